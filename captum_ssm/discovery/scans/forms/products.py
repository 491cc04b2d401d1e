"""Products of tokens with a matrix of coefficients that a module writes in line.

``softmax(q k) v`` or ``(q k * mask) v``, by ``@``, ``matmul``, ``bmm`` or ``einsum``: the matrix
itself is the operator. A product is known by its site in the model's code, and by which of its
factors are the values. Whether its rows are tokens is for the graph to say.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

_MATMUL = (torch.matmul, torch.bmm, Tensor.matmul, Tensor.bmm, Tensor.__matmul__)
_ADDED = (torch.baddbmm, Tensor.baddbmm)
PRODUCTS = frozenset((*_MATMUL, *_ADDED, torch.einsum))
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_OURS = f"{Path(__file__).parents[3]}{os.sep}"
_AROUND = ("torch", "nnsight")  # packages whose frames come and go
_MODELS = f"{_OURS}models{os.sep}"
_DEEPEST = 16  # frames that tell sites apart


@dataclass(frozen=True)
class TokenProduct:
    """A site in a model's code where values of tokens are multiplied by a matrix.

    Args:
        site (tuple): of each frame between the module's call and the product, the code and the
            instruction.
        values (int): which of the factors are the values.
        rows (str): the letter of the matrix's rows.
        columns (str): that of its columns, over which the product sums.
    """

    site: tuple[tuple[CodeType, int], ...]
    values: int
    rows: str
    columns: str

    def __post_init__(self) -> None:
        name = name_of(self.site[0][0]) if self.site else "a model"
        object.__setattr__(self, "__qualname__", f"a product in {name}")

    def __call__(self, *args: Any) -> Tensor:
        return token_product(*args)


def name_of(code: CodeType) -> str:
    """The name of a function, with that of its class where Python says it, as it does from 3.11."""
    return str(getattr(code, "co_qualname", code.co_name))


def token_product(weights: Tensor, values: Tensor) -> Tensor:
    """Weights ``(B, L, L)`` times values ``(B, L, P)``."""
    return weights @ values


def run_product(
    func: Any,
    args: Any,
    kwargs: Any,
    is_known: Callable[[TokenProduct], bool],
    multiply: Callable[[TokenProduct, Tensor, Tensor], Tensor],
) -> Any:
    """What one of :data:`PRODUCTS` returns.

    Args:
        func, args, kwargs: the call.
        is_known (Callable): whether a product is one of tokens.
        multiply (Callable): takes the first known one and the arguments of :func:`token_product`,
            and returns what that returns.
    """
    multiplied, others = args, kwargs
    added: Tensor | float | None = None
    if func in _ADDED and len(args) == 3:
        beta, scale = kwargs.get("beta", 1), kwargs.get("alpha", 1)
        added = beta * args[0] if beta != 0 else 0.0  # even of what is not finite
        multiplied, others = args[1:], {}
    written = None if others else _written(func, multiplied)
    if written is None or any(x.is_complex() for x in written.factors):
        return func(*args, **kwargs)
    frames: list[FrameType] | None = None
    for values, rows, columns in _parts(written):
        frames = frames_in_module(sys._getframe(2)) if frames is None else frames
        if frames is None:
            break
        site = tuple((frame.f_code, frame.f_lasti) for frame in frames)
        product = TokenProduct(site, values, rows, columns)
        if is_known(product):
            y = _multiplied(written, product, partial(multiply, product))
            return y if added is None else added + scale * y
    return func(*args, **kwargs)


def length_added_up(func: Any, args: Any) -> int:
    """How many entries one of :data:`PRODUCTS` adds up, of factors that each example has; or 0."""
    written = None if func in _ADDED else _written(func, args)
    if written is None or len(written.factors) != 2 or not written.out:
        return 0
    first, second = written.letters
    summed = [letter for letter in first if letter in second and letter not in written.out]
    is_by_example = written.out[0] in first and written.out[0] in second
    return written.sizes[summed[0]] if is_by_example and len(summed) == 1 else 0


def as_linear(
    func: Any, args: Any, kwargs: Any, layer: Callable[[Tensor, Tensor], Tensor | None]
) -> Tensor | None:
    """What one of :data:`PRODUCTS` returns that multiplies the channels of tokens by a weight.

    Args:
        func, args, kwargs: the call.
        layer (Callable): takes an input ``(..., in)`` and a weight ``(out, in)``, and returns what
            a linear layer does; None where the weight is not one.

    Returns:
        Tensor: None for other products.
    """
    written = None if kwargs or func in _ADDED else _written(func, args)
    if written is None or len(written.factors) != 2:
        return None
    out, sizes = written.out, written.sizes
    for at in (1, 0):
        of_weight, of_input = written.letters[at], written.letters[1 - at]
        summed = "".join(letter for letter in of_weight if letter in of_input)
        new = "".join(letter for letter in out if letter not in of_input)
        batch = "".join(letter for letter in of_input if letter in out)
        whole = set(of_weight) == set(summed + new) and set(of_input) == set(batch + summed)
        if not (summed and new and whole) or any(letter in batch for letter in summed):
            continue
        x = written.factors[1 - at].permute([of_input.index(letter) for letter in batch + summed])
        weight = written.factors[at].permute([of_weight.index(letter) for letter in new + summed])
        x, weight = x.flatten(len(batch)), weight.flatten(len(new)).flatten(0, -2)
        y = _layer(layer, x, weight) if x.shape[-1] == weight.shape[-1] else None
        if y is not None:
            y = y.unflatten(-1, [sizes[letter] for letter in new])
            return y.permute([(batch + new).index(letter) for letter in out])
    return None


def _layer(
    layer: Callable[[Tensor, Tensor], Tensor | None], x: Tensor, weight: Tensor
) -> Tensor | None:
    # Also a layer of complex numbers, as one of their real and imaginary parts.
    if not x.is_complex() or not weight.is_complex():
        return layer(x, weight)
    rows = [torch.view_as_real(c * weight.conj()).flatten(-2) for c in (1, 1j)]
    y = layer(torch.view_as_real(x).flatten(-2), torch.cat(rows))
    return None if y is None else torch.complex(*y.chunk(2, -1))


@dataclass(frozen=True)
class _Written:
    # A product in Einstein's notation: the letters of each factor and of the result.
    letters: list[str]
    out: str
    factors: list[Tensor]

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each letter's axis; of those that are broadcast, the larger one."""
        sizes: dict[str, int] = {}
        for letters, factor in zip(self.letters, self.factors, strict=True):
            for letter, size in zip(letters, factor.shape, strict=True):
                sizes[letter] = max(size, sizes.get(letter, 1))
        return sizes


