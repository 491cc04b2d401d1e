"""What ``supported`` says of a model."""

import pytest
import torch
from families import build
from models import ids, made, tiny
from stacks import FLIP, Merging, Stack, attention, in_order, shift, tokens

from captum_ssm import UnsupportedModelError, supported
from captum_ssm.attr import methods
from captum_ssm.models import VisionMamba


def test_a_registered_model():
    found = supported(tiny(), ids(2, 300))
    assert [mixer.known for mixer in found.mixers] == ["registered"] * 2
    assert all(mixer.error < 1e-6 for mixer in found.mixers)
    assert all(mixer.tokens == 32 for mixer in found.mixers)  # a trial is enough
    assert found.between == "each token is processed by itself and keeps its position"
    assert not any(found.methods.values())
    assert "rollout" in str(found)
    shown = found._repr_html_()
    assert shown.count("<table>") == 2
    assert "backbone.layers.{0-1}.mixer" in shown  # one row for both


def test_methods_without_a_target_read_the_run_of_the_report(monkeypatch):
    model, runs = tiny(), []
    forward = type(model).forward
    counted = lambda *args, **kwargs: runs.append(1) or forward(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(type(model), "forward", counted)
    supported(model, ids(1, 9))
    first = len(runs)
    supported(model, ids(1, 9))
    assert first <= 10
    # The run of the report, in which the target is found, and one for each method with a target.
    assert len(runs) - first == 1 + sum(method.needs_target() for method in methods().values())


def test_what_surrounds_the_mixers_is_counted():
    found = supported(tiny(), ids(1, 9))
    assert found.outside == {"Embedding": 1, "MambaRMSNorm": 3, "Linear": 1}
    assert not found.mixing
    assert "ther layers, each on one token at a time: Embedding, 3 x MambaRMSNorm, Linear" in str(
        found
    )
    mixed = supported(build("rwkv"), ids(1, 9))
    assert "RwkvFeedForward" in mixed.mixing
    assert "in which tokens act on one another" in str(mixed)


def test_orders_and_stages():
    found = supported(made(Stack(in_order(FLIP))), tokens())
    assert [mixer.order for mixer in found.mixers] == ["forward", "backward"] * 2
    assert [mixer.step for mixer in found.mixers] == [0, 0, 1, 1]
    vim = supported(VisionMamba(image_size=32, patch_size=8, classes=5, width=16, depth=2).eval(),
                    torch.randn(1, 3, 32, 32))  # fmt: skip
    assert {mixer.order for mixer in vim.mixers} == {"backward + forward"}


def test_what_lies_between_is_said():
    merging = supported(made(Merging()), tokens(2, 8))
    assert merging.between == "4 tokens made of 8, by a measured transport"
    assert merging.methods["latim"] is None
    assert merging.methods["rollout"] is None
    mixed = supported(made(Stack(shift)), tokens())
    assert "from one another, which no map shows" in mixed.between
    refused = supported(made(Stack(attention)), tokens())
    assert "Softmax" in refused.between
    assert refused.methods["rollout"] == refused.between
    assert refused.methods["mamba-lrp"] is None


def test_a_mixer_that_is_not_reproduced_is_named():
    model = build("mamba")
    mixer = model.backbone.layers[1].mixer
    mixer.forward = lambda hidden_states, **_: 1.1 * type(mixer).forward(mixer, hidden_states)
    found = supported(model, ids(1, 9))
    assert found.mixers[0].problem is None
    assert found.mixers[1].problem.startswith("not reproduced: relative error 9e-02")
    assert "does not reproduce" in found.methods["rollout"]


def test_a_model_without_mixers():
    with pytest.raises(UnsupportedModelError):
        supported(torch.nn.Linear(4, 4), torch.randn(1, 3, 4))
