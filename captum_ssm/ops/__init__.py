"""The recurrences under every method, as operators of ``torch.ops.captum_ssm``.

:mod:`captum_ssm.ops.diagonal` has those of a diagonal recurrence, :mod:`captum_ssm.ops.linear`
those of linear attention and the delta rule; :mod:`captum_ssm.ops.taps` has the inner loop of
LaTIM's vectors. Each operator exists three times:

* the C++ kernel in ``csrc/``, used for CPU tensors wherever the extension is built;
* a PyTorch form (``*_torch``), chunked and made of matrix products, differentiable in every
  argument: the fallback for any device, and what gradients of coefficients are taken from;
* a naive form (``naive_*``), the equation line by line in float64, for tests.

Results are float32, or float64 where any argument is float64; half precision arguments are
accumulated in float32. :func:`tap_rows` is the exception: it writes into a tensor it is given, in
that tensor's dtype, and has no gradient.
"""

from captum_ssm.ops._operator import ExtensionWarning, extension_loaded
from captum_ssm.ops.diagonal import (
    diagonal_mean,
    diagonal_mean_torch,
    diagonal_rows,
    diagonal_rows_torch,
    diagonal_scan,
    diagonal_scan_torch,
    diagonal_vecmat,
    diagonal_vecmat_torch,
    naive_diagonal_matrix,
    naive_diagonal_mean,
    naive_diagonal_rows,
    naive_diagonal_scan,
    naive_diagonal_vecmat,
)
from captum_ssm.ops.linear import (
    linear_mean,
    linear_mean_torch,
    linear_rows,
    linear_rows_torch,
    linear_scan,
    linear_scan_torch,
    linear_vecmat,
    linear_vecmat_torch,
    naive_linear_matrix,
    naive_linear_mean,
    naive_linear_rows,
    naive_linear_scan,
    naive_linear_vecmat,
)
from captum_ssm.ops.taps import tap_rows, tap_rows_torch

__all__ = [
    "ExtensionWarning",
    "diagonal_mean",
    "diagonal_mean_torch",
    "diagonal_rows",
    "diagonal_rows_torch",
    "diagonal_scan",
    "diagonal_scan_torch",
    "diagonal_vecmat",
    "diagonal_vecmat_torch",
    "extension_loaded",
    "linear_mean",
    "linear_mean_torch",
    "linear_rows",
    "linear_rows_torch",
    "linear_scan",
    "linear_scan_torch",
    "linear_vecmat",
    "linear_vecmat_torch",
    "naive_diagonal_matrix",
    "naive_diagonal_mean",
    "naive_diagonal_rows",
    "naive_diagonal_scan",
    "naive_diagonal_vecmat",
    "naive_linear_matrix",
    "naive_linear_mean",
    "naive_linear_rows",
    "naive_linear_scan",
    "naive_linear_vecmat",
    "tap_rows",
    "tap_rows_torch",
]