def _written(func: Any, args: Sequence[Any]) -> _Written | None:
    factors = list(args[1:] if func is torch.einsum else args)
    if len(factors) == 1 and isinstance(factors[0], (list, tuple)):
        factors = list(factors[0])
    if len(factors) < 2 or not all(map(torch.is_tensor, factors)):
        return None
    if not all(x.is_floating_point() or x.is_complex() for x in factors):
        return None
    if any(torch._C._functorch.is_batchedtensor(x) for x in factors):
        return None
    if func is torch.einsum:
        return _of_equation(args[0], factors) if isinstance(args[0], str) else None
    if min(x.dim() for x in factors) < 2:
        return None
    batch = _LETTERS[: max(x.dim() for x in factors) - 2]
    letters = [batch[len(batch) - x.dim() + 2 :] for x in factors]
    return _Written([f"{letters[0]}mk", f"{letters[1]}kn"], f"{batch}mn", factors)


def _of_equation(equation: str, factors: list[Tensor]) -> _Written | None:
    left, arrow, out = equation.replace(" ", "").partition("->")
    letters = left.split(",")
    free = [x for x in _LETTERS if x not in equation]
    hidden = [x.dim() - len(axes) + 3 for axes, x in zip(letters, factors, strict=True)]
    most = max((n for n, axes in zip(hidden, letters, strict=True) if "..." in axes), default=0)
    if not arrow or most > len(free):
        return None
    dots = "".join(free[:most])
    letters = [
        axes.replace("...", dots[most - n :]) for axes, n in zip(letters, hidden, strict=True)
    ]
    out = out.replace("...", dots)
    if any(len(set(axes)) < len(axes) for axes in (*letters, out)):
        return None
    return _Written(letters, out, factors)


