"""The fewest edges by which a model still gives its answer, as far as that was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from captum_ssm.attr.flow.edge import Edge
from captum_ssm.attr.relevance_flow import RelevanceFlow
from captum_ssm.capture import Request
from captum_ssm.interventions.reference import Reference
from captum_ssm.metrics.circuit_runs import CircuitRuns
from captum_ssm.utils.integers import as_index


@dataclass(frozen=True)
class Circuit:
    """Edges, and what the model answers with these only.

    Args:
        edges (tuple of Edge): the largest first.
        faithfulness (float): as measured with these edges: 1 minus how far the recovered share of
            the score is from 1.
        wanted (float): the faithfulness that was asked for, which may be more.
        kept (bool): whether the same answer comes first as with all edges.
        score, whole, none (float): the score with these edges, with all, and with none.
        unpruned (int): the number of edges before pruning.
        curve (dict): the faithfulness of the k largest edges, by k, as far as it was measured.
        how (str): how the other edges were removed.

    Examples::

        >>> found = find_circuit(model, input_ids, target=5)
        >>> found.faithfulness >= 0.9 or not found.reached
        True
    """

    edges: tuple[Edge, ...]
    faithfulness: float
    wanted: float
    kept: bool
    score: float
    whole: float
    none: float
    unpruned: int
    curve: dict[int, float] = field(repr=False)
    how: str

    @property
    def reached(self) -> bool:
        """Whether the faithfulness is what was asked for, and the first answer the model's."""
        return self.kept and self.faithfulness >= self.wanted

    def __len__(self) -> int:
        return len(self.edges)

    def __str__(self) -> str:
        missed = "" if self.reached else f" ({self.wanted:g} was not reached)"
        lines = [
            f"{len(self)} edges, faithfulness {self.faithfulness:.3f}{missed}: score "
            f"{self.score:.3f}, {self.whole:.3f} with all edges, {self.none:.3f} with none",
            f"the first answer is {'' if self.kept else 'not '}the model's; {self.how}",
        ]
        lines += [f"{e.layer}: {e.source} -> {e.target} ({e.relevance:+.3f})" for e in self.edges]
        return "\n".join(lines)


def find_circuit(
    forward_func: Callable[..., Any],
    inputs: Any,
    target: Any,
    foil: Any = None,
    *,
    faithfulness: float = 0.9,
    reference_inputs: Any = None,
    formulation: str = "hidden",
    prune: bool = True,
    max_edges: int = 1000,
    model: Any = None,
    additional_forward_args: Any = None,
    position: Any = None,
    perturbations_per_eval: int = 8,
) -> Circuit:
    r"""A small set of edges that suffices for an answer, with its measured faithfulness.

    Edges are ranked by the size of their relevance. How faithful the k largest are is measured for
    k = 1, 2, 4, ..., and need not grow with k: the set is the smallest from which on it stays at
    what is asked for, with the model's own first answer, found by bisection between two of these
    k. Then edges that it does not need are removed, those first without which the faithfulness is
    highest, until none can be removed alone. Each step is a run of the model. A set with fewer
    edges may exist, and several small ones may do.

    Args:
        forward_func (nn.Module or Callable): as for :func:`circuit_faithfulness`.
        inputs (Tensor or dict): one example.
        target (int, Tensor or tuple): the answer; ``(position, answer)`` for one that is read at
            another token than the last, negative from the end.
        foil (int or Tensor, optional): why not this answer; None for all others. Default: None
        faithfulness (float, optional): in (0, 1], the share of the score that the set must recover;
            as much over 1 as under it is as unfaithful. Default: 0.9
        reference_inputs (Tensor or dict, optional): other inputs of the same length. A removed edge
            carries its mean over them. None: it carries nothing, and coefficients are those of the
            model's own run. Default: None
        formulation (str, optional): as for :func:`captum_ssm.interventions.circuit`.
            Default: ``"hidden"``
        prune (bool, optional): remove edges that the set does not need. Default: True
        max_edges (int, optional): how many of the largest edges are tried. Default: 1000
        model, additional_forward_args, position (optional): as for :func:`circuit_faithfulness`.
        perturbations_per_eval (int, optional): runs that are joined into one. Default: 8

    Returns:
        Circuit: of the highest faithfulness that was measured, if what is asked for is not reached;
        its ``reached`` is then False.

    Raises:
        ValueError: for several examples, a faithfulness outside (0, 1], a ``max_edges`` below 1, a
            score that does not depend on the edges, or as for :func:`circuit_faithfulness`.

    Examples::

        >>> others = torch.randint(3, 20, (8, input_ids.shape[1]))
        >>> found = find_circuit(model, input_ids, target=5, reference_inputs=others)
        >>> len(found.edges) <= found.unpruned
        True
    """
    if not 0 < faithfulness <= 1:
        raise ValueError(f"faithfulness is {faithfulness!r}; expected a number above 0, up to 1.")
    most = as_index(max_edges)
    if most is None or most < 1:
        raise ValueError(f"max_edges is {max_edges!r}; expected an integer of at least 1.")
    request = Request.of(forward_func, model, inputs, additional_forward_args)
    if request.batch != 1:
        raise ValueError(
            f"inputs hold {request.batch} examples; expected one, as each has edges of its own."
        )
    target, position = _placed(target, position)
    options, how = _removal(request, reference_inputs, formulation)
    runs = CircuitRuns.of(
        request,
        target,
        foil,
        position=position,
        perturbations_per_eval=perturbations_per_eval,
        **options,
    )
    against = "others" if foil is None else foil
    flow = RelevanceFlow(forward_func, model)
    edges = flow.edges(
        inputs,
        target,
        additional_forward_args,
        against=against,
        position=position,
        formulation=formulation,
    ).top(most)
    search = _Search.of(runs, edges, faithfulness)
    shortest = search.shortest()
    found = search.pruned(shortest) if prune else shortest
    (measured,) = search.measured([found])
    return Circuit(
        tuple(found),
        measured.faithfulness,
        faithfulness,
        measured.is_same,
        measured.score,
        search.whole,
        search.none,
        len(shortest),
        {k: one.faithfulness for k, one in sorted(search.curve.items())},
        how,
    )


