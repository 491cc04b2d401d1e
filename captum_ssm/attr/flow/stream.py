"""The residual stream around the blocks of a model, and the relevance of its tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from captum_ssm.attr.flow.activations import ActivationStandIns, BlockStream
from captum_ssm.graph.points import Point
from captum_ssm.graph.reachability import is_read_around, meetings
from captum_ssm.mixers import find_mixers
from captum_ssm.operators.composed import sum_of

KNOWN_STREAM = (
    "expected blocks in a ModuleList or Sequential, which take and return the tokens, or a norm "
    "that is given them."
)
UNKNOWN_STREAM = (
    f"the residual stream after the last mixer was not found in this model; {KNOWN_STREAM}"
)


@dataclass(frozen=True)
class Ways:
    """What reaches the input of a block by no edge of its mixers.

    Args:
        constant (Tensor): ``(B, L)``, what biases of norms and MLPs give, and what the block reads
            that are not its tokens, such as a condition.
        shifts (dict of int to Tensor): by offset o, ``(B, L)``, what token t is given by token
            t - o outside of the mixers' scans.
        shared (Tensor): ``(B, L)``, what the block reads of tensors that other blocks are given
            too, such as the embeddings once more.
        made_of (frozenset of int): the blocks whose ``before`` these tensors were made of.
    """

    constant: Tensor
    shifts: dict[int, Tensor]
    shared: Tensor
    made_of: frozenset[int]


@dataclass(frozen=True)
class BlockNodes:
    """The relevance of the residual stream's tokens, before and after a block.

    Args:
        mixers (range): which of the run's mixers are in it.
        before, after (Tensor): ``(B, L)``.
        index (int): which of the run's blocks it is.
        residual (Tensor, optional): ``(B, L)``, the part of ``after`` that passes by everything in
            the block; None where the block returns more than one tensor of tokens. Default: None
        ways (Ways, optional): what reaches ``before`` by no edge; None where nothing does.
            Default: None
    """

    mixers: range
    before: Tensor
    after: Tensor
    index: int
    residual: Tensor | None = None
    ways: Ways | None = None


def blocks_of(model: nn.Module) -> set[nn.Module]:
    """The blocks that hold a model's mixers.

    A block is the child of the innermost ``ModuleList`` or ``Sequential`` around a mixer.
    """
    modules = dict(model.named_modules())
    blocks: set[nn.Module] = set()
    for path, *_ in find_mixers(model):
        parts = path.split(".")
        for k in range(len(parts), 0, -1):
            if isinstance(modules.get(".".join(parts[: k - 1])), (nn.ModuleList, nn.Sequential)):
                blocks.add(modules[".".join(parts[:k])])
                break
    return blocks


def streams_of(stand_ins: ActivationStandIns, score: Tensor) -> tuple[list[BlockStream], bool]:
    """The residual stream around the mixers of a run: at the ends of its blocks.

    Where blocks are not modules, as where a loop over two lists says ``x = x + mixer(norm(x))``, it
    is what a norm was given and all ways from the inputs to the score pass.

    Returns:
        tuple: the blocks, and whether the score reads no token but in what the last one returns.
    """
    blocks = [stream for stream in stand_ins.streams if stream.mixers]
    later, earlier = Point.of(score, None), [Point.of(x) for x in stand_ins.starts()]
    after = [Point.of(x) for x in blocks[-1].after if x.requires_grad] if blocks else []
    if after and not any(is_read_around(later, point, *after) for point in earlier):
        return stand_ins.streams, True
    streams = _between_norms(stand_ins, earlier, later)
    # Where later layers read the outputs of several blocks at once, norms tell fewer points apart.
    return (streams, True) if len(streams) >= len(blocks) else (stand_ins.streams, False)


def _between_norms(
    stand_ins: ActivationStandIns, earlier: Sequence[Point], later: Point
) -> list[BlockStream]:
    # What a function of the model's own returned has a third entry in its edge.
    passed = {edge[:2] for edge in meetings([later], earlier)}
    if len(earlier) == 1:
        passed.add(earlier[0].edge[:2])
    stream = [(k, x) for k, x in stand_ins.normed if get_gradient_edge(x)[:2] in passed]
    mixers = len(stand_ins.made_of)
    # By the number of mixers that ran before, the stream that the next one is given; last the one
    # that is left after all.
    before = {k: x for k, x in stream if k < mixers}
    if 0 not in before:
        return []
    last = [x for k, x in stream if k == mixers][-1:]
    tensors = pairwise([*([x] for x in before.values()), last])
    numbers = pairwise([*before, mixers])
    return [
        BlockStream(entering, left, range(first, end))
        for (entering, left), (first, end) in zip(tensors, numbers, strict=True)
    ]


def nodes_of(
    streams: Sequence[BlockStream],
    coefficient: Callable[[Tensor], Tensor | None],
    device: torch.device,
) -> list[BlockNodes]:
    """The relevance of the tokens around each block, on a device, from coefficients of tensors."""

    def total(tensors: Sequence[Tensor]) -> Tensor | None:
        totals = (total_of(coefficient(x), x, device) for x in tensors)
        parts = [part for part in totals if part is not None]
        return sum_of(parts) if parts else None

    shared = shared_tensors(streams)
    nodes = []
    for index, stream in enumerate(streams):
        unshared = [x for x in stream.before if id(x) not in shared]
        before, after = total(unshared), total(stream.after)
        if before is None or after is None:
            continue
        residual = None
        if len(unshared) == len(stream.after) == 1:
            residual = total_of(coefficient(stream.after[0]), unshared[0], device)
        nodes.append(BlockNodes(stream.mixers, before, after, index, residual))
    return nodes


def shared_tensors(streams: Sequence[BlockStream]) -> set[int]:
    """The identities of tensors that several blocks are given: they are not the stream."""
    uses = Counter(id(x) for stream in streams for x in stream.before)
    return {x for x, count in uses.items() if count > 1}


def total_of(coefficient: Tensor | None, x: Tensor, device: torch.device) -> Tensor | None:
    """The relevance ``(B, L)`` of the tokens of ``x (B, L, ...)``, from its coefficients."""
    if coefficient is None or coefficient.shape != x.shape:
        return None
    coefficient = coefficient.detach().to(x.device, torch.float32)
    return (coefficient * x.detach().float()).flatten(2).sum(-1).to(device)
