"""The parts that adapters share: activations, norms, short convolutions, padding, positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.graph.node_rules import activation_factor as activation_factor
from captum_ssm.kernels.convolution import causal_conv
from captum_ssm.mixers.call import MixerCall
from captum_ssm.operators import PermutedOperator, TokenOperator
from captum_ssm.operators.conv import depthwise_conv
from captum_ssm.utils.lazy import cached_property


def rms_factor(y: Tensor, weight: Tensor | None, eps: float, groups: int = 1) -> Tensor:
    """The frozen scale of an RMS norm over groups of channels, ``(B, L, D)``.

    Args:
        y (Tensor): the norm's input, ``(B, L, D)``.
        weight (Tensor, optional): its weight, ``(D,)``, or ``(D / groups,)`` if the groups
            share it.
        eps (float): its epsilon.
        groups (int, optional): number of equal groups of channels. Default: 1

    Examples::

        >>> norm, y = nn.RMSNorm(4, eps=1e-5), torch.randn(1, 7, 4)
        >>> torch.testing.assert_close(rms_factor(y, norm.weight, norm.eps) * y, norm(y))
    """
    parts = y.unflatten(-1, (groups, -1))
    scale = torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps).expand_as(parts)
    if weight is not None:
        scale = scale * (weight if weight.numel() == parts.shape[-1] else weight.view(groups, -1))
    return scale.flatten(-2)


def rms_scale(call: MixerCall, norm: Any, groups: int = 1) -> Callable[[Tensor], Tensor]:
    """A module's RMS norm over groups of channels, as :func:`rms_factor` of what it is given."""
    weight = None if norm.weight is None else call.parameter(norm.weight)
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    return lambda y: rms_factor(y, weight, eps, groups)


def projection(call: MixerCall, layer: nn.Module) -> dict[str, Any]:
    """An output projection, as the arguments of a ``FrozenMixer`` by their names."""
    return {"out_proj": lambda y: call.linear(layer, y), "out_weight": call.weight(layer)}


def unit(x: Tensor) -> Tensor:
    """``x (..., N)`` scaled to unit length, as the delta rule's keys and queries are."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def previous(x: Tensor, before: Tensor | None = None) -> Tensor:
    """The previous token at each position of ``x (B, L, E)``.

    That of the first is ``before (B, 1, E)``, or zeros.
    """
    if before is None:
        return F.pad(x, (0, 0, 1, 0))[:, :-1]
    return torch.cat([before, x[:, :-1]], 1)


@dataclass(frozen=True)
class ShortConv:
    """A causal depthwise convolution with its input; without taps it returns the input.

    Args:
        inputs (Tensor): u, ``(B, L, D)``.
        taps (Tensor, optional): ``(D, K)``. Default: None
        bias (Tensor, optional): ``(D,)``, or ``(B, L, D)``. Default: None

    Examples::

        >>> u, conv = torch.randn(1, 7, 4), nn.Conv1d(4, 4, 3, groups=4, padding=2)
        >>> short = ShortConv(u, conv.weight[:, 0], conv.bias)
        >>> torch.testing.assert_close(short.output, conv(u.mT)[..., :7].mT)
    """

    inputs: Tensor
    taps: Tensor | None = None
    bias: Tensor | None = None

    @cached_property
    def output(self) -> Tensor:
        """conv(u) + bias, ``(B, L, D)``."""
        return causal_conv(self.inputs, self.taps, self.bias)

    @property
    def arguments(self) -> dict[str, Any]:
        """It as the arguments of a ``FrozenMixer``, by their names."""
        return {"inputs": self.inputs, "conv": self.taps, "conv_bias": self.bias}

    def channels(self, index: slice | Tensor) -> ShortConv:
        """The convolution of some of the channels."""
        taps = None if self.taps is None else self.taps[index]
        bias = None if self.bias is None else self.bias[..., index]
        return ShortConv(self.inputs[..., index], taps, bias)


@dataclass(frozen=True, eq=False)
class ImageConv:
    """A depthwise convolution over tokens in an order of its own, before scans in any order.

    A text is an image of one row.

    Args:
        inputs (Tensor): u, ``(B, L, D)``, in its order.
        taps (Tensor): ``(D, Kh, Kw)``, both odd, centered on the token itself.
        grid (tuple of int): (H, W) of the image, H W = L.
        bias (Tensor, optional): ``(D,)``. Default: None
        order (Tensor, optional): ``(L,)`` int64: its t-th token is token ``order[t]`` of the
            model. None for the model's order. Default: None

    Examples::

        >>> u, conv = torch.randn(1, 6, 4), nn.Conv2d(4, 4, 3, groups=4, padding=1)
        >>> over_image = ImageConv(u, conv.weight[:, 0], (2, 3), conv.bias)
        >>> image = u.mT.unflatten(-1, (2, 3))
        >>> torch.testing.assert_close(over_image.output, conv(image).flatten(2).mT)
    """

    inputs: Tensor
    taps: Tensor
    grid: tuple[int, int]
    bias: Tensor | None = None
    order: Tensor | None = None

    @cached_property
    def output(self) -> Tensor:
        """conv(u) + bias, ``(B, L, D)``, in its order."""
        out = depthwise_conv(self.inputs, self.taps, self.grid)
        return out if self.bias is None else out + self.bias

    def before(self, operator: TokenOperator) -> TokenOperator:
        """An operator over the model's tokens, after this convolution of them."""
        if operator.maps != operator.channels:
            operator = operator.scaled(None, None)
        if self.order is None:
            return operator.convolved(self.taps, self.grid)
        operator = PermutedOperator(operator, torch.argsort(self.order))
        return PermutedOperator(operator.convolved(self.taps, self.grid), self.order)


