"""The largest entries of an operator's channel sum, against all of its entries."""

from __future__ import annotations

import pytest
import torch
from test_operators import KINDS, B, D, make_diagonal, make_linear, naive_maps, normal, per_channel

from captum_ssm.operators import PermutedOperator, SumOperator, TokenOperator, top


def channel_sum(operator: TokenOperator) -> torch.Tensor:
    return per_channel(naive_maps(operator)).sum(1)


def expected_values(
    operator: TokenOperator, entries: torch.Tensor, k: int, by: str, between: bool
) -> torch.Tensor:
    """The k largest values per example, from every entry that the operator may have."""
    L = operator.length
    may_be = torch.ones(L, L).tril() if operator.is_causal else torch.ones(L, L)
    may_be = may_be - torch.eye(L) if between else may_be
    values = entries[:, may_be.bool()]
    order = (values.abs() if by == "size" else values).argsort(dim=1, descending=True)
    return values.gather(1, order[:, :k])


@pytest.mark.parametrize("between", [False, True])
@pytest.mark.parametrize("by", top.ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_entries_are_those_of_the_matrix(kind, by, between, monkeypatch):
    monkeypatch.setattr(top, "MOST_ROWS", 5)
    for L, k in ((1, 3), (3, 2), (17, 6), (23, 400)):
        operator = KINDS[kind](L).scaled(normal(B, L, D), normal(B, L, D))
        entries = channel_sum(operator)
        found = operator.top(k, by, between=between)
        values = expected_values(operator, entries, k, by, between)
        assert found.values.shape == found.targets.shape == found.sources.shape == values.shape
        order = torch.Tensor.abs if by == "size" else torch.Tensor.clone
        torch.testing.assert_close(order(found.values), order(values), rtol=1e-9, atol=1e-11)
        example = torch.arange(B)[:, None]
        at_places = entries[example, found.targets, found.sources]
        torch.testing.assert_close(found.values, at_places, rtol=1e-9, atol=1e-11)
        places = found.targets * L + found.sources
        assert all(len(set(row)) == len(row) for row in places.tolist())
        rest = entries.sum((1, 2)) - values.sum(1)
        torch.testing.assert_close(found.rest, rest, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_no_entry_is_larger_than_its_bound(kind):
    for L in (1, 2, 19):
        plain = KINDS[kind](L)
        left = normal(B, L, D) * (torch.arange(L)[:, None] % 3 > 0)
        for operator in (plain, plain.scaled(left, normal(B, L, D))):
            bounds, largest = operator.row_bounds(), channel_sum(operator).abs().amax(-1)
            assert bounds.shape == (B, L)
            assert bool((largest <= bounds * (1 + 1e-12)).all())


def counted(monkeypatch: pytest.MonkeyPatch, operator: TokenOperator) -> list[tuple[int, int]]:
    """The tiles of rows that are computed from now on."""
    tiles: list[tuple[int, int]] = []
    plain = type(operator).row_tile

    def row_tile(self: TokenOperator, start: int, stop: int) -> torch.Tensor:
        tiles.append((start, stop))
        return plain(self, start, stop)

    monkeypatch.setattr(type(operator), "row_tile", row_tile)
    return tiles


@pytest.mark.parametrize("make", [make_diagonal, make_linear])
def test_rows_that_cannot_matter_are_not_computed(make, monkeypatch):
    monkeypatch.setattr(top, "MOST_ROWS", 8)
    L = 80
    left = normal(B, L, D) * 1e-9
    left[:, 40:43] = normal(B, 3, D)
    operator = make(L).compose(left=left, conv=normal(D, 4)).scaled(None, normal(B, L, D))
    tiles = counted(monkeypatch, operator)
    found = operator.top(5)
    assert tiles == [(40, 48)]
    assert bool(((found.targets >= 40) & (found.targets < 43)).all())


def test_both_directions_and_rows_of_zeros():
    L = 30
    order = torch.arange(L).flip(0)
    left = torch.zeros(B, L, D, dtype=torch.float64)
    left[:, 7] = 1.0
    both = SumOperator((make_diagonal(L), PermutedOperator(make_diagonal(L), order)))
    operator = both.scaled(left, None)
    found = operator.top(40)
    assert bool((found.targets[:, :L] == 7).all())
    assert bool((found.values[:, L:] == 0).all())
    torch.testing.assert_close(found.rest, torch.zeros(B, dtype=torch.float64), atol=1e-9, rtol=0)


def test_what_is_asked_for_is_checked():
    operator = make_diagonal(4)
    with pytest.raises(ValueError, match=r"by is 'value'; expected one of \('size', 'signed'\)"):
        operator.top(2, "value")
    with pytest.raises(ValueError, match="k is 0; expected at least 1"):
        operator.top(0)
