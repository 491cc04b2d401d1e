"""Norms with frozen denominators: linear maps of each token."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from captum_ssm.mixers import MixerCall
from captum_ssm.utils.nested import tensors_in
from captum_ssm.utils.offload import weights_loaded
from captum_ssm.utils.signatures import signature

_EPS = re.compile("(.*_)?eps(ilon)?")
_ROUNDINGS = 4  # as many may add up in a norm's own arithmetic


@dataclass(frozen=True)
class FrozenNorm:
    """A recorded norm as ``scale * x + bias``, or ``scale * (x - mean(x)) + bias`` if centered.

    The scale is ``weight (E,)`` times ``inverse (B, L, 1)``, one over the denominator. Layer norms
    are centered, RMS norms are not.
    """

    weight: Tensor
    inverse: Tensor
    centered: bool
    bias: Tensor | None = None

    @classmethod
    def of(cls, call: MixerCall) -> FrozenNorm | None:
        """The frozen norm of a recorded call; None if it is neither an RMS nor a layer norm."""
        norm = call.module
        x = first_input(call).detach()
        if not x.is_floating_point() or x.shape != call.output.shape:
            return None
        y = call.output.detach().to(x.dtype)
        eps = next((v for k, v in vars(norm).items() if _EPS.fullmatch(k)), 1e-6)
        eps = torch.finfo(x.dtype).eps if eps is None else eps
        with weights_loaded(norm):
            weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
            rounding = _rounding(call, weight)
            weight = x.new_ones(x.shape[-1]) if weight is None else weight.detach().to(x)
            bias = None if bias is None else bias.detach().to(x)
        if weight.shape != x.shape[-1:]:
            return None
        centered = x - x.mean(-1, keepdim=True)
        rms, std = (torch.rsqrt(z.square().mean(-1, keepdim=True) + eps) for z in (x, centered))
        # An RMS norm, one whose weight is stored minus one (Gemma), or a layer norm.
        forms = (
            cls(weight, rms, False, bias),
            cls(1 + weight, rms, False, bias),
            cls(weight, std, True, bias),
        )
        return next((form for form in forms if form._returns(y, x, rounding)), None)

    def _returns(self, y: Tensor, x: Tensor, rounding: float) -> bool:
        # At each token, up to the rounding of what is added.
        size = x * self.inverse * self.weight
        terms = size.norm(dim=-1) + (0 if self.bias is None else self.bias.norm())
        return bool(((self(x) - y).norm(dim=-1) <= _ROUNDINGS * rounding * terms).all())

    def __call__(self, x: Tensor) -> Tensor:
        """The frozen norm of ``x (B, L, E)``."""
        # In this order a graph keeps no tensor of the size of x.
        y = (x - x.mean(-1, keepdim=True) if self.centered else x) * self.inverse * self.weight
        return y if self.bias is None else y + self.bias

    def pull_back(self, gradient: Tensor) -> Tensor:
        """The gradient before the norm, of one after it: ``(B, L, E)``."""
        pulled = gradient * self.weight * self.inverse
        return pulled - pulled.mean(-1, keepdim=True) if self.centered else pulled


def _rounding(call: MixerCall, weight: Tensor | None) -> float:
    # A norm computes in the coarsest of its dtypes; in float32 if all are finer.
    tensors = [*tensors_in((call.args, call.kwargs)), call.output]
    tensors = [*tensors, weight] if torch.is_tensor(weight) else tensors
    known = {x.dtype for x in tensors if x.is_floating_point()} | {torch.float32}
    return max(torch.finfo(dtype).eps for dtype in known)


def first_input(call: MixerCall) -> Tensor:
    """The first tensor argument of a module, in the working dtype.

    A fused norm also adds the residual stream: its input is then the sum.
    """
    tensors = [a for a in (*call.args, *call.kwargs.values()) if torch.is_tensor(a)]
    x = tensors[0].to(call.dtype)
    if "residual" not in signature(type(call.module).forward).parameters:
        return x
    residual = call.arguments.get("residual")
    return x + residual.to(x) if torch.is_tensor(residual) else x
