"""Planted half-lives, sinks and ranks, and all numbers against states computed step by step."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from families import FAMILIES, WITHOUT_STATE, build
from models import ids, tiny
from torch import nn

from captum_ssm.capture import Request, freeze
from captum_ssm.errors import InputError
from captum_ssm.interventions import state_report
from captum_ssm.interventions.states import memory_of
from captum_ssm.mixers import find_mixers
from captum_ssm.visualization import state_memory

ONE = math.log(math.e - 1)  # whose softplus is 1


def mixers(model: nn.Module) -> list[nn.Module]:
    return [module for _, module in find_mixers(model)]


@torch.no_grad()
def test_a_planted_half_life_of_channels():
    model = tiny("mamba")
    for mixer, tokens in zip(mixers(model), (7, 50), strict=True):
        mixer.dt_proj.weight.zero_()
        mixer.dt_proj.bias.fill_(ONE)
        mixer.A_log.fill_(math.log(math.log(2) / tokens))
    report = state_report(model, [ids(2, 12), ids(1, 5)[0]])
    for layer, tokens in zip(report.layers.values(), (7, 50), strict=True):
        np.testing.assert_allclose(layer.half_lives, tokens, rtol=0.01)
    assert report.sequences == 3


@torch.no_grad()
def test_a_planted_half_life_of_heads():
    model = build("mamba2")
    for mixer in mixers(model):
        mixer.in_proj.weight[-mixer.num_heads :] = 0
        mixer.dt_bias.fill_(ONE)
        mixer.A_log.fill_(math.log(math.log(2) / 7))
        mixer.A_log[-1] = math.log(math.log(2) / 50)
    for layer in state_report(model, [ids(1, 9)]).layers.values():
        np.testing.assert_allclose(layer.half_lives[:, :-1], 7, rtol=0.01)
        np.testing.assert_allclose(layer.half_lives[:, -1], 50, rtol=0.01)


@torch.no_grad()
def test_a_planted_sink_and_a_planted_rank():
    model, sink = build("mamba2"), 3
    mixer = mixers(model)[0]
    embedding = model.get_input_embeddings().weight
    embedding[:, 0] = 0
    embedding[sink, 0] = embedding.norm(dim=-1).max()
    mixer.in_proj.weight[-mixer.num_heads :] = 0
    mixer.in_proj.weight[-mixer.num_heads :, 0] = 20  # the step of the sink alone is long
    mixer.dt_bias.fill_(-4)
    mixer.A_log.fill_(-9)
    first, size = mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size
    keys = slice(first, first + size)
    mixer.conv1d.weight[keys] = 0  # all keys are alike, so that each head's state has rank one
    mixer.conv1d.bias[keys] = 1
    tokens = torch.tensor([5, 6, sink, 7, 8, 9, 10, 11, 12, 5])
    report = state_report(model, [tokens, tokens.flip(0)], layers=0)
    (layer,) = report.layers.values()
    assert report.tokens[0].id == sink
    assert report.tokens[0].count == 2
    assert min(report.tokens[0].shares.values()) > 0.8
    assert (layer.sinks[[2, 7]] > 0.4).all()  # half of the sequences have it there
    np.testing.assert_allclose(layer.sinks.sum(0), 1, rtol=1e-5)
    possible = min(mixer.ssm_state_size, mixer.head_dim)
    np.testing.assert_allclose(layer.rank, 1 / possible, rtol=1e-4)


def test_all_numbers_are_those_of_the_recurrence_step_by_step():
    model, tokens = build("mamba2"), ids(2, 9)
    report = state_report(model, [tokens])
    frozen = freeze(Request.of(model, None, tokens), query=False)
    for frozen_layer in frozen.layers:
        operator, found = memory_of(frozen_layer.mixer), report.layers[frozen_layer.name]
        key, decay = operator.key.double(), operator.log_decay.double().exp()
        values = frozen_layer.mixer.values.double().unflatten(-1, (-1, operator.width))
        parts = torch.zeros(*key.shape, operator.width, dtype=torch.float64)  # (B, L, H, K, P)
        before, ranks, changes = parts.sum(1), [], []
        for t in range(9):
            parts = parts * decay[:, None, t, :, :, None]
            parts[:, t] = key[:, t, :, :, None] * values[:, t, :, None, :]
            state = parts.sum(1)
            squares = torch.linalg.svdvals(state) ** 2
            p = (squares / squares.sum(-1, keepdim=True)).clamp(min=1e-300)
            ranks.append((-(p * p.log()).sum(-1)).exp().mean(0) / p.shape[-1])
            changes.append(((state - before).norm(dim=(2, 3)) / state.norm(dim=(2, 3))).mean(0))
            before = state
        norms = parts.norm(dim=(3, 4))
        sinks = (norms / norms.sum(1, keepdim=True)).mean(0)
        np.testing.assert_allclose(found.sinks, sinks, rtol=1e-4, atol=1e-7)
        at = report.after - 1
        assert at.tolist() == [0, 1, 3, 7]
        np.testing.assert_allclose(found.rank, torch.stack(ranks)[at], rtol=1e-4)
        np.testing.assert_allclose(found.change, torch.stack(changes)[at], rtol=1e-4)
        lives = (math.log(0.5) / operator.log_decay.double()).transpose(1, 2)[..., 0]
        sorted_lives = lives.transpose(0, 1).flatten(1).sort(1).values  # (H, 18)
        np.testing.assert_allclose(found.half_lives[1], sorted_lives[:, 8], rtol=0.01)


@pytest.mark.parametrize("family", ["mamba", "rwkv", "qwen3_next"])
def test_other_states_have_a_report_and_a_figure(family):
    if family not in FAMILIES or family in WITHOUT_STATE:
        pytest.skip(f"{family} is not in this version of transformers")
    report = state_report(build(family), [ids(1, 9), ids(2, 6)], samples=2)
    for layer in report.layers.values():
        held = (layer.sinks * report.counts[:, None]).sum(0) / report.sequences
        np.testing.assert_allclose(held, 1, rtol=1e-5)
        assert np.isnan(layer.rank).all() == (layer.kind == "diagonal")
        np.testing.assert_allclose(layer.change[0], 1, rtol=1e-5)
    assert ("softmax" in str(report).lower()) == bool(report.refused)
    assert len(report.to_pandas()) == len(report.rows())
    lives = state_memory(report).axes[0]
    assert len(lives.get_yticks()) == len(report.layers)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ([], "inputs is empty"),
        ("a text", "a list of one text"),
        (["a text"], "tokenizer="),
        (torch.tensor([1, 2]), "Give a single input in a list"),
        ([torch.ones(3)], "expected integer ids"),
    ],
)
def test_wrong_inputs_are_refused_in_words(inputs, words):
    with pytest.raises(InputError, match=words):
        state_report(tiny("mamba"), inputs)
