"""The layers on their real Triton kernels, run by Triton's interpreter: tiny shapes only.

With gradients the layers choose kernels of chunks, which the interpreter cannot run. So what lies
between the mixers, and whether autograd shows it, is looked at on their naive forms
(``test_layers.py``), and on the kernels that do run with gradients (``test_models.py``).
"""

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
    with torch.no_grad():
        frozen = freeze(
            Request.of(build(name), None, ids(2, 3)), query=False, check=False, wiring=False
        )
    for layer in frozen.layers:
        expected = layer.call.output
        error = (layer.mixer.output() - expected).abs().max()
        assert error <= 1e-5 * expected.abs().max()
