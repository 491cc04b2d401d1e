"""Many inputs explained in the same way: what :func:`explain` is built on, and data sets."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import nn

from captum_ssm.errors import InputError
from captum_ssm.explanation import Example, Explanation, Method
from captum_ssm.explanation.make.answers.whole import AskedAnswer
from captum_ssm.explanation.make.generate import Generation, parse_generation
from captum_ssm.explanation.make.inputs.arrays import Given, Known, inputs_for
from captum_ssm.explanation.make.inputs.media import encoded
from captum_ssm.explanation.make.inputs.parse_inputs import (
    is_tokenizer,
    numbered,
    parse_inputs,
    unpacked,
)
from captum_ssm.explanation.make.inputs.reading import TokenizedText
from captum_ssm.explanation.make.messages import chat_questions, find_messages
from captum_ssm.explanation.make.parse import checked_options, parse_setup, parse_spans
from captum_ssm.explanation.make.questions.arrays import array_questions
from captum_ssm.explanation.make.questions.asked import Answerable, text_questions
from captum_ssm.explanation.make.questions.base import Setup
from captum_ssm.explanation.make.questions.kinds import Task, task_of
from captum_ssm.explanation.make.questions.texts import TextQuestion
from captum_ssm.explanation.make.recorded import Recorded
from captum_ssm.explanation.make.together import Outcome, answered
from captum_ssm.explanation.parts import SPAN
from captum_ssm.utils.allocator import workspace
from captum_ssm.utils.integers import as_index
from captum_ssm.utils.progress import showing

PACKAGES = ("torch", "captum", "transformers", "numpy")
# What an explanation says of how it was made, in this order.
SETTINGS = (
    *("target", "against", "position", "max_new_tokens", "generation", "units", "spans", "span"),
    *("hops", "reasoning", "through", "alternatives", "maps", "layers", "lens", "circuit"),
    *("dtype", "device", "notes"),
)


@dataclass(frozen=True)
class InputRow:
    """One input, and what is asked about it: as :func:`captum_ssm.explain` takes a single one.

    Args:
        inputs (Any): a text, a pair of texts, token ids, an image, a series, or a conversation.
        target, against (Any, optional): Default: None
        span (str or tuple, optional): in place of that of the explainer. Default: None
        units (str or dict, optional): in place of that of the explainer. Default: None
        messages (bool, optional): whether the input is a conversation. Default: False
        recorded (Recorded, optional): what a server recorded of the text and its target.
            Default: None
    """

    inputs: Any
    target: Any = None
    against: Any = None
    span: Any = None
    units: Any = None
    messages: bool = False
    recorded: Recorded | None = None


class Explainer:
    """:func:`captum_ssm.explain` of many inputs, of which none keeps the others from it.

    Args:
        model, tokenizer (Any): as for :func:`captum_ssm.explain`.
        **options: those of :func:`captum_ssm.explain`, without what is about single inputs.

    Examples::

        >>> from captum_ssm.explanation.make.many import Explainer, InputRow
        >>> explainer = Explainer(model, tokenizer, methods="rollout")
        >>> rows = [InputRow("w3 w4"), InputRow(""), InputRow("w5", target="w6")]
        >>> one, bad, other = explainer(rows)
        >>> one.relevance["rollout"].shape, type(bad).__name__, other.text
        ((2, 3), 'InputError', 'w5 w6')
    """

    def __init__(self, model: Any, tokenizer: Any = None, **options: Any) -> None:
        model, tokenizer, _, processor = unpacked(model, tokenizer, None, options.get("processor"))
        self.options = checked_options(options) | {"processor": processor}
        self.setup = parse_setup(model, tokenizer, self.options)
        self._task: Task | None = None
        self._known: Known = {}

    def questions(
        self,
        inputs: Any,
        tensors: Mapping[str, Any] | None = None,
        messages: Any = None,
        target: Any = None,
        against: Any = None,
        row: InputRow | None = None,
    ) -> Sequence[Answerable]:
        """What is asked about one or several inputs, as ``explain`` takes them.

        ``row`` is given where they are one of many rows, which may ask in its own way.

        Raises:
            ValueError, TypeError: as for ``explain``.
        """
        writing, tensors = self._writing(target), {} if tensors is None else tensors
        setup, units = self._setup_of(row)
        messages = find_messages(messages, inputs, tensors, units)
        texts, array = None, None
        if messages is None:
            inputs = encoded(inputs, _processor(setup))
            tokenizer, texts, array = parse_inputs(setup.tokenizer, inputs, tensors)
            setup = replace(setup, tokenizer=tokenizer)
        if self.options["features"] is not None and (messages is not None or texts is not None):
            raise TypeError("features names those of a series or a table, and the input is a text.")
        tell = partial(self._tell, setup, row is None)
        questions: Sequence[Answerable]
        if messages is not None:
            questions = chat_questions(setup, messages, target, against, tell, writing is not None)
        elif texts is not None:
            questions = text_questions(setup, texts, target, against, tell)
        else:
            questions = array_questions(setup, self._given(setup, array), target, against)
        if setup.answer.is_asked or setup.recorded is not None:
            _require_continued(questions, "span or hops" if setup.answer.is_asked else "a record")
        if setup.answer.is_asked and setup.validate:
            raise InputError(
                "validate removes tokens for single outputs, and span or hops explains several "
                "together; leave one of them out."
            )
        return questions

    def _writing(self, target: Any) -> Generation | None:
        length, how = self.options["max_new_tokens"], self.options["generation"]
        return parse_generation(length, how, target, self.setup.position)

    def _setup_of(self, row: InputRow | None) -> tuple[Setup, Any]:
        # How an input is explained, and by which units it is shown: a row may have its own.
        setup, units = self.setup, self.options["units"]
        if row is None:
            return setup, units
        units, answer = units if row.units is None else row.units, setup.answer
        if row.span is not None:
            answer = AskedAnswer.of(row.span, answer.hops, answer.reasoning, answer.through)
        spans, recorded = parse_spans(units), row.recorded
        return replace(setup, spans=spans, answer=answer, recorded=recorded), units

    def _tell(self, setup: Setup, is_all: bool, text: TokenizedText, is_one: bool) -> Task:
        if self._task is None:
            is_one = is_one and is_all
            self._task = task_of(setup.model, text, setup.tokenizer, setup.labels, is_one)
        return self._task

    def _given(self, setup: Setup, arrays: Any) -> Given:
        norms = self.options["mean"], self.options["std"]
        inputs = inputs_for(setup.model, arrays, _processor(setup), *norms, self._known)
        if inputs.note:
            setup.note(inputs.note)
        return inputs.named(self.options["features"])

    def answer(self, questions: Sequence[Answerable], target: Any = None) -> list[Example]:
        """The example of each question."""
        examples: dict[int, Example] = {}
        for k, outcome in self._answered(questions, target):
            if isinstance(outcome, Exception):
                with numbered(k, len(questions)):
                    raise outcome
            examples[k] = outcome
        return [examples[k] for k in range(len(questions))]

    def _answered(
        self, questions: Sequence[Answerable], target: Any
    ) -> Iterator[tuple[int, Outcome]]:
        with showing(None if self.options["show_progress"] else False):
            yield from answered(questions, self._writing(target))

    @workspace()
    def __call__(self, rows: Sequence[InputRow]) -> list[Outcome]:
        """The example of each input, or its error."""
        asked: dict[int, Answerable] = {}
        outcomes: dict[int, Outcome] = {}
        for k, row in enumerate(rows):
            try:
                asked[k] = self._about(row)
            except Exception as error:  # whatever an input of any kind may raise
                outcomes[k] = error
        numbers = list(asked)
        for i, outcome in self._answered(list(asked.values()), None):
            outcomes[numbers[i]] = outcome
        return [outcomes[k] for k in range(len(rows))]

    def _about(self, row: InputRow) -> Answerable:
        inputs, messages = (None, row.inputs) if row.messages else (row.inputs, None)
        questions = self.questions(inputs, None, messages, row.target, row.against, row)
        if len(questions) != 1:
            raise InputError(f"this holds {len(questions)} inputs; expected one.")
        return questions[0]

    def size(self, row: InputRow) -> int:
        """How many tokens or numbers an input has."""
        return self._about(row).size

    def heading(self, examples: Sequence[Example]) -> str:
        """The title of an explanation of these examples."""
        title = self.options["title"]
        return _title(examples, _name(self.setup.model)) if title is None else str(title)

    def explanation(
        self, examples: Iterable[Example], target: Any = None, against: Any = None
    ) -> Explanation:
        """The explanation that holds these examples, and how they were made."""
        setup, answer, examples = self.setup, self.setup.answer, tuple(examples)
        first = next(setup.model.parameters())
        asked = {"target": target, "against": against, "span": answer.span, "hops": answer.hops}
        asked["through"] = answer.through if answer.hops else None
        asked["units"] = "span" if setup.spans else self.options["units"]
        ran = {"dtype": str(first.dtype).removeprefix("torch."), "device": str(first.device)}
        values = {**self.options, **vars(setup), **asked, **ran}
        name = _name(setup.model)
        return Explanation(
            self.heading(examples),
            name,
            tuple(
                Method(name, method.title, method.note, method.adds_up, plain(method.options))
                for name, method in setup.methods.items()
            ),
            examples,
            plain({name: values[name] for name in SETTINGS}),
            _versions(),
        )


def _processor(setup: Setup) -> Any:
    # It may stand in the tokenizer's place.
    processor = None if is_tokenizer(setup.tokenizer) else setup.tokenizer
    return processor if setup.processor is None else setup.processor


def _require_continued(questions: Sequence[Answerable], name: str) -> None:
    # Only where a text is continued, several tokens are explained together, or were recorded.
    if not all(isinstance(question, TextQuestion) for question in questions):
        raise TypeError(
            f"{name} is given, and the model does not continue texts: expected a language "
            "model and a text."
        )


def plain(value: Any, other: Callable[[Any], Any] = str) -> Any:
    """A value as JSON gives it back; ``other`` says what stands for an object."""
    if isinstance(value, Mapping):
        return {str(key): plain(item, other) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, other) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):
        return plain(value.tolist(), other)
    index = as_index(value)
    return other(value) if index is None else index


def _name(model: nn.Module) -> str:
    name = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    if not name:
        return type(model).__name__
    return Path(name).name if Path(name).is_dir() else name


def _title(examples: Sequence[Example], name: str) -> str:
    is_one = len(examples) == 1 and len(examples[0].outputs) == 1
    if is_one or (len(examples) == 1 and examples[0].outputs[0].role == SPAN):
        output = examples[0].outputs[0]
        return f"Why “{output.answers[output.chosen].text.strip()}”?"
    return f"What {name} reads"


def _versions() -> dict[str, str]:
    release = import_module("captum_ssm").__version__
    versions = {"captum_ssm": release, "python": sys.version.split()[0]}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
