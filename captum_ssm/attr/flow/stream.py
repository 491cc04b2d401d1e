"""The residual stream around the blocks of a model, and the relevance of its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from captum_ssm.attr.flow.activations import BlockStream
from captum_ssm.mixers import find_mixers
from captum_ssm.operators.composed import sum_of


@dataclass(frozen=True)
class BlockNodes:
    """The relevance of the residual stream's tokens, before and after a block.

    Args:
        mixers (range): which of the run's mixers are in it.
        before, after (Tensor): ``(B, L)``.
        residual (Tensor, optional): ``(B, L)``, the part of ``after`` that passes by everything in
            the block; None where the block returns more than one tensor of tokens.
        shifts (tuple of Tensor, optional): ``(B, L)`` twice: what the token before gives to each
            token by a token shift, on the way into the block's mixer and after it; None where
            nothing does.
    """

    mixers: range
    before: Tensor
    after: Tensor
    residual: Tensor | None = None
    shifts: tuple[Tensor, Tensor] | None = None


def blocks_of(model: nn.Module) -> set[nn.Module]:
    """The blocks that hold a model's mixers.

    A block is the child of the innermost ``ModuleList`` or ``Sequential`` around a mixer.
    """
    named = dict(model.named_modules())
    found: set[nn.Module] = set()
    for path, *_ in find_mixers(model):
        parts = path.split(".")
        for k in range(len(parts), 0, -1):
            if isinstance(named.get(".".join(parts[: k - 1])), (nn.ModuleList, nn.Sequential)):
                found.add(named[".".join(parts[:k])])
                break
    return found


def nodes_of(
    streams: Sequence[BlockStream], coefficient: Callable[[Tensor], Tensor | None]
) -> list[BlockNodes]:
    """The relevance of the tokens around each block, from the coefficients of tensors."""

    def total(tensors: Sequence[Tensor]) -> Tensor | None:
        parts = [part for x in tensors if (part := total_of(coefficient(x), x)) is not None]
        return sum_of(parts) if parts else None

    # What several blocks are given, such as the embeddings once more, is not the stream.
    uses = Counter(id(x) for stream in streams for x in stream.before)
    found = []
    for stream in streams:
        given = [x for x in stream.before if uses[id(x)] == 1]
        before, after = total(given), total(stream.after)
        if before is None or after is None:
            continue
        residual = None
        if len(given) == len(stream.after) == 1:
            residual = total_of(coefficient(stream.after[0]), given[0])
        found.append(BlockNodes(stream.mixers, before, after, residual))
    return found


def total_of(coefficient: Tensor | None, x: Tensor) -> Tensor | None:
    """The relevance ``(B, L)`` of the tokens of ``x (B, L, ...)``, from its coefficients."""
    if coefficient is None or coefficient.shape != x.shape:
        return None
    return (coefficient.detach().float() * x.detach().float()).flatten(2).sum(-1)
