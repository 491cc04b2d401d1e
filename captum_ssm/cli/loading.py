"""Models, tokenizers and pictures from disk or from the hub."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from captum_ssm.inspection.support import first_line
from captum_ssm.kernels import ExtensionWarning
from captum_ssm.models import VisionMamba
from captum_ssm.utils.transformers_advice import without_advice

# How published vision models were trained.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_ERRORS = (OSError, ValueError, KeyError, ImportError)


def add_loading(parser: argparse.ArgumentParser) -> None:
    """The arguments that say where and how a model runs."""
    parser.add_argument("--device", default="cpu", help="where the model runs. Default: cpu")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "float64", "bfloat16", "float16"),
        help="of the weights; auto keeps the checkpoint's. Default: auto",
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Without progress bars and advice on kernels, which are not what was asked for."""
    with without_advice(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ExtensionWarning)
        yield


def check_device(name: str) -> None:
    """Raise where torch cannot use the device.

    Raises:
        ValueError: names those that it can use.
    """
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        known = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        raise ValueError(
            f"--device is {name!r}, which torch {torch.__version__} cannot use here "
            f"({first_line(error)}); it can use {', '.join(known)}."
        ) from error


def is_vision_mamba(name: str) -> bool:
    """Whether a folder holds the weights of a `VisionMamba`, which has no configuration."""
    folder = Path(name)
    return (folder / "model.safetensors").exists() and not (folder / "config.json").exists()


def load_model(args: argparse.Namespace, images: bool | None = None) -> nn.Module:
    """The model of ``--model``.

    Args:
        args (Namespace): with ``model``, ``device`` and ``dtype``.
        images (bool, optional): whether it has to read images; None for either. Default: None

    Raises:
        ValueError: where there is none of that kind.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageClassification

    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    try:
        if is_vision_mamba(args.model):
            if images is False:
                raise ValueError(
                    "it holds a VisionMamba, which reads images; expected --image in place of a "
                    "text."
                )
            state = load_file(Path(args.model, "model.safetensors"))
            return VisionMamba.from_state_dict(state).to(args.device, dtype)
        kind = AutoModelForImageClassification if images else AutoModelForCausalLM
        model = kind.from_pretrained(args.model, dtype=dtype or "auto")
        return model.eval().to(args.device)
    except _ERRORS as error:
        raise _not_loaded("image" if images else "language", args.model, error) from error


def load_config(name: str) -> nn.Module:
    """A language model without weights.

    Raises:
        ValueError: where there is no configuration of one.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except _ERRORS as error:
        raise _not_loaded("language", name, error) from error


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model.

    Raises:
        ValueError: where there is none.
    """
    import transformers

    why: Any = "its vocabulary is empty"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        # What transformers makes up for a model that came without one.
        if tokenizer.vocab_size > 0 and len(tokenizer.encode("a b", add_special_tokens=False)):
            return tokenizer
    except _ERRORS as error:
        why = error
    raise ValueError(
        f"no tokenizer could be loaded from {name!r} ({first_line(why)}); pass token ids with "
        "--ids in place of --text."
    )


def load_image(
    path: Path, args: argparse.Namespace, model: nn.Module
) -> tuple[Any, dict[str, Any]]:
    """A picture as the model takes it, and what :func:`captum_ssm.explain` has to know of it.

    A `VisionMamba` has no processor: the picture is scaled to the model's size, and normalized by
    ``--mean`` and ``--std``.

    Raises:
        ValueError: for a file that is no picture, or a model without a processor.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        picture = Image.open(path).convert("RGB")
    except UnidentifiedImageError as error:
        raise ValueError(f"--image is {path}, which is no picture: {error}.") from error
    mean, std = args.mean or MEAN, args.std or STD
    if isinstance(model, VisionMamba):
        height, width = model.image_size
        scaled = picture.resize((width, height), Image.Resampling.BILINEAR)
        pixels = torch.frombuffer(bytearray(scaled.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(height, width, 3).permute(2, 0, 1).float() / 255
        first = next(model.parameters())
        return ((pixels - _channels(mean)) / _channels(std)).to(first), {"mean": mean, "std": std}
    from transformers import AutoImageProcessor

    try:
        return picture, {"processor": AutoImageProcessor.from_pretrained(args.model)}
    except _ERRORS as error:
        raise _not_loaded("image", args.model, error) from error


def _channels(values: Any) -> Tensor:
    return torch.tensor(values).view(-1, 1, 1)


def _not_loaded(kind: str, name: str, error: Exception) -> ValueError:
    return ValueError(
        f"no {kind} model could be loaded from {name!r}: {first_line(error)}\n"
        "A model of another kind is explained in Python: "
        "captum_ssm.MambaLRP(model).attribute(inputs), "
        "captum_ssm.estimate(captum_ssm.MambaLRP(model), inputs)."
    )
