"""The activations inside of frozen mixers, kept in the graph of a run, and their coefficients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.attr.mamba_lrp import RelevanceStandIns
from captum_ssm.capture import Request
from captum_ssm.capture.check import Rebuilt
from captum_ssm.mixers import FrozenMixer, MixerCall
from captum_ssm.utils.nested import tensors_in


@dataclass(frozen=True)
class Activations:
    """What one frozen mixer was given, and what its parts returned, or coefficients at these.

    Args:
        mixer (FrozenMixer): the mixer.
        inputs, values, mixed (list of Tensor): what each scan's convolution, its recurrence, and
            its skip were given and returned, ``(B, L, D)``, in the scan's order: u, v and y.
        gated (Tensor): what the output projection is given, ``(B, L, D)``.
        output (Tensor): what the mixer returns, ``(B, L, E)``.
    """

    mixer: FrozenMixer = field(repr=False)
    inputs: list[Tensor]
    values: list[Tensor]
    mixed: list[Tensor]
    gated: Tensor
    output: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in one list."""
        return [*self.inputs, *self.values, *self.mixed, self.gated, self.output]

    def replaced(self, tensors: Sequence[Tensor]) -> Activations:
        """These with others in the place of :attr:`tensors`, such as their coefficients."""
        n = len(self.mixed)
        parts = [list(tensors[k * n : (k + 1) * n]) for k in range(3)]
        return Activations(self.mixer, *parts, *tensors[3 * n :])


@dataclass(frozen=True)
class BlockStream:
    """The residual stream around one block of the model, in the graph.

    Args:
        before, after (list of Tensor): the tensors ``(B, L, ...)`` that the block is given, and
            those that it returns.
    """

    before: list[Tensor]
    after: list[Tensor]


class ActivationStandIns(RelevanceStandIns):
    """The rules of MambaLRP, with the activations inside of each mixer kept in the graph.

    Args:
        request (Request): what is run.
        blocks (dict, optional): further modules, whose inputs and outputs are kept, with their
            paths. Default: None
        rule (str, optional): ``"lrp"``; ``"gradient"`` leaves the coefficients in the graph, and
            what is outside of the mixers as it is. Default: ``"lrp"``

    Attributes:
        made_of (list of Activations): by mixer, in forward order.
        streams (dict): by block.
    """

    def __init__(
        self,
        request: Request,
        blocks: dict[nn.Module, str] | None = None,
        rule: str = "lrp",
    ) -> None:
        super().__init__(request)
        self.blocks = {} if blocks is None else blocks
        self.rule = rule
        self.made_of: list[Activations] = []
        self.streams: dict[str, BlockStream] = {}
        self.kept_bytes = math.inf

    def picks(self, module: nn.Module) -> bool:
        return module in self.blocks or super().picks(module)

    def begin(self) -> None:
        super().begin()
        self.made_of.clear()
        self.streams.clear()

    def rebuilt(self, mixer: FrozenMixer, call: MixerCall) -> Rebuilt:
        frozen = mixer.detach_coefficients() if self.rule == "lrp" else mixer
        scans = [scan for scan, _, _ in frozen.scans_in_order()]
        mixed = [scan.mixed for scan in scans]
        rebuilt = Rebuilt.of(frozen, call, mixed)
        inputs, values = [scan.inputs for scan in scans], [scan.values for scan in scans]
        assert rebuilt.gated is not None
        self.made_of.append(
            Activations(frozen, inputs, values, mixed, rebuilt.gated, rebuilt.output)
        )
        return rebuilt

    def other(self, call: MixerCall) -> Tensor | None:
        path = self.blocks.get(call.module)
        if path is not None:
            shape = call.output.shape[:2]
            before, after = (
                [x for x in tensors_in(part) if x.is_floating_point() and x.shape[:2] == shape]
                for part in ((call.args, call.kwargs), call.result)
            )
            self.streams[path] = BlockStream(before, after)
            return None
        if self.rule == "lrp" or isinstance(call.module, nn.Embedding):
            return super().other(call)
        return None


def coefficients_of(
    kept: Sequence[Activations], of: Callable[[list[Tensor]], list[Tensor | None]]
) -> list[Activations]:
    """Coefficients in the place of activations, zero where the score does not depend on one.

    Args:
        kept (sequence of Activations): by mixer.
        of (Callable): returns the coefficients at tensors.
    """
    tensors = [x for one in kept for x in one.tensors]
    wanted = {id(x): x for x in tensors if x.requires_grad}
    found = dict(zip(wanted, of(list(wanted.values())), strict=True))

    def one(x: Tensor) -> Tensor:
        coefficient = found.get(id(x))
        return torch.zeros_like(x) if coefficient is None else coefficient.detach()

    return [layer.replaced([one(x) for x in layer.tensors]) for layer in kept]
