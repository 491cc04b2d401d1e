"""From many explanations to a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from captum_ssm.explanation.corpus.changes import Change, change
from captum_ssm.explanation.corpus.opened import ExplainedDataset, open_dataset
from captum_ssm.explanation.corpus.parts import ReportExample
from captum_ssm.explanation.corpus.profiles import distances, grouped, plane, profiles
from captum_ssm.explanation.corpus.readings import Reading, read
from captum_ssm.explanation.corpus.report import Report
from captum_ssm.explanation.corpus.shares import ShareTable
from captum_ssm.explanation.corpus.slices import FEW, Slice, Slicer
from captum_ssm.explanation.explanation import Explanation
from captum_ssm.explanation.tables import require_texts

# What is summarized.
Explanations = Explanation | ExplainedDataset
KINDS = ("word", "token", "part", "tenth", "start", "end", "distance", "layer")
SHOWN = 6  # typical examples of a slice, and as many untypical ones
MOST = 200  # examples that are shown as texts; the page takes fewer where they are long
EACH = 12  # of the wrong and of the changed ones


def summarize(
    data: Explanations | str | Path,
    *,
    method: str | None = None,
    by: str | Sequence[str] | Sequence[Any] | None = None,
    labels: Sequence[str] | str | None = None,
    against: Explanations | str | Path | None = None,
    reading_token: bool | None = None,
    title: str | None = None,
) -> Report:
    """What many explained texts have in common, and how they differ.

    Relevance is compared as shares: a token's part of the total magnitude of its row. Shares of an
    example's outputs are averaged first, and means and their intervals (the moderated t-statistic;
    Smyth, 2004) are over examples. The token at which an answer is read is left out of the shares,
    as on the page of an explanation.

    Args:
        data (Explanation, ExplainedDataset, str or Path): several texts, or the folder of
            :func:`captum_ssm.explain_dataset`.
        method (str, optional): its name; None for the first. Default: None
        by (str or sequence, optional): a column of the user's own data, or several, of a folder; of
            an explanation one value per example. Default: None
        labels (sequence of str or str, optional): the right answers, or the column that has them,
            where these are not the targets that were explained. Default: None
        against (Explanation, ExplainedDataset, str or Path, optional): another run of the same
            data, such as by another checkpoint; or the name of another method. Default: None
        reading_token (bool, optional): whether the token at which the answer is read counts; None
            leaves it out, except where its own label is explained or where it is a word from which
            a classifier reads the text. Default: None
        title (str, optional): a heading; None for that of the explanations. Default: None

    Returns:
        Report: as tables (:meth:`Report.to_pandas`), as a page (:meth:`Report.to_html`), or, by
        ``print``, as a few lines.

    Raises:
        ValueError: for no example, an unknown method or column, values that are not one per
            example, images, or two runs without a common text.
        OSError: for a folder that is not there.

    Examples::

        >>> explanation = explain(model, tokenizer, ["w3 w4 w5", "w4 w6", "w4 w3"])
        >>> report = summarize(explanation)
        >>> sorted(report.shares)
        ['distance', 'end', 'start', 'tenth', 'token']
    """
    run = _Run(_opened(data), method, reading_token, labels)
    columns = _columns(run, by)
    other = None if against is None else _other(run, against)
    readings = run.readings
    kinds = [kind for kind in KINDS if any(kind in reading.kinds for reading in readings)]
    tables = {kind: ShareTable(readings, kind) for kind in kinds}
    if "word" in tables and tables["word"].says(tables["token"]):
        del tables["word"]  # each word is a token
    units = "word" if "word" in tables else "token"
    rows = profiles(readings, units)
    groups = grouped(rows)
    slicer = Slicer(readings, tables, rows, units, SHOWN)
    slices = _slices(slicer, columns, groups)
    changed = None if other is None else change(readings, other.readings, other.name(run))
    examples = _examples(readings, rows, groups, slices, columns, changed)
    wanted = _shown(examples, slicer.make("all", "", np.ones(len(rows), dtype=bool)), slices)
    notes = () if groups is not None else (
        "There are no groups of examples: they need scikit-learn, which is not installed. "
        "pip install scikit-learn",
    )  # fmt: skip
    return Report(
        run.data.title if title is None else title, run.first.model, run.method.title, units,
        examples, {kind: table.shares() for kind, table in tables.items()}, tuple(slices), changed,
        run.errors, dict(run.of(wanted)),
        {} if other is None else dict(other.of([i for i in wanted if i in other.indices])),
        notes,
    )  # fmt: skip


class _Run:
    # Examples by one method, read once; of another run by its first one where it lacks that.
    def __init__(
        self,
        data: Explanations,
        method: str | None,
        reading_token: bool | None,
        labels: Sequence[str] | str | None,
        is_other: bool = False,
    ) -> None:
        self.data, self.reading_token, self.labels = data, reading_token, labels
        self.errors: Mapping[int, str] = dict(getattr(data, "errors", {}))
        # A run that has not finished may lack rows in the middle.
        rows = range(len(data)) if isinstance(data, Explanation) else data.column("index")
        self.places = {i: k for k, i in enumerate(rows)}
        self.indices = [i for i in self.places if i not in self.errors]
        if not self.indices:
            raise ValueError(
                f"the data has {len(data)} rows, and none was explained; expected at least one "
                "explained text."
            )
        self.first = data[self.indices[0]]
        known = {m.name: m for m in self.first.methods}
        if method is not None and method not in known and not is_other:
            raise ValueError(f"method is {method!r}; expected {' or '.join(known)}.")
        self.method = known.get(method or "", self.first.methods[0])
        right = self.column(labels, "labels") if isinstance(labels, str) else labels
        if right is not None and len(right) != len(data):
            raise ValueError(
                f"labels has {len(right)} values for {len(data)} examples; expected one for each."
            )
        self.readings = list(self._read(right))

    @property
    def _is_asked(self) -> bool:
        # Whether targets were given, for all rows or by a column; else the prediction is explained.
        manifest = getattr(self.data, "manifest", {})
        asked = manifest.get("asked", {})
        column = asked.get("columns", {}).get("target", "target")
        return (
            self.first.settings.get("target") is not None
            or asked.get("target") is not None
            or column in manifest.get("columns", ())
        )

    def column(self, name: str, what: str) -> list[Any]:
        """A column of the user's own data."""
        if not hasattr(self.data, "column"):
            raise ValueError(
                f"{what} is {name!r}, and an explanation has no columns; expected one value per "
                "example, or the folder of explain_dataset."
            )
        return list(self.data.column(name))

    def name(self, of: _Run) -> str:
        """What tells this run from another one."""
        if self.first.model != of.first.model:
            return self.first.model
        if self.method.name != of.method.name:
            return self.method.title
        folder = getattr(self.data, "folder", None)
        return self.data.title if folder is None else str(folder.name)

    def of(self, indices: Sequence[int]) -> Iterator[tuple[int, Explanation]]:
        """Some explanations, one after the other."""
        return ((i, self.data[i]) for i in indices)

    def _read(self, right: Sequence[Any] | None) -> Iterator[Reading]:
        is_asked, reading_token = self._is_asked, self.reading_token
        for i, explanation in self.of(self.indices):
            require_texts(explanation.examples, "a report")
            value = None if right is None else right[self.places[i]]
            label = None if value is None else str(value).strip()
            options = (label, is_asked, reading_token)
            yield read(explanation.examples[0], self.method.name, i, "word", *options)


