"""Tokens that a model fills from its other arguments: with images, with sound.

A model of text and images looks up an embedding for the placeholder of an image, and writes what it
made of the image in its place. Nothing of a placeholder's id is left there, and the image is not
among what is explained: the token begins with what was written.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from captum_ssm.capture.request import Request
from captum_ssm.graph.points import edge_of
from captum_ssm.utils.nested import tensors_in


def may_fill(request: Request) -> bool:
    """Whether a model may write other arguments into tokens: ids are explained, floats are not."""
    inputs, extra = request.inputs, (*request.positional, *request.named.values())
    has_floats = any(x.is_floating_point() and x.dim() > 1 for x in tensors_in(extra))
    return has_floats and len(inputs) == 1 and not inputs[0].is_floating_point()


class FilledTokens:
    """Which tokens a run fills.

    They are looked for once, in what the first module is given that reads all tokens: those that do
    not depend on the embeddings of their ids.

    Attributes:
        added (int): how many more tokens than ids an example has, which are made of no id.
    """

    def __init__(self) -> None:
        self.added = 0
        self._shape: tuple[int, ...] = ()
        self._embeddings: GradientEdge | None = None

    def embedded(self, embeddings: Tensor) -> None:
        """Look for tokens that are made of ``embeddings`` ``(B, L, E)``."""
        if embeddings.dim() == 3 and embeddings.requires_grad:
            # The tensor itself may be written into.
            self._shape, self._embeddings = embeddings.shape, edge_of(embeddings)

    def among(self, arguments: Any) -> tuple[Tensor, Tensor] | None:
        """The tokens ``(B, L, E)`` among what a module is given, and which are filled, ``(B, L)``.

        None where there are none, and after they were found.
        """
        embeddings = self._embeddings
        if embeddings is None:
            return None
        for tokens in tensors_in(arguments):
            is_filled = self._filled(tokens, embeddings) if self._may_be(tokens) else None
            if is_filled is not None:
                self._embeddings = None
                is_filled = is_filled & (tokens != 0).any(-1)  # others were erased, as by a mask
                if tokens.shape == self._shape:
                    return (tokens, is_filled) if bool(is_filled.any()) else None
                self.added = int(is_filled[0].sum())
        return None

    def warn_of_added(self) -> None:
        """Warn of tokens that have no position in a result of the shape of ids."""
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
