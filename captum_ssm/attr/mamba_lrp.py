"""MambaLRP: layer-wise relevance propagation through frozen mixers (Jafari et al., 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from captum_ssm.attr.base import TokenAttribution, delta
from captum_ssm.attr.options import Arguments
from captum_ssm.attr.relevance_stand_ins import RelevanceStandIns, StateStandIns, with_leaves
from captum_ssm.attr.segments import (
    COMPARED,
    FormStandIns,
    SegmentedRun,
    check_text,
    compare,
    position_after,
    with_positions,
)
from captum_ssm.capture import FrozenModel, Request
from captum_ssm.capture.honesty import look_for_hidden, warn_of_hidden
from captum_ssm.capture.joined_examples import joins_examples, warn_of_joined_examples
from captum_ssm.capture.target import read_score
from captum_ssm.capture.unknown_mixers import find_unknown_mixers, reaching, warn_of_unknown
from captum_ssm.mixers.past import Past
from captum_ssm.mixers.registry import known_of
from captum_ssm.operators.composed import sum_of
from captum_ssm.utils.captum_api import format_output
from captum_ssm.utils.memory import limited_graph, memory_limit
from captum_ssm.wiring.ledger import structure


class StateRelevance(NamedTuple):
    """Relevance of what a layer had kept of earlier tokens when it was called.

    Args:
        state (Tensor, optional): of the state, in the shape that the cache holds it in: of a
            recurrence ``(B, D, N)`` or ``(B, H, N, P)``, of attention that of the cached values,
            ``(B, H, tokens, P)``. None where there was none.
        tails (tuple of Tensor): of the last inputs of its convolutions, ``(B, K, D)``. Cached keys
            count as constants: theirs is zero.

    Examples::

        >>> with torch.no_grad():
        ...     output = model(input_ids[:, :-1], use_cache=True)
        >>> name = "cache" if "cache" in output else "cache_params"  # before transformers 5.24
        >>> _, states = MambaLRP(model).attribute(
        ...     input_ids[:, -1:], token, {name: output[name]}, return_states=True
        ... )
        >>> states["backbone.layers.0.mixer"].total.shape
        torch.Size([1])
    """

    state: Tensor | None
    tails: tuple[Tensor, ...]

    @property
    def total(self) -> Tensor:
        """All of it, ``(B,)``."""
        parts = [*self.tails, *([] if self.state is None else [self.state])]
        return sum_of([part.double().flatten(1).sum(1) for part in parts])


StandIns = TypeVar("StandIns", bound="RelevanceStandIns")


class MambaLRP(TokenAttribution):
    r"""Gradient times input through a network whose data-dependent parts are frozen.

    Relevance propagation that conserves the explained score (Jafari, Montavon, Müller & Eberle,
    `MambaLRP <https://arxiv.org/abs/2406.07592>`_). The model runs once, and on the way back

    - a recurrence's coefficients (:math:`\Delta, A, B, C`; decays, keys and queries), attention
      probabilities and routers' weights are constants, as is everything that comes out of a
      sigmoid, a softmax or an exponential;
    - an activation is its argument times a constant, :math:`\mathrm{SiLU}(x) = \sigma(x)\,x`;
    - a product of two tensors, such as a SiLU gate and its signal, gives half of its relevance to
      each;
    - a norm's denominator is a constant, and any other denominator.

    What is left is linear in the embeddings, so that :math:`R_j = \sum_e x_{je}\,\partial s /
    \partial x_{je}` adds up to the score minus what the bias terms contribute, through MLPs,
    experts, gates and soft caps alike. Mixers and norms are replaced by frozen forms that return
    the same values. What a frozen mixer computes, by the very operations that relevance is
    propagated through, is compared with what the mixer returned. The other rules are attached to
    the nodes of the autograd graph, whichever module they come from, and change no value. A
    function without a rule (softplus, a log softmax, a fused kernel with a backward pass of its
    own) keeps its plain gradient: a warning names it with its share of the relevance, and the delta
    says what that costs. So does one of coefficients that are added, not multiplied. Autograd
    keeps no argument of :func:`torch.tanh`: where its result is rounded to ±1 (\|x\| > 9 in
    float32, 3.5 in bfloat16), relevance is too large by about \|x\| over that limit.
    :class:`torch.nn.Tanh` is exact.

    The arguments are those of :class:`~captum_ssm.attr.TokenAttribution`. ``memory_limit`` here
    limits the bytes that the graph of the run may keep, in addition to the model; a run that needs
    more raises :class:`~captum_ssm.MemoryLimitError`. Every entry of a floating input has relevance
    of its own, so ``interpolate_mode`` and ``feature_share`` are not used; ids have that of their
    embedding.

    Examples::

        >>> relevance, delta = MambaLRP(model).attribute(
        ...     input_ids, target=token, return_convergence_delta=True
        ... )
    """

    name = "mamba-lrp"
    summary = "gradient times input through the frozen network"

    def get_name(self) -> str:
        """The method's name."""
        return "MambaLRP"

    def has_convergence_delta(self) -> bool:
        """True: relevance claims to add up to the score."""
        return True

    @classmethod
    def is_additive(cls, **options: Any) -> bool:
        """True: the frozen network is linear."""
        return True

    def _attribute(
        self, arguments: Arguments, *, segment: int | None = None, return_states: bool = False
    ) -> Any:
        """Relevance of each entry of the inputs, or of each token, for the target.

        The delta is the score minus the sum of relevance: what the bias terms contribute, and what
        parts of the model that could not be frozen fail to conserve. A cache in
        ``additional_forward_args`` holds what tokens before the inputs have left in each layer;
        that gets relevance of its own, which counts in the sum.

        Args:
            segment (int, optional): explain a text in segments of so many tokens, with the memory
                of one, whatever its length, and the same result. The model's mixers have to be
                recurrent, and tokens may be joined by their states alone; the target is read in the
                last segment. Default: None, as a whole
            return_states (bool, optional): return, last, relevance of what each layer began with,
                a dict of :class:`~captum_ssm.attr.StateRelevance` by the names of the mixers; empty
                without a cache. Default: False
        """
        request = self._request(arguments.inputs, arguments.additional_forward_args)
        tokens = None if segment is None else check_text(request, segment)
        if tokens is not None and tokens < request.inputs[0].shape[1]:
            result, score, of_pasts = self._in_segments(request, arguments, tokens)
        else:
            request = with_leaves(request)
            rules, frozen = self._propagated(request, arguments, StateStandIns)
            score = frozen.require_score()
            relevance = rules.relevance(score)
            self._warn(frozen)
            result, of_pasts = of_inputs(frozen, relevance), rules.of_pasts
        pairs = of_pasts.items()
        states = {path: StateRelevance(past.state, tuple(past.tails)) for path, past in pairs}
        results = [result]
        if arguments.return_convergence_delta:
            left = delta(score, result)
            results.append(left - sum(state.total.to(left) for state in states.values()))
        results += [states] if return_states else []
        return result if len(results) == 1 else tuple(results)

    def _in_segments(
        self, request: Request, arguments: Arguments, segment: int
    ) -> tuple[Any, Tensor, dict[str, Past]]:
        # Relevance of a long text, its score, and relevance of what mixers began with.
        tokens = request.inputs[0].shape[1]
        compared = 2 * min(segment, COMPARED, tokens // 2)
        # The last segments end where the text ends.
        starts = [0, *range(tokens % segment or segment, tokens, segment)]

        def asked(move: Callable[[int], int]) -> Arguments:
            target, position = with_positions(arguments.target, arguments.position, move)
            return replace(arguments, target=target, position=position)

        last = asked(position_after(starts[-1], tokens))
        begin = request.of_tokens(0, compared)
        rules = self._beginning(begin, asked(lambda _: compared - 1))
        bounds = [[past.anew() for _, past in rules.pasts]]
        score_of = partial(read_score, target=last.target)
        with memory_limit(self.memory_limit):
            if self.check:
                halves = (0, compared // 2)
                compare(SegmentedRun(begin, rules.forms, halves, self.get_name(), list(bounds)))
            run = SegmentedRun(request, rules.forms, starts, self.get_name(), bounds)
            run.forward()
            relevance, score, begun = run.backward(partial(score_of, position=last.position))
        result = format_output(request.packed, (relevance.to(request.inputs[0].device),))
        names = (path for path, _ in rules.pasts)
        return result, score, dict(zip(names, begun, strict=True))

    def _beginning(self, begin: Request, arguments: Arguments) -> FormStandIns:
        # What mixers return, and begin with, at the beginning of a text, whose graph is then gone.
        rules, frozen = self._propagated(with_leaves(begin), arguments, FormStandIns)
        self._warn(frozen)
        return rules

    def _propagated(
        self, request: Request, arguments: Arguments, stand_ins: Callable[[Request], StandIns]
    ) -> tuple[StandIns, FrozenModel]:
        """A run in which frozen forms stand in for all that depends on data, and these."""
        find_unknown_mixers(request)
        known = known_of(request.module)
        is_new = not known.is_settled()
        run = partial(self._ruled, request, arguments, stand_ins)
        rules, frozen = reaching(request, partial(run, wiring=is_new))
        made_of = _made_of(frozen)
        is_changed = not known.is_settled(made_of)
        if is_changed and not is_new:
            known.forget_warned()
            # Its graph is made of something that was not there before.
            rules, frozen = run(wiring=True)
        # Scans that no mixer is known of have to be frozen too.
        if find_unknown_mixers(request, between=frozen.wiring):
            rules, frozen = run(wiring=True)
        # What a method of maps has looked at already is known.
        if is_changed and not (is_new and frozen.operations <= known.honest):
            look_for_hidden(request, made_of, frozen.operations)
        if is_changed:
            known.mixes_examples = None
        if request.batch > 1 and known.mixes_examples is None:
            score, starts = frozen.require_score(), rules.starts()
            known.mixes_examples = joins_examples(score, starts, rules.of_others())
        known.settle(made_of | _made_of(frozen))
        return rules, frozen

    def _ruled(
        self,
        request: Request,
        arguments: Arguments,
        stand_ins: Callable[[Request], StandIns],
        *,
        wiring: bool,
    ) -> tuple[StandIns, FrozenModel]:
        rules = stand_ins(request)
        with (
            memory_limit(self.memory_limit),
            limited_graph(request.module, self.get_name()),
        ):
            frozen = self._run(
                request,
                arguments.position,
                target=arguments.target,
                also=rules.picks,
                substitution=rules,
                query=False,
                wiring=wiring,
            )
        rules.check_embedded()
        return rules, frozen

    def _warn(self, frozen: FrozenModel) -> None:
        # The warnings of a run: padding that is read, and what could not be frozen.
        frozen.warn_of_padding()
        warn_of_unknown(frozen.request.module, frozen.wiring.unknown or None)
        warn_of_hidden(frozen.request.module)
        if known_of(frozen.request.module).mixes_examples and frozen.request.batch > 1:
            warn_of_joined_examples()


def _made_of(frozen: FrozenModel) -> frozenset[Any]:
    # What the graph of a run is made of, and what it does not show.
    return structure([frozen.require_score().grad_fn]) | frozen.operations


def of_inputs(frozen: FrozenModel, relevance: Sequence[Tensor]) -> Any:
    """The relevance of each input's entries as ``attribute`` returns it, zero on padding."""
    request = frozen.request
    return format_output(
        request.packed, tuple(map(partial(_of_input, frozen), request.inputs, relevance))
    )


def _of_input(frozen: FrozenModel, tensor: Tensor, relevance: Tensor) -> Tensor:
    # Padding has no relevance.
    mask = frozen.mask
    if mask is not None and relevance.shape[:2] == mask.shape and relevance.dim() <= 3:
        mask = mask.reshape(*mask.shape, *[1] * (relevance.dim() - 2))
        relevance = relevance * mask.to(relevance.device)
    return relevance.to(tensor.device)
