"""Tokens that a model fills from its other arguments: with images, with sound.

A model of text and images looks up an embedding for the placeholder of an image, and writes what it
made of the image in its place. Nothing of a placeholder's id is left there, and the image is not
among what is explained: the token begins with what was written.
"""

from __future__ import annotations

import warnings
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

    Attributes:
        added (int): how many tokens of an example stand beside those of ids, and are made of none.
    """

    def __init__(self, start: Start) -> None:
        self.start = start
        self.added = 0
        self._shape: tuple[int, ...] = ()
        self._embeddings: GradientEdge | None = None

    def embedded(self, embeddings: Tensor) -> None:
        """Look for tokens that are made of ``embeddings`` ``(B, L, E)``."""
        if embeddings.dim() == 3 and embeddings.requires_grad:
            # The tensor itself may be written into.
            self._shape, self._embeddings = embeddings.shape, get_gradient_edge(embeddings)

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What a module is to be given, where that is the tokens."""
        embeddings = self._embeddings
        if embeddings is None:
            return None
        for tokens in tensors_in((args, kwargs)):
            is_filled = self._filled(tokens, embeddings) if self._may_be(tokens) else None
            if is_filled is not None:
                self._embeddings = None
                if tokens.shape == self._shape:
                    return self._begun(tokens, is_filled, (args, kwargs))
                self.added = int(is_filled[0].sum())
        return None

    def warn_of_added(self) -> None:
        """Warn of tokens that have no place in a result of the shape of ids."""
        if self.added:
            warnings.warn(
                f"{self.added} tokens that the model reads are made of no id of inputs, and the "
                "result does not show them. If the model makes them of additional_forward_args (an "
                "image, sound), give these among inputs to explain them too: (ids, image).",
                stacklevel=2,
            )

    def _may_be(self, tokens: Tensor) -> bool:
        B, L, E = self._shape
        is_row = tokens.dim() == 3 and tokens.shape[0] == B and tokens.shape[2] == E
        return is_row and tokens.shape[1] >= L and tokens.requires_grad

    def _filled(self, tokens: Tensor, embeddings: GradientEdge) -> Tensor | None:
        # Which tokens do not depend on embeddings of ids, (B, T); None if none of them does. The
        # product of the Jacobian with a random direction is the derivative of that from the left.
        generator = torch.Generator().manual_seed(0)
        shapes = tokens.shape, self._shape
        left, right = (torch.rand(shape, generator=generator).to(tokens) for shape in shapes)
        left.requires_grad_()
        try:
            with torch.enable_grad():
                (back,) = torch.autograd.grad(
                    tokens, embeddings, left, create_graph=True, allow_unused=True
                )
                if back is None:
                    return None
                (along,) = torch.autograd.grad(back, left, right)
        except RuntimeError:  # a function on the way that is differentiable only once
            return None
        return (along == 0).all(-1)

    def _begun(self, tokens: Tensor, is_filled: Tensor, given: Any) -> Any:
        if not bool(is_filled.any()):
            return None
        with torch.enable_grad():
            started = self.start(is_filled, tokens.detach())
            begun = torch.where(is_filled[..., None], started, tokens)
        return map_tensors(lambda x: begun if x is tokens else x, given)
