"""The scans of a module alone, where nothing else of it could be measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from captum_ssm.discovery.measure.convolution import find_convolution
from captum_ssm.discovery.measure.cut_run import CutRun
from captum_ssm.discovery.measure.directions import parted
from captum_ssm.discovery.measure.moved import entered
from captum_ssm.discovery.measure.rerun import NotMeasured, Rerun, is_close
from captum_ssm.discovery.measure.token_shift import share_of_neighbors
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.graph.points import Point, gradients
from captum_ssm.graph.readers import Entries, readers, readers_by_bits
from captum_ssm.mixers.families.vision import in_image_order
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.operators import TokenOperator


@dataclass(frozen=True, kw_only=True)
class FrozenRecurrence(FrozenMixer):
    """The scans of a module whose other parts could not be measured: ``"hidden"`` maps alone.

    Its scans were compared with what they returned when they were called.

    Args:
        recorded (Tensor): what the module returned, ``(B, L, E)``.
        missing (UnsupportedModelError): says what could not be measured.
    """

    recorded: Tensor
    missing: UnsupportedModelError

    def operator(
        self, formulation: str = "hidden", components: Iterable[str] | None = None
    ) -> TokenOperator:
        self._chosen(formulation, components)
        if formulation != "hidden":
            raise self.missing
        return self.recurrence

    def scans_in_order(self) -> list[tuple[FrozenMixer, Tensor | None, float]]:
        raise self.missing

    def mean_gated_gradient(self, gradient: Tensor) -> Tensor:
        raise self.missing

    def gated_output(self, mixed: Sequence[Tensor] | None = None) -> Tensor:
        """What the module returned: nothing of it is computed again."""
        return self.recorded

    def recurrence_share(self, gated: Tensor) -> Tensor:
        return gated.new_ones(gated.shape[0])

    def output(self) -> Tensor:
        return self.recorded


def find_recurrence(rerun: Rerun, why: str) -> FrozenRecurrence | None:
    """The scans alone, if their orders can be read off the module's output."""
    output, directions = Point.of(rerun.run.output), []
    try:
        for cut in rerun.run.scans:
            earlier = Point.of(cut.leaf)
            lands = readers_by_bits(output, earlier, by_channel=True)
            if lands is None or bool((lands < 0).any()):
                return None
            ones = torch.ones_like(cut.leaf).flatten(0, 1)
            channels = torch.arange(earlier.width, device=lands.device).expand_as(lands)
            for direction in parted(rerun, cut, Entries(lands, channels, ones)):
                directions.append(
                    direction if direction.lands is None else entered(rerun, direction)
                )
        convolutions = [find_convolution(rerun, direction) for direction in directions]
        neighbor_share = share_of_neighbors(rerun, directions, convolutions)
    except NotMeasured:
        return None
    first, orders = directions[0], tuple(d.order for d in directions)
    eye = torch.eye(rerun.E, dtype=first.values.dtype)  # of what the module returned
    call = rerun.call
    return FrozenRecurrence(
        recurrence=in_image_order([d.operator for d in directions], orders),
        inputs=first.values[:, torch.argsort(first.order)],
        out_proj=lambda y: y,
        out_weight=eye.to(first.values.device),
        neighbor_share=neighbor_share,
        recorded=rerun.run.output.detach().reshape(rerun.B, rerun.L, rerun.E),
        missing=UnsupportedModelError(
            f"{call.path} ({type(call.module).__name__}) has no adapter, and of what it does only "
            f'the scans could be measured: {why}. Methods of "hidden" maps and MambaLRP work; for '
            "the others register an adapter with captum_ssm.register_mixer(module_type, freeze)."
        ),
    )


def is_silent(run: CutRun) -> bool:
    """Whether a module without its scans and convolutions returns nothing of its tokens.

    Or each token by one matrix of the module's own, a skip, as the D of S5 and LRU. The identity
    would be a residual stream.
    """
    if not run.output.requires_grad:
        return True
    output, tokens = Point.of(run.output), Point.of(run.tokens)
    noise = output.noise()[:1]
    seed = noise.expand(output.tokens, -1).contiguous()
    (by_token,) = gradients([output], [seed], [tokens])
    if by_token is None or not bool((by_token != 0).any()):
        return True
    first = by_token[:1]
    if first.shape == noise.shape:
        factor = (first * noise).sum() / noise.square().sum()
        if is_close(factor * noise, first):
            return False
    return is_close(first.expand_as(by_token), by_token) and readers(output, tokens) is not None
