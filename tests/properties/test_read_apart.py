"""A stream that an output reads apart from what mixers return: against products by hand."""

import pytest
import torch
from methods import assert_close
from three_mixers import L, rollout, tokens, with_forward

from captum_ssm import MambaRollout, RawAttention, supported
from captum_ssm.mixers import MixerCall, find_adapter


def row(at):
    return torch.eye(L, dtype=torch.float64)[at]


MEAN = torch.full((L,), 1 / L, dtype=torch.float64)
# What the score reads, and how: of the input, of the state after a, and of what b returned.
APART = {
    "one token, and the mean": (
        lambda m, x, h, y: m.head(h[:, -1] + y.mean(1)),
        (None, row(-1), MEAN),
    ),
    "the first of the input": (
        lambda m, x, h, y: m.head(x[:, 0] + y.mean(1)),
        (row(0), None, MEAN),
    ),
    "two tokens": (lambda m, x, h, y: m.head(5 * h[:, 3] + y[:, -1]), (None, 5 * row(3), row(-1))),
    "the input, and another token": (
        lambda m, x, h, y: m.head(x[:, 3] + y[:, -1]),
        (row(3), None, row(-1)),
    ),
}


@pytest.mark.parametrize("name", APART)
def test_what_is_read_apart_from_a_mixer_goes_past_it(name):
    head, read = APART[name]
    model, x = with_forward(lambda m, x: apart(m, x, head)), tokens()
    of_input, of_state, of_mixer = (torch.zeros(L).double() if w is None else w for w in read)
    with torch.no_grad():
        (_, _), (h, rows) = rollout(model, x, model.a)
        call = MixerCall("b", model.b, (h,), {}, model.b(h))
        mixed = find_adapter(model.b)(call).recurrence.matrix("mean")[0] @ rows[0]
    # The stream, or the mixer, counts one, whichever is read more.
    past = of_input.sum() + of_state.sum()
    expected = (of_input + of_state @ rows[0] + of_mixer @ mixed) / max(past, of_mixer.sum())
    assert_close(MambaRollout(model).attribute(x).sum(-1)[0], expected, 1e-9)
    share = float(of_mixer.sum() / (past + of_mixer.sum()))
    assert abs(supported(model, x).held - share) < 1e-6
    with pytest.warns(UserWarning, match=f"the maps hold {share:.0%} of what the score reads"):
        RawAttention(model).attribute(x)


def apart(m, x, head):
    h = x + m.a(x)
    return head(m, x, h, m.b(h))


JOINED = {
    "means": (lambda m, h, y: h.mean(1) + y.mean(1), MEAN, None),
    "a larger mean": (lambda m, h, y: 3 * h.mean(1) + y.mean(1), MEAN, None),
    "a token in addition": (
        lambda m, h, y: (h + y)[:, -1] + 3 * (h + y)[:, 0] + 2 * h[:, 0],
        (row(-1) + 3 * row(0)) / 6,
        row(0) / 3,
    ),
}


@pytest.mark.parametrize("name", JOINED)
def test_what_is_read_at_the_tokens_of_the_mixers_is_their_stream(name):
    """Two of them side by side, so that no tensor holds all tokens that the output reads."""
    read, at_sum, at_state = JOINED[name]

    def forward(m, x):
        h = x + m.a(x)
        return m.head(read(m, h, m.b(h) + m.c(h)))

    model, x = with_forward(forward), tokens()
    with torch.no_grad():
        (_, _), (h, rows) = rollout(model, x, model.a)
        both = rows[0].clone()
        for mixer in (model.b, model.c):
            call = MixerCall("mixer", mixer, (h,), {}, mixer(h))
            both += find_adapter(mixer)(call).recurrence.matrix("mean")[0] @ rows[0]
    expected = at_sum @ both
    if at_state is not None:
        expected = expected + at_state @ rows[0]
    assert_close(MambaRollout(model).attribute(x).sum(-1)[0], expected, 1e-9)
