"""Many inputs at once: the same as one by one, in few runs, and each with its own errors."""

from collections import Counter
from inspect import signature

import numpy as np
import pytest
import torch
from families import build
from models import Classifier, tiny
from test_classes import qwen
from torch import nn
from transformers import Qwen3NextForTokenClassification
from vision_models import vim

from captum_ssm import InputError, explain
from captum_ssm.attr import MambaAttribution, MambaLRP, MambaRollout
from captum_ssm.explanation.make.many import Explainer, InputRow
from captum_ssm.explanation.make.parse import OPTIONS
from captum_ssm.explanation.make.relevance import rows as rows_module

TEXTS = ["w3 w4 w5 w9", "w9 w8", "w30 w3 w3 w4 w7 w6", "w5", "w8 w9", "w6 w7 w8 w9"]
EVERY = ("mamba-lrp", "rollout", "raw-attention", "mamba-attribution", "unified", "latim")


def assert_close(several, alone):
    """Outputs are the same, and numbers equal to rounding."""
    for one, other in zip(several.examples, alone, strict=True):
        (other,) = other.examples
        assert one.tokens == other.tokens
        assert [out.chosen for out in one.outputs] == [out.chosen for out in other.outputs]
        assert [out.read_at for out in one.outputs] == [out.read_at for out in other.outputs]
        for a, b in zip(one.outputs, other.outputs, strict=True):
            likely = [[answer.probability for answer in out.answers] for out in (a, b)]
            np.testing.assert_allclose(*likely, rtol=1e-4)
        for name, rows in other.relevance.items():
            scale = np.abs(rows).max()
            np.testing.assert_allclose(one.relevance[name], rows, atol=2e-5 * scale, err_msg=name)
        for name, delta in other.deltas.items():
            np.testing.assert_allclose(one.deltas[name], delta, atol=1e-5)


def runs_of(model, call):
    """How many inputs each run of the model had."""
    sizes = []
    handle = model.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    call()
    handle.remove()
    return sizes


@pytest.mark.parametrize("family", ["mamba", "jamba", "mamba2", "qwen3_next", "rwkv"])
def test_continuations_of_texts_of_several_lengths(family, tokenizer):
    model = tiny(family) if family in ("mamba", "jamba") else build(family)
    asked = {"methods": EVERY if family == "mamba" else EVERY[:2], "alternatives": 1}
    targets = ["w1", "w2 w3", "w4 w5 w6", "w9", "w2", "w3"]
    several = explain(model, tokenizer, TEXTS, target=targets, **asked)
    pairs = zip(TEXTS, targets, strict=True)
    assert_close(several, [explain(model, tokenizer, a, target=b, **asked) for a, b in pairs])


@pytest.mark.parametrize("asked", [{"against": "w7"}, {"position": "all"}, {"lens": True}])
def test_what_is_asked_goes_with_its_text(asked, tokenizer):
    model = tiny("mamba")
    asked = asked | {"target": None if "position" in asked else "w5", "methods": EVERY[:3]}
    several = explain(model, tokenizer, TEXTS, **asked)
    assert_close(several, [explain(model, tokenizer, text, **asked) for text in TEXTS])


@pytest.mark.parametrize("options", [{"discard_ratio": 0.6}, {"min_max": True}])
def test_maps_that_are_rescaled_as_a_whole_see_no_padding(options, tokenizer):
    model, asked = tiny("mamba"), {"methods": {"rollout": options, "mamba-attribution": {}}}
    several = explain(model, tokenizer, TEXTS, **asked)
    assert_close(several, [explain(model, tokenizer, text, **asked) for text in TEXTS])


def test_a_list_takes_few_runs(tokenizer):
    model = tiny("mamba")
    texts = [" ".join(f"w{3 + (7 * k + i) % 30}" for i in range(2 + k % 9)) for k in range(64)]
    one = runs_of(model, lambda: explain(model, tokenizer, texts[0], alternatives=0))
    many = runs_of(model, lambda: explain(model, tokenizer, texts, alternatives=0))
    # The kind of output, whether later tokens are read, the answers, and the relevance.
    assert len(many) <= len(one) + 2
    assert max(many) == 64


