"""A model's modules, copied for the time of a run, so that the user's own are left alone.

Hooks, replaced forwards and whatever the model writes while it runs (counters, caches, running
means, weights under ``no_grad``) go to copies that are thrown away. Nothing has to be put back, so
no exception and no signal can leave the user's model half restored.

- A *copy* has the class and the attributes of its module. Containers, and objects that the model
  keeps as attributes, are copied too; what cannot be copied (locks, open files, generators) is
  shared.
- Tensors are cloned, or shared and put back: :mod:`captum_ssm.utils.clones`.
- Inside :func:`copied` a call of one of the user's modules, from a closure or a hook, is a call of
  its copy. This is so in the thread that opened the block; other threads run the user's modules.
"""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from captum_ssm.errors import UnsupportedModelError
from captum_ssm.utils.blocks import WhileOpen, bound, contextmanager, undo
from captum_ssm.utils.clones import Clones
from captum_ssm.utils.random_state import random_state_kept

V = TypeVar("V")

# An attribute that is made of more objects than these, such as a trainer, is shared.
_MANY = 20_000
_MARK = "_captum_ssm_copy_of"
_OWN = (_MARK, "__deepcopy__")  # of copies alone

_ATOMIC = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, range, type(...), slice, torch.Size),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
_SHARED = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, types.CodeType),
    *(types.GeneratorType, types.CoroutineType, property, staticmethod, classmethod),
    *(types.UnionType, types.GenericAlias),  # in annotations
)
_OF_GRADIENTS = frozenset({"_backward_hooks", "_backward_pre_hooks"})
_CONTAINERS = frozenset(
    {dict, OrderedDict, defaultdict, list, tuple, set, frozenset, deque},
)


class _Uncopyable(Exception):
    pass


class _Mark:
    # In the attributes of a copy: the user's module, and the run that the copy was made for.
    def __init__(self, module: nn.Module, copies: Copies) -> None:
        self.module, self.copies = module, copies

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mark:
        return self


