"""Logs of evaluations, taken apart into records as servers write them. Needs no PyTorch.

============ ======================================================================================
Inspect      ``EvalLog``, or one of its ``samples``: each call of the evaluated model is an event
             with ``input``, ``config`` and ``output.choices[]``
lm-eval      a line of ``samples_*.jsonl``: ``arguments`` are what the model was given, and
             ``resps`` what it wrote, or the log probability of a given continuation
============ ======================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from captum_ssm.errors import InputError
from captum_ssm.explanation.make.served.chunks import Data

EVALUATIONS = INSPECT, LM_EVAL = ("Inspect", "lm-eval")
HASHES = ("doc_hash", "prompt_hash", "target_hash")
STORED = "attachment://"  # what stands for a long text in a file of Inspect


def each_record(entry: Any) -> Iterator[Any]:
    """The records in an entry of a log: one per call of a model in an evaluation, else itself.

    What cannot be read is its error.
    """
    keys = entry.keys() if isinstance(entry, Mapping) else ()
    read_as = next((reader for marks, reader in READERS.items() if marks <= set(keys)), None)
    try:
        yield from [entry] if read_as is None else read_as(entry)
    except Exception as error:  # whatever an entry that is damaged may raise
        yield error


# Inspect.


def _inspect_log(log: Data) -> Iterator[Any]:
    for sample in log["samples"] or ():
        yield from _inspect_sample(sample)


def _inspect_sample(sample: Data) -> Iterator[Any]:
    # Graders are models, too: the evaluated one is that whose output the sample has.
    model = (sample.get("output") or {}).get("model")
    calls = [event for event in sample["events"] if event.get("event") == "model"]
    calls = [
        event for event in calls if event["output"].get("model") == model and not event.get("error")
    ]
    scores = {f"score_{k}": v.get("value") for k, v in (sample.get("scores") or {}).items()}
    for k, call in enumerate(calls):
        try:
            yield {
                "object": INSPECT,
                **{"sample": sample.get("id"), "epoch": sample["epoch"], "call": k, **scores},
                "request": {**call.get("config", {}), "messages": _conversation(call)},
                "response": {
                    "model": model,
                    "choices": list(map(_choice, call["output"]["choices"])),
                },
            }
        except InputError as error:
            yield error


def _conversation(call: Data) -> list[dict[str, str]]:
    if call.get("tools"):
        raise InputError(
            "the call offers the model tools, which a chat template may write in several ways; "
            "expected a record of the prompt's ids."
        )
    said = [
        {"role": message["role"], "content": _text(message["content"])} for message in call["input"]
    ]
    if not said or any(STORED in message["content"] for message in said):
        raise InputError(
            "the call's messages are stored elsewhere in the file; expected a log that was read by "
            "inspect_ai.log.read_eval_log(path, resolve_attachments=True), or its path."
        )
    return said


def _choice(choice: Data) -> dict[str, Any]:
    message = {"role": "assistant", "content": _text(choice["message"]["content"])}
    told = {"finish_reason": choice.get("stop_reason"), "logprobs": choice.get("logprobs")}
    return {"message": message, **told}


def _text(content: Any) -> str:
    parts = [content] if isinstance(content, str) else content
    texts = [part if isinstance(part, str) else part.get("text") for part in parts]
    if None in texts:
        kinds = ", ".join(str(part.get("type")) for part in parts if not isinstance(part, str))
        raise InputError(f"a message is made of parts ({kinds}); expected text alone.")
    return "".join(texts)


# lm-eval.


def _lm_eval(sample: Data) -> Iterator[Any]:
    arguments = sample["arguments"]
    fields = {k: v for k, v in sample.items() if k not in HASHES}
    for k, (call, responses) in enumerate(zip(_values(arguments), sample["resps"], strict=True)):
        context, *rest = _values(call)
        if not rest:
            yield InputError(
                "the request is a text without an answer (loglikelihood_rolling); expected a "
                "context with a continuation, or with what the model wrote."
            )
            continue
        is_written = isinstance(rest[0], Mapping)
        if not is_written:
            # As lm-eval does, so that a continuation begins with its space.
            spaces = len(context) - len(context.rstrip())
            context, rest[0] = (
                context[: len(context) - spaces],
                context[-spaces:][:spaces] + rest[0],
            )
        request = {**(rest[0] if is_written else {}), "prompt": context}
        outputs = [
            {"index": i, "text": response}
            if is_written
            else {"index": k, **_scored(rest[0], response)}
            for i, response in enumerate(responses)
        ]
        yield {**fields, "object": LM_EVAL, "request": request, "outputs": outputs}


def _scored(continuation: str, response: Sequence[Any]) -> dict[str, Any]:
    # The file has numbers as texts.
    logprob, is_greedy = response
    told = {"cumulative_logprob": float(logprob), "is_greedy": str(is_greedy) == "True"}
    return {"text": continuation, **told}


def _values(value: Any) -> list[Any]:
    return list(value.values() if isinstance(value, Mapping) else value)


# By the keys that an entry has.
READERS: dict[frozenset[str], Callable[[Data], Iterator[Any]]] = {
    frozenset({"eval", "samples"}): _inspect_log,
    frozenset({"events", "epoch"}): _inspect_sample,
    frozenset({"arguments", "resps"}): _lm_eval,
}
