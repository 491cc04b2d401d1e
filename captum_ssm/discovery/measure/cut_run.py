"""A module run once more, with its scans and depthwise convolutions cut off.

What a scan or a depthwise convolution returned becomes a leaf of the graph, at unchanged values.
What is left acts on each token by itself, so that gradients say which token is where.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from captum_ssm.discovery.measure.unfused import fused_functions, unfuse
from captum_ssm.discovery.scans import (
    PRODUCTS,
    FunctionCall,
    Scan,
    ScanCalls,
    as_linear,
    candidate_functions,
    first_tensor,
    intercepted,
    is_product,
    is_sum,
)
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.graph.points import Point
from captum_ssm.graph.reachability import dependencies
from captum_ssm.graph.readers import readers
from captum_ssm.graph.relevance_rules import is_norm, ruled
from captum_ssm.mixers.call import MixerCall, without_caches
from captum_ssm.operators import WeightsOperator
from captum_ssm.utils.clones import is_same
from captum_ssm.utils.copies import copied
from captum_ssm.utils.nested import tensors_in
from captum_ssm.utils.plain_graph import plain_graph
from captum_ssm.utils.watch_modules import watch_modules


@dataclass(frozen=True, eq=False)
class CutScan:
    """A scan; ``leaf (B, L, D)`` takes the place of its output before its own gate."""

    scan: Scan
    leaf: Tensor
    values: Point | None
    function: Callable[..., Any]


@dataclass(frozen=True, eq=False)
class CutConv:
    """A depthwise convolution, channels first; ``leaf`` takes the place of its output."""

    inputs: Tensor
    point: Point | None
    leaf: Tensor
    weight: Tensor
    bias: Tensor | None
    padding: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class CutLinear:
    """A linear layer, or a convolution of one tap, which is not cut.

    Its input and output, channels last, where they are, and its weight.
    """

    inputs: Tensor
    point: Point
    output: Tensor
    at_output: Point
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class CutNorm:
    """What a norm was given and what it returned, which is not cut."""

    inputs: Point
    output: Point

    def along(self, channels: int) -> CutNorm:
        """This norm with its channels on another axis."""
        ends = (replace(end, channels=channels) for end in (self.inputs, self.output))
        return CutNorm(*ends)


@dataclass(eq=False)
class CutRun:
    """What a run left, in the order of the calls.

    Args:
        tokens (Tensor): the leaf that took the place of the module's input.
        output (Tensor): what the module returned.
        silent (bool): whether zeros took the place of what was cut off.
        called (bool): whether a function was called that may be a scan.
        without (frozenset of Callable): products with a matrix that are not of tokens.
        unread (str): why a loop over tokens is not a scan.
    """

    tokens: Tensor
    output: Tensor
    silent: bool
    called: bool = False
    unread: str = ""
    without: frozenset[Callable[..., Any]] = frozenset()
    scans: list[CutScan] = field(default_factory=list)
    convs: list[CutConv] = field(default_factory=list)
    linears: list[CutLinear] = field(default_factory=list)
    norms: list[CutNorm] = field(default_factory=list)


def run_cut(
    call: MixerCall,
    functions: Iterable[Callable[..., Any]] | None = None,
    *,
    silent: bool = False,
    without: frozenset[Callable[..., Any]] = frozenset(),
) -> CutRun:
    """Run the module of ``call`` on its recorded arguments, cut; in float32 at least.

    Args:
        call (MixerCall): the recorded call.
        functions (iterable of Callable, optional): those whose calls may be scans; None for all.
            Default: None
        silent (bool, optional): scans and convolutions return zeros, and bias terms are zero.
            Default: False
        without (frozenset of Callable, optional): products that are not cut. Default: none

    Raises:
        UnsupportedModelError: for a module that does not return one token for each given one.
    """
    recorded, kwargs = token_argument(call), without_caches(call.kwargs)
    with torch.inference_mode(False), torch.enable_grad(), copied(call.module) as copies:
        working = torch.promote_types(recorded.dtype, torch.float32)
        module = copies.root
        if silent or working != call.output.dtype:
            module = _in_dtype(module, working, without_bias=silent)
        unfuse(module)
        leaf = recorded.detach().to(working, copy=True).requires_grad_()
        tokens = leaf.clone()

        def put(value: Any) -> Any:
            # Attention is given its tokens three times, and a recorded call holds them detached.
            if torch.is_tensor(value) and is_same(value, recorded):
                return tokens
            if torch.is_tensor(value):
                value = value.detach()
                half = value.is_floating_point() and value.dtype.itemsize == 2
                return value.to(working) if half else value
            return value

        half = recorded.dtype if recorded.dtype.itemsize == 2 else None
        run, fused = CutRun(leaf, leaf, silent, without=without), fused_functions()

        def handle(call: FunctionCall) -> Any:
            plain = fused.get(call.source)
            run.called |= plain is None
            return scans(replace(call, half=half)) if plain is None else plain(call)

        known_results = None if silent else call.scans
        scans = ScanCalls(
            lambda call, scan, result: _cut(call, scan, result, run), known=known_results
        )
        known = candidate_functions() if functions is None else [*functions]
        with (
            plain_graph(),
            _norms_noted(module, run),
            _Layers(run),
            intercepted(handle, [*known, *fused], without=without),
        ):
            again = replace(call, args=tree_map(put, call.args), kwargs=tree_map(put, kwargs))
            again = again.run(module)
    output = first_tensor(again.result)
    assert output is not None
    run.output, run.unread = output, scans.unread
    can_tell = not silent and output.requires_grad
    mistaken = _without_mistaken(run) if can_tell else frozenset()
    if not mistaken:
        return run
    return run_cut(call, known, without=without | mistaken)


def _in_dtype(module: nn.Module, dtype: torch.dtype, *, without_bias: bool) -> nn.Module:
    # A copy of the module in a dtype; complex numbers stay complex.
    module = copy.deepcopy(module)
    module._apply(lambda x: x.to(dtype) if x.is_floating_point() else x)
    for name, parameter in module.named_parameters():
        if without_bias and name.endswith("bias"):
            parameter.data.zero_()
    return module


def _without_mistaken(run: CutRun) -> frozenset[Callable[..., Any]]:
    # Products with a matrix, some of which only make weights of others (q k). Returned are those
    # that are not of tokens: whose rows are not read by a token each, later ones first.
    later, mistaken, unread = Point.of(run.output), set[CutScan](), set[CutScan]()
    starts = [Point.of(run.tokens), *(Point.of(cut.leaf) for cut in run.scans)]
    products = [cut for cut in reversed(run.scans) if _may_be_mistaken(cut)]
    leaves = [Point.of(cut.leaf) for cut in products]
    values = {cut: cut.values for cut in run.scans if cut.values is not None}
    *reads, of_output = dependencies([*values.values(), later], leaves)
    for k, (cut, earlier) in enumerate(zip(products, leaves, strict=True)):
        reading = [other for other, read in zip(values, reads, strict=True) if k in read]
        is_told = any(cut.function == other.function for other in mistaken)  # by another step
        if is_told or mistaken.intersection(reading):
            continue
        is_right = all(_is_by_token(values[other], earlier) for other in reading)
        is_right = is_right and any(dependencies([cut.values], starts))
        is_read = k in of_output
        if is_read:
            with ruled([later.edge.node], [earlier.edge.node]) as carries:
                is_read = carries[later.edge.node]
                is_right = is_right and (not is_read or _is_by_token(later, earlier))
        if _is_empty(cut) or not (is_read or reading):
            unread.add(cut)
        elif not is_right:
            mistaken.add(cut)
    if not mistaken:
        run.scans = [cut for cut in run.scans if cut not in unread] or run.scans
    return frozenset(cut.function for cut in mistaken)


def _may_be_mistaken(cut: CutScan) -> bool:
    return is_product(cut.function) or is_sum(cut.function)


def _is_empty(cut: CutScan) -> bool:
    # Whether a mask leaves none of a product's weights, as before the first whole block of tokens.
    return isinstance(cut.scan.operator, WeightsOperator) and not cut.scan.operator.weights.any()


def _is_by_token(later: Point, earlier: Point) -> bool:
    # Whether the rows of each sequence of a leaf (B', L, D') are read by tokens of their own.
    read_by = readers(later, earlier)
    if read_by is None:
        return False
    ordered = read_by.view(earlier.shape[0], -1).sort(1).values
    return not bool(((ordered.diff(dim=1) == 0) & (ordered[:, 1:] >= 0)).any())


def token_argument(call: MixerCall) -> Tensor:
    """The tokens among a call's arguments, one for each token of the output, or an error."""
    output = first_tensor(call.result)
    shape = None if output is None else tuple(output.shape)
    for value in tensors_in((call.args, call.kwargs)):
        fits = shape is not None and tuple(value.shape[:-1]) == shape[:-1]
        if fits and value.is_floating_point() and value.dim() >= 3:
            return value
    shapes = [tuple(value.shape) for value in tensors_in((call.args, call.kwargs))]
    raise UnsupportedModelError(
        f"{call.path} ({type(call.module).__name__}) holds a scan, takes tensors of shapes "
        f"{shapes} and returns {shape}; expected tokens (B, L, E) and one token for each of them. "
        "Register an adapter with captum_ssm.register_mixer(module_type, freeze)."
    )


