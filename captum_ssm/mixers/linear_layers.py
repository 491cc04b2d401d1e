"""Linear layers: plain, or quantized or wrapped by another library."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

# So little may be read of other tokens: where all are rounded by one scale, it is not nothing.
_LEAST = 1e-6


def is_quantized(module: nn.Module) -> bool:
    """Whether a linear layer of ``module``, or one it wraps, holds quantized weights."""
    return any(
        _holds_codes(value)
        for part in module.modules()
        if hasattr(part, "in_features")
        for value in _weights(part)
    )


def _weights(layer: nn.Module) -> list[Tensor]:
    weight = getattr(layer, "weight", None)
    if callable(weight) and not torch.is_tensor(weight):  # torch.ao's packed layers
        weight = weight()
    values = [*layer.parameters(), *layer.buffers()]
    return [*values, weight] if torch.is_tensor(weight) else values


def _holds_codes(value: Tensor) -> bool:
    # Integers, floats of one byte, or a quantization library's tensor, which may claim any dtype.
    # Torch's own subclasses (DTensor) hold plain numbers; a flag, mask or counter is not a weight.
    if type(value).__module__.partition(".")[0] != "torch":
        return True
    if value.dim() == 0 or value.dtype == torch.bool or value.is_complex():
        return False
    return not value.is_floating_point() or value.element_size() == 1


def is_plain(layer: Any) -> TypeGuard[nn.Linear]:
    """Whether ``layer`` computes as ``nn.Linear`` does, with a plain floating-point weight."""
    return (
        isinstance(layer, nn.Linear)
        and type(layer).forward is nn.Linear.forward
        and type(layer.weight) in (Tensor, nn.Parameter)
        and layer.weight.is_floating_point()
    )


def wraps_weight(layer: Any) -> bool:
    """Whether ``layer`` has the plain weight of a linear layer, and another forward (LoRA)."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or type(weight) not in (Tensor, nn.Parameter):
        return False
    return weight.dim() == 2 and weight.is_floating_point() and not is_plain(layer)


def width_of(layer: nn.Module) -> int:
    """The channels that a linear layer is given: those of the first one in it, if it wraps some."""
    widths = (getattr(part, "in_features", None) for part in layer.modules())
    return next(width for width in widths if width is not None)


def by_token(layer: nn.Module, x: Tensor) -> tuple[Tensor, bool]:
    """What a layer, as one around a linear one, returns, and whether it mixes tokens.

    It makes a token of ``x (B, L, in)`` of others where its gradient says so of one of the tokens;
    a layer that has none, as some that are quantized, is not looked at.
    """
    if x.dim() < 3:
        return layer(x), False
    has_graph = x.requires_grad and torch.is_grad_enabled()
    with torch.inference_mode(False), torch.enable_grad(), suppress(RuntimeError):
        tokens = x if has_graph else x.detach().clone().requires_grad_()
        y = layer(tokens)
        size = torch.linalg.vector_norm(y[:, x.shape[1] // 2])
        (gradient,) = torch.autograd.grad(size, tokens, retain_graph=has_graph)
        read = gradient.abs().sum((0, *range(2, x.dim())))
        return y if has_graph else y.detach(), int((read > _LEAST * read.amax()).sum()) > 1
    return layer(x), False