def _parts(written: _Written) -> Iterator[tuple[int, str, str]]:
    # Which factor may be the values, and the letters of the matrix's rows and columns.
    sizes, out = written.sizes, written.out
    for values in reversed(range(len(written.factors))):
        of_values = set(written.letters[values])
        rest = set().union(*(set(x) for i, x in enumerate(written.letters) if i != values))
        summed, new = (
            of_values.difference(out),
            [letter for letter in out if letter not in of_values],
        )
        if len(summed) != 1 or not rest.issuperset((*summed, *new)):
            continue
        (columns,) = summed
        for rows in reversed(new):
            if sizes[rows] == sizes[columns]:
                yield values, rows, columns


def is_in_autograd_function(frame: FrameType) -> bool:
    """Whether a frame is that of the forward or backward of a custom function.

    What these call does not know the graph.
    """
    if frame.f_code.co_varnames[:1] != ("ctx",):
        return False
    return isinstance(frame.f_locals.get("ctx"), FunctionCtx)


def frames_in_module(frame: FrameType | None) -> list[FrameType] | None:
    """The frames of a model's code in the innermost module's call, the inner ones first.

    None inside of an autograd function: what that calls does not know the graph.
    """
    frames: list[FrameType] = []
    is_inside = True  # the innermost module
    while frame is not None:
        code, package = frame.f_code, str(frame.f_globals.get("__name__")).partition(".")[0]
        if is_in_autograd_function(frame):
            return None
        is_inside &= not (package == "torch" and code.co_name == "_call_impl")
        is_inside &= len(frames) < _DEEPEST
        is_ours = code.co_filename.startswith(_OURS) and not code.co_filename.startswith(_MODELS)
        if is_inside and not (is_ours or package in _AROUND):
            frames.append(frame)
        frame = frame.f_back
    return frames


def _multiplied(
    written: _Written, product: TokenProduct, multiply: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    # The product, by a function of weights (B, L, L) and values (B, L, P): all axes that both have
    # are in B.
    out, rows, columns, sizes = written.out, product.rows, product.columns, written.sizes
    of_values, values = written.letters[product.values], written.factors[product.values]
    others = [i for i in range(len(written.factors)) if i != product.values]
    rest = ",".join(written.letters[i] for i in others)
    examples = of_values[0] if of_values[0] == out[0] else ""
    batch = "".join(x for x in out if x in rest + examples and x != rows)
    channels = "".join(x for x in of_values if x in out and x not in batch)
    known = "".join(x for x in f"{batch}{rows}{columns}" if x in rest)

    def shape(letters: str) -> list[int]:
        return [sizes[letter] for letter in letters]

    weights = torch.einsum(f"{rest}->{known}", *(written.factors[i] for i in others))
    weights = _over(weights, known, f"{batch}{rows}{columns}", sizes)
    values = _over(values, of_values, f"{batch}{columns}{channels}", sizes)
    y = multiply(
        weights.reshape(-1, *shape(rows + columns)),
        values.reshape(-1, sizes[columns], math.prod(shape(channels))),
    )
    order = f"{batch}{rows}{channels}"
    return y.reshape(shape(order)).permute([order.index(letter) for letter in out])


def _over(x: Tensor, letters: str, wanted: str, sizes: dict[str, int]) -> Tensor:
    # A tensor with its axes in another order, and those that it lacks.
    x = x.permute([letters.index(letter) for letter in wanted if letter in letters])
    for axis, letter in enumerate(wanted):
        if letter not in letters:
            x = x.unsqueeze(axis)
    return x.expand([sizes[letter] for letter in wanted])
