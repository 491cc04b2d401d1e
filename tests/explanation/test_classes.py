"""`explain` of classifiers: of texts, of tokens, and of the places where an answer lies."""

import re
import warnings

import numpy as np
import pandas
import pytest
import torch
from families import build
from models import VOCABULARY, Classifier, tiny, word_tokenizer
from PIL import Image
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    Qwen3NextForQuestionAnswering,
    Qwen3NextForTokenClassification,
)

from captum_ssm import Explanation, InputError, MambaLRP, TargetError, explain
from captum_ssm.attr import methods

LABELS = {0: "NEGATIVE", 1: "neutral", 2: "POSITIVE", 3: "mixed", 4: "ironic"}
TEXT, IDS = "w3 w4 w5 w9", torch.tensor([[3, 4, 5, 9]])
PAIR = {"question": "w3 w4", "context": "w7 w8 w9 w10 w11"}
PAIR_IDS = torch.tensor([[3, 4, 7, 8, 9, 10, 11]])


@pytest.fixture(scope="module")
def classifier():
    model = tiny("jamba_classifier")
    model.config.id2label = LABELS
    return model


def qwen(kind):
    config = build("qwen3_next").config
    config.id2label = {0: "O", 1: "PER", 2: "LOC"}
    config.label2id = {name: k for k, name in config.id2label.items()}
    torch.manual_seed(0)
    return kind(config).eval()


@pytest.fixture(scope="module")
def tagger():
    return qwen(Qwen3NextForTokenClassification)


@pytest.fixture(scope="module")
def reader():
    return qwen(Qwen3NextForQuestionAnswering)


# A class of a text.


