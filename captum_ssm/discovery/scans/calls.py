"""Calls of scan functions, intercepted while a model runs."""

from __future__ import annotations

import builtins
import gc
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from captum_ssm.discovery.scans.form import all_forms, of_any
from captum_ssm.discovery.scans.forms.fourier import (
    FACTORS,
    TRANSFORMS,
    Transforms,
    fourier_convolution,
)
from captum_ssm.discovery.scans.forms.loops import GATHERS, Gathers, TokenLoop, token_loop
from captum_ssm.discovery.scans.forms.products import (
    PRODUCTS,
    TokenProduct,
    is_in_autograd_function,
    run_product,
    token_product,
)
from captum_ssm.discovery.scans.forms.states import is_associative, with_states
from captum_ssm.discovery.scans.forms.sums import Memories, TokenSum, token_sum
from captum_ssm.discovery.scans.trace import CallTrace
from captum_ssm.utils.blocks import bound, contextmanager
from captum_ssm.utils.lazy import cached_property
from captum_ssm.utils.nested import map_tensors
from captum_ssm.utils.patch_functions import own_codes, patched_functions
from captum_ssm.utils.signatures import signature

# The last ones stand for the products, the loops and the sums at all sites in the code.
_BUILT_IN = (
    F.scaled_dot_product_attention,
    fourier_convolution,
    token_product,
    token_loop,
    token_sum,
)
_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclass(frozen=True)
class FunctionCall:
    """A call of a function whose arguments play the roles of a scan.

    Args:
        function (Callable): what was called: the function itself, its body not replaced.
        args (tuple): positional arguments.
        kwargs (dict): keyword arguments.
        source (Callable): the function as the model knows it.
        half (torch.dtype, optional): of the model, where it runs in float32 for now. A kernel that
            does not take that runs in this dtype. Default: None
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    source: Callable[..., Any]
    half: torch.dtype | None = None

    def run(self) -> Any:
        """What the function returns. Calls inside of it are intercepted too."""
        if self.half is None:
            return self.function(*self.args, **self.kwargs)
        try:
            return self.function(*self.args, **self.kwargs)
        except (AssertionError, RuntimeError, TypeError, ValueError):
            args, kwargs = map_tensors(self._narrow, (self.args, self.kwargs))
            return map_tensors(_wide, self.function(*args, **kwargs))

    def _narrow(self, x: Tensor) -> Tensor:
        return x.to(self.half) if x.dtype == torch.float32 else x

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments by parameter name, defaults included."""
        if not isinstance(self.function, FunctionType):
            return dict(zip(_ATTENTION, self.args, strict=False)) | self.kwargs
        bound = signature(self.function).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def with_arguments(self, changed: dict[str, Any]) -> FunctionCall:
        """This call with some of its arguments changed, by parameter name."""
        if not isinstance(self.function, FunctionType):
            return replace(self, args=(), kwargs=self.arguments | changed)
        bound = signature(self.function).bind(*self.args, **self.kwargs)
        bound.arguments.update(changed)
        return replace(self, args=bound.args, kwargs=bound.kwargs)


Handler = Callable[[FunctionCall], Any]


# What computes the intercepted calls of this thread.
_HANDLER: ContextVar[Handler | None] = ContextVar("captum_ssm_handler", default=None)


@contextmanager
def intercepted(
    handler: Handler,
    functions: Iterable[Callable[..., Any]] | None = None,
    *,
    without: Collection[Callable[..., Any]] = (),
    traced: bool = True,
) -> Iterator[None]:
    """Have ``handler(call)`` compute what each call of a scan function in this thread returns.

    Args:
        handler (Callable): takes a :class:`FunctionCall` and returns the result. Calls of other
            functions go to the handler around it.
        functions (iterable of Callable, optional): the functions; None for all of
            :func:`candidate_functions`. Default: None
        without (collection of TokenProduct, optional): products that are not of tokens.
            Default: ()
        traced (bool, optional): whether calls in loops over tokens are kept, to tell what the loops
            compute. Default: True
    """
    known = set(candidate_functions() if functions is None else functions)
    bodies = [f for f in known.difference(_BUILT_IN) if isinstance(f, FunctionType)]
    built_in, around = {f for f in known if is_built_in(f)}, _HANDLER.get()

    def handled(call: FunctionCall) -> Any:
        if not known.isdisjoint((call.source, _anywhere(call.source))):
            return handler(call)
        return call.run() if around is None else around(call)

    with (
        patched_functions(bodies, _handled),
        handled_by(handled),
        _BuiltIn(built_in, without, traced=traced) if built_in else nullcontext(),
    ):
        yield


def handled_by(handler: Handler | None) -> AbstractContextManager[None]:
    """Have another handler compute the intercepted calls of this thread; None runs them as is."""
    return bound(_HANDLER, handler)


def not_intercepted() -> AbstractContextManager[None]:
    """Calls run as they are, in this thread."""
    return handled_by(None)


def is_built_in(function: Callable[..., Any]) -> bool:
    """Whether a function is intercepted by PyTorch's own means, as it has no body to exchange."""
    return function in _BUILT_IN or _anywhere(function) is not function


def is_product(function: Callable[..., Any]) -> bool:
    """Whether a function stands for a product with a matrix at one site in the code."""
    return isinstance(function, TokenProduct)


def is_loop(function: Callable[..., Any]) -> bool:
    """Whether a function stands for a loop over tokens at one site in the code."""
    return isinstance(function, TokenLoop)


def is_sum(function: Callable[..., Any]) -> bool:
    """Whether a function stands for a sum over tokens at one site in the code."""
    return isinstance(function, TokenSum)


