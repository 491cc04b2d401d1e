"""LaTIM: contributions that add up, the scores made of them, and logits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from families import FAMILIES, build, padded
from models import Residual, embed, ids
from proofs import assert_sums_to_logits
from torch import nn

from captum_ssm import LaTIM, hidden_attention
from captum_ssm.attr.latim_parts import alti as _alti
from captum_ssm.attr.latim_parts import contributions as _contributions
from captum_ssm.attr.latim_parts.alti import Alti
from captum_ssm.attr.latim_parts.contributions import ACTIVATIONS
from captum_ssm.explanation.make.relevance.rows import InputQuestions, Question, rows
from captum_ssm.explanation.make.relevance.run import Run
from captum_ssm.metrics import decomposition_error
from captum_ssm.utils import progress

EXACT = (
    *("mamba", "falcon_mamba", "jamba", "mamba2", "bamba", "falcon_h1"),
    *("qwen3_next", "kimi_linear"),
)
EXACT = tuple(family for family in EXACT if family in FAMILIES)
L = 9


def ids_for(count: int = 2, length: int = L) -> torch.Tensor:
    return torch.randint(1, 30, (count, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", EXACT)
def test_gate_is_exact_on_every_layer(family: str) -> None:
    model, ids = build(family), ids_for()
    assert max(decomposition_error(LaTIM(model), ids, activation="gate")) < 1e-5


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_silu_is_not_exact_and_says_so(family: str) -> None:
    errors = decomposition_error(LaTIM(build(family)), ids_for(), activation="silu")
    assert all(1e-2 < error < 2 for error in errors)


@pytest.mark.parametrize("family", EXACT)
def test_contributions_sum_to_the_layers_output(family: str) -> None:
    model, ids = build(family), ids_for()
    mixer = model.get_submodule(next(iter(hidden_attention(model, ids, layers=0))))
    seen = []
    handle = mixer.register_forward_hook(lambda m, a, out: seen.append(out))
    with torch.no_grad():
        model(ids)
    handle.remove()
    output = seen[0][0] if isinstance(seen[0], tuple) else seen[0]
    vectors = LaTIM(model).contributions(ids, 0, list(range(L)), activation="gate")
    assert vectors.shape == (2, L, L, output.shape[-1])
    out_proj = next(
        p for n, p in mixer.named_children() if n in ("out_proj", "o_proj", "linear_out")
    )
    bias = 0 if out_proj.bias is None else out_proj.bias.detach()
    error = (vectors.sum(2) + bias - output).abs().max() / output.abs().max()
    assert float(error) < 1e-5


@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba", "falcon_h1"])
@pytest.mark.parametrize("activation", ["silu", "gate"])
def test_interactions_are_the_aggregated_contributions(family: str, activation: str) -> None:
    model, ids = build(family), ids_for()
    latim = LaTIM(model)
    vectors = latim.contributions(ids, 1, list(range(L)), activation=activation)
    for aggregation, p in (("l1", 1), ("l2", 2), (3, 3)):
        found = latim.interactions(ids, 1, aggregation, activation=activation)
        expected = torch.linalg.vector_norm(vectors, ord=p, dim=-1)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
        row = latim.attribute(ids, layer=1, aggregation=aggregation, activation=activation)
        torch.testing.assert_close(row, expected[:, -1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_alti_is_eq_6(activation: str) -> None:
    model, ids = build("mamba"), ids_for()
    latim = LaTIM(model)
    vectors = latim.contributions(ids, 0, list(range(L)), activation=activation)
    y = vectors.sum(2)
    near = y.abs().sum(-1)[..., None] - (y[:, :, None] - vectors).abs().sum(-1)
    near = near.clamp(min=0)
    expected = near / near.sum(-1, keepdim=True)
    found = latim.interactions(ids, 0, "alti", activation=activation)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "bamba", "recurrent_gemma", "rwkv", "zamba"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_alti_rows_sum_to_one(family: str, activation: str) -> None:
    found = LaTIM(build(family)).interactions(ids_for(), 0, "alti", activation=activation)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, L))
    assert not bool(found.triu(1).any())


@pytest.mark.parametrize("family", EXACT)
def test_alti_logit_sums_to_the_logit(family: str) -> None:
    # None of these models has a bias behind its mixers or in its head.
    assert_sums_to_logits(build(family), ids_for(), activation="gate")


def test_alti_logit_is_eq_8_with_explicit_matrices() -> None:
    model, ids = build("mamba"), ids_for(1)
    latim, target = LaTIM(model), 5
    norms = [layer.norm for layer in model.backbone.layers] + [model.backbone.norm_f]
    streams: list[torch.Tensor] = []
    handles = [n.register_forward_hook(lambda m, a, out: streams.append(a[0])) for n in norms]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    last = streams[-1][0, -1]
    scale = torch.rsqrt(last.square().mean() + model.backbone.norm_f.variance_epsilon)
    unembed = (model.lm_head.weight[target] * model.backbone.norm_f.weight * scale).detach()
    rows = list(range(L))
    mixing, expected = torch.eye(L), torch.zeros(L)
    expected[-1] += unembed @ streams[0][0, -1]
    for k in range(len(streams) - 1):
        vectors = latim.contributions(ids, k, rows, activation="silu")[0]  # (L, L, E)
        expected += (vectors[-1] @ unembed) @ mixing
        # What the layer adds beyond its contributions stays with the token: nothing in Mamba.
        own = vectors.clone()
        own[rows, rows] += streams[k][0]
        after = own.sum(1)  # not the stream, which the vectors of "silu" miss
        near = after.abs().sum(-1)[:, None] - (after[:, None] - own).abs().sum(-1)
        near = near.clamp(min=0)
        mixing = near / near.sum(-1, keepdim=True) @ mixing
    found = latim.attribute(ids, target=target, activation="silu")[0]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    whole = latim.interactions(
        ids, None, "alti_logit", target=torch.full((1, L), target), activation="silu"
    )
    torch.testing.assert_close(whole[0, -1], found, rtol=1e-3, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*reads the padding")
def test_contributions_are_exact_where_padding_enters_the_state() -> None:
    # RecurrentGemma's convolution and recurrence do not look at the mask.
    extra = {"attention_mask": padded("left")}
    latim = LaTIM(build("recurrent_gemma"))
    for error in latim.layer_errors(ids_for(), activation="gate", additional_forward_args=extra):
        assert error.max() < 1e-4


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["mamba", "recurrent_gemma"])
def test_contributions_to_and_of_padding_are_zero(family: str, side: str) -> None:
    latim, outside = LaTIM(build(family)), padded(side) == 0
    options = {"activation": "gate", "additional_forward_args": {"attention_mask": padded(side)}}
    vectors = latim.contributions(ids_for(), -1, range(L), **options)
    assert (vectors[outside] == 0).all()
    assert (vectors.transpose(1, 2)[outside] == 0).all()
    found = latim.interactions(ids_for(), -1, "l2", **options)
    torch.testing.assert_close(found, vectors.norm(dim=-1))


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_logits_map_with_padding(side: str) -> None:
    model, mask = build("mamba"), padded(side)
    options = {"activation": "gate", "additional_forward_args": {"attention_mask": mask}}
    found = LaTIM(model).interactions(ids_for(), aggregation="alti_logit", **options)
    last = torch.where(mask.bool(), torch.arange(L), -1).amax(1)
    target = model(ids_for(), attention_mask=mask).logits.argmax(-1)[torch.arange(2), last]
    expected = LaTIM(model).attribute(ids_for(), target=target, **options)
    torch.testing.assert_close(found[torch.arange(2), last], expected)


def test_the_logits_map_takes_what_attribute_takes() -> None:
    from nnsight import NNsight

    model, ids = build("mamba"), ids_for()
    expected = LaTIM(model).interactions(ids, aggregation="alti_logit")
    for wrapped, inputs in ((model, embed(model, ids)), (NNsight(build("mamba")), ids)):
        found = LaTIM(wrapped).interactions(inputs, aggregation="alti_logit")
        torch.testing.assert_close(found, expected)
    with pytest.raises(ValueError, match="pass it: Method"):
        LaTIM(lambda t: model(t).logits).interactions(ids, aggregation="alti_logit")


def with_biases() -> nn.Module:
    """A model whose output projections and head have bias terms."""
    model = build("mamba", use_bias=True)
    model.lm_head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features)
    return model


@pytest.mark.parametrize("activation", ["silu", "gate"])
@pytest.mark.parametrize("layer", [None, 0, -1])
@pytest.mark.parametrize("make", [lambda: build("mamba"), with_biases, lambda: build("zamba")])
def test_there_is_one_convergence_delta(make, layer, activation) -> None:
    latim, ids = LaTIM(make()), ids_for()
    options = {"layer": layer, "activation": activation}
    found, delta = latim.attribute(ids, target=3, return_convergence_delta=True, **options)
    again = latim.compute_convergence_delta(found, ids, target=3, **options)
    torch.testing.assert_close(again, delta)
    moved = latim.compute_convergence_delta(found + 0.5, ids, target=3, **options)
    torch.testing.assert_close(moved, delta - 0.5 * L)
    if activation == "gate":
        assert delta.abs().max() < 1e-4 * max(1.0, float(found.abs().max()))
    else:
        assert delta.abs().max() > 1e-3


@pytest.mark.parametrize("aggregation", ["l1", "l2", "alti", 3])
def test_what_decomposes_nothing_has_no_delta(aggregation) -> None:
    latim, options = LaTIM(build("mamba")), {"layer": 0, "aggregation": aggregation}
    with pytest.raises(ValueError, match="layer_errors"):
        latim.attribute(ids_for(), return_convergence_delta=True, **options)
    with pytest.raises(ValueError, match="delta"):
        latim.compute_convergence_delta(torch.zeros(2, L), ids_for(), **options)


def test_a_linear_head_is_enough() -> None:
    model, ids = Residual(), ids_for()
    found, delta = LaTIM(model).attribute(
        ids, target=3, activation="gate", return_convergence_delta=True
    )
    score = model(ids)[:, -1, 3] - model.head.bias[3]
    torch.testing.assert_close(found.sum(1), score)
    assert delta.abs().max() < 1e-5


@pytest.mark.filterwarnings("ignore:the score does not depend on what mixers")  # by a factor of 0
@pytest.mark.parametrize("factor", [0.0, 1e-8, 0.22, -3.0])
@pytest.mark.parametrize("has_mlp", [False, True])
def test_what_multiplies_a_mixer_is_part_of_it(factor, has_mlp) -> None:
    """Layer scale, ReZero, residual multipliers: as if the output projection held them."""

    class Scaled(Residual):
        def __init__(self):
            super().__init__(3)
            self.scales = nn.Parameter(factor * torch.linspace(0.5, 2, 16))
            self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
            self.mlps = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
            self.norm = nn.LayerNorm(16)

        def forward(self, ids):
            x = self.embeddings(ids)
            for mixer, norm, mlp in zip(self.mixers, self.norms, self.mlps, strict=True):
                x = x + self.scales * mixer(norm(x))
                x = x + mlp(self.norm(x)).tanh() if has_mlp else x
            return self.head(self.norm(x))

    torch.manual_seed(0)
    model, ids = Scaled().eval(), ids_for(1)

    def explained():
        latim = LaTIM(model)
        yield latim.attribute(ids, target=3, activation="gate")
        yield latim.attribute(ids, target=3, activation="gate", layer=1)
        if factor:  # else no token is read from the mixers
            yield latim.interactions(ids, aggregation="alti_logit", activation="gate")

    found = list(explained())
    with torch.no_grad():
        for mixer in model.mixers:
            mixer.out_proj.weight *= model.scales[:, None]
        model.scales.fill_(1.0)
    for one, expected in zip(found, explained(), strict=True):
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("has_mlp", [False, True])
def test_a_norm_of_the_token_that_is_read_is_that_of_all(has_mlp) -> None:
    """``norm(x[:, -1])`` and ``norm(x)[:, -1]`` are one function and have one decomposition."""

    class Read(Residual):
        def __init__(self, is_late):
            torch.manual_seed(0)
            super().__init__(2)
            self.is_late = is_late
            self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(3))
            self.mlp = nn.Linear(16, 16)

        def forward(self, ids):
            x = self.embeddings(ids)
            for mixer, norm in zip(self.mixers, self.norms, strict=False):
                x = x + mixer(norm(x))
                x = x + self.mlp(norm(x)).tanh() if has_mlp else x
            norm = self.norms[-1]
            return self.head(norm(x)[:, -1] if self.is_late else norm(x[:, -1]))

    ids = ids_for()
    for options in ({}, {"activation": "silu"}, {"layer": 1}):
        late, early = (
            LaTIM(Read(is_late).eval()).attribute(
                ids, target=3, return_convergence_delta=True, **options
            )
            for is_late in (True, False)
        )
        torch.testing.assert_close(early, late, rtol=1e-5, atol=1e-6)


def test_a_norm_before_an_mlp_is_not_taken_for_the_last() -> None:
    model, ids = Residual(), ids_for()
    inner = nn.Linear(16, 16, bias=False), nn.GELU(), nn.Linear(16, 30, bias=False)
    model.head = nn.Sequential(nn.LayerNorm(16), *inner)
    nn.init.normal_(model.embeddings.weight)
    nn.init.zeros_(model.head[0].bias)
    found, delta = LaTIM(model).attribute(
        ids, target=3, activation="gate", return_convergence_delta=True
    )
    torch.testing.assert_close(found.sum(1) + delta, model(ids)[:, -1, 3])
    assert delta.abs().max() < 1e-5


class RootNorm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("is_series", [False, True])
@pytest.mark.parametrize("last", [nn.Tanh, lambda: nn.LayerNorm(30, bias=False), RootNorm])
def test_a_head_that_caps_or_norms_what_it_reads(last, is_series) -> None:
    model, inputs = Residual(), ids_for()
    model.head = nn.Sequential(nn.LayerNorm(16, bias=False), nn.Linear(16, 30, bias=False), last())
    nn.init.normal_(model.embeddings.weight)
    if is_series:
        model = nn.Sequential(nn.Linear(5, 16, bias=False), model)
        inputs = torch.randn(2, L, 5, generator=torch.Generator().manual_seed(0))
    found, delta = LaTIM(model).attribute(
        inputs, target=(L - 1, 3), activation="gate", return_convergence_delta=True
    )
    score = model(inputs)[:, -1, 3]
    torch.testing.assert_close(found.flatten(1).sum(1), score, rtol=1e-4, atol=1e-5)
    assert delta.abs().max() < 1e-5


@pytest.fixture(params=["as wide models", "as narrow models"])
def width(request, monkeypatch) -> str:
    """Whether sources are left out, or rows only."""
    if request.param == "as wide models":
        monkeypatch.setattr(_alti, "NARROW", 0)
    return request.param


@pytest.mark.parametrize("tolerance", [0.01, 0.5])
@pytest.mark.parametrize("activation", ["silu", "gate"])
@pytest.mark.parametrize("family", ["mamba", "mamba2", "recurrent_gemma"])
def test_a_tolerance_changes_no_more_than_the_bound(family, activation, tolerance, width) -> None:
    # In float64, where neither side is rounded.
    latim, ids = LaTIM(build(family).double()), ids_for(2, 33)
    options = {"target": torch.tensor([3, 7]), "activation": activation}
    exact, none = latim.attribute(ids, return_error_bound=True, **options)
    found, delta, bound = latim.attribute(
        ids, tolerance=tolerance, return_convergence_delta=True, return_error_bound=True, **options
    )
    assert (none == 0).all()
    assert (exact < 0).any()
    assert (exact > 0).any()
    distance = (found - exact).abs().sum(1)
    assert (distance <= bound * (1 + 1e-9)).all()
    assert (bound > 0).all() or (width == "as narrow models" and tolerance < 0.1)
    # It moves relevance from token to token, and loses none.
    torch.testing.assert_close(found.sum(1), exact.sum(1))
    again = latim.compute_convergence_delta(found, ids, tolerance=tolerance, **options)
    torch.testing.assert_close(again, delta)


def test_the_tolerance_is_a_share_of_the_relevance(width) -> None:
    latim, ids = LaTIM(build("mamba", num_hidden_layers=2)), ids_for(1, 33)
    one = LaTIM(build("mamba", num_hidden_layers=2)).attribute(ids, target=3, layer=-1)
    for tolerance in (1e-3, 1e-2, 0.1):
        _, bound = latim.attribute(ids, target=3, tolerance=tolerance, return_error_bound=True)
        # Two layers: what the upper one gives is carried through the lower one.
        assert float(bound) <= 2 * tolerance * float(one.abs().sum()) * (1 + 1e-5)


def test_what_a_vector_misses_is_bounded_by_its_length() -> None:
    g = torch.Generator().manual_seed(0)
    weight, z = torch.randn(12, 20, generator=g), torch.randn(1, 20, 5, 7, generator=g)
    z *= torch.logspace(-3, 1, 7)
    y = torch.randn(1, 5, 12, generator=g)
    y[0, 0, :3] = 0
    alti = Alti(SimpleNamespace(weight=weight))
    vectors = torch.einsum("ed,bdrc->brce", weight, z)
    signs = y.sign()[:, :, None]
    near = y.abs().sum(-1)[..., None] - (y[:, :, None] - vectors).abs().sum(-1)
    missing = (signs * vectors).sum(-1) - near
    bound = alti._most_missing(y, z.norm(dim=1))
    assert (missing <= bound + 1e-4).all()
    assert (missing >= -1e-4).all()
    expected = weight.norm(dim=1) * z.norm(dim=1)[..., None] - y.abs()[:, :, None]
    torch.testing.assert_close(bound, 2 * expected.clamp(min=0).sum(-1), rtol=1e-4, atol=1e-4)


@pytest.fixture
def coarse_products(monkeypatch) -> None:
    """Products in float32 may take bfloat16, on a processor that is fast with it."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)
    monkeypatch.setattr(_contributions, "ROUNDED", 1)
    # The setting itself would have some processors round what the model computes too.
    monkeypatch.setattr(_contributions, "products_dtype", lambda device: torch.bfloat16)


