"""What a model answers in its own runs with some edges only, and how edges are ranked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from captum_ssm.attr.flow.edge import Edge
from captum_ssm.attr.flow.edges import RelevanceEdges
from captum_ssm.capture import Request
from captum_ssm.capture.model import extract_logits
from captum_ssm.capture.record import record
from captum_ssm.capture.target import asked_rows, split_target
from captum_ssm.capture.thrown_away import run_on_copies
from captum_ssm.capture.unknown_mixers import find_unknown_mixers
from captum_ssm.errors import brief
from captum_ssm.interventions.circuit import circuit
from captum_ssm.interventions.runs import only, repeated
from captum_ssm.metrics.logits import classes
from captum_ssm.operators.top import ORDERS
from captum_ssm.utils.integers import as_index, count_of

# Edges from the first to the last that is kept: as a method returns them, as maps by layer, or as
# a list.
RankedEdges: TypeAlias = RelevanceEdges | Mapping[str, Tensor] | Iterable[Edge]


@dataclass(frozen=True)
class CircuitRuns:
    """Runs of one input with some edges of the model only, and their scores.

    Args:
        request (Request): the input.
        rows (Tensor, optional): ``(B,)``, the token whose logits are the answer's, from the end, of
            outputs with logits per token; None for outputs ``(B, V)`` or ``(B,)``.
        whole (Tensor): ``(B, V)``, the logits of the model itself; V is 1 for an output of one
            score, which has no answers.
        target, foil (Tensor): ``(B,)``, the answer and the one that it is compared with: the
            runner-up if none was given.
        others (Tensor): ``(B, V)``, the weights of the answers whose logits are subtracted from
            the target's in the score.
        options (dict): how edges are removed, of :func:`~captum_ssm.interventions.circuit`.
        at_once (int): how many runs are joined into one. Default: 1
        position (Any, optional): the token that was asked for. Default: None
        decodes (bool, optional): whether the rows are tokens of a decoder. Default: False
    """

    request: Request
    rows: Tensor | None
    whole: Tensor
    target: Tensor
    foil: Tensor
    others: Tensor
    options: dict[str, Any]
    at_once: int = 1
    position: Any = None
    decodes: bool = False

    @classmethod
    def of(
        cls,
        request: Request,
        target: Any,
        foil: Any = None,
        *,
        position: Any = None,
        perturbations_per_eval: int = 1,
        **options: Any,
    ) -> CircuitRuns:
        """Runs with a score for each example.

        The score is the target's logit minus the foil's; without a foil, minus the mean logit of
        all others by the probabilities that they have in the whole model's run. An output of one
        score is that score.

        Raises:
            ValueError, TypeError: for a target or a foil that is not a class of the output, or a
                model that returns neither logits nor one score.
        """
        at_once = count_of("perturbations_per_eval", perturbations_per_eval, 1)
        find_unknown_mixers(request)
        recording = record(request)
        output = extract_logits(recording.output)
        target, position = split_target(recording, target, position, is_only_position=True)
        rows = asked_rows(recording, position) if output.dim() == 3 else None
        told = {"position": position, "decodes": recording.decodes}
        options["layers"] = [call.path for call in recording.calls]
        whole = _answers(output, rows)
        if whole.shape[1] == 1:
            _check_one_score(target, foil)
            none = torch.zeros(len(whole), dtype=torch.long, device=whole.device)
            others = torch.zeros_like(whole, dtype=torch.double)
            return cls(request, rows, whole, none, none, others, options, at_once, **told)
        index = classes("target", target, whole)[:, None]
        weights = whole.double().scatter(1, index, -torch.inf).softmax(1)
        if foil is None:
            wrong = weights.argmax(1)
        else:
            wrong = classes("foil", foil, whole)
            if bool((wrong == index[:, 0]).any()):
                raise ValueError(
                    f"foil is the target in an example: both are {brief(foil)}; expected another "
                    "answer."
                )
            weights = torch.zeros_like(weights).scatter(1, wrong[:, None], 1.0)
        return cls(request, rows, whole, index[:, 0], wrong, weights, options, at_once, **told)

    @property
    def model(self) -> Any:
        """The model that runs."""
        return self.request.model

    @property
    def is_one_score(self) -> bool:
        """Whether the output is one score, with no answer that could come first."""
        return self.whole.shape[1] == 1

    def asked(self, answers: Tensor) -> dict[str, Any]:
        """The target and the position of answers ``(B,)``, as a method takes them."""
        if not self.decodes or self.rows is None:
            return {"target": None if self.is_one_score else answers, "position": self.position}
        return {"target": list(zip(self.rows.tolist(), answers.tolist(), strict=True))}

    def example(self, b: int) -> CircuitRuns:
        """The runs of one example."""
        of = slice(b, b + 1)
        return replace(
            self,
            request=only(self.request, b),
            rows=None if self.rows is None else self.rows[of],
            **{name: getattr(self, name)[of] for name in ("whole", "target", "foil", "others")},
        )

    def gives(self, logits: Tensor, answers: Tensor) -> Tensor:
        """Whether answers ``(B,)`` come first, 1 or 0, ``(..., B)``; NaN where there are none."""
        first = (logits.argmax(-1) == answers).double()
        return first * torch.nan if self.is_one_score else first

    def logits(self, kept: Sequence[Sequence[Edge]], *, remove: bool = False) -> Tensor:
        """The logits of the runs with each of K sets of edges, or without them: ``(K, B, V)``."""
        sets = list(dict.fromkeys(map(tuple, kept)))  # each once
        answers = []
        for start in range(0, len(sets), self.at_once):
            part = sets[start : start + self.at_once]
            joined = _joined(part, self.request.batch)
            with torch.no_grad(), circuit(self.model, joined, remove=remove, **self.options):
                output = extract_logits(run_on_copies(repeated(self.request, len(part))))
            rows = None if self.rows is None else self.rows.repeat(len(part))
            answers.append(_answers(output, rows).unflatten(0, (len(part), -1)))
        return torch.cat(answers)[[sets.index(tuple(edges)) for edges in kept]]

    def scores(self, logits: Tensor) -> Tensor:
        """The scores ``(..., B)`` of logits ``(..., B, V)``, in float64."""
        wide = logits.double()
        index = self.target[:, None].expand(*wide.shape[:-1], 1)
        return wide.gather(-1, index)[..., 0] - (self.others * wide).sum(-1)


def ranked(edges: RankedEdges, batch: int, k: int, by: str = "size") -> list[list[Edge]]:
    """The k first edges of each example, in order.

    Args:
        edges (RelevanceEdges, dict or iterable of Edge): relevance, of which the largest are
            taken; maps ``(B, L, L)`` by layer, of which the largest are taken; or edges in order.
        batch (int): B.
        k (int): how many, at most.
        by (str, optional): of what is ranked here, ``"size"`` or ``"signed"``. Default: ``"size"``

    Raises:
        ValueError: for an unknown ranking, or maps of another shape or with NaN.
        TypeError: for something else than edges.
    """
    if by not in ORDERS:
        raise ValueError(f"by is {brief(by)}; expected one of {ORDERS}.")
    if isinstance(edges, RelevanceEdges):
        listed = edges.top(k, by=by)
    elif isinstance(edges, Mapping):
        listed = _largest(edges, batch, k, by)
    else:
        listed = list(edges) if isinstance(edges, Iterable) else [edges]
        wrong = [item for item in listed if not isinstance(item, Edge)]
        if wrong:
            raise TypeError(
                f"edges holds {type(wrong[0]).__name__}; expected RelevanceEdges, a dict from "
                "layers to maps (B, L, L), or captum_ssm.attr.Edge objects, the first ones first."
            )
    by_example: list[list[Edge]] = [[] for _ in range(batch)]
    for edge in listed:
        for example in range(batch) if edge.example is None else (edge.example,):
            if not -batch <= example < batch:
                raise ValueError(
                    f"edges holds {edge} for a batch of {batch} examples; expected an example from "
                    f"0 .. {batch - 1}, or None for all."
                )
            if len(by_example[example]) < k:
                by_example[example].append(replace(edge, example=example % batch))
    return by_example


def _largest(maps: Mapping[Any, Any], batch: int, k: int, by: str) -> list[Edge]:
    by_example: list[list[Edge]] = [[] for _ in range(batch)]
    for layer, scores in maps.items():
        shape = tuple(scores.shape)
        if len(shape) != 3 or shape[0] != batch or shape[1] != shape[2]:
            raise ValueError(
                f"the map of {layer} has shape {shape}; expected ({batch}, L, L), target and "
                "source of each example."
            )
        if bool(scores.isnan().any()):
            raise ValueError(f"the map of {layer} holds NaN, which has no rank; expected numbers.")
        size = (scores.abs() if by == "size" else scores).detach().flatten(1)
        best, at = size.topk(min(k, size.shape[1]), 1)
        L = shape[1]
        for example in range(batch):
            by_example[example] += [
                Edge(layer, index // L, index % L, value, example=example)
                for value, index in zip(best[example].tolist(), at[example].tolist(), strict=True)
                if value > 0
            ]
    return [e for part in by_example for e in sorted(part, key=lambda e: -e.relevance)[:k]]


def _joined(sets: Sequence[Sequence[Edge]], batch: int) -> list[Edge]:
    # Edges of several runs of the same B examples, which are one batch.
    if len(sets) == 1:
        return list(sets[0])
    return [
        replace(edge, example=n * batch + example)
        for n, edges in enumerate(sets)
        for edge in edges
        for example in (range(batch) if edge.example is None else (edge.example,))
    ]


def _answers(output: Tensor, rows: Tensor | None) -> Tensor:
    if rows is not None and output.dim() == 3:
        if int(rows.min()) < -output.shape[1]:
            raise ValueError(
                f"the model returned logits of its last {output.shape[1]} tokens, and the position "
                "asked for is before them; have it return logits for all tokens."
            )
        output = output[torch.arange(len(output), device=output.device), rows]
    if output.dim() not in (1, 2):
        raise ValueError(
            f"the model returned {tuple(output.shape)}; expected logits of answers, (B, V) or "
            "(B, L, V), or one score, (B,) or (B, 1)."
        )
    return output if output.dim() == 2 else output[:, None]


def _check_one_score(target: Any, foil: Any) -> None:
    index = as_index(target)
    is_first = index == 0 or (torch.is_tensor(target) and not bool(target.any()))
    if foil is not None or not (target is None or is_first):
        raise ValueError(
            f"target is {brief(target)} and foil is {brief(foil)}, and the model returns one score "
            "per example; expected target=None and foil=None."
        )
