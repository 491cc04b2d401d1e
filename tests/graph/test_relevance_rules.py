"""What relevance misses is said, and functions of complex numbers and of two limits conserve it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from models import normal
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.attr.relevance import coefficients_at, times
from captum_ssm.graph.in_place import seen_in_views

Function = Callable[[Tensor], Tensor]


OTHER, DIRECTION = normal(3, 4, seed=1), normal(3, 4, seed=2)


def missing(function: Function) -> tuple[float, list[str]]:
    """What is missing from the relevance of a function that is zero at zero, and what is said."""

    @seen_in_views
    def explained() -> tuple[float, list[str]]:
        x = normal(3, 4).requires_grad_()
        score = (function(x) * DIRECTION).sum()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            (relevance,) = times([x], coefficients_at([x], score))
        return float(score.detach() - relevance.sum()), [str(warning.message) for warning in said]

    return explained()


def in_view(change: Callable[[Tensor, Tensor], object]) -> Function:
    def changed(x: Tensor) -> Tensor:
        whole = 2 * x
        change(whole[:, :2], x[:, 2:] * 0.3)
        return whole

    return changed


def as_complex(function: Function) -> Function:
    return lambda x: torch.view_as_real(function(torch.complex(x, 0.4 * x.flip(1)))).sum(-1)


# Coefficients that are summands: what the warning calls them.
SUMMANDS: dict[str, tuple[str, Function]] = {
    "a quotient of a constant": ("Div", lambda x: x + OTHER / (1 + x.abs())),
    "a negative power": ("Pow", lambda x: x + x.abs() ** -0.5),
    "negative powers": ("Pow", lambda x: x + x.abs() ** -OTHER.abs()),
    "a power of a constant": ("Pow", lambda x: x + OTHER.abs() ** x),
    "a part that is a power": ("Pow", lambda x: torch.cat([x[:, :2], x[:, 2:].abs() ** -1], -1)),
    "a sign": ("Copysign", lambda x: x + torch.copysign(OTHER, x)),
    "between constants": ("Lerp", lambda x: x + torch.lerp(OTHER, 2 * OTHER, x)),
    "towards a constant": ("Lerp", lambda x: torch.lerp(x, OTHER, x.sigmoid())),
    "a product in a sum": ("Sigmoid", lambda x: torch.addcmul(x, OTHER, x.sigmoid())),
    "a quotient in a sum": ("Addcdiv", lambda x: torch.addcdiv(x, OTHER, x)),
}


@pytest.mark.parametrize("name", SUMMANDS)
def test_coefficients_that_are_added_are_said(name: str) -> None:
    kind, function = SUMMANDS[name]
    lost, said = missing(function)
    assert abs(lost) > 1e-3
    assert [f"the result of {kind} " in words for words in said] == [True]


CONSERVED: dict[str, Function] = {
    "two limits of the tokens": lambda x: torch.clamp(x, -x.roll(1, 0).abs(), x.roll(1, 1).abs()),
    "an upper limit": lambda x: torch.clamp_max(x, x.roll(1, 0).abs()),
    "a lower limit in a view": in_view(lambda v, o: v.clamp_min_(o)),
    "a copied slice": lambda x: torch.slice_copy(x, 1, 0, 4) * 2,
    "a constant in a view": in_view(lambda v, o: v.zero_()),
    "a norm": lambda x: x / x.norm(dim=-1, keepdim=True) + F.rms_norm(x, (4,)),
    **{f"complex {f.__name__}": as_complex(f) for f in (torch.sin, torch.atan, torch.sinh)},
    **{f"complex {f.__name__}": as_complex(f) for f in (torch.asin, torch.asinh, torch.log1p)},
    "complex powers": as_complex(lambda z: z ** torch.tensor([1.0, 2.0, 3.0, 2.0]) + z**3),
    "complex gate": as_complex(lambda z: z * torch.sigmoid(z) * torch.exp(z)),
}


@pytest.mark.parametrize("name", CONSERVED)
def test_what_is_conserved_is_not_said(name: str) -> None:
    lost, said = missing(CONSERVED[name])
    assert (abs(lost) < 1e-9, said) == (True, [])


@pytest.mark.parametrize("function", [torch.tanh, torch.expm1])
def test_complex_functions_whose_argument_is_not_kept_are_said(function: Function) -> None:
    lost, said = missing(as_complex(function))
    assert abs(lost) > 1e-3
    assert [" which has no rule" in words for words in said] == [True]
