"""Cheaper products for backward passes that need only some properties of their results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class RankOneProducts(TorchDispatchMode):
    r"""Every matrix product :math:`A B` is :math:`(A a) (b^\top B)` with random vectors a and b.

    For a backward pass of which only the zeros matter: through MLPs it is little else than matrix
    products. No zero is new, with probability one: gradients are linear in each matrix
    :math:`a b^\top` between two factors, and what is zero for all matrices of rank one is zero for
    the identity, which is a sum of such. Zeros are lost where a product picks some of the rows that
    it sums over.

    Args:
        alike (bool, optional): use equal vectors in products with the same matrix, so that what is
            added after them and subtracted again stays zero. Default: False
    """

    # Such as attention that PyTorch compiles.
    supports_higher_order_operators = True

    def __init__(self, alike: bool = False) -> None:
        super().__init__()
        self.generator, self.alike = torch.Generator().manual_seed(0), alike
        self._vectors: dict[Any, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Values that checkpointing computes once more have to be right.
        is_backward = func is torch.ops.aten.mm.default and not torch.is_grad_enabled()
        if not is_backward or any(type(x) is not Tensor for x in args):
            return func(*args, **(kwargs or {}))
        first, second = args
        a, b = self._of(second).to(first)
        return torch.outer(first @ (a / len(second) ** 0.5), b @ second)

    def _of(self, second: Tensor) -> Tensor:
        if not self.alike:
            return torch.randn(2, len(second), generator=self.generator)
        matrix = second.data_ptr(), second.shape, second.stride()
        if matrix not in self._vectors:
            self._vectors[matrix] = torch.randn(2, len(second), generator=self.generator)
        return self._vectors[matrix]


class WithoutZeroKernels(TorchDispatchMode):
    """Convolutions with a kernel of zeros are not computed.

    PyTorch's second derivative of a convolution takes that of its weight too, asked for or not: as
    a convolution with the gradient that was put in as its kernel. Derivatives along directions put
    in zeros.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = args[1] if func in _CONVOLUTIONS else None
        if kernel is None or bool(kernel.any()):
            return func(*args, **(kwargs or {}))
        x, _, *rest = args
        shape = func(x.to("meta"), kernel.to("meta"), *rest, **(kwargs or {})).shape
        return x.new_zeros(shape)


_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten._convolution.default)
