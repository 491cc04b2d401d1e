"""Relevance flow: which edge of which layer carried the answer."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from captum_ssm.attr.flow.activations import ActivationStandIns, coefficients_of
from captum_ssm.attr.flow.edges import RelevanceEdges
from captum_ssm.attr.flow.layer_edges import layer_edges
from captum_ssm.attr.flow.stream import blocks_of, nodes_of
from captum_ssm.attr.mamba_lrp import MambaLRP, of_inputs, with_leaves
from captum_ssm.attr.options import Arguments
from captum_ssm.attr.relevance import coefficients_at, times
from captum_ssm.capture import FrozenModel, exact_arithmetic
from captum_ssm.capture.recording import gradients_at
from captum_ssm.capture.target import Against
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.graph.in_place import seen_in_views
from captum_ssm.mixers.frozen_mixer import FORMULATIONS
from captum_ssm.utils.allocator import workspace
from captum_ssm.utils.retry import retry_with_copies

RULES = ("lrp", "gradient", "integrated")


class RelevanceFlow(MambaLRP):
    r"""MambaLRP's relevance, followed along every edge of every layer.

    :meth:`attribute` is that of :class:`~captum_ssm.attr.MambaLRP`. :meth:`edges` says by which
    edges the relevance went: with the coefficients of the same propagation, the relevance that
    token i of a mixer reads from token j is :math:`E_{ij} = \sum_d g_{id} \alpha_{ij} v_{jd}`, and
    edges, skip, gate and biases add up to the relevance of what the mixer returns at each token.

    The constructor's arguments are those of :class:`~captum_ssm.attr.TokenAttribution`.

    Examples::

        >>> flow = RelevanceFlow(model)
        >>> edges = flow.edges(input_ids, target=5)
        >>> best = edges.top(1)[0]
        >>> best.target, best.source <= best.target
        (6, True)
    """

    def get_name(self) -> str:
        """The method's name."""
        return "RelevanceFlow"

    def edges(
        self,
        inputs: Any,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        against: Any = "others",
        position: Any = None,
        formulation: str = "hidden",
        rule: str = "lrp",
        steps: int = 5,
    ) -> RelevanceEdges:
        r"""The relevance along every edge of every mixer: one run and one backward pass.

        Args:
            inputs, target, additional_forward_args, position: as for ``attribute``.
            against (Any, optional): what the target's score is compared with. ``"others"``: all
                other answers, weighted by their probabilities, which removes what speaks for any
                answer; of an output that is one score, nothing. Another target: why not that one.
                None: the target's score alone. Default: ``"others"``
            formulation (str, optional): where an edge starts. ``"hidden"``: at the scan's values,
                so that it can be removed from a run (:func:`~captum_ssm.interventions.circuit`).
                ``"unified"``: at the mixer's input, before the short convolution and with the skip,
                so that the edges of one layer end where those of the next begin.
                Default: ``"hidden"``
            rule (str, optional): ``"lrp"``: the coefficients of MambaLRP, whose edges balance.
                ``"gradient"``: the plain gradient, as in edge attribution patching (Syed et al.,
                `2023 <https://arxiv.org/abs/2310.10348>`_), of removing each edge.
                ``"integrated"``: its mean over runs with all edges scaled (EAP-IG, Hanna et al.,
                `2024 <https://arxiv.org/abs/2403.17806>`_), whose edges add up to what all of them
                change of the score. Default: ``"lrp"``
            steps (int, optional): of ``"integrated"``, the number of runs. Default: 5

        Returns:
            RelevanceEdges: one map for each mixer, made where it is asked for.

        Raises:
            ValueError, TypeError: as for ``attribute``, or for an unknown formulation or rule.
            UnsupportedModelError: for a mixer that was measured, whose scans have no coefficients,
                or that works on windows of the tokens.
        """
        if formulation not in FORMULATIONS:
            raise ValueError(f"formulation is {formulation!r}; expected one of {FORMULATIONS}.")
        if rule not in RULES:
            raise ValueError(f"rule is {rule!r}; expected one of {RULES}.")
        asked = target if against is None else Against(target, against)
        arguments = Arguments(inputs, asked, additional_forward_args, position)
        with workspace():
            run = seen_in_views(retry_with_copies)
            return run(lambda: self._edges(arguments, formulation, rule))

    def _edges(self, arguments: Arguments, formulation: str, rule: str) -> RelevanceEdges:
        request = with_leaves(self._request(arguments.inputs, arguments.additional_forward_args))
        blocks = blocks_of(request.module)
        make = partial(ActivationStandIns, blocks=blocks, rule=rule)
        stand_ins, frozen = self._propagated(request, arguments, make)
        _check_known(stand_ins, frozen)
        score, kept = frozen.require_score(), stand_ins.made_of
        starts = stand_ins.starts()
        streams = [x for s in stand_ins.streams.values() for x in (*s.before, *s.after)]
        inside = [x for one in kept for x in one.tensors]
        wanted = {id(x): x for x in (*starts, *inside, *streams) if x.requires_grad}
        if rule == "lrp":
            gradients = coefficients_at(list(wanted.values()), score, starts)
        else:
            gradients = gradients_at(list(wanted.values()), score)
        at = dict(zip(wanted, gradients, strict=True))

        def of(tensors: list[Tensor]) -> list[Tensor | None]:
            return [at.get(id(x)) for x in tensors]

        self._warn(frozen)
        coefficients = coefficients_of(kept, of)
        relevance = of_inputs(frozen, stand_ins.of_inputs(lambda x: times(x, of(x))))
        with self._computing():
            layers = {
                layer.name: layer_edges(layer.name, *parts, formulation, layer.order)
                for layer, *parts in zip(frozen.layers, kept, coefficients, strict=True)
            }
            nodes = nodes_of(stand_ins.streams, lambda x: at.get(id(x)))
        return RelevanceEdges(layers, score.detach(), relevance, nodes, rule, formulation)


def _check_known(stand_ins: ActivationStandIns, frozen: FrozenModel) -> None:
    if len(stand_ins.made_of) != len(frozen.layers):
        raise UnsupportedModelError(
            "a mixer of this model was measured, and runs as it is in relevance propagation, so "
            "its edges have no coefficients; expected mixers that an adapter is registered for. "
            "Register one with captum_ssm.register_mixer(module_type, freeze)."
        )
