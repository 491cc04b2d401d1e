"""How precise PyTorch was asked to make products of float32."""

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

    Args:
        device (torch.device): where the products are made.

    Returns:
        torch.dtype: float16 (for TF32, which has as many bits), bfloat16 or float32.
    """
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    # Asking for the one setting is an error once that of a backend was changed.
    found = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if found is None:  # before PyTorch 2.9
        found = torch.get_float32_matmul_precision()
    return _DTYPES.get(found, torch.float32)
