"""What the model reads in a row of a data set, and what is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from os import PathLike
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from captum_ssm.errors import InputError, brief
from captum_ssm.explanation.make.dataset.own import present
from captum_ssm.explanation.make.inputs.pictures import is_array
from captum_ssm.explanation.make.many import InputRow
from captum_ssm.utils.integers import as_index
from captum_ssm.utils.suggestions import did_you_mean

# The columns in which inputs are looked for, first ones first, by what they hold.
PAIRS = (("question", "context"), ("text", "text_pair"), ("input_ids", "attention_mask"))
INPUTS = {
    "messages": ("messages", "conversation", "conversations"),
    "text": ("text", "prompt", "question", "sentence", "document", "content", "input"),
    "input_ids": ("input_ids", "ids"),
    "image": ("image", "img", "video", "pixel_values"),
    "series": ("series", "values"),
}
ASKED = ("target", "against", "span", "units")
ROLES = (*INPUTS, "question", "context", "text_pair", "attention_mask", *ASKED)


class RowReader(Protocol):
    """What makes inputs of the rows of a data set."""

    def row(self, entry: Any) -> InputRow:
        """What is explained of a row."""

    def keeps(self, column: str) -> bool:
        """Whether a column is kept with the explanation."""


@dataclass(frozen=True)
class Columns:
    """Which column of a data set is what.

    Args:
        inputs (dict): the columns that the model reads, by their role; empty where a row is itself
            what the model reads.
        asked (dict): the columns of what is asked, by role.
        shared (dict): what is asked of every row that does not ask for itself.
    """

    inputs: Mapping[str, str]
    asked: Mapping[str, str]
    shared: Mapping[str, Any]

    @classmethod
    def find(
        cls, names: Sequence[str] | None, roles: Mapping[str, str], shared: Mapping[str, Any]
    ) -> Columns:
        """The columns of a data set of these names; ``names`` is None where rows have none.

        Raises:
            InputError: for a role or a column that there is not, and where no column holds inputs.
        """
        _check(names, roles)
        if names is None:
            return cls({}, {}, shared)
        asked = {role: role for role in ASKED if role in names}
        asked |= {role: column for role, column in roles.items() if role in ASKED}
        inputs = {role: column for role, column in roles.items() if role not in ASKED}
        return cls(inputs or _inputs(names), asked, shared)

    def row(self, entry: Any) -> InputRow:
        """What is explained of a row.

        Raises:
            InputError: for an input that is empty, missing or not finite.
            TypeError: for one of another type.
        """
        if not self.inputs:
            return _row_of(entry, dict(self.shared))
        if not isinstance(entry, Mapping):
            raise TypeError(f"the row is a {type(entry).__name__}; expected one with columns.")
        asked = {role: present(entry.get(column)) for role, column in self.asked.items()}
        asked = {**self.shared, **{k: value for k, value in asked.items() if value is not None}}
        if isinstance(asked.get("span"), list):
            asked["span"] = tuple(asked["span"])
        values = {
            role: _READ.get(role, _text)(_value(entry, column), column)
            for role, column in self.inputs.items()
        }
        if "messages" in values:
            return InputRow(values["messages"], **asked, messages=True)
        if "attention_mask" in values:
            pairs = zip(values["input_ids"], values["attention_mask"], strict=True)
            return InputRow([token for token, mark in pairs if mark], **asked)
        return InputRow(values if len(values) > 1 else next(iter(values.values())), **asked)

    def keeps(self, column: str) -> bool:
        """Whether a column is kept with the explanation: all but what the model reads."""
        return column not in self.inputs.values()


def _check(names: Sequence[str] | None, columns: Mapping[str, str]) -> None:
    if columns and names is None:
        raise InputError(
            f"columns is {dict(columns)!r}, and the rows of the data set are inputs without "
            "columns; leave it out."
        )
    for role, column in columns.items():
        if role not in ROLES:
            raise InputError(
                f"columns names {role!r}; expected {', '.join(ROLES)}, each with the name of a "
                f"column.{did_you_mean(role, ROLES)}"
            )
        if column not in (names or ()):
            raise InputError(
                f"columns says that {role} is {column!r}; the data set has the columns "
                f"{', '.join(names or ())}.{did_you_mean(column, names or ())}"
            )


def _inputs(names: Sequence[str]) -> dict[str, str]:
    for pair in PAIRS:
        if {*pair} <= {*names}:
            return {role: role for role in pair}
    for role, candidates in INPUTS.items():
        for column in candidates:
            if column in names:
                return {role: column}
    if len(names) == 1:
        return {"text": names[0]}
    raise InputError(
        f"the data set has the columns {', '.join(names) or '(none)'}; expected one that is named "
        "text, prompt, messages, image, series or input_ids. Say which one it is: "
        f"columns={{'text': {next(iter(names), 'review')!r}}}."
    )


def _value(row: Mapping[str, Any], column: str) -> Any:
    if column not in row:
        raise InputError(f"the row has no {column!r}; expected it in every row.")
    return row[column]


def _row_of(row: Any, asked: dict[str, Any]) -> InputRow:
    # A row that is itself what the model reads.
    first = row[0] if isinstance(row, (list, tuple)) and row else None
    if isinstance(first, Mapping):
        return InputRow(_conversation(row, "the row"), **asked, messages=True)
    if isinstance(row, tuple) and len(row) == 2 and isinstance(first, str):
        texts = {role: _text(text, role) for role, text in zip(PAIRS[1], row, strict=True)}
        return InputRow(texts, **asked)
    if first is not None and all(as_index(entry) is not None for entry in row):
        return InputRow(_ids(row, "the row"), **asked)
    if isinstance(row, (list, tuple)):
        return InputRow(_series(row, "the row"), **asked)
    is_text = isinstance(row, str) or not (is_array(row) or isinstance(row, PathLike))
    return InputRow(_text(row, "the row") if is_text else _finite(row, "the row"), **asked)


def _text(value: Any, column: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{column} is {_short(value)}; expected a text.")
    if not value.strip():
        raise InputError(f"{column} is {brief(value)}, which is empty; expected a text.")
    return value


def _conversation(value: Any, column: str) -> list[Any]:
    messages = list(value) if isinstance(value, (list, tuple, np.ndarray)) else []
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        raise TypeError(f"{column} is {_short(value)}; expected a list of messages, at least one.")
    return messages


def _ids(value: Any, column: str) -> list[int]:
    ids = [as_index(number) for number in _marks(value, column)]
    known = [token_id for token_id in ids if token_id is not None and 0 <= token_id < 2**31]
    if len(known) < len(ids):
        raise TypeError(f"{column} is {_short(value)}; expected a list of integers from 0 on.")
    return known


def _marks(value: Any, column: str) -> list[Any]:
    marks = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(marks, (list, tuple)) and len(marks) == 1 and isinstance(marks[0], (list, tuple)):
        marks = marks[0]  # a batch of one
    if not isinstance(marks, (list, tuple)) or not marks:
        raise TypeError(f"{column} is {_short(value)}; expected a list of integers.")
    return list(marks)


def _image(value: Any, column: str) -> Any:
    if isinstance(value, Mapping):  # as data sets store a picture: its bytes, or where they are
        value = next((value[key] for key in ("bytes", "path") if value.get(key)), value)
    if isinstance(value, bytes):
        return _decoded(value, column)
    if isinstance(value, (list, tuple)):
        return _series(value, column)
    if is_array(value):
        return _finite(value, column)
    if not isinstance(value, (str, PathLike)):
        raise TypeError(f"{column} is {_short(value)}; expected an image, its path, or an array.")
    return value


def _decoded(value: bytes, column: str) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        return Image.open(BytesIO(value))
    except UnidentifiedImageError as error:
        raise InputError(f"{column} holds bytes that PIL cannot open as an image.") from error


def _series(value: Any, column: str) -> Any:
    if is_array(value):
        return _finite(value, column)
    try:
        array = np.array(value, dtype=np.float32)
    except (TypeError, ValueError):
        raise TypeError(f"{column} is {_short(value)}; expected numbers (T, F).") from None
    if not array.size or not array.ndim:
        raise InputError(f"{column} is {_short(value)}; expected numbers (T, F), at least one.")
    return _finite(torch.from_numpy(array), column)


def _finite(value: Any, column: str) -> Any:
    array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        index = tuple(map(int, np.argwhere(~np.isfinite(array))[0]))
        raise InputError(f"{column} holds {array[index]} at {index}; expected finite numbers.")
    return value


_READ: dict[str, Callable[[Any, str], Any]] = {
    "messages": _conversation,
    "input_ids": _ids,
    "attention_mask": _marks,
    "image": _image,
    "series": _series,
}


def _short(value: Any) -> str:
    text = repr(value)
    kind = type(value).__name__
    return f"{text if len(text) <= 40 else text[:37] + '...'} (a {kind})"
