"""Whether a frozen mixer computes what the mixer computed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from captum_ssm._errors import ReconstructionError
from captum_ssm._nested import map_tensors
from captum_ssm.mixers import FrozenMixer, MixerCall, find_adapter
from captum_ssm.mixers._frozen_mixer import Product
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

# A recurrence may be off by so many times the tolerance of the whole output, relative to itself.
RECURRENCE = 3.0


def reconstruction_error(call: MixerCall, rebuilt: Tensor, mask: Tensor | None) -> Tensor:
    """The relative L2 error of each example, ``(B,)``, padding excluded.

    Args:
        call (MixerCall): its output is what is expected.
        rebuilt (Tensor): ``(B, L, E)``.
        mask (Tensor, optional): ``(B, L)``, zero for padding.
    """
    return _relative(*_norms(rebuilt, call.output), mask)


def _norms(found: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    # Of the error, and of what is expected, for each token: (B, L).
    # A mixer of images may return (B, H, W, E).
    expected = expected.to(found.dtype).reshape(found.shape)
    error = torch.linalg.vector_norm(found - expected, dim=2)
    return error, torch.linalg.vector_norm(expected, dim=2)


def _relative(error: Tensor, size: Tensor, mask: Tensor | None) -> Tensor:
    if mask is not None:
        keep = mask.to(error.device)
        error, size = error * keep, size * keep
    whole = torch.linalg.vector_norm(size, dim=1)
    return torch.linalg.vector_norm(error, dim=1) / whole.clamp(min=1e-12)


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


@dataclass(frozen=True)
class Rebuilt:
    """What a frozen mixer computes.

    Args:
        output (Tensor): ``(B, L, E)``.
        share (Tensor): ``(B,)``, how much of it comes of the recurrence, by norms.
        rounding (float): that of the :class:`FrozenMixer`.
        projected (tuple of Tensor, optional): the input of the output projection, and the one that
            the module's own was given, ``(B, L, D)``, where that is known. ``output`` then comes of
            the latter. Default: None
    """

    output: Tensor
    share: Tensor
    rounding: float
    projected: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(
        cls,
        mixer: FrozenMixer,
        call: MixerCall | None = None,
        multiply: Product = torch.mul,
        mixed: Sequence[Tensor] | None = None,
    ) -> Rebuilt:
        """What ``mixer`` computes, with its rule for the product of signal and gate.

        Of what ``call`` has kept the output projection is not computed again. ``mixed`` is what
        the mixer's scans return, where that is known.
        """
        gated = mixer.gated_output(multiply, mixed)
        with torch.no_grad():
            share = mixer.recurrence_share(gated)
        own = None if call is None else call.projected(mixer.out_weight)
        if own is None or own.shape != gated.shape:
            return cls(mixer.projected(gated), share, mixer.rounding)
        return cls(mixer.projected(_Own.apply(gated, own)), share, mixer.rounding, (gated, own))


class _Own(torch.autograd.Function):
    # A module's own values, with the gradient of ours.
    @staticmethod
    def forward(ctx: Any, ours: Tensor, own: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return own.view_as(own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return grad, None


@dataclass(frozen=True)
class Deviation:
    """How far a frozen mixer is from what the mixer returned.

    Args:
        error (Tensor): ``(B, L)``, the norm of each token's error.
        size (Tensor): ``(B, L)``, the norm of what was expected.
        share (Tensor): ``(B,)``, how much of the output comes of the recurrence, by norms.
        rounding (float): that of the :class:`FrozenMixer`.
    """

    error: Tensor
    size: Tensor
    share: Tensor
    rounding: float

    @classmethod
    @torch.no_grad()
    def of(cls, call: MixerCall, rebuilt: Rebuilt) -> Deviation:
        """That of ``rebuilt`` from the output of ``call``, and from what was projected to it."""
        error, size = _norms(rebuilt.output, call.output)
        if rebuilt.projected is not None:
            before, whole = _norms(*rebuilt.projected)
            error = torch.maximum(error, before / whole.clamp(min=1e-30) * size)
        return cls(error, size, rebuilt.share, rebuilt.rounding)

    def errors(self, mask: Tensor | None, least: float = 0.0) -> tuple[float, float]:
        """The largest errors of all examples: of the output, and of what the recurrence adds.

        A recurrence whose share is not above ``least`` (a token that decays at once) adds nothing
        that could be wrong.
        """
        error = _relative(self.error, self.size, mask)
        share = self.share.to(error)
        of_recurrence = torch.where(share <= least, 0, error / share.clamp(min=1e-30))
        return float(error.amax()), float(of_recurrence.amax())


def check_reconstruction(
    name: str, call: MixerCall, rebuilt: Rebuilt, mask: Tensor | None = None
) -> None:
    """Raise `ReconstructionError` unless ``rebuilt`` is the mixer's output.

    Args:
        name (str): the layer's, for the error.
        call (MixerCall): its output is what is expected.
        rebuilt (Rebuilt): by the frozen mixer.
        mask (Tensor, optional): ``(B, L)``, zero for padding. Default: None
    """
    check_deviation(name, call, Deviation.of(call, rebuilt), mask)


def check_deviation(
    name: str, call: MixerCall, deviation: Deviation, mask: Tensor | None = None
) -> None:
    """Raise `ReconstructionError` unless a frozen mixer returns the mixer's output.

    A recurrence that adds little could be wrong and pass as rounding. Then the mixer is run once
    more, on larger tokens, where it adds more.

    Args:
        name (str): the layer's, for the error.
        call (MixerCall): the mixer's.
        deviation (Deviation): from its output.
        mask (Tensor, optional): ``(B, L)``, zero for padding. Default: None
    """
    error, of_recurrence = deviation.errors(mask)
    tolerance = tolerance_of(call, deviation.rounding)
    if error <= tolerance and of_recurrence > RECURRENCE * tolerance:
        of_recurrence = _error_on_larger_tokens(call)
    if not (error <= tolerance and of_recurrence <= RECURRENCE * tolerance):
        raise ReconstructionError(
            f"the frozen operator of {name} ({type(call.module).__name__}) does not reproduce its "
            f"output: relative error {error:.2e}, expected at most {tolerance:.0e} for "
            f"{call.output.dtype}; {of_recurrence:.2e} of what its recurrence adds, expected at "
            f"most {RECURRENCE * tolerance:.0e}. The mixer computes something this library does "
            "not know (a variant, a patched kernel, a generation cache that is not empty), or the "
            "model changes its result in place; register an adapter with register_mixer, or pass "
            "check=False to look at the operator all the same."
        )


def _error_on_larger_tokens(call: MixerCall) -> float:
    """The error of what the recurrence adds, or of all, on tokens on which it adds more.

    In half precision, where these would overflow, a copy of the mixer in float32 is run.
    """
    module, tokens = call.module, call.given_tokens()
    args, kwargs, dtype = call.args, call.kwargs, tokens.dtype
    if dtype.itemsize == 2:
        module, dtype = copy.deepcopy(module).float(), torch.float32
    # An S6 recurrence grows with the cube of its tokens.
    larger = tokens.to(dtype) * (30 / tokens.float().std().clamp(min=1e-12)).to(dtype)

    def moved(x: Tensor) -> Tensor:
        if x is tokens:
            return larger
        return x.to(dtype) if x.dtype == tokens.dtype else x

    args, kwargs = map_tensors(moved, (args, kwargs))
    adapter = find_adapter(call.module)
    assert adapter is not None
    with torch.no_grad():
        again = replace(call, module=module, args=args, kwargs=kwargs).run()
        # A share is the norm of a difference, known up to the rounding of what is subtracted.
        rounding = torch.finfo(dtype).eps
        return max(Deviation.of(again, Rebuilt.of(adapter(again))).errors(None, least=rounding))


def is_padded_left(mask: Tensor | None) -> bool:
    """Whether padding comes before tokens in any example of a mask ``(B, L)``."""
    return mask is not None and bool((mask[:, 1:] > mask[:, :-1]).any())


def warn_if_padding_is_read(
    name: str, call: MixerCall, mixer: FrozenMixer, mask: Tensor | None
) -> None:
    """Warn where tokens read the padding before them: the model ignores its mask."""
    if mask is None or not is_padded_left(mask):
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


def warn_of_shift(call: MixerCall, mixer: FrozenMixer) -> None:
    """Warn where a mixer's maps act on values that a token shift has mixed."""
    if mixer.exchanged:
        # In the same words for all layers, of which Python shows one.
        warnings.warn(
            f"{type(call.module).__name__} reads neighboring tokens before its scan (a token "
            "shift), which its maps do not show: they act on the mixed values. supported() says "
            "how much; MambaLRP accounts for it.",
            UserWarning,
            stacklevel=2,
        )
