"""Functions that are called before and after calls of some modules, for the time of a block."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import nn

from captum_ssm.utils.blocks import contextmanager, undo

# Where a module keeps its hooks: first what is noted of them, then the hooks themselves.
_KEPT = (
    "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks", "_forward_hooks",
)  # fmt: skip

# Takes a module and what it is called with; returns other arguments, ``(args, kwargs)``, or None.
Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
# Takes a module, what it was called with and what it returned; returns another result, or None.
After = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


@contextmanager
def watch_modules(
    modules: Iterable[nn.Module],
    *,
    before: Before | None = None,
    after: After | None = None,
    ended: After | None = None,
) -> Iterator[None]:
    """Have functions called before and after each call of some modules, in this thread.

    Calls in other threads go on unseen. The hooks are removed at the end of the block, also after
    an exception or a signal.

    Args:
        modules (iterable of nn.Module): the modules, or copies of them.
        before (Callable, optional): takes a module, its args and its kwargs. Default: None
        after (Callable, optional): takes a module, its args, its kwargs and its result.
            Default: None
        ended (Callable, optional): as ``after``, also for a call that raised; ``before`` then comes
            before the hooks that a module has. Default: None

    Examples::

        >>> layer, widths = nn.Linear(2, 3), []
        >>> with watch_modules([layer], after=lambda m, args, kw, y: widths.append(y.shape[-1])):
        ...     _ = layer(torch.ones(1, 2))
        >>> _ = layer(torch.ones(1, 2))
        >>> widths
        [3]
    """
    thread = threading.get_ident()

    def here(function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        def hook(*call: Any) -> Any:
            return function(*call) if threading.get_ident() == thread else None

        undo(stack, _remove, module, hook)
        return hook

    with ExitStack() as stack, stack:
        for module in modules:
            if before is not None:
                hook, is_first = here(before, module), ended is not None
                module.register_forward_pre_hook(hook, prepend=is_first, with_kwargs=True)
            for told, always in ((after, False), (ended, True)):
                if told is not None:
                    hook = here(told, module)
                    module.register_forward_hook(hook, with_kwargs=True, always_call=always)
        yield


def _remove(module: nn.Module, hook: Callable[..., Any]) -> None:
    # The handle of a hook comes too late: a signal may come between the hook and its handle.
    kept = [getattr(module, name) for name in _KEPT]
    for key in [key for hooks in kept for key, known in list(hooks.items()) if known is hook]:
        for hooks in kept:
            hooks.pop(key, None)


def run_in(around: Callable[[nn.Module], AbstractContextManager[None]], module: nn.Module) -> None:
    """Have the forward of a copy run in a context manager."""
    forward = module.forward

    def within(*args: Any, **kwargs: Any) -> Any:
        with around(module):
            return forward(*args, **kwargs)

    module.__dict__["forward"] = within
