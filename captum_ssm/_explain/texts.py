"""One text: what the model answers after it, or along it, and why."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm._capture.check_inputs import check_inputs
from captum_ssm._capture.model import extract_logits, parameter_names
from captum_ssm._errors import InputError, TargetError
from captum_ssm._explain.asked import Asked, Setup, kept
from captum_ssm._explain.lens import Lens
from captum_ssm._explain.reading import TokenizedText, answer_text, between, read, read_ids
from captum_ssm._hidden_attention import hidden_attention
from captum_ssm._integers import as_index
from captum_ssm._memory import memory_limit, require
from captum_ssm._vocabulary import require_known, unknown_in_prompt
from captum_ssm.attr import LaTIM
from captum_ssm.explanation import Example, Maps
from captum_ssm.explanation._units import named, sentences, words


@dataclass(frozen=True)
class TextRequest:
    """What is asked about one text, or its ids: as ``explain`` takes it."""

    tokenizer: Any
    given: str | list[int]
    target: str | list[int] | None
    against: str | list[int] | None
    position: int | Sequence[int] | str | None
    spans: Mapping[str, tuple[int, int]]


def explain_text(setup: Setup, asked: TextRequest) -> Example:
    """One text explained.

    Raises:
        ValueError, TypeError: as for ``explain``.
    """
    tokenizer = asked.tokenizer
    prompt = _prompt(tokenizer, asked.given)
    P = len(prompt.tokens)
    target = _continuation(tokenizer, asked.target, "target")
    against = _continuation(tokenizer, asked.against, "against")
    places = _places(asked.position, P)
    if places is not None:
        for name, one in (("target", target), ("against", against)):
            _require_one(name, one)
    device = next(setup.model.parameters()).device
    along = () if target is None or places is not None else target.ids[:-1]
    ids = torch.tensor([[*prompt.ids, *along]], device=device)
    check_inputs(ids, setup.model)
    first = 0 if _is_all(asked.position) else P - 1
    positions = list(range(first, ids.shape[1])) if places is None else places

    lens = Lens(setup.model, positions)
    logits, layers = _run(setup, ids, lens)
    V = logits.shape[-1]
    for name, one in (("target", target), ("against", against)):
        _require_ids(name, one, V)
    whole = prompt
    if places is None:
        if target is None:
            target = _next(tokenizer, prompt, int(logits[-1].argmax()))
        gap = between(tokenizer, prompt, target) if asked.target is not None else ""
        whole = prompt.followed_by(target, gap)
    contrasts = _contrasts(setup, logits, positions, P, target, against, places)

    found = Asked(setup, answer_text(tokenizer))
    unknown = getattr(tokenizer, "unk_token_id", None)
    for k, position in enumerate(positions):
        chosen, typed = None if target is None else target.ids[0], None
        if places is None:
            token = whole.tokens[position + 1]
            chosen, typed = token.id, token.text.strip() if token.id == unknown else None
        found.add(
            logits[k],
            position,
            chosen,
            contrasts.get(k),
            [layer[k] for layer in layers],
            typed,
        )
    L = len(whole.tokens)
    found.require_memory(L)
    # First, since they are refused where they are too large.
    maps = _maps(setup, torch.tensor([whole.ids], device=device))
    relevance, deltas = found.explained(
        ids, lambda rows: nn.functional.pad(rows, (0, L - rows.shape[1]))
    )
    units = {"word": words(whole.tokens), "sentence": sentences(whole.tokens)}
    if asked.spans:
        units["span"] = named(whole.tokens, asked.spans)
    return Example(
        _shortened(whole.text),
        tuple(found.outputs),
        relevance,
        deltas,
        whole.tokens,
        P,
        units,
        maps=maps,
    )


def _prompt(tokenizer: Any, given: str | list[int]) -> TokenizedText:
    if not isinstance(given, str):
        return read_ids(tokenizer, given, "the text")
    found = read(tokenizer, given, "text")
    warning = unknown_in_prompt(tokenizer, found.ids)
    if warning:
        warnings.warn(warning, UserWarning, stacklevel=5)
    return found


def _continuation(tokenizer: Any, given: str | list[int] | None, name: str) -> TokenizedText | None:
    if given is None:
        return None
    if not isinstance(given, str):
        return read_ids(tokenizer, given, name)
    if tokenizer is None:
        raise TypeError(f"{name} is {given!r}, and there is no tokenizer; expected token ids.")
    found = read(tokenizer, given, name, special=False)
    require_known(tokenizer, given, found.ids, name, f"{name}= also takes token ids.")
    return found


def _next(tokenizer: Any, prompt: TokenizedText, one: int) -> TokenizedText:
    # A token as it would stand after the text.
    token = read_ids(tokenizer, [prompt.ids[-1], one], "the answer").tokens[1]
    width = token.end - token.start
    return TokenizedText(token.text if width else "", (replace(token, start=0, end=width),))


def _is_all(position: Any) -> bool:
    return isinstance(position, str) and position == "all"


def _places(position: Any, P: int) -> list[int] | None:
    if position is None or _is_all(position):
        return None
    given = [position] if as_index(position) is not None else position
    indices = [] if isinstance(given, str) else [as_index(one) for one in given]
    found = [one for one in indices if one is not None]
    if not found or len(found) < len(indices):
        raise TypeError(f"position is {position!r}; expected an int, several ints, 'all' or None.")
    if any(not -P <= one < P for one in found):
        raise InputError(
            f"position is {position!r}; the text has {P} tokens: expected 0 .. {P - 1} (or -{P} "
            ".. -1 from the end)."
        )
    return sorted({one % P for one in found})


def _require_one(name: str, given: TokenizedText | None) -> None:
    if given is not None and len(given.tokens) > 1:
        parts = ", ".join(repr(token.text) for token in given.tokens)
        raise TargetError(
            f"{name} is {given.text!r}, which has {len(given.tokens)} tokens ({parts}), but with "
            "position it has to be one: the token the model may predict there. Choose one of "
            "them, or remove position."
        )


def _require_ids(name: str, given: TokenizedText | None, V: int) -> None:
    if given is not None and not all(0 <= one < V for one in given.ids):
        raise TargetError(f"{name} is {given.ids}; the model's ids are 0 .. {V - 1}.")


def _run(setup: Setup, ids: Tensor, lens: Lens) -> tuple[Tensor, list[Tensor]]:
    # The logits at the positions that are explained, and those after each layer.
    named = {"use_cache": False} if "use_cache" in parameter_names(setup.model) else {}
    with torch.no_grad():
        if not setup.lens:
            output = setup.model(ids, **named)
        else:
            with lens.watching():
                output = setup.model(ids, **named)
        logits = extract_logits(output)
        if logits.dim() != 3 or logits.shape[1] != ids.shape[1]:
            raise ValueError(
                f"the model returns an output of shape {tuple(logits.shape)} for ids of shape "
                f"{tuple(ids.shape)}; expected logits (B, L, V), one row per token. A classifier "
                "is explained by the methods' own attribute: MambaLRP(model).attribute(ids, "
                "target=label)."
            )
        logits = logits[0, lens.positions].float()
        layers = lens.layers(logits) if setup.lens else []
    if layers is None:
        note = "no lens: the model's final norm and head were not found"
        if note not in setup.notes:
            setup.notes.append(note)
    return logits, layers or []


def _contrasts(
    setup: Setup,
    logits: Tensor,
    positions: list[int],
    P: int,
    target: TokenizedText | None,
    against: TokenizedText | None,
    places: list[int] | None,
) -> dict[int, int]:
    # By output: what is explained against. Two continuations share what is before their first
    # difference, and nothing after it.
    if against is None:
        return {}
    if places is not None:
        chosen = [int(row.argmax()) if target is None else target.ids[0] for row in logits]
        if against.ids[0] in chosen:
            raise _itself(setup, against, target is None)
        return dict.fromkeys(range(len(positions)), against.ids[0])
    assert target is not None
    pairs = zip(target.ids, against.ids, strict=False)
    k = next((k for k, (one, other) in enumerate(pairs) if one != other), None)
    if k is None:
        raise _itself(setup, against, False)
    return {positions.index(P - 1 + k): against.ids[k]}


def _itself(setup: Setup, against: TokenizedText, predicted: bool) -> TargetError:
    what = "what the model predicts" if predicted else "the target, or begins like it"
    return TargetError(
        f"against is {against.text!r}, which is {what}; expected another continuation, which "
        "differs from the target in one of the tokens that both have."
    )


def _maps(setup: Setup, ids: Tensor) -> tuple[Maps, ...]:
    if not setup.maps:
        return ()
    found = hidden_attention(
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
            {name: kept(one[0]) for name, one in found.items()},
        )
    if "latim" in setup.maps:
        with memory_limit(setup.memory_limit):
            size = 4 * ids.shape[1] ** 2
            require(
                len(setup.maps) * len(found) * size,
                f"maps of {len(found)} layers, {len(setup.maps)} kinds and {ids.shape[1]} tokens",
                [("layers=-1, one layer", len(setup.maps) * size)],
            )
        method = LaTIM(setup.model, memory_limit=setup.memory_limit)
        interactions = partial(method.interactions, ids, aggregation="l2", activation="gate")
        maps["latim"] = Maps(
            "LaTIM", "l2 norm", {name: kept(interactions(name)[0]) for name in found}
        )
    return tuple(maps[name] for name in setup.maps)


def _shortened(text: str, length: int = 60) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 1].rstrip() + "…"
