"""A function called as a model calls it, and proven to be a scan."""

from typing import Any

from captum_ssm.discovery.scans import FunctionCall, Scan, prove


def proven(function: Any, **arguments: Any) -> Scan | None:
    """The scan that a function of these arguments computes, if a form is found for it."""
    return prove(FunctionCall(function, (), arguments, function), function(**arguments))
