"""`explain`: rows are what the methods return, tokens are the text, and errors say what to do."""

import re

import pytest
import torch
from families import build
from models import VOCABULARY, WORDS, Slow, ids, tiny, word_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast
from vision_models import vim

from captum_ssm import (
    Explanation,
    InputError,
    MemoryLimitError,
    TargetError,
    explain,
    hidden_attention,
)
from captum_ssm.attr import LaTIM, methods
from captum_ssm.explanation.units import texts_of

TEXT, TARGET = "w3 w4 w5 w6 w7", "w8 w9"
READ = torch.tensor([[3, 4, 5, 6, 7, 8]])
EVERY = {name: {"activation": "gate"} if name == "latim" else {} for name in methods()}


@pytest.fixture(scope="module")
def explained(model, words):
    """Two tokens, by every method, the second one against another continuation."""
    return explain(model, words, TEXT, target=TARGET, against="w8 w11", methods=EVERY)


def padded(row: torch.Tensor) -> torch.Tensor:
    # The last token of the continuation explains nothing.
    return torch.nn.functional.pad(row, (0, 7 - len(row)))


@pytest.mark.parametrize("name", EVERY)
def test_rows_are_what_the_method_returns(name, explained, model):
    (example,) = explained.examples
    method = methods()[name](model)
    rows = torch.from_numpy(example.relevance[name])
    count = 0
    for output in example.outputs:
        for answer in output.answers:
            if answer.row is None:
                continue
            asked = {"target": answer.id, "position": output.position, **EVERY[name]}
            expected = method.attribute(READ, **asked)
            torch.testing.assert_close(rows[answer.row], padded(expected[0]), rtol=1e-4, atol=1e-6)
            count += 1
    assert count == 5  # each target and one alternative, and what the second is held against
    assert len(rows) == 6


@pytest.mark.parametrize("name", EVERY)
def test_a_contrast_is_the_difference_of_two_scores(name, explained, model):
    options = EVERY[name]

    def score(ids):
        logits = model(ids, use_cache=False).logits[:, 5]
        return logits[:, 9] - logits[:, 11]

    method = methods()[name](score, model=model)
    row = explained.relevance(name, output=1, against="w11")
    expected = padded(method.attribute(READ, position=5, **options)[0])
    torch.testing.assert_close(torch.from_numpy(row), expected, rtol=1e-4, atol=1e-6)
    parts = [explained.relevance(name, output=1, answer=one) for one in ("w9", "w11")]
    linear = explained.methods[list(EVERY).index(name)].adds_up
    if linear:
        assert abs(row - (parts[0] - parts[1])).max() < 1e-5 * abs(row).max()
    elif not methods()[name].needs_target(**options):
        assert (row == parts[0]).all()
    else:
        assert abs(row - (parts[0] - parts[1])).max() > 1e-3 * abs(row).max()


def test_answers_are_the_models(explained, model):
    with torch.no_grad():
        logits = model(READ).logits[0, 4:]
    (example,) = explained.examples
    for output, row, target in zip(example.outputs, logits, (8, 9), strict=True):
        assert [a.id for a in output.answers][:5] == row.topk(5).indices.tolist()
        assert output.answers[output.chosen].id == target
        for answer in output.answers:
            assert answer.text == f"w{answer.id}"
            assert answer.probability == pytest.approx(float(row.softmax(-1)[answer.id]), rel=1e-4)
            assert answer.logit == pytest.approx(float(row[answer.id]), rel=1e-6, abs=1e-6)
            assert answer.rank == 1 + int((row > row[answer.id]).sum())
    assert example.prompt == 5
    assert [output.position for output in example.outputs] == [4, 5]


def test_deltas_are_the_score_less_the_sum(explained):
    (example,) = explained.examples
    assert set(example.deltas) == {"latim", "mamba-lrp"}
    for name, deltas in example.deltas.items():
        method = methods()[name](tiny())
        for output in example.outputs:
            answer = output.answers[output.chosen]
            asked = {"target": (output.position, answer.id), **EVERY[name]}
            _, delta = method.attribute(READ, return_convergence_delta=True, **asked)
            assert deltas[answer.row] == pytest.approx(float(delta), abs=1e-4)


