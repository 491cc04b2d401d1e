"""The layers on their real Triton kernels, run by Triton's interpreter: tiny shapes only."""

from __future__ import annotations

import pytest
import torch
from layers import LAYERS, build
from models import ids

from captum_ssm.capture import Request, freeze

pytestmark = [
    pytest.mark.filterwarnings("ignore:According to Bo"),
    pytest.mark.filterwarnings("ignore:ShortConvolution is crucial"),
]


@pytest.mark.parametrize("name", LAYERS)
def test_the_frozen_layer_is_what_the_kernels_compute(name):
    with torch.no_grad():  # the kernels of a run with gradients are those of chunks
        frozen = freeze(
            Request.of(build(name), None, ids(2, 3)), query=False, check=False, wiring=False
        )
    for layer in frozen.layers:
        expected = layer.call.output
        error = (layer.mixer.output() - expected).abs().max()
        assert error <= 1e-5 * expected.abs().max()
