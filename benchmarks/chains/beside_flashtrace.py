"""FlashTrace's own package on the chains, by the measures of `evaluate_chains.py`.

    python benchmarks/chains/beside_flashtrace.py tutorials/models/chains-qwen3next

It needs FlashTrace (https://github.com/wbopan/flashtrace) in an environment of its own. Hybrids are
explained by its repository at 13865e9 with transformers 5.8.1. Release 0.1.1 is not enough: it
expects ``self_attn`` in every layer. With transformers 5.24 neither works: layers have no kernel of
their own that could be replaced.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import torch
from flashtrace import FlashTrace, load_model_and_tokenizer

from captum_ssm.examples.chains import LINKS, Puzzle, make_puzzle

# After this directory, so that files of the same name here come first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from _evaluating import interval
from _record import save

RESULTS = Path(__file__).resolve().parent / "results"
SCORING_SEED = 30_007


def hop_shares(tracer: FlashTrace, puzzle: Puzzle, hops: int) -> torch.Tensor:
    """Each hop's share of every record, of its scores on the prompt, ``(hops, records)``."""
    answer = len(puzzle.aloud) - 2
    traced = tracer.trace(
        prompt=" ".join(puzzle.prompt),
        target=" ".join(puzzle.aloud),
        output_span=(answer, answer),
        reasoning_span=(0, answer - 1),
        hops=hops,
    )
    tokens = [token.strip() for token in traced.prompt_tokens]
    if tokens != puzzle.prompt:
        raise SystemExit(f"FlashTrace reads {tokens}, not the words {puzzle.prompt}")
    vectors = torch.tensor([*traced.per_hop_scores, traced.scores]).double()
    shares = vectors / vectors.abs().sum(1, keepdim=True).clamp(min=1e-30)
    return torch.stack(
        [shares[:, list(puzzle.positions(k))].sum(1) for k in range(len(puzzle.records))], 1
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--examples", type=int, default=50)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_model_and_tokenizer(
        str(args.model), device_map=None, dtype="float32", attn_implementation="eager"
    )
    tracer, hops = FlashTrace(model, tokenizer), LINKS - 1
    rng = random.Random(SCORING_SEED + LINKS)
    rows = []
    puzzles = [make_puzzle(rng, held_out=True) for _ in range(args.examples)]
    shares = [hop_shares(tracer, puzzle, hops) for puzzle in puzzles]
    count = len(shares[0])
    for k in range(count):
        right = [puzzle.links[max(0, LINKS - 1 - k)] for puzzle in puzzles]
        pairs = list(zip(puzzles, shares, right, strict=True))
        rows.append(
            {
                "hop": "all" if k == count - 1 else k,
                "right record": interval([float(s[k, r]) for _, s, r in pairs]),
                "asked chain": interval([float(s[k, p.links].sum()) for p, s, _ in pairs]),
                "other chain": interval([float(s[k, p.others].sum()) for p, s, _ in pairs]),
                "largest is right": interval([float(s[k].argmax() == r) for _, s, r in pairs]),
            }
        )
        print(rows[-1])
    save(RESULTS / f"flashtrace-{args.model.name}.json", "chains, FlashTrace", rows)


if __name__ == "__main__":
    main()
