"""How precise products of float32 are."""

from __future__ import annotations

import torch

# TF32 has as many bits as float16.
_DTYPES = {
    **{"tf32": torch.float16, "high": torch.float16},
    **{"bf16": torch.bfloat16, "medium": torch.bfloat16},
}


def products_dtype(device: torch.device) -> torch.dtype:
    """The dtype that products of float32 may be rounded to on a device.

    Not every device does so. The setting is :func:`torch.set_float32_matmul_precision`, or that of
    each backend.
    """
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    # Asking for the one setting is an error once that of a backend was changed.
    setting = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if setting is None:  # before PyTorch 2.9
        setting = torch.get_float32_matmul_precision()
    return _DTYPES.get(setting, torch.float32)


def kernels_dtype(device: torch.device) -> torch.dtype:
    """The dtype that kernels outside of PyTorch may round products of float32 to on a device.

    Those that are written in Triton, as fla's and most of mamba-ssm's, make them on tensor cores in
    TF32, whatever PyTorch was asked to do; so do cuDNN's convolutions, unless they are told not to.
    """
    return torch.float16 if device.type == "cuda" else torch.float32
