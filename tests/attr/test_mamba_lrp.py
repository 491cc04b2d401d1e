"""MambaLRP: conservation, and an independent gradient times input through a hand-frozen Mamba."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch
from families import build
from models import WithOutput, normal, without_biases
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm import (
    FrozenMixer,
    LaTIM,
    MambaLRP,
    MambaRollout,
    MemoryLimitError,
    ReconstructionError,
)
from captum_ssm.attr.norms import FrozenNorm
from captum_ssm.attr.relevance import coefficients_at, times
from captum_ssm.graph.node_rules import rule_of
from captum_ssm.mixers import MixerCall
from captum_ssm.models import BidirectionalMamba


def ids_for(count: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(1, 30, (count, length), generator=torch.Generator().manual_seed(0))


def test_biases_are_what_the_delta_is() -> None:
    # With a convolution bias the relevance misses its share, which the delta reports.
    model, ids = build("mamba"), ids_for()
    _, delta = MambaLRP(model).attribute(ids, target=3, return_convergence_delta=True)
    plain = MambaLRP(without_biases(model))
    _, none = plain.attribute(ids, target=3, return_convergence_delta=True)
    assert float(delta.abs().max()) > 1e-3
    assert float(none.abs().max()) < 1e-5


def test_equals_a_hand_frozen_mamba() -> None:
    model, ids, target = build("mamba").double(), ids_for(), 4
    x = model.backbone.embeddings(ids).detach().requires_grad_(True)
    hidden = x
    for layer in model.backbone.layers:
        mixed = _frozen_mixer(layer.mixer, _frozen_rms(layer.norm, hidden))
        hidden = hidden + mixed
    hidden = _frozen_rms(model.backbone.norm_f, hidden)
    score = (hidden[:, -1] @ model.lm_head.weight[target]).sum()
    (gradient,) = torch.autograd.grad(score, x)
    expected = (x * gradient).sum(-1).detach()
    found = MambaLRP(model).attribute(ids, target=target)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def _frozen_rms(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    scale = torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return x * scale * norm.weight


def _frozen_mixer(mixer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A Mamba mixer token by token, with constants where MambaLRP has them."""
    L = x.shape[1]
    u, z = mixer.in_proj(x).chunk(2, -1)
    K = mixer.conv1d.kernel_size[0]
    padded = F.pad(u, (0, 0, K - 1, 0))
    psi = mixer.conv1d.bias + sum(
        padded[:, k : k + L] * mixer.conv1d.weight[:, 0, k] for k in range(K)
    )
    v = psi * torch.sigmoid(psi).detach()
    rank, N = mixer.time_step_rank, mixer.ssm_state_size
    step, B, C = mixer.x_proj(v.detach()).split([rank, N, N], -1)
    dt = F.softplus(mixer.dt_proj(step)).detach()
    A = -torch.exp(mixer.A_log.float()).double()
    state = torch.zeros(x.shape[0], v.shape[-1], N, dtype=x.dtype)
    rows = []
    for t in range(L):
        decay = torch.exp(dt[:, t, :, None] * A).detach()
        write = (dt[:, t, :, None] * B[:, t, None]).detach()
        state = decay * state + write * v[:, t, :, None]
        rows.append((state * C[:, t, None].detach()).sum(-1))
    y = torch.stack(rows, 1) + mixer.D * v
    gate = z * torch.sigmoid(z).detach()
    half = 0.5 * (y * gate.detach() + y.detach() * gate)
    return mixer.out_proj(half)


def test_the_delta_can_be_computed_from_attributions() -> None:
    model, ids = without_biases(build("mamba")), ids_for()
    explained = MambaLRP(model)
    relevance, delta = explained.attribute(ids, target=3, return_convergence_delta=True)
    found = explained.compute_convergence_delta(relevance, ids, target=3)
    torch.testing.assert_close(found, delta, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="convergence delta"):
        MambaRollout(model).compute_convergence_delta(relevance, ids)


WEIGHT = normal(4, 4, seed=1)
OTHER = normal(4, 4, seed=2)


def activation(f):
    return f, lambda x, c: x * (f(c) / c)


def gated(gate):
    return lambda x: x * gate(x), lambda x, c: x * gate(c)