@pytest.mark.parametrize("name", ["mamba-lrp", "latim", "rollout", "raw-attention"])
def test_rows_are_what_the_method_returns(name, classifier, tokenizer):
    method = methods()[name](classifier)
    asked = {"target": 1} if method.needs_target() else {}
    alone = explain(classifier, tokenizer, TEXT, target="neutral", methods=name, alternatives=0)
    assert np.array_equal(alone.relevance(), method.attribute(IDS, **asked)[0].numpy())
    found = explain(classifier, tokenizer, TEXT, target="neutral", methods=name, alternatives=2)
    (output,) = found.examples[0].outputs
    assert output.position is None
    rows = [answer for answer in output.answers if answer.row is not None]
    assert len(rows) == 3
    for answer in rows:
        needs = {"target": answer.id} if method.needs_target() else {}
        expected = method.attribute(IDS, **needs)[0].numpy()
        np.testing.assert_allclose(
            found.examples[0].relevance[name][answer.row], expected, rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize(("pool", "read_at"), [("last", 3), ("mean", None), ("middle", 2)])
def test_the_token_that_a_class_is_read_from(pool, read_at, tokenizer):
    found = explain(Classifier(pool), tokenizer, TEXT, labels=[*"abcde"], methods="rollout")
    assert found.examples[0].outputs[0].read_at == read_at


def test_a_class_is_read_from_the_last_or_the_first_token(classifier, tokenizer, tmp_path):
    texts = [TEXT, "w3 w4", "w9"]
    found = explain(classifier, tokenizer, texts, methods="rollout")
    assert [example.outputs[0].read_at for example in found.examples] == [3, 1, 0]
    found.save(tmp_path / "found.json")
    again = Explanation.load(tmp_path / "found.json")
    assert [example.outputs[0].reading_token for example in again.examples] == [3, 1, 0]
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    torch.manual_seed(0)
    bert = BertForSequenceClassification(config).eval()
    found = explain(bert, tokenizer, texts[:2], methods="saliency")
    assert [example.outputs[0].read_at for example in found.examples] == [0, 0]


def test_the_run_that_tells_the_kind_is_the_first_answer(classifier, tagger, reader, tokenizer):
    # One run of the model tells its kind and answers; the method runs it once more, after the first
    # call, which also looks for hidden ways. A head that pools is asked whether it takes two texts.
    for model, inputs, runs in (
        (tiny(), TEXT, 2),
        (tiny(), [TEXT, "w3 w4"], 4),
        (tagger, TEXT, 2),
        (classifier, TEXT, 3),
        (reader, PAIR, 3),
    ):
        count = []
        asked = {"position": 1} if model is tagger else {}
        explain(model, tokenizer, inputs, alternatives=0, **asked)
        with model.register_forward_hook(lambda *_, count=count: count.append(1)):
            explain(model, tokenizer, inputs, alternatives=0, **asked)
        assert len(count) == runs, type(model).__name__


def test_relevance_adds_up_to_the_logit(classifier, tokenizer):
    found = explain(classifier, tokenizer, TEXT, target=2, against="negative")
    with torch.no_grad():
        logits = classifier(IDS).logits[0]
    delta = found.examples[0].deltas["mamba-lrp"]
    assert found.relevance().sum() + delta[0] == pytest.approx(float(logits[2]), abs=1e-5)
    contrast = found.relevance(against="NEGATIVE")
    row = found.examples[0].outputs[0].contrasts[0].row
    difference = float(logits[2] - logits[0])
    assert contrast.sum() + delta[row] == pytest.approx(difference, abs=1e-5)


def test_labels_and_their_probabilities(classifier, tokenizer):
    found = explain(classifier, tokenizer, TEXT)
    with torch.no_grad():
        logits = classifier(IDS).logits[0]
    (output,) = found.examples[0].outputs
    assert [one.text for one in output.answers] == [
        LABELS[k] for k in logits.argsort().flip(0).tolist()
    ]
    for answer in output.answers:
        assert answer.probability == pytest.approx(float(logits.softmax(0)[answer.id]), rel=1e-5)
    assert found.title == f"Why “{LABELS[int(logits.argmax())]}”?"


@pytest.mark.parametrize(
    ("problem", "classes", "expected"),
    [
        ("multi_label_classification", 5, torch.sigmoid),
        ("regression", 5, None),
        (None, 1, torch.sigmoid),
    ],
)
def test_probabilities_are_those_of_the_problem(problem, classes, expected, tokenizer):
    model = tiny("jamba_classifier", num_labels=classes)
    model.config.problem_type = problem
    found = explain(model, tokenizer, TEXT, methods=["mamba-lrp"])
    for answer in found.examples[0].outputs[0].answers:
        if expected is None:
            assert answer.probability is None
        else:
            wanted = float(expected(torch.tensor(answer.logit, dtype=torch.float64)))
            assert answer.probability == pytest.approx(wanted, rel=1e-5)
    assert "captum-data" in found.to_html()


def test_several_texts_ids_and_masks_are_the_same(classifier, tokenizer):
    texts = [TEXT, "w4 w5"]
    found = explain(classifier, tokenizer, texts, target=["neutral", "POSITIVE"])
    single = [
        explain(classifier, tokenizer, t, target=k) for t, k in zip(texts, (1, 2), strict=True)
    ]
    batch = tokenizer(texts, padding=True, return_tensors="pt", padding_side="left")
    padded = explain(classifier, **batch, target=["neutral", "POSITIVE"])
    for k, alone in enumerate(single):
        assert np.array_equal(found.relevance(example=k), alone.relevance())
        assert np.array_equal(padded.relevance(example=k), alone.relevance())
    columns = pandas.Series(texts, index=[7, 9])
    for given in (columns, (text for text in texts), {"text": texts}, np.array(texts)):
        again = explain(classifier, tokenizer, given, target=[1, 2])
        assert np.array_equal(again.relevance(example=1), found.relevance(example=1))


def test_a_model_that_takes_one_text_at_a_time(classifier):
    words = word_tokenizer({f"w{k}": k for k in range(VOCABULARY)}, unk_token="w30")
    model = tiny("jamba_classifier")
    model.config.pad_token_id = None
    with pytest.raises(ValueError, match="no padding token"):
        model(IDS.expand(2, -1))
    asked = {"target": 1, "against": 2, "methods": ["mamba-lrp", "feature-ablation", "saliency"]}
    found = explain(model, words, TEXT, **asked, validate=True)
    expected = explain(classifier, words, TEXT, **asked, validate=True)
    for name, rows in expected.examples[0].relevance.items():
        np.testing.assert_allclose(found.examples[0].relevance[name], rows, atol=1e-5)
    checks = [one.examples[0].validation for one in (found, expected)]
    np.testing.assert_allclose(checks[0].random, checks[1].random, atol=1e-5)


def test_modules_of_ones_own(tokenizer):
    names = ["bad", "fair", "good"]
    model = Classifier("mean", classes=3)
    found = explain(model, tokenizer, TEXT, target="good", labels=names, alternatives=0)
    expected = MambaLRP(model).attribute(IDS, target=2)[0].numpy()
    assert np.array_equal(found.relevance(), expected)
    assert explain(model, tokenizer, TEXT, target=2).examples[0].outputs[0].answers[0].text in "012"

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Classifier("last", classes=1)

        def forward(self, ids):
            return self.inner(ids).squeeze(-1)

    one = One().eval()
    found = explain(one, tokenizer, TEXT, labels=["score"])
    (answer,) = found.examples[0].outputs[0].answers
    assert answer.text == "score"
    expected = MambaLRP(one).attribute(IDS)[0].numpy()
    np.testing.assert_allclose(found.relevance(), expected, atol=1e-7)


class Paired(nn.Module):
    """A classifier of two texts, which reads which token is of which."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny().backbone
        self.kinds = nn.Embedding(2, 16)
        self.head = nn.Linear(16, 3)

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()

    def forward(self, input_ids, token_type_ids=None):
        kinds = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        embeddings = self.get_input_embeddings()(input_ids) + 20 * self.kinds(kinds)
        return self.head(self.inner(inputs_embeds=embeddings).last_hidden_state[:, -1])


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{k}" for k in range(5, VOCABULARY))]
    path = tmp_path_factory.mktemp("bert") / "vocab.txt"
    path.write_text("\n".join(words))
    return BertTokenizerFast(str(path))


def test_pairs_of_texts_go_with_their_types(bert):
    model = Paired().eval()
    encoded = bert("w5 w6", "w9 w8", return_tensors="pt")
    assert encoded["token_type_ids"].any()
    given = {"token_type_ids": encoded["token_type_ids"]}
    method = MambaLRP(model)
    expected = method.attribute(encoded["input_ids"], target=1, additional_forward_args=given)
    plain = method.attribute(encoded["input_ids"], target=1)
    assert not torch.allclose(expected, plain)
    pair = {"text": "w5 w6", "text_pair": "w9 w8"}
    for inputs in (pair, [pair], [("w5 w6", "w9 w8")], encoded):
        found = explain(model, bert, inputs, target=1, alternatives=0)
        assert np.array_equal(found.relevance(), expected[0].numpy())
    assert explain(model, bert, pair).examples[0].text == "w5 w6\nw9 w8"
    assert found.examples[0].tokens[0].text == "[CLS]"
    for name in ("integrated-gradients", "feature-ablation"):
        rows = [
            explain(model, bert, one, target=1, methods=name).relevance()
            for one in (pair, encoded["input_ids"])
        ]
        assert abs(rows[0] - rows[1]).max() > 1e-3


# A label of each token.


def test_a_label_of_each_token(tagger, tokenizer):
    found = explain(tagger, tokenizer, TEXT)
    with torch.no_grad():
        logits = tagger(IDS).logits[0]
    (example,) = found.examples
    assert [output.position for output in example.outputs] == [0, 1, 2, 3]
    assert {output.role for output in example.outputs} == {"label"}
    for k, output in enumerate(example.outputs):
        chosen = output.answers[output.chosen]
        assert chosen.id == int(logits[k].argmax())
        assert chosen.text == tagger.config.id2label[chosen.id]
        expected = MambaLRP(tagger).attribute(IDS, target=(k, chosen.id))[0]
        np.testing.assert_allclose(found.relevance(output=k), expected.numpy(), atol=1e-6)
        delta = example.deltas["mamba-lrp"][chosen.row]
        assert found.relevance(output=k).sum() + delta == pytest.approx(chosen.logit, abs=1e-5)


def test_a_label_at_a_position(tagger, tokenizer):
    found = explain(tagger, tokenizer, TEXT, target="per", against="LOC", position=-2)
    (output,) = found.examples[0].outputs
    assert output.position == 2
    assert output.answers[output.chosen].text == "PER"
    assert output.contrasts
    with pytest.raises(TargetError, match="against is 'PER', the class that is explained"):
        explain(tagger, tokenizer, TEXT, target="PER", against="PER")
    with pytest.raises(
        TargetError, match=re.escape("or its name: O, PER, LOC. Did you mean 'PER'?")
    ):
        explain(tagger, tokenizer, TEXT, target="PERS")


# The places of an answer.


def test_an_answer_its_start_and_its_end(reader, tokenizer):
    found = explain(reader, tokenizer, PAIR, target="w9 w10", against="w8")
    whole, start, end = found.examples[0].outputs
    assert [one.role for one in found.examples[0].outputs] == ["span", "start", "end"]
    texts = [one.answers[one.chosen].text for one in (whole, start, end)]
    assert texts == ["w9 w10", "w9", "w10"]
    with torch.no_grad():
        output = reader(PAIR_IDS)
    starts, ends = output.start_logits[0], output.end_logits[0]
    assert whole.answers[whole.chosen].logit == pytest.approx(float(starts[4] + ends[5]), abs=1e-5)

    def score(ids):
        output = reader(ids)
        return output.start_logits[:, 4] + output.end_logits[:, 5]

    expected, delta = MambaLRP(score, model=reader).attribute(
        PAIR_IDS, return_convergence_delta=True
    )
    np.testing.assert_allclose(found.relevance(), expected[0].numpy(), atol=1e-6)
    assert found.relevance().sum() == pytest.approx(float(starts[4] + ends[5] - delta), abs=1e-5)
    rows = [found.relevance(output=k) for k in (1, 2)]
    np.testing.assert_allclose(rows[0] + rows[1], expected[0].numpy(), atol=1e-5)
    other = found.relevance(against="w8").sum()
    assert other == pytest.approx(float(starts[4] + ends[5] - starts[3] - ends[3]), abs=1e-5)


def test_the_likeliest_answer_lies_in_the_context(reader, tokenizer):
    found = explain(reader, tokenizer, [PAIR, PAIR])
    whole = found.examples[1].outputs[0]
    with torch.no_grad():
        output = reader(PAIR_IDS)
    starts, ends = output.start_logits[0, 2:].double(), output.end_logits[0, 2:].double()
    likely = (starts.softmax(0)[:, None] * ends.softmax(0)[None]).triu()
    first, last = divmod(int(likely.argmax()), 5)
    best = whole.answers[whole.chosen]
    assert best.text == " ".join(["w7", "w8", "w9", "w10", "w11"][first : last + 1])
    assert best.probability == pytest.approx(float(likely.max()), rel=1e-5)
    assert best.rank == 1
    assert whole.among == 5 + 4 + 3 + 2 + 1  # parts of five tokens
    assert [one.among for one in found.examples[1].outputs[1:]] == [5, 5]
    by_words = explain(reader, tokenizer, PAIR, target=(4, 5)).examples[0].outputs[0]
    assert by_words.answers[by_words.chosen].text == "w9 w10"
    with pytest.raises(TargetError, match="'w3', which does not stand in the text"):
        explain(reader, tokenizer, PAIR, target="w3")
    with pytest.raises(InputError, match="answers a question by a part of a text"):
        explain(reader, tokenizer, TEXT)


def test_target_free_methods_read_the_place_of_an_answer(reader, tokenizer):
    found = explain(reader, tokenizer, PAIR, target="w8", methods=["rollout"])
    # A recurrence that looks back knows nothing of what comes after the answer.
    assert np.all(found.relevance()[4:] == 0)
    assert np.all(found.relevance()[:4] != 0)


# What the last axis means.


@pytest.mark.parametrize("kind", ["backbone", "wrapped", "no head"])
def test_hidden_states_are_told(kind, classifier, tokenizer):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny().backbone

        def forward(self, ids):
            return self.inner(ids).last_hidden_state * 2

    model = {"backbone": tiny().backbone, "wrapped": Wrapped(), "no head": classifier.model}[kind]
    with pytest.raises(ValueError, match=r"returns hidden states of shape .*the whole model with"):
        explain(model.eval(), tokenizer, TEXT)


def test_a_vocabulary_as_wide_as_the_embeddings(tokenizer):
    model = tiny(vocab_size=16)
    words = word_tokenizer({f"w{i}": i for i in range(16)})
    (output,) = explain(model, words, "w3 w4").examples[0].outputs
    assert output.role == "next"
    with pytest.raises(ValueError, match="returns hidden states"):
        explain(model.backbone, words, "w3 w4")


def test_a_token_classifier_of_ones_own_is_no_language_model(tokenizer):
    backbone = tiny().backbone

    class Tags(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = backbone, nn.Linear(16, 5)

        def forward(self, ids):
            return self.head(self.inner(ids).last_hidden_state)

    found = explain(Tags().eval(), tokenizer, TEXT, position=-1)
    (output,) = found.examples[0].outputs
    assert output.role == "label"
    assert {answer.text for answer in output.answers} <= set("01234")


def test_random_outputs_are_told(tokenizer):
    model = nn.Sequential(Classifier("last"), nn.Dropout(0.5)).train()
    with pytest.warns(UserWarning, match="draws random numbers while it runs.*call model.eval"):
        explain(model, tokenizer, TEXT, methods=["saliency"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        explain(model.eval(), tokenizer, TEXT, methods=["saliency"])


# What is given, and in which order.


def test_one_bad_text_is_refused_before_anything_is_computed(classifier, tokenizer):
    runs = []
    handle = classifier.register_forward_hook(lambda *_: runs.append(1))
    try:
        with pytest.raises(InputError, match=re.escape("inputs[2] of 3: text is '', which holds")):
            explain(classifier, tokenizer, [TEXT, TEXT, ""])
        assert runs == []
        with pytest.raises(TargetError, match=re.escape("inputs[1] of 2: target is 'happy'")):
            explain(classifier, tokenizer, [TEXT, TEXT], target=["neutral", "happy"])
        assert len(runs) <= 2
    finally:
        handle.remove()
    model = tiny()
    words = word_tokenizer({f"w{k}": k for k in range(VOCABULARY)}, unk_token="w0")
    with pytest.raises(TargetError, match=re.escape("inputs[1] of 2: target is 'no', which the")):
        explain(model, words, [TEXT, TEXT], target=["w5", "no"])
    with pytest.raises(
        InputError, match=re.escape("inputs[1] of 2: inputs holds ids from 3 to 99")
    ):
        explain(model, torch.tensor([[3, 4], [3, 99]]))


BAD = {
    "swapped": (lambda m, t: explain(t, m, TEXT), TypeError, "model is a tokenizer"),
    "swapped text": (
        lambda m, t: explain(m, TEXT, t),
        TypeError,
        "inputs is a tokenizer; expected",
    ),
    "by name": (lambda m, t: explain(m, "gpt2", TEXT), TypeError, "from_pretrained('gpt2')"),
    "pair": (
        lambda m, t: explain(tiny(), t, {"text": TEXT, "text_pair": TEXT}),
        InputError,
        "there is a second text",
    ),
    "empty": (lambda m, t: explain(m, t, []), InputError, "inputs is empty"),
    "no text": (lambda m, t: explain(m, t, {"txt": TEXT}), TypeError, "a dict of txt; expected"),
    "mixed": (lambda m, t: explain(m, t, [TEXT, 3]), TypeError, "inputs[1] of 2: this is a int"),
    "position": (lambda m, t: explain(m, t, TEXT, position=0), InputError, "leave position out"),
    "labels": (lambda m, t: explain(m, t, TEXT, labels=["a"]), ValueError, "labels holds 1 names"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_says_what_to_do(name, classifier, tokenizer):
    call, error, message = BAD[name]
    with pytest.raises(error, match=re.escape(message)):
        call(classifier, tokenizer)


# What becomes of it.


@pytest.mark.parametrize("kind", ["classifier", "tagger", "reader"])
def test_explanations_of_classes_are_explanations(kind, request, tokenizer, tmp_path):
    model = request.getfixturevalue(kind)
    inputs = PAIR if kind == "reader" else TEXT
    found = explain(model, tokenizer, inputs, methods=["mamba-lrp", "rollout"], maps=True)
    found.save(tmp_path / "why.json")
    again = Explanation.load(tmp_path / "why.json")
    assert again.examples[0].outputs == found.examples[0].outputs
    assert np.array_equal(again.relevance(), found.relevance())
    table = found.to_pandas()
    assert set(table["answer"]) >= {
        one.answers[one.chosen].text for one in found.examples[0].outputs
    }
    assert len(found.to_captum()) == len(table) // len(found.examples[0].tokens)
    assert found.difference(again).relevance().max() == 0
    assert found.mean().top()
    assert len((found + again).to_html()) > 1000


# Pipelines.


def test_a_pipeline_in_place_of_the_model(classifier, tagger, tokenizer):
    from transformers import pipeline

    classes = pipeline("text-classification", model=classifier, tokenizer=tokenizer)
    found = explain(classes, TEXT, alternatives=0)
    (output,) = found.examples[0].outputs
    said = classes(TEXT)[0]
    assert output.answers[0].text == said["label"]
    assert output.answers[0].probability == pytest.approx(said["score"], rel=1e-4)
    assert np.array_equal(
        found.relevance(), explain(classifier, tokenizer, TEXT, alternatives=0).relevance()
    )
    labels = explain(pipeline("token-classification", model=tagger, tokenizer=tokenizer), TEXT)
    assert len(labels.examples[0].outputs) == 4
    words = pipeline("text-generation", model=tiny(), tokenizer=tokenizer)
    assert explain(words, TEXT, target="w5").examples[0].outputs[0].role == "next"
    with pytest.raises(TypeError, match="has its own tokenizer"):
        explain(classes, tokenizer, TEXT)


def test_a_pipeline_of_questions(reader, tokenizer):
    # transformers 5 has none of its own any more.
    class Answering:
        def __init__(self):
            self.model, self.tokenizer, self.task = reader, tokenizer, "question-answering"

    found = explain(Answering(), PAIR, target="w9")
    assert np.array_equal(
        found.relevance(), explain(reader, tokenizer, PAIR, target="w9").relevance()
    )


def test_a_pipeline_of_images():
    from vision_models import vim

    class Seeing:
        def __init__(self):
            self.model, self.tokenizer, self.image_processor = vim(), None, self.prepare

        def prepare(self, image, return_tensors):
            return {"pixel_values": torch.full((1, 3, 16, 16), image.getpixel((0, 0))[0] / 100)}

    found = explain(Seeing(), Image.new("RGB", (20, 20), (50, 0, 0)), target=1)
    expected = explain(vim(), torch.full((3, 16, 16), 0.5), target=1)
    assert np.array_equal(found.relevance(), expected.relevance())
