"""Explanations as data: kept, opened again, compared and shown without the model."""

from captum_ssm.explanation.corpus import ExplainedDataset, RowError, open_dataset
from captum_ssm.explanation.corpus.changes import Change
from captum_ssm.explanation.corpus.parts import ReportExample
from captum_ssm.explanation.corpus.report import Report
from captum_ssm.explanation.corpus.shares import Difference, Share
from captum_ssm.explanation.corpus.slices import Slice
from captum_ssm.explanation.corpus.summarize import summarize
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
from captum_ssm.explanation.pictures import Picture
from captum_ssm.explanation.replayed import Replay, TokenDifference
from captum_ssm.explanation.summary import Mean, Summary

__all__ = [
    "Answer",
    "Change",
    "Contrast",
    "Difference",
    "Example",
    "ExplainedDataset",
    "Explanation",
    "Maps",
    "Mean",
    "Method",
    "Output",
    "Picture",
    "Replay",
    "Report",
    "ReportExample",
    "RowError",
    "Share",
    "Slice",
    "Span",
    "Summary",
    "Token",
    "TokenDifference",
    "Validation",
    "open_dataset",
    "summarize",
]
