"""A decoder of attention that reads what mixers encode: its rows are not the mixers' tokens."""

import pytest
import torch
from inputs import noise
from methods import METHODS, assert_close, each
from three_mixers import Base, E, L, after
from torch import nn
from torch.nn import functional as F

from captum_ssm import InputError, MambaLRP, MambaRollout, supported
from captum_ssm.attr import RelevanceFlow
from captum_ssm.errors import TargetError
from captum_ssm.interventions import circuit
from captum_ssm.metrics import circuit_faithfulness, find_circuits

V, ROW, TOKEN = 11, 3, 7
COUNTS = [4, L, L + 3]


class Translator(Base):
    """Mixers encode floats; a decoder's tokens attend to them, by a fused function."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(V, E), nn.Linear(E, V)
        self.query, self.key, self.value = (nn.Linear(E, E) for _ in range(3))

    def attended(self, words, x):
        h = self.towards(x)
        q, k, v = self.query(words)[:, None], self.key(h)[:, None], self.value(h)[:, None]
        return F.scaled_dot_product_attention(3 * q, k, v)[:, 0]

    def forward(self, x, ids):
        words = self.words(ids)
        return self.out(words + self.attended(words, x))


def case(count):
    torch.manual_seed(0)
    return Translator().double().eval(), noise(1, L, E, seed=2), torch.arange(count)[None] % V


@pytest.mark.parametrize("count", COUNTS)
@each(METHODS)
def test_an_entry_is_read_at_the_mixers_tokens_that_its_row_attends_to(method, count):
    model, x, ids = case(count)
    found = method(model).attribute(x, target=(ROW, TOKEN), additional_forward_args=ids)
    score = method(lambda x, ids: model(x, ids)[:, ROW, TOKEN], model)
    assert_close(found, score.attribute(x, additional_forward_args=ids), 1e-9)


@pytest.mark.parametrize("count", COUNTS)
def test_the_rollout_is_weighted_by_what_attention_reads(count):
    model, x, ids = case(count)
    found = MambaRollout(model).attribute(x, target=(ROW, TOKEN), additional_forward_args=ids)
    with torch.no_grad():
        rows = torch.eye(L, dtype=x.dtype)[None]
        h = x
        for mixer in (model.a, model.b):
            h, rows = after(mixer, h, rows)
    # The gradient of the score by values alone, that attention weighs.
    values = h.clone().requires_grad_()
    attention = (3 * model.query(model.words(ids)) @ model.key(h).mT / E**0.5).softmax(-1)
    model.out(attention.detach() @ model.value(values))[0, ROW, TOKEN].backward()
    weights = values.grad[0].abs().sum(1)
    assert_close(found.sum(-1)[0], weights / weights.sum() @ rows[0], 1e-9)


@pytest.mark.parametrize("count", COUNTS)
def test_the_relevance_is_of_the_score_of_that_row(count):
    model, x, ids = case(count)
    relevance, delta = MambaLRP(model).attribute(
        x, target=(ROW, TOKEN), additional_forward_args=ids, return_convergence_delta=True
    )
    assert_close(relevance.sum() + delta[0], model(x, ids)[0, ROW, TOKEN], 1e-5)


@pytest.mark.parametrize("count", COUNTS)
@each(METHODS)
def test_both_sequences_are_explained(method, count):
    model, x, ids = case(count)
    found, words = method(model).attribute((x, ids), target=(ROW, TOKEN))
    alone = method(model).attribute(x, target=(ROW, TOKEN), additional_forward_args=ids)
    assert_close(found, alone, 1e-9)
    assert words.shape == ids.shape


def test_every_method_is_supported():
    model, x, ids = case(4)
    assert not any(supported(model, (x, ids)).methods.values())


@each(METHODS)
def test_rows_of_unknown_tokens_are_refused(method):
    model, x, ids = case(4)
    with pytest.raises(InputError, match=r"logits of 4 of its 9 tokens.* of a decoder"):
        method(lambda x: model(x, ids), model).attribute(x, target=(-1, TOKEN))


@pytest.mark.parametrize("count", COUNTS)
def test_a_circuit_is_of_the_score_of_that_row(count):
    model, x, ids = case(count)
    options = {"additional_forward_args": ids}
    edges = RelevanceFlow(model).edges(x, target=(ROW, TOKEN), **options).top(5)
    found = circuit_faithfulness(model, x, edges, (ROW, TOKEN), ks=(5, 1000), **options)
    with torch.no_grad(), circuit(model, edges, layers=["a", "b"]):
        few = model(x, ids)[0, ROW]
    whole = model(x, ids)[0, ROW].detach()
    others = whole.clone()
    others[TOKEN] = -torch.inf
    weights = others.softmax(0)
    assert_close(found.whole[0], whole[TOKEN] - weights @ whole, 1e-9)
    assert_close(found.scores[0, 0], few[TOKEN] - weights @ few, 1e-9)


@pytest.mark.parametrize("count", COUNTS)
def test_the_circuit_that_is_looked_for_is_of_that_row_too(count):
    model, x, ids = case(count)
    (found,) = find_circuits(model, x, (ROW, TOKEN), foil=1, additional_forward_args=ids)
    with torch.no_grad(), circuit(model, found.edges, coefficients="whole", layers=["a", "b"]):
        row = model(x, ids)[0, ROW]
    assert_close(torch.tensor(found.score), row[TOKEN] - row[1], 1e-6)


@pytest.mark.parametrize("count", [4, L + 3])
def test_a_circuit_of_no_row_is_refused(count):
    model, x, ids = case(count)
    with pytest.raises(TargetError, match=r"target=\(row, answer\)"):
        circuit_faithfulness(model, x, [], TOKEN, additional_forward_args=ids)
