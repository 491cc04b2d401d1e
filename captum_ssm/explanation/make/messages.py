"""A conversation as the model reads it: the chat template's text, and whose part is where."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from captum_ssm.errors import InputError, brief
from captum_ssm.explanation.make.inputs.parse_inputs import numbered, warn_of_unknown
from captum_ssm.explanation.make.inputs.reading import TokenizedText
from captum_ssm.explanation.make.inputs.templates import Message, Rendering, rendered
from captum_ssm.explanation.make.questions.asked import Answerable, text_questions
from captum_ssm.explanation.make.questions.base import Setup
from captum_ssm.explanation.make.questions.kinds import Task
from captum_ssm.explanation.units import Turn, Turns, belongs

ANSWERS = "assistant"  # the role whose last message is the answer


def find_messages(messages: Any, inputs: Any, tensors: Mapping[str, Any], units: Any = None) -> Any:
    """The conversations among what ``explain`` is given; None if there are none.

    Raises:
        TypeError: where something else is given as well.
        ValueError: for units that need a conversation.
    """
    conversations = inputs if messages is None and _are_messages(inputs) else messages
    if conversations is None and isinstance(units, str) and units == "turn":
        raise InputError("units is 'turn', and there is no conversation; expected messages=[...].")
    others = [value for value in (inputs, *tensors.values()) if value is not None]
    if messages is not None and others:
        raise TypeError(
            "messages is given together with another input; expected one of them: "
            "explain(model, tokenizer, messages=[...])."
        )
    return conversations


def _are_messages(inputs: Any) -> bool:
    if isinstance(inputs, Mapping):
        return "role" in inputs
    if not isinstance(inputs, (list, tuple)) or not inputs:
        return False
    return isinstance(inputs[0], (Mapping, list, tuple)) and _are_messages(inputs[0])


def chat_questions(
    setup: Setup,
    messages: Any,
    target: Any,
    against: Any,
    tell: Callable[[TokenizedText, bool], Task],
    is_written: bool = False,
) -> Sequence[Answerable]:
    """What is asked about each conversation.

    The assistant's last message, or a target that is a text, is the answer; the chat template puts
    it into the conversation, so its tokens are those that the model was trained on. A model that
    tells classes reads the whole conversation.

    ``tell`` says what the model puts out, by a text, and whether it is the only one. ``is_written``
    tells whether the model writes the answer.

    Raises:
        ValueError, TypeError: for what is not a conversation, and a tokenizer without a template.
    """
    conversations = _parse(messages)
    _require_template(setup.tokenizer)
    chats = [Conversation(setup.tokenizer, tuple(said)) for said in conversations]
    B = len(chats)
    whole = []
    for k, chat in enumerate(chats):
        with numbered(k, B):
            whole.append(chat.whole())
    warn_of_unknown(whole, stacklevel=6)
    answers = [partial(chat.asked, is_written) for chat in chats]
    return text_questions(setup, whole, target, against, tell, answers)


@dataclass(frozen=True)
class Conversation:
    """A conversation, read by the tokenizer's chat template."""

    tokenizer: Any
    messages: tuple[Message, ...]

    @classmethod
    def of(cls, tokenizer: Any, messages: Any) -> Conversation:
        """One conversation, checked."""
        (said,) = _parse([messages])
        _require_template(tokenizer)
        return cls(tokenizer, tuple(said))

    def opened(self) -> TokenizedText:
        """All that is said, up to where the assistant begins to answer."""
        return self._marked(rendered(self.tokenizer, self.messages, True))

    def whole(self) -> TokenizedText:
        """All that is said, without room for an answer."""
        return self._marked(rendered(self.tokenizer, self.messages, False))

    def asked(self, is_written: bool, target: Any, against: Any) -> tuple[TokenizedText, Any, Any]:
        """The text before the answer, the answer if there is one, and what it is held against.

        Raises:
            InputError: for two answers, or one that the template does not put into the text.
        """
        if self.messages[-1]["role"] == ANSWERS:
            _require_no_other_answer(target, is_written)
            before = Conversation(self.tokenizer, self.messages[:-1])
            return before.asked(False, self.messages[-1]["content"], against)
        opened = rendered(self.tokenizer, self.messages, True)
        prompt = self._marked(opened)
        if isinstance(target, str):
            prompt, target = self._answered(target, opened)
        self._warn(opened)
        if isinstance(against, str):
            against = self._rival(against, opened, prompt)
        return prompt, target, against

    def _answered(self, answer: str, opened: Rendering) -> tuple[TokenizedText, TokenizedText]:
        # The text before an answer, and the answer.
        said = (*self.messages, {"role": ANSWERS, "content": answer})
        whole = rendered(self.tokenizer, said, False)
        bounds = [(start, end) for k, start, end in whole.spans or [] if k == len(said) - 1]
        tokens = whole.text.tokens
        inside = [k for k, token in enumerate(tokens) if bounds and belongs(token, *bounds[0])]
        if not inside:
            raise InputError(
                f"The answer is {brief(answer)}, and the chat template does not put it into the "
                "text as it is; expected an answer that stands there. Pass its token ids: "
                "target=ids."
            )
        before = replace(whole, text=_cut(whole.text, 0, inside[0]))
        # A template may leave a message out once it is answered, such as the system's.
        prompt = self._marked(opened if opened.messages - whole.messages else before)
        return prompt, _cut(whole.text, inside[0], inside[-1] + 1)

    def _warn(self, opened: Rendering) -> None:
        unmarked = opened.said - opened.messages
        if unmarked:
            names = ", ".join(_name(self.messages, k) for k in sorted(unmarked))
            warnings.warn(
                "The chat template does not put what these messages say into the text as it is, so "
                f"their tokens are not marked as turns: {names}.",
                UserWarning,
                stacklevel=7,
            )

    def _rival(self, answer: str, opened: Rendering, prompt: TokenizedText) -> list[int]:
        # Another answer after the same prompt, which may end before white space of the template.
        before, other = self._answered(answer, opened)
        ids, P = before.ids + other.ids, len(prompt.tokens)
        return ids[P:] if ids[:P] == prompt.ids and len(ids) > P else other.ids

    def _marked(self, rendering: Rendering) -> TokenizedText:
        # The text with whose turn each part of it is, if that is known.
        if rendering.spans is None:
            return rendering.text
        L = len(self.messages)
        speaker = _name([*self.messages, {"role": ANSWERS}], L)
        said = [span for span in rendering.spans if span[0] < L]
        turns = tuple(Turn(_name(self.messages, k), start, end) for k, start, end in said)
        return replace(rendering.text, turns=Turns(turns, speaker))


