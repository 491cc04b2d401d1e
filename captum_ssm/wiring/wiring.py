"""How the mixers of a model hang together: steps, and how each reads the tokens of others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from captum_ssm.errors import UnsupportedModelError
from captum_ssm.graph.points import Point
from captum_ssm.graph.token_weights import TokenWeights
from captum_ssm.utils.lazy import cached_property
from captum_ssm.utils.progress import progress
from captum_ssm.wiring.inputs import InputMap

# The first of the model's inputs, among the steps that a step reads; the next ones are below it.
INPUT = -1


@dataclass(frozen=True)
class TokenMap:
    """Which earlier tokens each of some tokens is made of. By default of the one at its position.

    Args:
        source (Tensor, optional): ``(T,)``: the one earlier token, -1 for none. Default: None
        transport (TokenWeights, optional): in which shares. Default: None
        order (Tensor, optional): ``(S,)``: where the transport's earlier tokens are. Default: None
        count (int, optional): S, the number of earlier tokens, where it is not T. Default: 0
        share (Tensor, optional): ``(B, T)``: the part of each token that is made of these earlier
            ones, where it is made of several inputs. Default: None, all of it
    """

    source: Tensor | None = None
    transport: TokenWeights | None = None
    order: Tensor | None = None
    count: int = 0
    share: Tensor | None = None

    @property
    def is_identity(self) -> bool:
        """Whether each token is the one at its position, and nothing else."""
        return self.keeps_positions and self.share is None

    @property
    def keeps_positions(self) -> bool:
        """Whether each token is the one at its position, or a share of it is."""
        return self.source is None and self.transport is None

    def of(self, share: Tensor) -> TokenMap:
        """This map for a part of each token, ``(B, T)``."""
        return replace(self, share=share if self.share is None else share * self.share)

    def earlier(self, tokens: int) -> int:
        """S, the number of earlier tokens, of ``tokens`` ones that read them."""
        return self.count or tokens

    def is_read(self, root: Point) -> Tensor:
        """Whether earlier tokens are read by each token of ``root``: 0 or 1, ``(T,)`` or one."""
        if self.source is None:
            return torch.ones(1, device=root.device)
        return (self.source >= 0).to(root.device, torch.float64)

    def rmatvec(self, w: Tensor) -> Tensor:
        """Weights ``(B, T)`` as weights of the earlier tokens, ``(B, S)``."""
        if self.share is not None:
            w = w * self.share.to(w)
        if self.transport is not None:
            return self._in_order(self.transport.rmatvec(w))
        if self.source is None:
            return w
        kept = self.source >= 0
        out = w.new_zeros(w.shape[0], self.count)
        return out.index_add_(1, self.source[kept].to(w.device), w[:, kept])

    def matmul(self, matrix: Tensor) -> Tensor:
        """``(B, S, ...)``, one row per earlier token, as ``(B, T, ...)``."""
        rows = self._read(matrix)
        if self.share is None:
            return rows
        return rows * self.share.to(rows).view(*self.share.shape, *[1] * (rows.dim() - 2))

    def matvec(self, values: Tensor, probes: int) -> Tensor:
        """Means ``(B, T, k)`` of ``values (B, S, k)`` in [0, 1] of the earlier tokens.

        They are weighted as by the transport, measured in so many passes; zero for tokens that
        read none.
        """
        if self.transport is not None:
            values = values if self.order is None else values[:, self.order]
            return self.transport.matvec(values, probes)
        return self._read(values)

    def _read(self, matrix: Tensor) -> Tensor:
        if self.transport is not None:
            return self._in_order(self.transport.matrix()).to(matrix) @ matrix
        if self.source is None:
            return matrix
        source = self.source.to(matrix.device)
        return matrix[:, source.clamp(min=0)] * (source >= 0).to(matrix)[:, None]

    def _in_order(self, weights: Tensor) -> Tensor:
        if self.order is None:
            return weights
        return weights[..., torch.argsort(self.order).to(weights.device)]


# A step (or INPUT), and how its tokens are read.
Source = tuple[int, TokenMap]


@dataclass(frozen=True)
class Step:
    """One step through the model: a mixer, or several side by side that read the same tokens.

    Args:
        calls (tuple of int): the mixers' calls.
        reads (tuple of Source): the steps whose tokens its own are made of.
        tokens (int): T, their number.
        around (tuple of int, optional): how many steps before this one the residual streams leave
            that are added to what its mixers return: 0 where one goes around this step only, 1
            around this one and the one before, which are then in series in one branch. Empty where
            nothing is added. Default: (0,)
        is_given_stream (bool, optional): whether its mixers are given the residual stream itself,
            and not what a norm makes of it; None where that was not measured. Default: None
        is_aside (bool, optional): whether what it reads around the mixer before it is given to its
            own mixers alone, as the embeddings to Zamba's attention, and is no part of the residual
            stream. Default: False
    """

    calls: tuple[int, ...]
    reads: tuple[Source, ...]
    tokens: int
    around: tuple[int, ...] = (0,)
    is_given_stream: bool | None = None
    is_aside: bool = False

    @property
    def stream(self) -> tuple[Source, ...]:
        """The reads of which the residual stream before it is made."""
        return ((self.reads[0][0], TokenMap()),) if self.is_aside else self.reads


@dataclass(frozen=True)
class Wiring:
    """How the mixers of one run hang together.

    Args:
        steps (list of Step): in forward order.
        output (tuple of Source): the steps that the output is made of.
        orders (list of Tensor): by call, None or ``(W, l)``: token t of window w of the mixer's
            sequences is this one of its step's tokens.
        readout (list of Tensor): by read of the output, ``(B, T)``: the shares in which a pooled
            output reads the tokens, or None.
        neighbor_share (float, optional): the most read of others between mixers. Default: 0.0
        is_far (bool, optional): whether they read others than their neighbors so. Default: False
        refused (str, optional): why no map through the layers can be made. Default: None
        lacks_second (bool, optional): whether for lack of a second derivative. Default: False
        inputs (tuple of InputMap, optional): by input of the model, how its entries make up tokens.
            Default: (), where that was not measured
        unknown (str, optional): what multiplies tokens by others and is no mixer; empty where they
            are only added to others, after the last mixers. Default: None
        main (int, optional): how many of the reads of the output, the first ones, come through the
            last mixers; the others go around them. Default: 1
        unheld (str, optional): what goes around them, in words. Default: None
        rows (Tensor, optional): how far a shorter output is from the last tokens. Default: None
        unread (str, optional): the mixers on whose results nothing depends, by name. Default: None
        gates (str, optional): those whose results only multiply others, as a gate. Default: None
        joins_examples (bool, optional): whether examples act on one another. Default: False
        structure (frozenset, optional): what the graph between is made of. Default: frozenset()
    """

    steps: list[Step]
    output: tuple[Source, ...]
    orders: list[Tensor | None]
    readout: list[Tensor | None]
    neighbor_share: float = 0.0
    is_far: bool = False
    refused: str | None = None
    lacks_second: bool = False
    inputs: tuple[InputMap, ...] = ()
    unknown: str | None = None
    main: int = 1
    unheld: str | None = None
    rows: Tensor | None = None
    unread: str | None = None
    gates: str | None = None
    joins_examples: bool = False
    structure: frozenset[Any] = frozenset()

    @cached_property
    def step_of(self) -> dict[int, int]:
        """The step of each call."""
        return {call: i for i, step in enumerate(self.steps) for call in step.calls}

    @property
    def read(self) -> frozenset[int]:
        """The steps that the output is made of. What a model computes aside may be read nowhere."""
        steps, left = set[int](), [i for i, _ in self.output]
        while left:
            step = left.pop()
            if step >= 0 and step not in steps:
                steps.add(step)
                left += [i for i, _ in self.steps[step].reads]
        return frozenset(steps)

    @property
    def neighbor_percent(self) -> str:
        """The share that tokens read from one another, in percent; a small one is not none."""
        return f"{max(self.neighbor_share, 0.001):.1%}"

    @property
    def is_chain(self) -> bool:
        """Whether each step after the first reads the one before it, token by token."""
        reads = [*(step.stream for step in self.steps), self.output]
        return all(
            len(read) <= 1 and all(link.is_identity and s == i for s, link in read)
            for i, read in enumerate(reads[1:])
        )

    @property
    def needs_graph(self) -> bool:
        """Whether something is still to be measured on the graph of the run."""
        reads = [*(step.reads for step in self.steps), self.output]
        measured = any(link.transport is not None for read in reads for _, link in read)
        return measured or any(way.roots for way in self.inputs)

    @property
    def is_mixed(self) -> bool:
        """Whether a mixer that is not known may lie between the others."""
        return self.refused is not None or self.is_far or self.unknown is not None

    @property
    def is_simple(self) -> bool:
        """Whether all mixers work on the input's tokens in their order."""
        reads = [*(step.reads for step in self.steps), self.output]
        same = all(link.is_identity for read in reads for _, link in read)
        return same and all(order is None for order in self.orders)

    @property
    def can_be_lengthened(self) -> bool:
        """Whether inputs of another length have a wiring that this one tells: see `lengthened`."""
        return self.is_simple and all(read is None for read in self.readout)

    @property
    def grids(self) -> list[list[int]]:
        """The steps that work on the same tokens, one after the other."""
        grids: list[list[int]] = []
        for i, step in enumerate(self.steps):
            same = any(s == i - 1 and not link.count for s, link in step.reads)
            if grids and same and step.tokens == self.steps[i - 1].tokens:
                grids[-1].append(i)
            else:
                grids.append([i])
        return grids

    def said(self) -> Iterator[str]:
        """What maps through the layers do not show, or count all the same, for warnings."""
        if self.joins_examples:
            yield (
                "examples of the batch act on one another (as by a batch norm in training mode), "
                "and maps through the layers do not show it. Explain one example at a time."
            )
        if self.unread is not None:
            yield (
                f"the score does not depend on what {self.unread} returned (it is multiplied by "
                "zero, subtracted again, or read by a saturated activation), and rollouts of maps "
                "may count it all the same. MambaLRP accounts for it, and start_layer leaves out "
                "the first layers."
            )
        if self.gates is not None:
            yield (
                f"what {self.gates} returned is only a gate of what others hold: a coefficient, "
                "which rollouts of maps count all the same. MambaLRP accounts for it."
            )
        if self.neighbor_share:
            yield (
                f"between mixers tokens read up to {self.neighbor_percent} from one another by "
                "something that is not a mixer (a token shift, a convolution, a gate for all "
                "tokens), which the maps do not show. MambaLRP accounts for it."
            )

    def starting_at(self, step: int) -> Wiring:
        """This wiring without what is before a step, whose tokens are then the input's."""

        def kept(reads: tuple[Source, ...]) -> tuple[Source, ...]:
            return tuple(read for read in reads if read[0] >= step)

        steps = [
            replace(old, reads=kept(old.reads), is_aside=old.is_aside and kept(old.reads)[1:] != ())
            for old in self.steps
        ]
        return replace(self, steps=steps, output=kept(self.output))

    def lengthened(self, tokens: int) -> Wiring:
        """This wiring of inputs of another length, where it is simple and nothing is pooled."""
        return replace(
            self,
            steps=[replace(step, tokens=tokens) for step in self.steps],
            readout=[None] * len(self.readout),
            inputs=(),
        )

    def back(
        self,
        at_output: Sequence[Tensor],
        through: Callable[[int, Tensor], dict[int | None, Tensor]],
        *,
        to_inputs: bool = True,
    ) -> list[Tensor]:
        """Carry weights of tokens from the output back to the inputs.

        Args:
            at_output (sequence of Tensor): ``(B, T)`` for each read of the output.
            through (Callable): takes a step and weights of the tokens after it, returns those of
                the tokens that its mixers are given, under None, and of the residual stream before
                it and before earlier steps that one leaves at: by step.
            to_inputs (bool, optional): go on to the inputs, which may cost as much as all the
                rest. Default: True

        Returns:
            list of Tensor: ``(B, L)`` for each input, of its tokens; empty without ``to_inputs``.
        """
        # The weights of tokens after steps, and of the residual stream before them.
        at, before = defaultdict[int, list[Tensor]](list), defaultdict[int, list[Tensor]](list)
        for (last, _), w in zip(self.output, at_output, strict=True):
            at[last].append(w)
        for i in progress(range(len(self.steps) - 1, -1, -1), "layers"):
            step, aside = self.steps[i], list[Tensor]()
            carried = through(i, reduce(torch.add, at.pop(i))) if i in at else {}
            for leaving, w in carried.items():
                if leaving is None and step.is_aside:
                    aside.append(w)
                else:
                    before[i if leaving is None else leaving].append(w)
            for reads, some in ((step.reads, aside), (step.stream, before.pop(i, []))):
                for earlier, link in (reads or ((INPUT, TokenMap()),)) if some else ():
                    if to_inputs or earlier >= 0:
                        at[earlier].append(link.rmatvec(reduce(torch.add, some)))
        return self._at_inputs(at) if to_inputs else []

    def from_first(self, w: Tensor) -> list[Tensor]:
        """Weights ``(B, T)`` of the first step's tokens as those of each input's."""
        reads = self.steps[0].reads or ((INPUT, TokenMap()),)
        return self._at_inputs({i: [link.rmatvec(w)] for i, link in reads})

    def _at_inputs(self, at: Mapping[int, list[Tensor]]) -> list[Tensor]:
        if INPUT in at and len(at) == 1 and len(self.inputs) < 2:
            return [reduce(torch.add, at[INPUT])]
        (like, *_), *_ = at.values()
        none = [like.new_zeros(way.batch, way.leaf.tokens // way.batch) for way in self.inputs]
        return [reduce(torch.add, at.get(INPUT - k, []), zero) for k, zero in enumerate(none)]

    def forth(
        self, start: Tensor, through: Callable[[int, dict[int | None, Tensor]], Tensor]
    ) -> Tensor:
        """Carry a matrix from the input, ``(B, L, ...)``, to the output.

        ``through`` takes a step and the rows of the residual stream before it and all earlier ones,
        by step, and of what its mixers are given, under None, and returns those after it.

        Raises:
            UnsupportedModelError: if the output is read from several grids of tokens.
        """
        sizes = [self.steps[i].tokens for i, _ in self.output if i >= 0]
        if len(set(sizes)) > 1:
            raise UnsupportedModelError(
                f"the output is read from steps of {' and '.join(map(str, sizes))} tokens, so "
                "there is no one axis of output tokens; expected one. attribute() gives the row of "
                "the output, or of one entry of it with target=."
            )
        after, before = {INPUT: start}, dict[int | None, Tensor]()

        def read(reads: tuple[Source, ...]) -> Tensor:
            return reduce(torch.add, [link.matmul(after[earlier]) for earlier, link in reads])

        for i, step in enumerate(progress(self.steps, "layers")):
            before[i] = read(step.stream or ((INPUT, TokenMap()),))
            before[None] = read(step.reads) if step.is_aside else before[i]
            after[i] = through(i, before)
        return read(self.output)


def sequence(count: int, tokens: int) -> Wiring:
    """The wiring of mixers one after the other, each token at its position."""
    steps = [Step((i,), ((i - 1, TokenMap()),), tokens) for i in range(count)]
    return Wiring(steps, ((count - 1, TokenMap()),), [None] * count, [None])


def side_by_side(direct: dict[int, frozenset[int]]) -> list[list[int]]:
    """The steps: mixers that read the same, and are read by the same."""
    groups: dict[Any, list[int]] = {}
    for i in range(max(direct)):
        read_by = frozenset(j for j, read in direct.items() if i in read)
        groups.setdefault((direct[i], read_by), []).append(i)
    return sorted(groups.values())
