r"""Mixers of images, which scan their tokens in several orders.

Vision Mamba's bidirectional S6 (here, and the published fork of mamba-ssm whose ``Mamba`` has a
``bimamba_type``) and VMamba's four-direction SS2D. Each scan is an ordinary frozen mixer over the
tokens in its own order. Their outputs are added up in the image's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Self

from captum_ssm.mixers.call import MixerCall
from captum_ssm.mixers.families.s6 import coefficients, freeze_s6, freeze_scan
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.mixers.parts import ImageConv, activation_factor, projection, rms_scale
from captum_ssm.mixers.registry import adapts
from captum_ssm.models.ss2d import scan_orders
from captum_ssm.operators import PermutedOperator, SumOperator, TokenOperator


@dataclass(frozen=True, kw_only=True)
class FrozenScans(FrozenMixer):
    r"""A mixer that adds up scans of the same tokens, each in its own order.

    .. math::
        y = W_{out}\, \Big(c \sum_k P_k^\top y'_k + o\Big) + b_{out}

    where :math:`y'_k` is the gated output of scan k, an ordinary frozen mixer over the permuted
    tokens :math:`P_k u` with gate, norm and skip permuted likewise. ``"hidden"`` is the plain sum
    of the scans' recurrences in image order, after a convolution that reads later tokens if no scan
    does, or the map would not show that the mixer does; ``"unified"`` includes the factor c,
    whichever components are chosen. Values exist per scan only.

    Args:
        scans (tuple of FrozenMixer): the scans, over their own orders.
        orders (tuple of Tensor): ``(L,)`` each: the t-th token of scan k is token
            ``orders[k][t]`` of the image.
        scale (float, optional): c. Default: 1.0
    """

    scans: tuple[FrozenMixer, ...]
    orders: tuple[Tensor, ...]
    scale: float = 1.0

    @classmethod
    def of(cls, scans: Sequence[FrozenMixer], orders: Sequence[Tensor], **others: Any) -> Self:
        """At least one scan, with the recurrence, the inputs and the projection that follow."""
        first = scans[0]
        recurrences = [scan.recurrence for scan in scans]
        recurrence = in_image_order(recurrences, orders)
        if recurrence.is_causal:
            convs = [scan.image_conv for scan in scans]
            recurrence = in_image_order(recurrences, orders, convs)
        conv = first.image_conv
        if conv is None:
            inputs = first.inputs[:, torch.argsort(orders[0])]
        else:
            inputs = (
                conv.inputs if conv.order is None else conv.inputs[:, torch.argsort(conv.order)]
            )
        return cls(
            recurrence=recurrence,
            inputs=inputs,
            out_proj=first.out_proj,
            out_weight=first.out_weight,
            out_gate=first.out_gate,
            scans=tuple(scans),
            orders=tuple(orders),
            **others,
        )

    @property
    def values(self) -> Tensor:
        raise AttributeError(
            "a mixer of several scans has values per scan; read those of FrozenScans.scans."
        )

    def operator(
        self, formulation: str = "hidden", components: Iterable[str] | None = None
    ) -> TokenOperator:
        chosen = self._chosen(formulation, components)
        if formulation == "hidden":
            return self.recurrence
        parts = [scan.operator(formulation, chosen) for scan in self.scans]
        convs = [scan.image_conv if "conv" in chosen else None for scan in self.scans]
        total = in_image_order(parts, self.orders, convs)
        if self.scale != 1:
            total = total.scaled(torch.full_like(self.inputs, self.scale), None)
        return total

    def scans_in_order(self) -> list[tuple[FrozenMixer, Tensor | None, float]]:
        """The scans, their orders and their common factor."""
        return [(s, o, self.scale) for s, o in zip(self.scans, self.orders, strict=True)]

    def with_row_factors(self, factors: Sequence[Tensor]) -> FrozenMixer:
        pairs = zip(self.scans, factors, strict=True)
        scans = tuple(scan.with_row_factors([factor]) for scan, factor in pairs)
        return replace(self, scans=scans, scale=1.0)

    def detach_coefficients(self) -> Self:
        scans = tuple(scan.detach_coefficients() for scan in self.scans)
        return replace(super().detach_coefficients(), scans=scans)


def in_image_order(
    parts: Sequence[TokenOperator],
    orders: Sequence[Tensor],
    convs: Sequence[ImageConv | None] | None = None,
) -> TokenOperator:
    """The sum of operators, each over its own order of the tokens, after its convolution of them.

    A convolution that all of them share is applied to the sum.
    """
    in_order = [
        part if bool((order.diff() == 1).all()) else PermutedOperator(part, order)
        for part, order in zip(parts, orders, strict=True)
    ]
    shared = None if convs is None else convs[0]
    if convs is None or all(conv is shared for conv in convs):
        total = SumOperator(tuple(in_order))
        return total if shared is None else shared.before(total)
    pairs = zip(in_order, convs, strict=True)
    return SumOperator(tuple(p if conv is None else conv.before(p) for p, conv in pairs))


def _projection(call: MixerCall) -> dict[str, Any]:
    """The output projection, with the learned scale of its channels."""
    plain = projection(call, call.module.out_proj)
    gamma = getattr(call.module, "gamma", None)
    if gamma is None:
        return plain
    factor, apply = call.parameter(gamma), plain["out_proj"]
    weight = plain["out_weight"] * factor[:, None]
    return {"out_proj": lambda y: apply(y) * factor, "out_weight": weight}


@adapts("captum_ssm.models.vision_mamba.BidirectionalMamba")
def freeze_bidirectional(call: MixerCall) -> FrozenMixer:
    """Vision Mamba's mixer: ``v2``, ``v1`` or one direction."""
    return _freeze_kind(call, call.module.bimamba_type)


@adapts("mamba_ssm.modules.mamba_simple.Mamba")
def freeze_published(call: MixerCall) -> FrozenMixer:
    """mamba-ssm's ``Mamba``, and its forks with two directions, as in Vision Mamba's repository.

    Without their fast path the forks run one direction, whatever their ``bimamba_type``. Those
    that do not have one run a second direction wherever they have weights for it.
    """
    module = call.module
    usual = "v2" if hasattr(module, "conv1d_b") else "none"
    is_fast = getattr(module, "use_fast_path", True)
    kind = getattr(module, "bimamba_type", usual) if is_fast else "none"
    if kind == "none" and getattr(module, "gamma", None) is None:
        return freeze_s6(call)
    return _freeze_kind(call, kind)


def _freeze_kind(call: MixerCall, kind: str) -> FrozenMixer:
    module = call.module
    u, z = call.linear(module.in_proj, call.tokens()).chunk(2, -1)
    out = _projection(call)
    there = freeze_scan(call, u, z, _rates(call, module.A_log), out)
    if kind == "none":
        return there
    positions = torch.arange(u.shape[1], device=u.device)
    backward, rates = positions.flip(0), _rates(call, module.A_b_log)
    if kind == "v2":
        halved = getattr(module, "if_divide_out", getattr(module, "if_devide_out", False))
        back = freeze_scan(call, u.flip(1), z.flip(1), rates, out, suffix="_b")
        scale = 0.5 if halved else 1.0
        return FrozenScans.of((there, back), (positions, backward), scale=scale)
    # v1 scans the same values twice, with the same coefficients except the decay.
    again = coefficients(call, there.values.flip(1), rates)
    both = SumOperator((there.recurrence, PermutedOperator(again, backward)))
    return replace(there, recurrence=both, skip=2 * call.parameter(module.D))


def _rates(call: MixerCall, A_log: Tensor) -> Tensor:
    wide = torch.promote_types(A_log.dtype, torch.float32)
    return -torch.exp(A_log.detach().to(wide)).to(call.dtype)


@adapts("captum_ssm.models.ss2d.SS2D")
def freeze_ss2d(call: MixerCall) -> FrozenMixer:
    """VMamba's four-direction scan, with a layer norm of the scans' sum."""
    module = call.module
    u = call.linear(module.in_proj, call.tokens().flatten(1, -2))
    u, z = u.chunk(2, -1) if module.gated else (u, None)
    gate = None if z is None else F.silu(z)
    bias = None if module.conv2d.bias is None else call.parameter(module.conv2d.bias)
    image_conv = ImageConv(u, call.parameter(module.conv2d.weight)[:, 0], module.grid, bias)
    psi = image_conv.output
    activation = activation_factor(module.act, psi)
    values = activation * psi
    orders = tuple(scan_orders(module.grid, u.device))
    rates = _rates(call, module.A_logs).unflatten(0, (4, -1))
    names = ("x_proj_weight", "dt_projs_weight", "dt_projs_bias")
    weights = (call.parameter(getattr(module, name)) for name in names)
    recurrences = [
        coefficients(
            call,
            values[:, order],
            A,
            x_proj=partial(F.linear, weight=x_weight),
            dt_proj=partial(F.linear, weight=dt_weight, bias=dt_bias),
        )
        for order, A, x_weight, dt_weight, dt_bias in zip(orders, rates, *weights, strict=True)
    ]
    skips = call.parameter(module.Ds).view(4, -1)
    merged = in_image_order(recurrences, orders).matvec(values) + skips.sum(0) * values
    scale_of = rms_scale(call, module.out_norm)
    norm = scale_of(merged - merged.mean(-1, keepdim=True))
    offset = call.parameter(module.out_norm.bias)
    offset = offset if gate is None else offset * gate

    def readout(y: Tensor) -> Tensor:
        y = y - y.mean(-1, keepdim=True)
        y = y * scale_of(y)
        return offset + (y if gate is None else y * gate)

    out = _projection(call)
    scans = tuple(
        FrozenMixer(
            recurrence=recurrence,
            inputs=psi[:, order],
            **out,
            skip=skip,
            activation=activation[:, order],
            gate=None if gate is None else gate[:, order],
            gate_argument=None if z is None else z[:, order],
            norm=norm[:, order],
            centered=1,
            image_conv=image_conv,
        )
        for recurrence, skip, order in zip(recurrences, skips, orders, strict=True)
    )
    return FrozenScans.of(scans, orders, offset=offset, readout=readout)