def centered(taps: Tensor, ahead: int) -> Tensor:
    """Taps ``(D, K)`` that read so many later tokens, as those of an image of one row.

    Examples::

        >>> centered(torch.ones(2, 4), 1).shape  # two tokens before, and one that is zero after
        torch.Size([2, 1, 5])
    """
    before = taps.shape[-1] - 1 - ahead
    side = max(before, ahead)
    return F.pad(taps, (side - before, side - ahead))[:, None]


def short_conv(call: MixerCall, conv: nn.Conv1d, u: Tensor) -> ShortConv:
    """A module's convolution, in the call's working dtype.

    Args:
        call (MixerCall): the recorded call.
        conv (nn.Conv1d): causal and depthwise.
        u (Tensor): its input, ``(B, L, D)``.

    Examples::

        >>> module, x = model.backbone.layers[0].mixer, torch.randn(1, 7, 16)
        >>> call = MixerCall("mixer", module, (x,), {}, module(x))
        >>> u = torch.randn(1, 7, 32)
        >>> short = short_conv(call, module.conv1d, u)
        >>> torch.testing.assert_close(short.output, module.conv1d(u.mT)[..., :7].mT)
    """
    bias = None if conv.bias is None else call.parameter(conv.bias)
    taps = call.parameter(conv.weight)[:, 0]
    before = call.before(u, taps.shape[1] - 1)
    if before is not None:
        read = _read_of(before, taps, u.shape[1])
        bias = read if bias is None else read + bias
    return ShortConv(u, taps, bias)


def _read_of(before: Tensor, taps: Tensor, tokens: int) -> Tensor:
    # What a convolution reads at so many tokens of the K - 1 inputs before them, (B, L, D).
    reading = min(before.shape[1], tokens)
    read = causal_conv(F.pad(before, (0, 0, 0, reading)), taps)[:, before.shape[1] :]
    return F.pad(read, (0, 0, 0, tokens - reading))


def masked_tokens(call: MixerCall) -> tuple[Tensor, Tensor | None]:
    """The tokens ``(B, L, E)`` of a ``call`` with padding set to zero, and its padding mask.

    The mask is ``(B, L)``, or None where the mixer was given none.

    Examples::

        >>> module, x = model.backbone.layers[0].mixer, torch.randn(1, 7, 16)
        >>> call = MixerCall("mixer", module, (x,), {}, module(x))
        >>> tokens, mask = masked_tokens(call)
        >>> tokens.shape, mask
        (torch.Size([1, 7, 16]), None)
    """
    x, mask = call.tokens(), call.token_mask()
    return (x if mask is None else x * mask[..., None]), mask


def rotated(rotary: Any, x: Tensor, mask: Tensor | None) -> Tensor:
    """Rotary positions of ``x (B, L, H, N)``, counted from the first token that is not padding."""
    positions = torch.arange(x.shape[1], dtype=torch.float64, device=x.device)[None]
    if mask is not None:
        positions = (mask.double().cumsum(1) - 1).clamp(min=0)
    rates = rotary.base ** -(
        torch.arange(0, rotary.dim, 2, dtype=torch.float64, device=x.device) / rotary.dim
    )
    angle = (positions[..., None] * rates)[:, :, None]  # (B or 1, L, 1, N / 2)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    if rotary.interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
