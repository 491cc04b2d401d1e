"""The page of the benchmark of explanations, and of the checkpoints that were measured.

Each finding is a sentence that has to hold: where the numbers say something else, it raises, and
the sentence has to be written anew.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

from truth.summary import TRACKS, by_task, difference, entrants, standings  # noqa: E402

SHOWN = {
    "hit": "hit ↑",
    "precision": "precision ↑",
    "share": "share ↑",
    "removal": "removal ↑",
    "interchange": "interchange ↑",
    "paraphrase": "paraphrase ↑",
    "seeds": "seeds ↑",
    "randomized": "randomized ↓",
    "guessing": "guessing ↓",
    "faithful": "faithful ↑",
    "complete": "complete ↑",
    "gap": "gap ↓",
}
MAIN = {"tasks": "precision", "circuits": "faithful"}
RESULTS = BENCHMARKS / "truth" / "results"


def record() -> dict[str, Any]:
    """The full run's record, or the quick one's."""
    path = RESULTS / "full.json"
    found: dict[str, Any] = json.loads(
        (path if path.exists() else RESULTS / "quick.json").read_text()
    )
    return found


def page() -> str:
    """The page of the benchmark."""
    found = record()
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    seeded = [row for row in found["tasks"] if len(row["trainings"]) > 1]
    trained = "; ".join(f"{row['name']} ({len(row['trainings'])} trainings)" for row in seeded)
    examples = sum(row["explained"] for row in found["tasks"])
    parts = [
        "# Does it find the cause? A benchmark",
        "<!-- python docs/tables.py writes this page. -->",
        "`benchmarks/truth` asks every method about examples whose cause was proven by "
        "intervention: with another cause the model gives another answer, and however the "
        "irrelevant rest is redrawn, it stays. Its README says what each measure is, and how a "
        "method is added: one function in one file. The page in `benchmarks/truth/results` can be "
        "sorted, and has all intervals.",
        f"The {found['run']} run of {found['date']}: {examples} examples of {len(found['tasks'])} "
        f"tasks, seed {found['seed']}, {versions}. Maps of several trainings are compared on: "
        f"{trained or 'no task'}. In brackets: the 95% interval of the rank, over bootstrap "
        "samples of the examples. `python -m benchmarks.truth"
        f"{' --quick' if found['run'] == 'quick' else ''}` measures it anew.",
        "## Findings",
        numbered_findings(),
        "## Tokens",
        _table(found, "tasks"),
        "Precision by task:",
        _by_task(found, "tasks"),
        "## Circuits",
        "The answers that the first k edges of a ranking keep alone (*faithful*), and that are "
        "gone without them (*complete*), as areas over log k from 1 to 100; removed edges carry "
        "what they do on the input with another cause. *Gap*: how far the score is from the "
        "whole model's.",
        _table(found, "circuits"),
    ]
    return "\n\n".join(parts) + "\n"


def _rows(lines: list[list[str]]) -> str:
    marks = ["---", *["---:"] * (len(lines[0]) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [lines[0], marks, *lines[1:]])


def _table(found: dict[str, Any], track: str) -> str:
    all_of = {measure: standings(found, measure, track) for measure in TRACKS[track][1]}
    all_of = {measure: own for measure, own in all_of.items() if own}
    main = all_of[MAIN[track]]
    lines = [["method", *(SHOWN[measure] for measure in all_of)]]
    for name in sorted(main, key=lambda name: main[name].rank):
        cells = [
            f"{own[name].value:.2f} ({own[name].first} to {own[name].last})" if name in own else "-"
            for own in all_of.values()
        ]
        lines.append([name, *cells])
    return _rows(lines)


def _by_task(found: dict[str, Any], track: str) -> str:
    means = by_task(found, MAIN[track], track)
    main = standings(found, MAIN[track], track)
    lines = [["method", *(row["name"] for row in found[track])]]
    for name in sorted(main, key=lambda name: main[name].rank):
        values = means[name].values()
        lines.append([name, *("refused" if v is None else f"{v:.2f}" for v in values)])
    return _rows(lines)


def checkpoints() -> str:
    """The page of published checkpoints."""
    path = BENCHMARKS / "results" / "checkpoints.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    lines = [["checkpoint", "precision", "largest error", "MambaLRP: delta", "in forwards"]]
    lines[0] += ["LaTIM: delta", "in forwards", "peak memory", "run"]
    for row in rows:
        numbers = [
            f"{row[key]:{form}}" if key in row else "refused"
            for key, form in (
                ("largest_error", ".0e"), ("lrp_delta", ".0e"), ("lrp_forwards", ".2f"),
                ("latim_delta", ".0e"), ("latim_forwards", ".2f"),
            )
        ]  # fmt: skip
        run = f"{row['date']}, {row['by'] or 'unnamed'}, {row['processor']}"
        memory = f"{row['peak_mib'] / 1024:.1f} GiB"
        lines.append([row["checkpoint"], row["dtype"], *numbers, memory, run])
    state = "" if rows else "\n\nNobody has run it yet, so the table is empty."
    return (
        "# Published checkpoints\n\n<!-- python docs/tables.py writes this page. -->\n\n"
        "How exactly published checkpoints are explained, and at what cost. "
        '`python benchmarks/checkpoints.py --by "your name"` fills the table where a hub can be '
        "reached, and writes a page of each model to `out/`: the largest reconstruction error of "
        "its mixers, relative to their output; what MambaLRP and LaTIM leave of the score, "
        "relative to "
        "it (bias terms count); their times in forward passes; and the peak memory of the process."
        f"{state}\n\n{_rows(lines)}\n"
    )


README_ROWS = {
    "MambaLRP": "`MambaLRP`",
    "LaTIM, flow_logit": '`LaTIM`, `aggregation="flow_logit"`',
    "LaTIM": "`LaTIM`",
    "UnifiedImplicitAttention": "`UnifiedImplicitAttention`",
    "MambaAttribution": "`MambaAttribution`",
    "IntegratedGradients (Captum)": "Captum's `IntegratedGradients`",
    "random": "random maps",
}


def readme_table() -> str:
    """Average precision by family of tasks, and over all with its interval."""
    found = record()
    families = list(dict.fromkeys(row["family"] for row in found["tasks"]))
    means, whole = by_task(found, "precision"), standings(found, "precision")
    lines = [["", *families, "all"]]
    for name, shown in README_ROWS.items():
        cells = []
        for family in families:
            rows = [row["name"] for row in found["tasks"] if row["family"] == family]
            known = [means[name][row] for row in rows]
            is_whole = None not in known
            cells.append(f"{sum(known) / len(known):.2f}" if is_whole else "refused")
        lines.append([shown, *cells, _interval(whole[name])])
    return _rows(lines)


def numbered_findings() -> str:
    """The findings as a list."""
    return "\n".join(f"{k}. {text}" for k, text in enumerate(findings(record()), 1))


def findings(found: dict[str, Any]) -> list[str]:
    """What the numbers say, one sentence each.

    Raises:
        ValueError: for a sentence that the numbers no longer support.
    """
    precision, count = standings(found, "precision"), len(entrants(found))
    first = [
        name
        for name in sorted(precision, key=lambda name: precision[name].rank)
        if precision[name].first == 1 and name not in found["heuristics"]
    ]
    flow, logit = "LaTIM, flow_logit", "LaTIM"
    means = by_task(found, "precision")
    taken = [task for task, score in means[flow].items() if score is not None]
    refused = [task for task in means[flow] if task not in taken]
    mended = difference(found, flow, logit, "precision", taken)
    mine, theirs = means["MambaLRP"], means[flow]
    more = {task: theirs[task] - mine[task] for task in taken}
    missed, worst = max(more, key=more.__getitem__), min(more, key=more.__getitem__)
    poor = min(taken, key=lambda task: means[logit][task])
    size = difference(found, "RawAttention, absolute", "RawAttention", "precision")
    paraphrase = standings(found, "paraphrase")
    moved = difference(found, "MambaLRP", "InputXGradient (Captum)", "paraphrase")
    interchange = standings(found, "interchange")
    agrees = max(
        (n for n in interchange if n not in ("FeatureAblation (Captum)", *found["heuristics"])),
        key=lambda name: interchange[name].value,
    )
    guessing = standings(found, "guessing")
    looks = "same token, brightness"
    return [
        _holds(
            "MambaLRP" in first,
            f"By average precision, of {count} entrants, first places are within the intervals of: "
            f"{', '.join(f'{n} ({_interval(precision[n])})' for n in first)}.",
        ),
        _holds(
            mended[1] > 0,
            'LaTIM is better with `aggregation="flow_logit"` than by default, by '
            f"{mended[0]:.2f} [{mended[1]:.2f}, {mended[2]:.2f}] in precision, and on {poor} "
            f"{theirs[poor]:.2f} instead of {means[logit][poor]:.2f}"
            + (
                f". It refuses {' and '.join(refused)}, where it counts as random maps do."
                if refused
                else "."
            ),
        ),
        _holds(
            more[worst] < 0 < more[missed],
            f"No method finds the cause on every task: MambaLRP has {mine[missed]:.2f} on "
            f"{missed}, where {flow} has {theirs[missed]:.2f}, and that one "
            f"{theirs[worst]:.2f} on {worst}, where MambaLRP has {mine[worst]:.2f}: look at both.",
        ),
        _holds(
            size[1] > 0,
            'Hidden attention has to be read by its size: `sign="absolute"` takes RawAttention '
            f"from {precision['RawAttention'].value:.2f}, where random maps have "
            f"{precision['random'].value:.2f}, to {precision['RawAttention, absolute'].value:.2f} "
            f"(difference {size[0]:.2f} [{size[1]:.2f}, {size[2]:.2f}]).",
        ),
        _holds(
            moved[1] > 0,
            "When only irrelevant words and values are redrawn, maps of input x gradient change: "
            f"the cosine similarity is {paraphrase['InputXGradient (Captum)'].value:.2f}, that of "
            f"MambaLRP's {paraphrase['MambaLRP'].value:.2f}.",
        ),
        _holds(
            interchange[agrees].high < 0.5,
            "Finding the cause is not agreeing with interventions unit by unit: the rank "
            f"correlation with interchange is at most {_interval(interchange[agrees])} "
            f"({agrees}; MambaLRP "
            f"{interchange['MambaLRP'].value:.2f}), feature ablation's "
            f"{interchange['FeatureAblation (Captum)'].value:.2f}.",
        ),
        _holds(
            guessing[looks].low > guessing["random"].high,
            f"A heuristic that never runs the model, *{looks}*, has a precision of "
            f"{_interval(precision[looks])}, and {guessing[looks].value:.2f} in models that guess, "
            f"where MambaLRP has {guessing['MambaLRP'].value:.2f} and random maps "
            f"{guessing['random'].value:.2f}: precision alone proves nothing.",
        ),
        *_of_circuits(found),
    ]


def _of_circuits(found: dict[str, Any]) -> list[str]:
    if not found["circuits"]:
        return []
    faithful = standings(found, "faithful", "circuits")
    gap = standings(found, "gap", "circuits")
    more = difference(found, "RelevanceFlow", "EAP", "faithful", track="circuits")
    attention = difference(found, "RelevanceFlow", "hidden attention", "faithful", track="circuits")
    return [
        _holds(
            attention[1] > 0,
            "Under interchange ablation the first edges by relevance keep "
            f"{faithful['RelevanceFlow'].value:.2f} of the answers and those by hidden attention "
            f"{faithful['hidden attention'].value:.2f} (difference {attention[0]:.2f} "
            f"[{attention[1]:.2f}, {attention[2]:.2f}]); plain gradients (EAP) keep "
            f"{faithful['EAP'].value:.2f} (difference {more[0]:.2f} [{more[1]:.2f}, "
            f"{more[2]:.2f}]), with a gap of {gap['EAP'].value:.2f} instead of "
            f"{gap['RelevanceFlow'].value:.2f}.",
        )
    ]


def _interval(own: Any) -> str:
    return f"{own.value:.2f} [{own.low:.2f}, {own.high:.2f}]"


def _holds(is_so: bool, text: str) -> str:
    if not is_so:
        raise ValueError(f"the record no longer supports this finding; expected a new one: {text}")
    return text
