"""The prompt and the answer of a record, as the local model reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from captum_ssm.errors import InputError
from captum_ssm.explanation.make.inputs.reading import TokenizedText, read, read_ids
from captum_ssm.explanation.make.many import InputRow
from captum_ssm.explanation.make.messages import Conversation
from captum_ssm.explanation.make.recorded import Recorded
from captum_ssm.explanation.make.served.records import ServedRecord
from captum_ssm.explanation.make.served.vocabulary import Vocabulary

# What a record itself tells.
TOLD = (
    *("inputs", "messages", "input_ids", "columns", "target"),
    *("max_new_tokens", "generation", "position"),
)


def check_told(options: Mapping[str, Any]) -> None:
    """Raise for options that say what a record tells."""
    for name in TOLD:
        if options.get(name) is not None:
            raise TypeError(f"{name} is given, and the record tells it; leave it out.")


def served_row(
    record: ServedRecord,
    vocabulary: Vocabulary,
    bound: float | None,
    temperature: float,
    against: Any = None,
) -> InputRow:
    """What is explained of a record.

    ``bound`` is how much log probabilities may differ, None for any amount; the server divided its
    logits by ``temperature``.

    Raises:
        InputError: for a prompt or an answer that the tokenizer does not reproduce.
        TypeError: for texts without a tokenizer.
    """
    prompt = read_prompt(record, vocabulary.tokenizer)
    answer = read_answer(record, vocabulary, prompt)
    P = len(prompt.tokens)
    before = record.prompt_logprobs if len(record.prompt_logprobs) == P else (None,) * P
    each = enumerate([*before, *(token.logprob for token in record.answer)])
    known: dict[tuple[int, ...], float]
    known = {(position,): value for position, value in each if position and value is not None}
    if record.total is not None:
        known[tuple(range(P, P + len(answer.tokens)))] = record.total
    recorded = Recorded(record.format, known, bound, temperature, record.sampling)
    return InputRow(prompt, answer, against, recorded=recorded)


def read_prompt(record: ServedRecord, tokenizer: Any) -> TokenizedText:
    """The prompt, by its ids where they were recorded, else by its text or the chat template.

    Raises:
        InputError: where the tokenizer makes another number of tokens of it than the server did.
        TypeError: for a text without a tokenizer.
    """
    ids = record.prompt_ids
    if ids is not None:
        return _marked(record, tokenizer) or read_ids(tokenizer, ids, "the prompt")
    _require_tokenizer(tokenizer, "prompt")
    is_chat = record.messages is not None
    if record.messages is not None:
        prompt = Conversation.of(tokenizer, record.messages).opened()
    else:
        prompt = read(tokenizer, record.prompt or "", "the prompt")
    counted = record.prompt_count or len(record.prompt_logprobs) or None
    if counted not in (None, len(prompt.tokens)):
        what = "chat template, or the tokenizer," if is_chat else "tokenizer"
        raise InputError(
            f"the server counted {counted} tokens of the prompt, and the {what} given here makes "
            f"{len(prompt.tokens)} of it, beginning with {prompt.tokens[0].text!r}; pass the "
            "served model's own, or record ids (vLLM's return_token_ids)."
        )
    return prompt


def read_answer(
    record: ServedRecord, vocabulary: Vocabulary, prompt: TokenizedText
) -> TokenizedText:
    """The answer, by its recorded tokens, else by its text as it continues the prompt's.

    Raises:
        InputError: for tokens that the tokenizer does not have, and an empty answer.
        TypeError: for texts without a tokenizer.
    """
    tokenizer, tokens = vocabulary.tokenizer, record.answer
    if tokenizer is None and any(token.id is None for token in tokens or (None,)):  # type: ignore[union-attr]
        _require_tokenizer(tokenizer, "answer")
    if tokens:
        return read_ids(tokenizer, vocabulary.ids_of(tokens, record.text), "the answer")
    if record.prompt is not None and record.prompt_ids is None:
        P, whole = len(prompt.ids), read(tokenizer, f"{record.prompt}{record.text}", "the record")
        if whole.ids[:P] == prompt.ids and whole.ids[P:]:
            return read_ids(tokenizer, whole.ids[P:], "the answer")
    return read(tokenizer, record.text or "", "the answer", special=False)


def _marked(record: ServedRecord, tokenizer: Any) -> TokenizedText | None:
    # With the turns of a conversation, where its template makes the recorded ids of it.
    if record.messages is None or not getattr(tokenizer, "chat_template", None):
        return None
    prompt = Conversation.of(tokenizer, record.messages).opened()
    return prompt if tuple(prompt.ids) == record.prompt_ids else None


def _require_tokenizer(tokenizer: Any, what: str) -> None:
    if tokenizer is None:
        raise TypeError(
            f"the record has the {what} as a text, and there is no tokenizer; expected "
            "replay(model, tokenizer, record)."
        )
