"""Ways to call a model that its edits do not follow."""

from __future__ import annotations

import pytest
import torch
from stacks import FLIP, Stack, in_order, tokens

from captum_ssm import UnsupportedModelError
from captum_ssm.interventions import knockout


def test_a_model_under_vmap_is_refused_in_words() -> None:
    model, x = Stack(in_order(FLIP)).double().eval(), tokens()
    refused = pytest.raises(UnsupportedModelError, match=r"called under torch\.vmap")
    with refused, knockout(model, sources=2):
        torch.vmap(lambda example: model(example[None])[0])(x)
    with knockout(model, sources=2):
        edited = model(x)
    assert not torch.allclose(edited, model(x))
