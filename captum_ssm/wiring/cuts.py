"""Where a run of a model is cut: at its inputs, and where its mixers are entered and left.

While the model runs its mixers are cut off: what a mixer returns starts a new graph. The graph that
is left is everything else: embeddings, norms, MLPs, heads, permutations, the merging of patches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from captum_ssm.graph.points import Point
from captum_ssm.graph.reachability import dependencies
from captum_ssm.utils.blocks import contextmanager


class _Exit(torch.autograd.Function):
    # The identity. While the wiring is measured no gradient goes from here into the mixer.
    @staticmethod
    def forward(ctx: Any, y: Tensor, cuts: RunCuts) -> Tensor:
        ctx.cuts = cuts
        ctx.set_materialize_grads(False)
        return y.clone()  # a model may write into it

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        return None if ctx.cuts._measuring else gradient, None


@dataclass(frozen=True)
class MixerCut:
    """One call of a mixer in the graph.

    Args:
        name (str): the module's path.
        entry (Point, optional): its tokens as they were given; None where they depend on nothing
            that was recorded.
        exit (Point): its tokens as they were returned.
    """

    name: str
    entry: Point | None
    exit: Point


@dataclass(frozen=True)
class InputCut:
    """One of the model's inputs in the graph.

    Args:
        point (Point): the input, or the embeddings of its ids.
        values (Tensor): its values.
        embedded (bool): whether its last axis is an embedding's.
    """

    point: Point
    values: Tensor
    embedded: bool


@dataclass
class RunCuts:
    """Where a run of a model is cut, and what it left there.

    Args:
        whole (bool): keep the graph whole for other gradients, and cut it only to measure.

    Attributes:
        embedded (dict of int to Tensor): by input of ids, which of them a table was given, flat.
    """

    whole: bool
    starts: dict[int, InputCut] = field(default_factory=dict)
    ports: list[MixerCut] = field(default_factory=list)
    embedded: dict[int, Tensor] = field(default_factory=dict)
    _measuring: bool = False
    _begun: dict[int, Tensor] = field(default_factory=dict)
    _entries: list[Point | None] = field(default_factory=list)

    def enter(self, tokens: Tensor) -> Tensor:
        """The tokens that a mixer is to be given in place of ``tokens``."""
        self._entries.append(Point.of(tokens) if tokens.requires_grad else None)
        # A copy: the model may go on to change its own in place.
        return tokens.clone() if self.whole else tokens.detach().clone()

    def leave(self, name: str, output: Tensor) -> Tensor:
        """The tokens that the model goes on with in place of a mixer's ``output``."""
        tokens = self._started(output)
        self.ports.append(MixerCut(name, self._entries.pop(), Point.of(tokens)))
        return tokens

    def abandon(self) -> None:
        """Forget that a mixer was entered, which then returned nothing."""
        self._entries.pop()

    def begin(self, index: int, values: Tensor, *, embedded: bool) -> Tensor:
        """One of the model's inputs, or its embeddings, as the model is to go on with them."""
        start = self._started(values)
        channels = None if values.dim() == 2 else -1
        self.starts[index] = InputCut(Point.of(start, channels), values.detach(), embedded)
        return start

    def embed(self, index: int, ids: Tensor, entries: Tensor, value: Tensor, width: int) -> Tensor:
        """The embeddings of some ids of an input, as the model is to go on with them.

        The input's point is that of zeros that are added to all of its embeddings, whichever
        tables they come from.

        Args:
            index (int): of the input.
            ids (Tensor): the input.
            entries (Tensor): those that were embedded, in the order of the flat ids.
            value (Tensor): their embeddings, with an axis of channels after those of ``entries``.
            width (int): of the widest table.
        """
        if index not in self.starts:
            zeros = value.new_zeros(*ids.shape, width)
            self._begun[index] = self.begin(index, zeros, embedded=True)
            self.embedded[index] = torch.zeros(ids.numel(), dtype=torch.bool)
        at, E = entries.flatten().to(value.device), value.shape[-1]
        self.embedded[index][entries.flatten()] = True
        self.starts[index].values.flatten(0, -2)[at, :E] = value.detach().reshape(-1, E)
        value = self._started(value) if self.whole else value.detach()
        with torch.enable_grad():
            added = self._begun[index].flatten(0, -2)[:, :E].index_select(0, at)
            return value + added.view(value.shape)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Keep gradients from going into the mixers while the block is open."""
        self._measuring = True
        try:
            yield
        finally:
            self._measuring = False

    def forget(self) -> None:
        """Let go of the graph, which refers to this object too."""
        self.starts.clear()
        self._begun.clear()
        self.ports.clear()
        self._entries.clear()

    def is_connected(self, output: Tensor) -> bool:
        """Whether autograd saw what lies between the mixers."""
        if len(self.ports) == 1:
            return output.requires_grad
        return any(port.entry is not None for port in self.ports)

    def are_read_by(self, score: Tensor | None) -> bool:
        """Whether a score depends on what the mixers returned."""
        if score is None or not score.requires_grad:
            return False
        return any(dependencies([Point.of(score, None)], [port.exit for port in self.ports]))

    def _started(self, output: Tensor) -> Tensor:
        # The output where the graph after it begins.
        if not (self.whole and output.requires_grad):
            output = output.detach().requires_grad_()
        with torch.enable_grad():
            return _Exit.apply(output, self)
