"""From a request to a frozen model: run, frozen, checked, with its query and its score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.capture.check import check_reconstruction
from captum_ssm.capture.frozen_model import FrozenCall, FrozenModel
from captum_ssm.capture.honesty import check_honesty
from captum_ssm.capture.joined_examples import joins_examples, warn_of_joined_examples
from captum_ssm.capture.long_text import stays_apart
from captum_ssm.capture.randomness import noting_draws, warn_of_randomness
from captum_ssm.capture.record import record
from captum_ssm.capture.recording import Recording
from captum_ssm.capture.remote import ONLY_LAYERS, record_remotely
from captum_ssm.capture.request import Request
from captum_ssm.capture.substitute import FrozenDuringRun, FrozenStandIns
from captum_ssm.capture.target import (
    check_rows,
    counted_tokens,
    names_entry,
    query_weights,
    read_score,
)
from captum_ssm.capture.thrown_away import on_thrown_away
from captum_ssm.capture.unknown_mixers import find_unknown_mixers, reaching
from captum_ssm.errors import InputError, UnsupportedModelError
from captum_ssm.graph.in_place import seen_in_views
from captum_ssm.mixers import MixerCall, find_adapter
from captum_ssm.mixers.past import STALE
from captum_ssm.mixers.registry import known_of
from captum_ssm.mixers.reordered import in_order
from captum_ssm.utils.allocator import workspace
from captum_ssm.utils.nested import detached
from captum_ssm.utils.offload import moved
from captum_ssm.wiring.wiring import Wiring, sequence

# A run without gradients measures the wiring on so many tokens at most.
SHORT = 256


@workspace()
@seen_in_views
def freeze(
    request: Request,
    *,
    position: Any = None,
    target: Any = None,
    query: bool = True,
    gradients: bool = False,
    through_mixers: bool = True,
    also: Callable[[nn.Module], bool] | None = None,
    substitution: FrozenStandIns | None = None,
    check: bool = True,
    wiring: bool = True,
    keep_graph: bool = False,
) -> FrozenModel:
    """Run a request once and freeze every mixer it visits.

    Args:
        request (Request): what to run.
        position (int or Tensor, optional): the query token; None for the model's own readout.
        target (Any, optional): as in Captum. Without gradients only the position is used that it
            names. Default: None
        query (bool, optional): find the token whose row is explained; not needed for whole
            matrices. Default: True
        gradients (bool, optional): also compute the gradient of the target's score with
            respect to each recorded output. Default: False
        through_mixers (bool, optional): False: the gradient is needed only at the calls of ``also``
            after the last mixer. The mixers then run without a graph, where no input has variables.
            Default: True
        also (Callable, optional): says which modules outside the mixers to keep too.
            Default: None
        substitution (FrozenStandIns, optional): takes the mixers' place; the score then keeps its
            graph, and no gradient is taken. Default: None
        check (bool, optional): raise where a frozen mixer does not reproduce its output.
            Default: True
        wiring (bool, optional): measure what lies between the mixers. Default: True
        keep_graph (bool, optional): keep the recording, with its own graph where it was cut at the
            mixers; without gradients there is none. Default: False
    """
    if request.remote and (query or gradients or substitution is not None):
        raise UnsupportedModelError(ONLY_LAYERS)
    find_unknown_mixers(request)
    has_variables = any(map(request.has_variables, range(len(request.inputs))))
    through_mixers = through_mixers or has_variables
    plan = _Plan(request, position, target, gradients, through_mixers, also, wiring, substitution)
    recording, mixer_wiring, made = reaching(request, plan.run)
    if not plan.own_graph and find_unknown_mixers(request, between=mixer_wiring):
        recording, mixer_wiring, made = plan.run()  # with those that were found
    mask = recording.mask
    if mixer_wiring.rows is not None:
        check_rows(recording, mixer_wiring.rows)
    live = recording if keep_graph and (recording.ports or not gradients) else None
    score = recording.score
    if score is not None:
        if not plan.own_graph:
            recording, score = plan.with_gradients(recording, score), score.detach()
            mixer_wiring = recording.wiring or mixer_wiring
        recording = detached(recording)
    if wiring and not plan.own_graph and mixer_wiring.refused is None:
        is_read = query or gradients
        check_honesty(request, mixer_wiring.structure, recording.operations, with_output=is_read)
    weights: list[Tensor] | None = None
    if query:
        if mixer_wiring.refused is not None:
            raise UnsupportedModelError(mixer_wiring.refused)
        weights = query_weights(recording, mixer_wiring, position, target)
    _check_begun(recording, substitution)
    device, dtype = recording.device, recording.calls[0].dtype
    return FrozenModel(
        request,
        _frozen_layers(recording, mixer_wiring, made, check),
        recording.shape,
        counted_tokens(recording),
        mixer_wiring,
        mask=None if mask is None else mask.to(dtype),
        query=None if weights is None else [w.to(device, dtype) for w in weights],
        score=score,
        others=[_brought(call, device) for call in recording.others],
        grid=recording.grid,
        unruled=recording.unruled,
        operations=recording.operations,
        live=live,
        again=partial(freeze, query=False, check=check),
    )


@dataclass(frozen=True)
class _Plan:
    # What freeze asks of a run; its arguments are those of freeze.
    request: Request
    position: Any
    target: Any
    gradients: bool
    through_mixers: bool
    also: Callable[[nn.Module], bool] | None
    wiring: bool
    substitution: FrozenStandIns | None

    @property
    def own_graph(self) -> bool:
        # Whether what takes the mixers' place needs the score with its graph.
        return self.substitution is not None

    def run(self) -> tuple[Recording, Wiring, list[FrozenDuringRun | None]]:
        # A recording, how its mixers hang together, and what was frozen meanwhile.
        request, stand_in = self.request, self.substitution
        if not self.own_graph and self.gradients and self.through_mixers:
            # What other modules read says what the mixers add to.
            stand_in = FrozenStandIns(keeps_outputs=self.also is not None)
        with noting_draws() as draws:
            recording = self._recorded(stand_in)
        if any(draws):
            known, made_of = known_of(request.module), recording.operations
            was_steady = made_of <= known.steady
            with on_thrown_away(request) as (copies, _), torch.no_grad():
                if warn_of_randomness(request.module, copies.run, was_steady=was_steady):
                    known.steady |= made_of
        _ = recording.mask  # raises for one of padding only, whose numbers need not be finite
        recording.check_finite()
        wiring = recording.wiring or sequence(len(recording.calls), recording.shape[1])
        # What puts leaves of its own into the graph checks that they are at all of the ids.
        if request.by_ids and not self.own_graph and not (self.wiring and wiring.steps[0].reads):
            _check_tokens(request.inputs[0], wiring.steps[0].tokens, recording.calls[0])
        return recording, wiring, [] if stand_in is None else stand_in.made

    def with_gradients(self, recording: Recording, score: Tensor) -> Recording:
        # The recording with the gradients of the score that were asked for.
        self._look_at_examples(recording, score)
        with torch.inference_mode(False), torch.enable_grad():
            if self.through_mixers:
                return recording.with_gradients(score)
            return recording.with_readout(score)

    def _look_at_examples(self, recording: Recording, score: Tensor) -> None:
        # Whether they act on one another: once for each structure of the graph without that.
        known, B = known_of(self.request.module), self.request.batch
        made_of = frozenset() if recording.wiring is None else recording.wiring.structure
        if B == 1 or made_of <= known.apart:
            return
        calls = [call for call in recording.calls if call.output.shape[0] == B]
        ports = dict(zip((call.order for call in recording.calls), recording.ports, strict=False))
        edges = [ports[c.order].exit.edge if ports else recording.edges[c.order] for c in calls]
        ends = [edge for edge in edges if edge is not None]
        if joins_examples(score, ends, [slice(1, None)] * len(ends)):
            warn_of_joined_examples()
        else:
            known.apart |= made_of

    def _score_of(self, recording: Recording) -> Tensor:
        if not self.through_mixers:
            recording.check_finite()  # names the mixer, where the score could not
        return read_score(recording, self.target, self.position)

    def _entry_of(self, recording: Recording) -> Tensor | None:
        # What the target names of a dense output, where its tokens are to be found.
        if not self._names_entry(recording):
            return None
        return read_score(recording, self.target, self.position)

    def _names_entry(self, recording: Recording) -> bool:
        return names_entry(recording, self.target, self.position)

    def _recorded(self, stand_in: FrozenStandIns | None) -> Recording:
        request, has_score = self.request, self.gradients or self.own_graph
        if request.remote:
            return record_remotely(request)
        run = partial(
            record,
            request,
            score=self._score_of if has_score else None,
            also=self.also,
            substitute=stand_in,
            through_mixers=self.through_mixers,
            entry=self._entry_of,
        )
        has_graph = has_score and self.through_mixers
        short = None if has_graph or not self.wiring else request.shortened(SHORT)
        if short is None:
            return run(wiring=self.wiring)
        try:
            beginning = record(short, wiring=True)
        except Exception:  # a model, or an argument, that cannot be shortened
            return run(wiring=True)
        wiring = beginning.wiring
        if wiring is None or not wiring.can_be_lengthened or self._names_entry(beginning):
            return run(wiring=True)
        recording = run()
        is_alike = recording.operations <= beginning.operations  # else a branch for long texts
        if not is_alike or len(wiring.orders) != len(recording.calls):
            return run(wiring=True)
        if not stays_apart(recording, reads_neighbors=wiring.neighbor_share > 0):
            return run(wiring=True)
        return replace(recording, wiring=wiring.lengthened(recording.shape[1]))


def _check_all_begun(calls: Sequence[MixerCall], begun: MixerCall) -> None:
    # RecurrentGemma keeps the states of its recurrent layers in its modules: a run without
    # use_cache, as all runs here, begins them anew, whatever the cache of attention holds.
    anew = (call for call in calls if call.past is None and find_adapter(call.module) is not None)
    call = next(anew, None)
    if call is not None:
        raise UnsupportedModelError(
            f"the cache holds what {begun.path} kept of earlier tokens, and nothing of "
            f"{call.path} ({type(call.module).__name__}), which begins anew; expected a cache of "
            "all layers. Explain the whole text, without a cache."
        )


def _check_begun(recording: Recording, substitution: FrozenStandIns | None) -> None:
    # Maps of the new tokens alone would leave out what these read of earlier ones.
    begun = next((call for call in recording.calls if call.past is not None), None)
    if begun is not None and not (substitution is not None and substitution.takes_pasts):
        raise UnsupportedModelError(
            f"{begun.path} is called with a cache that is not empty, so its tokens read a state "
            "that no map of them shows; expected the whole text, without a cache. MambaLRP alone "
            "explains from a cache: its states get relevance of their own."
        )
    if begun is not None:
        _check_all_begun(recording.calls, begun)
    # A window drops tokens.
    calls = [c for c in recording.calls if getattr(c.module, "sliding_window", None) is None]
    counts = (c.past.tokens for c in calls if c.past is not None)
    before = {n for n in counts if n is not None}
    mask = recording.arguments.get("attention_mask")
    if len(before) > 1 or (before and torch.is_tensor(mask)):
        told = "no attention_mask" if mask is None else f"attention_mask {tuple(mask.shape)}"
        raise InputError(
            f"layers of attention hold {sorted(before)} tokens in the cache, and there is {told}; "
            "expected as many tokens in each, and no mask, as it is of the inputs alone and the "
            f"model would hide tokens by it. {STALE}"
        )


def _check_tokens(inputs: Tensor, tokens: int, first: MixerCall) -> None:
    # Where nothing was measured between the input and the first mixer.
    if inputs.shape[1] != tokens:
        raise InputError(
            f"inputs has shape {tuple(inputs.shape)}, but the mixers saw (batch, tokens) = "
            f"{tuple(first.output.shape[:-1])}; forward_func has to pass each input token to the "
            "model as one token, and nothing in addition, such as padding, copies, or the texts "
            "without a condition of classifier-free guidance."
        )


def _frozen_layers(
    recording: Recording, wiring: Wiring, made: Sequence[FrozenDuringRun | None], check: bool
) -> list[FrozenCall]:
    layers: list[FrozenCall] = []
    visits = Counter[str]()
    for i, call in enumerate(recording.calls):
        name = f"{call.path}:{visits[call.path]}" if visits[call.path] else call.path
        visits[call.path] += 1
        during_run = made[i] if i < len(made) else None
        order, mask = wiring.orders[i], recording.mask
        if mask is not None and (order is not None or mask.shape != call.output.shape[:2]):
            mask = None
        if during_run is not None and check:
            check_reconstruction(name, call, during_run.deviation, mask)
        here = _brought(in_order(call, order, recording.shape[0]), recording.device)
        step = wiring.step_of[i]
        layers.append(FrozenCall(name, here, step, call, during_run, mask, check, order))
    return layers


def _brought(call: MixerCall, device: torch.device) -> MixerCall:
    return moved(call, call.output.device, device)
