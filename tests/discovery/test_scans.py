"""Scans recorded by what they are called with, proven, and exchanged."""

import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import wild
from folders import ROOT
from group_normed import gated_sum
from proofs import proven
from torch.nn import functional as F
from xlstm_layers import mlstm

import captum_ssm
from captum_ssm.attr import MambaRollout
from captum_ssm.discovery.measure import freeze_measured
from captum_ssm.discovery.scans import (
    Candidate,
    candidate_functions,
    intercepted,
    not_intercepted,
    prove,
    register_scan,
)
from captum_ssm.discovery.scans import form as _form
from captum_ssm.discovery.scans.forms import heads as _heads
from captum_ssm.mixers import MixerCall
from captum_ssm.mixers.registry import how_known
from captum_ssm.operators import DiagonalOperator


def coefficients(B=2, L=7, D=4, N=3, dtype=torch.float32):
    x, step = torch.randn(2, B, L, D, dtype=dtype)
    return dict(
        x=x,
        delta=F.softplus(step),
        A=-torch.rand(D, N, dtype=dtype) - 0.1,
        B=torch.randn(B, L, N, dtype=dtype),
        C=torch.randn(B, L, N, dtype=dtype),
        D=torch.randn(D, dtype=dtype),
    )


def late_scan(x, delta, A, B, C, D):
    return wild.scan(x, delta, A, F.pad(B, (0, 0, 1, 0))[:, :-1], C, D)


def noisy_scan(x, delta, A, B, C, D):
    y = wild.scan(x, delta, A, B, C, D)
    return y + 1e-3 * y.norm() * F.normalize(torch.randn(y.numel()), dim=0).view(y.shape)


def reversed_scan(x, delta, A, B, C, D):
    return wild.scan(*(t.flip(1) for t in (x, delta)), A, B.flip(1), C.flip(1), D).flip(1)


def shifted_scan(x, delta, A, B, C, D):
    return F.pad(wild.scan(x, delta, A, B, C, D), (0, 0, 1, 0))[:, :-1]


def residual_scan(x, delta, A, B, C, D):
    return x + wild.scan(x, delta, A, B, C, D)


def attending_scan(x, delta, A, B, C, D):
    return wild.scan(x, delta, A, B, C, D) + torch.softmax(C @ B.mT, -1) @ x


def skipless_scan(x, delta, A, B, C, D):
    return wild.scan(x, delta, A, B, C, 0 * D)


def biased_scan(x, delta, A, B, C, D, delta_bias=None, delta_softplus=False):
    """The bias of the step is given, and not added."""
    return wild.scan(x, F.softplus(delta) if delta_softplus else delta, A, B, C, D)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_scan_is_proven(dtype):
    scan = proven(wild.scan, **coefficients(dtype=dtype))
    assert scan.error < 1e-5 if dtype == torch.float32 else scan.error < 1e-12
    assert scan.skip is not None
    assert scan.gate is None


def test_a_scan_may_leave_out_its_skip():
    assert proven(skipless_scan, **coefficients()).skip is None


@pytest.mark.parametrize(
    "function",
    [late_scan, noisy_scan, reversed_scan, shifted_scan, residual_scan, attending_scan],
)
def test_a_function_that_looks_like_a_scan_is_none(function):
    assert proven(function, **coefficients()) is None


@pytest.mark.parametrize("small", [1.0, 1e-3])
def test_what_the_recurrence_adds_is_compared_not_the_whole(small):
    # With tiny B and C the recurrence is a millionth of the output: its error is the rounding's.
    given = coefficients() | {"delta_bias": torch.full((4,), 0.5), "delta_softplus": True}
    given["B"], given["C"] = small * given["B"], small * given["C"]
    y, right = biased_scan(**given), biased_scan(**given | {"delta": given["delta"] + 0.5})
    if small < 1:
        assert float((y - right).norm()) < 1e-5 * float(y.norm())
    assert proven(biased_scan, **given) is None
    assert proven(biased_scan, **given | {"delta_bias": torch.zeros(4)}) is not None


