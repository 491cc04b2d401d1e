"""A mixer that is given the model's tokens in another order, or in windows, in the model's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import Self

from captum_ssm.errors import UnsupportedModelError
from captum_ssm.mixers.call import MixerCall
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.operators import PermutedOperator, TokenOperator


@dataclass(frozen=True, kw_only=True)
class ReorderedMixer(FrozenMixer):
    """A frozen mixer whose maps are over the model's tokens.

    Args:
        inner (FrozenMixer): over the mixer's own sequences, W windows per example.
        order (Tensor): ``(W, l)`` int64, W l = L: token t of window w is this one of the model's.
    """

    inner: FrozenMixer
    order: Tensor

    @classmethod
    def of(cls, inner: FrozenMixer, order: Tensor) -> ReorderedMixer:
        """``inner`` over the model's tokens."""
        order = order.to(inner.inputs.device)
        return cls(
            recurrence=_reordered(inner.recurrence, order),
            inputs=_to_model(inner.inputs, order),
            out_proj=inner.out_proj,
            out_weight=inner.out_weight,
            paper_components=inner.paper_components,
            out_gate=None if inner.out_gate is None else _to_model(inner.out_gate, order),
            dense_skip=None if inner.dense_skip is None else _to_model(inner.dense_skip, order),
            adds_input=inner.adds_input,
            neighbor_share=inner.neighbor_share,
            rounding=inner.rounding,
            inner=inner,
            order=order,
        )

    @property
    def values(self) -> Tensor:
        return _to_model(self.inner.values, self.order)

    def operator(
        self, formulation: str = "hidden", components: Iterable[str] | None = None
    ) -> TokenOperator:
        return _reordered(self.inner.operator(formulation, components), self.order)

    def scans_in_order(self) -> list[tuple[FrozenMixer, Tensor | None, float]]:
        """The scans of the inner mixer, in orders of the model's tokens."""
        if self.order.shape[0] > 1:
            raise UnsupportedModelError(
                f"this mixer works on {self.order.shape[0]} windows of the tokens, so it has no "
                "scan of all of them; expected one sequence. Use MambaLRP, or a method of maps."
            )
        order = self.order[0]
        return [
            (scan, order if inner is None else order[inner.to(order.device)], weight)
            for scan, inner, weight in self.inner.scans_in_order()
        ]

    def gated_output(self, mixed: Sequence[Tensor] | None = None) -> Tensor:
        return _to_model(self.inner.gated_output(mixed), self.order)

    def _add_up(self, of: Callable[[FrozenMixer], Tensor]) -> Tensor:
        return _to_model(self.inner._add_up(of), self.order)

    def remainder(self) -> Tensor:
        return _to_model(self.inner.remainder(), self.order)

    def with_row_factors(self, factors: Sequence[Tensor]) -> FrozenMixer:
        return ReorderedMixer.of(self.inner.with_row_factors(factors), self.order)

    def detach_coefficients(self) -> Self:
        return replace(self, inner=self.inner.detach_coefficients())


def in_order(call: MixerCall, order: Tensor | None, batch: int) -> MixerCall:
    """A call as if the mixer had been given the model's tokens in their order: ``(B, L, E)``.

    ``order (W, l)`` is as in :class:`ReorderedMixer`; None for the same.
    """

    def moved(x: Tensor) -> Tensor:
        x = x.reshape(batch, -1, x.shape[-1])
        return x if order is None else _to_model(x, order.to(x.device).flatten()[None])

    if order is None and call.output.dim() == 3:
        return call
    gradient = None if call.gradient is None else moved(call.gradient)
    return replace(
        call, args=(moved(call.given_tokens()),), kwargs={}, result=moved(call.output),
        gradient=gradient,
    )  # fmt: skip


def _reordered(operator: TokenOperator, order: Tensor) -> TokenOperator:
    flat = order.flatten()
    is_same = torch.equal(order, torch.arange(len(flat), device=flat.device)[None])
    return operator if is_same else PermutedOperator(operator, flat)


def _to_model(x: Tensor, order: Tensor) -> Tensor:
    # (B W, l, D) in the mixer's order to (B, L, D) in the model's.
    joined = x.reshape(x.shape[0] // order.shape[0], order.numel(), x.shape[-1])
    return joined[:, torch.argsort(order.flatten())]
