"""What proves a scan, and relevance that adds up."""

from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm import LaTIM, MambaLRP
from captum_ssm.discovery.scans import FunctionCall, Scan, prove


def proven(function: Any, **arguments: Any) -> Scan | None:
    """The scan that a function of these arguments computes, if a form is found for it."""
    return prove(FunctionCall(function, (), arguments, function), function(**arguments))


def assert_adds_up(model: nn.Module, tokens: Tensor) -> None:
    """Relevance of a model without bias terms leaves nothing of the logit out."""
    for method, options in ((MambaLRP, {}), (LaTIM, {"activation": "gate"})):
        relevance, delta = method(model).attribute(
            tokens, target=3, return_convergence_delta=True, **options
        )
        assert float(delta.abs().max()) < 1e-5
        assert float(relevance.abs().max()) > 1e-3


def assert_sums_to_logits(model: nn.Module, tokens: Tensor, **options: Any) -> None:
    """LaTIM's relevance for two tokens adds up to their logits, in a model without bias terms."""
    target = torch.tensor([3, 7])
    relevance, delta = LaTIM(model).attribute(
        tokens, target=target, return_convergence_delta=True, **options
    )
    with torch.no_grad():
        logit = model(tokens).logits[torch.arange(2), -1, target]
    assert float(delta.abs().max()) < 1e-5 * max(1.0, float(logit.abs().max()))
    torch.testing.assert_close(relevance.sum(1), logit, rtol=1e-4, atol=1e-5)