def test_gates_layouts_and_groups():
    x, step, z = torch.randn(3, 2, 8, 7)
    Bs, Cs = torch.randn(2, 2, 2, 3, 7)
    As, Ds = -torch.rand(8, 3), torch.randn(8)

    def gated(u, dts, As, Bs, Cs, Ds, z):
        return wild.last_scan(u, dts, As, Bs, Cs, Ds) * F.silu(z)

    found = proven(gated, u=x, dts=F.softplus(step), As=As, Bs=Bs, Cs=Cs, Ds=Ds, z=z)
    torch.testing.assert_close(found.gate, F.silu(z).mT)
    torch.testing.assert_close(found.values, x.mT)
    assert found.layout == "BDL"


def linear_attention(q, k, v, decay, beta=None):
    """Heads first; with beta the delta rule."""
    S, out = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]), []
    for t in range(q.shape[2]):
        S = decay[:, :, t].exp()[..., None, None] * S
        value = v[:, :, t, None]
        if beta is not None:
            value = beta[:, :, t, None, None] * (value - k[:, :, t, None] @ S)
        S = S + k[:, :, t, :, None] * value
        out.append((q[:, :, t, None] @ S)[:, :, 0])
    return torch.stack(out, 2)


@pytest.mark.parametrize("beta", [False, True])
def test_linear_attention_and_the_delta_rule(beta):
    q, k = F.normalize(torch.randn(2, 2, 3, 6, 4), dim=-1)
    v, decay = torch.randn(2, 3, 6, 5), -torch.rand(2, 3, 6)
    given = dict(q=q, k=k, v=v, decay=decay)
    given |= {"beta": torch.rand(2, 3, 6)} if beta else {}
    assert proven(linear_attention, **given).error < 1e-5


def test_softmax_attention_of_torch_is_intercepted():
    q, k, v = torch.randn(3, 2, 3, 6, 4)
    found = []

    def handle(call):
        with not_intercepted():
            result = call.run()
        found.append(prove(call, result))
        return result

    with intercepted(handle):
        F.scaled_dot_product_attention(q, k, v)
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert [scan.operator.is_causal for scan in found] == [False, True]


def test_a_mask_that_is_no_tensor_is_left_out():
    def attend(queries, keys, values, attn_mask):
        return (queries @ keys.mT / 2).softmax(-1) @ values

    q, k, v = torch.randn(3, 2, 3, 6, 4).unbind()
    scan = proven(attend, queries=q, keys=k, values=v, attn_mask=slice(None))
    torch.testing.assert_close(scan.operator.matrix(), (q @ k.mT / 2).softmax(-1))

    def attend_causally(queries, keys, values, attn_mask):
        scores = (queries @ keys.mT / 2).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        return scores.softmax(-1) @ values

    assert proven(attend_causally, queries=q, keys=k, values=v, attn_mask=slice(None)) is None


def ones(call):
    return torch.ones(())


def test_functions_are_exchanged_wherever_they_are_referred_to():
    held = wild.scan
    code, given = held.__code__, coefficients()
    with intercepted(ones):
        assert wild.scan(**given) == held(**given) == 1
        assert held.__code__ is not code
    assert held.__code__ is code
    assert held(**given).shape == (2, 7, 4)


def test_an_exception_puts_everything_back():
    code = wild.scan.__code__

    def fail(call):
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"), intercepted(fail):
        wild.scan(**coefficients())
    assert wild.scan.__code__ is code
    assert wild.scan(**coefficients()).shape == (2, 7, 4)


def test_runs_may_be_nested():
    with intercepted(ones):
        with intercepted(lambda call: torch.zeros(())):
            assert wild.scan(**coefficients()) == 0
        assert wild.scan(**coefficients()) == 1
        # A run that handles other functions leaves these to the one around it.
        with intercepted(lambda call: torch.zeros(()), [F.scaled_dot_product_attention]):
            assert wild.scan(**coefficients()) == 1


def test_other_threads_run_as_they_are():
    results, started, done = [], threading.Event(), threading.Event()

    def other():
        started.wait()
        results.append(wild.scan(**coefficients()))
        with intercepted(lambda call: torch.zeros(())):
            results.append(wild.scan(**coefficients()))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with intercepted(ones):
        started.set()
        done.wait()
        assert wild.scan(**coefficients()) == 1
    thread.join()
    assert results[0].shape == (2, 7, 4)
    assert results[1] == 0


def test_the_interpreters_hooks_stay():
    def hook(frame, event, arg):
        return None

    before = sys.getprofile(), sys.gettrace()
    sys.setprofile(hook)
    try:
        with intercepted(ones):
            wild.scan(**coefficients())
            assert sys.getprofile() is hook
        assert sys.getprofile() is hook
    finally:
        sys.setprofile(before[0])
    assert sys.gettrace() is before[1]


