"""Layers on two devices in turn, on a machine that has one: see other_device.py."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from families import build
from gpu import assert_same
from methods import METHODS, assert_close
from models import ids
from torch import nn

from captum_ssm.capture import Request, freeze

# Families, which of a model's layers is the first one on the CPU, and whether layers send what they
# return to where it came from.
CASES = (("mamba", 0, True), ("mamba2", 1, False), ("recurrent_gemma", 0, False))
TOKENS = ids(2, 9)

pytestmark = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="needs a device in Python",
)


def in_a_process(what: str) -> list[str]:
    """The lines that this file prints, run by itself."""
    pytest.importorskip("accelerate")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, __file__, what], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.splitlines()


def test_methods_with_layers_on_two_devices():
    assert in_a_process("methods") == [family for family, *_ in CASES]


@pytest.mark.slow
def test_every_call_with_layers_on_two_devices():
    names = in_a_process("calls")
    assert "edges" in names
    assert "patching" in names


def spread(model: nn.Module, first: int, returns: bool) -> nn.Module:
    """The model with its layers on the CPU and the second device in turn.

    Its hooks are those that accelerate puts for ``device_map=``, which send each module with
    weights what it is given; or, where layers return theirs, one per layer.
    """
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    from other_device import DEVICE

    cpu = torch.device("cpu")
    places: dict[nn.Module, torch.device] = {}
    layers = getattr(model, model.base_model_prefix).layers
    for i, layer in enumerate(layers):
        layer.to(cpu if i % 2 == first else DEVICE)
        places |= dict.fromkeys(layer.modules(), cpu if i % 2 == first else DEVICE)
    if returns:
        hooked = [*layers]
    else:
        hooked = [m for m in model.modules() if m in places or m._parameters or m is model]
    for module in hooked:
        hook = AlignDevicesHook(places.get(module, cpu), io_same_device=returns or module is model)
        add_hook_to_module(module, hook)
    return model


def check(family: str, *places: Any) -> None:
    """Explanations are those of the model on one device, and so is what frozen mixers compute."""
    from other_device import OtherDevice

    for method in METHODS:
        with OtherDevice():
            found = method(spread(build(family), *places)).attribute(TOKENS, target=5)
        assert found.device == TOKENS.device
        assert_close(found, method(build(family)).attribute(TOKENS, target=5))
    frozen = freeze(Request.of(build(family), None, TOKENS)).layers
    with OtherDevice():
        layers = freeze(Request.of(spread(build(family), *places), None, TOKENS)).layers
        for layer, truth in zip(layers, frozen, strict=True):
            torch.testing.assert_close(layer.mixer.output().cpu(), truth.mixer.output())
            if layer.mixer.readout is not None:
                again = layer.mixer.readout(layer.mixer.mixed)
                torch.testing.assert_close(again.cpu(), truth.mixer.gated_output())


def check_call(name: str) -> None:
    """What a call of the library returns is the same for a model on one device."""
    from other_device import OtherDevice
    from test_on_a_gpu import CALLS

    truth = CALLS[name](build("mamba2"), TOKENS)
    with OtherDevice():
        assert_same(CALLS[name](spread(build("mamba2"), 1, False), TOKENS), truth)


def main(what: str) -> None:
    warnings.simplefilter("ignore")
    if what == "methods":
        for family, *places in CASES:
            check(family, *places)
            print(family, flush=True)
        return
    from test_on_a_gpu import CALLS

    for name in CALLS:
        print(name, flush=True)
        check_call(name)


if __name__ == "__main__":
    main(sys.argv[1])
