"""The parts of a selective scan that a module holds, by the usual names of its attributes."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from captum_ssm._copies import original

# The names of each part. A second direction has the same ones with a suffix.
_NAMES: dict[str, tuple[str, ...]] = {
    "in_proj": ("in_proj",),
    "conv": ("conv1d", "conv"),
    "x_proj": ("x_proj",),
    "dt_proj": ("dt_proj",),
    "dt_bias": ("dt_bias",),
    "A": ("A_log", "A"),
    "D": ("D",),
    "dt_norm": ("dt_layernorm", "dt_norm"),
    "B_norm": ("B_layernorm", "b_layernorm", "B_norm", "b_norm"),
    "C_norm": ("C_layernorm", "c_layernorm", "C_norm", "c_norm"),
    "norm": ("norm",),
    "out_proj": ("out_proj",),
    "conv2d": ("conv2d",),
    "x_projs": ("x_proj_weight",),
    "dt_projs": ("dt_projs_weight",),
    "dt_biases": ("dt_projs_bias",),
    "A_logs": ("A_logs",),
    "Ds": ("Ds",),
    "out_norm": ("out_norm",),
}
_SUFFIXES = (("", "_b"), ("_fwd", "_bwd"), ("_f", "_b"), ("_forward", "_backward"))
_NEEDED = {
    "S6": {"in_proj", "x_proj", "dt_proj", "A", "out_proj"},
    "SSD": {"in_proj", "conv", "dt_bias", "A", "out_proj"},
    "SS2D": {"in_proj", "conv2d", "x_projs", "dt_projs", "dt_biases", "A_logs", "Ds"}
    | {"out_norm", "out_proj"},
}
# Names that modules of other kinds have too.
_COMMON = {"in_proj", "conv", "conv2d", "norm", "out_norm", "out_proj"}

Parts = dict[str, Any]
# Why a module was not taken for a mixer, and the error of the nearest variant.
_MISSES: WeakKeyDictionary[nn.Module, tuple[float, str]] = WeakKeyDictionary()


def parts_of(module: nn.Module, suffix: str = "") -> Parts:
    """The parts of a module by role, ``"rates"`` being the name of A."""
    found: Parts = {}
    # A name that a module does not have takes it long to look up.
    known = _own(module).union(vars(module), *map(vars, type(module).__mro__))
    for role, names in _NAMES.items():
        for name in names:
            for full in (f"{name}{suffix}", f"A{suffix}_log" if name == "A_log" else name + suffix):
                value = getattr(module, full, None) if full in known else None
                if isinstance(value, nn.Module) or torch.is_tensor(value):
                    found.setdefault(role, value)
                    if role == "A":
                        found.setdefault("rates", name)
    return found


def directions_of(module: nn.Module) -> list[Parts]:
    """The parts of each direction that has any of its own, ``"S6"`` complete; else of the one."""
    both = parts_of(module)
    for first, second in _SUFFIXES:
        back = parts_of(module, second)
        found = [both | parts_of(module, first), both | back]
        if back and all(parts.keys() >= _NEEDED["S6"] for parts in found):
            return found
    return [both]


def form_of(module: nn.Module) -> str | None:
    """The form, ``"S6"``, ``"SSD"`` or ``"SS2D"``, that a module has all parts of, if any."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return None
    parts = directions_of(module)[0].keys()
    return next((form for form, needed in _NEEDED.items() if parts >= needed), None)


def note_miss(module: nn.Module, why: str, error: float = float("inf")) -> None:
    """Remember why a module was not taken for a mixer."""
    module = original(module)
    if error <= _MISSES.get(module, (float("inf"), ""))[0]:
        _MISSES[module] = error, why


def nearest_misses(model: nn.Module, most: int = 3) -> str:
    """What in ``model`` looks like a mixer and why it is none, the nearest first; or nothing."""
    found: dict[tuple[str, str], tuple[float, str]] = {}
    for path, module in model.named_modules():
        error, why = _MISSES.get(module) or (float("inf"), _missing(module))
        if why:
            found.setdefault((type(module).__name__, why), (error, path))
    ranked = sorted(found.items(), key=lambda one: one[1][0])[:most]
    return "; ".join(f"{path or 'the model'} ({kind}) {why}" for (kind, why), (_, path) in ranked)


def names_of(module: nn.Module) -> str:
    """The names of a module's recognized parts, for messages."""
    parts = directions_of(module)[0]
    values = {id(value) for value in parts.values()}
    return ", ".join(name for name in sorted(_own(module)) if id(getattr(module, name)) in values)


def look_of(module: nn.Module) -> str:
    """What modules have in common that compute alike: their class, parts, shapes and settings."""
    settings = {
        f"{path}.{name}": value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, (bool, int, float, str, tuple)) and not name.startswith("_")
    }
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__} {id(kind)}: {module} {settings} {shapes}"


def _own(module: nn.Module) -> set[str]:
    return {*module._parameters, *module._buffers, *module._modules}


def _missing(module: nn.Module) -> str:
    parts = {role for role in parts_of(module) if role in _NAMES}
    if len(parts - _COMMON) < 2:
        return ""
    form, needed = min(_NEEDED.items(), key=lambda one: len(one[1] - parts))
    lacks = ", ".join(" or ".join(_NAMES[role]) for role in sorted(needed - parts))
    return f"has {names_of(module)}" + (f", and for {form} lacks {lacks}" if lacks else "")
