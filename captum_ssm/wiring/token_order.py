"""The orders in which mixers are given the model's tokens."""

from __future__ import annotations

import torch
from torch import Tensor


class Orders(dict[int, "Tensor | None"]):
    """By mixer, ``(T,)``: which of the model's tokens, over the whole batch, is its token t.

    None is the model's own order. A mixer that is missing has not been looked at yet.

    Args:
        batch (int): B.
    """

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch = batch

    def chosen(self, mixer: int, tokens: Tensor) -> Tensor:
        """Some of the model's tokens, ``(T,)`` bool, as those of a mixer."""
        order = self.get(mixer)
        return tokens if order is None else tokens[order]

    def put(self, mixer: int, other: int, same: Tensor) -> None:
        """Say that token t of a mixer is token ``same[t]`` of another."""
        order = self.get(other)
        tokens = same if order is None else order[same]
        self[mixer] = None if torch.equal(tokens, torch.arange(len(tokens))) else tokens

    def of_example(self, source: Tensor, count: int, earlier: int) -> Tensor | None:
        """Indices ``(B T,)`` of all examples' tokens as those of one of S, if all examples agree.

        Without a token the index is -1. T is the ``count``, S is ``earlier``.
        """
        if source.numel() != self.batch * count:  # of a batch of texts of their own lengths
            return None
        parts = source.view(self.batch, count)
        parts = torch.where(parts >= 0, parts - earlier * torch.arange(self.batch)[:, None], -1)
        inside = (parts >= -1) & (parts < earlier) & (parts == parts[:1])
        return parts[0] if bool(inside.all()) else None
