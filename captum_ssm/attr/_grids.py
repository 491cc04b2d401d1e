r"""ALTI-Logit through mixers that work on different tokens: grids, orders, U-shapes.

Also where the score is read from one residual stream by no norm or head that is known. Each mixer
adds its output y to a residual stream. Let the score's coefficients :math:`d` at y be the gradient
along the ways that lead past all later mixers, norms and gates frozen as in MambaLRP. Then the
score is, except for bias terms,

.. math::
    s = \langle d_0, h \rangle + \sum_\lambda \langle d_\lambda, y_\lambda \rangle,

where h is the stream before the first mixer, and each y is the sum of its vectors. What the score
reads of the inputs past h has their values times its gradient. Relevance is mixed within a layer by
ALTI, and carried from one grid to the one before by the measured transport, whose rows are shares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from captum_ssm._capture import FrozenLayer, FrozenModel, Request
from captum_ssm._capture.checking import check_finite
from captum_ssm._capture.recording import require_graph
from captum_ssm._capture.wiring import INPUT, Wiring
from captum_ssm._errors import UnsupportedModelError
from captum_ssm._graph import Point, is_read_past
from captum_ssm._nested import tensors_in, with_first
from captum_ssm._rules import is_norm, ruled, without_rule
from captum_ssm.attr._alti import Alti
from captum_ssm.attr._contributions import Contributions
from captum_ssm.attr._norms import first_input
from captum_ssm.attr._relevance import of_constants, times, warn_of_unruled
from captum_ssm.attr._residual import feeding_norm
from captum_ssm.attr.mamba_lrp import Rules, has_a_rule
from captum_ssm.mixers import MixerCall, find_adapter, find_mixers
from captum_ssm.mixers._reordered import in_order
from captum_ssm.mixers._unfused import fused_norms
from captum_ssm.scans import intercepted

# Norms of PyTorch, which are single nodes of the graph.
_RULED = (nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)


@dataclass(frozen=True)
class _Cut:
    # Where a mixer leaves the graph, and the stream before it: in the graph, and its values. The
    # same of what the mixer was given, which is the stream where no norm is between.
    exit: Point
    stream: Point | None
    before: Tensor
    given: Point | None
    tokens: Tensor

    def after(self, norm: MixerCall) -> _Cut:
        """The same of a mixer whose tokens are those of a norm."""
        given = next(tensors_in((norm.args, norm.kwargs)))
        stream = Point.of(given).before_move(norm.channels) if given.requires_grad else None
        return replace(self, stream=stream, before=first_input(norm).detach())

    def reading(self, is_given_stream: bool | None) -> _Cut:
        """The same, if it is known whether the mixer is given the stream."""
        if is_given_stream:
            return replace(self, stream=self.given, before=self.tokens)
        if is_given_stream is False and self.stream is self.given:
            return replace(self, stream=None)
        return self


@dataclass(frozen=True)
class CutGraph:
    """The graph of a run whose mixers were cut off: how the score reads what they return.

    Args:
        cuts (list of _Cut): of the mixers' calls, in forward order.
        score (Tensor): ``(B,)``, with its graph.
        starts (list of tuple): where the graph begins, and the values there.
        of_inputs (Callable): turns relevance of the starts into that of the inputs.
    """

    cuts: list[_Cut]
    score: Tensor
    starts: list[tuple[Point, Tensor]]
    of_inputs: Callable[[list[Tensor]], list[Tensor]]

    @classmethod
    def of(cls, frozen: FrozenModel) -> CutGraph | None:
        """That of the run that a model was frozen at, if it was kept and tells all of it.

        None where a function has no rule, which the replacement of its module may have, where a
        mixer's stream is not known to be the input of a norm that is a module, and for ids.
        """
        live, ways = frozen.live, frozen.wiring.inputs
        if live is None or live.score is None or not _obeys_rules(live.request.module):
            return None
        inputs = live.request.inputs
        if len(ways) != len(inputs) or not all(x.is_floating_point() for x in inputs):
            return None
        norms = [one for one in live.others if is_norm(one.module)]
        cuts = []
        for layer, call, port in zip(frozen.layers, live.calls, live.ports, strict=True):
            given = None if port.entry is None else port.entry.before_move(call.channels)
            norm = feeding_norm(call, [one for one in norms if one.order < call.order])
            if norm is None and not frozen.wiring.stages[layer.stage].is_given_stream:
                return None
            cut = _Cut(port.exit, given, call.tokens(), given, call.tokens())
            cuts.append(cut if norm is None else cut.after(norm))
        # It begins at the inputs themselves.
        graph = cls(cuts, live.score, [(way.leaf, way.values) for way in ways], list)
        with graph._ruled() as carries:
            return None if without_rule(carries) else graph

    def coefficients(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Those of the score at what each mixer returned, and at the stream before it.

        Zero at a mixer that the score does not read; None where no graph leads to the stream.
        """
        require_graph(self.score)
        ends = [cut.exit for cut in self.cuts]
        streams = [cut.stream.edge for cut in self.cuts if cut.stream is not None]
        edges = [*(end.edge for end in ends), *streams]
        with self._ruled() as carries:
            if not carries[self.score.grad_fn]:
                raise of_constants()
            warn_of_unruled(without_rule(carries))
            found = torch.autograd.grad(
                self.score.sum(), edges, allow_unused=True, retain_graph=True
            )
        exits = [
            torch.zeros(one.shape, dtype=one.dtype, device=one.device) if g is None else g.detach()
            for one, g in zip(ends, found[: len(ends)], strict=True)
        ]
        rest = iter(found[len(ends) :])
        return exits, [
            None if cut.stream is None else _channels_last(next(rest), cut.stream)
            for cut in self.cuts
        ]

    def relevance_past(self, stream: Point, direction: Tensor) -> list[Tensor]:
        """What inputs add to the score past the mixers and a stream: times the gradient, by input.

        Args:
            stream (Point): before the first mixer.
            direction (Tensor): the score's coefficients there, channels last.

        Returns:
            list of Tensor: in the inputs' shapes; empty where all that the score reads goes through
            the stream.
        """
        root = Point.of(self.score, None)
        if not any(is_read_past(root, point, stream) for point, _ in self.starts):
            return []
        edges, values = [point.edge for point, _ in self.starts], [x for _, x in self.starts]
        options: dict[str, Any] = {"allow_unused": True, "retain_graph": True}
        with self._ruled():
            whole = torch.autograd.grad(self.score.sum(), edges, **options)
            seed = stream.unflat(direction.flatten(0, -2))
            through = torch.autograd.grad(stream.edge, edges, seed, **options)
        pairs = zip(times(values, whole), times(values, through), strict=True)
        return self.of_inputs([a - b for a, b in pairs])

    @contextmanager
    def _ruled(self) -> Iterator[dict[Any, bool]]:
        points = [*(cut.exit for cut in self.cuts), *(point for point, _ in self.starts)]
        nodes = [point.edge.node for point in points]
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            ruled([self.score.grad_fn], nodes) as carries,
        ):
            yield carries