def glu(x: Tensor, c: Tensor) -> Tensor:
    return (x @ WEIGHT)[:, :2] * (c @ WEIGHT)[:, 2:].sigmoid()


def product(x: Tensor, c: Tensor) -> Tensor:
    return 0.5 * (x @ c.mT + c @ x.mT)


# What each function does, and the same with its constants written out.
RULES = {
    "silu": (F.silu, lambda x, c: x * torch.sigmoid(c)),
    "gelu": activation(F.gelu),
    "gelu, tanh": activation(partial(F.gelu, approximate="tanh")),
    "mish": activation(F.mish),
    "hardswish": activation(F.hardswish),
    "relu": (torch.relu, lambda x, c: x * (c > 0)),
    "squared relu": (lambda x: torch.relu(x).square(), lambda x, c: x * torch.relu(c)),
    "square root": (
        lambda x: x.square().sum(-1, keepdim=True).sqrt(),
        lambda x, c: (x * c).sum(-1, keepdim=True) / c.norm(dim=-1)[:, None],
    ),
    "standard deviation": (
        lambda x: x.var(-1, correction=0, keepdim=True).sqrt(),
        lambda x, c: (
            (x * (c - c.mean(-1, keepdim=True))).mean(-1, keepdim=True)
            / c.std(-1, correction=0, keepdim=True)
        ),
    ),
    "cube": (lambda x: x**3, lambda x, c: x * c**2),
    "soft cap": activation(lambda x: 3 * torch.tanh(x / 3)),
    "sigmoid gate": gated(lambda x: torch.sigmoid(x @ WEIGHT)),
    "gated linear unit": (lambda x: F.glu(x @ WEIGHT), glu),
    "gated linear unit, dim 1": (lambda x: F.glu(x @ WEIGHT, 1), glu),
    "gated MLP": (
        lambda x: F.silu(x @ WEIGHT) * (x @ OTHER),
        lambda x, c: (
            0.5 * (x @ WEIGHT) * (c @ WEIGHT).sigmoid() * (c @ OTHER)
            + 0.5 * F.silu(c @ WEIGHT) * (x @ OTHER)
        ),
    ),
    "experts": (
        lambda x: (x @ WEIGHT).softmax(-1).topk(2)[0].sum(-1, keepdim=True) * (x @ OTHER),
        lambda x, c: (c @ WEIGHT).softmax(-1).topk(2)[0].sum(-1, keepdim=True) * (x @ OTHER),
    ),
    "RMS norm": gated(lambda x: torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.1)),
    "a power as denominator": gated(lambda x: (x.pow(2).sum(-1, keepdim=True) + 0.1) ** -0.5),
    "division": (
        lambda x: x / x.norm(dim=-1, keepdim=True),
        lambda x, c: x / c.norm(dim=-1)[:, None],
    ),
    "reciprocal": (lambda x: (1 / (2 + x**2)) * x, lambda x, c: (1 / (2 + c**2)) * x),
    "layer norm": (
        lambda x: F.layer_norm(x, (4,), WEIGHT[0]),
        lambda x, c: (
            (x - x.mean(-1, keepdim=True))
            * WEIGHT[0]
            / (c.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        ),
    ),
    "matrix product": (lambda x: x @ x.mT, product),
    "matrix product of a batch": (lambda x: x[None] @ x[None].mT, lambda x, c: product(x, c)[None]),
    "sum with a product": (
        lambda x: torch.addmm(x[:, :3], x, x.mT) + torch.addcmul(x, x, x)[:, :3],
        lambda x, c: x[:, :3] + product(x, c) + (x + x * c)[:, :3],
    ),
    "sum with a product of a batch": (
        lambda x: torch.baddbmm(x[None, :, :3], x[None], x[None].mT),
        lambda x, c: x[None, :, :3] + product(x, c)[None],
    ),
    "sum with a constant product": (
        lambda x: torch.addmm(x, WEIGHT[:3], OTHER) + torch.addmm(OTHER[0], x, WEIGHT),
        lambda x, c: x + WEIGHT[:3] @ OTHER + OTHER[0] + x @ WEIGHT,
    ),
    "convolution with a kernel of the tokens": (
        lambda x: F.conv1d(x[None], x[:, None, :2], groups=3),
        lambda x, c: (
            0.5 * F.conv1d(x[None], c[:, None, :2], groups=3)
            + 0.5 * F.conv1d(c[None], x[:, None, :2], groups=3)
        ),
    ),
    "attention": (
        lambda x: F.scaled_dot_product_attention(
            *(x[None, None] @ w for w in (WEIGHT, OTHER, WEIGHT))
        ),
        lambda x, c: F.scaled_dot_product_attention(
            *(t[None, None] for t in (c @ WEIGHT, c @ OTHER, x @ WEIGHT))
        ),
    ),
    "attention by hand": (
        lambda x: (x @ WEIGHT @ x.mT).softmax(-1) @ x,
        lambda x, c: (c @ WEIGHT @ c.mT).softmax(-1) @ x,
    ),
    "dot product": (
        lambda x: torch.stack([torch.dot(row, row) + torch.vdot(row, row) for row in x])[:, None],
        lambda x, c: 2 * (x * c).sum(-1, keepdim=True),
    ),
    "matrix times vector": (
        lambda x: (torch.mv(x, x[0]) + torch.addmv(x[:, 0], x, x[1]))[:, None],
        lambda x, c: (0.5 * (x @ (c[0] + c[1]) + c @ (x[0] + x[1])) + x[:, 0])[:, None],
    ),
    "sum with products": (
        lambda x: torch.addbmm(x[:, :3], x[None], x[None].mT) + torch.addr(x, x[:, 0], x[0])[:, :3],
        lambda x, c: (
            x[:, :3]
            + product(x, c)
            + (x + 0.5 * (torch.outer(x[:, 0], c[0]) + torch.outer(c[:, 0], x[0])))[:, :3]
        ),
    ),
    "exponentials of two": (
        lambda x: 2**x * x + torch.exp2(x) * x + torch.tensor(2.0) ** x * x,
        lambda x, c: 3 * torch.exp2(c) * x,
    ),
    "a power of the tokens": (
        lambda x: (x.abs() + 1) ** x.sin(),
        lambda x, c: (
            torch.where(c.sin() > 0, x.abs() + 1, c.abs() + 1) * (c.abs() + 1) ** (c.sin() - 1)
        ),
    ),
    "powers by a tensor": (
        lambda x: x[:, :1] ** torch.tensor([2.0, 3.0]),
        lambda x, c: x[:, :1] * c[:, :1] ** torch.tensor([1.0, 2.0]),
    ),
    "hard sigmoid gate": (lambda x: F.hardsigmoid(x) * x, lambda x, c: F.hardsigmoid(c) * x),
    "sum with a quotient": (
        lambda x: torch.addcdiv(x, x, x.abs() + 1),
        lambda x, c: x + x / (c.abs() + 1),
    ),
    **{f.__name__: activation(f) for f in (torch.asinh, torch.atan, torch.erf, torch.sin, F.elu)},
    **{f.__name__: activation(f) for f in (F.celu, F.selu, F.relu6, F.softshrink, torch.expm1)},
    "elu in place": activation(lambda x: F.elu(1 * x, 0.5, inplace=True)),
    "a clamp": activation(lambda x: x.clamp(-0.5, 0.3)),
    "inverse error function": activation(lambda x: torch.special.i1(torch.erfinv(x.tanh()))),
    "GELU written out": (
        lambda x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.045 * x**3))),
        lambda x, c: 0.5 * x * (1 + torch.tanh(0.8 * (c + 0.045 * c**3))),
    ),
    "GELU by erf": gated(lambda x: (torch.erf(x / 2**0.5) + 1) / 2),
    "hard swish written out": gated(lambda x: F.relu6(x + 3) / 6),
    "cross product": (
        lambda x: torch.linalg.cross(x[:, :3], x[:, 1:]),
        lambda x, c: (
            0.5 * (torch.linalg.cross(x[:, :3], c[:, 1:]) + torch.linalg.cross(c[:, :3], x[:, 1:]))
        ),
    ),
    "bilinear": (
        lambda x: F.bilinear(x, x, WEIGHT[None]),
        lambda x, c: 0.5 * (F.bilinear(x, c, WEIGHT[None]) + F.bilinear(c, x, WEIGHT[None])),
    ),
    "a solution": (
        lambda x: torch.linalg.solve(x[:, :3], x[:, 1:]),
        lambda x, c: torch.linalg.solve(c[:, :3], x[:, 1:]),
    ),
    "determinant": (
        lambda x: torch.linalg.det(x[:, :3]).expand(1, 1),
        lambda x, c: (
            (torch.linalg.inv(c[:, :3]) @ x[:, :3]).trace().expand(1, 1)
            * torch.linalg.det(c[:, :3])
            / 3
        ),
    ),
    "interpolation": (
        lambda x: torch.lerp(x, x.roll(1, 0), x),
        lambda x, c: torch.lerp(x, x.roll(1, 0), c),
    ),
    "logarithms": (
        lambda x: torch.xlogy(x, x.abs() + 0.1),
        lambda x, c: x * torch.log(c.abs() + 0.1),
    ),
    "variance and mean": (
        lambda x: sum(torch.var_mean(x, -1, keepdim=True)),
        lambda x, c: (
            (x * (c - c.mean(-1, keepdim=True))).sum(-1, keepdim=True) / 3
            + x.mean(-1, keepdim=True)
        ),
    ),
    "a sign and steps": (
        lambda x: x * torch.sign(x) + x * x.round() + x * torch.div(x, 0.3, rounding_mode="floor"),
        lambda x, c: x * (c.sign() + c.round() + torch.div(c, 0.3, rounding_mode="floor")),
    ),
}


