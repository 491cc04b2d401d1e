"""Arguments that a model takes without reading them, such as a misspelt one in ``**kwargs``."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator
from types import CodeType
from typing import Any, get_args, get_type_hints

from torch import nn

from captum_ssm.errors import InputError
from captum_ssm.utils.suggestions import did_you_mean

# How similar two names are of which one is a misspelling, by difflib: a letter that is missing from
# "attention_mask" leaves 0.96, and "cross_attentions", another word, 0.6.
TYPO = 0.85

MASK = "attention_mask"


def check_names(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse the names of arguments that nothing in the model reads.

    A module reads what its ``forward`` names, what the type of its ``**kwargs`` lists, and what its
    code looks up by that name.

    Raises:
        InputError: for a name that is close to one that is read.
    """
    parameters = inspect.signature(type(model).forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = [name for name in names if name not in parameters]
    if not unknown or not takes_any:
        return  # Python itself raises for a name that is not taken
    # What is padding is read by the library itself, also where the model does not.
    known = names_read(model) | {MASK}
    for name in unknown:
        if name in known:
            continue
        meant = did_you_mean(name, known, TYPO)
        told = f"additional_forward_args holds {name!r}, which no module of the model reads"
        if meant:
            raise InputError(f"{told}; {type(model).__name__} would take it and ignore it.{meant}")
        warnings.warn(
            f"{told}, so {type(model).__name__} most likely ignores it.", UserWarning, stacklevel=2
        )


def names_read(model: nn.Module) -> set[str]:
    """The names of the arguments that a model, or a module in it, reads."""
    return {name for part in model.modules() for name in _read_by(part)}


def _read_by(module: nn.Module) -> Iterator[str]:
    forward = inspect.unwrap(type(module).forward)
    for name, parameter in inspect.signature(forward).parameters.items():
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            yield name
        elif parameter.kind is parameter.VAR_KEYWORD:
            yield from _listed(forward, name)
    # Decorators look arguments up too.
    layer: Any = type(module).forward
    while layer is not None:
        code = getattr(layer, "__code__", None)
        yield from _texts(code) if code is not None else ()
        layer = getattr(layer, "__wrapped__", None)


def _listed(forward: Any, name: str) -> Iterator[str]:
    # The keys of a TypedDict in Unpack[...].
    try:
        annotation = get_type_hints(forward).get(name)
    except Exception:  # an annotation names what is not imported
        return
    for typed_dict in get_args(annotation):
        yield from getattr(typed_dict, "__annotations__", {})


def _texts(code: CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _texts(constant)
