"""Whether a frozen mixer computes what the mixer computed."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from captum_ssm._errors import ReconstructionError
from captum_ssm.mixers import FrozenMixer, MixerCall
from captum_ssm.mixers._weights import is_quantized

# The largest relative L2 error of an example's reconstruction. A model in half precision rounds
# at every step; the frozen operator does not. Measured on every family, with weights up to 1.5
# times as large as at initialization, right adapters err by at most 9e-7, 1.3e-5, 6e-3 and 1.9e-2;
# in bfloat16 the delta rule and RG-LRU by 4.7e-2 (see FrozenMixer.rounding).
TOLERANCE = {
    torch.float64: 5e-6,
    torch.float32: 1e-4,
    torch.float16: 1.2e-2,
    torch.bfloat16: 4e-2,
}


def reconstruction_error(call: MixerCall, rebuilt: Tensor, mask: Tensor | None) -> Tensor:
    """The relative L2 error of each example, ``(B,)``, padding excluded.

    Args:
        call (MixerCall): its output is what is expected.
        rebuilt (Tensor): ``(B, L, E)``.
        mask (Tensor, optional): ``(B, L)``, zero for padding.
    """
    # A mixer of images may return (B, H, W, E).
    expected = call.output.to(rebuilt.dtype).reshape(rebuilt.shape)
    error = rebuilt - expected
    if mask is not None:
        keep = mask.to(error.device)[..., None]
        error, expected = error * keep, expected * keep
    size = torch.linalg.vector_norm(expected, dim=(1, 2))
    return torch.linalg.vector_norm(error, dim=(1, 2)) / size.clamp(min=1e-12)


def tolerance_of(call: MixerCall, rounding: float) -> float:
    """The largest relative error with which a call counts as reproduced.

    Args:
        call (MixerCall): its dtype and weights decide.
        rounding (float): that of the :class:`FrozenMixer`.
    """
    dtype = call.output.dtype
    tolerance = TOLERANCE[dtype] * (rounding if dtype.itemsize == 2 else 1.0)
    # Quantized weights may round what enters a layer.
    return max(tolerance, TOLERANCE[torch.float16]) if is_quantized(call.module) else tolerance


def check_reconstruction(
    name: str, call: MixerCall, rebuilt: Tensor, mask: Tensor | None, rounding: float
) -> None:
    """Raise `ReconstructionError` unless ``rebuilt (B, L, E)`` is the mixer's output."""
    error = float(reconstruction_error(call, rebuilt, mask).amax())
    tolerance = tolerance_of(call, rounding)
    if not error <= tolerance:
        raise ReconstructionError(
            f"the frozen operator of {name} ({type(call.module).__name__}) does not reproduce its "
            f"output: relative error {error:.2e}, expected at most {tolerance:.0e} for "
            f"{call.output.dtype}. The mixer computes something this library does not know (a "
            "variant, a patched kernel, a generation cache that is not empty), or the model "
            "changes its result in place; register an adapter with register_mixer, or pass "
            "check=False to look at the operator all the same."
        )


def warn_if_padding_is_read(
    name: str, call: MixerCall, mixer: FrozenMixer, mask: Tensor | None
) -> None:
    """Warn where tokens read the padding before them: the model ignores its mask."""
    if mask is None or not bool((mask[:, 1:] > mask[:, :-1]).any()):
        return
    mask = mask.to(mixer.recurrence.device, mixer.recurrence.dtype)
    read = mixer.recurrence.rmatvec(mask, "mean") * (1 - mask)
    written = mixer.inputs.abs().amax(-1) * read.abs()
    if bool((written > 0).any()):
        warnings.warn(
            f"{name} ({type(call.module).__name__}) reads the padding on the left: this model "
            "ignores attention_mask there, so its outputs depend on how much padding an example "
            "has. Pad on the right, or explain examples of one length.",
            UserWarning,
            stacklevel=2,
        )
