"""What :func:`explain` is given to explain: texts, as people have them, or an image."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from captum_ssm.capture import is_model
from captum_ssm.capture.check_inputs import check_text
from captum_ssm.errors import InputError
from captum_ssm.explanation.make.inputs.arrays import may_be_text
from captum_ssm.explanation.make.inputs.media import Media, check_ids, media_of, placeholders
from captum_ssm.explanation.make.inputs.patches import pictured
from captum_ssm.explanation.make.inputs.reading import TokenizedText, read, read_ids, read_pair
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.integers import as_index
from captum_ssm.utils.vocabulary import unknown_words

# What the two texts of a pair are called, as by pipelines of transformers.
PAIRS = (("question", "context"), ("text", "text_pair"))


@dataclass(frozen=True)
class Ids:
    """Token ids without their padding, which of two texts each is of, and what goes with them."""

    ids: list[int]
    types: tuple[int, ...] = ()
    media: Media | None = None


Text = str | tuple[str, str] | Ids | TokenizedText


def parse_inputs(
    tokenizer: Any, inputs: Any, tensors: Mapping[str, Any]
) -> tuple[Any, list[Text] | None, Any]:
    """The tokenizer, if any, the texts or their ids, and else None and the image."""
    if inputs is None and not is_tokenizer(tokenizer):
        tokenizer, inputs = None, tokenizer
    given_tensors = {name: value for name, value in tensors.items() if value is not None}
    if (inputs is None) == (not given_tensors):
        raise TypeError(
            f"{'no input' if inputs is None else 'more than one input'} was given; expected a text "
            "with its tokenizer, token ids, a tokenizer's output, or an image."
        )
    _check_order(tokenizer, inputs)
    inputs = given_tensors if inputs is None else inputs
    if _is_listed(inputs):
        inputs = list(inputs)
    if is_tokenizer(tokenizer):
        inputs = _with_ids(inputs)
    is_read = isinstance(inputs, TokenizedText)
    if not is_read and not may_be_text(inputs, is_tokenizer(tokenizer)):
        return tokenizer, None, inputs
    texts = _texts(inputs)
    if texts is not None and tokenizer is None and not isinstance(texts[0], (Ids, TokenizedText)):
        raise TypeError(
            "inputs is a text, and there is no tokenizer; expected explain(model, tokenizer, text)."
        )
    is_image = texts is None and isinstance(inputs, Mapping)
    return tokenizer, texts, inputs.get("pixel_values") if is_image else inputs


def unpacked(model: Any, tokenizer: Any, inputs: Any, processor: Any) -> tuple[Any, Any, Any, Any]:
    """The model, tokenizer, inputs and processor of what ``explain`` is given.

    Args:
        model (Any): a model, or a pipeline: what holds a model, with its tokenizer or its image
            processor.
        tokenizer (Any): of a model, or its processor, which holds one. A pipeline has its own, and
            the inputs stand in its place.
        inputs (Any): what is explained.
        processor (Callable, optional): another one than the pipeline's.

    Raises:
        TypeError: for a pipeline with another tokenizer, or with two inputs.
    """
    if is_model(model) or not is_model(getattr(model, "model", None)):
        if is_processor(tokenizer):
            used_processor = tokenizer if processor is None else processor
            return model, _with_template(tokenizer), inputs, used_processor
        return model, tokenizer, inputs, processor
    if tokenizer is not None and inputs is not None:
        raise TypeError(
            f"model is a {type(model).__name__}, which has its own tokenizer; expected "
            "explain(pipeline, inputs)."
        )
    inputs = tokenizer if inputs is None else inputs
    names = ("processor", "image_processor")
    processors = [
        candidate
        for candidate in (getattr(model, name, None) for name in names)
        if candidate is not None
    ]
    used_processor = next(iter(processors), None) if processor is None else processor
    return model.model, getattr(model, "tokenizer", None), inputs, used_processor


def is_processor(value: Any) -> bool:
    """Whether a value is a processor of texts and of images or sound: it holds a tokenizer."""
    inner = getattr(value, "tokenizer", None)
    return callable(value) and not isinstance(value, type) and is_tokenizer(inner)


def _with_template(processor: Any) -> Any:
    # The tokenizer, by the chat template of its processor where it has none.
    tokenizer, template = processor.tokenizer, getattr(processor, "chat_template", None)
    if template and not getattr(tokenizer, "chat_template", None):
        tokenizer = copy(tokenizer)
        tokenizer.chat_template = template
    return tokenizer


def is_tokenizer(value: Any) -> bool:
    """Whether a value is a tokenizer: it encodes texts, and decodes ids."""
    return not isinstance(value, (str, type)) and all(
        callable(getattr(value, name, None)) for name in ("encode", "decode")
    )


def read_texts(
    tokenizer: Any, texts: Sequence[Text], model: nn.Module, processor: Any = None
) -> list[TokenizedText]:
    """All texts as the model reads them; ``processor`` tells how images were made.

    Raises:
        InputError: for a text without a token, or ids that are not in the vocabulary; of several
            it says which.
    """
    readings = []
    for k, text in enumerate(texts):
        with numbered(k, len(texts)):
            if isinstance(text, Ids) and text.media is not None:
                check_ids(torch.tensor([text.ids]), model, text.media)
                whole = read_ids(tokenizer, text.ids, "the text", placeholders(model, processor))
                readings.append(pictured(whole, text.media, model, processor))
                continue
            readings.append(_read(tokenizer, text))
            check_text(torch.tensor([readings[-1].ids]), model)
    # A conversation was read before, and its own reader warns of it.
    pairs = zip(readings, texts, strict=True)
    warn_of_unknown([read for read, original in pairs if read is not original], stacklevel=7)
    return readings


@contextmanager
def numbered(index: int, count: int, name: str = "inputs") -> Iterator[None]:
    """Errors inside say which of several inputs they are about."""
    try:
        yield
    except (ValueError, TypeError) as error:
        if count == 1:
            raise
        raise type(error)(f"{name}[{index}] of {count}: {error}") from error


def _read(tokenizer: Any, text: Text) -> TokenizedText:
    if isinstance(text, TokenizedText):
        return text
    if isinstance(text, tuple):
        return read_pair(tokenizer, *text)
    if isinstance(text, Ids):
        tokenized = read_ids(tokenizer, text.ids, "the text")
        special = {*getattr(tokenizer, "all_special_ids", ())}
        pairs = zip(text.ids, text.types, strict=False)
        parts = tuple(None if token_id in special else part for token_id, part in pairs)
        return replace(tokenized, parts=parts, types=text.types)
    return read(tokenizer, text, "text")


def warn_of_unknown(texts: Sequence[TokenizedText], stacklevel: int) -> None:
    """Warn of words that the tokenizer does not know, once for all texts."""
    unknown = [token for text in texts for token in text.tokens if token.read_as is not None]
    if unknown:
        words = list(dict.fromkeys(token.text.strip() for token in unknown))
        warning = unknown_words(words, str(unknown[0].read_as))
        warnings.warn(warning, UserWarning, stacklevel=stacklevel + 1)


def _check_order(tokenizer: Any, inputs: Any) -> None:
    if is_tokenizer(inputs):
        raise TypeError(
            "inputs is a tokenizer; expected explain(model, tokenizer, text), in this order."
        )
    if isinstance(tokenizer, str):
        raise TypeError(
            f"tokenizer is the str {tokenizer!r}; expected the tokenizer itself, such as "
            f"AutoTokenizer.from_pretrained({tokenizer!r}), before the text."
        )


def _is_listed(inputs: Any) -> bool:
    # Generators, pandas' Series and arrays of texts: what is neither one input nor a table.
    kinds = (str, bytes, list, Mapping, Tensor)
    if isinstance(inputs, kinds) or hasattr(inputs, "columns") or not isinstance(inputs, Iterable):
        return False
    return getattr(getattr(inputs, "dtype", None), "kind", "O") in "OUT"


def _with_ids(inputs: Any) -> Any:
    # With a tokenizer, arrays of integers are token ids, as tensors are.
    if isinstance(inputs, list):
        return [_with_ids(entry) for entry in inputs]
    is_ids = isinstance(inputs, np.ndarray) and inputs.dtype.kind in "iu" and inputs.ndim < 3
    return torch.as_tensor(inputs.astype(np.int64)) if is_ids else inputs


def _texts(inputs: Any) -> list[Text] | None:
    # None for what is not texts.
    if isinstance(inputs, (str, TokenizedText)):
        return [inputs]
    if isinstance(inputs, Mapping):
        return _of_mapping(inputs)
    if isinstance(inputs, list):
        return _of_list(inputs)
    if not torch.is_tensor(inputs) or inputs.is_floating_point():
        return None
    return _of_ids(inputs, None, None)


def _of_list(inputs: list[Any]) -> list[Text] | None:
    if not inputs:
        raise InputError("inputs is empty; give at least one text.")
    first = inputs[0]
    if isinstance(first, (str, Mapping)):
        all_texts: list[Text] = []
        for k, entry in enumerate(inputs):
            with numbered(k, len(inputs)):
                texts = _texts(entry) if isinstance(entry, (str, Mapping)) else None
                is_known = isinstance(entry, str) or _has_media(entry)
                if texts is None or not (is_known or _is_pair_of_texts(entry)):
                    raise TypeError(
                        f"this is a {type(entry).__name__}; expected a text, as before."
                    )
                all_texts += texts
        return all_texts
    if isinstance(first, tuple) and len(first) == 2 and all(isinstance(t, str) for t in first):
        return [(str(a), str(b)) for a, b in inputs]
    if torch.is_tensor(first):  # of other axes it may be a picture or a batch
        is_ids = all(map(_is_row_of_ids, inputs))
    else:
        is_ids = isinstance(first, (list, tuple)) or as_index(first) is not None
    return _of_ids(inputs, None, None) if is_ids else None


def _is_row_of_ids(value: Any) -> bool:
    if torch.is_tensor(value):
        return value.dim() == 1 and not value.is_floating_point()
    return isinstance(value, (list, tuple))


def _is_pair_of_texts(inputs: Mapping[str, Any]) -> bool:
    return any(isinstance(inputs.get(first), str) for first, _ in PAIRS)


def _has_media(inputs: Any) -> bool:
    return isinstance(inputs, Mapping) and "input_ids" in inputs and media_of(inputs) is not None


def _of_mapping(inputs: Mapping[str, Any]) -> list[Text] | None:
    if "input_ids" in inputs:
        media = media_of(inputs)
        if media is not None:
            texts = _of_ids(inputs["input_ids"], inputs.get("attention_mask"), None)
            return [replace(text, media=media) for text in texts if isinstance(text, Ids)]
        masks = [inputs.get(name) for name in ("attention_mask", "token_type_ids")]
        return _of_ids(inputs["input_ids"], *masks)
    for names in PAIRS:
        values = [inputs[name] for name in names if name in inputs]
        columns = [[value] if isinstance(value, str) else list(value) for value in values]
        if names[0] in inputs and len(columns) == 2:
            return [(str(a), str(b)) for a, b in zip(*columns, strict=True)]
        if names[0] in inputs and names[0] == "text":
            return _texts(columns[0])
    if "pixel_values" in inputs:
        return None
    raise TypeError(
        f"inputs is a {type(inputs).__name__} of {', '.join(map(str, inputs)) or 'nothing'}; "
        "expected 'text' (and 'text_pair'), 'question' and 'context', 'input_ids' or "
        "'pixel_values'."
    )


def _of_ids(ids: Any, mask: Any, types: Any) -> list[Text]:
    rows, shape = _rows(ids), _shape(ids)
    if not rows or not all(rows):
        raise InputError(
            f"the ids have shape {shape}; expected (L,) or (B, L) of an integer dtype, at least "
            "one."
        )
    marks = [[1] * len(row) for row in rows] if mask is None else _rows(mask)
    kinds = [[0] * len(row) for row in rows] if types is None else _rows(types)
    for name, values in (("attention_mask", marks), ("token_type_ids", kinds)):
        if [len(row) for row in values] != [len(row) for row in rows]:
            raise InputError(
                f"{name} has shape {_shape(values)} for ids of shape {shape}; give one entry per "
                "token."
            )
    texts: list[Text] = []
    for k, (row, marked, kind) in enumerate(zip(rows, marks, kinds, strict=True)):
        positions = [i for i, mark in enumerate(marked) if mark]
        if not positions:
            raise InputError(
                f"attention_mask marks no token of example {k}; expected at least one."
            )
        of_texts = tuple(kind[i] for i in positions)
        texts.append(Ids([row[i] for i in positions], of_texts if any(of_texts) else ()))
    return texts


def _rows(values: Any) -> list[list[int]]:
    # (B, L), or one of L.
    if isinstance(values, np.ndarray):
        values = torch.as_tensor(values)
    if torch.is_tensor(values):
        if values.dim() not in (1, 2) or values.is_complex():
            raise InputError(
                f"the ids have shape {tuple(values.shape)} and dtype {values.dtype}; expected (L,) "
                "or (B, L) of an integer dtype, at least one."
            )
        values = values.tolist()
    values = [entry.tolist() if hasattr(entry, "tolist") else entry for entry in values]
    rows = values if values and isinstance(values[0], (list, tuple)) else [values]
    return [[int(number) for number in row] for row in rows]


def _shape(values: Any) -> tuple[int, ...]:
    return tuple(values.shape) if torch.is_tensor(values) else (len(values),)
