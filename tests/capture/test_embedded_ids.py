"""What public models showed, in tiny ones: tables of categories, and writing in place."""

from __future__ import annotations

import pytest
import torch
from models import randomize
from torch import Tensor, nn
from torch.testing import assert_close
from wild import BothWays, Stack

from captum_ssm import (
    InputError,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    UnifiedImplicitAttention,
)
from captum_ssm.attr import TokenAttribution
from captum_ssm.capture.embedded_ids import entries_of

MAPS = (RawAttention, MambaRollout, MambaAttribution, UnifiedImplicitAttention)
METHODS = (*MAPS, MambaLRP)


class Body(nn.Module):
    """A classifier of embedded columns."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack(BothWays(), BothWays())

    def forward(self, tokens: Tensor) -> Tensor:
        return self.stack(tokens).mean(1)


class Table(nn.Module):
    """Numbers ``(B, F)`` and categories ``(B, C)``, each column with an embedding of its own.

    A norm follows the numbers' bare multiples, so that the first mixer hardly depends on them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Parameter(torch.randn(3, 6))
        self.categories = nn.ModuleList([nn.Embedding(5, 6), nn.Embedding(7, 4)])
        self.wider = nn.Linear(4, 6, bias=False)
        self.body = Body()

    def embedded(self, numbers: Tensor, categories: Tensor) -> Tensor:
        first, second = self.categories
        assert first(categories[:, 0]).dim() == 2  # called twice, as some do to ask for its shape
        known = [first(categories[:, 0]), self.wider(second(categories[:, 1]))]
        return torch.cat([torch.stack(known, 1), numbers[..., None] * self.numbers], 1)

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        return self.body(self.embedded(numbers, categories))


def columns() -> tuple[Tensor, Tensor]:
    numbers = torch.randn(2, 3)
    numbers[0, 1] = 0.0
    return numbers, torch.tensor([[4, 6], [1, 0]])


@pytest.mark.parametrize("method", METHODS)
def test_a_column_has_the_relevance_of_its_token(method: type[TokenAttribution]) -> None:
    model = randomize(Table()).eval()
    inputs = columns()
    tokens = model.embedded(*inputs).detach()
    of_tokens = method(model.body).attribute(tokens, target=2).sum(-1)
    numbers, categories = method(model).attribute(inputs, target=2)
    assert_close(categories, of_tokens[:, :2], rtol=1e-4, atol=1e-6)
    assert_close(numbers, of_tokens[:, 2:], rtol=1e-4, atol=1e-6)


def test_a_table_in_other_layouts() -> None:
    model = randomize(Table()).eval()
    numbers, categories = columns()
    expected = MambaLRP(model).attribute((numbers, categories), target=2)[1]
    by_columns = categories.T.contiguous().T  # the same values, another layout
    assert_close(MambaLRP(model).attribute((numbers, by_columns), target=2)[1], expected)


@pytest.mark.parametrize("method", METHODS)
def test_ids_that_are_copied_column_by_column_are_refused(method: type[TokenAttribution]) -> None:
    model = randomize(Table()).eval()

    def forward(numbers: Tensor, categories: Tensor) -> Tensor:
        return model(numbers, torch.stack([categories[:, 0], categories[:, 1]], 1).flip(0).flip(0))

    with pytest.raises(InputError, match="embeds 0 of the 4 ids"):
        method(forward, model=model).attribute(columns(), target=2)


def test_which_ids_a_tensor_holds() -> None:
    ids = torch.arange(12).view(3, 4) % 5
    entry = torch.arange(12).view(3, 4)
    assert torch.equal(entries_of(ids, ids), entry)
    assert torch.equal(entries_of(ids.clone(), ids), entry)
    assert torch.equal(entries_of(ids[:, 1], ids), entry[:, 1])
    assert torch.equal(entries_of(ids[1:, ::2], ids), entry[1:, ::2])
    assert torch.equal(entries_of(ids.T, ids), entry.T)
    assert torch.equal(entries_of(ids.T, ids.T), entry.view(4, 3))
    assert entries_of(ids[:, 1].clone(), ids) is None  # a copy could be of another column
    assert entries_of(ids, ids[:, :2]) is None
    assert entries_of(ids[1], ids[0]) is None


class Normalizes(nn.Module):
    """A classifier of series that divides them by their deviation, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.embedding, self.body = nn.Linear(3, 6), Body()

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(1, keepdim=True).detach()
        deviation = torch.sqrt(torch.var(x, dim=1, keepdim=True) + 1e-5)
        if self.in_place:
            x /= deviation
        else:
            x = x / deviation
        return self.body(self.embedding(x))


@pytest.mark.parametrize("method", METHODS)
def test_writing_into_what_the_gradient_needs(method: type[TokenAttribution]) -> None:
    plain, writes = (randomize(Normalizes(in_place)).eval() for in_place in (False, True))
    x = torch.randn(2, 8, 3)
    with pytest.raises(RuntimeError, match="inplace"):
        writes(x.requires_grad_()).sum().backward()
    # The mean is no coefficient, and it is detached.
    with pytest.warns(UserWarning, match="autograd does not show"):
        expected = method(plain).attribute(x.detach(), target=1)
    with pytest.warns(UserWarning, match="autograd does not show"):
        found = method(writes).attribute(x.detach(), target=1)
    assert_close(found, expected)


class WritesAfter(nn.Module):
    """A classifier of series with a product, one of whose factors is changed after it, or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.first, self.second, self.body = nn.Linear(3, 6), nn.Linear(3, 6), Body()

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        product = first * self.second(x)
        if self.in_place:
            first += 3
        else:
            first = first + 3
        return self.body(product + first)


def test_a_memory_limit_does_not_hide_what_is_written() -> None:
    plain, writes = (randomize(WritesAfter(in_place)).eval() for in_place in (False, True))
    x = torch.randn(2, 8, 3)
    expected = MambaLRP(plain).attribute(x, target=1)
    assert_close(MambaLRP(writes, memory_limit=1 << 30).attribute(x, target=1), expected)


class Shifted(nn.Module):
    """One table for each id and, ``again``, for the one before it."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.again = nn.Embedding(11, 6), again
        self.stack = Stack(BothWays(), BothWays())

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def forward(self, ids: Tensor) -> Tensor:
        tokens = self.table(ids)
        if self.again:
            tokens = tokens + self.table(ids.roll(1, 1))
        return self.stack(tokens)[:, -1]


@pytest.mark.parametrize("method", [MambaRollout, MambaLRP])
def test_a_table_that_is_given_moved_ids_too_is_said(method: type[TokenAttribution]) -> None:
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2]])
    with pytest.warns(UserWarning, match="table is given ids that are computed from those"):
        method(Shifted(True).eval()).attribute(ids, target=1)
    method(Shifted(False).eval()).attribute(ids, target=1)  # warnings are errors
