"""MambaLRP from a cache: the new tokens, and what each layer kept of the ones before."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import transformers
from families import DELTA_FAMILIES, KDA_FAMILIES, SPECS, TRANSFORMERS_4, build
from methods import each_method
from models import ids, without_biases
from torch import Tensor, nn

from captum_ssm import RawAttention, ReconstructionError, UnsupportedModelError
from captum_ssm.attr import LaTIM, MambaLRP, MambaRollout, StateRelevance
from captum_ssm.errors import InputError

pytestmark = pytest.mark.skipif(TRANSFORMERS_4, reason="caches of transformers 4 are others")

S6 = ("mamba", "falcon_mamba", "jamba", "zamba")
# In transformers Bamba and MiniMax go on from a cache to something else than in the whole text.
SSD = ("mamba2", "zamba2", "falcon_h1", "nemotron_h", "granitemoehybrid")
INDEXED = ("qwen4_exp", "glm5_next")
DELTA = tuple(f for f in (*DELTA_FAMILIES, *KDA_FAMILIES) if f not in INDEXED)
CONV = ("lfm2", "lfm2_moe", "lfm3")
SEVERAL = [f for f in (*SSD, *DELTA, *CONV) if f in SPECS]
P = 9  # tokens in the cache
TARGET = 3


def filled(model: nn.Module, tokens: Tensor) -> dict[str, Any]:
    """The argument that holds a model's cache after some tokens."""
    names = inspect.signature(model.forward).parameters
    name = next(n for n in ("cache", "past_key_values", "cache_params", "state") if n in names)
    with torch.no_grad():
        return {name: getattr(model(tokens, use_cache=True), name)}


def explained(
    model: nn.Module, new: Tensor, cache: dict[str, Any]
) -> tuple[Tensor, Tensor, dict[str, StateRelevance]]:
    return MambaLRP(model).attribute(
        new, TARGET, cache, return_convergence_delta=True, return_states=True
    )


def total(states: dict[str, StateRelevance]) -> Tensor:
    return torch.stack([one.total for one in states.values()]).sum(0).float()


@pytest.mark.parametrize(
    ("family", "count"),
    [*((f, 1) for f in (*S6, *SEVERAL)), *((f, 5) for f in SEVERAL)],
)
def test_new_tokens_have_the_relevance_that_they_have_in_the_whole_text(family, count):
    model, text = build(family), ids(2, P + count)
    whole = MambaLRP(model).attribute(text, TARGET)
    cache = filled(model, text[:, :P])
    before = copy.deepcopy(cache)
    found, delta, states = explained(model, text[:, P:], cache)
    torch.testing.assert_close(found, whole[:, P:], rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        score = model(text[:, P:], **before).logits[:, -1, TARGET]
    torch.testing.assert_close(found.sum(1) + total(states) + delta, score, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "count"), [("mamba", 1), ("mamba2", 5), ("qwen3_next", 5)])
def test_states_have_the_relevance_of_the_tokens_that_they_hold(family, count):
    # Without bias terms nothing is lost on the way, so the layers together hold what the tokens
    # before have in the whole text.
    model, text = without_biases(build(family)), ids(2, P + count)
    whole, left = MambaLRP(model).attribute(text, TARGET, return_convergence_delta=True)
    _, delta, states = explained(model, text[:, P:], filled(model, text[:, :P]))
    torch.testing.assert_close(total(states), whole[:, :P].sum(1), rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(delta, left, rtol=0, atol=1e-5)


def test_relevance_of_a_state_has_its_shape():
    model, text = build("mamba2"), ids(2, P + 3)
    cache = filled(model, text[:, :P])
    layer = next(iter(cache.values())).layers[0]
    _, _, states = explained(model, text[:, P:], cache)
    assert list(states) == ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]
    first = states["backbone.layers.0.mixer"]
    assert first.state.shape == layer.recurrent_states[0].shape
    assert first.tails[0].mT.shape == layer.conv_states[0].shape
    assert bool((first.total != 0).all())


def test_a_graph_that_is_made_in_the_backward_pass(monkeypatch):
    model, text = build("mamba2"), ids(2, P + 3)
    cache = filled(model, text[:, :P])
    expected, _, of_states = explained(model, text[:, P:], cache)
    monkeypatch.setattr("captum_ssm.capture.substitute.KEPT", 0)
    found, _, states = explained(model, text[:, P:], cache)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(total(states), total(of_states))


def test_rwkv_takes_its_list_of_states():
    model, text = build("rwkv"), ids(1, P + 4)
    cache = filled(model, text[:, :P])
    found, delta, states = explained(model, text[:, P:], cache)
    whole = MambaLRP(model).attribute(text, TARGET)
    torch.testing.assert_close(found, whole[:, P:], rtol=1e-3, atol=1e-5)
    with torch.no_grad():
        score = model(text).logits[:, -1, TARGET]
    torch.testing.assert_close(found.sum(1) + total(states) + delta, score, rtol=1e-4, atol=1e-5)


