"""The models of the tasks: those of the repository, and their trainings by other seeds."""

from __future__ import annotations

import copy
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.examples.typeseg import PLACEHOLDER, TypeSeg

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS, TUTORIALS = ROOT / "benchmarks", ROOT / "tutorials"
CACHE = Path(__file__).resolve().parent / "cache"
ASKED = 80  # the character of a file that is asked for

__all__ = ["ASKED", "CACHE", "PLACEHOLDER"]

# How each model is trained, by the name of its checkpoint.
TRAINING = {
    "chains-mamba2": ("chains/train.py", "chains", "mamba2", "--steps", "1200"),
    "copying-mamba": ("copying/train.py",),
    "copying-mamba2": ("copying/train.py", "--model", "mamba2", "--state", "64"),
    "digits-vim": ("vision/train.py",),
    "moving-video": ("video/train.py",),
    "passkey-mamba": ("passkey/train.py", "--examples", "100"),
    "series-classifier": ("series/train.py", "classifier"),
    "series-forecaster": ("series/train.py", "forecaster"),
    "stories-mamba": ("language/train.py", "mamba", "--steps", "4000", "--stories", "100"),
    "stories-mamba2": ("language/train.py", "mamba2", "--steps", "1500", "--stories", "100"),
    "stories-qwen3next": ("language/train.py", "qwen3next", "--steps", "600", "--stories", "100"),
}


def _module(name: str, folder: Path) -> Any:
    # The benchmarks are scripts, whose folders are no packages.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    return importlib.import_module(name)


def passkey_records() -> Any:
    """``benchmarks/passkey/records.py``."""
    return _module("records", BENCHMARKS / "passkey")


def video_clips() -> Any:
    """``benchmarks/video/clips.py``."""
    return _module("clips", BENCHMARKS / "video")


def typeseg_labels() -> Any:
    """``benchmarks/typeseg_labels.py``."""
    return _module("typeseg_labels", BENCHMARKS)


def fast_scan() -> Any:
    """``benchmarks/_scan.py``: scans that take gradients quickly, of the same values."""
    return _module("_scan", BENCHMARKS).fast_scan()


def checkpoint(name: str, seed: int) -> Path:
    """The folder of a model: the repository's for seed 0, or one of the cache."""
    return TUTORIALS / "models" / name if seed == 0 else CACHE / f"{name}-{seed}"


def is_trained(name: str, seed: int) -> bool:
    """Whether a training by this seed is there."""
    return (checkpoint(name, seed) / "README.md").exists()


def train(name: str, seed: int) -> None:
    """Train a model by another seed into the cache, which takes minutes."""
    script, *options = TRAINING[name]
    line = [sys.executable, str(BENCHMARKS / script), *options, "--seed", str(seed)]
    subprocess.run([*line, "--output", str(checkpoint(name, seed))], check=True)


def language(name: str, seed: int = 0) -> nn.Module:
    """A language model of transformers."""
    from transformers import AutoModelForCausalLM

    path = checkpoint(name, seed)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    model.config.use_cache = False  # type: ignore[union-attr]
    return model


class Entries(nn.Module):
    """A forecaster whose future is one row of entries, ``(B, 60)``."""

    def __init__(self, forecaster: nn.Module) -> None:
        super().__init__()
        self.forecaster = forecaster

    def forward(self, series: Tensor) -> Tensor:
        return self.forecaster(series).flatten(1)


class AskedCharacter(nn.Module):
    """typeseg's logits for one character of a file, ``(B, 35)``."""

    def __init__(self, model: TypeSeg) -> None:
        super().__init__()
        self.model = model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)[:, ASKED]


def series(kind: str, seed: int = 0) -> nn.Module:
    """The forecaster or the classifier of series."""
    from captum_ssm.examples.series import SeriesClassifier, SeriesForecaster

    model = {"forecaster": SeriesForecaster, "classifier": SeriesClassifier}[kind]()
    model.load_state_dict(_weights(f"series-{kind}", seed))
    return Entries(model) if kind == "forecaster" else model


def digits_vim(seed: int = 0) -> nn.Module:
    """The classifier of images."""
    from captum_ssm.models import VisionMamba

    return VisionMamba.from_state_dict(_weights("digits-vim", seed))


def moving_video(seed: int = 0) -> nn.Module:
    """The classifier of clips."""
    model: nn.Module = _module("trained_models", TUTORIALS).VideoClassifier()
    model.load_state_dict(_weights("moving-video", seed))
    return model


def _weights(name: str, seed: int) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    stored = load_file(checkpoint(name, seed) / "model.safetensors")
    return {key: value.float() for key, value in stored.items()}


def has_typeseg() -> bool:
    """Whether the package with the weights is installed."""
    return find_spec("typeseg") is not None


@cache
def typeseg() -> TypeSeg:
    """The model of the typeseg package, with a quick scan."""
    return TypeSeg(typeseg_labels().scan).eval()


def typeseg_asked(seed: int = 0) -> nn.Module:
    """typeseg, asked for the label of one character."""
    return AskedCharacter(copy.deepcopy(typeseg()))


def randomized(model: nn.Module, seed: int = 0) -> Iterator[nn.Module]:
    """Copies with ever more weights shuffled, from the output to the inputs.

    The cascade of Adebayo et al. (2018): first what follows the last block, then block by block,
    last the embedding or the stem. Each parameter keeps its values and loses their order, so that
    rates stay rates. The last copy knows nothing: its answers are guesses.

    Args:
        model (nn.Module): which stays as it is.
        seed (int, optional): of the orders. Default: 0

    Yields:
        nn.Module: a copy of its own each time.
    """
    generator = torch.Generator().manual_seed(seed)
    stages = _stages([name for name, _ in model.named_parameters()])
    changed = copy.deepcopy(model)
    for names in stages:
        changed = copy.deepcopy(changed)
        with torch.no_grad():
            for name in names:
                weights = changed.get_parameter(name)
                order = torch.randperm(weights.numel(), generator=generator)
                weights.copy_(weights.flatten()[order].view_as(weights))
        yield changed


def _stages(names: list[str]) -> list[list[str]]:
    blocks = [re.search(r"\.(\d+)\.", name) for name in names]
    numbered = [k for k, block in enumerate(blocks) if block]
    stages: dict[int, list[str]] = {}
    for k, (name, block) in enumerate(zip(names, blocks, strict=True)):
        first = -1 if k < numbered[0] else len(names)
        stages.setdefault(int(block[1]) if block else first, []).append(name)
    return [stages[key] for key in sorted(stages, reverse=True)]


def processor() -> str:
    """The processor's name."""
    found: str = _module("_record", BENCHMARKS).processor()
    return found
