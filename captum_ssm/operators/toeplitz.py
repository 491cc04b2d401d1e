r"""Convolutions as long as the input: S4, S4D and DSS, Hyena.

A state-space model whose coefficients depend on no token is a convolution with its impulse
response :math:`k_l = C \bar A^l \bar B` (Gu et al., 2022, eq. 5), computed by Fourier transforms.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from captum_ssm.operators.base import TokenOperator, check_rmatvec
from captum_ssm.utils.lazy import cached_property


@dataclass(frozen=True)
class ToeplitzOperator(TokenOperator):
    r"""A convolution over all tokens, :math:`\alpha^d_{ij} = k^d_{i-j}`: one map per channel.

    Rows and matrices are exact; products go through Fourier transforms, which round.

    Args:
        kernel (Tensor): ``(D, 2 L)``: k at lag l, of a later token where that is negative, stands
            at l modulo 2 L.
        examples (int): B.

    Examples::

        >>> operator = ToeplitzOperator(torch.rand(4, 10), examples=1)
        >>> lags = torch.arange(5)[:, None] - torch.arange(5)
        >>> torch.testing.assert_close(operator.matrix()[0], operator.kernel[:, lags])
    """

    kernel: Tensor
    examples: int
    axes = (("kernel", "D"), ("examples", "B"))

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        D, twice = self.kernel.shape
        return self.examples, twice // 2, D, D

    @cached_property
    def is_causal(self) -> bool:
        return not bool(self.kernel[:, self.length :].any())

    def matvec(self, v: Tensor) -> Tensor:
        return self._convolved(v, torch.fft.rfft(self.kernel))

    def rmatvec(self, w: Tensor, reduction: str | None = None) -> Tensor:
        mean = check_rmatvec(reduction)
        response = torch.fft.rfft(self.kernel).conj()
        if mean and w.dim() == 2:
            return self._convolved(w[..., None], response.mean(0, keepdim=True))[..., 0]
        u = self._convolved(w if w.dim() == 3 else w[..., None], response)
        return u.mean(-1) if mean else u

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        return self.kernel[start:stop, self._lags(index)].transpose(0, 1)

    def row_tile(self, start: int, stop: int) -> Tensor:
        index = torch.arange(start, stop, device=self.device)
        return self.kernel.mean(0)[self._lags(index)].expand(self.examples, -1, -1)

    def _lags(self, index: Tensor) -> Tensor:
        return index[..., None] - torch.arange(self.length, device=self.device)

    def _convolved(self, x: Tensor, response: Tensor) -> Tensor:
        n = 2 * self.length
        y = torch.fft.irfft(torch.fft.rfft(x.mT, n=n) * response, n=n)
        return y[..., : self.length].mT
