"""What does it cost to measure what lies between mixers?

Layers of the shape of mamba-130m (width 768), with and without an MLP of 3072 in each, on 1,024
tokens: the model's own forward (transformers' CPU path), and what a rollout and a method with
gradients add to measure the wiring. A rollout runs 32 tokens once more. A method with gradients
takes one backward pass through everything except the mixers, on the whole length.

    python benchmarks/wiring.py --layers 4 --length 1024
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from _record import RESULTS, save

from captum_ssm._capture import Request
from captum_ssm._capture import recording as recording_module
from captum_ssm._capture.recording import record

SHAPE = {"vocab_size": 1000, "hidden_size": 768}


def models(layers: int) -> dict[str, torch.nn.Module]:
    """A model of mixers alone, and one with an MLP after each."""
    mlps = transformers.JambaConfig(
        **SHAPE,
        num_hidden_layers=layers,
        intermediate_size=3072,
        num_attention_heads=12,
        num_key_value_heads=12,
        num_experts=1,
        attn_layer_period=100,
        attn_layer_offset=99,
        use_mamba_kernels=False,
        pad_token_id=0,
    )
    plain = transformers.MambaConfig(**SHAPE, num_hidden_layers=layers)
    torch.manual_seed(0)
    return {
        "mixers": transformers.MambaModel(plain).eval(),
        "mixers and MLPs": transformers.JambaModel(mlps).eval(),
    }


def seconds(run: Callable[[], Any], repeats: int, clock: Callable[[], float]) -> float:
    """The best of some runs."""
    found = []
    for _ in range(repeats):
        start = clock()
        run()
        found.append(clock() - start)
    return min(found)


def measure(model: torch.nn.Module, length: int, repeats: int, clock: Any) -> dict[str, float]:
    """Seconds of a forward, and of both measurements."""
    ids = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0))
    request = Request.of(model, None, ids)
    short = request.shortened(256)
    assert short is not None
    with torch.no_grad():
        forward = seconds(lambda: request.run(), repeats, clock)
    check = seconds(lambda: record(short, wiring=True), repeats, clock)
    # The whole length: the time of the measurement itself, within a run that has its graph anyway.
    spent, real = [], recording_module.measure

    def timed(*args: Any) -> Any:
        start = clock()
        found = real(*args)
        spent.append(clock() - start)
        assert found.is_simple
        return found

    recording_module.measure = timed
    try:
        for _ in range(repeats):
            record(request, wiring=True)
    finally:
        recording_module.measure = real
    return {"forward_s": forward, "short_s": check, "whole_s": min(spent)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--no-save", action="store_true", help="print only")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="one thread, by the processor time it took: for a machine that is busy otherwise",
    )
    args = parser.parse_args()
    torch.set_num_threads(1 if args.cpu_time else args.threads)
    clock = time.process_time if args.cpu_time else time.perf_counter
    rows = []
    for name, model in models(args.layers).items():
        found = measure(model, args.length, args.repeats, clock)
        rows.append({"model": name, "layers": args.layers, "length": args.length, **found})
        short, whole = (found[key] / found["forward_s"] for key in ("short_s", "whole_s"))
        print(
            f"{name:16} forward {found['forward_s']:.2f} s; 32 tokens {short:.3f}, the whole "
            f"length {whole:.3f} of a forward"
        )
    if not args.no_save:
        save(RESULTS / "wiring.json", "wiring", rows, cpu_time=args.cpu_time)


if __name__ == "__main__":
    main()
