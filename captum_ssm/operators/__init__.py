"""Frozen token mixers as linear operators over tokens, one kind of recurrence a file."""

from captum_ssm.operators._base import REDUCTIONS, TokenOperator
from captum_ssm.operators.diagonal import DiagonalOperator

__all__ = ["REDUCTIONS", "DiagonalOperator", "TokenOperator"]
