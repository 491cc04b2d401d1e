"""Circuits: does the model still give its answer by some edges only?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_ssm.attr.flow.edges import RelevanceEdges
from captum_ssm.attr.relevance_flow import RelevanceFlow
from captum_ssm.capture import Request
from captum_ssm.errors import brief
from captum_ssm.interventions.reference import Reference
from captum_ssm.metrics.circuit_runs import CircuitRuns, RankedEdges, ranked
from captum_ssm.metrics.interval import Interval, bootstrap
from captum_ssm.metrics.perturbation import Curve
from captum_ssm.utils.integers import as_index

KS = (1, 2, 5, 10, 20, 50, 100)
LARGEST_GAP = 2.0
COLUMNS = {
    "kept": "answer with these only",
    "removed": "answer without them",
    "recovered": "score recovered",
    "gap": "gap to the model",
    "control": "foil, by edges for the foil",
}


@dataclass(frozen=True)
class CircuitFaithfulness:
    """What a model answers with the first k edges of a ranking only, and without them.

    For an output of one score, all that counts answers is NaN, and printing leaves it out. Curves
    are per example and k; :meth:`estimate` gives their areas over log k with intervals,
    and printing shows all of it as a table.

    Args:
        ks (tuple of int): K numbers of edges, ascending.
        kept (Tensor): ``(B, K)``, 1 where the answer comes first with the k first edges only.
        removed (Tensor): ``(B, K)``, 1 where it comes first without them.
        scores (Tensor): ``(B, K)``, the score with these edges only: the answer's logit minus the
            foil's, or minus the mean logit of all others.
        control (Tensor, optional): ``(B, K)``, 1 where the *foil* comes first with the k first
            edges of a ranking for the foil. A faithful way to choose edges does not make a model
            give answers that it does not give. None where there is no such ranking.
        whole, none (Tensor): ``(B,)``, the score with all edges, and with none.
        kept_whole, kept_none (Tensor): ``(B,)``, whether the answer comes first there.
        control_whole, control_none (Tensor): ``(B,)``, whether the foil comes first there.

    Examples::

        >>> edges = RelevanceFlow(model).edges(input_ids, target=5)
        >>> result = circuit_faithfulness(model, input_ids, edges, target=5, ks=(1, 5, 20))
        >>> result.recovered.shape
        torch.Size([1, 3])
        >>> sorted(result.estimate())
        ['control', 'gap', 'kept', 'recovered', 'removed']
    """

    ks: tuple[int, ...]
    kept: Tensor
    removed: Tensor
    scores: Tensor
    control: Tensor | None
    whole: Tensor
    none: Tensor
    kept_whole: Tensor
    kept_none: Tensor
    control_whole: Tensor
    control_none: Tensor

    @property
    def is_one_score(self) -> bool:
        """Whether the model returns one score per example, so that no answer comes first."""
        return bool(self.kept_whole.isnan().all())

    @property
    def recovered(self) -> Tensor:
        """How far each example's score is from that of no edge (0) to that of all (1).

        ``(B, K)``; NaN where all edges together change nothing.
        """
        share = (self.scores - self.none[:, None]) / (self.whole - self.none)[:, None]
        return share.where((self.whole != self.none)[:, None], torch.nan)

    @property
    def gap(self) -> Tensor:
        """How far :attr:`recovered` is from 1, at most 2: ``(B, K)``."""
        return (1 - self.recovered).abs().clamp(max=LARGEST_GAP)

    def estimate(self, **options: Any) -> dict[str, Interval]:
        """The areas over log k, as means over examples with their intervals.

        ``"recovered"`` is the ratio of the means, which an example that hardly depends on its
        edges does not dominate. Keyword arguments are those of :func:`bootstrap`.
        """
        log_k = torch.tensor(self.ks).double().log()
        return self._estimated(lambda curve: Curve(log_k, curve).areas, options)

    def at(self, k: int, **options: Any) -> dict[str, Interval]:
        """The means for one of :attr:`ks`, with the names and the options of :meth:`estimate`.

        Raises:
            ValueError: for a k that was not measured.
        """
        if k not in self.ks:
            raise ValueError(f"k is {k}; expected one of {self.ks}, which were measured.")
        return self._estimated(lambda curve: curve[:, self.ks.index(k)], options)

    def _estimated(
        self, read: Callable[[Tensor], Tensor], options: dict[str, Any]
    ) -> dict[str, Interval]:
        curves = {"kept": self.kept, "removed": self.removed, "gap": self.gap}
        if self.control is not None:
            curves["control"] = self.control
        if self.is_one_score:  # with no answers to count
            curves = {"gap": self.gap}
        values = {name: read(curve) for name, curve in curves.items()}
        intervals = {name: bootstrap(x[~x.isnan()], **options) for name, x in values.items()}
        parts = read(self.scores), self.none, self.whole
        return intervals | {"recovered": bootstrap(*parts, statistic=_ratio, **options)}

    def table(self, **options: Any) -> str:
        """All numbers as a table in Markdown; keyword arguments are those of :func:`bootstrap`."""
        at = {str(k): self.at(k, **options) for k in self.ks}
        none = self._end(0.0, self.kept_none, self.control_none)
        whole = self._end(1.0, self.kept_whole, self.control_whole)
        rows = {"none": none, **at, "all": whole, "area": self.estimate(**options)}
        lines = [["edges", *COLUMNS.values()], ["---"] * (len(COLUMNS) + 1)]
        lines += [[label, *(str(row.get(n, "")) for n in COLUMNS)] for label, row in rows.items()]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)

    def _end(self, recovered: float, kept: Tensor, control: Tensor) -> dict[str, Any]:
        cells = {"kept": f"{kept.mean():.3f}", "recovered": f"{recovered:.3f}"}
        if self.is_one_score:
            return {"recovered": cells["recovered"]}
        return cells if self.control is None else {**cells, "control": f"{control.mean():.3f}"}

    def __str__(self) -> str:
        count = len(self.whole)
        about = f"{count} examples, 95% intervals" if count > 1 else "One example"
        about += "; areas over log k"
        return f"{about}\n{self.table()}"


def circuit_faithfulness(
    forward_func: Callable[..., Any],
    inputs: Any,
    edges: RankedEdges,
    target: Any = None,
    foil: Any = None,
    *,
    ks: Sequence[int] = KS,
    by: str = "size",
    control: RankedEdges | None = None,
    ablation: str | Reference = "zero",
    formulation: str = "hidden",
    coefficients: str = "run",
    model: Any = None,
    additional_forward_args: Any = None,
    position: Any = None,
    perturbations_per_eval: int = 1,
) -> CircuitFaithfulness:
    r"""Whether the first edges of a ranking suffice for an answer, and whether it needs them.

    For each k the model runs with the k first edges of each example only, and without them, see
    :func:`captum_ssm.interventions.circuit`. As a control, it also runs with the k first edges of a
    ranking for a wrong answer, the foil.

    A share of answers that are kept says little by itself: edges with the largest *signed*
    relevance leave out what opposes the answer, so that such edges can be found for a wrong answer
    too. Read it together with the gap to the model and with the control.

    Args:
        forward_func (nn.Module or Callable): the model, or a function that runs it; returns logits
            ``(B, V)``, or ``(B, L, V)``.
        inputs (Tensor or dict): as for ``attribute``.
        edges (RelevanceEdges, dict or iterable of Edge): the ranking: what
            :meth:`captum_ssm.attr.RelevanceFlow.edges` returns; maps ``(B, L, L)`` by layer, such
            as those of :func:`captum_ssm.hidden_attention`; or edges, the first one first, for one
            example each or for all.
        target (int, Tensor, tuple or list, optional): ``(B,)``, the answers; ``(position, answer)``
            for one that is read at that token, or at that row of a decoder, or a list of these, by
            example; None for an output of one score. Default: None
        foil (int or Tensor, optional): ``(B,)``, wrong answers. None: the score is compared with
            all others, and the control's answer is the model's best other one. Default: None
        ks (sequence of int, optional): numbers of edges, ascending.
            Default: 1, 2, 5, 10, 20, 50, 100
        by (str, optional): how relevance and maps are ranked, ``"size"``: by absolute value, or
            ``"signed"``. Default: ``"size"``
        control (optional): the ranking for the foil, in any form of ``edges``. None: relevance with
            the rule and formulation of ``edges``, if these are RelevanceEdges, else no control.
            Default: None
        ablation, formulation, coefficients (optional): how edges are removed, as for
            :func:`captum_ssm.interventions.circuit`.
        model (nn.Module, optional): the model that ``forward_func`` runs, if it is a function.
            Default: None
        additional_forward_args, position (optional): as for ``attribute``.
        perturbations_per_eval (int, optional): runs that are joined into one, in a batch that many
            times as large. Default: 1

    Returns:
        CircuitFaithfulness: its curves by example; print it for a table.

    Raises:
        ValueError: for ``ks`` that are not ascending positive integers, a foil that is the target,
            classes outside of the output, maps of another shape, RelevanceEdges of another
            formulation, or options that ``circuit`` refuses.
        TypeError: for edges of another kind.

    Examples::

        >>> edges = RelevanceFlow(model).edges(input_ids, target=5)
        >>> result = circuit_faithfulness(model, input_ids, edges, 5, ks=(1, 1000))
        >>> bool(result.recovered[0, 1].isclose(torch.tensor(1.0, dtype=torch.float64)))
        True
    """
    counts = _checked(ks)
    request = Request.of(forward_func, model, inputs, additional_forward_args)
    for ranking in (edges, control):
        if isinstance(ranking, RelevanceEdges) and ranking.formulation != formulation:
            raise ValueError(
                f"the ranking has {ranking.formulation!r} edges and formulation is "
                f"{formulation!r}, so that other edges would be kept than those that were ranked; "
                "expected the same. Pass formulation= to RelevanceFlow.edges too, or, to test it "
                "nevertheless, its edges.top(k)."
            )
    options = {"ablation": ablation, "formulation": formulation, "coefficients": coefficients}
    runs = CircuitRuns.of(
        request,
        target,
        foil,
        position=position,
        perturbations_per_eval=perturbations_per_eval,
        **options,
    )
    if control is None and isinstance(edges, RelevanceEdges) and not runs.is_one_score:
        control = RelevanceFlow(forward_func, model).edges(
            inputs,
            additional_forward_args=additional_forward_args,
            **runs.asked(runs.foil),
            formulation=edges.formulation,
            rule=edges.rule,
        )
    sets, wrong = (
        [] if ranking is None else _prefixes(ranked(ranking, request.batch, counts[-1], by), counts)
        for ranking in (edges, control)
    )
    only = runs.logits([[], *sets, *wrong])
    only, of_foil = only.split([1 + len(sets), len(wrong)])
    without = runs.logits(sets, remove=True)
    scores, gives = runs.scores(only), runs.gives
    return CircuitFaithfulness(
        counts,
        kept=gives(only[1:], runs.target).T,
        removed=gives(without, runs.target).T,
        scores=scores[1:].T,
        control=None if control is None else gives(of_foil, runs.foil).T,
        whole=runs.scores(runs.whole),
        none=scores[0],
        kept_whole=gives(runs.whole, runs.target),
        kept_none=gives(only[0], runs.target),
        control_whole=gives(runs.whole, runs.foil),
        control_none=gives(only[0], runs.foil),
    )


def _checked(ks: Sequence[int]) -> tuple[int, ...]:
    counts = [as_index(k) for k in ks]
    positive = tuple(k for k in counts if k is not None and k > 0)
    if not positive or len(positive) != len(counts) or list(positive) != sorted(set(positive)):
        raise ValueError(f"ks is {brief(ks)}; expected positive integers in ascending order.")
    return positive


def _prefixes(edges: list[list[Any]], ks: tuple[int, ...]) -> list[list[Any]]:
    return [[edge for ranking in edges for edge in ranking[:k]] for k in ks]


def _ratio(score: Tensor, none: Tensor, whole: Tensor) -> Tensor:
    return (score - none).mean() / (whole - none).mean()
