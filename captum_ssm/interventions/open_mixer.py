"""A mixer in the middle of a run, and what it returns if it is edited there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from captum_ssm.capture.check import Deviation, Rebuilt, check_reconstruction
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.mixers import FrozenMixer, MixerCall
from captum_ssm.utils.clones import address
from captum_ssm.utils.lazy import cached_property


class OwnProjection(NamedTuple):
    """A mixer's output projection, which returns the mixer's result.

    Args:
        layer (nn.Linear): a plain one.
        given (Tensor): ``(B, L, D)``, what it is given in a call.
        has_run (bool): whether it has returned, and the mixer too.
    """

    layer: nn.Linear
    given: Tensor
    has_run: bool

    def of(self, inputs: Tensor) -> Tensor:
        """What it returns for another input, ``(B, L, E)``."""
        return nn.Linear.forward(self.layer, inputs)


@dataclass(frozen=True)
class OpenMixer:
    """A mixer frozen in the middle of a run, taken apart after its scans.

    Args:
        path (str): the module's.
        call (MixerCall): the call, at the current input of the layer. Of a result that is still to
            come it has the shape.
        mixer (FrozenMixer): the same, frozen, with its graph.
        visit (int, optional): how often the module was called before in this run. Default: 0
        unedited (OpenMixer, optional): the call in the run without the intervention, if that was
            asked for. Default: None
        projection (OwnProjection, optional): what returns the module's result. Default: None, where
            that is not known
    """

    path: str
    call: MixerCall
    mixer: FrozenMixer
    visit: int = 0
    unedited: OpenMixer | None = None
    projection: OwnProjection | None = None

    @property
    def name(self) -> str:
        """The call's, as of a :class:`~captum_ssm.capture.FrozenCall`."""
        return f"{self.path}:{self.visit}" if self.visit else self.path

    @cached_property
    def mixed(self) -> list[Tensor]:
        """What each of the mixer's scans returns, ``(B, L, D)``, in the scan's order."""
        return [scan.mixed for scan, _, _ in self.mixer.scans_in_order()]

    @cached_property
    def gated(self) -> Tensor:
        """The input of the output projection, ``(B, L, D)``."""
        mixer = self.mixer
        return mixer.gated_output_of(self.mixed) if mixer.is_readable else mixer.gated_output()

    @cached_property
    def output(self) -> Tensor:
        """What the frozen mixer returns, ``(B, L, E)``."""
        return self.mixer.projected(self.gated)

    @property
    def returned(self) -> Tensor:
        """What the module itself returns, ``(B, L, E)``."""
        projection = self.projection
        if projection is None or projection.has_run:
            return self.call.output
        return projection.of(projection.given)

    @property
    def has_own_projection(self) -> bool:
        """Whether the projection is known, and the frozen mixer's."""
        if self.projection is None:
            return False
        layer, inputs, _ = self.projection
        is_weight = address(layer.weight) == address(self.mixer.out_weight)
        return is_weight and self.mixer.out_gate is None and inputs.shape == self.gated.shape

    def check(self, mask: Tensor | None) -> None:
        """Raise `ReconstructionError` unless this is what the module computed."""
        gated, projection = self.gated.detach(), self.projection
        # The output is kept for the edit, which needs the run's graph of it.
        output = self.output.detach() if projection is None else self.call.output
        with torch.no_grad():
            share = self.mixer.recurrence_share(gated)
            projected = None if projection is None else (gated, projection.given)
            rebuilt = Rebuilt(output, share, self.mixer.rounding, projected)
            deviation = Deviation.of(self.call, rebuilt)
            check_reconstruction(self.path, self.call, deviation, mask)

    def returning_mixed(self, mixed: list[Tensor]) -> Tensor:
        """The module's output if its scans returned ``mixed`` instead of :attr:`mixed`."""
        return self.returning(self.mixer.gated_output_of(mixed))

    def returning(self, gated: Tensor) -> Tensor:
        """The module's output for another input of its output projection, ``(B, L, D)``."""
        if self.projection is None:
            mixer = self.mixer if self.unedited is None else self.unedited.mixer
            actual, before, after = self.call.output, self.output, mixer.projected(gated)
        else:
            actual, before, after = self.projection.given, self.gated, gated
        before, after = before.reshape(actual.shape), after.reshape(actual.shape)
        is_followed = torch.is_grad_enabled() and actual.requires_grad
        if is_followed and not (before.requires_grad or after.requires_grad):
            raise UnsupportedModelError(
                f"{self.path} ({type(self.call.module).__name__}) was frozen without the graph of "
                "its coefficients, as all measured mixers are, so no gradient goes through the "
                "intervention's change; expected torch.no_grad(). Or register an adapter with "
                "captum_ssm.register_mixer(module_type, freeze)."
            )
        edited = _left(actual, before, after)
        if torch.is_grad_enabled():
            followed = actual + (after - before)
            edited = followed + (edited - followed).detach()
        edited = edited.to(actual.dtype)
        return edited if self.projection is None else self.projection.of(edited)


@torch.no_grad()
def _left(actual: Tensor, before: Tensor, after: Tensor) -> Tensor:
    """What an edit leaves of the module's own result, where the frozen mixer's becomes another.

    The two differ by rounding before the edit. What is left keeps its share of that, and where
    nothing is left it is zero: a norm that follows would scale the rounding of what is removed up
    to the size of a token. What is not edited stays as it is.
    """
    share = (after / before).abs_().nan_to_num_(1.0).clamp_(max=1)
    left = share.mul_(actual - before).add_(after)
    return torch.where(after == before, actual, left)