def test_the_settings_and_versions_are_kept(explained):
    assert explained.settings["target"] == TARGET
    assert explained.settings["dtype"] == "float32"
    assert {"captum_ssm", "torch", "transformers"} <= set(explained.versions)
    assert [m.name for m in explained.methods] == list(EVERY)
    assert explained.methods[0].options == {"activation": "gate"}
    assert explained.model == "MambaForCausalLM"


def test_without_a_target_the_prediction_is_explained(model, tokenizer):
    best = int(model(torch.tensor([[3, 4, 5]])).logits[0, -1].argmax())
    found = explain(model, tokenizer, "w3 w4 w5", alternatives=2)
    (output,) = found.examples[0].outputs
    assert output.answers[output.chosen].id == best
    assert output.chosen == 0
    assert [a.row for a in output.answers] == [0, 1, 2, None, None]
    assert found.title == f"Why “{output.answers[0].text}”?"
    text = found.examples[0].text
    assert text == "w3 w4 w5 " + output.answers[0].text or best in tokenizer.all_special_ids


def test_positions(model, tokenizer):
    logits = model(torch.tensor([[3, 4, 5, 6]])).logits[0].detach()
    found = explain(model, tokenizer, "w3 w4 w5 w6", position=[1, -1], target="w9")
    (example,) = found.examples
    assert [output.position for output in example.outputs] == [1, 3]
    assert {output.answers[output.chosen].text for output in example.outputs} == {"w9"}
    assert example.text == "w3 w4 w5 w6"
    found = explain(model, tokenizer, "w3 w4 w5 w6", position=1)
    (output,) = found.examples[0].outputs
    assert output.answers[output.chosen].id == int(logits[1].argmax())
    found = explain(model, tokenizer, "w3 w4 w5 w6", target="w7", position="all", alternatives=0)
    (example,) = found.examples
    chosen = [output.answers[output.chosen].text for output in example.outputs]
    assert chosen == ["w4", "w5", "w6", "w7"]
    assert example.prompt == 4
    same = explain(model, tokenizer, "w3", target="w4 w5 w6 w7", alternatives=0).examples[0]
    assert (same.relevance["mamba-lrp"] == example.relevance["mamba-lrp"]).all()


def test_ids_texts_and_tokenizers_output_give_the_same(model, tokenizer):
    expected = explain(model, tokenizer, "w3 w4 w5", target="w6").relevance()
    encoded = tokenizer("w3 w4 w5", return_tensors="pt")
    encoded["token_type_ids"] = torch.zeros_like(encoded["input_ids"])
    for found in (
        explain(model, torch.tensor([3, 4, 5]), target=6),
        explain(model, tokenizer, [[3, 4, 5]], target=[6]),
        explain(model, encoded, target=torch.tensor([6])),
        explain(model, **encoded, target=6),
        explain(model, tokenizer, **encoded, target="w6"),
        explain(model, tokenizer, inputs=tokenizer("w3 w4 w5"), target="w6"),
    ):
        assert (found.relevance() == expected).all()
    assert explain(model, **encoded, target=6).examples[0].text == "3 4 5 6"
    assert explain(model, tokenizer, **encoded, target=6).examples[0].text == "w3 w4 w5 w6"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_explained(side, model):
    words = word_tokenizer({f"w{i}": i for i in range(VOCABULARY)}, pad_token="w0")
    words.padding_side = side
    texts = ["w3 w4 w5 w6", "w7 w8"]
    batch = words(texts, padding=True, return_tensors="pt")
    found = explain(model, words, **batch, target="w9")
    listed = explain(model, words, texts, target=["w9", "w9"])
    assert len(found) == len(listed) == 2
    for one, other, text in zip(found, listed, texts, strict=True):
        assert one.examples[0].text == other.examples[0].text == f"{text} w9"
        assert (one.relevance() == other.relevance()).all()


