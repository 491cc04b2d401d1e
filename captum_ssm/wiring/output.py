"""At which tokens, and how strongly, an output without tokens or a score reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from captum_ssm.graph.points import Point, gradients
from captum_ssm.graph.token_weights import TokenWeights
from captum_ssm.wiring.inputs import portions
from captum_ssm.wiring.joined_streams import joined
from captum_ssm.wiring.ledger import Gathered, gathered, source_of, token_tensors, weights
from captum_ssm.wiring.mixer_graph import MixerGraph
from captum_ssm.wiring.mixing_test import is_mixed
from captum_ssm.wiring.token_order import Orders
from captum_ssm.wiring.wiring import Source, Step


class OutputReads:
    """What the output of one run, or a score, reads.

    Args:
        graph (MixerGraph): the run; its output becomes the pool.
        score (Point, optional): an entry of the output, where the tokens that it is read from are
            asked for, not those of the whole output.
        decodes (bool, optional): whether the output's rows are tokens of a decoder. Default: False

    Attributes:
        pool (Point): the tokens in which all that a pooled output reads comes together; None where
            there are none, or the output holds tokens itself.
    """

    def __init__(self, graph: MixerGraph, score: Point | None, *, decodes: bool = False) -> None:
        self.graph, self.score, self.output = graph, score, graph.entries[graph.end]
        self.root = self.output if score is None else score
        self.decodes = decodes
        self.pool: Point | None = None
        # How strongly a pooled output reads what goes around these tokens, by mixer: (T,).
        self._left: dict[int, Tensor] = {}
        # What the last tensors that hold tokens are made of, where there is no pool.
        self._gathered: frozenset[int] = frozenset()
        if self.root is not None and not self.is_per_token:
            self._find_pool()
        if self.pool is not None:
            graph.entries[graph.end] = self.pool

    @property
    def is_per_token(self) -> bool:
        """Whether what is read is tokens: the output's own, or those of the pool."""
        point, graph = self.output, self.graph
        if point is None or self.pool is not None:
            return True
        if self.decodes or len(point.shape) != 3 or point.shape[0] != graph.batch:
            return False
        return point.tokens in {graph.exits[i].tokens for i in graph.reads[graph.end] if i >= 0}

    @property
    def is_whole(self) -> bool:
        """Whether each token of the output is read for itself."""
        return self.is_per_token and self.score is None and self.pool is None

    def _find_pool(self) -> None:
        graph, root = self.graph, self.root
        assert root is not None
        read = graph.direct[graph.end]
        held = {i: gathered(root, graph.exits[i], graph.batch) for i in read}
        last = max(read)
        some = [tensor for tensor in held[last][1:] if tensor.holds_all_of(graph.exits[last])]
        for tensor in sorted(reversed(some), key=lambda tensor: not tensor.is_permuted):
            holds_all = read <= graph.cut.read_by(tensor.point.edge)
            if holds_all and not self._left_over([tensor]):
                self.pool = tensor.point
                return
        pool = some[-1] if len(read) == 1 and some and some[-1].is_permuted else None
        last_held = [tensors[-1] for tensors in held.values()] if pool is None else [pool]
        left = self._left_over(last_held)
        if all(graph.exits[k].tokens == graph.exits[last].tokens for k in left):
            self._left, self.pool = left, None if pool is None else pool.point
            made_of = (graph.cut.read_by(tensor.point.edge) for tensor in last_held)
            self._gathered = frozenset().union(*made_of)
        # Else they are of other grids, and skips.

    def _left_over(self, held: Sequence[Gathered]) -> dict[int, Tensor]:
        # How strongly is read what goes around these tokens.
        graph = self.graph
        strengths = self._weights(graph.leaves, [tensor.point.edge for tensor in held])
        left = {
            k: strength
            for k, strength in zip(graph.exits, strengths, strict=True)
            if strength is not None
        }
        direct = graph.direct[graph.end]
        return {
            k: strength for k, strength in left.items() if k not in direct and bool(strength.any())
        }

    def shares(
        self, output: Sequence[Source], steps: Sequence[Step], skips: Mapping[int, TokenWeights]
    ) -> list[Tensor | None]:
        """The shares in which tokens after the output's steps are read: ``(B, T)``.

        Where they are read from several steps around one another, they share it. ``skips`` holds
        the ways to these.
        """
        if self.pool is not None:
            read = self._read_at(self.pool)
            if read is None or not bool((read.sum(1) > 0).all()):
                return [None] * len(output)
            return [link.rmatvec(_normalized(read)) for _, link in output]
        mixers = [s if s < 0 else steps[s].calls[0] for s, _ in output]
        read_of = [
            strength for i in mixers if (strength := self._read_of(i, skips.get(i))) is not None
        ]
        whole = reduce(torch.add, [strength.sum(1) for strength in read_of], torch.zeros(()))
        if len(read_of) < len(mixers) or not bool((whole > 0).all()):
            return [None] * len(mixers)
        shares = [_normalized(strength) for strength in read_of]
        streams = joined(self.graph, self.root, output, steps)
        if streams is not None:
            sums = [stream.view(self.graph.batch, -1).mean(1, keepdim=True) for stream in streams]
            shares = [share * part.to(share) for share, part in zip(shares, sums, strict=True)]
        if skips:
            sizes = [self._read_of(i, skips.get(i), power=2) for i in mixers]
            parts = portions([size.sum(1, keepdim=True) for size in sizes if size is not None])
            shares = [share * part for share, part in zip(shares, parts, strict=True)]
        return list(shares)

    def skips_of_pool(
        self, steps: list[Step], shares: list[Tensor | None]
    ) -> tuple[dict[int, Tensor], list[Tensor | None], Tensor | float]:
        """The shares ``(B, T)`` that a pooled output reads around its tokens, by mixer.

        And what is then left of the ``shares`` of all that it is known to read; steps whose stream
        is among the former lose it. And a factor ``(B, 1)`` of all shares: a stream that is read as
        much as the mixers counts one, next to these, as it does where it joins them.
        """
        graph = self.graph
        main = [share for share in shares if share is not None]
        if not self._left or not main or len(main) < len(shares):
            return {}, shares, 1.0
        left = {k: graph.in_order(k, strength) for k, strength in self._left.items()}
        # A residual stream that joins where tokens are no longer apart is one where it is read at
        # the tokens of the mixers, and else goes around them.
        left = {k: w for k, w in left.items() if k in self._gathered or not _is_any_alike(w, main)}
        apart = left.keys() - self._gathered if self.pool is None else set[int]()
        for s, step in enumerate(steps):
            if graph.direct[graph.end].intersection(step.calls):
                before = {back: graph.read_by(steps[s - back].calls[0]) for back in step.around}
                last = {back: max(stream, default=None) for back, stream in before.items()}
                around = tuple(back for back, k in last.items() if k not in apart)
                steps[s] = replace(step, around=around)
        skips = self._last_of_streams(left, steps)
        read = self._read_at(graph.exits[max(graph.direct[graph.end])])
        sums = {k: strength.sum(1, keepdim=True) for k, strength in skips.items()}
        main_sum = next(iter(sums.values())) if read is None else read.sum(1, keepdim=True)
        total = reduce(torch.add, sums.values(), main_sum)
        shares = [share * (main_sum / total) for share in main]
        of_streams = reduce(torch.add, (sums[k] for k in apart & sums.keys()), 0 * main_sum)
        factor = total / (total - torch.minimum(main_sum, of_streams))
        return {k: strength / total for k, strength in skips.items()}, shares, factor

    def _last_of_streams(self, left: dict[int, Tensor], steps: Sequence[Step]) -> dict[int, Tensor]:
        # What is read of the last mixers alone: a residual stream there holds the earlier ones.
        graph, skips = self.graph, dict[int, Tensor]()
        while left:
            k = max(left)
            skips[k] = left.pop(k)
            step = next((candidate for candidate in steps if k in candidate.calls), None)
            stream = graph.read_by(k) if step and step.around else frozenset()
            if not stream <= self._left.keys() or (step and len(step.calls) > 1):
                how = "around all others, without the residual stream there"
                raise graph.refused(k, graph.end, how)
            graph.refuse_mixers(graph.end, k)
            rest = {
                m: strength * (skips[k] == 0) if m in stream else strength
                for m, strength in left.items()
            }
            left = {m: strength for m, strength in rest.items() if bool(strength.any())}
        return skips

    def unheld(
        self, skips: Mapping[int, Tensor], again: Sequence[Source], shares: Sequence[Tensor | None]
    ) -> str | None:
        """What goes around the last mixers, in words; None where nothing does.

        ``again`` is what joins its tokens around their mixers, with its ``shares`` if it is pooled.
        """
        gone = [
            (self.graph.groups[s][0] if s >= 0 else s, link.share if share is None else share)
            for (s, link), share in zip(again, shares, strict=True)
        ]
        gone += skips.items()
        if not gone:
            return None
        parts, held = [], 1.0
        for k, read in gone:
            assert read is not None
            read = read.abs()
            at = (read > 0.01 * read.amax(1, keepdim=True)).any(0).nonzero()[:, 0].tolist()
            where = f"token {at[0]}" if len(at) == 1 else f"{len(at)} tokens"
            # All tokens of an output are read, each for itself.
            share = float(read.mean() if self.is_whole else read.sum(1).mean())
            held -= share
            parts.append(f"{share:.0%} goes around, from {self.graph.name(k)} at {where}")
        return f"the maps hold {held:.0%} of what the score reads; {', '.join(parts)}"

    def rows(self) -> Tensor | None:
        """How far the rows of an output of fewer tokens are from its last tokens, ``(n,)``."""
        graph, root = self.graph, self.output
        leaf, T = graph.exits[graph.end - 1], graph.tokens(graph.end - 1)
        if root is None or len(root.shape) != 3 or root.shape[1] >= T:
            return None
        source, n = source_of(root, leaf, graph.batch), root.shape[1]
        if source is not None:
            return source[:n] - torch.arange(T - n, T)
        ends = torch.tensor([0, n - 1])
        mostly = [self._read_most(root, leaf, int(row)) for row in ends]
        return torch.tensor(mostly) - (T - n + ends)

    def _read_most(self, root: Point, leaf: Point, row: int) -> int:
        # The token that a row of the output reads most, in the first example.
        seed = root.noise().view(root.shape)
        seed = seed * (torch.arange(root.shape[1], device=seed.device) == row)[:, None]
        (gradient,) = gradients([root], [root.flat(seed)], [leaf])
        sizes = leaf.noise()[:, 0] * 0 if gradient is None else gradient.norm(dim=1)
        return int(sizes.view(self.graph.batch, -1)[0].argmax())

    def mixes_after(self) -> bool:
        """Whether tokens act on one another after the last mixers, before a score."""
        graph, root, T = self.graph, self.root, self.graph.tokens(max(self.graph.exits))
        if root is None or self.pool is None or T < 2:
            return False
        leaves = {i: graph.exits[i] for i in range(graph.end) if graph.tokens(i) == T}
        points = token_tensors(root, [self.pool, *graph.leaves], T, graph.batch)
        ends = {graph.end + k: point for k, point in enumerate(points)}
        return bool(ends) and is_mixed(ends, leaves, Orders(graph.batch))

    def _weights(
        self, leaves: Sequence[Point], around: Sequence[GradientEdge] = (), *, power: int = 1
    ) -> list[Tensor | None]:
        if self.root is None:
            return [None] * len(leaves)
        graph = self.graph
        return weights(self.root, leaves, graph.batch, graph.leaves, around, power=power)

    def _read_at(self, leaf: Point) -> Tensor | None:
        # How strongly tokens are read, (B, T), where they are last apart.
        if self.root is None:
            return None
        last = gathered(self.root, leaf, self.graph.batch)[-1]
        (read,) = self._weights([last.point])
        return None if read is None else last.weights(read, self.graph.batch, leaf.tokens)

    def _read_of(self, i: int, skips: TokenWeights | None, *, power: int = 1) -> Tensor | None:
        # How strongly tokens after mixer i are read, in the model's order.
        leaf = self.graph.exits[i]
        if skips is None and power == 1:
            read = self._read_at(leaf)
        else:
            (read,) = self._weights([leaf], () if skips is None else skips.around, power=power)
            if read is not None and skips is not None and skips.kept is not None:
                read = read * skips.kept.to(read)
        return None if read is None else self.graph.in_order(i, read)


def _is_any_alike(read: Tensor, others: Sequence[Tensor]) -> bool:
    # Whether tokens are read in the same shares as in any of the others.
    shares = _normalized(read)
    alike = (other for other in others if other.shape == shares.shape)
    return any(bool((shares - other).abs().max() <= 1e-6 * other.max()) for other in alike)


def _normalized(read: Tensor) -> Tensor:
    return read / read.sum(1, keepdim=True).clamp(min=1e-300)
