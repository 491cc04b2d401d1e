"""flash-linear-attention's scans, by form or by impulses, against their equations."""

from __future__ import annotations

import inspect
from itertools import pairwise

import pytest
import torch
from proofs import proven
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.discovery.scans import ScanCalls, intercepted
from captum_ssm.operators import SoftmaxOperator


def unit(t: Tensor) -> Tensor:
    return t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def recurrence(q, k, v, decay, probe=None, late=True):
    """``S = diag(decay) S``; what the state holds at ``probe`` is taken from v; ``S += k v``."""
    state, out = torch.zeros(*k.shape[::2], k.shape[-1], v.shape[-1]), []
    for t in range(v.shape[1]):
        found = 0.0 if probe is None else (probe[:, t, ..., None] * state).sum(-2)
        state = decay[:, t, ..., None] * state
        if late and probe is not None:
            found = (probe[:, t, ..., None] * state).sum(-2)
        state = state + k[:, t, ..., None] * (v[:, t] - found)[..., None, :]
        out.append((q[:, t, ..., None] * state).sum(-2))
    return torch.stack(out, 1)


def kda(q, k, v, g, beta, A_log, dt_bias, lower_bound=None, use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True):  # fmt: skip
    q, k = (unit(t).repeat_interleave(2, 2) for t in (q, k))
    step, speed = g + dt_bias.view(g.shape[-2:]), A_log.exp()[:, None]
    bounded = lower_bound is not None
    log = lower_bound * torch.sigmoid(speed * step) if bounded else -speed * F.softplus(step)
    b = 2 * torch.sigmoid(beta)[..., None]
    return recurrence(q * q.shape[-1] ** -0.5, k, b * v, log.exp(), b * k), None


def comba(q, k, v, p, g, beta, use_qk_l2norm_in_kernel=True):
    q, k, p = (unit(t).repeat_interleave(2, 2) for t in (q, k, p))
    b = beta[..., None]
    return recurrence(q * q.shape[-1] ** -0.5, k, b * v, g.exp()[..., None], b * p, late=False)


def comba_naive(q, k, v, p, g, beta, scale=0.5):
    q, k, p = (t.repeat_interleave(2, 2) for t in (q, k, p))
    b = beta[..., None]
    return recurrence(q * scale, k, b * v, g.exp()[..., None], b * p)


def gdn2(q, k, v, g, b, w, use_qk_l2norm_in_kernel=True):
    q, k = unit(q), unit(k)
    return recurrence(q * q.shape[-1] ** -0.5, k, w * v, g.exp(), b * k)


