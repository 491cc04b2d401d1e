"""Tokens that a head weighs are read alike, however the same weighted sum is written."""

from __future__ import annotations

import pytest
import torch
from methods import assert_close
from three_mixers import tokens, with_forward
from torch.nn import functional as F

from captum_ssm import MambaRollout

# Weights of the tokens, (B, L, 1), each made of its own token.
WEIGHTS = {
    "a linear score": lambda g: g**3,
    "a SiLU": lambda g: F.silu(8 * g),
    "a shifted tanh": lambda g: 1 + torch.tanh(5 * g),
    "a squared sigmoid": lambda g: torch.sigmoid(8 * g) ** 2,
    "one of two probabilities": lambda g: torch.cat([8 * g, 0 * g], -1).softmax(-1)[..., :1],
    "normalized": lambda g: F.relu(8 * g) / (F.relu(8 * g).sum(1, keepdim=True) + 1e-3),
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_sum_of_weighed_tokens_is_a_product_with_their_weights(name: str) -> None:
    def weighed(m, h):
        return WEIGHTS[name](m.gate(h))

    forms = (
        lambda m, h: m.head((h * weighed(m, h)).sum(1)),
        lambda m, h: m.head((weighed(m, h).mT @ h)[:, 0]),
        lambda m, h: m.head(h.mean(1)),
    )
    summed, product, mean = (
        MambaRollout(with_forward(lambda m, x, form=form: form(m, m.towards(x)))).attribute(
            tokens()
        )
        for form in forms
    )
    assert_close(summed, product, 1e-9)
    assert float((summed - mean).abs().max()) > 0.05 * float(mean.abs().max())


def test_the_denominator_of_a_norm_is_no_weight() -> None:
    def normed(h):
        return h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)

    def divided(h):
        return h / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    def over(h):
        return h * (1 / (h.square().mean(-1, keepdim=True) + 1e-6).sqrt())

    first, *others = (
        MambaRollout(
            with_forward(lambda m, x, norm=norm: m.head(norm(m.towards(x)).mean(1)))
        ).attribute(tokens())
        for norm in (divided, normed, over)
    )
    for other in others:
        assert_close(other, first, 1e-9)
