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

from captum_ssm.operators import ToeplitzOperator
from captum_ssm.scans._arguments import per_channel, working_dtype
from captum_ssm.scans._candidate import Candidate
from captum_ssm.scans._form import register_scan

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
    n = K + L if n is None else n
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

        Args:
            function (Callable): :func:`torch.fft.rfft` or :func:`torch.fft.irfft`.
            args, kwargs: its arguments.
            convolve (Callable): takes the arguments of :func:`fourier_convolution` where a product
                of two transforms is transformed back, and returns what that returns.
        """
        whole = function(*args, **kwargs)
        x, n = _taken(args, kwargs)
        if x is None:
            return whole
        if function is torch.fft.rfft:
            self._known = [*self._known, (whole, x, n or x.shape[-1])][-_REMEMBERED:]
            return whole
        found = self._factors(x, n or 2 * (x.shape[-1] - 1))
        if found is None:
            return whole
        y = convolve(*found)
        y = y.reshape(*whole.shape[:-1], y.shape[-1])
        return torch.cat([y.to(whole.dtype), whole[..., y.shape[-1] :]], -1)

    def _factors(self, product: Tensor, n: int) -> tuple[Tensor, Tensor, int] | None:
        # Values (B, D, L), kernel (D, K) and n of two transforms whose product this is.
        for one in reversed(self._known):
            for other in self._known:
                (a, x, n_x), (b, k, n_k) = one, other
                fits = other is not one and n_x == n_k == n and x.dim() == 3
                if not fits or k.numel() != x[0].numel() // x.shape[-1] * k.shape[-1]:
                    continue
                if product.numel() != a.numel() or product.shape[0] != len(x):
                    continue
                with torch.no_grad():
                    expected = (a * b.view(-1, b.shape[-1])).view_as(product)
                    close = (product - expected).norm() <= 1e-5 * expected.norm()
                if bool(close):
                    return x, k.reshape(-1, k.shape[-1]), n
        return None


def _taken(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, int | None]:
    # The tensor and the length of a transform along the last axis, without another norm.
    given = dict(zip(("input", "n", "dim", "norm"), args, strict=False)) | kwargs
    x = given.get("input")
    if not torch.is_tensor(x) or given.get("dim", -1) not in (-1, x.dim() - 1):
        return None, None
    if given.get("norm") not in (None, "backward"):
        return None, None
    return x, given.get("n")
