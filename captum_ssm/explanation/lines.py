"""An explanation as lines of text: what is explained, and the tokens with the most relevance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from textwrap import shorten

import numpy as np

from captum_ssm.explanation.parts import END, LABEL, PART, START, Answer, Example, Method, Output
from captum_ssm.explanation.read import printable
from captum_ssm.explanation.units import bounds_of, read_apart, spans_of, summed, texts_of

WIDTH, BAR = 40, 24
BLOCKS = 8  # along the axes of an image whose patches are not known


@dataclass(frozen=True)
class Heading:
    """A row of relevance, with what it explains in words."""

    text: str
    row: np.ndarray


def headings(example: Example, method: str, output: Output) -> Iterator[Heading]:
    """The rows of an output by a method: the chosen answer's, contrasts, and hops."""
    rows, chosen = example.relevance[method], output.answers[output.chosen]
    if chosen.row is not None:
        yield Heading(_heading(example, output, None), rows[chosen.row])
    for contrast in output.contrasts:
        against = output.answers[contrast.against]
        yield Heading(_heading(example, output, against), rows[contrast.row])
    before = None if chosen.row is None else np.abs(rows[chosen.row])
    for hop, row in enumerate(output.hops, 1):
        assert before is not None
        share = before[example.prompt :].sum() / (before.sum() or 1.0)
        told = f"hop {hop}: {share:.0%} of the relevance above is on the model's own words, which"
        yield Heading(f"{told} rest on", rows[row])
        before = np.abs(rows[row])


def _heading(example: Example, output: Output, against: Answer | None) -> str:
    chosen, best = output.answers[output.chosen], min(output.answers, key=lambda one: one.rank)
    about = {START: "start ", END: "end "}.get(output.role, "")
    if output.role == LABEL and output.position is not None:
        about = f"{visible(example.tokens[output.position].text)!r} is "
    if against is not None:
        return f"{about}{visible(chosen.text)!r}, not {visible(against.text)!r}"
    if chosen.probability is None:
        return f"{about}{visible(chosen.text)!r}, value {chosen.logit:.4g}"
    likely = f"probability {told_probability(chosen.probability)}"
    if output.role == PART:
        return f"{visible(chosen.text)!r}, {likely}; explained together"
    return f"{about}{visible(chosen.text)!r}, {likely}; the model predicts {visible(best.text)!r}"


def told_probability(value: float) -> str:
    """A probability with four decimals, or one too small for these in powers of ten."""
    return f"{value:.4f}" if value >= 5e-5 or value == 0 else f"{value:.0e}"


def visible(text: str) -> str:
    """A token in one line, without what a terminal would obey."""
    shown = printable(text)
    return shown.strip() or shown.replace(" ", "\N{OPEN BOX}")


class ShownUnits:
    """The units of an input and their relevance.

    As on the page, units of a text that are shown were read by the model, and the one at which the
    answer is read is told apart.
    """

    def __init__(self, row: np.ndarray, example: Example, output: Output, units: str) -> None:
        self.kind, self.first = f"{units}s", list[str]()
        self.own: int | None = None
        if not example.tokens:
            self.row, self.texts, self.kind = _places(row, example)
            shown: Sequence[int] = range(len(self.row))
        else:
            self.row, self.texts = summed(row, spans_of(example, units)), texts_of(example, units)
            shown = self._of_text(example, output, units)
        self.by_size = sorted(shown, key=lambda i: -abs(self.row[i]))
        self.largest = abs(float(self.row[self.by_size[0]])) if self.by_size else 0.0

    def _of_text(self, example: Example, output: Output, units: str) -> list[int]:
        position, at = output.position, read_apart(example, output)
        bounds = bounds_of(example, units)
        self.first = [f"{first:6d}" for first, _ in bounds]
        inside = [i for i, (a, b) in enumerate(bounds) if at is not None and a <= at < b]
        is_alone = [i for i in inside if position is not None or bounds[i][1] - bounds[i][0] == 1]
        self.own = is_alone[0] if is_alone else None
        is_read = [position is None or first <= position for first, _ in bounds]
        return [i for i, read in enumerate(is_read) if (read or self.row[i]) and i != self.own]

    def share(self, i: int) -> float:
        """Relevance in parts of the largest that is shown."""
        return float(self.row[i]) / (self.largest or 1.0)

    @property
    def without(self) -> str:
        """What is told apart, in words."""
        if self.own is None:
            return ""
        value, total = float(self.row[self.own]), float(abs(self.row).sum()) or 1.0
        return (
            f"not shown: {visible(self.texts[self.own])!r}, at which the answer is read "
            f"({value:+.4g}, {abs(value) / total:.0%} of all relevance)"
        )

    def table(self, top: int) -> Iterator[str]:
        """The units with the most relevance, a line for each: of a text in its order."""
        rows = self.by_size[:top]
        rows = sorted(rows) if self.first else rows
        texts = [shorten(visible(self.texts[i]), WIDTH, placeholder=" ...") for i in rows]
        width = max(16, *map(len, texts)) if texts else 0
        for i, text in zip(rows, texts, strict=True):
            share = self.share(i)
            bar = ("#" if share >= 0 else "-") * round(BAR * abs(share))
            at = self.first[i] if self.first else ""
            yield f"{at}  {text:{width}s} {float(self.row[i]):+11.4g}  {bar}".rstrip()
        if len(self.by_size) > top:
            yield f"the {top} largest of {len(self.by_size)} {self.kind}"


def _places(row: np.ndarray, example: Example) -> tuple[np.ndarray, list[str], str]:
    # Relevance of the parts of an image, a video, a series or a table, their names, and their kind.
    if example.series is not None:
        names = [visible(name) for name in example.features]
        if row.ndim == 1:
            return row, names, "features"
        steps = [f"{name}, step {step}" for step in range(len(row)) for name in names]
        return row.flatten(), steps, "values"
    grid = example.grid or (BLOCKS,) * row.ndim
    grid = grid if len(grid) == row.ndim else (1,) * (row.ndim - len(grid)) + grid
    patches = np.zeros(grid)
    cells = (np.arange(n) * k // n for n, k in zip(row.shape, grid, strict=True))
    np.add.at(patches, np.ix_(*cells), row)
    axes = ("slice", "row", "column")[-row.ndim :]
    places = np.ndindex(*grid)
    names = [", ".join(f"{a} {i:3d}" for a, i in zip(axes, p, strict=True)) for p in places]
    return patches.flatten(), names, "patches" if example.grid else "blocks"


def in_few_lines(
    examples: Sequence[Example], methods: Sequence[Method], most: int = 3, top: int = 5
) -> Iterator[str]:
    """The first rows of an explanation, each with its parts of the most relevance."""
    rows = [
        (example, method.name, output)
        for example in examples
        for output in example.outputs
        for method in methods
    ]
    for example, method, output in islice(rows, most):
        # As on the page, a contrast comes before the answer by itself.
        told = [*headings(example, method, output)]
        heading = (told[1:] if output.contrasts else told)[0]
        if len(examples) > 1:
            yield shorten(visible(example.name), 2 * WIDTH, placeholder=" ...")
        by = f", by {method}" * (len(methods) > 1)
        shown = ShownUnits(heading.row, example, output, "token")
        yield shorten(heading.text, 2 * WIDTH, placeholder=" ...") + by
        yield from shown.table(top)
        if shown.without:
            yield shown.without
    if len(rows) > most:
        yield f"{len(rows) - most} more: explanation[i].relevance(method, output), or to_html(path)"
