"""MambaLRP: layer-wise relevance propagation through frozen mixers (Jafari et al., 2024)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from captum_ssm.attr.base import TokenAttribution, delta
from captum_ssm.attr.norms import FrozenNorm, first_input
from captum_ssm.attr.options import Arguments
from captum_ssm.attr.relevance import relevance_at
from captum_ssm.capture import FrozenModel, FrozenStandIns, Request
from captum_ssm.capture.check import Rebuilt
from captum_ssm.capture.embedded_ids import entries_of, is_view
from captum_ssm.capture.honesty import look_for_hidden, warn_of_hidden
from captum_ssm.capture.model import input_embeddings
from captum_ssm.capture.unknown_mixers import (
    find_unknown_mixers,
    is_settled,
    search_anew,
    settle,
    warn_of_unknown,
)
from captum_ssm.discovery.frozen_scans import scans_frozen
from captum_ssm.discovery.search import MeasuredAdapter
from captum_ssm.errors import InputError
from captum_ssm.graph.relevance_rules import is_norm, ruled
from captum_ssm.mixers import FrozenMixer, MixerCall, find_adapter
from captum_ssm.mixers.parts import activation_factor
from captum_ssm.operators.composed import sum_of
from captum_ssm.utils.captum_api import format_output
from captum_ssm.utils.memory import limited_graph, memory_limit
from captum_ssm.utils.nested import tensors_in
from captum_ssm.wiring.ledger import structure

# Where relevance of an input is read, and of which entries it is; None for all.
Leaves = Sequence[tuple[Tensor, Tensor | None]]


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

    def _attribute(self, arguments: Arguments) -> Any:
        """Relevance of each entry of the inputs, or of each token, for the target.

        The delta is the score minus the sum of relevance: what the bias terms contribute, and what
        parts of the model that could not be frozen fail to conserve.
        """
        request = with_leaves(self._request(arguments.inputs, arguments.additional_forward_args))
        rules, frozen = self._propagated(request, arguments, RelevanceStandIns)
        score = frozen.require_score()
        relevance = rules.relevance(score)
        self._warn(frozen)
        result = of_inputs(frozen, relevance)
        return (result, delta(score, result)) if arguments.return_convergence_delta else result

    def _propagated(
        self, request: Request, arguments: Arguments, stand_ins: Callable[[Request], StandIns]
    ) -> tuple[StandIns, FrozenModel]:
        """A run in which frozen forms stand in for all that depends on data, and these."""
        find_unknown_mixers(request)
        model, is_new = request.module, not is_settled(request.module)
        run = partial(self._ruled, request, arguments, stand_ins)
        rules, frozen = run(wiring=is_new)
        made_of = structure([frozen.require_score().grad_fn])
        if not is_new and not is_settled(model, made_of):
            # Its graph is made of something that was not there before.
            search_anew(model)
            rules, frozen = run(wiring=True)
        # Scans that no mixer is known of have to be frozen too.
        if frozen.wiring.is_mixed and find_unknown_mixers(request, mixed=True):
            rules, frozen = run(wiring=True)
        if not is_settled(model, made_of):
            look_for_hidden(request)
        settle(model, made_of | structure([frozen.require_score().grad_fn]))
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
        return rules, frozen

    def _warn(self, frozen: FrozenModel) -> None:
        # The warnings of a run: padding that is read, and what could not be frozen.
        frozen.warn_of_padding()
        unknown = frozen.wiring.refused or frozen.wiring.unknown or None
        warn_of_unknown(frozen.request.module, unknown)
        warn_of_hidden(frozen.request.module)


def has_a_rule(module: nn.Module) -> bool:
    """Whether a module outside the mixers is replaced, or holds leaves."""
    return isinstance(module, nn.Embedding) or is_norm(module) or _is_activation(module)


def _is_activation(module: nn.Module) -> bool:
    # Activations of torch are single nodes of the graph, with a rule of their own; the rule of
    # tanh does not know the argument where tanh saturates.
    return isinstance(module, nn.Tanh) or type(module).__module__ == "transformers.activations"


class RelevanceStandIns(FrozenStandIns):
    """Frozen forms of mixers, norms and activations, and the leaves at which relevance is read."""

    keeps_mixers = False
    hides_graphs = False  # its rules are for the nodes

    def __init__(self, request: Request) -> None:
        super().__init__()
        self.inputs = request.inputs
        self.table = input_embeddings(request.module)
        self.embedded: list[tuple[nn.Module, Tensor, Tensor]] = []

    def around(self, root: nn.Module) -> AbstractContextManager[None]:
        return scans_frozen(root)

    def begin(self) -> None:
        super().begin()
        self.embedded.clear()

    def picks(self, module: nn.Module) -> bool:
        """Whether calls of a module outside of the mixers are looked at."""
        return has_a_rule(module)

    def needs_graph(self, module: nn.Module) -> bool:
        adapter = find_adapter(module)
        return adapter is None or not self.replaces(adapter)

    def replaces(self, adapter: Callable[..., Any]) -> bool:
        # A measured mixer runs as it is, its scans frozen where they are called.
        return not isinstance(adapter, MeasuredAdapter)

    def takes(self, call: MixerCall) -> bool:
        return True

    def rebuilt(self, mixer: FrozenMixer, call: MixerCall) -> Rebuilt:
        return Rebuilt.of(mixer.detach_coefficients(), call)

    def pulled(self, output: Tensor, leaves: Sequence[Tensor], gradient: Tensor) -> Any:
        starts = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves]
        with ruled([output.grad_fn], starts):
            return super().pulled(output, leaves, gradient)

    def other(self, call: MixerCall) -> Tensor | None:
        if isinstance(call.module, nn.Embedding):
            return self._embedding(call)
        if is_norm(call.module):
            norm = FrozenNorm.of(call)
            return None if norm is None else norm(first_input(call))
        return _activation(call)

    def starts(self) -> list[Tensor]:
        """Where the graph begins: embeddings, and inputs of floats."""
        return [
            *(leaf for _, _, leaf in self.embedded),
            *(x for x in self.inputs if x.requires_grad),
        ]

    def relevance(self, score: Tensor) -> list[Tensor]:
        """The relevance of each input's entries, in its shape: of an id that of its embedding."""
        return self.of_inputs(lambda leaves: relevance_at(leaves, score))

    def of_inputs(self, relevance_of: Callable[[list[Tensor]], list[Tensor]]) -> list[Tensor]:
        """Relevance of each input's entries, from a function that gives that of leaves."""
        inputs = self.inputs
        leaves: list[Leaves] = [
            [(x, None)] if x.is_floating_point() else self._leaves(x) for x in inputs
        ]
        remaining = iter(relevance_of([leaf for part in leaves for leaf, _ in part]))
        return [
            sum_of([_of_entries(entries, next(remaining), x) for _, entries in part])
            for x, part in zip(inputs, leaves, strict=True)
        ]

    def _leaves(self, ids: Tensor) -> Leaves:
        # The embeddings of ids, from one table or several, and the entries that they are of.
        embeddings = [
            ((leaf, entries), module, is_view(indices, ids))
            for module, indices, leaf in self.embedded
            if (entries := entries_of(indices, ids)) is not None
        ]
        # The table that was given the very ids embeds tokens, whichever it is. Among equal copies,
        # which may be positions, only the model's own table is known to do so.
        surely = [leaf for leaf, module, view in embeddings if view or module is self.table]
        leaves = surely or [leaf for leaf, _, _ in embeddings]
        known = torch.zeros(ids.numel(), dtype=torch.bool)
        for _, entries in leaves:
            known[entries] = True
        if not bool(known.all()):
            raise InputError(
                f"the model embeds {int(known.sum())} of the {ids.numel()} ids of inputs, of shape "
                f"{tuple(ids.shape)}, by torch.nn.Embedding, so the start of the propagation is "
                "not known; expected all, as a whole or in views of them, such as columns. Explain "
                "the embeddings instead, or pass what is not ids in additional_forward_args."
            )
        if not surely and len({id(module) for _, module, _ in embeddings}) > 1:
            raise ValueError(
                "several embedding tables were given ids equal to the inputs (positions, perhaps), "
                "so the one that embeds the tokens is not known; give the model a "
                "get_input_embeddings() that returns it, or explain the embeddings instead."
            )
        return leaves

    def _embedding(self, call: MixerCall) -> Tensor | None:
        # A table that was given the ids. A table of positions may be too: `_leaves` tells.
        indices = next(tensors_in((call.args, call.kwargs)))
        ids = (x for x in self.inputs if not x.is_floating_point())
        if all(entries_of(indices, x) is None for x in ids):
            return None
        leaf = call.output.detach().clone().requires_grad_(True)
        self.embedded.append((call.module, indices, leaf))
        return leaf


def _of_entries(entries: Tensor | None, relevance: Tensor, inputs: Tensor) -> Tensor:
    # Relevance of an input of floats, or of embeddings of some entries of one of ids.
    if entries is None:
        return relevance
    total = relevance.new_zeros(inputs.numel())
    total.index_add_(0, entries.flatten().to(total.device), relevance.sum(-1).flatten())
    return total.view(inputs.shape)


def with_leaves(request: Request) -> Request:
    """The request with its floating inputs as leaves of a graph."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_() if tensor.is_floating_point() else tensor

    with torch.inference_mode(False):
        return replace(request, inputs=tuple(map(leaf, request.inputs)))


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
        relevance = relevance * mask.reshape(*mask.shape, *[1] * (relevance.dim() - 2))
    return relevance.to(tensor.device)


def _activation(call: MixerCall) -> Tensor | None:
    x = first_input(call).to(call.output.dtype)

    def function(x: Tensor) -> Tensor:
        return type(call.module).forward(call.module, x)

    with torch.no_grad():
        if float(function(x.new_zeros(1))) != 0:
            return None  # a gate
        factor = activation_factor(function, x)
    return x * factor
