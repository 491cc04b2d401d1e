"""Train a small Mamba or Mamba-2 to copy, measure it on held-out strings and save it.

Run from the repository root::

    python benchmarks/copying/train.py
    python benchmarks/copying/train.py --model mamba2 --state 64

The result is a plain transformers checkpoint with a model card.  Nothing from this directory is
needed to run it.  Training is reproducible from ``--seed`` with a fixed ``--threads`` on one
machine; other machines round differently and end elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from dataclasses import dataclass
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
    LENGTHS,
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
    about_run,
    add_mamba_options,
    fit,
    options,
    parsed,
    save,
    shown_settings,
    size_of,
    slow_rates,
    table,
)

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
        "vocab_size": VOCABULARY_SIZE,
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
    return model


def lesson_length(step: int, steps: int, generator: torch.Generator) -> int:
    """Source length of the batch at ``step``.

    Recall is found within a few hundred steps on short strings, and hardly at all on long ones,
    so the range of lengths grows to the task's own over the first two fifths of training.  Its
    lower end stays at two thirds of the upper, the proportion of the task itself.
    """
    progress = min(1.0, step / (0.4 * steps))
    longest = round(SHORTEST_LESSON + (MAX_LENGTH - SHORTEST_LESSON) * progress)
    shortest = round(longest * MIN_LENGTH / MAX_LENGTH)
    return int(torch.randint(shortest, longest + 1, (), generator=generator))


def copy_logits(model: PreTrainedModel, batch: CopyBatch) -> Tensor:
    """Logits of the predictions that copy, shape ``(examples, length, vocabulary)``."""
    logits: Tensor = model(batch.inputs, use_cache=False).logits
    return logits[:, batch.length :]


def train(model: PreTrainedModel, args: argparse.Namespace) -> float:
    """Train in place and return the seconds it took.

    The loss covers the copied tokens only: the source is noise and cannot be predicted.
    """
    generator = torch.Generator().manual_seed(args.seed)
    watched = held_out_batch(256, torch.Generator().manual_seed(PROGRESS_SEED), MAX_LENGTH)

    def loss_of(step: int) -> Tensor:
        length = lesson_length(step, args.steps, generator)
        batch = make_batch(args.batch, generator, length)
        logits = copy_logits(model, batch)
        return functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())

    def scores() -> dict[str, float]:
        right = copy_logits(model, watched).argmax(-1) == watched.targets
        return {"accuracy": right.float().mean().item()}

    return fit(model, args, "copying", loss_of, scores)


@torch.no_grad()
def greedy_copy(model: PreTrainedModel, batch: CopyBatch) -> Tensor:
    """The model's own copy of each source string, token by token, shape ``(examples, length)``."""
    generated: Tensor = model.generate(
        batch.prompt,
        attention_mask=torch.ones_like(batch.prompt),
        max_new_tokens=batch.length,
        do_sample=False,
    )
    return generated[:, batch.prompt.shape[1] :]


@torch.no_grad()
def evaluate(model: PreTrainedModel, strings_per_length: int) -> Accuracy:
    """Accuracy on fixed held-out strings, as many of each length."""
    generator = torch.Generator().manual_seed(EVALUATION_SEED)
    forced, generated, whole = [], [], []
    for length in LENGTHS:
        batch = held_out_batch(strings_per_length, generator, length)
        forced.append((copy_logits(model, batch).argmax(-1) == batch.targets).double())
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
    each_length = accuracy.strings // len(LENGTHS)
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
        "task": f"`captum_ssm.examples.copying`: strings of {MIN_LENGTH} to {MAX_LENGTH} symbols, "
        f"each drawn uniformly from {len(SYMBOLS)}",
        "vocabulary": f"ids 0 to {len(SYMBOLS) - 1} are `{SYMBOLS[0]}` to `{SYMBOLS[-1]}`, "
        f"id {SEPARATOR_ID} is `{SEPARATOR}`; there is no tokenizer",
        "model": f"{shown_settings(model.config, shown)}; {size_of(model):,} parameters, float32",
    } | about_run(
        "benchmarks/copying/train.py",
        args,
        f"{args.steps:,} steps of {args.batch} strings; "
        f"{seconds / 60:.0f} minutes, {args.threads} CPU thread(s)",
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

| | |
|---|---|
{table(rows)}

Accuracy on {accuracy.strings:,} held-out strings, {each_length} of each length,
measured on the saved model with transformers' own code:

| | |
|---|---|
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
    for name, default in {"head-dim": 16, "groups": 1, "chunk": 16}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help="mamba2 only")
    parser.add_argument("--strings-per-length", type=int, default=500, help="for evaluation")
    parser.add_argument(
        "--evaluate-only", action="store_true", help="measure the model already in the output"
    )
    return parsed(parser, "copying-", "model")


def main() -> None:
    """Train, save, then measure what was saved."""
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()  # it warns about every CUDA kernel it lacks
    seconds = None
    if not args.evaluate_only:
        model = build(args)
        # Mamba-2 multiplies matrices over chunks, which is fast enough as it is.
        with fast_scan() if args.model == "mamba" else nullcontext():
            seconds = train(model, args)
        save(model, args.output)
    # Judge what was written, on the code that others will run, not the model in memory.
    loader = MambaForCausalLM if args.model == "mamba" else Mamba2ForCausalLM
    model = loader.from_pretrained(args.output, local_files_only=True).eval()
    accuracy = evaluate(model, args.strings_per_length)
    print(accuracy)
    if seconds is not None:
        (args.output / "README.md").write_text(model_card(model, accuracy, args, seconds))


if __name__ == "__main__":
    main()