def _cut(call: FunctionCall, scan: Scan, result: Any, run: CutRun) -> Any:
    leaf = scan.mixed.detach().clone().requires_grad_()
    values = Point.of(scan.values) if scan.values.requires_grad else None
    run.scans.append(CutScan(scan, leaf, values, call.source))
    if run.silent:
        return scan.silenced(result)
    return scan.result(leaf.clone(), result)


def _norms_noted(module: nn.Module, run: CutRun) -> AbstractContextManager[None]:
    norms = [part for part in module.modules() if part is not module and is_norm(part)]
    return watch_modules(
        norms, after=lambda _, args, kwargs, output: _note_norm(run, output, *args[:1])
    )


def _note_norm(run: CutRun, output: Any, x: Any = None) -> None:
    are_tensors = torch.is_tensor(x) and torch.is_tensor(output)
    if are_tensors and x.requires_grad and output.requires_grad and x.shape == output.shape:
        norm = CutNorm(Point.of(x), Point.of(output))
        # A module that calls the function returns the very same.
        if not run.norms or run.norms[-1].output.edge.node is not norm.output.edge.node:
            run.norms.append(norm)


class _Layers(TorchFunctionMode):
    # Depthwise convolutions, linear layers and norms, whichever module calls them.
    def __init__(self, run: CutRun) -> None:
        super().__init__()
        self.run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if func is F.linear or _is_of_one_tap(func, args, kwargs):
            return self._linear(func, args, kwargs)
        if is_depthwise(func, args, kwargs):
            return self._convolution(func, args, kwargs)
        if func in _NORMS:
            y = func(*args, **kwargs)
            (x,) = _named(("input",), args, kwargs)
            _note_norm(self.run, y, x)
            return y
        y = as_linear(func, args, kwargs, self._product) if func in PRODUCTS else None
        return func(*args, **kwargs) if y is None else y

    def _product(self, x: Tensor, weight: Tensor) -> Tensor | None:
        # A product by a weight, which does not depend on the tokens.
        tokens, is_weight = [Point.of(self.run.tokens)], weight.dtype == x.dtype
        if weight.requires_grad and is_weight:
            is_weight = not any(dependencies([Point.of(weight)], tokens))
        return self._linear(F.linear, (x, weight), {}) if is_weight else None

    def _linear(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        y = func(*args, **kwargs)
        x, weight, bias = _named(("input", "weight", "bias"), args, kwargs)
        if x.requires_grad:
            axis = -1 if func is F.linear else 1
            inputs, output = (t.detach().movedim(axis, -1) for t in (x, y))
            weight, bias = weight.detach().flatten(1), None if bias is None else bias.detach()
            ends = Point.of(x, axis), Point.of(y, axis)
            self.run.linears.append(CutLinear(inputs, ends[0], output, ends[1], weight, bias))
        return y

    def _convolution(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        x, weight, bias, padding = _named(("input", "weight", "bias", "padding"), args, kwargs)
        size = weight.shape[2:]
        with torch.no_grad():
            y = func(*args, **kwargs)
        if padding == "same":
            padding = tuple((k - 1) // 2 for k in size)
        elif padding in (None, "valid"):
            padding = 0
        if not isinstance(padding, (tuple, list)):
            padding = (padding,) * len(size)
        leaf = (0 * y if self.run.silent else y.detach().clone()).requires_grad_()
        self.run.convs.append(
            CutConv(
                x.detach(),
                Point.of(x, 1) if x.requires_grad else None,
                leaf,
                weight.detach()[:, 0],
                None if bias is None else bias.detach(),
                tuple(padding),
            )
        )
        return leaf.clone()


def is_depthwise(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call is that of a depthwise convolution, of stride one and without dilation."""
    if func not in (F.conv1d, F.conv2d):
        return False
    x, weight, stride, dilation, groups = _named(
        ("input", "weight", "stride", "dilation", "groups"), args, kwargs
    )
    plain = _is_only(stride, 1) and _is_only(dilation, 1)
    each = groups == weight.shape[0] and x.dim() == weight.dim() and x.shape[1] == groups
    return plain and each and math.prod(weight.shape[2:]) > 1


def _is_of_one_tap(func: Any, args: Any, kwargs: Any) -> bool:
    # Whether a convolution is a linear layer of the channels on axis 1.
    if func not in (F.conv1d, F.conv2d, F.conv3d):
        return False
    weight, stride, padding, groups = _named(
        ("weight", "stride", "padding", "groups"), args, kwargs
    )
    bare = padding in ("valid", "same") or _is_only(padding, 0)
    return groups in (None, 1) and _is_only(stride, 1) and bare and math.prod(weight.shape[2:]) == 1


def _is_only(value: Any, number: int) -> bool:
    # Whether an option of a convolution, for all axes or for each, is this number, or left out.
    return value is None or set(value if isinstance(value, (tuple, list)) else [value]) == {number}


_NORMS = (F.layer_norm, F.group_norm, F.rms_norm)
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")


def _named(names: tuple[str, ...], args: Any, kwargs: Any) -> list[Any]:
    # Arguments of a convolution or of a linear layer, whose order is the same; a norm's first.
    by_name = dict(zip(_CONVOLUTION, args, strict=False)) | kwargs
    return [by_name.get(name) for name in names]
