"""What the script of a report's page reads: the format ``captum_ssm.report/1``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from captum_ssm.explanation.corpus.parts import ORDERED, ReportData
from captum_ssm.explanation.corpus.shares import Difference, Share
from captum_ssm.explanation.corpus.slices import Slice
from captum_ssm.explanation.page.data import page_data, rounded
from captum_ssm.explanation.parts import ExplanationData

FORMAT = "captum_ssm.report/1"
MOST_TEXTS = 800_000  # characters of the examples that are shown as texts
MOST_LISTED = 4000  # examples; of more, evenly spaced ones
MOST_SLICES = 40
MOST_KEYS = {True: 30, False: 12}  # of all examples, and of a slice


def report_data(report: ReportData) -> dict[str, Any]:
    """The report as JSON, of bounded size however large the corpus is."""
    shown, other = _texts(report)
    step = -(-len(report.examples) // MOST_LISTED)
    listed = [
        example
        for k, example in enumerate(report.examples)
        if k % step == 0 or example.index in shown[0]
    ]
    names = list(dict.fromkeys(name for example in listed for name in example.columns))
    return {
        "format": FORMAT,
        "title": report.title,
        "model": report.model,
        "method": report.method,
        "units": report.units,
        "count": len(report.examples),
        "right": rounded(report.right, 4),
        "own": rounded(report.own, 4),
        "errors": [[i, error] for i, error in list(report.errors.items())[:20]],
        "failed": len(report.errors),
        "notes": [*report.notes, *_left_out(report, len(listed), len(shown[0]))],
        "shares": _shares(report.shares, True),
        "slices": [_slice(part) for part in report.slices[:MOST_SLICES]],
        "change": _change(report),
        "listed": {
            "index": [example.index for example in listed],
            "text": [example.text for example in listed],
            "target": [example.target for example in listed],
            "prediction": [None if example.right else example.prediction for example in listed],
            "right": [example.right for example in listed],
            "p": [rounded(example.probability, 3) for example in listed],
            "length": [example.length for example in listed],
            "group": [example.group for example in listed],
            "distance": [rounded(example.distance, 3) for example in listed],
            "point": [[rounded(v, 3) for v in example.point] for example in listed],
            "moved": [rounded(example.moved, 3) for example in listed],
            "flipped": [int(example.flipped) for example in listed],
            **{
                f"column {name}": [_plain(example.columns[name]) for example in listed]
                for name in names
            },
        },
        "columns": names,
        "shown": shown[1],
        "rows": shown[0],
        "other": other[1],
        "otherRows": other[0],
    }


def _left_out(report: ReportData, listed: int, shown: int) -> list[str]:
    # What the page leaves out, so that it stays small.
    count, told = len(report.examples), []
    if listed < count:
        told.append(
            f"The list and the picture of all examples have {listed:,} of {count:,}, evenly "
            "spaced; shares, slices and counts are of all."
        )
    if len(report.slices) > MOST_SLICES:
        told.append(
            f"The page has the first {MOST_SLICES} of {len(report.slices)} slices; "
            "report.slices has all."
        )
    if shown < count:
        told.append(
            f"Examples that are here with their tokens, and open as pages of their own: {shown:,}, "
            "the most and the least typical, those that changed, and wrong ones."
        )
    return told


def _texts(report: ReportData) -> tuple[tuple[list[int], Any], tuple[list[int], Any]]:
    # The most wanted examples, as many as there is room for; of two runs both.
    rows: list[int] = []
    size = 0
    for row, explanation in report.shown.items():
        both = [explanation, *([report.shown_other[row]] if row in report.shown_other else [])]
        # What all examples share, such as settings with the targets of all, is there once.
        size += sum(len(json.dumps(page_data(_light(each))["examples"])) for each in both)
        if rows and size > MOST_TEXTS:
            break
        rows.append(row)
    others = [row for row in rows if row in report.shown_other]
    pairs = (report.shown, rows), (report.shown_other, others)
    shown, other = ((kept, _joined(report.title, held, kept)) for held, kept in pairs)
    return shown, other


def _joined(
    title: str, explanations: Mapping[int, ExplanationData], rows: Sequence[int]
) -> dict[str, Any] | None:
    # Explanations of a data set each have the title of their own answer.
    if not rows:
        return None
    light = [_light(explanations[row]) for row in rows]
    examples = tuple(explanation.examples[0] for explanation in light)
    return page_data(replace(light[0], title=title, examples=examples))


def _light(explanation: ExplanationData) -> ExplanationData:
    (example,) = explanation.examples
    lens = tuple(replace(output, lens=()) for output in example.outputs)
    return replace(explanation, examples=(replace(example, maps=(), circuits=(), outputs=lens),))


def _shares(shares: Mapping[str, tuple[Share, ...]], is_all: bool) -> dict[str, list[Any]]:
    by_kind = {}
    for kind, entries in shares.items():
        most = len(entries) if kind in ORDERED else MOST_KEYS[is_all]
        by_kind[kind] = [
            [
                entry.key,
                entry.examples,
                *(
                    rounded(v, 3)
                    for v in (entry.share, entry.low, entry.high, entry.total, entry.leaning)
                ),
            ]
            for entry in entries[:most]
        ]
    return by_kind


def _slice(part: Slice) -> dict[str, Any]:
    return {
        "by": part.by,
        "name": part.name,
        "count": len(part.examples),
        "right": rounded(part.right, 4),
        "p": rounded(part.probability, 4),
        "shares": _shares(part.shares, False),
        "apart": [_difference(difference) for difference in part.apart[:8]],
        "typical": list(part.typical),
        "untypical": list(part.untypical),
    }


def _difference(difference: Difference) -> list[Any]:
    numbers = (difference.here, difference.elsewhere, difference.low, difference.high)
    return [difference.kind, difference.key, *(rounded(value, 3) for value in numbers)]


def _change(report: ReportData) -> dict[str, Any] | None:
    change = report.change
    if change is None:
        return None
    return {
        "other": change.other,
        "moved": [rounded(v, 4) for v in (change.moved.value, change.moved.low, change.moved.high)],
        "flipped": len(change.flipped),
        "unpaired": change.unpaired,
        "shares": [
            _difference(difference) for difference in change.shares.get(report.units, ())[:20]
        ],
    }


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, (int, str)) else str(value)
