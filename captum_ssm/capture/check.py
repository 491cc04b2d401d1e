"""Whether a frozen mixer computes what the mixer computed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from captum_ssm.capture.tolerances import TOLERANCE, Tolerances, tolerances_of
from captum_ssm.capture.wider_dtype import WIDER, InWider
from captum_ssm.errors import ReconstructionError
from captum_ssm.mixers import FrozenMixer, MixerCall, find_adapter
from captum_ssm.mixers.call import without_caches
from captum_ssm.mixers.linear_calls import random_signs
from captum_ssm.mixers.linear_layers import is_quantized
from captum_ssm.mixers.registry import known_of, learn_projection
from captum_ssm.utils.clones import address
from captum_ssm.utils.copies import copied
from captum_ssm.utils.fingerprint import fingerprint
from captum_ssm.utils.nested import map_tensors
from captum_ssm.utils.offload import weights_loaded

# A recurrence may be off by so many times the tolerance of the whole output, relative to itself.
RECURRENCE = 3.0

# A token may be off by so many times that tolerance, relative to itself. Measured as above, right
# adapters err by at most 6e-6, 6.8e-6, 3e-2 and 1e-1 at a token; the delta rule by 2.1e-1 in
# bfloat16, RG-LRU by 1.4e-3, 1.3e-1 and 4.3e-1.
TOKEN = 20.0

# Errors from so many times the tolerance on, of the whole and of a token, may be rounding or not.
# The mixer is then run once more in a wider dtype, which tells.
DOUBTED = 0.25, 2.5
# A recurrence of a smaller part of the output changes nothing there in float32. In float64 one that
# is as large is known up to 2e-5 of itself.
NOTHING = 1e-11
IGNORED = (
    " The mixer was given a cache: some of transformers' (Mamba's, with several tokens) do not go "
    "on from its state. Pass one token, or the whole text without a cache."
)
# Its own rounding may then be so many times the tolerance.
SLACK = 10.0


def _norms(rebuilt: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    # For each token (B, L), the norm of the error, and that of the larger of both: a token for
    # which one of them is zero is off by all of itself.
    # A mixer of images may return (B, H, W, E).
    expected = expected.to(rebuilt.dtype).reshape(rebuilt.shape)
    error, a, b = (
        torch.linalg.vector_norm(x, dim=2) for x in (rebuilt - expected, rebuilt, expected)
    )
    return error, torch.maximum(a, b)


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    return error / size.clamp(min=1e-30)


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
        off (tuple of Tensor, optional): how far the output projection is from its weight, and the
            size of what it returns, ``(B, L)``, where that was compared. Default: None
        gated (Tensor, optional): the input of the output projection, in the graph that ``output``
            is made of. Default: None
    """

    output: Tensor
    share: Tensor
    rounding: float
    projected: tuple[Tensor, Tensor] | None = None
    off: tuple[Tensor, Tensor] | None = None
    gated: Tensor | None = None

    @classmethod
    def of(
        cls,
        mixer: FrozenMixer,
        call: MixerCall | None = None,
        mixed: Sequence[Tensor] | None = None,
    ) -> Rebuilt:
        """What ``mixer`` computes.

        Of what ``call`` has kept the output projection is not computed again. ``mixed`` is what
        the mixer's scans return, where that is known.
        """
        gated = mixer.gated_output(mixed)
        with torch.no_grad():
            share = mixer.recurrence_share(gated)
        projected = None if call is None else call.projected(mixer.out_weight)
        if projected is None or projected.shape != gated.shape:
            output = mixer.projected(gated)
            off = None if call is None or is_quantized(call.module) else _off_weight(mixer, gated)
            return cls(output, share, mixer.rounding, off=off, gated=gated)
        assert call is not None
        learn_projection(call.module, mixer)
        output = mixer.projected(_Own.apply(gated, projected))
        return cls(output, share, mixer.rounding, (gated, projected), gated=gated)


def _off_weight(mixer: FrozenMixer, gated: Tensor) -> tuple[Tensor, Tensor] | None:
    # A layer of a class of its own may do something else than multiply each token by its weight,
    # such as mask some. Sums of the channels with random signs tell, up to what it adds to each
    # token: the bias term, and in a measured mixer what goes around its scans.
    if mixer.out_gate is not None:
        return None
    with torch.no_grad():
        gated = gated.detach()
        output, added = mixer.out_proj(gated), mixer.out_proj(torch.zeros_like(gated))
        signs = random_signs(mixer.out_weight)
        row = signs @ mixer.out_weight
        error = ((output - added) @ signs - gated @ row).abs()
        size = torch.linalg.vector_norm(gated, dim=2) * torch.linalg.vector_norm(row)
        return error, torch.linalg.vector_norm(output, dim=2) + size / len(row) ** 0.5


