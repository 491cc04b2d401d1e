"""The second track: do the edges that a method ranks first carry the answer?

An entrant is one function from a model, inputs and targets to the strength of each edge:

    def ranking(model, inputs, target):
        return {layer: strength}  # (B, L, L): what token i of it reads from token j

or what :meth:`captum_ssm.attr.RelevanceFlow.edges` returns. Edges are ranked by magnitude. A
removed edge carries what it does in the run on the input with another cause, where another answer
is right: an interchange ablation.

=============== ================================================================= ===============
measure         area over log k of                                                a perfect
                                                                                  ranking has
=============== ================================================================= ===============
``faithful``    answers that the k first edges alone keep                         1
``complete``    answers that are gone without the k first edges                   1
``gap``         how far the answer's logit minus the other's is from the          0
                whole model's, with the k first edges alone
=============== ================================================================= ===============
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm import LaTIM, hidden_attention
from captum_ssm.attr import RelevanceFlow
from captum_ssm.interventions import Reference
from captum_ssm.metrics import Curve, circuit_faithfulness

from . import models
from .harness import Plan, subject_of
from .task import Examples, Task

KS = (1, 2, 5, 20, 100)
CIRCUIT_MEASURES = ("faithful", "complete", "gap")
Ranking = Callable[[nn.Module, Tensor, Tensor], Any]


def flow(rule: str, against: Any = None) -> Ranking:
    """Edges by relevance or by gradients."""
    return lambda model, inputs, target: RelevanceFlow(model).edges(
        inputs, target, rule=rule, against=against
    )


def attention(model: nn.Module, inputs: Tensor, target: Tensor) -> dict[str, Tensor]:
    """The size of the hidden attention."""
    return {k: v.abs() for k, v in hidden_attention(model, inputs, reduction="mean").items()}


def norms(model: nn.Module, inputs: Tensor, target: Tensor) -> dict[str, Tensor]:
    """The size of what each token adds to another one, by LaTIM."""
    latim = LaTIM(model)
    layers = hidden_attention(model, inputs[:, :2], reduction="mean")
    return {name: latim.interactions(inputs, name, "l1").detach() for name in layers}


def noise(model: nn.Module, inputs: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Edges at random."""
    B, L = inputs.shape
    layers = hidden_attention(model, inputs[:, :2], reduction="mean")
    return {name: torch.rand(B, L, L).tril() for name in layers}


RANKINGS: dict[str, Ranking] = {
    "RelevanceFlow": flow("lrp", "others"),
    "RelevanceFlow, logit": flow("lrp"),
    "EAP": flow("gradient"),
    "EAP-IG": flow("integrated"),
    "LaTIM, l1": norms,
    "hidden attention": attention,
    "random edges": noise,
}


def scored_circuits(
    task: Task,
    rankings: dict[str, Ranking],
    plan: Plan,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """All scores of all rankings on one task, per example and, as curves, per number of edges."""
    scores: dict[str, Any] = {}
    refused: dict[str, str] = {}
    seconds: dict[str, float] = {}
    with models.fast_scan():
        subject, counts = subject_of(task, plan)
        (part,) = subject.parts
        for name, ranking in rankings.items():
            torch.manual_seed(plan.seed)
            start = time.process_time()
            try:
                found = faithfulness(subject.model, part, ranking)
            except Exception as error:  # any refusal of any entrant
                refused[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:300]
                tell(f"{task.name}: {name} refused: {refused[name]}")
                continue
            seconds[name] = round((time.process_time() - start) / len(part), 4)
            scores[name] = found
            means = ", ".join(
                f"{key} {torch.tensor(found[key]).mean():.2f}" for key in CIRCUIT_MEASURES
            )
            tell(f"{task.name}: {name}: {means}")
    return {
        "name": task.name,
        "family": task.family,
        **counts,
        "explained": len(part),
        "ks": KS,
        "scores": scores,
        "refused": refused,
        "seconds": seconds,
    }


def faithfulness(model: nn.Module, part: Examples, ranking: Ranking) -> dict[str, list[float]]:
    """The scores of one ranking per example, and the means per k."""
    edges = ranking(model, part.inputs, part.target)
    found = circuit_faithfulness(
        model,
        part.inputs,
        edges,
        part.answer,
        part.other,
        ks=KS,
        ablation=Reference.of(model, part.swapped, mean=False),
    )
    curves = {"faithful": found.kept, "complete": 1 - found.removed, "gap": found.gap.nan_to_num()}
    log_k = torch.tensor(KS).double().log()
    areas = {name: _rounded(Curve(log_k, curve).areas) for name, curve in curves.items()}
    return areas | {f"{name} by k": _rounded(curve.mean(0)) for name, curve in curves.items()}


def _rounded(values: Tensor) -> list[float]:
    return [round(float(x), 4) for x in values.tolist()]
