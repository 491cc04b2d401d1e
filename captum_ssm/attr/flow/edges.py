"""The edges of all mixers for one score of each example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from captum_ssm.attr.flow.edge import Edge
from captum_ssm.attr.flow.layer_edges import LayerEdges
from captum_ssm.attr.flow.stream import BlockNodes
from captum_ssm.capture.frozen_model import exact_arithmetic
from captum_ssm.errors import brief
from captum_ssm.operators import TopEntries
from captum_ssm.operators.top import ORDERS
from captum_ssm.utils.integers import count_of, index_in


@dataclass(frozen=True, eq=False)
class RelevanceEdges(Mapping[str, LayerEdges]):
    """The edges of every mixer, by its path, and the books that they are kept in.

    Args:
        layers (dict of str to LayerEdges): by path, in forward order.
        score (Tensor): ``(B,)``, what is explained.
        relevance (Any): of the inputs, in their shape, as :class:`~captum_ssm.attr.MambaLRP`
            returns it; None for the rules that do not propagate it.
        blocks (list of BlockNodes): the residual stream around each block that holds mixers.
        is_whole (bool): whether the score reads no token but in what the last of these returns.
        steps (list of list of int): the mixers' indices, those side by side together.
        rule (str): ``"lrp"``, ``"gradient"`` or ``"integrated"``.
        formulation (str): ``"hidden"`` or ``"unified"``.
        of (str): what the score is: that of the target, ``"score"``, its ``"contrast"`` with all
            other answers, or its ``"difference"`` from another answer.

    Examples::

        >>> edges = RelevanceFlow(model).edges(input_ids, target=5)
        >>> list(edges)
        ['backbone.layers.0.mixer', 'backbone.layers.1.mixer']
        >>> edges["backbone.layers.0.mixer"].matrix().shape
        torch.Size([1, 7, 7])
        >>> edges.top(1)[0].target
        6
    """

    layers: dict[str, LayerEdges]
    score: Tensor
    relevance: Any
    blocks: list[BlockNodes] = field(repr=False)
    is_whole: bool = field(repr=False)
    steps: list[list[int]] = field(repr=False)
    rule: str
    formulation: str
    of: str

    def __getitem__(self, layer: str | int) -> LayerEdges:
        index = index_in(layer, len(self.layers))
        if index is not None:
            return list(self.layers.values())[index]
        if layer in self.layers:
            return self.layers[layer]
        raise KeyError(
            f"layer is {brief(layer)}; expected an index from 0 to {len(self.layers) - 1}, or one "
            f"of {', '.join(self.layers)}."
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def errors(self) -> dict[str, tuple[float, float]]:
        """By layer, the largest relevance that the books do not account for, relative.

        At the tokens that read, and at those that are read, see
        :attr:`LayerEdges.relative_errors`.
        """
        return {name: layer.relative_errors for name, layer in self.layers.items()}

    def of_layers(self, layers: int | str | Sequence[int | str]) -> RelevanceEdges:
        """The edges of some mixers only, named by index (negative from the end) or path.

        Raises:
            KeyError: for a layer that is not there, or for none.
        """
        wanted = [layers] if isinstance(layers, (int, str)) else list(layers)
        if not wanted:
            raise KeyError(
                f"layers is {brief(layers)}, which names no layer; expected at least one."
            )
        chosen = [self[name] for name in wanted]
        return replace(self, layers={layer.name: layer for layer in chosen})

    def matrix(self) -> Tensor:
        """Every edge, ``(B, layers, L, L)``, of layers that work on the same tokens."""
        return torch.stack([layer.matrix() for layer in self.layers.values()], 1)

    def top(
        self,
        k: int,
        by: str = "size",
        *,
        layers: int | str | Sequence[int | str] | None = None,
        between: bool = False,
    ) -> list[Edge]:
        """The k largest edges of each example, the largest first, without ever making a map.

        Args:
            k (int): how many, at most.
            by (str, optional): ``"size"``: by absolute relevance, for what a faithful circuit
                needs. ``"signed"``: only edges that support the answer. Default: ``"size"``
            layers (int, str or sequence, optional): of which mixers, by index or path; None for
                all. Default: None
            between (bool, optional): leave out what tokens read from themselves. Default: False

        Returns:
            list of Edge: those of one example after those of another. For a single example they
            name none, and hold for any.

        Raises:
            ValueError: for an unknown ranking, or a k below 1.
            KeyError: for a layer that is not there.
        """
        if by not in ORDERS:
            raise ValueError(f"by is {brief(by)}; expected one of {ORDERS}.")
        k = count_of("k", k, 1)
        chosen = list((self if layers is None else self.of_layers(layers)).layers.values())
        with exact_arithmetic():
            ranked = [layer.operator.top(k, by, between=between) for layer in chosen]
        B = len(self.score)
        return [
            Edge(layer, i, j, value, example=None if B == 1 else example)
            for example in range(B)
            for value, layer, i, j in _merged(ranked, chosen, example, k, by)
        ]


def _merged(
    ranked: Sequence[TopEntries],
    layers: Sequence[LayerEdges],
    example: int,
    k: int,
    by: str,
) -> list[tuple[float, str, int, int]]:
    entries = [
        (value, layer.name, i, j)
        for layer, top in zip(layers, ranked, strict=True)
        for value, i, j in zip(
            *(part[example].tolist() for part in (top.values, top.targets, top.sources)),
            strict=True,
        )
        if value != 0 and (by == "size" or value > 0)
    ]
    return sorted(entries, key=lambda entry: -abs(entry[0]))[:k]
