"""Whether tokens act on one another between mixers: gradients put in at some reach others.

All tokens here are the same, each mixer's in an order of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from captum_ssm._capture.orders import Orders
from captum_ssm._graph import Point, RankOneProducts, gradients, visit_gradients
from captum_ssm._transport import Transport

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
) -> bool:
    """Whether a token of a root depends on a leaf's tokens in other places.

    So it does where some tokens of an input are read, and others, for which there is another token
    in their place, are not.

    Args:
        roots (mapping of int to Point): by mixer, the tokens that it is given.
        leaves (mapping of int to Point): by mixer, the tokens that it returned; by input, below
            zero, its own.
        orders (Orders): of both.
        all_read (bool, optional): ask the same of what mixers returned as of inputs: that all of
            the tokens are read, or none. Default: False
    """
    asked = [i for i in leaves if i < 0 or all_read]
    if max(point.width for point in leaves.values()) < _WIDE:
        return _finds_mixing(roots, leaves, orders, asked)
    with RankOneProducts():
        suspected = _finds_mixing(roots, leaves, orders, asked)
    return suspected and _finds_mixing(roots, leaves, orders, asked)


def _finds_mixing(
    roots: Mapping[int, Point],
    leaves: Mapping[int, Point],
    orders: Orders,
    asked: Iterable[int],
) -> bool:
    count = next(iter(leaves.values())).tokens
    generator = torch.Generator().manual_seed(0)
    unread = {i: torch.ones(count, dtype=torch.bool) for i in asked}
    numbers, found = list(leaves), False

    def seed(i: int, root: Point, chosen: Tensor) -> Callable[[], Tensor]:
        rows, columns = root.rank_one(generator)
        rows = rows * orders.chosen(i, chosen).to(root.device)[:, None]
        return lambda: rows * columns

    for chosen in separating(count, generator):

        def visit(k: int, gradient: Tensor, chosen: Tensor = chosen) -> None:
            nonlocal found
            i = numbers[k]
            others = ~orders.chosen(i, chosen).to(gradient.device)
            # NaN, as at the norm of a token that is zero, tells nothing.
            found = found or bool((gradient[others].abs() > 0).any())
            if i in unread:
                unread[i] &= ~(gradient != 0).any(-1).cpu()

        seeds = [seed(i, root, chosen) for i, root in roots.items()]
        visit_gradients(list(roots.values()), seeds, list(leaves.values()), visit)
        if found:
            return True
    return any(bool(one.any()) and not bool(one.all()) for one in unread.values())


def shares_of_others(
    mixer: int, root: Point, leaves: Mapping[int, Point], orders: Orders
) -> dict[int, float]:
    """The share of tokens in other places in what a mixer's read, by leaf, where there is any."""
    generator = torch.Generator().manual_seed(0)
    away, whole = dict.fromkeys(leaves, 0.0), dict.fromkeys(leaves, 0.0)
    for own in halves(root.tokens, generator):
        seed = root.noise(generator) * orders.chosen(mixer, own).to(root.device)[:, None]
        found = gradients([root], [seed], list(leaves.values()))
        for j, gradient in zip(leaves, found, strict=True):
            if gradient is not None:
                energy = gradient.double().square().sum(-1).cpu()
                whole[j] += float(energy.sum())
                away[j] += float(energy[~orders.chosen(j, own)].sum())
    # Half of what goes to other tokens goes to tokens that were not chosen.
    return {j: min(1.0, 2 * away[j] / whole[j]) for j in leaves if away[j] > 0}


def share_of_others(way: Transport, orders: Orders) -> float:
    """The share of tokens in other places in what is read of a leaf by one way: of all ways."""
    generator = torch.Generator().manual_seed(0)
    away = whole = 0.0
    every = replace(way, around=())
    for own in halves(way.root.tokens, generator):
        seed = way.root.unflat(way.root.noise(generator) * own.to(way.root.device)[:, None])
        here, there = (one.energy(seed) for one in (every, way))
        whole += 0.0 if here is None else float(here.sum())
        away += 0.0 if there is None else float(there.cpu()[~own].sum())
    return min(1.0, 2 * away / max(whole, 1e-300))


def is_local(mixer: int, root: Point, earlier: int, leaf: Point, orders: Orders) -> bool:
    """Whether a token reads its neighbors only, as by a token shift or a convolution.

    Args:
        mixer (int): whose tokens read.
        root (Point): the tokens that it is given.
        earlier (int): the mixer that is read.
        leaf (Point): the tokens that it returned.
        orders (Orders): of both.
    """
    count = root.tokens
    length = count // orders.batch
    t = length - 1 - length // 4  # late enough that a causal recurrence would show
    here = torch.zeros(count, dtype=torch.bool)
    here[t] = True
    noise = root.noise(torch.Generator().manual_seed(0))
    seed = noise * orders.chosen(mixer, here).to(root.device)[:, None]
    (found,) = gradients([root], [seed], [leaf])
    near = torch.zeros(count, dtype=torch.bool)
    reach = max(1, min(4, length // 4))
    near[max(0, t - reach) : t + reach + 1] = True
    if found is None:
        return True
    energy = found.double().square().sum(-1).cpu()
    return float(energy[orders.chosen(earlier, near)].sum()) >= 0.99 * float(energy.sum())


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
    place = torch.randperm(count, generator=generator)
    for bit in range(max(1, (count - 1).bit_length()) if count <= _FEW else 1):
        half = (place >> bit) & 1 == 1
        yield half
        yield ~half
