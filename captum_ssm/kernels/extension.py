"""The compiled extension: importing it registers its kernels."""

from __future__ import annotations

import importlib
import os
import warnings

import torch


class ExtensionWarning(UserWarning):
    """The compiled extension is missing, so the slower PyTorch forms are used.

    Raised once per process, by the first call that would have used the extension.
    ``CAPTUM_SSM_PURE_TORCH=1`` in the environment chooses the PyTorch forms without this warning.

    Examples::

        >>> import warnings
        >>> warnings.filterwarnings("ignore", category=ExtensionWarning)
    """


def _load(name: str) -> ImportError | None:
    """Import a compiled module, which registers its kernels; return the error if it fails."""
    try:
        importlib.import_module(f"captum_ssm.{name}")
    except ImportError as error:
        return error
    return None


_FORCED_TORCH = os.environ.get("CAPTUM_SSM_PURE_TORCH", "0") not in ("", "0")
_MISSING: ImportError | None = ImportError("CAPTUM_SSM_PURE_TORCH is set")
if not _FORCED_TORCH:
    _MISSING = _load("_C")
    if torch.version.cuda is not None:
        _load("_C_cuda")
_warned = False


def extension_loaded() -> bool:
    """Whether the compiled CPU kernels are in use.

    Examples::

        >>> extension_loaded() in (True, False)  # False: see ExtensionWarning
        True
    """
    return _MISSING is None


def warn_if_missing() -> None:
    global _warned
    if _MISSING is None or _FORCED_TORCH or _warned or torch.compiler.is_compiling():
        return
    _warned = True
    warnings.warn(
        f"captum_ssm's compiled kernels are not available ({_MISSING}); the PyTorch forms are "
        "used instead, which give the same results several times slower. Build them with "
        "`pip install --no-build-isolation -e .` in an environment with torch >= 2.11 and a C++17 "
        "compiler, or set CAPTUM_SSM_PURE_TORCH=1 to use the PyTorch forms without this warning.",
        ExtensionWarning,
        stacklevel=3,
    )
