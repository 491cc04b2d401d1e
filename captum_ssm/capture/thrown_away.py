"""Runs of a model on copies of its modules that are thrown away, without nnsight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from captum_ssm.capture.model import is_model, unwrap
from captum_ssm.capture.request import Request
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.clones import repeated
from captum_ssm.utils.copies import Copies, copied
from captum_ssm.utils.uncompiled import without_compiler


@contextmanager
def on_thrown_away(request: Request) -> Iterator[tuple[Request, Copies]]:
    """A request that runs copies of its model's modules, and these copies, without nnsight."""
    function = request.forward_func
    function = unwrap(function) if is_model(function) else function
    modules = [function] if isinstance(function, nn.Module) else []
    with without_compiler(), copied(request.module, *modules) as copies:
        yield replace(request, forward_func=copies.of(function), model=copies.root), copies


@repeated
def run_on_copies(request: Request) -> Any:
    """What a request returns, by a run that leaves the model, and the random state, as they are."""
    with on_thrown_away(request) as (of_copies, _):
        return of_copies.run()
