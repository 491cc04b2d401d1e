"""Frozen token mixers as linear operators over tokens, one kind of recurrence per file."""

from typing import TYPE_CHECKING

from captum_ssm.errors import renamed
from captum_ssm.operators.base import REDUCTIONS, TokenOperator
from captum_ssm.operators.composed import (
    ConvolvedOperator,
    ScaledOperator,
    SkipOperator,
    SumOperator,
)
from captum_ssm.operators.diagonal import DiagonalOperator
from captum_ssm.operators.diagonal import one_state as one_state
from captum_ssm.operators.heads import HeadOperator
from captum_ssm.operators.joined import JoinedOperator
from captum_ssm.operators.linear_attention import LinearAttentionOperator
from captum_ssm.operators.mlstm import mlstm_operator as mlstm_operator
from captum_ssm.operators.packed import PackedOperator
from captum_ssm.operators.permuted import MovedOperator, PermutedOperator
from captum_ssm.operators.softmax import SoftmaxOperator
from captum_ssm.operators.states import LatterOperator as LatterOperator
from captum_ssm.operators.states import continued as continued
from captum_ssm.operators.substeps import SubstepOperator
from captum_ssm.operators.toeplitz import ToeplitzOperator
from captum_ssm.operators.top import TopEntries
from captum_ssm.operators.weights import WeightsOperator
from captum_ssm.operators.wkv import wkv_operator as wkv_operator
from captum_ssm.operators.wkv import wkv_state as wkv_state

__all__ = [
    "REDUCTIONS",
    "ConvolvedOperator",
    "DiagonalOperator",
    "HeadOperator",
    "JoinedOperator",
    "LinearAttentionOperator",
    "MovedOperator",
    "PackedOperator",
    "PermutedOperator",
    "ScaledOperator",
    "SkipOperator",
    "SoftmaxOperator",
    "SubstepOperator",
    "SumOperator",
    "ToeplitzOperator",
    "TokenOperator",
    "TopEntries",
    "WeightsOperator",
]

if not TYPE_CHECKING:
    __getattr__ = renamed(
        __name__,
        BandOperator="SkipOperator",
        ChainOperator="TokenOperator.scaled and .convolved",
        ComposedOperator="ScaledOperator",
        PlacedOperator="PackedOperator",
        WindowedOperator="PermutedOperator",
        band="operators.composed",
    )
