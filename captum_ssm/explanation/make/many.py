"""Many inputs explained in the same way: what :func:`explain` is built on, and data sets."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from captum_ssm.capture import Readout
from captum_ssm.errors import InputError
from captum_ssm.explanation import Example, Explanation, Method
from captum_ssm.explanation.make.answers.whole import AskedAnswer
from captum_ssm.explanation.make.generate import Generation, parse_generation
from captum_ssm.explanation.make.inputs.arrays import Known, given
from captum_ssm.explanation.make.inputs.media import encoded
from captum_ssm.explanation.make.inputs.parse_inputs import is_tokenizer, numbered, parse_inputs
from captum_ssm.explanation.make.inputs.pipelines import unpacked
from captum_ssm.explanation.make.inputs.reading import TokenizedText
from captum_ssm.explanation.make.messages import chat_questions, find_messages
from captum_ssm.explanation.make.parse import parse_setup, parse_spans
from captum_ssm.explanation.make.questions.arrays import array_questions
from captum_ssm.explanation.make.questions.asked import Answerable, text_questions
from captum_ssm.explanation.make.questions.base import TextSetup
from captum_ssm.explanation.make.questions.kinds import Task, task_of
from captum_ssm.explanation.make.questions.texts import TextQuestion
from captum_ssm.explanation.make.recorded import Recorded
from captum_ssm.explanation.make.relevance.rows import RowSource
from captum_ssm.explanation.make.together import Outcome, answered
from captum_ssm.explanation.parts import RELEVANCE, SPAN
from captum_ssm.utils.allocator import workspace
from captum_ssm.utils.integers import as_index
from captum_ssm.utils.progress import showing

PACKAGES = ("torch", "captum", "transformers", "numpy")


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

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        *,
        max_new_tokens: Any = None,
        generation: Any = None,
        methods: Any = ("mamba-lrp",),
        validate: bool = False,
        span: Any = None,
        hops: Any = None,
        reasoning: Any = None,
        through: Any = RELEVANCE,
        position: Any = None,
        units: Any = "token",
        alternatives: Any = 1,
        maps: Any = False,
        layers: Any = None,
        lens: bool = False,
        circuit: bool = False,
        processor: Any = None,
        labels: Any = None,
        features: Any = None,
        mean: Any = None,
        std: Any = None,
        title: str | None = None,
        memory_limit: int | None = None,
        show_progress: bool = True,
    ) -> None:
        model, tokenizer, _, processor = unpacked(model, tokenizer, None, processor)
        how = methods, alternatives, maps, layers, lens, memory_limit
        self.setup = parse_setup(model, *how, tokenizer, validate, circuit)
        if labels is None and isinstance(model, Readout) and model.names:
            labels = model.names
        self.processor, self.labels, self.features = processor, labels, features
        self.mean, self.std, self.title = mean, std, title
        self.max_new_tokens, self.generation = max_new_tokens, generation
        self.units, self.reasoning, self.show_progress = units, reasoning, show_progress
        self.asked = TextSetup(
            tokenizer,
            position,
            parse_spans(units),
            AskedAnswer.of(span, hops, reasoning, through),
            processor=processor,
        )
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
        writing = self._writing(target)
        setup, tensors = self.setup, {} if tensors is None else tensors
        asked, units = self._asked_of(row)
        messages = find_messages(messages, inputs, tensors, units)
        texts, array = None, None
        if messages is None:
            inputs = encoded(inputs, self._processor(asked.tokenizer))
            tokenizer, texts, array = parse_inputs(asked.tokenizer, inputs, tensors)
            asked = replace(asked, tokenizer=tokenizer)
        if self.features is not None and (messages is not None or texts is not None):
            raise TypeError("features names those of a series or a table, and the input is a text.")
        tell = partial(self._tell, asked.tokenizer, row is None)
        found: Sequence[Answerable]
        if messages is not None:
            is_written = writing is not None
            found = chat_questions(setup, messages, target, against, tell, asked, is_written)
        elif texts is not None:
            found = text_questions(setup, texts, target, against, tell, asked)
        else:
            found = self._about_arrays(array, asked.tokenizer, target, against)
        if asked.answer.is_asked or asked.recorded is not None:
            _require_continued(found, "span or hops" if asked.answer.is_asked else "a record")
        if asked.answer.is_asked and setup.validate:
            raise InputError(
                "validate removes tokens for single outputs, and span or hops explains several "
                "together; leave one of them out."
            )
        return found

    def _writing(self, target: Any) -> Generation | None:
        return parse_generation(self.max_new_tokens, self.generation, target, self.asked.position)

    def _asked_of(self, row: InputRow | None) -> tuple[TextSetup, Any]:
        # What is asked about texts, and by which units: a row may have its own.
        if row is None:
            return self.asked, self.units
        units, answer = self.units if row.units is None else row.units, self.asked.answer
        if row.span is not None:
            answer = AskedAnswer.of(row.span, answer.hops, answer.reasoning, answer.through)
        spans, recorded = parse_spans(units), row.recorded
        return replace(self.asked, spans=spans, answer=answer, recorded=recorded), units

    def _tell(self, tokenizer: Any, is_all: bool, text: TokenizedText, is_one: bool) -> Task:
        if self._task is None:
            is_one = is_one and is_all
            self._task = task_of(self.setup.model, text, tokenizer, self.labels, is_one)
        return self._task

    def _processor(self, tokenizer: Any) -> Any:
        # It may stand in the tokenizer's place.
        own = None if is_tokenizer(tokenizer) else tokenizer
        return own if self.processor is None else self.processor

    def _about_arrays(
        self, arrays: Any, tokenizer: Any, target: Any, against: Any
    ) -> Sequence[Answerable]:
        processor = self._processor(tokenizer)
        found = given(self.setup.model, arrays, processor, self.mean, self.std, self._known)
        found = found.named(self.features)
        if found.note:
            self.setup.note(found.note)
        return array_questions(found, target, against, self.labels)

    def answer(self, questions: Sequence[Answerable], target: Any = None) -> list[Example]:
        """The example of each question.

        Raises:
            ValueError, TypeError: as for ``explain``; of several inputs they say which.
        """
        found: dict[int, Example] = {}
        for k, outcome in self._answered(questions, target):
            if isinstance(outcome, Exception):
                with numbered(k, len(questions)):
                    raise outcome
            found[k] = outcome
        return [found[k] for k in range(len(questions))]

    def _answered(
        self, questions: Sequence[Answerable], target: Any
    ) -> Iterator[tuple[int, Outcome]]:
        with showing(None if self.show_progress else False):
            yield from answered(self.setup, questions, self._writing(target))

    @workspace()
    def __call__(self, rows: Sequence[InputRow]) -> list[Outcome]:
        """The example of each input, or its error.

        Args:
            rows (sequence of InputRow): the inputs.

        Returns:
            list: of :class:`~captum_ssm.explanation.Example` and exceptions, in the order of the
            inputs.
        """
        asked: dict[int, Answerable] = {}
        found: dict[int, Outcome] = {}
        for k, row in enumerate(rows):
            try:
                asked[k] = self._about(row)
            except Exception as error:  # whatever an input of any kind may raise
                found[k] = error
        places = list(asked)
        for i, outcome in self._answered(list(asked.values()), None):
            found[places[i]] = outcome
        return [found[k] for k in range(len(rows))]

    def _about(self, row: InputRow) -> Answerable:
        inputs, messages = (None, row.inputs) if row.messages else (row.inputs, None)
        found = self.questions(inputs, None, messages, row.target, row.against, row)
        if len(found) != 1:
            raise InputError(f"this holds {len(found)} inputs; expected one.")
        return found[0]

    def size(self, row: InputRow) -> int:
        """How many tokens or numbers an input has.

        Raises:
            ValueError, TypeError: as for ``explain``.
        """
        return self._about(row).size

    def heading(self, examples: Sequence[Example]) -> str:
        """The title of an explanation of these examples."""
        return _title(examples, _name(self.setup.model)) if self.title is None else self.title

    def explanation(
        self, examples: Iterable[Example], target: Any = None, against: Any = None
    ) -> Explanation:
        """The explanation that holds these examples, and how they were made."""
        setup, asked, examples = self.setup, self.asked, tuple(examples)
        first = next(setup.model.parameters())
        settings = {
            "target": target,
            "against": against,
            "position": asked.position,
            "max_new_tokens": self.max_new_tokens,
            "generation": self.generation,
            "units": "span" if asked.spans else self.units,
            "spans": asked.spans,
            "span": asked.answer.span,
            "hops": asked.answer.hops,
            "reasoning": self.reasoning,
            "through": asked.answer.through if asked.answer.hops else None,
            "alternatives": setup.alternatives,
            "maps": setup.maps,
            "layers": setup.layers,
            "lens": setup.lens,
            "circuit": setup.circuit,
            "dtype": str(first.dtype).removeprefix("torch."),
            "device": str(first.device),
            "notes": setup.notes,
        }
        name = _name(setup.model)
        return Explanation(
            self.heading(examples),
            name,
            tuple(_method(name, source) for name, source in setup.methods.items()),
            examples,
            _plain(settings),
            _versions(),
        )


def _require_continued(questions: Sequence[Answerable], name: str) -> None:
    # Only where a text is continued, several tokens are explained together, or were recorded.
    if not all(isinstance(one, TextQuestion) for one in questions):
        raise TypeError(
            f"{name} is given, and the model does not continue texts: expected a language "
            "model and a text."
        )


def _method(name: str, source: RowSource) -> Method:
    return Method(name, source.title, source.note, source.adds_up, _plain(source.options))


def _plain(value: Any) -> Any:
    # JSON gives the result back as it is.
    if torch.is_tensor(value):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    index = as_index(value)
    return str(value) if index is None else index


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
    own = import_module("captum_ssm").__version__
    versions = {"captum_ssm": own, "python": sys.version.split()[0]}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