def _cut(text: TokenizedText, first: int, end: int) -> TokenizedText:
    tokens = text.tokens[first:end]
    start = tokens[0].start
    moved = [replace(token, start=token.start - start, end=token.end - start) for token in tokens]
    return TokenizedText(text.text[start : tokens[-1].end], tuple(moved))


def _name(messages: Sequence[Message], index: int) -> str:
    roles = Counter(message["role"] for message in messages[: index + 1])
    role = messages[index]["role"]
    return f"{role} {roles[role]}"


# Messages, checked.


def _parse(messages: Any) -> list[list[Message]]:
    several = messages if isinstance(messages, (list, tuple)) else [messages]
    if several and all(isinstance(entry, (list, tuple)) for entry in several):
        return [_conversation(entry, f"messages[{k}]") for k, entry in enumerate(several)]
    return [_conversation(several, "messages")]


def _conversation(messages: Sequence[Any], name: str) -> list[Message]:
    if not messages:
        raise InputError(f"{name} is empty; expected at least one message.")
    return [_message(message, f"{name}[{k}]") for k, message in enumerate(messages)]


def _message(message: Any, name: str) -> Message:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(
            f"{name} is {brief(message)}; expected a dict with a role and a content, such as "
            "{'role': 'user', 'content': 'Who has the ball?'}."
        )
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        content = ""
    if isinstance(content, (list, tuple)):
        content = "".join(_part(part, f"{name}['content'][{k}]") for k, part in enumerate(content))
    if not isinstance(content, str):
        raise InputError(f"{name}['content'] is {brief(content)}; expected a text.")
    return {**message, "content": content}


def _part(part: Any, name: str) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
    if kind != "text" or not isinstance(text, str):
        what = f"of type {kind!r}" if kind != "text" else repr(part)
        raise InputError(
            f"{name} is {what}; expected {{'type': 'text', 'text': ...}}, since a conversation is "
            "rendered as a text. With images, give what the processor makes of it: "
            "explain(model, processor, processor.apply_chat_template(messages, tokenize=True, "
            "return_dict=True, return_tensors='pt', add_generation_prompt=True))."
        )
    return text


def _require_template(tokenizer: Any) -> None:
    if not callable(getattr(tokenizer, "apply_chat_template", None)):
        raise TypeError(
            "messages is given, and there is no tokenizer with a chat template; expected "
            "explain(model, tokenizer, messages=[...])."
        )
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(
            f"messages is given, and this {type(tokenizer).__name__} has no chat template; set "
            "tokenizer.chat_template to the one that the model was trained with, or pass the text "
            "as the model reads it: explain(model, tokenizer, text)."
        )


def _require_no_other_answer(target: Any, is_written: bool) -> None:
    if target is None and not is_written:
        return
    other = "max_new_tokens" if is_written else "target"
    raise InputError(
        f"The last of messages is the {ANSWERS}'s, which is the answer to explain, and {other} is "
        f"given as well; leave out {other}, or that message."
    )
