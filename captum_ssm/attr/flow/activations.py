"""The activations inside of frozen mixers, kept in the graph of a run, and their coefficients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from captum_ssm.attr.relevance import coefficients_at, times
from captum_ssm.attr.relevance_stand_ins import RelevanceStandIns
from captum_ssm.capture import FrozenCall, Request
from captum_ssm.capture.check import Rebuilt
from captum_ssm.capture.recording import gradients_at
from captum_ssm.discovery.frozen_scans import scans_frozen
from captum_ssm.discovery.scans.proof import Scan
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.graph.relevance_rules import is_norm
from captum_ssm.mixers import FrozenMixer, MixerCall, find_adapter
from captum_ssm.utils.nested import map_tensors, tensors_in, with_first


@dataclass(frozen=True)
class Activations:
    """What one frozen mixer was given, and what its parts returned, or coefficients at these.

    Args:
        mixer (FrozenMixer): the mixer.
        inputs, values, mixed (list of Tensor): what each scan's convolution, its recurrence, and
            its skip were given and returned, ``(B, L, D)``, in the scan's order: u, v and y.
        gated (Tensor): what the output projection is given, ``(B, L, D)``.
        output (Tensor): what the mixer returns, ``(B, L, E)``, or an image of as many tokens.
        added (list of Tensor, optional): for each scan of a mixer that was measured, the part of
            its skip that the module itself adds, and the scan's function does not, so that
            ``mixed`` is without it; None where there is no such part. Default: None
    """

    mixer: FrozenMixer = field(repr=False)
    inputs: list[Tensor]
    values: list[Tensor]
    mixed: list[Tensor]
    gated: Tensor
    output: Tensor
    added: list[Tensor] | None = None

    @property
    def is_measured(self) -> bool:
        """Whether the mixer was measured: only its scans and its output are in the graph."""
        return not self.gated.requires_grad

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in one list."""
        return [*self.inputs, *self.values, *self.mixed, self.gated, self.output]

    def with_skips(self) -> list[Tensor]:
        """What each scan returned, with all of its skip, ``(B, L, D)``."""
        if self.added is None:
            return self.mixed
        parts = zip(self.mixed, self.added, self.values, strict=True)
        return [torch.addcmul(y.detach(), skip.to(y), v.detach().to(y)) for y, skip, v in parts]

    def replaced(self, tensors: Sequence[Tensor]) -> Activations:
        """These with others in the place of :attr:`tensors`, such as their coefficients."""
        n = len(self.mixed)
        inputs, values, mixed = (list(tensors[k * n : (k + 1) * n]) for k in range(3))
        gated, output = tensors[3 * n :]
        return Activations(self.mixer, inputs, values, mixed, gated, output, self.added)


@dataclass(frozen=True)
class ScannedCall:
    """A call of a mixer that was measured, which ran as it is, its scans frozen."""

    scans: list[Scan]
    output: Tensor

    def activations(self, layer: FrozenCall) -> Activations:
        """The activations of the call, as far as they are in the graph.

        Raises:
            UnsupportedModelError: for scans that are not those of the frozen mixer, one by one.
        """
        mixer = layer.mixer
        parts = [scan for scan, _, _ in mixer.scans_in_order()]
        pairs = zip(parts, self.scans, strict=False)
        if len(parts) != len(self.scans) or not all(_is_same(part, scan) for part, scan in pairs):
            raise UnsupportedModelError(
                f"{layer.name} ({type(layer.call.module).__name__}) has no adapter, and its scans "
                "work on the tokens in several ways at once, so its edges have no coefficients of "
                "their own; expected scans of all tokens. Register an adapter with "
                "captum_ssm.register_mixer(module_type, freeze)."
            )
        return Activations(
            mixer,
            [part.inputs.detach() for part in parts],
            [scan.values for scan in self.scans],
            [scan.mixed for scan in self.scans],
            mixer.gated_output().detach(),
            self.output,
            _added_skips(parts, self.scans),
        )


def _added_skips(parts: Sequence[FrozenMixer], scans: Sequence[Scan]) -> list[Tensor] | None:
    # What the module adds of each scan's values to what the scan's function returned.
    def skip(scan: FrozenMixer | Scan) -> Tensor:
        zeros = torch.zeros_like(scan.values.detach())
        return zeros if scan.skip is None else zeros + scan.skip.detach().to(zeros)

    added = [skip(part) - skip(scan) for part, scan in zip(parts, scans, strict=True)]
    return added if any(bool(difference.any()) for difference in added) else None


def _is_same(part: FrozenMixer, scan: Scan) -> bool:
    if part.values.shape != scan.values.shape:
        return False
    expected = part.values.detach().to(scan.values.dtype)
    error = (scan.values.detach() - expected).norm()
    return bool(error <= 1e-3 * expected.norm())