def _placed(target: Any, position: Any) -> tuple[Any, Any]:
    # The answer and the token at which it is read.
    if not isinstance(target, tuple) or len(target) != 2:
        return target, position
    if position is not None:
        raise ValueError(
            f"target is {target!r}, which names a token, and position is {position!r}; expected "
            "one of them."
        )
    return target[1], target[0]


def _removal(request: Request, others: Any, formulation: str) -> tuple[dict[str, Any], str]:
    if others is None:
        how = "removed edges carry nothing, coefficients are the model's own"
        removal: dict[str, Any] = {"coefficients": "whole"}
    else:
        how = "removed edges carry their mean over other inputs"
        removal = {"ablation": Reference.of(request.model, others, formulation=formulation)}
    return {"formulation": formulation, **removal}, how


class _Measured(NamedTuple):
    # What a run with a set of edges gave.
    faithfulness: float
    is_same: bool  # the first answer is that of the whole model
    score: float


@dataclass(frozen=True)
class _Search:
    # How faithful sets of the edges of one example are; `curve` holds what was measured by k.
    runs: CircuitRuns
    edges: list[Edge]
    wanted: float
    whole: float
    none: float
    curve: dict[int, _Measured] = field(default_factory=dict)

    @classmethod
    def of(cls, runs: CircuitRuns, edges: list[Edge], wanted: float) -> _Search:
        whole, none = float(runs.scores(runs.whole)), float(runs.scores(runs.logits([[]])))
        if whole == none:
            raise ValueError(
                f"the score is {whole:.4g} with all edges and with none; expected an answer that "
                "depends on what tokens read from each other."
            )
        return cls(runs, edges, wanted, whole, none)

    def measured(self, sets: Sequence[Sequence[Edge]]) -> list[_Measured]:
        logits = self.runs.logits(sets)[:, 0]
        scores = self.runs.scores(logits[:, None])[:, 0].tolist()
        is_same = (logits.argmax(-1) == self.runs.whole.argmax(-1)).tolist()
        shares = [(score - self.none) / (self.whole - self.none) for score in scores]
        return [
            _Measured(1 - abs(1 - share), same, score)
            for share, same, score in zip(shares, is_same, scores, strict=True)
        ]

    def suffices(self, found: _Measured) -> bool:
        return found.is_same and found.faithfulness >= self.wanted

    def of_largest(self, ks: Sequence[int]) -> list[_Measured]:
        new = [k for k in ks if k not in self.curve]
        if new:
            self.curve.update(zip(new, self.measured([self.edges[:k] for k in new]), strict=True))
        return [self.curve[k] for k in ks]

    def shortest(self) -> list[Edge]:
        # The k largest edges from which on the measured sets suffice; else the most faithful.
        ks = [2**n for n in range(len(self.edges).bit_length())]
        ks = [*(k for k in ks if k < len(self.edges)), len(self.edges)]
        failing = [n for n, found in enumerate(self.of_largest(ks)) if not self.suffices(found)]
        if failing and failing[-1] == len(ks) - 1:
            return self.edges[: max(ks, key=lambda k: self.curve[k].faithfulness)]
        low, high = (ks[failing[-1]], ks[failing[-1] + 1]) if failing else (0, ks[0])
        while high - low > 1:
            middle = (low + high) // 2
            is_enough = self.suffices(*self.of_largest([middle]))
            low, high = (low, middle) if is_enough else (middle, high)
        return self.edges[:high]

    def pruned(self, edges: list[Edge]) -> list[Edge]:
        # As many edges are removed at once as can be, from those that are missed least.
        while smaller := self._smaller(edges):
            edges = smaller
        return edges

    def _smaller(self, edges: list[Edge]) -> list[Edge]:
        # The largest part of the edges' removable ones is gone; none if there is none.
        if len(edges) < 2:
            return []
        found = self.measured([edges[:n] + edges[n + 1 :] for n in range(len(edges))])
        removable = [n for n, one in enumerate(found) if self.suffices(one)]
        removable.sort(key=lambda n: -found[n].faithfulness)
        count = len(removable)
        while count:
            gone = set(removable[:count])
            left = [edge for n, edge in enumerate(edges) if n not in gone]
            if left and self.suffices(*self.measured([left])):
                return left
            count //= 2
        return []