def precond(q, k, v, g, beta, g_atk, beta_atk, log_atk_scale, x=1.5, eps=1e-6,
            use_qk_l2norm_in_kernel=True):  # fmt: skip
    q, k = unit(q), unit(k)
    seen, keys = torch.zeros_like(k[:, 0]), []
    for t in range(k.shape[1]):
        seen = g_atk[:, t, :, None].exp() * seen + beta_atk[:, t, :, None] * k[:, t] ** 2
        rest = torch.log(seen + eps) - log_atk_scale[:, None]
        keys.append(k[:, t] * x ** (-rest / (1 + rest.abs())))
    b = beta[..., None]
    # Written with one key, read with another: (k' v) - k' (b k S), in a loop of its own.
    write, state, out = torch.stack(keys, 1) * b, torch.zeros(*k.shape[::2], 4, 3), []
    for t in range(k.shape[1]):
        state = g[:, t, ..., None].exp() * state
        left = v[:, t] - (k[:, t, ..., None] * state).sum(-2)
        state = state + write[:, t, ..., None] * left[..., None, :]
        out.append((q[:, t, ..., None] * state).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(out, 1), None


def gsa(q, k, v, s, g, scale=0.7):
    q = q * scale
    weights = (q[:, :, None] * k[:, None]).sum(-1)  # (B, i, j, H)
    total = g.cumsum(1)
    L, out = q.shape[1], []
    for i in range(L):
        held = sum(
            weights[:, i, j, :, None] * (total[:, i] - total[:, j]).exp() * s[:, j]
            for j in range(i + 1)
        )
        read = held.softmax(-1)
        out.append(
            sum(
                (read * (total[:, i] - total[:, j]).exp() * s[:, j]).sum(-1, keepdim=True) * v[:, j]
                for j in range(i + 1)
            )
        )
    return torch.stack(out, 1), None


def abc(q, k, v, s):
    total = s.logcumsumexp(1)
    before = torch.cat([total[:, :1], total[:, :-1]], 1)
    return gsa(q, k, v, torch.exp(s - total), before - total, scale=q.shape[-1] ** -0.5)


def mesa(q, k, v, g, beta, lamb, use_qk_l2norm_in_kernel=True):
    q, k = unit(q), unit(k)
    keys = values = torch.zeros(*k.shape[::2], 1, 1)
    out = []
    for t in range(v.shape[1]):
        decay, write = g[:, t, :, None, None].exp(), (beta[:, t, :, None] * k[:, t])[..., None]
        keys = decay * keys + write * k[:, t, ..., None, :]
        values = decay * values + write * v[:, t, ..., None, :]
        query = torch.linalg.solve(keys + torch.diag_embed(lamb), q[:, t])
        out.append((query[..., None] * values).sum(-2))
    return torch.stack(out, 1)


def masked(weights: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhij,bjhp->bihp", weights, v)


def products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return torch.einsum("bihn,bjhn->bhij", q, k) * scale


def based(q, k, v, scale=0.5, use_norm=True):
    s = products(q, k, scale)
    weights = (1 + s + s * s / 2).tril()
    return masked(weights / (weights.sum(-1, keepdim=True) + 1e-6), v)


def rebased(q, k, v, eps=1e-5, use_scale=True, use_normalize=True):
    weights = products(q, k, q.shape[-1] ** -0.5).square().tril()
    return masked(weights / (weights.sum(-1, keepdim=True) + eps), v)


def linear(q, k, v, scale=None, normalize=True):
    weights = products(q.abs(), k.abs(), q.shape[-1] ** -0.5).tril()
    return masked(weights / (weights.sum(-1, keepdim=True) + 1e-10), v)


def forgetting(q, k, v, g, scale=None, window_size=None):
    k, v = (t.repeat_interleave(2, 2) for t in (k, v))
    total = g.cumsum(1).mT
    scores = products(q, k, q.shape[-1] ** -0.5) + total[..., None] - total[..., None, :]
    at = torch.arange(q.shape[1])
    far = at[:, None] - at >= (window_size or q.shape[1])
    blocked = far | (at > at[:, None])
    return masked(scores.masked_fill(blocked, -torch.inf).softmax(-1), v)


def given(name: str, L: int) -> dict[str, Tensor]:
    B, H, N, P = 2, 2, 4, 3
    grouped = name in ("kda", "comba", "comba_naive")
    heads = 2 * H if grouped else H
    q, k, p = (torch.randn(B, L, H, N) for _ in range(3))
    v = torch.randn(B, L, heads, P)
    per_head, per_key = -torch.rand(B, L, heads), -torch.rand(B, L, heads, N)
    beta = torch.rand(B, L, heads)
    found = {"q": q, "k": k, "v": v}
    if name.startswith("kda"):
        found |= {"g": torch.randn(B, L, heads, N), "beta": beta, "A_log": torch.randn(heads)}
        found |= {"dt_bias": torch.randn(heads * N)}
    elif name.startswith("comba"):
        found |= {"p": p, "g": per_head, "beta": beta}
    elif name == "gdn2":
        found |= {"g": per_key, "b": torch.rand(B, L, H, N), "w": torch.rand(B, L, H, P)}
    elif name == "precond":
        found |= {"g": per_key, "beta": beta, "g_atk": per_head, "beta_atk": beta.flip(1)}
        found |= {"log_atk_scale": torch.randn(H)}
    elif name == "gsa":
        found |= {"s": torch.rand(B, L, H, 5), "g": -torch.rand(B, L, H, 5)}
    elif name == "abc":
        found |= {"s": torch.randn(B, L, H, 5)}
    elif name == "mesa":
        found |= {"g": per_head, "beta": beta, "lamb": 0.3 + torch.rand(H, N)}
    elif name == "linear":
        found |= {"q": q.abs(), "k": k.abs()}
    elif name == "forgetting":
        found |= {"q": torch.randn(B, L, 2 * H, N), "g": -torch.rand(B, L, 2 * H)}
    return found


SCANS = {
    f.__name__: f
    for f in (
        kda,
        comba,
        comba_naive,
        gdn2,
        precond,
        gsa,
        abc,
        mesa,
        based,
        rebased,
        linear,
        forgetting,
    )
}


def matrices(function, arguments) -> Tensor:
    """Impulses of the values through the function: ``(B, channels, L, L)``."""
    v, columns = arguments["v"], []
    for j in range(v.shape[1]):
        impulse = torch.zeros_like(v)
        impulse[:, j] = 1
        out = function(**arguments | {"v": impulse})
        columns.append((out[0] if isinstance(out, tuple) else out).flatten(2))
    return torch.stack(columns, -1).transpose(1, 2)


@pytest.mark.parametrize("length", [1, 2, 7, 65])
@pytest.mark.parametrize("name", SCANS)
def test_a_call_is_proven_and_its_map_is_what_impulses_measure(name, length):
    torch.manual_seed(0)
    arguments = given(name, length)
    scan = proven(SCANS[name], **arguments)
    assert scan is not None
    if length > 7:
        return
    truth, found = matrices(SCANS[name], arguments), scan.operator.matrix()
    found = found.repeat_interleave(truth.shape[1] // found.shape[1], 1)
    assert (found - truth).abs().max() <= 2e-5 * truth.abs().max()


def test_options_of_kda_and_of_forgetting_attention():
    torch.manual_seed(0)
    assert proven(kda, **given("kda", 7), lower_bound=-5.0) is not None
    assert proven(forgetting, **given("forgetting", 7), window_size=3) is not None


@pytest.mark.parametrize("name", SCANS)
def test_another_recurrence_is_none(name):
    torch.manual_seed(0)

    def altered(**arguments):
        out = SCANS[name](**arguments)
        y = (out[0] if isinstance(out, tuple) else out).clone()
        y[:, :, 0] *= 1.01
        return y

    altered.__signature__ = inspect.signature(SCANS[name])
    assert proven(altered, **given(name, 7)) is None


def attention(q, k, v, causal=True, window_size=(-1, -1), softmax_scale=None, softcap=0.0):
    """As flash-attn's function, also of packed tokens ``(T, H, N)``."""
    q, k, v = (t[None] if t.dim() == 3 else t for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], 2) for t in (k, v))
    scores = products(q, k, softmax_scale or q.shape[-1] ** -0.5)
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    at = torch.arange(q.shape[1])
    ahead, (before, after) = at - at[:, None], window_size
    hidden = (ahead > 0) if causal else (after >= 0) & (ahead > after)
    hidden = hidden | ((before >= 0) & (-ahead > before))
    return masked(scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window_size": (2, 0)},
        {"causal": False, "window_size": (1, 2)},
        {"softcap": 2.0, "softmax_scale": 0.7},
    ],
)
def test_attention_as_flash_attn_computes_it(options):
    torch.manual_seed(0)
    arguments = given("forgetting", 7)
    del arguments["g"]
    scan = proven(attention, **arguments, **options)
    truth, found = matrices(attention, arguments | options), scan.operator.matrix()
    found = found.repeat_interleave(truth.shape[1] // found.shape[1], 1)
    if options == {}:  # query heads that share a value's
        truth = matrices(attention, arguments)
    assert isinstance(scan.operator, SoftmaxOperator)
    assert (found - truth).abs().max() <= 2e-5


def stick_breaking(q, k, v, attend_current=True):
    z = products(q, k, q.shape[-1] ** -0.5)
    seen = torch.ones_like(z).tril(0 if attend_current else -1) > 0
    weights = torch.zeros_like(z)
    for i in range(z.shape[-1]):
        left = torch.ones_like(z[..., 0, 0])
        for j in range(i if attend_current else i - 1, -1, -1):
            share = torch.sigmoid(z[..., i, j])
            weights[..., i, j], left = left * share, left * (1 - share)
    assert not weights[~seen].any()
    return masked(weights, v), None


def momentum(q, k, v, log_alpha, log_mu, beta):
    """The delta rule whose writes have momentum: a state of two parts."""
    state = moving = torch.zeros(*k.shape[::2], k.shape[-1], v.shape[-1])
    out = []
    for t in range(v.shape[1]):
        alpha, mu, b = (x[:, t, :, None, None] for x in (log_alpha.exp(), log_mu.exp(), beta))
        left = v[:, t] - (k[:, t, ..., None] * state).sum(-2)
        moving = mu * moving - k[:, t, ..., None] * left[..., None, :]
        state = alpha * state - b * moving
        out.append((q[:, t, ..., None] * state).sum(-2))
    return torch.stack(out, 1)


def dependent(q, k, v):
    return masked(products(q, k, 1.0).softmax(-1), v / v.norm(dim=-1, keepdim=True))


def mixing_heads(q, k, v):
    return masked(products(q, k, 1.0).softmax(-1), v.flip(2))


def seen_by(function, arguments):
    """The scans that a run of the function holds."""
    found = []
    handler = ScanCalls(lambda call, scan, result: found.append(scan) or result)
    with intercepted(handler, [function]), torch.no_grad():
        function(**arguments)
    return found


def measured(name: str, L: int) -> dict[str, Tensor]:
    extra = {} if name != "momentum" else given("comba", L)
    found = {name: t for name, t in given("based", L).items() if name in "qkv"}
    if extra:
        found |= dict(log_alpha=-torch.rand(2, L, 2), log_mu=-torch.rand(2, L, 2))
        found |= dict(beta=torch.rand(2, L, 2))
    return found


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("function", [stick_breaking, momentum])
def test_a_call_without_a_form_is_measured_with_impulses(function, length):
    torch.manual_seed(0)
    arguments = measured(function.__name__, length)
    assert length == 1 or proven(function, **arguments) is None
    (scan,) = seen_by(function, arguments)
    truth, found = matrices(function, arguments), scan.operator.matrix()
    found = found.repeat_interleave(truth.shape[1] // found.shape[1], 1)
    assert (found - truth).abs().max() <= 2e-5 * truth.abs().max().clamp(min=1e-3)


def attention_of_one_head(q, k, v, mask=None):
    scores = q @ k.mT * q.shape[-1] ** -0.5
    return (
        scores.masked_fill(torch.tensor(False) if mask is None else ~mask, -torch.inf).softmax(-1)
        @ v
    )


def rotating(q, k, v, a):
    """A complex decay per token, as in GateLoop: (B, L, N) each, a (B, L) complex."""
    h, out = torch.zeros(len(v), k.shape[-1], v.shape[-1], dtype=torch.complex64), []
    for t in range(v.shape[1]):
        h = a[:, t, None, None] * h + k[:, t, :, None] * v[:, t, None]
        out.append((q[:, t, None] @ h.real)[:, 0])
    return torch.stack(out, 1)


def test_one_head_may_have_no_axis():
    q, k, v = torch.randn(3, 2, 7, 4).unbind()
    mask = torch.ones(2, 7, 7, dtype=torch.bool).tril()
    for given in (dict(), dict(mask=mask)):
        scan = proven(attention_of_one_head, q=q, k=k, v=v, **given)
        expected = attention_of_one_head(q, k, torch.eye(7).expand(2, 7, 7), **given)
        torch.testing.assert_close(scan.operator.matrix()[:, 0], expected)
    a = torch.polar(torch.rand(2, 7), 6 * torch.rand(2, 7))
    (scan,) = seen_by(rotating, dict(q=q, k=k, v=v, a=a))
    expected = rotating(q, k, torch.eye(7).expand(2, 7, 7), a)
    torch.testing.assert_close(scan.operator.matrix()[:, 0], expected, rtol=1e-4, atol=1e-5)
    # Channels of more than one head.
    mixing = lambda q, k, v: attention_of_one_head(q, k, v.flip(-1))  # noqa: E731
    assert not seen_by(mixing, dict(q=q, k=k, v=v))


@pytest.mark.parametrize("function", [dependent, mixing_heads])
def test_what_is_not_linear_in_each_head_is_not_measured(function):
    torch.manual_seed(0)
    assert not seen_by(function, measured(function.__name__, 7))


def delta_product(q, k, v, beta, g, num_householder):
    out, state = [], torch.zeros(*k.shape[::2], k.shape[-1], v.shape[-1])
    for t in range(q.shape[1]):
        state = g[:, t, :, None, None].exp() * state
        for i in range(t * num_householder, (t + 1) * num_householder):
            left = v[:, i] - (k[:, i, ..., None] * state).sum(-2)
            write = beta[:, i, :, None] * k[:, i]
            state = state + write[..., None] * left[..., None, :]
        out.append((q[:, t, ..., None] * state).sum(-2) * q.shape[-1] ** -0.5)
    return torch.stack(out, 1), state


@pytest.mark.parametrize("length", [1, 2, 7, 65])
@pytest.mark.parametrize("steps", [1, 3])
def test_several_steps_per_token(length, steps):
    torch.manual_seed(0)
    k, v = unit(torch.randn(2, length * steps, 2, 4)), torch.randn(2, length * steps, 2, 3)
    q, beta, g = torch.randn(2, length, 2, 4), torch.rand(2, length * steps, 2), -torch.rand(2, 1)
    arguments = dict(q=q, k=k, v=v, beta=beta, g=g.expand(2, length)[..., None].expand(-1, -1, 2))
    scan = proven(delta_product, **arguments, num_householder=steps)
    assert scan is not None
    if length > 7:
        return
    found = scan.operator.matrix().unflatten(1, (steps, 2))  # by step and head
    columns = matrices(delta_product, arguments | {"num_householder": steps})
    truth = columns.unflatten(-1, (length, steps)).unflatten(1, (2, 3))[:, :, 0].movedim(-1, 1)
    assert (found - truth).abs().max() <= 2e-5 * truth.abs().max()


def packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, causal=True):
    ends = cu_seqlens_q.tolist()
    assert max_seqlen_q == max(b - a for a, b in pairwise(ends))
    return torch.cat([attention(q[a:b], k[a:b], v[a:b], causal)[0] for a, b in pairwise(ends)])


def test_packed_sequences_are_proven_one_by_one():
    torch.manual_seed(0)
    ends = torch.tensor([0, 3, 4, 9])
    q, k, v = torch.randn(3, 9, 2, 4)
    arguments = dict(q=q, k=k, v=v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=5)
    (scan,) = seen_by(packed, arguments)
    found = scan.operator.matrix()[0]
    block = torch.block_diag(*(torch.ones(n, n) for n in (3, 1, 5))).bool()
    assert not found[:, ~block].any()
    assert (found @ v.transpose(0, 1) - packed(**arguments).transpose(0, 1)).abs().max() <= 2e-5
