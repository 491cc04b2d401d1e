"""Models put together at random, whose rollout is known step by step.

Each step changes the tokens x ``(B, T, E)`` and the rows ``(B, T, L)`` of the rollout so far: what
each token is made of. The mixers are all of one kind; where they stand, what goes around and past
them, which tokens they are given, and in which order, is drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from models import randomize
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.mixers import MixerCall, find_adapter
from captum_ssm.models import BidirectionalMamba

E = 16


class Mixer(nn.Module):
    """A norm and a mixer, and what that makes of rows."""

    def __init__(self, has_norm: bool = True) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(E) if has_norm else nn.Identity()
        self.mixer = BidirectionalMamba(E, state=4, bimamba_type="none")

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer(self.norm(x))

    def rows(self, x: Tensor, rows: Tensor) -> Tensor:
        given = self.norm(x)
        call = MixerCall("mixer", self.mixer, (given,), {}, self.mixer(given))
        return find_adapter(self.mixer)(call).recurrence.matrix("mean") @ rows


class LayerStep(nn.Module):
    """One step of a model. By default rows stay what they are: tokens do not act on one another."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(E, E), nn.LayerNorm(E)
        self.draw(rng)

    def draw(self, rng: random.Random) -> None:
        """What else is drawn."""

    def rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return rows


class MLP(LayerStep):
    def draw(self, rng):
        self.out, self.is_residual = nn.Linear(E, E), rng.random() < 0.8

    def forward(self, x):
        y = self.out(F.gelu(self.linear(self.norm(x))))
        return x + y if self.is_residual else y


class Norm(LayerStep):
    def forward(self, x):
        return self.norm(x)


class Gate(LayerStep):
    def forward(self, x):
        return x * self.linear(x).sigmoid()


class OneMixer(LayerStep):
    def draw(self, rng):
        self.mixer, self.is_residual = Mixer(rng.random() < 0.7), rng.random() < 0.85
        self.scale = rng.choice([1.0, 0.1, 0.01])

    def forward(self, x):
        y = self.scale * self.linear(self.mixer(x))
        return x + y if self.is_residual else y

    def rows(self, x, rows):
        mixed = self.mixer.rows(x, rows)
        return rows + mixed if self.is_residual else mixed


class InSeries(LayerStep):
    """Two mixers in one branch."""

    def draw(self, rng):
        self.one, self.two, self.is_inner = Mixer(), Mixer(False), rng.random() < 0.5

    def between(self, x):
        return x + self.one(x) if self.is_inner else F.gelu(self.linear(self.one(x)))

    def forward(self, x):
        return x + self.two(self.between(x))

    def rows(self, x, rows):
        between = self.one.rows(x, rows) + (rows if self.is_inner else 0)
        return rows + self.two.rows(self.between(x), between)


class Permuted(LayerStep):
    """The tokens in another order, from here on."""

    def draw(self, rng):
        self.kind, self.seed = rng.choice(["backwards", "shuffled", "turned"]), rng.randrange(1000)

    def order(self, x):
        T = x.shape[1]
        if self.kind == "shuffled":
            return torch.randperm(T, generator=torch.Generator().manual_seed(self.seed))
        return torch.arange(T).flip(0) if self.kind == "backwards" else torch.arange(T).roll(1)

    def forward(self, x):
        return x[:, self.order(x)]

    def rows(self, x, rows):
        return rows[:, self.order(x)]


class SideBySide(Permuted):
    """Two mixers, one of which is given the tokens in another order; a gate for both."""

    def draw(self, rng):
        super().draw(rng)
        self.one, self.two, self.is_gated = Mixer(False), Mixer(False), rng.random() < 0.4

    def forward(self, x):
        order, given = self.order(x), self.norm(x)
        y = self.one(given) + self.two(given[:, order])[:, order.argsort()]
        return x + (y * F.silu(self.linear(given)) if self.is_gated else y)

    def rows(self, x, rows):
        order, given = self.order(x), self.norm(x)
        two = self.two.rows(given[:, order], rows[:, order])[:, order.argsort()]
        return rows + self.one.rows(given, rows) + two


