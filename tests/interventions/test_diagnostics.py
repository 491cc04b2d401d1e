"""State reports: planted half-lives, sinks and ranks, and agreement with one input's states."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from families import build
from models import ids
from torch.nn import functional as F

from captum_ssm.interventions import state_report, states
from captum_ssm.interventions.diagnostics.half_lives import half_lives, shares, state_sizes
from captum_ssm.interventions.diagnostics.tally import Lifetimes, Medians
from captum_ssm.operators import LinearAttentionOperator
from captum_ssm.visualization import state_plot

L = 9


def one_mixer(family: str, operator: LinearAttentionOperator | None = None, values=None):
    mixer = next(iter(states(build(family), ids(1, L)).values())).mixer
    if operator is None:
        return mixer
    plain = dict.fromkeys(("conv", "conv_bias", "activation", "memory"))
    return replace(mixer, recurrence=operator, inputs=values, **plain)


@pytest.mark.parametrize(
    "family", ["mamba", "mamba2", "qwen3_next", "rwkv", "kimi_linear", "recurrent_gemma"]
)
def test_one_input_by_brute_force(family):
    for state in states(build(family), ids(2, L), positions=None).values():
        at = torch.arange(L)
        found, truth = half_lives(state.mixer, at), state.memory_length()
        steps = torch.where(found.is_over, (found.tokens - 1e-9).ceil().clamp(min=1), torch.inf)
        assert torch.equal(steps[found.is_written].float(), truth[found.is_written])
        assert torch.equal(found.is_written, ~truth.isnan())
        heads = state.values.dim() == 5
        all_of = (lambda x: x) if heads else (lambda x: x[..., None, :, :])
        parts, whole = all_of(state.by_source(5)), all_of(state.values)
        share = (parts * whole[:, 5:6]).sum((-1, -2)) / whole[:, 5:6].square().sum((-1, -2))
        torch.testing.assert_close(shares(state.mixer, 5), share[:, :6], rtol=1e-4, atol=1e-5)
        sizes = state_sizes(state.mixer, at)
        s = torch.linalg.svdvals(whole.double()).square()
        used = s.sum(-1).square() / s.square().sum(-1) / s.shape[-1]
        torch.testing.assert_close(sizes.used, used)
        change = (whole - F.pad(whole, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1]).double()
        ratio = torch.linalg.matrix_norm(change) / torch.linalg.matrix_norm(whole.double())
        torch.testing.assert_close(sizes.change, ratio, rtol=1e-4, atol=1e-5)


def plant(family: str, lives: list[float]):
    """A model whose first layer forgets at known rates, whatever it reads."""
    model = build(family, **({"context_length": 256} if family == "rwkv" else {}))
    rates = math.log(2) / torch.tensor(lives)
    with torch.no_grad():
        PLANTS[family](model, lambda heads: rates.repeat(heads // len(lives)))
    return model


STEP = math.log(math.expm1(0.01))  # softplus of it is 0.01


def plant_mamba(model, rates_of):
    mixer = model.backbone.layers[0].mixer
    mixer.dt_proj.weight.zero_()
    mixer.dt_proj.bias.fill_(STEP)
    mixer.A_log.copy_((rates_of(len(mixer.A_log))[:, None] / 0.01).log())


def plant_mamba2(model, rates_of):
    mixer = model.backbone.layers[0].mixer
    mixer.in_proj.weight[-mixer.num_heads :] = 0
    mixer.dt_bias.fill_(STEP)
    mixer.A_log.copy_((rates_of(mixer.num_heads) / 0.01).log())


def plant_rwkv(model, rates_of):
    mixer = model.rwkv.blocks[0].attention
    mixer.time_decay.copy_(rates_of(len(mixer.time_decay)).log())
    mixer.key.weight.zero_()  # the state is scaled by the largest key, which stays the same


def plant_qwen3_next(model, rates_of):
    # What a head forgets per token is to a fifth erased by the token, and the rest decays.
    layer = model.model.layers[0]
    mixer, K = layer.linear_attn, layer.linear_attn.head_k_dim
    rates = rates_of(mixer.num_v_heads).view(mixer.num_k_heads, -1)
    # The first number of each token is constant, and nothing else of it is large.
    model.model.embed_tokens.weight.mul_(1e-3)[:, 0] = 1
    layer.input_layernorm.weight.zero_()
    constant = math.sqrt(model.config.hidden_size)
    of_heads = mixer.in_proj_ba.weight.zero_().unflatten(0, (mixer.num_k_heads, 2, -1))
    of_heads[:, 0, :, 0] = (-torch.expm1(-rates / 5)).logit() / constant
    mixer.dt_bias.fill_(STEP)
    mixer.A_log.copy_((0.8 * rates.flatten() / 0.01).log())
    # All keys have one direction, so that each token erases what those before it wrote.
    keys = mixer.in_proj_qkvz.weight.unflatten(0, (mixer.num_k_heads, -1))[:, K : 2 * K]
    keys.zero_()[:, 0, 0] = 1
    mixer.conv1d.weight.fill_(1)


PLANTS = {
    "mamba": plant_mamba,
    "mamba2": plant_mamba2,
    "rwkv": plant_rwkv,
    "qwen3_next": plant_qwen3_next,
}


@pytest.mark.parametrize("family", PLANTS)
def test_planted_half_lives_are_measured(family):
    texts = [ids(1, 160), *(ids(1, 160).roll(k, 1) for k in range(1, 7))]
    report = state_report(plant(family, [7.0, 50.0]), texts, layers=0, samples=12)
    for row in report.half_lives:
        planted = (7.0, 50.0)[row["head"] % 2]
        for name in ("half_life", "low", "high", "q10"):
            assert row[name] == pytest.approx(planted, rel=0.02)
    assert report.inputs == 7


def planted_operator(erase: float = 0.0, decay: float = 0.0, T: int = 120):
    key = F.normalize(torch.ones(1, T, 1, 4), dim=-1)
    log_decay = torch.full((1, T, 1, 1), decay)
    return LinearAttentionOperator(key, key, log_decay, erase * key, key, width=3)


def test_planted_half_life_of_the_delta_rule():
    at = torch.tensor([0, 9])
    for life in (7.0, 50.0):
        half = 0.5 ** (1 / life)
        for options in ({"erase": 1 - half}, {"decay": math.log(half)}):
            mixer = one_mixer("qwen3_next", planted_operator(**options), torch.randn(1, 120, 3))
            assert half_lives(mixer, at).tokens.flatten().tolist() == pytest.approx(
                [life] * 2, 0.02
            )


def test_half_life_per_key_dimension_is_of_the_whole_write():
    key = torch.ones(1, 80, 1, 2)
    rates = torch.tensor([math.log(2) / 7, math.log(2) / 50])
    operator = LinearAttentionOperator(key, key, -rates.expand(1, 80, 1, 2), width=3)
    mixer = one_mixer("qwen3_next", operator, torch.randn(1, 80, 3))
    t = float(half_lives(mixer, torch.tensor([0])).tokens)
    left = (-2 * rates * t).exp().sum().sqrt() / math.sqrt(2)
    assert float(left) == pytest.approx(0.5, rel=1e-3)


def test_planted_sink_and_rank():
    values = 0.01 * torch.randn(1, 120, 3)
    values[:, 3] = 5.0
    mixer = one_mixer("qwen3_next", planted_operator(), values)
    share = shares(mixer, 119)[0, :, 0]
    assert float(share.sum()) == pytest.approx(1, abs=1e-5)
    assert int(share.argmax()) == 3
    assert float(share[3]) > 0.9
    # One key for all tokens: a matrix of rank one of three.
    used = state_sizes(mixer, torch.tensor([5, 119])).used
    torch.testing.assert_close(used, torch.full_like(used, 1 / 3))


def test_lives_that_outlast_their_text_are_censored():
    rng = np.random.default_rng(0)
    true = rng.exponential(20 / math.log(2), (20000, 1))
    end = rng.uniform(0, 60, true.shape)
    lives = Lifetimes(1)
    lives.add(np.minimum(true, end), true <= end, np.full(true.shape, True))
    assert lives.quantile(0.5)[0] == pytest.approx(20, rel=0.05)
    assert lives.outliving()[0] == pytest.approx((true > end).mean())
    assert lives.quantile(0.999)[0] == np.inf
    few, medians = Medians(1), Medians(1)
    few.add(np.array([3.0]))
    assert np.isnan(few.summary()[1:]).all()
    for value in [*range(1, 100), np.inf]:
        medians.add(np.array([float(value)]))
    assert medians.summary()[:, 0] == pytest.approx([50, 40, 60], rel=0.03)


def test_a_report_of_texts_and_its_picture():
    report = state_report(build("mamba2"), (ids(1, n)[0] for n in (12, 20)), samples=6)
    assert report.inputs == 2
    tables = {name: report.to_pandas(name) for name in ("half_lives", "positions", "sinks")}
    assert tables["half_lives"].groupby("layer").size().tolist() == [4, 4]
    used = tables["positions"].query("measure == 'used'")["mean"]
    assert used.between(0.2, 1.0).all()
    assert set(tables["sinks"]["token"]) == set(ids(1, 20)[0].tolist()) | set(
        ids(1, 12)[0].tolist()
    )
    assert len(state_plot(report).axes) == 4
    head, *lines = str(report).splitlines()
    assert "over 2 inputs" in head
    assert len(lines) == 8 + 1 + 2  # heads, and sinks by layer
    assert f"{report.half_lives[0]['outlives']:.0%} outlive" in lines[0]
    with pytest.raises(ValueError, match="table is 'x'"):
        report.to_pandas("x")
    with pytest.raises(TypeError, match="input 0 is a text"):
        state_report(build("mamba2"), ["a text"])
    with pytest.raises(ValueError, match="input 0 has shape"):
        state_report(build("mamba2"), [ids(2, 5)])
    with pytest.raises(ValueError, match="inputs is empty"):
        state_report(build("mamba2"), [])
