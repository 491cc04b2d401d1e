"""The bodies of functions, replaced for the time of a run.

Whoever refers to a function, and however, then calls the other body. No hook of the interpreter is
needed: a debugger's or a coverage tool's stay in place. Calls of other threads go on to the
original.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from types import CodeType, FunctionType, MappingProxyType
from typing import Any

from captum_ssm.utils.blocks import bound, contextmanager, undo
from captum_ssm.utils.signatures import signature

# Takes the function, one with its own body, and the arguments of a call.
Body = Callable[[FunctionType, FunctionType, tuple[Any, ...], dict[str, Any]], Any]


# The other bodies of functions in this thread.
_BODIES: ContextVar[Mapping[FunctionType, Body]] = ContextVar(
    "captum_ssm_bodies", default=MappingProxyType({})
)
_LOCK = threading.Lock()
_EXCHANGED: dict[FunctionType, _Exchange] = {}


@contextmanager
def patched_functions(functions: Iterable[FunctionType], body: Body) -> Iterator[None]:
    """Calls of some functions in this thread run another body."""
    functions, user = list(functions), object()
    with ExitStack() as stack, stack:
        undo(stack, _put_back, functions, user)
        _put(functions, user)
        with bound(_BODIES, {**_BODIES.get(), **dict.fromkeys(functions, body)}):
            yield


def own_codes(functions: Iterable[FunctionType]) -> list[CodeType]:
    """The code of each function, also of those whose bodies are replaced now, by any thread."""
    with _LOCK:
        exchanged = {f: exchange.code for f, exchange in _EXCHANGED.items()}
        return [exchanged.get(f) or f.__code__ for f in functions]


class _Exchange:
    # A function whose body is replaced, and by which blocks.
    def __init__(self, function: FunctionType) -> None:
        f = self.function = function
        self.code, self.users = f.__code__, set[object]()
        self.original = FunctionType(
            f.__code__, f.__globals__, f.__name__, f.__defaults__, f.__closure__
        )
        self.original.__kwdefaults__ = function.__kwdefaults__
        self.original.__qualname__ = function.__qualname__
        self.original.__module__ = function.__module__
        self.is_signed = "__signature__" in vars(function)

    def put(self) -> None:
        """Give the function the other body."""
        # Models ask functions which arguments they take; the other body takes any.
        if not self.is_signed:
            vars(self.function)["__signature__"] = signature(self.function)
        consts = tuple(
            self if const == "the exchange" else const for const in _stub.__code__.co_consts
        )
        self.function.__code__ = _stub.__code__.replace(
            co_consts=consts, co_freevars=self.code.co_freevars
        )

    def put_back(self) -> None:
        """Give the function its own body."""
        self.function.__code__ = self.code
        if not self.is_signed:
            vars(self.function).pop("__signature__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        body = _BODIES.get().get(self.function)
        if body is None:
            return self.original(*args, **kwargs)
        return body(self.function, self.original, args, kwargs)


def _stub(*args: Any, **kwargs: Any) -> Any:
    exchange: Any = "the exchange"  # a constant of the body, which each function gets its own of
    return exchange(*args, **kwargs)


def _put(functions: Iterable[FunctionType], user: object) -> None:
    with _LOCK:
        for function in functions:
            exchange = _EXCHANGED.get(function)
            if exchange is None:
                exchange = _EXCHANGED[function] = _Exchange(function)
            exchange.users.add(user)
            exchange.put()


def _put_back(functions: Iterable[FunctionType], user: object) -> None:
    with _LOCK:
        for function in functions:
            exchange = _EXCHANGED.get(function)
            if exchange is not None:
                exchange.users.discard(user)
                if not exchange.users:
                    exchange.put_back()
                    _EXCHANGED.pop(function, None)


def _after_fork() -> None:
    # Another thread of the parent may have held the lock.
    global _LOCK
    _LOCK = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
