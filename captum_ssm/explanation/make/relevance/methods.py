"""Which methods explain, by name or as objects: those of this library, and Captum's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from captum.attr import Attribution
from torch import nn

from captum_ssm.attr import TokenAttribution
from captum_ssm.attr import methods as token_methods
from captum_ssm.capture import resolve_model, unwrap
from captum_ssm.errors import brief
from captum_ssm.explanation.make.relevance.captum_methods import NAMED, CaptumRows, options_of
from captum_ssm.explanation.make.relevance.rows import RowSource, TokenRows
from captum_ssm.utils.suggestions import did_you_mean

ALL = "all"


def method_names() -> list[str]:
    """All names that ``methods=`` takes: first those of this library, then Captum's."""
    return [*token_methods(), *NAMED]


def parse_methods(
    methods: Any, model: Any, module: nn.Module, tokenizer: Any, memory_limit: int | None
) -> dict[str, RowSource]:
    """The sources of rows, by the names that they have in the explanation.

    Raises:
        ValueError: for an unknown method or option, a method twice, or one of another model.
    """
    is_one = isinstance(methods, str) or not isinstance(methods, Iterable)
    listed = [methods] if is_one else methods
    if listed in ([ALL], (ALL,)):
        listed = method_names()
    if not listed:
        raise ValueError("methods is empty; name at least one, such as 'mamba-lrp'.")
    sources: dict[str, RowSource] = {}
    for item in listed:
        options = dict(listed[item]) if isinstance(listed, Mapping) else {}
        method, name = _made(item, model, memory_limit)
        source: RowSource
        if isinstance(method, TokenAttribution):
            if unwrap(resolve_model(method.forward_func, method.model)) is not module:
                raise ValueError(
                    f"{type(method).__name__} was made with another model; expected the model that "
                    f"is explained: {type(method).__name__}(model)."
                )
            _check_options(name, options, list(method.options()))
            source = TokenRows(method, options)
        else:
            _check_options(name, options, options_of(method))
            source = CaptumRows(method, module, options, tokenizer)
        count = 2
        while name in sources:
            name, count = f"{re.sub(r'-[0-9]+$', '', name)}-{count}", count + 1
        sources[name] = source
    return sources


def _made(item: Any, model: Any, memory_limit: int | None) -> tuple[Attribution, str]:
    # A method, and its name.
    if isinstance(item, Attribution):
        return item, _name_of(type(item))
    if isinstance(item, type) and issubclass(item, Attribution):
        item = _name_of(item)
    ours = token_methods()
    if item in ours:
        return ours[item](model, memory_limit=memory_limit), item
    if item in NAMED:
        return NAMED[item](model), item
    known = method_names()
    hint = did_you_mean(_with_hyphens(str(item)), known)
    raise ValueError(
        f"methods holds {brief(item)}; expected one or several of {', '.join(known)}, or one of "
        f"Captum's methods made with the model.{hint}"
    )


def _name_of(cls: type[Attribution]) -> str:
    return getattr(cls, "name", None) or _with_hyphens(cls.__name__)


def _with_hyphens(name: str) -> str:
    words = re.sub(r"X(?=[A-Z][a-z])", "X-", name)  # input x gradient
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", words).lower().replace("_", "-")


def _check_options(name: str, options: Mapping[str, Any], known: list[str]) -> None:
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(
            f"methods[{name!r}] holds the option {unknown[0]!r}; expected "
            f"{', '.join(known) or 'no options'}.{did_you_mean(unknown[0], known)}"
        )
