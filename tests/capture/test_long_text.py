"""Long texts, whose wiring is measured on their beginning: what shows far apart alone is seen."""

from __future__ import annotations

import pytest
import torch
from families import build
from methods import assert_close
from three_mixers import Base, rollout
from torch import nn
from torch.nn import functional as F

from captum_ssm import MambaRollout, RawAttention
from captum_ssm.capture import freezing, long_text
from captum_ssm.mixers.registry import known_of

SHORT, L = 32, 90


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(freezing, "SHORT", SHORT)


class Text(Base):
    """A language model, or a classifier of texts, with something between its first two mixers."""

    def __init__(self, between, head) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings, self.between, self.read = nn.Embedding(30, 16), between, head
        self.double().eval()

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def forward(self, ids):
        h = self.embeddings(ids)
        h = self.between(h + self.a(h))
        return self.read(self, h + self.b(h))


def ids(count=L):
    return torch.randint(30, (1, count), generator=torch.Generator().manual_seed(1))


BETWEEN = {
    "a shift": lambda h: h + 2 * F.pad(h, (0, 0, 40, 0))[:, : h.shape[1]],
    "the first token": lambda h: torch.cat([h[:, :50], h[:, 50:] + 2 * h[:, :1]], 1),
    "one token": lambda h: h + 2 * h[:, 60:61].sum(1, keepdim=True),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_what_only_a_long_text_mixes_is_seen(name) -> None:
    """As where the wiring of the whole text is measured."""
    models = [Text(BETWEEN[name], lambda m, h: m.head(h)) for _ in range(2)]
    found = MambaRollout(models[0]).attribute(ids(), position=L - 1)
    assert not known_of(models[0]).long
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(freezing, "SHORT", 2 * L)
        expected = MambaRollout(models[1]).attribute(ids(), position=L - 1)
    assert_close(found, expected, 1e-9)


HEADS = {
    "the last token": (lambda m, h: m.head(h[:, -1]), lambda rows: rows[-1]),
    "the mean": (lambda m, h: m.head(h.mean(1)), lambda rows: rows.mean(0)),
    "each token": (lambda m, h: m.head(h), lambda rows: rows[-1]),
}


@pytest.mark.parametrize("name", HEADS)
def test_long_texts_are_read_where_short_ones_are(name) -> None:
    head, read = HEADS[name]
    model = Text(lambda h: h, head)
    with torch.no_grad():
        _, _, (_, rows) = rollout(model, model.embeddings(ids()), model.a, model.b)
    assert_close(MambaRollout(model).attribute(ids())[0], read(rows[0]), 1e-9)
    assert RawAttention(model).attribute(ids()).shape == (1, L)


@pytest.mark.parametrize("family", ["mamba", "rwkv", "jamba"])
@pytest.mark.parametrize("most", [0, long_text._MOST])
def test_a_model_is_looked_at_once_up_to_the_longest_text(family, most, monkeypatch) -> None:
    """Token shifts, which act on neighbors alone, too, and outputs that are too large."""
    monkeypatch.setattr(long_text, "_MOST", most)
    model, runs = build(family), []
    run = long_text._MovedRun.__post_init__
    monkeypatch.setattr(
        long_text._MovedRun, "__post_init__", lambda self: (runs.append(self), run(self))
    )
    for count, expected in ((L, 2), (L - 20, 2), (L + 20, 4)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warnings.warn", lambda *_, **__: None)
            MambaRollout(model).attribute(ids(count), position=-1)
        assert len(runs) == expected
    assert [*known_of(model).long.values()] == [L + 20]


def test_each_text_of_a_long_batch_has_a_target_of_its_own() -> None:
    model = Text(lambda h: h, lambda m, h: m.head(h))
    texts, targets = ids(2 * L).view(2, L), [(L - 1, 2), (10, 1)]
    found = MambaRollout(model).attribute(texts, target=targets)
    for text, target, row in zip(texts, targets, found, strict=True):
        assert_close(MambaRollout(model).attribute(text[None], target=target)[0], row, 1e-9)
        assert not bool(row[target[0] + 1 :].any())
