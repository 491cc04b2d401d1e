"""What takes the place of mixers, norms and activations while relevance is propagated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from captum_ssm.attr.norms import FrozenNorm, first_input
from captum_ssm.attr.relevance import coefficients_at, times
from captum_ssm.capture import FrozenStandIns, Request
from captum_ssm.capture.check import Rebuilt
from captum_ssm.capture.embedded_ids import entries_of, is_view, rows_of
from captum_ssm.capture.model import input_embeddings
from captum_ssm.discovery.frozen_scans import scans_frozen
from captum_ssm.discovery.search import MeasuredAdapter
from captum_ssm.errors import InputError
from captum_ssm.graph.reachability import nodes_before
from captum_ssm.graph.relevance_rules import is_norm, ruled
from captum_ssm.mixers import FrozenMixer, MixerCall, find_adapter
from captum_ssm.mixers.parts import activation_factor
from captum_ssm.mixers.past import Past
from captum_ssm.operators.composed import sum_of
from captum_ssm.utils.nested import tensors_in

# Where relevance of an input is read, and of which entries it is; None for all.
Leaves = Sequence[tuple[Tensor, Tensor | None]]


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

    def around(self, root: nn.Module) -> AbstractContextManager[None]:
        return scans_frozen(root)

    def begin(self) -> None:
        super().begin()
        self.embedded: list[tuple[nn.Module | None, Tensor, Tensor]] = []
        self.filled_tokens: list[Tensor] = []  # from the model's other arguments

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
        starts = [get_gradient_edge(leaf).node for leaf in leaves]
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
            *self.filled_tokens,
            *(x for x in self.inputs if x.requires_grad),
        ]

    def of_others(self) -> list[Tensor | slice]:
        """By start, which of its tokens are not of the first example."""
        others: list[Tensor | slice] = []
        for module, indices, _ in self.embedded:
            rows = rows_of(module, self.table)
            ids = [x for x in self.inputs if not x.is_floating_point()]
            pairs = [(entries_of(indices, x, rows), x[0].numel()) for x in ids]
            entries, count = next((e, n) for e, n in pairs if e is not None)
            others.append(entries >= count)
        return [*others, *[slice(1, None)] * (len(self.starts()) - len(others))]

    def check_embedded(self) -> None:
        """Raise `InputError` where the model does not embed the ids of an input by a table."""
        for x in self.inputs:
            if not x.is_floating_point():
                self._leaves(x)

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
            if (entries := entries_of(indices, ids, rows_of(module, self.table))) is not None
        ]
        others = [leaf for leaf, module, _ in embeddings if module is None]
        embeddings = [way for way in embeddings if way[1] is not None]
        # The table that was given the very ids embeds tokens, whichever it is. Among equal copies,
        # which may be positions, only the model's own table is known to do so.
        surely = [leaf for leaf, module, view in embeddings if view or module is self.table]
        leaves = surely or [leaf for leaf, _, _ in embeddings]
        known = torch.zeros(ids.numel(), dtype=torch.bool)
        for _, entries in [*leaves, *others]:
            known[entries] = True
        if not bool(known.all()):
            raise InputError(
                f"the model embeds {int(known.sum())} of the {ids.numel()} ids of inputs, of shape "
                f"{tuple(ids.shape)}, by torch.nn.Embedding or as rows of a table, so the start of "
                "the propagation is not known; expected all, as a whole or in views of them, such "
                "as columns. Explain the embeddings instead, or pass what is not ids in "
                "additional_forward_args."
            )
        if not surely and len({id(module) for _, module, _ in embeddings}) > 1:
            raise ValueError(
                "several embedding tables were given ids equal to the inputs (positions, perhaps), "
                "so the one that embeds the tokens is not known; give the model a "
                "get_input_embeddings() that returns it, or explain the embeddings instead."
            )
        every = torch.arange(ids.numel())
        return [*leaves, *others, *((tokens, every) for tokens in self.filled_tokens)]

    def looked_up(self, ids: Tensor, rows: Tensor) -> Tensor:
        starts = {get_gradient_edge(start).node for start in self.starts()}
        if rows.grad_fn is not None and not starts.isdisjoint(nodes_before([rows.grad_fn], ())):
            return rows  # of tokens, such as the logits of their own ids
        leaf = rows.detach().clone().requires_grad_(True)
        self.embedded.append((None, ids, leaf))
        return leaf.clone()  # a model may write into it

    def filled(self, tokens: Tensor) -> Tensor:
        leaf = tokens.clone().requires_grad_(True)
        self.filled_tokens.append(leaf)
        return leaf

    def _embedding(self, call: MixerCall) -> Tensor | None:
        # A table that was given the ids. A table of positions may be too: `_leaves` tells.
        indices = next(tensors_in((call.args, call.kwargs)))
        ids = (x for x in self.inputs if not x.is_floating_point())
        rows = rows_of(call.module, self.table)
        if all(entries_of(indices, x, rows) is None for x in ids):
            return None
        before = self.embedded[-1:]
        if before and before[0][0] is None and before[0][1] is indices:
            self.embedded.pop()  # the table's own look-up
        leaf = call.output.detach().clone().requires_grad_(True)
        self.embedded.append((call.module, indices, leaf))
        return leaf


class StateStandIns(RelevanceStandIns):
    """Stand-ins at which relevance of what mixers began with is read too.

    Attributes:
        of_pasts (dict of str to Past): that relevance, by mixer.
    """

    takes_pasts = True

    def begin(self) -> None:
        super().begin()
        self.pasts: list[tuple[str, Past]] = []
        self.of_pasts: dict[str, Past] = {}

    def __call__(self, call: MixerCall) -> Any:
        if call.past is not None:
            past = call.past.of([x.requires_grad_() for x in call.past.tensors])
            self.pasts.append((call.path, past))
            call = replace(call, past=past)
        return super().__call__(call)

    def relevance(self, score: Tensor) -> list[Tensor]:
        """The relevance of each input's entries, in its shape: of an id that of its embedding."""
        begun = [x for _, past in self.pasts for x in past.tensors]

        def relevance_of(leaves: list[Tensor]) -> list[Tensor]:
            both = [*leaves, *begun]
            relevance = times(both, coefficients_at(both, score))
            rest = iter(relevance[len(leaves) :])
            for path, past in self.pasts:
                self.of_pasts[path] = past.of([next(rest) for _ in past.tensors])
            return relevance[: len(leaves)]

        return self.of_inputs(relevance_of)


def _of_entries(entries: Tensor | None, relevance: Tensor, inputs: Tensor) -> Tensor:
    # Relevance of an input of floats, or of embeddings of some entries of one of ids.
    if entries is None:
        return relevance
    total = relevance.new_zeros(inputs.numel())
    at = entries.flatten().to(total.device)
    total.index_add_(0, at, relevance.reshape(len(at), -1).sum(-1))
    return total.view(inputs.shape)


def _activation(call: MixerCall) -> Tensor | None:
    x = first_input(call).to(call.output.dtype)

    def function(x: Tensor) -> Tensor:
        return type(call.module).forward(call.module, x)

    with torch.no_grad():
        if float(function(x.new_zeros(1))) != 0:
            return None  # a gate
        factor = activation_factor(function, x)
    return x * factor


def with_leaves(request: Request) -> Request:
    """The request with its floating inputs as leaves of a graph."""

    def leaf(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_() if tensor.is_floating_point() else tensor

    with torch.inference_mode(False):
        return replace(request, inputs=tuple(map(leaf, request.inputs)))
