"""The page of a record: one file that needs no network."""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .summary import TRACKS, by_task, entrants, standings

HERE = Path(__file__).resolve().parent
# What each column is, for the page; :mod:`measures` and :mod:`circuits` say how it is computed.
TOLD = {
    "hit": ("hit", "The largest relevance is at the cause."),
    "precision": ("precision", "Average precision of the cause among irrelevant units."),
    "share": ("share", "Share of the positive relevance that is at the cause."),
    "removal": ("removal", "Rank correlation with the exact effect of removing each unit."),
    "interchange": ("interchange", "Rank correlation with the effect of interchanging each unit."),
    "paraphrase": ("paraphrase", "Cosine similarity of maps when irrelevant parts are redrawn."),
    "seeds": ("seeds", "Cosine similarity of maps between models trained by other seeds."),
    "randomized": (
        "randomized ↓",
        "Rank correlation with maps of the model with shuffled weights: lower is better.",
    ),
    "guessing": (
        "guessing ↓",
        "Average precision in a model that guesses: what is above the random map's is not read "
        "off the model.",
    ),
    "faithful": ("faithful", "Answers kept by the first k edges alone, area over log k."),
    "complete": ("complete", "Answers gone without the first k edges, area over log k."),
    "gap": ("gap ↓", "Distance to the whole model's score with the first k edges alone."),
}


def summary(record: dict[str, Any], track: str) -> dict[str, Any]:
    """What the page shows of a track: standings by measure, and means by task."""
    chance, measures = TRACKS[track]
    found = {measure: standings(record, measure, track) for measure in measures}
    return {
        "chance": chance,
        "methods": entrants(record, track),
        "columns": [[key, *TOLD[key], up] for key, up in measures.items() if found[key]],
        "standings": {
            key: {name: asdict(one) for name, one in each.items()} for key, each in found.items()
        },
        "tasks": [
            {key: row.get(key) for key in ("name", "about", "explained", "proven", "drawn")}
            for row in record[track]
        ],
        "by task": {measure: by_task(record, measure, track) for measure in measures},
        "refused": {row["name"]: row["refused"] for row in record[track]},
        "seconds": {row["name"]: row["seconds"] for row in record[track]},
    }


def write_page(record: dict[str, Any], path: Path) -> None:
    """Write the page of a record."""
    tracks = {track: summary(record, track) for track in TRACKS if record[track]}
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    trained = {
        row["name"]: row["trainings"] for row in record["tasks"] if len(row["trainings"]) > 1
    }
    about = (
        f"{record['run']} run of {record['date']}, seed {record['seed']}, {versions}, "
        f"{record['processor']}. Trainings by several seeds: "
        + ("; ".join(f"{name} {seeds}" for name, seeds in trained.items()) or "none")
        + "."
    )
    data = json.dumps(tracks, ensure_ascii=False).replace("</", "<\\/")
    page = (HERE / "page.html").read_text(encoding="utf-8")
    page = page.replace("<!-- about -->", html.escape(about)).replace("/* data */ null", data)
    path.write_text(page, encoding="utf-8")
