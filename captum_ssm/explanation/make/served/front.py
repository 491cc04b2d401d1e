"""From the record of a served model to its explanation by the local checkpoint."""

from __future__ import annotations

import warnings
from typing import Any

from captum_ssm.explanation import Explanation
from captum_ssm.explanation.make.inputs.parse_inputs import numbered, unpacked
from captum_ssm.explanation.make.many import Explainer
from captum_ssm.explanation.make.recorded import BOUND, check_bound
from captum_ssm.explanation.make.served.records import read_records
from captum_ssm.explanation.make.served.rendering import check_told, served_row
from captum_ssm.explanation.make.served.vocabulary import Vocabulary
from captum_ssm.explanation.replayed import Replay


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
    ``{"request": {"messages": [...]}, "response": {...}}``. Logs of evaluations are read as well:
    those of Inspect, and the samples of lm-eval.

    Args:
        model (nn.Module, nnsight model or Pipeline): the checkpoint that was served.
        tokenizer (TokenizerLike, optional): its tokenizer; records of ids need none. Default: None
        record (dict, object or list): a record, several of them, the chunks of a stream, or a log
            of an evaluation.
        bound (float, optional): how much the log probability of any token may differ, in nats.
            None explains a record that differs as well, with a warning. Default: 0.5
        temperature (float, optional): by which the server divided its logits before it recorded
            log probabilities. vLLM and OpenAI record those of the model itself by default, which
            is 1. Penalties and truncated sampling are not undone. Default: 1.0
        **options: of :func:`captum_ssm.explain`.

    Returns:
        Explanation: one example per answer. Its ``replay`` has the recorded and the local log
        probability of each token, and the largest and the mean difference: of the run that is
        explained, so that there is no other one.

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
    check_told(options)
    vocabulary = Vocabulary(tokenizer)
    against = options.pop("against", None)
    explainer = Explainer(model, tokenizer, **options)
    records = read_records(record)
    rows = []
    for k, answer in enumerate(records):
        with numbered(k, len(records), "records"):
            rows.append(served_row(answer, vocabulary, bound, temperature, against))
    examples = []
    for k, outcome in enumerate(explainer(rows)):
        with numbered(k, len(records), "records"):
            if isinstance(outcome, Exception):
                raise outcome
            assert outcome.replay is not None
            _warn_of(outcome.replay)
        examples.append(outcome)
    return explainer.explanation(examples, [row.target.text for row in rows], against)


def _warn_of(replay: Replay) -> None:
    # What is explained although nothing says that it is of this model.
    said = replay.exceeding(BOUND) if replay.bound is None else ""
    if not replay.tokens:
        said = "the record holds no log probabilities, so nothing was compared"
    if said:
        warnings.warn(f"{said}. It is explained as it is.", UserWarning, stacklevel=3)
