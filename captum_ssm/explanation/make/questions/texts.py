"""One text: what the model answers after it, or along it, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from captum_ssm.errors import InputError, TargetError, brief
from captum_ssm.explanation import Example
from captum_ssm.explanation.make.answers.whole import WholeAnswer
from captum_ssm.explanation.make.inputs.media import check_ids
from captum_ssm.explanation.make.inputs.reading import (
    TokenizedText,
    answer_text,
    between,
    is_all,
    positions_in,
    read,
    read_ids,
)
from captum_ssm.explanation.make.questions.base import Choices, Questions, Setup, Steps
from captum_ssm.explanation.make.questions.explained import explained_text
from captum_ssm.explanation.make.questions.kinds import Task
from captum_ssm.explanation.make.questions.lens import Lens
from captum_ssm.explanation.make.questions.observed import Look
from captum_ssm.explanation.make.relevance.run import Run
from captum_ssm.utils.integers import as_index
from captum_ssm.utils.vocabulary import require_known


@dataclass(frozen=True)
class TextQuestion:
    """What is asked about one text, after which, or along which, the model tells the next token."""

    setup: Setup
    task: Task
    prompt: TokenizedText
    target: TokenizedText | None
    against: TokenizedText | None

    @classmethod
    def of(
        cls, setup: Setup, task: Task, text: TokenizedText, target: Any, against: Any
    ) -> TextQuestion:
        """The question, checked: targets are continuations of the text."""
        if text.parts:
            raise InputError(
                "there is a second text (a pair, or token_type_ids), and the model tells the next "
                "token of one; expected one text per example."
            )
        target = _continuation(setup.tokenizer, as_continuation(target), "target")
        against = _continuation(setup.tokenizer, as_continuation(against), "against")
        if setup.answer.is_asked and setup.position is not None:
            raise InputError(
                f"position is {brief(setup.position)}, which explains tokens of the text, and span "
                "or hops explain the continuation together; give one of them."
            )
        question = cls(setup, task, text, target, against)
        if not question.follows_text:
            _require_one_token("target", target)
            _require_one_token("against", against)
        return question

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return len(self.prompt.tokens) + (0 if self.target is None else len(self.target.tokens))

    @property
    def follows_text(self) -> bool:
        """Whether answers are what follows the text, and not any at tokens that were asked for."""
        return positions_in(self.setup.position, len(self.prompt.tokens)) is None

    @property
    def ids(self) -> list[int]:
        """What the model reads."""
        if self.target is None or not self.follows_text:
            return self.prompt.ids
        return self.prompt.ids + self.target.ids[:-1]

    @property
    def positions(self) -> list[int]:
        """The tokens at which answers are explained."""
        P = len(self.prompt.tokens)
        first = 0 if is_all(self.setup.position) else P - 1
        asked = positions_in(self.setup.position, P)
        return list(range(first, len(self.ids))) if asked is None else asked

    def answer(self) -> Steps[Example]:
        """The text, explained."""
        setup = self.setup
        ids = torch.tensor([self.ids], device=next(setup.model.parameters()).device)
        check_ids(ids, setup.model, self.prompt.media)
        recorded, run = setup.recorded, self.task.run_on(self.prompt)
        told = [] if recorded is None else recorded.read_at
        positions = sorted({*self.positions, *told})
        if setup.lens:
            logits, layers = _layered(setup, run, ids, positions)
        else:
            seen = yield Look(run, ids, positions, self.task.first)
            logits, layers = seen.scores[0].float(), []
        _require_ids("target", self.target, logits.shape[-1])
        _require_ids("against", self.against, logits.shape[-1])
        ranks = {position: k for k, position in enumerate(positions)}
        replay = None
        if recorded is not None and self.target is not None:
            tokens = (*self.prompt.tokens, *self.target.tokens)
            replay = recorded.compared(logits[[ranks[position] for position in told]], tokens)
        rows = [ranks[position] for position in self.positions]
        logits, layers = logits[rows], [layer[rows] for layer in layers]
        followed, whole = self._followed(int(logits[-1].argmax()))
        P, answer = len(self.prompt.tokens), setup.answer
        questions = Questions(setup, run, Choices(answer_text(setup.tokenizer)))
        thoughts = answer.thoughts(whole.tokens, P)
        if answer.span is None:
            followed._add(questions, whole, logits, layers)
        if answer.is_asked:
            part = answer.part(whole.tokens, P, thoughts)
            questions.add_answer(WholeAnswer(answer, whole, P, part, run, ids), logits)
        example = yield from explained_text(questions, ids, whole, P)
        return replace(example, reasoning=thoughts, replay=replay)

    def _followed(self, predicted: int) -> tuple[TextQuestion, TokenizedText]:
        # With a target, which is what the model predicts if none was given; and the whole text.
        prompt, tokenizer = self.prompt, self.setup.tokenizer
        if not self.follows_text:
            return self, prompt
        if self.target is None:
            target = _next(tokenizer, prompt, predicted)
            return replace(self, target=target), prompt.followed_by(target)
        return self, prompt.followed_by(self.target, between(tokenizer, prompt, self.target))

    def _add(
        self,
        questions: Questions,
        whole: TokenizedText,
        logits: Tensor,
        layers: Sequence[Tensor],
    ) -> None:
        # One output for each token that is explained by itself.
        contrasts = self._contrasts(logits)
        unknown = getattr(self.setup.tokenizer, "unk_token_id", None)
        follows_text = self.follows_text
        for k, position in enumerate(self.positions):
            chosen, typed = None if self.target is None else self.target.ids[0], None
            if follows_text:
                token = whole.tokens[position + 1]
                chosen, typed = token.id, token.text.strip() if token.id == unknown else None
            lens = [layer[k] for layer in layers]
            questions.add(logits[k], position, chosen, contrasts.get(k), lens, typed)

    def _contrasts(self, logits: Tensor) -> dict[int, int]:
        # By output: what is explained against. Two continuations share what is before their first
        # difference, and nothing after it.
        target, against = self.target, self.against
        if against is None:
            return {}
        if not self.follows_text:
            chosen = [int(row.argmax()) if target is None else target.ids[0] for row in logits]
            if against.ids[0] in chosen:
                raise _itself(against, target is None)
            return dict.fromkeys(range(len(self.positions)), against.ids[0])
        assert target is not None
        pairs = enumerate(zip(target.ids, against.ids, strict=False))
        k = next((k for k, (token, other) in pairs if token != other), None)
        if k is None:
            raise _itself(against, False)
        return {self.positions.index(len(self.prompt.tokens) - 1 + k): against.ids[k]}


def as_continuation(target: Any) -> str | list[int] | TokenizedText | None:
    """A target as a text or as token ids; one that was read already stays as it is.

    Raises:
        TypeError: for what is neither.
    """
    if target is None or isinstance(target, (str, TokenizedText)):
        return target
    index = as_index(target)
    if index is not None:
        return [index]
    values = target.reshape(-1).tolist() if torch.is_tensor(target) else target
    ids = [as_index(value) for value in values] if isinstance(values, Sequence) else [None]
    if None in ids:
        raise TypeError(f"target is {brief(target)}; expected a text, a token id, or several ids.")
    return ids  # type: ignore[return-value]


def _continuation(
    tokenizer: Any, text: str | list[int] | TokenizedText | None, name: str
) -> TokenizedText | None:
    if text is None or isinstance(text, TokenizedText):
        return text
    if not isinstance(text, str):
        return read_ids(tokenizer, text, name)
    if tokenizer is None:
        raise TypeError(f"{name} is {brief(text)}, and there is no tokenizer; expected token ids.")
    continuation = read(tokenizer, text, name, special=False)
    require_known(tokenizer, text, continuation.ids, name, f"{name}= also takes token ids.")
    return continuation


def _next(tokenizer: Any, prompt: TokenizedText, predicted: int) -> TokenizedText:
    # The token is read after the last one of the text, since that tells how it is spaced.
    token = read_ids(tokenizer, [prompt.ids[-1], predicted], "the answer").tokens[1]
    width = token.end - token.start
    return TokenizedText(token.text if width else "", (replace(token, start=0, end=width),))


def _require_one_token(name: str, text: TokenizedText | None) -> None:
    if text is not None and len(text.tokens) > 1:
        parts = ", ".join(repr(token.text) for token in text.tokens)
        raise TargetError(
            f"{name} is {text.text!r}, which has {len(text.tokens)} tokens ({parts}), but with "
            "position it has to be one: the token the model may predict there. Choose one of "
            "them, or remove position."
        )


def _require_ids(name: str, text: TokenizedText | None, V: int) -> None:
    if text is not None and not all(0 <= token < V for token in text.ids):
        raise TargetError(f"{name} is {text.ids}; the model's ids are 0 .. {V - 1}.")


def _layered(
    setup: Setup, run: Run, ids: Tensor, positions: list[int]
) -> tuple[Tensor, list[Tensor]]:
    # The logits at the positions that are explained, and those after each layer.
    lens = Lens(setup.model, positions)
    with torch.no_grad():
        with lens.watching():
            logits = run(ids)[0, positions].float()
        layers = lens.layers(logits)
    if layers is None:
        setup.note("no lens: the model's final norm and head were not found")
    return logits, layers or []


def _itself(against: TokenizedText, predicted: bool) -> TargetError:
    what = "what the model predicts" if predicted else "the target, or begins like it"
    return TargetError(
        f"against is {against.text!r}, which is {what}; expected another continuation, which "
        "differs from the target in one of the tokens that both have."
    )
