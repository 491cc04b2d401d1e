"""List a model's token mixers, check that they are reproduced, and estimate each method's cost."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from captum_ssm.attr import LaTIM, MambaLRP, MambaRollout, methods
from captum_ssm.capture import Request
from captum_ssm.capture.record import record
from captum_ssm.cli.arguments import check_model
from captum_ssm.cli.loading import add_loading, check_device, load_config, load_model, quiet
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.inspection.cost import Costs
from captum_ssm.inspection.implicit_attention import hidden_attention
from captum_ssm.inspection.support import (
    ERRORS,
    Support,
    aligned,
    counted,
    first_line,
    kinds_of,
    likeliest,
    outside,
    supported,
)
from captum_ssm.mixers import find_adapter, find_mixers
from captum_ssm.mixers.registry import nearest_misses, supported_classes
from captum_ssm.models import VisionMamba
from captum_ssm.utils.memory import readable_bytes

PROBE_LENGTH = 16


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("model", help="a hub name, or a folder")
    parser.add_argument(
        "--length", type=int, default=1024, help="tokens the costs are for. Default: 1024"
    )
    parser.add_argument(
        "--config-only",
        action="store_true",
        help="read the configuration alone: lists the mixers without loading weights",
    )
    add_loading(parser)


def run(args: argparse.Namespace) -> None:
    """Print the report, for a language model or a `VisionMamba`, as it is computed."""
    if args.length < 1:
        raise ValueError(f"--length is {args.length}; expected at least one token.")
    check_model(args.model)
    check_device(args.device)
    with quiet():
        if args.config_only:
            _print_without_weights(load_config(args.model))
            return
        model = load_model(args)
        memory = readable_bytes(sum(p.nbytes for p in model.parameters()))
        print(f"{_named(model)}, {memory} in memory")
        probe = _inputs(model, PROBE_LENGTH)
        support = supported(model, probe)
        target = likeliest(Request.of(model, None, probe))
        _print_mixers(model)
        for line in support.surroundings:
            print(fill(line, 100, subsequent_indent="  "))
        _print_exactness(model, probe, target, support)
        _print_costs(model, _inputs(model, args.length), target)


def _print_without_weights(model: nn.Module) -> None:
    print(_named(model))
    _print_mixers(model)
    print(f"outside the maps: {counted(kinds_of(outside(model)))}")
    print(
        "\nno weights were loaded, so nothing was run: without --config-only it is also\n"
        "said how exact the methods are on this model, and what they cost"
    )


def _named(model: nn.Module) -> str:
    return f"{type(model).__name__}, {count(sum(p.numel() for p in model.parameters()))} parameters"


def _print_mixers(model: nn.Module) -> None:
    kinds: dict[type[nn.Module], list[str]] = {}
    for path, module in find_mixers(model):
        kinds.setdefault(type(module), []).append(path)
    if not kinds:
        raise UnsupportedModelError(
            f"{type(model).__name__} holds no token mixer that captum_ssm knows. Supported: "
            f"{supported_classes()}. Register a new one with captum_ssm.register_mixer. "
            f"{nearest_misses(model)}"
        )
    print(f"{sum(map(len, kinds.values()))} token mixers that captum_ssm knows:")
    for kind, paths in kinds.items():
        print(f"  {len(paths):3d} x {kind.__name__}  {shortened(paths)}")
        print(f"        {_family(model.get_submodule(paths[0]))}")


def _print_exactness(model: nn.Module, probe: Tensor, target: Any, support: Support) -> None:
    latim = LaTIM(model, check=False)
    silu, gate = (
        [float(error.max()) for error in latim.layer_errors(probe, activation=activation)]
        for activation in ("silu", "gate")
    )
    groups: dict[tuple[str, int, bool], list[int]] = {}
    for i, mixer in enumerate(support.mixers):
        groups.setdefault((mixer.kind, mixer.maps, mixer.problem is None), []).append(i)
    rows: list[tuple[str, ...]] = [("mixer", "maps", "maps miss", "latim misses", "with gate", "")]
    for (_, maps, is_reproduced), group in groups.items():
        name = shortened([support.mixers[i].name for i in group])
        error = max(support.mixers[i].error for i in group)
        missed = [_share(max(errors[i] for i in group)) for errors in (silu, gate)]
        verdict = "" if is_reproduced else "NOT reproduced: methods raise ReconstructionError"
        rows.append((name, str(maps), f"{error:.0e}", *missed, verdict))
    on = "an image of noise" if probe.dim() == 4 else f"{probe.shape[1]} random tokens"
    print(f"\nhow exact, on {on}:")
    for line in aligned(rows, right=range(1, 5)):
        print(f"  {line}")
    print(
        "  maps miss: the frozen mixer, of its output's norm\n"
        "  latim misses: what the sum of a layer's vectors lacks of its output, in the paper's\n"
        "  form, activation='silu'; with gate: in the default form, activation='gate'"
    )
    print(f"  mamba-lrp: {_conserved(model, probe, target)}")


def _share(error: float) -> str:
    return "nothing" if error < 1e-4 else f"{100 * error:.3g}%"


def _conserved(model: nn.Module, probe: Tensor, target: Any) -> str:
    method = MambaLRP(model, check=False)
    try:
        relevance, delta = method.attribute(probe, target=target, return_convergence_delta=True)
    except ERRORS as error:
        return f"not on this model ({first_line(error)})"
    total = float(relevance.sum())
    return (
        f"relevance adds up to {total:.4g}, the score is {total + float(delta):.4g}; the "
        "difference is what\n  bias terms contribute, and what functions without a rule lose"
    )


def _calls(model: nn.Module, target: Any) -> dict[str, Callable[..., Any]]:
    # What is estimated: every method as it is by default, and what takes more than a default row.
    rollout = MambaRollout(model)
    return {
        name: partial(method(model).attribute, target=target if method.needs_target() else None)
        for name, method in methods().items()
    } | {
        "rollout, sign='clamp'": partial(rollout.attribute, sign="clamp"),
        "rollout of every token": rollout.rollout,
        "hidden_attention, one mean per layer": partial(hidden_attention, model, reduction="mean"),
        "hidden_attention, all maps": partial(hidden_attention, model),
    }


def _print_costs(model: nn.Module, inputs: Tensor, target: Any) -> None:
    costs = Costs(Request.of(model, None, inputs))
    forward = costs.of_forward()
    tokens = inputs.shape[1]
    what = f"one text of {tokens:,} token{'s' if tokens > 1 else ''}"
    if inputs.dim() == 4:
        tokens = record(costs.request).shape[1]
        what = f"one image of {inputs.shape[2]} x {inputs.shape[3]} pixels, {tokens:,} tokens"
    is_measured = costs.lengths == [costs.length]
    how = "measured" if is_measured else "extrapolated from calls on fewer"
    free = _free_bytes(inputs.device)
    print(f"\nfor {what}, {how}:")
    calls = _calls(model, target)
    width = max(map(len, calls))
    took = f"1 ({_readable_time(forward.seconds)})"
    print(f"  {'':{width}s} {'memory':>11s} {'forward passes':>15s}")
    print(f"  {'a forward pass':{width}s} {readable_bytes(forward.total_bytes):>11s} {took:>15s}")
    for name, call in calls.items():
        try:
            cost = costs.of(call)
        except ERRORS as error:
            print(f"  {name:{width}s} not on this model: {first_line(error)}")
            continue
        fits = "" if free is None or cost.total_bytes < free else "  more than is free"
        times = f"{cost.forwards:,.1f}" if cost.forwards < 10 else f"{cost.forwards:,.0f}"
        memory = readable_bytes(cost.total_bytes)
        print(f"  {name:{width}s} {memory:>11s} {times:>15s}{fits}", flush=True)
    available = "" if free is None else f"; free on {inputs.device}: {readable_bytes(free)}"
    print(f"  memory: the most at a time, in addition to the weights{available}")


def _free_bytes(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    free = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return free[0] if free and device.type == "cpu" else None


def _inputs(model: nn.Module, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    if isinstance(model, VisionMamba):
        weight = model.patch_embed.proj.weight
        shape = (1, weight.shape[1], *model.image_size)
        return torch.randn(shape, generator=generator).to(weight)
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    ids = torch.randint(embeddings.num_embeddings, (1, length), generator=generator)
    return ids.to(embeddings.weight.device)


def shortened(paths: Sequence[str]) -> str:
    """Module paths that differ in one number as one: ``layers.{0-2, 4}.mixer``."""
    if len(paths) == 1:
        return paths[0]
    parts = [path.split(".") for path in paths]
    varying = [i for i, column in enumerate(zip(*parts, strict=False)) if len(set(column)) > 1]
    same_length = len({len(p) for p in parts}) == 1
    if not same_length or len(varying) != 1 or not all(p[varying[0]].isdigit() for p in parts):
        return f"{paths[0]} .. {paths[-1]}"
    at = varying[0]
    numbers = [int(p[at]) for p in parts]
    splits = np.flatnonzero(np.diff(numbers) != 1) + 1
    ends = [(run[0], run[-1]) for run in np.split(numbers, splits)]
    runs = [str(first) if first == last else f"{first}-{last}" for first, last in ends]
    shown = [*runs[:2], "..", runs[-1]] if len(runs) > 4 else runs
    return ".".join([*parts[0][:at], "{" + ", ".join(shown) + "}", *parts[0][at + 1 :]])


def count(value: float) -> str:
    """A number with its unit: ``1.3 G``."""
    for unit in ("", " k", " M", " G"):
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:,.3g} T" if value < 999.5 else f"{value:,.0f} T"


def _readable_time(seconds: float) -> str:
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{1000 * seconds:.0f} ms"


def _family(module: nn.Module) -> str:
    adapter: Callable[..., object] | None = find_adapter(module)
    module_of_adapter = sys.modules.get(getattr(adapter, "__module__", ""))
    return first_line(getattr(module_of_adapter, "__doc__", None) or "")
