"""Train a small Mamba to look up a value by its key, measure it on held-out records and save it.

Run from the repository root::

    python benchmarks/passkey/train.py

The result is a plain transformers checkpoint with a model card. Nothing from this directory is
needed to run it. Training is reproducible from ``--seed`` with a fixed ``--threads`` on one
machine; other machines round differently and end elsewhere.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import transformers
from measure import Accuracy, accuracy, answer_logits
from records import (
    CONTEXT,
    RECORD_LENGTH,
    RECORDS,
    VOCABULARY_SIZE,
    PasskeyBatch,
    held_out_batch,
    make_batch,
)
from torch import Tensor
from torch.nn import functional
from transformers import MambaConfig, MambaForCausalLM, PreTrainedModel

# After this directory, so that files of the same name here come first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from _scan import fast_scan
from _training import (
    about_run,
    add_mamba_options,
    fit,
    options,
    save,
    set_up,
    size_of,
    sized,
    slow_rates,
    table,
)

PROGRESS_SEED = 10_001
SHORTEST_LESSON = 8
LESSONS = 0.6
QUESTIONS = 8


def build(args: argparse.Namespace) -> PreTrainedModel:
    """A model whose state remembers for long from the start (see the copying task's ``build``)."""
    torch.manual_seed(args.seed)
    model = MambaForCausalLM(
        MambaConfig(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=args.width,
            num_hidden_layers=args.layers,
            state_size=args.state,
            conv_kernel=args.conv,
            time_step_min=0.01,
            # Every id is in use; the defaults would end generation at a symbol.
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )
    slow_rates(model, args.rate_scale)
    return model


def lesson(step: int, args: argparse.Namespace, generator: torch.Generator) -> PasskeyBatch:
    """The batch at ``step``.

    Contexts grow from two records with hardly any filler to the task's own over the first three
    fifths of training. Several questions follow one another, which is several times the signal for
    a little more length; up to its first answer the sequence is the task itself.
    """
    progress = min(1.0, step / (LESSONS * args.steps))
    longest = round(SHORTEST_LESSON + (CONTEXT - SHORTEST_LESSON) * progress)
    context = int(
        torch.randint(max(SHORTEST_LESSON, longest // 2), longest + 1, (), generator=generator)
    )
    records = max(2, min(RECORDS, context // (RECORD_LENGTH + 1)))
    return make_batch(args.batch, generator, context, records, questions=QUESTIONS)


def train(model: PreTrainedModel, args: argparse.Namespace) -> float:
    """Train in place and return the seconds it took. The loss covers the answers only."""
    generator = torch.Generator().manual_seed(args.seed)
    watched = held_out_batch(128, torch.Generator().manual_seed(PROGRESS_SEED))

    def loss_of(step: int) -> Tensor:
        batch = lesson(step, args, generator)
        logits = answer_logits(model, batch)
        return functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())

    def scores() -> dict[str, float]:
        right = answer_logits(model, watched).argmax(-1) == watched.targets
        return {"accuracy": right.float().mean().item()}

    return fit(model, args, "passkey", loss_of, scores)


def model_card(
    model: PreTrainedModel, scores: dict[int, Accuracy], args: argparse.Namespace, seconds: float
) -> str:
    """The README.md saved next to the weights."""
    shown = ["hidden_size", "num_hidden_layers", "state_size", "conv_kernel"]
    rows = {
        "task": f"`benchmarks/passkey/records.py`: {RECORDS} records in {CONTEXT // 2} "
        f"to {CONTEXT} tokens of context, one question",
        "vocabulary": f"{VOCABULARY_SIZE} ids: filler `a` to `z`, digits `0` to `9`, keys "
        "`A` to `P`, `<KEY>`, `<QUERY>`; there is no tokenizer",
        "model": sized({name: getattr(model.config, name, None) for name in shown}, size_of(model)),
    } | about_run(
        "benchmarks/passkey/train.py",
        args,
        f"{args.steps:,} steps of {args.batch} examples; "
        f"{seconds / 60:.0f} minutes, {args.threads} CPU thread(s)",
        (torch, transformers),
    )
    lines = "\n".join(
        f"| {context} | {score.answered:.2%} | {score.generated:.2%} |"
        for context, score in scores.items()
    )
    return f"""# {args.output.name}

A small `MambaForCausalLM` that looks up a value by its key: it reads records such as
`<KEY> B 4` among filler, then `<QUERY> B`, and continues with `4`. It was trained
from scratch for this repository, to be explained rather than used: the record that decides every
answer is known, so an explanation of this model can be checked.

{table(rows)}

Accuracy on {args.examples:,} held-out questions for each length of context, measured on the saved
model with transformers' own code. It was trained on no context longer than {CONTEXT} tokens.

| tokens of context | values predicted right | greedy generation |
|---|---|---|
{lines}

Examples are held out by a hash of their records, so none of these was trained on.

```python
from transformers import MambaForCausalLM

model = MambaForCausalLM.from_pretrained("tutorials/models/{args.output.name}").eval()
```
"""


def main() -> None:
    """Train, save, then measure what was saved."""
    parser = options(__doc__, "passkey-mamba", report_every=100, threads=1, steps=1500, batch=32)
    add_mamba_options(parser, layers=2)
    parser.add_argument("--examples", type=int, default=500, help="for evaluation")
    args = parser.parse_args()
    set_up(args.threads)
    model = build(args)
    with fast_scan():
        seconds = train(model, args)
    save(model, args.output)
    # Judge what was written, on the code that others will run, not the model in memory.
    model = MambaForCausalLM.from_pretrained(args.output, local_files_only=True).eval()
    contexts = [factor * CONTEXT for factor in (1, 2, 4)]
    scores = {context: accuracy(model, context, args.examples) for context in contexts}
    print(scores)
    (args.output / "README.md").write_text(model_card(model, scores, args, seconds))


if __name__ == "__main__":
    main()
