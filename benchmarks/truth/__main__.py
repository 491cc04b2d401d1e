"""Run the benchmark: ``python -m benchmarks.truth --quick``.

    python -m benchmarks.truth                                  # the full run
    python -m benchmarks.truth --train                          # other seeds' models, first
    python -m benchmarks.truth --quick --method mine.py:relevance
    python -m benchmarks.truth --quick --ranking mine.py:edges  # of edges, for the circuits

The record is written after each task, and a run goes on where the last one stopped. ``--tasks`` and
``--methods`` choose by a name, or by a part of names.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import captum
import torch
import transformers

import captum_ssm

from . import models
from .circuits import RANKINGS, scored_circuits
from .floats import float_tasks
from .harness import Plan, scored_task
from .methods import HEURISTICS, METHODS, SLOW, UsageError, from_file
from .page import write_page
from .submitted import forget_edited, report
from .summary import TRACKS
from .task import Task
from .texts import text_tasks

RESULTS = Path(__file__).resolve().parent / "results"
FULL, QUICK = Plan(), Plan(examples=6, randomized=3)
# One task of each family, both of the series, and of the stories one whose cause is not the answer.
QUICK_TASKS = (
    "copying-mamba",
    "passkey-mamba",
    "stories-mamba, color",
    "stories-mamba, animal",
    "chains-mamba2",
    "series-forecaster",
    "series-classifier",
    "digits-vim",
    "moving-video",
)


def tasks() -> list[Task]:
    """All tasks."""
    return [*text_tasks(), *float_tasks()]


def about(plan: Plan, name: str) -> dict[str, Any]:
    """What the scores depend on, apart from the code."""
    versions = {
        "captum_ssm": captum_ssm.__version__,
        "captum": captum.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    return {
        "benchmark": "truth",
        "run": name,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "processor": models.processor(),
        "versions": versions,
        "seed": plan.seed,
        "plan": vars(plan),
        "heuristics": HEURISTICS,
        "submitted": {},
        "tasks": [],
        "circuits": [],
    }


def save(record: dict[str, Any], path: Path) -> None:
    """Write the record, one line per method's scores."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1)
    lines, inside = [], ""
    for line in text.splitlines():  # lists of numbers stand on one line
        if inside or line.endswith(": ["):
            inside += line.strip() if inside else line
            if line.strip() in ("]", "],") or line.endswith("{"):
                lines.append(inside)
                inside = ""
        else:
            lines.append(line)
    path.write_text("\n".join(lines) + "\n")


def known(record: dict[str, Any], track: str, task: str) -> dict[str, Any] | None:
    """What the record has of a task."""
    return next((row for row in record[track] if row["name"] == task), None)


def merged(record: dict[str, Any], track: str, found: dict[str, Any]) -> None:
    """Add a task's scores to those of other methods that the record has.

    Raises:
        SystemExit: if they are not of the same examples, and so cannot be compared.
    """
    old = known(record, track, found["name"])
    if old is None:
        record[track].append(found)
        return
    for count in ("drawn", "proven", "explained"):
        if old[count] != found[count]:
            raise SystemExit(
                f"{found['name']}: the record has {old[count]} examples {count} and this run "
                f"{found[count]}; expected the same examples. Pass --anew to measure all methods."
            )
    # A machine without the other trainings leaves out a measure, not the record's trainings.
    if len(old.get("trainings", ())) > len(found.get("trainings", ())):
        found["trainings"] = old["trainings"]
    for part in ("scores", "refused", "seconds"):
        found[part] = {**old.get(part, {}), **found[part]}
    old.update(found)


def begun(args: argparse.Namespace, record: dict[str, Any], path: Path) -> dict[str, Any]:
    """The record to add to: the one at the path; for a submitted function also the committed one.

    Raises:
        SystemExit: if the one at the path was measured by another plan.
    """
    places = [path, RESULTS / path.name] if args.method or args.ranking else [path]
    for place in places:
        if args.anew or not place.exists():
            continue
        old = json.loads(place.read_text())
        if old["plan"] == record["plan"]:
            for name, version in record["versions"].items():
                if old["versions"][name] != version:
                    print(
                        f"{place} was measured with {name} {old['versions'][name]}; "
                        f"this run has {version}.",
                        file=sys.stderr,
                    )
            kept = {track: old[track] for track in TRACKS}
            return record | kept | {"submitted": old.get("submitted", {})}
        if place == path:
            raise SystemExit(
                f"{path} was measured with {old['plan']} and this run is one with "
                f"{record['plan']}; pass --anew to replace it, or another --output."
            )
    return record


