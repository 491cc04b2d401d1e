"""What of a model is supported, how exact each method is on it, and what each costs."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from captum_ssm._capture import FrozenModel, Request, freeze
from captum_ssm._capture.discovery import find_unknown_mixers
from captum_ssm._capture.record import record
from captum_ssm._cost import Costs
from captum_ssm._errors import UnsupportedModelError
from captum_ssm._hidden_attention import hidden_attention
from captum_ssm._memory import readable_bytes
from captum_ssm._supported import ERRORS, between, first_line, likeliest, support_of
from captum_ssm.attr import LaTIM, MambaLRP, MambaRollout, methods
from captum_ssm.mixers import MixerCall, find_adapter, find_mixers
from captum_ssm.mixers._registry import nearest_misses, supported_classes
from captum_ssm.models import VisionMamba

PROBE_LENGTH = 16


def report(model: nn.Module, length: int, *, with_weights: bool = True) -> None:
    """Print it all, for a language model or a `VisionMamba`, as it is found out.

    Costs are for ``length`` tokens. Without weights the model cannot be run.
    """
    if with_weights and not any(True for _ in find_mixers(model)):
        find_unknown_mixers(Request.of(model, None, _inputs(model, PROBE_LENGTH)))
    mixers = list(find_mixers(model))
    parameters = count(sum(p.numel() for p in model.parameters()))
    memory = readable_bytes(sum(p.nbytes for p in model.parameters()))
    weights = f", {memory} in memory" if with_weights else ""
    print(f"{type(model).__name__}, {parameters} parameters{weights}")
    if not mixers:
        raise UnsupportedModelError(
            f"{type(model).__name__} holds no token mixer that captum_ssm knows. Supported: "
            f"{supported_classes()}. Register a new one with captum_ssm.register_mixer. "
            f"{nearest_misses(model)}"
        )
    print(f"{len(mixers)} token mixers that captum_ssm knows:")
    kinds: dict[type[nn.Module], list[str]] = {}
    for path, module in mixers:
        kinds.setdefault(type(module), []).append(path)
    for kind, paths in kinds.items():
        print(f"  {len(paths):3d} x {kind.__name__}  {shortened(paths)}")
        print(f"        {_family(model.get_submodule(paths[0]))}")
    if not with_weights:
        print(f"outside the maps: {_counted(outside(model))}")
        print(
            "\nno weights were loaded, so nothing was run: without --config-only it is also\n"
            "said how exact the methods are on this model, and what they cost"
        )
        return
    probe = _inputs(model, PROBE_LENGTH)
    others = list(outside(model))
    frozen = freeze(
        Request.of(model, None, probe), also=lambda m: m in others, query=False, check=False
    )
    _print_outside(frozen, others)
    _print_exactness(model, probe, frozen)
    _print_costs(model, _inputs(model, length))


def _print_exactness(model: nn.Module, probe: Tensor, frozen: FrozenModel) -> None:
    latim = LaTIM(model, check=False)
    silu, gate = (
        [float(error.max()) for error in latim.layer_errors(probe, activation=activation)]
        for activation in ("silu", "gate")
    )
    groups: dict[tuple[str, int, bool], list[int]] = {}
    found = [support_of(frozen, layer) for layer in frozen.layers]
    for i, mixer in enumerate(found):
        groups.setdefault((mixer.kind, mixer.maps, mixer.problem is None), []).append(i)
    names = [shortened([found[i].name for i in group]) for group in groups.values()]
    width = max(24, *map(len, names))
    on = "an image of noise" if probe.dim() == 4 else f"{probe.shape[1]} random tokens"
    heads = f"{'maps':>6s} {'maps miss':>10s} {'latim misses':>13s} {'with gate':>10s}"
    print(f"\nhow exact, on {on}:")
    print(f"  {'mixer':{width}s} {heads}")
    for name, ((_, maps, fits), group) in zip(names, groups.items(), strict=True):
        error = max(found[i].error for i in group)
        missed = [_share(max(errors[i] for i in group)) for errors in (silu, gate)]
        verdict = "" if fits else "  NOT reproduced: methods raise ReconstructionError"
        print(
            f"  {name:{width}s} {maps:6d} {error:10.0e} {missed[0]:>13s} {missed[1]:>10s}{verdict}"
        )
    print(
        "  maps miss: the frozen mixer, of its output's norm\n"
        "  latim misses: the sum of a layer's vectors, of its output's norm; with gate: with\n"
        "  activation='gate' instead of 'silu', the default, which acts on each tap by itself"
    )
    print(f"  mamba-lrp: {_conserved(model, probe)}")


def _share(error: float) -> str:
    return "nothing" if error < 1e-4 else f"{100 * error:.3g}%"


def _conserved(model: nn.Module, probe: Tensor) -> str:
    method = MambaLRP(model, check=False)
    try:
        relevance, delta = method.attribute(
            probe, target=likeliest(Request.of(model, None, probe)), return_convergence_delta=True
        )
    except ERRORS as error:
        return f"not on this model ({first_line(error)})"
    total = float(relevance.sum())
    return (
        f"relevance adds up to {total:.4g}, the score is {total + float(delta):.4g}; the "
        "difference is what\n  bias terms contribute, and what functions without a rule lose"
    )


def _print_outside(frozen: FrozenModel, others: Sequence[nn.Module]) -> None:
    tokens, mixing = frozen.shape[1], set()
    if frozen.wiring.exchanged or frozen.wiring.is_mixed:
        mixing = {call.module for call in frozen.others if _mixes(call, tokens)}
    print(f"outside the maps: {_counted(m for m in others if m not in mixing)}")
    if mixing:
        mixing_kinds = _counted(m for m in others if m in mixing)
        print(f"  {mixing_kinds}: tokens act on one another there, which no map shows")
    print(fill(f"between the mixers: {between(frozen)}", 100, subsequent_indent="  "))


def outside(model: nn.Module) -> Iterator[nn.Module]:
    """The largest modules with weights that hold no mixer."""
    for child in model.children():
        if find_adapter(child) is not None or not any(True for _ in child.parameters()):
            continue
        if isinstance(child, nn.ModuleList) or any(True for _ in find_mixers(child)):
            yield from outside(child)
        else:
            yield child


def _mixes(call: MixerCall, tokens: int) -> bool:
    # Where tokens are mixed between the mixers: whether it is in this module, so that another first
    # token changes what it returns at a later one.
    first = next((i for i, value in enumerate(call.args) if torch.is_tensor(value)), None)
    if tokens < 2 or first is None or call.args[first].shape[1:2] != (tokens,):
        return False
    args = list(call.args)
    args[first] = args[first].clone()
    args[first][:, 0] = call.args[first][:, -1]
    with torch.no_grad():
        found, again = replace(call, args=tuple(args)).run().output, call.run().output
    return found.shape[1:2] == (tokens,) and not torch.equal(found[:, 1:], again[:, 1:])


def _counted(modules: Iterable[nn.Module]) -> str:
    found = Counter(type(module).__name__ for module in modules)
    return ", ".join(f"{n} x {name}" if n > 1 else name for name, n in found.items()) or "nothing"


def _calls(model: nn.Module, target: int) -> dict[str, Callable[..., Any]]:
    # What is estimated: every method as it is by default, and what takes more than a default row.
    found: dict[str, Callable[..., Any]] = {}
    for name, method in methods().items():
        given = {"target": target} if method.needs_target() else {}
        found[name] = partial(method(model).attribute, **given)
    rollout = MambaRollout(model)
    return found | {
        "rollout, sign='clamp'": partial(rollout.attribute, sign="clamp"),
        "rollout of every token": rollout.rollout,
        "hidden_attention, one mean per layer": partial(hidden_attention, model, reduction="mean"),
        "hidden_attention, all maps": partial(hidden_attention, model),
    }


def _print_costs(model: nn.Module, inputs: Tensor) -> None:
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
    calls = _calls(model, likeliest(Request.of(model, None, inputs[:, :PROBE_LENGTH])))
    width = max(map(len, calls))
    print(f"  {'':{width}s} {'memory':>11s} {'forward passes':>15s}")
    took = f"1 ({_readable_time(forward.seconds)})"
    print(f"  {'a forward pass':{width}s} {readable_bytes(forward.total_bytes):>11s} {took:>15s}")
    for name, call in calls.items():
        try:
            found = costs.of(call)
        except ERRORS as error:
            print(f"  {name:{width}s} not on this model: {first_line(error)}")
            continue
        fits = "" if free is None or found.total_bytes < free else "  more than is free"
        times = f"{found.forwards:,.1f}" if found.forwards < 10 else f"{found.forwards:,.0f}"
        memory = readable_bytes(found.total_bytes)
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
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found and device.type == "cpu" else None


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
    home = sys.modules.get(getattr(adapter, "__module__", ""))
    return first_line(home.__doc__ or "") if home is not None else ""
