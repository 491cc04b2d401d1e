"""What a form makes of a call: an operator that may be what the function computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from captum_ssm.operators import TokenOperator

# From (B, L, D) to the layout in which a function returns it, and whose shape its result has.
_LAYOUTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "BLD": lambda y, like: y,
    "BDL": lambda y, like: y.mT,
    "BLHP": lambda y, like: _padded(y.unflatten(-1, (like.shape[2], -1)), like.shape[-1]),
    "BLSHP": lambda y, like: y.unflatten(-1, (-1, *like.shape[2:])).sum(2),
    "LHP": lambda y, like: _padded(y[0].unflatten(-1, (like.shape[1], -1)), like.shape[-1]),
    "BHLP": lambda y, like: y.unflatten(-1, (like.shape[1], -1)).transpose(1, 2),
}


@dataclass(frozen=True, kw_only=True)
class Candidate:
    r"""What a scan function may have computed: :math:`y = g \odot (\alpha v + s \odot v)`.

    Args:
        operator (TokenOperator): :math:`\alpha`.
        values (Tensor): v, ``(B, L, D)``, with its graph.
        layouts (tuple of str): the layouts in which the function may return y: ``"BLD"``,
            ``"BDL"``, ``"BLHP"``, ``"BHLP"`` or, of one example, ``"LHP"`` (heads of P channels);
            ``"BLSHP"``, whose sum over S steps is returned as ``"BLHP"``.
        skip (Tensor, optional): s, broadcasts to ``(B, L, D)``. The function may leave it out.
            Default: None
        gates (tuple of Tensor, optional): what g may be, ``(B, L, D)`` each, with its graph; or no
            gate. Default: ()

    Examples::

        >>> dt, v, (B, C) = torch.rand(1, 5, 4), torch.randn(1, 5, 4), torch.randn(2, 1, 5, 1, 3)
        >>> operator = DiagonalOperator(dt, dt, -torch.ones(4, 3), B, C)
        >>> Candidate(operator=operator, values=v, layouts=("BLD",)).values.shape
        torch.Size([1, 5, 4])
    """

    operator: TokenOperator
    values: Tensor
    layouts: tuple[str, ...]
    skip: Tensor | None = None
    gates: tuple[Tensor, ...] = ()


def _padded(y: Tensor, width: int) -> Tensor:
    # Heads of values that were padded with zeros, to the width of their keys.
    return F.pad(y, (0, width - y.shape[-1])) if y.shape[-1] < width else y


def in_layout(y: Tensor, layout: str, like: Tensor) -> Tensor | None:
    """``y (B, L, D)`` in a function's layout; None where that has another shape than ``like``."""
    if layout == "LHP" and (like.dim() != 3 or len(y) != 1 or y.shape[-1] % like.shape[1]):
        return None
    if layout == "BLSHP" and (like.dim() != 4 or y.shape[-1] % like.shape[2:].numel()):
        return None
    if layout == "BLHP" and (like.dim() != 4 or y.shape[-1] % like.shape[2]):
        return None
    if layout == "BHLP" and (like.dim() != 4 or y.shape[-1] % like.shape[1]):
        return None
    found = _LAYOUTS[layout](y, like)
    return found if found.shape == like.shape else None
