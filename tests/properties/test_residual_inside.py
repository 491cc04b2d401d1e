"""Blocks that add their own input, and scan, in one forward: against the same with it outside."""

from __future__ import annotations

import copy

import pytest
import torch
import wild
from methods import METHODS, assert_close
from torch import nn

import captum_ssm
from captum_ssm.interventions import TokenKnockout, circuit, knockout

E = 6


class Prenormed(wild.Mixer):
    """A norm comes before all else."""

    inside = False

    def __init__(self) -> None:
        super().__init__(width=E)
        self.norm = nn.LayerNorm(E)

    def forward(self, x):
        y = super().forward(self.norm(x))
        return x + y if self.inside else y


class Backwards(Prenormed):
    """It takes and returns what else it holds, and scans from the end."""

    def forward(self, x):
        return super().forward(x.flip(1)).flip(1), x.mean()


class Written(nn.Module):
    """RWKV-6 without token shifts, as its steps are written out to explain it: in float32, with the
    decays made by products with plain matrices."""

    inside, heads = True, 2

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(E), nn.GroupNorm(self.heads, E)
        self.r, self.k, self.v, self.out = (nn.Linear(E, E) for _ in range(4))
        self.down, self.up = nn.Parameter(torch.randn(E, 2)), nn.Parameter(torch.randn(2, E))
        self.bonus = nn.Parameter(torch.randn(self.heads, E // self.heads, 1))

    def coefficients(self, x):
        """By head, ``(B, L, H, K)``: receptance, key, value and decay."""
        x = self.norm(x)
        decay = torch.exp(-torch.exp(torch.tanh(x @ self.down) @ self.up))
        made = (self.r(x), self.k(x), self.v(x), decay)
        return [y.unflatten(-1, (self.heads, -1)) for y in made]

    def step(self, r, k, v, w, state):
        r, k, v, w = (
            y.float() for y in (r.unsqueeze(-2), k[..., None], v.unsqueeze(-2), w[..., None])
        )
        new = k @ v
        out = r @ (state + new * self.bonus)
        return out.squeeze(-2).to(self.bonus.dtype), state * w + new

    def forward(self, x):
        coefficients = self.coefficients(x)
        out = torch.empty_like(coefficients[2])
        state = x.new_zeros(len(x), self.heads, E // self.heads, E // self.heads)
        for t in range(x.shape[1]):
            out[:, t], state = self.step(*(y[:, t] for y in coefficients), state)
        return x + self.out(self.after(out.view(-1, E)).view_as(x))

    def maps(self, x):
        """``(B, H, L, L)``, by its definition."""
        r, k, _, w = (y.transpose(1, 2) for y in self.coefficients(x))
        maps = r.new_zeros(*r.shape[:3], r.shape[2])
        for t in range(r.shape[2]):
            maps[:, :, t, t] = (r[:, :, t] * self.bonus[..., 0] * k[:, :, t]).sum(-1)
            for s in range(t):
                decayed = w[:, :, s + 1 : t].prod(2)
                maps[:, :, t, s] = (r[:, :, t] * decayed * k[:, :, s]).sum(-1)
        return maps


class Model(nn.Module):
    def __init__(self, kind: type[Prenormed]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind() for _ in range(2))
        self.head = nn.Linear(E, 3)

    def forward(self, x):
        for block in self.blocks:
            y = block(x)
            y = y[0] if isinstance(y, tuple) else y
            x = y if block.inside else x + y
        return self.head(x)[:, -1]


def both(kind, dtype=torch.float64):
    """A model with its residual streams in the blocks, and the same outside of them."""
    torch.manual_seed(0)
    outside = Model(kind).to(dtype).eval()
    inside = copy.deepcopy(outside)
    for block in inside.blocks:
        block.inside = True
    x = wild.tokens(width=E).to(dtype)
    assert_close(inside(x), outside(x), 1e-12 if dtype == torch.float64 else 1e-2)
    return inside, outside, x


@pytest.mark.parametrize("kind", [Prenormed, Backwards])
@pytest.mark.parametrize("method", METHODS)
def test_relevance_is_that_with_the_residual_outside(method, kind):
    inside, outside, x = both(kind)
    before = copy.deepcopy(inside.state_dict()), inside(x)
    assert_close(
        method(inside).attribute(x, target=1), method(outside).attribute(x, target=1), 1e-9
    )
    assert all(
        torch.equal(a, b)
        for a, b in zip(before[0].values(), inside.state_dict().values(), strict=True)
    )
    assert torch.equal(before[1], inside(x))


def test_the_residual_stream_is_found():
    inside, outside, x = both(Prenormed)
    told = [captum_ssm.supported(model, x) for model in (inside, outside)]
    assert told[0].between == told[1].between
    assert [mixer.known for mixer in told[0].mixers] == ["measured"] * 2
    assert all(mixer.error < 1e-6 for mixer in told[0].mixers)
    maps, expected = (captum_ssm.hidden_attention(model, x) for model in (inside, outside))
    for name, matrix in maps.items():
        assert_close(matrix, expected[name], 1e-9)


def test_interventions_leave_the_residual_alone():
    inside, outside, x = both(Prenormed)
    scores = []
    for model in (inside, outside):
        method = TokenKnockout(model)
        scores.append([method.attribute(x, target=1, perturbations_per_eval=n) for n in (1, 7)])
        with torch.no_grad(), knockout(model, sources=2):
            scores[-1].append(model(x))
        with torch.no_grad(), circuit(model, {0: torch.zeros(7, 7, dtype=torch.bool)}):
            scores[-1].append(model(x))
    for mine, expected in zip(*scores, strict=True):
        assert_close(mine, expected, 1e-9)


def test_flow_graphs_are_those_with_the_residual_outside():
    inside, outside, x = both(Prenormed)
    graphs = [captum_ssm.RelevanceFlow(model).edges(x[:1], 1) for model in (inside, outside)]
    for name, edges in graphs[0].items():
        assert_close(edges.matrix(), graphs[1][name].matrix(), 1e-9)
        assert max(edges.relative_errors) < 1e-9


def test_a_block_of_written_steps_beside_products_with_matrices():
    torch.manual_seed(0)
    model, x = Model(Written).eval(), wild.tokens(width=E)
    mixers = captum_ssm.supported(model, x).mixers
    assert [mixer.known for mixer in mixers] == ["measured"] * 2
    assert all(mixer.error < 1e-5 for mixer in mixers)
    maps = captum_ssm.hidden_attention(model, x)
    with torch.no_grad():
        for name, block in model.blocks.named_children():
            assert_close(maps[f"blocks.{name}"], block.maps(x), 1e-5)
            x = block(x)


def test_half_precision_is_checked_without_the_residual():
    inside, _, x = both(Prenormed, torch.bfloat16)
    relevance = captum_ssm.MambaLRP(inside).attribute(x, target=1)
    assert relevance.isfinite().all()