def byte_level() -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and pairs, as of GPT-2."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def metaspace() -> PreTrainedTokenizerFast:
    """A tokenizer that writes spaces as letters, as sentencepiece does, with a first token."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=60, special_tokens=["<unk>", "<s>"], show_progress=False
    )
    backend.train_from_iterator(["the cat sat on the mat"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("make", [byte_level, metaspace])
@pytest.mark.parametrize(
    "text", ["the cat sat", " the  cat,\n on the mat. ", "the zebra sat", "voilà 🦓 cat", "a\tb"]
)
def test_tokens_join_to_the_text(text, make, slow):
    from captum_ssm.explanation.make.inputs.reading import read, read_ids

    tokenizer = Slow(make()) if slow else make()
    reading = read(tokenizer, text, "text")
    assert reading.text == text
    assert "".join(token.text for token in reading.tokens if token.end > token.start) == text
    assert reading.ids == tokenizer.encode(text)
    for token in reading.tokens:
        assert "<unk>" not in token.text
        assert token.text
        if token.end > token.start:
            assert text[token.start : token.end] == token.text
    again = read_ids(tokenizer, reading.ids, "the text")
    assert "".join(t.text for t in again.tokens if t.end > t.start) == again.text
    if "<unk>" not in tokenizer.decode(reading.ids):
        assert again.text == tokenizer.decode(reading.ids)


def test_unknown_words_stay_as_they_were_typed(model):
    words = {"<unk>": 0, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = word_tokenizer(words, unk_token="<unk>")
    with pytest.warns(UserWarning, match="does not know 'zebra': the model reads <unk> in the"):
        found = explain(model, tokenizer, "w3 zebra w5", position="all", alternatives=0)
    (example,) = found.examples
    assert example.text.startswith("w3 zebra w5")
    first = example.outputs[0]
    assert first.answers[first.chosen].text == "zebra"
    # One of Captum's few functions of a tokenizer tells no offsets.
    assert explain(model, WORDS, "w3 w4", target="w5").examples[0].text == "w3 w4 w5"


def test_words_that_the_model_does_not_see_are_told(model, tmp_path):
    words = {"<unk>": 0, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = word_tokenizer(words, unk_token="<unk>")
    texts = ["w3 zebra w5 <unk> horse", "zebra w4"]
    with pytest.warns(UserWarning, match="does not know") as told:
        found = explain(model, tokenizer, texts, alternatives=0)
    # One warning for all texts, at the line of the call.
    (warning,) = told
    assert "'zebra', 'horse': the model reads <unk> in the place of each" in str(warning.message)
    assert warning.filename == __file__
    found.save(tmp_path / "found.json")
    for one in (found, Explanation.load(tmp_path / "found.json")):
        first, second = ([token.read_as for token in e.tokens[: e.prompt]] for e in one.examples)
        # What is typed as the unknown token is read as it was typed.
        assert first == [None, "<unk>", None, None, "<unk>"]
        assert second == ["<unk>", None]
    # A warning names some of many words.
    with pytest.warns(UserWarning, match="'z9' and 2 more: the model reads <unk>"):
        explain(model, tokenizer, " ".join(f"z{i}" for i in range(12)), methods="rollout")


def test_units(model):
    text = "the cat's mat. On it sat"
    found = explain(model_of(byte_level()), byte_level(), text, units={"subject": (4, 9)})
    (example,) = found.examples
    whole = example.text

    def parts(name):
        spans = example.units[name]
        assert [span.first for span in spans[1:]] == [span.end for span in spans[:-1]]
        assert (spans[0].first, spans[-1].end) == (0, len(example.tokens))
        return [whole[example.tokens[s.first].start : example.tokens[s.end - 1].end] for s in spans]

    assert parts("word")[:6] == ["the", " cat's", " mat", ".", " On", " it"]
    assert parts("sentence")[0] == "the cat's mat."
    (subject,) = [span for span in example.units["span"] if span.name == "subject"]
    assert parts("span")[example.units["span"].index(subject)] == " cat's"
    row = found.relevance()
    for name in ("word", "sentence", "span"):
        summed = found.relevance(units=name)
        expected = [row[span.first : span.end].sum() for span in example.units[name]]
        assert summed == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_lines_are_units_of_a_text_that_has_several():
    text = "x = 1\n\n  y = x\nprint("
    found = explain(model_of(byte_level()), byte_level(), text, target="y)", units="line")
    (example,) = found.examples
    texts = texts_of(example, "line")
    assert "".join(texts) == example.text == text + "y)"
    assert [one.strip() for one in texts[:2]] == ["x = 1", "y = x"]
    assert texts[2].strip().startswith("print(y)")
    assert found.relevance(units="line").sum() == pytest.approx(found.relevance().sum(), rel=1e-4)
    one = explain(model_of(byte_level()), byte_level(), "x =", target=" 1").examples[0]
    assert "line" not in one.units


def model_of(tokenizer):
    return tiny(vocab_size=len(tokenizer))


@pytest.mark.parametrize("family", ["mamba", "recurrent_gemma", "jamba"])
def test_the_lens_ends_at_the_models_own_answers(family):
    model = build(family)
    found = explain(model, ids(1, 6)[0], lens=True, target=[5, 6])
    for output in found.examples[0].outputs:
        assert len(output.lens) == model.config.num_hidden_layers
        last = output.lens[-1]
        assert [a.id for a in last] == [a.id for a in output.answers if a.rank <= 5]
        kept = {a.id: a.probability for a in output.answers}
        assert all(a.probability == pytest.approx(kept[a.id], rel=1e-3) for a in last)
    assert found.settings["notes"] == []


def test_a_model_without_a_known_end_has_no_lens_and_says_so(model):
    from models import Residual

    found = explain(Residual().eval(), ids(1, 6)[0], lens=True)
    assert found.examples[0].outputs[0].lens == ()
    assert found.settings["notes"] == ["no lens: the model's final norm and head were not found"]


def test_maps_are_those_of_the_library(model, tokenizer):
    found = explain(model, tokenizer, TEXT, target="w8", maps=["hidden-attention", "latim"])
    hidden, vectors = found.examples[0].maps
    expected = hidden_attention(model, READ, reduction="mean")
    assert list(hidden.layers) == list(expected)
    for name, one in expected.items():
        assert (hidden.layers[name] == one[0].numpy()).all()
        own = LaTIM(model).interactions(READ, name, "l2", activation="gate")[0]
        assert (vectors.layers[name] == own.numpy()).all()
    (only,) = explain(model, tokenizer, TEXT, maps=True, layers=-1).examples[0].maps
    assert list(only.layers) == list(expected)[-1:]


class OfTwoTexts(nn.Module):
    """A model that takes another text too."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, input_ids, other):
        return self.inner(input_ids).logits + self.inner(other).logits


