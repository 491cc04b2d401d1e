"""The front door, :func:`explain`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import wraps
from typing import Any, Literal

from captum_ssm.explanation import Explanation
from captum_ssm.explanation.make.inputs.media import GIVEN
from captum_ssm.explanation.make.inputs.parse_inputs import unpacked
from captum_ssm.explanation.make.many import Explainer
from captum_ssm.explanation.make.parse import OPTIONS
from captum_ssm.utils.allocator import workspace
from captum_ssm.utils.suggestions import closest

# Options by the names that people try.
ELSEWHERE = {"text": "inputs=", "max_tokens": "max_new_tokens=", "method": "methods="}
ELSEWHERE |= {name: f"inputs={{'text': ..., {name!r}: ...}}" for name in GIVEN}


def _suggesting(function: Any) -> Any:
    # A keyword that the function does not have is answered with the closest that it has.
    known = inspect.signature(function).parameters

    @wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        for name in named:
            if name not in known:
                near = closest(name, [*known, *ELSEWHERE])
                meant = f" Did you mean {ELSEWHERE.get(near, f'{near}=')}?" if near else ""
                if not near and "input_ids" in named:
                    meant = " What a processor returns is one argument: explain(model, processor, "
                    meant += "processor(text=..., images=..., return_tensors='pt'))."
                raise TypeError(
                    f"explain has no option {name!r}.{meant} Options of a method go into a dict: "
                    "methods={'latim': {'aggregation': 'l2'}}."
                )
        return function(*args, **named)

    return checked


@_suggesting
@workspace()
def explain(
    model: Any,
    tokenizer: Any = None,
    inputs: Any = None,
    *,
    messages: Any = None,
    max_new_tokens: int | None = None,
    generation: Mapping[str, Any] | None = None,
    target: Any = None,
    against: Any = None,
    methods: Any = ("mamba-lrp",),
    validate: bool = False,
    span: str | tuple[int, int] | None = None,
    hops: int | None = None,
    reasoning: tuple[str, str] | None = None,
    through: str = "relevance",
    position: int | Sequence[int] | Literal["all"] | None = None,
    units: str | Mapping[str, tuple[int, int]] = "token",
    alternatives: int = 1,
    maps: bool | str | Sequence[str] = False,
    layers: int | str | Sequence[int | str] | None = None,
    lens: bool = False,
    circuit: bool = False,
    processor: Any = None,
    labels: Sequence[str] | Mapping[int, str] | None = None,
    features: Sequence[str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    title: str | None = None,
    memory_limit: int | None = None,
    show_progress: bool = True,
    input_ids: Any = None,
    attention_mask: Any = None,
    token_type_ids: Any = None,
    pixel_values: Any = None,
) -> Explanation:
    """Why a model answers what it answers, as data that can be shown, saved and compared.

    ``explain(model, tokenizer, text)`` explains the model's next token, and with ``target`` each
    token of a continuation; with ``max_new_tokens`` the model writes the continuation itself.
    ``messages=`` is a conversation, by the tokenizer's chat template. ``explain(model, image)``
    explains the class of an image or a video, and ``explain(model, series)`` a forecast, or with
    ``labels`` the class of a series or of a row of a table. The model runs once or a few times to
    see what kind of model it is and what it answers, once for each further input, and then as each
    method needs.

    What an array is, the model decides: each reading that its shape allows, as an image, a series
    or a table, is tried, and the one that the model takes counts.

    Args:
        model (nn.Module, nnsight model or Pipeline): a language model that returns logits
            ``(B, L, V)``; a classifier of texts or images, ``(B, classes)``, or of tokens,
            ``(B, L, labels)``; a model that finds answers in a text, with ``start_logits`` and
            ``end_logits``; or a pipeline of transformers, in place of a model and its tokenizer.
        tokenizer (TokenizerLike or Processor, optional): of the language model; for a text with
            images the model's processor, which holds a tokenizer. Without it, ids are their own
            texts, and the inputs may stand here. Default: None
        inputs (str, list of str, Tensor, dict or image): a text or several, also an array or a
            pandas ``Series`` of them; two texts that go together, ``{"text": ..., "text_pair":
            ...}`` or ``{"question": ..., "context": ...}``; token ids ``(L,)`` or ``(B, L)``; a
            tokenizer's whole output, also by keyword (``**tokenizer(text)``), whose padding is not
            explained; a text with images, ``{"text": ..., "images": ...}`` as the model's processor
            takes it, or what that returned; a series ``(T, F)`` or ``(B, T, F)``, or a pandas table
            with one row per step and one column per feature; a row of a table ``(F,)`` or several
            ``(B, F)``; an image, a path, or a video ``(C, T, H, W)``; or a list of these. Floats
            ``(C, H, W)`` or ``(H, W, C)`` are pixels as the model takes them; a PIL image, a file
            and an array of bytes are scaled to 0 .. 1, and normalized by ``mean`` and ``std``. With
            ``processor`` all but tensors of floats are as that takes them. Default: None
        messages (list of dict, or list of lists, optional): a conversation in place of ``inputs``,
            ``[{"role": "user", "content": "..."}]``, or several. The tokenizer's chat template
            renders it. The answer is what the assistant's last message says, else ``target``,
            else what the model writes (``max_new_tokens``) or predicts. Who says what is in
            ``Example.units["turn"]``: spans such as ``"user 1"`` and ``"assistant 1"``, and
            ``"template"`` for the template's own tokens. A content may be a list of text parts,
            which are joined. Default: None
        max_new_tokens (int, optional): the model writes up to so many tokens after each text, and
            each of them is explained, the end-of-sequence token too. Greedy, by the model's own
            ``generate``, or step by step for a model without one. Default: None
        generation (dict, optional): options of the model's ``generate``, such as
            ``{"do_sample": True, "temperature": 0.7}``; samples begin at PyTorch's random state,
            which is left as it was. Default: None
        target (str, int, sequence of int or list of str, optional): the continuation that is
            explained, one output per token; of an image, a text or a token a class or its label; of
            a text that answers a question a part of it; of a forecast an index such as
            ``(step, feature)``, or its name; a list of str has one per text. None is what the model
            predicts. Default: None
        against (str, int, sequence of int or list of str, optional): another continuation, or
            class. Where the two first differ, the score of one minus that of the other is explained
            as well; methods that ignore the target give their plain row. Default: None
        methods (str, Attribution, sequence of these or dict, optional): names, as
            :func:`captum_ssm.attr.methods` lists them, names of Captum's methods, such as
            ``"integrated-gradients"``, and methods that were made with the model, such as Captum's
            ``IntegratedGradients(model)``; a dict has options of each method's ``attribute``.
            ``"all"`` is every method that works on the model. Default: ``("mamba-lrp",)``
        validate (bool, optional): also remove the tokens, most relevant first, and keep how the
            score falls for each method and for random orders, in ``Example.validation``.
            Default: False
        span (str or tuple, optional): explains several tokens of the continuation together, by one
            row for the sum of their logits, in place of each by itself: a text of the continuation
            (where it stands last), or the first and the last of its tokens, negative from the end.
            Default: None
        hops (int, optional): the relevance that falls on tokens of the continuation is handed on,
            so many times, to what the model wrote these from (:func:`captum_ssm.trace`): of the
            span, or of the answer after the thoughts, in addition to its single tokens.
            Default: None
        reasoning (tuple of str, optional): what the model's thoughts begin and end with; an empty
            text for the beginning of the continuation. Default: ``("<think>", "</think>")``
        through (str, optional): what says on which of its own words the model rests, where hops
            follow them: ``"relevance"``, or ``"swaps"``, which replaces each that depends on the
            prompt by others that fit there, at about eight forward passes per word
            (:func:`captum_ssm.interventions.swap_effects`). Default: ``"relevance"``
        position (int, sequence of int or str, optional): explains what is predicted at these
            tokens of the text, negative from the end, in place of its continuation: the target,
            of one token, or the model's own prediction there; of labels those of these tokens.
            ``"all"`` explains every token of the text from the second on, by those before it, and
            then the continuation.
            Default: None
        units (str or dict, optional): what relevance is summed over where it is shown:
            ``"token"``, ``"word"``, ``"sentence"``, ``"line"`` of a text that has several, or
            ``"turn"`` of a conversation; or named parts of the text, ``{"subject": (0, 4)}``, each
            a range of characters. The rows themselves are per
            token. Default: ``"token"``
        alternatives (int, optional): how many of the other likeliest answers are explained at
            each output, in addition to the target. Default: 1
        maps (bool, str or sequence of str, optional): also keep one map ``(L, L)`` per layer:
            ``"hidden-attention"`` (the mean over channels; also for True) or ``"latim"`` (the l2
            norms of the contributions). Default: False
        layers (int, str or sequence, optional): of the maps, by index or module path; None for
            all. Default: None
        lens (bool, optional): also keep the likeliest answers after each layer, by the model's
            own final norm and head; skipped, with a note in ``settings``, where these are not
            found. Default: False
        circuit (bool, optional): also keep, for the answer explained first at each output of a
            text, which token reads which other one in which layer: the flow graphs of
            :class:`~captum_ssm.attr.RelevanceFlow`, in ``Example.circuits``, of the answer against
            ``against`` or else against all others. Skipped, with a note in ``settings``, for models
            without such a graph. Default: False
        processor (Callable, optional): the image processor of the model, or a function from a
            picture to a tensor ``(C, H, W)``; it may also stand in the tokenizer's place.
            Default: None
        labels (sequence or dict of str, optional): the names of the model's classes; None for
            those of its configuration. The outputs of a model of series or tables are classes if
            they have names, else numbers. Default: None
        features (sequence of str, optional): the names of the features of a series, or of the
            columns of a table's row; None for those of a pandas table, else numbers. Default: None
        mean, std (sequence of float, optional): how pixels are normalized: bytes are, and floats
            are shown as they were before. None for those of the processor; without one bytes are
            only scaled, and of floats the range is shown. Default: None
        title (str, optional): a heading. Default: None
        memory_limit (int, optional): bytes for the rows, for the maps, and for the work of each
            method; what needs more is refused before it is computed. Default: None
        show_progress (bool, optional): progress bars for what takes more than two seconds.
            Default: True
        input_ids, attention_mask, token_type_ids, pixel_values (Tensor, optional): what tokenizers
            and processors return, by keyword. Default: None

    Returns:
        Explanation: with one example per text or image.

    Raises:
        ValueError: for a text without a token, images or sound that the model or the processor
            does not take with a text, hidden states
            in place of scores, a label that the model does not have, words of a target that the
            tokenizer does not know, messages without a chat template, an option that ``generate``
            does not have, a target of several tokens where one is needed, a contrast with the
            target itself, an unknown method, unit or map, and whatever a method raises.
        TypeError: for inputs of a wrong type.
        MemoryLimitError: where rows or maps do not fit ``memory_limit``.

    Examples::

        >>> explanation = explain(model, tokenizer, "w3 w4 w5", target="w6 w7", against="w6 w8")
        >>> [output.answers[output.chosen].text for output in explanation.examples[0].outputs]
        ['w6', 'w7']
        >>> explanation.relevance(output=1, against="w8").shape
        (5,)
        >>> explanation = explain(model, **tokenizer("w3 w4 w5", return_tensors="pt"))
        >>> explanation = explain(model, tokenizer, "w3 w4 w5", max_new_tokens=2)
        >>> len(explanation.examples[0].outputs)
        2
    """
    options = {name: value for name, value in locals().items() if name in OPTIONS}
    model, tokenizer, inputs, processor = unpacked(model, tokenizer, inputs, processor)
    tensors = {"input_ids": input_ids, "attention_mask": attention_mask}
    tensors |= {"token_type_ids": token_type_ids, "pixel_values": pixel_values}
    explainer = Explainer(model, tokenizer, **options | {"processor": processor})
    questions = explainer.questions(inputs, tensors, messages, target, against)
    examples = explainer.answer(questions, target)
    return explainer.explanation(examples, target, against)
