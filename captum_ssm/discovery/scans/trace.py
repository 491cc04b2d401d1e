"""What a run calls of PyTorch's functions, kept so that calls can be made again, changed.

Each tensor has a :class:`Traced`: the call that made it. A call keeps what it was given, so that
the calls that a tensor was made by live as long as the tensor, like its autograd graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

_ALLOCATIONS = frozenset((torch.empty, torch.empty_like, Tensor.new_empty))


class Traced(NamedTuple):
    """A tensor as it was when a call had made it: one of the call's outputs."""

    call: TracedCall
    output: int


@dataclass(frozen=True, eq=False, repr=False)
class TracedCall:
    """A call of a function of PyTorch.

    Args:
        function (Callable): what was called.
        leaves (list): its arguments, taken out of lists and dictionaries.
        spec (TreeSpec): puts them back there.
        made (list of Traced, optional): for each of them how it was made, if that is known.
        versions (list of int): those of tensors, before the call.
        written (tuple of int): which of the leaves it changed in place. They count as outputs,
            after what it returned.
        order (float): its number among the calls of the run.
    """

    function: Callable[..., Any]
    leaves: list[Any]
    spec: TreeSpec
    made: list[Traced | None]
    versions: list[int]
    written: tuple[int, ...]
    order: float

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(getattr(self.function, "__name__", self.function))

    def outputs(self, leaves: list[Any]) -> list[Any]:
        """What the call returns for other arguments, and then what it writes to, as a copy."""
        leaves = [x.clone() if n in self.written else x for n, x in enumerate(leaves)]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return [*tree_leaves(self.function(*args, **kwargs)), *(leaves[n] for n in self.written)]

    def values(self) -> list[Any]:
        """Its arguments as they were then: what was written over since is computed again.

        What an allocation happened to hold, which may be anything, is zeros.
        """
        return [*map(_as_it_was, self.leaves, self.made, self.versions)]


class CallTrace:
    """The calls of a run that tensors which are still there were made by."""

    def __init__(self) -> None:
        self._made = WeakIdKeyDictionary()
        self._count = 0

    def made(self, x: Any) -> Traced | None:
        """How a tensor was made; None if it was written to by way of another one since."""
        made, version = self._made.get(x, (None, 0)) if torch.is_tensor(x) else (None, 0)
        return made if made is not None and version_of(x) == version else None

    def run(self, run: Callable[..., Any], func: Any, args: Any, kwargs: Any) -> Any:
        """What ``run(func, args, kwargs)`` returns, noted as a call of ``func``."""
        leaves, spec = tree_flatten((args, kwargs))
        made, versions = [self.made(x) for x in leaves], [*map(version_of, leaves)]
        result = run(func, args, kwargs)
        returned = tree_leaves(result)
        written = tuple(n for n, x in enumerate(leaves) if version_of(x) != versions[n])
        outputs = [*returned, *(leaves[n] for n in written)]
        if any(map(torch.is_tensor, outputs)):
            self._count += 1
            call = TracedCall(func, leaves, spec, made, versions, written, self._count)
            for n, x in enumerate(outputs):
                if torch.is_tensor(x):
                    self._made[x] = Traced(call, n), version_of(x)
        return result


def _as_it_was(x: Any, made: Traced | None, version: int) -> Any:
    if made is not None and made.call.function in _ALLOCATIONS:
        return torch.zeros_like(x)
    if made is None or version_of(x) == version:
        return x
    return made.call.outputs(made.call.values())[made.output]


def version_of(x: Any) -> int:
    """The version of a tensor's numbers; 0 where none is kept."""
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0
