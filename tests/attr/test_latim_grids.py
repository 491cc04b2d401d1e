"""LaTIM through several grids of tokens, against sums over explicit vectors and Jacobians."""

from __future__ import annotations

import copy

import inputs
import pytest
import torch
from inputs import noise
from methods import assert_close
from models import made
from torch import Tensor, nn
from two_grids import E, Layer, TwoGrids

from captum_ssm import LaTIM, UnsupportedModelError
from captum_ssm.attr.latim_parts.grids import CutStandIns, ScoreGraph
from captum_ssm.capture import FrozenModel, Request, freeze
from captum_ssm.models import BidirectionalMamba


def mixing(vectors: Tensor, before: Tensor, output: Tensor) -> Tensor:
    """Eq. 6 for vectors ``(L, L, E)`` and a stream."""
    own = vectors + torch.diag_embed(before.mT).permute(1, 2, 0)
    near = output.abs().sum(-1, keepdim=True) - (output[:, None] - own).abs().sum(-1)
    near = near.clamp(min=0)
    return near / near.sum(1, keepdim=True)


@torch.no_grad()
def explicit(model: TwoGrids, x: Tensor) -> dict[int | None, Tensor]:
    """The relevance of the 8 steps of one example, by stage."""
    latim, L = LaTIM(model), 8
    fine = latim.contributions(x, 0, range(L), activation="gate")[0]
    fine = fine * model.fine.gate[:, None] if isinstance(model.fine, GatedByToken) else fine
    coarse = latim.contributions(x, 1, range(L // 2), activation="gate")[0]
    h = model.inp(x)
    after = model.fine(h)
    merged = model.merge(after.mT).mT
    last = model.coarse(merged)[0]
    # The head, and the last norm with its denominator frozen.
    inverse = (last.var(1, correction=0, keepdim=True) + model.norm.eps).rsqrt()
    g = model.head.weight[1] * model.norm.weight * inverse / len(last)
    d_coarse = g - g.mean(1, keepdim=True)
    d_fine = torch.zeros(L, E, dtype=x.dtype)
    d_fine[::2] = d_coarse @ model.merge.weight[..., 0]

    def on_steps(coarse: Tensor) -> Tensor:
        return torch.stack([coarse, torch.zeros_like(coarse)], 1).flatten()

    added = torch.einsum("ie,ije->j", d_coarse, coarse)
    own = torch.einsum("ie,ije->j", d_fine, fine) + (d_fine * h[0]).sum(1)
    P = mixing(fine, h[0], after[0])
    return {
        1: on_steps(added + (d_coarse * merged[0]).sum(1)),
        0: own,
        None: on_steps(added) @ P + own,
    }


class GatedByToken(Layer):
    """What its mixer returns is multiplied, differently at each token, before it is added."""

    def __init__(self) -> None:
        super().__init__(mlp=False)
        self.gate = nn.Parameter(torch.randn(8, E))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.gate * self.mixer(self.norm(h))


@pytest.mark.parametrize("is_gated", [False, True])
def test_two_grids_are_an_explicit_sum(is_gated):
    model, x = TwoGrids(), noise(2, 8, 3)
    model.fine = GatedByToken() if is_gated else model.fine
    model = made(model)
    latim = LaTIM(model, feature_share="even")
    for grid in (None, 0, 1, -1):
        found, delta = latim.attribute(
            x, 1, activation="gate", grid=grid, return_convergence_delta=True
        )
        truth = [explicit(model, one[None])[1 if grid == -1 else grid] for one in x]
        assert_close(found.sum(-1), torch.stack(truth), 1e-9)
        again = latim.compute_convergence_delta(found, x, 1, grid=grid)
        assert_close(again, delta, 1e-9)
        if grid is not None:
            assert delta.abs().max() <= 1e-12


class AddedInPlace(nn.Module):
    """A layer whose mixer's result is changed in place."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.norm, self.mixer = layer.norm, layer.mixer

    def forward(self, x: Tensor) -> Tensor:
        y = self.mixer(self.norm(x))
        y += x
        return y


def test_what_a_mixer_returned_may_be_changed_in_place():
    model, x = made(TwoGrids()), noise(2, 8, 3)
    expected = LaTIM(model).attribute(x, 1)
    model.fine, model.coarse = AddedInPlace(model.fine), AddedInPlace(model.coarse)
    assert_close(LaTIM(model).attribute(x, 1), expected, 1e-9)


def test_what_one_layer_adds():
    model, x = made(TwoGrids()), noise(1, 8, 3)
    latim, options = LaTIM(model), {"activation": "gate", "return_convergence_delta": True}
    fine, nothing = latim.attribute(x, 1, layer=0, **options)
    coarse, too = latim.attribute(x, 1, layer=1, **options)
    assert max(float(nothing.abs()), float(too.abs())) <= 1e-12
    assert bool((coarse[:, 1::2] == 0).all())
    # What is left of a grid's relevance is that of the stream before it.
    streams = [
        latim.attribute(x, 1, grid=k, activation="gate").sum() - one.sum()
        for k, one in enumerate((fine, coarse))
    ]
    whole = latim.attribute(x, 1, activation="gate")
    assert_close(whole.sum(), fine.sum() + coarse.sum() + streams[0], 1e-9)


def test_a_mode_interpolates_from_the_grid():
    model, x = made(inputs.Hierarchy()), noise(1, 3, 16, 16)
    carried, nearest = (
        LaTIM(model, interpolate_mode=mode).attribute(x, 1, grid=-1, activation="gate").sum(1)
        for mode in (None, "nearest")
    )
    blocks = carried.unflatten(2, (4, 4)).unflatten(1, (4, 4)).sum((2, 4))
    assert_close(nearest[:, ::4, ::4], blocks, 1e-9)


@pytest.mark.parametrize(
    ("model", "target"), [(inputs.Hierarchy, 1), (inputs.UShape, (2, 5, 5))], ids=["image", "U"]
)
def test_one_run_of_images_is_enough(model, target, monkeypatch):
    model, x = made(model()), noise(2, 3, 16, 16)
    runs, run = [], CutStandIns.__init__

    def counted(self: CutStandIns, request: Request, frozen: FrozenModel) -> None:
        runs.append(request)
        run(self, request, frozen)

    monkeypatch.setattr(CutStandIns, "__init__", counted)
    options = {"activation": "gate", "return_convergence_delta": True}
    found = LaTIM(model).attribute(x, target, **options)
    assert not runs
    # What is read off the graph of another run, in which norms are replaced.
    monkeypatch.setattr(ScoreGraph, "of", classmethod(lambda cls, frozen: None))
    again = LaTIM(model).attribute(x, target, **options)
    assert len(runs) == 1
    for one, other in zip(found, again, strict=True):
        assert_close(one, other, 1e-9)


def test_activations_without_rules_are_replaced():
    model, x = made(inputs.Hierarchy()), noise(1, 3, 16, 16)
    model.head = nn.Sequential(model.head, nn.Tanh())
    frozen = freeze(
        Request.of(model, None, x), target=1, gradients=True, through_mixers=False, keep_graph=True
    )
    assert frozen.live is not None
    assert ScoreGraph.of(frozen) is None


def test_what_several_grids_do_not_offer():
    model, x = made(TwoGrids()), noise(1, 8, 3)
    latim = LaTIM(model)
    with pytest.raises(ValueError, match=r"grid is 2; .* 2 grids .*0 \.\. 1"):
        latim.attribute(x, 1, grid=2)
    with pytest.raises(ValueError, match="expected grid only for aggregation='alti_logit'"):
        latim.attribute(x, 1, grid=0, layer=0)
    with pytest.raises(ValueError, match=r"tolerance is 0\.001.* several grids"):
        latim.attribute(x, 1, tolerance=1e-3)
    # Each layer's own map is on its own grid.
    assert [latim.interactions(x, layer=k).shape[1] for k in (0, 1)] == [8, 4]
    model.fine.forward = lambda h: model.fine.mixer(model.fine.norm(h))
    with pytest.raises(UnsupportedModelError, match=r"fine\.mixer does not add to a residual"):
        latim.attribute(x, 1)
    one = made(inputs.Series())
    assert torch.equal(
        LaTIM(one).attribute(noise(1, 8, 3), 1, grid=0), LaTIM(one).attribute(noise(1, 8, 3), 1)
    )


class Normed(nn.Module):
    """Layers whose norm is a module, a function, or written out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inp = kind, nn.Linear(3, E)
        self.mixers = nn.ModuleList(BidirectionalMamba(E, state=4) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(E) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(E), nn.Linear(E, 4)

    def before(self, norm: nn.LayerNorm, h: Tensor) -> Tensor:
        if self.kind == "module":
            return norm(h)
        if self.kind == "function":
            return nn.functional.layer_norm(h, (E,), norm.weight, norm.bias)
        h = h - h.mean(-1, keepdim=True)
        return h * (h.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.weight + norm.bias

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            h = h + mixer(self.before(norm, h))
        return self.head(self.norm(h))


def test_the_stream_before_a_norm_that_is_no_module():
    x, found = noise(2, 8, 3), {}
    for kind in ("module", "function"):
        torch.manual_seed(0)
        found[kind] = LaTIM(made(Normed(kind))).attribute(x, (5, 1), activation="gate")
    assert_close(found["function"], found["module"], 1e-9)
    with pytest.raises(UnsupportedModelError, match="a norm that is known"):
        LaTIM(made(Normed("written out"))).attribute(x, (5, 1))


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda h, norm, mixer, f: h + mixer(h), True),
        (lambda h, norm, mixer, f: 0.5 * h + mixer(h), True),
        (lambda h, norm, mixer, f: norm(h + mixer(h)), True),
        (lambda h, norm, mixer, f: h + mixer(norm(h)), False),
        (lambda h, norm, mixer, f: h + (f(norm(h)) + mixer(norm(h))), False),
    ],
    ids=["no norm", "scaled", "norm after", "norm before", "parallel"],
)
def test_whether_a_mixer_is_given_the_stream(step, expected):
    class Model(Normed):
        def forward(self, x: Tensor) -> Tensor:
            h = self.inp(x)
            for norm, mixer in zip(self.norms, self.mixers, strict=True):
                y = {}
                h = step(h, lambda h, norm=norm, y=y: y.setdefault(h, norm(h)), mixer, self.mlp)
            return self.head(self.norm(h))

        def mlp(self, h: Tensor) -> Tensor:
            return nn.functional.silu(h @ self.norm.weight[:, None] * self.norm.weight)

    model, x = made(Model("module")), noise(1, 8, 3)
    found = freeze(Request.of(model, None, x), query=False).wiring.steps
    assert [stage.is_given_stream for stage in found] == [expected] * 3


class Scaled(Layer):
    """What its mixer returns is multiplied per channel before it is added."""

    def __init__(self, mlp: bool) -> None:
        super().__init__(mlp)
        self.gamma = nn.Parameter(torch.rand(E) + 0.2)

    def forward(self, h: Tensor) -> Tensor:
        h = h + self.gamma * self.mixer(self.norm(h))
        return h + self.down(nn.functional.gelu(self.up(self.norm2(h)))) if self.mlp else h


class Chain(nn.Module):
    def __init__(self, mlp: bool = False) -> None:
        super().__init__()
        self.inp, self.fine, self.coarse = nn.Linear(3, E), Layer(mlp), Layer(mlp)
        self.norm, self.head = nn.LayerNorm(E), nn.Linear(E, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.coarse(self.fine(self.inp(x))))[:, -1])


