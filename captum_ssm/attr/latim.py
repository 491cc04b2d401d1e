"""LaTIM: token-to-token interactions from contribution vectors (Pitorro & Treviso, ACL 2025)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from captum_ssm._captum import TargetType, format_output
from captum_ssm._capture import FrozenLayer, FrozenModel, Request
from captum_ssm._capture.model import extract_logits
from captum_ssm._capture.target import token_ids
from captum_ssm._errors import TargetError
from captum_ssm._integers import as_integers
from captum_ssm._nested import tensors_in
from captum_ssm.attr._alti import Alti, of_tiles
from captum_ssm.attr._base import TokenAttribution, delta
from captum_ssm.attr._chain import Decomposition, output_of
from captum_ssm.attr._contributions import Contributions
from captum_ssm.attr._grids import CutMixers, ScoreGraph, grids_of
from captum_ssm.attr._relevance import warn_of_unruled
from captum_ssm.attr._residual import UnreadStreamError, norms_and_head, stream_of
from captum_ssm.attr.mamba_lrp import has_a_rule, with_leaves

LOGIT: Literal["alti_logit"] = "alti_logit"


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
      final norm's denominator frozen. What layers add beyond their mixers (MLPs, the embedding
      itself) stays with its token; bias terms of output projections and of the head belong to no
      token.

    The only step that is not additive is the activation after the convolution:
    ``activation="silu"`` (the paper's default) applies it to each tap by itself, ``"taylor1"``,
    ``"taylor2"``, ``"relu"`` and ``"identity"`` are the paper's other choices (appendix C; the
    last two for models retrained with them), and ``"gate"`` freezes its factor,
    :math:`\mathrm{SiLU}(\psi) = \sigma(\psi)\,\psi`, which is exact on any model.

    **A convolution over an image, or one that reads later tokens,** is not taken apart into taps:
    what it returns counts to the token at its center. Sums are kept, and a map is blurred by the
    size of the kernel.

    The arguments are those of :class:`~captum_ssm.attr.TokenAttribution`.

    **Several targets of one text** share its vectors: pass the text expanded to one row per target,
    as ``input_ids.expand(T, -1)``.

    Examples::

        >>> latim = LaTIM(model)
        >>> relevance, delta = latim.attribute(
        ...     input_ids, target=token, activation="gate", return_convergence_delta=True
        ... )
        >>> heatmap = latim.interactions(input_ids, layer=-1, aggregation="l2")  # (B, L, L)
    """

    name = "latim"
    summary = "contribution vectors, by way of the logit"
    cost = "quadratic"

    @classmethod
    def needs_target(cls, **options: Any) -> bool:
        """Whether the aggregation decomposes a logit."""
        return options.get("aggregation", LOGIT) == LOGIT

    def get_name(self) -> str:
        """The method's name."""
        return "LaTIM"

    def has_convergence_delta(self) -> bool:
        """True: the contributions claim to add up, and the delta says how well they do."""
        return True

    def attribute(
        self,
        inputs: Any,
        target: TargetType = None,
        additional_forward_args: Any = None,
        *,
        position: Any = None,
        layer: int | str | None = None,
        grid: int | None = None,
        aggregation: Literal["alti_logit", "alti", "l1", "l2"] | float = LOGIT,
        activation: Literal["silu", "taylor1", "taylor2", "relu", "identity", "gate"] = "silu",
        tolerance: float = 0.0,
        return_convergence_delta: bool = False,
        return_error_bound: bool = False,
    ) -> Any:
        """Relevance of each input token.

        The delta of ``"alti_logit"`` is what the activation makes the decomposition miss, zero
        for ``"gate"``: the score, or with ``layer`` what that layer adds to it, less the bias
        terms and the sum of relevance: that of tokens, where it is interpolated. The other
        aggregations decompose nothing; how much of a layer's output its vectors miss is returned by
        :meth:`layer_errors`.

        Where layers work on several grids of tokens, or it is not known how the score reads the
        last stream, MLPs and all else between mixers are frozen as in MambaLRP. The delta then
        also holds the bias terms outside of mixers; with ``grid`` it is the part of the score that
        the grid's residual stream carries past all later grids' mixers, less the mixers' bias terms
        and the sum of relevance.

        Args:
            layer (int or str, optional): explain one layer's map, by index (negative from the
                end) or module path. None is all layers, for ``"alti_logit"`` only.
                Default: None
            grid (int, optional): of a model whose layers work on several grids of tokens, one
                after the other: only the layers of this one, negative from the end, for
                ``"alti_logit"``. So that sums are kept, relevance is carried to the input by the
                transport, and interpolated only with an ``interpolate_mode``. None is all.
                Default: None
            aggregation (str or float, optional): ``"alti_logit"``, ``"alti"``, ``"l1"``,
                ``"l2"`` or a number p. Default: ``"alti_logit"``
            activation (str, optional): ``"silu"``, ``"taylor1"``, ``"taylor2"``, ``"relu"``,
                ``"identity"`` or ``"gate"``. Default: ``"silu"``
            tolerance (float, optional): for ``"alti_logit"`` over all layers, the share of the
                relevance that a layer may put on wrong tokens, between 0 and 1. Vectors that cannot
                matter more than that are not made. Zero makes all of them. Relevance adds up to
                the same in either case. Zero where norms and MLPs are frozen, see above.
                Default: 0.0
            return_error_bound (bool, optional): return, last, a bound ``(B,)`` on what the
                tolerance changes: the sum over tokens of :math:`|\\text{exact} -
                \\text{returned}|`, before it is carried from the first layer's tokens to the
                inputs. Default: False
        """
        order = _order(aggregation, layer)
        is_bounded = bool(tolerance or return_error_bound)
        self._check_score_options(aggregation, layer, grid, tolerance, return_error_bound)
        if return_convergence_delta and order is not None:
            raise ValueError(
                f"aggregation is {aggregation!r}, which is not a decomposition of the score, so it "
                "has no convergence delta; layer_errors() says how much of each layer's output "
                "its vectors miss."
            )
        request = self._request(inputs, additional_forward_args)
        if order is not None:
            frozen = self._run(request, position, target=target)
            with self._computing():
                row = _query_row(frozen, frozen.select_one(layer), activation, order)
                return self._formatted(frozen.wiring.from_first(row), frozen)
        of_score = self._decomposition(request, target, position, layer, grid)
        frozen = of_score.frozen
        if is_bounded and any(step.local is None for step in of_score.steps.values()):
            raise ValueError(
                f"tolerance is {tolerance!r} and return_error_bound is {return_error_bound!r}; "
                "the layers of this model work on several grids of tokens, or its score is "
                "read from them by no norm or head that is known. All vectors are then made: "
                "leave them at 0.0 and False."
            )
        is_one = frozen.is_chain and _is_one_text(inputs, additional_forward_args, request.batch)
        with self._computing():
            rows, claimed, bound = of_score.relevance(activation, tolerance, is_one_text=is_one)
            relevance = self._formatted(rows, frozen)
            if of_score.past:
                pairs = zip(tensors_in(relevance), of_score.past, strict=True)
                relevance = format_output(
                    request.packed, tuple(one + past.to(one) for one, past in pairs)
                )
            found = [relevance]
            if return_convergence_delta:
                # A pixel that is interpolated has the relevance of a whole patch.
                summed = relevance if frozen.grid is None else (*rows, *of_score.past)
                found.append(delta(claimed, summed))
            if return_error_bound:
                found.append(bound)
            return found[0] if len(found) == 1 else tuple(found)

    def _claimed(
        self,
        request: Request,
        target: Any,
        position: Any,
        *,
        layer: int | str | None = None,
        grid: int | None = None,
        aggregation: str | float = LOGIT,
        activation: str = "gate",
        tolerance: float = 0.0,
    ) -> Tensor:
        if _order(aggregation, layer) is not None:
            raise ValueError(f"aggregation is {aggregation!r}; only {LOGIT!r} has a delta.")
        of_score = self._decomposition(request, target, position, layer, grid)
        with self._computing():
            return of_score.claimed()

    def interactions(
        self,
        inputs: Any,
        layer: int | str | None = None,
        aggregation: str | float = "l2",
        *,
        target: Tensor | None = None,
        activation: str = "silu",
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
        order = _order(aggregation, layer)
        request = self._request(inputs, additional_forward_args)
        if order is None:
            frozen = self._run_sum(request, target)
            with self._computing():
                frozen.require_chain("LaTIM")
                of_score = stream_of(frozen)
                of_score = of_score if layer is None else of_score.at_layer(layer)
                return frozen.mask_matrix(of_score.matrix(activation))
        frozen = self._run(request, query=False)
        with self._computing():
            chosen = frozen.select_one(layer)
            rows = torch.arange(chosen.shape[1], device=chosen.call.output.device)
            tiles = _score_tiles(frozen, chosen, activation, order, rows)
            return frozen.mask_matrix(of_tiles(tiles, len(rows)))

    def contributions(
        self,
        inputs: Any,
        layer: int | str,
        rows: int | Sequence[int] | Tensor,
        *,
        activation: str = "silu",
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

            >>> vectors = LaTIM(model).contributions(input_ids, -1, [3, -1], activation="gate")
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

    def layer_errors(
        self, inputs: Any, *, activation: str = "silu", additional_forward_args: Any = None
    ) -> list[Tensor]:
        """The decomposition error of each layer, ``(B,)``, relative to the layer's output.

        The norm of what the contributions miss of the output, over the output's; zero for
        ``"gate"``, up to rounding. The arguments and errors are those of :meth:`attribute`.

        Returns:
            list of Tensor: one per mixer, in forward order.

        Examples::

            >>> errors = LaTIM(model).layer_errors(input_ids, activation="gate")
            >>> len(errors), errors[0].shape
            (2, torch.Size([1]))
        """
        frozen = self._run(self._request(inputs, additional_forward_args), query=False)
        with self._computing():
            return [_layer_error(frozen, layer, activation) for layer in frozen.layers]

    def _check_score_options(
        self,
        aggregation: str | float,
        layer: int | str | None,
        grid: int | None,
        tolerance: float,
        return_error_bound: bool,
    ) -> None:
        whole = aggregation == LOGIT and layer is None
        given = f"for aggregation {aggregation!r} and layer {layer!r}; expected"
        if grid is not None and not whole:
            raise ValueError(
                f"grid is {grid!r}, {given} grid only for aggregation='alti_logit' with "
                "layer=None. A layer's own map is returned by interactions()."
            )
        if not 0 <= tolerance < 1 or ((tolerance or return_error_bound) and not whole):
            raise ValueError(
                f"tolerance is {tolerance!r} and return_error_bound is {return_error_bound!r}, "
                f"{given} a share of at least 0 and less than 1, and either of them only for "
                "aggregation='alti_logit' with layer=None."
            )

    def _run_sum(self, request: Request, target: Tensor | None) -> FrozenModel:
        # Frozen for every token at once: the score is the sum of one logit per position.
        count = len(request.inputs)

        def summed(*given: Any, **_: Any) -> Tensor:
            logits = extract_logits(request.run(given[:count]))
            return _chosen_logits(logits, target).sum(1)

        return self._run_score(replace(request, forward_func=summed), None, None)

    def _decomposition(
        self,
        request: Request,
        target: Any,
        position: Any,
        layer: int | str | None,
        grid: int | None,
    ) -> Decomposition:
        # Read off one residual stream, if there is one, and it is known how the score is read from
        # it. Else both are read off the graph of a run here.
        frozen = self._run_score(request, target, position)
        found: Decomposition | None = None
        with self._computing():
            if frozen.is_chain:
                frozen.require_chain("LaTIM")
                with suppress(UnreadStreamError):
                    found = stream_of(frozen)
        if found is not None:
            warn_of_unruled(sorted(frozen.unruled))
            if grid is not None:
                frozen.stages_of(grid)  # there is one
            return found if layer is None else found.at_layer(layer)
        graph = ScoreGraph.of(frozen) or self._cut_graph(frozen, target, position)
        with self._computing():
            found = grids_of(frozen, graph)
            if grid is not None:
                return found.at_grid(grid, self.interpolate_mode)
            return found if layer is None else found.at_layer(layer)

    def _cut_graph(self, frozen: FrozenModel, target: Any, position: Any) -> ScoreGraph:
        # The graph of another run, in which modules whose graph has no rules are replaced.
        request = with_leaves(frozen.request)
        cut = CutMixers(request)
        run = self._run(
            request,
            position,
            target=target,
            query=False,
            wiring=False,
            also=has_a_rule,
            substitution=cut,
        )
        return cut.graph(frozen, run.require_score())

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


def _chosen_logits(logits: Tensor, target: Tensor | None) -> Tensor:
    if logits.dim() != 3:
        raise ValueError(
            f"the model returns an output of shape {tuple(logits.shape)}; interactions with "
            "aggregation='alti_logit' need logits (B, L, V), one row per token."
        )
    token = logits.argmax(-1) if target is None else as_integers(target, logits.device)
    if token is None or token.shape != logits.shape[:2]:
        given = f"shape {tuple(target.shape)} and {target.dtype}" if torch.is_tensor(target) else ""
        raise TargetError(
            f"target is {given or repr(target)}; expected one token id per position, "
            f"integers of shape {tuple(logits.shape[:2])}."
        )
    return logits.gather(-1, token_ids(token, logits.shape[-1])[..., None])[..., 0]


def _order(aggregation: str | float, layer: int | str | None) -> str | float | None:
    # The order of a norm, "alti", or None for "alti_logit".
    named: dict[Any, str | float | None] = {"l1": 1.0, "l2": 2.0, "alti": "alti", LOGIT: None}
    is_number = isinstance(aggregation, (int, float)) and not isinstance(aggregation, bool)
    if not (isinstance(aggregation, str) and aggregation in named):
        if not (is_number and float(aggregation) > 0):
            raise ValueError(
                f"aggregation is {aggregation!r}; expected one of {tuple(named)}, or a number p > "
                "0."
            )
        named[aggregation] = float(aggregation)
    if layer is None and named[aggregation] is not None:
        raise ValueError(
            f"aggregation is {aggregation!r}, which makes a map of one layer, and layer is "
            "None; pass layer=, an index or a module path."
        )
    return named[aggregation]


def _score_tiles(
    frozen: FrozenModel, layer: FrozenLayer, activation: str, order: str | float, rows: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Ascending rows ``(R,)`` of a layer's map: tiles of them, each with ``(B, r, C)``."""
    parts = Contributions.of(frozen, [layer], activation)
    if order == "alti":
        yield from Alti(parts, output_of([layer])).tiles(rows)
        return

    def norm(vectors: Tensor, rows: slice, columns: slice) -> Tensor:
        return torch.linalg.vector_norm(vectors, ord=order, dim=1)

    for chosen in parts.tiles(rows):
        index = chosen.expand(parts.batch, -1)
        yield chosen, parts.reduced(index, parts.columns(chosen), norm)


def _query_row(
    frozen: FrozenModel, layer: FrozenLayer, activation: str, order: str | float
) -> Tensor:
    frozen.require_chain("LaTIM")
    (query,) = frozen.require_query()
    row = torch.zeros_like(query)
    rows = (query != 0).any(0).nonzero()[:, 0]
    for chosen, tile in _score_tiles(frozen, layer, activation, order, rows):
        row[:, : tile.shape[2]] += torch.einsum("bi,bij->bj", query[:, chosen], tile)
    return row


def _layer_error(frozen: FrozenModel, layer: FrozenLayer, activation: str) -> Tensor:
    # Relative norm of what the contributions miss of the layer's output, per example.
    parts = Contributions.of(frozen, [layer], activation)
    output = output_of([layer]) - parts.bias()
    error, mask = parts.total() - output, frozen.mask_of(layer)
    if mask is not None:
        error, output = error * mask[..., None], output * mask[..., None]
    return error.flatten(1).norm(dim=1) / output.flatten(1).norm(dim=1).clamp(min=1e-30)


def _is_one_text(inputs: Any, further: Any, batch: int) -> bool:
    # Whether what was given is one text expanded to a batch: the same memory.
    batched = [x for x in tensors_in((inputs, further)) if x.dim() and x.shape[0] == batch]
    return batch > 1 and bool(batched) and not any(x.stride(0) for x in batched)
