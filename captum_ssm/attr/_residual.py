r"""The residual stream of a frozen model: what each layer of mixers receives and adds.

In a pre-norm model the stream before a layer is the input of the norm that feeds its mixers, and
the last norm leads from the stream to the score. What a layer adds beyond its mixers (an MLP,
experts, a multiplier on a branch) acts on one token at a time and stays with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from captum_ssm._frozen import FrozenLayer, FrozenModel
from captum_ssm.mixers import MixerCall


@dataclass(frozen=True)
class Stage:
    """One layer's step through the residual stream.

    Args:
        layers (list of FrozenLayer): its mixer, or those that run side by side.
        before (Tensor): the stream before them, ``(B, L, E)``.
        mixed (Tensor): what the mixers added, ``(B, L, E)``.
        local (Tensor): what else was added to each token until the next layer, ``(B, L, E)``.
    """

    layers: list[FrozenLayer]
    before: Tensor
    mixed: Tensor
    local: Tensor


@dataclass(frozen=True)
class ResidualStream:
    """The stages of a frozen model and the direction in which its score is read.

    Args:
        stages (list of Stage): in forward order.
        final (Tensor): the stream ahead of the last norm, ``(B, L, E)``.
        direction (Tensor): ``(B, L, E)``: the gradient of the score behind the last norm (the
            unembedding row of the target token), taken through the norm with its denominator
            frozen. Zero for tokens the score is not read from.
    """

    stages: list[Stage]
    final: Tensor
    direction: Tensor

    @classmethod
    def of(cls, frozen: FrozenModel) -> ResidualStream:
        """Read the stream off a model frozen with gradients and norms.

        Raises:
            ValueError: where the norms of a pre-norm residual stream are not found.
        """
        groups: list[list[FrozenLayer]] = []
        for layer in frozen.layers:
            if groups and groups[-1][0].stage == layer.stage:
                groups[-1].append(layer)
            else:
                groups.append([layer])
        after = [n for n in frozen.norms if n.order > frozen.layers[-1].call.order]
        width = frozen.layers[-1].call.output.shape
        after = [n for n in after if n.output.shape == width]
        if not after:
            raise ValueError(
                "no norm was found behind the model's last mixer, so the direction in which the "
                "score is read from the residual stream is not known; pass layer= and another "
                "aggregation for a map of one layer."
            )
        last = after[-1]
        final = _input(last)
        # A mixer that does not read the stream itself (Zamba's shared attention reads it beside
        # the embeddings) is no stage; what comes of it is local to the tokens.
        found = [(group, _stream_before(group[0].call, frozen.norms)) for group in groups]
        found = [(group, before) for group, before in found if before.shape == final.shape]
        groups = [group for group, _ in found]
        streams = [before for _, before in found]
        stages = []
        for group, before, following in zip(groups, streams, [*streams[1:], final], strict=True):
            mixed = torch.stack([layer.call.output.to(before.dtype) for layer in group]).sum(0)
            stages.append(Stage(group, before, mixed, following - before - mixed))
        assert last.gradient is not None
        return cls(stages, final, _through_norm(last, last.gradient.to(final.dtype)))


def _input(call: MixerCall) -> Tensor:
    tensors = [a for a in (*call.args, *call.kwargs.values()) if torch.is_tensor(a)]
    return tensors[0].to(call.dtype)


def _stream_before(call: MixerCall, norms: Sequence[MixerCall]) -> Tensor:
    # The norm whose output went into the mixer, up to a multiplier or the zeroing of padding.
    tokens = call.tokens()
    for norm in reversed(norms):
        if norm.order < call.order and norm.output.shape == tokens.shape:
            x, y = norm.output.to(tokens.dtype), tokens
            keep = (y != 0).any(-1, keepdim=True)
            x = x * keep
            inner = (x * y).sum() ** 2
            if bool(inner >= (1 - 1e-3) * x.square().sum() * y.square().sum()):
                return _input(norm)
    # Without a norm in front, the mixer reads the stream itself.
    return tokens


def _through_norm(call: MixerCall, gradient: Tensor) -> Tensor:
    """A gradient behind a norm, ahead of it, with the norm's denominator frozen."""
    norm, x, y = call.module, _input(call), call.output.to(gradient.dtype)
    eps = next((getattr(norm, n) for n in ("variance_epsilon", "eps") if hasattr(norm, n)), 1e-6)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    weight = getattr(norm, "weight", None)
    weight = x.new_ones(x.shape[-1]) if weight is None else weight.detach().to(x.dtype)
    bias = getattr(norm, "bias", None)
    y = y if bias is None else y - bias.detach().to(x.dtype)
    rms = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    centred = x - x.mean(-1, keepdim=True)
    std = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    # An RMS norm, one whose weight is stored less one (Gemma), or a layer norm: the one that
    # gives what the norm returned.
    for scale, source in ((weight * rms, x), ((1 + weight) * rms, x), (weight * std, centred)):
        error = (scale * source - y).abs().amax()
        if bool(error <= 2e-2 * y.abs().amax()):
            pulled = scale * gradient
            return pulled - pulled.mean(-1, keepdim=True) if source is centred else pulled
    raise ValueError(
        f"the model's last norm, {call.path} ({type(norm).__name__}), is neither an RMS norm nor "
        "a layer norm; pass layer= and another aggregation for a map of one layer."
    )
