"""A chat template: the text that it makes of messages, and where each of them stands in it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from captum_ssm.errors import InputError
from captum_ssm.explanation.make.inputs.reading import TokenizedText, read

# Characters of private use stand for a message's content while the template is read.
MARK = "\ue000{}\ue001"
_MARKS = re.compile("\ue000(\\d+)\ue001")

Message = dict[str, Any]
MessageSpan = tuple[int, int, int]  # a message's index, its first character, the one after its last


@dataclass(frozen=True)
class Rendering:
    """What a template makes of messages.

    Args:
        text (TokenizedText): as the model reads it.
        spans (list of MessageSpan, optional): where it holds what messages say; None where the text
            does not tell.
        said (frozenset of int): the messages that say something.
    """

    text: TokenizedText
    spans: list[MessageSpan] | None
    said: frozenset[int]

    @property
    def messages(self) -> frozenset[int]:
        """The messages whose span is known."""
        return frozenset(index for index, _, _ in self.spans or []) & self.said


def rendered(tokenizer: Any, messages: Sequence[Message], is_open: bool) -> Rendering:
    """Messages as a tokenizer's chat template renders them.

    Contents are given as texts. Some templates, of models that also read images, take lists of
    parts alone, and refuse a text or leave it out: they get one part.

    Args:
        tokenizer (TokenizerLike): with a chat template.
        messages (sequence of dict): each with a role and a text as its content.
        is_open (bool): whether the text ends where the assistant begins to answer.

    Raises:
        InputError: for messages that the template refuses.
    """
    try:
        rendering = _rendering(tokenizer, messages, is_open, str)
    except InputError as error:
        try:
            return _rendering(tokenizer, messages, is_open, _one_part)
        except InputError:
            raise error from error.__cause__
    if rendering.messages or not rendering.said:
        return rendering
    try:
        parts = _rendering(tokenizer, messages, is_open, _one_part)
    except InputError:
        return rendering
    return parts if parts.messages else rendering


def _one_part(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def _rendering(
    tokenizer: Any, messages: Sequence[Message], is_open: bool, form: Callable[[str], Any]
) -> Rendering:
    # The template is rendered with marks in the place of the contents, and the text tells what
    # stands there.
    said = frozenset(k for k, message in enumerate(messages) if message["content"].strip())
    text = _applied(tokenizer, messages, is_open, form)
    marked = [
        {**message, "content": MARK.format(k)} if k in said else message
        for k, message in enumerate(messages)
    ]
    pieces = _MARKS.split(_applied(tokenizer, marked, is_open, form))
    literals, marks = pieces[::2], [int(index) for index in pieces[1::2]]
    spans = _matched(literals, [_forms(messages[k]["content"]) for k in marks], text)
    # A template may also change what is said, such as leave out its reasoning.
    spans = spans or _matched(literals, [".*?"] * len(marks), text)
    whole = read(tokenizer, text, "messages", special=False)
    if spans is None:
        return Rendering(whole, None, said)
    parts = [(k, start, end) for k, (start, end) in zip(marks, spans, strict=True)]
    return Rendering(whole, parts, said)


def _applied(
    tokenizer: Any, messages: Sequence[Message], is_open: bool, form: Callable[[str], Any]
) -> str:
    shaped = [{**message, "content": form(message["content"])} for message in messages]
    try:
        text = tokenizer.apply_chat_template(shaped, tokenize=False, add_generation_prompt=is_open)
    except Exception as error:  # a template raises what it likes
        roles = ", ".join(message["role"] for message in messages)
        raise InputError(
            f"The chat template refuses these messages (roles: {roles}): {error}"
        ) from error
    return str(text)


def _matched(
    literals: Sequence[str], patterns: Sequence[str], text: str
) -> list[tuple[int, int]] | None:
    first, *others = [re.escape(literal) for literal in literals]
    pattern = first + "".join(
        f"({said}){after}" for said, after in zip(patterns, others, strict=True)
    )
    match = re.fullmatch(pattern, text, re.DOTALL)
    return match and [match.span(k + 1) for k in range(len(patterns))]


def _forms(content: str) -> str:
    # As it is, or without white space around it, as many templates put it.
    forms = (content, content.strip(), content.lstrip(), content.rstrip())
    return "|".join(re.escape(form) for form in dict.fromkeys(forms))