@dataclass(frozen=True)
class BlockStream:
    """The residual stream around one block of the model, in the graph.

    Args:
        before, after (list of Tensor): the tensors ``(B, L, ...)`` that the block is given, and
            those that it returns.
        mixers (range): which of the run's mixers are in it.
    """

    before: list[Tensor]
    after: list[Tensor]
    mixers: range


class Changed(NamedTuple):
    """What becomes of a call of a mixer in a run that is not the model's own.

    Args:
        mixer (FrozenMixer): has the coefficients.
        mixed (list of Tensor): what its scans return, ``(B, L, D)``, in the scan's order.
        gated (Tensor): what its output projection is given, ``(B, L, D)``.
    """

    mixer: FrozenMixer
    mixed: list[Tensor]
    gated: Tensor


class ActivationStandIns(RelevanceStandIns):
    """The rules of MambaLRP, with the activations inside of each mixer kept in the graph.

    Args:
        request (Request): what is run.
        blocks (set of nn.Module, optional): further modules, whose inputs and outputs are kept.
            Default: None
        rule (str, optional): ``"lrp"``; ``"gradient"`` leaves the coefficients in the graph, and
            what is outside of the mixers as it is. Default: ``"lrp"``

    Attributes:
        made_of (list of Activations or ScannedCall): by mixer, in forward order.
        streams (list of BlockStream): by block, in forward order.
        normed (list of tuple): what norms outside of the mixers were given, in the graph, each with
            the number of mixers that ran before.
    """

    def __init__(
        self,
        request: Request,
        blocks: set[nn.Module] | None = None,
        rule: str = "lrp",
    ) -> None:
        super().__init__(request)
        self.blocks = blocks or set()
        self.rule = rule

    def picks(self, module: nn.Module) -> bool:
        return module in self.blocks or super().picks(module)

    def begin(self) -> None:
        super().begin()
        self.made_of: list[Activations | ScannedCall] = []
        self.scans: list[Scan] = []  # of the call that is running
        self.streams: list[BlockStream] = []
        self.normed: list[tuple[int, Tensor]] = []

    def around(self, root: nn.Module) -> AbstractContextManager[None]:
        return scans_frozen(root, self.scans.append)

    def __call__(self, call: MixerCall) -> Any:
        before = len(self.made_of)
        if call.module in self.blocks:
            call = replace(call, result=_apart(call))
        result = super().__call__(call)
        is_measured = len(self.made_of) == before and find_adapter(call.module) is not None
        if is_measured:
            self.made_of.append(ScannedCall(list(self.scans), call.output))
            self.scans.clear()
        return result

    def _keeps(self, call: MixerCall) -> bool:
        # Coefficients are read inside of every mixer, so that no graph can be made later; that of
        # an offloaded mixer keeps its weights.
        return True

    def rebuilt(self, mixer: FrozenMixer, call: MixerCall) -> Rebuilt:
        return self.rebuilt_of(mixer.detach_coefficients() if self.rule == "lrp" else mixer, call)

    def rebuilt_of(self, frozen: FrozenMixer, call: MixerCall) -> Rebuilt:
        """As :meth:`rebuilt`, of a mixer whose coefficients are what they shall be."""
        mixed = [scan.mixed for scan, _, _ in frozen.scans_in_order()]
        rebuilt = Rebuilt.of(frozen, call, mixed)
        assert rebuilt.gated is not None
        self._keep(frozen, frozen, mixed, rebuilt.gated, rebuilt.output)
        return rebuilt

    def _keep(
        self,
        frozen: FrozenMixer,
        mixer: FrozenMixer,
        mixed: list[Tensor],
        gated: Tensor,
        output: Tensor,
    ) -> None:
        # What a mixer was given in this run, and what another one's coefficients made of it.
        scans = [scan for scan, _, _ in frozen.scans_in_order()]
        inputs, values = [scan.inputs for scan in scans], [scan.values for scan in scans]
        self.made_of.append(Activations(mixer, inputs, values, mixed, gated, output))

    def other(self, call: MixerCall) -> Tensor | None:
        if call.module in self.blocks and torch.is_tensor(call.output):
            shape = call.output.shape[:2]
            before, after = (
                [x for x in tensors_in(part) if x.is_floating_point() and x.shape[:2] == shape]
                for part in ((call.args, call.kwargs), call.result)
            )
            first = self.streams[-1].mixers.stop if self.streams else 0
            self.streams.append(BlockStream(before, after, range(first, len(self.made_of))))
            return None
        if is_norm(call.module):
            unnormed = next(tensors_in((call.args, call.kwargs)))  # in the graph, of its own dtype
            if unnormed.requires_grad:
                self.normed.append((len(self.made_of), unnormed))
        if self.rule == "lrp" or isinstance(call.module, nn.Embedding):
            return super().other(call)
        return None


def _apart(call: MixerCall) -> Any:
    # What a block returned, as tensors of their own in the graph where there are several: what the
    # block itself reads of one, such as the residual of mamba-ssm's blocks, is not read there.
    returned = [x for x in tensors_in(call.result) if x.requires_grad]
    if len(returned) < 2:
        return call.result
    return map_tensors(lambda x: x.view_as(x) if x.requires_grad else x, call.result)


