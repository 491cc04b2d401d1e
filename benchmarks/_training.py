"""How the small models of `tutorials/models` are trained and saved."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import trange
from transformers import PreTrainedModel

WARMUP_STEPS = 200
FINAL_LR_FRACTION = 0.01
SIZE_LIMIT = 2_000_000


def optimizer_for(model: nn.Module, args: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW that decays matrices only: decaying norms, biases or rates pulls them to no purpose."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        plain = parameter.ndim >= 2 and not name.endswith("A_log")
        (matrices if plain else others).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98))


def lr_factor(step: int, steps: int) -> float:
    """Linear warm-up, then half a cosine down to a hundredth."""
    warmup = min(1.0, (step + 1) / WARMUP_STEPS)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, step / steps)))
    return warmup * (FINAL_LR_FRACTION + (1.0 - FINAL_LR_FRACTION) * cosine)


def fit(
    model: nn.Module,
    args: argparse.Namespace,
    name: str,
    loss_of: Callable[[int], Tensor],
    scores: Callable[[], dict[str, float]],
) -> float:
    """Train in place and return the seconds it took.

    Args:
        model (nn.Module): what is trained.
        args (argparse.Namespace): ``lr``, ``weight_decay``, ``steps``, ``report_every``.
        name (str): shown next to the progress.
        loss_of (Callable): takes the number of a step and returns its loss.
        scores (Callable): the shares of right answers so far, by name; called every
            ``report_every`` steps, in evaluation mode and without gradients.
    """
    optimizer = optimizer_for(model, args)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: lr_factor(s, args.steps))
    model.train()
    start = time.monotonic()
    progress = trange(args.steps, desc=name, mininterval=1.0, disable=None)
    for step in progress:
        loss = loss_of(step)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % args.report_every == 0:
            model.eval()
            with torch.no_grad():
                shares = scores()
            model.train()
            line = ", ".join(f"{key} {share:.4f}" for key, share in shares.items())
            line = f"loss {loss.item():.4f}, {line}"
            progress.set_postfix_str(line)
            if progress.disable:  # output goes to a file: leave a line there instead of a bar
                print(f"step {step + 1}: {line}, {time.monotonic() - start:.0f} s", flush=True)
    return time.monotonic() - start


def table(rows: dict[str, Any]) -> str:
    """The rows of a two-column Markdown table."""
    return "\n".join(f"| {key} | {value} |" for key, value in rows.items())


def save(model: PreTrainedModel, directory: Path) -> None:
    """Save weights and configuration, and refuse a checkpoint too large to keep in git."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    _check_size(directory)


def save_module(model: nn.Module, metrics: dict[str, Any], card: str, directory: Path) -> None:
    """Save the weights of a plain module, its metrics and its card."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), directory / "model.safetensors")
    (directory / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    (directory / "README.md").write_text(card)
    _check_size(directory)


def _check_size(directory: Path) -> None:
    size = sum(path.stat().st_size for path in directory.iterdir() if path.is_file())
    if size > SIZE_LIMIT:
        raise SystemExit(f"{directory} holds {size:,} bytes, over the limit of {SIZE_LIMIT:,}")
