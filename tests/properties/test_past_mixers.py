"""What is added once more past mixers, at its own tokens: against products written out by hand."""

import warnings

import pytest
import torch
from families import build
from inputs import noise
from methods import MAPS, METHODS, assert_close
from models import ids
from three_mixers import E, L, after, rollout, tokens, with_forward

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    UnifiedImplicitAttention,
    UnsupportedModelError,
    supported,
)
from captum_ssm.capture import Request, freeze
from captum_ssm.wiring.wiring import INPUT

PLACES = [(0, 2), (0, 3), (1, 3)]


def once_more(g, source, place, change=lambda m, h: h):
    """The state after so many mixers is added once more, g times, after others."""

    def forward(m, x):
        states, h = [x], x
        for i, mixer in enumerate((m.a, m.b, m.c, None)):
            if i == place:
                h = h + g * change(m, states[source])
            h = h if mixer is None else h + mixer(h)
            states.append(h)
        return m.head(h[:, -1])

    return with_forward(forward)


@torch.no_grad()
def product(model, x, g, source, place):
    """The row of the last token, of what is added as of a residual stream that counts g.

    What is subtracted has entries of the other sign.
    """
    states = [(x, torch.eye(L, dtype=x.dtype)[None])]
    for i, mixer in enumerate((model.a, model.b, model.c, None)):
        h, rows = states[-1]
        if i == place:
            other, its_rows = states[source]
            h, rows = h + g * other, (rows + g * its_rows) / (1 + abs(g))
        states.append((h, rows) if mixer is None else after(mixer, h, rows))
    return states[-1][1][0, -1]


@pytest.mark.parametrize("g", [0, 1, 5, 500, -0.3, -1, -5])
@pytest.mark.parametrize("place", PLACES, ids=str)
def test_the_rollout_counts_it_as_much_as_it_adds(place, g):
    model, x = once_more(g, *place), tokens()
    expected = product(model, x, g, *place)
    assert_close(MambaRollout(model).attribute(x).sum(-1)[0], expected, 1e-9)
    assert_close(MambaRollout(model).rollout(x)[0, -1], expected, 1e-9)


def test_what_others_hold_is_subtracted():
    # The input in other places.
    def forward(m, x):
        h = m.towards(x)
        return m.head((h + m.c(h) - 2 * x.flip(1))[:, -1])

    model, x = with_forward(forward), tokens()
    states = rollout(model, x, model.a, model.b, model.c)
    expected = (states[3][1] - 2 * states[0][1].flip(1))[0, -1] / 3
    assert_close(MambaRollout(model).attribute(x).sum(-1)[0], expected, 1e-9)


def test_a_stream_that_is_taken_off_again_is_not_there():
    def forward(m, x):
        h = x + m.a(x)
        return m.head((h + m.b(h) - h)[:, -1])

    model, plain = (
        with_forward(one) for one in (forward, lambda m, x: m.head(m.b(x + m.a(x))[:, -1]))
    )
    for method in (*MAPS, MambaLRP):
        found, expected = (method(one).attribute(tokens(), target=1) for one in (model, plain))
        assert_close(found, expected, 1e-9)


SUBTRACTED = {
    "from the stream": lambda m, h, mixer: h - mixer(h),
    "the stream from it": lambda m, h, mixer: -(mixer(h) - h),
}


@pytest.mark.parametrize("name", SUBTRACTED)
def test_a_branch_that_is_subtracted_has_a_projection_of_the_other_sign(name):
    step = SUBTRACTED[name]

    def forward(m, x):
        h = step(m, x, m.a)
        return m.head(step(m, h, m.b)[:, -1])

    model, plain = with_forward(forward), with_forward(lambda m, x: m.head(m.towards(x)[:, -1]))
    with torch.no_grad():
        for mixer in (plain.a, plain.b):
            mixer.out_proj.weight.neg_()
    for method in METHODS:
        found, expected = (method(one).attribute(tokens(), target=1) for one in (model, plain))
        assert_close(found, expected, 1e-9)


