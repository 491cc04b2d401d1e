"""Runs of a model on copies of its modules that are thrown away, without nnsight."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from captum_ssm.capture.model import is_model, unwrap
from captum_ssm.capture.request import Request
from captum_ssm.utils.blocks import WhileOpen, contextmanager
from captum_ssm.utils.copies import Copies, copied


@contextmanager
def on_thrown_away(request: Request) -> Iterator[tuple[Request, Copies]]:
    """A request that runs copies of its model's modules, and these copies, without nnsight."""
    function = request.forward_func
    function = unwrap(function) if is_model(function) else function
    modules = [function] if isinstance(function, nn.Module) else []
    with without_compiler(), copied(request.module, *modules) as copies:
        yield replace(request, forward_func=copies.of(function), model=copies.root), copies


def without_compiler() -> AbstractContextManager[None]:
    """Without compiled models: what would be traced, anew for every run, is the recording."""
    return _EAGER.block() if "torch._dynamo" in sys.modules else nullcontext()


class _Stance:
    # The stance of the compiler, which holds for all threads.
    def __init__(self) -> None:
        self.before: Any = None

    def put(self) -> None:
        """Have compiled models run as they are written."""
        if self.before is None:
            self.before = sys.modules["torch._dynamo"].eval_frame._stance
        torch.compiler.set_stance("force_eager")

    def put_back(self) -> None:
        """Have compiled models run as before."""
        if self.before is not None:
            before = self.before
            torch.compiler.set_stance(
                before.stance,
                skip_guard_eval_unsafe=before.skip_guard_eval_unsafe,
                force_backend=before.backend,
            )
            self.before = None


_STANCE = _Stance()
_EAGER = WhileOpen(_STANCE.put, _STANCE.put_back)
