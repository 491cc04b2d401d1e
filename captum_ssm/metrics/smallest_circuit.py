"""The fewest edges by which a model still gives its answer, as far as that was measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from captum_ssm.attr.flow.edge import Edge
from captum_ssm.attr.relevance_flow import RelevanceFlow
from captum_ssm.capture import Request
from captum_ssm.interventions.circuit_flow import CircuitFlow
from captum_ssm.interventions.reference import Reference
from captum_ssm.metrics.circuit_runs import CircuitRuns
from captum_ssm.metrics.circuit_search import CircuitSearch, shared_top
from captum_ssm.utils.integers import count_of

PRUNINGS = ("relevance", "runs")
NOTHING = "removed edges carry nothing, coefficients are the model's own"
MEAN = "removed edges carry their mean over other inputs"


@dataclass(frozen=True)
class Circuit:
    """Edges, and what the model answers with these only.

    A circuit that several examples share is as faithful as in the example where it is least so.

    Args:
        edges (tuple of Edge): the largest first.
        faithfulness (float): as measured with these edges: 1 minus how far the recovered share of
            the score is from 1.
        wanted (float): the faithfulness that was asked for, which may be more.
        kept (bool): whether the same answer comes first as with all edges, in each example; True
            for outputs of one score.
        score, whole, none (float): the score with these edges, with all, and with none; the mean of
            several examples.
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
    target: Any = None,
    foil: Any = None,
    *,
    faithfulness: float = 0.9,
    reference_inputs: Any = None,
    formulation: str = "hidden",
    prune: bool | str = True,
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
    k. Then edges that it does not need are removed, until none can be removed alone. Each step is a
    run of the model. A set with fewer edges may exist, and several small ones may do.

    Of several examples it is one circuit that all of them share: edges between the same positions,
    ranked by their mean size, that suffice in every example. That asks for examples whose tokens
    play the same parts at the same positions, such as one sentence with other names.
    :func:`find_circuits` finds one for each example.

    Args:
        forward_func (nn.Module or Callable): as for :func:`circuit_faithfulness`.
        inputs (Tensor or dict): one example, or several that share the circuit.
        target (int, Tensor, tuple or list, optional): the answer; ``(position, answer)`` for one
            that is read at another token than the last, negative from the end, or a list of these,
            by example; None for an output of one score. Default: None
        foil (int or Tensor, optional): why not this answer; None for all others. Default: None
        faithfulness (float, optional): in (0, 1], the share of the score that the set must recover;
            as much over 1 as under it is as unfaithful. Default: 0.9
        reference_inputs (Tensor, dict or Reference, optional): other inputs of the same length. A
            removed edge carries its mean over them. None: it carries nothing, and coefficients are
            those of the model's own run. Default: None
        formulation (str, optional): as for :func:`captum_ssm.interventions.circuit`.
            Default: ``"hidden"``
        prune (bool or str, optional): how edges that the set does not need are removed, True for
            both ways. ``"relevance"``: those of the smallest relevance in the run of the set
            itself, as many as can be, and again with relevance computed anew; where that is not
            known (``"unified"`` edges, measured mixers) this step does nothing. ``"runs"``: those
            first without which the faithfulness is highest, by one run for each edge.
            False: none are. Default: True
        max_edges (int, optional): how many of the largest edges are tried. Default: 1000
        model, additional_forward_args, position (optional): as for :func:`circuit_faithfulness`.
        perturbations_per_eval (int, optional): runs that are joined into one. Default: 8

    Returns:
        Circuit: of the highest faithfulness that was measured, if what is asked for is not reached;
        its ``reached`` is then False.

    Raises:
        ValueError: for a faithfulness outside (0, 1], a ``max_edges`` below 1, an unknown way to
            prune, a score that does not depend on the edges, or as for
            :func:`circuit_faithfulness`.

    Examples::

        >>> others = torch.randint(3, 20, (8, input_ids.shape[1]))
        >>> found = find_circuit(model, input_ids, target=5, reference_inputs=others)
        >>> len(found.edges) <= found.unpruned
        True
    """
    if not 0 < faithfulness <= 1:
        raise ValueError(f"faithfulness is {faithfulness!r}; expected a number above 0, up to 1.")
    most = count_of("max_edges", max_edges, 1)
    if not (isinstance(prune, bool) or prune in PRUNINGS):
        raise ValueError(f"prune is {prune!r}; expected True, False or one of {PRUNINGS}.")
    request = Request.of(forward_func, model, inputs, additional_forward_args)
    reference = _reference(request, reference_inputs, formulation)
    removal = {"coefficients": "whole"} if reference is None else {"ablation": reference}
    runs = CircuitRuns.of(
        request,
        target,
        foil,
        position=position,
        perturbations_per_eval=perturbations_per_eval,
        formulation=formulation,
        **removal,
    )
    against = "others" if foil is None else runs.asked(runs.foil)["target"]
    asked = {**runs.asked(runs.target), "against": against}
    edges = RelevanceFlow(forward_func, model).edges(
        request.given, additional_forward_args=request.extra, formulation=formulation, **asked
    )
    search = CircuitSearch.of(runs, shared_top(edges, most), faithfulness)
    smallest = shortest = search.shortest()
    if prune in (True, "relevance") and formulation == "hidden":
        flow = CircuitFlow.of(request, reference)
        smallest = smallest if flow is None else search.pruned_by_relevance(smallest, flow, asked)
    if prune in (True, "runs"):
        smallest = search.pruned_by_runs(smallest)
    (measured,) = search.measured([smallest])
    return Circuit(
        tuple(smallest),
        measured.faithfulness,
        faithfulness,
        measured.is_same,
        measured.score,
        float(search.whole.mean()),
        float(search.none.mean()),
        len(shortest),
        {k: at_k.faithfulness for k, at_k in sorted(search.curve.items())},
        NOTHING if reference is None else MEAN,
    )


def find_circuits(
    forward_func: Callable[..., Any],
    inputs: Any,
    target: Any = None,
    foil: Any = None,
    *,
    reference_inputs: Any = None,
    model: Any = None,
    additional_forward_args: Any = None,
    position: Any = None,
    **options: Any,
) -> list[Circuit]:
    """A circuit for each example, as :func:`find_circuit` finds it for that example alone.

    Args:
        forward_func, inputs, target, foil: as for :func:`find_circuit`, of B examples.
        reference_inputs, model, additional_forward_args, position (optional): as for it, too.
        options: its other keyword arguments.

    Returns:
        list of Circuit: B circuits, whose edges name their example.

    Raises:
        ValueError, TypeError: as for :func:`find_circuit`.

    Examples::

        >>> found = find_circuits(model, torch.randint(3, 20, (2, 7)), target=torch.tensor([5, 8]))
        >>> len(found)
        2
    """
    request = Request.of(forward_func, model, inputs, additional_forward_args)
    runs = CircuitRuns.of(request, target, foil, position=position)
    reference = _reference(request, reference_inputs, options.get("formulation", "hidden"))
    circuits = []
    for b in range(request.batch):
        run = runs.example(b)
        circuit = find_circuit(
            forward_func,
            run.request.given,
            None if run.is_one_score else run.target,
            None if foil is None else run.foil,
            reference_inputs=reference,
            model=model,
            additional_forward_args=run.request.extra,
            position=run.rows,
            **options,
        )
        edges = tuple(replace(edge, example=b) for edge in circuit.edges)
        circuits.append(replace(circuit, edges=edges))
    return circuits


def _reference(request: Request, others: Any, formulation: str) -> Reference | None:
    if others is None or isinstance(others, Reference):
        return others
    return Reference.of(request.model, others, formulation=formulation)
