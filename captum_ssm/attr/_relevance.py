"""Relevance propagation through an autograd graph, by the rules of :mod:`captum_ssm._rules`."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from captum_ssm._capture.recording import gradients_at, require_graph
from captum_ssm._rules import ruled, without_rule


def relevance_at(leaves: Sequence[Tensor], score: Tensor) -> list[Tensor]:
    """Relevance of the entries of each leaf for ``score`` (summed over the batch), in its shape.

    The leaf times its coefficients; zero where the score does not depend on it. The graph can be
    used once.

    Raises:
        ValueError: if no relevance can be propagated to any of the leaves.
    """
    return times(leaves, coefficients_at(leaves, score))


def times(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Each leaf times its gradient, in float32 at least; zero for None."""
    return [_product(leaf.detach(), g) for leaf, g in zip(leaves, gradients, strict=True)]


def coefficients_at(leaves: Sequence[Tensor], score: Tensor) -> list[Tensor | None]:
    """The gradients of ``score`` (summed over the batch) at leaves, by the rules of relevance.

    None at a leaf that the score does not depend on. The graph can be used once.

    Raises:
        ValueError: if no relevance can be propagated to any of the leaves.
    """
    require_graph(score)
    with torch.inference_mode(False), torch.enable_grad():
        starts = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves]
        with ruled([score.grad_fn], starts) as carries:
            connected = carries[score.grad_fn]
            unknown = without_rule(carries)
            if connected:
                found = gradients_at(leaves, score)
        if not connected:
            gradients_at(leaves, score)  # raises if there is no gradient either
            raise of_constants()
    warn_of_unruled(unknown)
    return found


def warn_of_unruled(functions: Collection[str]) -> None:
    """Warn of functions that relevance goes through by their plain gradient, if there are any."""
    if functions:
        warnings.warn(
            f"relevance goes through {', '.join(functions)}, which has no rule: its plain gradient "
            "is kept, so relevance may not add up to the score. The convergence delta says by how "
            "much. Explain a logit, or write the function in operations of PyTorch that have one.",
            UserWarning,
            stacklevel=2,
        )


def of_constants() -> ValueError:
    """The error for a score that nothing but constant coefficients lead to."""
    return ValueError(
        "the score depends on the tokens only through a sigmoid, a softmax or an exponential, "
        "which are constants in LaTIM and MambaLRP; expected logits. Let forward_func return the "
        "logits rather than probabilities."
    )


def _product(x: Tensor, gradient: Tensor | None) -> Tensor:
    working = torch.promote_types(x.dtype, torch.float32)
    x = x.to(working)
    return torch.zeros_like(x) if gradient is None else x * gradient.to(working)
