"""The scalar columns of a data set, which are kept with the explanations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from captum_ssm.errors import InputError
from captum_ssm.utils.integers import as_index

# Types that a shard has columns of, in addition to that of missing values alone, and of what is not
# a scalar and not kept.
NONE, OTHER = "none", "other"
_INTEGER = re.compile(r"-?(0|[1-9]\d{0,17})")
_NUMBER = re.compile(r"-?\d+(\.\d*)?([eE][-+]?\d+)?")
_SAID = ("datetime", "date", "time", "timedelta", "Timestamp", "Timedelta", "Decimal", "UUID")


def present(value: Any) -> Any:
    """A value, or None for one that is missing."""
    is_missing = isinstance(value, float) and value != value
    return None if is_missing or type(value).__name__ in ("NAType", "NaTType") else value


def legal(text: str) -> str:
    """A text that UTF-8 can hold: halves of characters, such as of an emoji cut in two, escaped."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def column_types(rows: Iterable[Any], of_texts: bool) -> dict[str, str | None]:
    """The types of all columns.

    Args:
        rows (iterable): of the data set; what is not a dict has no columns.
        of_texts (bool): whether all values are texts, as in a CSV file, where numbers are texts of
            digits.

    Returns:
        dict: ``"bool"``, ``"int64"``, ``"float64"`` or ``"string"``, by name; None for a column of
        other values.
    """
    kinds: dict[str, str] = {}
    kind = _kind_of_text if of_texts else kind_of
    for row in rows:
        if isinstance(row, Mapping):
            for name, value in row.items():
                kinds[str(name)] = _joined(kinds.get(str(name), NONE), kind(present(value)))
    types = {NONE: "string", OTHER: None}
    return {name: types.get(type_name, type_name) for name, type_name in kinds.items()}


def own_values(row: Any, types: Mapping[str, str]) -> dict[str, Any]:
    """A row's values of the columns of these types.

    Raises:
        InputError: for one that its column's type cannot hold.
    """
    values = {name: row.get(name) for name in types} if isinstance(row, Mapping) else {}
    return {name: _cast(name, present(value), types[name]) for name, value in values.items()}


def kind_of(value: Any) -> str:
    """The type of column that holds a value; ``NONE`` and ``OTHER`` are explained above."""
    if value is None:
        return NONE
    if isinstance(value, bool) or type(value).__name__ in ("bool_", "bool"):
        return "bool"
    index = as_index(value)
    if index is not None:
        return "int64" if -(2**63) <= index < 2**63 else "string"
    if isinstance(value, float) or type(value).__name__.startswith("float"):
        return "float64"
    return "string" if isinstance(value, str) or type(value).__name__ in _SAID else OTHER


def _kind_of_text(value: Any) -> str:
    if not isinstance(value, str):
        return NONE if value is None else OTHER
    if not value:
        return NONE
    if _INTEGER.fullmatch(value):
        return "int64"
    is_number = _NUMBER.fullmatch(value) and not re.match(r"-?0\d", value)
    return "float64" if is_number else "string"


def _joined(a: str, b: str) -> str:
    if a == b or NONE in (a, b):
        return a if b == NONE else b
    if OTHER in (a, b):
        return OTHER
    return "float64" if {a, b} == {"int64", "float64"} else "string"


def _cast(name: str, value: Any, kind: str) -> Any:
    if value is None or (value == "" and kind != "string"):
        return None
    if kind == "string":
        return legal(str(value))
    with suppress(TypeError, ValueError):
        if kind == "float64":
            return float(value)
        if kind == "int64" and (isinstance(value, str) or int(value) == value):
            return int(value)
        if kind == "bool" and kind_of(value) == "bool":
            return bool(value)
    raise InputError(
        f"{name} is {str(value)[:40]!r} (a {type(value).__name__}), and earlier rows hold {kind}; "
        "expected one type in each column."
    )
