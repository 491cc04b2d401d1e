"""Mixers of one grid between which other operations mix the tokens, as convolutions of an image."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from groups import SIDE, Groups
from inputs import noise, options
from methods import MAPS, METHODS, assert_close, each
from models import made
from torch import Tensor, nn

from captum_ssm import MambaRollout, RawAttention, UnsupportedModelError, hidden_attention
from captum_ssm.capture import Request, freeze


class Unclear(Groups):
    """Other tokens are added to what comes of the first group than those that it was given."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x).flatten(2).mT
        h = self.conv(0, self.groups[0](h)) + self.conv(1, h)
        return self.head(self.norm(self.groups[1](h).mean(1)))


def wiring_of(model: nn.Module, x: Tensor):
    return freeze(Request.of(model, None, x, None), query=False).wiring


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("skip", [True, False])
def test_a_rollout_is_the_product_with_the_exchange(skip, layers):
    model, x = made(lambda: Groups(layers, skip=skip)), noise(1, 3, SIDE, SIDE)
    maps = [one.mean(1)[0] for one in hidden_attention(model, x).values()]
    T = SIDE**2
    eye = torch.eye(T, dtype=x.dtype)
    inside = [eye, eye]
    for i, one in enumerate(maps):
        inside[i // layers] = (eye + one) @ inside[i // layers]
    with torch.no_grad():
        start = model.inp(x).flatten(2).mT
        end = model.groups[0](start)

    def given(end: Tensor, start: Tensor) -> Tensor:
        # What the first mixer of the second group is given.
        h = model.conv(0, end)
        return model.groups[1].norms[0](h + start if skip else h)[0]

    energies = []
    for argument in (0, 1):
        jacobian = torch.func.jacrev(given, argnums=argument)(end, start)  # (T, E, 1, T, E)
        energies.append(jacobian[:, :, 0].square().sum((1, 3)))
    exchange, past = energies
    share = exchange.sum(1) / (exchange.sum(1) + past.sum(1))
    middle = share[:, None] * (exchange / exchange.sum(1, keepdim=True)) @ inside[0]
    truth = inside[1] @ (middle + (1 - share)[:, None] * eye)
    # The wiring up to the last mixer; each pixel is one token.
    wiring = wiring_of(model, x)
    assert wiring.refused is None
    reads = wiring.steps[layers].reads
    assert [s for s, _ in reads] == ([layers - 1, -1] if skip else [layers - 1])
    before = torch.zeros(1, T, T, dtype=x.dtype)
    for s, link in reads:
        before += link.matmul((eye if s < 0 else inside[0])[None])
    assert_close(inside[1] @ before[0], truth, 0.06)
    if skip:
        assert_close(reads[0][1].share[0], share, 0.02)


@each(METHODS)
@pytest.mark.parametrize("skip", [True, False])
def test_every_method_runs_through_them(method, skip):
    model, x = made(lambda: Groups(skip=skip)), noise(2, 3, SIDE, SIDE)
    # The stream goes around the convolution and the mixers before it, and maps of layers do not.
    is_said = skip and method is RawAttention
    with pytest.warns(UserWarning, match="54% goes around") if is_said else nullcontext():
        found = method(model).attribute(x, 1, **options(method))
        alone = method(model).attribute(x[1:], 1, **options(method))
    assert found.shape == x.shape
    assert bool(found.any())
    assert_close(found[1:], alone, 0.2 if method in MAPS else 0.3)


def test_what_is_not_clear_is_refused():
    model, x = made(Unclear), noise(1, 3, SIDE, SIDE)
    with pytest.raises(UnsupportedModelError, match="something that is not a mixer"):
        MambaRollout(model).attribute(x)
    assert set(hidden_attention(model, x)) == {
        f"groups.{g}.mixers.{k}" for g in (0, 1) for k in (0, 1)
    }
