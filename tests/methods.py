"""The methods that tests are parametrized by, and how near their results have to be."""

import pytest
from torch import Tensor

import captum_ssm
from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    UnifiedImplicitAttention,
)

MAPS = [RawAttention, MambaRollout, MambaAttribution, UnifiedImplicitAttention]
METHODS = list(captum_ssm.attr.methods().values())
OF_A_TARGET = [MambaAttribution, UnifiedImplicitAttention, LaTIM, MambaLRP]


def each(methods: list[type]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("method", methods, ids=lambda m: m.__name__)


each_method = each(METHODS)


def assert_close(ours: Tensor, truth: Tensor, tolerance: float = 1e-5) -> None:
    """Within ``tolerance`` of the truth's largest entry."""
    assert ours.shape == truth.shape
    assert truth.isfinite().all()
    assert (ours - truth).abs().max() <= tolerance * truth.abs().max()
