"""What an explanation costs in addition to the model's own work, on a 130m-shaped Mamba.

Random weights in the shape of mamba-130m (width 768, 1536 channels, 16 states), few layers: every
cost here is that of one layer times their number. For each length, in one run and on the same
tokens: the model's forward (transformers' CPU path), its forward and backward, and what each method
adds to the forward it runs, in time and in the peak memory of a process of its own. The row of a
rollout is first checked against the product of matrices.

    python benchmarks/end_to_end.py --layers 2 --lengths 1024 4096

The model's own scan on a CPU holds three tensors of (length, 1536, 16) float32, 18 GiB at 65,536
tokens, and reads them across their rows. Where that does not fit, `--fast-scan` replaces it by this
library's scan: what a method adds is then compared with a forward pass that is itself faster.
`--own SECONDS` also runs transformers' own forward, in a process that is stopped after that time: a
method that adds less than that adds less than one forward.

    MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=17179869184 \
        python benchmarks/end_to_end.py --layers 24 --lengths 16384 32768 65536 \
        --only rollout --fast-scan --own 600 --repeats 1

The two settings keep glibc from asking the kernel for new pages at every tensor of 32 MiB and more,
which otherwise takes half of the time of both sides at such lengths. Gradients on long inputs:
`--layers 24 --lengths 65536 --only lrp attribution --quadratic 65536 --fast-scan --memory
--tolerance 1e-3 --repeats 1`.

On a GPU, where the model runs mamba-ssm's kernels if they are installed: `--device cuda --layers 24
--lengths 1024 4096 16384 --memory --output end_to_end_gpu.json`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from _memory import peak_mib
from _timing import keep, options, parsed, rounded, seconds
from torch import Tensor
from transformers.models.mamba import modeling_mamba

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    UnifiedImplicitAttention,
    kernels,
)


def model_of(layers: int, device: str = "cpu") -> Any:
    """A model of mamba-130m's layer shape with random weights."""
    torch.manual_seed(0)
    config = transformers.MambaConfig(
        vocab_size=1000, hidden_size=768, num_hidden_layers=layers, state_size=16, use_cache=False
    )
    return transformers.MambaForCausalLM(config).eval().to(device)


def check(model: Any) -> float:
    """Largest difference of a rollout's row from the product of matrices, of its largest entry."""
    ids = torch.randint(1000, (1, 65), generator=torch.Generator().manual_seed(0)).to(model.device)
    rollout = MambaRollout(model)
    row, expected = rollout.attribute(ids), rollout.rollout(ids)[:, -1]
    difference = (row - expected).abs().max() / expected.abs().max()
    if not float(difference) < 1e-5:
        raise SystemExit(f"the row differs from the product of matrices by {float(difference):.1e}")
    return float(difference)


def fast_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor,
    **_: Any,
) -> Tensor:
    """The values of transformers' scan, by this library's; in the layout of the former."""
    dt = torch.nn.functional.softplus(dt + delta_bias[:, None]).transpose(1, 2)
    B, C = (t.transpose(1, 2)[:, :, None] for t in (B, C))
    coefficients = kernels.DiagonalCoefficients(dt, dt, A, B, C)
    y = kernels.diagonal_scan(x.transpose(1, 2), coefficients).transpose(1, 2)
    return (y + x * D[:, None]) * torch.nn.functional.silu(z)


def sides(
    layers: int, length: int, fast: bool = False, tolerance: float = 0, device: str = "cpu"
) -> dict[str, Callable[[], Any]]:
    """What is measured; each takes the same tokens."""
    model = model_of(layers, device)
    if fast:
        modeling_mamba.mamba_selective_scan = fast_scan
    ids = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0)).to(device)

    def forward() -> None:
        with torch.no_grad():
            model(ids)

    def forward_backward() -> None:
        embeddings = model.get_input_embeddings()(ids).detach().requires_grad_(True)
        score = model(inputs_embeds=embeddings).logits[0, -1, 3]
        torch.autograd.grad(score, embeddings)

    return {
        "forward": forward,
        "forward_backward": forward_backward,
        "rollout": lambda: MambaRollout(model).attribute(ids),
        "unified_rollout": lambda: UnifiedImplicitAttention(model).attribute(
            ids, aggregation="rollout"
        ),
        "lrp": lambda: MambaLRP(model).attribute(ids, target=3),
        "attribution": lambda: MambaAttribution(model).attribute(
            ids, target=3, tolerance=tolerance
        ),
        "unified": lambda: UnifiedImplicitAttention(model).attribute(ids, target=3),
        "latim_row": lambda: LaTIM(model).attribute(
            ids, layer=-1, aggregation="l2", activation="gate"
        ),
    }


