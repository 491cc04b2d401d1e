"""Train a small Mamba or Mamba-2 to copy, measure it on held-out strings and save it.

Run from the repository root::

    python benchmarks/copying/train.py
    python benchmarks/copying/train.py --model mamba2 --state 64
    python benchmarks/copying/train.py --model mamba2 --paper-setting --width 128

The last is the setting of LaTIM's table 2 (Pitorro & Treviso 2025, appendix B.1): eight layers,
strings of 50, one layer initialized as by Trockman et al. (2024), a learning rate that falls with
the root of the step. Narrower than the paper's, and taught on short strings first.

The result is a plain transformers checkpoint with a model card.  Nothing from this directory is
needed to run it.  Training is reproducible from ``--seed`` with a fixed ``--threads`` on one
machine; other machines round differently and end elsewhere.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from transformers import (
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from captum_ssm.examples.copying import (
    MAX_LENGTH,
    MIN_LENGTH,
    SEPARATOR,
    SEPARATOR_ID,
    SYMBOLS,
    VOCABULARY_SIZE,
    CopyBatch,
    held_out_batch,
    make_batch,
)

# After this directory, so that files of the same name here come first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from _scan import fast_scan
from _training import (
    Checkpoint,
    about_run,
    add_device_option,
    add_mamba_options,
    fit,
    inverse_square_root,
    lr_factor,
    options,
    parsed,
    save,
    set_up,
    size_of,
    sized,
    slow_rates,
    table,
    trained_in,
)
from mimetic import mimic_attention

# Seeds of the strings used to follow and to judge training.  The two kinds of batches could share
# a seed and still have no string in common (see task.py); distinct seeds keep the strings looked
# at during training apart from those of the published number.
PROGRESS_SEED = 10_001
EVALUATION_SEED = 20_002

SHORTEST_LESSON = 4


@dataclass(frozen=True)
class Accuracy:
    """How well a model copies held-out strings.

    Attributes:
        teacher_forced: Share of copied tokens predicted right when the true copy so far is given.
        generated_tokens: Share of copied tokens right when the model continues its own copy.
        generated_strings: Share of strings that greedy generation copies without a mistake.
        worst_length: The lowest ``teacher_forced`` among the source lengths.
        strings: Number of strings that these shares are of.
    """

    teacher_forced: float
    generated_tokens: float
    generated_strings: float
    worst_length: float
    strings: int


def build(args: argparse.Namespace) -> PreTrainedModel:
    """A model whose state remembers for longer than the stock initialization lets it.

    The stock rates ``-1, -2, -3 ..`` suit long sequences of redundant text: with the time steps
    drawn here most of the state fades within a few tokens, while copying needs every token for
    ``length + 1`` steps.  Scaling the rates down starts the search close to a solution.
    """
    torch.manual_seed(args.seed)
    settings = {
        "vocab_size": args.vocabulary,
        "hidden_size": args.width,
        "num_hidden_layers": args.layers,
        "state_size": args.state,
        "conv_kernel": args.conv,
        "time_step_min": 0.01,
        # Every id is a symbol or the separator; the defaults would end generation at a symbol.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    model: PreTrainedModel
    if args.model == "mamba":
        model = MambaForCausalLM(MambaConfig(**settings))
    else:
        heads = {
            "head_dim": args.head_dim,
            "num_heads": 2 * args.width // args.head_dim,
            "n_groups": args.groups,
            "chunk_size": args.chunk,
        }
        model = Mamba2ForCausalLM(Mamba2Config(**settings, **heads, expand=2))
    slow_rates(model, args.rate_scale)
    if args.mimetic is not None:
        mimic_attention(model, args.mimetic)
    return model


def lesson_length(step: int, args: argparse.Namespace, generator: torch.Generator) -> int:
    """Source length of the batch at ``step``.

    Recall is found within a few hundred steps on short strings, and hardly at all on long ones,
    so the range of lengths grows to the task's own over the first part of training.  Its lower
    end stays in the task's own proportion to the upper, two thirds by default.
    """
    progress = min(1.0, step / (args.lessons * args.steps))
    longest = round(SHORTEST_LESSON + (args.longest - SHORTEST_LESSON) * progress)
    shortest = round(longest * args.shortest / args.longest)
    return int(torch.randint(shortest, longest + 1, (), generator=generator))


def copy_logits(model: PreTrainedModel, batch: CopyBatch) -> Tensor:
    """Logits of the predictions that copy, shape ``(examples, length, vocabulary)``."""
    logits: Tensor = model(batch.inputs.to(model.device), use_cache=False).logits
    return logits[:, batch.length :]


def learning_rate(args: argparse.Namespace) -> Callable[[int, int], float]:
    """The schedule, with a linear end to zero if a cooldown is asked for."""
    schedule = inverse_square_root if args.schedule == "inverse-square-root" else lr_factor

    def factor(step: int, steps: int) -> float:
        return schedule(step, steps) * min(1.0, (steps - step) / max(1, args.cooldown))

    return factor


def train(model: PreTrainedModel, args: argparse.Namespace) -> tuple[float, list[dict[str, float]]]:
    """Train in place and return the seconds it took and the scores on the way.

    The loss covers the copied tokens only: the source is noise and cannot be predicted.
    """
    generator = torch.Generator().manual_seed(args.seed)
    drawn_for_watching = torch.Generator().manual_seed(PROGRESS_SEED)
    watched = held_out_batch(args.watched, drawn_for_watching, args.longest)

    def loss_of(step: int) -> Tensor:
        length = lesson_length(step, args, generator)
        batch = make_batch(args.batch, generator, length)
        logits = copy_logits(model, batch)
        return functional.cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten().to(logits.device)
        )

    def scores() -> dict[str, float]:
        right = copy_logits(model, watched).argmax(-1).cpu() == watched.targets
        return {"accuracy": right.float().mean().item()}

    checkpoint = Checkpoint(args.checkpoint, generator)
    seconds = fit(
        model,
        args,
        "copying",
        loss_of,
        scores,
        factor=learning_rate(args),
        checkpoint=checkpoint,
        is_done=lambda shares: shares["accuracy"] >= args.enough,
    )
    return seconds, checkpoint.history


@torch.no_grad()
def greedy_copy(model: PreTrainedModel, batch: CopyBatch) -> Tensor:
    """The model's own copy of each source string, token by token, shape ``(examples, length)``."""
    prompt = batch.prompt.to(model.device)
    generated: Tensor = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=batch.length,
        do_sample=False,
    )
    return generated[:, prompt.shape[1] :].cpu()