def relevance_at(x: Tensor, score: Tensor) -> Tensor:
    return times([x], coefficients_at([x], score))[0]


@pytest.mark.parametrize("kind", RULES)
def test_rules_are_gradients_with_constants_written_out(kind: str) -> None:
    function, frozen = RULES[kind]
    x = normal(3, 4).requires_grad_()
    score, same = function(x), frozen(x, x.detach())
    torch.testing.assert_close(same, score)
    direction = torch.randn_like(score)
    (gradient,) = torch.autograd.grad((same * direction).sum(), x)
    # Powers of one tensor may be values in part, and denominators.
    said = pytest.warns(UserWarning, match="result of Pow .* share of the score is missing")
    with said if kind == "a power of the tokens" else nullcontext():
        found = relevance_at(x, (score * direction).sum(-1))
    torch.testing.assert_close(found, x.detach() * gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["cos", "lgamma", "logit", "special.i0", "linalg.matrix_exp"])
def test_a_function_without_a_rule_is_said_with_its_share(name: str) -> None:
    function = attrgetter(name)(torch)
    x = normal(3, 3).sigmoid().requires_grad_()
    with pytest.warns(UserWarning, match="has no rule.* for 100% of the relevance"):
        relevance_at(x, function(x).sum(-1))
    with pytest.warns(UserWarning, match="has no rule.* for [1-9][0-9]?% of the relevance"):
        relevance_at(x, (x + function(x)).sum(-1))