class Partial(LayerStep):
    """A mixer of some of the tokens, around which the others go: all but the first, or every other.

    It is written in the ways in which people write it.
    """

    def draw(self, rng):
        self.mixer, self.first, self.step = Mixer(), rng.choice([0, 1]), 2
        if rng.random() < 0.5:
            self.first, self.step = 1, 1
        self.form = rng.choice(["put", "added", "in place", "padded"])

    def forward(self, x):
        some = slice(self.first, None, self.step)
        mixed = self.mixer(x[:, some])
        if self.form == "added":
            return x.index_add(1, torch.arange(x.shape[1])[some], mixed)
        if self.form == "padded":
            zeros = torch.zeros_like(x)
            zeros[:, some] = mixed
            return x + zeros
        if self.form == "put" and self.step == 1:
            return torch.cat([x[:, : self.first], x[:, some] + mixed], 1)
        y = x.clone()
        y[:, some] += mixed
        return y

    def rows(self, x, rows):
        some = slice(self.first, None, self.step)
        found = rows.clone()
        found[:, some] += self.mixer.rows(x[:, some], rows[:, some])
        return found


class Cropped(LayerStep):
    """Without the first tokens."""

    def draw(self, rng):
        self.count = rng.choice([1, 2])

    def forward(self, x):
        return x[:, self.count :]

    def rows(self, x, rows):
        return rows[:, self.count :]


class Register(LayerStep):
    """A token more, which is a parameter."""

    def draw(self, rng):
        self.token, self.at = nn.Parameter(torch.zeros(1, 1, E)), rng.choice([0, 1, 99])

    def forward(self, x):
        return self._put(x, self.token.expand(len(x), -1, -1))

    def rows(self, x, rows):
        return self._put(rows, torch.zeros_like(rows[:, :1]))

    def _put(self, x, more):
        return torch.cat([x[:, : self.at], more, x[:, self.at :]], 1)


class Repeated(LayerStep):
    """Each token twice: next to itself, or after all others."""

    def draw(self, rng):
        self.form = rng.choice(["side by side", "stacked", "after one another"])

    def forward(self, x):
        if self.form == "after one another":
            return torch.cat([x, self.linear(x)], 1)
        if self.form == "stacked":
            return torch.stack([x, self.linear(x)], 2).flatten(1, 2)
        return x.repeat_interleave(2, 1)

    def rows(self, x, rows):
        if self.form == "after one another":
            return torch.cat([rows, rows], 1)
        return rows.repeat_interleave(2, 1)


STEPS = (MLP, Norm, Gate, Permuted, Cropped, Register, Repeated)
WITH_MIXERS = (OneMixer, OneMixer, InSeries, SideBySide, Partial)
READOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "the first": lambda x: x[:, 0],
    "the last": lambda x: x[:, -1],
    "one between": lambda x: x[:, x.shape[1] // 2],
    "the mean": lambda x: x.mean(1),
}


class Model(nn.Module):
    """Some steps, one of them twice at times, a norm, a head and a readout.

    Args:
        seed (int): decides on all of it.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        kinds = [rng.choice((*STEPS, *WITH_MIXERS)) for _ in range(rng.randint(1, 5))]
        kinds.insert(rng.randint(0, len(kinds)), rng.choice(WITH_MIXERS))
        steps = [kind(rng) for kind in kinds]
        if rng.random() < 0.15:
            steps.append(rng.choice([s for s in steps if not isinstance(s, (Cropped, Register))]))
        self.steps = nn.ModuleList(steps)
        self.norm = nn.LayerNorm(E) if rng.random() < 0.8 else nn.Identity()
        self.head, self.readout = nn.Linear(E, 5), rng.choice(list(READOUTS))
        self.shape = rng.choice([1, 2]), rng.choice([6, 7, 8, 12]), E
        randomize(self)

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return self.head(READOUTS[self.readout](self.norm(x)))

    @torch.no_grad()
    def rollout(self, x: Tensor) -> Tensor:
        """The row of the rollout that the readout reads, ``(B, L)``."""
        rows = torch.eye(x.shape[1], dtype=x.dtype).expand(len(x), -1, -1)
        for step in self.steps:
            x, rows = step(x), step.rows(x, rows)
        return READOUTS[self.readout](rows)

    def __str__(self) -> str:
        return ", ".join([*(type(step).__name__ for step in self.steps), self.readout])