def measure(
    args: argparse.Namespace,
    record: dict[str, Any],
    plan: Plan,
    path: Path,
    chosen: dict[str, dict[str, Any]],
) -> None:
    """All that the record lacks of the chosen entrants of each track, task by task."""
    for track, scored in (("tasks", scored_task), ("circuits", scored_circuits)):
        entrants: dict[str, Any] = chosen[track]
        if args.track not in ("both", track):
            continue
        for task in _chosen_tasks(args):
            if track == "circuits" and not task.has_circuits():
                continue
            old = known(record, track, task.name) or {"scores": {}, "refused": {}}
            left = {
                name: entrant
                for name, entrant in entrants.items()
                if name not in old["scores"] and name not in old["refused"]
            }
            if left:
                start = time.process_time()
                found = scored(task, left, plan, lambda line: print(line, flush=True))
                merged(record, track, found)
                save(record, path)
                print(f"{task.name}: {time.process_time() - start:.0f} s", flush=True)


def _chosen_tasks(args: argparse.Namespace) -> list[Task]:
    # A whole name is that task; anything else is a part of names.
    found = tasks()
    names = {task.name for task in found}
    if not args.tasks:
        return [t for t in found if t.name in QUICK_TASKS] if args.quick else found
    for part in args.tasks:
        if not any(part in name for name in names):
            raise UsageError(
                f"--tasks has {part!r}; expected names, or parts of names, of: "
                + "; ".join(sorted(names))
            )
    return [
        task
        for task in found
        if any(part == task.name if part in names else part in task.name for part in args.tasks)
    ]


def _chosen(
    entrants: dict[str, Any], args: argparse.Namespace, places: list[str]
) -> dict[str, Any]:
    submitted = _submitted(entrants, places)
    for part in args.methods:
        if not any(part in name for name in (*METHODS, *RANKINGS)):
            raise UsageError(
                f"--methods has {part!r}; expected names, or parts of names, of: "
                + "; ".join((*METHODS, *RANKINGS))
            )
    if args.quick:
        entrants = {name: one for name, one in entrants.items() if name not in SLOW}
    if args.methods:
        entrants = {n: one for n, one in entrants.items() if any(p in n for p in args.methods)}
    return {**entrants, **submitted}


def _submitted(entrants: dict[str, Any], places: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for place in places:
        name, function = from_file(place)
        if name in entrants or name in found:
            raise UsageError(
                f"{place!r} has the name of another entrant; expected a name of its own."
            )
        found[name] = function
    return found


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = argparse.ArgumentParser(
        prog="python -m benchmarks.truth", description=(__doc__ or "").partition("\n")[0]
    )
    found.add_argument("--quick", action="store_true", help="few examples of one task per family")
    found.add_argument("--examples", type=int, help="of each task, instead of the run's own number")
    found.add_argument("--track", choices=("both", "tasks", "circuits"), default="both")
    found.add_argument("--tasks", nargs="+", default=[], help="parts of names")
    found.add_argument("--methods", nargs="+", default=[], help="parts of names")
    place = "FILE.py:FUNCTION"
    found.add_argument("--method", action="append", default=[], metavar=place)
    found.add_argument("--ranking", action="append", default=[], metavar=place)
    found.add_argument("--train", action="store_true", help="train the other seeds' models first")
    found.add_argument("--anew", action="store_true", help="forget what the record has")
    found.add_argument("--output", type=Path, default=RESULTS)
    return found


def main(argv: list[str] | None = None) -> None:
    """Measure, write the record, and make its page."""
    options = parser()
    args = options.parse_args(argv)
    submitted = {"tasks": args.method, "circuits": args.ranking}
    try:
        chosen = {
            "tasks": _chosen(METHODS, args, args.method),
            "circuits": _chosen(RANKINGS, args, args.ranking),
        }
        _chosen_tasks(args)
    except UsageError as error:
        options.error(str(error))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name, plan = ("quick", QUICK) if args.quick else ("full", FULL)
    if args.examples:
        plan = Plan(args.examples, min(plan.randomized, args.examples))
    if args.train:
        for task in _chosen_tasks(args):
            for seed in filter(None, task.seeds):  # seed 0 is the repository's
                if not models.is_trained(task.trained_as, seed):
                    models.train(task.trained_as, seed)
    path = args.output / f"{name}.json"
    record = begun(args, about(plan, name), path)
    for track, places in submitted.items():
        forget_edited(record, track, places)
    measure(args, record, plan, path, chosen)
    save(record, path)
    write_page(record, path.with_suffix(".html"))
    for track, places in submitted.items():
        for place in places:
            print(report(record, track, place.rpartition(":")[2]), end="")
    print(f"{path} and {path.with_suffix('.html').name}", file=sys.stderr)


if __name__ == "__main__":
    main()
