"""Explanations as data: kept, opened again, compared and shown without the model."""

from captum_ssm.explanation._explanation import Explanation
from captum_ssm.explanation._parts import (
    Answer,
    Contrast,
    Example,
    Maps,
    Method,
    Output,
    Span,
    Token,
)
from captum_ssm.explanation._summary import Mean, Summary

__all__ = [
    "Answer",
    "Contrast",
    "Example",
    "Explanation",
    "Maps",
    "Mean",
    "Method",
    "Output",
    "Span",
    "Summary",
    "Token",
]