@pytest.mark.parametrize("tolerance", [0.0, 0.05])
def test_vectors_follow_pytorchs_precision_of_products(request, tolerance, width) -> None:
    latim, ids = LaTIM(build("mamba")), ids_for(2, 33)
    options = {"target": torch.tensor([3, 7]), "activation": "gate", "tolerance": tolerance}
    exact = latim.attribute(ids, **options)
    request.getfixturevalue("coarse_products")
    found = latim.attribute(ids, **options)
    distance = (found - exact).abs().sum(1) / exact.abs().sum(1)
    assert (distance > 1e-5).all()
    assert (distance < 1e-2).all()
    torch.testing.assert_close(found.sum(1), exact.sum(1))  # none is lost
    torch.testing.assert_close(latim.attribute(ids, **options), found)


@pytest.mark.parametrize("tolerance", [0.0, 0.05])
def test_tiles_and_blocks_of_any_size_give_the_same(monkeypatch, tolerance, width) -> None:
    latim, ids = LaTIM(build("mamba").double()), ids_for(2, 33)
    options = {"target": torch.tensor([3, 7]), "tolerance": tolerance, "return_error_bound": True}
    expected, bound = latim.attribute(ids, **options)
    monkeypatch.setattr(_contributions, "TILE", 1 << 13)
    monkeypatch.setattr(_contributions, "PIECE", 1 << 10)
    for block in (7, 64):
        monkeypatch.setattr(_contributions, "BLOCK", block)
        found, other = latim.attribute(ids, **options)
        if tolerance:
            # Each tile has its own part of the tolerance.
            assert ((found - expected).abs().sum(1) <= bound + other).all()
        else:
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("block", [16, 1 << 10])
def test_a_row_needs_no_vectors_of_later_tokens(monkeypatch, block) -> None:
    widths = []
    project = _contributions.Contributions.project

    def counted(self, z):
        widths.append(z.shape[2])
        return project(self, z)

    latim, ids, L = LaTIM(build("mamba").double()), ids_for(2, 33), 33
    expected = latim.interactions(ids, 0, "l2")
    monkeypatch.setattr(_contributions, "BLOCK", block)
    monkeypatch.setattr(_contributions.Contributions, "project", counted)
    torch.testing.assert_close(latim.interactions(ids, 0, "l2"), expected)
    assert max(widths) <= block // 2
    if block < L:
        # A row at a time, and no narrow rest of one.
        assert sum(widths) == L * (L + 1) // 2
        assert min(widths[block // 2 :]) >= block // 4
    else:
        assert sum(widths) < 0.8 * L * L


@pytest.fixture
def batches(monkeypatch) -> list[int]:
    """The number of examples whose vectors are made, call by call."""
    counts, own = [], _contributions.Contributions.unprojected

    def counted(self, index, *rest):
        counts.append(len(index))
        return own(self, index, *rest)

    monkeypatch.setattr(_contributions.Contributions, "unprojected", counted)
    return counts


def test_targets_of_one_text_share_its_vectors(monkeypatch, batches) -> None:
    monkeypatch.setattr(_alti, "NARROW", 0)
    latim, ids = LaTIM(build("mamba")), ids_for(1, 17)
    targets = [(16, 3), (16, 7), (11, 5)]
    for tolerance in (0.0, 0.05):
        options = {"tolerance": tolerance, "return_error_bound": True}
        expected = [latim.attribute(ids, target=[one], **options) for one in targets]
        batches.clear()
        found, bound = latim.attribute(ids.expand(3, -1), target=targets, **options)
        assert set(batches) == {1}
        relevance = torch.cat([one for one, _ in expected])
        if tolerance:
            bounds = bound + torch.cat([one for _, one in expected])
            assert ((found - relevance).abs().sum(1) <= bounds + 1e-5).all()
        else:
            torch.testing.assert_close(found, relevance, rtol=1e-4, atol=1e-5)
        batches.clear()
        latim.attribute(ids.repeat(3, 1), target=targets, **options)
        assert set(batches) == {3}


@pytest.mark.parametrize(
    "options",
    [
        {"tolerance": -0.1},
        {"tolerance": 1.0},
        {"tolerance": 0.1, "layer": 0},
        {"tolerance": 0.1, "layer": 0, "aggregation": "l2"},
        {"return_error_bound": True, "layer": 0},
    ],
)
def test_a_tolerance_that_does_not_fit_is_an_error(options) -> None:
    with pytest.raises(ValueError, match="tolerance is"):
        LaTIM(build("mamba")).attribute(ids_for(), target=3, **options)


def test_progress_is_shown_where_asked_and_long_work_is_announced(
    monkeypatch, capsys, caplog
) -> None:
    latim, ids = LaTIM(build("mamba")), ids_for(1)
    latim.attribute(ids, target=3)
    assert "LaTIM" not in capsys.readouterr().err
    latim.attribute(ids, target=3, show_progress=True)
    assert "LaTIM" in capsys.readouterr().err
    monkeypatch.setattr(progress, "DELAY", 0.0)
    monkeypatch.setattr(progress, "LONG", 0.0)
    latim.attribute(ids, target=3, show_progress=False)
    assert not caplog.messages
    latim.attribute(ids, target=3)
    assert any("LaTIM, layers: about" in message for message in caplog.messages)


def test_answers_and_contrasts_of_an_explanation_share_the_vectors_too(batches) -> None:
    questions = [
        Question(L - 1, 3),
        Question(L - 1, 5),
        Question(L - 1, 3, 5),
        Question(L - 1, 5, 3),
    ]
    model = build("mamba")
    ((found, _),) = rows(LaTIM(model), [InputQuestions(Run(model), ids_for(1), questions)])
    assert set(batches) == {1}
    torch.testing.assert_close(found[2], found[0] - found[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found[3], -found[2], rtol=1e-4, atol=1e-5)


def test_the_delta_of_a_log_probability_is_what_relevance_misses_of_it():
    model, given = build("mamba"), ids()

    def log_probabilities(inputs):
        return model(inputs).logits.log_softmax(-1)

    explain = LaTIM(log_probabilities, model=model)
    with pytest.warns(UserWarning, match="LogSoftmax, which has no rule"):
        found, delta = explain.attribute(given, target=3, return_convergence_delta=True)
    expected = log_probabilities(given)[:, -1, 3] - found.flatten(1).sum(1)
    torch.testing.assert_close(delta, expected, rtol=1e-4, atol=1e-4)
