"""How far a frozen mixer may be from what the mixer returned, and still be right."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from captum_ssm.mixers import MixerCall
from captum_ssm.mixers.linear_layers import is_quantized
from captum_ssm.utils.precision import kernels_dtype, products_dtype

# The largest relative L2 error of an example's reconstruction. A model in half precision rounds
# at every step; the frozen operator does not. Measured on every family, with weights up to 1.5
# times as large as at initialization, right adapters err by at most 9e-7, 4.9e-5, 6e-3 and 2.3e-2;
# in half precision the delta rule and RG-LRU by 1.6e-2 and 5.6e-2 (see FrozenMixer.rounding).
TOLERANCE = {
    torch.float64: 5e-6,
    torch.float32: 1e-4,
    torch.float16: 1.2e-2,
    torch.bfloat16: 4e-2,
}


class Tolerances(NamedTuple):
    """The largest relative errors with which a mixer counts as reproduced, from strict to lenient.

    Args:
        dtype (float): what its dtype rounds.
        settings (float): and what PyTorch was allowed to round in products of float32.
        kernels (float): and what kernels outside of PyTorch may round in them on its device.
    """

    dtype: float
    settings: float
    kernels: float

    @classmethod
    def of(cls, output: Tensor, tolerance: float) -> Tolerances:
        """The tolerances for the output of a mixer, given that of its dtype."""
        if output.dtype != torch.float32:
            return cls(tolerance, tolerance, tolerance)
        settings = max(tolerance, TOLERANCE[products_dtype(output.device)])
        return cls(tolerance, settings, max(settings, TOLERANCE[kernels_dtype(output.device)]))


def tolerances_of(call: MixerCall, rounding: float) -> Tolerances:
    """The largest relative errors with which a call counts as reproduced."""
    dtype = call.output.dtype
    tolerance = TOLERANCE[dtype] * (rounding if dtype.itemsize == 2 else 1.0)
    # Quantized weights may round what enters a layer.
    if is_quantized(call.module):
        tolerance = max(tolerance, TOLERANCE[torch.float16])
    return Tolerances.of(call.output, tolerance)
