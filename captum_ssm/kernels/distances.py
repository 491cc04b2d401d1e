"""How far vectors that are sums over maps are from what they add up to.

The inner loop of ALTI where a map serves many channels, as an attention head's does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from captum_ssm.kernels.arguments import check_dims, shape_error
from captum_ssm.kernels.extension import NAMESPACE, OPS, warn_if_missing

# Numbers of vectors that the PyTorch form makes at a time.
_BLOCK = 1 << 18


def map_distances(maps: Tensor, values: Tensor, outputs: Tensor) -> Tensor:
    """``out[b, r, c] = sum_e |sum_m maps[b, c, m, r] values[b, c, m, e] - outputs[b, r, e]|``.

    The l1 distances of outputs from the vectors that tokens add to them. Not differentiable.

    Args:
        maps (Tensor): ``(B, C, M, R)``: by token c and map m, the entries of the rows.
        values (Tensor): ``(B, C, M, E)``: what each map adds of token c, times its entry.
        outputs (Tensor): ``(B, R, E)``.

    Returns:
        Tensor: ``(B, R, C)``.

    Raises:
        ValueError: an argument has an unexpected shape.
        TypeError: the tensors are not of one dtype.

    Examples::

        >>> maps, values = torch.rand(1, 5, 2, 3), torch.rand(1, 5, 2, 4)
        >>> vectors = torch.einsum("bcmr,bcme->brce", maps, values)
        >>> distances = map_distances(maps, values, outputs := torch.rand(1, 3, 4))
        >>> torch.testing.assert_close(distances, (vectors - outputs[:, :, None]).abs().sum(-1))
    """
    check_dims(maps=(maps, 4), values=(values, 4), outputs=(outputs, 3))
    (B, C, M, R), E = maps.shape, outputs.shape[-1]
    if values.shape != (B, C, M, E):
        raise shape_error("values", values, f"(B, C, M, E) = {(B, C, M, E)}")
    if outputs.shape != (B, R, E):
        raise shape_error("outputs", outputs, f"(B, R, E) = {(B, R, E)}")
    warn_if_missing()
    return OPS.map_distances(maps, values, outputs)


def map_distances_torch(maps: Tensor, values: Tensor, outputs: Tensor) -> Tensor:
    (B, C, _, R), E = maps.shape, outputs.shape[-1]
    out = maps.new_empty(B, R, C)
    step = max(1, _BLOCK // max(1, B * R * E))
    for first in range(0, C, step):
        part = slice(first, first + step)
        vectors = maps[:, part].mT @ values[:, part]  # (B, c, R, E)
        out[..., part] = vectors.sub_(outputs[:, None]).abs_().sum(-1).mT
    return out


torch.library.define(
    f"{NAMESPACE}::map_distances", "(Tensor maps, Tensor values, Tensor outputs) -> Tensor"
)
torch.library.impl(f"{NAMESPACE}::map_distances", "CompositeExplicitAutograd")(map_distances_torch)
torch.library.register_fake(f"{NAMESPACE}::map_distances")(
    lambda maps, values, outputs: maps.new_empty(maps.shape[0], maps.shape[3], maps.shape[1])
)
