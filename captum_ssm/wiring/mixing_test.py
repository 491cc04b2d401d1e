"""Whether tokens act on one another between mixers: gradients put in at some reach others.

All tokens here are the same, each mixer's in an order of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from captum_ssm.graph.fast_products import RankOneProducts
from captum_ssm.graph.points import Point, closed, gradients, passing_nan, visit_gradients
from captum_ssm.wiring.token_order import Orders

# So many tokens, in the whole batch, are looked at two by two.
_FEW = 64
# Narrower matrices are multiplied faster than they are exchanged for others of rank one.
_WIDE = 256


def is_mixed(
    roots: Mapping[int, Point],
    leaves: Mapping[int, Point],
    orders: Orders,
    *,
    all_read: bool = False,
    mask: Tensor | None = None,
) -> bool:
    """Whether tokens that mixers are given depend on mixers' and inputs' tokens at other positions.

    So they do where some tokens of an input are read, and others, for which there is another token
    at their position, are not. With ``all_read`` the same is asked of what mixers returned,
    except for padding, where the mask ``(B, L)`` is False.
    """
    asked = [i for i in leaves if i < 0 or all_read]
    if max(point.width for point in leaves.values()) < _WIDE:
        return _finds_mixing(roots, leaves, orders, asked, mask)
    with RankOneProducts():
        suspected = _finds_mixing(roots, leaves, orders, asked, mask)
    return suspected and _finds_mixing(roots, leaves, orders, asked, mask)


def _finds_mixing(
    roots: Mapping[int, Point],
    leaves: Mapping[int, Point],
    orders: Orders,
    asked: Iterable[int],
    mask: Tensor | None,
) -> bool:
    count = next(iter(leaves.values())).tokens
    generator = torch.Generator().manual_seed(0)
    unread = {i: torch.ones(count, dtype=torch.bool) for i in asked}
    numbers, reached = list(leaves), False

    def seed(i: int, root: Point, chosen: Tensor) -> Callable[[], Tensor]:
        rows, columns = root.rank_one(generator)
        rows = rows * orders.chosen(i, chosen).to(root.device)[:, None]
        return lambda: rows * columns

    for chosen in separating(count, generator):

        def visit(k: int, gradient: Tensor, chosen: Tensor = chosen) -> None:
            nonlocal reached
            i = numbers[k]
            others = ~orders.chosen(i, chosen).to(gradient.device)
            # NaN, as at the norm of a token that is zero, tells nothing.
            reached = reached or bool((gradient[others].abs() > 0).any())
            if i in unread:
                unread[i] &= ~(gradient != 0).any(-1).cpu()

        seeds = [seed(i, root, chosen) for i, root in roots.items()]
        visit_gradients(list(roots.values()), seeds, list(leaves.values()), visit)
        if reached:
            return True
    partly = [i for i, tokens in unread.items() if bool(tokens.any()) and not bool(tokens.all())]
    return any(i < 0 or _is_left_out(i, roots, leaves[i], mask) for i in partly)


def _is_left_out(i: int, roots: Mapping[int, Point], leaf: Point, mask: Tensor | None) -> bool:
    # Whether mixers after i are not given all tokens that it returned. Derivatives of zero, as of
    # an MLP of padding, pass on what is not a number: only a choice of tokens keeps it from one.
    later = [root for k, root in roots.items() if k > i]
    seeds = [root.noise().fill_(torch.nan) for root in later]
    with passing_nan():
        (gradient,) = gradients(later, seeds, [leaf])
    if gradient is None:
        return False
    is_read = (gradient != 0).any(-1)
    if mask is not None and mask.numel() == leaf.tokens:
        is_read |= ~mask.flatten().to(is_read.device)
    return not bool(is_read.all())


def unread(roots: Sequence[Point], leaves: Mapping[int, Point]) -> list[int]:
    """The leaves to which the graph shows ways from the roots, none of which depends on them.

    They are subtracted again, multiplied by zero, or read by an activation that is saturated.
    """
    numbers, dead, alive = list(leaves), set[int](), set[int]()

    def visit(k: int, gradient: Tensor) -> None:
        (alive if bool((gradient != 0).any()) else dead).add(numbers[k])

    generator = torch.Generator().manual_seed(0)
    seeds = [partial(root.noise, generator) for root in roots]
    is_wide = any(point.width >= _WIDE for point in leaves.values())
    with RankOneProducts(alike=True) if is_wide else nullcontext():
        visit_gradients(roots, seeds, list(leaves.values()), visit)
    return sorted(dead - alive)


@dataclass(frozen=True)
class Leak:
    """What of other tokens gets into each without a mixer.

    Args:
        share (float): their share in what is read.
        is_far (bool): whether others are read than the neighbors that a token shift or a
            convolution reads.
    """

    share: float
    is_far: bool


def leaks(
    mixer: int,
    root: Point,
    leaves: Mapping[int, Point],
    orders: Orders,
    around: Sequence[GradientEdge] = (),
) -> dict[int, Leak]:
    """What leaks into the tokens that a mixer is given from others of each leaf, if anything does.

    What comes by way of the tensors in ``around`` is no leak.
    """
    generator = torch.Generator().manual_seed(0)
    away, whole = dict.fromkeys(leaves, 0.0), dict.fromkeys(leaves, 0.0)

    def energies(seed: Tensor) -> dict[int, Tensor]:
        by_leaf = zip(leaves, gradients([root], [seed], list(leaves.values())), strict=True)
        return {j: g.double().square().sum(-1).cpu() for j, g in by_leaf if g is not None}

    def put(chosen: Tensor) -> Tensor:
        noise = root.noise(generator)
        return noise * orders.chosen(mixer, chosen).to(root.device)[:, None]

    for half in halves(root.tokens, generator):
        seed = put(half)
        every = leaking = energies(seed)
        if around:
            with closed(around):
                leaking = energies(seed)
        for j, energy in every.items():
            whole[j] += float(energy.sum())
        for j, energy in leaking.items():
            away[j] += float(energy[~orders.chosen(j, half)].sum())
    leaves = {j: leaf for j, leaf in leaves.items() if away[j] > 0}
    if not leaves:
        return {}
    single, near = _neighbors(root.tokens, orders.batch)
    with closed(around):
        energy_of = energies(put(single))
    near_of = {j: float(energy[orders.chosen(j, near)].sum()) for j, energy in energy_of.items()}
    # Half of what goes to other tokens goes to tokens that were not chosen.
    return {
        j: Leak(
            min(1.0, 2 * away[j] / max(whole[j], 1e-300)),
            j in energy_of and near_of[j] < 0.99 * float(energy_of[j].sum()),
        )
        for j in leaves
    }


def _neighbors(count: int, batch: int) -> tuple[Tensor, Tensor]:
    # One of the tokens, late enough that a causal recurrence would show, and those close to it.
    length = count // batch
    t, reach = length - 1 - length // 4, max(1, min(4, length // 4))
    single, near = torch.zeros(2, count, dtype=torch.bool)
    single[t] = True
    near[max(0, t - reach) : t + reach + 1] = True
    return single, near


def separating(count: int, generator: torch.Generator) -> list[Tensor]:
    """Sets of tokens, ``(count,)`` bool: a half and the rest.

    For few tokens they are such that for any two of them, both ways, a set holds one and not the
    other (Sperner: codes of equal weight).
    """
    if count > _FEW:
        return list(halves(count, generator))[:2]
    size = next(k for k in range(2, count + 2) if math.comb(k, k // 2) >= count)
    codes = itertools.islice(itertools.combinations(range(size), size // 2), count)
    holds = torch.zeros(count, size, dtype=torch.bool)
    for token, code in zip(torch.randperm(count, generator=generator).tolist(), codes, strict=True):
        holds[token, list(code)] = True
    return list(holds.T)


def halves(count: int, generator: torch.Generator) -> Iterator[Tensor]:
    # Halves of the tokens and their rests, (count,) bool: where the tokens are few, such that any
    # two of them are told apart.
    numbers = torch.randperm(count, generator=generator)
    for bit in range(max(1, (count - 1).bit_length()) if count <= _FEW else 1):
        half = (numbers >> bit) & 1 == 1
        yield half
        yield ~half
