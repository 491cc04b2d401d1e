"""Streams that mixers gate, and sums of states: against products written out by hand."""

import pytest
import torch
from methods import MAPS, METHODS, assert_close
from three_mixers import after, rollout, tokens, warnings_of_relevance, with_forward

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    UnsupportedModelError,
    supported,
)


def read_by(m, h):
    return m.head((h + m.c(h))[:, -1])


def gate(m, y):
    return torch.sigmoid(m.gate(y))


# A gate of the stream, which comes of what the mixer returned.
GATED = {
    "a highway": lambda m, x, y: gate(m, y) * y + (1 - gate(m, y)) * x,
    "a share of the stream": lambda m, x, y: y + x * gate(m, y),
    "a denominator": lambda m, x, y: y + x / (1 + m.gate(y) ** 2),
    "a tanh": lambda m, x, y: y + x * (1 + torch.tanh(m.gate(y))) / 2,
}


@pytest.mark.parametrize("name", GATED)
def test_a_stream_that_the_mixer_gates_goes_around_it(name):
    def forward(m, x):
        return read_by(m, GATED[name](m, x, m.a(x)))

    model, x = with_forward(forward), tokens()
    with torch.no_grad():
        _, rows = after(model.a, x, torch.eye(x.shape[1], dtype=x.dtype)[None])
        _, rows = after(model.c, GATED[name](model, x, model.a(x)), rows)
    assert_close(MambaRollout(model).attribute(x).sum(-1)[0], rows[0, -1], 1e-9)


def test_a_mixer_that_is_only_a_gate_is_said():
    model = with_forward(lambda m, x: read_by(m, x + m.a(x) * torch.sigmoid(m.b(x))))
    for method in MAPS:
        (said,) = warnings_of_relevance(model, tokens(), method)
        assert said.startswith("what b returned is only a gate of what others hold")
    assert not warnings_of_relevance(model, tokens(), MambaLRP)
    assert "b returned is only a gate" in supported(model, tokens()).between


@pytest.mark.filterwarnings("ignore:what .* is only a gate")
def test_latim_needs_a_stream_that_the_score_reads_as_more_than_a_gate():
    model = with_forward(lambda m, x: m.head(x * torch.sigmoid(m.gate(m.towards(x))))[:, -1])
    with pytest.raises(UnsupportedModelError, match="leads on to the score"):
        LaTIM(model).attribute(tokens(), target=1)


@pytest.mark.parametrize("output", [torch.softmax, torch.log_softmax, lambda y, _: y.sigmoid()])
def test_a_probability_makes_no_gates_of_mixers(output):
    model = with_forward(lambda m, x: output(m.head(m.towards(x)[:, -1]), -1))
    assert not warnings_of_relevance(model, tokens(), MambaRollout)


@pytest.mark.parametrize("function", [torch.sigmoid, torch.exp, lambda h: 2 * h.softmax(-1)])
@pytest.mark.parametrize("method", [MambaRollout, MambaAttribution])
def test_a_stream_is_read_by_probabilities_of_tokens_as_by_logits(function, method):
    logits = with_forward(lambda m, x: m.head(m.towards(x)))
    both = with_forward(lambda m, x: function(m.head(m.towards(x)))), logits
    shares = []
    for model in both:
        row = method(model).attribute(tokens(), target=(6, 1)).sum(-1)[0]
        shares.append(row if method is MambaRollout else (row > 0.5).double())
    assert_close(*shares, 1e-9)


# One sum in two orders: the first one adds up earlier states before the stream.
SUMS = {
    "two states": (
        lambda x, h, y: (5 * x + h / 10) + y,
        lambda x, h, y: 5 * x + (h / 10 + y),
    ),
    "one is subtracted": (
        lambda x, h, y: (h / 10 - 3 * x) + y,
        lambda x, h, y: (h / 10 + y) - 3 * x,
    ),
    "in another form": (
        lambda x, h, y: (2 * (x.mT + h.mT / 4)).mT + y,
        lambda x, h, y: 2 * x + (h / 2 + y),
    ),
}


@pytest.mark.filterwarnings("ignore:.*goes around")
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("method", METHODS)
def test_states_count_alike_in_whatever_order_they_are_added(name, method):
    def with_sum(add):
        def forward(m, x):
            h = m.towards(x)
            return m.head(add(x, h, h + m.c(h))[:, -1])

        return with_forward(forward)

    x = tokens()
    early, late = (method(with_sum(add)).attribute(x, target=1) for add in SUMS[name])
    assert_close(early, late, 1e-6)


def test_weighted_sums_of_all_states_are_followed():
    # As in a DenseFormer: the first state joins once more, past two mixers.
    def forward(m, x):
        h = m.towards(x)
        y = h + m.c(h)
        return m.head(((4 * x + 0 * h) + y)[:, -1])

    model, x = with_forward(forward), tokens()
    states = rollout(model, x, model.a, model.b, model.c)
    expected = (states[3][1] + 4 * states[0][1])[0, -1] / 5
    assert_close(MambaRollout(model).attribute(x).sum(-1)[0], expected, 1e-9)
    assert abs(supported(model, x).held - 1 / 5) < 1e-6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("where", ["first", "between", "parallel", "last"])
def test_a_mixer_that_nothing_reads_is_none(where, method):
    def forward(m, x, is_read):
        unread = m.c if is_read else (lambda h: h)
        if where == "first":
            unread(x)
        h = x + m.a(x)
        if where in ("between", "parallel"):
            unread(x if where == "parallel" else h)
        h = h + m.b(h)
        if where == "last":
            unread(h)
        return m.head(h[:, -1])

    found, truth = (
        method(with_forward(lambda m, x, r=r: forward(m, x, r))).attribute(tokens(), target=1)
        for r in (True, False)
    )
    assert_close(found, truth, 1e-9)