class _Norms(TorchFunctionMode):
    # Tells what norms are given and return.
    def __init__(self, note: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        y = func(*args, **kwargs)
        if func in (F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm):
            self.note(args[0] if args else kwargs["input"], y)
        return y


class CutMixers(Rules):
    """A run in which what a mixer returns starts a new graph, and all else is frozen."""

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self._cuts: list[_Cut] = []
        self._norms: list[MixerCall] = []
        self._is_after_norm = False

    def needs_graph(self, module: nn.Module) -> bool:
        return find_adapter(module) is None

    @torch.enable_grad()
    def __call__(self, call: MixerCall) -> Any:
        if find_adapter(call.module) is None:
            if is_norm(call.module):
                self._norms.append(call)
                self._is_after_norm = True
            return super().__call__(call)
        check_finite(call)
        self.made.append(None)
        norm = feeding_norm(call, self._norms)
        tokens, own = call.tokens().detach(), call.given_tokens()
        given = Point.of(own).before_move(call.channels) if own.requires_grad else None
        output = call.output.detach().clone().requires_grad_()
        stream = None if self._is_after_norm else given
        cut = _Cut(Point.of(output), stream, tokens, given, tokens)
        self._cuts.append(cut if norm is None else cut.after(norm))
        self._is_after_norm = False
        return with_first(call.result, output)

    @contextmanager
    def noting_norms(self) -> Iterator[None]:
        """Know norms that are functions, and what they are given."""

        def note(x: Tensor, y: Tensor) -> None:
            if x.requires_grad and x.shape == y.shape:
                self._norms.append(MixerCall("", nn.Identity(), (x,), {}, y))

        fused = fused_norms()
        with _Norms(note), intercepted(lambda call: fused[call.source](call), fused):
            yield

    def graph(self, score: Tensor) -> CutGraph:
        """That of the run, in which ``score (B,)`` was computed."""
        starts = [leaf for _, _, leaf in self.embedded]
        starts += [one for one in self.inputs if one.requires_grad]

        def of_inputs(relevance: list[Tensor]) -> list[Tensor]:
            of_start = dict(zip(map(id, starts), relevance, strict=True))
            leaves = self.leaves()
            found = [of_start[id(leaf.tensor)] for part in leaves for leaf in part]
            return self.of_inputs(leaves, found)

        return CutGraph(self._cuts, score, [(Point.of(one), one) for one in starts], of_inputs)


@dataclass(frozen=True)
class _Step:
    # A stage of mixers side by side: their coefficients, the stream before them and its
    # coefficients, (B, T, E).
    layers: list[FrozenLayer]
    directions: list[Tensor]
    before: Tensor
    before_direction: Tensor

    def mixed(self) -> Tensor:
        return torch.stack([layer.call.output.to(self.before) for layer in self.layers]).sum(0)


@dataclass(frozen=True)
class Grids:
    """A frozen model's layers, each on its own tokens, and how the score reads what they add.

    Args:
        frozen (FrozenModel): the layers, and what lies between their grids.
        steps (dict of int to _Step): by stage of its wiring.
        score (Tensor): ``(B,)``.
        past (list of Tensor, optional): relevance, in the shape of each input, of what the score
            reads of it past the stream before the first mixer. Default: (), for nothing
    """

    frozen: FrozenModel
    steps: dict[int, _Step]
    score: Tensor
    past: Sequence[Tensor] = ()

    @classmethod
    def of(cls, frozen: FrozenModel, graph: CutGraph) -> Grids:
        """Read the coefficients off the graph.

        Args:
            frozen (FrozenModel): of a run as it is.
            graph (CutGraph): of the same run, or of another one of the same request.

        Raises:
            UnsupportedModelError: where relevance could be lost, or counted twice, on the way.
        """
        _check_shares(frozen.require_wiring())
        stages = frozen.wiring.stages
        given = [stages[layer.stage].is_given_stream for layer in frozen.layers]
        cuts = [cut.reading(one) for cut, one in zip(graph.cuts, given, strict=True)]
        graph = replace(graph, cuts=cuts)
        exits, streams = graph.coefficients()
        B = frozen.shape[0]
        found: dict[int, list[tuple[FrozenLayer, Tensor, _Cut, Tensor | None]]] = {}
        for one in zip(frozen.layers, exits, cuts, streams, strict=True):
            found.setdefault(one[0].stage, []).append(one)
        steps = {stage: _step(group, B) for stage, group in found.items()}
        stream, direction = next(
            (one.stream, at_stream)
            for _, _, one, at_stream in found[min(found)]
            if one.stream is not None and at_stream is not None
        )
        past = graph.relevance_past(stream, direction)
        score = graph.score.detach().to(frozen.layers[0].call.dtype)
        scaled = {one.name: one for step in steps.values() for one in step.layers}
        layers = [scaled[layer.name] for layer in frozen.layers]
        return cls(replace(frozen, live=None, layers=layers), steps, score, past)

    def at_level(self, level: int, mode: str | None) -> Grids:
        """Only the layers of one grid, from which relevance is interpolated if ``mode`` says how.

        The score is then the part that leads past all mixers of later grids.
        """
        stages = self.frozen.stages_of(level)
        frozen = self.frozen if mode is None else self.frozen.from_level(level, mode)
        steps = {i: step for i, step in self.steps.items() if i in stages}
        score = _dot(steps[min(steps)].before_direction, steps[min(steps)].before)
        for step in steps.values():
            for layer, direction in zip(step.layers, step.directions, strict=True):
                score = score + _dot(direction, layer.call.output)
        return Grids(frozen, steps, score)

    def at_layer(self, layer: FrozenLayer) -> Grids:
        """Only what one layer adds to the score; relevance is not mixed by the layers before."""
        step = self.steps[layer.stage]
        (direction,) = (
            d for one, d in zip(step.layers, step.directions, strict=True) if one is layer
        )
        alone = replace(step, layers=[layer], directions=[direction])
        return Grids(self.frozen, {layer.stage: alone}, _dot(direction, layer.call.output))

    def relevance(
        self, activation: str, *, with_stream: bool, advance: Callable[[float], None]
    ) -> list[Tensor]:
        """Relevance of each input's tokens.

        Args:
            activation (str): one of :data:`~captum_ssm.attr._contributions.ACTIVATIONS`.
            with_stream (bool): whether the stream before the first mixer is decomposed too.
            advance (Callable): told after each piece of work what part of a layer it was.

        Returns:
            list of Tensor: ``(B, S)`` by input.
        """
        wiring, B = self.frozen.wiring, self.frozen.shape[0]
        first = min(self.steps)

        def step(i: int, w: Tensor) -> dict[int, Tensor]:
            if i not in self.steps:
                return {i: w}
            one = self.steps[i]
            parts = [Contributions.of(self.frozen, [layer], activation) for layer in one.layers]
            if bool((w != 0).any()):
                whole = (
                    parts[0]
                    if len(parts) == 1
                    else Contributions.of(self.frozen, one.layers, activation)
                )
                alti = Alti(whole, one.before + one.mixed(), one.before)
                w = alti.carry(w[:, None], 0.0, advance)[0][:, 0]
            else:
                advance(1)
            for part, direction in zip(parts, one.directions, strict=True):
                w = w + part.dot_row(direction)
            if with_stream and i == first:
                w = w + (one.before_direction * one.before).sum(-1)
            return {i: w}

        none = [self.score.new_zeros(B, _tokens(wiring, read, B)) for read, _ in wiring.output]
        return wiring.back(none, step)

    def bias(self) -> Tensor:
        """The score's part that is bias terms of mixers, ``(B,)``."""
        total = torch.zeros_like(self.score)
        for step in self.steps.values():
            for layer, direction in zip(step.layers, step.directions, strict=True):
                bias = Contributions.of(self.frozen, [layer], "gate").bias()
                total = total + _dot(direction, bias)
        return total


def _obeys_rules(module: nn.Module) -> bool:
    # Whether each module outside the mixers leaves a graph whose nodes have rules.
    mixers = [mixer for _, mixer in find_mixers(module)]
    inside = {part for mixer in mixers for part in mixer.modules()}
    outside = [part for part in module.modules() if part not in inside]
    return all(isinstance(part, _RULED) or not has_a_rule(part) for part in outside)


def _channels_last(gradient: Tensor | None, at: Point) -> Tensor | None:
    return (
        gradient if gradient is None or at.channels is None else gradient.movedim(at.channels, -1)
    )


def _check_shares(wiring: Wiring) -> None:
    starts = sum(all(read < 0 for read, _ in stage.reads) for stage in wiring.stages)
    joined = any(
        len(stage.reads) > 1 and any(link.share is None for _, link in stage.reads)
        for stage in wiring.stages
    )
    if joined or starts > 1:
        raise UnsupportedModelError(
            "LaTIM follows residual streams from grid to grid, and this model has branches: in "
            "which shares tokens are made of each is not known. Use another method."
        )


def _step(group: Sequence[tuple[FrozenLayer, Tensor, _Cut, Tensor | None]], batch: int) -> _Step:
    layers = [layer for layer, *_ in group]
    directions = [_in_place(layer, at_exit, batch) for layer, at_exit, *_ in group]
    for layer, _, cut, at_stream in group:
        if at_stream is not None and cut.before.shape == cut.exit.shape:
            before, at_before = (_in_place(layer, x, batch) for x in (cut.before, at_stream))
            pairs = zip(layers, directions, strict=True)
            scaled = [_multiplied(one, d, at_before) for one, d in pairs]
            return _Step([one for one, _ in scaled], [d for _, d in scaled], before, at_before)
    raise UnsupportedModelError(
        f"{layers[0].name} does not add to a residual stream of its own tokens that leads on "
        "to the score, or is not given it by a norm that is known; LaTIM expects that of every "
        "mixer. Use MambaLRP, or interactions() with layer= and another aggregation."
    )


def _multiplied(
    layer: FrozenLayer, direction: Tensor, at_stream: Tensor
) -> tuple[FrozenLayer, Tensor]:
    # A mixer and its direction, with what its output is multiplied by before it is added to the
    # stream, a number per channel, in the mixer. The score reads the stream by the mixer's own norm
    # nowhere else, so that its coefficients after the mixer are those before it.
    if direction.shape != at_stream.shape:
        return layer, direction
    whole = at_stream.double().square().sum((0, 1))
    scale = (direction.double() * at_stream).sum((0, 1)) / whole.clamp(min=1e-300)
    scale = torch.where((whole > 0) & (scale != 0), scale, 1.0).to(direction)
    error = (direction - scale * at_stream).norm() / direction.norm().clamp(min=1e-30)
    is_one = bool((scale - 1).abs().max() <= 1e-3)
    if is_one or not bool(error <= 1e-3):
        return layer, direction
    return layer.times(scale), direction / scale


def _in_place(layer: FrozenLayer, x: Tensor, batch: int) -> Tensor:
    # A tensor at the mixer's tokens, in the model's order: (B, T, E).
    moved = in_order(replace(layer.source, gradient=x), layer.order, batch).gradient
    assert moved is not None
    return moved.to(layer.call.output.device, layer.call.dtype)


def _tokens(wiring: Wiring, read: int, batch: int) -> int:
    if read >= 0:
        return wiring.stages[read].tokens
    return wiring.inputs[INPUT - read].leaf.tokens // batch


def _dot(direction: Tensor, values: Tensor) -> Tensor:
    return (direction * values.to(direction)).sum((1, 2))
