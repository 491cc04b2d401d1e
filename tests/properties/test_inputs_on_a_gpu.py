"""Inputs of every form, images, and mixers that are measured, with a model on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import inputs
import pytest
import torch
import wild
from gpu import ON_A_GPU, Move, assert_same, exact_convolutions, on_both
from methods import each_method
from models import made
from torch import Tensor, nn
from vision_models import VISION, images

from captum_ssm import LaTIM, MambaLRP, MambaRollout, RawAttention, UnsupportedModelError
from captum_ssm.metrics import perturbation, segmentation

__all__ = ["exact_convolutions"]
pytestmark = ON_A_GPU


@each_method
@pytest.mark.parametrize("name", VISION)
def test_images(name, method):
    def call(model: nn.Module, at: Move) -> Any:
        model, x = model.float(), at(images().float())
        relevance = method(model).attribute(x, target=2)
        assert relevance.device == x.device
        curve = perturbation(model, x, relevance.abs(), model(x).argmax(1), removal="mean")
        return relevance, curve.values, vars(segmentation(relevance, x[:, 0] > 0))

    found, truth = on_both(call, VISION[name])
    assert_same(found[0], truth[0])
    assert_same(found[1:], truth[1:], 0.2)  # where two entries are alike, either may come first


WILD: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "a loop of one's own": (wild.Mixer, inputs.noise(2, 7, 6)),
    "both ways": (wild.BothWays, inputs.noise(2, 7, 6)),
    "two branches": (wild.TwoBranches, inputs.noise(2, 7, 6)),
    "four ways": (wild.FourWays, inputs.noise(2, 3, 4, 6)),
}


@pytest.mark.parametrize("method", [MambaLRP, MambaRollout, RawAttention])
@pytest.mark.parametrize("name", WILD)
def test_mixers_that_are_measured(name, method):
    kind, x = WILD[name]

    def call(model: nn.Module, at: Move) -> Any:
        return method(lambda x: model(x).flatten(1, -2)[:, -1], model).attribute(at(x), 2)

    assert_same(*on_both(call, lambda: made(lambda: wild.Stack(kind(), kind()))))


@pytest.mark.parametrize("method", [MambaLRP, MambaRollout, LaTIM])
@pytest.mark.parametrize("name", inputs.FORMS)
def test_any_input(name, method):
    form = inputs.FORMS[name]

    def call(model: nn.Module, at: Move) -> Any:
        given = tuple(map(at, form.inputs)) if isinstance(form.inputs, tuple) else at(form.inputs)
        try:
            return method(model).attribute(given, target=form.target)
        except UnsupportedModelError:
            return torch.zeros(())

    found, truth = on_both(call, lambda: made(form.model))
    assert_same(found, truth)
