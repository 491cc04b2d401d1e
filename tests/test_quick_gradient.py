"""The graph of our own that stands in for slow scans has the model's gradients."""

from __future__ import annotations

import pytest
import torch
from families import build, modeling_of

from captum_ssm import MambaAttribution
from captum_ssm._capture import Request, freeze
from captum_ssm._capture.recording import record
from captum_ssm._capture.substitution import KEPT
from captum_ssm._capture.target import read_score


@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba", "zamba", "recurrent_gemma"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kept", [KEPT, 0])
def test_gradients_are_the_models_own(
    family: str, frozen: bool, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("captum_ssm._capture.substitution.KEPT", kept)
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
