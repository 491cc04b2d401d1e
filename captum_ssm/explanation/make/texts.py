"""One text: what the model answers after it, or along it, and why."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.attr import LaTIM
from captum_ssm.capture.check_inputs import check_inputs
from captum_ssm.capture.model import extract_logits, parameter_names
from captum_ssm.errors import InputError, TargetError
from captum_ssm.explanation import Example, Maps, Span, Token
from captum_ssm.explanation.make.lens import Lens
from captum_ssm.explanation.make.questions import Questions, Setup, to_numpy
from captum_ssm.explanation.make.reading import TokenizedText, answer_text, between, read, read_ids
from captum_ssm.explanation.units import Turns, named, sentences, within, words
from captum_ssm.inspection.implicit_attention import hidden_attention
from captum_ssm.utils.integers import as_index
from captum_ssm.utils.memory import memory_limit, require
from captum_ssm.utils.vocabulary import require_known, unknown_in_prompt


@dataclass(frozen=True)
class TextQuestion:
    """What is asked about one text, or its ids: as ``explain`` takes it."""

    tokenizer: Any
    inputs: str | list[int] | TokenizedText
    target: str | list[int] | TokenizedText | None
    against: str | list[int] | TokenizedText | None
    position: int | Sequence[int] | str | None
    spans: Mapping[str, tuple[int, int]]
    turns: Turns | None = None

    def answer(self, setup: Setup) -> Example:
        """The text, explained.

        Raises:
            ValueError, TypeError: as for ``explain``.
        """
        texts = _read(self)
        device = next(setup.model.parameters()).device
        ids = torch.tensor([texts.ids], device=device)
        check_inputs(ids, setup.model)
        logits, layers = _run(setup, ids, texts.positions)
        _require_ids("target", texts.target, logits.shape[-1])
        _require_ids("against", texts.against, logits.shape[-1])
        whole = texts.prompt
        if texts.follows_text:
            texts, whole = _followed(self, texts, int(logits[-1].argmax()))
        questions = _questions(setup, self.tokenizer, texts, whole, logits, layers)
        L = len(whole.tokens)
        questions.require_memory(L)
        # Maps come first, since those that are too large are refused before any row is computed.
        maps = _maps(setup, torch.tensor([whole.ids], device=device))
        relevance, deltas = questions.explained(
            ids, lambda rows: nn.functional.pad(rows, (0, L - rows.shape[1]))
        )
        return Example(
            _shortened(self.turns.title(whole.text) if self.turns else whole.text),
            tuple(questions.outputs),
            relevance,
            deltas,
            whole.tokens,
            len(texts.prompt.tokens),
            self._units(whole.tokens, len(texts.prompt.tokens)),
            maps=maps,
            validation=questions.validation,
        )

    def _units(self, tokens: Sequence[Token], prompt: int) -> dict[str, tuple[Span, ...]]:
        units = {"word": words(tokens), "sentence": sentences(tokens)}
        if self.turns:
            turns = self.turns.spans(tokens, prompt)
            units = {unit: within(spans, turns) for unit, spans in units.items()}
            units["turn"] = turns
        if self.spans:
            units["span"] = named(tokens, self.spans)
        return units


@dataclass(frozen=True)
class _Texts:
    # The texts of a question, the ids that the model reads, and the tokens at which answers are
    # explained: those of the text that follows, or of any answer at positions that were asked for.
    prompt: TokenizedText
    target: TokenizedText | None
    against: TokenizedText | None
    ids: list[int]
    positions: list[int]
    follows_text: bool


def _read(question: TextQuestion) -> _Texts:
    prompt = read_prompt(question.tokenizer, question.inputs)
    P = len(prompt.tokens)
    target = _continuation(question.tokenizer, question.target, "target")
    against = _continuation(question.tokenizer, question.against, "against")
    positions = _positions(question.position, P)
    if positions is not None:
        _require_one_token("target", target)
        _require_one_token("against", against)
        return _Texts(prompt, target, against, prompt.ids, positions, False)
    ids = prompt.ids + ([] if target is None else target.ids[:-1])
    first = 0 if _is_all(question.position) else P - 1
    return _Texts(prompt, target, against, ids, list(range(first, len(ids))), True)


def _followed(
    question: TextQuestion, texts: _Texts, predicted: int
) -> tuple[_Texts, TokenizedText]:
    # With a target, which is what the model predicts if none was given; and the whole text.
    if texts.target is None:
        target, gap = _next(question.tokenizer, texts.prompt, predicted), ""
    else:
        target = texts.target
        is_read_together = isinstance(question.target, TokenizedText)
        gap = "" if is_read_together else between(question.tokenizer, texts.prompt, target)
    return replace(texts, target=target), texts.prompt.followed_by(target, gap)


def _questions(
    setup: Setup,
    tokenizer: Any,
    texts: _Texts,
    whole: TokenizedText,
    logits: Tensor,
    layers: Sequence[Tensor],
) -> Questions:
    contrasts = _contrasts(texts, logits)
    questions = Questions(setup, answer_text(tokenizer))
    unknown = getattr(tokenizer, "unk_token_id", None)
    for k, position in enumerate(texts.positions):
        chosen, typed = None if texts.target is None else texts.target.ids[0], None
        if texts.follows_text:
            token = whole.tokens[position + 1]
            chosen, typed = token.id, token.text.strip() if token.id == unknown else None
        lens = [layer[k] for layer in layers]
        questions.add(logits[k], position, chosen, contrasts.get(k), lens, typed)
    return questions


def read_prompt(tokenizer: Any, text: str | list[int] | TokenizedText) -> TokenizedText:
    """The text before the continuation, as tokens; a warning where one is unknown."""
    if isinstance(text, TokenizedText):
        return text
    if not isinstance(text, str):
        return read_ids(tokenizer, text, "the text")
    prompt = read(tokenizer, text, "text")
    warning = unknown_in_prompt(tokenizer, prompt.ids)
    if warning:
        warnings.warn(warning, UserWarning, stacklevel=6)
    return prompt


def _continuation(
    tokenizer: Any, text: str | list[int] | TokenizedText | None, name: str
) -> TokenizedText | None:
    if text is None or isinstance(text, TokenizedText):
        return text
    if not isinstance(text, str):
        return read_ids(tokenizer, text, name)
    if tokenizer is None:
        raise TypeError(f"{name} is {text!r}, and there is no tokenizer; expected token ids.")
    continuation = read(tokenizer, text, name, special=False)
    require_known(tokenizer, text, continuation.ids, name, f"{name}= also takes token ids.")
    return continuation


def _next(tokenizer: Any, prompt: TokenizedText, predicted: int) -> TokenizedText:
    # The token is read after the last one of the text, since that tells how it is spaced.
    token = read_ids(tokenizer, [prompt.ids[-1], predicted], "the answer").tokens[1]
    width = token.end - token.start
    return TokenizedText(token.text if width else "", (replace(token, start=0, end=width),))


def _is_all(position: Any) -> bool:
    return isinstance(position, str) and position == "all"


def _positions(position: Any, P: int) -> list[int] | None:
    if position is None or _is_all(position):
        return None
    several = [position] if as_index(position) is not None else position
    indices = [] if isinstance(several, str) else [as_index(item) for item in several]
    positions = [index for index in indices if index is not None]
    if not positions or len(positions) < len(indices):
        raise TypeError(f"position is {position!r}; expected an int, several ints, 'all' or None.")
    if any(not -P <= index < P for index in positions):
        raise InputError(
            f"position is {position!r}; the text has {P} tokens: expected 0 .. {P - 1} (or -{P} "
            ".. -1 from the end)."
        )
    return sorted({index % P for index in positions})


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


def _run(setup: Setup, ids: Tensor, positions: list[int]) -> tuple[Tensor, list[Tensor]]:
    # The logits at the positions that are explained, and those after each layer.
    lens = Lens(setup.model, positions)
    named = {"use_cache": False} if "use_cache" in parameter_names(setup.model) else {}
    with torch.no_grad():
        with lens.watching() if setup.lens else nullcontext():
            output = setup.model(ids, **named)
        logits = extract_logits(output)
        if logits.dim() != 3 or logits.shape[1] != ids.shape[1]:
            raise ValueError(
                f"the model returns an output of shape {tuple(logits.shape)} for ids of shape "
                f"{tuple(ids.shape)}; expected logits (B, L, V), one row per token. A classifier "
                "is explained by the methods' own attribute: MambaLRP(model).attribute(ids, "
                "target=label)."
            )
        logits = logits[0, positions].float()
        layers = lens.layers(logits) if setup.lens else []
    if layers is None:
        note = "no lens: the model's final norm and head were not found"
        if note not in setup.notes:
            setup.notes.append(note)
    return logits, layers or []


def _contrasts(texts: _Texts, logits: Tensor) -> dict[int, int]:
    # By output: what is explained against. Two continuations share what is before their first
    # difference, and nothing after it.
    target, against = texts.target, texts.against
    if against is None:
        return {}
    if not texts.follows_text:
        chosen = [int(row.argmax()) if target is None else target.ids[0] for row in logits]
        if against.ids[0] in chosen:
            raise _itself(against, target is None)
        return dict.fromkeys(range(len(texts.positions)), against.ids[0])
    assert target is not None
    pairs = enumerate(zip(target.ids, against.ids, strict=False))
    k = next((k for k, (token, other) in pairs if token != other), None)
    if k is None:
        raise _itself(against, False)
    return {texts.positions.index(len(texts.prompt.tokens) - 1 + k): against.ids[k]}


def _itself(against: TokenizedText, predicted: bool) -> TargetError:
    what = "what the model predicts" if predicted else "the target, or begins like it"
    return TargetError(
        f"against is {against.text!r}, which is {what}; expected another continuation, which "
        "differs from the target in one of the tokens that both have."
    )


def _maps(setup: Setup, ids: Tensor) -> tuple[Maps, ...]:
    if not setup.maps:
        return ()
    means = hidden_attention(
        setup.model,
        ids,
        layers=setup.layers,
        reduction="mean",
        memory_limit=setup.memory_limit,
    )
    maps = {}
    if "hidden-attention" in setup.maps:
        maps["hidden-attention"] = Maps(
            "hidden attention",
            "mean over channels",
            {name: to_numpy(mean[0]) for name, mean in means.items()},
        )
    if "latim" in setup.maps:
        with memory_limit(setup.memory_limit):
            size = 4 * ids.shape[1] ** 2
            require(
                len(setup.maps) * len(means) * size,
                f"maps of {len(means)} layers, {len(setup.maps)} kinds and {ids.shape[1]} tokens",
                [("layers=-1, one layer", len(setup.maps) * size)],
            )
        method = LaTIM(setup.model, memory_limit=setup.memory_limit)
        interactions = partial(method.interactions, ids, aggregation="l2", activation="gate")
        maps["latim"] = Maps(
            "LaTIM", "l2 norm", {name: to_numpy(interactions(name)[0]) for name in means}
        )
    return tuple(maps[name] for name in setup.maps)


def _shortened(text: str, length: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"
