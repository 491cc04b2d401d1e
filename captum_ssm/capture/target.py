"""What is explained: the query token whose row is read, and the score of a target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.capture.check_inputs import usable
from captum_ssm.capture.model import check_head, extract_logits, is_hidden
from captum_ssm.capture.recording import Recording
from captum_ssm.capture.span_target import (
    SpanTarget,
    as_tokens,
    check_count,
    mean_of_others,
    token_ids,
)
from captum_ssm.errors import InputError, TargetError, UnsupportedModelError, brief
from captum_ssm.utils.captum_api import select_targets
from captum_ssm.utils.integers import as_index, as_integers, from_start, is_any_same
from captum_ssm.wiring.wiring import INPUT, Wiring


@dataclass(frozen=True)
class Against:
    """A target whose score is compared with that of other answers: why this one, and not those.

    Args:
        target (Any): as for ``attribute``.
        foil (Any, optional): another target, whose score is subtracted; ``"others"`` for the scores
            of all other answers, weighted by their probabilities without the target's, which count
            as constants. Default: ``"others"``
    """

    target: Any
    foil: Any = "others"


def read_score(recording: Recording, target: Any, position: Any) -> Tensor:
    """The explained score ``(B,)`` of a run with its graph."""
    if isinstance(target, Against):
        return _score_against(recording, target, position)
    logits = extract_logits(recording.output)
    target, position = split_target(recording, target, position)
    names_token = position is None or position is target
    if names_token and recording.is_language and _is_tokens(recording):
        check_head(recording.output, target)
    with torch.inference_mode(False), torch.enable_grad():
        if isinstance(target, SpanTarget):
            score = target.read(_of_tokens(recording, logits), counted_tokens(recording))
        else:
            score = _score(recording, logits, usable(target), position)
    if score.is_complex():
        raise TargetError(
            f"the explained score is complex ({score.dtype}); expected a real number. Let "
            "forward_func return one, such as the absolute value or the real part."
        )
    if not bool(torch.isfinite(score).all()):
        raise InputError(
            f"the explained score is {score.tolist()}: look for NaN or Inf in the weights after "
            "the last mixer, or choose another target."
        )
    return score


def _score_against(recording: Recording, asked: Against, position: Any) -> Tensor:
    if not isinstance(asked.foil, str):
        score = read_score(recording, asked.target, position)
        return score - _score_of_foil(recording, asked, position)
    if asked.foil != "others":
        raise TargetError(
            f"against is {brief(asked.foil)}; expected 'others', another target, or None."
        )
    if isinstance(asked.target, SpanTarget):
        return read_score(recording, replace(asked.target, score="contrast"), position)
    score = read_score(recording, asked.target, position)
    return score - _score_of_others(recording, asked.target, position)


def query_weights(
    recording: Recording, wiring: Wiring, position: Any, target: Any = None
) -> list[Tensor]:
    """Weights ``(B, L)`` of the tokens whose rows are explained, for each step the output reads.

    One token, or those that a pooled output, or an entry of a dense one, is read from.
    """
    # Where no score is taken, a target says which token is asked for in any output per token.
    is_position = recording.score is None and not recording.decodes
    position = split_target(recording, target, position, is_position)[1]
    measured = [weights for weights in wiring.readout if weights is not None]
    is_measured = len(measured) == len(wiring.readout)
    per_token = _is_tokens(recording)
    is_asked = per_token and (recording.is_language or not is_measured)
    if position is not None or is_asked:
        return at_steps(_asked(recording, position).to(recording.calls[0].dtype), wiring)
    if not is_measured:
        shape = tuple(extract_logits(recording.output).shape)
        raise ValueError(
            f"position is None, and it was not found at which tokens the output of shape {shape} "
            "reads what the mixers returned; pass position=, the token whose row is explained."
        )
    return measured


def balance(query: Sequence[Tensor], wiring: Wiring) -> Tensor:
    """The share ``(B,)`` of what is read that comes through the last mixers, not around them."""
    read = torch.stack([weights.abs().sum(1) for weights in query])
    return read[: wiring.main].sum(0) / read.sum(0)


def check_rows(recording: Recording, rows: Tensor) -> None:
    """Raise unless n rows of logits are those of the last n tokens, all ``rows`` zero."""
    if recording.is_language and _is_tokens(recording) and bool((rows != 0).any()):
        raise InputError(
            f"the model returns logits of {_returned(recording)} of its {recording.shape[1]} "
            "tokens, which are not the last ones; expected logits of all tokens or of the last "
            "ones. Let forward_func return the logits of all, or a score of its own, such as those "
            "of one token of a decoder: lambda *args: model(*args)[:, i]."
        )


def at_steps(query: Tensor, wiring: Wiring) -> list[Tensor]:
    """Weights of the tokens that positions count as those of each step that the output reads."""
    if query.shape[1] < wiring.steps[0].tokens:
        reads = [link for earlier, link in wiring.steps[0].reads if earlier == INPUT]
        if len(reads) != 1 or reads[0].source is None:
            raise UnsupportedModelError(
                f"the model makes {wiring.steps[0].tokens} tokens of the {query.shape[1]} that "
                "positions count, not known which; expected tokens that are added to the input's."
            )
        query = reads[0].matmul(query[..., None])[..., 0]
    return [link.rmatvec(query) for _, link in wiring.output]


def counted_tokens(recording: Recording) -> int:
    """How many tokens positions count.

    Those of the inputs, where a language model adds tokens of its own that it returns no logits of.
    """
    L, inputs = recording.shape[1], recording.request.inputs[0]
    if not (recording.is_language and _is_tokens(recording)) or inputs.dim() < 2:
        return L
    return inputs.shape[1] if _returned(recording) <= inputs.shape[1] < L else L


def asked_rows(recording: Recording, position: Any) -> Tensor:
    """The rows ``(B,)`` of an output ``(B, n, V)`` that are asked for, counted from its end.

    Positions count the mixers' tokens; the rows of a decoder count themselves.

    Raises:
        TargetError: for a decoder's rows, of which the last may be padding, and no position.
    """
    if not recording.decodes:
        return _asked(recording, position).argmax(1) - counted_tokens(recording)
    if position is None:
        raise TargetError(
            f"the output has {_returned(recording)} rows, which are a decoder's tokens, and none "
            "is named; expected the row together with the answer: target=(row, answer)."
        )
    shape = recording.shape[0], _returned(recording)
    return one_query(position, shape, None, recording.device).argmax(1) - shape[1]


def _returned(recording: Recording) -> int:
    return extract_logits(recording.output).shape[1]


def _asked(recording: Recording, position: Any) -> Tensor:
    shape = recording.shape[0], counted_tokens(recording)
    mask = recording.mask
    if mask is not None and mask.shape[1] != shape[1]:
        mask = None
    return one_query(position, shape, mask, recording.device)


def _is_tokens(recording: Recording) -> bool:
    # A language model may return the logits of its last tokens only, but of no more than there are.
    shape, L = extract_logits(recording.output).shape, recording.shape[1]
    is_row = len(shape) == 3 and (shape[1] == L or (recording.is_language and shape[1] < L))
    return is_row and not recording.decodes


def _positions(position: Any, B: int, L: int, device: torch.device) -> Tensor:
    index = as_integers(position, device)
    if index is None or index.dim() > 1:
        raise TypeError(
            f"position is {brief(position)}, a {type(position).__name__}; expected an int, a (B,) "
            "integer tensor or None."
        )
    if index.dim() == 1 and index.shape[0] != B:
        raise InputError(
            f"position has {index.shape[0]} entries for a batch of {B}; expected one per example, "
            "or an int for all."
        )
    told = f"position is {index.tolist()}, outside the sequence of {L} tokens"
    return from_start(index, L, told).expand(B)


def one_query(
    position: Any, shape: tuple[int, int], mask: Tensor | None, device: torch.device
) -> Tensor:
    """``(B, L)``, one at the query token: ``position``, or the last token that is no padding.

    A span's tokens have its weights.
    """
    B, L = shape
    if isinstance(position, SpanTarget):
        query = position.query(B, L, device)
        if mask is not None and bool((query * (mask == 0)).any()):
            raise InputError("the span holds padding; attention_mask marks the tokens to ask for.")
        return query
    if position is not None:
        index = _positions(position, B, L, device)
        if mask is not None and not bool(mask.gather(1, index[:, None]).all()):
            raise InputError(
                f"position {index.tolist()} falls on padding in at least one example; "
                "attention_mask marks the tokens that can be asked."
            )
    elif mask is not None:
        index = torch.where(mask, torch.arange(L, device=device), -1).amax(1)
    else:
        index = torch.full((B,), L - 1, device=device)
    return nn.functional.one_hot(index, L)


def names_entry(recording: Recording, target: Any, position: Any) -> bool:
    """Whether a target, of which no score was taken, names an entry of an output that is dense.

    The token that an entry is read at is named by an output that holds one row per token.
    """
    entries = target if isinstance(target, list) else [target]
    if recording.score is not None or position is not None:
        return False
    if not entries or not all(isinstance(entry, tuple) for entry in entries):
        return False
    is_row = _is_tokens(recording) and all(len(entry) == 2 for entry in entries)
    return extract_logits(recording.output).dim() > 2 and not is_row


def split_target(
    recording: Recording, target: Any, position: Any, is_only_position: bool = False
) -> tuple[Any, Any]:
    """The target, and the token that it is read at.

    For a language model's logits ``(B, L, V)`` a tuple ``(position, token)`` sets both, and so do
    several in a list, by example. Where ``is_only_position``, an entry of any other output per
    token does too.

    Raises:
        TargetError: for a position that is given twice, or entries that are no pairs of integers.
    """
    target = target.target if isinstance(target, Against) else target
    if isinstance(target, SpanTarget):
        if position is not None and position is not target:
            raise TargetError(
                f"position is {brief(position)}; leave it out for a span, which has its own."
            )
        return target, target
    is_only_position = is_only_position and position is None
    is_row = is_only_position and recording.decodes
    is_token = (recording.is_language or is_only_position) and _is_tokens(recording)
    if not (is_row or is_token):
        return target, position
    logits = extract_logits(recording.output)
    if isinstance(target, tuple) and len(target) == 2:
        pairs = [target] * logits.shape[0]
    elif isinstance(target, list) and target and all(isinstance(t, tuple) for t in target):
        check_count(len(target), logits.shape[0])
        pairs = target
    else:
        return target, position
    if any(len(pair) != 2 for pair in pairs):
        raise TargetError(f"target is {brief(target)}; a tuple names (position, token).")
    if position is not None:
        raise TargetError(
            f"target is {brief(target)}, which names the position, and position is "
            f"{brief(position)}; give one of them."
        )
    positions, tokens = ([as_index(x) for x in side] for side in zip(*pairs, strict=True))
    if None in positions or None in tokens:
        raise TargetError(
            f"target is {brief(target)}; expected a tuple (position, token) of two integers."
        )
    return tokens, torch.tensor(positions)


def _score(recording: Recording, logits: Tensor, target: Any, position: Any) -> Tensor:
    """The explained score of each example, ``(B,)``."""
    B = recording.shape[0]
    is_row = recording.is_language or (position is not None and as_index(target) is not None)
    if not (is_row and _is_tokens(recording)):
        return captum_score(logits, target, B)
    if target is None:
        raise TargetError(
            f"the model returns logits of shape {tuple(logits.shape)} and no target was given; "
            "pass a token id, one id per example, or (position, token)."
        )
    token = token_ids(as_tokens(target, logits), logits.shape[-1])
    return _row_of(recording, logits, position)[torch.arange(B, device=logits.device), token]


def _of_tokens(recording: Recording, logits: Tensor) -> Tensor:
    # The logits (B, n, V) of the tokens, which a span is read from.
    if not _is_tokens(recording) or counted_tokens(recording) < logits.shape[1]:
        raise TargetError(
            f"the target is a span of tokens, and the output has shape {tuple(logits.shape)}; "
            "expected the logits of each token, (B, L, V)."
        )
    return logits


def _row_of(recording: Recording, logits: Tensor, position: Any) -> Tensor:
    # The logits (B, V) of the token that is asked for.
    B = recording.shape[0]
    if len(logits) != B:
        raise TargetError(
            f"the model returns logits of shape {tuple(logits.shape)} for {B} examples; expected "
            "those of each example. Explain one example at a time, or let forward_func return a "
            "score of its own."
        )
    row = asked_rows(recording, position).to(logits.device) + logits.shape[1]
    if bool((row < 0).any()):
        raise InputError(
            f"the model returned logits for its last {logits.shape[1]} of "
            f"{counted_tokens(recording)} tokens, and the position asked for is before them; "
            "expected one among these. Have the model return logits for all tokens."
        )
    return logits[torch.arange(B, device=logits.device), row]


def _score_of_foil(recording: Recording, asked: Against, position: Any) -> Tensor:
    # The score of the other target, at the target's token unless it names one of its own.
    answer, answer_position = split_target(recording, asked.target, position)
    foil, foil_position = split_target(recording, asked.foil, None)
    foil_position = answer_position if foil_position is None else foil_position
    score = read_score(recording, foil, foil_position)
    if is_any_same(answer, foil) and is_any_same(answer_position, foil_position):
        raise TargetError(
            f"against is the target in an example: {brief(asked.foil)} and {brief(asked.target)}; "
            "expected another answer."
        )
    return score


def _score_of_others(recording: Recording, target: Any, position: Any) -> Tensor:
    # The mean score of all answers but the target's, (B,), by the probabilities that they have
    # among themselves; zero for an output that is one score.
    logits = extract_logits(recording.output)
    # In any output per token, an entry's first index is the token whose answers compete.
    target, position = split_target(recording, target, position, is_only_position=True)
    if logits.dim() == 3 and (recording.decodes or _is_tokens(recording)):
        logits = _row_of(recording, logits, position)
    # Numbers, such as those of a regression or of features, do not compete.
    config = getattr(recording.request.module, "config", None)
    are_numbers = getattr(config, "problem_type", None) == "regression"
    if are_numbers or is_hidden(recording.output) or logits[0].numel() == 1:
        return logits.new_zeros(len(logits))
    if logits.dim() != 2:
        raise TargetError(
            f"the output has shape {tuple(logits.shape)}, in which it is not known which answers "
            "the target competes with; expected logits (B, classes) or (B, tokens, vocabulary). "
            "Pass against=None to explain the score alone, or another target as against=."
        )
    return mean_of_others(logits, token_ids(as_tokens(target, logits), logits.shape[-1]))


def captum_score(logits: Tensor, target: Any, B: int) -> Tensor:
    """The entry of the output that Captum's ``target`` names, ``(B,)``."""
    index = as_index(target)  # Captum knows Python's integers only
    shape = tuple(logits.shape)
    try:
        score = select_targets(logits, target if index is None else index)
    except (AssertionError, IndexError, RuntimeError) as error:
        raise TargetError(
            f"target is {brief(target)}, which does not select one value per example of the output "
            f"of shape {shape}: {error}"
        ) from error
    if score.numel() not in (1, B):
        axes = ", ".join(f"n{i}" for i in range(1, logits.dim()))
        other = ""
        if logits.dim() == 3:
            other = (
                " If its second axis is the tokens, position= names the token, and target the "
                "entry of its row."
            )
        raise TargetError(
            f"the output has shape {shape} and target is {brief(target)}, which leaves "
            f"{tuple(score.shape)}; a target has to select one value per example: expected a tuple "
            f"({axes}), one index per axis after the first, as in Captum, or one tuple per example "
            f"in a list.{other} For a sum over several entries let forward_func return it."
        )
    return score.reshape(-1)
