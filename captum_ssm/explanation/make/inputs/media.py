"""Images and sound that go with a text, as a processor of transformers returns them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.capture.arguments import names_read
from captum_ssm.capture.check_inputs import check_inputs, check_text
from captum_ssm.capture.model import parameter_names
from captum_ssm.errors import InputError
from captum_ssm.explanation.make.inputs.pictures import is_path, opened
from captum_ssm.explanation.pictures import Picture
from captum_ssm.inspection.support import first_line
from captum_ssm.utils.blocks import contextmanager

# What processors call their arguments, in addition to ``text``.
GIVEN = ("images", "videos", "audio")
# Who knows the id of a placeholder, and by which name, for each kind of what stands there.
SIGNS = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
    "sound": ("audio_token_id", "audio_token_index"),
}
OF_TEXT = ("input_ids", "attention_mask", "labels")
RAISED = (ValueError, TypeError, RuntimeError, IndexError, KeyError, StopIteration)


@dataclass(frozen=True, eq=False)
class Media:
    """What a model reads with the tokens of one text.

    Args:
        arguments (dict): by the name that the model's ``forward`` has for it, such as
            ``pixel_values`` and ``image_grid_thw``.
        per_token (dict): by name, one number for each token of the text, ``(1, L)``: such as
            ``mm_token_type_ids``. Those of a continuation are zero.
        images (tuple): pictures as they were given, where they were. Default: ``()``
        pictures (tuple of Picture): which tokens they are. Default: ``()``
        end (int): how many of the text's tokens the model cannot do without. Default: 0
    """

    arguments: Mapping[str, Any]
    per_token: Mapping[str, Tensor]
    images: tuple[Any, ...] = ()
    pictures: tuple[Picture, ...] = field(default=())
    end: int = 0

    def on(self, inputs: Tensor) -> dict[str, Any]:
        """The arguments for inputs ``(n, L)``, which are all of this text or its continuation."""
        n, L = inputs.shape[:2]
        if self.end > L:
            raise InputError(
                f"the first {L} tokens are explained by themselves, and images or sound stand up "
                f"to token {self.end - 1}, which the model cannot read without them; expected a "
                "position after these."
            )
        arguments = {name: _repeated(value, n, inputs) for name, value in self.arguments.items()}
        for name, value in self.per_token.items():
            row = nn.functional.pad(value, (0, max(0, L - value.shape[1])))[:, :L]
            arguments[name] = row.to(inputs.device).expand(n, -1)
        return arguments


def _repeated(value: Any, count: int, inputs: Tensor) -> Any:
    # Images of several texts lie one after the other along the first axis.
    if not torch.is_tensor(value):
        return value
    value = value.to(inputs.device)
    return value.repeat(count, *[1] * (value.dim() - 1)) if value.dim() and count > 1 else value


def media_of(inputs: Mapping[str, Any]) -> Media | None:
    """What a processor returned in addition to the ids; None for a tokenizer's output.

    Raises:
        InputError: for several texts.
    """
    others = {name: value for name, value in inputs.items() if name not in (*OF_TEXT, *GIVEN)}
    others = {name: value for name, value in others.items() if torch.is_tensor(value)}
    floats = [name for name, value in others.items() if value.is_floating_point()]
    if not floats:
        return None
    ids = torch.as_tensor(inputs["input_ids"])
    if ids.dim() == 2 and len(ids) > 1:
        raise InputError(
            f"inputs holds {', '.join(floats)} of {len(ids)} texts together; expected one text "
            "with its images: a list of them, such as [processor(text=..., images=...), ...], is "
            "explained one by one."
        )
    types = [name for name in others if name.endswith("token_type_ids")]
    per_token = {name: others.pop(name).reshape(1, -1) for name in types}
    mask = inputs.get("attention_mask")
    if mask is not None:
        is_real = torch.as_tensor(mask).reshape(-1) != 0
        per_token = {name: value[:, is_real] for name, value in per_token.items()}
    return Media(others, per_token, tuple(_flat(inputs.get("images"))))


def encoded(inputs: Any, processor: Any) -> Any:
    """What a processor makes of a text with images or sound; other inputs stay as they are.

    Args:
        inputs (Any): ``{"text": ..., "images": ...}``, with the names of a processor's arguments;
            or a list of such.
        processor (Callable, optional): of texts and images.

    Raises:
        TypeError: without such a processor.
        InputError: for what the processor does not take.
    """
    if isinstance(inputs, list):
        return [encoded(example, processor) for example in inputs]
    if not isinstance(inputs, Mapping) or "input_ids" in inputs or "text" not in inputs:
        return inputs
    names = [name for name in GIVEN if inputs.get(name) is not None]
    if not names:
        return inputs
    if not hasattr(processor, "tokenizer"):
        what = (
            "there is no processor"
            if processor is None
            else (f"{type(processor).__name__} reads no texts")
        )
        raise TypeError(
            f"inputs is a text with {', '.join(names)}, and {what}; expected the model's whole "
            "processor, as AutoProcessor.from_pretrained returns it: explain(model, processor, "
            f"{{'text': ..., '{names[0]}': ...}})."
        )
    media = {name: inputs[name] for name in names}
    if "images" in media:
        media["images"] = _opened(media["images"])
    try:
        encoding = processor(text=inputs["text"], **media, return_tensors="pt")
    except RAISED as error:
        counts = (f"{len(list(_flat(value)))} {name}" for name, value in media.items())
        raise InputError(
            f"{type(processor).__name__} does not take the text {inputs['text']!r} with "
            f"{' and '.join(counts)}. It says: {error}{_hint(processor, inputs['text'])}"
        ) from error
    return {**encoding, **{name: media[name] for name in ("images",) if name in media}}


def _hint(processor: Any, text: Any) -> str:
    sign = getattr(processor, "image_token", None)
    if not isinstance(sign, str) or not isinstance(text, str):
        return ""
    return (
        f" The text holds {text.count(sign)} of its placeholder {sign!r}; expected one for each "
        "image, where the model reads it."
    )


def _opened(images: Any) -> Any:
    if isinstance(images, (list, tuple)):
        return [_opened(image) for image in images]
    is_file = is_path(images) and "://" not in str(images)
    return opened(images) if is_file else images


def _flat(images: Any) -> Iterator[Any]:
    if isinstance(images, (list, tuple)):
        for image in images:
            yield from _flat(image)
    elif images is not None and not isinstance(images, (str, PathLike)):
        yield images


def placeholders(model: nn.Module, processor: Any = None) -> dict[int, str]:
    """What stands in the place of which id, by the model's configuration, else its processor."""
    owners = (getattr(model, "config", None), processor)
    kinds: dict[int, str] = {}
    for kind, names in SIGNS.items():
        known = (getattr(owner, name, None) for owner in owners for name in names)
        ids = [token_id for token_id in known if token_id is not None]
        kinds |= {int(token_id): kind for token_id in ids[:1]}
    return kinds


