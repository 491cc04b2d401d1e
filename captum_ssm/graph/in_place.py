"""In-place operations on views, whose functions an autograd graph hides.

``view.mul_(gate)`` is one node of the graph, ``CopySlices``. It holds the function's own node,
which Python cannot read, so no rule can be attached to it. Where such a function matters, the run
is repeated with each in-place operation on a view computed in a copy, which is then written into
the view: the copy has the function's node, and the write is linear.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from captum_ssm.utils.nested import map_tensors, tensors_in

Result = TypeVar("Result")
P = ParamSpec("P")

COPY_SLICES = "torch::autograd::CopySlices"
# They change a tensor's shape, storage or flags rather than its values.
_NOT_OF_VALUES = frozenset(
    f"{name}_"
    for name in (
        *("as_strided", "coalesced", "detach", "rename", "requires_grad", "resize", "resize_as"),
        *("set", "share_memory", "squeeze", "swapaxes", "swapdims", "t", "transpose", "unsqueeze"),
    )
)
# They are steps, or made of steps: their gradients are those of a constant that is put or added.
_STEPS = frozenset(
    f"{name}_" for name in ("ceil", "fix", "floor", "floor_divide", "fmod", "frac", "remainder")
) | {"__ifloordiv__", "__imod__", "heaviside_", "round_", "sgn_", "sign_", "trunc_"}
_IS_VISIBLE: ContextVar[bool] = ContextVar("_IS_VISIBLE", default=False)


class HiddenFunctionError(Exception):
    """A function was applied in place to a view, and the graph does not say which."""

    def __init__(self) -> None:
        super().__init__(
            "a view of a tensor, such as a slice, was changed in place by a function that the "
            "autograd graph hides; expected a model that changes whole tensors in place, or a "
            "call of attribute, which sees such functions. Write the function out of place."
        )


def seen_in_views(function: Callable[P, Result]) -> Callable[P, Result]:
    """A function that is run again where it met another one that a view hides."""

    @functools.wraps(function)
    def seen(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except HiddenFunctionError:
            pass
        except RuntimeError as error:
            if _IS_VISIBLE.get() or "returns multiple views" not in str(error):
                raise
        token = _IS_VISIBLE.set(True)
        try:
            with _OnCopies():
                return function(*args, **kwargs)
        finally:
            _IS_VISIBLE.reset(token)

    return seen


def is_hidden(node: Any) -> bool:
    """Whether a ``CopySlices`` node holds a function, rather than values that are put or added.

    Raises:
        HiddenFunctionError: it does, and a second run would show the function.
    """
    is_hidden = not _read(node)[0]
    if is_hidden and not _IS_VISIBLE.get():
        raise HiddenFunctionError
    return is_hidden


def note_step(function: Any, args: Any, kwargs: Any) -> None:
    """Remember a function that was called, if it put steps into a view: its node does not tell."""
    is_step = _name_of(function).removeprefix("_foreach_") in _STEPS
    if is_step and torch.is_grad_enabled() and not _IS_VISIBLE.get():
        for x in tensors_in((args[:1], kwargs)):
            if x._is_view() and x.requires_grad:
                node: Any = cast(Tensor, x._base).grad_fn
                node.metadata["captum_ssm"] = False, False


def is_overwritten(node: Any) -> bool:
    """Whether a ``CopySlices`` node leaves nothing of what was in the tensor before."""
    return _read(node)[1]


def _read(node: Any) -> tuple[bool, bool]:
    # Whether values are put or added, and whether they are put everywhere.
    known = node.metadata
    if "captum_ssm" not in known:
        form = node._input_metadata[0]
        with torch.no_grad():
            grads = node(torch.ones(form.shape, dtype=form.dtype, device=form.device))
        grads = (grads,) if torch.is_tensor(grads) else grads
        is_write = len(grads) <= 2 and _is_write(*grads)
        known["captum_ssm"] = is_write, is_write and grads[0] is not None and not grads[0].any()
    return known["captum_ssm"]


def _is_write(before: Tensor | None, values: Tensor | None = None) -> bool:
    # From the gradients of the sum: at what was there before they are zero where it was
    # overwritten, and one elsewhere; at the values one for each entry that they were put into, or
    # that they were added to. What has no other values is taken for a constant that was put:
    # :func:`note_step` tells others.
    if before is not None and not bool(((before == 0) | (before == 1)).all()):
        return False
    if values is None:
        return True
    values = values.abs()
    if before is None or bool(before.all()):
        return values.numel() == 0 or bool((values == values.flatten()[0]).all())
    is_counted = bool((values == values.round()).all())
    return is_counted and float(values.sum()) == float(torch.count_nonzero(before == 0))


class _OnCopies(TorchFunctionMode):
    # Computes in-place operations on views in copies of these. Autograd lets a tensor be changed
    # that is one of several views, such as chunks, only if each was made by itself.
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if not _is_in_place(func, args, kwargs):
            result = func(*args, **kwargs)
            if isinstance(result, (tuple, list)) and any(map(_is_view, result)):
                whole = next(tensors_in((args, kwargs)))
                return type(result)(_part_of(whole, x) if _is_view(x) else x for x in result)
            return result
        views: dict[int, tuple[Tensor, Tensor]] = {}

        def copied(x: Tensor) -> Tensor:
            if not x._is_view():
                return x
            copy = x.clone()
            views[id(copy)] = (x, copy)
            return copy

        result = func(*map_tensors(copied, args[:1]), *args[1:], **_of_first(copied, args, kwargs))
        for view, copy in views.values():
            if copy._version:
                view.copy_(copy)
        return map_tensors(lambda x: views[id(x)][0] if id(x) in views else x, result)


def _is_view(x: Any) -> bool:
    return torch.is_tensor(x) and x._is_view() and x.requires_grad


def _part_of(whole: Tensor, x: Tensor) -> Tensor:
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def _of_first(copied: Callable[[Tensor], Tensor], args: Any, kwargs: Any) -> dict[str, Any]:
    # The first argument may be given by its name.
    names = () if args else ("input", "self")
    return {name: map_tensors(copied, x) if name in names else x for name, x in kwargs.items()}


def _is_in_place(function: Any, args: Any, kwargs: Any) -> bool:
    always, position = _in_place_form(function)
    if always or kwargs.get("inplace"):
        return True
    return position is not None and len(args) > position and bool(args[position])


@functools.cache
def _name_of(function: Any) -> str:
    return getattr(function, "__name__", "").partition(".")[0]


@functools.cache
def _in_place_form(function: Any) -> tuple[bool, int | None]:
    # Whether a function is one in place, such as mul_, and where its argument inplace stands.
    name = _name_of(function)
    if name.startswith("__"):
        return name.startswith("__i"), None
    if name.endswith("_"):
        return name not in _NOT_OF_VALUES, None
    try:
        parameters = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return False, None
    return False, parameters.index("inplace") if "inplace" in parameters else None
