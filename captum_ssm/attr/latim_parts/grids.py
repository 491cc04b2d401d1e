r"""ALTI-Logit through mixers that work on different tokens: grids, orders, U-shapes.

Also where the score is read from one residual stream by no norm or head that is known. The score's
coefficients at what a mixer returned are then its gradient along the ways around all later mixers,
norms and gates frozen as in MambaLRP. What the score reads of the inputs outside the first stream
has their values times its gradient. Between grids relevance is carried by the measured transport.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from captum_ssm.attr.latim_parts.chain import Decomposition, LayerStep
from captum_ssm.attr.latim_parts.residual_stream import feeding_norm, is_one
from captum_ssm.attr.norms import first_input
from captum_ssm.attr.relevance import of_constants, times, warn_of_added, warn_of_unruled
from captum_ssm.attr.relevance_stand_ins import RelevanceStandIns, has_a_rule
from captum_ssm.capture import FrozenCall, FrozenModel, Request
from captum_ssm.capture.finite import check_finite
from captum_ssm.capture.recording import require_graph
from captum_ssm.capture.unknown_mixers import warn_of_unknown
from captum_ssm.discovery.measure.unfused import fused_norms
from captum_ssm.discovery.scans import FunctionCall, intercepted
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.graph.factors import before_casts, factors
from captum_ssm.graph.kinds import MATRICES, kind_of
from captum_ssm.graph.points import Point
from captum_ssm.graph.reachability import is_read_around, meetings
from captum_ssm.graph.relevance_rules import added_coefficients, is_norm, ruled, without_rule
from captum_ssm.graph.segments import SegmentGraph
from captum_ssm.mixers import MixerCall, find_adapter, find_mixers
from captum_ssm.mixers.reordered import in_order
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.lazy import cached_property
from captum_ssm.utils.nested import tensors_in, with_first
from captum_ssm.wiring.cuts import MixerCut
from captum_ssm.wiring.wiring import Source

# Norms of PyTorch, which are single nodes of the graph.
_RULED = (nn.LayerNorm, nn.RMSNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm)


class _Cut(NamedTuple):
    # Where a mixer was cut off: what it returned, the stream before it where the graph has it, and
    # the values of that stream.
    exit: Point
    stream: Point | None
    before: Tensor


def _cut(
    frozen: FrozenModel,
    index: int,
    call: MixerCall,
    port: MixerCut,
    norm: MixerCall | None,
    *,
    is_fed: bool,
) -> _Cut:
    # The cut at the index-th call of a mixer, with the norm that feeds it, if one is known. Where
    # the wiring does not say whether the mixer is given the stream itself, ``is_fed`` does.
    is_given_stream = frozen.wiring.steps[frozen.layers[index].step].is_given_stream
    if norm is not None and not is_given_stream:
        x = next(tensors_in((norm.args, norm.kwargs)))
        stream = Point.of(x).before_move(norm.channels) if x.requires_grad else None
        return _Cut(port.exit, stream and before_casts(stream), first_input(norm).detach())
    is_known = is_fed if is_given_stream is None else is_given_stream
    stream = port.entry.before_move(call.channels) if port.entry and is_known else None
    return _Cut(port.exit, stream and before_casts(stream), call.tokens().detach())


class _Coefficients(NamedTuple):
    # The score's coefficients at what a mixer returned, at the stream before it, and at their sum,
    # (T, E), if a graph leads there, and if there is one.
    exit: Tensor
    stream: Tensor | None
    root: Point | None
    at_root: Tensor | None


@dataclass(frozen=True)
class ScoreGraph:
    """The graph of a run whose mixers were cut off: how the score ``(B,)`` reads what they return.

    Cuts are in forward order. It begins at the starts, whose values are known, and whose relevance
    ``of_inputs`` turns into that of the inputs.
    """

    cuts: list[_Cut]
    score: Tensor
    starts: list[tuple[Point, Tensor]]
    of_inputs: Callable[[list[Tensor]], list[Tensor]]

    @classmethod
    def of(cls, frozen: FrozenModel) -> ScoreGraph | None:
        """The score graph of the frozen run; None if the graph was not kept or lacks rules.

        A function without a rule may have one where its module is replaced. None also where a
        mixer's stream is not known to be the input of a norm that is a module, and for ids.
        """
        live, input_maps = frozen.live, frozen.wiring.inputs
        if live is None or live.score is None or not _obeys_rules(live.request.module):
            return None
        inputs = live.request.inputs
        if len(input_maps) != len(inputs) or not all(x.is_floating_point() for x in inputs):
            return None
        norms = [call for call in live.others if is_norm(call.module)]
        cuts = []
        for k, (call, port) in enumerate(zip(live.calls, live.ports, strict=True)):
            norm = feeding_norm(call, [norm for norm in norms if norm.order < call.order])
            cuts.append(_cut(frozen, k, call, port, norm, is_fed=False))
        if any(cut.stream is None for cut in cuts):
            return None
        # The graph begins at the inputs themselves.
        graph = cls(
            cuts, live.score, [(input_map.leaf, input_map.values) for input_map in input_maps], list
        )
        with graph._ruled() as carries:
            return None if without_rule(carries) else graph

    def coefficients(self, groups: Sequence[Sequence[int]]) -> list[_Coefficients]:
        """By cut, how the score reads it; sums are looked for of ``groups`` of cuts."""
        require_graph(self.score)
        sums = self._sums(groups)
        ends = [(self.cuts[k].exit, self.cuts[k].stream, root) for k, root in enumerate(sums)]
        points = [point for of_cut in ends for point in of_cut if point is not None]
        with self._ruled() as carries:
            if not carries[self.score.grad_fn]:
                raise of_constants()
            warn_of_unruled(without_rule(carries))
            warn_of_added(added_coefficients(carries))
            edges = [point.edge for point in points]
            gradients = torch.autograd.grad(
                self.score.sum(), edges, allow_unused=True, retain_graph=True
            )
        at = {p: g.detach() for p, g in zip(points, gradients, strict=True) if g is not None}
        coefficients = []
        for end, stream, root in ends:
            at_exit = at.get(end, torch.zeros(end.shape, dtype=end.dtype, device=end.device))
            at_stream = None if stream is None else at.get(stream)
            if stream is not None and at_stream is not None and stream.channels is not None:
                at_stream = at_stream.movedim(stream.channels, -1)
            at_root = root.flat(at[root]) if root and root in at else None  # a gate is a constant
            coefficients.append(_Coefficients(at_exit, at_stream, root, at_root))
        return coefficients

    def _sums(self, groups: Sequence[Sequence[int]]) -> list[Point | None]:
        # By cut, the first tensor, in the stream's form, that all the score reads of it and of the
        # stream before its group goes through.
        sums: list[Point | None] = [None] * len(self.cuts)
        for group in groups:
            streams = [stream for k in group if (stream := self.cuts[k].stream) is not None][:1]
            for k in group if streams else ():
                edges = meetings([Point.of(self.score, None)], [self.cuts[k].exit, *streams])
                joined = (Point.at(edge, streams[0].channels) for edge in edges)
                sums[k] = next((p for p in joined if p.shape == streams[0].shape), None)
        return sums

    def through_matrix(self, group: Sequence[int]) -> bool:
        """Whether what cuts side by side returned goes through a matrix before it is added."""
        sums = self._segments.around(Point.of(self.score, None), group).first_sums
        ends = [self.cuts[k].exit for k in group]
        ways = (edge for node in sums for edge in meetings([Point.at(node)], ends))
        return any(kind_of(edge.node) in MATRICES for edge in ways)

    @cached_property
    def _segments(self) -> SegmentGraph:
        exits = {k: cut.exit for k, cut in enumerate(self.cuts)}
        return SegmentGraph(exits | {-1 - k: point for k, (point, _) in enumerate(self.starts)})

    def relevance_outside(self, stream: Point, direction: Tensor) -> list[Tensor]:
        """What each input adds to the score outside of mixers and a stream, in its shape.

        The direction holds the score's coefficients at the stream, channels last. Nothing where all
        that the score reads goes through the stream.
        """
        score = Point.of(self.score, None)
        if not any(is_read_around(score, point, stream) for point, _ in self.starts):
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
    # Notes the calls of norms that are functions.
    def __init__(self, norms: list[MixerCall]) -> None:
        super().__init__()
        self.norms = norms

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        y = func(*args, **kwargs)
        if func in (F.layer_norm, F.rms_norm, torch.layer_norm, torch.rms_norm):
            x = args[0] if args else kwargs["input"]
            if x.requires_grad and x.shape == y.shape:
                self.norms.append(MixerCall("", nn.Identity(), (x,), {}, y))
        return y


class CutStandIns(RelevanceStandIns):
    """A run in which what a mixer returns starts a new graph, and all else is frozen."""

    def __init__(self, request: Request, frozen: FrozenModel) -> None:
        super().__init__(request)
        self._frozen = frozen

    def begin(self) -> None:
        super().begin()
        self._cuts: list[_Cut] = []
        self._norms: list[MixerCall] = []
        self._is_after_norm = False

    @contextmanager
    def around(self, root: nn.Module) -> Iterator[None]:
        fused = fused_norms()
        # Functions that an interception around this one is about run as they are.
        unfused = intercepted(lambda call: fused.get(call.source, FunctionCall.run)(call), fused)
        with super().around(root), _Norms(self._norms), unfused:
            yield

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
        norm, tokens = feeding_norm(call, self._norms), call.given_tokens()
        entry = Point.of(tokens) if tokens.requires_grad else None
        output = call.output.detach().clone().requires_grad_()
        port = MixerCut(call.path, entry, Point.of(output))
        # No norm between the last mixer and this one: it is given the stream itself.
        is_fed = not self._is_after_norm
        self._cuts.append(_cut(self._frozen, len(self._cuts), call, port, norm, is_fed=is_fed))
        self._is_after_norm = False
        return with_first(call.result, output.clone())  # the model may change it in place

    def graph(self, score: Tensor) -> ScoreGraph:
        """The graph of the run that computed ``score (B,)``."""
        starts = self.starts()

        def of_inputs(relevance: list[Tensor]) -> list[Tensor]:
            of_start = dict(zip(map(id, starts), relevance, strict=True))
            return self.of_inputs(lambda leaves: [of_start[id(leaf)] for leaf in leaves])

        points = [(Point.of(start), start) for start in starts]
        return ScoreGraph(self._cuts, score, points, of_inputs)


def grids_of(frozen: FrozenModel, graph: ScoreGraph) -> Decomposition:
    """How the score reads the layers, each on its own tokens.

    ``graph`` comes from the run that the model was frozen at, or from another run of its request.

    Raises:
        UnsupportedModelError: where relevance could be lost, or counted twice, on the way.
    """
    wiring = frozen.require_wiring()
    warn_of_unknown(frozen.request.module, wiring.unknown or None)
    read = wiring.read
    _check_shares([wiring.steps[i].reads for i in read])
    groups = {
        step: [k for k, layer in enumerate(frozen.layers) if layer.step == step] for step in read
    }
    # Nothing is known of sums where the stream is read again around them.
    reads = [*(wiring.steps[i].reads for i in read), wiring.output]
    left = {max(earlier, -1) + 1 for sources in reads for earlier, _ in sources[1:]}
    coefficients = graph.coefficients([group for i, group in groups.items() if i not in left])
    calls = [*zip(frozen.layers, graph.cuts, coefficients, strict=True)]
    mixers = {step: [calls[k] for k in group] for step, group in groups.items()}
    steps = {step: _step(group, frozen.shape[0]) for step, group in mixers.items()}
    _warn_of_matrices(graph, frozen.layers, sorted(steps)[:-1])
    stream, direction = next(
        (cut.stream, at.stream)
        for _, cut, at in mixers[min(mixers)]
        if cut.stream is not None and at.stream is not None
    )
    outside = graph.relevance_outside(stream, direction)
    first = frozen.layers[0]
    score = graph.score.detach().to(first.device, first.call.dtype)
    scaled = {layer.name: layer for step in steps.values() for layer in step.layers}
    layers = [scaled.get(layer.name, layer) for layer in frozen.layers]
    return Decomposition(replace(frozen, live=None, layers=layers), steps, score, outside)


def _warn_of_matrices(graph: ScoreGraph, layers: Sequence[FrozenCall], steps: list[int]) -> None:
    # Which steps, of those that mix the relevance of later ones, do it by vectors before a matrix.
    groups = ([k for k, layer in enumerate(layers) if layer.step == step] for step in steps)
    names = [layers[group[0]].name for group in groups if graph.through_matrix(group)]
    if names:
        warnings.warn(
            f"what {', '.join(names)} returned is multiplied by a matrix before it is added to the "
            "residual stream. LaTIM mixes relevance by its vectors before that matrix: sums, and "
            "what each layer adds, are right, and which tokens relevance of later layers goes to "
            "is not exact. MambaLRP accounts for it.",
            stacklevel=2,
        )


def _obeys_rules(module: nn.Module) -> bool:
    # Whether each module outside the mixers leaves a graph whose nodes have rules.
    mixers = [mixer for _, mixer in find_mixers(module)]
    inside = {part for mixer in mixers for part in mixer.modules()}
    outside = [part for part in module.modules() if part not in inside]
    return all(isinstance(part, _RULED) or not has_a_rule(part) for part in outside)


def _check_shares(reads: Sequence[tuple[Source, ...]]) -> None:
    starts = sum(all(earlier < 0 for earlier, _ in sources) for sources in reads)
    joined = any(
        len(sources) > 1 and any(link.share is None for _, link in sources) for sources in reads
    )
    if joined or starts > 1:
        raise UnsupportedModelError(
            "LaTIM follows residual streams from grid to grid, and this model has branches: in "
            "which shares tokens are made of each is not known. Use another method."
        )


_MixerRead = tuple[FrozenCall, _Cut, _Coefficients]


def _step(group: Sequence[_MixerRead], batch: int) -> LayerStep:
    for layer, cut, at in group:
        if at.stream is not None and cut.before.shape == cut.exit.shape:
            before, at_before = (_in_model_order(layer, x, batch) for x in (cut.before, at.stream))
            stream = next(cut.stream for _, cut, _ in group if cut.stream is not None)
            return LayerStep([_as_added(*read, stream, batch) for read in group], before, at_before)
    raise UnsupportedModelError(
        f"{group[0][0].name} does not add to a residual stream of its own tokens that leads on "
        "to the score, or is not given it by a norm that is known; LaTIM expects that of every "
        "mixer. Use MambaLRP, or interactions() with layer= and another aggregation."
    )


def _as_added(
    layer: FrozenCall, cut: _Cut, at: _Coefficients, stream: Point, batch: int
) -> tuple[list[FrozenCall], Tensor]:
    # A mixer with what multiplies its output before it meets the stream, and its direction there.
    direction = _in_model_order(layer, at.exit, batch)
    if at.root is None or at.at_root is None:
        return [layer], direction
    rounding = max(1e-3, 4 * torch.finfo(at.exit.dtype).eps)
    # The sum is of tokens in the model's order, or in the mixer's.
    for order, ordered in ((layer.order, replace(layer, order=None)), (None, layer)):
        orders = [None if order is None else order.flatten(), None]
        # A product with what the stream is made into counts half for each side.
        scale, of_stream = (
            factor if factor is None or factor.dim() == 1 else at.root.flat(factor)
            for factor in factors(at.root, [cut.exit, stream], orders)
        )
        if scale is None:
            continue
        # In units of the stream.
        unit = 1 if of_stream is None or not of_stream.all() else of_stream
        scale, summed = (
            x if x.dim() == 1 else _in_model_order(ordered, x.unflatten(0, (batch, -1)), batch)
            for x in (y.to(direction.device) for y in (scale / unit, at.at_root * unit))
        )
        off = (direction - scale.to(summed) * summed).norm()
        if bool(off <= rounding * direction.norm()):
            return [layer if is_one(scale) else layer.times(scale)], summed
    return [layer], direction


def _in_model_order(layer: FrozenCall, x: Tensor, batch: int) -> Tensor:
    # A tensor at the mixer's tokens, in the model's order: (B, T, E).
    moved = in_order(replace(layer.source, gradient=x), layer.order, batch).gradient
    assert moved is not None
    return moved.to(layer.call.output.device, layer.call.dtype)
