"""Relevance flow: which edge of which layer carried the answer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor
from typing_extensions import Self

from captum_ssm.attr.base import computed
from captum_ssm.attr.flow.activations import (
    Activations,
    ActivationStandIns,
    PropagatedRun,
    ScaledStandIns,
    coefficients_of,
)
from captum_ssm.attr.flow.build import graph_of
from captum_ssm.attr.flow.components import Components, components_of
from captum_ssm.attr.flow.direct import DirectRun, DirectStandIns
from captum_ssm.attr.flow.edges import RelevanceEdges
from captum_ssm.attr.flow.features import FeatureRelevance, check_decoder, features_of
from captum_ssm.attr.flow.graph import FlowGraph
from captum_ssm.attr.flow.layer_edges import LayerEdges, layer_edges, mean_of
from captum_ssm.attr.flow.stream import blocks_of, nodes_of, streams_of
from captum_ssm.attr.flow.ways import with_ways
from captum_ssm.attr.mamba_lrp import MambaLRP, of_inputs
from captum_ssm.attr.options import Arguments
from captum_ssm.attr.relevance_stand_ins import with_leaves
from captum_ssm.capture import FrozenModel, Readout, Request
from captum_ssm.capture.target import Against
from captum_ssm.errors import brief
from captum_ssm.mixers.components import check_formulation
from captum_ssm.utils.integers import count_of
from captum_ssm.utils.offload import moved

RULES = ("lrp", "gradient", "integrated")
# A graph that loses a larger share of the relevance at a token says so.
TOLERATED = 0.05

Keeping = TypeVar("Keeping", bound=ActivationStandIns)


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

    _stand_ins: Callable[..., ActivationStandIns] = ActivationStandIns

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
        layers: int | str | Sequence[int | str] | None = None,
        formulation: str = "hidden",
        rule: str = "lrp",
        steps: int = 5,
    ) -> RelevanceEdges:
        r"""The relevance along every edge of every mixer: one run and one backward pass.

        Args:
            inputs, target, additional_forward_args, position: as for ``attribute``.
            against (Any, optional): what the target's score is compared with. ``"others"``: all
                other answers, weighted by their probabilities, which removes what supports any
                answer; of an output that is one score, nothing. Another target: why not that one,
                read at the target's token unless it is a ``(position, token)`` of its own. None:
                the target's score alone. Default: ``"others"``
            layers (int, str or sequence, optional): only of these mixers, by index or path; None
                for all. Default: None
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
            KeyError: for a layer that is not there.
            UnsupportedModelError: for a mixer that works on windows of the tokens; or that was
                measured, where its scans do not work on all tokens one by one.
        """
        check_formulation(formulation)
        if rule not in RULES:
            raise ValueError(f"rule is {brief(rule)}; expected one of {RULES}.")
        arguments = _arguments(inputs, target, additional_forward_args, against, position)
        if rule == "integrated":
            edges = self._integrated(arguments, formulation, steps)
        else:
            edges = self._asked(arguments, formulation, rule)
        return edges if layers is None else edges.of_layers(layers)

    def graph(
        self,
        inputs: Any,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        against: Any = "others",
        position: Any = None,
        share: float = 0.9,
        formulation: str | None = None,
        tokens: Sequence[str] | None = None,
        example: int = 0,
    ) -> FlowGraph:
        r"""The edges between tokens as a graph, from the input through all layers to the answer.

        Args:
            inputs, target, additional_forward_args, against, position: as for :meth:`edges`.
            share (float, optional): the edges of the graph are the fewest, joined to the output,
                that hold this share of the size of all edges between tokens; at most 300.
                Default: 0.9
            formulation (str, optional): as for :meth:`edges`. None is ``"unified"``, in which the
                edges of one layer end where those of the next begin; or ``"hidden"`` for mixers
                with a token shift, whose edges are then joined by what the shift moves, and where
                the graph loses less so, as with biases before the convolution of a mixer that was
                measured. Default: None
            tokens (sequence of str, optional): the texts of the tokens. Default: their indices
            example (int, optional): which of the batch. Default: 0

        Raises:
            ValueError, TypeError, UnsupportedModelError: as for :meth:`edges`, or for layers that
                work on different tokens, or without a residual stream.
        """
        check_formulation("hidden" if formulation is None else formulation)
        if not 0 < share <= 1:
            raise ValueError(f"share is {brief(share)}; expected a number above 0, up to 1.")
        arguments = _arguments(inputs, target, additional_forward_args, against, position)

        def made(formulation: str | None) -> FlowGraph:
            edges = self._asked(arguments, formulation, balanced=True)
            with self._computing():
                return graph_of(edges, example, share)

        graph = made(formulation)
        if graph.error > TOLERATED and formulation is None and graph.formulation == "unified":
            graph = min(graph, made("hidden"), key=lambda one: one.error)
        if graph.error > TOLERATED:
            warnings.warn(
                f"up to {graph.error:.0%} of the relevance at a token leaves it by no edge of the "
                "graph, but by a way around the residual stream that was not found. FlowGraph.lost "
                "says where.",
                UserWarning,
                stacklevel=2,
            )
        return graph if tokens is None else graph.with_tokens(tokens)

    def components(
        self,
        inputs: Any,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        against: Any = "others",
        position: Any = None,
        formulation: str | None = None,
    ) -> Components:
        r"""What each part of the model writes directly for the target: direct logit attribution.

        Only the straight way counts, from what a mixer, an MLP or the embedding adds to the
        residual stream to the score, with norms constant, and not what later layers make of it.

        Args:
            inputs, target, additional_forward_args, against, position: as for :meth:`edges`.
            formulation (str, optional): as for :meth:`edges`, of how a mixer's part is split over
                the tokens. None is as for :meth:`graph`. Default: None

        Raises:
            ValueError, TypeError, UnsupportedModelError: as for :meth:`edges`, or for a stream that
                blocks do not add to.
        """
        check_formulation("hidden" if formulation is None else formulation)
        arguments = _arguments(inputs, target, additional_forward_args, against, position)
        return computed(lambda: self._components(arguments, formulation))

    def features(
        self,
        inputs: Any,
        target: Any = None,
        additional_forward_args: Any = None,
        *,
        readout: Readout,
        against: Any = "others",
        position: Any = None,
    ) -> FeatureRelevance:
        r"""The relevance of features of the residual stream or a state, such as an SAE's latents.

        With :math:`g_t` MambaLRP's coefficient at what the readout's layer returns, the relevance
        of feature f at token t is its value there, :math:`z_{tf}`, times :math:`g_t \cdot d_f`,
        where :math:`d_f` is its row of the decoder. Features and rest add up to the relevance of
        the stream. To ask which features of one layer made a feature of a later one, make the
        method with the later readout in the model's place.

        With ``side="state"`` the coefficient is that at the state of a mixer after token t,

        .. math::
            \Lambda_t = \sum_{i \ge t} g_i\, \partial y_i / \partial S_t

        with g at what its recurrence returns, and features and rest add up to what all edges of the
        mixer carry that pass over token t. Sums over tokens mean nothing there: what the state
        keeps counts at each.

        Args:
            inputs, target, additional_forward_args, against, position: as for :meth:`edges`.
            readout (Readout): of the same model, with a decoder.

        Raises:
            ValueError, TypeError, UnsupportedModelError: as for :meth:`edges`, for a readout
                without a decoder, or for a layer that the score does not read, or without the
                state that is asked for.
            InputError: for a decoder without that state's shape.

        Examples::

            >>> atoms = torch.randn(3, 32, 4)
            >>> mixer = "backbone.layers.0.mixer"
            >>> readout = captum_ssm.Readout(model, mixer, atoms, decoder=atoms, side="state")
            >>> RelevanceFlow(model).features(input_ids, 5, readout=readout).relevance.shape
            torch.Size([1, 7, 3])
        """
        check_decoder(readout)
        arguments = _arguments(inputs, target, additional_forward_args, against, position)
        return computed(lambda: self._features(arguments, readout))

    def _ran(
        self, arguments: Arguments, stand_ins: Callable[[Request], Keeping]
    ) -> tuple[Keeping, FrozenModel, list[Activations], Tensor]:
        # What stood in for the model's parts in its run, what each mixer kept, and the score.
        request = with_leaves(self._request(arguments.inputs, arguments.additional_forward_args))
        made, frozen = self._propagated(request, arguments, stand_ins)
        self._warn(frozen)
        return made, frozen, _kept(made, frozen), frozen.require_score()

    def _features(self, arguments: Arguments, readout: Readout) -> FeatureRelevance:
        keeping = partial(ActivationStandIns, blocks={readout.module})
        stand_ins, frozen, inside, score = self._ran(arguments, keeping)
        streams = stand_ins.streams
        run = PropagatedRun.of(stand_ins, streams, inside, score, "lrp", retain_graph=False)
        with self._computing():
            return features_of(run, stand_ins, readout, frozen.layers, score)

    def _components(self, arguments: Arguments, formulation: str | None) -> Components:
        stand_ins, frozen, inside, score = self._ran(arguments, DirectStandIns)
        run = DirectRun.of(stand_ins, inside, score)
        with self._computing():
            layers = _layers(frozen, inside, run.coefficients, formulation or _natural(inside))
            return components_of(run, layers, score)

    def in_changed_run(self, stand_ins: Callable[..., ActivationStandIns]) -> Self:
        """This method, in a run whose mixers do not return what the model's do.

        Args:
            stand_ins (Callable): makes what takes their place.
        """
        changed = copy(self)
        changed.check, changed._stand_ins = False, stand_ins
        return changed

    def _integrated(self, arguments: Arguments, formulation: str, steps: int) -> RelevanceEdges:
        # The mean over runs in which all edges are scaled by (k + 1/2) / steps.
        count = count_of("steps", steps, 1)
        whole = self._asked(arguments, formulation, "gradient")
        runs = [
            self.in_changed_run(partial(ScaledStandIns, factor=(k + 0.5) / count))._asked(
                arguments, formulation, "gradient"
            )
            for k in range(count)
        ]
        layers = {name: mean_of([run.layers[name] for run in runs]) for name in whole}
        return replace(whole, layers=layers, rule="integrated")

    def _asked(
        self,
        arguments: Arguments,
        formulation: str | None,
        rule: str = "lrp",
        *,
        balanced: bool = False,
    ) -> RelevanceEdges:
        return computed(lambda: self._edges(arguments, formulation, rule, balanced))

    def _edges(
        self, arguments: Arguments, formulation: str | None, rule: str, balanced: bool
    ) -> RelevanceEdges:
        def make(asked: Request) -> ActivationStandIns:  # once all mixers are known
            return self._stand_ins(asked, blocks_of(asked.module), rule)

        stand_ins, frozen, inside, score = self._ran(arguments, make)
        formulation = formulation or _natural(inside)
        streams, is_whole = streams_of(stand_ins, score)
        run = PropagatedRun.of(stand_ins, streams, inside, score, rule, retain_graph=balanced)
        relevance = of_inputs(frozen, stand_ins.of_inputs(run.relevance_at))
        with self._computing():
            coefficients = coefficients_of(inside, run.coefficients_at)
            layers = _layers(frozen, inside, coefficients, formulation)
            nodes = nodes_of(streams, run.coefficient_at, frozen.layers[0].device)
        if balanced:
            nodes = with_ways(nodes, run, coefficients, layers, frozen.layers)
        steps = [list(step.calls) for step in frozen.wiring.steps]
        return RelevanceEdges(
            {layer.name: layer for layer in layers},
            score.detach().to(frozen.layers[0].device),
            relevance,
            nodes,
            is_whole,
            steps,
            rule,
            formulation,
            _kind_of_score(arguments.target),
        )


def _arguments(inputs: Any, target: Any, extra: Any, against: Any, position: Any) -> Arguments:
    asked = target if against is None else Against(target, against)
    return Arguments(inputs, asked, extra, position)


def _kind_of_score(target: Any) -> str:
    if not isinstance(target, Against):
        return "score"
    return "contrast" if isinstance(target.foil, str) else "difference"


def _kept(stand_ins: ActivationStandIns, frozen: FrozenModel) -> list[Activations]:
    pairs = zip(frozen.layers, stand_ins.made_of, strict=True)
    return [made if isinstance(made, Activations) else made.activations(x) for x, made in pairs]


def _natural(inside: Sequence[Activations]) -> str:
    # The formulation in which the edges of one layer end where those of the next begin, if any.
    return "hidden" if any(each.mixer.has_token_shift for each in inside) else "unified"


def _layers(
    frozen: FrozenModel,
    inside: Sequence[Activations],
    coefficients: Sequence[Activations],
    formulation: str,
) -> list[LayerEdges]:
    layers = [
        layer_edges(layer, activations, coefficient, formulation)
        for layer, activations, coefficient in zip(frozen.layers, inside, coefficients, strict=True)
    ]
    return [moved(edges, edges.out.device, frozen.layers[0].device) for edges in layers]
