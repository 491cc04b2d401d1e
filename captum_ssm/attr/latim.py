"""LaTIM: token-to-token interactions from contribution vectors (Pitorro & Treviso, ACL 2025)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from captum_ssm.attr.base import TokenAttribution, delta
from captum_ssm.attr.latim_parts.chain import Decomposition, logits_of_tokens
from captum_ssm.attr.latim_parts.contributions import Contributions
from captum_ssm.attr.latim_parts.flow_shares import flow_shares
from captum_ssm.attr.latim_parts.grids import CutStandIns, ScoreGraph, grids_of
from captum_ssm.attr.latim_parts.layer_map import (
    FLOW,
    LOGIT,
    check_score_options,
    layer_error,
    layer_map,
    norm_order,
    query_row,
)
from captum_ssm.attr.latim_parts.residual_stream import UnreadStreamError, norms_and_head, stream_of
from captum_ssm.attr.options import Arguments
from captum_ssm.attr.relevance import warn_of_unruled
from captum_ssm.attr.relevance_flow import RelevanceFlow
from captum_ssm.attr.relevance_stand_ins import has_a_rule, with_leaves
from captum_ssm.capture import FrozenModel, Request
from captum_ssm.capture.model import extract_logits
from captum_ssm.errors import brief
from captum_ssm.utils.allocator import workspace
from captum_ssm.utils.captum_api import format_output
from captum_ssm.utils.nested import tensors_in


class LaTIM(TokenAttribution):
    r"""The vector each token adds to a mixer's output, summed up into interaction scores.

    With everything data-dependent frozen, a mixer's output at token i is
    :math:`y_i = \sum_j T_i(x_j)` (Pitorro & Treviso, `LaTIM: Measuring Latent Token-to-Token
    Interactions in Mamba Models <https://arxiv.org/abs/2502.15612>`_, eq. 16-25). The scores
    (table 1) are

    - ``"l1"``, ``"l2"`` or any number p: :math:`C_{ij} = \|T_i(x_j)\|_p`;
    - ``"alti"``: :math:`C_{ij} \propto [\|y_i\|_1 - \|y_i - T_i(x_j)\|_1]_+` (eq. 6), rows sum
      to one;
    - ``"alti_logit"``: what token j adds to the target's logit through all layers (eq. 7-8):
      the dot products of the vectors with the unembedding row of the target, carried to the
      input tokens by the ALTI mixing of the layers below, residual stream included, with the
      final norm's denominator frozen. What follows a mixer before the stream (a norm, a gate, a
      multiplier, a matrix that joins two directions) is part of its vectors. What layers add
      beyond their mixers (MLPs, the embedding itself) stays with its token; bias terms of output
      projections and of the head belong to no token;
    - ``"flow_logit"``: the same dot products, carried by the positive edges of
      :class:`~captum_ssm.RelevanceFlow` for the target in place of ALTI's mixing, which knows none.

    The only step that is not additive is the activation after the convolution. ``"gate"`` freezes
    its factor, :math:`\mathrm{SiLU}(\psi) = \sigma(\psi)\,\psi`: exact on any model. The paper's
    forms miss up to all (100%) of a layer's output in a Mamba that copies strings: ``"silu"``
    (each tap by itself), ``"taylor1"``, ``"taylor2"``, and for models retrained with them
    ``"relu"`` and ``"identity"`` (appendix C). :meth:`layer_errors` measures what is missed.

    **A convolution over an image, or one that reads later tokens,** is not taken apart into taps:
    what it returns counts to the token at its center. Sums are kept, and a map is blurred by the
    size of the kernel.

    The arguments are those of :class:`~captum_ssm.attr.TokenAttribution`. Several targets of one
    text share its vectors: pass ``input_ids.expand(T, -1)``.

    Examples::

        >>> latim = LaTIM(model)
        >>> relevance, delta = latim.attribute(
        ...     input_ids, target=token, return_convergence_delta=True
        ... )
        >>> heatmap = latim.interactions(input_ids, layer=-1, aggregation="l2")  # (B, L, L)
    """

    name = "latim"
    summary = "contribution vectors, by way of the logit"
    cost = "quadratic"

    @classmethod
    def needs_target(cls, **options: Any) -> bool:
        """Whether the aggregation decomposes a logit."""
        return options.get("aggregation", LOGIT) in (LOGIT, FLOW)

    def get_name(self) -> str:
        """The method's name."""
        return "LaTIM"

    def has_convergence_delta(self) -> bool:
        """True: the contributions claim to add up, and the delta says how well they do."""
        return True

    @classmethod
    def is_additive(cls, **options: Any) -> bool:
        """Whether all contributions are made, whatever the score: there is no tolerance."""
        return not options.get("tolerance")

    def _attribute(
        self,
        arguments: Arguments,
        *,
        layer: int | str | None = None,
        grid: int | None = None,
        aggregation: Literal["alti_logit", "flow_logit", "alti", "l1", "l2"] | float = LOGIT,
        activation: Literal["silu", "taylor1", "taylor2", "relu", "identity", "gate"] = "gate",
        tolerance: float = 0.0,
        return_error_bound: bool = False,
    ) -> Any:
        """Relevance of each input token.

        The delta of ``"alti_logit"`` is what the activation makes the decomposition miss, zero
        for ``"gate"``: the score, or with ``layer`` what that layer adds to it, minus the bias
        terms and the sum of relevance: that of tokens, where it is interpolated. The other
        aggregations decompose nothing; how much of a layer's output its vectors miss is returned by
        :meth:`layer_errors`.

        Where layers work on several grids of tokens, or it is not known how the score reads the
        last stream, MLPs and all else between mixers are frozen as in MambaLRP. The delta then
        also holds the bias terms outside of mixers; with ``grid`` it is the part of the score that
        the grid's residual stream carries around all later grids' mixers, minus the mixers' bias
        terms and the sum of relevance.

        Args:
            layer (int or str, optional): explain one layer's map, by index (negative from the
                end) or module path. None is all layers, for ``"alti_logit"`` only.
                Default: None
            grid (int, optional): of a model whose layers work on several grids of tokens, one
                after the other: only the layers of this one, negative from the end, for
                ``"alti_logit"``. So that sums are kept, relevance is carried to the input by the
                transport, and interpolated only with an ``interpolate_mode``. None is all.
                Default: None
            aggregation (str or float, optional): ``"alti_logit"``, ``"flow_logit"`` (one run and
                one backward pass more), ``"alti"``, ``"l1"``, ``"l2"`` or a number p.
                Default: ``"alti_logit"``
            activation (str, optional): ``"silu"``, ``"taylor1"``, ``"taylor2"``, ``"relu"``,
                ``"identity"`` or ``"gate"``. Default: ``"gate"``
            tolerance (float, optional): for ``"alti_logit"`` over all layers, the share of the
                relevance that a layer may put on wrong tokens, between 0 and 1. Vectors that cannot
                matter more than that are not made; sums are the same. Zero where norms and MLPs are
                frozen, see above. Default: 0.0
            return_error_bound (bool, optional): return, last, a bound ``(B,)`` on what the
                tolerance changes: the sum of sizes, at the first layer's tokens. Default: False
        """
        order = norm_order(aggregation, layer)
        check_score_options(aggregation, layer, grid, tolerance, return_error_bound)
        if order is not None:
            if arguments.return_convergence_delta:
                raise ValueError(
                    f"aggregation is {brief(aggregation)}, which is not a decomposition of the "
                    "score, so it has no convergence delta; layer_errors() says how much of each "
                    "layer's output its vectors miss."
                )
            return self._one_layer(arguments, layer, activation, order)
        score = self._decomposition(arguments, layer, grid)
        is_bounded = bool(tolerance or return_error_bound)
        if is_bounded and any(step.local is None for step in score.steps.values()):
            raise ValueError(
                f"tolerance is {brief(tolerance)} and return_error_bound is "
                f"{brief(return_error_bound)}; the layers of this model work on several grids of "
                "tokens, or its score is read from them by no norm or head that is known. All "
                "vectors are then made: leave them at 0.0 and False."
            )
        frozen = score.frozen
        is_one_text = frozen.is_chain and arguments.is_one_text(frozen.shape[0])
        mixing = self._mixing(arguments) if aggregation == FLOW else None
        with self._computing():
            rows, claimed, bound = score.relevance(
                activation, tolerance, is_one_text=is_one_text, mixing=mixing
            )
            relevance = self._formatted(rows, frozen)
            if score.outside:
                pairs = zip(tensors_in(relevance), score.outside, strict=True)
                relevance = format_output(
                    frozen.request.packed, tuple(x + outside.to(x) for x, outside in pairs)
                )
            # A pixel that is interpolated has the relevance of a whole patch.
            summed = relevance if frozen.grid is None else (*rows, *score.outside)
            results = [relevance]
            if arguments.return_convergence_delta:
                results.append(delta(claimed, summed))
            if return_error_bound:
                results.append(bound)
            return results[0] if len(results) == 1 else tuple(results)

    def _one_layer(
        self, arguments: Arguments, layer: Any, activation: str, order: str | float
    ) -> Any:
        frozen = self._freeze(arguments)
        with self._computing():
            row = query_row(frozen, frozen.select_one(layer), activation, order)
            return self._formatted(frozen.wiring.from_first(row), frozen)

    def _claimed(
        self,
        arguments: Arguments,
        *,
        layer: int | str | None = None,
        grid: int | None = None,
        aggregation: str | float = LOGIT,
        **_: Any,
    ) -> Tensor:
        if norm_order(aggregation, layer) is not None:
            raise ValueError(
                f"aggregation is {brief(aggregation)}; expected {LOGIT!r} for a delta."
            )
        score = self._decomposition(arguments, layer, grid)
        with self._computing():
            return score.claimed()

    @workspace()
    def interactions(
        self,
        inputs: Any,
        layer: int | str | None = None,
        aggregation: str | float = "l2",
        *,
        target: Tensor | None = None,
        activation: str = "gate",
        additional_forward_args: Any = None,
    ) -> Tensor:
        """The map of every token of a layer to every one: ``(B, L, L)``, zero on padding.

        The other arguments, and the errors, are those of :meth:`attribute`.

        Args:
            target (Tensor, optional): for ``"alti_logit"``, the token whose logit is explained
                at each position, ``(B, L)``; None for the one the model predicts there.
                As there, -1 is the last of the vocabulary. Default: None

        Returns:
            Tensor: ``(B, L, L)``; row i is of query token i.

        Examples::

            >>> LaTIM(model).interactions(input_ids, layer=0).shape
            torch.Size([1, 7, 7])
        """
        order = norm_order(aggregation, layer)
        if aggregation == FLOW:
            raise ValueError(
                f"aggregation is {FLOW!r}, whose edges are those of one position; pass attribute() "
                "the text once per position."
            )
        request = self._request(inputs, additional_forward_args)
        if order is None:
            frozen = self._run_sum(request, target)
            with self._computing():
                frozen.require_chain("LaTIM")
                score = stream_of(frozen)
                score = score if layer is None else score.at_layer(layer)
                return frozen.mask_matrix(score.matrix(activation))
        frozen = self._run(request, query=False)
        with self._computing():
            scores = layer_map(frozen, frozen.select_one(layer), activation, order)
            return frozen.mask_matrix(scores)

    @workspace()
    def contributions(
        self,
        inputs: Any,
        layer: int | str,
        rows: int | Sequence[int] | Tensor,
        *,
        activation: str = "gate",
        additional_forward_args: Any = None,
    ) -> Tensor:
        """The vectors :math:`T_i(x_j)` for the tokens ``rows``: ``(B, R, L, E)``, zero on padding.

        The other arguments are those of :meth:`attribute`.

        Args:
            rows (int, sequence or Tensor): i, an int, ``(R,)`` or ``(B, R)``, negative from the
                end. Each row holds L vectors of the model's width: ask for those you need.

        Returns:
            Tensor: ``(B, R, L, E)``, in the units of the mixer's output.

        Raises:
            ValueError: for rows outside the sequence, and as for :meth:`attribute`.
            TypeError: for rows that are no integers, and as for :meth:`attribute`.

        Examples::

            >>> vectors = LaTIM(model).contributions(input_ids, -1, [3, -1])
            >>> vectors.shape
            torch.Size([1, 2, 7, 16])
        """
        frozen = self._run(self._request(inputs, additional_forward_args), query=False)
        with self._computing():
            chosen = frozen.select_one(layer)
            parts, mask = Contributions.of(frozen, [chosen], activation), frozen.mask_of(chosen)
            index = frozen.row_index(rows, chosen.shape)
            vectors = parts.vectors(index)
            if mask is not None:
                vectors *= mask[:, None, :, None]
                vectors *= mask.gather(1, index)[..., None, None]
            return vectors

    @workspace()
    def layer_errors(
        self, inputs: Any, *, activation: str = "gate", additional_forward_args: Any = None
    ) -> list[Tensor]:
        """The decomposition error of each layer, ``(B,)``, relative to the layer's output.

        The norm of what the contributions miss of the output, over the output's; zero for
        ``"gate"``, up to rounding. The arguments and errors are those of :meth:`attribute`.

        Returns:
            list of Tensor: one per mixer, in forward order.

        Examples::

            >>> errors = LaTIM(model).layer_errors(input_ids)
            >>> len(errors), errors[0].shape
            (2, torch.Size([1]))
        """
        frozen = self._run(self._request(inputs, additional_forward_args), query=False)
        with self._computing():
            return [layer_error(frozen, layer, activation) for layer in frozen.layers]

    def _run_sum(self, request: Request, target: Tensor | None) -> FrozenModel:
        # The model frozen for every token at once: the score is the sum of one logit per position.
        count = len(request.inputs)

        def summed(*arguments: Any, **_: Any) -> Tensor:
            logits = extract_logits(request.run(arguments[:count]))
            return logits_of_tokens(logits, target).sum(1)

        return self._run_score(replace(request, forward_func=summed), None, None)

    def _decomposition(
        self, arguments: Arguments, layer: int | str | None, grid: int | None
    ) -> Decomposition:
        request = self._request(arguments.inputs, arguments.additional_forward_args)
        frozen = self._run_score(request, arguments.target, arguments.position)
        score = self._stream(frozen)
        if score is None:
            # It reads the layers by the graph of a run.
            graph = ScoreGraph.of(frozen) or self._cut_graph(frozen, arguments)
            with self._computing():
                score = grids_of(frozen, graph)
            if grid is not None:
                return score.at_grid(grid, self.interpolate_mode)
        elif grid is not None:
            frozen.steps_of(grid)  # raises where there is no such grid
        return score if layer is None else score.at_layer(layer)

    def _mixing(self, arguments: Arguments) -> Callable[[int], Tensor]:
        # A step's rows for the target, by the edges of another run.
        flow = RelevanceFlow(self.forward_func, self.model, check=self.check)
        asked = arguments.inputs, arguments.target, arguments.additional_forward_args
        options: dict[str, Any] = {"against": None, "formulation": "unified"}
        return partial(flow_shares, flow.edges(*asked, position=arguments.position, **options))

    def _stream(self, frozen: FrozenModel) -> Decomposition | None:
        # The score as it reads one residual stream; None where it is not known how it does so.
        if not frozen.is_chain:
            return None
        with self._computing():
            frozen.require_chain("LaTIM")
            try:
                score = stream_of(frozen)
            except UnreadStreamError:
                return None
        warn_of_unruled(sorted(frozen.unruled))
        return score

    def _cut_graph(self, frozen: FrozenModel, arguments: Arguments) -> ScoreGraph:
        # The graph of another run, in which modules whose graph has no rules are replaced.
        request = with_leaves(frozen.request)
        cut = CutStandIns(request, frozen)
        run = self._run(
            request,
            arguments.position,
            target=arguments.target,
            query=False,
            wiring=False,
            also=has_a_rule,
            substitution=cut,
        )
        return cut.graph(run.require_score())

    def _run_score(self, request: Request, target: Any, position: Any) -> FrozenModel:
        # The score's direction in the residual stream is read after the last mixer.
        return self._run(
            request,
            position,
            target=target,
            gradients=True,
            through_mixers=False,
            also=norms_and_head(request.module),
            keep_graph=True,
        )