class _Own(torch.autograd.Function):
    # A module's own values, with the gradient of ours.
    @staticmethod
    def forward(ctx: Any, ours: Tensor, values: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        return grad, None


def _check_size(call: MixerCall, rebuilt: Tensor) -> None:
    # A mixer of images may return (B, H, W, E), which is as many numbers.
    output = call.output
    if output.numel() != rebuilt.numel():
        raise ReconstructionError(
            f"{call.path} ({type(call.module).__name__}) is given tokens (B, L, E) = "
            f"{(*call.given_tokens().shape,)} and returns {(*output.shape,)}; expected "
            f"{(*rebuilt.shape,)}, one token for each. If it mixes examples, explain one at a time."
        )


class Errors(NamedTuple):
    """The largest relative errors of all examples.

    Args:
        whole (float): over an example's tokens.
        recurrence (float): over an example's tokens, relative to what the recurrence adds.
        token (float): of one token.
    """

    whole: float
    recurrence: float
    token: float

    def within(self, tolerance: float) -> bool:
        """Whether they are what rounding may do, given that of the whole."""
        limits = tolerance, RECURRENCE * tolerance, TOKEN * tolerance
        return all(error <= limit for error, limit in zip(self, limits, strict=True))

    def in_doubt(self, tolerance: float) -> bool:
        """Whether something that is wrong could be as small."""
        of_whole, of_token = DOUBTED
        return not (self.whole <= of_whole * tolerance and self.token <= of_token * tolerance)


@dataclass(frozen=True)
class Deviation:
    """How far a frozen mixer is from what the mixer returned.

    Args:
        error (Tensor): ``(n, B, L)``, the norm of each token's error: of the output, and of what
            the output projection was given, where that is known.
        size (Tensor): ``(n, B, L)``, the norm of what was expected or rebuilt, the larger one.
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
        """How far ``rebuilt`` is from the output of ``call``, and from what was projected to it."""
        _check_size(call, rebuilt.output)
        norms = [] if rebuilt.projected is None else [_norms(*rebuilt.projected)]
        if rebuilt.output is not call.output:
            norms.append(_norms(rebuilt.output, call.output))
        if rebuilt.off is not None:
            norms.append(rebuilt.off)
        error, size = (torch.stack(column) for column in zip(*norms, strict=True))
        return cls(error, size, rebuilt.share, rebuilt.rounding)

    def errors(self, mask: Tensor | None, least: float = 0.0) -> Errors:
        """The largest errors of all examples.

        A recurrence whose share is not above ``least`` (a token that decays at once) adds nothing
        that could be wrong.
        """
        keep = 1.0 if mask is None else mask.to(self.error.device)
        error, size = self.error * keep, self.size * keep
        whole = _ratio(*(torch.linalg.vector_norm(x, dim=-1) for x in (error, size)))
        share = self.share.to(whole)
        of_recurrence = torch.where(share <= least, 0, _ratio(whole, share))
        token = _ratio(error, size)
        return Errors(*(float(x.amax()) for x in (whole, of_recurrence, token)))


def check_reconstruction(
    name: str, call: MixerCall, deviation: Deviation, mask: Tensor | None = None
) -> None:
    """Raise `ReconstructionError` unless a frozen mixer returns the mixer's output.

    A recurrence that adds little could be wrong and pass as rounding. Then the mixer is run once
    more, in float64 or on larger tokens, where it adds more. Larger errors of rounding could hide
    something that is wrong by a little, or at a token. Then it is run once more in a wider dtype;
    but not where kernels round by themselves, as they may do so in any dtype: then there is a
    warning.
    """
    dtype = call.output.dtype
    errors, tolerances = deviation.errors(mask), tolerances_of(call, deviation.rounding)
    tolerance = tolerances.kernels
    if errors.whole <= tolerance and errors.recurrence > RECURRENCE * tolerance:
        errors = errors._replace(recurrence=_error_of_little(call, mask))
    if errors.within(tolerance) and errors.in_doubt(tolerances.dtype) and not _is_sure(call.module):
        if not errors.within(tolerances.settings):
            _warn_of_kernels(call, tolerances)
        elif (wider := _again_in_wider_dtype(call, mask)) is not None:
            dtype, (errors, tolerance) = WIDER[dtype], wider
            if errors.within(tolerance):
                known_of(call.module).right = state_of(call.module)
    if not errors.within(tolerance):
        raise ReconstructionError(
            f"the frozen operator of {name} ({type(call.module).__name__}) does not reproduce its "
            f"output: relative error {errors.whole:.2e}, expected at most {tolerance:.0e} for "
            f"{dtype}; {errors.recurrence:.2e} of what its recurrence adds, expected at "
            f"most {RECURRENCE * tolerance:.0e}; {errors.token:.2e} at one token, expected at most "
            f"{TOKEN * tolerance:.0e}. The mixer computes something this library does "
            "not know (a variant, a hook, a patched kernel, a generation cache that is not empty), "
            "or the model changes its result in place; register an adapter with register_mixer, "
            "or pass check=False to look at the operator all the same."
            + (IGNORED if call.past is not None else "")
        )


def _error_of_little(call: MixerCall, mask: Tensor | None) -> float:
    """The error of what the recurrence adds, or of all, where that is more than rounding.

    In float64 it is. Where a mixer does not run in that, or still is in doubt, it is run on tokens
    on which the recurrence adds more; half precision, where these would overflow, in float32.
    """
    dtype = call.output.dtype
    wider = None if dtype.itemsize == 2 else _again_in_wider_dtype(call, mask)
    if wider is not None and wider[0].within(wider[1]):
        return wider[0].recurrence
    # An S6 recurrence grows with the cube of its tokens.
    scale = 30 / float(call.given_tokens().float().std().clamp(min=1e-12))
    is_wide = wider is not None or dtype.itemsize == 2
    errors = _again(call, InWider(dtype) if is_wide else nullcontext(), None, scale)
    return max(errors.whole, errors.recurrence)


def _warn_of_kernels(call: MixerCall, tolerances: Tolerances) -> None:
    # In the same words for all layers, of which Python shows one.
    warnings.warn(
        f"{type(call.module).__name__} returns float32 that a kernel on this GPU has rounded more "
        "than PyTorch does (Triton's products and cuDNN's convolutions are in TF32): its frozen "
        f"operator agrees within {tolerances.kernels:.0e}, instead of {tolerances.dtype:.0e}, and "
        "errors that are smaller would not be noticed. supported() says by how much each layer is "
        "off; on a CPU, or where `torch.backends.cudnn.allow_tf32 = False` is enough, it is exact.",
        UserWarning,
        stacklevel=2,
    )


def _again_in_wider_dtype(call: MixerCall, mask: Tensor | None) -> tuple[Errors, float] | None:
    # The errors in it, and the tolerance. None where there is none, or where the mixer does not run
    # in it: some kernels know some dtypes only.
    narrow = call.output.dtype
    if narrow not in WIDER or is_quantized(call.module):
        return None
    wide = WIDER[narrow]
    try:
        errors = _again(call, InWider(narrow), mask)
    except (RuntimeError, TypeError, ValueError, AssertionError):
        return None
    return errors, Tolerances.of(call.output.to(wide), SLACK * TOLERANCE[wide]).kernels


def _again(
    call: MixerCall,
    mode: AbstractContextManager[Any],
    mask: Tensor | None,
    scale: float = 1.0,
) -> Errors:
    # The errors of a mixer that is run again, on its tokens times a factor.
    tokens, arguments = call.given_tokens(), (call.args, without_caches(call.kwargs))
    adapter = find_adapter(call.module)
    assert adapter is not None
    uncast = torch.autocast(tokens.device.type, enabled=False)
    with torch.no_grad(), uncast, copied(call.module), mode, weights_loaded(call.module):
        args, kwargs = map_tensors(
            lambda x: x.detach() * scale if x is tokens else x.detach(), arguments
        )
        again = replace(call, args=args, kwargs=kwargs, linears=None, scans=None, past=None).run()
        deviation = Deviation.of(again, Rebuilt.of(adapter(again)))
    # A share is the norm of a difference, known up to the rounding of what is subtracted.
    return deviation.errors(mask, least=max(torch.finfo(again.output.dtype).eps, NOTHING))


def _is_sure(module: nn.Module) -> bool:
    return bool(known_of(module).right == state_of(module))


def state_of(module: nn.Module) -> Any:
    """What a module computes with: its weights and modes, and what was hung into it."""
    parts = [
        (id(type(part)), id(vars(part).get("forward")), part.training)
        + (tuple(part._forward_hooks), tuple(part._forward_pre_hooks))
        for part in module.modules()
    ]
    addresses = [address(x) for x in (*module.parameters(), *module.buffers())]
    return parts, addresses, fingerprint(module)


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
    weights = mixer.recurrence.rmatvec(mask, "mean") * (1 - mask)
    written = mixer.inputs.abs().amax(-1) * weights.abs()
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
    if mixer.neighbor_share:
        # In the same words for all layers, of which Python shows one.
        warnings.warn(
            f"{type(call.module).__name__} reads neighboring tokens before its scan (a token "
            "shift), which its maps do not show: they act on the mixed values. supported() says "
            "how much; MambaLRP accounts for it.",
            UserWarning,
            stacklevel=2,
        )
