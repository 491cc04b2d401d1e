"""Train the small Vision Mamba on cluttered digits: ``python benchmarks/vision/train.py``.

Writes the weights and their metrics to ``--output``. One CPU core, about forty minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from torch import nn

from captum_ssm.examples.digits import CANVAS, Samples, compose, glyphs, held_out_digits
from captum_ssm.models import VisionMamba

# After this directory, so that files of the same name here come first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from _training import MODELS, save_module, size_of


def build() -> VisionMamba:
    """The untrained model: 101 tokens, 4 blocks, 48 channels."""
    return VisionMamba(CANVAS, 4, classes=10, width=48, depth=4, state=4, dt_rank=3)


def accuracy(model: nn.Module, samples: Samples) -> float:
    """Share of samples whose digit the model names."""
    model.eval()
    with torch.no_grad():
        hits = [(model(s.images).argmax(1) == s.labels).float() for s in samples.batches(90)]
    return float(torch.cat(hits).mean())


# Pieces of other digits on a canvas, and the first learning rate, of each cycle of training. More
# clutter than in the held-out images to begin with: what is learned on it carries over.
CYCLES = ((5, 3e-3), (3, 2e-3))


def train(steps: int, batch: int, seed: int) -> VisionMamba:
    """The trained model: ``steps`` in each of :data:`CYCLES`, a fresh optimizer in each."""
    torch.manual_seed(seed)
    model = build()
    for cycle in range(len(CYCLES)):
        run_cycle(model, cycle, steps, batch, seed)
    return model.eval()


def run_cycle(model: VisionMamba, cycle: int, steps: int, batch: int, seed: int) -> None:
    """AdamW on fresh canvases at every step, with warm-up and a cosine."""
    pieces, rate = CYCLES[cycle]
    generator = torch.Generator().manual_seed(seed + cycle)
    shapes, labels = glyphs("train")
    decayed = [p for n, p in model.named_parameters() if n.endswith("weight") and p.dim() > 1]
    rest = [p for n, p in model.named_parameters() if not (n.endswith("weight") and p.dim() > 1)]
    groups = [{"params": decayed, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))
    start, running = time.time(), 0.0
    for step in range(steps):
        warm = min(1.0, (step + 1) / 100)
        factor = warm * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * factor
        chosen = torch.randint(len(shapes), (batch,), generator=generator)
        samples = compose(shapes[chosen], labels[chosen], generator, pieces)
        model.train()
        loss = nn.functional.cross_entropy(model(samples.images), samples.labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        running = loss.item() if step == 0 else 0.98 * running + 0.02 * loss.item()
        if (step + 1) % 100 == 0:
            found = accuracy(model, held_out_digits(180)) if (step + 1) % 500 == 0 else float("nan")
            print(f"{cycle} {step + 1:5d} {time.time() - start:6.0f} s loss {running:.3f} "
                  f"{found:.3f}", flush=True)  # fmt: skip


CARD = """# digits-vim

A small `VisionMamba` that names a digit on a cluttered canvas. It was trained from scratch for
this repository, to be explained rather than used: which pixels are the digit is known, so an
explanation of this model can be checked.

| | |
|---|---|
| task | `captum_ssm.examples.digits`: scikit-learn's 8 x 8 digits at three times their size on a 40 x 40 canvas, among pieces of other digits and noise, tinted |
| input | `(B, 3, 40, 40)`; an empty canvas is -0.5, full ink 1.5 |
| model | patches of 4 (100 tokens), CLS in the middle (token 50), 4 bidirectional blocks (`v2`, halved output, RMS norm), width 48, state 4; {parameters:,} parameters, float32 |
| command | `python benchmarks/vision/train.py` |
| seed | {seed} |
| training | 2 cycles of {steps:,} steps of {batch} fresh canvases with the {train:,} training digits, the first with more clutter; 1 CPU thread |
| made with | torch {torch} |
| held-out accuracy | {accuracy:.1%} of {held_out} digits that were not trained on, each on one canvas |

```python
from safetensors.torch import load_file
from captum_ssm.models import VisionMamba

model = VisionMamba.from_state_dict(load_file("tutorials/models/digits-vim/model.safetensors"))
```

`benchmarks/vision/evaluate.py` scores explanations of it; the tables are in
`benchmarks/vision/results/`. The digits are those of scikit-learn's `load_digits` (UCI, Alpaydin
and Kaynak, 1998).
"""  # noqa: E501


def save(model: VisionMamba, args: argparse.Namespace) -> None:
    """The weights, their metrics and their card."""
    metrics = {
        "accuracy": accuracy(model, held_out_digits()),
        "held_out": len(held_out_digits()),
        "parameters": size_of(model),
        "steps": args.steps,
        "batch": args.batch,
        "seed": args.seed,
        "torch": torch.__version__,
    }
    card = CARD.format(train=len(glyphs("train")[0]), **metrics)
    save_module(model, metrics, card, args.output)
    print(json.dumps(metrics, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=MODELS / "digits-vim")
    args = parser.parse_args()
    torch.set_num_threads(1)
    save(train(args.steps, args.batch, args.seed), args)


if __name__ == "__main__":
    main()
