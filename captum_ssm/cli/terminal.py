"""An explanation on the terminal: the text in color where it can, else a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from captum_ssm.explanation import Explanation
from captum_ssm.explanation.lines import ShownUnits, headings, visible
from captum_ssm.utils.colors import AGAINST, FOR, INK, PAPER

TOP = 10
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
            for output in example.outputs:
                for heading in headings(example, method.name, output):
                    print(f"\n{heading.text}")
                    shown = ShownUnits(heading.row, example, output, units)
                    if colored and example.tokens and not example.pictures:
                        console.print(_in_color(shown))
                    else:
                        print("\n".join(shown.table(TOP)))
                    if shown.without:
                        print(shown.without)
        if example.validation is not None:
            print(f"\n{example.validation}")


def show_summary(explanation: Explanation, lines: Sequence[int]) -> None:
    """Print one line per example, and the tokens with the largest share over all."""
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


def _in_color(shown: ShownUnits) -> Text:
    styled, colored = Text(), set(shown.by_size)
    for i, text in enumerate(shown.texts):
        lead = text[: len(text) - len(text.lstrip())]
        seen = "\n".join(visible(line) if line else line for line in text.lstrip().split("\n"))
        styled.append(lead if lead.isprintable() or set(lead) <= {" ", "\n"} else " ")
        share = shown.share(i) if i in colored else 0.0
        ink = PAPER if abs(share) > DARK else INK
        styled.append(seen, style=f"{ink} on {_color(share)}" if abs(share) > FAINTEST else "")
    styled.append("\n")
    for ramp, name in ((AGAINST[:0:-1], " opposes "), (FOR, " supports")):
        for color in ramp:
            styled.append("  ", style=f"on {color}")
        styled.append(name)
    if shown.by_size:
        strongest = shown.by_size[0]
        value = float(shown.row[strongest])
        styled.append(f"; strongest: {visible(shown.texts[strongest])!r} {value:+.4g}")
    return styled


def _color(share: float) -> str:
    # Between two colors of a ramp.
    ramp = FOR if share >= 0 else AGAINST
    step = abs(share) * (len(ramp) - 1)
    k = min(int(step), len(ramp) - 2)
    pairs = zip(*(bytes.fromhex(color[1:]) for color in ramp[k : k + 2]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * (step - k)):02x}" for a, b in pairs)
