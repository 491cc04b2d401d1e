"""What one run of a model left: its mixers' calls, its score, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from captum_ssm.capture.finite import check_finite
from captum_ssm.capture.model import extract_logits, unwrap
from captum_ssm.capture.request import Request
from captum_ssm.errors import InputError, UnsupportedModelError
from captum_ssm.graph.points import Point
from captum_ssm.graph.reachability import is_read_around, nodes_before
from captum_ssm.graph.relevance_rules import goes_through_activation, ruled, without_rule
from captum_ssm.mixers import MixerCall, find_adapter, find_mixers
from captum_ssm.models.token_grid import TokenGrid, find_token_grid
from captum_ssm.utils.lazy import cached_property
from captum_ssm.utils.nested import tensors_in
from captum_ssm.wiring.cuts import MixerCut
from captum_ssm.wiring.wiring import Wiring

if TYPE_CHECKING:
    from nnsight import Envoy


@dataclass(frozen=True)
class Recording:
    """What one run of a model left.

    Args:
        request (Request): what was run.
        output (Any): what ``forward_func`` returned.
        calls (list of MixerCall): the mixers' calls, in forward order.
        others (list of MixerCall): calls of further modules outside the mixers, in forward
            order, where they were asked for.
        arguments (dict): the arguments the model's own ``forward`` was called with, by name
            (empty where ``forward_func`` runs only a part of the model).
        wiring (Wiring, optional): what lies between the mixers, where it was measured.
            Default: None
        score (Tensor, optional): ``(B,)``, what is explained, where it was asked for.
            Default: None
        edges (sequence of GradientEdge, optional): by order, where the calls' outputs are in the
            graph; None where they are not. Default: ()
        unruled (frozenset of str, optional): functions without a rule of relevance by which the
            score reads what comes after the last mixer. Default: frozenset()
        operations (frozenset, optional): the functions that it called between its mixers.
            Default: frozenset()
        ports (sequence of MixerCut, optional): where the mixers were cut off, by call, if they were
            and there is a score. Default: ()
        is_decoder (bool, optional): whether it is known that the output's rows are tokens of a
            decoder. Default: False
    """

    request: Request
    output: Any
    calls: list[MixerCall]
    others: list[MixerCall]
    arguments: dict[str, Any]
    wiring: Wiring | None = None
    score: Tensor | None = None
    edges: Sequence[GradientEdge | None] = ()
    unruled: frozenset[str] = frozenset()
    operations: frozenset[Any] = frozenset()
    ports: Sequence[MixerCut] = ()
    is_decoder: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(B, L), the tokens that the last mixer works on; those of the output's rows where an
        earlier one works on so many more, as before a tower of fewer tokens.
        """
        B, output = self.request.batch, extract_logits(self.output)
        counts = [math.prod(call.output.shape[:-1]) // B for call in self.calls]
        rows = output.shape[1] if output.dim() == 3 else 0
        return B, max(counts[-1], rows if rows in counts else 0)

    @cached_property
    def mask(self) -> Tensor | None:
        """``(B, L)`` bool, False for padding; None where nothing was masked.

        Raises:
            InputError: for a mask of other values than 0 and 1, or an example of padding only.
        """
        inputs = self.request.inputs[0]
        B, L = inputs.shape[:2] if inputs.dim() < 4 else self.shape
        mask = {**self.request.named, **self.arguments}.get("attention_mask")
        if not torch.is_tensor(mask):
            masks = (call.token_mask() for call in self.calls)
            mask = next((m for m in masks if m is not None), None)
        if mask is None or tuple(mask.shape) not in ((B, L), (1, L)):
            return None
        mask = mask.expand(B, L)
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise InputError(
                f"attention_mask holds values from {float(mask.min()):g} to "
                f"{float(mask.max()):g}; expected 1 for tokens and 0 for padding."
            )
        empty = (mask != 0).sum(1) == 0
        if bool(empty.any()):
            raise InputError(
                f"attention_mask marks no token in row {int(empty.nonzero()[0])}: an example of "
                "padding only has nothing to explain; remove it from the batch."
            )
        return (mask != 0).to(self.device)

    @cached_property
    def is_language(self) -> bool:
        """Whether the output is logits of the mixers' tokens."""
        return self.request.is_language_output(extract_logits(self.output)) and not self.decodes

    @cached_property
    def decodes(self) -> bool:
        """Whether the rows of the output are tokens of a decoder, which reads what mixers encode.

        These are more than the mixers' tokens, or as many as another argument holds and the first
        input does not.
        """
        output, T = extract_logits(self.output), self.shape[1]
        if self.is_decoder or output.dim() != 3:
            return self.is_decoder
        n, request = output.shape[1], self.request
        is_other = n not in request.inputs[0].shape[1:2] and request.has_others(n)
        return n > T or (n < T and is_other)

    @property
    def may_decode(self) -> bool:
        """Whether the rows may be a decoder's tokens, of which there are as many as the mixers'."""
        output, T = extract_logits(self.output), self.shape[1]
        return not self.decodes and output.dim() == 3 and self.request.has_others(T)

    @property
    def entry(self) -> Tensor | None:
        """A value per example that is read from tokens of its own: of a dense output, or a score.

        None for logits of a language model's tokens, which are asked for by a position instead.
        """
        output = extract_logits(self.output)
        if output.dim() == 1:
            return output
        return None if self.is_language and output.dim() > 2 else self.score

    @property
    def reads_mixers(self) -> bool:
        """Whether the score depends on what any of the mixers returned, as the graph shows.

        A function with a backward pass of its own may have run all of them.
        """
        edges = [self.edges[call.order] for call in self.calls]
        ends = {edge.node for edge in edges if edge is not None}
        start = None if self.score is None else self.score.grad_fn
        return start is not None and not ends.isdisjoint(nodes_before([start], ends))

    @property
    def device(self) -> torch.device:
        """The first mixer's. A model may be spread over devices; results are on this one."""
        return self.calls[0].output.device

    @property
    def grid(self) -> TokenGrid | None:
        """Which token of the last mixer is which patch of the input, where the model tells.

        None also where the way from the input is measured, because its tokens are made of more.
        """
        inputs, model = self.request.inputs, self.request.module
        if len(inputs) > 1 or (self.wiring is not None and self.wiring.steps[0].reads):
            return None
        return find_token_grid(model, self.arguments, inputs[0], self.shape[1])

    def check_finite(self) -> None:
        """Raise `InputError` where a mixer returned NaN or Inf."""
        for call in self.calls:
            check_finite(call)

    def with_gradients(self, target: Tensor) -> Recording:
        """This recording with each call's gradient of ``target`` (summed over the batch).

        Its wiring gets the gradient of each series.
        """
        require_graph(target)
        reading, unruled = self._reading(target)
        ways = () if self.wiring is None else self.wiring.inputs
        starts = [way for k, way in enumerate(ways) if way.roots and self.request.has_variables(k)]
        edges = {call.order: self.edges[call.order] for call in (*self.calls, *self.others)}
        wanted = {order: edge for order, edge in edges.items() if edge is not None}
        ends: list[Any] = [*wanted.values(), *(way.leaf.edge for way in starts)]
        keeps = self.wiring is not None and self.wiring.needs_graph
        at_ends = gradients_at(ends, target, retain_graph=keeps)
        gradients = dict(zip(wanted, at_ends, strict=False))
        if all(gradients.get(call.order) is None for call in self.calls):
            # A score may have a graph of its own: that of a head after a detached backbone.
            raise no_graph()
        known = dict(zip(starts, at_ends[len(wanted) :], strict=True))
        inputs = (replace(way, gradient=known[way]) if way in known else way for way in ways)
        return replace(
            self,
            calls=_carrying(self.calls, _or_zeros(self.calls, gradients)),
            others=_carrying(self.others, _or_zeros(self.others, gradients) | reading),
            wiring=None if self.wiring is None else replace(self.wiring, inputs=tuple(inputs)),
            edges=(),
            unruled=unruled,
        )

    def with_readout(self, target: Tensor) -> Recording:
        """This recording with the gradient of ``target`` at the calls after the last mixer."""
        require_graph(target)
        last = self.calls[-1].order
        wanted = [c for c in self.others if c.order > last and c.output.requires_grad]
        if not wanted:
            return self
        reading, unruled = self._reading(target)
        keeps = bool(self.ports) or (self.wiring is not None and self.wiring.needs_graph)
        at_calls = gradients_at([call.output for call in wanted], target, retain_graph=keeps)
        gradients = dict(zip((call.order for call in wanted), at_calls, strict=True))
        others = _carrying(self.others, _or_zeros(wanted, gradients) | reading)
        return replace(self, others=others, unruled=unruled)

    def _reading(self, target: Tensor) -> tuple[dict[int, Tensor | None], frozenset[str]]:
        # How the target reads calls after the last mixer, where its plain gradient does not say so,
        # by order. None for what it reads around as well, such as an MLP's norm, or through an MLP.
        # Norms and soft caps in between count as constants, as in MambaLRP. And the functions in
        # between that there is no rule for.
        later, last = Point.of(target, None), self.calls[-1].order
        reading: dict[int, Tensor | None] = {}
        unruled: set[str] = set()
        for call in self.others:
            tokens = next(tensors_in((call.args, call.kwargs)), None)
            if call.order <= last or tokens is None:
                continue
            if not (tokens.requires_grad and call.output.requires_grad):
                continue
            output = Point.of(call.output)
            is_around = is_read_around(later, Point.of(tokens), output)
            if is_around or goes_through_activation(later.edge.node, output.edge.node):
                reading[call.order] = None
                continue
            with ruled([later.edge.node], [output.edge.node]) as carries:
                reading[call.order] = None  # a probability
                if carries[later.edge.node]:
                    (gradient,) = gradients_at([call.output], target, retain_graph=True)
                    reading[call.order] = gradient
                    unruled.update(without_rule(carries))
        return reading, frozenset(unruled)


# Gradients at the calls' outputs are by the calls' order.


def _or_zeros(
    calls: Sequence[MixerCall], gradients: Mapping[int, Tensor | None]
) -> dict[int, Tensor | None]:
    pairs = {call.order: (call.output, gradients.get(call.order)) for call in calls}
    return {k: torch.zeros_like(y) if g is None else g for k, (y, g) in pairs.items()}


def _carrying(
    calls: Sequence[MixerCall], gradients: Mapping[int, Tensor | None]
) -> list[MixerCall]:
    return [replace(call, gradient=gradients.get(call.order)) for call in calls]


def require_graph(score: Tensor) -> None:
    """Raise unless a gradient of ``score`` can be taken."""
    if not score.requires_grad:
        raise no_graph()


def gradients_at(
    leaves: Sequence[Tensor] | Sequence[GradientEdge], score: Tensor, *, retain_graph: bool = False
) -> list[Tensor | None]:
    """The gradients of ``score`` (summed over the batch) at ``leaves``, not None for all."""
    require_graph(score)
    with torch.inference_mode(False), torch.enable_grad():
        gradients = torch.autograd.grad(
            score.sum(), leaves, allow_unused=True, retain_graph=retain_graph
        )
    if all(gradient is None for gradient in gradients):
        raise no_graph()
    return list(gradients)


def no_graph() -> ValueError:
    """The error for a score that no gradient can be taken of."""
    return ValueError(
        "the target does not depend differentiably on the mixers' outputs: forward_func "
        "detaches them, runs under torch.no_grad() itself, or calls them in a function whose "
        "backward pass hides them, such as a checkpoint; expected the model's own output. "
        "torch.utils.checkpoint is switched off during the run."
    )


class NotReachedError(UnsupportedModelError):
    """A model has mixers, and a run called none of them."""


def split_calls(
    model: nn.Module | Envoy, calls: list[MixerCall]
) -> tuple[list[MixerCall], list[MixerCall]]:
    """The calls of mixers, and those of what else was recorded.

    Raises:
        NotReachedError: there are none of mixers.
    """
    mixers = [call for call in calls if find_adapter(call.module) is not None]
    if not mixers:
        known = sum(1 for _ in find_mixers(unwrap(model)))
        raise NotReachedError(
            f"forward_func did not reach any of the {known} mixers of model="
            f"{type(unwrap(model)).__name__}; pass the model that forward_func runs."
        )
    return mixers, [call for call in calls if find_adapter(call.module) is None]