@pytest.mark.parametrize("function", [torch.exp, torch.sigmoid, lambda x: 1 / (2 + x), torch.sign])
def test_a_coefficient_that_is_added_is_said(function) -> None:
    x = normal(3, 4).requires_grad_()
    with pytest.warns(UserWarning, match="its share of the score is missing"):
        found = relevance_at(x, (x + torch.log(2 + function(x))).sum(-1))
    torch.testing.assert_close(found, x.detach())


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 8.66), (torch.bfloat16, 3.12)])
def test_a_saturated_tanh_carries_relevance(dtype: torch.dtype, limit: float) -> None:
    x = torch.tensor([-20.0, -limit, 0.0, 1.0, limit, 10.0, 40.0]).to(dtype).requires_grad_()
    found = relevance_at(x, torch.tanh(x))
    # Its argument is known up to where tanh is rounded to one.
    expected = x.double() * (x.double().tanh() / x.double()).nan_to_num(1.0).clamp(min=1 / limit)
    torch.testing.assert_close(found.double(), expected.detach(), rtol=0.02, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saturated_tanh_module_is_exact(dtype: torch.dtype) -> None:
    model = WithOutput(without_biases(build("mamba")), lambda logits: model.cap(1e4 * logits))
    model.cap = nn.Tanh()
    model.to(dtype)
    with torch.no_grad():
        score = model(ids_for())[:, -1, 3]
    assert (score.abs() == 1).all()
    relevance = MambaLRP(model).attribute(ids_for(), 3)
    error = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(relevance.sum(1), score.float(), rtol=0, atol=error)
    # Its derivative is zero, and it depends on the tokens all the same.
    with pytest.warns(UserWarning, match="read by a saturated activation"):
        assert MambaRollout(model).attribute(ids_for()).isfinite().all()


def test_the_rms_norm_of_other_devices_is_a_rule_too() -> None:
    # CPUs have no fused RMS norm, so no node of it.
    x, weight = normal(3, 4), WEIGHT[0]
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1)
    node = SimpleNamespace(
        name=lambda: "FusedRmsNormBackward0",
        next_functions=[(None, 0), (None, 0)],
        _saved_result1=scale,
        _saved_weight=weight,
        _saved_normalized_shape=(4,),
    )
    rule = rule_of(node, {0})
    assert rule is not None
    gradient, _ = rule((None, None), (OTHER[:3],))
    torch.testing.assert_close(gradient, OTHER[:3] * weight * scale)