@pytest.mark.parametrize("tokens", [2, 8])
@pytest.mark.parametrize("kind", [TwoGrids, Chain])
def test_a_multiplier_is_as_good_as_one_in_the_projection(kind, tokens):
    model = kind(mlp=True)
    model.fine, model.coarse = Scaled(True), Scaled(True)
    model = made(model)
    within = copy.deepcopy(model)
    with torch.no_grad():
        for layer in (within.fine, within.coarse):
            layer.gamma.copy_(torch.rand(E) + 0.2)
        for layer, other in ((model.fine, within.fine), (model.coarse, within.coarse)):
            layer.gamma.copy_(other.gamma)
            projection = other.mixer.out_proj
            projection.weight.mul_(other.gamma[:, None])
            if projection.bias is not None:
                projection.bias.mul_(other.gamma)
            other.gamma.fill_(1)
    x = noise(1, tokens, 3)
    for layer in (None, 1):
        found, truth = (
            LaTIM(one).attribute(x, 1, activation="gate", layer=layer) for one in (model, within)
        )
        assert_close(found.sum(-1), truth.sum(-1), 1e-9)


class Projecting(Layer):
    """What its mixer returns goes through a matrix before it is added."""

    def __init__(self, mlp: bool) -> None:
        super().__init__(mlp)
        self.join = nn.Linear(E, E, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.join(self.mixer(self.norm(h)))


def test_a_matrix_after_a_mixer_of_several_grids_is_said():
    """What each layer adds is right all the same; the last layer mixes nothing of later ones."""
    model, x = TwoGrids(), noise(1, 8, 3)
    model.coarse = Projecting(mlp=False)
    LaTIM(made(model)).attribute(x, 1)
    model.fine = Projecting(mlp=False)
    with pytest.warns(UserWarning, match=r"fine\.mixer returned is multiplied by a matrix"):
        found, delta = LaTIM(made(model)).attribute(x, 1, return_convergence_delta=True)
    within = copy.deepcopy(model)
    with torch.no_grad():
        for layer in (within.fine, within.coarse):
            layer.mixer.out_proj.weight.copy_(layer.join.weight @ layer.mixer.out_proj.weight)
            layer.join.weight.copy_(torch.eye(E))
    with pytest.warns(UserWarning, match="multiplied by a matrix"):
        truth, expected = LaTIM(within).attribute(x, 1, return_convergence_delta=True)
    assert_close(found.sum((1, 2)), truth.sum((1, 2)), 1e-9)
    assert_close(delta, expected, 1e-9)


class HalfPrecision(Layer):
    """A stream in float32 around a norm and a mixer in half precision."""

    def forward(self, h: Tensor) -> Tensor:
        return h + self.mixer(self.norm(h.to(self.norm.weight.dtype))).to(h.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_stream_is_read_before_it_is_cast_for_a_norm(dtype):
    model, x = TwoGrids(), noise(1, 8, 3).float()
    model.fine, model.coarse = HalfPrecision(mlp=False), HalfPrecision(mlp=False)
    model = made(model).float()
    expected = LaTIM(model).attribute(x, 1)
    for layer in (model.fine, model.coarse):
        layer.to(dtype)
    assert_close(LaTIM(model).attribute(x, 1), expected, 0.05)
