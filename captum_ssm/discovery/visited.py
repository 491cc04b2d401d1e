"""The calls of modules that a search looks at."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.discovery.measure.cut_run import token_argument
from captum_ssm.discovery.scans import first_tensor
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.mixers.call import MixerCall
from captum_ssm.mixers.layout import TOKENS_FIRST
from captum_ssm.utils.clones import address
from captum_ssm.utils.nested import tensors_in

# How modules may take and return their tokens: channels last, or first, as convolutions take them,
# or tokens first; then these axes with a residual stream inside.
LAYOUTS = [
    {"channels": axis, "adds_input": adds}
    for adds in (False, True)
    for axis in (-1, 1, TOKENS_FIRST)
]
# Without a residual stream and with one: whether there is one is asked of the latter alone.
CHANNELS_LAST = [layout for layout in LAYOUTS if layout["channels"] == -1]


@dataclass
class ModuleVisit:
    """A call of a module on the stack of calls; depthwise convolutions inside of it are counted."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any = None
    convolutions: int = 0

    def call(self, **layout: Any) -> MixerCall:
        """The call, with the options of :meth:`MixerCall.of`."""
        return MixerCall.of(self.path, self.module, self.args, self.kwargs, self.result, **layout)


def has_parts(module: nn.Module) -> bool:
    """Whether a module holds more than one parameter or module itself."""
    return len([*module.parameters(recurse=False), *module.children()]) > 1


def given_first(visit: ModuleVisit) -> Any:
    """What tells the first tensor that a call is given from others; None without one."""
    first = next(tensors_in((visit.args, visit.kwargs)), None)
    return None if first is None else (address(first), first.shape, first.stride())


def ends_in_channels(output: Tensor | None, known: Collection[torch.Size]) -> bool:
    """Whether an output's last axis is that of the channels.

    It alone has the size of theirs in mixers that are known, ``(B, L, E)``, of whatever tokens.
    """
    if output is None or output.shape in known:
        return output is not None
    widths = {shape[-1] for shape in known}
    return output.shape[-1] in widths and widths.isdisjoint(output.shape[1:-1])


def no_tokens(visit: ModuleVisit) -> str:
    """Why a module that calls a scan, and those around it, are no mixers."""
    shapes = [tuple(x.shape) for x in tensors_in((visit.args, visit.kwargs))]
    output = first_tensor(visit.result)
    returned = None if output is None else tuple(output.shape)
    return (
        f"takes tensors of shapes {shapes} and returns {returned}; expected tokens (B, L, E) and "
        "one token for each, of it or of a module around it. A module counts where it is called "
        "itself, as module(x), not by another of its methods"
    )


def may_have(visit: ModuleVisit, length: int) -> bool:
    """Whether tokens of a call can be parted into sequences of a length."""
    tensors = [x for x in tensors_in((visit.args, visit.kwargs)) if x.dim() >= 3]
    sizes = [x[0].numel() // x.shape[axis] for x in tensors if x.numel() for axis in (-1, 1)]
    return any(size % length == 0 for size in [*sizes, *map(len, tensors)])


def takes_tokens(call: MixerCall) -> bool:
    """Whether a call returns a token for each of those it is given."""
    try:
        token_argument(call)
    except UnsupportedModelError:
        return False
    return True
