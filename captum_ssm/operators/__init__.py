"""Frozen token mixers as linear operators over tokens, one kind of recurrence a file."""

from captum_ssm.operators._base import REDUCTIONS, TokenOperator
from captum_ssm.operators.band import BandOperator, ChainOperator, SumOperator
from captum_ssm.operators.diagonal import DiagonalOperator
from captum_ssm.operators.heads import ComposedOperator, HeadOperator
from captum_ssm.operators.linear_attention import LinearAttentionOperator
from captum_ssm.operators.permuted import ConvolvedOperator, PermutedOperator
from captum_ssm.operators.softmax import SoftmaxOperator

__all__ = [
    "REDUCTIONS",
    "BandOperator",
    "ChainOperator",
    "ComposedOperator",
    "ConvolvedOperator",
    "DiagonalOperator",
    "HeadOperator",
    "LinearAttentionOperator",
    "PermutedOperator",
    "SoftmaxOperator",
    "SumOperator",
    "TokenOperator",
]
