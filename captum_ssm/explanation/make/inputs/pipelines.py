"""A pipeline of transformers in place of its model, and of what prepares the model's inputs."""

from __future__ import annotations

from typing import Any

from captum_ssm.capture import is_model


def unpacked(model: Any, tokenizer: Any, inputs: Any, processor: Any) -> tuple[Any, Any, Any, Any]:
    """The model, tokenizer, inputs and image processor of what ``explain`` is given.

    Args:
        model (Any): a model, or a pipeline: what holds a model, with its tokenizer or its image
            processor.
        tokenizer (Any): of a model. A pipeline has its own, and the inputs stand in its place.
        inputs (Any): what is explained.
        processor (Callable, optional): another one than the pipeline's.

    Raises:
        TypeError: for a pipeline with another tokenizer, or with two inputs.
    """
    if is_model(model) or not is_model(getattr(model, "model", None)):
        return model, tokenizer, inputs, processor
    if tokenizer is not None and inputs is not None:
        raise TypeError(
            f"model is a {type(model).__name__}, which has its own tokenizer; expected "
            "explain(pipeline, inputs)."
        )
    inputs = tokenizer if inputs is None else inputs
    own = getattr(model, "image_processor", None) if processor is None else processor
    return model.model, getattr(model, "tokenizer", None), inputs, own
