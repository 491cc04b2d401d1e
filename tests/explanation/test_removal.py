"""The check by removal: curves of a model that is known, random orders, and the winner."""

import numpy as np
import pytest
import torch
from models import VOCABULARY, word_tokenizer

from captum_ssm import explain
from captum_ssm.explanation import Explanation, Validation
from captum_ssm.explanation.page.data import page_data
from captum_ssm.metrics.perturbation import WHOLE, flipping

TEXT = "w3 w4 w5 w6 w7 w9"


@pytest.fixture(scope="module")
def explained(model):
    words = word_tokenizer({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w2")
    methods = ["feature-ablation", "rollout"]
    return explain(model, words, TEXT, target="w8", methods=methods, validate=True)


def test_curves_are_those_of_the_librarys_metric(model, explained):
    (example,) = explained.examples
    ids = torch.tensor([[3, 4, 5, 6, 7, 9]])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0]])  # the answer is read at the last token
    for name, curve in example.validation.curves.items():
        row = torch.from_numpy(example.relevance[name][:1, :6])
        expected = flipping(
            lambda x: model(x).logits[:, -1], ids, row, torch.tensor([8]), removal=2, mask=mask
        )
        np.testing.assert_allclose(curve, expected.values[0], rtol=1e-4, atol=1e-5)
    assert example.validation.shares == WHOLE
    assert example.validation.removed == "by w2"


def test_what_ablation_names_is_what_the_score_needs(explained):
    validation = explained.examples[0].validation
    assert validation.winner == "feature-ablation"
    assert validation.beaten("feature-ablation") >= 14
    # All orders begin with the whole text, and end with nothing but the last token.
    ends = [*validation.curves.values(), *validation.random]
    for place in (0, -1):
        assert np.ptp([curve[place] for curve in ends]) < 1e-5


def test_it_is_kept_and_said(explained, tmp_path):
    explained.save(tmp_path / "why.json")
    again = Explanation.load(tmp_path / "why.json")
    assert again.examples[0].validation.areas == pytest.approx(
        explained.examples[0].validation.areas
    )
    assert "feature-ablation wins removal" in repr(again)
    assert "feature-ablation 2" in repr(again + again)
    told = str(explained.examples[0].validation)
    assert "better than" in told
    assert "replaced by w2" in told
    assert explained.difference(explained).examples[0].validation is None


def test_the_page_has_it(explained):
    shown = page_data(explained)["examples"][0]["validation"]
    validation = explained.examples[0].validation
    assert min(shown["areas"], key=shown["areas"].get) == validation.winner
    assert shown["area"] == pytest.approx(validation.random_area, rel=1e-3)
    assert shown["orders"] == len(validation.random) == 16
    assert shown["random"] == pytest.approx(validation.random.mean(0), rel=1e-3)
    assert set(shown["curves"]) == set(shown["beaten"]) == {"feature-ablation", "rollout"}


def test_areas():
    curves = {"a": np.array([1.0, 0.0, 0.0]), "b": np.array([1.0, 1.0, 0.0])}
    random = np.array([[1.0, 0.5, 0.0], [1.0, 1.0, 0.0]])
    validation = Validation("logit", "by <unk>", (0.0, 0.5, 1.0), curves, random)
    assert validation.areas == {"a": 0.25, "b": 0.75}
    assert (validation.winner, validation.beaten("a"), validation.beaten("b")) == ("a", 2, 0)


def test_what_says_little_is_said_to():
    shares, fast, slow = (0.0, 0.5, 1.0), np.array([1.0, 0.2, 0.0]), np.array([1.0, 1.0, 0.9])
    falling = np.array([[1.0, 0.5, 0.0], [1.0, 1.0, 0.0]])
    one = Validation("logit", "by <unk>", shares, {"a": fast}, falling)
    assert one.is_telling
    assert one.falls
    assert not Validation("logit", "by <unk>", shares, {"a": slow}, falling).is_telling
    assert not Validation("logit", "by <unk>", shares, {"a": fast}, np.ones((2, 3))).falls


def test_a_text_of_one_token_has_nothing_to_remove(model):
    assert explain(model, torch.tensor([3]), validate=True).examples[0].validation is None
    assert explain(model, torch.tensor([3, 4])).examples[0].validation is None
