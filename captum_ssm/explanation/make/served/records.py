"""Records of served models, in the formats of vLLM and of the OpenAI API.

========================= =========================================================================
vLLM, in Python           ``RequestOutput``: ``prompt``, ``prompt_token_ids``, ``outputs``, of which
                          each has ``text``, ``token_ids`` and ``logprobs``, a dict per token from
                          ids to ``Logprob(logprob, rank, decoded_token)``
completions               ``choices[].text`` and ``.logprobs`` with ``tokens``, ``token_logprobs``
                          and ``text_offset``
chat completions          ``choices[].message.content`` and ``.logprobs.content[]`` with ``token``,
                          ``logprob`` and ``bytes``
with ``return_token_ids`` also ``prompt_token_ids`` and ``choices[].token_ids``, of vLLM's server
========================= =========================================================================

Logs of evaluations are taken apart into such records (:mod:`.evaluations`).

A response does not say what was asked: the request is beside it, as ``{"request": ..., "response":
...}``, as the ``body`` of a line of a batch file, or as ``messages`` or ``prompt`` in the record.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from captum_ssm.errors import InputError
from captum_ssm.explanation.make.inputs.parse_inputs import numbered
from captum_ssm.explanation.make.served.chunks import Data, grouped, is_chunk, joined, whole
from captum_ssm.explanation.make.served.evaluations import EVALUATIONS, each_record

UNKNOWN = -9999.0  # what servers write for a log probability that they do not have
ID = "token_id:"  # how vLLM writes ids in the place of texts
SINGLE = (str, bool, int, float)
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias"),
)


@dataclass(frozen=True)
class ServedToken:
    """A token as it was recorded: by its id, its text or its bytes, with what it was given.

    Args:
        id (int, optional): Default: None
        text (str, optional): Default: None
        data (bytes, optional): its bytes. Default: None
        logprob (float, optional): its log probability. Default: None
    """

    id: int | None = None
    text: str | None = None
    data: bytes | None = None
    logprob: float | None = None


@dataclass(frozen=True)
class ServedRecord:
    """A prompt and one answer to it, as a server recorded them.

    Args:
        format (str): what the record is.
        answer (tuple of ServedToken): its tokens; empty where only its text was recorded.
        text (str, optional): of the answer. Default: None
        total (float, optional): the log probability of the whole answer, where none of its tokens
            has one. Default: None
        prompt (str, optional): as text. Default: None
        prompt_ids (tuple of int, optional): as ids. Default: None
        prompt_logprobs (tuple, optional): of the prompt's tokens, None where there is none.
            Default: ``()``
        prompt_count (int, optional): how many tokens the server counted in it. Default: None
        messages (list, optional): the conversation. Default: None
        request (dict, optional): what else was asked for. Default: ``{}``
        columns (dict, optional): single values that came with it, such as ``custom_id``, ``model``
            and ``finish_reason``. Default: ``{}``
    """

    format: str
    answer: tuple[ServedToken, ...]
    text: str | None = None
    total: float | None = None
    prompt: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    prompt_logprobs: tuple[float | None, ...] = ()
    prompt_count: int | None = None
    messages: list[Any] | None = None
    request: Data = field(default_factory=dict)
    columns: Data = field(default_factory=dict)

    @property
    def sampling(self) -> dict[str, Any]:
        """By which options the tokens were drawn, as far as the record says."""
        return {name: self.request[name] for name in SAMPLING if self.request.get(name) is not None}


def read_records(records: Any) -> list[ServedRecord]:
    """Every answer in a record or a list of records, in their order.

    A record is a dict, the object of vLLM or of the OpenAI client, or the log of an evaluation; a
    list may hold the chunks of a stream.

    Raises:
        InputError: for what is none of the known formats, and for a record that is cut off.
    """
    entry = as_data(records)
    entries = entry if isinstance(entry, list) else [entry]
    groups = list(grouped(chain.from_iterable(map(each_record, entries))))
    if not groups:
        raise InputError("the list of records is empty; expected at least one.")
    answers = []
    for k, group in enumerate(groups):
        with numbered(k, len(groups), "records"):
            answers += _answers(whole(group))
    return answers


def each_answer(entries: Iterable[Any]) -> Iterator[ServedRecord | Exception]:
    """Every answer in records that come one after the other, or the error of a record."""
    for group in grouped(chain.from_iterable(map(each_record, map(as_data, entries)))):
        try:
            yield from _answers(whole(group))
        except Exception as error:  # whatever a record that is damaged may raise
            yield error


def as_data(value: Any) -> Any:
    """Objects of clients and servers as dicts and lists."""
    if isinstance(value, Mapping):
        return {key: as_data(item) for key, item in value.items()}
    if isinstance(value, (str, bytes, int, float, Exception)) or value is None:
        return value
    if callable(getattr(value, "model_dump", None)):
        return as_data(value.model_dump())
    if isinstance(value, Sequence) or (hasattr(value, "__iter__") and hasattr(value, "__len__")):
        return [as_data(item) for item in value]
    return {k: as_data(v) for k, v in getattr(value, "__dict__", {}).items() if k[:1] != "_"}


def _answers(entry: Any) -> list[ServedRecord]:
    if isinstance(entry, Exception):
        raise entry
    if not isinstance(entry, Mapping):
        raise InputError(
            f"the record is a {type(entry).__name__}; expected a dict with 'choices' (OpenAI, "
            "vLLM's server) or 'outputs' (vLLM), and the request beside it."
        )
    response, request = _response(entry), _request(entry)
    if "outputs" in response:
        outputs = response["outputs"] or ()
        return [
            _told(_offline(response, output, request), response, entry, output)
            for output in outputs
        ]
    choices = response.get("choices")
    if not choices:
        failed = response.get("error") or entry.get("error")
        why = f"holds an error, {failed!r}" if failed else f"has the keys {', '.join(response)}"
        raise InputError(
            f"the record {why}; expected 'choices' (OpenAI, vLLM's server) or 'outputs' (vLLM)."
        )
    records = [
        _told(_choice(response, choice, request), response, entry, choice) for choice in choices
    ]
    _require_whole(records, response)
    return records


def _response(entry: Data) -> Data:
    response = entry.get("response")
    if isinstance(response, list):
        return joined(response)
    response = response if isinstance(response, Mapping) else entry
    body = response.get("body")
    response = body if isinstance(body, Mapping) and response is not entry else response
    return joined([response]) if is_chunk(response) else response


def _request(entry: Data) -> Data:
    for name in ("request", "body"):
        request = entry.get(name)
        if isinstance(request, Mapping):
            inner = request.get("body")
            return inner if isinstance(inner, Mapping) else request
    return {k: v for k, v in entry.items() if k in ("messages", "prompt", "echo", *SAMPLING)}


def _told(record: ServedRecord, response: Data, entry: Data, answer: Data) -> ServedRecord:
    # What came with the answer, and which log it is of.
    columns = {**_single(response), **_single(entry), **_single(answer)}
    name = entry.get("object")
    return replace(record, columns=columns, format=name if name in EVALUATIONS else record.format)


def _with_total(record: ServedRecord, total: Any) -> ServedRecord:
    # One number for the whole answer, where its tokens have none.
    is_told = any(token.logprob is not None for token in record.answer)
    return record if is_told else replace(record, total=_number(total))


def _single(choice: Data) -> Data:
    # What is neither the prompt nor the answer.
    left_out = ("object", "prompt", "text", "messages")
    return {k: v for k, v in choice.items() if k not in left_out and isinstance(v, SINGLE)}


# vLLM in Python.


def _offline(response: Data, output: Data, request: Data) -> ServedRecord:
    ids, rows = output.get("token_ids") or [], output.get("logprobs")
    _require_as_many("token_ids", len(ids), "logprobs", rows)
    tokens = tuple(
        ServedToken(token_id, *_entry(row, token_id))
        for token_id, row in zip(ids, rows or [None] * len(ids), strict=True)
    )
    record = _record("vLLM", response, request, tokens, output.get("text"))
    return _with_total(record, output.get("cumulative_logprob"))


def _entry(row: Any, token_id: int) -> tuple[str | None, None, float | None]:
    # What a dict from ids, as numbers or as texts, tells of one of them.
    entry = {int(key): value for key, value in (row or {}).items()}.get(token_id)
    if isinstance(entry, Mapping):
        return entry.get("decoded_token"), None, _number(entry.get("logprob"))
    return None, None, _number(entry)


# Choices of a server.


def _choice(response: Data, choice: Data, request: Data) -> ServedRecord:
    logprobs = choice.get("logprobs") or {}
    is_chat = "message" in choice or "content" in logprobs
    tokens_of = _chat_tokens if is_chat else _completion_tokens
    tokens, ids = tokens_of(logprobs), choice.get("token_ids")
    text = (choice.get("message") or {}).get("content") if is_chat else choice.get("text")
    prompt = {
        key: choice[key] for key in ("prompt_token_ids", "prompt_logprobs") if choice.get(key)
    }
    name = "chat completion" if is_chat else "completion"
    record = _record(name, {**response, **prompt}, request, tokens, text)
    if not is_chat and tokens:
        record = _without_echo(record, logprobs)
    return _with_ids(record, ids)


def _chat_tokens(logprobs: Data) -> tuple[ServedToken, ...]:
    return tuple(
        _token(entry.get("token"), entry.get("logprob"), entry.get("bytes"))
        for entry in logprobs.get("content") or ()
    )


def _completion_tokens(logprobs: Data) -> tuple[ServedToken, ...]:
    texts, values = logprobs.get("tokens") or [], logprobs.get("token_logprobs")
    _require_as_many("logprobs.tokens", len(texts), "logprobs.token_logprobs", values)
    return tuple(map(_token, texts, values or [None] * len(texts)))


def _token(text: Any, logprob: Any, data: Any = None) -> ServedToken:
    written = str(text)
    if written.startswith(ID):
        return ServedToken(int(written.removeprefix(ID)), logprob=_number(logprob))
    is_bytes = data is not None and all(0 <= byte < 256 for byte in data)
    return ServedToken(None, text, bytes(data) if is_bytes else None, _number(logprob))


def _with_ids(record: ServedRecord, ids: Any) -> ServedRecord:
    if not ids:
        return record
    tokens = record.answer or tuple(ServedToken() for _ in ids)
    _require_as_many("token_ids", len(ids), "logprobs", tokens)
    pairs = zip(tokens, ids, strict=True)
    return replace(record, answer=tuple(replace(token, id=token_id) for token, token_id in pairs))


def _without_echo(record: ServedRecord, logprobs: Data) -> ServedRecord:
    # With echo the prompt's tokens stand before those of the answer.
    tokens, request = record.answer, record.request
    if not request.get("echo"):
        return record
    if record.prompt_ids is not None:
        count = len(record.prompt_ids)
    elif record.prompt is not None and logprobs.get("text_offset"):
        count = sum(at < len(record.prompt) for at in logprobs["text_offset"])
    else:
        raise InputError(
            "the request has echo, and the record does not tell where the prompt ends; expected "
            "the prompt, and logprobs.text_offset or prompt_token_ids."
        )
    told = tuple(token.logprob for token in tokens[:count])
    text = record.text if record.text is None else record.text.removeprefix(record.prompt or "")
    return replace(record, answer=tokens[count:], text=text, prompt_logprobs=told)


# What all formats share.


def _record(
    name: str, response: Data, request: Data, tokens: tuple[ServedToken, ...], text: str | None
) -> ServedRecord:
    prompt = request.get("prompt", response.get("prompt"))
    ids = response.get("prompt_token_ids")
    if isinstance(prompt, list):
        several = [entry for entry in prompt if not isinstance(entry, int)]
        if len(several) > 1:
            raise InputError(
                f"the request has {len(several)} prompts; expected one per record, so that each "
                "answer has its own."
            )
        single = several[0] if several else prompt
        prompt, ids = (single, ids) if isinstance(single, str) else (None, ids or single)
    messages = request.get("messages")
    if prompt is None and not ids and not messages:
        raise InputError(
            "the record has an answer and no prompt; expected prompt_token_ids (vLLM's "
            "return_token_ids), or the request beside the response: {'request': {'messages': "
            "[...]}, 'response': {...}}."
        )
    values = tuple(
        None if not row else _entry(row, token_id)[2]
        for token_id, row in zip(ids or (), response.get("prompt_logprobs") or (), strict=False)
    )
    usage = response.get("usage") or {}
    return ServedRecord(
        name,
        tokens,
        text,
        prompt=prompt,
        prompt_ids=tuple(ids) if ids else None,
        prompt_logprobs=values,
        prompt_count=usage.get("prompt_tokens"),
        messages=messages,
        request=request,
    )


def _number(value: Any) -> float | None:
    if value is None or not math.isfinite(value) or value <= UNKNOWN:
        return None
    return float(value)


def _require_as_many(name: str, count: int, other: str, values: Any) -> None:
    if values is not None and len(values) != count:
        raise InputError(
            f"{name} holds {count} tokens and {other} {len(values)}, so the record is cut off; "
            "expected as many in both."
        )


def _require_whole(records: list[ServedRecord], response: Data) -> None:
    # Servers may count a last token that they do not report, such as the end of the text.
    counted = (response.get("usage") or {}).get("completion_tokens")
    if len(records) != 1 or counted is None or not records[0].answer:
        return
    count = len(records[0].answer)
    if count < counted - 1:
        raise InputError(
            f"the record holds {count} tokens of the answer, and the server counted {counted}, so "
            "it is cut off; expected all of them."
        )
