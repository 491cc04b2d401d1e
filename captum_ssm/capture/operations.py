"""Which functions a run calls between its mixers: what is not in its graph shows here too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from captum_ssm.graph.in_place import note_step
from captum_ssm.utils.blocks import contextmanager, undo

LookedUp = Callable[[Any, Tensor], Tensor]
# Stands for a mixer's call, among the functions.
_MIXER = "mixer"
# What asks for the form of a tensor does not read what it holds.
_METHODS = ("__len__", "dim", "is_contiguous", "is_floating_point", "numel", "size", "stride")
_PROPERTIES = ("device", "dtype", "is_cuda", "ndim", "requires_grad", "shape")
_OF_FORM = frozenset(
    [getattr(Tensor, name) for name in _METHODS]
    + [getattr(Tensor, name).__get__ for name in _PROPERTIES]
)
# What looks up rows of a table.
_LOOKUPS = frozenset(
    [F.embedding, Tensor.__getitem__]
    + [getattr(of, name) for of in (torch, Tensor) for name in ("gather", "index_select", "take")]
)


class Operations(TorchFunctionMode):
    """Notes each of PyTorch's functions that a run calls, with the one before it.

    A graph shows no ``detach()``, no ``no_grad()``, nothing that is computed inside of them, and
    there is none in a run without gradients. What was measured of a run holds for one that calls
    nothing else.

    Attributes:
        pairs (set of tuple): each function, and the one called before it.

    Examples::

        >>> operations = Operations()
        >>> with operations.noted():
        ...     _ = torch.ones(2).detach().neg()
        >>> (torch.Tensor.detach, torch.Tensor.neg) in operations.pairs
        True
    """

    def __init__(self) -> None:
        super().__init__()
        self._looked_up: LookedUp | None = None
        self.pairs: set[tuple[Any, Any]] = set()
        self._last: Any = None
        self._paused = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._paused and func not in _OF_FORM:
            self.pairs.add((self._last, func))
            self._last = func
        result = func(*args, **(kwargs or {}))
        note_step(func, args, kwargs)
        if func in _LOOKUPS and self._looked_up is not None and not self._paused:
            return self._looked_up((args, kwargs), result)
        return result

    @contextmanager
    def noted(self, looked_up: LookedUp | None = None) -> Iterator[None]:
        """Note what is called inside of the block.

        Args:
            looked_up (Callable, optional): is given the arguments and the result of what may look
                up rows of a table, and returns what the model goes on with. Default: None
        """
        with ExitStack() as stack, stack:
            undo(stack, self._leave)
            self._looked_up = looked_up
            self.__enter__()
            yield

    def _leave(self) -> None:
        self._looked_up = None
        while _get_current_function_mode() is self:
            self.__exit__(None, None, None)

    @contextmanager
    def in_mixer(self, module: nn.Module) -> Iterator[None]:
        """What a mixer runs in, which counts as one function."""
        self._last = _MIXER
        with self.paused():
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Note nothing inside of the block."""
        self._paused += 1
        # A recurrence may call thousands of functions, each of which would be looked at.
        is_open = _get_current_function_mode() is self
        try:
            if is_open:
                self.__exit__(None, None, None)
            yield
        finally:
            if is_open and _get_current_function_mode() is not self:
                self.__enter__()
            self._paused -= 1