class Copies:
    """The copies of a model's modules, and of what hangs on them.

    Attributes:
        root (nn.Module): the copy of the model.
    """

    root: nn.Module

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.modules: list[nn.Module] = []  # the user's
        self._memo: dict[int, Any] = {}
        self._held: list[Any] = []  # what the keys of the memo are the ids of
        self._clones = Clones()
        self._left = -1  # how many more objects an attribute may be made of

    def make(self, root: nn.Module, *also: nn.Module) -> None:
        """Copy the user's model, and others that run with it."""
        self.root, *_ = (self._value(module) for module in (root, *also))

    def of(self, value: V) -> V:
        """The copy of a module, or a function with the user's modules replaced by their copies.

        A method of a module and a partial function are taken apart. Other functions come back as
        they are: the calls in them find the copies.
        """
        if isinstance(value, nn.Module):
            return self._memo.get(id(value), value)
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.of(value.__self__))  # type: ignore[return-value]
        if isinstance(value, functools.partial):
            return functools.partial(self.of(value.func), *value.args, **value.keywords)  # type: ignore[return-value]
        return value

    def clear(self) -> None:
        """Let go of the copies, and have them let go of what holds them in turn.

        Copies that a hook has kept have the user's own weights from then on.
        """
        for module in self.modules:
            made = self._memo.get(id(module))
            if made is not None:
                for name in (*_OWN, "forward", "__nnsight__"):
                    made.__dict__.pop(name, None)
                for name in ("_parameters", "_buffers"):
                    made.__dict__[name] = module.__dict__[name]
        self._memo.clear()
        self._held.clear()

    def end(self, error: type[BaseException] | None, *_: object) -> None:
        """Let go of the copies, and put back what of the model's tensors they shared."""
        self.clear()
        self._clones.end(error)

    def _put(self, value: Any, made: Any) -> Any:
        self._memo[id(value)] = made
        self._held.append(value)
        return made

    def _attribute(self, value: Any) -> Any:
        # The copy of a module's attribute, or the attribute itself where it cannot be copied.
        kind = type(value)
        if kind in _ATOMIC:
            return value
        if isinstance(value, (nn.Module, Tensor)) or id(value) in self._memo:
            return self._value(value)
        if kind in _CONTAINERS:
            return self._container(value, self._attribute)
        before, self._left = len(self._held), _MANY
        try:
            return self._value(value)
        except Exception:  # any that an object raises when it is asked for its parts
            for held in self._held[before:]:
                del self._memo[id(held)]
            del self._held[before:]
            return value
        finally:
            self._left = -1

    def _value(self, value: Any, _: Any = None) -> Any:
        kind = type(value)
        if kind in _ATOMIC:
            return value
        known = self._memo.get(id(value))
        if known is not None:
            return known
        if isinstance(value, Tensor):
            return self._put(value, self._clones.of(value))
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, _SHARED):
            return value
        if kind in _CONTAINERS:
            return self._container(value, self._value)
        if kind is types.MethodType:
            return types.MethodType(value.__func__, self._value(value.__self__))
        if kind is torch.Generator:
            return self._put(value, value.clone_state())
        return self._object(value)

    def _module(self, module: nn.Module) -> nn.Module:
        made = self._put(module, object.__new__(type(module)))
        self.modules.append(module)
        attributes = made.__dict__
        attributes[_MARK] = _Mark(original(module), self)
        if not hasattr(type(module), "__deepcopy__"):
            attributes["__deepcopy__"] = functools.partial(_deepcopied, made, module)
        for name, value in [*module.__dict__.items()]:
            # A compiled forward is that of the user's module, and copies run without a compiler.
            if name in (*_OWN, "_compiled_call_impl"):
                continue
            if name in _OF_GRADIENTS:  # may change them, and listeners wait for the user's own
                attributes[name] = type(value)()
            elif name.endswith("_hooks") and isinstance(value, dict):
                attributes[name] = self._container(value, self._hook) if value else type(value)()
            else:
                attributes[name] = self._attribute(value)
        for cls in type(module).__mro__:
            slots = cls.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if name not in ("__dict__", "__weakref__") and hasattr(module, name):
                    object.__setattr__(made, name, self._attribute(getattr(module, name)))
        return made

    def _hook(self, hook: Any) -> Any:
        # A method of a module of the model goes to its copy. Others tell those who listen.
        if type(hook) is types.MethodType and isinstance(hook.__self__, nn.Module):
            return types.MethodType(hook.__func__, self._value(hook.__self__))
        return hook

    def _container(self, value: Any, copy_of: Callable[[Any], Any]) -> Any:
        known, kind = self._memo.get(id(value)), type(value)
        if known is not None or len(value) > _MANY:
            return value if known is None else known
        is_dict = isinstance(value, dict)
        is_atomic = (not is_dict or _are_atomic(value.values())) and _are_atomic(value)
        if kind in (tuple, frozenset):
            return self._put(value, value if is_atomic else kind([copy_of(item) for item in value]))
        made = self._put(value, value.copy())
        if is_atomic:
            return made
        items = [*value.items()] if is_dict else [copy_of(item) for item in value]
        made.clear()
        if is_dict:
            for key, item in items:
                made[copy_of(key)] = copy_of(item)
        else:
            made.update(items) if kind is set else made.extend(items)
        return made

    def _object(self, value: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            raise _Uncopyable
        deepcopy = getattr(type(value), "__deepcopy__", None)
        if deepcopy is not None:
            return self._put(value, deepcopy(value, self._memo))
        parts = value.__reduce_ex__(4)
        if isinstance(parts, str):
            return value
        made = copy._reconstruct(value, self._memo, *parts, deepcopy=self._value)  # type: ignore[attr-defined]
        return self._put(value, made)


def _deepcopied(made: nn.Module, users: nn.Module, memo: dict[int, Any]) -> nn.Module:
    # What copy.deepcopy() makes of a copy while a model runs: a module of its own. Of what is hung
    # into the copy, which would run or tell of the copy itself, it has only the user's: a forward
    # that is a method of the user's module, as VMamba's, is one of the module that is made.
    module = memo[id(made)] = memo[id(users)] = object.__new__(type(made))
    kept = {k: v for k, v in made.__dict__.items() if k not in _OWN and not _is_hung(k)}
    hung = {k: v for k, v in users.__dict__.items() if _is_hung(k)}
    module.__dict__.update(copy.deepcopy({**kept, **hung}, memo))
    return module


def _is_hung(name: str) -> bool:
    # Also "_forward_hooks_with_kwargs", which says how they are called.
    return name in ("forward", "__nnsight__") or "_hooks" in name


def _are_atomic(values: Any) -> bool:
    return _ATOMIC.issuperset(map(type, values))


# The copies that calls of the user's modules go to, innermost run first.
_RUNNING: ContextVar[tuple[Copies, ...]] = ContextVar("captum_ssm_running", default=())
_BEFORE: Any = nn.Module._call_impl


def original(module: nn.Module) -> nn.Module:
    """The user's module that a copy was made of; a module that is no copy itself."""
    mark = module.__dict__.get(_MARK)
    return module if mark is None else mark.module


def running(module: nn.Module) -> nn.Module:
    """The copy that calls of a module go to now, in this thread; else the module itself."""
    return next((c.of(module) for c in _RUNNING.get() if c.of(module) is not module), module)


@contextmanager
def copied(model: nn.Module, *also: nn.Module) -> Iterator[Copies]:
    """Copies of a model's modules and of others, which calls of them inside the block go to.

    What the block draws from PyTorch's, NumPy's and Python's own random generators is put back, and
    so are attributes of the modules' classes.

    Raises:
        UnsupportedModelError: for a run that wrote to memory which cannot be copied.
    """
    with ExitStack() as stack, stack:
        copies = Copies()
        stack.push(copies.end)
        stack.push(copies.end)
        stack.enter_context(random_state_kept())
        undo(stack, _class_attributes([model, *also]))
        copies.make(model, *also)
        stack.enter_context(_LOOKED_AT.block())
        stack.enter_context(bound(_RUNNING, (copies, *_RUNNING.get())))
        yield copies


def _look_at_calls() -> None:
    global _BEFORE
    if nn.Module._call_impl is not _call:
        _BEFORE = nn.Module._call_impl
        nn.Module._call_impl = _call  # type: ignore[method-assign]


def _look_away() -> None:
    if nn.Module._call_impl is _call:
        nn.Module._call_impl = _BEFORE  # type: ignore[method-assign]


_LOOKED_AT = WhileOpen(_look_at_calls, _look_away)


def _call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    mark = self.__dict__.get(_MARK)
    if mark is None:
        self = running(self)
    elif mark.copies.thread != threading.get_ident():
        raise UnsupportedModelError(
            f"{type(self).__name__} of the explained model was called in another thread than the "
            "one that runs the model; expected a forward that runs in one thread. Let it call its "
            "modules one after the other, without a thread pool, while it is explained."
        )
    return _BEFORE(self, *args, **kwargs)


def _class_attributes(models: Iterable[nn.Module]) -> Callable[[], None]:
    # What puts the attributes of the modules' own classes back.
    kinds = {type(module) for model in models for module in model.modules()}
    classes = {cls for kind in kinds for cls in kind.__mro__}
    writable = [cls for cls in classes if cls.__module__.partition(".")[0] not in _NOT_WRITTEN]
    before = {cls: dict(vars(cls)) for cls in writable}

    def put_back() -> None:
        for cls, attributes in before.items():
            for name in [*vars(cls)]:
                if name not in attributes:
                    type.__delattr__(cls, name)
            for name, value in attributes.items():
                if vars(cls).get(name) is not value:
                    type.__setattr__(cls, name, value)

    return put_back


_NOT_WRITTEN = frozenset({"torch", "builtins", "abc", "typing", "captum_ssm", "nnsight"})
