"""Mixers without an adapter, found before a model is recorded."""

from __future__ import annotations

from weakref import WeakSet

from torch import nn

from captum_ssm._capture.recording import unchanged
from captum_ssm._capture.request import Request
from captum_ssm.mixers import find_mixers
from captum_ssm.mixers._registry import remember
from captum_ssm.mixers.discovery import discover

_SEARCHED: WeakSet[nn.Module] = WeakSet()


def find_unknown_mixers(request: Request, *, always: bool = False) -> bool:
    """Run a model whose mixers no adapter is registered for, and remember those found.

    Args:
        request (Request): what to run.
        always (bool, optional): search a model with known mixers too, once. Default: False

    Returns:
        bool: whether any were found.
    """
    model = request.module
    known = any(True for _ in find_mixers(model))
    if request.remote or (known and (not always or model in _SEARCHED)):
        return False
    with unchanged(model):
        found = discover(model, request.run)
    remember(found)
    _SEARCHED.add(model)
    return bool(found)
