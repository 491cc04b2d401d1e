"""The residual stream around the blocks of a model, and the relevance of its tokens."""

from __future__ import annotations

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
        name (str): the block's path.
        before, after (Tensor): ``(B, L)``.
    """

    name: str
    before: Tensor
    after: Tensor


def blocks_of(model: nn.Module) -> dict[nn.Module, str]:
    """The blocks that hold a model's mixers, in their order, with their paths.

    A block is the child of the innermost ``ModuleList`` or ``Sequential`` around a mixer.
    """
    named = dict(model.named_modules())
    found: dict[nn.Module, str] = {}
    for path, *_ in find_mixers(model):
        parts = path.split(".")
        for k in range(len(parts), 0, -1):
            if isinstance(named.get(".".join(parts[: k - 1])), (nn.ModuleList, nn.Sequential)):
                block = ".".join(parts[:k])
                found[named[block]] = block
                break
    return found


def nodes_of(
    streams: dict[str, BlockStream], coefficient: Callable[[Tensor], Tensor | None]
) -> dict[str, BlockNodes]:
    """The relevance of the tokens around each block, from the coefficients of tensors."""

    def total(tensors: Sequence[Tensor]) -> Tensor | None:
        parts = []
        for x in tensors:
            g = coefficient(x)
            if g is not None:
                parts.append((g.detach().float() * x.detach().float()).flatten(2).sum(-1))
        return sum_of(parts) if parts else None

    found = {}
    for path, stream in streams.items():
        before, after = total(stream.before), total(stream.after)
        if before is not None and after is not None:
            found[path] = BlockNodes(path, before, after)
    return found
