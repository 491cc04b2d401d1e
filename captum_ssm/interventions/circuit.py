"""Circuits: the model's own run with some edges only, or without some."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from captum_ssm.attr import Edge, RelevanceEdges
from captum_ssm.capture import resolve_model, unwrap
from captum_ssm.capture.model import mixer_index
from captum_ssm.errors import InputError, brief
from captum_ssm.interventions.edges import EdgeSet, ListedEdges, MaskedEdges
from captum_ssm.interventions.editing import edited
from captum_ssm.interventions.left import with_edges
from captum_ssm.interventions.open_mixer import OpenMixer
from captum_ssm.interventions.reference import Reference, whole_mixer
from captum_ssm.interventions.selection import Layers, chosen_layers
from captum_ssm.mixers import FrozenMixer
from captum_ssm.mixers.components import check_formulation
from captum_ssm.operators import SoftmaxOperator
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.integers import as_index

# One edge: (layer, target, source) or (layer, target, source, head).
Listed: TypeAlias = Edge | tuple[int | str, int, int] | tuple[int | str, int, int, int]
Edges: TypeAlias = Iterable[Listed] | Mapping[int | str, Tensor] | Tensor

COEFFICIENTS = ("run", "whole")
ALL = -(2**62)  # stands for all examples or heads


@contextmanager
def circuit(
    model: Any,
    edges: Edges,
    *,
    remove: bool = False,
    formulation: str = "hidden",
    ablation: str | Reference = "zero",
    coefficients: str = "run",
    layers: Layers = None,
    check: bool = True,
) -> Iterator[None]:
    r"""Run the model, inside the block, with these edges of its mixers only, or without them.

    An edge is what one token reads from another one in a layer, :math:`\alpha_{ij} v_j`. Gates,
    norms, skip connections, the residual stream and what lies between the mixers are no edges, and
    stay. With all edges the run is the model's own, bit by bit; without any it is that of a
    :func:`knockout` of all tokens, which is the case of edges from all of some tokens to all of
    others. Each mixer is frozen at the input that the layer has in this run.

    A token that keeps all or none of its edges costs nothing; for each other one in a layer, a row
    of every map is computed, in tiles of bounded memory. Edges that are listed take memory linear
    in the tokens. Gradients go through what is left and its coefficients, as in :func:`knockout`.

    Args:
        model (nn.Module or nnsight model): the model that the block runs.
        edges (iterable, dict or Tensor): one of

            - :class:`~captum_ssm.attr.Edge` objects, or tuples ``(layer, target, source)`` or
              ``(layer, target, source, head)``: layers by index or module path, positions and
              heads negative from the end. Of a module that runs several times, these are edges of
              each call; ``"path:k"`` names its call k, from 0 on, and an Edge is of one call;
            - a dict from layers to bool masks ``(L, L)``, ``(B, L, L)`` or ``(B, M, L, L)`` of
              target and source, for M heads or channels; layers that are not in it have no edges;
            - a bool mask of all layers, ``(layers, L, L)`` or ``(B, layers, L, L)``.
        remove (bool, optional): remove these edges, and keep all others. Default: False
        formulation (str, optional): ``"hidden"``: an edge starts at the scan's value, after the
            short convolution; the norm after the scan is computed anew. ``"unified"``: it starts
            at the mixer's input, goes through the convolution, and holds all parts of the mixer up
            to its output projection, skip connection included; norm and gate stay.
            Default: ``"hidden"``
        ablation (str or Reference, optional): ``"zero"``: a removed edge carries nothing. A
            :class:`Reference`: it carries what it does on other inputs. Default: ``"zero"``
        coefficients (str, optional): ``"run"``: coefficients are those of the changed run.
            ``"whole"``: coefficients, gates and norms of each chosen mixer are those of the run
            without the intervention on the same input, so that only what the edges carry changes;
            the model runs twice. Default: ``"run"``
        layers (int, str, slice or sequence, optional): mixers, by index or path, whose other edges
            are removed; all edges of other layers stay. None for all. Default: None
        check (bool, optional): compare each frozen mixer with its module. Default: True

    Raises:
        ValueError: for an unknown formulation, ablation, coefficients or layer, a layer that
            another intervention edits, or a reference of another formulation.
        TypeError: for edges of another kind.
        UnsupportedModelError: on leaving, where the block did not reach a layer; for a mixer whose
            norm cannot be computed anew.
        InputError: from the run, for edges outside the sequence, the heads or the batch, from a
            later token where none is read, masks of another shape, or a reference of other sizes.
        ReconstructionError: from the run, for a mixer that computes something else.

    Examples::

        >>> with captum_ssm.interventions.circuit(model, [(0, 6, 2), (1, 6, 6)]):
        ...     logits = model(input_ids).logits
        >>> mask = torch.ones(2, 7, 7, dtype=torch.bool)
        >>> with captum_ssm.interventions.circuit(model, mask):
        ...     torch.equal(model(input_ids).logits, model(input_ids).logits)
        True
    """
    check_formulation(formulation)
    if coefficients not in COEFFICIENTS:
        raise ValueError(f"coefficients is {coefficients!r}; expected one of {COEFFICIENTS}.")
    reference = _reference(ablation, formulation)
    root = unwrap(resolve_model(model, None))
    kept = KeptEdges.of(root, edges, remove=remove, formulation=formulation)
    chosen = list(chosen_layers(root, layers))
    if remove:
        named = {name if name in chosen else name.rpartition(":")[0] for name in kept.by_layer}
        chosen = [path for path in chosen if path in named]

    def edit(opened: OpenMixer) -> Tensor:
        source = opened if opened.unedited is None else opened.unedited
        operator = whole_mixer(source.mixer, formulation)
        elsewhere = None if reference is None else reference.at(opened)
        return with_edges(opened, kept.at(opened), operator, elsewhere)

    if not chosen:  # nothing is removed
        yield
        return
    with edited(model, chosen, edit, check=check, unedited=coefficients == "whole"):
        yield


@dataclass(frozen=True)
class KeptEdges:
    """The edges that a model keeps.

    Args:
        by_layer (dict): for each mixer's path, or ``"path:k"`` for its call k, a mask, or numbers
            ``(E, 4)`` int64: example, head, target and source.
        remove (bool): keep all edges except these.
        formulation (str): ``"hidden"`` or ``"unified"``, which edges are meant.
    """

    by_layer: dict[str, Tensor]
    remove: bool
    formulation: str

    @classmethod
    def of(
        cls, model: nn.Module, edges: Edges, *, remove: bool = False, formulation: str = "hidden"
    ) -> KeptEdges:
        """The edges that a user named, as for :func:`circuit`."""
        return cls(_by_layer(model, edges), remove, formulation)

    def at(self, opened: OpenMixer) -> EdgeSet:
        """The edges of one mixer in a run, which tells its tokens, heads and examples."""
        names = (f"{opened.path}:{opened.visit}", opened.path)
        edges = [self.by_layer[name] for name in names if name in self.by_layer]
        if not edges or (len(edges) > 1 and edges[0].dtype != torch.bool):
            edges = [torch.cat([torch.empty(0, 4, dtype=torch.long), *edges])]
        return _edge_set(opened, edges[0], self.remove, self.formulation)


def _reference(ablation: str | Reference, formulation: str) -> Reference | None:
    if isinstance(ablation, str) and ablation == "zero":
        return None
    if not isinstance(ablation, Reference):
        raise ValueError(f"ablation is {ablation!r}; expected 'zero' or a Reference.")
    if ablation.formulation != formulation:
        raise ValueError(
            f"the reference has {ablation.formulation!r} edges and formulation is {formulation!r}; "
            "expected the same. Pass formulation= to Reference.of too."
        )
    return ablation


def _by_layer(model: nn.Module, edges: Any) -> dict[str, Tensor]:
    # For each path a mask, or numbers (E, 4): example, head, target, source.
    paths = list(chosen_layers(model, None))
    if torch.is_tensor(edges):
        axis = edges.dim() - 3
        _check_mask(edges, "edges")
        if axis not in (0, 1) or edges.shape[axis] != len(paths):
            raise ValueError(
                f"edges is a mask of shape {tuple(edges.shape)} for a model of {len(paths)} "
                f"mixers; expected ({len(paths)}, L, L) or (B, {len(paths)}, L, L)."
            )
        return dict(zip(paths, edges.unbind(axis), strict=True))
    if isinstance(edges, RelevanceEdges):
        raise TypeError(
            "edges is a RelevanceEdges, which holds all edges of the model; expected some of them, "
            "such as edges.top(20)."
        )
    if isinstance(edges, Mapping):
        for layer, mask in edges.items():
            _check_mask(mask, f"edges[{brief(layer)}]")
        named = {_path(layer, model, paths): mask for layer, mask in edges.items()}
        if len(named) < len(edges):
            raise ValueError(
                f"edges holds masks of {', '.join(map(brief, edges))}, of which two are of one "
                "layer; expected one mask of each."
            )
        return named
    if isinstance(edges, (str, Edge)) or not isinstance(edges, Iterable):
        raise TypeError(
            f"edges is {brief(edges)}; expected edges in a list, a dict or a bool Tensor."
        )
    listed: dict[str, list[list[int]]] = {}
    for item in edges:
        layer, numbers = _numbers(item)
        path = _path(layer, model, paths)
        if isinstance(item, Edge) and path in paths:  # of the first call
            path = f"{path}:0"
        listed.setdefault(path, []).append(numbers)
    return {path: torch.tensor(numbers) for path, numbers in listed.items()}


def _path(layer: Any, model: nn.Module, paths: list[str]) -> str:
    # Also of one call of a mixer, "path:k".
    if isinstance(layer, str) and layer not in paths:
        path, _, call = layer.rpartition(":")
        if path in paths and call.isdecimal():
            return layer
    return paths[mixer_index(layer, unwrap(model), paths, "edges holds")]


def _check_mask(mask: Any, what: str) -> None:
    if not torch.is_tensor(mask) or mask.dtype != torch.bool:
        kind = mask.dtype if torch.is_tensor(mask) else type(mask).__name__
        raise TypeError(f"{what} is of type {kind}; expected a bool Tensor, True for an edge.")


def _numbers(item: Any) -> tuple[Any, list[int]]:
    # The layer of an edge, and its example, head, target and source.
    fields: tuple[Any, ...] = ()
    if isinstance(item, Edge):
        fields = item.layer, item.target, item.source, item.head, item.example
    elif isinstance(item, (tuple, list)) and len(item) in (3, 4):
        fields = *item, *[None] * (5 - len(item))
    numbers = [ALL if x is None else as_index(x) for x in fields[1:]]
    if not fields or None in numbers or ALL in numbers[:2]:
        raise TypeError(
            f"edges holds {brief(item)}; expected an Edge, (layer, target, source) or "
            "(layer, target, source, head), with integers."
        )
    target, source, head, example = numbers
    return fields[0], [example, head, target, source]  # type: ignore[list-item]


def _edge_set(opened: OpenMixer, edges: Tensor, remove: bool, formulation: str) -> EdgeSet:
    # The edges of a mixer that are kept.
    operator = opened.mixer.operator("hidden")
    B, L, _, M = operator.sizes
    edges = edges.to(operator.device)
    if edges.dtype != torch.bool:
        index = _index(opened, edges, (B, M, L, L))
        _check_order(opened, index, formulation)
        return _listed(index, (B, M, L), not remove)
    shapes = [(L, L), *((b, *heads, L, L) for b in (1, B) for heads in ((), (1,), (M,)))]
    if tuple(edges.shape) not in shapes:
        raise InputError(
            f"the mask of edges is {tuple(edges.shape)} for {opened.path}, which is given {L} "
            f"tokens in {B} examples and has {M} heads or channels: expected ({L}, {L}), "
            f"({B}, {L}, {L}) or ({B}, {M}, {L}, {L})."
        )
    mask = edges if edges.dim() == 4 else edges.view(-1, 1, L, L)
    return MaskedEdges(~mask if remove else mask)


def _index(opened: OpenMixer, edges: Tensor, sizes: tuple[int, ...]) -> Tensor:
    # Edges (E, 4) with numbers from the start; -1 for all.
    size = torch.tensor(sizes, device=edges.device)
    outside = (edges != ALL) & ((edges < -size) | (edges >= size))
    if bool(outside.any()):
        row, column = outside.nonzero()[0].tolist()
        name, limit = ("example", "head", "target", "source")[column], sizes[column]
        raise InputError(
            f"edges holds {int(edges[row, 3])} -> {int(edges[row, 2])} of {opened.path} with "
            f"{name} {int(edges[row, column])}; the layer has {sizes[0]} examples, {sizes[1]} "
            f"heads or channels and {sizes[2]} tokens: expected 0 .. {limit - 1} (or -{limit} .. "
            "-1 from the end)."
        )
    return torch.where(edges == ALL, -1, edges % size)


def _listed(index: Tensor, sizes: tuple[int, int, int], keep: bool) -> ListedEdges:
    B, M, L = sizes
    of_all = index[:, 0] < 0
    if bool(of_all.all()):
        index[:, 0] = 0
        return ListedEdges(index.unique(dim=0), (1, M, L), keep)
    repeated = index[of_all].repeat(B, 1)
    repeated[:, 0] = torch.arange(B, device=index.device).repeat_interleave(int(of_all.sum()))
    index = torch.cat([index[~of_all], repeated]).unique(dim=0)
    return ListedEdges(index, (B, M, L), keep)


def _check_order(opened: OpenMixer, index: Tensor, formulation: str) -> None:
    later = index[index[:, 3] > index[:, 2]]
    if len(later) and not _reads_later(opened.mixer, formulation):
        target, source = later[0, 2:].tolist()
        raise InputError(
            f"edges holds the edge {source} -> {target} of {opened.path}, which reads no later "
            "tokens; expected the target first, then the source, which is not after it."
        )


def _reads_later(mixer: FrozenMixer, formulation: str) -> bool:
    attention = mixer.recurrence
    if not isinstance(attention, SoftmaxOperator) or attention.bias is None:
        return not mixer.operator(formulation).is_causal
    L, bias = attention.length, attention.bias
    later = torch.ones(L, L, device=bias.device).triu(1).bool()
    return bool((bias.expand(*bias.shape[:2], L, L) > -torch.inf)[..., later].any())