@each_method
def test_rwkv_of_one_token_mixes_the_examples_of_a_batch(method):
    # In transformers the states (B, E) are added to tokens (B, 1, E), which makes (B, B, E).
    model, text = build("rwkv"), ids(2, P + 1)
    cache = filled(model, text[:, :P])
    assert model(text[:, P:], **copy.deepcopy(cache)).logits.shape[:2] == (2, 2)
    with pytest.raises(ValueError, match=r"attention .*is given .* and returns .*expected"):
        method(model).attribute(text[:, P:], target=TARGET, additional_forward_args=cache)
    alone = {"state": [x[:1] for x in cache["state"]]}
    found, _, _ = explained(model, text[:1, P:], alone)
    whole = MambaLRP(model).attribute(text[:1], TARGET)
    torch.testing.assert_close(found, whole[:, P:], rtol=1e-3, atol=1e-5)


def test_the_cache_stays_as_it_was_and_an_empty_one_is_none():
    model, text = build("mamba2"), ids(2, P)
    cache = filled(model, text)
    before = copy.deepcopy(vars(next(iter(cache.values())).layers[0]))
    explained(model, text[:, :2], cache)
    after = vars(next(iter(cache.values())).layers[0])
    assert torch.equal(before["recurrent_states"][0], after["recurrent_states"][0])
    empty = type(next(iter(cache.values())))(config=model.config)
    found, _, states = explained(model, text, {next(iter(cache)): empty})
    torch.testing.assert_close(found, MambaLRP(model).attribute(text, TARGET))
    assert states == {}


def test_a_cache_of_other_examples_or_another_model_is_refused():
    model, text = build("mamba2"), ids(2, P)
    with pytest.raises(InputError, match="as many examples as the inputs have"):
        explained(model, text[:1], filled(model, text))
    wider = build("mamba2", expand=4, num_heads=8)
    with pytest.raises(InputError, match="a cache that this model filled"):
        explained(model, text, filled(wider, text))
    deeper = build("mamba2", num_hidden_layers=1)
    with pytest.raises(InputError, match="of 1 layers"):
        explained(model, text, filled(deeper, text))


def test_a_cache_of_other_lengths_or_with_a_mask_is_refused():
    model, text = build("falcon_h1"), ids(2, P + 1)
    cache = filled(model, text[:, :P])
    mask = torch.ones(2, 1, dtype=torch.long)
    with pytest.raises(InputError, match=rf"hold \[{P}\] tokens .* no mask"):
        explained(model, text[:, P:], cache | {"attention_mask": mask})
    layers = [x for x in next(iter(cache.values())).layers if hasattr(x, "keys")]
    assert len(layers) == 2
    layers[1].keys, layers[1].values = layers[1].keys[:, :, 1:], layers[1].values[:, :, 1:]
    with pytest.raises(InputError, match=rf"hold \[{P - 1}, {P}\] tokens"):
        explained(model, text[:, P:], cache)


def test_states_that_are_kept_elsewhere_are_missed_in_words():
    # Attention's layers are in the cache, and the recurrent ones keep their states in the modules.
    model, text = build("recurrent_gemma"), ids(2, P + 1)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(text[:, :P], cache=cache, use_cache=True)
    with pytest.raises(UnsupportedModelError, match=r"nothing of .*RecurrentBlock.* begins anew"):
        explained(model, text[:, P:], {"cache": cache})


@pytest.mark.parametrize("segment", [1, 4, 13])
def test_segments_go_on_from_a_cache(segment):
    model, text = build("mamba2"), ids(2, P + 13)
    cache = filled(model, text[:, :P])
    whole, left, begun = explained(model, text[:, P:], cache)
    found, delta, states = MambaLRP(model).attribute(
        text[:, P:],
        TARGET,
        cache,
        segment=segment,
        return_convergence_delta=True,
        return_states=True,
    )
    torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(delta, left, rtol=0, atol=1e-5)
    assert [*states] == [*begun]
    for name, of in states.items():
        assert of.state.shape == begun[name].state.shape
        torch.testing.assert_close(of.state, begun[name].state, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(of.tails, begun[name].tails, rtol=1e-4, atol=1e-6)


def test_segments_after_a_cache_that_the_model_ignores_are_refused():
    model, text = build("mamba"), ids(1, P + 6)
    with pytest.raises(ReconstructionError, match="do not go on from its state"):
        MambaLRP(model).attribute(text[:, P:], TARGET, filled(model, text[:, :P]), segment=2)


def test_what_the_model_ignores_is_refused():
    # With several tokens the scan of transformers begins with zeros, whatever the cache holds.
    model, text = build("mamba"), ids(2, P + 3)
    with pytest.raises(ReconstructionError, match="do not go on from its state"):
        explained(model, text[:, P:], filled(model, text[:, :P]))


@pytest.mark.parametrize("method", [RawAttention, MambaRollout, LaTIM])
def test_maps_of_new_tokens_alone_are_refused(method):
    model, text = build("mamba2"), ids(2, P + 3)
    with pytest.raises(UnsupportedModelError, match="MambaLRP alone explains from a cache"):
        method(model).attribute(text[:, P:], TARGET, filled(model, text[:, :P]))


@pytest.mark.parametrize("family", [f for f in (*INDEXED, "zaya", "inkling") if f in SPECS])
def test_attention_that_keeps_something_else_is_refused(family):
    model, text = build(family), ids(2, P + 3)
    with pytest.raises((UnsupportedModelError, ReconstructionError), match="cache"):
        explained(model, text[:, P:], filled(model, text[:, :P]))
