r"""Recurrences that begin with a state, and what they leave of it.

A state is a few more tokens. In front of the sequence stand N tokens that do not decay: the n-th
writes its value into the n-th part of the state and reads nothing. After the sequence stand N that
read the parts one by one. Both are ordinary tokens of the same recurrence, so one scan returns the
outputs and the last state, and its gradient that of the first state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from captum_ssm.errors import InputError, UnsupportedModelError
from captum_ssm.operators.base import AroundOperator, TokenOperator


def continued(
    operator: TokenOperator, v: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The outputs for values ``v`` from a state on, and the state after the last token.

    Args:
        operator (TokenOperator): with :meth:`~TokenOperator.between_states`.
        v (Tensor): ``(B, L, D)``.
        state (Tensor, optional): ``(B, N, D)``, the parts of the state as values of N tokens.
            Default: None, which is zero

    Returns:
        tuple of Tensor: ``(B, L, D)`` and ``(B, N, D)``. That of attention stays what it was.

    Raises:
        UnsupportedModelError: for an operator whose state is not known.
        InputError: for a state of another shape.

    Examples::

        >>> dt, (B, C) = torch.rand(1, 6, 4), torch.randn(2, 1, 6, 1, 3)
        >>> part = lambda a, b: DiagonalOperator(
        ...     dt[:, a:b], dt[:, a:b], -torch.ones(4, 3), B[:, a:b], C[:, a:b]
        ... )
        >>> v = torch.randn(1, 6, 4)
        >>> _, state = continued(part(0, 4), v[:, :4])
        >>> y, _ = continued(part(4, 6), v[:, 4:], state)
        >>> torch.testing.assert_close(y, part(0, 6).matvec(v)[:, 4:])
    """
    if isinstance(operator, LatterOperator) and state is not None:
        return operator.after(v, state), state
    whole = operator.between_states()
    if whole is None:
        raise UnsupportedModelError(
            f"the state of a {type(operator).__name__} is not known, so it cannot begin with one; "
            "expected a diagonal recurrence or linear attention."
        )
    B, L, D = v.shape
    N = (whole.length - L) // 2
    if state is None:
        state = v.new_zeros(B, N, D)
    if state.shape != (B, N, D):
        raise InputError(
            f"the state has shape {tuple(state.shape)}; expected {(B, N, D)}, (batch, states, "
            "channels)."
        )
    y = whole.matvec(torch.cat([state.to(v), v, v.new_zeros(B, N, D)], 1))
    # The state alone may be kept.
    return y[:, N : N + L], y[:, N + L :].clone()


@dataclass(frozen=True)
class LatterOperator(AroundOperator):
    """The last tokens of an operator; what they read of the first ones is their state.

    So attention goes on after cached keys: the state holds the values of the tokens before.

    Examples::

        >>> query, key = torch.randn(2, 1, 2, 5, 3)
        >>> inner = SoftmaxOperator(query, key, scale=1.0, width=4)
        >>> v = torch.randn(1, 5, 8)
        >>> y, _ = continued(LatterOperator(inner, 2), v[:, 2:], v[:, :2])
        >>> torch.testing.assert_close(y, inner.matvec(v)[:, 2:])
    """

    inner: TokenOperator
    first: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        B, L, D, M = self.inner.sizes
        return B, L - self.first, D, M

    def matvec(self, v: Tensor) -> Tensor:
        return self.inner.matvec(self._whole(v))[:, self.first :]

    def rmatvec(self, w: Tensor, reduction: str | None = None) -> Tensor:
        return self.inner.rmatvec(self._whole(w), reduction)[:, self.first :]

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        return self.inner.map_rows(index + self.first, start, stop)[..., self.first :]

    def after(self, v: Tensor, before: Tensor) -> Tensor:
        """The outputs for ``v (B, L, D)`` after the values ``before (B, first, D)``."""
        return self.inner.matvec(torch.cat([before.to(v), v], 1))[:, self.first :]

    def _whole(self, x: Tensor) -> Tensor:
        return F.pad(x, (0,) * (2 * x.dim() - 4) + (self.first, 0))


def around(x: Tensor, front: float, back: float, count: int) -> Tensor:
    """``x (B, L, ...)`` between ``count`` tokens of a constant each."""
    shape = (x.shape[0], count, *x.shape[2:])
    return torch.cat([x.new_full(shape, front), x, x.new_full(shape, back)], 1)


def units_before(x: Tensor) -> Tensor:
    """``x (B, L, G, N)`` after N tokens of unit vectors, and before N of zeros."""
    units = _units(x)
    return torch.cat([units, x, torch.zeros_like(units)], 1)


def units_after(x: Tensor) -> Tensor:
    """``x (B, L, G, N)`` after N tokens of zeros, and before N of unit vectors."""
    units = _units(x)
    return torch.cat([torch.zeros_like(units), x, units], 1)


def _units(x: Tensor) -> Tensor:
    B, _, G, N = x.shape
    return torch.eye(N, dtype=x.dtype, device=x.device)[:, None].expand(B, N, G, N)
