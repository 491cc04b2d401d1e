"""Layers on two devices in turn, on a machine that has one: see other_device.py."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from functools import partial
from itertools import cycle
from types import MethodType
from typing import Any

import pytest
import torch
import wild
from families import build
from gpu import assert_same
from methods import METHODS, assert_close
from models import ids
from torch import nn

from captum_ssm import UnsupportedModelError
from captum_ssm.capture import Request, freeze
from captum_ssm.mixers import find_mixers
from captum_ssm.utils.nested import map_tensors, tensors_in

# Families, which of a model's layers is the first one on the CPU, and whether layers send what they
# return to where it came from.
CASES = (("mamba", 0, True), ("mamba2", 1, False), ("recurrent_gemma", 0, False))
TOKENS = ids(2, 9)

pytestmark = pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="needs a device in Python",
)


def in_a_process(*what: str) -> list[str]:
    """The lines that this file prints, run by itself."""
    pytest.importorskip("accelerate")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, __file__, *what], env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.splitlines()


def test_methods_with_layers_and_mixers_on_two_devices():
    of_layers, of_mixers = [family for family, *_ in CASES], ["Model", "Stack", "refused"]
    assert in_a_process("methods", "mixers") == of_layers + of_mixers


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


class HandWritten:
    """A hook in the manner of accelerate's, which sends what a module returns back."""

    def __init__(self) -> None:
        from other_device import DEVICE

        self.execution_device, self.io_same_device = DEVICE, True

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self.input_device = next(tensors_in((args, kwargs))).device
        return map_tensors(lambda x: x.to(self.execution_device), (args, kwargs))

    def post_forward(self, module: nn.Module, result: Any) -> Any:
        return map_tensors(lambda x: x.to(self.input_device), result)


def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = self._hf_hook.pre_forward(self, *args, **kwargs)
    return self._hf_hook.post_forward(self, type(self).forward(self, *args, **kwargs))


def with_mixers_away(model: nn.Module, mixers: list[nn.Module], *, by_hand: bool) -> nn.Module:
    """The model on the CPU, with each mixer on the second device, which sends its tokens back."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module
    from other_device import DEVICE

    for mixer in mixers:
        mixer.to(DEVICE)
        if by_hand:
            mixer._hf_hook = HandWritten()  # type: ignore[assignment]
            mixer.forward = MethodType(hooked, mixer)
        else:
            add_hook_to_module(mixer, AlignDevicesHook(DEVICE, io_same_device=True))
    return model


def check_mixers() -> None:
    """Explanations are those of the model on one device, of known mixers and of measured ones."""
    from other_device import OtherDevice

    def known() -> tuple[nn.Module, list[nn.Module]]:
        model = build("mamba")
        return model, [mixer for _, mixer in find_mixers(model)]

    def unknown() -> tuple[nn.Module, list[nn.Module]]:
        torch.manual_seed(0)
        model = wild.Stack(wild.Mixer(), wild.Mixer()).eval()
        return model, list(model.layers)

    few = METHODS[:2]
    cases = ((known, METHODS, TOKENS, 5), (unknown, few, wild.tokens(1), (6, 1)))
    for make, methods, inputs, target in cases:
        for method, by_hand in zip(methods, cycle((True, False))):
            with OtherDevice():
                model = with_mixers_away(*make(), by_hand=by_hand)
                found = method(model).attribute(inputs, target=target)
            assert found.device == inputs.device
            assert_close(found, method(make()[0]).attribute(inputs, target=target))
        print("Model" if make is known else "Stack", flush=True)
    with OtherDevice():
        model = with_mixers_away(*known(), by_hand=True)
        for _, mixer in find_mixers(model):
            hook = mixer.__dict__.pop("_hf_hook")
            mixer.forward = partial(forward_elsewhere, hook, mixer)
        for method in METHODS:
            with pytest.raises(UnsupportedModelError, match="its own forward moves tokens"):
                method(model).attribute(TOKENS, target=5)
    print("refused", flush=True)


def forward_elsewhere(hook: HandWritten, mixer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = hook.pre_forward(mixer, *args, **kwargs)
    return hook.post_forward(mixer, type(mixer).forward(mixer, *args, **kwargs))


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
    if what == "mixers":
        check_mixers()
        return
    from test_on_a_gpu import CALLS

    for name in CALLS:
        print(name, flush=True)
        check_call(name)


if __name__ == "__main__":
    for what in sys.argv[1:]:
        main(what)
