"""A long text explained by relevance propagation in segments, with the memory of one of them.

A frozen network is linear, and segments of a recurrent model are joined only by what its mixers
keep: states, and the last inputs of convolutions. Forward, segment after segment runs without a
graph, and what is kept at each boundary is stored. Backward, the last segment runs once more with
its graph. The coefficients of the score at what its mixers began with are those with which the
segment before propagates from what its mixers kept, and so on to the first. That one begins with
what a cache holds, if there is one.

The frozen mixers take the place of the model's own, which need not be able to go on from a state.
So the beginning of the text is first explained as a whole, with every check, and what segments
return there is compared with what the model returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.attr.relevance import coefficients_at, times
from captum_ssm.attr.relevance_stand_ins import RelevanceStandIns, StateStandIns, with_leaves
from captum_ssm.capture import Request
from captum_ssm.capture.check import SLACK, Deviation
from captum_ssm.capture.model import extract_logits, is_model, parameter_names, unwrap
from captum_ssm.capture.record import record
from captum_ssm.capture.recording import Recording
from captum_ssm.capture.span_target import SpanTarget
from captum_ssm.capture.substitute import FrozenDuringRun, without_autocast
from captum_ssm.capture.target import Against
from captum_ssm.capture.tolerances import TOLERANCE, Tolerances
from captum_ssm.errors import InputError, ReconstructionError, UnsupportedModelError, brief
from captum_ssm.mixers import MixerCall, find_adapter
from captum_ssm.mixers.past import Past
from captum_ssm.mixers.registry import frozen_by
from captum_ssm.operators.composed import sum_of
from captum_ssm.utils.copies import original
from captum_ssm.utils.integers import as_index
from captum_ssm.utils.memory import limited_graph
from captum_ssm.utils.nested import first_of, map_tensors, tensors_in, with_first
from captum_ssm.utils.offload import weights_loaded
from captum_ssm.utils.progress import Bar

# Tokens at the beginning on which segments are compared with the whole: two of so many.
COMPARED = 128

# A mixer of a segment: what segments return is compared as a whole.
_ZERO = torch.zeros(1, 1, 1)
UNCHECKED = FrozenDuringRun(None, Deviation(_ZERO, _ZERO, _ZERO[0, 0], 1.0))

Score = Callable[[Recording], Tensor]
Forms = dict[nn.Module, Any]


class FormStandIns(StateStandIns):
    """Stand-ins of an ordinary run, which keep the form of what each mixer returns.

    Attributes:
        forms (dict of nn.Module to Any): by mixer, its result without its numbers.
    """

    def begin(self) -> None:
        super().begin()
        self.forms: Forms = {}

    def __call__(self, call: MixerCall) -> Any:
        if find_adapter(call.module) is not None:
            shape = call.given_tokens().shape[:2]
            others = list(tensors_in(call.result))[1:]
            if any(x.shape[:2] == shape for x in others) or call.channels != -1:
                raise UnsupportedModelError(
                    f"{call.path} ({type(call.module).__name__}) returns more than tokens (B, L, "
                    "E), which later layers may read; expected mixers that are joined by their "
                    "states alone. Explain the text as a whole: segment=None."
                )
            self.forms[call.module] = map_tensors(empty, call.result)
        return super().__call__(call)


class SegmentStandIns(RelevanceStandIns):
    """Frozen mixers that go on from what they kept of earlier segments.

    The model's own mixers do not run, and a cache among the arguments is not read.

    Args:
        request (Request): for a segment.
        forms (dict of nn.Module to Any): what each mixer returns, without its numbers.
        past (sequence of Past): what each mixer has kept, in the order of the calls; empty for the
            first segment, if nothing came before it.
    """

    takes_pasts = True

    def __init__(self, request: Request, forms: Forms, past: Sequence[Past]) -> None:
        super().__init__(request)
        self.forms, self.past = forms, past

    def begin(self) -> None:
        super().begin()
        self.kept: list[Past] = []

    def prepare(self, module: nn.Module) -> None:
        mixer = original(module)
        form = self.forms[mixer]

        def forward(*args: Any, **kwargs: Any) -> Any:
            tokens = MixerCall.of("", mixer, args, kwargs, None).given_tokens()
            return with_first(form, first_of(form)[0, 0, 0].expand(tokens.shape))

        module.__dict__["forward"] = forward

    def __call__(self, call: MixerCall) -> Any:
        adapter = find_adapter(call.module)
        if adapter is None:
            return super().__call__(call)
        past = self.past[len(self.kept)].anew() if self.past else Past()
        with without_autocast(), weights_loaded(call.module):
            mixer = frozen_by(adapter, replace(call, past=past)).detach_coefficients()
            goes_on = mixer.state is past.state or (past.is_cached and mixer.state is not None)
            if mixer.recurrence.between_states() is None or not goes_on:
                raise UnsupportedModelError(
                    f"{call.path} ({type(call.module).__name__}) cannot go on from a state, so the "
                    "text cannot be explained in segments; expected recurrent mixers in all "
                    "layers. Explain the text as a whole: segment=None."
                )
            mixed, state = mixer.carry()
            output = mixer.projected(mixer.gated_output([mixed]))
        self.kept.append(past.then(state))
        self.made.append(UNCHECKED)
        return with_first(call.result, output.to(call.output.dtype))


@dataclass(frozen=True)
class SegmentedRun:
    """A text that is run in segments.

    Args:
        request (Request): for the whole text.
        forms (dict of nn.Module to Any): what each mixer returns, without its numbers.
        starts (list of int): of each segment, its first token.
        name (str): of the method, for errors.
        bounds (list of list of Past): what each mixer has kept before each segment; at first that
            before the first one, empty where nothing came before.
        blocks (list of Tensor): of all segments, the numbers that are kept between them.
    """

    request: Request
    forms: Forms
    starts: Sequence[int]
    name: str
    bounds: list[list[Past]]
    blocks: list[Tensor] = field(default_factory=list)

    def forward(self) -> None:
        """Run all segments but the last without a graph, and store what is kept between them."""
        bar = Bar("segments", len(self.starts) - 1)
        for k in range(len(self.starts) - 1):
            # What else a run leaves is gone before the next one.
            self.bounds.append(self._stored(k, self._recorded(k)[0].kept))
            bar.advance()

    def backward(self, score: Score) -> tuple[Tensor, Tensor, list[Past]]:
        """Relevance of the input's entries for the score of the last segment, and that score.

        Last comes relevance of what each mixer began with.
        """
        parts: list[Tensor] = []
        begun = self.bounds[0]
        value, handed_on = None, None
        for k in reversed(range(len(self.starts))):
            relevance, reached, handed_on = self._propagated(k, score, handed_on)
            value = reached if value is None else value
            parts.append(relevance)
            self.bounds.pop()
        assert value is not None
        tensors = [x for past in begun for x in past.tensors]
        states = iter(times(tensors, handed_on or []))
        of_begun = [past.of(list(islice(states, len(past.tensors)))) for past in begun]
        return torch.cat(parts[::-1], 1), value, of_begun

    def outputs(self) -> Tensor:
        """What the model returns for the last segment, after :meth:`forward`."""
        _, recording = self._recorded(len(self.starts) - 1)
        return extract_logits(recording.output)

    def _recorded(self, k: int) -> tuple[SegmentStandIns, Recording]:
        # A run of one segment without a graph.
        request = self._of(k)
        stand_ins = SegmentStandIns(request, self.forms, self.bounds[k])
        with torch.no_grad():
            return stand_ins, record(request, also=stand_ins.picks, substitute=stand_ins)

    def _propagated(
        self, k: int, score: Score, handed_on: list[Tensor | None] | None
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        # Relevance in one segment, its score, and the coefficients at what its mixers began with.
        request = with_leaves(self._of(k))
        bounds = self.bounds[k]
        leaves = [past.of([x.detach().requires_grad_() for x in past.tensors]) for past in bounds]
        stand_ins = SegmentStandIns(request, self.forms, leaves)
        begun = [x for past in leaves for x in past.tensors]

        def handing_on(recording: Recording) -> Tensor:
            states = [x for past in stand_ins.kept for x in past.tensors]
            pairs = zip(states, handed_on or [], strict=True)
            return sum_of([(x * c).sum() for x, c in pairs if c is not None])

        with limited_graph(request.module, self.name):
            recorded = record(
                request,
                score=score if handed_on is None else handing_on,
                also=stand_ins.picks,
                substitute=stand_ins,
            )
        reached = recorded.score
        assert reached is not None
        coefficients: list[Tensor | None] = []

        def relevance_of(starts: list[Tensor]) -> list[Tensor]:
            both = [*starts, *begun]
            gradients = coefficients_at(both, reached)
            # Parts of larger tensors, which would wait with them for the segment before.
            coefficients.extend(x if x is None else x.clone() for x in gradients[len(starts) :])
            return times(starts, gradients[: len(starts)])

        (relevance,) = stand_ins.of_inputs(relevance_of)
        return relevance.detach(), reached.detach(), coefficients

    def _stored(self, k: int, pasts: Sequence[Past]) -> list[Past]:
        # In blocks that are there from the first boundary on: small tensors that stay between large
        # ones that are freed would keep malloc from using that memory for the next large ones.
        tensors = [x for past in pasts for x in past.tensors]
        if k == 0:
            self.blocks[:] = [x.new_empty(len(self.starts) - 1, *x.shape) for x in tensors]
        stored = iter([block[k].copy_(x) for block, x in zip(self.blocks, tensors, strict=True)])
        return [past.of(list(islice(stored, len(past.tensors)))) for past in pasts]

    def _of(self, k: int) -> Request:
        if k + 1 == len(self.starts):
            return self.request.of_tokens(self.starts[k], self.tokens)
        request = self.request.of_tokens(self.starts[k], self.starts[k + 1])
        # Logits of a whole segment that nothing reads would take most of the memory.
        forward = request.forward_func
        names = parameter_names(unwrap(forward)) if is_model(forward) else []
        if "logits_to_keep" not in names[len(request.positional) + 1 :]:
            return request
        return replace(request, named={**request.named, "logits_to_keep": 1})

    @property
    def tokens(self) -> int:
        return self.request.inputs[0].shape[1]


def check_text(request: Request, segment: Any) -> int:
    """``segment``, if a request is for a text that can be cut into segments of so many tokens."""
    count = as_index(segment)
    if count is None or count < 1:
        raise InputError(
            f"segment is {brief(segment)}; expected a positive number of tokens, or None."
        )
    if not request.is_text or request.remote:
        raise InputError(
            f"inputs of shape {tuple(request.inputs[0].shape)} cannot be cut into segments: "
            "expected ids (B, L) or embeddings (B, L, E) of a text, on this machine. Leave out "
            "segment=."
        )
    mask = request.named.get("attention_mask")
    if torch.is_tensor(mask) and not bool((mask != 0).all()):
        raise InputError(
            "attention_mask marks padding; expected texts without any, as a segment may be padding "
            "as a whole. Explain texts of several lengths one by one."
        )
    return count


def compare(run: SegmentedRun) -> None:
    """Raise unless two segments return what the model returns for all of their tokens.

    Raises:
        ReconstructionError: they do not.
    """
    with torch.no_grad():
        run.forward()
        outputs = run.outputs()
        expected = extract_logits(run.request.run())
    if expected.dim() == 3 and expected.shape[1] != outputs.shape[1]:
        expected = expected[:, -outputs.shape[1] :]
    error = float((outputs - expected).norm() / expected.norm().clamp(min=1e-30))
    known = TOLERANCE.get(expected.dtype, TOLERANCE[torch.float32])
    limit = Tolerances.of(expected, SLACK * known).kernels
    if not error <= limit:
        raise ReconstructionError(
            f"two segments of {run.tokens} tokens return something else than the model does for "
            f"all of them: relative error {error:.1e}, expected at most {limit:.0e}. Tokens of one "
            "segment reach the next in another way than by the states of recurrent mixers (a token "
            "shift between mixers, positions, a pooled output). Explain the text as a whole: "
            "segment=None."
        )


def position_after(start: int, tokens: int) -> Callable[[int], int]:
    """From a position in a text to that in its last segment, which begins at ``start``."""

    def move(position: int) -> int:
        index = (position + tokens if position < 0 else position) - start
        if index < 0:
            raise InputError(
                f"position {position} is not in the last segment, which begins at token {start}; "
                "expected one in it. Explain the text up to the position, or choose a longer "
                "segment."
            )
        return index

    return move


def with_positions(target: Any, position: Any, move: Callable[[int], int]) -> tuple[Any, Any]:
    """A target and a position, with every position in them moved."""

    def moved(positions: Any) -> Any:
        if torch.is_tensor(positions):
            indices = [move(int(index)) for index in positions.reshape(-1)]
            return torch.tensor(indices).view(positions.shape)
        is_several = isinstance(positions, (list, tuple))
        return list(map(move, positions)) if is_several else move(int(positions))

    def pair(entry: Any) -> Any:
        return (
            (moved(entry[0]), entry[1]) if isinstance(entry, tuple) and len(entry) == 2 else entry
        )

    if isinstance(target, Against):
        sides = (with_positions(side, None, move)[0] for side in (target.target, target.foil))
        target = Against(*sides)
    elif isinstance(target, SpanTarget):
        target = replace(target, positions=moved(target.positions))
    elif isinstance(target, list):
        target = list(map(pair, target))
    else:
        target = pair(target)
    return target, None if position is None else moved(position)


def empty(x: Tensor) -> Tensor:
    """A tensor of one number, in as many axes at least as tokens have."""
    return x.new_zeros(()).expand(*[1] * max(x.dim(), 3))
