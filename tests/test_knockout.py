"""Knockout of edges against brute force, and where it must not go wrong silently."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from edges import SCANS, removed_by_hand
from families import FAMILIES, HYBRIDS, build, padded, skip_what_fails_by_itself
from methods import assert_close
from models import Classifier, embed, ids, recast, tiny
from torch import Tensor, nn

from captum_ssm import (
    InputError,
    MambaLRP,
    RawAttention,
    ReconstructionError,
    UnsupportedModelError,
)
from captum_ssm.interventions import knockout

L = 11


def edges(mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Other sources and targets in each of two examples, so that some edges stay in each row."""
    sources, targets = torch.zeros(2, L), torch.zeros(2, L)
    sources[0, [2, 5]] = 1
    sources[1, 4:7] = 1
    targets[0, 3:] = 1
    targets[1, [4, 9]] = 1
    return sources, targets


def test_every_family_has_an_oracle():
    assert set(SCANS) == set(FAMILIES)


@pytest.mark.filterwarnings("ignore:.*reads the padding")
@pytest.mark.parametrize(("family", "side"), [*itertools.product(SCANS, (None, "left", "right"))])
def test_knockout_is_brute_force(family, side):
    skip_what_fails_by_itself(family, L, side)
    model, tokens = build(family), ids(2, L)
    inputs = {} if side is None else {"attention_mask": padded(side, length=L)}
    sources, targets = edges()
    for renormalize in (False, True) if family in HYBRIDS else (False,):
        with (
            torch.no_grad(),
            knockout(
                model,
                sources=sources.bool(),
                targets=targets.bool(),
                renormalize=renormalize,
            ),
        ):
            found = model(tokens, **inputs).logits
        with torch.no_grad(), removed_by_hand(family, model, sources, targets, renormalize):
            truth = model(tokens, **inputs).logits
        with torch.no_grad():
            plain = model(tokens, **inputs).logits
        real = 1.0 if side is None else inputs["attention_mask"][..., None]
        assert ((truth - plain) * real).abs().max() > 1e-3 * plain.abs().max()
        assert_close(found * real, truth * real)
