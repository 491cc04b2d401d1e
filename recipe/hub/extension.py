"""The compiled kernels of this build, in the place of the library's own ``extension.py``."""

from __future__ import annotations

from ._ops import add_op_namespace_prefix
from ._ops import ops as OPS

NAMESPACE = add_op_namespace_prefix("").removesuffix("::")


class ExtensionWarning(UserWarning):
    """Never raised here: a build of the hub always has its kernels."""


def extension_loaded() -> bool:
    """Whether compiled kernels are in use: those of the build's backend, on its device."""
    return True


def extension_report() -> str:
    """Where the compiled kernels are from."""
    return f"compiled kernels: torch.ops.{NAMESPACE}."


def warn_if_missing() -> None:
    """Nothing is missing."""


__all__ = ["NAMESPACE", "OPS"]
