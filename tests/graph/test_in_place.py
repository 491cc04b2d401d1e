"""Functions applied in place to views, which an autograd graph hides, have the rules of others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import without_biases
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm import LaTIM, MambaLRP
from captum_ssm.models import BidirectionalMamba

Change = Callable[[Tensor, Tensor], object]
RUNS: list[Tensor] = []  # what models were given: what is of a model is put back


class Changes(nn.Module):
    """Values that ``change(view, other)`` may change in place, then a mixer."""

    def __init__(self, change: Change, last: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.values, self.other = nn.Linear(6, 16, bias=False), nn.Linear(6, 8, bias=False)
        self.mixer, self.head = BidirectionalMamba(8, state=4), nn.Linear(8, 3, bias=False)
        self.change, self.last = change, last
        without_biases(self).double().eval()

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(x)
        view, other = self.values(x)[..., :8], self.other(x)
        if self.last:
            view = view + self.mixer(view)
            view = torch.cat([view, other], -1)[..., :8]
        changed = self.change(view, other)
        # A change in place may return nothing, or what was changed.
        h = view if changed is None else changed
        return self.head((h if self.last else h + self.mixer(h)).mean(1))


def in_place(change: Change) -> Change:
    def changed(view: Tensor, other: Tensor) -> None:
        change(view, other)

    return changed


def put(view: Tensor, other: Tensor) -> None:
    view[..., :3] = other[..., :1]


def chunked(view: Tensor, other: Tensor) -> Tensor:
    first, second = view.chunk(2, -1)
    first.mul_(F.silu(second))
    return torch.cat([first, second], -1)


HIDDEN: dict[str, tuple[Change, Change]] = {
    "gate": (lambda v, o: v * F.silu(o), in_place(lambda v, o: v.mul_(F.silu(o)))),
    "operator": (lambda v, o: v * o, in_place(lambda v, o: v.__imul__(o))),
    "list": (lambda v, o: v * o, in_place(lambda v, o: torch._foreach_mul_([v], [o]))),
    "overload": (lambda v, o: v * o, in_place(lambda v, o: torch.ops.aten.mul_.Tensor(v, o))),
    "norm": (
        lambda v, o: v / (v.square().mean(-1, keepdim=True) + 1e-5).sqrt(),
        in_place(lambda v, o: v.div_((v.square().mean(-1, keepdim=True) + 1e-5).sqrt())),
    ),
    "activation": (lambda v, o: F.silu(v), in_place(lambda v, o: F.silu(v, inplace=True))),
    "by position": (lambda v, o: F.mish(v), in_place(lambda v, o: F.mish(v, True))),
    "transposed": (lambda v, o: F.silu(v), in_place(lambda v, o: nn.SiLU(inplace=True)(v.mT))),
    "view of a view": (
        lambda v, o: torch.cat([v[..., :2], v[..., 2:4] ** 3, v[..., 4:]], -1),
        in_place(lambda v, o: v[..., 1:4][..., 1:].pow_(3)),
    ),
    "two factors": (lambda v, o: v + o * o, in_place(lambda v, o: v.addcmul_(o, o))),
    "whole view": (lambda v, o: v * o.sigmoid(), lambda v, o: v * o[:].sigmoid_()),
    "one of several": (
        lambda v, o: torch.cat([v[..., :4] * F.silu(v[..., 4:]), v[..., 4:]], -1),
        chunked,
    ),
}


def relevance(model: nn.Module, method: type = MambaLRP) -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return method(model).attribute(x, target=1, return_convergence_delta=True)


@pytest.mark.parametrize("kind", HIDDEN)
@pytest.mark.parametrize("last", [False, True])
def test_a_function_in_place_on_a_view_has_its_rule(kind: str, last: bool) -> None:
    out_of_place, hidden = (Changes(change, last) for change in HIDDEN[kind])
    expected, _ = relevance(out_of_place)
    found, delta = relevance(hidden)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    assert float(delta.abs().max()) < 1e-9


@pytest.mark.parametrize("kind", ["gate", "norm"])
def test_a_readout_in_place_on_a_view(kind: str) -> None:
    out_of_place, hidden = (Changes(change, last=True) for change in HIDDEN[kind])
    torch.testing.assert_close(relevance(hidden, LaTIM)[0], relevance(out_of_place, LaTIM)[0])


@pytest.mark.parametrize(
    "change", [put, in_place(lambda v, o: v.add_(o, alpha=2)), in_place(lambda v, o: v.sub_(o))]
)
def test_values_that_are_put_or_added_need_one_run(change: Change) -> None:
    model = Changes(change)
    relevance(model)  # the first look at it takes some runs more
    RUNS.clear()
    _, delta = relevance(model)
    assert float(delta.abs().max()) < 1e-9
    assert len(RUNS) == 1


def test_a_coefficient_that_is_put_into_a_part_is_said() -> None:
    def gated(view: Tensor, other: Tensor) -> Tensor:
        joined = torch.cat([view, other], -1)
        value, gate = joined.chunk(2, -1)
        gate.sigmoid_()
        return value * gate

    with pytest.warns(UserWarning, match="adds the result of Sigmoid .* or joins them"):
        relevance(Changes(gated))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda v, o: v[..., :3].round_(), "adds the result of Round"),
        (lambda v, o: torch.ops.aten.sign_.default(v[..., :3]), "adds the result of Sign"),
        (lambda v, o: torch._foreach_trunc_([v[..., :3]]), "adds the result of Trunc"),
        (lambda v, o: v[..., :3].__imod__(1.0), "Remainder, which has no rule"),
    ],
)
def test_steps_that_a_view_hides_are_no_constants(change: Change, said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        relevance(Changes(in_place(change)))


def test_a_custom_function_in_place_on_a_view_is_named() -> None:
    with pytest.warns(UserWarning, match="in place to a view"):
        relevance(Changes(in_place(lambda v, o: Doubles.apply(v))))


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient
