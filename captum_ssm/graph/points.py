"""What lies between two points of an autograd graph: which token reads which, and how strongly.

A point is a tensor of tokens that a run left in its graph. Gradients put in at one point
and read at an earlier one say how the later point's tokens depend on the earlier one's. Where a
token is not read its gradient is exactly zero, in half precision too; this is what the measurements
here rest on. Tokens are all axes but that of the channels, flattened: the patches of an image, or
windows that lie in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from captum_ssm.utils.blocks import contextmanager


class OwningEdge(GradientEdge):
    """An edge that keeps its graph alive by itself.

    A node of a :class:`torch.autograd.Function` is freed with the graph's last tensor, whoever
    holds the node: reading it then fails, or ends the process. Newer torch (2.13, not 2.6) has a
    field of the edge for a node that owns it.
    """

    owner: Any


def edge_of(x: Tensor) -> GradientEdge:
    """Where a tensor that requires a gradient came from, to be kept without the tensor."""
    with torch._C.DisableTorchFunctionSubclass():  # a subclass's view is a copy of its own class
        edge = get_gradient_edge(x)
    if len(edge) > 2 or not isinstance(edge.node, torch._C._FunctionBase):
        return edge
    owning = OwningEdge(*edge)
    with torch.enable_grad():
        owning.owner = x.view_as(x).grad_fn
    return owning


@dataclass(frozen=True, eq=False)
class Point:
    """A tensor of tokens in an autograd graph. It holds the graph, not the values.

    Args:
        edge (GradientEdge): where the tensor came from.
        shape (tuple of int): of the tensor.
        dtype (torch.dtype): of the tensor.
        device (torch.device): of the tensor.
        channels (int, optional): the axis of the channels; None where each entry is a token of
            its own. Default: -1
    """

    edge: GradientEdge
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    channels: int | None = -1

    @classmethod
    def of(cls, x: Tensor, channels: int | None = -1) -> Point:
        """The point of a tensor that requires a gradient, also for a caller without gradients."""
        with torch.inference_mode(False), torch.enable_grad():
            edge = edge_of(x)
        return cls(edge, x.shape, x.dtype, x.device, channels)

    @classmethod
    def at(cls, edge: GradientEdge, channels: int | None = -1) -> Point:
        """The point of a tensor that the graph alone knows."""
        known = edge.node._input_metadata[edge.output_nr]
        return cls(edge, tuple(known.shape), known.dtype, known.device, channels)

    def before_move(self, channels: int) -> Point:
        """The point of what this is, where its channels were moved last from the axis given."""
        if channels == -1:
            return self
        ((node, output),) = self.edge.node.next_functions
        assert node is not None
        shape = list(self.shape)
        shape.insert(channels % len(shape), shape.pop())
        edge = GradientEdge(node, output)
        return replace(self, edge=edge, shape=tuple(shape), channels=channels)

    def is_at(self, other: Point) -> bool:
        """Whether the two are of one tensor, with its channels on the same axis."""
        axes = {
            None if point.channels is None else point.channels % len(point.shape)
            for point in (self, other)
        }
        here, there = self.edge, other.edge
        return here.node is there.node and here.output_nr == there.output_nr and len(axes) == 1

    @property
    def tokens(self) -> int:
        """T, the number of tokens in the whole batch."""
        return math.prod(self.shape) // self.width

    @property
    def width(self) -> int:
        """E, the number of channels."""
        return 1 if self.channels is None else self.shape[self.channels]

    def flat(self, x: Tensor) -> Tensor:
        """A tensor of this shape as ``(T, E)``."""
        if self.channels is None:
            return x.reshape(-1, 1)
        return x.movedim(self.channels, -1).reshape(-1, self.width)

    def unflat(self, x: Tensor) -> Tensor:
        """``x (T, E)`` in this point's shape."""
        if self.channels is None:
            return x.reshape(self.shape)
        moved = list(self.shape)
        moved.append(moved.pop(self.channels))
        return x.reshape(moved).movedim(-1, self.channels)

    def noise(self, generator: torch.Generator | None = None) -> Tensor:
        """Normal numbers ``(T, E)``, the same on every device; complex where the tensor is.

        Without a generator they are the same in every call.
        """
        generator = torch.Generator().manual_seed(0) if generator is None else generator
        kind = torch.complex64 if self.dtype.is_complex else None
        x = torch.randn(self.tokens, self.width, generator=generator, dtype=kind)
        return x.to(self.device, self.dtype)

    def rank_one(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Normal numbers ``(T, 1)`` and ``(E,)``, whose products are as good as :meth:`noise`."""
        rows = torch.randn(self.tokens, 1, generator=generator)
        kind = torch.complex64 if self.dtype.is_complex else None
        columns = torch.randn(self.width, generator=generator, dtype=kind)
        return rows.to(self.device, self.dtype), columns.to(self.device, self.dtype)


def gradients(
    later: Sequence[Point], seeds: Sequence[Tensor], earlier: Sequence[Point]
) -> list[Tensor | None]:
    """The gradients at ``earlier``, ``(T, E)`` each, of ``seeds (T, E)`` put in at ``later``.

    None for an earlier point that no later one depends on. The graph is kept.
    """
    pulled = torch.autograd.grad(
        [point.edge for point in later],
        [point.edge for point in earlier],
        [point.unflat(seed) for point, seed in zip(later, seeds, strict=True)],
        retain_graph=True,
        allow_unused=True,
    )
    return [None if g is None else point.flat(g) for point, g in zip(earlier, pulled, strict=True)]


def visit_gradients(
    later: Sequence[Point],
    seeds: Sequence[Callable[[], Tensor]],
    earlier: Sequence[Point],
    visit: Callable[[int, Tensor], None],
) -> None:
    """Show the gradients of :func:`gradients` one by one, each gone before the next is made.

    All seeds and gradients of a deep model on a long input take more memory than its graph. The
    graph is kept. ``visit`` takes the number of an earlier point, which is not where the graph
    starts, and the gradient there, ``(T, E)``.
    """
    before = [
        GradientEdge(node, k)
        for point in earlier
        for node, k in point.edge.node.next_functions
        if node is not None
    ]
    nothing = [
        torch.zeros((), dtype=point.dtype, device=point.device).expand(point.shape)
        for point in later
    ]

    def put(point: Point, seed: Callable[[], Tensor], gradient: Tensor | None) -> Tensor:
        added = point.unflat(seed())
        return added if gradient is None else gradient + added

    def look(i: int, point: Point, gradient: Tensor | None) -> Tensor | None:
        if gradient is not None:
            visit(i, point.flat(gradient))
        return gradient

    with ExitStack() as stack:
        for point, seed in zip(later, seeds, strict=True):
            stack.enter_context(passing(point.edge, partial(put, point, seed)))
        for i, point in enumerate(earlier):
            stack.enter_context(passing(point.edge, partial(look, i, point)))
        torch.autograd.grad(
            [point.edge for point in later], before, nothing, retain_graph=True, allow_unused=True
        )


@contextmanager
def passing_nan() -> Iterator[None]:
    """Gradients may be no numbers, also where autograd looks for anomalies."""
    with ExitStack() as stack:
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        yield


@contextmanager
def closed(edges: Iterable[GradientEdge]) -> Iterator[None]:
    """No gradient passes these tensors meanwhile."""

    def close(gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else torch.zeros_like(gradient)

    with ExitStack() as stack:
        for edge in edges:
            stack.enter_context(passing(edge, close))
        yield


@contextmanager
def passing(edge: GradientEdge, change: Callable[[Tensor | None], Tensor | None]) -> Iterator[None]:
    """What a tensor is given as its gradient goes on through a function meanwhile."""

    def prehook(outer: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        k = edge.output_nr
        return (*outer[:k], change(outer[k]), *outer[k + 1 :])

    hook = edge.node.register_prehook(prehook)
    try:
        yield
    finally:
        hook.remove()
