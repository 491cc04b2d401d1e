"""States against the model's own cache, their split by source token, and memory lengths."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, TRANSFORMERS_4, WITHOUT_STATE, build
from models import ids
from torch import Tensor, nn

from captum_ssm import UnsupportedModelError
from captum_ssm.interventions import states
from captum_ssm.mixers import find_mixers

L = 9
CACHED = ["mamba", "falcon_mamba", "jamba", "mamba2", "bamba", "rwkv", "qwen3_next", "kimi_linear"]


def of_cache(model: nn.Module, family: str, tokens: Tensor) -> dict[str, Tensor]:
    """The recurrent state that the model itself keeps after ``tokens``."""
    with torch.no_grad():
        output = model(tokens, use_cache=True)
    paths = [path for path, _ in find_mixers(model)]
    if family == "rwkv":
        return {path: output.state[2][..., k, None] for k, path in enumerate(paths)}
    cache = getattr(output, "cache_params", None)
    cache = output.past_key_values if cache is None else cache
    found = {}
    for k, path in enumerate(paths):
        if cache.layers[k].is_linear if hasattr(cache.layers[k], "is_linear") else True:
            try:
                found[path] = cache.get_recurrent_state(k)
            except ValueError:  # softmax attention
                continue
    if family in ("mamba2", "bamba"):  # values before keys
        found = {path: state.mT for path, state in found.items()}
    return found


@pytest.mark.skipif(TRANSFORMERS_4, reason="transformers 4 has another cache in every family")
@pytest.mark.parametrize("family", [f for f in CACHED if f in FAMILIES])
def test_states_are_those_of_the_models_own_cache(family):
    model, tokens = build(family), ids(2, L)
    found = states(model, tokens, positions=[3, L - 1])
    for r, after in enumerate((4, L)):
        truth = of_cache(model, family, tokens[:, :after])
        assert list(found) == list(truth)
        for path, state in found.items():
            assert state.positions.tolist() == [3, L - 1]
            expected = truth[path]
            assert state.values[:, r].shape == expected.shape
            assert expected.abs().max() > 1e-3
            error = (state.values[:, r] - expected).abs().max()
            assert error <= 1e-5 * expected.abs().max(), path


@pytest.mark.parametrize("family", FAMILIES)
def test_what_tokens_wrote_adds_up(family):
    model, tokens = build(family), ids(2, L)
    if family in WITHOUT_STATE:
        with pytest.raises(UnsupportedModelError, match="keeps a state"):
            states(model, tokens)
        return
    for state in states(model, tokens, positions=[2, L - 1]).values():
        size = state.values.abs().max()
        for r, t in enumerate((2, -1)):
            parts = state.by_source(t)
            assert parts.shape == (2, L, *state.values.shape[2:])
            assert (parts.sum(1) - state.values[:, r]).abs().max() <= 1e-5 * size
            assert (parts[:, state.positions[r] + 1 :] == 0).all()
        assert state.features().shape == (4, state.values[0, 0].numel())


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next", "recurrent_gemma"])
def test_memory_length_is_when_half_of_a_write_is_gone(family):
    model, tokens = build(family), ids(2, L)
    for state in states(model, tokens, positions=None).values():
        found = state.memory_length([0, 4])
        # What the token wrote, after each later one, by the split of the state.
        later = torch.stack([state.by_source(t)[:, [0, 4]] for t in range(L)], 1)
        if later.dim() == 6:  # (B, T, R, H, K, P): all of a head's values are carried alike
            later = later.movedim(-2, -1)[..., 0, :]
        size = later.norm(dim=-1)  # (B, T, R, M)
        for r, t in enumerate((0, 4)):
            gone = size[:, t:, r] <= size[:, t : t + 1, r] / 2
            truth = torch.where(gone.any(1), gone.int().argmax(1).float(), torch.inf)
            assert torch.equal(found[:, r], truth)
        assert found.isfinite().any()


def test_layers_positions_and_padding():
    model, tokens = build("jamba"), ids(2, L)
    every = states(model, tokens)
    assert [path.rpartition(".")[2] for path in every] == ["mamba"] * 3
    path = list(every)[1]
    (one,) = states(model, tokens, layers=path, positions=None).values()
    assert one.values.shape[1] == L
    assert torch.equal(one.values[:, -1:], every[path].values)
    with pytest.raises(UnsupportedModelError, match="keeps no state"):
        states(model, tokens, layers=1)
    with pytest.raises(ValueError, match="positions holds 9, outside"):
        states(model, tokens, positions=L)
    mask = torch.ones(2, L, dtype=torch.long)
    mask[1, :4] = 0
    padded = states(model, tokens, layers=0, additional_forward_args={"attention_mask": mask})
    alone = states(model, tokens[1:, 4:], layers=0)
    for state, short in zip(padded.values(), alone.values(), strict=True):
        torch.testing.assert_close(state.values[1:], short.values)


def test_scikit_learn_takes_them():
    from sklearn.linear_model import LogisticRegression

    model, tokens = build("mamba"), ids(20, 5)
    (state,) = states(model, tokens, layers=1).values()
    probe = LogisticRegression(max_iter=2000).fit(state.features(), (tokens[:, -1] % 2).numpy())
    assert probe.score(state.features(), (tokens[:, -1] % 2).numpy()) > 0.8
