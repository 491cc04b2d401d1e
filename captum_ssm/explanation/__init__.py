"""Explanations as data: kept, opened again, compared and shown without the model."""

from captum_ssm.explanation._explanation import (
    Answer,
    Contrast,
    Example,
    Explanation,
    Maps,
    Method,
    Output,
    Span,
    Token,
)

__all__ = [
    "Answer",
    "Contrast",
    "Example",
    "Explanation",
    "Maps",
    "Method",
    "Output",
    "Span",
    "Token",
]
