"""Convolutions with kernels as long as the input, computed by Fourier transforms.

As a function of its own (Hyena's ``fftconv(u, k, D)``), or written into a module: the product of
two transforms that is transformed back is then taken for a call of :func:`fourier_convolution`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.discovery.scans.form import Candidate, register_scan
from captum_ssm.discovery.scans.forms.arguments import per_channel, working_dtype
from captum_ssm.operators import ToeplitzOperator

TRANSFORMS = (torch.fft.rfft, torch.fft.fft, torch.fft.irfft)
# How many transforms of a run are remembered: a convolution's two stand close to each other.
_REMEMBERED = 4


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
        self._known: list[tuple[Tensor, Tensor, int]] = []  # transforms, of what, and n

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
                transform = moved[..., : (n or x.shape[-1]) // 2 + 1]
                self._known = [*self._known, (transform, x, n or x.shape[-1])][-_REMEMBERED:]
            return whole
        n = n or 2 * (x.shape[-1] - 1)
        factors = self._factors(x, n)
        if factors is None:
            return whole
        values, kernel, scale = factors
        scale = scale * {"forward": n, "ortho": n**0.5}.get(norm, 1)
        y = convolve(values, kernel * scale, n)
        y = y.reshape(*moved.shape[:-1], y.shape[-1])
        y = torch.cat([y.to(whole.dtype), moved[..., y.shape[-1] :]], -1)
        return y.movedim(-1, axis)

    def _factors(self, product: Tensor, n: int) -> tuple[Tensor, Tensor, float] | None:
        # Values (B, D, L), kernel (D, K) and c of two transforms whose product this is, times c.
        for first in reversed(self._known):
            for second in self._known:
                (a, x, n_x), (b, k, n_k) = first, second
                fits = second is not first and n_x == n_k == n and x.dim() >= 3
                if not fits or product.numel() != a.numel() or product.shape[0] != len(x):
                    continue
                kernel, of_kernel = _by_channel(k, x), _by_channel(b, x)
                if kernel is None or of_kernel is None:
                    continue
                values = x.flatten(1, -2)
                with torch.no_grad():
                    expected = (a.flatten(1, -2) * of_kernel).reshape(product.shape)
                    size = expected.abs().square().sum()
                    c = float((product * expected.conj()).sum().real / size.clamp(min=1e-300))
                    left = (product - c * expected).norm()
                if bool(left <= 1e-5 * product.norm()) and c != 0:
                    return values, kernel, c
        return None


def _by_channel(kernel: Tensor, x: Tensor) -> Tensor | None:
    # A kernel for each of x (B, ..., L), (D, K): heads of several channels may share one.
    channels, each = x.shape[1:-1], kernel.shape[:-1]
    if each.numel() == channels.numel():
        return kernel.reshape(-1, kernel.shape[-1])
    each = each[1:] if len(each) > len(channels) and each[0] == 1 else each
    is_shared = len(each) <= len(channels) and all(
        size in (1, of_x) for size, of_x in zip(each[::-1], channels[::-1], strict=False)
    )
    if not is_shared:
        return None
    return kernel.reshape(*each, -1).expand(*channels, -1).reshape(channels.numel(), -1)


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
