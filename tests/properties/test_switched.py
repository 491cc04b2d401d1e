"""What a model does in some calls only: later, in long texts, or by what earlier calls left."""

import pytest
import torch
from methods import MAPS, METHODS, assert_close
from models import randomize
from three_mixers import Base, E, tokens, two, warnings_of_relevance, with_forward
from torch import nn

from captum_ssm import MambaLRP, MambaRollout, UnsupportedModelError, supported

HIDDEN = "autograd does not show"


def turned(m, h):
    return h + 3 * h.flip(1).detach() if m.flag else h


def in_long_ones(m, h):
    return h + 3 * h[:, :1].detach() if h.shape[1] > 7 else h


def kept(m, h):
    before = m.__dict__.setdefault("kept", torch.zeros_like(h[:, :1]))
    m.kept = 0.9 * before + 0.1 * h.detach().mean(1, keepdim=True)
    return h + 3 * m.kept if m.flag else h


@pytest.mark.parametrize("change", [turned, in_long_ones, kept])
@pytest.mark.parametrize("method", [MambaRollout, MambaLRP])
def test_a_hidden_way_that_comes_later_is_noticed(change, method):
    model, x = with_forward(lambda m, x: two(m, x, lambda h: change(m, h))), tokens()
    model.flag = False
    assert not warnings_of_relevance(model, x[:, :7], method)
    model.flag = True
    for _ in range(2):
        if method is MambaLRP:
            assert any(HIDDEN in one for one in warnings_of_relevance(model, x))
        else:
            with pytest.raises(UnsupportedModelError, match=HIDDEN):
                method(model).attribute(x)
    model.flag = False
    assert not warnings_of_relevance(model, x[:, :7], method)


def in_place(m):
    with torch.no_grad():
        m.opened += 3


def of_data(m):
    m.opened.data.add_(3)


def exchanged(m):
    m.opened = nn.Parameter(torch.tensor(3.0, dtype=torch.double))


def loaded(m):
    m.load_state_dict(m.state_dict() | {"opened": torch.tensor(3.0).double()}, assign=True)


def of_a_buffer(m):
    m.kept += 3


def of_an_attribute(m):
    m.number = 3.0


def of_a_dict(m):
    m.scaling["default"] = 3.0


CHANGES = (in_place, of_data, exchanged, loaded, of_a_buffer, of_an_attribute, of_a_dict)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("method", [MambaRollout, MambaLRP])
def test_a_hidden_way_that_another_weight_opens_is_noticed(change, method):
    def forward(m, x):
        scale = m.opened + m.kept + m.number + m.scaling["default"]
        return two(m, x, lambda h: h + scale * h.flip(1).detach())

    model = with_forward(forward)
    model.opened = nn.Parameter(torch.zeros((), dtype=torch.double))
    model.register_buffer("kept", torch.zeros((), dtype=torch.double))
    model.number, model.scaling = 0.0, {"default": 0.0}
    assert not warnings_of_relevance(model, tokens(), method)
    change(model)
    if method is MambaLRP:
        assert any(HIDDEN in one for one in warnings_of_relevance(model, tokens()))
    else:
        with pytest.raises(UnsupportedModelError, match=HIDDEN):
            method(model).attribute(tokens())


class OfIds(Base):
    """A language model that may do something else with texts of more than 300 tokens."""

    def __init__(self):
        super().__init__()
        self.table, self.logits = nn.Embedding(37, E), nn.Linear(E, 37)
        randomize(self)

    def get_input_embeddings(self):
        return self.table

    def forward(self, ids):
        h = self.table(ids)
        h = h + self.a(h)
        if ids.shape[1] <= 300:
            return self.logits(h + self.b(h))
        return self.logits(self.long(h))


LONG = {
    "the order": lambda m, h: (lambda g: g + m.b(g))(h.flip(1)).flip(1),
    "windows": lambda m, h: h + m.b(h.view(2, -1, E)).view(h.shape),
}


def of_ids(long):
    kind = type("OfLongIds", (OfIds,), {"long": long})
    ids = torch.randint(37, (1, 320), generator=torch.Generator().manual_seed(0))
    return kind().double().eval(), ids


@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize("method", MAPS)
def test_what_is_done_with_long_texts_alone_is_measured(name, method):
    model, ids = of_ids(LONG[name])
    always = type("Always", (OfIds,), {"forward": lambda m, x: m.logits(LONG[name](m, one(m, x)))})
    plain = always().double().eval()
    plain.load_state_dict(model.state_dict())

    def one(m, x):
        h = x if x.is_floating_point() else m.table(x)
        return h + m.a(h)

    # All tokens of other inputs than a text are looked at.
    x = model.table(ids).detach()
    series = with_forward(lambda m, x: plain(x))
    series.plain = plain
    expected = method(series).attribute(x, target=(40, 1)).sum(-1)
    found = method(model).attribute(ids, target=(40, 1))
    assert_close(found / found.abs().sum(), expected / expected.abs().sum(), 1e-6)


def test_what_is_hidden_in_long_texts_alone_is_refused_or_said():
    model, ids = of_ids(lambda m, h: (lambda g: g + m.b(g))(h + 3 * h.flip(1).detach()))
    with pytest.raises(UnsupportedModelError, match=HIDDEN):
        MambaRollout(model).attribute(ids)
    assert any(HIDDEN in one for one in warnings_of_relevance(model, ids))


@pytest.mark.filterwarnings("ignore:.*torch.func")
@pytest.mark.parametrize("method", METHODS)
def test_layers_under_vmap_between_mixers(method):
    def forward(of):
        return lambda m, x: two(m, x, lambda h: h + of(lambda t: m.linear(t).relu())(h))

    mapped, plain = (with_forward(forward(of)) for of in (torch.vmap, lambda layer: layer))
    found, expected = (method(m).attribute(tokens(), target=1) for m in (mapped, plain))
    assert_close(found, expected, 1e-9)
    assert set(supported(mapped, tokens()).methods.values()) == {None}


def test_hooks_that_ask_for_shapes_have_nothing_looked_at_again():
    model, x = with_forward(lambda m, x: two(m, x, lambda h: h + m.linear(h))), tokens()
    runs = []

    def once_more():
        with model.linear.register_forward_hook(lambda m, args, out: runs.append(len(out))):
            MambaLRP(model).attribute(x, target=1)

    MambaLRP(model).attribute(x, target=1)
    once_more()
    assert runs == [len(x)]
    with torch.no_grad():
        model.linear.weight.mul_(2)
    once_more()
    assert len(runs) > 2
