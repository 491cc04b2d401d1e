"""The coefficients of linear attention and of the delta rule, and the check of their shapes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from captum_ssm.kernels.arguments import promote, shape_error

# A full reset, also one given as -inf: it must stay finite in sums.
MIN_LOG_DECAY = -1e4
# exp(-60) is far below float32's resolution and far above its denormals.
MIN_EXPONENT = -60.0


@dataclass(frozen=True)
class LinearAttentionCoefficients:
    """The coefficients of linear attention with decay, or of the delta rule; one map per head.

    Any floating dtype; tensors of different dtypes are computed in the widest. Heads may share
    memory (``expand``): nothing is copied if the numbers of one token and head are contiguous.

    Args:
        query (Tensor): q, ``(B, L, H, N)``; the CUDA kernels take N up to 1024.
        key (Tensor): k, ``(B, L, H, N)``, including every factor of the value.
        log_decay (Tensor): log a, ``(B, L, H, 1)`` for a decay per head or ``(B, L, H, N)`` for
            one per key dimension; at most 0, and ``-inf`` for a decay factor of zero.
        erase (Tensor, optional): e, ``(B, L, H, N)``, for the delta rule. Default: None
        probe (Tensor, optional): r, ``(B, L, H, N)``, given with ``erase``. Default: None
        bonus (Tensor, optional): u, ``(B, L, H)``. With it the output reads the state before the
            token's own decay and write, and the token's own value enters with this weight, as in
            RWKV. Default: None

    Examples::

        >>> query, key = torch.randn(2, 1, 5, 2, 3)
        >>> coefficients = LinearAttentionCoefficients(query, key, -torch.rand(1, 5, 2, 1))
    """

    query: Tensor
    key: Tensor
    log_decay: Tensor
    erase: Tensor | None = None
    probe: Tensor | None = None
    bonus: Tensor | None = None

    def narrow(self, start: int, stop: int) -> LinearAttentionCoefficients:
        """The coefficients of heads ``start .. stop - 1``."""
        some: dict[str, Any] = {
            name: None if x is None else x[:, :, start:stop] for name, x in tensors_of(self).items()
        }
        return LinearAttentionCoefficients(**some)


_NAMES = tuple(field.name for field in fields(LinearAttentionCoefficients))


def tensors_of(c: LinearAttentionCoefficients) -> dict[str, Any]:
    return {name: getattr(c, name) for name in _NAMES}


def checked(c: LinearAttentionCoefficients, **first: Tensor | None) -> list[Any]:
    # All tensors in one dtype, `first` before the coefficients, whose shapes agree.
    tensors = promote(**first, **tensors_of(c))
    shape = tuple(c.query.shape)
    if len(shape) != 4 or 0 in shape[1:]:
        raise shape_error("query", c.query, "(B, L, H, N) with L, H and N at least 1")
    for name, x in (("key", c.key), ("erase", c.erase), ("probe", c.probe)):
        if x is not None and x.shape != shape:
            raise shape_error(name, x, f"that of query, {shape}")
    if c.log_decay.shape not in (shape, (*shape[:3], 1)):
        raise shape_error("log_decay", c.log_decay, f"{(*shape[:3], 1)} or that of query, {shape}")
    if c.bonus is not None and c.bonus.shape != shape[:3]:
        raise shape_error("bonus", c.bonus, f"{shape[:3]}, or None")
    if (c.erase is None) != (c.probe is None):
        name = "probe" if c.erase is None else "erase"
        raise ValueError(f"only {name} is given; expected both erase and probe, or neither")
    return tensors


# The tensors of the schemas, in the order of the fields.
TENSORS = "Tensor query, Tensor key, Tensor log_decay, Tensor? erase, Tensor? probe, Tensor? bonus"
