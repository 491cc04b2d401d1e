"""What comes of a change of a state, against autograd through the equations of its recurrence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from captum_ssm import UnsupportedModelError
from captum_ssm.mixers import FrozenMixer
from captum_ssm.mixers.memory import changes_of_state, states_of
from captum_ssm.operators import DiagonalOperator, LinearAttentionOperator, SumOperator

B, L, H, K, P = 2, 6, 2, 3, 4
GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def linear(decays: int, erases: bool, bonus: bool) -> LinearAttentionOperator:
    return LinearAttentionOperator(
        query=random(B, L, H, K),
        key=random(B, L, H, K),
        log_decay=-random(B, L, H, decays).abs(),
        erase=random(B, L, H, K) / 2 if erases else None,
        probe=random(B, L, H, K) / 2 if erases else None,
        bonus=random(B, L, H) if bonus else None,
        width=P,
    )


def diagonal() -> DiagonalOperator:
    dt, right, left = random(3, B, L, H * P).abs()
    return DiagonalOperator(
        dt, right, -random(H * P, K).abs(), random(B, L, 2, K), random(B, L, 2, K), left
    )


def of(operator: DiagonalOperator | LinearAttentionOperator) -> FrozenMixer:
    weight = torch.eye(H * P, dtype=torch.float64)
    return FrozenMixer(
        recurrence=operator,
        inputs=random(B, L, H * P),
        out_proj=lambda y: y,
        out_weight=weight,
    )


def step_by_step(operator, v: Tensor) -> tuple[list[Tensor], Tensor]:
    """The states, and what is read of them, by the equations of :mod:`captum_ssm.kernels`."""
    found, read = [], []
    if isinstance(operator, DiagonalOperator):
        x, width = operator, H * P // 2
        into, out = (t.repeat_interleave(width, 2) for t in (x.B, x.C))
        h = torch.zeros(B, H * P, K, dtype=v.dtype)
        for t in range(L):
            written = into[:, t] * (x.right[:, t] * v[:, t])[..., None]
            h = torch.exp(x.A * x.dt[:, t, :, None]) * h + written
            h.requires_grad_()
            found.append(h)
            read.append(x.left[:, t] * (out[:, t] * h).sum(-1))
        return found, torch.stack(read, 1)
    x, v = operator, v.unflatten(-1, (H, P))
    S = torch.zeros(B, H, K, P, dtype=v.dtype)
    for t in range(L):
        if x.bonus is not None:
            own = x.bonus[:, t, :, None] * v[:, t]
            read.append(torch.einsum("bhk,bhkp->bhp", x.query[:, t], S) + own)
        S = x.log_decay[:, t, ..., None].exp() * S
        if x.erase is not None:
            known = torch.einsum("bhk,bhkp->bhp", x.probe[:, t], S)
            S = S - torch.einsum("bhk,bhp->bhkp", x.erase[:, t], known)
        S = S + torch.einsum("bhk,bhp->bhkp", x.key[:, t], v[:, t])
        S.requires_grad_()
        found.append(S)
        if x.bonus is None:
            read.append(torch.einsum("bhk,bhkp->bhp", x.query[:, t], S))
    return found, torch.stack(read, 1).flatten(2)


OPERATORS = {
    "diagonal": diagonal,
    "a decay per head": lambda: linear(1, erases=False, bonus=False),
    "a decay per key": lambda: linear(K, erases=False, bonus=False),
    "a bonus": lambda: linear(K, erases=False, bonus=True),
    "the delta rule": lambda: linear(1, erases=True, bonus=False),
    "the delta rule with a bonus": lambda: linear(K, erases=True, bonus=True),
}


@pytest.mark.parametrize("kind", OPERATORS)
def test_the_coefficient_of_a_state_is_its_gradient(kind):
    operator = OPERATORS[kind]()
    mixer, g = of(operator), random(B, L, H * P)
    found, y = step_by_step(operator, mixer.values)
    torch.testing.assert_close(operator.matvec(mixer.values), y.detach())
    state = operator.joined_states([*states_of(mixer)])
    torch.testing.assert_close(state, torch.stack(found, 1).detach())
    expected = torch.autograd.grad((g * y).sum(), found, allow_unused=True)
    slopes = operator.joined_states([change.rmatvec(g) for change in changes_of_state(mixer)])
    for t in range(L):
        of_t = torch.zeros_like(found[t]) if expected[t] is None else expected[t]
        torch.testing.assert_close(slopes[:, t], of_t)

    # A change of all states, later ones of what earlier ones left too.
    changes = random(*state.shape)
    parts = zip(operator.split_states(changes), changes_of_state(mixer), strict=True)
    change = sum(operator.matvec(part) for part, operator in parts)
    torch.testing.assert_close((g * change).sum(), (slopes * changes).sum())


@pytest.mark.parametrize("kind", OPERATORS)
def test_a_state_is_carried_to_the_next_token_and_written_into(kind):
    operator = OPERATORS[kind]()
    mixer = of(operator)
    state = operator.joined_states([*states_of(mixer)])
    silent = mixer.values.clone()
    silent[:, 3] = 0
    without = operator.joined_states([*states_of(replace(mixer, inputs=silent))])
    torch.testing.assert_close(operator.carried(state[:, 2], 3), without[:, 3])


def test_a_state_that_the_recurrence_does_not_read_is_refused():
    operator = diagonal()
    scaled = replace(operator, right=2 * operator.right)
    delayed = torch.eye(2, dtype=torch.float64)[:1].expand(H * P, 2)  # by one token
    for memory, recurrence in (
        (scaled, operator),
        (operator, SumOperator((operator, operator))),
        (linear(1, erases=False, bonus=False), operator),
        (operator, operator.compose(conv=delayed)),
    ):
        mixer = replace(of(operator), recurrence=recurrence, memory=lambda memory=memory: memory)
        with pytest.raises(UnsupportedModelError, match="which is not what its recurrence"):
            changes_of_state(mixer)
    assert len([*changes_of_state(replace(of(operator), memory=lambda: operator))]) == K
