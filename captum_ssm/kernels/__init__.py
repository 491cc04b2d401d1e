"""The recurrences that every method computes, as operations of ``torch.ops.captum_ssm``.

:mod:`captum_ssm.kernels.diagonal` has those of a diagonal recurrence (its channel mean is in
:mod:`captum_ssm.kernels.channel_mean`),
:mod:`captum_ssm.kernels.linear_attention` those of linear attention and the delta rule;
:mod:`captum_ssm.kernels.taps` has the inner loop of LaTIM's vectors,
:mod:`captum_ssm.kernels.distances` that of ALTI over attention's heads,
:mod:`captum_ssm.kernels.weighted` that of channel means of heads, and
:mod:`captum_ssm.kernels.weighted_heads` all of it for linear attention. Each operation exists
twice:

* the compiled kernel in ``csrc/``, used for CPU tensors if the extension is built, and for
  CUDA tensors if nvcc was there (all but :func:`map_distances`, :func:`weighted_rows` and
  :func:`linear_attention_weighted`);
* a PyTorch form (``*_torch``), chunked and made of matrix products, differentiable in every
  argument: the fallback for any device.

The gradients of the scans, and of products with row vectors, are operations of their own
(``diagonal_scan_backward``, ``linear_attention_scan_backward``), those of means and rows are
autograd's through the PyTorch form. All are differentiable again.

Two naive matrices, the equations line by line in float64, define what is computed.

Results are float32, or float64 if any argument is float64; half precision arguments are
accumulated in float32. :func:`tap_rows` is the exception: it writes into its argument ``out``, in
that tensor's dtype, and has no gradient; :func:`map_distances` and :func:`weighted_rows` compute in
the one dtype of their arguments, and have none either.
"""

from typing import TYPE_CHECKING

from captum_ssm.errors import renamed
from captum_ssm.kernels import channel_mean, diagonal_backward, linear_attention_backward  # noqa: F401
from captum_ssm.kernels.diagonal import (
    DiagonalCoefficients,
    diagonal_mean,
    diagonal_rmatvec,
    diagonal_rows,
    diagonal_scan,
    naive_diagonal_matrix,
)
from captum_ssm.kernels.distances import map_distances
from captum_ssm.kernels.extension import ExtensionWarning, extension_loaded, extension_report
from captum_ssm.kernels.linear_attention import (
    linear_attention_mean,
    linear_attention_rmatvec,
    linear_attention_rows,
    linear_attention_scan,
    naive_linear_attention_matrix,
)
from captum_ssm.kernels.linear_attention_coefficients import LinearAttentionCoefficients
from captum_ssm.kernels.taps import tap_rows
from captum_ssm.kernels.weighted import weighted_rows
from captum_ssm.kernels.weighted_heads import linear_attention_weighted

__all__ = [
    "DiagonalCoefficients",
    "ExtensionWarning",
    "LinearAttentionCoefficients",
    "diagonal_mean",
    "diagonal_rmatvec",
    "diagonal_rows",
    "diagonal_scan",
    "extension_loaded",
    "extension_report",
    "linear_attention_mean",
    "linear_attention_rmatvec",
    "linear_attention_rows",
    "linear_attention_scan",
    "linear_attention_weighted",
    "map_distances",
    "naive_diagonal_matrix",
    "naive_linear_attention_matrix",
    "tap_rows",
    "weighted_rows",
]

if not TYPE_CHECKING:
    __getattr__ = renamed(
        __name__,
        diagonal_vecmat="diagonal_rmatvec",
        linear_mean="linear_attention_mean",
        linear_rows="linear_attention_rows",
        linear_scan="linear_attention_scan",
        linear_vecmat="linear_attention_rmatvec",
        naive_linear_matrix="naive_linear_attention_matrix",
    )
