"""What a corpus of explanations tells: plain data, as tables, a page or a few lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from captum_ssm.explanation import file as _file
from captum_ssm.explanation.corpus.page_data import report_data
from captum_ssm.explanation.corpus.parts import ReportData
from captum_ssm.explanation.corpus.shares import Difference, Share
from captum_ssm.explanation.corpus.slices import Slice
from captum_ssm.explanation.read import printable

if TYPE_CHECKING:
    import pandas

LISTED = 10  # of a table, in print
BAR = 24


@dataclass(frozen=True, eq=False)
class Report(ReportData):
    """Which parts of their texts many explained examples rest on, made by :func:`summarize`.

    Args:
        title, model (str): as of the explanations.
        method (str): the title of the method whose relevance this is.
        units (str): what is compared, ``"word"`` or ``"token"``.
        examples (tuple of ReportExample): in the order of the data.
        shares (dict): mean shares by kind (:class:`Share` lists the kinds), sorted by the lower end
            of their interval, so that rare ones do not come first.
        slices (tuple of Slice): parts of the corpus.
        change (Change or None): what is different in another run.
        errors (dict): rows that could not be explained, with their errors.
        shown (dict): explanations of some examples, by row: those the page shows as texts.
        shown_other (dict): of the other run.
        notes (tuple of str): what could not be computed, and why.

    Examples::

        >>> report = summarize(explain(model, tokenizer, ["w3 w4 w5", "w4 w6", "w4 w3"]))
        >>> report.shares["token"][0].kind, len(report.examples)
        ('token', 3)
        >>> report.to_html(folder / "report.html")
    """

    def __repr__(self) -> str:
        return f"<Report on {len(self.examples)} examples of {self.model} by {self.method}>"

    def __len__(self) -> int:
        return len(self.examples)

    def __str__(self) -> str:
        """A summary for a terminal."""
        # A line that begins a part has an empty one before it; no other break is the report's own.
        lines = (("\n" * text.startswith("\n"), text.removeprefix("\n")) for text in _lines(self))
        return "\n".join(gap + printable(line) for gap, line in lines)

    def to_pandas(self, table: str = "shares") -> pandas.DataFrame:
        """One of the report's tables.

        Args:
            table (str, optional): ``"shares"`` (of all examples), ``"slices"`` (shares of each
                slice), ``"apart"`` (what sets slices apart), ``"examples"``, ``"change"`` or
                ``"errors"``. Default: ``"shares"``

        Raises:
            ImportError: without pandas.
            ValueError: for another name.
        """
        import pandas

        tables: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
            "shares": lambda: (vars(share) for kind in self.shares.values() for share in kind),
            "slices": lambda: self._of_slices(lambda part: chain(*part.shares.values())),
            "apart": lambda: self._of_slices(lambda part: part.apart),
            "examples": self._examples,
            "change": self._change,
            "errors": lambda: ({"index": k, "error": error} for k, error in self.errors.items()),
        }
        if table not in tables:
            raise ValueError(f"table is {table!r}; expected {' or '.join(map(repr, tables))}.")
        return pandas.DataFrame(map(dict, tables[table]()))

    def _of_slices(
        self, entries: Callable[[Slice], Iterable[Share | Difference]]
    ) -> Iterator[dict[str, Any]]:
        for part in self.slices:
            for entry in entries(part):
                yield {"by": part.by, "slice": part.name, **vars(entry)}

    def _examples(self) -> Iterator[dict[str, Any]]:
        for example in self.examples:
            line = {k: v for k, v in vars(example).items() if k not in ("point", "columns")}
            yield line | dict(example.columns)

    def _change(self) -> Iterator[dict[str, Any]]:
        kinds = self.change.shares.values() if self.change else ()
        return (vars(difference) for kind in kinds for difference in kind)

    @overload
    def to_html(self, path: None = None) -> str: ...

    @overload
    def to_html(self, path: str | Path) -> None: ...

    def to_html(self, path: str | Path | None = None) -> str | None:
        """The interactive page: one self-contained file that needs no network.

        Args:
            path (str or Path, optional): where it is written. Default: None

        Returns:
            str: the page; None if it is written to ``path``.

        Raises:
            OSError: where it cannot be written, such as in a folder that does not exist.
        """
        from captum_ssm.explanation.page.html import report_html

        return _file.page_or_file(lambda: report_html(report_data(self)), path)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        # IPython calls it for what a notebook shows.
        from captum_ssm.explanation.page.notebook import framed

        return {"text/html": framed(self.to_html(), self.title), "text/plain": str(self)}, {}


def _lines(report: Report) -> Iterator[str]:
    right = "" if report.right is None else f", {report.right:.1%} predicted right"
    what = f"{len(report.examples)} examples of {report.model} by {report.method}"
    yield f"{report.title}: {what}{right}"
    for kind in (report.units, "part"):
        entries = report.shares.get(kind, ())[:LISTED]
        if not entries:
            continue
        yield f"\n{kind:22s} {'examples':>8s} {'mean share':>10s}  95% interval"
        top = max(entry.share for entry in entries)
        for entry in entries:
            bar = "#" * round(BAR * entry.share / (top or 1.0))
            numbers = (
                f"{entry.examples:8d} {entry.share:10.1%}  {entry.low:6.1%} to {entry.high:6.1%}"
            )
            yield f"{str(entry.key)[:22]:22s} {numbers}  {bar}"
    tenths = {entry.key: entry.share for entry in report.shares["tenth"]}
    yield "\nshare of each tenth of the text, from its start to its end:"
    yield " ".join(f"{tenths.get(k, 0.0):5.1%}" for k in range(10))
    yield from _slices(report)
    if report.change is not None:
        change = report.change
        yield (
            f"\nagainst {change.other}: {change.moved.value:.1%} of the relevance lies elsewhere "
            f"({change.moved.low:.1%} to {change.moved.high:.1%}), "
            f"{len(change.flipped)} predictions differ"
        )
        for gap in change.shares.get(report.units, ())[:LISTED]:
            yield f"{str(gap.key)[:22]:22s} {gap.elsewhere:6.1%} -> {gap.here:6.1%}"
    if report.errors:
        first = ", ".join(map(str, list(report.errors)[:LISTED]))
        yield f"\n{len(report.errors)} rows have errors and are left out: {first}"
    yield from report.notes


def _slices(report: Report) -> Iterator[str]:
    by = None
    for part in report.slices:
        if part.by != by:
            by = part.by
            yield f"\nby {by}"
        right = "" if part.right is None else f" {part.right:7.1%} right"
        more = [
            str(difference.key)
            for difference in part.apart
            if difference.low > 0 and difference.kind == report.units
        ]
        words = f"  more on {', '.join(more[:4])}" if more else ""
        yield f"{part.name[:30]:30s} {len(part.examples):6d}{right}{words}"