class ReadsLater(nn.Module):
    """A language model whose output at each token also tells how the text ends."""

    def __init__(self):
        super().__init__()
        self.inner = tiny("mamba")

    def get_input_embeddings(self):
        return self.inner.get_input_embeddings()

    def forward(self, ids):
        logits = self.inner(ids).logits
        return logits + 0.1 * logits[:, -1:]


def test_texts_are_not_padded_where_later_tokens_are_read(tokenizer):
    model = ReadsLater()
    asked = {"alternatives": 0, "position": 0}
    several = explain(model, tokenizer, TEXTS, **asked)
    assert_close(several, [explain(model, tokenizer, text, **asked) for text in TEXTS])


def test_relevance_on_padding_is_noticed(tokenizer, monkeypatch):
    # As if the test of one text had been passed by a model that reads later tokens of others.
    from captum_ssm.explanation.make.questions import kinds

    monkeypatch.setattr(kinds, "_reads_no_later_token", lambda *_: True)
    model = ReadsLater()
    asked = {"target": "w5", "position": 0, "alternatives": 0}
    several = explain(model, tokenizer, TEXTS, **asked)
    alone = [explain(model, tokenizer, text, **asked) for text in TEXTS]
    for one, other in zip(several.examples, alone, strict=True):
        expected = other.examples[0].relevance["mamba-lrp"]
        np.testing.assert_allclose(one.relevance["mamba-lrp"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("way", ["mean", "last"])
def test_classes_of_texts(way, tokenizer):
    model = Classifier(way, classes=3)
    asked = {"labels": ["a", "b", "c"], "methods": ["mamba-lrp", "rollout"], "against": None}
    several = explain(model, tokenizer, TEXTS, **asked)
    assert_close(several, [explain(model, tokenizer, text, **asked) for text in TEXTS])


def test_labels_of_tokens(tokenizer):
    model = qwen(Qwen3NextForTokenClassification)
    several = explain(model, tokenizer, TEXTS, alternatives=0)
    assert_close(several, [explain(model, tokenizer, text, alternatives=0) for text in TEXTS])


def test_images_of_two_sizes_of_batches():
    model, images = vim(), torch.rand(3, 3, 16, 16)
    asked = {"methods": ["mamba-lrp", "rollout", "integrated-gradients"], "labels": list("abc")}
    several = explain(model, list(images), **asked)
    assert_close(several, [explain(model, image, **asked) for image in images])
    sizes = runs_of(model, lambda: explain(model, list(images), methods="rollout"))
    assert 3 in sizes


def test_a_list_of_ids_of_several_lengths():
    model = tiny("mamba")
    rows = [torch.tensor(row) for row in ([3, 4, 5, 9], [9, 8], [30, 3, 3, 4, 7])]
    assert_close(explain(model, inputs=rows), [explain(model, inputs=row) for row in rows])
    assert_close(explain(model, inputs=rows[:1]), [explain(model, inputs=rows[0])])


def test_arrays_of_integers_are_ids_where_there_is_a_tokenizer(tokenizer):
    model, ids = tiny("mamba"), [[3, 4, 5, 9], [9, 8]]
    expected = [explain(model, tokenizer, row) for row in ids]
    arrays = [np.array(row, kind) for row, kind in zip(ids, ("int32", "uint16"), strict=True)]
    for given in (arrays, tuple(arrays), np.array(arrays, object), [arrays[0], ids[1]]):
        assert_close(explain(model, tokenizer, given), expected)
    padded = np.array([ids[0], [*ids[1], 0, 0]])
    named = {"input_ids": padded, "attention_mask": (padded > 0).astype(int)}
    assert_close(explain(model, tokenizer, named), expected)
    assert_close(explain(model, tokenizer, {"input_ids": arrays}), expected)
    for one in (arrays[0], arrays[0][None]):
        assert_close(explain(model, tokenizer, one), expected[:1])


def test_options_are_those_of_explain():
    known = signature(explain).parameters
    assert {name: known[name].default for name in OPTIONS} == OPTIONS
    with pytest.raises(TypeError, match=r"no option 'metods'\. Did you mean 'methods'"):
        Explainer(tiny("mamba"), metods="rollout")


def test_each_input_has_its_own_error(tokenizer):
    explainer = Explainer(tiny("mamba"), tokenizer, alternatives=0)
    rows = [
        InputRow("w3 w4", target="w5"),
        InputRow(""),
        InputRow("w3", target=999),
        InputRow(7.5),
        InputRow([3, 4, 5]),
        InputRow([3, 400]),
        InputRow("w3 w4", target="w5 w6", span="w6"),
        InputRow(["w3", "w4"]),
        InputRow("w8 w9", units={"first": (0, 2)}),
        InputRow(None),
    ]
    found = explainer(rows)
    failed = [k for k, one in enumerate(found) if isinstance(one, Exception)]
    assert failed == [1, 2, 3, 5, 7, 9]
    assert isinstance(found[1], InputError)
    assert "holds no token" in str(found[1])
    assert "expected one" in str(found[7])
    assert found[6].outputs[0].part == (3, 4)
    assert found[8].units["span"][0].name == "first"
    expected = explain(tiny("mamba"), tokenizer, "w3 w4", target="w5", alternatives=0)
    np.testing.assert_allclose(found[0].relevance["mamba-lrp"][0], expected.relevance(), rtol=1e-4)
    good = [one for one in found if not isinstance(one, Exception)]
    assert explainer.explanation(good).methods == expected.methods


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError, RuntimeError])
def test_batches_that_fail_are_halved(error, tokenizer, monkeypatch):
    model, sizes = tiny("mamba"), []
    plain = MambaLRP.attribute

    def limited(self, inputs, *args, **kwargs):
        sizes.append(len(inputs))
        if len(inputs) > 2 or bool((inputs == 30).any()):
            raise error("too much")
        return plain(self, inputs, *args, **kwargs)

    monkeypatch.setattr(MambaLRP, "attribute", limited)
    explainer = Explainer(model, tokenizer, alternatives=0)
    found = explainer([InputRow(text) for text in TEXTS])
    assert max(sizes) == 6
    assert [type(one).__name__ for one in found].count("Example") == 5
    assert type(found[2]) is error  # the text that holds w30, and no other
    with pytest.raises(error):
        explain(model, tokenizer, TEXTS, alternatives=0)