def test_a_model_that_takes_more_than_a_text_is_refused(model, tokenizer):
    with pytest.raises(InputError, match=r"OfTwoTexts .* forward takes input_ids.*says: .*'other'"):
        explain(OfTwoTexts(model), tokenizer, "w3 w4 w5")


def test_what_does_not_fit_is_refused_before_it_is_computed(model, tokenizer):
    runs = []
    handle = model.register_forward_hook(lambda *_: runs.append(1))
    try:
        with pytest.raises(MemoryLimitError, match="an explanation of 16 rows of 9 numbers by 1"):
            explain(model, tokenizer, "w3", target="w4 " * 8, position=None, memory_limit=64)
        assert len(runs) == 2  # what kind of model it is, and what it answers
        with pytest.raises(MemoryLimitError, match="hidden_attention of 2 layers"):
            explain(model, tokenizer, TEXT, maps=True, memory_limit=150, alternatives=0)
    finally:
        handle.remove()


def test_the_model_is_left_as_it_was(tokenizer):
    model = tiny().train()
    before = {name: p.clone() for name, p in model.named_parameters()}
    explain(model, tokenizer, TEXT, methods=["mamba-lrp", "rollout"], lens=True, maps=True)
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    for name, p in model.named_parameters():
        assert p.grad is None
        assert torch.equal(p, before[name])


