"""Fused parts of flash-linear-attention, run by their equations while a module is measured.

The norms of mamba-ssm that also add the residual stream are here too.

Fused kernels are nodes of the autograd graph that do not say what they do to which token. The
equations give the same results up to rounding, and are compared with what the module returned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.discovery.scans import FunctionCall

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "sigmoid": torch.sigmoid,
}


def unfuse(module: nn.Module) -> None:
    """Have the fused norms and convolutions in a copy of a module run by their equations."""
    for part in module.modules():
        plain = _PLAIN.get(type(part).__name__)
        if plain is not None and type(part).__module__.partition(".")[0] == "fla":
            part.forward = partial(plain, part, part.forward)


def fused_functions() -> dict[Callable[..., Any], Callable[[FunctionCall], Any]]:
    """Fused functions of the process, each with what computes a call of it by its equation."""
    if "fla.modules" not in sys.modules:
        return {}
    modules = [vars(m) for name, m in sys.modules.items() if name.startswith("fla.modules.")]
    return {
        function: _norm_linear
        for module in modules
        for name in ("rms_norm_linear", "rms_norm_swish_gate_linear")
        if isinstance(function := module.get(name), FunctionType) and function.__name__ == name
    }


def fused_norms() -> dict[Callable[..., Any], Callable[[FunctionCall], Any]]:
    """Functions of the process that add a residual stream and norm it, as those of mamba-ssm."""
    functions: dict[Callable[..., Any], Callable[[FunctionCall], Any]] = {}
    for module in list(sys.modules.values()):
        for name in ("layer_norm_fn", "rms_norm_fn"):
            function = getattr(module, "__dict__", {}).get(name)
            if isinstance(function, FunctionType):
                names = function.__code__.co_varnames[: function.__code__.co_argcount]
                if {"x", "weight", "bias", "residual", "prenorm", "eps"}.issubset(names):
                    functions[function] = _added_norm
    return functions


def _is_more(args: Any, kwargs: dict[str, Any]) -> bool:
    # Whether a call asks for more than the equation: a residual, a cache, packed sequences.
    return bool(args) or any(v is not None and v is not False for v in kwargs.values())


def _normed(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, size: int | None = None
) -> Tensor:
    # The root mean square norm of each group of so many channels, in float32.
    size = size or x.shape[-1]
    y = F.rms_norm(x.float().unflatten(-1, (-1, size)), (size,), eps=eps).flatten(-2)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _rms_norm(norm: Any, fused: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if _is_more(args, kwargs):
        return fused(x, *args, **kwargs)
    return _normed(x, norm.weight, norm.bias, norm.eps).to(x.dtype)


def _gated_norm(norm: Any, fused: Any, x: Tensor, g: Tensor, *args: Any, **kwargs: Any) -> Any:
    if _is_more(args, kwargs):
        return fused(x, g, *args, **kwargs)
    return (_rms_norm(norm, None, x).float() * _ACTIVATIONS[norm.activation](g.float())).to(x.dtype)


def _grouped_norm(norm: Any, fused: Any, x: Tensor, z: Tensor | None = None) -> Any:
    gate = 1.0 if z is None else F.silu(z.float())
    before, after = (1.0, gate) if norm.norm_before_gate else (gate, 1.0)
    y = _normed(x.float() * before, norm.weight, norm.bias, norm.eps, norm.group_size)
    return (y * after).to(x.dtype)


def _short_conv(
    conv: Any, fused: Any, x: Tensor, *args: Any, mask: Tensor | None = None, **kwargs: Any
) -> Any:
    if _is_more(args, kwargs):
        return fused(x, *args, mask=mask, **kwargs)
    x = x if mask is None else x * mask[..., None]
    size = conv.weight.shape[-1]
    y = F.conv1d(x.mT, conv.weight, conv.bias, padding=size - 1, groups=x.shape[-1])
    y = y[..., : x.shape[1]].mT
    return (y if conv.activation is None else _ACTIVATIONS[conv.activation](y)), None


_PLAIN: dict[str, Callable[..., Any]] = {
    "RMSNorm": _rms_norm,
    "RMSNormGated": _grouped_norm,
    "FusedRMSNormGated": _gated_norm,
    "ShortConvolution": _short_conv,
}


def _norm_linear(call: FunctionCall) -> Any:
    """A norm, a gate where one is given, and a linear layer."""
    options = call.arguments
    if options["residual"] is not None or options["prenorm"]:
        return call.run()
    x, gate = options["x"], options.get("g")
    y = _normed(x, options["norm_weight"], options["norm_bias"], options["eps"])
    y = y if gate is None else y * F.silu(gate.float())
    return F.linear(y.to(x.dtype), options["linear_weight"].to(x.dtype), options["linear_bias"])


def _added_norm(call: FunctionCall) -> Any:
    options = call.arguments
    more = ("x1", "weight1", "bias1", "rowscale", "dropout_p")
    if any(torch.is_tensor(options.get(name)) or options.get(name) for name in more):
        return call.run()
    x, weight, bias = options["x"], options["weight"], options["bias"]
    added = x if options["residual"] is None else x + options["residual"]
    added = added.float() if options.get("residual_in_fp32") else added
    if options.get("is_rms_norm", call.function.__name__ == "rms_norm_fn"):
        y = F.rms_norm(added, x.shape[-1:], weight, options["eps"])
        y = y if bias is None else y + bias
    else:
        y = F.layer_norm(added, x.shape[-1:], weight, bias, options["eps"])
    y = y.to(x.dtype)
    return (y, added) if options["prenorm"] else y
