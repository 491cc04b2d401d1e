"""Residual streams side by side count as much as each adds: products written out by hand."""

import pytest
import torch
from methods import assert_close
from three_mixers import E, L, rollout, tokens, with_forward
from torch import nn

from captum_ssm import MambaLRP, MambaRollout
from captum_ssm.models import BidirectionalMamba


def towers(joined):
    """A stream around one mixer, and another one around two, joined as ``joined`` says."""
    return with_forward(lambda m, x: joined(m, x + m.a(x), (lambda h: h + m.c(h))(x + m.b(x))))


def last(m, h):
    return m.head(h[:, -1])


# How the streams are joined, by their weights.
JOINED = {
    "added": lambda m, h, g, p, q: last(m, p * h + q * g),
    "in a norm": lambda m, h, g, p, q: last(m, nn.functional.layer_norm(p * h + q * g, (E,))),
    "in a layer": lambda m, h, g, p, q: last(m, m.linear(p * h + q * g)),
    "in other units": lambda m, h, g, p, q: last(m, p * h + q / 50 * (50 * g)),
    "in logits": lambda m, h, g, p, q: p * last(m, h) + q * last(m, g),
    "in logits of all tokens": lambda m, h, g, p, q: (p * m.head(h) + q * m.head(g))[:, -1],
}


@pytest.mark.parametrize(("p", "q"), [(1, 1), (0.9, 0.1), (0.001, 0.999), (3, -1)])
@pytest.mark.parametrize("how", JOINED)
def test_streams_count_as_much_as_they_add(how, p, q):
    model, x = towers(lambda m, h, g: JOINED[how](m, h, g, p, q)), tokens()
    (*_, (_, one)), (*_, (_, other)) = (
        rollout(model, x, *mixers) for mixers in ([model.a], [model.b, model.c])
    )
    expected = (p * one + q * other)[0, -1] / (abs(p) + abs(q))
    assert_close(MambaRollout(model).attribute(x, target=1).sum(-1)[0], expected, 1e-6)


def test_a_mixer_reads_streams_as_much_as_they_add():
    x = tokens()

    def joined(m, h, g):
        h = (3 * h + g) / 4
        return last(m, h + m.late(h))

    model = towers(joined)
    model.late = BidirectionalMamba(E, state=4, bimamba_type="none").double()
    (*_, (h, one)), (*_, (g, other)) = (
        rollout(model, x, *mixers) for mixers in ([model.a], [model.b, model.c])
    )
    _, (_, through) = rollout(model, (3 * h + g) / 4, model.late)
    expected = (through @ ((3 * one + other) / 4))[0, -1]
    assert_close(MambaRollout(model).attribute(x).sum(-1)[0], expected, 1e-6)


def test_branches_of_one_stream_are_added():
    model, x = with_forward(lambda m, x: last(m, x + m.a(x) + m.c(m.b(x)))), tokens()
    one = torch.eye(L, dtype=x.dtype)[None]
    with torch.no_grad():
        a, b = (rollout(model, x, mixer)[-1][1] - one for mixer in (model.a, model.b))
        c = rollout(model, model.b(x), model.c)[-1][1] - one
    expected = (one + a + c @ b)[0, -1]
    assert_close(MambaRollout(model).attribute(x).sum(-1)[0], expected, 1e-9)


@pytest.mark.parametrize("method", [MambaRollout, MambaLRP])
def test_the_mean_of_two_runs_is_one_run(method):
    plain = with_forward(lambda m, x: last(m, m.towards(x)))
    twice = with_forward(lambda m, x: (last(m, m.towards(x)) + last(m, m.towards(x))) / 2)
    expected = method(plain).attribute(tokens(), target=1)
    assert_close(method(twice).attribute(tokens(), target=1), expected, 1e-6)


def with_late_tower(read):
    """A mixer of all tokens, and then one of half of them, whose tokens are repeated."""

    def forward(m, x):
        x = x + m.a(x)
        few = nn.functional.avg_pool1d(x.mT, 2, ceil_mode=True).mT
        few = few + m.b(few)
        return read(m.head(x + few.repeat_interleave(2, 1)[:, : x.shape[1]]))

    return with_forward(forward)


@pytest.mark.parametrize("method", [MambaRollout, MambaLRP])
@pytest.mark.parametrize("position", [1, 6, -1])
def test_positions_count_the_rows_where_the_last_mixer_has_fewer_tokens(method, position):
    x = tokens()
    expected = method(with_late_tower(lambda y: y[:, position])).attribute(x, target=1)
    model = with_late_tower(lambda y: y)
    assert_close(method(model).attribute(x, target=1, position=position), expected, 1e-9)
    row = position % x.shape[1]
    assert_close(method(model).attribute(x, target=(row, 1)), expected, 1e-9)
