"""Explanations as data: kept, opened again, compared and shown without the model."""

from captum_ssm.explanation.corpus import ExplainedDataset, RowError, open_dataset
from captum_ssm.explanation.explanation import Explanation
from captum_ssm.explanation.parts import (
    Answer,
    Contrast,
    Example,
    Maps,
    Method,
    Output,
    Span,
    Token,
    Validation,
)
from captum_ssm.explanation.summary import Mean, Summary

__all__ = [
    "Answer",
    "Contrast",
    "Example",
    "ExplainedDataset",
    "Explanation",
    "Maps",
    "Mean",
    "Method",
    "Output",
    "RowError",
    "Span",
    "Summary",
    "Token",
    "Validation",
    "open_dataset",
]
