"""The compiled extension: importing it registers its kernels."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path

import torch

# Where the operations are. The copy of these files on the kernels hub has a name of its own, as
# several versions of it may be loaded at once (recipe/hub).
NAMESPACE = "captum_ssm"
OPS = getattr(torch.ops, NAMESPACE)
OWN_FOLDER = Path(__file__).resolve().parents[1]


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
_MISSING_CUDA: ImportError | None = None
if not _FORCED_TORCH:
    _MISSING = _load("_C")
    if torch.version.cuda is not None:
        _MISSING_CUDA = _load("_C_cuda")
_warned = False


def extension_loaded() -> bool:
    """Whether the compiled CPU kernels are in use.

    Examples::

        >>> extension_loaded() in (True, False)  # False: see ExtensionWarning
        True
    """
    return _MISSING is None


def extension_report() -> str:
    """Whether the compiled CPU kernels are in use, why not, and what to do about it.

    Returns:
        One to four sentences.

    Examples::

        >>> extension_report().split(":")[0] in ("compiled kernels", "no compiled kernels")
        True
    """
    if _MISSING is None:
        here = f"compiled kernels: loaded from {sys.modules['captum_ssm._C'].__file__}."
        if _MISSING_CUDA is None:
            return here
        return (
            f"{here} On a GPU the PyTorch forms run: the CUDA kernels could not be loaded "
            f"({_MISSING_CUDA}). They are built with captum_ssm where there is an nvcc of CUDA "
            f"{torch.version.cuda}, as torch has it."
        )
    if _FORCED_TORCH:
        return f"no compiled kernels: {_MISSING}."
    return f"no compiled kernels: {_reason(_MISSING)}"


def _reason(missing: ImportError) -> str:
    if _has_kernels(OWN_FOLDER):
        return (
            f"those in {OWN_FOLDER} could not be loaded ({missing}). They need torch >= 2.11, and "
            f"this is torch {torch.__version__}. Build them again with `pip install "
            "--no-deps --force-reinstall`."
        )
    folders = [Path(entry or ".").resolve() / "captum_ssm" for entry in sys.path]
    other = next((path for path in folders if path != OWN_FOLDER and _has_kernels(path)), None)
    if other is not None:
        return (
            f"Python imported captum_ssm from {OWN_FOLDER}, which has none; the installed copy in "
            f"{other} has them. Start Python in another folder to use it, or build them in "
            "place: `pip install -e .`"
        )
    if (OWN_FOLDER.parent / "setup.py").exists():
        return (
            f"captum_ssm was imported from its sources in {OWN_FOLDER}, where none were built. "
            "Build them there: `pip install -e .`, with torch >= 2.11 and a "
            "C++17 compiler."
        )
    return (
        "none were built when captum_ssm was installed, because torch >= 2.11 or a C++17 compiler "
        "was missing then. Install both, then captum_ssm again with `pip install --no-deps "
        "--force-reinstall -v`, whose output holds what the compiler says."
    )


def _has_kernels(folder: Path) -> bool:
    return any(folder.glob("_C.*"))


def warn_if_missing() -> None:
    global _warned
    if _MISSING is None or _FORCED_TORCH or _warned or torch.compiler.is_compiling():
        return
    _warned = True
    warnings.warn(
        f"captum_ssm has {extension_report()}\nThe PyTorch forms give the same results, several "
        "times slower. CAPTUM_SSM_PURE_TORCH=1 chooses them without this warning.",
        ExtensionWarning,
        stacklevel=3,
    )
