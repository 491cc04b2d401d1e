"""Circuits against brute force: the model's own scans, and mixers with masked matrices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from edges import SCANS, RemovedPairs, without
from families import (
    TRANSFORMERS_4,
    build,
    padded,
    skip_what_fails_by_itself,
    skip_what_keeps_its_cache,
)
from frozen import frozen_layers
from methods import assert_close
from models import embed, ids
from torch import Tensor, nn

import captum_ssm
from captum_ssm import InputError, RelevanceFlow, UnsupportedModelError
from captum_ssm.attr import Edge
from captum_ssm.interventions import Reference, circuit, knockout
from captum_ssm.mixers import COMPONENTS, FrozenMixer, MixerCall, find_adapter, find_mixers
from captum_ssm.utils.memory import memory_limit

L = 7


def some(*shape: int, share: float = 0.6) -> Tensor:
    """Edges at random; one token keeps all, and one none."""
    mask = torch.rand(*shape, L, L, generator=torch.Generator().manual_seed(0)) < share
    mask[..., 2, :], mask[..., 4, :] = True, False
    return mask


def logits(model: nn.Module, tokens: Tensor, **inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens, **inputs).logits


def dense(
    mixer: FrozenMixer,
    kept: Tensor,
    formulation: str,
    coefficients: FrozenMixer | None = None,
    reference: tuple[FrozenMixer, bool] | None = None,
) -> Tensor:
    """The gated output of a mixer with whole matrices, of which entries are zero."""
    source = mixer if coefficients is None else coefficients

    def carried(operator: Any, v: Tensor, mask: Tensor) -> Tensor:
        alpha = operator.matrix()
        mask = mask.repeat_interleave(alpha.shape[1] // mask.shape[1], 1)
        v = v.unflatten(-1, (alpha.shape[1], -1))
        return torch.einsum("bmij,bjmp->bimp", alpha * mask, v).flatten(2)

    def elsewhere(operator: Any, v: Tensor, mask: Tensor) -> Tensor:
        if not reference[1]:
            return carried(operator, v, ~mask)
        return torch.stack([carried(operator, v, ~one[None]).mean(0) for one in mask])

    if formulation == "unified":
        gated = source.gated_output()
        operator = source.operator("unified", COMPONENTS)
        left = gated - carried(operator, source.inputs, torch.ones(1, 1, L, L, dtype=torch.bool))
        left = left + carried(operator, mixer.inputs, kept)
        if reference is not None:
            other = reference[0]
            left = left + elsewhere(other.operator("unified", COMPONENTS), other.inputs, kept)
        return left
    mixed = []
    for k, (scan, order, _) in enumerate(source.scans_in_order()):
        here = kept if order is None else kept[..., order, :][..., order]
        v = mixer.scans_in_order()[k][0].values
        y = carried(scan.recurrence, v, here)
        if reference is not None:
            other = reference[0].scans_in_order()[k][0]
            y = y + elsewhere(other.recurrence, other.values, here)
        mixed.append(y if scan.skip is None else y + scan.skip * v)
    return mixer.gated_output_of(mixed) if coefficients is None else source.gated_output(mixed)


@contextmanager
def by_hand(model: nn.Module, left: Callable[[FrozenMixer, str], Tensor]) -> Iterator[None]:
    """The model with another input of the output projection of each mixer."""

    def hook(path: str) -> Callable[..., Any]:
        def replaced(module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
            mixer = find_adapter(module)(MixerCall(path, module, args, kwargs, result))
            output = mixer.projected(left(mixer, path))
            return (output, *result[1:]) if isinstance(result, tuple) else output

        return replaced

    with ExitStack() as stack:
        for path, module in find_mixers(model):
            handle = module.register_forward_hook(hook(path), with_kwargs=True)
            stack.callback(handle.remove)
        yield


@pytest.mark.filterwarnings("ignore:.*reads the padding")
@pytest.mark.parametrize("side", [None, "left"])
@pytest.mark.parametrize("family", SCANS)
def test_hidden_edges_are_those_of_the_models_own_scans(family, side):
    skip_what_fails_by_itself(family, L, side)
    model, tokens = build(family), ids(2, L)
    inputs = {} if side is None else {"attention_mask": padded(side, length=L, pads=2)}
    real = 1.0 if side is None else inputs["attention_mask"][..., None]
    kept = some(2)
    layers = len(list(find_mixers(model)))
    with torch.no_grad(), circuit(model, kept[:, None].expand(-1, layers, -1, -1)):
        found = model(tokens, **inputs).logits
    with torch.no_grad(), without(family, model, RemovedPairs((~kept).float())):
        truth = model(tokens, **inputs).logits
    assert ((truth - logits(model, tokens, **inputs)) * real).abs().max() > 1e-3
    assert_close(found * real, truth * real)


@pytest.mark.parametrize("formulation", ["hidden", "unified"])
@pytest.mark.parametrize("family", SCANS)
def test_all_edges_change_nothing_and_no_edges_are_a_knockout_of_all(family, formulation):
    model, tokens = build(family), ids(2, L)
    plain, layers = logits(model, tokens), len(list(find_mixers(model)))
    everything = torch.ones(layers, L, L, dtype=torch.bool)
    listed = [(w, i, j) for w in range(layers) for i in range(L) for j in range(i + 1)]
    for edges, remove in (
        (everything, False),
        (everything.tril(), False),
        (listed, False),
        ([], True),
        (~everything, True),
    ):
        with circuit(model, edges, remove=remove, formulation=formulation):
            assert torch.equal(logits(model, tokens), plain)
    with circuit(model, [], formulation=formulation):
        none = logits(model, tokens)
    with circuit(model, everything, remove=True, formulation=formulation):
        assert_close(logits(model, tokens), none)
    if formulation == "hidden":
        with knockout(model):
            assert torch.equal(logits(model, tokens), none)


@pytest.mark.filterwarnings("ignore:.*reads the padding")
@pytest.mark.parametrize("coefficients", ["run", "whole"])
@pytest.mark.parametrize("formulation", ["hidden", "unified"])
@pytest.mark.parametrize(
    "family", ["mamba", "mamba2", "jamba", "rwkv", "qwen3_next", "recurrent_gemma", "xlstm"]
)
def test_mixers_with_masked_matrices(family, formulation, coefficients):
    skip_what_fails_by_itself(family, L)
    skip_what_keeps_its_cache(family)
    model, tokens = build(family), ids(2, L)
    mask = padded("right", length=L, pads=2)
    other = ids(3, L, seed=1)
    plain = {layer.name: layer for layer in frozen_layers(model, tokens, mask)}
    means, single = ({a.name: a for a in frozen_layers(model, x)} for x in (other, other[:2]))
    kept = some(2)
    layers = len(list(find_mixers(model)))
    for elsewhere, mean in ((None, False), (means, True), (single, False)):
        reference = None
        if elsewhere is not None:
            x = other if mean else other[:2]
            reference = Reference.of(model, x, mean=mean, formulation=formulation)

        def left(mixer: FrozenMixer, path: str, elsewhere=elsewhere, mean=mean) -> Tensor:
            of_whole = plain[path].mixer if coefficients == "whole" else None
            far = None if elsewhere is None else (elsewhere[path].mixer, mean)
            return dense(mixer, kept[:, None], formulation, of_whole, far)

        options = {"formulation": formulation, "coefficients": coefficients}
        with (
            torch.no_grad(),
            circuit(
                model,
                kept[:, None].expand(-1, layers, -1, -1),
                ablation="zero" if reference is None else reference,
                **options,
            ),
        ):
            found = model(tokens, attention_mask=mask).logits
        with torch.no_grad(), by_hand(model, left):
            assert_close(found, model(tokens, attention_mask=mask).logits)


@pytest.mark.parametrize("remove", [False, True])
@pytest.mark.parametrize("formulation", ["hidden", "unified"])
@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba"])
def test_lists_heads_and_masks_name_the_same_edges(family, formulation, remove):
    model, tokens = build(family), ids(2, L)
    path = next(path for path, _ in find_mixers(model))
    maps = 4 if family == "mamba2" else 32
    edges = [
        Edge(path, 3, 1),
        Edge(path, -1, 2, head=1, example=0),
        Edge(path, 6, -5, head=-1),
        Edge(path, 6, 6, example=1),
        (path, 5, 0, 2),
        (0, -2, 3),
    ]
    mask = torch.zeros(2, maps, L, L, dtype=torch.bool)
    mask[:, :, 3, 1] = mask[0, 1, 6, 2] = mask[:, -1, 6, 2] = mask[1, :, 6, 6] = True
    mask[:, 2, 5, 0] = mask[:, :, 5, 3] = True
    reference = Reference.of(model, ids(3, L, seed=1), formulation=formulation)
    for ablation in ("zero", reference):
        options = dict(remove=remove, formulation=formulation, ablation=ablation)
        with circuit(model, edges, **options):
            found = logits(model, tokens)
        with circuit(model, {path: mask}, **options):
            assert_close(found, logits(model, tokens))
        if ablation == "zero":
            kept = mask ^ remove

            def left(mixer: FrozenMixer, at: str, kept: Tensor = kept) -> Tensor:
                here = kept if at == path else torch.full((2, 1, L, L), remove)
                return dense(mixer, here, formulation)

            with torch.no_grad(), by_hand(model, left):
                assert_close(found, model(tokens).logits)
        with memory_limit(1), circuit(model, edges, **options):  # a tile for each token
            assert_close(logits(model, tokens), found)


@pytest.mark.parametrize("remove", [False, True])
@pytest.mark.parametrize("family", ["mamba", "recurrent_gemma", "rwkv", "mamba2"])
def test_few_listed_edges_without_any_row(family, remove):
    skip_what_keeps_its_cache(family)
    model, tokens, other = build(family), ids(2, L), ids(4, L, seed=1)
    layers = len(list(find_mixers(model)))
    mask = torch.zeros(2, layers, L, L, dtype=torch.bool)
    mask[:, :, [6, 6, 5, 1, 1], [2, 6, 0, 0, 1]] = True  # all edges of one token
    mask[0, 0, 6, 5] = mask[0, 0, 3, 2] = True
    listed = [
        Edge(path, i, j, example=None if bool(mask[:, w, i, j].all()) else b)
        for w, (path, _) in enumerate(find_mixers(model))
        for b, i, j in mask[:, w].nonzero().tolist()
    ]
    e = embed(model, tokens)
    references = [Reference.of(model, x, mean=m) for x, m in ((other, True), (other[:2], False))]
    for ablation in ("zero", *references):
        found = []
        for edges in (listed, mask):
            x = e.clone().requires_grad_()
            with circuit(model, edges, remove=remove, ablation=ablation):
                y = model(inputs_embeds=x).logits
            found.append([y.detach(), *torch.autograd.grad(y[:, -1, 5].sum(), x)])
        assert_close(found[0][0], found[1][0])
        assert_close(found[0][1], found[1][1])


def test_scans_in_several_orders():
    from captum_ssm.models import SS2D, BidirectionalMamba

    x, other = torch.randn(2, 2, 6, 16, generator=torch.Generator().manual_seed(0)).unbind()
    kept = some(2)[:, :6, :6]
    for mixer in (
        BidirectionalMamba(16, state=4, bimamba_type="v2"),
        BidirectionalMamba(16, state=4, bimamba_type="v1"),
        SS2D(16, grid=(2, 3)),
    ):
        model = nn.Sequential(mixer).eval()
        for formulation in ("hidden", "unified"):
            reference = Reference.of(model, other, mean=False, formulation=formulation)
            (layer,) = frozen_layers(model, other)
            for ablation, far in (("zero", None), (reference, (layer.mixer, False))):

                def left(mixer: FrozenMixer, path: str, far=far, form=formulation) -> Tensor:
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setitem(globals(), "L", 6)
                        return dense(mixer, kept[:, None], form, None, far)

                options = {"formulation": formulation, "ablation": ablation}
                with torch.no_grad():
                    with circuit(model, kept[:, None], **options):
                        found = model(x)
                    with by_hand(model, left):
                        assert_close(found, model(x))
                    listed = [Edge("0", i, j, example=b) for b, i, j in kept.nonzero().tolist()]
                    with circuit(model, listed, **options):
                        assert_close(model(x), found)
                    with circuit(model, torch.ones(1, 6, 6, dtype=torch.bool), **options):
                        assert torch.equal(model(x), model[0](x))


def test_a_reference_of_a_part_of_the_batch_is_repeated(mamba):
    tokens, other = ids(4, L), ids(2, L, seed=1)
    kept = some(4)[:, None].expand(-1, 2, -1, -1)
    with circuit(mamba, kept, ablation=Reference.of(mamba, other, mean=False)):
        found = logits(mamba, tokens)
    with circuit(mamba, kept, ablation=Reference.of(mamba, other.repeat(2, 1), mean=False)):
        assert_close(logits(mamba, tokens), found)


def test_a_run_is_its_own_reference(mamba):
    tokens = ids(2, L)
    for formulation in ("hidden", "unified"):
        own = Reference.of(mamba, tokens, mean=False, formulation=formulation)
        with circuit(mamba, [(0, 3, 1)], formulation=formulation, ablation=own):
            assert_close(logits(mamba, tokens), logits(mamba.eval(), tokens))


def test_only_the_chosen_layers_lose_edges(mamba):
    tokens, edges = ids(2, L), [(0, 6, 2), (1, 6, 3)]
    with circuit(mamba, edges, layers=0):
        found = logits(mamba, tokens)
    keeps_all = {0: torch.zeros(L, L, dtype=torch.bool), 1: torch.ones(L, L, dtype=torch.bool)}
    keeps_all[0][6, 2] = True
    with circuit(mamba, keeps_all):
        assert_close(logits(mamba, tokens), found)
    with circuit(mamba, edges, remove=True, layers=[1]):
        found = logits(mamba, tokens)
    with knockout(mamba, sources=3, targets=6, layers=1):
        assert_close(logits(mamba, tokens), found)
    # Tokens that lose nothing keep the model's own values.
    assert torch.equal(found[:, :6], logits(mamba, tokens)[:, :6])


def test_coefficients_of_the_whole_run_are_of_the_same_input(mamba):
    tokens, edges = ids(2, L), [(0, 6, 2), (1, 6, 3)]
    found = []
    for coefficients in ("run", "whole"):
        with circuit(mamba, edges, coefficients=coefficients):
            found.append(logits(mamba, tokens))
            logits(mamba, ids(1, L + 2))
            assert torch.equal(logits(mamba, tokens), found[-1])  # each run has its own whole run
    assert (found[0] - found[1]).abs().max() > 1e-4
    with (
        pytest.raises(UnsupportedModelError, match="expected the block to call the model itself"),
        circuit(mamba, edges, coefficients="whole"),
        torch.no_grad(),
    ):
        mamba.backbone(tokens)


@pytest.mark.parametrize("coefficients", ["run", "whole"])
@pytest.mark.parametrize("formulation", ["hidden", "unified"])
@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba", "qwen3_next"])
def test_gradients_go_through_what_is_left(family, formulation, coefficients):
    model, tokens = build(family), ids(1, L)
    e, kept = embed(model, tokens), some()
    layers = len(list(find_mixers(model)))
    reference = Reference.of(model, ids(2, L, seed=1), formulation=formulation)

    def score(e: Tensor, limit: int | None = None) -> Tensor:
        options = {"formulation": formulation, "coefficients": coefficients}
        edges = kept.expand(layers, -1, -1)
        with memory_limit(limit), circuit(model, edges, ablation=reference, **options):
            return model(inputs_embeds=e).logits[0, -1, 5]

    def gradient(of: Callable[[Tensor], Tensor]) -> Tensor:
        x = e.clone().requires_grad_()
        return torch.autograd.grad(of(x), x)[0]

    g = gradient(score)
    assert_close(gradient(lambda x: score(x, 1)), g)  # with the graph of each tile made anew
    far = {layer.name: layer.mixer for layer in frozen_layers(model, ids(2, L, seed=1))}
    whole: dict[str, FrozenMixer] = {}

    def keep(mixer: FrozenMixer, path: str) -> Tensor:
        whole[path] = mixer
        return mixer.gated_output()

    def left(mixer: FrozenMixer, path: str) -> Tensor:
        far_mixer = far[path], True
        return dense(mixer, kept[None, None], formulation, whole.get(path), far_mixer)

    def truth(x: Tensor) -> Tensor:
        if coefficients == "whole":
            with by_hand(model, keep):
                model(inputs_embeds=x)
        with by_hand(model, left):
            return model(inputs_embeds=x).logits[0, -1, 5]

    assert_close(g, gradient(truth))


def test_errors_say_what_to_do(mamba):
    tokens = ids(2, L)
    reference = Reference.of(mamba, tokens, mean=False)
    bad: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ([(0, L, 1)], {}, InputError, rf"with target {L}; .* expected 0 .. {L - 1} \(or"),
        ([(0, 1, -L - 1)], {}, InputError, "source"),
        ([(0, 1, 3)], {}, InputError, "3 -> 1 of backbone.layers.0.mixer, which reads no later"),
        ([(0, 3, 1, 32)], {}, InputError, "head 32; .* 32 heads"),
        ([Edge("backbone.layers.0.mixer", 3, 1, example=2)], {}, InputError, "example 2"),
        ([(2, 3, 1)], {}, ValueError, "edges holds 2; this model has 2 mixers"),
        ([("backbone", 3, 1)], {}, ValueError, "or a path: backbone.layers.0.mixer"),
        ([(0, 3)], {}, TypeError, r"edges holds \(0, 3\); expected an Edge, \(layer, target"),
        ([(0, 3, 1.5)], {}, TypeError, "with integers"),
        ([(0, 3, None)], {}, TypeError, "with integers"),
        ([3], {}, TypeError, "edges holds 3"),
        (3, {}, TypeError, "edges is 3; expected edges in a list"),
        (torch.ones(2, L, L), {}, TypeError, "edges is of type torch.float32; expected a bool"),
        (some(3), {}, ValueError, r"for a model of 2 mixers; expected \(2, L, L\)"),
        (some(3, 2), {}, InputError, "the mask of edges is"),
        ({0: some()[:5]}, {}, InputError, rf"the mask of edges is \(5, {L}\)"),
        ({0: some(2, 3)}, {}, InputError, "32 heads or channels"),
        ({5: some()}, {}, ValueError, "edges holds 5"),
        ({0: [1]}, {}, TypeError, r"edges\[0\] is of type list"),
        ([], {"formulation": "both"}, ValueError, "formulation is 'both'"),
        ([], {"ablation": "mean"}, ValueError, "ablation is 'mean'; expected 'zero' or a Ref"),
        ([], {"coefficients": "all"}, ValueError, "coefficients is 'all'"),
        ([], {"layers": 2}, ValueError, "layers holds 2"),
        ([], {"ablation": reference, "formulation": "unified"}, ValueError, "expected the same"),
    ]
    for edges, options, error, match in bad:
        with pytest.raises(error, match=match), circuit(mamba, edges, **options):
            mamba(tokens)
    for other, match in ((ids(2, 5), "is given 5 tokens in this run"), (ids(3, L), "this run 3")):
        with pytest.raises(InputError, match=match), circuit(mamba, [], ablation=reference):
            mamba(other)
    empty = replace(reference, carried={})
    with pytest.raises(InputError, match="knows nothing of"), circuit(mamba, [], ablation=empty):
        mamba(tokens)
    jamba = build("jamba")
    index = next(
        k for k, (_, m) in enumerate(find_mixers(jamba)) if type(m).__name__.endswith("Attention")
    )
    for formulation in ("hidden", "unified"):
        with (
            pytest.raises(InputError, match="reads no later"),
            circuit(jamba, [(index, 1, 3)], formulation=formulation),
        ):
            jamba(tokens)
    with pytest.raises(UnsupportedModelError, match="did not reach"), circuit(mamba, []):
        pass
    with (
        pytest.raises(ValueError, match="is edited by another"),
        circuit(mamba, []),
        knockout(mamba, sources=1),
    ):
        mamba(tokens)
    with pytest.raises(ZeroDivisionError), circuit(mamba, [], coefficients="whole"):
        raise ZeroDivisionError
    assert all("forward" not in vars(m) for m in mamba.modules())


def test_writing_inside_is_refused_with_a_cache_and_edited_without(mamba):
    tokens = ids(1, L)
    how = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": -1}
    with circuit(mamba, [(0, 3, 1)]):
        hint = "" if TRANSFORMERS_4 else ".*use_cache=False"
        with pytest.raises(UnsupportedModelError, match=f"cache that is not empty{hint}"):
            mamba.generate(tokens, **how)
        written = mamba.generate(tokens, use_cache=False, **how)
        for end in range(L, L + 3):
            assert mamba(written[:, :end]).logits[0, -1].argmax() == written[0, end]
    assert all("forward" not in vars(m) for m in mamba.modules())


def test_methods_of_frozen_mixers_are_refused_inside(mamba):
    with pytest.raises(UnsupportedModelError, match="inside of the block"), circuit(mamba, []):
        captum_ssm.MambaLRP(mamba).attribute(ids(), target=5)


def test_circuits_of_other_threads_do_not_meet(mamba):
    tokens, edges = ids(2, L), [(0, 6, 2), (1, 6, 3)]
    truths = {}
    for coefficients in ("run", "whole"):
        with circuit(mamba, edges, coefficients=coefficients):
            truths[coefficients] = logits(mamba, tokens)
    truths["plain"], wrong, start = logits(mamba, tokens), [], threading.Barrier(4)

    def run(kind: str) -> None:
        start.wait()
        for _ in range(5):
            with ExitStack() as stack:
                if kind != "plain":
                    stack.enter_context(circuit(mamba, edges, coefficients=kind))
                if not torch.equal(logits(mamba, tokens), truths[kind]):
                    wrong.append(kind)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(run, ("run", "whole", "plain", "whole")))
    assert not wrong


def test_a_list_of_edges_takes_memory_linear_in_the_tokens(mamba):
    from captum_ssm.interventions.edges import ListedEdges

    edges = ListedEdges(torch.tensor([[0, -1, 99_000, 7]]), (1, 32, 100_000), keep=True)
    is_whole, has_some = edges.tokens(is_causal=True)
    assert not is_whole.any()
    assert has_some.nonzero().tolist() == [[0, 99_000]]
    assert edges.at(torch.tensor([[99_000]])).nonzero().tolist() == [[0, 0, 0, 7]]


def test_all_edges_of_a_model_are_not_a_choice_of_them():
    model, tokens = build("mamba"), ids(1, L)
    edges = RelevanceFlow(model).edges(tokens, 5)
    with (
        pytest.raises(TypeError, match=r"expected some of them, such as edges\.top"),
        circuit(model, edges),
    ):
        model(tokens)