def test_what_was_done_is_not_done_again_where_a_later_batch_fails(tokenizer, monkeypatch):
    from captum_ssm.explanation.make.relevance import batches

    monkeypatch.setattr(batches, "TOKENS", 8)
    done, failing = Counter(), len(TEXTS[2].split())  # the longest text, in the last batch
    for kind in (MambaAttribution, MambaLRP):

        def counted(self, inputs, *args, plain=kind.attribute, **kwargs):
            if isinstance(self, MambaLRP) and inputs.shape[1] == failing:
                raise RuntimeError("too long")
            done.update((type(self), tuple(filter(None, row))) for row in inputs.tolist())
            return plain(self, inputs, *args, **kwargs)

        monkeypatch.setattr(kind, "attribute", counted)
    explainer = Explainer(tiny("mamba"), tokenizer, methods=["mamba-attribution", "mamba-lrp"])
    found = explainer([InputRow(text, target="w5") for text in TEXTS])
    assert [k for k, one in enumerate(found) if isinstance(one, Exception)] == [2]
    assert len(done) == 2 * len(TEXTS) - 1
    assert {*done.values()} == {2}  # two answers of each text


def test_rollout_of_every_token_runs_the_model_once_for_all_texts(tokenizer, monkeypatch):
    model, frozen = tiny("mamba"), []
    plain = MambaRollout.freeze_once
    monkeypatch.setattr(
        MambaRollout, "freeze_once", lambda self, *a: frozen.append(1) or plain(self, *a)
    )
    explain(model, tokenizer, TEXTS, position="all", methods="rollout")
    assert len(frozen) == 1


def test_batches_hold_so_many_tokens(tokenizer, monkeypatch):
    from captum_ssm.explanation.make.relevance import batches

    monkeypatch.setattr(batches, "TOKENS", 10)
    sizes = []
    plain = rows_module.joined
    monkeypatch.setattr(
        rows_module,
        "joined",
        lambda several: sizes.append((len(several), plain(several).inputs.shape)) or plain(several),
    )
    explain(tiny("mamba"), tokenizer, TEXTS, alternatives=0)
    assert all(count == 1 or shape.numel() <= 10 for count, shape in sizes)
    assert max(count for count, _ in sizes) > 1
