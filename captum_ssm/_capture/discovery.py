"""Mixers without an adapter, found before a model is recorded."""

from __future__ import annotations

import warnings
from weakref import WeakSet

from torch import nn

from captum_ssm._capture.recording import unchanged
from captum_ssm._capture.request import Request
from captum_ssm.mixers import find_mixers
from captum_ssm.mixers._registry import remember
from captum_ssm.mixers.discovery import discover

_SEARCHED: WeakSet[nn.Module] = WeakSet()


def find_unknown_mixers(request: Request, *, always: bool = False) -> None:
    """Run a model whose mixers no adapter is registered for, and remember those found.

    Args:
        request (Request): what to run.
        always (bool, optional): search a model with known mixers too, once. Default: False
    """
    model = request.module
    known = any(True for _ in find_mixers(model))
    if request.remote or (known and (not always or model in _SEARCHED)):
        return
    with unchanged(model), warnings.catch_warnings():
        # The run that is explained warns by itself.
        warnings.simplefilter("ignore")
        remember(discover(model, request.run))
    _SEARCHED.add(model)
