"""Convolutions with kernels as long as the input, computed by Fourier transforms.

As a function of its own (Hyena's ``fftconv(u, k, D)``), or written into a module: the product of
two transforms that is transformed back is then taken for a call of :func:`fourier_convolution`. A
kernel may be known by its transform alone, as a filter of frequencies is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.discovery.scans.form import Candidate, register_scan
from captum_ssm.discovery.scans.forms.arguments import per_channel, working_dtype
from captum_ssm.graph.reachability import nodes_before
from captum_ssm.operators import ToeplitzOperator
from captum_ssm.utils.clones import is_same

TRANSFORMS = (torch.fft.rfft, torch.fft.fft, torch.fft.irfft)
FACTORS = (torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
# How many transforms of a run are remembered: a convolution's two stand close to each other.
_REMEMBERED = 4
# What transforms back are multiplied by, by their norm; the others are divided by that.
_NORMS: dict[str, Callable[[int], float]] = {"forward": float, "ortho": math.sqrt}


def fourier_convolution(u: Tensor, kernel: Tensor, n: int) -> Tensor:
    """The first L numbers of the circular convolution, of length n, of u ``(B, D, L)``."""
    transformed = torch.fft.rfft(u, n=n) * torch.fft.rfft(kernel, n=n)
    return torch.fft.irfft(transformed, n=n)[..., : u.shape[-1]]


@register_scan(names={"x": ("u",), "kernel": ("k", "filter"), "D": ("bias",)})
def long_convolution(
    x: Tensor, kernel: Tensor, D: Tensor | None = None, n: int | None = None
) -> Iterator[Candidate]:
    """x ``(B, D, L)`` and kernel ``(D, K)``: of S4, whose kernel depends on no token, and Hyena.

    Around a circle of n numbers a kernel reaches later tokens too.
    """
    if x.dim() != 3 or not kernel.is_floating_point() or kernel.numel() == 0:
        return
    (B, channels, L), K = x.shape, kernel.shape[-1]
    k = kernel.to(working_dtype(x, kernel)).reshape(-1, K)
    n = n if isinstance(n, int) else K + L
    if len(k) != channels or n < K:
        return
    lags = torch.arange(2 * L, device=x.device)
    lags[L:] -= 2 * L
    around = F.pad(k, (0, n - K))[:, lags % n]
    around[:, L] = 0
    yield Candidate(
        operator=ToeplitzOperator(around, examples=B),
        values=x.mT,
        layouts=("BDL",),
        skip=per_channel(D, channels),
    )


class Transforms:
    """The Fourier transforms of a run, among which convolutions that are written out are found."""

    def __init__(self) -> None:
        self._known: list[_Transform] = []

    def run(
        self,
        function: Callable[..., Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        convolve: Callable[[Tensor, Tensor, int], Tensor],
    ) -> Tensor:
        """What a transform, or one back, returns.

        Where a product of two is transformed back, ``convolve`` does what
        :func:`fourier_convolution` does.
        """
        whole = function(*args, **kwargs)
        arguments = _taken(args, kwargs)
        if arguments is None:
            return whole
        x, n, axis, norm = arguments
        moved = whole.movedim(axis, -1)
        if function is not torch.fft.irfft:
            if x.is_floating_point():
                n = n or x.shape[-1]
                scale = 1 / _NORMS.get(norm, lambda n: 1.0)(n)
                transform = moved[..., : n // 2 + 1]
                self._remember(_Transform(transform, x, n, axis % whole.dim(), scale))
            return whole
        n = n or 2 * (x.shape[-1] - 1)
        factors = self._factors(x, n)
        if factors is None:
            return whole
        values, kernel, scale = factors
        scale = scale * _NORMS.get(norm, lambda n: 1.0)(n)
        y = convolve(values, kernel * scale, n)
        y = y.reshape(*moved.shape[:-1], y.shape[-1])
        y = torch.cat([y.to(whole.dtype), moved[..., y.shape[-1] :]], -1)
        return y.movedim(-1, axis)

    def multiplied(self, args: tuple[Any, ...]) -> None:
        """Remember what a transform of the run is multiplied by as a transform, too."""
        if len(args) != 2 or not all(torch.is_tensor(x) for x in args):
            return
        if any(torch._C._functorch.is_batchedtensor(x) for x in args):
            return
        for x, factor in (args, args[::-1]):
            known = next((known for known in self._known if known.is_of(x)), None)
            missing = x.dim() - factor.dim()
            if known is None or missing < 0 or any(t.is_of(factor) for t in self._known):
                continue
            moved = factor[(None,) * missing].movedim(known.axis, -1)
            if moved.shape[-1] == known.transform.shape[-1]:
                kernel = torch.fft.irfft(moved, n=known.n)
                self._remember(_Transform(moved, kernel, known.n, known.axis))

    def _remember(self, transform: _Transform) -> None:
        self._known = [*self._known, transform][-_REMEMBERED:]

    def _factors(self, product: Tensor, n: int) -> tuple[Tensor, Tensor, float] | None:
        # Values (B, D, L), kernel (D, K) and c of two transforms whose product this is, times c.
        # Each of the values' channels may have several kernels, or one for all.
        if product.dim() < 3:
            return None
        rows = product.flatten(1, -2)
        # A kernel may have an axis of one, as the values of one example have.
        for first in sorted(self._known[::-1], key=lambda known: _is_constant(known.values)):
            for second in self._known:
                fits = second is not first and first.n == second.n == n and first.values.dim() >= 3
                if not fits or len(first.values) != len(rows):
                    continue
                both = first.of_channels(1), second.of_channels(0)
                if both[0][0].shape[-1] != rows.shape[-1]:
                    continue
                ways = (_repeats(*channels, rows.shape[1]) for channels in both)
                for (a, x), (b, k) in itertools.product(*ways):
                    if (c := _ratio(rows, a * b)) is not None:
                        return x, k, c * first.scale * second.scale
        return None


class _Transform(NamedTuple):
    # A transform with its frequencies last, and of what; n, and the axis that it was along; and how
    # many times as large it is as without a norm.
    transform: Tensor
    values: Tensor
    n: int
    axis: int
    scale: float = 1.0

    def is_of(self, x: Tensor) -> bool:
        """Whether this is a tensor that a run computes with."""
        is_alike = x.dtype is self.transform.dtype and x.dim() == self.transform.dim()
        return is_alike and is_same(x.movedim(self.axis, -1), self.transform)

    def of_channels(self, start: int) -> tuple[Tensor, Tensor]:
        a, x = self.transform, self.values
        return (a.flatten(start, -2), x.flatten(start, -2)) if a.dim() > 1 else (a[None], x[None])


def _is_constant(x: Tensor) -> bool:
    # Whether a graph shows that a tensor is made of parameters alone.
    if x.grad_fn is None:
        return True
    leaves = (getattr(node, "variable", None) for node in nodes_before([x.grad_fn], ()))
    return all(leaf is None or isinstance(leaf, nn.Parameter) for leaf in leaves)


def _repeats(x: Tensor, values: Tensor, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    # A transform and what it is of, with so many channels, the last axis but one, made of its own.
    times, left = divmod(count, x.shape[-2])
    if (times, left) == (1, 0):
        yield x, values  # no copy: what is added to the result may be made of the values too
    elif not left and times:
        channels = torch.arange(x.shape[-2], device=x.device)
        for order in (channels.repeat(times), channels.repeat_interleave(times)):
            yield x[..., order, :], values[..., order, :]


def _ratio(product: Tensor, expected: Tensor) -> float | None:
    # What a product is of what it is expected to be, the same at each frequency.
    with torch.no_grad():
        size = expected.abs().square().sum()
        c = float((product * expected.conj()).sum().real / size.clamp(min=1e-300))
        left = (product - c * expected).norm()
    return c if bool(left <= 1e-5 * product.norm()) and c != 0 else None


def _taken(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, int | None, int, str] | None:
    # The tensor of a transform, with its axis last, the length, the axis and the norm.
    arguments = dict(zip(("input", "n", "dim", "norm"), args, strict=False)) | kwargs
    x = arguments.get("input")
    if not torch.is_tensor(x):
        return None
    axis = arguments.get("dim", -1)
    return x.movedim(axis, -1), arguments.get("n"), axis, arguments.get("norm") or "backward"