@torch.no_grad()
def evaluate(model: PreTrainedModel, strings_per_length: int, lengths: Sequence[int]) -> Accuracy:
    """Accuracy on fixed held-out strings, as many of each length."""
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    forced, generated, whole = [], [], []
    for length in lengths:
        batch = held_out_batch(strings_per_length, generator, length)
        forced.append((copy_logits(model, batch).argmax(-1).cpu() == batch.targets).double())
        right = greedy_copy(model, batch) == batch.targets
        generated.append(right.double())
        whole.append(right.all(dim=1).double())
    return Accuracy(
        teacher_forced=torch.cat([right.flatten() for right in forced]).mean().item(),
        generated_tokens=torch.cat([right.flatten() for right in generated]).mean().item(),
        generated_strings=torch.cat(whole).mean().item(),
        worst_length=min(right.mean().item() for right in forced),
        strings=sum(len(right) for right in whole),
    )


def model_card(
    model: PreTrainedModel, accuracy: Accuracy, args: argparse.Namespace, seconds: float
) -> str:
    """The README.md saved next to the weights."""
    kind = type(model).__name__
    each_length = accuracy.strings // (args.longest + 1 - args.shortest)
    shown = [
        "hidden_size",
        "num_hidden_layers",
        "state_size",
        "conv_kernel",
        "num_heads",
        "head_dim",
        "n_groups",
        "chunk_size",
    ]
    rows = {
        "task": f"`captum_ssm.examples.copying`: strings of {args.shortest} to {args.longest} "
        f"symbols, each drawn uniformly from {len(SYMBOLS)}",
        "vocabulary": f"ids 0 to {len(SYMBOLS) - 1} are `{SYMBOLS[0]}` to `{SYMBOLS[-1]}`, "
        f"id {SEPARATOR_ID} is `{SEPARATOR}`; there is no tokenizer",
        "model": sized({name: getattr(model.config, name, None) for name in shown}, size_of(model)),
    } | about_run(
        "benchmarks/copying/train.py",
        args,
        f"{args.steps:,} steps of {args.batch} strings; {trained_in(seconds, args, args.threads)}",
        (torch, transformers),
    )
    scores = {
        "copied tokens, given the true copy so far": accuracy.teacher_forced,
        "the same at the length where it is lowest": accuracy.worst_length,
        "copied tokens, greedy generation": accuracy.generated_tokens,
        "whole strings, greedy generation": accuracy.generated_strings,
    }
    return f"""# {args.output.name}

A small `{kind}` that copies strings: it reads `source {SEPARATOR}` and continues with the source.
It was trained from scratch for this repository, to be explained rather than used: the source
token of every copied token is known, so an explanation of this model can be checked.

{table(rows)}

Accuracy on {accuracy.strings:,} held-out strings, {each_length} of each length,
measured on the saved model with transformers' own code:

{table({key: f"{score:.3%}" for key, score in scores.items()})}

Strings are held out by a hash of the string itself, so none of these was trained on.

```python
from transformers import {kind}

model = {kind}.from_pretrained("tutorials/models/{args.output.name}").eval()
```
"""


