"""What a corpus of explanations tells: plain data, as tables, a page or a few lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from captum_ssm.explanation import file as _file
from captum_ssm.explanation.corpus.page_data import report_data
from captum_ssm.explanation.corpus.parts import ReportData
from captum_ssm.explanation.corpus.shares import Difference, Share
from captum_ssm.explanation.corpus.slices import Slice
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

        tables: dict[str, Callable[[], Iterable[dict[str, Any]]]] = {
            "shares": lambda: (vars(one) for kind in self.shares.values() for one in kind),
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
            for one in entries(part):
                yield {"by": part.by, "slice": part.name, **vars(one)}

    def _examples(self) -> Iterator[dict[str, Any]]:
        for one in self.examples:
            line = {k: v for k, v in vars(one).items() if k not in ("place", "columns")}
            yield line | dict(one.columns)

    def _change(self) -> Iterator[dict[str, Any]]:
        kinds = self.change.shares.values() if self.change else ()
        return (vars(one) for kind in kinds for one in kind)

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
