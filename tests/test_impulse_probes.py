"""The strongest oracle: a model's own scan function, measured.

The scan is linear in its value argument. Its arguments are recorded in a real forward pass; with
them and a unit impulse at token j it returns column j of the implicit attention of every
channel. No formula of this library is in it.
"""

import pytest
import torch
from families import modeling_of
from models import S6_FAMILIES, ids, s6_paths, tiny
from torch import Tensor

from captum_ssm import hidden_attention

LENGTHS = (1, 2, 3, 7, 33)
TOLERANCE = 2e-5


@pytest.fixture
def recorded(monkeypatch):
    """Runs a model and returns its scan function with the calls that the run made of it."""

    def record(model, **inputs):
        modeling = modeling_of(model, "mamba_selective_scan")
        scan = modeling.mamba_selective_scan
        calls = []

        def spy(*args, **kwargs):
            calls.append((args, kwargs))
            return scan(*args, **kwargs)

        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(modeling, "mamba_selective_scan", spy)
            model(**inputs)
        return scan, calls

    return record


def probe(scan, args, kwargs) -> Tensor:
    """The matrices of one recorded scan, ``(B, D, L, L)``, a column an impulse."""
    values, *coefficients = args
    kwargs = {**kwargs, "D": None, "z": None, "return_last_state": False}
    columns = []
    for j in range(values.shape[-1]):
        impulse = torch.zeros_like(values)
        impulse[..., j] = 1
        columns.append(scan(impulse, *coefficients, **kwargs))
    return torch.stack(columns, -1)


def measured(scan, calls, mixers: int) -> list[Tensor]:
    """A mixer's matrices: those of its consecutive scans (Zamba has one a head), side by side."""
    heads = len(calls) // mixers
    parts = [probe(scan, *call) for call in calls]
    return [torch.cat(parts[i * heads : (i + 1) * heads], 1) for i in range(mixers)]


def assert_same(ours: Tensor, truth: Tensor) -> None:
    assert ours.shape == truth.shape
    assert ours.dtype == torch.float32
    assert (ours - truth).abs().max() <= TOLERANCE * truth.abs().max()


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("family", S6_FAMILIES)
def test_hidden_attention_is_what_impulses_measure(family, length, recorded):
    model, tokens = tiny(family), ids(2, length)
    maps = hidden_attention(model, tokens)
    paths = s6_paths(model)
    scan, calls = recorded(model, input_ids=tokens)
    assert len(calls) == len(paths) * (4 if family == "zamba" else 1)
    for path, truth in zip(paths, measured(scan, calls, len(paths)), strict=True):
        assert truth.tril().abs().median() > 1e-6 * truth.abs().max()  # not trivially near zero
        assert_same(maps[path], truth)
    assert [path for path in maps if path in paths] == paths  # in forward order


@pytest.mark.parametrize("family", S6_FAMILIES)
def test_channels_differ(family):
    # Else a test of maps could not tell which channel is which.
    model = tiny(family)
    for m in hidden_attention(model, ids(1, 7), layers=s6_paths(model)).values():
        flat = m[0].flatten(1)
        distance = torch.cdist(flat, flat).fill_diagonal_(float("inf"))
        assert distance.min() > 1e-3 * flat.norm(dim=1).mean()


@pytest.mark.parametrize("place", [slice(0, 4), slice(5, 9), slice(3, 5)], ids=str)
@pytest.mark.parametrize("family", S6_FAMILIES)
def test_under_a_padding_mask(family, place, recorded):
    model, tokens = tiny(family), ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, place] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask}
    maps = hidden_attention(model, tokens, additional_forward_args={"attention_mask": mask})
    scan, calls = recorded(model, **inputs)
    paths = s6_paths(model)
    between_tokens = (mask[:, None, :, None] * mask[:, None, None, :]).float()
    for path, truth in zip(paths, measured(scan, calls, len(paths)), strict=True):
        assert_same(maps[path], truth * between_tokens)


def test_options_of_the_architecture(recorded):
    changes = {"conv_kernel": 3, "use_conv_bias": False, "use_bias": True, "expand": 3}
    for more in ({}, {"hidden_act": "gelu"}, {"hidden_act": "relu"}):
        model, tokens = tiny("mamba", **changes, **more), ids(2, 7)
        maps = hidden_attention(model, tokens)
        scan, calls = recorded(model, input_ids=tokens)
        for ours, truth in zip(maps.values(), measured(scan, calls, 2), strict=True):
            assert_same(ours, truth)
