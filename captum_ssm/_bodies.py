"""The bodies of functions, exchanged for the time of a run.

Whoever refers to a function, and however, then calls the other body. No hook of the interpreter is
needed: a debugger's or a coverage tool's stay in place. Calls of other threads go on to the
original.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

# Takes the function, one with its own body, and the arguments of a call.
Body = Callable[[FunctionType, FunctionType, tuple[Any, ...], dict[str, Any]], Any]


class _Thread(threading.local):
    def __init__(self) -> None:
        self.bodies: dict[FunctionType, Body] = {}


_THIS = _Thread()
_LOCK = threading.Lock()
_EXCHANGED: dict[FunctionType, _Exchange] = {}


@contextmanager
def exchanged(functions: Iterable[FunctionType], body: Body) -> Iterator[None]:
    """Calls of some functions in this thread run another body."""
    known, before = list(functions), _THIS.bodies
    _exchange(known)
    _THIS.bodies = {**before, **dict.fromkeys(known, body)}
    try:
        yield
    finally:
        _THIS.bodies = before
        _put_back(known)


def own_codes(functions: Iterable[FunctionType]) -> list[CodeType]:
    """The code of each function, also of those whose bodies are exchanged now, by any thread."""
    with _LOCK:
        return [_EXCHANGED[f].code if f in _EXCHANGED else f.__code__ for f in functions]


class _Exchange:
    # A function whose body is exchanged, by how many runs.
    def __init__(self, function: FunctionType) -> None:
        f = self.function = function
        self.code, self.users = f.__code__, 0
        self.original = FunctionType(
            f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__
        )
        self.original.__kwdefaults__ = function.__kwdefaults__
        self.original.__qualname__ = function.__qualname__
        self.original.__module__ = function.__module__
        # Models ask functions which arguments they take; the other body takes any.
        self.is_signed = "__signature__" in vars(function)
        if not self.is_signed:
            vars(f)["__signature__"] = inspect.signature(function)

    def put_back(self) -> None:
        """Give the function its own body."""
        self.function.__code__ = self.code
        if not self.is_signed:
            vars(self.function).pop("__signature__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        body = _THIS.bodies.get(self.function)
        if body is None:
            return self.original(*args, **kwargs)
        return body(self.function, self.original, args, kwargs)


def _stub(*args: Any, **kwargs: Any) -> Any:
    exchange: Any = "the exchange"  # a constant of the body, which each function gets its own of
    return exchange(*args, **kwargs)


def _exchange(functions: Iterable[FunctionType]) -> None:
    with _LOCK:
        for function in functions:
            exchange = _EXCHANGED.get(function)
            if exchange is None:
                exchange = _EXCHANGED[function] = _Exchange(function)
                consts = tuple(
                    exchange if const == "the exchange" else const
                    for const in _stub.__code__.co_consts
                )
                function.__code__ = _stub.__code__.replace(
                    co_consts=consts, co_freevars=exchange.code.co_freevars
                )
            exchange.users += 1


def _put_back(functions: Iterable[FunctionType]) -> None:
    with _LOCK:
        for function in functions:
            exchange = _EXCHANGED[function]
            exchange.users -= 1
            if exchange.users == 0:
                exchange.put_back()
                del _EXCHANGED[function]
