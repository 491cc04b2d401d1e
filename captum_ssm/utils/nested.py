"""Tensors inside nested values: containers, as torch.utils._pytree knows them, and dataclasses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

V = TypeVar("V")


def map_tensors(
    function: Callable[[Tensor], Any],
    value: V,
    on_callables: Callable[[Callable[..., Any]], Any] = lambda leaf: leaf,
) -> V:
    """A copy of ``value`` with ``function`` of each tensor in its place.

    Modules and classes stay as they are; ``on_callables`` returns what takes the place of a
    function.
    """

    return tree_map(partial(_mapped, function, on_callables), value)


# No function inside of the one above: one that calls itself would keep the tensors that it holds
# until garbage is collected.
def _mapped(
    function: Callable[[Tensor], Any],
    on_callables: Callable[[Callable[..., Any]], Any],
    leaf: Any,
) -> Any:
    if torch.is_tensor(leaf):
        return function(leaf)
    if isinstance(leaf, (torch.nn.Module, type)):
        return leaf
    if is_dataclass(leaf):
        parts = {f.name: getattr(leaf, f.name) for f in fields(leaf)}
        parts = {name: map_tensors(function, part, on_callables) for name, part in parts.items()}
        return replace(leaf, **parts)  # type: ignore[type-var]
    return on_callables(leaf) if callable(leaf) else leaf


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in containers, in order."""
    return (leaf for leaf in tree_leaves(value) if torch.is_tensor(leaf))


def first_of(result: Any) -> Any:
    """What a function returned, or the first of several results: of a dict, the first tokens.

    The first result may be several itself, as of a block that returns ``((x, router), cache)``.
    """
    key = _first_key(result)
    if key is not None:
        return result[key]
    return first_of(result[0]) if isinstance(result, (tuple, list)) and result else result


def with_first(result: Any, first: Any) -> Any:
    """A result with another tensor in place of the first."""
    key = _first_key(result)
    if key is not None:
        changed = copy.copy(result)
        changed[key] = first
        return changed
    if not isinstance(result, (tuple, list)):
        return first
    make = getattr(result, "_make", type(result))  # of a named tuple
    return make([with_first(result[0], first) if result else first, *result[1:]])


def _first_key(result: Any) -> Any:
    # The key of a dict's first tensor that has tokens, else of its first tensor.
    if not isinstance(result, dict):
        return None
    tensors = [key for key, value in result.items() if torch.is_tensor(value)]
    tokens = (key for key in tensors if result[key].dim() >= 3 and result[key].is_floating_point())
    return next(tokens, tensors[0] if tensors else None)


def detached(value: V) -> V:
    """A copy of ``value`` whose tensors have no autograd graph."""
    return map_tensors(Tensor.detach, value)


def same_values(first: Any, second: Any) -> bool:
    """Whether two nested values hold equal tensors, and otherwise equal or identical leaves."""
    a, b = tree_leaves(first), tree_leaves(second)
    return len(a) == len(b) and all(map(_same, a, b))


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if not (torch.is_tensor(a) and torch.is_tensor(b)):
        return type(a) is type(b) and np.array_equal(a, b)
    integers = not (a.is_floating_point() or b.is_floating_point())
    alike = a.shape == b.shape and (integers or a.dtype == b.dtype)
    return alike and bool((a.to(b.device) == b).all())
