"""What a corpus of explanations tells: plain data, as tables, a page or a few lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captum_ssm.explanation import file as _file
from captum_ssm.explanation.corpus.page_data import report_data
from captum_ssm.explanation.corpus.parts import ReportData
from captum_ssm.explanation.corpus.shares import Difference
from captum_ssm.explanation.corpus.told import told

if TYPE_CHECKING:
    import pandas


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
        >>> _ = report.to_html(folder / "report.html")
    """

    def __repr__(self) -> str:
        return f"<Report on {len(self.examples)} examples of {self.model} by {self.method}>"

    def __len__(self) -> int:
        return len(self.examples)

    def __str__(self) -> str:
        """A summary for a terminal."""
        return told(self)

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

        tables = {
            "shares": self._shares, "slices": self._slices, "apart": self._apart,
            "examples": self._examples, "change": self._change, "errors": self._errors,
        }  # fmt: skip
        if table not in tables:
            raise ValueError(f"table is {table!r}; expected {' or '.join(map(repr, tables))}.")
        return pandas.DataFrame(tables[table]())

    def _shares(self) -> list[dict[str, Any]]:
        return [dict(vars(one)) for entries in self.shares.values() for one in entries]

    def _slices(self) -> list[dict[str, Any]]:
        return [
            {"by": part.by, "slice": part.name, **vars(one)}
            for part in self.slices
            for entries in part.shares.values()
            for one in entries
        ]

    def _apart(self) -> list[dict[str, Any]]:
        return [
            {"by": part.by, "slice": part.name, **vars(one)}
            for part in self.slices
            for one in part.apart
        ]

    def _examples(self) -> list[dict[str, Any]]:
        lines = []
        for one in self.examples:
            line = {k: v for k, v in vars(one).items() if k not in ("place", "columns")}
            lines.append(line | dict(one.columns))
        return lines

    def _change(self) -> list[dict[str, Any]]:
        entries: Mapping[str, tuple[Difference, ...]] = self.change.shares if self.change else {}
        return [dict(vars(one)) for kind in entries.values() for one in kind]

    def _errors(self) -> list[dict[str, Any]]:
        return [{"index": index, "error": error} for index, error in self.errors.items()]

    def to_html(self, path: str | Path | None = None) -> str:
        """The interactive page: one self-contained file that needs no network.

        Args:
            path (str or Path, optional): where it is written as well. Default: None

        Returns:
            str: the page.

        Raises:
            OSError: where it cannot be written, such as in a folder that does not exist.
        """
        from captum_ssm.explanation.page.html import report_html

        return _file.write_page(lambda: report_html(report_data(self)), path)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        # IPython calls it for what a notebook shows.
        from captum_ssm.explanation.page.notebook import framed

        return {"text/html": framed(self.to_html(), self.title), "text/plain": str(self)}, {}
