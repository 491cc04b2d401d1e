"""Rankings of edges: relevance, gradients, and maps that do not know what is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from circuit_questions import Questions
from torch import Tensor

from captum_ssm import LaTIM, hidden_attention
from captum_ssm.attr import RelevanceFlow
from captum_ssm.attr.flow.edges import RelevanceEdges

Maps = dict[str, Tensor]
OUTPUT_PROJECTIONS = ("out_proj", "o_proj", "output", "linear_out")


def relevance(model: Any, q: Questions, answers: Tensor, rule: str, against: Any) -> RelevanceEdges:
    """Relevance for these answers."""
    flow = RelevanceFlow(model)
    return flow.edges(q.ids, answers, position=q.positions, rule=rule, against=against)


def maps(model: Any, q: Questions, seed: int) -> dict[str, Callable[[Tensor], Maps]]:
    """By name, functions from answers to maps ``(B, L, L)`` by layer.

    "reach": rows that the output does not depend on are zero.
    """
    attention = {k: v.abs() for k, v in hidden_attention(model, q.ids, reduction="mean").items()}
    of_gradient = relevance(model, q, q.answers, "gradient", None)
    reach = {name: (layer.out != 0).double()[..., None] for name, layer in of_gradient.items()}
    latim = LaTIM(model)
    norms = {name: latim.interactions(q.ids, name, "l1").detach() for name in attention}
    generator = torch.Generator().manual_seed(seed)
    noise = {name: torch.rand(x.shape, generator=generator).tril() for name, x in attention.items()}

    def reaching(of: Maps) -> Maps:
        return {name: x * reach[name] for name, x in of.items()}

    return {
        "gradient x hidden attention": lambda answers: _weighted(model, q, answers, attention),
        "hidden attention": lambda _: attention,
        "hidden attention, reach": lambda _: reaching(attention),
        "LaTIM l1, reach": lambda _: reaching(norms),
        "random, reach": lambda _: reaching(noise),
    }


def _weighted(model: Any, q: Questions, answers: Tensor, attention: Maps) -> Maps:
    # Row i times the gradient at the gated output of token i, as in Ali et al., eq. 24.
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: Any, args: Any) -> None:
            kept[name] = args[0]

        return hook

    handles = []
    for name in attention:
        mixer = model.get_submodule(name)
        output = next(getattr(mixer, n) for n in OUTPUT_PROJECTIONS if hasattr(mixer, n))
        handles.append(output.register_forward_pre_hook(keep(name)))
    try:
        logits = model(q.ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    score = logits[torch.arange(len(q)), q.positions, answers].sum()
    gradients = torch.autograd.grad(score, [kept[name] for name in attention])
    return {
        name: x * g.mean(-1)[..., None].abs()
        for (name, x), g in zip(attention.items(), gradients, strict=True)
    }
