"""How the small models of `tutorials/models` are trained and saved."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import trange
from transformers import PreTrainedModel

WARMUP_STEPS = 200
FINAL_LR_FRACTION = 0.01
SIZE_LIMIT = 2_000_000
MODELS = Path(__file__).resolve().parents[1] / "tutorials" / "models"


def options(
    description: str | None, output: str, report_every: int, **others: int
) -> argparse.ArgumentParser:
    """A parser of the options that the scripts share; each script adds its own.

    ``output`` is the folder's name in ``tutorials/models``; one that ends in ``-`` lacks the
    model's name, which :func:`parsed` adds. ``others`` are further whole numbers with their
    defaults, such as ``steps``.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    is_whole = not output.endswith("-")
    parser.add_argument(
        "--output",
        type=Path,
        default=MODELS / output if is_whole else None,
        help=None if is_whole else f"default: tutorials/models/{output}...",
    )
    for name, default in {"seed": 0, **others}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument(
        "--report-every", type=int, default=report_every, help="steps between reports"
    )
    return parser


def add_mamba_options(parser: argparse.ArgumentParser, layers: int) -> None:
    """The sizes of a Mamba that is trained from nothing."""
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--state", type=int, default=32, help="state size per channel")
    parser.add_argument("--conv", type=int, default=4, help="width of the convolution")
    parser.add_argument("--rate-scale", type=float, default=0.1, help="scales A at the start")


def add_device_option(parser: argparse.ArgumentParser) -> None:
    """Where a model is trained; batches are drawn on the CPU, so that they are the same."""
    parser.add_argument("--device", default="cpu", help="cpu or cuda. Default: cpu")


def set_up(threads: int = 1, device: str = "cpu") -> None:
    """Set the process up for training."""
    torch.set_num_threads(threads)
    if device != "cpu":
        torch.set_float32_matmul_precision("high")  # TF32: weights and sums stay float32
    transformers.logging.set_verbosity_error()  # it warns about every CUDA kernel it lacks


def trained_in(seconds: float, args: argparse.Namespace, threads: int = 1) -> str:
    """The time of a training and what it ran on, for the card."""
    on = f"{threads} CPU thread(s)" if args.device == "cpu" else torch.cuda.get_device_name()
    return f"{seconds / 60:.0f} minutes, {on}"


def parsed(parser: argparse.ArgumentParser, output: str, name: str) -> argparse.Namespace:
    """The arguments; without ``--output`` it is ``output`` and the argument called ``name``."""
    args = parser.parse_args()
    if args.output is None:
        args.output = MODELS / f"{output}{getattr(args, name)}"
    return args


def slow_rates(model: nn.Module, scale: float) -> None:
    """Scale the rates ``A``, so that the state remembers for longer than the stock ones let it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.add_(math.log(scale))


def size_of(model: nn.Module) -> int:
    """The number of a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def sized(settings: Mapping[str, Any], parameters: int) -> str:
    """A model's settings, without those of None, and its size, for the card."""
    shown = (f"`{name}={value}`" for name, value in settings.items() if value is not None)
    return f"{', '.join(shown)}; {parameters:,} parameters, float32"


def about_run(
    script: str, args: argparse.Namespace, training: str, packages: Sequence[Any] = (torch,)
) -> dict[str, Any]:
    """The card's rows on how a model was trained.

    ``training`` tells the steps and the time; ``packages`` are those whose versions matter.
    """
    versions = ", ".join(f"{package.__name__} {package.__version__}" for package in packages)
    return {
        "command": f"`{' '.join([f'python {script}', *sys.argv[1:]])}`",
        "seed": args.seed,
        "training": training,
        "made with": versions,
    }


def train_module(
    args: argparse.Namespace,
    train: Callable[[], nn.Module],
    evaluate: Callable[[nn.Module], dict[str, Any]],
    model_card: Callable[[dict[str, Any], argparse.Namespace, float], str],
) -> None:
    """Train a plain module on one thread, judge it, and save it with its metrics and its card.

    What ``train`` takes is the time on the card. ``evaluate`` takes the model, in evaluation mode,
    to its held-out scores; ``model_card`` takes metrics, arguments and seconds of processor time to
    the card.
    """
    set_up()
    torch.manual_seed(args.seed)
    start = time.process_time()
    model = train().eval()
    seconds = time.process_time() - start
    metrics = {**evaluate(model), "parameters": size_of(model)}
    save_module(model, metrics, model_card(metrics, args, seconds), args.output)
    print(metrics)


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


