"""What there is, and how it is loaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from captum_ssm.utils.suggestions import did_you_mean
from captum_ssm.utils.transformers_advice import without_advice

DATA = Path(__file__).resolve().parent / "data"


def names() -> list[str]:
    """The models that come with the package.

    Returns:
        Their names, in alphabetical order.

    Examples::

        >>> "stories-mamba" in captum_ssm.examples.names()
        True
    """
    return sorted(_LOADERS)


def folder(name: str) -> Path:
    """The folder of a model's files, which ``from_pretrained`` and the command line take as well.

    Args:
        name (str): One of :func:`names`.

    Returns:
        The folder.

    Raises:
        ValueError: If there is no such model.

    Examples::

        >>> sorted(path.name for path in captum_ssm.examples.folder("series-classifier").iterdir())
        ['model.safetensors', 'sample.safetensors']
    """
    if name not in _LOADERS:
        meant = did_you_mean(str(name).lower().replace("_", "-"), _LOADERS, 0.5)
        raise ValueError(f"no example is named {name!r}; expected one of {names()}.{meant}")
    return DATA / name


def load(name: str) -> tuple[nn.Module, Any]:
    """A small trained model, and what turns people's data into its inputs.

    ================================ ===================================== =========================
    name                             what it does                          comes with
    ================================ ===================================== =========================
    ``"stories-mamba"``,             finish the sentences of a story:      a tokenizer of words
    ``"stories-mamba2"``,            "Anna has a red ball. ... Anna's
    ``"stories-qwen3next"``          ball is red"
    ``"chat-mamba"``                 answers in a chat who has what        a tokenizer with a chat
                                                                           template
    ``"chains-mamba2"``              follows a chain aloud: "a = c; k =    a tokenizer of words
                                     17; c = k; ? a =" goes on with
                                     "c = k = 17."
    ``"documents-mamba2"``           answers from one of three documents,  a tokenizer of words
                                     or obeys an order in one of them
    ``"reviews-jamba"``              says whether a review of a film is    a tokenizer of words
                                     negative, mixed or positive
    ``"copying-mamba"``              repeats 16 to 24 letters that stand   a tokenizer of letters
                                     before ``<SEP>``                      between spaces
    ``"digits-vim"``                 names the digit in an image of        an image processor
                                     40 x 40 pixels
    ``"series-classifier"``          ``(B, 6, 96)`` to one of 4 patterns   ``None``
    ``"series-forecaster"``          ``(B, 64, 5)`` to ``(B, 12, 5)``      ``None``
    ================================ ===================================== =========================

    Args:
        name (str): One of :func:`names`.

    Returns:
        The model in eval mode and in float32, and its tokenizer, its image processor, or None where
        tensors are given as they are.

    Raises:
        ValueError: If there is no such model.

    Examples::

        >>> model, tokenizer = captum_ssm.examples.load("stories-mamba")
        >>> ids = tokenizer("The dogs near the bird", return_tensors="pt").input_ids
        >>> tokenizer.decode(model(ids).logits[0, -1].argmax())
        'bark'
    """
    path = folder(name)
    with without_advice():
        model, companion = _LOADERS[name](path)
    return model.eval(), companion


def sample(name: str) -> Any:
    """An input that the model was made for, and that it answers right.

    Args:
        name (str): One of :func:`names`.

    Returns:
        A text for a model of language, of a chat the messages up to the answer, a PIL image for a
        model of images, and for a model of series a tensor ``(1, ...)`` with a batch of one.

    Raises:
        ValueError: If there is no such model.

    Examples::

        >>> captum_ssm.examples.sample("stories-mamba")
        'The bird near the dogs sings. The dogs near the bird'
        >>> captum_ssm.examples.sample("series-forecaster").shape
        torch.Size([1, 64, 5])
    """
    (path,) = folder(name).glob("sample.*")
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    if path.suffix == ".txt":
        return path.read_text(encoding="utf-8").strip()
    if path.suffix == ".png":
        from PIL import Image

        with Image.open(path) as image:
            return image.convert("RGB")
    return _weights(path)["series"]


def _language_model(path: Path, kind: str = "AutoModelForCausalLM") -> tuple[nn.Module, Any]:
    import transformers

    model = getattr(transformers, kind).from_pretrained(path, dtype=torch.float32)
    return model, transformers.AutoTokenizer.from_pretrained(path)


def _vision_model(path: Path) -> tuple[nn.Module, Any]:
    from transformers import AutoImageProcessor

    from captum_ssm.models import VisionMamba

    model = VisionMamba.from_state_dict(_weights(path / "model.safetensors"))
    return model, AutoImageProcessor.from_pretrained(path)


def _series_model(path: Path, kind: str) -> tuple[nn.Module, None]:
    from captum_ssm.examples import series

    model = getattr(series, kind)()
    model.load_state_dict(_weights(path / "model.safetensors"))
    return model, None


def _weights(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {key: value.float() for key, value in load_file(path).items()}


_LOADERS: dict[str, Callable[[Path], tuple[nn.Module, Any]]] = {
    "chains-mamba2": _language_model,
    "chat-mamba": _language_model,
    "copying-mamba": _language_model,
    "digits-vim": _vision_model,
    "documents-mamba2": _language_model,
    "reviews-jamba": partial(_language_model, kind="AutoModelForSequenceClassification"),
    "series-classifier": partial(_series_model, kind="SeriesClassifier"),
    "series-forecaster": partial(_series_model, kind="SeriesForecaster"),
    "stories-mamba": _language_model,
    "stories-mamba2": _language_model,
    "stories-qwen3next": _language_model,
}
