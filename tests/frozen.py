"""What tests ask of frozen layers: that they are the model's own, to the last bias term."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.capture import FrozenCall, Request, freeze
from captum_ssm.discovery.measure import freeze_measured
from captum_ssm.mixers import COMPONENTS, FrozenMixer, MixerCall


def recorded(module: nn.Module, *args: Tensor) -> MixerCall:
    """A call of a module, as a run of its model records it."""
    with torch.no_grad():
        return MixerCall("mixer", module, args, {}, module(*args))


def measured(module: nn.Module, *args: Tensor) -> FrozenMixer:
    """What is measured of a module in eval mode; it returns what the module returns."""
    call = recorded(module.eval(), *args)
    mixer = freeze_measured(call)
    rounding = {} if call.output.dtype is torch.float64 else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(mixer.output(), call.output, **rounding)
    return mixer


def frozen_layers(
    model: nn.Module, tokens: Tensor, mask: Tensor | None = None, check: bool = False
) -> list[FrozenCall]:
    extra = None if mask is None else {"attention_mask": mask}
    return freeze(Request.of(model, None, tokens, extra), query=False, check=check).layers


def affine_output(mixer: FrozenMixer) -> Tensor:
    """The mixer's output from the unified operator and the documented bias terms, nothing else."""
    y = mixer.operator("unified", COMPONENTS).matvec(mixer.inputs)
    if mixer.conv_bias is not None:
        # The bias enters after the convolution, and is carried by the rest of the operator.
        rest = mixer.operator("unified", ("activation", "gate", "norm", "skip"))
        y = y + rest.matvec(mixer.conv_bias.expand_as(mixer.inputs))
    y = y + mixer.remainder()
    return y @ mixer.out_weight.mT + mixer.out_proj(torch.zeros_like(y))


def assert_reconstructs(layer: FrozenCall, mask: Tensor | None = None) -> None:
    """The mixer, rebuilt in three ways, puts out what the model's mixer did."""
    real = 1.0 if mask is None else mask[..., None]
    mixer, expected = layer.mixer, layer.call.output * real
    for found in (mixer.output(), affine_output(mixer), mixer.detach_coefficients().output()):
        error = (found * real - expected).abs().max()
        assert error <= 1e-5 * expected.abs().max(), layer.name


def assert_shows_what_is_read(maps: Tensor, module: nn.Module, x: Tensor) -> None:
    """Rows of maps ``(L, L)`` have entries for the tokens that the output reads, and no others."""
    x = x.clone().requires_grad_()
    for i, y in enumerate(module(x)[0].sum(-1)):
        (g,) = torch.autograd.grad(y, x, retain_graph=True)
        assert torch.equal(maps[i] != 0, (g[0] != 0).any(-1))


def alter_a_head(projection: nn.Module) -> None:
    """Make a mixer compute something else in one head, which an output projection is given."""
    projection.forward = with_a_head_altered(projection.forward)


def with_a_head_altered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ``(..., D)`` that is given other values in the first quarter of channels."""

    def altered(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        factor = torch.ones(x.shape[-1])
        factor[: factor.numel() // 4] = 1.3
        return function(x * factor, *args, **kwargs)

    return altered
