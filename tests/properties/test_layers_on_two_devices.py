"""Layers on two devices in turn, on a machine that has one: see other_device.py."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import pytest
import torch
from families import build
from methods import METHODS, assert_close
from models import ids
from torch import nn

from captum_ssm.capture import Request, freeze

# Families, and which of a model's layers is the first one on the CPU.
CASES = (("mamba", 0), ("mamba2", 1), ("recurrent_gemma", 0))
TOKENS = ids(2, 9)
NEEDED = "_setup_privateuseone_for_python_backend"


@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, NEEDED), reason="needs a device in Python"
)
def test_layers_on_two_devices_in_turn():
    accelerate = pytest.importorskip("accelerate")
    assert accelerate
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [f"{family}:{first}" for family, first in CASES]


def spread(model: nn.Module, first: int) -> nn.Module:
    """The model with its layers on the CPU and the second device in turn."""
    from accelerate import hooks
    from other_device import DEVICE

    for i, layer in enumerate(getattr(model, model.base_model_prefix).layers):
        place = torch.device("cpu") if i % 2 == first else DEVICE
        layer.to(place)
        hooks.add_hook_to_module(layer, hooks.AlignDevicesHook(place, io_same_device=True))
    return model


def check(family: str, first: int) -> None:
    """Explanations are those of the model on one device, and so is what frozen mixers compute."""
    from other_device import OtherDevice

    for method in METHODS:
        with OtherDevice():
            found = method(spread(build(family), first)).attribute(TOKENS, target=5)
        assert found.device == TOKENS.device
        assert_close(found, method(build(family)).attribute(TOKENS, target=5))
    frozen = freeze(Request.of(build(family), None, TOKENS)).layers
    with OtherDevice():
        layers = freeze(Request.of(spread(build(family), first), None, TOKENS)).layers
        for layer, truth in zip(layers, frozen, strict=True):
            torch.testing.assert_close(layer.mixer.output().cpu(), truth.mixer.output())
            if layer.mixer.readout is not None:
                again = layer.mixer.readout(layer.mixer.mixed)
                torch.testing.assert_close(again.cpu(), truth.mixer.gated_output())


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for family, first in CASES:
        check(family, first)
        print(f"{family}:{first}", flush=True)
