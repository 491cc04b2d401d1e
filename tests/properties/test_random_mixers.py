"""What is measured of mixers that nobody has thought of."""

from __future__ import annotations

import pytest
import torch
from frozen import recorded
from inputs import noise
from random_mixers import LENGTH, WIDTH, RandomMixer

from captum_ssm import UnsupportedModelError
from captum_ssm.discovery.measure import freeze_measured
from captum_ssm.mixers import FrozenMixer

EVERY = ("conv", "activation", "gate", "norm", "skip")
FEW, MANY = range(16), range(16, 600)


def frozen(module: RandomMixer, x: torch.Tensor) -> FrozenMixer | None:
    """None where it is refused, or has hidden maps alone."""
    call = recorded(module, x)
    try:
        mixer = freeze_measured(call)
        mixer.operator("unified")
    except UnsupportedModelError:
        return None
    torch.testing.assert_close(mixer.output(), call.output)
    return mixer


def check_maps(seeds: range) -> float:
    """Compares maps with what an impulse finds; the share of mixers that are refused."""
    refused = 0
    for seed in seeds:
        module, x = RandomMixer(seed).double().eval(), noise(1, LENGTH, WIDTH, seed=seed)
        mixer = frozen(module, x)
        if mixer is None:
            refused += 1
            continue
        expected, _ = module.maps(x)
        operator = mixer.operator("unified", EVERY).scaled(None, None)
        found = operator.map_rows(torch.arange(LENGTH)[None], 0, operator.maps)[0]
        error = float((found - expected).abs().max() / expected.abs().max())
        # An activation near zero is frozen at the factor that it has at 1e-4.
        assert error < 1e-4, f"{seed}: {module}: off by {error:.1e}"
    return refused / len(seeds)


def test_maps():
    assert check_maps(FEW) < 0.1


@pytest.mark.slow
def test_maps_of_many():
    assert check_maps(MANY) < 0.1
