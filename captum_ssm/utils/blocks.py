"""Changes of the whole process that last while a block of any thread is open.

Each thread opens and closes its blocks when it likes. The first block that is opened changes the
process, and the last one that is closed puts it back, whatever the order.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, ExitStack
from contextlib import contextmanager as _contextmanager
from contextvars import ContextVar
from types import GeneratorType, TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

V = TypeVar("V")
P = ParamSpec("P")


def contextmanager(function: Callable[P, Iterator[V]]) -> Callable[P, _Block[V]]:
    """As :func:`contextlib.contextmanager`, for blocks that are left whatever a signal interrupts.

    A signal that comes just when a block is entered or left keeps Python from leaving it. Then the
    next outer block leaves it first, so that both put back what they found, in their order. So it
    does with blocks of :mod:`contextlib`, such as PyTorch's.
    """

    @functools.wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> _Block[V]:
        return _Block(functools.partial(_contextmanager(function), *args, **kwargs))

    return made


class _Block(ContextDecorator, AbstractContextManager[V], Generic[V]):
    # One use of a function of contextmanager, also as a decorator.
    def __init__(self, make: Callable[[], Any]) -> None:
        self.make, self.context = make, make()

    def _recreate_cm(self) -> _Block[V]:
        return _Block(self.make)

    def __enter__(self) -> V:
        entered: V = self.context.__enter__()
        return entered

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        _leave_interrupted(traceback)
        is_handled: bool | None = self.context.__exit__(kind, error, traceback)
        return is_handled


def _leave_interrupted(traceback: TracebackType | None) -> None:
    # Leave the blocks that an error came up in while they were entered or left, the inner ones
    # first. What their own code raised ended it, so that there is nothing left of it to run.
    frames = []
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for frame in reversed(frames):
        if frame.f_code.co_filename in _FILES:
            block = frame.f_locals.get("self")
            block = getattr(block, "context", block)
            code = getattr(block, "gen", None)
            if isinstance(code, GeneratorType) and not code.gi_running:
                code.close()


_FILES = frozenset((__file__, _contextmanager.__code__.co_filename))


def undo(stack: ExitStack, function: Callable[..., Any], *args: Any) -> None:
    """Have a stack call ``function`` at its end, again where a signal interrupts the first call.

    Args:
        stack (ExitStack): entered twice, ``with ExitStack() as stack, stack:``, so that what a
            signal leaves over in its first exit is done in the second one.
        function (Callable): may be called again after it was done, or was interrupted.
        *args: what it takes.
    """
    stack.callback(function, *args)
    stack.callback(function, *args)


@contextmanager
def bound(variable: ContextVar[V], value: V) -> Iterator[None]:
    """A context variable with another value inside the block."""
    with ExitStack() as stack, stack:
        undo(stack, variable.set, variable.get())
        variable.set(value)
        yield


class WhileOpen:
    """A change that is in place while at least one block is open.

    Args:
        put (Callable): makes the change, if it is not made yet.
        put_back (Callable): takes it back, if it is made. A process that is forked while only
            other threads have blocks open takes it back too.
    """

    def __init__(self, put: Callable[[], None], put_back: Callable[[], None]) -> None:
        self._put, self._put_back = put, put_back
        self._lock = threading.Lock()
        self._threads: dict[object, int] = {}
        _ALL.add(self)

    @contextmanager
    def block(self) -> Iterator[None]:
        """A block in this thread."""
        with ExitStack() as stack, stack:
            key = object()
            undo(stack, self._close, key)
            with self._lock:
                self._threads[key] = threading.get_ident()
                self._put()
            yield

    def _close(self, key: object) -> None:
        with self._lock:
            self._threads.pop(key, None)
            if not self._threads:
                self._put_back()

    def _after_fork(self) -> None:
        # Another thread of the parent may have held the lock, and none of its blocks goes on here.
        self._lock = threading.Lock()
        here = threading.get_ident()
        self._threads = {key: thread for key, thread in self._threads.items() if thread == here}
        if not self._threads:
            self._put_back()


_ALL: weakref.WeakSet[WhileOpen] = weakref.WeakSet()


def _after_fork() -> None:
    for change in list(_ALL):
        change._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
