r"""A mixer that no adapter is registered for, measured.

The module runs once more on its recorded arguments, under a graph, with its scans and depthwise
convolutions cut off. What is left acts on each token by itself. So the gradient at a scan's output
from the input of the output projection, with the denominators of norms constant, is the product of
gate and norm, entry by entry, and says which token of the module each token of the scan is. The
gradient at a convolution's output from the scan's values is the activation's factor. Nothing about
the module's attributes is assumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm._errors import UnsupportedModelError
from captum_ssm._graph import Entries, Point, entries, gradients, readers, readers_by_bits
from captum_ssm._rules import ruled
from captum_ssm.mixers._call import MixerCall
from captum_ssm.mixers._cut import CutConv, CutLinear, CutRun, CutScan, run_cut
from captum_ssm.mixers._frozen_mixer import FrozenMixer, Product
from captum_ssm.mixers.vision import FrozenScans, in_image_order
from captum_ssm.operators import TokenOperator
from captum_ssm.operators.part import examples, part_of

# Rounding of float32, of values that are compared with what they should be.
_ROUNDING = 1e-4


def freeze_measured(
    call: MixerCall,
    functions: Iterable[Callable[..., Any]] | None = None,
    *,
    partly: bool = True,
) -> FrozenMixer:
    """The mixer of a recorded call of any module that holds scans.

    Args:
        call (MixerCall): the recorded call.
        functions (iterable of Callable, optional): those whose calls may be scans; None for all
            of the process. Default: None
        partly (bool, optional): whether the scans and their orders will do. Default: True

    Returns:
        FrozenMixer: with ``partly``, where only the scans and their orders could be measured, one
        that has ``"hidden"`` maps alone, and says what is missing when it is asked for more.

    Raises:
        UnsupportedModelError: saying what could not be measured.
    """
    with torch.inference_mode(False), torch.no_grad():
        measurement = _Measurement(call, run_cut(call, functions))
        try:
            return measurement.mixer()
        except _NotMeasured as error:
            found = measurement.recurrence(error.why) if partly else None
            if found is None or not _is_silent(run_cut(call, functions, silent=True)):
                raise UnsupportedModelError(str(error)) from None
            return found


@dataclass(frozen=True, kw_only=True)
class FrozenRecurrence(FrozenMixer):
    """The scans of a module whose other parts could not be measured: ``"hidden"`` maps alone.

    Its scans were compared with what they returned when they were called.

    Args:
        recorded (Tensor): what the module returned, ``(B, L, E)``.
        missing (UnsupportedModelError): says what could not be measured.
    """

    recorded: Tensor
    missing: UnsupportedModelError

    def operator(
        self, formulation: str = "hidden", components: Iterable[str] | None = None
    ) -> TokenOperator:
        self._chosen(formulation, components)
        if formulation != "hidden":
            raise self.missing
        return self.recurrence

    def scans_in_order(self) -> list[tuple[FrozenMixer, Tensor | None, float]]:
        raise self.missing

    def mean_gated_gradient(self, gradient: Tensor) -> Tensor:
        raise self.missing

    def gated_output(self, multiply: Product = torch.mul) -> Tensor:
        """What the module returned: nothing of it is computed again."""
        return self.recorded

    def recurrence_share(self, gated: Tensor) -> Tensor:
        return gated.new_ones(gated.shape[0])

    def output(self, multiply: Product = torch.mul) -> Tensor:
        return self.recorded


class _NotMeasured(UnsupportedModelError):
    def __init__(self, call: MixerCall, why: str) -> None:
        self.why = why
        super().__init__(
            f"{call.path} ({type(call.module).__name__}) holds scans, but cannot be measured: "
            f"{why}. Register an adapter with captum_ssm.register_mixer(module_type, freeze)."
        )


def _is_silent(run: CutRun) -> bool:
    # Whether a module without its scans and convolutions returns nothing of its tokens.
    if not run.output.requires_grad:
        return True
    root = Point.of(run.output)
    noise = root.noise(torch.Generator().manual_seed(0))
    (g,) = gradients([root], [noise], [Point.of(run.tokens)])
    return g is None or not bool((g != 0).any())


@dataclass(frozen=True)
class _Direction:
    # Channels start .. stop - 1 of some examples (rows) of a scan, which run over the module's
    # tokens in one order. The other tensors are in the scan's order.
    cut: CutScan
    rows: Tensor  # (B,), or (B, k) where a scan has heads or channels in its batch
    start: int
    stop: int
    order: Tensor  # (L,)
    channels: Tensor  # (D,) of the input of the output projection
    factor: Tensor  # (B, L, D)

    def of(self, x: Tensor) -> Tensor:
        """The direction's part of ``x (B', L, D')``."""
        return examples(x, self.rows, slice(self.start, self.stop))

    @property
    def values(self) -> Tensor:
        return self.of(self.cut.scan.values.detach())

    @property
    def mixed(self) -> Tensor:
        return self.of(self.cut.leaf.detach())

    @property
    def operator(self) -> TokenOperator:
        return part_of(self.cut.scan.operator, self.rows, self.start, self.stop)

    @property
    def skip(self) -> Tensor | None:
        skip = self.cut.scan.skip
        if skip is None:
            return None
        return (
            self.of(skip.expand_as(self.cut.leaf))
            if skip.dim() > 1
            else skip[self.start : self.stop].to(self.cut.leaf.dtype).repeat(self.rows[0].numel())
        )

    def where(self) -> Tensor:
        """The direction's entries among those of the scan, ``(B' L, D')`` bool."""
        found = torch.zeros(self.cut.leaf.shape, dtype=torch.bool, device=self.cut.leaf.device)
        found[self.rows, :, self.start : self.stop] = True
        return found.flatten(0, 1)


