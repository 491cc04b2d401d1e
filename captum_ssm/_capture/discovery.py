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

# Models whose unknown mixers, if they have any, were found.
_SEARCHED: WeakSet[nn.Module] = WeakSet()


def is_searched(model: nn.Module) -> bool:
    """Whether all mixers of a model are known."""
    return model in _SEARCHED


def find_unknown_mixers(request: Request, *, mixed: bool = False) -> bool:
    """Run a model whose mixers no adapter is registered for, and remember those found.

    Args:
        request (Request): what to run.
        mixed (bool, optional): whether tokens are mixed between the known mixers, so that a model
            that has some is searched too, once. Default: False

    Returns:
        bool: whether any were found.
    """
    model = request.module
    known = any(True for _ in find_mixers(model))
    if request.remote or (known and (not mixed or model in _SEARCHED)):
        return False
    with unchanged(model), warnings.catch_warnings():
        # The run that is explained warns by itself.
        warnings.simplefilter("ignore")
        found = discover(model, request.run)
    remember(found)
    _SEARCHED.add(model)
    return bool(found)