def test_a_function_without_a_rule_is_what_the_delta_is() -> None:
    class Unknown(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return F.silu(x)

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            s = torch.sigmoid(x)
            return gradient * s * (1 + x * (1 - s))

    model = without_biases(build("mamba"))

    def run(act):
        def forward(ids: Tensor) -> Tensor:
            return act(model(ids).logits)

        return MambaLRP(forward, model).attribute(ids_for(), 3, return_convergence_delta=True)

    with torch.no_grad():
        logit = F.silu(model(ids_for()).logits[:, -1, 3])
    with pytest.warns(UserWarning, match="through Unknown, which has no rule"):
        relevance, delta = run(Unknown.apply)
    torch.testing.assert_close(delta, logit - relevance.sum(1))
    assert float(delta.abs().max()) > 1e-2
    assert float(run(F.silu)[1].abs().max()) < 1e-5


@pytest.mark.parametrize("act", [F.softplus, partial(torch.log_softmax, dim=-1)])
def test_activations_without_a_rule_are_said(act) -> None:
    model = build("mamba")
    with pytest.warns(UserWarning, match=r"through (Softplus|LogSoftmax), which has no rule"):
        MambaLRP(lambda ids: act(model(ids).logits), model).attribute(ids_for(), target=3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_scripted_functions_are_said() -> None:
    model, swiglu = build("mamba"), torch.jit.script(_swiglu)

    def forward(ids: Tensor) -> Tensor:
        logits = model(ids).logits
        return swiglu(logits, logits)

    MambaLRP(lambda ids: _swiglu(*[model(ids).logits] * 2), model).attribute(ids_for(), target=3)
    forward(ids_for())  # the first call is only profiled
    with pytest.warns(UserWarning, match="DifferentiableGraph, which has no rule"):
        MambaLRP(forward, model).attribute(ids_for(), target=3)


def _swiglu(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def test_probabilities_are_refused() -> None:
    model = build("mamba")
    for method in (MambaLRP, LaTIM):
        with pytest.raises(ValueError, match="return the logits rather than probabilities"):
            method(lambda ids: model(ids).logits.softmax(-1), model).attribute(ids_for(), target=3)


def test_a_graph_of_the_users_own_is_left_as_it_was() -> None:
    model, ids = build("mamba"), ids_for()
    scale = torch.zeros((), requires_grad=True)
    gate = torch.sigmoid(scale)
    score = gate.square()  # kept, and differentiated later
    MambaLRP(lambda ids: gate * model(ids).logits, model).attribute(ids, target=3)
    (gradient,) = torch.autograd.grad(score, scale)
    torch.testing.assert_close(gradient, torch.tensor(0.25))


def test_values_are_the_models_own() -> None:
    model, ids = build("jamba"), ids_for()
    seen = []

    def forward(ids: Tensor) -> Tensor:
        seen.append(model(ids).logits)
        return seen[-1]

    MambaLRP(forward, model).attribute(ids, target=3)
    torch.testing.assert_close(seen[0].detach(), model(ids).logits.detach())


def test_a_memory_limit_is_kept_to() -> None:
    model, ids = build("mamba"), ids_for()
    expected = MambaLRP(model).attribute(ids, target=3)
    roomy = MambaLRP(model, memory_limit=1 << 20).attribute(ids, target=3)
    torch.testing.assert_close(roomy, expected)
    with pytest.raises(MemoryLimitError, match="keeps what every layer computes"):
        MambaLRP(model, memory_limit=1 << 12).attribute(ids, target=3)
    torch.testing.assert_close(MambaLRP(model).attribute(ids, target=3), expected)


def test_a_limit_grows_with_the_tokens() -> None:
    model = build("mamba2")
    least = {}
    for length in (8, 64):
        ids = ids_for(1, length)
        for limit in (2**n for n in range(10, 30)):
            try:
                MambaLRP(model, memory_limit=limit).attribute(ids, target=3)
            except MemoryLimitError:
                continue
            least[length] = limit
            break
    assert least[64] >= 4 * least[8]


POSITIONS = torch.arange(9)[None]


class Positioned(nn.Module):
    """Embeds learned positions first, then tokens; the table of tokens is known or not."""

    def __init__(self, tells: bool) -> None:
        super().__init__()
        self.positions = nn.Embedding(16, 16)
        self.inner = build("mamba")
        if tells:
            self.get_input_embeddings = self.inner.get_input_embeddings

    def forward(self, tokens: torch.Tensor, copy: bool = False) -> torch.Tensor:
        places = self.positions(torch.arange(tokens.shape[1]).expand_as(tokens))
        embedded = self.inner.backbone.embeddings(tokens.clone() if copy else tokens)
        return self.inner(inputs_embeds=places + embedded).logits


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("ids", [POSITIONS, ids_for()], ids=["alike", "different"])
def test_the_table_of_tokens_is_not_that_of_positions(tells, ids):
    model = Positioned(tells)
    embeddings, places = (
        table(x).detach()
        for table, x in ((model.inner.backbone.embeddings, ids), (model.positions, POSITIONS))
    )
    embedded = MambaLRP(lambda e: model.inner(inputs_embeds=e + places).logits, model)
    expected = embedded.attribute(embeddings, target=3).sum(-1)
    torch.testing.assert_close(MambaLRP(model).attribute(ids, target=3), expected)


def test_tables_that_cannot_be_told_apart_are_an_error():
    model = Positioned(False)
    with pytest.raises(ValueError, match="get_input_embeddings"):
        MambaLRP(model).attribute(POSITIONS, 3, {"copy": True})
    other = POSITIONS.flip(1)  # no position is its own id, except one
    assert MambaLRP(model).attribute(other, 3, {"copy": True}).shape == (1, 9)


def test_what_is_checked_is_what_relevance_goes_through(monkeypatch):
    own = FrozenMixer.detach_coefficients
    monkeypatch.setattr(
        FrozenMixer,
        "detach_coefficients",
        lambda self: dataclasses.replace(own(self), skip=1.01 * self.skip),
    )
    with pytest.raises(ReconstructionError, match="mixer"):
        MambaLRP(build("mamba")).attribute(ids_for(), target=3)


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def before(x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


NORMS = {
    "an RMS norm": (rms, True),
    "a layer norm": (lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-6), True),
    "with some of the token before": (lambda x: rms(x) + 0.01 * before(x), False),
    "a larger result": (lambda x: 1.001 * rms(x), False),
    "with an activation": (lambda x: rms(x) + 1e-3 * F.silu(x), False),
    "at all tokens but one": (
        lambda x: torch.cat([rms(x[:, :4]), 1.001 * rms(x[:, 4:5]), rms(x[:, 5:])], 1),
        False,
    ),
}


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_by_name_is_one_only_at_rounding(kind: str, dtype: torch.dtype) -> None:
    class OwnNorm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return NORMS[kind][0](x)

    # A token that is much larger than the others does not hide what happens to them.
    x = torch.randn(2, 9, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[:, 0] *= 1e3
    module = OwnNorm()
    call = MixerCall.of("norm", module, (x,), {}, module(x))
    assert (FrozenNorm.of(call) is not None) == NORMS[kind][1]
    model = without_biases(nn.Sequential(module, BidirectionalMamba(8, state=4))).to(dtype)
    _, delta = MambaLRP(lambda x: model(x).sum((1, 2)), model).attribute(
        x, return_convergence_delta=True
    )
    assert float(delta.abs().max()) < 1e-5
