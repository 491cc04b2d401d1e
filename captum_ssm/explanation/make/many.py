"""Many inputs, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from captum_ssm.explanation import Example, Explanation
from captum_ssm.explanation.make.front import explain


@dataclass(frozen=True)
class Row:
    """One input, and what is asked of it."""

    inputs: Any
    target: Any = None
    against: Any = None
    span: Any = None
    units: Any = None
    messages: bool = False


class Explainer:
    """Explains rows by the options of ``explain``."""

    def __init__(self, model: Any, tokenizer: Any = None, **options: Any) -> None:
        self.model, self.tokenizer, self.options = model, tokenizer, options
        self._last: Explanation | None = None

    def __call__(self, rows: Sequence[Row]) -> list[Example | Exception]:
        return [self._one(row) for row in rows]

    def _one(self, row: Row) -> Example | Exception:
        asked = {"target": row.target, "against": row.against, "span": row.span}
        asked |= {} if row.units is None else {"units": row.units}
        asked |= {"messages": row.inputs} if row.messages else {"inputs": row.inputs}
        try:
            self._last = explain(self.model, self.tokenizer, **self.options, **asked)
        except Exception as error:
            return error
        return self._last.examples[0]

    def explanation(self, examples: Sequence[Example]) -> Explanation:
        if self._last is None:
            inputs = "a" if self.tokenizer is not None else [1]
            self._last = explain(self.model, self.tokenizer, inputs)
        return replace(self._last, examples=tuple(examples))