def inverse_square_root(step: int, steps: int) -> float:
    """Linear warm-up, then down with the root of the step (Vaswani et al., 2017)."""
    return min((step + 1) / WARMUP_STEPS, math.sqrt(WARMUP_STEPS / (step + 1)))


class Checkpoint:
    """A file that a long training goes on from after it was stopped.

    It holds weights, optimizer, random numbers and the history of scores.

    Args:
        path (Path, optional): None keeps the history and no file. Default: None
        generator (torch.Generator, optional): what the batches are drawn from. Default: None
    """

    def __init__(self, path: Path | None = None, generator: torch.Generator | None = None) -> None:
        self.path, self.generator = path, generator
        self.history: list[dict[str, float]] = []

    def load(self, *parts: Any) -> int:
        """Restore the parts, which have a ``state_dict``, and return the number of steps done."""
        if self.path is None or not self.path.exists():
            return 0
        saved = torch.load(self.path)
        for part, state in zip(parts, saved["parts"], strict=True):
            part.load_state_dict(state)
        if self.generator is not None:
            self.generator.set_state(saved["generator"])
        self.history = saved["history"]
        return int(self.history[-1]["step"])

    def save(self, *parts: Any) -> None:
        """Write the parts as they are after the last entry of the history."""
        if self.path is None:
            return
        state = {"parts": [part.state_dict() for part in parts], "history": self.history}
        if self.generator is not None:
            state["generator"] = self.generator.get_state()
        # A run that is stopped while it writes still has the file before.
        written = self.path.with_suffix(".new")
        torch.save(state, written)
        written.replace(self.path)


def fit(
    model: nn.Module,
    args: argparse.Namespace,
    name: str,
    loss_of: Callable[[int], Tensor],
    scores: Callable[[], dict[str, float]],
    *,
    factor: Callable[[int, int], float] = lr_factor,
    checkpoint: Checkpoint | None = None,
    is_done: Callable[[dict[str, float]], bool] = lambda _: False,
) -> float:
    """Train in place and return the seconds it took.

    Args:
        model (nn.Module): what is trained.
        args (argparse.Namespace): ``lr``, ``weight_decay``, ``steps``, ``report_every``.
        name (str): shown next to the progress.
        loss_of (Callable): takes the number of a step and returns its loss.
        scores (Callable): the shares of right answers so far, by name; called every
            ``report_every`` steps, in evaluation mode and without gradients.
        factor (Callable, optional): takes a step and the number of steps to what the learning
            rate is multiplied by. Default: :func:`lr_factor`
        checkpoint (Checkpoint, optional): where to go on from. Default: None
        is_done (Callable, optional): takes the scores to whether to stop early. Default: never
    """
    checkpoint = Checkpoint() if checkpoint is None else checkpoint
    optimizer = optimizer_for(model, args)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: factor(s, args.steps))
    first = checkpoint.load(model, optimizer, schedule)
    spent = checkpoint.history[-1]["seconds"] if checkpoint.history else 0.0
    model.train()
    start = time.monotonic() - spent
    progress = trange(first, args.steps, desc=name, mininterval=1.0, disable=None)
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
            seconds = time.monotonic() - start
            progress.set_postfix_str(line)
            if progress.disable:  # output goes to a file: leave a line there instead of a bar
                print(f"step {step + 1}: {line}, {seconds:.0f} s", flush=True)
            checkpoint.history.append(
                {"step": step + 1, "loss": loss.item(), **shares, "seconds": round(seconds)}
            )
            checkpoint.save(model, optimizer, schedule)
            if is_done(shares):
                break
    return time.monotonic() - start


def table(rows: dict[str, Any], *heads: str) -> str:
    """A Markdown table of two columns, which need no heads."""
    head = f"| {' | '.join(heads)} |" if heads else "| | |"
    return "\n".join([head, "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())])


def save(model: PreTrainedModel, directory: Path) -> None:
    """Save weights and configuration; ``tutorials/models`` takes none too large for git."""
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    if MODELS in directory.resolve().parents:
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
