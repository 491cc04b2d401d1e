"""Relevance propagation through an autograd graph, by the rules of :mod:`captum_ssm._rules`."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_ssm._capture.recording import gradient_at, require_graph
from captum_ssm._rules import ruled


def relevance_at(leaf: Tensor, score: Tensor) -> Tensor:
    """Relevance of the entries of ``leaf`` for ``score`` (summed over the batch), in its shape.

    The graph can be used once.

    Raises:
        ValueError: if no relevance can be propagated to ``leaf``.
    """
    require_graph(score)
    with torch.inference_mode(False), torch.enable_grad():
        start = torch.autograd.graph.get_gradient_edge(leaf).node
        with ruled([score.grad_fn], [start]) as carries:
            connected = carries[score.grad_fn]
            if connected:
                gradient = gradient_at(leaf, score)
        if not connected:
            gradient_at(leaf, score)  # raises if there is no gradient either
            raise ValueError(
                "the score depends on the tokens only through a sigmoid, a softmax or an "
                "exponential, which are constants in MambaLRP; expected logits. Let forward_func "
                "return the logits rather than probabilities."
            )
    working = torch.promote_types(leaf.dtype, torch.float32)
    return leaf.detach().to(working) * gradient.to(working)