def test_images():
    model, image = vim(), torch.rand(3, 16, 16)
    options = {"methods": list(EVERY), "labels": ["cat", "dog", "owl"]}
    found = explain(model, image, target="dog", against="owl", **options)
    (example,) = found.examples
    assert example.grid == (2, 2)
    assert example.tokens == ()
    expected = ((image - image.min()) / (image.max() - image.min()) * 255).round()
    assert (torch.from_numpy(example.image).permute(2, 0, 1) == expected).all()
    (output,) = example.outputs
    assert output.position is None
    assert output.answers[output.chosen].text == "dog"
    for name in EVERY:
        own = methods()[name](model).attribute(image[None], target=1).sum(1)[0]
        row = torch.from_numpy(found.relevance(name))
        torch.testing.assert_close(row, own, rtol=1e-4, atol=1e-6)
        contrast = torch.from_numpy(found.relevance(name, against=2))

        def score(x):
            logits = model(x)
            return logits[:, 1] - logits[:, 2]

        own = methods()[name](score, model=model).attribute(image[None]).sum(1)[0]
        torch.testing.assert_close(contrast, own, rtol=1e-4, atol=1e-6)
    shown = explain(model, image, mean=[0.5] * 3, std=[0.5] * 3).examples[0].image
    assert (shown == ((image / 2 + 0.5) * 255).round().permute(1, 2, 0).numpy()).all()
    two = explain(model, torch.rand(2, 3, 16, 16))
    assert [example.name for example in two.examples] == ["image 1", "image 2"]


class Processor:
    """An image processor: pixels of a picture, halved."""

    image_mean, image_std = [0.0, 0.0, 0.0], [0.5, 0.5, 0.5]

    def __call__(self, image, return_tensors):
        pixels = torch.as_tensor(image).permute(2, 0, 1)[None] / 255
        return {"pixel_values": pixels / 0.5}


def test_a_picture_and_its_processor():
    picture = (torch.rand(16, 16, 3) * 255).round().numpy()
    found = explain(vim(), picture, processor=Processor())
    assert (found.examples[0].image == picture).all()
    second = explain(vim(), Processor(), picture)
    assert (second.relevance() == found.relevance()).all()
    with pytest.raises(
        InputError, match=r"does not take the input, .* as an image \(1, 5, 16, 3\), "
    ):
        explain(vim(), picture[:5])


