"""From the record of a served model to its explanation by the local checkpoint."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

from captum_ssm.capture import check_model, unwrap
from captum_ssm.errors import InputError
from captum_ssm.explanation import Explanation
from captum_ssm.explanation.make.inputs.parse_inputs import numbered
from captum_ssm.explanation.make.inputs.pipelines import unpacked
from captum_ssm.explanation.make.inputs.reading import TokenizedText
from captum_ssm.explanation.make.many import Explainer, InputRow
from captum_ssm.explanation.make.served.comparison import check_bound, compared
from captum_ssm.explanation.make.served.records import ServedRecord, read_records
from captum_ssm.explanation.make.served.rendering import read_answer, read_prompt
from captum_ssm.explanation.make.served.vocabulary import Vocabulary

BOUND = 0.5  # nats; docs/how_to/served_models.md has what it was chosen by
# What the record itself tells.
OWN = ("inputs", "messages", "target", "max_new_tokens", "generation", "position", "input_ids")


@dataclass(frozen=True)
class ServedRow:
    """What :func:`captum_ssm.explain` is asked about a record.

    Args:
        inputs (TokenizedText): the prompt, P tokens.
        target (TokenizedText): the answer, T tokens.
        record (ServedRecord): what was recorded.
    """

    inputs: TokenizedText
    target: TokenizedText
    record: ServedRecord

    @property
    def row(self) -> InputRow:
        """As one of many inputs."""
        return InputRow(self.inputs, self.target)

    def checked(self, model: Any, bound: float | None, temperature: float = 1.0) -> dict[str, Any]:
        """How the local model's log probabilities differ from the recorded ones, as plain data.

        Raises:
            InputError: where one differs by more than the bound.
        """
        found = compared(model, self.record, self.inputs, self.target, temperature)
        said = found.exceeding(BOUND if bound is None else bound)
        if said and bound is not None:
            raise InputError(
                f"{said}. The record is of another checkpoint, template or temperature; pass those "
                "that were served (temperature=, where the server recorded what it drew from), or "
                "bound=None to explain it as it is."
            )
        if said or not found.tokens:
            said = said or "the record holds no log probabilities, so nothing was compared"
            warnings.warn(f"{said}. It is explained as it is.", UserWarning, stacklevel=3)
        return found.data(self.record, temperature) | {"bound": bound}


def row_of(record: Any, tokenizer: Any) -> ServedRow:
    """The prompt and the answer of one record of a served model, as ``explain`` takes them.

    Args:
        record (Any): as for :func:`captum_ssm.replay`, with one answer.
        tokenizer (TokenizerLike): of the local model.

    Raises:
        InputError: for a record that holds several answers, and as for ``replay``.
    """
    found = read_records(record)
    if len(found) != 1:
        raise InputError(f"the record holds {len(found)} answers; expected one.")
    return _row(found[0], Vocabulary(tokenizer))


def _row(record: ServedRecord, vocabulary: Vocabulary) -> ServedRow:
    prompt = read_prompt(record, vocabulary.tokenizer)
    return ServedRow(prompt, read_answer(record, vocabulary), record)


def replay(
    model: Any,
    tokenizer: Any = None,
    record: Any = None,
    *,
    bound: float | None = BOUND,
    temperature: float = 1.0,
    **options: Any,
) -> Explanation:
    """Explain what a served model answered, by the same checkpoint here.

    The prompt and the answer run through the local model, token by token as the server recorded
    them: by their ids, or by their texts or bytes, which the tokenizer has to reproduce. The log
    probability of each token is compared with the recorded one, and the answer is explained only if
    they agree. Records are those of vLLM (``RequestOutput``, and its server with
    ``return_token_ids``), and of completions and chat completions of the OpenAI API with
    ``logprobs``; the request has to be beside a response that does not hold the prompt:
    ``{"request": {"messages": [...]}, "response": {...}}``.

    Args:
        model (nn.Module, nnsight model or Pipeline): the checkpoint that was served.
        tokenizer (TokenizerLike, optional): its tokenizer; records of ids need none. Default: None
        record (dict, object or list): a record, several of them, or the chunks of a stream.
        bound (float, optional): how much the log probability of any token may differ, in nats.
            None explains a record that differs as well, with a warning. Default: 0.5
        temperature (float, optional): by which the server divided its logits before it recorded
            log probabilities. vLLM and OpenAI record those of the model itself by default, which
            is 1. Penalties and truncated sampling are not undone. Default: 1.0
        **options: of :func:`captum_ssm.explain`.

    Returns:
        Explanation: one example per answer. ``settings["replay"]`` has, for each of them, the
        recorded and the local log probability of each token, and the largest and the mean
        difference.

    Raises:
        ValueError: for an unknown format, a record that is cut off, a token that the tokenizer does
            not have, another number of tokens in the prompt than the server counted, log
            probabilities that differ by more than the bound, and as for ``explain``.
        TypeError: for an option that the record tells itself, and as for ``explain``.

    Examples::

        >>> from captum_ssm import replay
        >>> answer = {"token_ids": [5, 6], "logprobs": [{5: -3.2}, {6: -3.1}]}
        >>> record = {"prompt_token_ids": [3, 4], "outputs": [answer]}
        >>> explanation = replay(model, tokenizer, record, bound=9)  # the model here is random
        >>> explanation.examples[0].text
        'w3 w4 w5 w6'
    """
    model, tokenizer, record, _ = unpacked(model, tokenizer, record, None)
    check_bound(bound, temperature)
    for name in OWN:
        if options.get(name) is not None:
            raise TypeError(f"{name} is given, and the record tells it; leave it out.")
    module, vocabulary = unwrap(check_model(model)), Vocabulary(tokenizer)
    against = options.pop("against", None)
    explainer = Explainer(model, tokenizer, **options)
    records = read_records(record)
    rows, checks = [], []
    for k, one in enumerate(records):
        with numbered(k, len(records), "records"):
            rows.append(_row(one, vocabulary))
            checks.append(rows[-1].checked(module, bound, temperature))
    examples = []
    for k, outcome in enumerate(explainer([replace(row.row, against=against) for row in rows])):
        if isinstance(outcome, Exception):
            with numbered(k, len(records), "records"):
                raise outcome
        examples.append(outcome)
    targets = [row.target.text for row in rows]
    whole = explainer.explanation(examples, targets, against)
    return replace(whole, settings={**whole.settings, "replay": checks})
