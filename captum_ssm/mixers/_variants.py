"""What a module may compute with the parts of S6, SSD or SS2D, each variant frozen by its adapter.

A variant reads the parts from the module of the call, so that it is an adapter of all modules of a
class. A trial is what a variant would give the output projection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.mixers._call import MixerCall
from captum_ssm.mixers._frozen_mixer import FrozenMixer
from captum_ssm.mixers._named import Parts, directions_of, form_of, parts_of
from captum_ssm.mixers._parts import identity
from captum_ssm.mixers.s6 import S6Scan
from captum_ssm.mixers.ssd import freeze_scan
from captum_ssm.mixers.vision import freeze_directions, freeze_four_directions

_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "SiLU(z)": F.silu,
    "sigmoid(z)": torch.sigmoid,
    "z": identity,
}
Variant = Callable[[MixerCall], FrozenMixer]


@dataclass(frozen=True)
class Trial:
    """What a variant computes.

    Args:
        variant (Callable): an adapter.
        gated (Tensor): its input of the output projection, ``(B, L, D)``.
        share (float): how much of it comes of the recurrence, by norms.
    """

    variant: Variant
    gated: Tensor
    share: float


def trials(call: MixerCall) -> Iterator[Callable[[], Iterator[Trial]]]:
    """Attempts of all variants that the parts of a module allow, the most usual first.

    An attempt raises where its variants do not fit the module.
    """
    form = form_of(call.module)
    if form == "S6":
        return _s6_trials(call)
    if form == "SSD":
        return _ssd_trials(call)
    return _ss2d_trials(call)


@dataclass(frozen=True, kw_only=True)
class S6Variant:
    """S6 in one direction, or in two."""

    directions: int = 1
    ahead: int | None = None
    z_first: bool = False
    act: bool = True
    bias_twice: bool = False
    log_rates: bool = True
    gate: str | None = "SiLU(z)"
    skip: bool = True
    halved: bool = False

    def __call__(self, call: MixerCall) -> FrozenMixer:
        """The frozen mixer of a recorded call."""
        parts = directions_of(call.module)[0]
        return self.freeze(call, call.linear(parts["in_proj"], call.tokens()))

    def __str__(self) -> str:
        conv = "a causal convolution" if not self.ahead else f"a convolution {self.ahead} ahead"
        said = {
            "S6": True,
            "in both directions": self.directions == 2,
            "halved": self.halved,
            "z before x": self.z_first,
            conv: True,
            "no activation": not self.act,
            "the bias of the step added twice": self.bias_twice,
            "A as it is": not self.log_rates,
            f"gate {self.gate}" if self.gate else "no gate": True,
            "no skip": not self.skip,
        }
        return ", ".join(text for text, is_so in said.items() if is_so)

    def freeze(self, call: MixerCall, projected: Tensor) -> FrozenMixer:
        """The same, with the output of the input projection already computed."""
        found = directions_of(call.module)
        ways = [found[min(n, len(found) - 1)] for n in range(self.directions)]
        u, z = _split(projected, _out_width(call), self.z_first)
        out_proj = call.module.out_proj
        return freeze_directions(
            call,
            u,
            z if self.gate else None,
            [self._scan(call, parts) for parts in ways],
            [parts.get("conv") for parts in ways],
            (lambda y: call.linear(out_proj, y), call.weight(out_proj)),
            halved=self.halved,
            ahead=self.ahead,
        )

    def _scan(self, call: MixerCall, parts: Parts) -> S6Scan:
        return S6Scan(
            x_proj=parts["x_proj"],
            dt_proj=parts["dt_proj"],
            A=call.decay_rate(parts["A"]) if self.log_rates else call.parameter(parts["A"]),
            D=parts.get("D") if self.skip else None,
            norms=tuple(parts.get(name) for name in ("dt_norm", "B_norm", "C_norm")),
            act=F.silu if self.act else None,
            gate=_GATES[self.gate or "z"],
            bias_twice=self.bias_twice,
        )


def _s6_trials(call: MixerCall) -> Iterator[Callable[[], Iterator[Trial]]]:
    module = call.module
    ways = directions_of(module)
    parts, width = ways[0], _out_width(call)
    projected = call.linear(parts["in_proj"], call.tokens())
    conv, A = parts.get("conv"), parts["A"]
    size = 1 if conv is None else conv.kernel_size[0]
    # Of an even kernel size, one token more may be read on either side.
    ahead = [None] if size < 2 else [None, *sorted({(size - 1) // 2, size // 2})]
    is_shared = all(way.get("conv") is conv for way in ways)
    orders: list[tuple[int, int | None]] = []
    for directions in sorted({len(ways), 1, 2}, key=lambda n: n != len(ways)):
        first = [0] if size > 1 and directions == 2 else []
        orders += [(directions, n) for n in (ahead + first if is_shared else [None])]
    structures = product(
        orders,
        (True, False),
        (False, True) if projected.shape[-1] == 2 * width else (False,),
        (False, True) if getattr(parts["dt_proj"], "bias", None) is not None else (False,),
        (True, False) if parts["rates"] == "A" and bool((A < 0).all()) else (True,),
    )
    for (directions, n), act, z_first, bias_twice, log_rates in structures:
        structure = S6Variant(
            directions=directions,
            ahead=n,
            act=act,
            z_first=z_first,
            bias_twice=bias_twice,
            log_rates=log_rates,
            gate=None,
        )
        yield lambda v=structure: _gated_and_skipped(v, call, projected, "D" in parts)  # type: ignore[misc]


def _gated_and_skipped(
    structure: S6Variant, call: MixerCall, projected: Tensor, has_skip: bool
) -> Iterator[Trial]:
    # All gates and skips of one run of the recurrences.
    mixer = structure.freeze(call, projected)
    _, z = _split(projected, _out_width(call), structure.z_first)
    added, skipped = torch.zeros_like(mixer.inputs), torch.zeros_like(mixer.inputs)
    for scan, order, _ in mixer.scans_in_order():
        back = slice(None) if order is None else torch.argsort(order)
        added = added + scan.recurrence.matvec(scan.values)[:, back]
        if scan.skip is not None:
            skipped = skipped + (scan.skip * scan.values)[:, back]
    for gate, skip, halved in product(
        [None] if z is None else [*_GATES],
        (True, False) if has_skip else (True,),
        (False, True) if structure.directions == 2 else (False,),
    ):
        factor = torch.full_like(mixer.inputs, 0.5 if halved else 1.0)
        if z is not None and gate is not None:
            factor = factor * _GATES[gate](z)
        whole = factor * (added + skipped if skip else added)
        variant = replace(structure, gate=gate, skip=skip, halved=halved)
        yield Trial(variant, whole, float((factor * added).norm() / whole.norm()))


@dataclass(frozen=True, kw_only=True)
class SSDVariant:
    """SSD with heads in groups."""

    groups: int
    norm_before_gate: bool | None
    gate: str = "SiLU(z)"
    skip: bool = True

    def __call__(self, call: MixerCall) -> FrozenMixer:
        """The frozen mixer of a recorded call."""
        parts = parts_of(call.module)
        H, D = parts["A"].numel(), _out_width(call)
        projected = call.linear(parts["in_proj"], call.tokens())
        limit = getattr(call.module, "time_step_limit", getattr(call.module, "dt_limit", None))
        module = SimpleNamespace(
            conv1d=parts["conv"],
            act=F.silu,
            dt_bias=parts["dt_bias"],
            A_log=parts["A"],
            D=parts.get("D") if self.skip else None,
            norm=parts.get("norm"),
        )
        z, mixed, step = projected.split([D, projected.shape[-1] - D - H, H], -1)
        return freeze_scan(
            call,
            projected=(z, mixed, step),
            width=D // H,
            groups=self.groups,
            limit=tuple(limit or (0.0, torch.inf)),
            norm_before_gate=self.norm_before_gate,
            out_proj=lambda y: call.linear(parts["out_proj"], y),
            out_weight=call.weight(parts["out_proj"]),
            parts=module,
            gate_function=_GATES[self.gate],
        )

    def __str__(self) -> str:
        groups = "" if self.groups == 1 else f" in {self.groups} groups"
        norm = {None: "no norm", True: "norm before gate", False: "norm after gate"}
        skip = "" if self.skip else ", no skip"
        return f"SSD{groups}, {norm[self.norm_before_gate]}, gate {self.gate}{skip}"


def _ssd_trials(call: MixerCall) -> Iterator[Callable[[], Iterator[Trial]]]:
    parts = parts_of(call.module)
    heads = parts["A"].numel()
    states = (parts["conv"].in_channels - _out_width(call)) // 2
    named = [getattr(call.module, name, None) for name in ("n_groups", "ngroups")]
    wanted = [g for g in (*named, 1, 2, 4, 8) if isinstance(g, int)]
    groups = [g for g in dict.fromkeys(wanted) if heads % g == 0 and states % g == 0]
    for g, before, gate, skip in product(
        groups,
        (False, True, None) if "norm" in parts else (None,),
        _GATES,
        (True, False) if "D" in parts else (True,),
    ):
        variant = SSDVariant(groups=g, norm_before_gate=before, gate=gate, skip=skip)
        yield lambda v=variant: _whole(v, call)  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class SS2DVariant:
    """Four directions over an image, whose tokens are given as ``(B, H, W, E)``."""

    z_first: bool = False
    act: bool = True

    def __call__(self, call: MixerCall) -> FrozenMixer:
        """The frozen mixer of a recorded call."""
        x = call.tokens()
        if x.dim() != 4:
            raise ValueError(f"tokens have shape {tuple(x.shape)}; expected (B, H, W, E).")
        projected = call.linear(call.module.in_proj, x.flatten(1, 2))
        u, z = _split(projected, _out_width(call), self.z_first)
        act = F.silu if self.act else identity
        return freeze_four_directions(call, u, z, (x.shape[1], x.shape[2]), act)

    def __str__(self) -> str:
        return (
            f"SS2D{', z before x' if self.z_first else ''}{'' if self.act else ', no activation'}"
        )


def _ss2d_trials(call: MixerCall) -> Iterator[Callable[[], Iterator[Trial]]]:
    for act, z_first in product((True, False), (False, True)):
        yield lambda v=SS2DVariant(z_first=z_first, act=act): _whole(v, call)  # type: ignore[misc]


def _whole(variant: Variant, call: MixerCall) -> Iterator[Trial]:
    mixer = variant(call)
    gated = mixer.gated_output()
    yield Trial(variant, gated, float(mixer.recurrence_share(gated)))


def _out_width(call: MixerCall) -> int:
    """D, the channels that the output projection takes."""
    width: Any = call.module.out_proj.in_features
    return int(width)


def _split(projected: Tensor, width: int, z_first: bool) -> tuple[Tensor, Tensor | None]:
    """What is mixed and what the gate is a function of, if there is a gate."""
    if projected.shape[-1] == width:
        return projected, None
    first, second = projected.split([width, width], -1)
    return (second, first) if z_first else (first, second)