def check_ids(ids: Tensor, model: nn.Module, media: Media | None) -> None:
    """Raise for ids that are not in the vocabulary, unless they may be placeholders."""
    if media is None:
        check_text(ids, model)
        return
    check_inputs(ids, model)
    names = {*media.arguments, *media.per_token} - {*parameter_names(model)}
    for name in sorted(names - names_read(model) if names else names):
        raise InputError(
            f"inputs holds {name}, which no module of {type(model).__name__} takes; expected the "
            "output of the model's own processor, and a model that reads images or sound with a "
            "text, such as a ...ForConditionalGeneration."
        )


@contextmanager
def refusals_explained(model: nn.Module, media: Media | None, ids: Tensor) -> Iterator[None]:
    """Say what was given, where a model does not take a text, or images or sound with it."""
    try:
        yield
    except RAISED as error:
        if isinstance(error, InputError) or (media is None and isinstance(error, RuntimeError)):
            raise
        if media is None:
            raise _no_model_of_text(model, ids, error) from error
        kinds = placeholders(model)
        counts = {kind: int((ids == token_id).sum()) for token_id, kind in kinds.items()}
        shown = ", ".join(f"{count} of {kind}" for kind, count in counts.items() if count)
        shapes = ", ".join(
            f"{name} {tuple(value.shape)}"
            for name, value in media.arguments.items()
            if torch.is_tensor(value)
        )
        raise InputError(
            f"{type(model).__name__} does not take {shapes} with this text, whose "
            f"{ids.shape[-1]} tokens hold {shown or 'no placeholders'}; expected placeholders for "
            "the images or sound that are given, and no others. The model says: "
            f"{first_line(error)}"
        ) from error


def _no_model_of_text(model: nn.Module, ids: Tensor, error: Exception) -> InputError:
    return InputError(
        f"{type(model).__name__} does not take this text, ids of shape {tuple(ids.shape)}, as it "
        "was given; expected a model whose forward takes input_ids, and attention_mask if any. "
        "Wrap one that takes more, or takes them in another form, in a module that takes these. "
        f"The model says: {first_line(error)}"
    )
