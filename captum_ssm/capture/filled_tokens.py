"""Tokens that a model fills from its other arguments: with images, with sound.

A model of text and images looks up an embedding for the placeholder of an image, and writes what it
made of the image in its place. Nothing of a placeholder's id is left there, and the image is not
among what is explained: the token begins with what was written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from captum_ssm.capture.request import Request
from captum_ssm.utils.nested import map_tensors, tensors_in

# Takes which tokens are filled, (B, L), and all tokens, (B, L, E); returns these as the model is to
# go on with them where they are filled.
Start = Callable[[Tensor, Tensor], Tensor]


def may_fill(request: Request) -> bool:
    """Whether a model may write other arguments into tokens: ids are explained, and floats are not.

    Args:
        request (Request): what is run.
    """
    inputs, extra = request.inputs, (*request.positional, *request.named.values())
    has_floats = any(x.is_floating_point() and x.dim() > 1 for x in tensors_in(extra))
    return has_floats and len(inputs) == 1 and not inputs[0].is_floating_point()


class FilledTokens:
    """Where a run fills tokens, they begin anew.

    The tokens are looked for once, in what the first module is given that reads all of them: those
    that do not depend on the embeddings of their ids.

    Args:
        start (Callable): begins them.
    """

    def __init__(self, start: Start) -> None:
        self.start = start
        self._shape: tuple[int, ...] = ()
        self._embeddings: GradientEdge | None = None

    def embedded(self, embeddings: Tensor) -> None:
        """Look for tokens that are made of ``embeddings`` ``(B, L, E)``."""
        if embeddings.dim() == 3 and embeddings.requires_grad:
            # The tensor itself may be written into.
            self._shape, self._embeddings = embeddings.shape, get_gradient_edge(embeddings)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What a module is to be given, where that is the tokens."""
        if self._embeddings is None:
            return None
        for tokens in tensors_in((args, kwargs)):
            if tokens.shape == self._shape and tokens.requires_grad:
                is_filled = self._filled(tokens)
                if is_filled is not None:
                    self._embeddings = None
                    return self._begun(tokens, is_filled, (args, kwargs))
        return None

    def _filled(self, tokens: Tensor) -> Tensor | None:
        # Which tokens do not depend on their embeddings, (B, L); None if none of them does. A norm
        # of equal gradients would be zero.
        assert self._embeddings is not None
        generator = torch.Generator().manual_seed(0)
        weights = torch.rand(tokens.shape, generator=generator).to(tokens)
        (gradient,) = torch.autograd.grad(
            tokens, self._embeddings, weights, retain_graph=True, allow_unused=True
        )
        return None if gradient is None else (gradient == 0).all(-1)

    def _begun(self, tokens: Tensor, is_filled: Tensor, given: Any) -> Any:
        if not bool(is_filled.any()):
            return None
        with torch.enable_grad():
            started = self.start(is_filled, tokens.detach())
            begun = torch.where(is_filled[..., None], started, tokens)
        return map_tensors(lambda x: begun if x is tokens else x, given)