def test_tuples_that_another_thread_fills_are_left_alone():
    stop, failures = threading.Event(), []

    def fill():
        try:
            while not stop.is_set():
                tuple(map(lambda i: [i], range(50)))
        except SystemError as error:
            failures.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=fill)
    thread.start()
    try:
        for _ in range(2):
            candidate_functions()
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert not failures


def test_only_functions_with_the_roles_are_candidates():
    found = candidate_functions()
    assert wild.scan in found
    assert wild.last_scan in found
    assert coefficients not in found
    assert not any((f.__module__ or "").startswith("captum_ssm.kernels") for f in found)


def test_scans_are_found_after_a_server_has_frozen_the_garbage_collector():
    code = """
import gc
import torch
import wild
from captum_ssm.discovery.scans.calls import candidate_functions

before = set(candidate_functions())
gc.freeze()
after = set(candidate_functions())
assert wild.scan in after
assert before == after, before ^ after
gc.unfreeze()
"""
    path = os.pathsep.join([str(Path(wild.__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_a_form_of_a_user(monkeypatch):
    monkeypatch.setattr(_form, "_FORMS", dict(_form._FORMS))

    def running(signal, keep):
        h, out = 0, []
        for token in signal.unbind(1):
            h = keep * h + token
            out.append(h)
        return torch.stack(out, 1)

    given = dict(signal=torch.randn(2, 5, 3), keep=torch.rand(3))
    assert proven(running, **given) is None

    @register_scan(names={"x": ["signal"], "decay": ["keep"]})
    def running_sum(x, decay):
        one = torch.ones_like(x)
        state = one[..., :1, None]
        operator = DiagonalOperator(one, one, decay.log()[:, None], state, state)
        yield Candidate(operator=operator, values=x, layouts=("BLD",))

    assert proven(running, **given).error < 1e-5
    assert running in candidate_functions()


def test_the_page_on_scan_forms_runs(monkeypatch):
    monkeypatch.setattr(_form, "_FORMS", dict(_form._FORMS))
    page = ROOT / "docs" / "development" / "add_a_scan_form.md"
    code, form, use = re.findall(r"```python\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    names = {}
    exec(code, names)
    model, ids = names["Model"]().eval(), torch.randint(11, (1, 12))
    with pytest.raises(captum_ssm.UnsupportedModelError):
        MambaRollout(model).attribute(ids)
    exec(form, names)
    exec(use, names)
    assert names["relevance"].shape == (1, 12)
    mixers = names["model"].mixers
    assert [how_known(mixer) for mixer in mixers] == ["measured"] * 2
    x = torch.randn(1, 7, 8)
    mixer = mixers[0]
    frozen = freeze_measured(MixerCall("mixer", mixer, (x,), {}, mixer(x).detach()))
    map_of = frozen.operator("unified").matrix()
    lags = torch.arange(7)[:, None] - torch.arange(7)
    decay = mixer.speed.detach().sigmoid()[:, None, None] ** lags.clamp(min=0) * (lags >= 0)
    gate = F.silu(mixer.enter(x).chunk(2, -1)[1]).detach()
    torch.testing.assert_close(map_of[0], decay * gate[0].mT[..., None])


@pytest.mark.parametrize("width", [1, 2, 4, 12])
def test_head_width(width):
    v = torch.randn(2, 12)
    factor = torch.randn(2, 12 // width, 1).expand(-1, -1, width).flatten(1)
    assert _heads._head_width(v, factor * v) == width
    assert _heads._head_width(v, torch.randn(2, 12)) == 1


def test_what_cannot_be_registered():
    with pytest.raises(TypeError, match="expected a function"):
        register_scan(3)
    with pytest.raises(ValueError, match="decay"):
        register_scan(lambda x: [], names={"decay": ["gamma"]})


def transposed_gated_sum(x, a):
    return gated_sum(x.mT, a.mT).mT


def gated_sum_of_logs(log_values, log_coeffs):
    return gated_sum(log_values.exp(), log_coeffs.exp())


def read_gated_sum(q, kv, a):
    return q * gated_sum(kv, a), (a[:, -1], kv[:, -1])


def test_gated_sums():
    x, q, a = torch.randn(2, 9, 3), torch.randn(2, 9, 3), torch.rand(2, 9, 3)
    matrix = proven(gated_sum, x=x, a=a).operator.matrix()
    torch.testing.assert_close(matrix[:, :, 4, 3], a[:, 4])
    assert proven(transposed_gated_sum, x=x.mT, a=a.mT).layout == "BDL"
    torch.testing.assert_close(proven(read_gated_sum, q=q, kv=x, a=a).gate, q)
    found = proven(gated_sum_of_logs, log_values=x, log_coeffs=a.log())
    torch.testing.assert_close(found.operator.matrix(), matrix)
    torch.testing.assert_close(found.values, x.exp())
    assert proven(lambda x, a: gated_sum(x * a, a), x=x, a=a) is None


def heads_of(state, q, k, v):
    """Linear attention, heads last, whose state is ``state(S, t)`` plus what a token writes."""
    S, out = v.new_zeros(*q[:, 0].shape, v.shape[-1]), []
    for t in range(q.shape[1]):
        S = state(S, t) + k[:, t, ..., None] * v[:, t, :, None]
        out.append((q[:, t, ..., None] * S).sum(-2))
    return torch.stack(out, 1)


def retention(query, key, value):
    """Heads first, with a scale and a decay per head that no argument says."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    decay = 1 - 2.0 ** -torch.arange(3, 3 + q.shape[2]).to(q)
    return 0.3 * heads_of(lambda S, t: decay[:, None, None] * S, q, k, v).transpose(1, 2)


def attends_everywhere(query, key, value):
    return query @ (key.mT @ value) / query.shape[2]


@pytest.mark.parametrize("length", [5, 400])
def test_a_decay_that_no_argument_says_is_fitted(length):
    q, k, v = torch.randn(3, 2, 3, length, 4).unbind()
    found = proven(retention, query=q, key=k, value=v)
    scores = torch.einsum("bhin,bhjn->bhij", q, k)
    steps = torch.arange(length)[:, None] - torch.arange(length)
    decay = (1 - 2.0 ** -torch.arange(3, 6.0))[:, None, None]
    expected = 0.3 * (scores * decay**steps).tril()
    torch.testing.assert_close(found.operator.matrix(), expected, rtol=1e-3, atol=1e-4)
    for wrong in (
        lambda query, key, value: retention(query, key, value) + value,
        lambda query, key, value: retention(query, key.roll(1, 2), value),
        lambda query, key, value: retention(query, key, value).tanh(),
    ):
        assert proven(wrong, query=q, key=k, value=v) is None


def test_linear_attention_to_all_tokens():
    q, k, v = torch.randn(3, 2, 3, 6, 4).unbind()
    operator = proven(attends_everywhere, query=q, key=k, value=v).operator
    torch.testing.assert_close(operator.matrix(), q @ k.mT / 6)
    assert not operator.is_causal


def test_a_state_transition_that_reads_and_writes():
    def rwkv(receptance, w, key, value, a, b):
        def state(S, t):
            read = (a[:, t, ..., None] * S).sum(-2, keepdim=True)
            return w[:, t, ..., None] * S + b[:, t, ..., None] * read

        return heads_of(state, receptance, key, value)

    r, k, v, a, b = torch.randn(5, 2, 7, 3, 4).unbind()
    a = F.normalize(a, dim=-1)
    given = dict(receptance=r, w=0.5 + 0.5 * torch.rand(2, 7, 3, 4), key=k, value=v, a=-a)
    assert proven(rwkv, **given, b=a * torch.rand(2, 7, 3, 1)).error < 1e-5
    assert proven(lambda receptance, w, key, value, a, b: value, **given, b=b) is None


def test_an_mlstm():
    def named(queries, keys, values, igate_preact, fgate_preact):
        return mlstm(queries, keys, values, igate_preact, fgate_preact)

    q, k, v = torch.randn(3, 2, 3, 7, 4).unbind()
    i, f = torch.randn(2, 2, 3, 7, 1).unbind()
    given = dict(queries=q, keys=k, values=v, igate_preact=i, fgate_preact=f)
    assert proven(named, **given).error < 1e-4

    def clipped(queries, keys, values, igate_preact, fgate_preact):
        return mlstm(queries, keys, values, igate_preact, fgate_preact).clamp(-0.1, 0.1)

    assert proven(clipped, **given) is None
