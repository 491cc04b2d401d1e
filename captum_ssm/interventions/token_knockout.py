"""Relevance of tokens: what the score loses without the edges out of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from captum.attr import PerturbationAttribution
from torch import Tensor

from captum_ssm.attr.base import ModelAttribution
from captum_ssm.attr.to_inputs import of_inputs
from captum_ssm.capture import Request, freeze
from captum_ssm.errors import InputError, UnsupportedModelError, brief
from captum_ssm.interventions.knockout import knockout
from captum_ssm.interventions.runs import Runs, bar
from captum_ssm.interventions.selection import Layers, Tokens, run_layers
from captum_ssm.utils.captum_api import TargetType, log_usage
from captum_ssm.utils.integers import as_integers, count_of

READERS = ("later", "query")


@dataclass(frozen=True)
class LayerSweep:
    """Relevance of tokens for windows of layers.

    Args:
        relevance (Tensor): ``(B, W, L)``.
        layers (list of tuple): the paths of the W windows' mixers.

    Examples::

        >>> method = captum_ssm.interventions.TokenKnockout(model)
        >>> result = method.sweep(input_ids, target=5, window=2, perturbations_per_eval=7)
        >>> list(result.rows())
        ['backbone.layers.0.mixer .. backbone.layers.1.mixer']
    """

    relevance: Tensor
    layers: list[tuple[str, ...]]

    def rows(self, example: int = 0) -> dict[str, Tensor]:
        """The relevance of one example by window, ``(L,)`` each, as ``layer_overview`` takes it."""
        names = (w[0] if len(w) == 1 else f"{w[0]} .. {w[-1]}" for w in self.layers)
        return dict(zip(names, self.relevance[example], strict=True))


class TokenKnockout(ModelAttribution, PerturbationAttribution):
    r"""What the explained score loses when the edges out of a token are removed.

    For each token (or span of tokens, by ``feature_mask``) the model is run without what other
    tokens read from it in the chosen layers, see :func:`knockout`. A token's own edge stays, as do
    its residual stream and its skip connections: so the last token of a causal model, which no
    other reads, has no relevance.

    Args:
        forward_func (nn.Module or Callable): what is explained.
        model (nn.Module, optional): the model that ``forward_func`` runs; required where
            ``forward_func`` is a plain callable. Default: None
        check (bool, optional): compare each frozen mixer with its module, in every run.
            Default: True

    Raises:
        TypeError: for a ``forward_func`` or ``model`` that is not a model.
        ValueError: for a plain callable without ``model``.

    Examples::

        >>> method = captum_ssm.interventions.TokenKnockout(model)
        >>> method.attribute(input_ids, target=5, layers=[0], perturbations_per_eval=7).shape
        torch.Size([1, 7])
    """

    @log_usage()
    def attribute(
        self,
        inputs: Any,
        target: TargetType = None,
        additional_forward_args: Any = None,
        *,
        position: Any = None,
        layers: Layers = None,
        heads: Tokens = None,
        readers: str = "later",
        feature_mask: Tensor | None = None,
        formulation: str = "hidden",
        renormalize: bool = False,
        perturbations_per_eval: int = 1,
        show_progress: bool = False,
    ) -> Any:
        """Relevance of each token: the score minus that of the run without the edges out of it.

        Args:
            inputs, target, additional_forward_args, position: as for the other methods'
                ``attribute``.
            layers, heads, formulation, renormalize (optional): which edges are removed, as for
                :func:`knockout`.
            readers (str, optional): which tokens no longer read it: ``"later"``, all others; or
                ``"query"``, only the tokens that the output is read from. Default: ``"later"``
            feature_mask (Tensor, optional): integers ``(B, L)`` or ``(1, L)``; tokens of the same
                number are removed together, and each gets the relevance of all.
                Default: None, each by itself
            perturbations_per_eval (int, optional): tokens (or spans) whose runs are joined into
                one, in a batch that many times as large. Default: 1
            show_progress (bool, optional): show a progress bar. Default: False

        Returns:
            Tensor or tuple of Tensor: relevance in the shape of ``inputs``, zero on padding.

        Raises:
            ValueError: for inputs, a target, a position or options that do not fit, an unsupported
                model, or a mixer whose frozen operator does not reproduce its output.
        """
        knocked = self._prepared(
            inputs, target, additional_forward_args, position, readers, feature_mask
        )
        edges = {"heads": heads, "formulation": formulation, "renormalize": renormalize}
        frozen = knocked.runs.frozen
        windows = [run_layers(frozen, layers)]
        relevance = knocked.relevance(windows, edges, perturbations_per_eval, show_progress)
        return of_inputs(frozen.wiring.from_first(relevance[:, 0]), frozen, "linear", None)

    def sweep(
        self,
        inputs: Any,
        target: TargetType = None,
        additional_forward_args: Any = None,
        *,
        window: int = 1,
        stride: int = 1,
        position: Any = None,
        heads: Tokens = None,
        readers: str = "later",
        feature_mask: Tensor | None = None,
        formulation: str = "hidden",
        renormalize: bool = False,
        perturbations_per_eval: int = 1,
        show_progress: bool = False,
    ) -> LayerSweep:
        """Relevance of the model's tokens for each window of layers.

        Args:
            window (int, optional): the layers of a window. Default: 1
            stride (int, optional): from the first layer of a window to that of the next.
                Default: 1

        The other arguments are those of :meth:`attribute`.

        Returns:
            LayerSweep: with relevance ``(B, W, L)``.

        Examples::

            >>> method = captum_ssm.interventions.TokenKnockout(model)
            >>> result = method.sweep(input_ids, target=5, perturbations_per_eval=7)
            >>> result.relevance.shape
            torch.Size([1, 2, 7])
            >>> rows = result.rows()
            >>> figure = captum_ssm.visualization.layer_overview(rows, tokens, scale="shared")
        """
        knocked = self._prepared(
            inputs, target, additional_forward_args, position, readers, feature_mask
        )
        paths = run_layers(knocked.runs.frozen, None)
        if not 1 <= window <= len(paths) or stride < 1:
            raise ValueError(
                f"window is {window} and stride {stride}; this model has {len(paths)} mixers: "
                f"expected a window of 1 .. {len(paths)} of them and a stride of at least 1."
            )
        starts = range(0, len(paths) - window + 1, stride)
        windows = [tuple(paths[start : start + window]) for start in starts]
        edges = {"heads": heads, "formulation": formulation, "renormalize": renormalize}
        relevance = knocked.relevance(windows, edges, perturbations_per_eval, show_progress)
        return LayerSweep(relevance, windows)

    def _prepared(
        self,
        inputs: Any,
        target: Any,
        extra: Any,
        position: Any,
        readers: str,
        feature_mask: Tensor | None,
    ) -> _Knocked:
        if readers not in READERS:
            raise ValueError(f"readers is {readers!r}; expected one of {READERS}.")
        request = Request.of(self.forward_func, self._known_model(), inputs, extra)
        of_query = readers == "query"
        query_target = target if of_query else None
        frozen = freeze(
            request, position=position, target=query_target, query=of_query, check=False
        )
        for layer in frozen.layers:
            if layer.order is not None or layer.shape != frozen.shape:
                raise UnsupportedModelError(
                    f"{layer.name} works on other tokens than the last mixer, or in another order, "
                    "so one mask does not fit all layers; expected a model whose layers all read "
                    "the same tokens. Use captum_ssm.interventions.knockout, layer by layer."
                )
        B, L = frozen.shape
        spans = torch.arange(L).expand(B, L) if feature_mask is None else feature_mask
        numbers = as_integers(spans, frozen.layers[0].call.output.device)
        if numbers is None or numbers.shape not in ((B, L), (1, L)):
            raise InputError(
                f"feature_mask is {brief(feature_mask)}; expected integers ({B}, {L}) or (1, {L})."
            )
        query = None
        if of_query:
            query = torch.stack([weights != 0 for weights in frozen.require_query()]).any(0)
        return _Knocked(Runs(frozen, target, position), numbers.expand(B, L), query, self.check)


@dataclass(frozen=True)
class _Knocked:
    # The runs of one input without edges.
    runs: Runs
    spans: Tensor
    query: Tensor | None
    check: bool

    def relevance(
        self, windows: Sequence[Layers], edges: dict[str, Any], count: int, show_progress: bool
    ) -> Tensor:
        """The relevance of each of the model's tokens for each window of layers, ``(B, W, L)``."""
        groups = self.spans.unique()
        parts = groups.split(count_of("perturbations_per_eval", count, 1))
        B, L = self.spans.shape
        with (
            torch.no_grad(),
            bar("TokenKnockout", len(groups) * len(windows), show_progress) as done,
        ):
            total = self.runs.scores()[0]
            relevance = total.new_zeros(B, len(windows), L, device=self.spans.device)
            for w, numbers in product(range(len(windows)), parts):
                sources = self.spans == numbers[:, None, None]  # (k, B, L)
                targets = ~sources if self.query is None else ~sources & self.query
                with knockout(
                    self.runs.frozen.request.model,
                    sources=sources.flatten(0, 1),
                    targets=targets.flatten(0, 1),
                    layers=windows[w],
                    check=self.check,
                    **edges,
                ):
                    scores = self.runs.scores(len(numbers))
                lost = (total - scores).to(relevance)  # (k, B)
                relevance[:, w] += (lost[..., None] * sources).sum(0)
                done(len(numbers))
        return relevance
