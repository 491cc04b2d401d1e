"""Every call of a model on a GPU: the numbers of the CPU, on the device of the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from captum.attr import NoiseTunnel
from captum.metrics import infidelity, sensitivity_max
from families import build
from gpu import DEVICE, ON_A_GPU, Move, assert_same, devices_of, exact_convolutions, on_both
from methods import METHODS, each_method
from models import embed, ids
from torch import Tensor, nn

import captum_ssm
from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    Readout,
    RelevanceFlow,
    UnifiedImplicitAttention,
    effective_receptive_field,
    estimate,
    hidden_attention,
    supported,
)
from captum_ssm.attr import SpanTarget
from captum_ssm.inspection.heads import head_roles
from captum_ssm.interventions import (
    Reference,
    TokenKnockout,
    activation_patching,
    attribution_patching,
    circuit,
    knockout,
    patched,
    scaled_features,
    state_report,
    states,
    swap_effects,
    value_zeroing,
)
from captum_ssm.metrics import (
    circuit_faithfulness,
    decomposition_error,
    evaluate,
    find_circuit,
    find_circuits,
    flipping,
    knockout_agreement,
    layer_knockout,
    links,
    oversmoothing,
    part_shares,
)

__all__ = ["exact_convolutions"]
pytestmark = ON_A_GPU
FAMILIES = ("mamba", "mamba2", "qwen3_next")
L = 9
TOKENS = ids(2, L)
MASK = torch.ones_like(TOKENS).index_fill(1, torch.tensor([0, 1]), 0)
MASK[1] = 1
PROMPT, WRITTEN = ids(1, 6), ids(1, 4, seed=1)[0]
SPAN = SpanTarget([5, -1], [7, 9], [0.5, 2.0], score="contrast")

# The options that all methods have, as a call gives them.
OPTIONS: dict[str, Callable[[Move], dict[str, Any]]] = {
    "positions": lambda at: {"target": [5, 6], "position": [3, 6]},
    "a tensor of positions": lambda at: {
        "target": at(torch.tensor([5, 6])),
        "position": at(TOKENS[:, 0] % L),
    },
    "pairs": lambda at: {"target": [(3, 5), (6, 2)]},
    "a span": lambda at: {"target": SPAN},
    "a mask": lambda at: {"target": 5, "additional_forward_args": {"attention_mask": at(MASK)}},
}


def forward(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x).logits


def inside(block: Any, model: nn.Module, x: Tensor) -> Tensor:
    with block:
        return forward(model, x)


def edges_of(m: nn.Module, x: Tensor, **options: Any) -> Any:
    edges = RelevanceFlow(m).edges(x, 5, **options)
    made = {path: (layer.matrix(), layer.into, layer.error) for path, layer in edges.items()}
    return made, edges.matrix(), [edge.relevance for edge in edges.top(5)]


def heads_of(m: nn.Module, x: Tensor) -> Any:
    edges = RelevanceFlow(m).edges(x, 5)
    layer = next(iter(edges.values()))
    return (
        layer.heads(),
        layer.rows(torch.tensor([L - 1])),
        [[*role.shares.values()] for role in head_roles(edges, x)],
    )


def features(m: nn.Module, x: Tensor, name: str = "directions") -> Any:
    block = next(one for one in m.modules() if isinstance(one, nn.ModuleList))[0]
    atoms = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).to(x.device)
    readout = Readout(m, block, atoms, "abcde", decoder=atoms)
    if name == "scaled":
        return inside(scaled_features(readout, "b", 0.5, tokens=[2, 4]), m, x)
    if name == "begin":
        found = RelevanceFlow(m).features(x, 5, readout=readout)
        return found.values, found.relevance, [one.relevance for one in found.top(3)]
    return (
        readout(x).detach(),
        MambaLRP(readout).attribute(x, (6, 1)),
        RelevanceFlow(readout).edges(x, (6, 1)).matrix(),
    )


def state_readout(m: nn.Module, x: Tensor) -> Any:
    mixer = next(iter(states(m, x)))
    shape = states(m, x)[mixer].values.shape[2:]
    directions = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0))
    directions = directions.to(x.device)
    probe = Readout(m, mixer, directions, "abc", decoder=directions, side="state")
    return (
        MambaLRP(probe).attribute(x, (-1, 1)),
        TokenKnockout(probe).attribute(x, (-1, 1)),
        vars(RelevanceFlow(m).features(x, 5, readout=probe)),
        inside(scaled_features(probe, "b", 0.5, tokens=[2, 4]), m, x),
    )


def all_of_states(m: nn.Module, x: Tensor) -> Any:
    found = states(m, x[:1], positions=[3, -1])
    return {
        path: (one.values, one.features(), one.by_source(-1), one.memory_length(3))
        for path, one in found.items()
    }


def faithfulness(m: nn.Module, x: Tensor) -> Any:
    edges = RelevanceFlow(m).edges(x, 5)
    mean = Reference.of(m, x.flip(1))
    found = circuit_faithfulness(m, x, edges, 5, 7, ks=(1, 4), ablation=mean)
    return found.recovered, found.gap, [edge.relevance for edge in edges.top(3)]


def smallest(m: nn.Module, x: Tensor) -> Any:
    options = {"reference_inputs": x.flip(1), "max_edges": 8}
    found = find_circuit(m, x[:1], 5, 7, **options)
    return found.faithfulness, find_circuits(m, x, 5, 7, max_edges=4)[0].faithfulness


def traced(m: nn.Module, x: Tensor, **options: Any) -> Any:
    prompt, written = x[:1, :6], x[1, :4]
    found = captum_ssm.trace(MambaLRP(m), prompt, written, span=(-2, -1), hops=2, **options)
    return found.relevance, found.total, found.normalized, found.delta


def continued(m: nn.Module, x: Tensor) -> Any:
    prompt, written = x[:1, :6], x[1, :4]
    each = {
        n: captum_ssm.continuation_relevance(k(m), prompt, written)
        for n, k in {"lrp": MambaLRP, "rollout": MambaRollout}.items()
    }
    rows = each["lrp"]
    shares = part_shares(rows[:, :6], {"a": range(3), "b": range(3, 6)})
    return each, captum_ssm.trace_rows(rows, 6, hops=1).relevance, shares


def agreement(m: nn.Module, x: Tensor) -> Any:
    relevance = MambaLRP(m).attribute(x, 5)
    effects = TokenKnockout(m).attribute(x, 5, formulation="unified", perturbations_per_eval=4)
    found = knockout_agreement(relevance, effects, k=3)
    return found.rank, found.overlap, effects


def captums(m: nn.Module, x: Tensor) -> Any:
    def run(e: Tensor) -> Tensor:
        return m(inputs_embeds=e).logits[:, -1]

    method, e = MambaLRP(run, m), embed(m, x)
    relevance = method.attribute(e, target=5)
    tunnel = NoiseTunnel(method).attribute(e, nt_samples=2, stdevs=0.0, target=5)
    change = lambda x: (0.1 * x, 0.9 * x)  # noqa: E731
    return (
        relevance,
        tunnel,
        infidelity(run, change, e, relevance, target=5, n_perturb_samples=2),
        sensitivity_max(method.attribute, e, lambda x, r: x * 1.01, target=5, n_perturb_samples=1),
    )


def report(m: nn.Module, x: Tensor) -> Any:
    tables = state_report(m, [row[None] for row in x], samples=4)
    return [
        tables.to_pandas(name).select_dtypes("number").to_numpy()
        for name in ("half_lives", "positions")
    ]


def embeddings(m: nn.Module, x: Tensor) -> Any:
    e = embed(m, x)
    return [method(m).attribute(e, target=5) for method in METHODS], RelevanceFlow(m).edges(
        e, 5
    ).matrix()


def by_function(m: nn.Module, x: Tensor) -> Any:
    return [method(lambda t: m(t).logits[:, -1], m).attribute(x, target=5) for method in METHODS]


def deltas(m: nn.Module, x: Tensor) -> Any:
    given = {"return_convergence_delta": True}
    return [
        MambaLRP(m).attribute(x, 5, **given),
        LaTIM(m).attribute(x, 5, aggregation="alti_logit", **given),
    ]


def latims(m: nn.Module, x: Tensor) -> Any:
    method, layer = LaTIM(m), 0
    return (
        [method.attribute(x, 5, aggregation=one) for one in ("alti_logit", "flow_logit", "l2")[:2]],
        [method.interactions(x, layer, one) for one in ("l2", 1.0)],
        [
            method.contributions(x, layer, rows, activation=a)
            for rows, a in ((-1, "gate"), ([2, 5], "silu"))
        ],
        method.layer_errors(x, activation="silu"),
        decomposition_error(method, x),
        sorted(links(method.interactions(x, layer)[0])),
    )


def maps(m: nn.Module, x: Tensor) -> Any:
    unified = hidden_attention(m, x, formulation="unified", rows=[2, -1], reduction="max")
    return (
        hidden_attention(m, x),
        hidden_attention(m, x, formulation="unified", components=["conv", "gate"]),
        hidden_attention(m, x, layers=[0, -1], reduction="mean", rows=at_last(x)),
        unified,
        MambaRollout(m).rollout(x),
        MambaAttribution(m).rollout(x, 5),
    )


def at_last(x: Tensor) -> Tensor:
    return torch.full((1,), x.shape[1] - 1, device=x.device)


def method_options(m: nn.Module, x: Tensor) -> Any:
    return (
        MambaRollout(m).attribute(x, start_layer=1),
        RawAttention(m).attribute(x, layers=[0]),
        MambaAttribution(m).attribute(x, 5, start_layer=1),
        UnifiedImplicitAttention(m).attribute(x, 5, aggregation="rollout"),
        MambaLRP(m, memory_limit=1 << 30).attribute(x, 5),
    )


def interventions(m: nn.Module, x: Tensor) -> Any:
    edges = RelevanceFlow(m).edges(x, 5).top(6)
    mask = torch.zeros(2, L, dtype=torch.bool, device=x.device)
    mask[:, 3] = True
    return [
        inside(knockout(m, sources=2, targets=slice(4, None)), m, x),
        inside(knockout(m, sources=mask, formulation="unified"), m, x),
        inside(knockout(m, sources=[1, 2], keep=True, renormalize=True), m, x),
        inside(circuit(m, edges), m, x),
        inside(circuit(m, edges, remove=True, coefficients="whole"), m, x),
        inside(circuit(m, edges, ablation=Reference.of(m, x.flip(1))), m, x),
        inside(patched(m, x.flip(1), component="values", tokens=3), m, x),
    ]


def patching(m: nn.Module, x: Tensor) -> Any:
    found = [
        activation_patching(
            m, x, x.flip(1), target=5, component=one, perturbations_per_eval=4
        ).effects
        for one in ("output", "values", "state")
    ]
    first = next(iter(states(m, x)))
    return (
        found,
        [
            {
                k: one.effects
                for k, one in attribution_patching(m, x, x.flip(1), target=5, rule=rule).items()
            }
            for rule in ("relp", "gradient")
        ],
        value_zeroing(m, x, first),
    )


def swept(m: nn.Module, x: Tensor) -> Any:
    found = TokenKnockout(m).sweep(x, 5, window=1, perturbations_per_eval=4, readers="query")
    parts = torch.arange(L, device=x.device)[None] // 3
    return found.rows(), TokenKnockout(m).attribute(x, 5, feature_mask=parts)


def metrics(m: nn.Module, x: Tensor) -> Any:
    relevance = MambaLRP(m).attribute(embed(m, x), 5)
    run = lambda e: m(inputs_embeds=e).logits[:, -1]  # noqa: E731
    target = torch.tensor([5, 6], device=x.device)
    scored = evaluate(lambda x: MambaLRP(m).attribute(x, 5), x, batch_size=1)
    return (
        flipping(run, embed(m, x), relevance.sum(-1), target).values,
        layer_knockout(run, embed(m, x), target, model=m),
        oversmoothing(m, x),
        scored,
    )


def kept(m: nn.Module, x: Tensor) -> Any:
    # What runs on the device, and returns no numbers that are the same everywhere.
    assert str(supported(m, x, target=5))
    found = estimate(MambaLRP(m), x, target=5)
    assert found.total_bytes > 0
    return 1


CALLS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "embeddings": embeddings,
    "behind a function": by_function,
    "convergence deltas": deltas,
    "LaTIM": latims,
    "maps": maps,
    "options": method_options,
    "edges": edges_of,
    "unified edges": lambda m, x: edges_of(m, x, formulation="unified", against=None),
    "edges against another": lambda m, x: edges_of(m, x, against=7, rule="gradient"),
    "heads": heads_of,
    "graph": lambda m, x: RelevanceFlow(m).graph(x, 5, example=1).to_dict(),
    "paths": lambda m, x: [path.share for path in RelevanceFlow(m).graph(x, 5).paths(2)],
    "components": lambda m, x: vars(RelevanceFlow(m).components(x, 5)),
    "features": features,
    "features that a relevance begins at": lambda m, x: features(m, x, "begin"),
    "scaled features": lambda m, x: features(m, x, "scaled"),
    "readouts of a state": state_readout,
    "states": all_of_states,
    "report of states": report,
    "interventions": interventions,
    "patching": patching,
    "knockout of tokens": swept,
    "agreement": agreement,
    "faithfulness": faithfulness,
    "smallest circuits": smallest,
    "traces": traced,
    "traces through swaps": lambda m, x: traced(m, x, through="swaps"),
    "swaps": lambda m, x: swap_effects(m, x[:1, :6], x[1, :4], candidates=3),
    "continuations": continued,
    "Captum's wrappers": captums,
    "metrics": metrics,
    "support and estimate": kept,
    "receptive field": lambda m, x: effective_receptive_field(m, x).map,
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CALLS)
def test_calls(name, family):
    found, truth = on_both(lambda m, at: CALLS[name](m, at(TOKENS)), lambda: build(family))
    assert_same(found, truth)


@each_method
@pytest.mark.parametrize("family", FAMILIES)
def test_options_of_all_methods(family, method):
    def call(model: nn.Module, at: Move) -> dict[str, Tensor]:
        explain = method(model).attribute
        return {name: explain(at(TOKENS), **given(at)) for name, given in OPTIONS.items()}

    found, truth = on_both(call, lambda: build(family))
    assert_same(found, truth)
    assert devices_of(found) == {DEVICE}


@each_method
def test_relevance_lies_where_the_input_does(method):
    model = build("mamba").to(DEVICE)
    assert devices_of(method(model).attribute((TOKENS.to(DEVICE),), target=5)) == {DEVICE}
