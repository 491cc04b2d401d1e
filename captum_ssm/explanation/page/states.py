"""The page of a state report, in the style of the report on a corpus."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captum_ssm.explanation.file import page_or_file
from captum_ssm.explanation.page.data import rounded
from captum_ssm.explanation.page.html import states_html

if TYPE_CHECKING:
    from captum_ssm.interventions import StateReport

FORMAT = "captum_ssm.states/1"
MOST_TOKENS = 20  # of a layer
MEASURES = ("used", "change", "share", "norm")

Row = Mapping[str, Any]


def states_page(
    report: StateReport, path: str | Path | None = None, *, title: str = "What states keep"
) -> str | None:
    """The page of :func:`captum_ssm.interventions.state_report`: one file that needs no network.

    It has the half-lives of each layer's channels or heads, how full the state is along the text,
    and the tokens with the largest shares of it: at most 20 per layer; the report's tables have
    all.

    Args:
        report (StateReport): of a model on many inputs.
        path (str or Path, optional): where the page is written. Default: None
        title (str, optional): a heading. Default: ``"What states keep"``

    Returns:
        str: the page; None if it is written to ``path``.

    Raises:
        OSError: where it cannot be written, such as in a folder that does not exist.

    Examples::

        >>> report = captum_ssm.interventions.state_report(model, [input_ids], samples=4)
        >>> page = captum_ssm.explanation.page.states_page(report)
    """
    return page_or_file(lambda: states_html(states_data(report, title)), path)


def states_data(report: StateReport, title: str) -> dict[str, Any]:
    """What the script of the page reads: the format ``captum_ssm.states/1``."""
    by_layer: dict[str, list[list[Row]]] = defaultdict(lambda: [[], [], []])
    for k, table in enumerate((report.half_lives, report.positions, report.sinks)):
        for row in table:
            by_layer[row["layer"]][k].append(row)
    layers = [_layer(name, *tables) for name, tables in by_layer.items()]
    return {"format": FORMAT, "title": title, "inputs": report.inputs, "layers": layers}


def _layer(
    name: str, lives: Sequence[Row], positions: Sequence[Row], sinks: Sequence[Row]
) -> dict[str, Any]:
    outlives = [row["outlives"] for row in lives if not math.isnan(row["outlives"])]
    return {
        "name": name,
        "lives": [{"head": row["head"], "life": rounded(row["half_life"], 4)} for row in lives],
        "outlives": rounded(sum(outlives) / max(len(outlives), 1), 4),
        "lines": {measure: _line(positions, measure) for measure in MEASURES},
        "sinks": _tokens(sinks),
    }


def _line(positions: Sequence[Row], measure: str) -> list[list[Any]]:
    # Means over heads, by the first position of each range.
    means: dict[int, list[float]] = defaultdict(list)
    for row in positions:
        if row["measure"] == measure and math.isfinite(row["mean"]):
            means[row["start"]].append(row["mean"])
    return [[start, rounded(sum(v) / len(v), 4)] for start, v in sorted(means.items())]


def _tokens(sinks: Sequence[Row]) -> list[dict[str, Any]]:
    # Each token at the head of its largest share; those without an interval come last.
    largest: dict[Any, Row] = {}
    for row in sinks:
        layer = largest.get(row["token"])
        if layer is None or row["share"] > layer["share"]:
            largest[row["token"]] = row
    ranked = sorted(largest.values(), key=_rank)
    return [
        {
            "text": str(row["token"] if row["text"] is None else row["text"]),
            "head": row["head"],
            "inputs": row["inputs"],
            **{name: rounded(row[name], 4) for name in ("share", "low", "high")},
        }
        for row in ranked[:MOST_TOKENS]
    ]


def _rank(row: Row) -> tuple[bool, float]:
    # By the lower end of the interval, so that a rare token is not first by luck.
    is_rare = math.isnan(row["low"])
    return is_rare, -row["share"] if is_rare else -row["low"]
