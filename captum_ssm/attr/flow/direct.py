"""What each part of a model writes directly for an answer: its coefficients, and the check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from captum_ssm.attr.flow.activations import (
    Activations,
    ActivationStandIns,
    BlockStream,
    by_identity,
    coefficients_of,
)
from captum_ssm.attr.flow.stream import UNKNOWN_STREAM, blocks_of, shared_tensors, streams_of
from captum_ssm.attr.relevance import coefficients_at
from captum_ssm.capture import Request
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.graph.relevance_rules import goes_through_activation, is_norm, ruled
from captum_ssm.mixers import MixerCall, find_mixers
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.nested import tensors_in

# A stream is passed on unchanged where its coefficients differ by so much of the largest.
_UNCHANGED = 1e-4


@dataclass(frozen=True)
class Written:
    """What a module of a block that is not a mixer returned.

    Args:
        path (str): of the module in the model.
        output (Tensor): in the graph.
        mixers (int): how many mixers ran before it.
    """

    path: str
    output: Tensor = field(repr=False)
    mixers: int


@dataclass(frozen=True)
class DirectRun:
    """A run whose score depends on all parts' outputs directly: later parts are constants.

    Args:
        parts (list of tuple): by part in the order of the run, the index of its mixer or what else
            wrote, with the coefficient of the score at its output; None where there is none.
        coefficients (list of Activations): by mixer, inside of it.
        streams (list of BlockStream): around all blocks.
        at_streams (dict of int to Tensor): the coefficients of their tensors, by identity.
    """

    parts: list[tuple[int | Written, Tensor | None]]
    coefficients: list[Activations]
    streams: list[BlockStream]
    at_streams: dict[int, Tensor]

    @classmethod
    def of(
        cls, stand_ins: DirectStandIns, inside: Sequence[Activations], score: Tensor
    ) -> DirectRun:
        """The direct coefficients of a run, in two backward passes."""
        written, starts = stand_ins.written, stand_ins.starts()
        order: list[int | Written] = sorted(
            [*range(len(inside)), *written],
            key=lambda part: part if isinstance(part, int) else part.mixers - 0.5,
        )
        outputs = [inside[part].output if isinstance(part, int) else part.output for part in order]
        streams, _ = streams_of(stand_ins, score)
        around = [x for s in streams for x in (*s.before, *s.after)]
        at_outputs: dict[int, Tensor] = {}
        with _hooked([(x, partial(_stop, at_outputs, id(x))) for x in outputs if x.requires_grad]):
            of_all = by_identity(
                [*starts, *around], lambda x: coefficients_at(x, score, starts, retain_graph=True)
            )
        by_id = ((id(x), of_all.get(id(x))) for x in around)
        at_streams = {key: g for key, g in by_id if g is not None}
        coefficients = _inside(inside, at_outputs, starts)
        parts = [(part, at_outputs.get(id(x))) for part, x in zip(order, outputs, strict=True)]
        return cls(parts, coefficients, streams, at_streams)

    def check(self) -> None:
        """Raise unless all blocks pass their stream on as it is, at most times a number."""
        if not self.streams or not self.streams[-1].after:
            raise UnsupportedModelError(f"{UNKNOWN_STREAM} Call RelevanceFlow.edges.")
        last = self._coefficients(self.streams[-1].after)[0]
        for n, stream in enumerate(self.streams):
            for what, tensors in (("before", stream.before), ("after", stream.after)):
                # A norm of the embeddings, in the first block, is a part of the embedding.
                coefficients = self._coefficients(tensors) if n or what == "after" else []
                if not all(_are_parallel(g, last) for g in coefficients):
                    raise UnsupportedModelError(
                        f"the residual stream {what} block {n + 1} of {len(self.streams)} does not "
                        "reach the output by addition alone (it is gated, normed, pooled or mixed, "
                        "or something is computed on the way that is not in a module of its own), "
                        "so no part writes directly to the output; expected blocks that return "
                        "what they are given plus what their mixers and MLPs return. Follow the "
                        "relevance from layer to layer instead: RelevanceFlow.edges."
                    )

    def total(self, tensors: Sequence[Tensor]) -> Tensor:
        """What tensors of the stream say for the answer directly, ``(B, L)``."""
        last = self.streams[-1].after[0]
        total = torch.zeros(last.shape[:2], dtype=torch.float64, device=last.device)
        for x in self._own(tensors):
            part = self.at_streams[id(x)].double() * x.detach().double()
            total = total + part.flatten(2).sum(-1).to(total.device)
        return total

    def begins_plainly(self) -> bool:
        """Whether the first block adds to what it is given, and not to a norm of it."""
        last = self._coefficients(self.streams[-1].after)[0]
        return all(_are_parallel(g, last) for g in self._coefficients(self.streams[0].before))

    def _own(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        # Without what others are given too, such as the embeddings once more; unless a block is
        # given nothing else, as the first one is.
        shared = shared_tensors(self.streams)
        known = {id(x): x for x in tensors if id(x) in self.at_streams}
        return [x for key, x in known.items() if key not in shared] or [*known.values()]

    def _coefficients(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [self.at_streams[id(x)] for x in self._own(tensors)]


class DirectStandIns(ActivationStandIns):
    """The rules of MambaLRP, with the outputs of all modules that write to the stream.

    Args:
        request (Request): what is run.

    Attributes:
        written (list of Written): by module that is not a mixer, in forward order.
    """

    def __init__(self, request: Request) -> None:
        blocks = set(_blocks(request.module))
        super().__init__(request, blocks)
        mixers = {module for _, module, *_ in find_mixers(request.module)}
        parts = {part for block in blocks for part in _parts(block, mixers)}
        named = request.module.named_modules()
        self.parts = {module: name for name, module in named if module in parts}

    def picks(self, module: nn.Module) -> bool:
        return module in self.parts or super().picks(module)

    def begin(self) -> None:
        super().begin()
        self.written: list[Written] = []

    def other(self, call: MixerCall) -> Tensor | None:
        path = self.parts.get(call.module)
        if path is not None and _computes(call):
            self.written.append(Written(path, call.output, len(self.made_of)))
            return None
        return super().other(call) if super().picks(call.module) else None


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    # The blocks that hold mixers, and their like without mixers, such as an MLP of its own.
    holding = blocks_of(model)
    kinds = {type(block) for block in holding}
    for module in model.modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and holding & set(module):
            yield from (child for child in module if type(child) in kinds)


def _parts(block: nn.Module, mixers: set[nn.Module]) -> Iterator[nn.Module]:
    # The outermost modules of a block that hold no mixer.
    for child in block.children():
        if child in mixers or is_norm(child):
            continue
        inner = set(child.modules())
        if inner & mixers or isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts(child, mixers)
        else:
            yield child


def _computes(call: MixerCall) -> bool:
    # Whether a module is more than one linear step on the way of what other modules return. The
    # graph shows no activation that is linear piece by piece, such as ReLU: two matrices do.
    inputs = [x for x in tensors_in((call.args, call.kwargs)) if x.requires_grad]
    if not inputs or call.output.grad_fn is None:
        return False
    if sum(p.dim() > 1 for p in call.module.parameters()) > 1:
        return True
    start = torch.autograd.graph.get_gradient_edge(inputs[0]).node
    return goes_through_activation(call.output.grad_fn, start)


@contextmanager
def _hooked(hooks: Sequence[tuple[Tensor, Callable[[Tensor], Tensor]]]) -> Iterator[None]:
    # What takes the place of the gradients of tensors.
    with ExitStack() as stack:
        for x, hook in hooks:
            stack.callback(x.register_hook(hook).remove)
        yield


def _stop(stopped: dict[int, Tensor], key: int, g: Tensor) -> Tensor:
    # A gradient is put into `stopped`, and goes no further.
    stopped[key] = g.detach()
    return torch.zeros_like(g)


def _inside(
    inside: Sequence[Activations], at_outputs: dict[int, Tensor], starts: Sequence[Tensor]
) -> list[Activations]:
    # The coefficients inside of each mixer, from those at the mixers' outputs alone.
    outputs = [activations.output for activations in inside if id(activations.output) in at_outputs]
    gradients = [at_outputs[id(x)] for x in outputs]
    output_ids = {id(x) for x in outputs}
    ends = [torch.autograd.graph.get_gradient_edge(x).node for x in starts]

    def pulled(tensors: list[Tensor]) -> list[Tensor | None]:
        inner = [x for x in tensors if id(x) not in output_ids]
        roots = [x.grad_fn for x in outputs]
        hooks = [(x, lambda _, g=g: g) for x, g in zip(outputs, gradients, strict=True)]
        with torch.enable_grad(), ruled(roots, ends), _hooked(hooks):
            pulled = torch.autograd.grad(outputs, inner, gradients, allow_unused=True)
        by_id = dict(zip(map(id, inner), pulled, strict=True))
        return [at_outputs.get(id(x)) if id(x) in output_ids else by_id[id(x)] for x in tensors]

    return coefficients_of(inside, pulled)


def _are_parallel(g: Tensor, last: Tensor) -> bool:
    # Whether coefficients are others times a number.
    if g.shape != last.shape:
        return False
    a, b = g.double(), last.to(g.device, torch.float64)
    factor = (a * b).sum() / (b * b).sum().clamp(min=1e-300)
    scale = a.abs().amax().clamp(min=1e-300)
    return bool((a - factor * b).abs().amax() <= _UNCHANGED * scale)
