"""Mixers without an adapter, found before a model is recorded."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from captum_ssm._capture.checking import Rebuilt, check_reconstruction
from captum_ssm._capture.model import refuse_scripted
from captum_ssm._capture.request import Request
from captum_ssm._capture.tracing import on_thrown_away
from captum_ssm._clones import repeated
from captum_ssm._copies import Copies, original
from captum_ssm._errors import ReconstructionError
from captum_ssm._nested import map_tensors
from captum_ssm._quiet import quiet
from captum_ssm.mixers import MixerCall, find_adapter, find_mixers
from captum_ssm.mixers._registry import Freeze, as_unknown, may_be_namesake, remember
from captum_ssm.mixers.discovery import discover

# Models whose unknown mixers, if they have any, were found; and what is still not known of some.
_SEARCHED: WeakSet[nn.Module] = WeakSet()
# What the graphs of models were made of in which nothing is left to be searched for.
_SETTLED: WeakKeyDictionary[nn.Module, frozenset[Any]] = WeakKeyDictionary()
_UNKNOWN: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
# Models whose mixers were compared with the adapters of their names.
_COMPARED: WeakSet[nn.Module] = WeakSet()


def is_settled(model: nn.Module, structure: frozenset[Any] = frozenset()) -> bool:
    """Whether all that mixes tokens in a graph of a model is known.

    Args:
        model (nn.Module): the model.
        structure (frozenset, optional): what the graph is made of. Default: frozenset(), for any
            graph of this model
    """
    return model in _SETTLED and structure <= _SETTLED[model]


def settle(model: nn.Module, structure: frozenset[Any]) -> None:
    """Let :func:`is_settled` know that a graph was measured, and searched if tokens are mixed."""
    _SETTLED[model] = _SETTLED.get(model, frozenset()) | structure


def search_anew(model: nn.Module) -> None:
    """Let a model be searched again: its graph is made of something new."""
    _SEARCHED.discard(model)


def warn_of_unknown(model: nn.Module, refused: str | None) -> None:
    """Warn of what mixes tokens in a model and is no mixer, as once measured.

    Attention is no matter: its probabilities are constants wherever they are computed.
    """
    if refused is not None:
        _UNKNOWN[model] = refused
    found = _UNKNOWN.get(model)
    if found is not None and "Softmax" not in found and "ScaledDotProduct" not in found:
        why = found.partition(". ")[0]
        warnings.warn(
            f"{why}: its coefficients are not held constant, so relevance may not add up to the "
            "score. The convergence delta says by how much.",
            UserWarning,
            stacklevel=2,
        )


@repeated
def find_namesakes(request: Request) -> None:
    """Find other adapters of mixers whose class only has the name of one that is registered.

    As in copies of a package that compute something else: what the adapter of the name computes is
    compared with what they return, once for each model.

    Args:
        request (Request): what to run.
    """
    model = request.module
    if request.remote or model in _COMPARED:
        return
    named = {module for _, module in find_mixers(model) if may_be_namesake(module)}
    if named:
        # The run that is explained warns by itself.
        with quiet(), on_thrown_away(request) as (of_copies, copies):
            calls = _calls_of(set(map(copies.of, named)), of_copies)
            others = {original(call.module) for call in calls if not _reproduces(call)}
            if others:
                with as_unknown(others):
                    remember(_discovered(of_copies, copies))
    _COMPARED.add(model)  # not where it raised


def _discovered(request: Request, copies: Copies) -> dict[nn.Module, Freeze]:
    found = discover(copies.root, request.run)
    return {original(module): freeze for module, freeze in found.items()}


def _calls_of(modules: set[nn.Module], request: Request) -> list[MixerCall]:
    # The first call of each module that runs.
    calls: dict[nn.Module, MixerCall] = {}

    def note(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if module not in calls:
            call = MixerCall("", module, args, kwargs, result)
            calls[module] = map_tensors(lambda x: x.detach().clone(), call)

    with torch.no_grad(), ExitStack() as hooks:
        for module in modules:
            handle = module.register_forward_hook(note, with_kwargs=True, prepend=True)
            hooks.enter_context(handle)
        request.run()
    return list(calls.values())


def _reproduces(call: MixerCall) -> bool:
    adapter = find_adapter(call.module)
    assert adapter is not None
    try:
        with torch.no_grad():
            rebuilt = Rebuilt.of(adapter(call), call)
            check_reconstruction("", call, rebuilt, call.token_mask())
    except (ReconstructionError, AttributeError, RuntimeError, TypeError, ValueError):
        return False
    return True


@repeated
def find_unknown_mixers(request: Request, *, mixed: bool = False) -> bool:
    """Run a model whose mixers no adapter is registered for, and remember those found.

    Args:
        request (Request): what to run.
        mixed (bool, optional): whether tokens are mixed between the known mixers, so that a model
            that has some is searched too, once. Default: False

    Returns:
        bool: whether any were found.
    """
    find_namesakes(request)
    model = request.module
    known = any(True for _ in find_mixers(model))
    if request.remote or (known and (not mixed or model in _SEARCHED)):
        return False
    refuse_scripted(model)
    with quiet(), on_thrown_away(request) as (of_copies, copies):
        found = _discovered(of_copies, copies)
    remember(found)
    _SEARCHED.add(model)
    _UNKNOWN.pop(model, None)
    return bool(found)
