"""The graph of our own that stands in for slow scans has the model's gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from families import build, modeling_of
from unchanged import assert_unchanged, fingerprint

from captum_ssm import MambaAttribution, MambaLRP, MambaRollout, ReconstructionError
from captum_ssm.attr.latim_parts.residual_stream import norms_and_head, stream_of
from captum_ssm.attr.relevance_stand_ins import RelevanceStandIns, with_leaves
from captum_ssm.capture import FrozenStandIns, Request, freeze
from captum_ssm.capture import record as record_module
from captum_ssm.capture.record import record
from captum_ssm.capture.substitute import KEPT
from captum_ssm.capture.target import read_score
from captum_ssm.kernels.convolution import causal_conv, causal_conv_transpose
from captum_ssm.mixers import FrozenMixer, MixerCall, find_adapter, find_mixers, registry
from captum_ssm.mixers.linear_calls import LinearCalls


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba", "zamba", "recurrent_gemma"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kept", [KEPT, 0])
def test_gradients_are_the_models_own(
    family: str, frozen: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("captum_ssm.capture.substitute.KEPT", kept)
    model = build(family).requires_grad_(not frozen)
    ids = torch.randint(1, 30, (2, 13), generator=torch.Generator().manual_seed(0))
    request = Request.of(model, None, ids)
    # Nothing takes the place of the model's own graph.
    own = record(request, score=lambda run: read_score(run, 5, None))
    score = own.score
    assert score is not None
    own = own.with_gradients(score)
    for check in (True, False):
        quick = freeze(request, target=5, gradients=True, check=check)
        torch.testing.assert_close(quick.score, score.detach())
        for layer, call in zip(quick.layers, own.calls, strict=True):
            assert layer.call.gradient is not None
            torch.testing.assert_close(layer.call.gradient, call.gradient, rtol=1e-4, atol=1e-6)


def test_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mamba")
    modeling = modeling_of(model, "mamba_selective_scan")
    ids = torch.randint(1, 30, (1, 9), generator=torch.Generator().manual_seed(0))
    expected = MambaAttribution(model).attribute(ids, target=5)
    scan = modeling.mamba_selective_scan

    def without_graph(*args: object, **kwargs: object) -> torch.Tensor:
        with torch.no_grad():
            return scan(*args, **kwargs)

    monkeypatch.setattr(modeling, "mamba_selective_scan", without_graph)
    torch.testing.assert_close(MambaAttribution(model).attribute(ids, target=5), expected)


def test_a_graph_made_in_the_backward_pass_has_the_same_relevance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = torch.randint(1, 30, (2, 13), generator=torch.Generator().manual_seed(0))
    for family in ("mamba", "mamba2", "jamba", "qwen3_next", "xlstm"):
        model = build(family)
        found = []
        for kept in (KEPT, 0):
            monkeypatch.setattr("captum_ssm.capture.substitute.KEPT", kept)
            methods = (MambaLRP(model), MambaAttribution(model))
            found.append([method.attribute(ids, target=5) for method in methods])
        for expected, other in zip(*found, strict=True):
            torch.testing.assert_close(other, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", [MambaLRP, MambaAttribution])
def test_an_interrupt_in_the_backward_pass_leaves_no_trace(
    method: type[MambaLRP] | type[MambaAttribution], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("mamba")
    ids = torch.randint(1, 30, (1, 9), generator=torch.Generator().manual_seed(0))
    expected = method(model).attribute(ids, target=5)
    monkeypatch.setattr("captum_ssm.capture.substitute.KEPT", 0)
    before = fingerprint(model)

    def interrupt(self: FrozenStandIns) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(FrozenStandIns, "_count", interrupt)
        with pytest.raises(KeyboardInterrupt):
            method(model).attribute(ids, target=5)
    assert_unchanged(model, before)
    torch.testing.assert_close(method(model).attribute(ids, target=5), expected)


def test_what_nothing_needs_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each mixer runs once, and from its second layer on without a graph; no scan's backward pass
    # runs while the wiring is measured.
    model = build("mamba")
    ids = torch.randint(1, 30, (1, 9), generator=torch.Generator().manual_seed(0))
    graphs: list[bool] = []
    MambaAttribution(model).attribute(ids, target=5)  # the first look at a model runs it more often
    mixer = type(model.backbone.layers[0].mixer)
    own = mixer.forward

    def forward(self: torch.nn.Module, *args: object, **kwargs: object) -> torch.Tensor:
        found = own(self, *args, **kwargs)
        graphs.append(found.requires_grad)
        return found

    monkeypatch.setattr(mixer, "forward", forward)
    MambaAttribution(model).attribute(ids, target=5)
    assert graphs == [True, *[False] * (len(model.backbone.layers) - 1)]
    graphs.clear()
    MambaLRP(model).attribute(ids, target=5)
    assert graphs == [False] * len(model.backbone.layers)


@pytest.mark.parametrize("family", ["mamba", "jamba"])
@pytest.mark.parametrize("tokens", [13, 300])
def test_a_direction_is_read_without_a_graph_of_the_mixers(family: str, tokens: int) -> None:
    # More than 256 tokens: what lies between the mixers is measured on some of them.
    model = build(family)
    ids = torch.randint(1, 30, (1, tokens), generator=torch.Generator().manual_seed(0))
    request, also = Request.of(model, None, ids), norms_and_head(model)
    modes: list[bool] = []
    options = {"target": 5, "gradients": True, "through_mixers": False, "also": also}
    freeze(request, **options)  # the first look at a model runs it more often
    for _, mixer in find_mixers(model):
        for layer in mixer.children():
            layer.register_forward_hook(lambda *_: modes.append(torch.is_grad_enabled()))
    whole = freeze(request, target=5, gradients=True, also=also)
    modes.clear()
    quick = freeze(request, target=5, gradients=True, through_mixers=False, also=also)
    assert modes
    assert not any(modes)
    torch.testing.assert_close(quick.score, whole.score)
    expected, found = stream_of(whole), stream_of(quick)
    torch.testing.assert_close(found.score, expected.score)
    assert list(found.steps) == list(expected.steps)
    for i, step in found.steps.items():
        torch.testing.assert_close(step.direction, expected.steps[i].direction)
        torch.testing.assert_close(step.before, expected.steps[i].before)
        torch.testing.assert_close(step.local, expected.steps[i].local)


def test_the_outer_projections_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mamba")
    ids = torch.randint(1, 30, (1, 9), generator=torch.Generator().manual_seed(0))
    used: list[bool] = []
    find = LinearCalls.find

    def counted(self: LinearCalls, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        found = find(self, weight, x)
        used.append(found is not None)
        return found

    monkeypatch.setattr(LinearCalls, "find", counted)
    frozen = freeze(Request.of(model, None, ids))
    row = MambaRollout(model).attribute(ids)
    assert sum(used) == 2 * len(frozen.layers)
    # A frozen layer lets go of them; beyond the budget there are none.
    used.clear()
    for layer in (*frozen.layers, *frozen.layers):
        assert layer.mixer is not None
    assert sum(used) == 2 * len(frozen.layers)
    monkeypatch.setattr("captum_ssm.capture.reuse.KEPT", 0)
    used.clear()
    torch.testing.assert_close(MambaRollout(model).attribute(ids), row)
    assert not any(used)


@pytest.mark.parametrize("method", [MambaRollout, MambaAttribution, MambaLRP])
@pytest.mark.parametrize("part", ["out_proj", "gate"])
def test_what_is_wrong_next_to_a_known_projection_is_caught(
    part: str, method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("mamba")
    freeze_it = find_adapter(model.backbone.layers[0].mixer)

    def wrong(call: MixerCall) -> FrozenMixer:
        mixer = freeze_it(call)
        if part == "gate":
            return replace(mixer, gate=1.001 * mixer.gate)
        return replace(mixer, out_proj=lambda y: 1.001 * mixer.out_proj(y))

    # It counts as this library's own, so that gradients replace the model's mixers by it.
    wrong.__module__ = freeze_it.__module__
    monkeypatch.setitem(registry._REGISTRY, "MambaMixer", wrong)
    tokens = torch.randint(1, 30, (1, 40), generator=torch.Generator().manual_seed(0))
    with pytest.raises(ReconstructionError, match="relative error"):
        method(model).attribute(tokens, target=3)


def test_relevance_measures_the_wiring_of_a_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    own = record_module.measure

    def counted(cuts: Any, output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        measured.append(output.shape[1])
        return own(cuts, output, *args, **kwargs)

    monkeypatch.setattr(record_module, "measure", counted)
    model = build("mamba")
    for length in (3, 3, 40, 50, 9):
        MambaLRP(model).attribute(torch.ones(1, length, dtype=torch.long), target=3)
    assert measured == [3]
    # Not where the graph is made of something else, as a function that runs the model may have it.
    ids = torch.ones(1, 40, dtype=torch.long)
    MambaLRP(lambda ids: model(ids).logits.tanh(), model=model).attribute(ids, target=3)
    assert measured == [3, 40]


@pytest.mark.parametrize("function", [causal_conv, causal_conv_transpose])
@pytest.mark.parametrize("length", [1, 3, 6])
def test_a_convolution_of_few_taps_has_gradients(function: Any, length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, taps, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, length, 2), (2, 4), (2,))
    )
    given = (x, taps, bias) if function is causal_conv else (x, taps)
    assert torch.autograd.gradcheck(function, given)
    assert torch.autograd.gradgradcheck(function, given)
    y = causal_conv(x, taps)
    there, back = (y * y.detach()).sum(), (causal_conv_transpose(y.detach(), taps) * x).sum()
    torch.testing.assert_close(there, back)
    expected = torch.nn.functional.conv1d(
        torch.nn.functional.pad(x.mT, (3, 0)), taps[:, None], bias, groups=2
    )
    torch.testing.assert_close(causal_conv(x, taps, bias), expected.mT)


def test_relevance_keeps_the_form_only_of_what_mixers_returned() -> None:
    model, ids = build("mamba"), torch.ones(1, 9, dtype=torch.long)
    request = with_leaves(Request.of(model, None, ids))
    rules = RelevanceStandIns(request)
    frozen = freeze(request, target=3, substitution=rules, query=False)
    for layer in frozen.layers:
        assert layer.call.output.shape == (1, 9, model.config.hidden_size)
        assert layer.call.output.untyped_storage().nbytes() == layer.call.dtype.itemsize
