"""What a form makes of a call: an operator that may be what the function computes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from captum_ssm.operators import TokenOperator


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


def in_layout(y: Tensor, layout: str, like: Tensor) -> Tensor | None:
    """``y (B, L, D)`` in a function's layout; None where that has another shape than ``like``."""
    axes = layout.replace("S", "")
    if len(axes) != like.dim() or (axes[0] == "L" and len(y) > 1):
        return None
    if "H" in axes:
        H, D = like.shape[axes.index("H")], y.shape[-1]
        P = like.shape[-1] if axes != layout else D // H
        if H * P == 0 or D % (H * P):
            return None
        y = y.unflatten(-1, (-1, H, P)).sum(2) if axes != layout else y.unflatten(-1, (H, P))
        # Heads of values that were padded with zeros, to the width of their keys.
        y = F.pad(y, (0, max(0, like.shape[-1] - P)))
    y = y[0] if axes[0] == "L" else y.transpose(1, 2) if axes[2] == "L" else y
    return y if y.shape == like.shape else None
