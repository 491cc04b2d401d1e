"""What of a model can be explained, and how exactly, found out by running it on random input."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.attr import LaTIM, MambaLRP, methods
from captum_ssm.capture import Request
from captum_ssm.capture.record import record
from captum_ssm.cli.loading import MODEL, add_loading, check_loading, load_config, load_model, quiet
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.inspection.cost import Costs
from captum_ssm.inspection.implicit_attention import hidden_attention
from captum_ssm.inspection.support import ERRORS, first_line, kinds_of, outside, supported
from captum_ssm.inspection.support_report import Support, counted, indented, shortened
from captum_ssm.kernels import extension_report
from captum_ssm.mixers import find_mixers
from captum_ssm.mixers.registry import nearest_misses, supported_classes
from captum_ssm.models import VisionMamba
from captum_ssm.utils.memory import readable_bytes
from captum_ssm.utils.progress import progress

PROBE_LENGTH = 16


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    parser.add_argument(
        "--length",
        type=int,
        metavar="N",
        help="Also estimate the memory that each method needs on a text of N tokens, or on an "
        "image (any N). It runs each method a few times.",
    )
    parser.add_argument(
        "--config-only",
        action="store_true",
        help="Read the configuration alone: the command lists the mixers without loading weights.",
    )
    add_loading(parser)


def run(args: argparse.Namespace) -> None:
    """Print the report, for a language model or a `VisionMamba`."""
    if args.length is not None and args.length < 1:
        raise ValueError(f"--length is {args.length}; expected at least one token.")
    check_loading(args)
    with quiet():
        if args.config_only:
            _print_without_weights(load_config(args.model))
            return
        model = load_model(args)
        memory = readable_bytes(sum(p.nbytes for p in model.parameters()))
        probe = _inputs(model, PROBE_LENGTH)
        what = "an image of noise" if probe.dim() == 4 else f"{PROBE_LENGTH} random tokens"
        print(f"{_named(model)}, {memory} in memory, run on {what}\n", flush=True)
        support = supported(model, probe)
        print(f"{support}\n")
        for line in (_latim(model, probe, support), _mamba_lrp(model, probe, support.target)):
            print(fill(line, 100, subsequent_indent="  "))
        report = extension_report()
        print(fill(report[0].upper() + report[1:], 100, subsequent_indent="  "))
        if args.length is not None:
            _print_memory(model, _inputs(model, args.length), support.target)


def _print_without_weights(model: nn.Module) -> None:
    kinds: dict[str, list[str]] = {}
    for path, module in find_mixers(model):
        kinds.setdefault(type(module).__name__, []).append(path)
    if not kinds:
        raise UnsupportedModelError(
            f"{type(model).__name__} holds no token mixer that captum_ssm knows. Supported: "
            f"{supported_classes()}. Register a new one with captum_ssm.register_mixer. "
            f"{nearest_misses(model)}"
        )
    print(f"{_named(model)}\n\nMixers, the layers in which tokens read from one another:")
    for kind, paths in kinds.items():
        print(f"  {len(paths):3d} x {kind}  {shortened(paths)}")
    print(
        f"Other layers: {counted(kinds_of(outside(model)))}\n\n"
        "Nothing was run, since no weights were loaded. Without --config-only the report says\n"
        "which methods explain the model, and how exactly."
    )


def _named(model: nn.Module) -> str:
    return f"{type(model).__name__}, {count(sum(p.numel() for p in model.parameters()))} parameters"


def _latim(model: nn.Module, probe: Tensor, support: Support) -> str:
    if (problem := support.methods["latim"]) is not None:
        return f"LaTIM does not work on this model: {problem}"
    latim = LaTIM(model, check=False)
    missing = {
        activation: max(float(error.max()) for error in errors)
        for activation in ("gate", "silu")
        if (errors := latim.layer_errors(probe, activation=activation))
    }
    told = {name: "nothing" if x < 1e-4 else f"{100 * x:.3g}%" for name, x in missing.items()}
    return (
        f"LaTIM: the sum of a layer's contributions misses its output by {told['gate']} with "
        f"activation='gate', the default, and by {told['silu']} with activation='silu', the "
        "paper's."
    )


def _mamba_lrp(model: nn.Module, probe: Tensor, target: Any) -> str:
    method = MambaLRP(model, check=False)
    try:
        relevance, delta = method.attribute(probe, target=target, return_convergence_delta=True)
    except ERRORS as error:
        return f"MambaLRP does not work on this model: {first_line(error)}"
    total = float(relevance.sum())
    return (
        f"MambaLRP: relevance adds up to {total:.4g}, and the explained score is "
        f"{total + float(delta):.4g}; the rest is from bias terms, and from functions without a "
        "rule."
    )


def _print_memory(model: nn.Module, inputs: Tensor, target: Any) -> None:
    costs = Costs(Request.of(model, None, inputs))
    needs = [("the model itself", costs.of_forward().total_bytes)]
    calls: dict[str, Callable[..., Any]] = {
        name: partial(method(model).attribute, target=target if method.needs_target() else None)
        for name, method in methods().items()
    }
    calls["a map per layer (explain --maps)"] = partial(hidden_attention, model, reduction="mean")
    rows = []
    for name, call in progress(calls.items(), "methods"):
        try:
            needs.append((name, costs.of(call).total_bytes))
        except ERRORS as error:
            rows.append((name, f"does not work on this model: {first_line(error)}"))
    free = _free_bytes(inputs.device)
    for name, count in needs:
        fits = free is None or count < free
        rows.append((name, f"{readable_bytes(count):>9s}{'' if fits else ', more than is free'}"))
    what = f"a text of {inputs.shape[1]:,} tokens"
    if inputs.dim() == 4:
        tokens = record(costs.request).shape[1]
        what = f"an image of {inputs.shape[2]} x {inputs.shape[3]} pixels, {tokens:,} tokens"
    how = "measured" if costs.lengths == [costs.length] else "extrapolated from shorter texts"
    print(f"\nMemory in addition to the weights, for {what}, {how}:")
    for line in indented(rows):
        print(line)
    if free is not None:
        print(f"Free on {inputs.device}: {readable_bytes(free)}")


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


def count(value: float) -> str:
    """A number with its unit: ``1.3 G``."""
    for unit in ("", " k", " M", " G"):
        if value < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:,.3g} T" if value < 999.5 else f"{value:,.0f} T"
