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
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar

V = TypeVar("V")
P = ParamSpec("P")


def contextmanager(function: Callable[P, Iterator[V]]) -> Callable[P, _Block[V]]:
    """As :func:`contextlib.contextmanager`, for blocks that are left whatever a signal interrupts.

    A signal that comes just when a block is entered or left keeps Python from leaving it. Then the
    next outer block leaves it first, so that both put back what they found, in their order.
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
        _OPEN.set((*_OPEN.get(), weakref.ref(self)))
        return self.context.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        blocks = _OPEN.get()
        block = weakref.ref(self)
        before = blocks[: blocks.index(block)] if block in blocks else blocks
        if kind is not None:
            for inner in reversed(blocks[len(before) + 1 :]):
                if (left := inner()) is not None:
                    left.context.gen.close()
        is_handled = self.context.__exit__(kind, error, traceback)
        _OPEN.set(before)
        return is_handled


# The open blocks, from the outermost to the innermost.
_OPEN: ContextVar[tuple[weakref.ref[_Block[Any]], ...]] = ContextVar("captum_ssm_open", default=())


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
