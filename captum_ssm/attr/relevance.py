"""Relevance propagation through an autograd graph, by :mod:`captum_ssm.graph.relevance_rules`."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from captum_ssm.capture.recording import gradients_at, require_graph
from captum_ssm.graph.relevance_rules import added_coefficients, ruled, stopped, without_rule


def times(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor]:
    """Relevance: each leaf times its gradient, in float32 at least; zero for None."""
    return [_product(leaf.detach(), g) for leaf, g in zip(leaves, gradients, strict=True)]


def coefficients_at(
    leaves: Sequence[Tensor],
    score: Tensor,
    starts: Sequence[Tensor] | None = None,
    *,
    retain_graph: bool = False,
) -> list[Tensor | None]:
    """The gradients of ``score`` (summed over the batch) at leaves, by the rules of relevance.

    None at a leaf that the score does not depend on. The graph can be used once, unless it is
    retained. It begins at ``starts``, or at the leaves themselves.

    Raises:
        ValueError: if no relevance can be propagated to any of the leaves.
    """
    require_graph(score)
    with torch.inference_mode(False), torch.enable_grad():
        first = leaves if starts is None else starts
        nodes = [torch.autograd.graph.get_gradient_edge(start).node for start in first]
        with ruled([score.grad_fn], nodes) as carries:
            connected = carries[score.grad_fn]
            unknown, added, share = without_rule(carries), added_coefficients(carries), None
            if connected:
                gradients = gradients_at(leaves, score, retain_graph=retain_graph or bool(unknown))
            if connected and unknown:
                with stopped(carries):
                    rest = torch.autograd.grad(
                        score.sum(), list(leaves), allow_unused=True, retain_graph=retain_graph
                    )
                share = _share(times(leaves, gradients), times(leaves, rest))
        if not connected:
            gradients_at(leaves, score)  # raises if there is no gradient either
            raise of_constants()
    warn_of_unruled(unknown, share)
    warn_of_added(added)
    return gradients


def warn_of_unruled(functions: Collection[str], share: float | None = None) -> None:
    """Warn of functions that a share of the relevance goes through by their plain gradient."""
    if functions:
        part = "" if share is None else f" for {share:.0%} of the relevance"
        warnings.warn(
            f"relevance goes through {', '.join(functions)}, which has no rule: its plain gradient "
            f"is kept{part}, so relevance may not add up to the score. The convergence delta says "
            "by how much. Explain a logit, or write the function in operations of PyTorch that "
            "have one.",
            UserWarning,
            stacklevel=2,
        )


def warn_of_added(coefficients: Collection[str]) -> None:
    """Warn of coefficients that are added to, or joined with, what relevance goes through."""
    if coefficients:
        warnings.warn(
            f"the model adds the result of {', '.join(coefficients)} to what relevance goes "
            "through, or joins them; expected to be a factor, as in a gate. It counts as a "
            "constant, so its share of the score is missing from the relevance. The convergence "
            "delta says how much.",
            UserWarning,
            stacklevel=2,
        )


def _share(whole: Sequence[Tensor], rest: Sequence[Tensor]) -> float:
    # The size of the relevance that goes through a part, as a share of it and the rest's.
    through_rules = sum(float(part.abs().sum()) for part in rest)
    lost = sum(
        float((part - remaining).abs().sum()) for part, remaining in zip(whole, rest, strict=True)
    )
    return lost / (lost + through_rules) if lost else 0.0


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