def _opened(data: Explanations | str | Path) -> Explanations:
    if not isinstance(data, (str, Path)):
        return data
    if Path(data).suffix == ".json":
        return Explanation.load(data)
    return open_dataset(data)


def _other(run: _Run, against: Explanations | str | Path) -> _Run:
    reading_token, labels = run.reading_token, run.labels
    methods = [m.name for m in run.first.methods]
    if isinstance(against, str) and against in methods:
        return _Run(run.data, against, reading_token, labels)
    labels = labels if isinstance(labels, str) else None
    return _Run(_opened(against), run.method.name, reading_token, labels, is_other=True)


def _columns(run: _Run, by: Any) -> dict[str, list[Any]]:
    # By name, one value per explained example.
    if by is None:
        return {}
    if isinstance(by, str):
        by = [by]
    is_names = hasattr(run.data, "column") and all(isinstance(value, str) for value in by)
    if is_names and len(by) != len(run.data):
        columns = {name: run.column(name, "by") for name in by}
    elif len(by) == len(run.data):
        columns = {"column": list(by)}
    elif len(by) == 1:
        columns = {by[0]: run.column(by[0], "by")}
    else:
        raise ValueError(
            f"by has {len(by)} values for {len(run.data)} examples; expected one for each, or the "
            "names of columns of a folder of explain_dataset."
        )
    places = [run.places[i] for i in run.indices]
    return {name: [values[k] for k in places] for name, values in columns.items()}


def _slices(
    slicer: Slicer, columns: Mapping[str, list[Any]], groups: np.ndarray | None
) -> list[Slice]:
    readings = slicer.readings
    slices = [] if groups is None else slicer.groups(groups)
    for name, values in columns.items():
        slices += slicer.by_value(name, values)
    told = {True: "right", False: "wrong", None: None}
    slices += slicer.by_value("prediction", [told[reading.right] for reading in readings])
    return slices + slicer.by_value("target", [reading.target for reading in readings], least=FEW)


def _examples(
    readings: list[Reading],
    rows: np.ndarray,
    groups: np.ndarray | None,
    slices: list[Slice],
    columns: Mapping[str, list[Any]],
    changed: Change | None,
) -> tuple[ReportExample, ...]:
    labels = np.zeros(len(rows), dtype=int) if groups is None else groups
    names = [part.name for part in slices if part.by == "group"]
    far, points = distances(rows, labels), plane(rows)
    moved = {} if changed is None else changed.examples
    flipped = set() if changed is None else set(changed.flipped)
    return tuple(
        ReportExample(
            **reading.facts,
            group=names[labels[k]] if names else None,
            distance=float(far[k]),
            point=(float(points[k, 0]), float(points[k, -1])),
            columns={name: values[k] for name, values in columns.items()},
            moved=moved.get(reading.index),
            flipped=reading.index in flipped,
        )
        for k, reading in enumerate(readings)
    )


def _shown(
    examples: Sequence[ReportExample], everything: Slice, slices: Sequence[Slice]
) -> list[int]:
    # Rows of the data, the most wanted first: the most and the least typical of all, those that
    # changed most or whose prediction flipped, the surest of the wrong predictions, then the most
    # and the least typical of each slice in turn.
    moved = [example for example in examples if example.moved is not None]
    moved.sort(key=lambda one: -(one.moved or 0))
    wrong = [example for example in examples if example.right is False]
    wrong.sort(key=lambda one: one.probability or 0)
    wanted = [*everything.typical, *everything.untypical]
    wanted += [example.index for example in moved[:EACH]]
    wanted += [example.index for example in moved if example.flipped][:EACH]
    wanted += [example.index for example in wrong[:EACH]]
    for rank in range(max((len(part.typical) for part in slices), default=0)):
        for part in slices:
            for rows in (part.typical, part.untypical):
                wanted += rows[rank : rank + 1]
    return list(dict.fromkeys(wanted))[:MOST]
