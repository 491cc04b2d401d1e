"""A pipeline of transformers in place of its model, and of what prepares the model's inputs."""

from __future__ import annotations

from copy import copy
from typing import Any

from captum_ssm.capture import is_model
from captum_ssm.explanation.make.inputs.parse_inputs import is_tokenizer


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
            own = tokenizer if processor is None else processor
            return model, _with_template(tokenizer), inputs, own
        return model, tokenizer, inputs, processor
    if tokenizer is not None and inputs is not None:
        raise TypeError(
            f"model is a {type(model).__name__}, which has its own tokenizer; expected "
            "explain(pipeline, inputs)."
        )
    inputs = tokenizer if inputs is None else inputs
    names = ("processor", "image_processor")
    found = [one for one in (getattr(model, name, None) for name in names) if one is not None]
    own = next(iter(found), None) if processor is None else processor
    return model.model, getattr(model, "tokenizer", None), inputs, own


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
