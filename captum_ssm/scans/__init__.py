"""Scans found by what they are called with, whatever module they stand in.

There is no list of functions. A Python function whose parameters are named like those of a form (x,
dt, A, B and C) is a candidate, and it is a scan only if the form's operator, made from its
arguments, returns what it returned.
"""

from captum_ssm.scans import _known as _known
from captum_ssm.scans._calls import FunctionCall, candidate_functions, intercepted, not_intercepted
from captum_ssm.scans._candidate import Candidate
from captum_ssm.scans._form import register_scan
from captum_ssm.scans._proof import Scan, prove

__all__ = [
    "Candidate",
    "FunctionCall",
    "Scan",
    "candidate_functions",
    "intercepted",
    "not_intercepted",
    "prove",
    "register_scan",
]
