"""On a GPU: our scans, forward and backward, against the published kernels of the same recurrences.

mamba-ssm's selective scan (CUDA) and chunked scan of Mamba-2, fla's chunked kernels of a decay per
key and of the gated delta rule (all three in Triton, which compute products on tensor cores, in
float32 by TF32). Each side takes its inputs in the layout it likes best, in float32; the published
kernels also in bfloat16. Errors are relative to the largest entry, against the chunked PyTorch form
in float64.

    python benchmarks/kernels/published.py --lengths 2048 16384
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from _common import arguments, layer, linear_attention, relative_error
from _timing import keep, rounded, seconds
from torch import Tensor

from captum_ssm import kernels
from captum_ssm.kernels.diagonal import diagonal_scan_torch
from captum_ssm.kernels.linear_attention import linear_attention_scan_torch
from captum_ssm.utils.nested import map_tensors

DTYPES = (torch.float32, torch.bfloat16)


class Sides(NamedTuple):
    """One recurrence, by us and by others.

    Attributes:
        values (Tensor): in our layout.
        coefficients (Any): ours.
        ours (Callable): the scan of values and coefficients.
        form (Callable): its PyTorch form.
        theirs (Callable): the published kernel, given the same, in another dtype too.
    """

    values: Tensor
    coefficients: Any
    ours: Callable[..., Tensor]
    form: Callable[..., Tensor]
    theirs: Callable[..., Tensor]


def selective_scan(length: int) -> Sides:
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    def theirs(v: Tensor, c: Any) -> Tensor:
        channels_first = (x.transpose(1, 2) for x in (v, c.dt.to(v)))
        states_first = (x[:, :, 0].transpose(1, 2) for x in (c.B, c.C))
        return selective_scan_fn(*channels_first, c.A, *states_first).transpose(1, 2)

    c = layer(length)
    v = torch.randn(c.dt.shape, generator=torch.Generator().manual_seed(1))
    return Sides(v, c, kernels.diagonal_scan, diagonal_scan_torch, theirs)


def heads(length: int, theirs: Callable[..., Tensor], **sizes: Any) -> Sides:
    op = linear_attention(length, **sizes)
    names = ("query", "key", "log_decay", "erase", "probe", "bonus")
    c = kernels.LinearAttentionCoefficients(*(getattr(op, name) for name in names))
    shape = (*c.query.shape[:3], op.width)
    v = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return Sides(v, c, kernels.linear_attention_scan, linear_attention_scan_torch, theirs)


def chunked_scan(length: int) -> Sides:
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def theirs(v: Tensor, c: Any) -> Tensor:
        # The kernel multiplies what it decays by, and what it writes, by the step.
        dt = -c.log_decay[..., 0]
        one = -torch.ones(c.query.shape[2], device=v.device)
        return mamba_chunk_scan_combined(v / dt[..., None].to(v), dt, one, c.key, c.query, 128)

    return heads(length, theirs, heads=24, width=64)


def gated_linear_attention(length: int) -> Sides:
    from fla.ops.gla import chunk_gla

    def theirs(v: Tensor, c: Any) -> Tensor:
        return chunk_gla(c.query, c.key, v, c.log_decay, scale=1.0)[0]

    return heads(length, theirs, heads=8, width=128, per_key=True)


def gated_delta_rule(length: int) -> Sides:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def theirs(v: Tensor, c: Any) -> Tensor:
        # Keys of length one are written with a strength, which is the length of what we write.
        beta = c.key.norm(dim=-1)
        decay = c.log_decay[..., 0]
        return chunk_gated_delta_rule(c.query, c.probe, v, decay, beta, scale=1.0)[0]

    return heads(length, theirs, heads=16, width=128, delta=True)


KINDS: dict[str, Callable[[int], Sides]] = {
    "selective scan, 1536 channels of 16 (mamba-ssm)": selective_scan,
    "decay per head, 24 heads of 64, state 128 (mamba-ssm)": chunked_scan,
    "decay per key, 8 heads of 128, state 128 (fla)": gated_linear_attention,
    "gated delta rule, 16 heads of 128, state 128 (fla)": gated_delta_rule,
}


def in_dtype(c: Any, dtype: torch.dtype) -> Any:
    """Coefficients in a dtype, except for those that models compute in float32."""
    exact = ("A", "dt", "log_decay")
    names = [name for name, x in vars(c).items() if x is not None and name not in exact]
    return replace(c, **{name: getattr(c, name).to(dtype) for name in names})


def gradients(scan: Callable[..., Tensor], v: Tensor, c: Any) -> Callable[[], Any]:
    """A forward and backward pass with respect to the values and all coefficients."""
    leaves = map_tensors(lambda x: x.detach().requires_grad_(), {"v": v, "c": c})
    inputs = [leaves["v"], *(x for x in vars(leaves["c"]).values() if x is not None)]
    grad = torch.ones_like(v)
    return lambda: torch.autograd.grad(
        scan(leaves["v"], leaves["c"]), inputs, grad, allow_unused=True
    )


def measured(sides: Sides, repeats: int) -> dict[str, float]:
    """Times and errors of all sides."""
    v, c = map_tensors(lambda x: x.cuda(), (sides.values, sides.coefficients))
    expected = sides.form(*map_tensors(lambda x: x.double(), (v, c)))
    calls = {"ours": lambda: sides.ours(v, c), "form": lambda: sides.form(v, c)}
    passes = {"ours": gradients(sides.ours, v, c)}
    for dtype in DTYPES:
        given = v.to(dtype), in_dtype(c, dtype)
        name = str(dtype).removeprefix("torch.")
        calls[name] = lambda given=given: sides.theirs(*given)
        passes[name] = gradients(sides.theirs, *given)
    found: dict[str, float] = {}
    for name, call in calls.items():
        found[f"{name}_error"] = relative_error(call(), expected)
    times = seconds(*calls.values(), repeats=repeats)
    found |= {f"{name}_ms": 1e3 * s for name, s in zip(calls, times, strict=True)}
    times = seconds(*passes.values(), repeats=repeats)
    return found | {f"{n}_with_gradients_ms": 1e3 * s for n, s in zip(passes, times, strict=True)}


def main() -> None:
    args = arguments(__doc__, "published")
    rows = []
    for name, make in KINDS.items():
        for length in args.lengths or [2048, 16384]:
            rows.append({"kind": name, "length": length, **measured(make(length), args.repeats)})
            print(rounded(rows[-1]), flush=True)
    keep(args, rows, gpu=torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
