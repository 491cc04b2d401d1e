"""Channel means that pass over terms which change no digit: every entry by its own size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_kernels import ALL_FORMS, DTYPES, each, rand, randn, run

from captum_ssm import kernels
from captum_ssm.kernels import DiagonalCoefficients

LENGTH, CHANNELS, GROUPS, TAPS = 400, 12, 2, 4
RATES = (-0.0005, -0.15, -0.6)  # at 300 tokens, decays of 1, 2^-50 and 2^-195
STRONG = 2.0**30
ERROR = {torch.float32: 2e-5, torch.float64: 1e-13}  # the rates round by as much


def coefficients(dtype: torch.dtype) -> DiagonalCoefficients:
    sizes, states = (1, LENGTH, CHANNELS), (1, LENGTH, GROUPS, len(RATES))
    A = torch.tensor(RATES, dtype=torch.float64).repeat(CHANNELS, 1)
    A[::2, 0] = RATES[1]  # channels in which no state lasts
    made = DiagonalCoefficients(
        rand(sizes) / 2 + 0.5, randn(sizes), A, randn(states), randn(states),
        randn(sizes), randn(CHANNELS, TAPS), randn(sizes),
    )  # fmt: skip
    return each(made, lambda x: x.to(dtype))


@DTYPES
@pytest.mark.parametrize("plain", [False, True], ids=["taps", "no taps"])
@pytest.mark.parametrize("strong", ["B", "C", "left", "right", "conv", "columns", "nothing"])
def test_entries_are_exact_whatever_is_strong(strong, plain, dtype):
    """What decays most is by far the largest, in one factor after the other."""
    c = each(coefficients(dtype), torch.Tensor.clone)
    if strong in ("B", "C"):
        getattr(c, strong)[..., 1:] *= STRONG
    elif strong == "conv":
        c.conv[::2] *= STRONG
    elif strong != "nothing":
        getattr(c, strong)[..., ::2] *= STRONG
    c.left[:, 300:320] = 0
    if plain:
        c = replace(c, conv=None, columns=None)
    expected = kernels.naive_diagonal_matrix(c).mean(1)
    factors = {k: x.abs() for k, x in vars(c).items() if k not in ("dt", "A") and x is not None}
    size = kernels.naive_diagonal_matrix(replace(c, **factors)).mean(1)
    for form in ALL_FORMS:
        mean = run(form, "mean", c)
        assert bool(((mean - expected).abs() <= ERROR[dtype] * size).all()), form
        assert not bool(mean[:, 300:320].any()), form
