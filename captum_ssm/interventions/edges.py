"""Edges of one mixer that are kept, and what its tokens read along them.

A token that keeps all of its edges has the value that the model computed, and one that keeps none
has what is not an edge. Only the others cost something: a product of sources and targets takes one
masked scan. Any other set takes the rows of the operator at these tokens, in tiles of bounded
memory; or, of a list with few edges per token, only its entries where the operator knows them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from captum_ssm.operators import SoftmaxOperator, TokenOperator
from captum_ssm.utils.lazy import cached_property
from captum_ssm.utils.memory import tile_entries
from captum_ssm.utils.plain_graph import recomputed

FEW = 4  # edges into a token, up to which entries cost less than a row


@dataclass(frozen=True)
class EdgeSum:
    """A sum over edges in a mixer: what each token reads, in the order of one scan.

    Args:
        operator (TokenOperator): the coefficients of the edges.
        values (Tensor): ``(B, L, D)``, what the edges start at.
        whole (Tensor): ``(B, L, D)``, the sum over all edges and what is not an edge.
        rest (Tensor): ``(B, L, D)``, what is not an edge.
        reference (EdgesElsewhere, optional): what edges that are not kept carry; None for nothing.
            Default: None
    """

    operator: TokenOperator
    values: Tensor
    whole: Tensor
    rest: Tensor
    reference: EdgesElsewhere | None = None

    @cached_property
    def without_edges(self) -> Tensor:
        """What comes of it if no edge is kept, ``(B, L, D)``."""
        if self.reference is None:
            return self.rest
        return self.rest + self.reference.all_of(self.operator.batch)


@dataclass(frozen=True)
class EdgesElsewhere:
    """What the edges of a scan carry on other inputs.

    Args:
        operator (TokenOperator): of N examples.
        values (Tensor): ``(N, L, D)``.
        mean (bool): over the N examples. Otherwise example b of a batch has that of b modulo N.
    """

    operator: TokenOperator
    values: Tensor
    mean: bool

    def all_of(self, batch: int) -> Tensor:
        """The sum over all edges, ``(batch, L, D)``; ``(1, L, D)`` for the mean."""
        carried = self._carried
        return carried if self.mean else carried.repeat(batch // len(carried), 1, 1)

    @cached_property
    def _carried(self) -> Tensor:
        carried = self.operator.matvec(self.values)
        return carried.mean(0, keepdim=True) if self.mean else carried

    def along(self, rows: Tensor, edges: Tensor, batch: int) -> Tensor:
        """The sum over some edges into some tokens.

        Args:
            rows (Tensor): ``(b, R)`` int64, the tokens; b is 1 or the batch.
            edges (Tensor): bool, ``(b, m, R, L)``.
            batch (int): B.

        Returns:
            Tensor: ``(B, R, D)``, or ``(1, R, D)``.
        """
        if self.mean:
            return self._mean_along(rows, edges)
        N, b = self.operator.batch, len(rows)
        at_once = 1 if b == 1 else N
        parts = [
            carried(self.operator.rows(index.expand(N, -1)), self.values, chosen)
            for index, chosen in zip(rows.split(at_once), edges.split(at_once), strict=True)
        ]
        sums = torch.cat(parts)
        return sums.repeat(batch // len(sums), 1, 1)

    def _mean_along(self, rows: Tensor, edges: Tensor) -> Tensor:
        # The mean of an edge is the same in all examples: it is taken once for each token.
        N, L, D = self.values.shape
        M = max(self.operator.maps, edges.shape[1])
        v = self.values.unflatten(-1, (M, -1))
        chosen = edges.repeat_interleave(M // edges.shape[1], 1).transpose(1, 2)
        chosen = chosen[..., None, :].to(v.dtype)  # (b, R, M, 1, L)
        sums = v.new_zeros(*rows.shape, D)
        step = max(1, tile_entries(1 << 24) // (L * max(N * M, D)))
        for tokens in rows.unique().split(step):
            alpha = self.operator.rows(tokens.expand(N, -1))
            alpha = alpha.repeat_interleave(M // self.operator.maps, 1)
            each = torch.einsum("nmrj,njmp->rmjp", alpha, v) / N
            for token, mean in zip(tokens, each, strict=True):
                of_token = rows == token
                sums[of_token] = (chosen[of_token] @ mean).flatten(1)
        return sums

    def by_edge(self, example: Tensor, target: Tensor, source: Tensor) -> Tensor:
        """What each of E edges carries, ``(E, D)``, where the operator knows entries."""
        N = self.operator.batch
        batch_index = torch.zeros_like(example) if self.mean else example % N
        edges, at = torch.stack([batch_index, target, source]).unique(dim=1, return_inverse=True)
        if not self.mean:
            return self._by_edge(*edges)[at]
        every = edges.repeat_interleave(N, 1)
        every[0] = torch.arange(N, device=at.device).repeat(edges.shape[1])
        return self._by_edge(*every).view(-1, N, self.values.shape[-1]).mean(1)[at]

    def _by_edge(self, example: Tensor, target: Tensor, source: Tensor) -> Tensor:
        alpha = self.operator.entries(example, target, source)
        assert alpha is not None
        return _times(alpha, self.values[example, source])


class EdgeSet(ABC):
    """The edges of a mixer that are kept."""

    @abstractmethod
    def left(self, of: EdgeSum) -> Tensor:
        """What is left of a sum over edges, ``(B, L, D)``."""

    @abstractmethod
    def ordered(self, order: Tensor) -> EdgeSet:
        """The edges between the tokens in another order, whose t-th is the token ``order[t]``."""


@dataclass(frozen=True)
class ProductEdges(EdgeSet):
    """All edges from some tokens to others, in some heads; or all edges except these.

    Args:
        targets, sources (Tensor): bool, ``(B, L)``.
        heads (Tensor): bool, ``(M,)``.
        keep (bool): keep these edges, and no others.
        renormalize (bool): normalize the probabilities that are left of softmax attention.
            Default: False
    """

    targets: Tensor
    sources: Tensor
    heads: Tensor
    keep: bool
    renormalize: bool = False

    def left(self, of: EdgeSum) -> Tensor:
        v, operator, targets = of.values, of.operator, self.targets[..., None]
        if self.renormalize and isinstance(operator, SoftmaxOperator):
            pairs = targets[:, None] & self.sources[:, None, None]
            pairs = (pairs & self.heads[:, None, None]) ^ self.keep  # (B, M, L, L)
            return of.rest + operator.without(pairs).matvec(v)
        channels = self.heads.repeat_interleave(v.shape[-1] // len(self.heads))
        kept = (self.sources[..., None] & channels) ^ (not self.keep)  # (B, L, D)
        loses = ~kept.all(-1, keepdim=True)  # a token loses its edge to some such source
        loses = loses.cummax(1).values if operator.is_causal else loses.any(1, keepdim=True)
        # The scan of what is left, not the difference of two: where nothing is left it is zero.
        left = of.without_edges + operator.matvec(v * kept)
        left = torch.where(loses, left, of.whole)
        return torch.where(targets, left, of.without_edges if self.keep else of.whole)

    def ordered(self, order: Tensor) -> ProductEdges:
        return replace(self, targets=self.targets[:, order], sources=self.sources[:, order])


class RowEdges(EdgeSet):
    """Any edges, read by rows: base of those that are listed, and of masks."""

    @abstractmethod
    def tokens(self, is_causal: bool) -> tuple[Tensor, Tensor]:
        """The tokens that keep all edges, and those that may keep some: bool ``(b, L)`` each."""

    @abstractmethod
    def at(self, rows: Tensor) -> Tensor:
        """Which edges into the tokens ``rows (b, R)`` are kept: bool ``(b, m, R, L)``."""

    def left(self, of: EdgeSum) -> Tensor:
        is_whole, has_some = self.tokens(of.operator.is_causal)
        y = torch.where(is_whole[..., None], of.whole, of.without_edges)
        if not bool(has_some.any()):
            return y
        rows, is_row = _positions(has_some)
        tiles = list(_tiles(rows, of))
        if len(tiles) > 1 and torch.is_grad_enabled():  # a graph of all tiles is that of all rows
            parts = [recomputed(self._tile, of, tile) for tile in tiles]
        else:
            parts = [self._tile(of, tile) for tile in tiles]
        B = len(y)
        example, row = is_row.expand(B, -1).nonzero().unbind(1)
        token = rows.expand(B, -1)[example, row]
        return y.index_put((example, token), torch.cat(parts, 1)[example, row])

    def _tile(self, of: EdgeSum, rows: Tensor) -> Tensor:
        # What is left at the tokens rows (b, R): (B, R, D).
        B, L, D = of.values.shape
        kept, index = self.at(rows), rows.expand(B, -1)
        alpha = of.operator.rows(index)
        if of.operator.is_causal:
            possible = torch.arange(L, device=rows.device) <= rows[:, None, :, None]
        else:  # attention whose mask leaves no edge there
            possible = alpha != 0
        loses = (_matched(possible, kept) & ~_matched(kept, possible)).any(-1).any(1)  # (b, R)
        at = index[..., None].expand(-1, -1, D)
        left = of.rest.gather(1, at) + carried(alpha, of.values, kept)
        left = torch.where(loses[..., None], left, of.whole.gather(1, at))
        if of.reference is None:
            return left
        return left + of.reference.along(rows, ~kept, B)


@dataclass(frozen=True)
class ListedEdges(RowEdges):
    """Edges one by one, or all edges except these; linear memory in the tokens.

    Args:
        index (Tensor): ``(E, 4)`` int64: example, head, target and source, each edge once; -1 for
            all heads. All examples are 0 for edges that are those of every example.
        shape (tuple of int): (b, M, L): 1 or the examples of the batch, heads, tokens.
        keep (bool): keep these edges, and no others.
    """

    index: Tensor
    shape: tuple[int, int, int]
    keep: bool

    def left(self, of: EdgeSum) -> Tensor:
        left = self._by_entries(of)
        return super().left(of) if left is None else left

    def _by_entries(self, of: EdgeSum) -> Tensor | None:
        # What is left where few edges per token are listed: no row is computed.
        B, L, D = of.values.shape
        b = self.shape[0]
        index = self.index[self.index[:, 3] <= self.index[:, 2]]
        count = torch.zeros(b, L, dtype=torch.long, device=index.device)
        count.index_put_((index[:, 0], index[:, 2]), torch.ones_like(index[:, 0]), accumulate=True)
        of_heads, limit = bool((index[:, 1] >= 0).any()), FEW * int((count > 0).sum())
        if of_heads or not 0 < len(index) <= limit or not of.operator.is_causal:
            return None
        example, _, target, source = index.repeat(B // b, 1).unbind(1)
        if b < B:
            example = torch.arange(B, device=target.device).repeat_interleave(len(index))
        alpha = of.operator.entries(example, target, source)
        if alpha is None:
            return None
        moved = _times(alpha, of.values[example, source])
        if of.reference is not None:
            moved = moved - of.reference.by_edge(example, target, source)
        none, every = of.without_edges.expand(B, L, D), of.whole
        if not self.keep:
            none, every, moved = every, none, -moved
        left = none.index_put((example, target), moved, accumulate=True)
        is_all = count == torch.arange(1, L + 1, device=count.device)
        return torch.where(is_all[..., None], every, left) if bool(is_all.any()) else left

    def tokens(self, is_causal: bool) -> tuple[Tensor, Tensor]:
        b, _, L = self.shape
        has_some = torch.zeros(b, L, dtype=torch.bool, device=self.index.device)
        has_some[self.index[:, 0], self.index[:, 2]] = True
        return torch.full_like(has_some, not self.keep), has_some

    def at(self, rows: Tensor) -> Tensor:
        b, M, L = self.shape
        R = rows.shape[1]
        index = torch.full((b, L), -1, device=rows.device)
        index.scatter_(1, rows, torch.arange(R, device=rows.device).expand(b, -1))
        example, head, target, source = self.index.unbind(1)
        row, has_heads = index[example, target], bool((head >= 0).any())
        chosen = torch.zeros(b, M if has_heads else 1, R, L, dtype=torch.bool, device=rows.device)
        for every in (False, True):
            e = (row >= 0) & ((head < 0) == every)
            chosen[example[e], slice(None) if every else head[e], row[e], source[e]] = True
        return chosen if self.keep else ~chosen

    def ordered(self, order: Tensor) -> ListedEdges:
        inverse = torch.argsort(order)
        tokens = inverse[self.index[:, 2:]]
        return replace(self, index=torch.cat([self.index[:, :2], tokens], 1))


@dataclass(frozen=True)
class MaskedEdges(RowEdges):
    """Edges by a mask.

    Args:
        kept (Tensor): bool, ``(b, m, L, L)``, b and m one or all: of target and source.
    """

    kept: Tensor

    def tokens(self, is_causal: bool) -> tuple[Tensor, Tensor]:
        L = self.kept.shape[-1]
        possible = torch.ones(L, L, dtype=torch.bool, device=self.kept.device)
        possible = possible.tril() if is_causal else possible
        keeps = (self.kept & possible).any(-1).any(1)
        loses = (~self.kept & possible).any(-1).any(1)
        return ~loses, keeps & loses

    def at(self, rows: Tensor) -> Tensor:
        examples = torch.arange(len(self.kept), device=rows.device)[:, None]
        return self.kept[examples, :, rows].transpose(1, 2)

    def ordered(self, order: Tensor) -> MaskedEdges:
        return MaskedEdges(self.kept[..., order, :][..., order])


def carried(alpha: Tensor, values: Tensor, edges: Tensor) -> Tensor:
    """What edges carry: rows ``(B, M, R, L)`` of an operator, where a mask is True, of the values.

    Args:
        alpha (Tensor): ``(B, M, R, L)``.
        values (Tensor): ``(B, L, D)``.
        edges (Tensor): bool, ``(b, m, R, L)``.

    Returns:
        Tensor: ``(B, R, D)``.
    """
    alpha = _matched(alpha, edges) * _matched(edges, alpha)
    v = values.unflatten(-1, (alpha.shape[1], -1)).transpose(1, 2)  # (B, M, L, P)
    return (alpha @ v).transpose(1, 2).flatten(2)


def _times(alpha: Tensor, values: Tensor) -> Tensor:
    # Values (E, D) times entries (E, M) of their maps.
    return (alpha[..., None] * values.unflatten(1, (alpha.shape[1], -1))).flatten(1)


def _matched(x: Tensor, other: Tensor) -> Tensor:
    # x (B, M, R, L), with each map as often as another tensor has maps for it.
    maps, others = x.shape[1], other.shape[1]
    return x.repeat_interleave(others // maps, 1) if 1 < maps < others else x


def _positions(mask: Tensor) -> tuple[Tensor, Tensor]:
    # The tokens of a mask (b, L) as indices (b, R), and which of these are not mere filling.
    count = mask.sum(1)
    R = int(count.max())
    rows = mask.int().argsort(dim=1, descending=True, stable=True)[:, :R]
    return rows, torch.arange(R, device=mask.device) < count[:, None]


def _tiles(rows: Tensor, of: EdgeSum) -> Iterator[Tensor]:
    # Tokens whose rows of all maps take a bounded amount of memory (64 MiB in float32).
    B, L, _, M = of.operator.sizes
    B = B if of.reference is None else max(B, of.reference.operator.batch)
    yield from rows.split(max(1, tile_entries(1 << 24) // (B * M * L)), 1)
