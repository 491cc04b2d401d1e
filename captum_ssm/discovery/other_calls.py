"""What a search sees of a run in addition to scans, and why some of it cannot be one."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from captum_ssm.discovery.measure.cut_run import is_depthwise

_RECURRENT = frozenset((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu))


class OtherCalls(TorchFunctionMode):
    """Notes depthwise convolutions, and layers whose recurrence is not linear."""

    def __init__(self, convolved: Callable[[], None], layered: Callable[[str], None]) -> None:
        super().__init__()
        self.convolved, self.layered = convolved, layered

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_depthwise(func, args, kwargs or {}):
            self.convolved()
        if func in _RECURRENT:
            self.layered(
                f"calls torch.{func.__name__}, whose steps add up what depends on earlier steps by "
                "way of functions that are not linear"
            )
        return func(*args, **(kwargs or {}))


def why_scripted(kind: type[nn.Module]) -> str:
    """Why nothing is seen of what modules of a class call, where TorchScript compiled that."""
    methods = (f for base in kind.__mro__ for f in vars(base).values())
    for method in methods:
        if not isinstance(method, FunctionType):
            continue
        called = (method.__globals__.get(name) for name in method.__code__.co_names)
        for function in called:
            if isinstance(function, torch.jit.ScriptFunction):
                return (
                    f"calls {function.name}, a torch.jit.ScriptFunction, inside of which no loop "
                    "is seen; code that scripts by itself runs unscripted with PYTORCH_JIT=0 in "
                    "the environment"
                )
    return ""
