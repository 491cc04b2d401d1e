"""An explanation on the terminal: the text in color where it can, else a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import shorten

import numpy as np
from rich.console import Console
from rich.text import Text

from captum_ssm.explanation import Answer, Example, Explanation, Output
from captum_ssm.explanation.parts import END, LABEL, PART, START
from captum_ssm.explanation.read import printable
from captum_ssm.explanation.units import bounds_of, read_apart, texts_of
from captum_ssm.utils.colors import AGAINST, FOR, INK, PAPER

TOP, WIDTH = 10, 40
# Shares of the strongest relevance: less has no color, and more is written in white.
FAINTEST, DARK = 1 / 50, 0.92


def show(explanation: Explanation, units: str = "token") -> None:
    """Print what is explained first at each output, and contrasts, by each method."""
    console = Console(highlight=False, soft_wrap=True)
    colored = console.color_system is not None and not console.no_color
    for single in explanation:
        (example,) = single.examples
        if len(explanation) > 1:
            print(f"\n{visible(example.name)}")
        for method in single.methods:
            if len(single.methods) > 1:
                print(f"\n{method.name}")
            for k, output in enumerate(example.outputs):
                for heading, row in _rows(single, method.name, k, units):
                    print(f"\n{heading}")
                    if example.image is not None:
                        _print_patches(row, example.grid)
                        continue
                    parts = _Parts(row, example, units, output)
                    if colored and not example.pictures:
                        console.print(_in_color(parts))
                    else:
                        _print_table(parts)
                    if parts.without:
                        print(parts.without)
        if example.validation is not None:
            print(f"\n{example.validation}")


def show_summary(explanation: Explanation, lines: Sequence[int]) -> None:
    """Print one line per example, and the tokens with the largest share over all.

    Args:
        explanation (Explanation): of several texts.
        lines (sequence of int): where each text is in its file.
    """
    for line, example in zip(lines, explanation.examples, strict=True):
        answers = (output.answers[output.chosen] for output in example.outputs)
        told = " ".join(
            f"{visible(answer.text)!r} "
            f"{answer.logit if answer.probability is None else answer.probability:.4f}"
            for answer in answers
        )
        check = example.validation
        won = f"  ({check.winner} wins removal)" if check and check.is_telling else ""
        print(f"line {line}: {visible(example.name)}  ->  {told}{won}")
    summary = explanation.mean()
    for method in explanation.methods:
        count = sum(entry.method == method.name for entry in summary.by_token)
        which = f"the {TOP} of {count}" if count > TOP else f"all {count}"
        print(f"\n{method.name}: {which} tokens, by their mean share in {len(explanation)} texts")
        for entry in summary.top(method.name, TOP):
            bar = "#" * round(24 * entry.share)
            name = visible(str(entry.key))
            print(
                f"{entry.count:6d}  {name:16s} {entry.relevance:+11.4g} {entry.share:7.1%}  {bar}"
            )


def visible(text: str) -> str:
    """A token in one line, without what a terminal would obey."""
    shown = printable(text)
    return shown.strip() or shown.replace(" ", "\N{OPEN BOX}")


def _rows(
    explanation: Explanation, method: str, index: int, units: str
) -> Iterator[tuple[str, np.ndarray]]:
    # Each row of an output with what it is: the chosen answer's, contrasts, and hops.
    (example,) = explanation.examples
    output = example.outputs[index]
    yield _heading(example, output, None), explanation.relevance(method, index, units=units)
    for contrast in output.contrasts:
        against = output.answers[contrast.against]
        row = explanation.relevance(method, index, against=against.id, units=units)
        yield _heading(example, output, against), row
    for hop in range(1, len(output.hops) + 1):
        before = np.abs(explanation.relevance(method, index, hop=hop - 1))
        share = before[example.prompt :].sum() / (before.sum() or 1.0)
        what = f"hop {hop}: {share:.0%} of the relevance above is on the model's own words, which"
        row = explanation.relevance(method, index, hop=hop, units=units)
        yield f"{what} rest on", row


def _heading(example: Example, output: Output, against: Answer | None) -> str:
    chosen, best = output.answers[output.chosen], min(output.answers, key=lambda one: one.rank)
    about = {START: "start ", END: "end "}.get(output.role, "")
    if output.role == LABEL and output.position is not None:
        about = f"{visible(example.tokens[output.position].text)!r} is "
    if against is not None:
        return f"{about}{visible(chosen.text)!r}, not {visible(against.text)!r}"
    likely = f"logit {chosen.logit:.4g}"
    if chosen.probability is not None:
        likely = f"probability {chosen.probability:.4f}"
    if output.role == PART:
        return f"{visible(chosen.text)!r}, {likely}; explained together"
    return f"{about}{visible(chosen.text)!r}, {likely}; the model predicts {visible(best.text)!r}"


class _Parts:
    # The units of a text and their relevance. As on the page, those that are shown were read by the
    # model, and the one at which the answer is read is told apart.
    def __init__(self, row: np.ndarray, example: Example, units: str, output: Output) -> None:
        position, at = output.position, read_apart(example, output)
        self.row, self.texts, self.units = row, texts_of(example, units), units
        bounds = bounds_of(example, units)
        self.first = [first for first, _ in bounds]
        inside = [i for i, (a, b) in enumerate(bounds) if at is not None and a <= at < b]
        is_alone = [i for i in inside if position is not None or bounds[i][1] - bounds[i][0] == 1]
        self.own = is_alone[0] if is_alone else None
        is_read = [position is None or first <= position for first in self.first]
        shown = [i for i, read in enumerate(is_read) if (read or row[i]) and i != self.own]
        self.by_size = sorted(shown, key=lambda i: -abs(row[i]))
        self.largest = abs(float(row[self.by_size[0]])) if shown else 0.0

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


def _print_table(parts: _Parts) -> None:
    rows = sorted(parts.by_size[:TOP])
    texts = [shorten(visible(parts.texts[i]), WIDTH, placeholder=" ...") for i in rows]
    width = max(16, *map(len, texts)) if texts else 0
    for i, text in zip(rows, texts, strict=True):
        share = parts.share(i)
        bar = ("#" if share >= 0 else "-") * round(24 * abs(share))
        print(f"{parts.first[i]:6d}  {text:{width}s} {float(parts.row[i]):+11.4g}  {bar}")
    if len(parts.by_size) > TOP:
        print(f"the {TOP} largest of {len(parts.by_size)} {parts.units}s")


def _print_patches(row: np.ndarray, grid: tuple[int, ...] | None) -> None:
    rows, columns = grid or (8, 8)
    y = np.arange(row.shape[0]) * rows // row.shape[0]
    x = np.arange(row.shape[1]) * columns // row.shape[1]
    patches = np.zeros((rows, columns))
    np.add.at(patches, (y[:, None], x[None, :]), row)
    largest = abs(patches).max() or 1.0
    for i in np.argsort(-abs(patches), axis=None, kind="stable")[:TOP].tolist():
        value = patches.flat[i]
        bar = ("#" if value >= 0 else "-") * round(24 * abs(value) / largest)
        print(f"  row {i // columns:3d}, column {i % columns:3d} {value:+11.4g}  {bar}")
    if patches.size > TOP:
        print(f"the {TOP} largest of {patches.size} patches")


def _in_color(parts: _Parts) -> Text:
    styled, colored = Text(), set(parts.by_size)
    for i, text in enumerate(parts.texts):
        lead = text[: len(text) - len(text.lstrip())]
        shown = "\n".join(visible(line) if line else line for line in text.lstrip().split("\n"))
        styled.append(lead if lead.isprintable() or set(lead) <= {" ", "\n"} else " ")
        share = parts.share(i) if i in colored else 0.0
        ink = PAPER if abs(share) > DARK else INK
        styled.append(shown, style=f"{ink} on {_color(share)}" if abs(share) > FAINTEST else "")
    styled.append("\n")
    for ramp, name in ((AGAINST[:0:-1], " opposes "), (FOR, " supports")):
        for color in ramp:
            styled.append("  ", style=f"on {color}")
        styled.append(name)
    if parts.by_size:
        strongest = parts.by_size[0]
        value = float(parts.row[strongest])
        styled.append(f"; strongest: {visible(parts.texts[strongest])!r} {value:+.4g}")
    return styled


def _color(share: float) -> str:
    # Between two colors of a ramp.
    ramp = FOR if share >= 0 else AGAINST
    step = abs(share) * (len(ramp) - 1)
    k = min(int(step), len(ramp) - 2)
    pairs = zip(*(bytes.fromhex(color[1:]) for color in ramp[k : k + 2]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (step - k)):02x}" for a, b in pairs)
