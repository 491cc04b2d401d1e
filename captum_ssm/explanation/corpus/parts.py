"""What a report is made of: plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from captum_ssm.errors import renamed
from captum_ssm.explanation.corpus.changes import Change
from captum_ssm.explanation.corpus.readings import ExampleFacts
from captum_ssm.explanation.corpus.shares import Share
from captum_ssm.explanation.corpus.slices import Slice
from captum_ssm.explanation.explanation import Explanation

ORDERED = ("tenth", "start", "end", "distance", "layer")  # kinds whose keys have an order


@dataclass(frozen=True)
class ReportExample(ExampleFacts):
    """One example of a report, in a line.

    Args:
        index (int): its row of the data.
        name, text (str): shortened; the text's end is kept.
        target, prediction (str): what is explained, and the likeliest answer.
        right (bool or None): whether they are the same; None where no target was given.
        probability (float or None): of the target.
        length (int): how many tokens are read.
        own (float): the reading token's share, which all other numbers leave out.
        group (str or None): the name of the slice of examples that look alike.
        distance (float): from the mean profile of the group, 0 to 1: the larger, the less typical.
        point (tuple of float): in the plane in which examples differ most.
        columns (dict): the user's own values.
        moved (float or None): the part of the relevance that lies elsewhere in the other run.
        flipped (bool): whether the other run predicts something else.

    Examples::

        >>> report = summarize(explain(model, tokenizer, ["w3 w4 w5", "w4 w6"]))
        >>> [(one.index, one.length) for one in report.examples]
        [(0, 3), (1, 2)]
    """

    group: str | None
    distance: float
    point: tuple[float, float]
    columns: Mapping[str, Any] = field(default_factory=dict)
    moved: float | None = None
    flipped: bool = False

    if not TYPE_CHECKING:
        __getattr__ = renamed(place="point")


@dataclass(frozen=True, eq=False)
class ReportData:
    """What a :class:`Report` holds, for the modules that it is built on."""

    title: str
    model: str
    method: str
    units: str
    examples: tuple[ReportExample, ...]
    shares: Mapping[str, tuple[Share, ...]]
    slices: tuple[Slice, ...]
    change: Change | None
    errors: Mapping[int, str]
    shown: Mapping[int, Explanation]
    shown_other: Mapping[int, Explanation]
    notes: tuple[str, ...] = ()

    @property
    def right(self) -> float | None:
        """The part of the examples that is predicted right; None where no target was given."""
        known = [example.right for example in self.examples if example.right is not None]
        return sum(known) / len(known) if known else None

    @property
    def own(self) -> float:
        """The mean share of the token at which the answer is read."""
        return sum(example.own for example in self.examples) / len(self.examples)