LINEAR = ("rollout", "unified_rollout")


def peak(name: str, *own: Any) -> float:
    """MiB of one side: of its own process, or on a GPU of what is allocated during the call."""
    if own[-1] == "cpu":
        return peak_mib(__file__, "sides", name, *own)
    run = sides(*own)[name]
    run()
    torch.cuda.reset_peak_memory_stats()
    run()
    return torch.cuda.max_memory_allocated() / 2**20


def own_forward(layers: int, length: int) -> None:
    """Print a line when all is ready, and the seconds of transformers' own forward."""
    forward = sides(layers, length)["forward"]
    print("ready", flush=True)
    print(seconds(forward, repeats=1)[0], flush=True)


def within(layers: int, length: int, limit: float) -> dict[str, float]:
    """The seconds of transformers' own forward in another process, or how long it ran in vain."""
    code = f"import end_to_end; end_to_end.own_forward({layers}, {length})"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=Path(__file__).parent, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        start = time.perf_counter()
        try:
            printed, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()
            return {"own_forward_more_than_s": limit}
    if process.returncode == -signal.SIGKILL:
        return {"own_forward_out_of_memory_after_s": time.perf_counter() - start}
    if process.returncode:
        raise SystemExit(f"transformers' own forward ended with {process.returncode}")
    return {"own_forward_s": float(printed)}


def main() -> None:
    parser = options(__doc__, "end_to_end", repeats=2)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 4096])
    parser.add_argument("--backward", type=int, default=512, help="longest for the own backward")
    parser.add_argument("--quadratic", type=int, default=4096, help="longest for what is quadratic")
    parser.add_argument(
        "--only", nargs="+", help="methods to measure in addition to the forward. Default: all"
    )
    parser.add_argument("--fast-scan", action="store_true", help="instead of transformers' own")
    parser.add_argument("--own", type=float, help="seconds for transformers' own forward")
    parser.add_argument("--memory", action="store_true", help="also the peak memory of each")
    parser.add_argument("--tolerance", type=float, default=0, help="of MambaAttribution's rows")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    args = parsed(parser)
    difference = check(model_of(args.layers, args.device))
    rows: list[dict[str, Any]] = []
    for length in args.lengths:
        # First: later this process holds what the other needs.
        own_s = within(args.layers, length, args.own) if args.own else {}
        own = args.layers, length, args.fast_scan, args.tolerance, args.device
        runs = sides(*own)
        [base] = seconds(runs["forward"], repeats=args.repeats)
        row: dict[str, Any] = {"length": length, "layers": args.layers, "forward_s": base}
        row["scan"] = "captum_ssm" if args.fast_scan else "transformers"
        idle = peak("forward", *own) if args.memory else 0
        for name, run in runs.items():
            longest = args.backward if name == "forward_backward" else args.quadratic
            if name == "forward" or (length > longest and name not in LINEAR):
                continue
            if args.only and name not in args.only:
                continue
            [total] = seconds(run, repeats=args.repeats)
            row[f"{name}_s"] = total
            # What the method adds, in forwards: it runs the model itself.
            row[f"{name}_extra_in_forwards"] = (total - base) / base
            if args.memory:
                row[f"{name}_extra_MiB"] = peak(name, *own) - idle
        if own_s:
            row |= own_s
            for name in runs:
                if name != "forward" and f"{name}_s" in row:
                    added = row[f"{name}_s"] - base
                    row[f"{name}_extra_in_own_forwards_at_most"] = added / max(own_s.values())
        rows.append(row)
        print(rounded(row), flush=True)
        keep(
            args,
            rows,
            malloc={k: v for k, v in os.environ.items() if k.startswith("MALLOC_")},
            transformers=transformers.__version__,
            kernels=kernels.extension_loaded(),
            difference=difference,
        )


if __name__ == "__main__":
    main()
