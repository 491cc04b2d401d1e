"""Models, tokenizers and pictures from disk or from the hub."""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from captum_ssm import examples
from captum_ssm.cli.parser import did_you_mean, listed
from captum_ssm.explanation.make.inputs.pictures import normalized
from captum_ssm.inspection.support import first_line
from captum_ssm.kernels import ExtensionWarning
from captum_ssm.models import VisionMamba
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.transformers_advice import without_advice

MODEL = (
    "The model: a folder that save_pretrained wrote, a hub name, or an example that comes with the "
    "package, such as stories-mamba."
)
# What a model is loaded as, by the end of its class's name; without one as the first.
KINDS = (
    "ForCausalLM",
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
)
IMAGES = "ForImageClassification"
CONFIG = "config.json"
# How published vision models were trained.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_ERRORS = (OSError, ValueError, KeyError, ImportError)


def add_loading(parser: argparse.ArgumentParser) -> None:
    """The arguments that say where and how a model runs."""
    parser.add_argument(
        "--device", default="cpu", help="Where the model runs, such as cuda. Default: cpu"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "float64", "bfloat16", "float16"),
        metavar="DTYPE",
        help="The dtype of the weights: float32, float64, bfloat16, float16, or auto for the "
        "checkpoint's. Default: auto",
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Without progress bars and advice on kernels, which are not what was asked for."""
    with without_advice(), warnings.catch_warnings():
        warnings.simplefilter("ignore", ExtensionWarning)
        yield


def check_loading(args: argparse.Namespace) -> None:
    """Find the model that a command was given; of an example the name becomes its folder.

    Raises:
        ValueError: for a folder that holds no model, a name that is not known, and a device that
            torch cannot use.
    """
    args.model = found_model(args.model)
    check_device(args.device)
    if not Path(args.model).exists():
        check_hub(args.model)


def found_model(name: str) -> str:
    """A folder or a hub name; of an example that comes with the package its folder.

    Raises:
        ValueError: for the name of a folder that holds no model; says what is there.
    """
    # A hub name has at most one slash, and does not begin with a folder that is here.
    path = Path(name)
    below = len(path.parts) == 2 and path.parent.is_dir()
    if path.is_dir():
        if any((path / file).exists() for file in ("config.json", "model.safetensors")):
            return name
        what = "a folder without config.json"
    elif path.exists():
        what = "a file"
    elif name in examples.names():
        return str(examples.folder(name))
    elif name.startswith((".", "~", os.sep)) or len(path.parts) > 2 or below:
        what = "a folder that does not exist"
    elif "/" not in name and (meant := did_you_mean(name, examples.names())):
        raise ValueError(f"No such model: {name}. {meant}")
    else:
        return name
    raise ValueError(
        f"MODEL is {name!r}, {what}; expected a folder that save_pretrained wrote, a hub name such "
        f"as state-spaces/mamba-130m-hf, or an example: {listed(examples.names(), 'or')}."
    )


def check_hub(name: str) -> None:
    """Raise for what the hub does not have: it is asked once, where loading would try for long."""
    from huggingface_hub import constants, file_exists, try_to_load_from_cache

    try:
        if constants.HF_HUB_OFFLINE or isinstance(try_to_load_from_cache(name, CONFIG), str):
            return
        why = "" if file_exists(name, CONFIG) else f"it has no {CONFIG} of that name"
    except Exception as error:  # by version of the hub's client
        why = first_line(error).rstrip(".") or type(error).__name__
    if why:
        raise ValueError(
            f"MODEL is {name!r}, which is neither a folder nor in the cache, and was not found on "
            f"the hub: {why}. Expected a folder that save_pretrained wrote, a hub name such as "
            f"state-spaces/mamba-130m-hf, or an example: {listed(examples.names(), 'or')}."
        )


def check_device(name: str) -> None:
    """Raise where torch cannot use the device."""
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
    weights = Path(name, "model.safetensors")
    if not weights.exists() or Path(name, "config.json").exists():
        return False
    with safe_open(weights, "pt") as file:
        return "patch_embed.proj.weight" in file.keys()  # noqa: SIM118


def load_model(args: argparse.Namespace, images: bool | None = None) -> nn.Module:
    """The model that a command was given.

    Args:
        args (Namespace): with ``model``, ``device`` and ``dtype``.
        images (bool, optional): whether it has to read images; None for either. Default: None

    Raises:
        ValueError: where there is none of that kind.
    """
    import transformers

    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    try:
        if is_vision_mamba(args.model):
            if images is False:
                raise ValueError(
                    "it holds a VisionMamba, which reads images; expected --image in place of a "
                    "text."
                )
            state = load_file(Path(args.model, "model.safetensors"))
            return VisionMamba.from_state_dict(state).to(args.device, dtype or torch.float32)
        kind = IMAGES if images else _kind_of(args.model)
        auto = getattr(transformers, f"AutoModel{kind}")
        model = auto.from_pretrained(args.model, dtype=dtype or "auto")
        return model.eval().to(args.device)
    except _ERRORS as error:
        raise _not_loaded("image" if images else "language", args.model, error) from error


def _kind_of(name: str) -> str:
    written = _architecture(name)
    return next((kind for kind in KINDS if written.endswith(kind)), KINDS[0])


def _architecture(name: str) -> str:
    from transformers import AutoConfig

    (written, *_) = AutoConfig.from_pretrained(name).architectures or [""]
    return written


def load_config(name: str) -> nn.Module:
    """A model of texts without weights, or a ValueError where it has no configuration."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            return getattr(transformers, f"AutoModel{_kind_of(name)}").from_config(config)
    except _ERRORS as error:
        raise _not_loaded("language", name, error) from error


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model, or a ValueError where there is none."""
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


def add_pixels(parser: argparse.ArgumentParser) -> None:
    """The arguments that say how pixels are normalized."""
    for name, what in (("mean", "means"), ("std", "standard deviations")):
        parser.add_argument(
            f"--{name}",
            type=float,
            nargs="+",
            metavar="X",
            help=f"The {what} by which a VisionMamba's pixels are normalized, one for all channels "
            "or one for each. Default: those of ImageNet",
        )


def reads_images(name: str) -> bool:
    """Whether a model is one of images, by its weights or its configuration."""
    if is_vision_mamba(name):
        return True
    return (Path(name) / "config.json").exists() and _architecture(name).endswith(IMAGES)


def picture_options(args: argparse.Namespace, model: nn.Module) -> dict[str, Any]:
    """What :func:`captum_ssm.explain` has to know of a model's pictures: how they become pixels.

    For a `VisionMamba` without a processor a picture is scaled to the model's size, and
    normalized by ``--mean`` and ``--std``.

    Raises:
        ValueError: for a model without a processor.
    """
    has_processor = Path(args.model, "preprocessor_config.json").exists()
    if isinstance(model, VisionMamba) and (args.mean or args.std or not has_processor):
        mean, std = args.mean or MEAN, args.std or STD
        return {"processor": Scaled(model.image_size, mean, std), "mean": mean, "std": std}
    from transformers import AutoImageProcessor

    try:
        return {"processor": AutoImageProcessor.from_pretrained(args.model)}
    except _ERRORS as error:
        raise _not_loaded("image", args.model, error) from error


@dataclass(frozen=True)
class Scaled:
    """Makes pixels ``(3, H, W)`` of a picture, scaled to a size ``(H, W)`` and normalized."""

    size: tuple[int, int]
    mean: Sequence[float]
    std: Sequence[float]

    def __call__(self, picture: Any) -> Tensor:
        from PIL import Image

        height, width = self.size
        scaled = picture.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
        pixels = torch.frombuffer(bytearray(scaled.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(height, width, 3).permute(2, 0, 1).float() / 255
        return normalized(pixels, self.mean, self.std, 0)


def load_for_rows(args: argparse.Namespace) -> tuple[nn.Module, Any, dict[str, Any]]:
    """The model of a data set's rows, its tokenizer or None, and what else ``explain`` takes.

    Models of texts and of images are loaded from folders and from the hub; of series there are
    those that come with the package.

    Raises:
        ValueError: where there is no such model.
    """
    if reads_images(args.model):
        model = load_model(args, images=True)
        return model, None, picture_options(args, model)
    path = Path(args.model)
    if path.name in examples.names() and path == examples.folder(path.name):
        model, tokenizer = examples.load(path.name)
        if tokenizer is None:
            dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
            return model.to(args.device, dtype), None, {}
    return load_model(args, images=False), load_tokenizer(args.model), {}


def _not_loaded(kind: str, name: str, error: Exception) -> ValueError:
    return ValueError(
        f"no {kind} model could be loaded from {name!r}: {first_line(error)}\n"
        "A model of another kind is explained in Python: "
        "captum_ssm.MambaLRP(model).attribute(inputs)."
    )
