"""An explanation on the terminal: the text in color where it can, else a table."""

from __future__ import annotations

import numpy as np
from rich.console import Console
from rich.text import Text

from captum_ssm.explanation import Answer, Example, Explanation, Output
from captum_ssm.explanation.units import bounds_of, texts_of
from captum_ssm.utils.colors import AGAINST, FOR, INK, PAPER

TOP = 10
# Of the strongest relevance: what is less has no color, and what is more is read in white.
FAINTEST, DARK = 1 / 50, 0.92


def show(explanation: Explanation, units: str = "token") -> None:
    """Print what is explained first at each output, and contrasts, by each method."""
    console = Console(highlight=False, soft_wrap=True)
    colored = console.color_system is not None and not console.no_color
    for one in explanation:
        (example,) = one.examples
        if len(explanation) > 1:
            print(f"\n{visible(example.name)}")
        for method in one.methods:
            if len(one.methods) > 1:
                print(f"\n{method.name}")
            for k, output in enumerate(example.outputs):
                for against in (None, *(output.answers[c.against] for c in output.contrasts)):
                    print(f"\n{_heading(output, against)}")
                    other = None if against is None else against.id
                    row = one.relevance(method.name, k, against=other, units=units)
                    if example.image is not None:
                        _print_patches(row, example.grid)
                    elif colored:
                        console.print(_in_color(row, texts_of(example, units)))
                    else:
                        _print_table(row, example, units, output.position)


def show_summary(explanation: Explanation) -> None:
    """Print one line per example, and the tokens with the largest share over all."""
    for example in explanation.examples:
        answers = (output.answers[output.chosen] for output in example.outputs)
        told = " ".join(f"{visible(one.text)!r} {one.probability:.4f}" for one in answers)
        print(f"{visible(example.name)}  ->  {told}")
    summary = explanation.mean()
    for method in explanation.methods:
        print(f"\n{method.name}: mean share over {len(explanation)} texts")
        for entry in summary.top(method.name, TOP):
            bar = "#" * round(24 * entry.share)
            name = visible(str(entry.key))
            print(
                f"{entry.count:6d}  {name:16s} {entry.relevance:+11.4g} {entry.share:7.1%}  {bar}"
            )


def visible(text: str) -> str:
    """A token in one line, without what a terminal would obey."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return shown.strip() or shown.replace(" ", "\N{OPEN BOX}")


def _heading(output: Output, against: Answer | None) -> str:
    chosen, best = output.answers[output.chosen], min(output.answers, key=lambda one: one.rank)
    if against is not None:
        return f"{visible(chosen.text)!r}, not {visible(against.text)!r}"
    return (
        f"{visible(chosen.text)!r}, probability {chosen.probability:.4f}; the model predicts "
        f"{visible(best.text)!r}"
    )


def _print_table(row: np.ndarray, example: Example, units: str, position: int | None) -> None:
    texts, largest = texts_of(example, units), float(abs(row).max()) or 1.0
    # The answer and what comes after it is not read.
    places = [
        first for first, _ in bounds_of(example, units) if position is None or first <= position
    ]
    for i in sorted(np.argsort(-abs(row[: len(places)]), kind="stable")[:TOP].tolist()):
        bar = ("#" if row[i] >= 0 else "-") * round(24 * abs(float(row[i])) / largest)
        print(f"{places[i]:6d}  {visible(texts[i]):16s} {float(row[i]):+11.4g}  {bar}")


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


def _in_color(row: np.ndarray, texts: list[str]) -> Text:
    largest = float(abs(row).max()) or 1.0
    found = Text()
    for value, text in zip(row.tolist(), texts, strict=True):
        lead = text[: len(text) - len(text.lstrip())]
        shown = "\n".join(visible(line) if line else line for line in text.lstrip().split("\n"))
        found.append(lead if lead.isprintable() or set(lead) <= {" ", "\n"} else " ")
        share = value / largest
        ink = PAPER if abs(share) > DARK else INK
        found.append(shown, style=f"{ink} on {_color(share)}" if abs(share) > FAINTEST else "")
    strongest = int(abs(row).argmax())
    found.append("\n")
    for ramp, name in ((AGAINST[:0:-1], " against "), (FOR, " for")):
        for color in ramp:
            found.append("  ", style=f"on {color}")
        found.append(name)
    found.append(f"; strongest: {visible(texts[strongest])!r} {row[strongest]:+.4g}")
    return found


def _color(share: float) -> str:
    # Between two colors of a ramp.
    ramp = FOR if share >= 0 else AGAINST
    step = abs(share) * (len(ramp) - 1)
    k = min(int(step), len(ramp) - 2)
    pairs = zip(*(bytes.fromhex(one[1:]) for one in ramp[k : k + 2]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (step - k)):02x}" for a, b in pairs)
