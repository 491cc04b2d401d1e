"""What the graph of a run says of how its ends change with its starts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from captum_ssm.graph.points import passing_nan


class Promise:
    """Which tokens of the starts each token of the ends depends on, as the graph says.

    A call tells it for all of them at once, by differentiating the backward pass. A kernel's own
    backward pass cannot be differentiated in its turn, and then stands there as if it depended on
    nothing: what a call denies is asked of the backward pass itself, one token at a time.
    """

    def __init__(self, ends: Sequence[Tensor], starts: Sequence[Tensor]) -> None:
        self.ends, self.starts = ends, starts
        self.duals = [torch.zeros_like(end, requires_grad=True) for end in ends]
        self.back: Sequence[Tensor | None] = [None] * len(starts)
        self._read: dict[tuple[int, tuple[int, ...]], list[Tensor | None]] = {}
        live = [k for k, end in enumerate(ends) if end.requires_grad]
        with suppress(RuntimeError):  # it says that it cannot be differentiated twice
            self.back = self._gradients(live, [self.duals[k] for k in live], create_graph=True)

    def __call__(self, steps: Sequence[Tensor]) -> list[Tensor]:
        """Whether each token of the ends depends on one that a step moves.

        A moved token is not a number, which a derivative of zero passes on, such as that of a
        saturated tanh.
        """
        moved = [step.masked_fill(step != 0, torch.nan) for step in steps]
        return [(change != 0).any(-1) for change in self.along(moved)]

    def along(self, steps: Sequence[Tensor]) -> list[Tensor]:
        """The derivatives of the ends along steps of the starts."""
        pairs = [
            (gradient, step)
            for gradient, step in zip(self.back, steps, strict=True)
            if gradient is not None and gradient.requires_grad
        ]
        changes: Sequence[Tensor] = self.duals  # zeros
        if pairs:
            outputs, directions = zip(*pairs, strict=True)
            with suppress(RuntimeError), passing_nan():  # as above
                changes = torch.autograd.grad(
                    outputs, self.duals, directions, retain_graph=True, materialize_grads=True
                )
        return [change.detach() for change in changes]

    def of(self, end: int, seed: Tensor, steps: Sequence[Tensor]) -> float:
        """What a backward pass from a seed at an end says of steps: their products, added up."""
        pairs = zip(self._from(end, seed.to(self.ends[end])), steps, strict=True)
        return sum(float((g.double() * step).sum()) for g, step in pairs if g is not None)

    def is_shown(self, end: int, token: tuple[int, ...], steps: Sequence[Tensor]) -> bool:
        """Whether a backward pass from a token of an end comes to a token that a step moves."""
        if (end, token) not in self._read:
            seed = torch.zeros_like(self.ends[end])
            seed[token] = torch.nan
            self._read[end, token] = [None if g is None else g != 0 for g in self._from(end, seed)]
        pairs = zip(self._read[end, token], steps, strict=True)
        return any(bool((read & (step != 0)).any()) for read, step in pairs if read is not None)

    def reads(self, end: int) -> list[Tensor]:
        """Which entries of the starts an end as a whole depends on, bool, of their shapes."""
        seed = torch.full_like(self.ends[end], torch.nan)
        return [
            torch.zeros_like(x, dtype=torch.bool) if g is None else g != 0
            for x, g in zip(self.starts, self._from(end, seed), strict=True)
        ]

    def _from(self, end: int, seed: Tensor) -> Sequence[Tensor | None]:
        # The gradients at the starts of one end.
        is_live = self.ends[end].requires_grad
        return self._gradients([end], [seed]) if is_live else [None] * len(self.starts)

    def _gradients(
        self, ends: Sequence[int], seeds: Sequence[Tensor], **options: bool
    ) -> Sequence[Tensor | None]:
        live = [self.ends[k] for k in ends]
        with passing_nan():
            return torch.autograd.grad(
                live, self.starts, seeds, retain_graph=True, allow_unused=True, **options
            )
