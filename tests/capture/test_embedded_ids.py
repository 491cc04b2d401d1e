"""What public models showed, in tiny ones: tables of categories, and writing in place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import randomize, without_biases
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from wild import BothWays, Stack

from captum_ssm import (
    InputError,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    RelevanceFlow,
    UnifiedImplicitAttention,
    UnsupportedModelError,
)
from captum_ssm.attr import TokenAttribution
from captum_ssm.capture.embedded_ids import entries_of
from captum_ssm.models import BidirectionalMamba

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


class Embedding(nn.Embedding):
    """A table with something of its own after the look-up."""

    change = staticmethod(lambda looked_up: looked_up)

    def forward(self, ids: Tensor) -> Tensor:
        return self.change(super().forward(ids))


class Looks(nn.Module):
    """Embeddings, and what ``way(model, ids)`` adds to them."""

    def __init__(self, way: Callable[[Looks, Tensor], Tensor | float] = lambda m, ids: 0.0) -> None:
        super().__init__()
        self.table, self.rows = Embedding(11, 6), nn.Parameter(torch.randn(11, 6))
        self.mixer, self.head = BidirectionalMamba(6, state=4), nn.Linear(6, 3, bias=False)
        self.way = way
        without_biases(randomize(self)).double().eval()

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids) + self.way(self, ids)
        return self.head(h + self.mixer(h))


IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])
WAYS: dict[str, Callable[[Looks, Tensor], Tensor]] = {
    "rows": lambda m, ids: m.rows[ids],
    "scaled rows": lambda m, ids: (2 * m.rows)[ids].mul_(3),
    "rows by position": lambda m, ids: m.rows.index_select(0, ids.flatten()).view(*ids.shape, 6),
    "the same table": lambda m, ids: F.embedding(ids, m.table.weight.detach()),
    "a number for each": lambda m, ids: torch.take(m.rows, ids)[..., None],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_trained", [True, False])
def test_relevance_of_ids_by_a_table_that_is_no_module(way: str, is_trained: bool) -> None:
    model = Looks(WAYS[way]).requires_grad_(is_trained)
    found, delta = MambaLRP(model).attribute(IDS, 1, return_convergence_delta=True)
    assert float(delta.abs().max()) < 1e-12
    # Both ways in one table of embeddings.
    joined = Looks()
    every = torch.arange(11)
    joined.table.weight.data.add_(model.way(model, every[None])[0].detach())
    assert_close(found, MambaLRP(joined).attribute(IDS, 1))


class LooksAlone(Looks):
    """It has no module that embeds."""

    def forward(self, ids: Tensor) -> Tensor:
        h = self.way(self, ids)
        return self.head(h + self.mixer(h))


@pytest.mark.parametrize("way", [way for way in WAYS if way != "a number for each"])
def test_a_model_whose_only_table_is_no_module(way: str) -> None:
    model = LooksAlone(WAYS[way])
    found, delta = MambaLRP(model).attribute(IDS, 1, return_convergence_delta=True)
    assert float(delta.abs().max()) < 1e-12
    table = Looks(lambda m, ids: torch.zeros(()))
    table.table.weight.data.copy_(model.way(model, torch.arange(11)[None])[0].detach())
    table.mixer, table.head = model.mixer, model.head
    assert_close(found, MambaLRP(table).attribute(IDS, 1))
    edges = RelevanceFlow(model).edges(IDS, 1)
    assert all(max(layer.relative_errors) < 1e-9 for layer in edges.values())


def test_what_is_read_of_tokens_at_their_ids_is_no_table() -> None:
    model = Looks()

    def own(ids: Tensor) -> Tensor:
        return model(ids)[torch.arange(len(ids))[:, None], torch.arange(ids.shape[1]), ids]

    ids = IDS % 3
    found, delta = MambaLRP(own, model=model).attribute(ids, 4, return_convergence_delta=True)
    assert float(delta.abs().max()) < 1e-12
    assert bool((found[:, :5].abs().sum(1) > 0).all())


@pytest.mark.parametrize("method", METHODS)
def test_a_table_that_mixes_tokens_is_refused(method: type[TokenAttribution]) -> None:
    model = Looks()
    method(model).attribute(IDS, 1)
    model.table.change = lambda looked_up: looked_up + looked_up.flip(1)
    with pytest.raises(UnsupportedModelError, match=r"table .* mixes tokens"):
        method(model).attribute(IDS, 1)
    # What else it does, each token for itself.
    model.table.change = lambda looked_up: 3 * looked_up + torch.arange(7.0)[:, None].double()
    method(model).attribute(IDS, 1)
