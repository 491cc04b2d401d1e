"""The names of classes, and one of them as the user names it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from captum_ssm.errors import TargetError
from captum_ssm.utils.integers import as_index

PLACEHOLDER = re.compile(r"LABEL_\d+")  # what a configuration has where nobody named classes


def class_names(labels: Any, model: Any, count: int) -> list[str] | None:
    """The names of so many classes: those that were given, or the configuration's; else None.

    Raises:
        ValueError: for another number of names.
    """
    known: Mapping[int, str] | Sequence[str] | None = labels
    if labels is None:
        known = getattr(getattr(model, "config", None), "id2label", None)
        if known is None or len(known) != count:
            return None
    assert known is not None
    if len(known) != count:
        raise ValueError(
            f"labels holds {len(known)} names; the model has {count} classes: expected one name "
            "per class."
        )
    names = [str(known[k]) for k in range(count)]
    is_named = labels is not None or not all(map(PLACEHOLDER.fullmatch, names))
    return names if is_named else None


def chosen_of(
    target: Any, against: Any, names: Mapping[Any, str], first: Any, what: str = "a class"
) -> tuple[Any, Any]:
    """The keys of what is explained and of what it is explained against, or None for the latter.

    Args:
        target, against (Any): a name or a key; None for ``first``, and for no contrast.
        names (dict): by key.
        first (Any): the key of what is explained unless asked for otherwise.
        what (str, optional): is named, for messages. Default: ``"a class"``

    Raises:
        TargetError: for another one, and where both are the same.
    """
    chosen = first if target is None else _key("target", target, names, what)
    other = None if against is None else _key("against", against, names, what)
    if other is not None and other == chosen:
        raise TargetError(
            f"against is {against!r}, {what.replace('a ', 'the ', 1)} that is explained; expected "
            "another one."
        )
    return chosen, other


def _key(name: str, wanted: Any, names: Mapping[Any, str], what: str) -> Any:
    keys = {text: key for key, text in names.items()}
    if isinstance(wanted, str) and wanted in keys:
        return keys[wanted]
    index = as_index(wanted)
    key = _place(wanted) if index is None else index
    for one in (key, (key,)):
        if one in names:
            return one
    listed = list(names)
    shown = ", ".join(list(names.values())[:20]) + (", ..." if len(names) > 20 else "")
    raise TargetError(
        f"{name} is {wanted!r}; expected {what} {listed[0]} .. {listed[-1]}, or its name: {shown}."
    )


def _place(wanted: Any) -> tuple[int | None, ...] | None:
    return tuple(map(as_index, wanted)) if isinstance(wanted, (tuple, list)) else None
