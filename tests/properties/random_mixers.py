"""Random mixers of a scan or several, each with its maps by an impulse probe."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
import wild
from torch import Tensor, nn
from torch.nn import functional as F

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "tanh": torch.tanh}
LENGTH, WIDTH, INNER, STATE = 12, 6, 8, 3
COLUMNS = torch.arange(LENGTH).view(3, -1).T.flatten()


class WrittenOutNorm(nn.Module):
    """A norm of each token's channels, or of groups of them, as papers' code writes it."""

    def __init__(self, groups: int, is_centered: bool, keep: Callable) -> None:
        super().__init__()
        self.groups, self.is_centered, self.keep = groups, is_centered, keep
        self.weight = nn.Parameter(torch.rand(INNER) + 0.5)
        self.bias = nn.Parameter(torch.randn(INNER)) if is_centered else None

    def forward(self, y: Tensor) -> Tensor:
        heads = y.unflatten(-1, (self.groups, -1))
        if self.is_centered:
            heads = heads - self.keep(lambda: heads.mean(-1, keepdim=True), is_term=True)
        scale = self.keep(lambda: (heads.square().mean(-1, keepdim=True) + 1e-5).rsqrt())
        y = (heads * scale).flatten(-2) * self.weight
        return y if self.bias is None else y + self.keep(lambda: self.bias, is_term=True)


class RandomMixer(nn.Module):
    """Projection, convolutions, scans in several orders, their sum, a norm and a gate, at random.

    What is not linear in the projected tokens goes through :meth:`keep`: factors and terms, which
    :meth:`maps` leaves at their values.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        draw = random.Random(seed)
        ways = draw.choice([1, 1, 2, 2, 3])
        self.conv = draw.choice(["", "causal", "centered", "causal", "centered"])
        self.has_own_convs = draw.random() < 0.3
        self.act = draw.choice([*ACTIVATIONS, ""])
        self.orders = [draw.choice([*ORDERS][: draw.choice([2, 3, 6])]) for _ in range(ways)]
        self.sum = draw.choice(["sum", "mean", "weights", "shares"])
        self.adds_values = draw.random() < 0.2
        self.has_skip = draw.random() < 0.7
        kind = draw.choice(["", "", "rms", "layer", "group"])
        if kind in ("layer", "group") and self.sum in ("weights", "shares"):
            kind = "rms"  # the mean of what has different weights is no mean of the scans'
        self.kind = kind
        self.gate = draw.choice(["", "silu", "silu", "own", "channels", "convolved"])
        self.in_proj = nn.Linear(WIDTH, 2 * INNER, bias=draw.random() < 0.5)
        size = 3 if self.conv else 1
        self.convs = nn.ModuleList(
            nn.Conv1d(INNER, INNER, size, groups=INNER, bias=draw.random() < 0.5)
            for _ in range(ways if self.has_own_convs else 1)
        )
        self.projections = nn.ModuleList(nn.Linear(INNER, INNER + 2 * STATE) for _ in range(ways))
        self.rates = nn.ParameterList(torch.randn(INNER, STATE) for _ in range(ways))
        self.skips = nn.ParameterList(torch.randn(INNER) * self.has_skip for _ in range(ways))
        self.weights = nn.ParameterList(torch.randn(INNER) for _ in range(ways))
        self.norm = WrittenOutNorm(2 if kind == "group" else 1, kind != "rms", self.keep)
        self.gates = nn.Linear(INNER, INNER)
        self.gate_conv = nn.Conv1d(INNER, INNER, 3, groups=INNER, padding=2)
        self.out_proj = nn.Linear(INNER, WIDTH)
        self.kept: list[Tensor] | None = None
        self.replayed: Iterator[Tensor] | None = None

    def extra_repr(self) -> str:
        parts = (self.conv, self.has_own_convs, self.act, self.orders, self.sum, self.adds_values)
        return str((*parts, self.has_skip, self.kind, self.gate))

    def keep(self, make: Callable[[], Tensor], is_term: bool = False) -> Tensor:
        if self.replayed is not None:
            found = next(self.replayed)
            return torch.zeros_like(found) if is_term else found
        found = make()
        if self.kept is not None:
            self.kept.append(found)
        return found

    def activated(self, psi: Tensor) -> Tensor:
        if not self.act:
            return psi
        if not self.conv:  # the map starts at what the scan is given
            values = ACTIVATIONS[self.act](psi)
            self.keep(lambda: values)
            return psi if self.replayed is not None else values
        if self.kept is None and self.replayed is None:
            return ACTIVATIONS[self.act](psi)
        return psi * self.keep(lambda: ACTIVATIONS[self.act](psi) / psi)

    def convolved(self, u: Tensor, way: int) -> Tensor:
        if not self.conv:
            return u
        conv = self.convs[way if self.has_own_convs else 0]
        pad = (1, 1) if self.conv == "centered" else (2, 0)
        bias = None if conv.bias is None else self.keep(lambda: conv.bias, is_term=True)
        return F.conv1d(F.pad(u.mT, pad), conv.weight, bias, groups=INNER).mT

    def scanned(self, v: Tensor, way: int) -> Tensor:
        found = self.projections[way](v).split([INNER, STATE, STATE], -1)
        step, B, C = (self.keep(lambda one=one: one) for one in found)
        return wild.scan(v, F.softplus(step), -self.rates[way].exp(), B, C, self.skips[way])

    def gated(self, y: Tensor, z: Tensor) -> Tensor:
        if self.gate == "silu":
            return y * F.silu(z)
        if self.gate == "own":
            return y * self.keep(lambda: torch.sigmoid(y))
        if self.gate == "channels":
            return y * self.keep(lambda: torch.sigmoid(self.gates(y.mean(1, keepdim=True))))
        if self.gate == "convolved":
            return y * F.silu(self.gate_conv(z.mT)[..., :LENGTH].mT)
        return y

    def mixed(self, u: Tensor, z: Tensor) -> Tensor:
        ys, first = [], None
        for way, order in enumerate(self.orders):
            v = self.activated(self.convolved(u, way))
            first = v if first is None else first
            y = ORDERS[order](v, lambda x, way=way: self.scanned(x, way))
            if self.sum == "weights":
                y = y * self.weights[way]
            if self.sum == "shares":
                y = y * self.keep(lambda v=v, way=way: torch.sigmoid(v.mean(1, True)))
            ys.append(y)
        y = sum(ys) / (len(ys) if self.sum == "mean" else 1)
        y = y + first if self.adds_values else y
        return self.gated(self.norm(y) if self.kind else y, z)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.mixed(*self.in_proj(x).chunk(2, -1)))

    def maps(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The maps ``(D, L, L)`` of one text ``(1, L, E)``, and the values that they are of."""
        with torch.no_grad():
            u, z = self.in_proj(x).chunk(2, -1)
            self.kept = []
            self.mixed(u, z)
            kept, self.kept = self.kept, None
            columns = []
            for token in range(LENGTH):  # one impulse for all channels, which do not mix
                self.replayed = iter(kept)
                impulse = torch.zeros_like(u)
                impulse[:, token] = 1
                columns.append(self.mixed(impulse, z)[0].mT)
        self.replayed = None
        values = u if self.conv or not self.act else ACTIVATIONS[self.act](u)
        return torch.stack(columns, 2), values[0]


def plain(v: Tensor, scan: Callable[[Tensor], Tensor]) -> Tensor:
    return scan(v)


def backward(v: Tensor, scan: Callable[[Tensor], Tensor]) -> Tensor:
    return scan(v.flip(1)).flip(1)


def columns(v: Tensor, scan: Callable[[Tensor], Tensor]) -> Tensor:
    return scan(v[:, COLUMNS])[:, COLUMNS.argsort()]


def both_ways(v: Tensor, scan: Callable[[Tensor], Tensor]) -> Tensor:
    there, back = scan(torch.cat([v, v.flip(1)])).chunk(2)
    return there + back.flip(1)


def rolled(v: Tensor, scan: Callable[[Tensor], Tensor]) -> Tensor:
    return scan(v.roll(1, 1)).roll(-1, 1)


def even_first(v: Tensor, scan: Callable[[Tensor], Tensor]) -> Tensor:
    y = scan(torch.cat([v[:, ::2], v[:, 1::2]], 1))
    return torch.stack(y.chunk(2, 1), 2).flatten(1, 2)


ORDERS = {
    "plain": plain,
    "backward": backward,
    "columns": columns,
    "both ways": both_ways,
    "rolled": rolled,
    "even first": even_first,
}
