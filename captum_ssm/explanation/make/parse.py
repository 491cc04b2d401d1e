"""What :func:`explain` takes, checked: how to explain, which texts, and what is asked of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from captum_ssm.capture import check_model, unwrap
from captum_ssm.errors import InputError
from captum_ssm.explanation.make.methods import ALL, parse_methods
from captum_ssm.explanation.make.questions import Setup, per_example
from captum_ssm.explanation.make.removal import Replacement
from captum_ssm.explanation.make.texts import TextQuestion
from captum_ssm.utils.integers import as_index

UNITS = ("token", "word", "sentence", "turn")
MAPS = ("hidden-attention", "latim")


def parse_setup(
    model: Any,
    methods: Any,
    alternatives: Any,
    maps: Any,
    layers: Any,
    lens: Any,
    memory_limit: int | None,
    tokenizer: Any = None,
    validate: bool = False,
) -> Setup:
    """How examples are explained.

    Raises:
        TypeError: for a model that is not one.
        ValueError: for an unknown method, option or map, and a negative count.
    """
    module = unwrap(check_model(model))
    tokenizer = tokenizer if hasattr(tokenizer, "convert_ids_to_tokens") else None
    chosen = parse_methods(methods, model, module, tokenizer, memory_limit)
    count = as_index(alternatives)
    if count is None or count < 0:
        raise ValueError(f"alternatives is {alternatives!r}; expected an integer from 0 on.")
    return Setup(
        module,
        chosen,
        count,
        _maps(maps),
        layers,
        bool(lens),
        memory_limit,
        Replacement.of(tokenizer),
        bool(validate),
        isinstance(methods, str) and methods == ALL,
    )


def parse_spans(units: Any) -> dict[str, tuple[int, int]]:
    """The named parts of a text, ``{name: (start, end)}``; none for the usual units.

    Raises:
        ValueError: for unknown units, and parts that are not two integers.
    """
    if isinstance(units, str) and units in UNITS:
        return {}
    if not isinstance(units, Mapping) or not units:
        raise ValueError(
            f"units is {units!r}; expected one of {', '.join(UNITS)}, or named parts of the text "
            "such as {'subject': (0, 4)}."
        )
    spans = {}
    for name, span in units.items():
        indices = [as_index(bound) for bound in span] if isinstance(span, Sequence) else []
        bounds = [bound for bound in indices if bound is not None]
        if not len(bounds) == len(indices) == 2 or not isinstance(name, str):
            raise ValueError(
                f"units[{name!r}] is {span!r}; expected two integers, the first character and the "
                "one after the last."
            )
        spans[name] = bounds[0], bounds[1]
    return spans


def parse_inputs(
    tokenizer: Any, inputs: Any, tensors: Mapping[str, Any]
) -> tuple[Any, list[str] | list[list[int]] | None, Any]:
    """The tokenizer, if any, the texts or their ids, and else None and the image.

    Args:
        tokenizer (Any): may be the inputs, where there are none.
        inputs (Any): as ``explain`` takes them.
        tensors (dict): by keyword, None where they were not given.

    Raises:
        ValueError, TypeError: as for ``explain``.
    """
    is_tokenizer = callable(getattr(tokenizer, "encode", None)) and not isinstance(tokenizer, str)
    if inputs is None and not is_tokenizer:
        tokenizer, inputs = None, tokenizer
    named = {name: value for name, value in tensors.items() if value is not None}
    if (inputs is None) == (not named):
        raise TypeError(
            f"{'no input' if inputs is None else 'more than one input'} was given; expected a text "
            "with its tokenizer, token ids, a tokenizer's output, or an image."
        )
    inputs = named if inputs is None else inputs
    texts = _texts(tokenizer, inputs)
    is_image = texts is None and isinstance(inputs, Mapping)
    return tokenizer, texts, inputs.get("pixel_values") if is_image else inputs


def text_questions(
    tokenizer: Any,
    texts: Sequence[Any],
    target: Any,
    against: Any,
    position: Any,
    spans: Mapping[str, tuple[int, int]],
) -> list[TextQuestion]:
    """What is asked about each text.

    Raises:
        ValueError, TypeError: for targets that are not one per text, or not continuations.
    """
    targets = per_example("target", target, len(texts))
    others = per_example("against", against, len(texts))
    return [
        TextQuestion(tokenizer, text, continuation(a), continuation(b), position, spans)
        for text, a, b in zip(texts, targets, others, strict=True)
    ]


def _maps(maps: Any) -> tuple[str, ...]:
    if isinstance(maps, bool):
        return MAPS[:1] if maps else ()
    names = (maps,) if isinstance(maps, str) else tuple(maps)
    for name in names:
        if name not in MAPS:
            raise ValueError(
                f"maps holds {name!r}; expected True, or one or several of {', '.join(MAPS)}."
            )
    return names


def _texts(tokenizer: Any, inputs: Any) -> list[str] | list[list[int]] | None:
    # Texts, or ids without their padding; None for images.
    if isinstance(inputs, str) or (
        isinstance(inputs, (list, tuple)) and inputs and isinstance(inputs[0], str)
    ):
        if tokenizer is None:
            raise TypeError(
                "inputs is a text, and there is no tokenizer; expected explain(model, tokenizer, "
                "text)."
            )
        return [inputs] if isinstance(inputs, str) else list(inputs)
    mask = None
    if isinstance(inputs, Mapping):
        if "input_ids" not in inputs:
            return None
        mask = inputs.get("attention_mask")
        segments = inputs.get("token_type_ids")
        if segments is not None and bool(torch.as_tensor(segments).any()):
            raise InputError(
                "token_type_ids marks a second text; expected one text per example. Pass "
                "tokenizer(text) in place of tokenizer(text, pair)."
            )
        inputs = inputs["input_ids"]
    if isinstance(inputs, (list, tuple)) and inputs and not torch.is_tensor(inputs[0]):
        rows = inputs if isinstance(inputs[0], (list, tuple)) else [inputs]
        masks = [[1] * len(row) for row in rows] if mask is None else mask
        masks = masks if isinstance(masks[0], (list, tuple, Tensor)) else [masks]
        return [
            [int(token) for token, is_read in zip(row, mark, strict=True) if is_read]
            for row, mark in zip(rows, masks, strict=True)
        ]
    if not torch.is_tensor(inputs) or inputs.is_floating_point():
        return None
    ids = inputs[None] if inputs.dim() == 1 else inputs
    if ids.dim() != 2 or ids.numel() == 0 or ids.dtype == torch.bool:
        raise InputError(
            f"the ids have shape {tuple(inputs.shape)} and dtype {inputs.dtype}; expected (L,) or "
            "(B, L) of an integer dtype, at least one."
        )
    marks = torch.ones_like(ids) if mask is None else torch.as_tensor(mask).reshape(ids.shape)
    texts = [row[mark != 0].tolist() for row, mark in zip(ids, marks, strict=True)]
    if not all(texts):
        raise InputError("attention_mask marks no token of an example; expected at least one.")
    return texts


def continuation(target: Any) -> str | list[int] | None:
    """A target as a text or as ids.

    Raises:
        TypeError: for anything else.
    """
    if target is None or isinstance(target, str):
        return target
    index = as_index(target)
    if index is not None:
        return [index]
    values = target.reshape(-1).tolist() if torch.is_tensor(target) else target
    ids = [as_index(value) for value in values] if isinstance(values, Sequence) else [None]
    if None in ids:
        raise TypeError(f"target is {target!r}; expected a text, a token id, or several ids.")
    return ids  # type: ignore[return-value]