def parse_arguments() -> argparse.Namespace:
    """The settings; the defaults are those of ``tutorials/models/copying-mamba``."""
    parser = options(__doc__, "copying-", report_every=100, threads=1, steps=5000, batch=64)
    parser.add_argument("--model", choices=("mamba", "mamba2"), default="mamba")
    add_mamba_options(parser, layers=3)
    add_device_option(parser)
    sizes = {"shortest": MIN_LENGTH, "longest": MAX_LENGTH, "vocabulary": VOCABULARY_SIZE}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in {"head-dim": 16, "groups": 1, "chunk": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="mamba2 only")
    parser.add_argument("--mimetic", type=int, help="layer to initialize like linear attention")
    parser.add_argument("--schedule", choices=("cosine", "inverse-square-root"), default="cosine")
    parser.add_argument(
        "--lessons", type=float, default=0.4, help="part of the steps in which lengths grow"
    )
    parser.add_argument(
        "--cooldown", type=int, default=0, help="last steps, in which the rate falls to zero"
    )
    parser.add_argument("--watched", type=int, default=256, help="strings judged on the way")
    parser.add_argument("--enough", type=float, default=2.0, help="accuracy at which to stop")
    parser.add_argument("--checkpoint", type=Path, help="file to go on from after a stop")
    parser.add_argument("--log", type=Path, help="file for settings, scores and accuracy, JSON")
    parser.add_argument(
        "--paper-setting", action="store_true", help="the defaults of LaTIM's appendix B.1"
    )
    parser.add_argument("--strings-per-length", type=int, default=500, help="for evaluation")
    parser.add_argument(
        "--evaluate-only", action="store_true", help="measure the model already in the output"
    )
    if "--paper-setting" in sys.argv:
        state = 128 if "mamba2" in sys.argv else 16
        parser.set_defaults(
            layers=8,
            width=512,
            state=state,
            head_dim=64,
            chunk=64,
            vocabulary=32,
            shortest=50,
            longest=50,
            mimetic=3,
            schedule="inverse-square-root",
            lr=7e-4,
            batch=256,
            rate_scale=1.0,
        )
    return parsed(parser, "copying-", "model")


def main() -> None:
    """Train, save, then measure what was saved."""
    args = parse_arguments()
    set_up(args.threads, args.device)
    seconds, history = None, []
    if not args.evaluate_only:
        model = build(args).to(args.device)
        with fast_scan():
            seconds, history = train(model, args)
        save(model, args.output)
    # Judge what was written, on the code that others will run, not the model in memory.
    loader = MambaForCausalLM if args.model == "mamba" else Mamba2ForCausalLM
    model = loader.from_pretrained(args.output, local_files_only=True).eval().to(args.device)
    accuracy = evaluate(model, args.strings_per_length, range(args.shortest, args.longest + 1))
    print(accuracy)
    if seconds is not None:
        (args.output / "README.md").write_text(model_card(model, accuracy, args, seconds))
    if args.log is not None:
        settings = {
            name: value for name, value in vars(args).items() if not isinstance(value, Path)
        }
        log = {"settings": settings, "accuracy": asdict(accuracy), "history": history}
        args.log.write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