BAD = {
    "no text": (dict(inputs=""), InputError, "text is '', which holds no token"),
    "no target": (dict(target=""), InputError, "target is '', which holds no token"),
    "no input": (dict(inputs=None), TypeError, "no input was given; expected a text"),
    "two inputs": (dict(input_ids=READ), TypeError, "more than one input was given"),
    "an image for a model of text": (
        dict(inputs={"input_ids": READ, "pixel_values": torch.zeros(1, 3, 4, 4)}),
        InputError,
        "inputs holds pixel_values, which no module of .* takes; expected .* own processor",
    ),
    "no method": (dict(methods=[]), ValueError, "methods is empty"),
    "a method": (dict(methods="magic"), ValueError, "methods holds 'magic'; expected .* latim"),
    "an option": (
        dict(methods={"rollout": {"layer": 1}}),
        ValueError,
        r"methods\['rollout'\] holds the option 'layer'; expected start_layer",
    ),
    "a typo in an option": (
        dict(methods={"latim": {"activaton": "gate"}}),
        ValueError,
        r"holds the option 'activaton'; expected .*\. Did you mean 'activation'\?$",
    ),
    "a typo in an option of Captum's": (
        dict(methods={"integrated-gradients": {"n_step": 5}}),
        ValueError,
        r"holds the option 'n_step'; expected .* Did you mean 'n_steps'\?$",
    ),
    "units": (dict(units="letter"), ValueError, "units is 'letter'; expected one of token, word"),
    "a span": (
        dict(units={"a": (0, 99)}),
        ValueError,
        r"units\['a'\] is \(0, 99\); expected characters \(start, end\) of the text",
    ),
    "half a span": (dict(units={"a": 3}), ValueError, r"units\['a'\] is 3; expected two integers"),
    "two spans": (
        dict(units={"a": (0, 4), "b": (3, 6)}),
        ValueError,
        r"units\['b'\] and units\['a'\] share the token ' w4'",
    ),
    "maps": (dict(maps="heat"), ValueError, "maps holds 'heat'; expected True, or one or several"),
    "alternatives": (dict(alternatives=-1), ValueError, "alternatives is -1; expected an integer"),
    "a contrast with itself": (
        dict(target="w8", against="w8"),
        TargetError,
        "against is 'w8', which is the target, or begins like it; expected another continuation",
    ),
    "a contrast with its beginning": (
        dict(target="w8 w9", against="w8"),
        TargetError,
        "begins like it",
    ),
    "a split target": (
        dict(target="w8 w9", position=2),
        TargetError,
        r"target is 'w8 w9', which has 2 tokens \('w8', ' w9'\), but with position it has to be",
    ),
    "a position": (dict(position=9), InputError, "position is 9; the text has 5 tokens"),
    "no position": (dict(position="some"), TypeError, "position is 'some'; expected an int"),
    "an id": (dict(target=99), TargetError, r"target is \[99\]; the model's ids are 0 .. 36"),
    "a type": (dict(target=0.5), TypeError, "target is 0.5; expected a text, a token id"),
    "targets": (
        dict(target=["w3", "w4"]),
        InputError,
        r"target holds 2 targets for 1 example\(s\)",
    ),
    "floats": (
        dict(inputs=0.5),
        InputError,
        "the model does not take the input.*It reads token ids",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_call_says_what_is_wrong(name, model, tokenizer):
    options, error, message = BAD[name]
    with pytest.raises(error, match=message):
        explain(model, tokenizer, **{"inputs": TEXT} | options)


def test_other_bad_calls(model, tokenizer):
    with pytest.raises(TypeError, match="model is a str"):
        explain("mamba", tokenizer, TEXT)
    with pytest.raises(TypeError, match=re.escape("expected explain(model, tokenizer, text)")):
        explain(model, TEXT)
    words = word_tokenizer({"<unk>": 0, "w3": 3}, unk_token="<unk>")
    with pytest.raises(TargetError, match="target is 'w4', which the tokenizer reads as <unk>"):
        explain(model, words, "w3", target="w4")
    with pytest.raises(TargetError, match="against is 'w4', which the tokenizer reads as <unk>"):
        explain(model, words, "w3", target="w3", against="w4")
    best = int(model(torch.tensor([[3]])).logits[0, -1].argmax())
    for options in ({}, {"position": 0}):
        with pytest.raises(TargetError, match=f"against is '{best}', which is"):
            explain(model, torch.tensor([3]), against=best, **options)
    with pytest.raises(InputError, match="there is a second text"):
        explain(model, input_ids=READ, token_type_ids=torch.ones_like(READ))
    with pytest.raises(InputError, match="attention_mask marks no token"):
        explain(model, input_ids=READ, attention_mask=torch.zeros_like(READ))
    image = torch.rand(3, 16, 16)
    with pytest.raises(TargetError, match="against is 1, the class that is explained"):
        explain(vim(), image, target=1, against=1)
    with pytest.raises(TargetError, match="target is 'cow'; expected a class"):
        explain(vim(), image, target="cow")
    with pytest.raises(ValueError, match="labels holds 1 names; the model has 3 classes"):
        explain(vim(), image, labels=["cat"])
    with pytest.raises(InputError, match="to have 3 channels, but got 1"):
        explain(vim(), torch.rand(16, 16))


@pytest.mark.parametrize(
    ("name", "meant"),
    [("targt", "target="), ("max_tokens", "max_new_tokens="), ("method", "methods="), ("zzz", "")],
)
def test_an_option_that_it_does_not_have_is_answered_with_the_closest(model, name, meant):
    with pytest.raises(TypeError, match=f"explain has no option '{name}'") as raised:
        explain(model, None, torch.tensor([3, 4]), **{name: 1})
    assert (f"Did you mean {meant}?" in str(raised.value)) == bool(meant)


def test_a_long_text_is_read_in_time_that_grows_with_its_length():
    from captum_ssm.explanation.make.inputs.reading import _reading

    class Counted(list):
        copied = 0

        def __getitem__(self, key):
            found = super().__getitem__(key)
            self.copied += len(found) if isinstance(key, slice) else 0
            return found

    n = 500
    offsets = Counted((3 * k, 3 * k + 2) for k in range(n))
    tokenizer = word_tokenizer({f"w{i}": i for i in range(VOCABULARY)})
    found = _reading(tokenizer, "w3 " * n, [3] * n, offsets)
    assert [found.tokens[k].start for k in (0, 1, n - 1)] == [0, 2, 3 * n - 4]
    assert offsets.copied <= n
