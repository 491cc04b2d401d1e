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
from _common import HEADS, arguments, linear_attention, relative_error
from _timing import keep, rounded, seconds
from operators import diagonal
from torch import Tensor

from captum_ssm import kernels
from captum_ssm.kernels import diagonal as diagonal_kernels
from captum_ssm.kernels import linear_attention as linear_attention_kernels
from captum_ssm.kernels.diagonal_backward import diagonal_scan_backward_torch
from captum_ssm.kernels.linear_attention_backward import linear_attention_scan_backward_torch
from captum_ssm.operators import DiagonalOperator

FORMS: dict[str, tuple[type, Callable[..., Tensor], Callable[..., Any]]] = {
    "diagonal": (
        kernels.DiagonalCoefficients,
        diagonal_kernels.diagonal_scan_torch,
        diagonal_scan_backward_torch,
    ),
    "linear_attention": (
        kernels.LinearAttentionCoefficients,
        linear_attention_kernels.linear_attention_scan_torch,
        linear_attention_scan_backward_torch,
    ),
}


def through_the_form(
    form: Callable[..., Tensor], container: type, tensors: list[Tensor | None], grad: Tensor
) -> list[Tensor]:
    """Autograd through the chunked form, run again."""
    leaves = [None if x is None else x.detach().requires_grad_() for x in tensors]
    y = form(leaves[0], container(*leaves[1:]))
    return list(torch.autograd.grad(y, [x for x in leaves if x is not None], grad))


def measured(op: Any, repeats: int) -> dict[str, float]:
    """The kernel's time, relative to it those of the forms in PyTorch, and errors of gradients."""
    is_diagonal = isinstance(op, DiagonalOperator)
    family = "diagonal" if is_diagonal else "linear_attention"
    shape = op.dt.shape if is_diagonal else (*op.query.shape[:3], op.width)
    container, form, backward_form = FORMS[family]
    v, grad = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    names = [field.name for field in fields(container) if field.name != "conv"]
    tensors = [v, *(getattr(op, name) for name in names)]
    wanted = [x is not None for x in tensors]
    operations = torch.ops.captum_ssm
    calls: list[Callable[[], Any]] = [
        lambda: getattr(operations, f"{family}_scan_backward")(grad, *tensors, wanted),
        lambda: through_the_form(form, container, tensors, grad),
        lambda: getattr(operations, f"{family}_scan")(*tensors),
        lambda: backward_form(grad, tensors[0], container(*tensors[1:]), wanted),
    ]
    kernel, autograd, scan, explicit = calls
    double = [None if x is None else x.double() for x in tensors]
    expected = through_the_form(form, container, double, grad.double())
    found = [x for x, want in zip(kernel(), wanted, strict=True) if want]
    error, chunked_error = (
        max(relative_error(x, z) for x, z in zip(side, expected, strict=True))
        for side in (found, autograd())
    )
    if not error <= 1e-5:
        raise SystemExit(f"the kernel's gradients are off by {error:.1e}")
    del expected, found, double
    kernel_s, autograd_s, scan_s = seconds(kernel, autograd, scan, repeats=repeats)
    kernel_again, explicit_s = seconds(kernel, explicit, repeats=2)
    return {
        "kernel_ms": 1e3 * kernel_s,
        "autograd_over_kernel": autograd_s / kernel_s,
        "torch_form_over_kernel": explicit_s / kernel_again,
        "kernel_over_scan": kernel_s / scan_s,
        "error": error,
        "autograd_error": chunked_error,
    }


def main() -> None:
    args = arguments(__doc__, "backward")
    rows = []
    for name in ("diagonal, 1536 channels of 16", *HEADS):
        for length in args.lengths or (1024, 2048):
            op = linear_attention(length, **HEADS[name]) if name in HEADS else diagonal(length)
            rows.append({"kind": name, "length": length, **measured(op, args.repeats)})
            print(rounded(rows[-1]))
    keep(args, rows)


main()
