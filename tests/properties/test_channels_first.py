"""Mixers whose tokens have their channels first, as convolutions take them: VMamba as published.

Each is compared with its twin that has them last, with the same weights.
"""

import pytest
import torch
from channels_first import twins
from methods import each_method

from captum_ssm import hidden_attention, supported
from captum_ssm.interventions import knockout
from captum_ssm.mixers import find_mixers

KINDS = ("image", "square", "series")


@pytest.mark.parametrize("kind", KINDS)
@each_method
def test_relevance_is_that_of_the_twin(method, kind):
    first, last, x = twins(kind)
    found, expected = (method(model).attribute(x, target=2) for model in (first, last))
    assert found.shape == x.shape
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("formulation", ["hidden", "unified"])
def test_maps_are_those_of_the_twin(kind, formulation):
    first, last, x = twins(kind)
    found, expected = (
        hidden_attention(model, x, formulation=formulation) for model in (first, last)
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_mixer_is_the_module_itself(kind):
    first, _, x = twins(kind)
    hidden_attention(first, x)
    assert [path for path, _ in find_mixers(first)] == ["mixers.0", "mixers.1"]
    assert "measured" in str(supported(first, x))


def test_a_token_is_removed_as_from_the_twin():
    first, last, x = twins("series")
    scores = []
    for model in (first, last):
        supported(model, x)
        with torch.no_grad(), knockout(model, sources=2, targets=5):
            scores.append(model(x))
    torch.testing.assert_close(*scores)
