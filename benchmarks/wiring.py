"""What does it cost to measure what lies between mixers?

Layers of the shape of mamba-130m (width 768), with and without an MLP of 3072 in each, on 1,024
tokens: the model's own forward (transformers' CPU path), and what a rollout and a method with
gradients add to measure the wiring. A rollout runs 32 tokens once more. A method with gradients
takes one backward pass through everything except the mixers, on the whole length.

With --recording: what it costs to record the calls of scan functions while a model runs, on the
model of mixers alone, which is registered, and on one whose scan is a Python function.

Runs take turns, one of each; numbers are medians, with 95% intervals of the median ratio.

    python benchmarks/wiring.py --layers 4 --length 1024
    python benchmarks/wiring.py --recording --cpu-time --repeats 25
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import _timing
import numpy as np
import torch
import transformers
from _timing import turns
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.capture import Request
from captum_ssm.capture import record as record_module
from captum_ssm.capture.record import record
from captum_ssm.discovery.frozen_scans import scans_frozen
from captum_ssm.discovery.scans import FunctionCall, candidate_functions, intercepted
from captum_ssm.metrics import bootstrap

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


class Written(nn.Module):
    """A mixer as people write them: the scan of mamba-130m is a function of five tensors."""

    def __init__(self, width: int, state: int = 16, rank: int = 48) -> None:
        super().__init__()
        inner = 2 * width
        self.sizes = [rank, state, state]
        self.in_proj = nn.Linear(width, 2 * inner)
        self.conv = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.x_proj = nn.Linear(inner, sum(self.sizes))
        self.dt_proj = nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(inner, 1))
        self.out_proj = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        u, gate = self.in_proj(x).chunk(2, -1)
        u = F.silu(self.conv(u.mT)[..., : x.shape[1]].mT)
        dt, B, C = self.x_proj(u).split(self.sizes, -1)
        y = written_scan(u, F.softplus(self.dt_proj(dt)), -self.A_log.exp(), B, C)
        return self.out_proj(y * F.silu(gate))


def written_scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
    """The scan of Mamba, one token at a time."""
    decay = (delta[..., None] * A).exp()
    added = (delta * u)[..., None] * B[:, :, None]
    h, out = torch.zeros_like(added[:, 0]), []
    for t in range(u.shape[1]):
        h = decay[:, t] * h + added[:, t]
        out.append((h * C[:, t, None]).sum(-1))
    return torch.stack(out, 1)


class Residual(nn.Module):
    """Mixers one after the other."""

    def __init__(self, mixers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(mixers)

    def forward(self, x: Tensor) -> Tensor:
        for mixer in self.mixers:
            x = x + mixer(x)
        return x


def summary(
    runs: dict[str, Callable[[], Any]], repeats: int, inner: dict[str, list[float]] | None = None
) -> dict[str, Any]:
    """The median seconds of each run by turns, and those relative to the forward, with intervals.

    ``inner`` are lists to which a run appends the seconds of what counts of it. The first turn
    warms up.
    """
    times = turns(*runs.values(), repeats=repeats + 1)
    seconds = dict(zip(runs, times, strict=True)) | (inner or {})
    seconds = {name: s[1:] for name, s in seconds.items()}
    found: dict[str, Any] = {f"{name}_s": float(np.median(s)) for name, s in seconds.items()}
    forward = torch.tensor(seconds.pop("forward"))
    for name, each in seconds.items():
        share = bootstrap(torch.tensor(each) / forward, statistic=partial(torch.quantile, q=0.5))
        found |= {name: share.value, f"{name}_interval": [share.low, share.high]}
    return found


def measure(model: nn.Module, length: int, repeats: int) -> dict[str, Any]:
    """Seconds of a forward, and of both measurements relative to it."""
    ids = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0))
    request = Request.of(model, None, ids)
    short = request.shortened(256)
    assert short is not None
    # The whole length: the time of the measurement itself, within a run that has its graph anyway.
    spent, real = [], record_module.measure

    def timed(*args: Any, **options: Any) -> Any:
        start = _timing.clock()
        found = real(*args, **options)
        spent.append(_timing.clock() - start)
        assert found.is_simple
        return found

    def whole() -> None:
        record_module.measure = timed
        try:
            record(request, wiring=True)
        finally:
            record_module.measure = real

    runs = {
        "forward": torch.no_grad()(request.run),
        "short": lambda: record(short, wiring=True),
        "whole": whole,
    }
    return summary(runs, repeats, {"whole": spent})


def record_scans(layers: int, length: int, repeats: int) -> list[dict[str, Any]]:
    """Seconds of a forward, of one whose scans are recorded, and of finding the functions."""
    calls: list[FunctionCall] = []

    def keep(call: FunctionCall) -> Any:
        calls.append(call)
        return call.run()

    width = SHAPE["hidden_size"]
    registered = models(layers)["mixers"]
    unregistered = Residual([Written(width) for _ in range(layers)])
    ids = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0))
    cases = {
        "registered": (registered, ids, partial(scans_frozen, registered)),
        "unregistered": (
            unregistered,
            torch.randn(1, length, width),
            partial(intercepted, keep, [written_scan]),
        ),
    }
    rows = []
    for name, (model, inputs, recording) in cases.items():

        def forward(around: Any = nullcontext, model: Any = model, given: Tensor = inputs) -> None:
            with torch.no_grad(), around():
                model(given)
            calls.clear()

        runs = {
            "forward": forward,
            "recorded": partial(forward, recording),
            "search": candidate_functions,
        }
        rows.append({"model": name, "layers": layers, "length": length, **summary(runs, repeats)})
    return rows


def main() -> None:
    """Measure and print."""
    parser = _timing.options(__doc__, "wiring", repeats=9)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument(
        "--recording", action="store_true", help="what it costs to record the calls of scans"
    )
    args = _timing.parsed(parser)
    if args.recording:
        rows = record_scans(args.layers, args.length, args.repeats)
    else:
        rows = [
            {"model": name, "layers": args.layers, "length": args.length}
            | measure(model, args.length, args.repeats)
            for name, model in models(args.layers).items()
        ]
    for row in rows:
        print(_timing.rounded(row))
    if args.recording:
        args.benchmark, args.output = "recording", args.output.with_name("recording.json")
    _timing.keep(args, rows, repeats=args.repeats)


if __name__ == "__main__":
    main()
