"""What many explanations have in common."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from captum_ssm.explanation.parts import Example, Method
from captum_ssm.explanation.tables import require_texts, shares
from captum_ssm.utils.tables import html_table

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Mean:
    """Mean relevance of tokens that have something in common.

    Args:
        method (str): the method's name.
        key (str or int): what they have in common: their text, their position, or their distance
            from the token at which the answer is read.
        count (int): how many there are.
        relevance (float): the mean of their relevance.
        share (float): the mean of their part of a row's total magnitude.

    Examples::

        >>> summary = explain(model, tokenizer, "w3 w4 w3 w5").mean()
        >>> [entry.count for entry in summary.by_token if entry.key == "w3"]
        [2]
    """

    method: str
    key: str | int
    count: int
    relevance: float
    share: float


@dataclass(frozen=True)
class Summary:
    """Mean relevance over all examples and outputs of an explanation, by method.

    Args:
        by_token (tuple of Mean): by the token's text, the largest share first; tokens that were
            read once, whose share is not a mean, come last.
        by_position (tuple of Mean): by the token's position in its text.
        by_distance (tuple of Mean): by the number of tokens between it and the token at which the
            answer is read.

    Examples::

        >>> summary = explain(model, tokenizer, ["w3 w4 w5", "w4 w6"]).mean()
        >>> len(summary.top(count=3))
        3
        >>> sorted({entry.key for entry in summary.by_token})
        ['w3', 'w4', 'w5', 'w6']
    """

    by_token: tuple[Mean, ...]
    by_position: tuple[Mean, ...]
    by_distance: tuple[Mean, ...]

    def top(self, method: str | None = None, count: int = 10) -> tuple[Mean, ...]:
        """The tokens with the largest mean share, those that were read once last.

        Args:
            method (str, optional): its name; None for the first. Default: None
            count (int, optional): how many. Default: 10
        """
        name = self.by_position[0].method if method is None else method
        return tuple(entry for entry in self.by_token if entry.method == name)[:count]

    def _repr_html_(self) -> str:
        # A notebook shows it for the value of a cell.
        methods = dict.fromkeys(entry.method for entry in self.by_token)
        return "".join(
            html_table(
                ("token", "count", "mean share", "mean relevance"),
                [
                    (
                        str(entry.key),
                        str(entry.count),
                        f"{entry.share:.1%}",
                        f"{entry.relevance:+.3g}",
                    )
                    for entry in self.top(method)
                ],
                f"Tokens with the largest mean share, {method}",
            )
            for method in methods
        )

    def to_pandas(self) -> pandas.DataFrame:
        """A table with one row per entry: ``by``, ``method``, ``key``, and its numbers."""
        import pandas

        return pandas.DataFrame(
            [
                {"by": by, **vars(entry)}
                for by in ("token", "position", "distance")
                for entry in getattr(self, f"by_{by}")
            ]
        )


def summary(methods: Sequence[Method], examples: Sequence[Example]) -> Summary:
    """The summary of :meth:`Explanation.mean`."""
    require_texts(examples, "the mean")
    tables: dict[str, list[Mean]] = {"token": [], "position": [], "distance": []}
    for method in methods:
        groups: dict[str, dict[Hashable, list[tuple[float, float]]]] = {
            name: defaultdict(list) for name in tables
        }
        for keys, numbers in _entries(examples, method.name):
            for name, key in zip(tables, keys, strict=True):
                groups[name][key].append(numbers)
        for name, group in groups.items():
            means = [_mean(method.name, key, numbers) for key, numbers in sorted(group.items())]
            if name == "token":
                means.sort(key=lambda one: (one.count == 1, -one.share))
            tables[name] += means
    return Summary(*(tuple(entries) for entries in tables.values()))


def _entries(
    examples: Sequence[Example], method: str
) -> Iterator[tuple[tuple[str, int, int], tuple[float, float]]]:
    # What is explained first at each output, token by token: (text, position, distance), numbers.
    for example in examples:
        for output in example.outputs:
            row = output.answers[output.chosen].row
            assert row is not None
            values = example.relevance[method][row]
            last = output.last_of(len(values))
            values = values[: last + 1]
            pairs = zip(values.tolist(), shares(values).tolist(), strict=True)
            for j, pair in enumerate(pairs):
                yield (example.tokens[j].text.strip(), j, last - j), pair


def _mean(method: str, key: Hashable, numbers: list[tuple[float, float]]) -> Mean:
    relevance, share = np.mean(numbers, axis=0)
    return Mean(method, key, len(numbers), float(relevance), float(share))  # type: ignore[arg-type]
