"""What do the gradients of all arguments of a scan cost, by the backward operations?

Layers of the shapes people run, as in `operators.py`. Against autograd through the chunked PyTorch
form of the scan, which runs that form once more to record its graph: both start from the saved
arguments and the gradient of the output. Errors are relative to each gradient's largest entry, the
worst of all arguments, against autograd through the chunked form in float64.

    python benchmarks/kernels/backward.py --cpu-time
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from _common import arguments, relative_error, save, seconds
from operators import diagonal, linear_attention
from torch import Tensor

from captum_ssm import kernels
from captum_ssm.kernels import diagonal as diagonal_kernels
from captum_ssm.kernels import linear_attention as linear_attention_kernels
from captum_ssm.kernels.diagonal_backward import diagonal_scan_backward_torch
from captum_ssm.kernels.linear_attention_backward import linear_attention_scan_backward_torch
from captum_ssm.operators import TokenOperator

KINDS: dict[str, tuple[Callable[[int], TokenOperator], int]] = {
    "diagonal, 1536 channels of 16": (diagonal, 0),
    "decay per head, 24 heads of 64, state 128": (lambda n: linear_attention(n, 24, 128, 64), 64),
    "decay per key, 8 heads of 128, state 128": (
        lambda n: linear_attention(n, 8, 128, 128, per_key=True),
        128,
    ),
    "gated delta rule, 16 heads of 128, state 128": (
        lambda n: linear_attention(n, 16, 128, 128, delta=True),
        128,
    ),
}


def through_the_form(
    form: Callable[..., Tensor], container: type, tensors: list[Tensor | None], grad: Tensor
) -> list[Tensor]:
    """Autograd through the chunked form, run again."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
    y = form(leaves[0], container(*leaves[1:]))
    return list(torch.autograd.grad(y, [x for x in leaves if x is not None], grad))


def main() -> None:
    args = arguments(__doc__)
    rows = []
    for name, (make, width) in KINDS.items():
        for length in args.lengths or (1024, 2048):
            op: Any = make(length)
            generator = torch.Generator().manual_seed(1)
            if width:
                family, container = "linear_attention", kernels.LinearAttentionCoefficients
                form: Callable[..., Tensor] = linear_attention_kernels.linear_attention_scan_torch
                backward_form: Callable[..., Any] = linear_attention_scan_backward_torch
                shape = (*op.query.shape[:3], width)
            else:
                family, container = "diagonal", kernels.DiagonalCoefficients
                form = diagonal_kernels.diagonal_scan_torch
                backward_form = diagonal_scan_backward_torch
                shape = op.dt.shape
            v, grad = torch.randn(2, *shape, generator=generator)
            names = [field.name for field in fields(container) if field.name != "conv"]
            tensors = [v, *(getattr(op, name) for name in names)]
            wanted = [x is not None for x in tensors]
            kernel_op = getattr(torch.ops.captum_ssm, f"{family}_scan_backward")
            scan_op = getattr(torch.ops.captum_ssm, f"{family}_scan")

            def kernel(op=kernel_op, tensors=tensors, grad=grad, wanted=wanted):
                return op(grad, *tensors, wanted)

            def explicit(form=backward_form, container=container, tensors=tensors, grad=grad,
                         wanted=wanted):  # fmt: skip
                return form(grad, tensors[0], container(*tensors[1:]), wanted)

            def autograd(form=form, container=container, tensors=tensors, grad=grad):
                return through_the_form(form, container, tensors, grad)

            def scan(op=scan_op, tensors=tensors):
                return op(*tensors)

            double = [None if x is None else x.double() for x in tensors]
            expected = through_the_form(form, container, double, grad.double())
            found = [x for x, want in zip(kernel(), wanted, strict=True) if want]
            pairs = list(zip(found, autograd(), expected, strict=True))
            error = max(relative_error(x, z) for x, _, z in pairs)
            chunked_error = max(relative_error(y, z) for _, y, z in pairs)
            if not error <= 1e-5:
                raise SystemExit(f"{name}: the kernel's gradients are off by {error:.1e}")
            del expected, found, pairs, double
            kernel_s, autograd_s, scan_s = seconds(kernel, autograd, scan, repeats=args.repeats)
            kernel_again, explicit_s = seconds(kernel, explicit, repeats=2)
            row = {
                "kind": name,
                "length": length,
                "kernel_ms": 1e3 * kernel_s,
                "autograd_over_kernel": autograd_s / kernel_s,
                "torch_form_over_kernel": explicit_s / kernel_again,
                "kernel_over_scan": kernel_s / scan_s,
                "error": error,
                "autograd_error": chunked_error,
            }
            rows.append(row)
            print({k: f"{x:.3g}" if isinstance(x, float) else x for k, x in row.items()})
    save("backward", args, rows)


main()
