"""Relevance in the model's own run with some edges only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from captum_ssm.attr import Edge, RelevanceEdges, RelevanceFlow
from captum_ssm.attr.flow.activations import Changed, ChangedStandIns
from captum_ssm.capture import Request
from captum_ssm.capture.thrown_away import run_on_copies
from captum_ssm.discovery.search import MeasuredAdapter
from captum_ssm.interventions.circuit import KeptEdges
from captum_ssm.interventions.editing import edited
from captum_ssm.interventions.left import gated_by, left_of
from captum_ssm.interventions.open_mixer import OpenMixer
from captum_ssm.interventions.reference import Reference
from captum_ssm.interventions.selection import chosen_layers
from captum_ssm.mixers import FrozenMixer, MixerCall, find_adapter


@dataclass(frozen=True)
class CircuitFlow:
    """Relevance in the runs that :func:`circuit` makes of one input, of ``"hidden"`` edges.

    Args:
        request (Request): the input.
        reference (Reference, optional): what removed edges carry. Default: None, which is nothing
        whole (dict, optional): each mixer in the run of the whole model, by its path and by how
            often it was called before; coefficients are then those. Default: None, which is the
            changed run's own
    """

    request: Request
    reference: Reference | None = None
    whole: dict[tuple[str, int], OpenMixer] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, request: Request, reference: Reference | None) -> CircuitFlow | None:
        """With a reference, or else the coefficients of the whole run.

        None for a model with a mixer that was measured, inside of which no relevance is known.
        """
        module = request.module
        adapters = (
            find_adapter(module.get_submodule(path)) for path in chosen_layers(module, None)
        )
        if any(isinstance(adapter, MeasuredAdapter) for adapter in adapters):
            return None
        if reference is not None:
            return cls(request, reference)
        whole: dict[tuple[str, int], OpenMixer] = {}

        def keep(opened: OpenMixer) -> Tensor:
            whole[opened.path, opened.visit] = opened
            return opened.returned

        with torch.no_grad(), edited(request.model, None, keep, check=False):
            run_on_copies(request)
        return cls(request, whole=whole)

    def edges(self, kept: Sequence[Edge], target: Any, **options: Any) -> RelevanceEdges:
        """The relevance along every edge in the run with those that are kept.

        The target and the options are as for :meth:`RelevanceFlow.edges`.
        """
        request = self.request
        stand_ins = partial(
            CircuitStandIns,
            kept=KeptEdges.of(request.module, kept),
            reference=self.reference,
            whole=self.whole,
        )
        flow = RelevanceFlow(request.forward_func, request.model).in_changed_run(stand_ins)
        return flow.edges(request.given, target, request.extra, **options)


class CircuitStandIns(ChangedStandIns):
    """MambaLRP's rules in a run with some edges only.

    Args:
        args: of the base.
        kept (KeptEdges): the edges.
        reference, whole: as for :class:`CircuitFlow`.
    """

    def __init__(
        self,
        *args: Any,
        kept: KeptEdges,
        reference: Reference | None,
        whole: dict[tuple[str, int], OpenMixer] | None,
    ) -> None:
        super().__init__(*args)
        self.kept, self.reference, self.whole = kept, reference, whole

    def begin(self) -> None:
        super().begin()
        self.visits: Counter[str] = Counter()

    def changed(self, call: MixerCall, frozen: FrozenMixer) -> Changed:
        visit = self.visits[call.path]
        self.visits[call.path] += 1
        unedited = None if self.whole is None else self.whole[call.path, visit]
        opened = OpenMixer(call.path, call, frozen, visit, unedited)
        elsewhere = None if self.reference is None else self.reference.at(opened)
        mixed = left_of(opened, self.kept.at(opened), None, elsewhere)
        mixer = frozen if unedited is None else unedited.mixer
        return Changed(mixer, mixed, gated_by(opened, mixed))