@dataclass(frozen=True)
class _Entry:
    # How a direction's values come from a convolution; tensors in the scan's order.
    conv: CutConv
    psi: Tensor  # (B, L, D), its output
    factor: Tensor  # (B, L, D), the activation's
    bias: Tensor  # (D,), of the convolution, and added after it
    position: Tensor  # (B, L), among the tokens of its output
    channels: Tensor  # (D,), of the convolution
    inputs: Tensor  # (B, L, D), its input, in the module's order
    taps: Tensor  # (D, K) or (D, Kh, Kw)
    center: tuple[int, ...]  # the tap of the token itself
    order: Tensor  # (L,), of the module's tokens in the convolution
    grid: tuple[int, int] | None


class _Measurement:
    def __init__(self, call: MixerCall, run: CutRun) -> None:
        self.call, self.run = call, run
        output = run.output
        self.B, self.E = output.shape[0], output.shape[-1]
        self.T = output.numel() // self.E
        self.L = self.T // self.B
        self.tokens = Point.of(run.tokens)
        if not run.scans:
            raise self.refused("none of the functions that it calls proved to be a scan")
        self.root, self.gated, self.out_proj, self.out_weight = self._projection()
        self.centered = False

    def refused(self, why: str) -> _NotMeasured:
        return _NotMeasured(self.call, why)

    def mixer(self) -> FrozenMixer:
        """The frozen mixer, its tokens flattened to ``(B, L, E)``."""
        directions = [d for cut in self.run.scans for d in self._directions(cut)]
        channels = directions[0].channels
        if any(not torch.equal(d.channels, channels) for d in directions):
            raise self.refused("its scans go to different channels of the output projection")
        found = [self._entry(d) for d in directions]
        mixer = self._assembled(directions, found, channels)
        return self._with_offset(mixer, directions, found)

    def recurrence(self, why: str) -> FrozenMixer | None:
        """The scans alone, if their orders can be read off the module's output."""
        root, found = Point.of(self.run.output), []
        try:
            for cut in self.run.scans:
                leaf = Point.of(cut.leaf)
                lands = readers_by_bits(root, leaf, by_channel=True)
                if lands is None or bool((lands < 0).any()):
                    return None
                ones = torch.ones_like(cut.leaf).flatten(0, 1)
                channels = torch.arange(leaf.width, device=lands.device).expand_as(lands)
                found += self._parted(cut, Entries(lands, channels, ones))
            for direction in found:
                self._entry(direction)
        except _NotMeasured:
            return None
        first, orders = found[0], tuple(d.order for d in found)
        eye = torch.eye(first.values.shape[-1], dtype=first.values.dtype)
        return FrozenRecurrence(
            recurrence=in_image_order([d.operator for d in found], orders),
            inputs=first.values[:, torch.argsort(first.order)],
            out_proj=lambda y: y,
            out_weight=eye.to(first.values.device),
            recorded=self.run.output.detach().reshape(self.B, self.L, self.E),
            missing=UnsupportedModelError(
                f"{self.call.path} ({type(self.call.module).__name__}) has no adapter, and of what "
                f'it does only the scans could be measured: {why}. Methods of "hidden" maps and '
                "MambaLRP work; for the others register an adapter with "
                "captum_ssm.register_mixer(module_type, freeze)."
            ),
        )

    def _projection(self) -> tuple[Point, Tensor, Callable[[Tensor], Tensor], Tensor]:
        # The last linear layer whose output is the module's.
        flat = self.run.output.detach().reshape(self.B, self.L, self.E)
        if not self.run.output.requires_grad:
            raise self.refused("its output does not depend on its scans")
        root = Point.of(self.run.output)
        for linear in reversed(self.run.linears):
            y, weight = linear.output, linear.weight
            if y.numel() != flat.numel() or y.shape[-1] != self.E or y.shape[0] != self.B:
                continue
            with ruled([root.edge.node], [Point.of(y).edge.node]):
                link = entries(root, Point.of(y))
            scale = _column_scale(link, self.T, self.E)
            if scale is None:
                continue
            rebuilt = y.detach().reshape(flat.shape) * scale
            if not _close(rebuilt, flat):
                continue
            gated = linear.inputs.reshape(self.B, self.L, -1)
            return linear.point, gated, _projected(linear, scale), weight * scale[:, None]
        eye = torch.eye(self.E, dtype=flat.dtype, device=flat.device)
        return root, flat, lambda x: x, eye

    def _directions(self, cut: CutScan) -> list[_Direction]:
        leaf = Point.of(cut.leaf)
        with ruled([self.root.edge.node], [leaf.edge.node], centered=False) as carries:
            exits = entries(self.root, leaf)
            self.centered |= any(c and "LayerNorm" in n.name() for n, c in carries.items())
        if exits is None:
            raise self.refused(f"what it does after {cut.scan.name} mixes channels or tokens")
        if bool((exits.token < 0).any()):
            raise self.refused(f"a part of what {cut.scan.name} returns does not reach its output")
        return self._parted(cut, exits)

    def _parted(self, cut: CutScan, exits: Entries) -> list[_Direction]:
        # The directions of a scan, by the module's token that each of its tokens reaches.
        rows, length, width = cut.leaf.shape
        table = exits.token.reshape(rows * length, width)
        kinds, group = torch.unique(table, dim=1, return_inverse=True)
        found: list[_Direction] = []
        for n in range(kinds.shape[1]):
            channels = (group == n).nonzero()[:, 0]
            start, stop = int(channels[0]), int(channels[-1]) + 1
            if len(channels) != stop - start:
                raise self.refused(f"the directions of {cut.scan.name} lie between each other")
            goes = exits.channel.reshape(rows, length, width)
            first = goes[:, 0, start]
            for at, order in self._orders(kinds[:, n].reshape(rows, length), first):
                to = examples(goes, at, slice(start, stop))
                if bool((to != to[:1, :1]).any()):
                    raise self.refused(f"{cut.scan.name} does not keep its channels")
                factor = exits.factor.reshape(rows, length, width)
                factor = examples(factor, at, slice(start, stop)).to(cut.leaf.dtype)
                found.append(_Direction(cut, at, start, stop, order, to[0, 0], factor))
        return sorted(found, key=lambda direction: direction.start)

    def _orders(self, lands: Tensor, channel: Tensor) -> list[tuple[Tensor, Tensor]]:
        # The rows of a scan's batch that run in one order, with that order; lands (B', L). Rows of
        # one example are told apart by the channel (B',) that they go to.
        example, token = lands // self.L, lands % self.L
        if bool((example != example[:, :1]).any()) or lands.shape[1] != self.L:
            raise self.refused("a scan does not run over all tokens of one example")
        kinds, group = torch.unique(token, dim=0, return_inverse=True)
        every = torch.arange(self.L, device=lands.device)
        found = []
        for n in range(len(kinds)):
            rows = (group == n).nonzero()[:, 0]
            rows = rows[torch.argsort(channel[rows], stable=True)]
            rows = rows[torch.argsort(example[rows, 0], stable=True)]
            several = max(1, len(rows) // self.B)
            owners = torch.arange(self.B, device=rows.device).repeat_interleave(several)
            if not torch.equal(example[rows, 0], owners):
                raise self.refused("examples of the batch are scanned in different orders")
            if several > 1:
                rows = rows.view(self.B, several)
                if bool((channel[rows].diff(dim=1) <= 0).any()):
                    raise self.refused("several scans in one order go to the same channels")
            if not torch.equal(torch.sort(kinds[n]).values, every):
                raise self.refused("a scan's tokens are not the module's")
            found.append((rows, kinds[n]))
        return sorted(found, key=lambda one: int(one[0].flatten()[0]))

    def _entry(self, direction: _Direction) -> _Entry | None:
        values = direction.cut.values
        if values is None:
            raise self.refused(f"the values of {direction.cut.scan.name} have no graph")
        for conv in reversed(self.run.convs):
            psi = Point.of(conv.leaf, 1)
            with ruled([values.edge.node], [psi.edge.node]) as carries:
                if not carries[values.edge.node]:
                    continue
                link = entries(values, psi, where=direction.where())
            if link is None:
                raise self.refused(f"what it does before {direction.cut.scan.name} mixes channels")
            if bool((link.token >= 0).any()):
                return self._through(direction, conv, link)
        lands = self._read_by(values, direction)
        if lands is not None and not torch.equal(lands, direction.order.expand_as(lands)):
            raise self.refused("a scan's result lands on another token than its values come from")
        return None

    def _read_by(self, values: Point, direction: _Direction) -> Tensor | None:
        # The module's token that each token of the scan is made of, (B, L).
        length = self.L
        rows = direction.rows.view(self.B, -1, 1)
        steps = torch.arange(length, device=rows.device)
        at = (rows * length + steps).flatten()
        # Rows of one example count as one.
        example = torch.arange(self.B, device=rows.device)[:, None, None]
        labels = torch.zeros(values.tokens, dtype=torch.long, device=rows.device)
        labels[at] = (example * length + steps).expand(-1, rows.shape[1], -1).flatten()
        channels = torch.arange(direction.start, direction.stop)
        found = readers(values, self.tokens, channels, tokens=at, labels=labels)
        if found is None:
            raise self.refused(
                f"before {direction.cut.scan.name} it mixes tokens by something that is neither a "
                "scan nor a depthwise convolution"
            )
        if bool((found < 0).any()):
            return None
        position = found.reshape(self.B, length) % length
        lands = torch.argsort(position, dim=1)
        return lands

    def _through(self, direction: _Direction, conv: CutConv, link: Entries) -> _Entry:
        psi_shape = conv.leaf.shape  # (B'', C, ...)
        size = psi_shape[2:].numel()
        place, channel = (link.token >= 0).nonzero().unbind(1)
        token, to = link.token[place, channel], link.channel[place, channel]
        # In the scan's order: the position and channel in the convolution of each entry.
        index = torch.full(direction.cut.leaf.shape, -1, device=place.device).flatten(0, 1)
        index[token, to] = place * psi_shape[1] + channel
        index = direction.of(index.reshape(direction.cut.leaf.shape))
        position, channels = index // psi_shape[1], index % psi_shape[1]
        if bool((index < 0).any() | (channels != channels[:1, :1]).any()) or bool(
            (position != position[..., :1]).any()
        ):
            raise self.refused(f"a convolution reaches a part of {direction.cut.scan.name} only")
        position, channels = position[..., 0], channels[0, 0]
        psi = Point.of(conv.leaf, 1).flat(conv.leaf.detach())[position][..., channels]
        factor = link.factor.to(psi)[position][..., channels]
        # A bias may be added after the convolution.
        added = direction.values - factor * psi
        bias = (added * factor).sum((0, 1)) / factor.square().sum((0, 1)).clamp(min=1e-300)
        if not _is_small(added - bias * factor, direction.values):
            raise self.refused(
                f"what it does between a convolution and {direction.cut.scan.name} is not an "
                "activation"
            )
        if _is_small(added, direction.values):
            bias = torch.zeros_like(bias)
        psi = psi + bias
        if conv.bias is not None:
            bias = bias + conv.bias[channels]
        # By the module's tokens, (B, L).
        back = torch.argsort(direction.order)
        q = position[:, back]
        if conv.point is None:
            raise self.refused("a convolution's input has no graph")
        p = self._conv_input(conv.point, q // size, direction)
        inputs = conv.point.flat(conv.inputs)[p][..., channels]
        grid, order, center, taps = self._geometry(conv, p, q, channels)
        return _Entry(
            conv, psi, factor, bias, position, channels, inputs, taps, center, order, grid
        )

    def _conv_input(self, point: Point, example: Tensor, direction: _Direction) -> Tensor:
        # The position in the convolution's input that reads each of the module's tokens, (B, L).
        size = point.tokens // point.shape[0]
        rows = example[:, 0]
        if bool((example != rows[:, None]).any()):
            raise self.refused("a convolution does not run over all tokens of one example")
        at = (rows[:, None] * size + torch.arange(size, device=rows.device)).flatten()
        found = readers(point, self.tokens, tokens=at)
        if found is None or bool((found < 0).any()):
            raise self.refused(
                "before a convolution it mixes tokens by something that is neither a scan nor a "
                "depthwise convolution"
            )
        found = found.reshape(self.B, self.L)
        if bool((found // size != rows[:, None]).any()):
            raise self.refused("a convolution reads other examples of the batch")
        return found

    def _geometry(
        self, conv: CutConv, p: Tensor, q: Tensor, channels: Tensor
    ) -> tuple[tuple[int, int] | None, Tensor, tuple[int, ...], Tensor]:
        # Of a convolution whose input position p and output position q belong to one token.
        here, there = conv.inputs.shape[2:], conv.leaf.shape[2:]
        taps = conv.weight[channels]
        order = torch.argsort(p[0])
        steps = p.gather(1, order.expand_as(p)).diff(dim=1)
        if bool((steps != 1).any()):
            raise self.refused("a convolution does not run over neighboring tokens")
        if len(here) == 1:
            offset = p % here[0] + conv.padding[0] - q % there[0]
            if bool((offset != offset[0, 0]).any()):
                raise self.refused("a convolution's tokens are shifted against the scan's")
            return None, order, (int(offset[0, 0]),), taps
        grid = (int(here[0]), int(here[1]))
        odd = all(
            k % 2 and pad == k // 2 for k, pad in zip(taps.shape[1:], conv.padding, strict=True)
        )
        same = torch.equal(p, q) and here == there and here.numel() == self.L
        if not odd or not same or not bool((order.diff() == 1).all()):
            raise self.refused("a convolution over the image is not centered on its tokens")
        return grid, order, (taps.shape[1] // 2, taps.shape[2] // 2), taps

    def _assembled(
        self, directions: list[_Direction], found: list[_Entry | None], channels: Tensor
    ) -> FrozenMixer:
        norm, after = self._norm(directions[0], channels)
        self.after = after
        own = all(e is None or _is_inside(e, d) for e, d in zip(found, directions, strict=True))
        scans = []
        for d, e in zip(directions, found, strict=True):
            causal = e is not None and own
            scan = FrozenMixer(
                recurrence=d.operator,
                inputs=d.values if e is None else e.psi,
                out_proj=self.out_proj,
                out_weight=self.out_weight[:, channels],
                skip=d.skip,
                activation=None if e is None else e.factor,
                gate=_unless_one(d.factor if norm is None else after[:, d.order]),
                norm=None if norm is None else norm[:, d.order],
                centered=self.centered,
            )
            if causal:
                assert e is not None
                width = e.taps.shape[1]
                scan = replace(
                    scan,
                    inputs=e.inputs[:, d.order],
                    conv=F.pad(e.taps, (0, e.center[0] - width + 1)),
                    conv_bias=e.bias,
                )
            scans.append(scan.with_values(d.values))
        orders = tuple(d.order for d in directions)
        straight = bool((orders[0].diff() == 1).all())
        taps = None if own else _shared_taps(found, self.L)
        if len(scans) == 1 and straight and taps is None:
            return scans[0]
        recurrence = in_image_order([scan.recurrence for scan in scans], orders)
        inputs = scans[0].inputs[:, torch.argsort(orders[0])]
        if taps is None:
            return FrozenScans(
                recurrence=recurrence,
                inputs=inputs,
                out_proj=self.out_proj,
                out_weight=self.out_weight[:, channels],
                scans=tuple(scans),
                orders=orders,
            )
        first = found[0]
        assert first is not None
        if recurrence.is_causal:
            # The map alone would not show what is read from later tokens.
            recurrence = recurrence.scaled(None, None).convolved(*taps)
        return FrozenScans(
            recurrence=recurrence,
            inputs=first.inputs,
            out_proj=self.out_proj,
            out_weight=self.out_weight[:, channels],
            scans=tuple(scans),
            orders=orders,
            image_conv=taps[0],
            grid=taps[1],
        )

    def _norm(self, direction: _Direction, channels: Tensor) -> tuple[Tensor | None, Tensor]:
        # The factor of a norm after the scans, and that of what follows it, in the module's order;
        # without such a norm, None and the whole factor.
        whole = direction.factor[:, torch.argsort(direction.order)]
        leaf = Point.of(direction.cut.leaf)
        for norm in reversed(self.run.norms):
            if norm.output.tokens * norm.output.width != self.T * len(channels):
                continue
            with ruled([norm.inputs.edge.node], [leaf.edge.node]) as carries:
                if not carries[norm.inputs.edge.node]:
                    continue
            with ruled([self.root.edge.node], [norm.output.edge.node]) as carries:
                found = entries(self.root, norm.output) if carries[self.root.edge.node] else None
            if found is None or found.factor.shape != (self.T, len(channels)):
                continue
            rows = torch.arange(self.T, device=channels.device)[:, None]
            if bool((found.token != rows).any() | (found.channel != channels).any()):
                continue
            after = found.factor.reshape(whole.shape).to(whole)
            return whole / after, after
        return None, whole

    def _with_offset(
        self, mixer: FrozenMixer, directions: list[_Direction], found: list[_Entry | None]
    ) -> FrozenMixer:
        # What is added to the scans: a bias, as it is or times the gate; a skip. Channels that no
        # scan reaches go to the output projection as they are.
        gated, out_proj, channels = self.gated, self.out_proj, directions[0].channels
        G = gated.shape[-1]
        if len(channels) < G or not torch.equal(channels, torch.arange(G, device=channels.device)):
            self._check_side(channels)

            def around(y: Tensor) -> Tensor:
                whole = gated.to(y).expand(*y.shape[:-1], G).clone()
                whole[..., channels] = y
                return out_proj(whole)

            mixer = _with_projection(mixer, around)
        want = gated[..., channels]
        rest = want - mixer.gated_output().to(want)
        if _is_small(rest, want):
            return mixer
        mixer = _with_skips(mixer, self._skips(directions, found))
        rest = want - mixer.gated_output().to(want)
        if _is_small(rest, want):
            return mixer
        for factor in (torch.ones_like(rest), self.after.to(rest)):
            bias = (rest * factor).sum((0, 1)) / factor.square().sum((0, 1))
            if self.T > 1 and _close(bias * factor, rest):
                return replace(mixer, offset=bias * factor)
        raise self.refused(
            "it adds something to its scans that depends on its tokens (a residual, a branch next "
            "to the scan)"
        )

    def _check_side(self, channels: Tensor) -> None:
        side = torch.ones(self.gated.shape[-1], dtype=torch.bool, device=channels.device)
        side[channels] = False
        found = readers(self.root, self.tokens, side.nonzero()[:, 0])
        here = torch.arange(self.T, device=channels.device)
        if found is None or bool(((found != here) & (found >= 0)).any()):
            raise self.refused("a branch next to its scans mixes tokens")

    def _skips(
        self, directions: list[_Direction], found: list[_Entry | None]
    ) -> list[Tensor | None]:
        # The factor of each direction's values that is added after its scan, (B, L, D) in the
        # scan's order. Directions of one convolution have one sum of them, given to the first.
        skips: list[Tensor | None] = []
        seen: list[CutConv] = []
        for direction, entry in zip(directions, found, strict=True):
            skip = None
            if entry is not None and not any(entry.conv is conv for conv in seen):
                seen.append(entry.conv)
                psi = Point.of(entry.conv.leaf, 1)
                with ruled([self.root.edge.node], [psi.edge.node], centered=False):
                    link = entries(self.root, psi)
                if link is not None:
                    at = link.factor.to(entry.factor)[entry.position][..., entry.channels]
                    skip = at / (entry.factor * direction.factor)
            skips.append(skip)
        return skips


def _projected(linear: CutLinear, scale: Tensor) -> Callable[[Tensor], Tensor]:
    def out_proj(x: Tensor) -> Tensor:
        bias = None if linear.bias is None else linear.bias.to(x)
        return F.linear(x, linear.weight.to(x), bias) * scale.to(x)

    return out_proj


def _unless_one(factor: Tensor) -> Tensor | None:
    return None if bool((factor == 1).all()) else factor


def _is_inside(entry: _Entry, direction: _Direction) -> bool:
    # Whether the convolution runs in the scan's own order and looks back only.
    causal = entry.grid is None and entry.center[0] >= entry.taps.shape[1] - 1
    return causal and torch.equal(entry.order, direction.order)


def _shared_taps(found: list[_Entry | None], length: int) -> tuple[Tensor, tuple[int, int]] | None:
    # Centered taps of one convolution before all scans, in the module's order.
    first = found[0]
    if first is None or not bool((first.order.diff() == 1).all()):
        return None
    for entry in found:
        if entry is None or entry.conv is not first.conv:
            return None
        if not torch.equal(entry.channels, first.channels):
            return None
    if first.grid is not None:
        return first.taps, first.grid
    before = first.center[0]
    after = first.taps.shape[1] - 1 - before
    side = max(before, after)
    return F.pad(first.taps, (side - before, side - after))[:, None], (1, length)


def _with_projection(mixer: FrozenMixer, out_proj: Callable[[Tensor], Tensor]) -> FrozenMixer:
    if isinstance(mixer, FrozenScans):
        scans = tuple(_with_projection(scan, out_proj) for scan in mixer.scans)
        return replace(mixer, out_proj=out_proj, scans=scans)
    return replace(mixer, out_proj=out_proj).with_values(mixer.values)


def _with_skips(mixer: FrozenMixer, skips: list[Tensor | None]) -> FrozenMixer:
    if isinstance(mixer, FrozenScans):
        scans = zip(mixer.scans, skips, strict=True)
        return replace(mixer, scans=tuple(_with_skips(scan, [skip]) for scan, skip in scans))
    (skip,) = skips
    if skip is None:
        return mixer
    total = skip if mixer.skip is None else mixer.skip + skip
    return replace(mixer, skip=total).with_values(mixer.values)


def _column_scale(link: Entries | None, T: int, E: int) -> Tensor | None:
    # The factor per channel where each entry is read by the same one, or None.
    if link is None:
        return None
    rows = torch.arange(T, device=link.token.device)[:, None]
    columns = torch.arange(E, device=link.token.device)
    if bool((link.token != rows).any() | (link.channel != columns).any()):
        return None
    scale = link.factor[:1]
    return scale[0].float() if _close(scale.expand_as(link.factor), link.factor) else None


def _close(a: Tensor, b: Tensor) -> bool:
    return _is_small(a.double() - b.double(), b)


def _is_small(x: Tensor, of: Tensor) -> bool:
    return float(x.norm()) <= _ROUNDING * float(of.norm())