def _anywhere(function: Callable[..., Any]) -> Callable[..., Any]:
    # What stands for products, loops or sums at all sites in the code; another function itself.
    everywhere: dict[type, Callable[..., Any]] = {
        TokenProduct: token_product,
        TokenLoop: token_loop,
        TokenSum: token_sum,
    }
    return everywhere.get(type(function), function)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() and x.dtype.itemsize == 2 else x


def candidate_functions() -> list[Callable[..., Any]]:
    """All functions of the process whose parameters have the names of a form's roles.

    PyTorch's softmax attention and convolutions by its Fourier transforms are among them.
    """
    functions, is_of_any = all_functions(), of_any(all_forms())
    candidates: list[Callable[..., Any]] = []
    for function, code in zip(functions, own_codes(functions), strict=True):
        # A quick test first: a process has tens of thousands of functions.
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if is_of_any(names) and _may_scan(function, names):
            candidates.append(function)
    return [*candidates, *_BUILT_IN]


def all_functions() -> list[FunctionType]:
    """The functions of the process: those that the garbage collector looks at, and frozen ones."""
    # Every function refers to the builtins. gc.get_objects() would also hand out tuples that
    # another thread is still filling, which fails there if anybody else holds them (bpo-15108).
    functions = [f for f in gc.get_referrers(vars(builtins)) if type(f) is FunctionType]
    if not gc.get_freeze_count():
        return functions
    return list({id(f): f for f in (*functions, *frozen_functions())}.values())


def frozen_functions() -> Iterable[FunctionType]:
    """The functions and methods of all modules: a server may call gc.freeze() before it forks."""
    for module in [m for m in list(sys.modules.values()) if isinstance(m, ModuleType)]:
        for value in list(vars(module).values()):
            for function in list(vars(value).values()) if isinstance(value, type) else [value]:
                if type(function) in (classmethod, staticmethod):
                    function = function.__func__
                while type(function) is FunctionType:
                    yield function
                    function = vars(function).get("__wrapped__")


# What is explained, like code of others.
_MODELS = ("captum_ssm.examples.", "captum_ssm.models.")


def _may_scan(function: FunctionType, names: Sequence[str]) -> bool:
    module = function.__module__ or ""
    is_ours = module.startswith("captum_ssm.") and not module.startswith(_MODELS)
    # An autograd function's forward does not know the graph.
    if is_ours or module == "torch" or module.startswith("torch.") or "ctx" in names[:1]:
        return False
    # A Triton kernel takes pointers, and Triton's interpreter looks at its parameters.
    if any("constexpr" in str(kind) for kind in function.__annotations__.values()):
        return False
    return _knows_torch(function)


def _knows_torch(function: FunctionType) -> bool:
    # Functions of numbers or arrays have such parameters too: SciPy's distributions take x and a.
    for value in list(function.__globals__.values()):
        name = None
        if isinstance(value, ModuleType):
            name = vars(value).get("__name__")
        elif isinstance(value, type):
            name = value.__module__
        if isinstance(name, str) and name.partition(".")[0] == "torch":
            return True
    return False


def _handled(
    function: FunctionType, original: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    handler = _HANDLER.get()
    if handler is None or _in_autograd_function():
        return original(*args, **kwargs)
    call = FunctionCall(original, args, kwargs, function)
    if not is_associative(call.arguments):
        return handler(call)

    def handled(states: Callable[..., Any], *args: Any) -> Any:
        return handler(FunctionCall(states, args, {}, function))

    with not_intercepted():
        result = call.run()
    return with_states(call.arguments, result, handled)


def _in_autograd_function() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if is_in_autograd_function(frame):
            return True
        frame = frame.f_back
    return False


class _BuiltIn(TorchFunctionMode):
    # Builtins have no body to exchange. PyTorch has a stack of such modes per thread.
    def __init__(
        self,
        known: Collection[Callable[..., Any]],
        without: Collection[Callable[..., Any]],
        *,
        traced: bool,
    ) -> None:
        super().__init__()
        self.known, self.without = known, without
        self.transforms, self.has_handled = Transforms(), False
        traced = traced and any(_anywhere(f) in (token_loop, token_sum) for f in known)
        self.trace = CallTrace() if traced else None
        self.gathers, self.memories = Gathers(self.trace), Memories(self.trace)
        self.sums = any(_anywhere(f) is token_sum for f in known)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _HANDLER.get() is None:
            return func(*args, **kwargs)
        self.has_handled = False
        if self.trace is None:
            result = self._handled(func, args, kwargs)
        else:
            result = self.trace.run(self._handled, func, args, kwargs)
        if self.has_handled or not self.sums:
            return result
        return self.memories.run(func, args, kwargs, result, self._is_known, self._handle)

    def _handle(self, *call: Any, **named: Any) -> Any:
        # What the handler makes of a call: a function, as the model knows it, and arguments.
        function, source, *args = call
        handler, self.has_handled = _HANDLER.get(), True
        assert handler is not None
        return handler(FunctionCall(function, tuple(args), named, source))

    def _handled(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is F.scaled_dot_product_attention and func in self.known:
            return self._handle(func, func, *args, **kwargs)
        if func in TRANSFORMS and fourier_convolution in self.known:
            convolve = partial(self._handle, fourier_convolution, fourier_convolution)
            return self.transforms.run(func, args, kwargs, convolve)
        if func in FACTORS:
            self.transforms.multiplied(args)
        if func in PRODUCTS:
            multiply = partial(self._handle, token_product)
            return run_product(func, args, kwargs, self._is_known, multiply)
        if func in GATHERS:
            return self.gathers.run(func, args, kwargs, self._is_known, self._handle)
        return func(*args, **kwargs)

    def _is_known(self, site: TokenProduct | TokenLoop | TokenSum) -> bool:
        is_known = site in self.known or _anywhere(site) in self.known
        return is_known and site not in self.without