def test_a_layer_on_the_way_is_measured():
    # A layer of one's own with singular values of three.
    model, x = once_more(2, 0, 3, change=lambda m, h: m.linear(h)), tokens()
    weight = torch.linalg.qr(torch.randn(E, E, dtype=x.dtype))[0]
    with torch.no_grad():
        model.linear.weight.copy_(3 * weight)
    states = rollout(model, x, model.a, model.b, model.c)
    expected = (states[3][1] + 6 * states[0][1])[0, -1] / 7
    assert_close(MambaRollout(model).attribute(x).sum(-1)[0], expected, 1e-9)


def test_a_projected_series_is_counted_in_the_units_of_the_tokens():
    def forward(m, x):
        start = m.linear(x)
        h = m.towards(start)
        return m.head((h + m.c(h) + 5 * start)[:, -1])

    model, x = with_forward(forward), tokens()
    with torch.no_grad():
        model.linear.weight.mul_(4)
        h = model.linear(x)
    states = rollout(model, h, model.a, model.b, model.c)
    expected = (states[3][1] + 5 * states[0][1])[0, -1] / 6
    assert_close(MambaRollout(model).attribute(x).sum(-1)[0], expected, 1e-9)


def test_ways_from_two_places():
    def forward(m, x):
        first = x + m.a(x)
        h = first + m.b(first)
        return m.head((h + m.c(h) + 2 * first + 3 * x)[:, -1])

    model, x = with_forward(forward), tokens()
    states = rollout(model, x, model.a, model.b, model.c)
    expected = (states[3][1] + 2 * states[1][1] + 3 * states[0][1])[0, -1] / 6
    assert_close(MambaRollout(model).attribute(x).sum(-1)[0], expected, 1e-9)


def test_turned_tokens_before_a_turned_mixer():
    # What the mixer is given is turned around as a whole: its order is not the model's.
    def forward(m, x):
        h = m.towards(x)
        h = h + 2 * x.roll(3, 1)
        return m.head((h + m.c(h.flip(1)).flip(1))[:, -1])

    model, x = with_forward(forward), tokens()
    h, rows = rollout(model, x, model.a, model.b)[-1]
    with torch.no_grad():
        h, rows = h + 2 * x.roll(3, 1), (rows + 2 * torch.eye(L, dtype=x.dtype).roll(3, 0)) / 3
        _, through = after(model.c, h.flip(1), rows.flip(1))
    assert_close(MambaRollout(model).attribute(x).sum(-1)[0], through.flip(1)[0, -1], 1e-9)


def test_a_gate_of_the_input_is_a_coefficient():
    model = with_forward(lambda m, x: m.head((m.towards(x) * torch.sigmoid(m.linear(x)))[:, -1]))
    x = tokens()
    expected = rollout(model, x, model.a, model.b)[-1][1][0, -1]
    assert_close(MambaRollout(model).attribute(x).sum(-1)[0], expected, 1e-9)


@pytest.mark.parametrize("aggregation", ["hidden", "rollout", "attribution"])
def test_every_rollout_follows_it(aggregation):
    method, options = MambaAttribution, {}
    if aggregation != "hidden":
        method, options = UnifiedImplicitAttention, {"aggregation": aggregation}
    x, found = tokens(), []
    for g in (0, 4):
        found.append(method(once_more(g, 0, 3)).attribute(x, 1, **options).sum(-1)[0])
    plain, both = found
    assert_close(both, (plain + 4 * torch.eye(L)[-1]) / 5, 1e-9)


@pytest.mark.parametrize("method", [MambaLRP, LaTIM])
def test_what_is_added_to_the_score_stays_with_its_token(method):
    x, found = tokens(), []
    for g in (0, 5):
        model = once_more(g, 0, 3)
        found.append(method(model).attribute(x, target=1)[0])
    plain, both = found
    added = torch.zeros(L, dtype=x.dtype)
    added[-1] = 5 * model.head.weight[1].detach() @ x[0, -1]
    assert_close((both - plain).sum(-1), added, 1e-9)


