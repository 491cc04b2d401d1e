"""What edges carry on other inputs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from captum_ssm.capture import Request
from captum_ssm.capture.thrown_away import run_on_copies
from captum_ssm.errors import InputError
from captum_ssm.interventions.edges import EdgesElsewhere
from captum_ssm.interventions.editing import edited
from captum_ssm.interventions.left import sums_of
from captum_ssm.interventions.open_mixer import OpenMixer
from captum_ssm.mixers import COMPONENTS, FrozenMixer
from captum_ssm.mixers.components import check_formulation
from captum_ssm.operators import TokenOperator


@dataclass(frozen=True)
class Reference:
    """What every edge of a model carries on other inputs, for :func:`circuit`.

    The operators and the values of all mixers are kept, in memory linear in the tokens; what an
    edge carries is computed when it is asked for.

    Args:
        carried (dict): for each mixer's path, and for each call of it in a run, what the edges of
            each of its scans carry.
        mean (bool): an edge carries its mean over the inputs.
        formulation (str): ``"hidden"`` or ``"unified"``, which edges are meant.

    Examples::

        >>> other = input_ids.flip(1)
        >>> reference = captum_ssm.interventions.Reference.of(model, other, mean=False)
        >>> edges = [(0, 6, 2), (1, 6, 6)]
        >>> with captum_ssm.interventions.circuit(model, edges, ablation=reference):
        ...     logits = model(input_ids).logits
    """

    carried: dict[str, list[list[EdgesElsewhere]]] = field(repr=False)
    mean: bool
    formulation: str

    @classmethod
    def of(
        cls,
        model: Any,
        inputs: Any,
        additional_forward_args: Any = None,
        *,
        mean: bool = True,
        formulation: str = "hidden",
        check: bool = True,
    ) -> Reference:
        """What the edges carry on ``inputs``, by one run of the model.

        Args:
            model (nn.Module or nnsight model): the model.
            inputs (Tensor or dict): N examples, as for ``attribute``, as long as those of the
                circuit; padding carries nothing.
            additional_forward_args (Any, optional): further arguments of the model.
                Default: None
            mean (bool, optional): an edge carries its mean over the N examples (mean ablation).
                Otherwise, in each example of a run, what it carries in this one of ``inputs``
                (interchange); a larger batch holds all N examples several times, one time after
                the other. Default: True
            formulation (str, optional): as for :func:`circuit`. Default: ``"hidden"``
            check (bool, optional): compare each frozen mixer with its module. Default: True

        Raises:
            ValueError: for an unknown formulation, or inputs that do not fit the model.
            UnsupportedModelError: for a model without a known mixer.
            ReconstructionError: for a mixer that computes something else.
        """
        check_formulation(formulation)
        carried: dict[str, list[list[EdgesElsewhere]]] = {}

        def keep(opened: OpenMixer) -> Tensor:
            sums = sums_of(opened, whole_mixer(opened.mixer, formulation))
            of_scans = [
                EdgesElsewhere(edge_sum.operator, edge_sum.values, mean) for edge_sum in sums
            ]
            carried.setdefault(opened.path, []).append(of_scans)
            return opened.returned

        request = Request.of(model, None, inputs, additional_forward_args)
        with torch.no_grad(), edited(model, None, keep, check=check):
            run_on_copies(request)
        return cls(carried, mean, formulation)

    def at(self, opened: OpenMixer) -> list[EdgesElsewhere]:
        """What the edges of each sum of a mixer carry.

        Raises:
            InputError: for a mixer that works on other tokens in this run, or on a batch that the
                examples do not fill.
        """
        calls = self.carried.get(opened.path, [])
        if not calls:
            raise InputError(
                f"the reference knows nothing of {opened.path}; expected a Reference of this model."
            )
        elsewhere = calls[opened.visit % len(calls)]
        B, L = opened.mixer.recurrence.batch, opened.mixer.recurrence.length
        N, length = elsewhere[0].operator.batch, elsewhere[0].operator.length
        if length != L:
            raise InputError(
                f"{opened.path} is given {L} tokens in this run and {length} in the reference's; "
                "expected inputs of the same length."
            )
        if not self.mean and B % N:
            raise InputError(
                f"the reference has {N} examples and this run {B}; expected as many, or a multiple "
                "of them. With mean=True any number will do."
            )
        return elsewhere


def whole_mixer(mixer: FrozenMixer, formulation: str) -> TokenOperator | None:
    """The operator of all parts of a mixer, for ``"unified"``; None for ``"hidden"``."""
    return mixer.operator("unified", COMPONENTS) if formulation == "unified" else None