class ChangedStandIns(ActivationStandIns, ABC):
    """The rules in a run whose scans return something else than in the model's own."""

    @abstractmethod
    def changed(self, call: MixerCall, frozen: FrozenMixer) -> Changed:
        """What a mixer's scans return in this run, and what becomes of it."""

    def __call__(self, call: MixerCall) -> Any:
        before = len(self.made_of)
        result = super().__call__(call)
        if len(self.made_of) == before:
            return result
        output = self.made_of[-1].output
        return with_first(call.result, output.reshape(call.output.shape).to(call.output.dtype))

    def rebuilt_of(self, frozen: FrozenMixer, call: MixerCall) -> Rebuilt:
        mixer, mixed, gated = self.changed(call, frozen)
        output = mixer.projected(gated)
        self._keep(frozen, mixer, mixed, gated, output)
        return Rebuilt(output, torch.ones(len(gated)), mixer.rounding, gated=gated)


class ScaledStandIns(ChangedStandIns):
    """The rules in a run with all edges times a factor; the arguments are those of its base."""

    def __init__(self, *args: Any, factor: float) -> None:
        super().__init__(*args)
        self.factor = factor

    def changed(self, call: MixerCall, frozen: FrozenMixer) -> Changed:
        mixed = [scan.mix(scan.values, self.factor) for scan, _, _ in frozen.scans_in_order()]
        return Changed(frozen, mixed, frozen.gated_output_of(mixed))


@dataclass(frozen=True)
class PropagatedRun:
    """A run, and the coefficients of its score at all that was kept of it.

    Args:
        streams (list of BlockStream): around its blocks.
        inside (list of Activations): inside of its mixers.
        coefficients (dict): of tensors, by their identity; None where the score does not depend on
            one.
    """

    streams: list[BlockStream]
    inside: Sequence[Activations]
    coefficients: dict[int, Tensor | None] = field(repr=False)

    @classmethod
    def of(
        cls,
        stand_ins: ActivationStandIns,
        streams: list[BlockStream],
        inside: Sequence[Activations],
        score: Tensor,
        rule: str,
        *,
        retain_graph: bool,
    ) -> PropagatedRun:
        """A run's coefficients, from one backward pass by a rule."""
        starts = stand_ins.starts()
        around = [x for stream in streams for x in (*stream.before, *stream.after)]
        read_at = [x for activations in inside for x in activations.tensors]

        def of(tensors: list[Tensor]) -> Sequence[Tensor | None]:
            if rule == "lrp":
                return coefficients_at(tensors, score, starts, retain_graph=retain_graph)
            return gradients_at(tensors, score)

        return cls(streams, inside, by_identity([*starts, *read_at, *around], of))

    def coefficient_at(self, x: Tensor) -> Tensor | None:
        """The coefficient at one tensor."""
        return self.coefficients.get(id(x))

    def coefficients_at(self, tensors: Sequence[Tensor]) -> list[Tensor | None]:
        """The coefficients at tensors."""
        return [self.coefficient_at(x) for x in tensors]

    def with_coefficients(self, tensors: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """The tensors that the score depends on, with their coefficients."""
        pairs = ((x, self.coefficient_at(x)) for x in tensors)
        return [(x, g) for x, g in pairs if g is not None]

    def relevance_at(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The relevance of tensors' entries, in their shapes."""
        return times(tensors, self.coefficients_at(tensors))


def by_identity(
    tensors: Sequence[Tensor], of: Callable[[list[Tensor]], Sequence[Tensor | None]]
) -> dict[int, Tensor | None]:
    """What a function returns for those of the tensors that have a graph, each given once."""
    wanted = {id(x): x for x in tensors if x.requires_grad}
    return dict(zip(wanted, of(list(wanted.values())), strict=True))


def coefficients_of(
    inside: Sequence[Activations], of: Callable[[list[Tensor]], Sequence[Tensor | None]]
) -> list[Activations]:
    """Coefficients in the place of activations, zero where the score does not depend on one."""
    coefficients = by_identity([x for activations in inside for x in activations.tensors], of)

    def detached(x: Tensor) -> Tensor:
        coefficient = coefficients.get(id(x))
        return torch.zeros_like(x) if coefficient is None else coefficient.detach()

    return [
        _with_gated(layer, layer.replaced([detached(x) for x in layer.tensors])) for layer in inside
    ]


def _with_gated(activations: Activations, coefficients: Activations) -> Activations:
    if not (activations.is_measured and activations.output.requires_grad):
        return coefficients
    mixer = activations.mixer
    at_output = coefficients.output.to(activations.gated.dtype).reshape(
        *activations.gated.shape[:2], -1
    )
    at_output = at_output if mixer.out_gate is None else at_output * mixer.out_gate
    return replace(coefficients, gated=at_output @ mixer.out_weight)
