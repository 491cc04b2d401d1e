"""Fused parts of flash-linear-attention, run by their equations while a module is measured.

And the norms of mamba-ssm that also add the residual stream.

Their kernels are nodes of the autograd graph that tell nothing of what they do to which token. The
results are the same up to rounding, and are compared with what the module returned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.scans import FunctionCall

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "sigmoid": torch.sigmoid,
}


@contextmanager
def unfused(module: nn.Module) -> Iterator[None]:
    """Run the fused norms and convolutions inside of ``module`` by their equations."""
    with ExitStack() as stack:
        for part in module.modules():
            plain = _PLAIN.get(type(part).__name__)
            if plain is None or type(part).__module__.partition(".")[0] != "fla":
                continue
            before = vars(part).get("forward")
            part.forward = partial(plain, part, part.forward)
            stack.callback(_put_back, part, before)
        yield


def fused_functions() -> dict[Callable[..., Any], Callable[[FunctionCall], Any]]:
    """Fused functions of the process, each with what computes a call of it by its equation."""
    found: dict[Callable[..., Any], Callable[[FunctionCall], Any]] = {}
    if "fla.modules" not in sys.modules:
        return found
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.modules."):
            for known, plain in _PLAIN_FUNCTIONS.items():
                function = vars(module).get(known)
                if isinstance(function, FunctionType) and function.__name__ == known:
                    found[function] = plain
    return found


def fused_norms() -> dict[Callable[..., Any], Callable[[FunctionCall], Any]]:
    """Functions of the process that add a residual stream and norm it, as those of mamba-ssm."""
    found: dict[Callable[..., Any], Callable[[FunctionCall], Any]] = {}
    for module in list(sys.modules.values()):
        for name in ("layer_norm_fn", "rms_norm_fn"):
            function = getattr(module, "__dict__", {}).get(name)
            if isinstance(function, FunctionType):
                names = function.__code__.co_varnames[: function.__code__.co_argcount]
                if {"x", "weight", "bias", "residual", "prenorm", "eps"}.issubset(names):
                    found[function] = _added_norm
    return found


def _put_back(part: nn.Module, forward: Any) -> None:
    if forward is None:
        del part.forward
    else:
        part.forward = forward


def _is_more(args: Any, kwargs: dict[str, Any]) -> bool:
    # Whether a call asks for more than the equation: a residual, a cache, packed sequences.
    return bool(args) or any(v is not None and v is not False for v in kwargs.values())


def _rms_norm(norm: Any, fused: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    if _is_more(args, kwargs):
        return fused(x, *args, **kwargs)
    y = F.rms_norm(x.float(), x.shape[-1:], eps=norm.eps)
    y = y if norm.weight is None else y * norm.weight
    return (y if norm.bias is None else y + norm.bias).to(x.dtype)


def _gated_norm(norm: Any, fused: Any, x: Tensor, g: Tensor, *args: Any, **kwargs: Any) -> Any:
    if _is_more(args, kwargs):
        return fused(x, g, *args, **kwargs)
    return (_rms_norm(norm, None, x).float() * _ACTIVATIONS[norm.activation](g.float())).to(x.dtype)


def _grouped_norm(norm: Any, fused: Any, x: Tensor, z: Tensor | None = None) -> Any:
    y = x.float()
    if z is not None and not norm.norm_before_gate:
        y = y * F.silu(z.float())
    size = norm.group_size or y.shape[-1]
    y = F.rms_norm(y.unflatten(-1, (-1, size)), (size,), eps=norm.eps).flatten(-2) * norm.weight
    y = y if norm.bias is None else y + norm.bias
    if z is not None and norm.norm_before_gate:
        y = y * F.silu(z.float())
    return y.to(x.dtype)


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
    given = call.arguments
    if given["residual"] is not None or given["prenorm"]:
        return call.run()
    x, gate, weight, bias = given["x"], given.get("g"), given["norm_weight"], given["norm_bias"]
    y = F.rms_norm(x.float(), x.shape[-1:], eps=given["eps"])
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    y = y if gate is None else y * F.silu(gate.float())
    return F.linear(y.to(x.dtype), given["linear_weight"].to(x.dtype), given["linear_bias"])


def _added_norm(call: FunctionCall) -> Any:
    given = call.arguments
    more = ("x1", "weight1", "bias1", "rowscale", "dropout_p")
    if any(torch.is_tensor(given.get(name)) or given.get(name) for name in more):
        return call.run()
    x, weight, bias = given["x"], given["weight"], given["bias"]
    added = x if given["residual"] is None else x + given["residual"]
    added = added.float() if given.get("residual_in_fp32") else added
    if given.get("is_rms_norm", call.function.__name__ == "rms_norm_fn"):
        y = F.rms_norm(added, x.shape[-1:], weight, given["eps"])
        y = y if bias is None else y + bias
    else:
        y = F.layer_norm(added, x.shape[-1:], weight, bias, given["eps"])
    y = y.to(x.dtype)
    return (y, added) if given["prenorm"] else y


_PLAIN_FUNCTIONS: dict[str, Callable[[FunctionCall], Any]] = {
    "rms_norm_linear": _norm_linear,
    "rms_norm_swish_gate_linear": _norm_linear,
}
