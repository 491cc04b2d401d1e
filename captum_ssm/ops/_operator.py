"""What the operators share: the compiled extension, their arguments, their registration.

The schemas live in this package and nowhere else. The PyTorch forms are registered for every
backend; a compiled kernel registered for CPU or CUDA takes precedence over them.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# ---- the extension --------------------------------------------------------------------------


class ExtensionWarning(UserWarning):
    """The compiled extension is missing, so the slower PyTorch forms are used.

    Given once a process, by the first call that would have used it; ``CAPTUM_SSM_PURE_TORCH=1`` in
    the environment chooses the PyTorch forms without it.

    Examples::

        >>> import warnings
        >>> warnings.filterwarnings("ignore", category=ExtensionWarning)
    """


def _load(name: str) -> ImportError | None:
    """Import a compiled module, which registers its kernels; return why it could not be."""
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


# ---- arguments ------------------------------------------------------------------------------

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def shape_error(name: str, given: Tensor, accepted: str) -> ValueError:
    return ValueError(f"{name} has shape {tuple(given.shape)}; accepted: {accepted}")


def promote(**tensors: Tensor | None) -> list[Tensor | None]:
    """Bring all tensors to the dtype that is computed in; they must be on one device."""
    given = {name: x for name, x in tensors.items() if x is not None}
    for name, x in given.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; accepted: a torch.Tensor")
        if x.dtype not in _FLOATS:
            raise TypeError(f"{name} is {x.dtype}; accepted: float16, bfloat16, float32, float64")
    devices = {name: x.device for name, x in given.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"the arguments are on different devices: {devices}")
    double = any(x.dtype == torch.float64 for x in given.values())
    dtype = torch.float64 if double else torch.float32
    return [None if x is None else x.to(dtype) for x in tensors.values()]


def contiguous(tensors: list[Tensor | None]) -> list[Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def row_index(index: Tensor, like: Tensor) -> Tensor:
    """Rows wanted, ``(B, R)`` or ``(R,)``, as ``(B, R)`` int64 for tensors like ``(B, L, ...)``."""
    if index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"index is {index.dtype}; accepted: int64")
    if index.dim() == 1:
        index = index.expand(like.shape[0], -1)
    if index.dim() != 2 or index.shape[0] != like.shape[0]:
        raise shape_error("index", index, f"(B, R) with B = {like.shape[0]}, or (R,)")
    index = index.to(device=like.device, dtype=torch.int64).contiguous()
    length = like.shape[1]
    # Reading values would break a compiled graph; the kernels check them again.
    if not torch.compiler.is_compiling() and index.numel():
        low, high = (int(x) for x in index.aminmax())
        if low < 0 or high >= length:
            raise IndexError(f"index reaches from {low} to {high}; accepted: rows in [0, {length})")
    return index


def row_range(start: int, stop: int | None, like: Tensor) -> tuple[int, int]:
    """The rows ``[start, stop)`` wanted of tensors like ``(B, L, ...)``."""
    length = like.shape[1]
    stop = length if stop is None else stop
    if not 0 <= start < stop <= length:
        raise ValueError(
            f"rows [{start}, {stop}) were asked of a sequence of {length}; "
            "accepted: 0 <= start < stop <= L"
        )
    return start, stop


# ---- registration ---------------------------------------------------------------------------


def register(
    name: str,
    schema: str,
    torch_form: Callable[..., Tensor],
    fake: Callable[..., Tensor],
    linear: Callable[..., Tensor] | None,
) -> None:
    """Define an operator; ``linear`` is the gradient of the first argument, itself an operator.

    All other gradients are taken from the PyTorch form, run again in the backward pass: they are
    rarely asked for (the methods freeze the coefficients), and nothing is kept for them.
    """
    qualified = f"captum_ssm::{name}"
    torch.library.define(qualified, schema)
    # Results must not alias arguments, and must be contiguous like the kernels' own.
    torch.library.impl(qualified, "CompositeExplicitAutograd")(
        lambda *args: torch_form(*args).contiguous()
    )
    torch.library.register_fake(qualified)(fake)

    def setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        is_tensor = [x is None or isinstance(x, Tensor) for x in inputs]
        tensors = is_tensor.index(False) if False in is_tensor else len(inputs)
        ctx.save_for_backward(*inputs[:tensors])
        ctx.constants = inputs[tensors:]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        args = (*ctx.saved_tensors, *ctx.constants)
        needed = list(ctx.needs_input_grad)
        grads: list[Tensor | None] = [None] * len(args)
        if linear is not None and needed[0]:
            grads[0], needed[0] = linear(grad, *args), False
        wanted = [k for k, need in enumerate(needed) if need]
        if wanted:
            with torch.enable_grad():
                replay = list(args)
                for k in wanted:
                    replay[k] = args[k].detach().requires_grad_()
                result = torch_form(*replay)
                # One token alone does not depend on the rates: nothing came before it.
                found = torch.autograd.grad(
                    result,
                    [replay[k] for k in wanted],
                    grad,
                    allow_unused=True,
                    materialize_grads=True,
                )
            for k, g in zip(wanted, found, strict=True):
                grads[k] = g
        return tuple(grads)

    torch.library.register_autograd(qualified, backward, setup_context=setup_context)