@pytest.mark.parametrize("family", ["zamba", "zamba2"])
def test_zambas_attention_reads_the_embeddings_too(family):
    wiring = freeze(Request.of(build(family), None, ids(1, 9))).wiring
    aside = [step for step in wiring.steps if step.is_aside]
    assert [[earlier for earlier, _ in step.reads] for step in aside] == [[3, INPUT]]
    (_, own), (_, past) = aside[0].reads
    assert_close(own.share + past.share, torch.ones(1, 9).double(), 1e-9)
    assert 0.4 < float(past.share.min()) <= float(past.share.max()) < 0.6
    assert wiring.is_chain  # its residual stream is that of the other layers


def test_the_share_is_said():
    model, x = once_more(5, 0, 3), tokens()
    found = supported(model, x)
    assert abs(found.held - 1 / 6) < 1e-6
    assert "83% goes around, from the input" in found.between
    with pytest.warns(UserWarning, match="83% goes around"):
        RawAttention(model).attribute(x)


@pytest.mark.parametrize("method", METHODS)
def test_a_result_can_be_asked_for_the_balance(method):
    plain, model, x = once_more(0, 0, 3), once_more(5, 0, 3), tokens().expand(2, -1, -1)
    for m, held in ((plain, 1), (model, 1 / 6)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what goes around
            relevance, balance = method(m).attribute(x, target=1, return_balance=True)
            assert_close(relevance, method(m).attribute(x, target=1), 1e-12)
        assert_close(balance, torch.full((2,), held, dtype=x.dtype), 1e-9)


def test_the_balance_is_that_of_the_row_and_the_last_result():
    def forward(m, x):
        h = m.towards(x)
        return m.head(h + torch.arange(L).to(x)[:, None] * x)

    model, x = with_forward(forward), tokens()
    for position in (0, 3):
        _, delta, balance = MambaLRP(model).attribute(
            x, (position, 1), return_convergence_delta=True, return_balance=True
        )
        assert_close(
            delta,
            MambaLRP(model).compute_convergence_delta(
                MambaLRP(model).attribute(x, (position, 1)), x, (position, 1)
            ),
            1e-12,
        )
        assert_close(balance, torch.tensor([1 / (1 + position)], dtype=x.dtype), 1e-6)


# What rejoins is one mixer's result, without the stream that it was added to.
WITHOUT_STREAM = {
    "at a mixer": ("between a and c", lambda m, h, y: (h + y) + m.c(h + y)),
    "at the output": ("between a and the output", lambda m, h, y: h + m.c(h) + y),
    "in other places": ("between a and c", lambda m, h, y: (h + y.flip(1)) + m.c(h + y.flip(1))),
}


@pytest.mark.parametrize("name", WITHOUT_STREAM)
def test_a_result_that_rejoins_without_its_stream_is_refused(name):
    between, end = WITHOUT_STREAM[name]

    def forward(m, x):
        y = m.a(x)
        h = x + y
        return m.head(end(m, h + m.b(h), y)[:, -1])

    with pytest.raises(UnsupportedModelError, match=f"^{between}.*without the residual stream"):
        MambaRollout(with_forward(forward)).attribute(tokens())


def test_an_earlier_state_that_gates_what_a_mixer_is_given_does_not_count():
    def forward(m, x):
        h = m.towards(x)
        return m.head((h + m.c(h * x.sigmoid()))[:, -1])

    model, x = with_forward(forward), tokens()
    h, rows = rollout(model, x, model.a, model.b)[-1]
    with torch.no_grad():
        _, whole = after(model.c, h * x.sigmoid(), rows)
    assert_close(MambaRollout(model).attribute(x).sum(-1)[0], whole[0, -1], 1e-9)


@pytest.mark.parametrize("method", MAPS)
def test_an_entry_of_a_dense_output_is_read_where_it_is(method):
    """Each example's own, of a map of classes, by methods that take no score too."""
    model = with_forward(lambda m, x: m.head(m.towards(x)).mT.unflatten(2, (3, 3)))
    x = noise(2, L, E, seed=4)
    found = method(model).attribute(x, target=[(1, 1, 1), (2, 0, 1)])
    for i, (kind, place) in enumerate([(1, 4), (2, 1)]):
        alone = method(lambda x, k=kind, p=place: model(x).flatten(2)[:, k, p], model)
        assert_close(found[i : i + 1], alone.attribute(x[i : i + 1]), 1e-9)
        assert not bool(found[i, place + 1 :].any())
