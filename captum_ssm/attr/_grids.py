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
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from captum_ssm._capture import FrozenLayer, FrozenModel, Request
from captum_ssm._capture.recording import check_finite, require_graph
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
from captum_ssm.attr.mamba_lrp import Rules
from captum_ssm.mixers import MixerCall, find_adapter
from captum_ssm.mixers._reordered import in_order
from captum_ssm.mixers._unfused import fused_norms
from captum_ssm.scans import intercepted


@dataclass(frozen=True)
class _Cut:
    # Where a mixer leaves the graph, and the stream before it: in the graph, and its values. The
    # same of what the mixer was given, which is the stream where no norm is between.
    exit: Tensor
    stream: Point | None
    before: Tensor
    given: Point | None
    tokens: Tensor


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
    """A run in which what a mixer returns starts a new graph, and all else is frozen.

    Attributes:
        cuts (list of _Cut): of the mixers' calls, in forward order.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.cuts: list[_Cut] = []
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
        given = Point.before_move(own, call.channels) if own.requires_grad else None
        stream, before = None if self._is_after_norm else given, tokens
        if norm is not None:
            first = next(tensors_in((norm.args, norm.kwargs)))
            stream = Point.before_move(first, norm.channels) if first.requires_grad else None
            before = first_input(norm).detach()
        self._is_after_norm = False
        output = call.output.detach().clone().requires_grad_()
        self.cuts.append(_Cut(output, stream, before, given, tokens))
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

    def read_given(self, of_calls: Sequence[bool | None]) -> None:
        """Take what mixers were given for the stream where it is, as far as that is known."""
        for i, is_given in enumerate(of_calls):
            cut = self.cuts[i]
            if is_given:
                self.cuts[i] = replace(cut, stream=cut.given, before=cut.tokens)
            elif is_given is False and cut.stream is cut.given:
                self.cuts[i] = replace(cut, stream=None)

    def coefficients(self, score: Tensor) -> tuple[list[Tensor], list[Tensor | None]]:
        """Those of the score at what each mixer returned, and at the stream before it.

        Zero at a mixer that the score does not read; None where no graph leads to the stream.
        """
        require_graph(score)
        ends = [cut.exit for cut in self.cuts]
        streams = [cut.stream.edge for cut in self.cuts if cut.stream is not None]
        edges = [*map(get_gradient_edge, ends), *streams]
        with self._ruled(score) as carries:
            if not carries[score.grad_fn]:
                raise of_constants()
            warn_of_unruled(without_rule(carries))
            found = torch.autograd.grad(score.sum(), edges, allow_unused=True, retain_graph=True)
        exits = [
            torch.zeros_like(one) if g is None else g.detach()
            for one, g in zip(ends, found[: len(ends)], strict=True)
        ]
        rest = iter(found[len(ends) :])
        return exits, [
            None if cut.stream is None else _channels_last(next(rest), cut.stream)
            for cut in self.cuts
        ]

    def relevance_past(self, score: Tensor, stream: Point, direction: Tensor) -> list[Tensor]:
        """What inputs add to the score past the mixers and a stream: times the gradient, by input.

        Args:
            score (Tensor): ``(B,)``.
            stream (Point): before the first mixer.
            direction (Tensor): the score's coefficients there, channels last.

        Returns:
            list of Tensor: in the inputs' shapes; empty where all that the score reads goes through
            the stream.
        """
        root = Point.of(score, None)
        if not any(is_read_past(root, Point.of(one), stream) for one in self._starts()):
            return []
        leaves = self.leaves()
        tensors = [leaf.tensor for part in leaves for leaf in part]
        options: dict[str, Any] = {"allow_unused": True, "retain_graph": True}
        with self._ruled(score):
            whole = torch.autograd.grad(score.sum(), tensors, **options)
            seed = stream.unflat(direction.flatten(0, -2))
            through = torch.autograd.grad(stream.edge, tensors, seed, **options)
        parts = zip(times(tensors, whole), times(tensors, through), strict=True)
        return self.of_inputs(leaves, [a - b for a, b in parts])

    def _starts(self) -> list[Tensor]:
        found = [leaf for _, _, leaf in self.embedded]
        return [*found, *(one for one in self.inputs if one.requires_grad)]

    @contextmanager
    def _ruled(self, score: Tensor) -> Iterator[dict[Any, bool]]:
        starts = [*(cut.exit for cut in self.cuts), *self._starts()]
        nodes = [get_gradient_edge(one).node for one in starts]
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            ruled([score.grad_fn], nodes) as carries,
        ):
            yield carries


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
    def of(cls, frozen: FrozenModel, cut: CutMixers, score: Tensor) -> Grids:
        """Read the coefficients off the graph of another run of the same request.

        Args:
            frozen (FrozenModel): of a run as it is.
            cut (CutMixers): what the mixers of the other run were replaced by.
            score (Tensor): ``(B,)``, of that run, with its graph.

        Raises:
            UnsupportedModelError: where relevance could be lost, or counted twice, on the way.
        """
        _check_shares(frozen.require_wiring())
        stages = frozen.wiring.stages
        cut.read_given([stages[layer.stage].is_given_stream for layer in frozen.layers])
        exits, streams = cut.coefficients(score)
        B = frozen.shape[0]
        found: dict[int, list[tuple[FrozenLayer, Tensor, _Cut, Tensor | None]]] = {}
        for one in zip(frozen.layers, exits, cut.cuts, streams, strict=True):
            found.setdefault(one[0].stage, []).append(one)
        steps = {stage: _step(group, B) for stage, group in found.items()}
        stream, direction = next(
            (one.stream, at_stream)
            for _, _, one, at_stream in found[min(found)]
            if one.stream is not None and at_stream is not None
        )
        past = cut.relevance_past(score, stream, direction)
        return cls(frozen, steps, score.detach().to(frozen.layers[0].call.dtype), past)

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
            return _Step(layers, directions, before, at_before)
    raise UnsupportedModelError(
        f"{layers[0].name} does not add to a residual stream of its own tokens that leads on "
        "to the score, or is not given it by a norm that is known; LaTIM expects that of every "
        "mixer. Use MambaLRP, or interactions() with layer= and another aggregation."
    )


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
