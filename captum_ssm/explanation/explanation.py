"""The explanation: what people keep, open again, compare and show. Nothing here needs PyTorch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from captum_ssm.errors import brief
from captum_ssm.explanation import file as _file
from captum_ssm.explanation import tables
from captum_ssm.explanation.compare import difference
from captum_ssm.explanation.lines import in_few_lines
from captum_ssm.explanation.parts import ExplanationData, Output
from captum_ssm.explanation.read import printable
from captum_ssm.explanation.summary import Summary, summary
from captum_ssm.explanation.units import spans_of, summed

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True, eq=False)
class Explanation(ExplanationData):
    """Examples explained by one or several methods, and all that made them.

    It is plain data: tokens, predictions and NumPy arrays. :func:`captum_ssm.explain` makes one;
    it is opened again (:meth:`load`) without the model and without PyTorch.

    Args:
        title (str): a heading.
        model (str): the model's name.
        methods (tuple of Method): in the order in which they are offered.
        examples (tuple of Example): one or more.
        settings (dict, optional): what :func:`captum_ssm.explain` was asked for.
            Default: ``{}``
        versions (dict, optional): of the packages that computed it. Default: ``{}``

    Examples::

        >>> explanation = explain(model, tokenizer, "w3 w4 w5", target="w6")
        >>> explanation.relevance().shape
        (4,)
        >>> explanation.save(folder / "why.json")
        >>> again = Explanation.load(folder / "why.json")
        >>> again.examples[0].text
        'w3 w4 w5 w6'
    """

    def __repr__(self) -> str:
        names = ", ".join(method.name for method in self.methods)
        counts = f"{len(self.examples)} examples" if len(self) > 1 else self._size()
        return printable(
            f"<Explanation of {self.model} by {names}: {counts}{self._winners()}{self._replayed()}>"
        )

    def __str__(self) -> str:
        """A summary for a terminal: the tokens with the most relevance, of what comes first."""
        return "\n".join([repr(self), *in_few_lines(self.examples, self.methods)])

    def _replayed(self) -> str:
        # How far the model is from the served one that wrote the answers.
        replays = [example.replay for example in self.examples if example.replay is not None]
        sizes = [abs(token.difference) for replay in replays for token in replay.tokens]
        if not sizes:
            return ""
        return (
            f"; replayed, {len(sizes)} log probabilities differ from the recorded ones by at most "
            f"{max(sizes):.2g} ({sum(sizes) / len(sizes):.2g} in the mean)"
        )

    def _winners(self) -> str:
        # Which methods name best what the model reads, where that was checked.
        checks = [example.validation for example in self.examples if example.validation]
        if not checks:
            return ""
        if len(checks) == 1:
            (check,) = checks
            beaten, N = check.beaten(check.winner), len(check.random)
            if not check.is_telling:
                return "; removal says little here"
            return f"; {check.winner} wins removal, better than {beaten} of {N} random orders"
        wins = Counter(check.winner for check in checks).most_common()
        told = ", ".join(f"{name} {count}" for name, count in wins)
        return f"; wins of removal: {told} of {len(checks)}"

    def _size(self) -> str:
        (example,) = self.examples
        if example.image is not None:
            kind = "an image" if example.image.ndim == 3 else "a video"
            return f"{kind} of " + " x ".join(map(str, example.image.shape[:-1]))
        if example.series is not None:
            kind = "a series" if example.series.ndim == 2 else "a row"
            return f"{kind} of " + " x ".join(map(str, example.series.shape))
        count = len(example.outputs)
        pictures = "".join(f", {picture.name}" for picture in example.pictures)
        return f"{len(example.tokens)} tokens{pictures}, {count} output{'s' * (count > 1)}"

    def __len__(self) -> int:
        return len(self.examples)

    def __iter__(self) -> Iterator[Explanation]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int | slice) -> Explanation:
        if not isinstance(index, slice) and not -len(self) <= index < len(self):
            raise IndexError(f"the index is {index}; expected an example, 0 .. {len(self) - 1}.")
        chosen = self.examples[index]
        return replace(self, examples=chosen if isinstance(chosen, tuple) else (chosen,))

    def __add__(self, other: Explanation) -> Explanation:
        if not isinstance(other, Explanation):
            return NotImplemented
        mine, theirs = ([(m.name, dict(m.options)) for m in held.methods] for held in (self, other))
        if mine != theirs:
            raise ValueError(
                f"the explanations were made by {_told(mine)} and by {_told(theirs)}; expected the "
                "same methods with the same options, in the same order."
            )
        return self._with(other, ", ", examples=self.examples + other.examples)

    def __radd__(self, other: int) -> Explanation:
        return self if other == 0 else NotImplemented  # what sum() begins with

    def relevance(
        self,
        method: str | None = None,
        output: int = 0,
        answer: str | int | None = None,
        against: str | int | None = None,
        example: int = 0,
        units: str = "token",
        hop: int = 0,
    ) -> np.ndarray:
        """One row of relevance.

        Args:
            method (str, optional): its name; None for the first. Default: None
            output (int, optional): which of the example's outputs, negative from the end.
                Default: 0
            answer (str or int, optional): what is explained there, by its text or id; None for
                the token of the text, or the target. Default: None
            against (str or int, optional): another answer: the relevance of the difference
                between the two scores. Computed from the difference where it was explained as
                such, else the difference of the two rows. Default: None
            example (int, optional): negative from the end. Default: 0
            units (str, optional): ``"token"``, or units of the example (``"word"``,
                ``"sentence"``, ``"line"``, ``"span"``), over which relevance is summed.
                Default: ``"token"``
            hop (int, optional): how often relevance on the continuation is handed on to what that
                was written from, of outputs that were explained with hops. Default: 0

        Returns:
            numpy.ndarray: ``(L,)``, or one number per unit; ``(H, W)`` for an image,
            ``(T, H, W)`` for a video, ``(T, F)`` for a series, ``(F,)`` for a row of a table.

        Raises:
            ValueError: for a method, output, answer, example, units or hop that it does not hold;
                the message lists those that it does.

        Examples::

            >>> explanation = explain(model, tokenizer, "w3 w4 w5", target="w6", against="w7")
            >>> explanation.relevance("mamba-lrp", against="w7", units="word").shape
            (4,)
        """
        names = [method.name for method in self.methods]
        name = names[0] if method is None else method
        if name not in names:
            raise ValueError(f"method is {brief(method)}; expected {' or '.join(names)}.")
        shown = _item(self.examples, example, "example")
        rows = shown.relevance[name]
        of = _item(shown.outputs, output, "output")
        plus, minus = _hop(of, hop, answer, against) if hop else _rows(of, answer, against)
        row = rows[plus] if minus is None else rows[plus] - rows[minus]
        return summed(row, spans_of(shown, units))

    def save(self, path: str | Path) -> None:
        """Write it to ``path``, JSON; maps, if any, to a file in safetensors' format next to it.

        The same explanation is always the same bytes, and numbers come back exactly.

        Args:
            path (str or Path): ends in ``.json``; maps are written to the same name with
                ``.safetensors``.

        Raises:
            ValueError: for another ending, or numbers that are not finite.
            OSError: where it cannot be written, such as in a folder that does not exist.
        """
        _file.save(vars(self), path)

    @classmethod
    def load(cls, path: str | Path) -> Explanation:
        """Open what :meth:`save` wrote; needs neither the model nor PyTorch.

        Args:
            path (str or Path): the ``.json`` file; that of its maps has to lie next to it.

        Raises:
            ValueError: for a file that is not an explanation, or one of another version.
            OSError: where a file is missing.
        """
        return cls(**_file.load(path))

    def to_pandas(self, units: str = "token") -> pandas.DataFrame:
        """A table with one row per example, method, output, answer and unit.

        Its columns are ``example``, ``method``, ``output`` (the token at which the answer is
        read), ``answer``, ``against`` (of a contrast, else empty), ``unit``, ``position`` (of the
        unit's first token), ``text``, ``value``, ``share`` (of the row's total magnitude) and
        ``hop`` (0, or how often relevance was handed on).

        Args:
            units (str, optional): as for :meth:`relevance`. Default: ``"token"``

        Raises:
            ImportError: without pandas.
            ValueError: for images, whose relevance is :meth:`relevance`, and for unknown units.
        """
        return tables.to_pandas(self.methods, self.examples, units)

    def to_captum(self) -> list[Any]:
        """Captum's records of texts, one per example, method, output and explained answer.

        Returns:
            list of captum.attr.visualization.VisualizationDataRecord: for Captum's
            ``visualize_text`` and :func:`captum_ssm.visualization.text_html`.

        Raises:
            ValueError: for images.
        """
        return tables.to_captum(self.methods, self.examples)

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
        from captum_ssm.explanation.page import page_html

        return _file.page_or_file(lambda: page_html(self), path)

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        # IPython calls it for what a notebook shows.
        from captum_ssm.explanation.page import notebook_bundle

        return notebook_bundle(self, **kwargs)

    def mean(self) -> Summary:
        """What all examples have in common: which tokens, and which distances, matter.

        Returns:
            Summary: means over the rows of what is explained first at each output.

        Raises:
            ValueError: for images.

        Examples::

            >>> both = explain(model, tokenizer, ["w3 w4 w5", "w4 w6"])
            >>> [entry.key for entry in both.mean().by_distance]
            [0, 1, 2]
        """
        return summary(self.methods, self.examples)

    def difference(self, other: Explanation) -> Explanation:
        """This explanation minus another one of the same texts or images by the same methods.

        For two models, or two sets of options: every row is the difference of the rows that
        explain the same answer at the same token.

        Args:
            other (Explanation): what is taken away.

        Returns:
            Explanation: with the predictions of this one, and without answers that only one of
            the two explains.

        Raises:
            ValueError: where examples, methods or explained answers are not the same.

        Examples::

            >>> first = explain(model, tokenizer, "w3 w4 w5", target="w6")
            >>> float(abs(first.difference(first).relevance()).max())
            0.0
        """
        names = [[method.name for method in held.methods] for held in (self, other)]
        if names[0] != names[1]:
            raise ValueError(
                f"the explanations were made by {', '.join(names[0])} and by "
                f"{', '.join(names[1])}; expected the same methods in the same order."
            )
        if len(self) != len(other):
            raise ValueError(
                f"the explanations are of {len(self)} and {len(other)} examples; expected the same "
                "examples. explanation[i] is one of them."
            )
        examples = tuple(map(difference, self.examples, other.examples))
        title = self.title if self.title == other.title else f"{self.title} minus {other.title}"
        return self._with(other, " minus ", title=title, examples=examples)

    def _with(self, other: Explanation, between: str, **changes: Any) -> Explanation:
        # Settings and versions stay where both have them.
        for name in ("settings", "versions"):
            mine, theirs = getattr(self, name), getattr(other, name)
            changes[name] = {k: v for k, v in mine.items() if theirs.get(k) == v}
        both = f"{self.model}{between}{other.model}"
        return replace(self, model=self.model if self.model == other.model else both, **changes)


def _told(methods: Sequence[tuple[str, dict[str, Any]]]) -> str:
    return ", ".join(name + (f" {options}" if options else "") for name, options in methods)


def _item(items: tuple[Any, ...], index: int, what: str) -> Any:
    if not -len(items) <= index < len(items):
        raise ValueError(
            f"{what} is {index}; expected 0 .. {len(items) - 1} (or -{len(items)} .. -1 from the "
            "end)."
        )
    return items[index]


def _rows(
    output: Output, answer: str | int | None, against: str | int | None
) -> tuple[int, int | None]:
    plus = output.chosen if answer is None else _answer(output, answer, "answer")
    minus = None if against is None else _answer(output, against, "against")
    for contrast in output.contrasts:
        if (contrast.answer, contrast.against) == (plus, minus):
            return contrast.row, None
    if plus == minus:
        raise ValueError(f"against is {brief(against)}, the answer itself; choose another answer.")
    rows = [None if i is None else _row(output, i) for i in (plus, minus)]
    assert rows[0] is not None
    return rows[0], rows[1]


def _hop(
    output: Output, hop: int, answer: str | int | None, against: str | int | None
) -> tuple[int, None]:
    if not 0 <= hop <= len(output.hops):
        raise ValueError(
            f"hop is {hop}; expected 0 .. {len(output.hops)}. explain(..., hops=...) computes more."
        )
    is_chosen = answer is None or _answer(output, answer, "answer") == output.chosen
    if not is_chosen or against is not None:
        raise ValueError(
            f"hop is {hop} and the answer is {brief(answer)} against {brief(against)}; expected "
            "hop=0 for them: hops are computed of the chosen answer alone."
        )
    return output.hops[hop - 1], None


def _row(output: Output, index: int) -> int:
    answer = output.answers[index]
    if answer.row is None:
        raise ValueError(
            f"the answer {answer.text!r} was not explained; expected {_explained(output)}. "
            "explain(..., against=...) or alternatives= explains more of them."
        )
    return answer.row


def _answer(output: Output, wanted: str | int, name: str) -> int:
    for key in (lambda text: text, str.strip):
        for i, answer in enumerate(output.answers):
            if wanted == answer.id or (isinstance(wanted, str) and key(answer.text) == key(wanted)):
                return i
    raise ValueError(f"{name} is {brief(wanted)}; expected {_explained(output)}.")


def _explained(output: Output) -> str:
    return " or ".join(repr(answer.text) for answer in output.answers if answer.row is not None)
