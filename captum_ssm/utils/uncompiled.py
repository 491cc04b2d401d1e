"""Runs of compiled models as they are written."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from captum_ssm.utils.blocks import WhileOpen


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
