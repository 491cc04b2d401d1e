"""The errors this library raises, each saying what was given, what was expected and what to do.

Names of an earlier release raise an ``AttributeError`` that has the new one: :func:`renamed`.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from contextlib import suppress
from math import prod
from typing import Any, NoReturn

__all__ = ["InputError", "ReconstructionError", "TargetError", "UnsupportedModelError"]


class UnsupportedModelError(ValueError):
    """The model holds no token mixer that this library knows, or the run reached none.

    Examples::

        >>> try:
        ...     RawAttention(nn.Embedding(50, 2)).attribute(input_ids)
        ... except UnsupportedModelError as error:
        ...     print(str(error).split(".")[0])
        Embedding holds no token mixer that captum_ssm knows
    """


class ReconstructionError(ValueError):
    """A frozen operator does not reproduce what the mixer itself returned.

    Raised instead of returning a map that would describe another computation than the model's:
    an unknown variant of a mixer, a patched kernel, a generation cache that was already filled.
    ``check=False`` on a method looks at the operator all the same.

    Examples::

        >>> freeze = captum_ssm.mixers.find_adapter(model.backbone.layers[0].mixer)
        >>> @register_mixer("MambaMixer")
        ... def forgets_the_gate(call):
        ...     return dataclasses.replace(freeze(call), gate=None)
        >>> try:
        ...     RawAttention(model).attribute(input_ids)
        ... except ReconstructionError as error:
        ...     print(str(error).split(" does")[0])
        the frozen operator of backbone.layers.1.mixer (MambaMixer)
    """


class InputError(ValueError):
    """The inputs cannot be explained: empty, not finite, all padding, of unequal batch sizes.

    Examples::

        >>> try:
        ...     RawAttention(model).attribute(input_ids[:, :0])
        ... except InputError as error:
        ...     print(error)
        inputs is empty, of shape (1, 0); give at least one token.
    """


# Captum reports a bad target by `assert`; code and tests written for Captum catch that.
class TargetError(ValueError, AssertionError):
    """The target does not select one value per example of the model's output.

    Examples::

        >>> try:
        ...     MambaAttribution(model).attribute(input_ids, target=10**6)
        ... except TargetError as error:
        ...     print(str(error).split(":")[0])
        target is [1000000], outside the vocabulary
    """


def renamed(module: str | None = None, /, **names: str) -> Callable[..., NoReturn]:
    """A ``__getattr__`` for a module or a class: old names raise an error that has the new one.

    Type checkers should not see it, as to them any name would exist then.

    Args:
        module (str, optional): the module's name, for a module. Default: None, for a class
        names (str): for each old name the new one, of this module or class; with its address where
            it is another's.
    """

    def missing(*of: Any) -> NoReturn:
        owner, name = module or type(of[0]).__name__, of[-1]
        short = owner.removeprefix("captum_ssm.")
        if name in names:
            new = names[name] if "." in names[name] else f"{short}.{names[name]}"
            raise AttributeError(f"{short}.{name} is now {new}.", name=name)
        kind = f"module {owner!r}" if module else f"{owner!r} object"
        raise AttributeError(f"{kind} has no attribute {name!r}", name=name)

    return missing


class _Brief(reprlib.Repr):
    # Texts and lists are cut; of modules and arrays, nested ones too, no repr is made.
    def repr1(self, x: Any, level: int) -> str:
        if isinstance(x, type):
            return repr(x)
        if hasattr(x, "named_modules"):
            return f"a {type(x).__name__}"
        if not hasattr(x, "shape") or not hasattr(x, "tolist"):
            return super().repr1(x, level)
        # Texts and complex numbers have no range, and arrays on the device meta no values.
        with suppress(RuntimeError, TypeError, ValueError):
            if prod(x.shape) <= 16:
                return repr(x.tolist())
            return f"of shape {tuple(x.shape)}, from {float(x.min()):g} to {float(x.max()):g}"
        return f"of shape {tuple(x.shape)} and dtype {x.dtype}"


_BRIEF = _Brief()
vars(_BRIEF).update(maxother=200, maxstring=200, maxlong=40, maxlist=16, maxtuple=16, maxdict=16)


def brief(value: Any) -> str:
    """A value as an error says it: its repr where that is short, the class of a module."""
    return _BRIEF.repr(value)
