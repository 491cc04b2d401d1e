"""What is asked about texts: by the kind of output that the model has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from captum_ssm.errors import InputError
from captum_ssm.explanation.make.inputs.parse_inputs import Text, numbered, read_texts
from captum_ssm.explanation.make.inputs.reading import TokenizedText
from captum_ssm.explanation.make.questions.arrays import ArrayQuestion
from captum_ssm.explanation.make.questions.base import Setup, per_example
from captum_ssm.explanation.make.questions.classes import ClassQuestion
from captum_ssm.explanation.make.questions.kinds import Kind, Task
from captum_ssm.explanation.make.questions.spans import SpanQuestion
from captum_ssm.explanation.make.questions.texts import TextQuestion
from captum_ssm.explanation.make.relevance.captum_methods import CaptumRows
from captum_ssm.explanation.parts import SWAPS

# A question about one input: how long that is (``size``), and what answers it (``answer``).
Answerable = TextQuestion | ClassQuestion | SpanQuestion | ArrayQuestion
QUESTIONS: dict[Kind, Any] = {
    "tokens": TextQuestion,
    "classes": ClassQuestion,
    "labels": ClassQuestion,
    "spans": SpanQuestion,
}


def require_known_to_media(setup: Setup, texts: Sequence[TokenizedText]) -> None:
    """Raise for what would leave out images or sound that go with a text, or take them as words."""
    media = [text.media for text in texts if text.media is not None]
    if not media:
        return
    names = ", ".join(media[0].arguments)
    for name in [name for name, method in setup.methods.items() if isinstance(method, CaptumRows)]:
        error = InputError(
            f"{name} changes the embeddings of ids or the ids themselves, and the model reads "
            f"{names} with this text, which it would give nothing; expected a method of this "
            "library, such as 'mamba-lrp'."
        )
        if not setup.goes_on_without(name, error):
            raise error
    if setup.validate:
        raise InputError(
            f"validate removes tokens by their ids, and the model reads {names} with this text, "
            "which would stay; leave validate out."
        )
    if setup.answer.through == SWAPS:
        raise InputError(
            f"through is 'swaps', which runs the model on ids alone, and it reads {names} with "
            "this text; expected through='relevance'."
        )


def text_questions(
    setup: Setup,
    texts: Sequence[Text],
    target: Any,
    against: Any,
    tell: Callable[[TokenizedText, bool], Task],
    answers: Sequence[Callable[[Any, Any], tuple[TokenizedText, Any, Any]]] = (),
) -> Sequence[Answerable]:
    """What is asked about each text, all of it checked before anything is computed.

    ``tell`` says what the model puts out, by a text, and whether it is the only one. ``answers``
    are for conversations, where the model continues texts: from targets to the text before each
    answer, the answer, and its rival.

    Raises:
        ValueError, TypeError: as for ``explain``; of several texts they say which.
    """
    readings = read_texts(setup.tokenizer, texts, setup.model, setup.processor)
    require_known_to_media(setup, readings)
    task = tell(readings[0], len(readings) == 1)
    # A list of integers is one continuation, but several classes.
    is_text = task.kind == "tokens"
    targets, others = (
        per_example(name, value, len(texts), is_text)
        for name, value in (("target", target), ("against", against))
    )
    questions = []
    for k, (text, a, b) in enumerate(zip(readings, targets, others, strict=True)):
        with numbered(k, len(texts)):
            arguments = answers[k](a, b) if answers and is_text else (text, a, b)
            questions.append(QUESTIONS[task.kind].of(setup, task, *arguments))
    return questions
