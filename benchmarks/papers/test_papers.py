"""The papers' scripts on stand-ins: tiny random checkpoints, tiny files in the real formats."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import alignments
import amplify
import arc_easy
import datasets
import h5py
import harness
import huggingface_hub
import imagenet_perturbation
import imagenet_segmentation
import imdb
import numpy as np
import pytest
import torch
from imagenet import BLACK, prepared, vision_mamba
from PIL import Image
from safetensors.torch import save_file
from text import padded, unknown_id
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    JambaConfig,
    JambaForSequenceClassification,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
)

from captum_ssm import MambaAttribution, MambaLRP
from captum_ssm.attr import methods
from captum_ssm.metrics import Interval, alignment_error_rate, segmentation
from captum_ssm.models import VisionMamba

HERE = Path(__file__).resolve().parent
END = "<|endoftext|>"


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, and the end of text that stands for UNK, as in GPT-NeoX's."""
    letters = {letter: k for k, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(letters, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=END, eos_token=END)


def config() -> MambaConfig:
    sizes = {"vocab_size": 264, "hidden_size": 8, "state_size": 2, "num_hidden_layers": 2}
    return MambaConfig(**sizes, time_step_rank=2, initializer_range=0.5, eos_token_id=256)


@pytest.fixture
def language_model(tmp_path) -> Path:
    folder = tmp_path / "language model"
    MambaForCausalLM(config()).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def vision_checkpoint(tmp_path) -> Path:
    """As published: weights, and the options of the training."""
    model = VisionMamba((16, 16), 4, classes=3, width=8, depth=2, state=4)
    path = tmp_path / "vim.pth"
    torch.save({"model": model.state_dict(), "args": argparse.Namespace(lr=1e-3), "epoch": 3}, path)
    return path


def record(folder: Path, name: str) -> dict:
    return json.loads((folder / f"{name}.json").read_text())


# ImageNet


def photo(width: int, height: int) -> np.ndarray:
    return np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture
def gtsegs(tmp_path) -> tuple[Path, list[np.ndarray], list[np.ndarray]]:
    """A file of the layout of gtsegs_ijcv.mat: columns of references, all arrays transposed."""
    images = [photo(20, 12), photo(16, 16), photo(9, 30)]
    masks = [np.zeros(image.shape[:2], np.uint8) for image in images]
    for mask in masks:
        mask[: len(mask) // 2, 3:] = 1
    path = tmp_path / "gtsegs_ijcv.mat"
    with h5py.File(path, "w") as file:
        img = file.create_dataset("value/img", (3, 1), dtype=h5py.ref_dtype)
        gt = file.create_dataset("value/gt", (3, 1), dtype=h5py.ref_dtype)
        for k, (image, mask) in enumerate(zip(images, masks, strict=True)):
            file[f"#refs#/image{k}"] = image.transpose(2, 1, 0)
            file[f"#refs#/mask{k}"] = mask.T
            cell = file.create_dataset(f"#refs#/cell{k}", (1, 1), dtype=h5py.ref_dtype)
            cell[0, 0] = file[f"#refs#/mask{k}"].ref
            img[k, 0], gt[k, 0] = file[f"#refs#/image{k}"].ref, cell.ref
    return path, images, masks


def test_images_and_masks_of_the_segmentation_file(gtsegs):
    path, images, masks = gtsegs
    found = imagenet_segmentation.SegmentedImages(path, (16, 16))
    assert len(found) == 3
    assert torch.equal(found[1][1], torch.from_numpy(masks[1]).long())
    assert torch.equal(found[1][0], prepared(Image.fromarray(images[1]), (16, 16)))
    for image, mask in (found[0], found[2]):
        assert image.shape == (3, 16, 16)
        assert mask[:8, 8:].all()
        assert not mask[9:].any()


def test_preparing_an_image_is_resizing_and_normalizing():
    image = Image.fromarray(photo(16, 8))
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = torch.from_numpy((np.asarray(image) / 255 - mean) / deviation).permute(2, 0, 1)
    torch.testing.assert_close(prepared(image, (8, 16)), expected.float())
    black = prepared(Image.new("L", (5, 5)), (4, 4))
    torch.testing.assert_close(black, BLACK.expand(3, 4, 4))


def test_segmentation_of_imagenet(gtsegs, vision_checkpoint, tmp_path, capsys):
    path, _, _ = gtsegs
    chosen = ["--methods", "attribution, hidden", "random", "--batch-size", "2", "--cpu"]
    imagenet_segmentation.main(
        ["--data", str(path), "--checkpoint", str(vision_checkpoint), "--output", str(tmp_path)]
        + chosen
    )
    found = record(tmp_path, "imagenet_segmentation")
    assert list(found["scores"]) == ["Attribution, hidden", "Random maps"]
    model = vision_mamba(str(vision_checkpoint))
    samples = [imagenet_segmentation.SegmentedImages(path, (16, 16))[k] for k in range(3)]
    images, masks = (torch.stack(part) for part in zip(*samples, strict=True))
    relevance = MambaAttribution(model).attribute(images, model(images).argmax(1))
    expected = segmentation(relevance, masks).miou()
    assert found["scores"]["Attribution, hidden"]["miou"]["value"] == pytest.approx(expected.value)
    printed = capsys.readouterr().out
    assert "(54.24)" in printed
    assert printed.count("| Random maps |") == 1


def test_perturbation_of_imagenet(vision_checkpoint, tmp_path):
    for k, folder in enumerate(("n01440764", "n01443537", "n01484850")):
        (tmp_path / "val" / folder).mkdir(parents=True)
        for n in range(2):
            name = f"val/{folder}/ILSVRC2012_val_0000{n}{k}.JPEG"
            Image.fromarray(photo(20 + k, 14 + n)).save(tmp_path / name)
    files = imagenet_perturbation.labelled_files(tmp_path / "val", 3)
    assert [label for _, label in files] == [0, 1, 2, 0, 1, 2]
    common = ["--data", str(tmp_path / "val"), "--checkpoint", str(vision_checkpoint), "--cpu"]
    common += ["--output", str(tmp_path), "--limit", "4"]
    imagenet_perturbation.main([*common, "--methods", "saliency", "rollout, h"])
    found = record(tmp_path, "imagenet_perturbation")
    assert found["about"]["images"] == 4
    assert found["scores"]["Saliency"]["positive"]["samples"] == 4
    assert found["paper"]["Rollout, hidden"] == {"positive": 18.806, "negative": 41.864}
    with pytest.raises(SystemExit, match="3 folders in it, and the model has 5 classes"):
        imagenet_perturbation.labelled_files(tmp_path / "val", 5)
    with pytest.raises(SystemExit, match="neither a file nor owner/name/file"):
        vision_mamba("no/such")
    with pytest.raises(SystemExit, match="none has such a name"):
        imagenet_perturbation.main([*common, "--methods", "gradcam"])


def test_checkpoints_from_the_hub_and_of_both_kinds(vision_checkpoint, tmp_path, monkeypatch):
    asked = []

    def download(*names: str) -> str:
        asked.append(names)
        return str(vision_checkpoint)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    state = vision_mamba("hustvl/Vim-small-midclstok/vim_s_midclstok_80p5acc.pth").state_dict()
    assert asked == [("hustvl/Vim-small-midclstok", "vim_s_midclstok_80p5acc.pth")]
    save_file(state, tmp_path / "vim.safetensors")
    again = vision_mamba(str(tmp_path / "vim.safetensors")).state_dict()
    assert all(torch.equal(state[name], again[name]) for name in state)


# IMDB


@pytest.fixture
def reviews(tmp_path) -> Path:
    words = "fine", "dull", "a bore", "good", "bad", "I cried", "no"
    data = {"text": list(words), "label": [1, 0, 0, 1, 0, 1, 0]}
    path = tmp_path / "plain_text"
    path.mkdir()
    datasets.Dataset.from_dict(data).to_parquet(path / "test-00000-of-00001.parquet")
    return path


@pytest.fixture
def published_classifier(tmp_path) -> tuple[Path, imdb.MeanPooledMamba]:
    """In the papers' checkpoint's format: mamba_ssm's configuration and names."""
    folder = tmp_path / "classifier"
    model = imdb.MeanPooledMamba(config(), 2).eval()
    state = {
        key.replace("backbone.embeddings.", "backbone.embedding.").replace(
            "classification_head.", "classification_head.classification_head."
        ): value
        for key, value in model.state_dict().items()
    }
    tokenizer().save_pretrained(folder)
    torch.save(state, folder / "pytorch_model.bin")
    settings = {"d_model": 8, "n_layer": 2, "vocab_size": 257, "ssm_cfg": {}, "rms_norm": True}
    (folder / "config.json").write_text(json.dumps(settings))
    return folder, model


def test_the_published_classifier_is_loaded_and_pools_its_tokens(published_classifier):
    folder, model = published_classifier
    loaded, words = imdb.classifier(str(folder))
    assert unknown_id(words) == words.convert_tokens_to_ids(END) == 256
    ids, mask = padded([words(text).input_ids for text in ("a film", "dull")], 256)
    with torch.no_grad():
        found = loaded(ids, attention_mask=mask).logits
        assert torch.equal(found, model(ids, attention_mask=mask).logits)
        alone = loaded(ids[1:, :4], attention_mask=mask[1:, :4]).logits
    torch.testing.assert_close(found[1:], alone)
    # All tokens are asked, none of the padding.
    relevance = MambaLRP(loaded).attribute(
        ids, target=0, additional_forward_args={"attention_mask": mask}
    )
    assert relevance[1, :4].all()
    assert not relevance[1, 4:].any()


def test_classifiers_from_the_hub_and_of_transformers(published_classifier, tmp_path, monkeypatch):
    folder, model = published_classifier
    monkeypatch.setattr(huggingface_hub, "snapshot_download", {"owner/name": folder}.get)
    (folder / "pytorch_model.bin").rename(folder / "old")
    save_file(torch.load(folder / "old"), folder / "model.safetensors")
    loaded, _ = imdb.classifier("owner/name")
    weights = model.state_dict()
    assert all(torch.equal(weights[name], w) for name, w in loaded.state_dict().items())
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 8}
    sizes |= {"hidden_size": 8, "num_hidden_layers": 2, "attn_layer_offset": 1, "num_experts": 1}
    jamba = JambaConfig(vocab_size=264, num_labels=2, attn_layer_period=2, pad_token_id=0, **sizes)
    JambaForSequenceClassification(jamba).save_pretrained(tmp_path / "jamba")
    tokenizer().save_pretrained(tmp_path / "jamba")
    loaded, words = imdb.classifier(str(tmp_path / "jamba"))
    assert not loaded.training
    # Such a model finds the end of a review by the id of its padding, not by the mask.
    padding = imdb.padding_id(loaded, unknown_id(words))
    assert padding == 0
    assert imdb.padding_id(model, unknown_id(words)) == 256
    ids, mask = padded([words(text).input_ids for text in ("so so, at length", "dull")], padding)
    with torch.no_grad():
        alone = loaded(ids[1:, :4], attention_mask=mask[1:, :4]).logits
        torch.testing.assert_close(loaded(ids, attention_mask=mask).logits[1:], alone)
    for no_padding in (256, None):
        loaded.config.pad_token_id = no_padding
        with pytest.raises(SystemExit, match=f"pad_token_id is {no_padding} and removed tokens"):
            imdb.padding_id(loaded, 256)


@pytest.mark.slow
def test_imdb_on_two_processes_is_imdb_on_one(published_classifier, reviews, tmp_path):
    common = ["--checkpoint", str(published_classifier[0]), "--data", str(reviews)]
    common += ["--batch-size", "2", "--cpu", "--methods", "attribution, h", "saliency", "random"]
    imdb.main([*common, "--output", str(tmp_path / "one")])
    one = record(tmp_path / "one", "imdb")
    assert one["about"]["reviews"] == 7
    assert set(one["scores"]) == {"Attribution, hidden", "Saliency", "Random scores"}
    assert len(one["curves"]["Random scores"]["activation"]) == 11
    for row in one["scores"].values():
        assert 0 < row["activation"]["value"] < 1
    subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        + [str(HERE / "imdb.py"), *common, "--output", str(tmp_path / "two")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache2")},
        check=True,
        timeout=300,
    )
    assert record(tmp_path / "two", "imdb") == one


# ARC-Easy


@pytest.fixture
def arc(tmp_path) -> Path:
    choices = [
        {"text": ["ice", "steam", "sand"], "label": ["A", "B", "C"]},
        {"text": ["the sun", "a rock", "iron", "wood"], "label": ["1", "2", "3", "4"]},
    ]
    data = {
        "id": ["q0", "q1"],
        "question": ["Hot?", "Shines?"],
        "choices": choices,
        "answerKey": ["B", "1"],
    }
    path = tmp_path / "arc.parquet"
    datasets.Dataset.from_dict(data).to_parquet(path)
    return path


def test_likelihoods_of_options_are_those_of_each_alone(language_model):
    model = MambaForCausalLM.from_pretrained(language_model).eval()
    prompts, options = torch.randint(256, (2, 5)), [[3], [7, 8, 9], [1, 2]]
    with torch.no_grad():
        found = arc_easy.log_likelihoods(model, prompts, options)
        for b, prompt in enumerate(prompts):
            for n, option in enumerate(options):
                ids = torch.cat([prompt, torch.tensor(option)])[None]
                scores = model(ids).logits.log_softmax(-1)[0]
                each = [scores[4 + k, token] for k, token in enumerate(option)]
                torch.testing.assert_close(found[b, n], torch.stack(each).sum())


def test_captums_methods_explain_the_continuation_s_likelihood(language_model):
    model = MambaForCausalLM.from_pretrained(language_model).eval()
    prompt, answer = torch.randint(256, (1, 4)), torch.tensor([5, 6])
    found = arc_easy.by_captum(model, "Input x gradient", 256)(prompt, answer)
    ids = torch.cat([prompt[0], answer])[None]
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    scores = model(inputs_embeds=embeddings).logits.log_softmax(-1)
    (gradient,) = torch.autograd.grad(scores[0, 3, 5] + scores[0, 4, 6], embeddings)
    torch.testing.assert_close(found, (gradient * embeddings).sum(-1)[:, :4])


def test_arc_easy(language_model, arc, tmp_path):
    arc_easy.main(
        ["--checkpoint", str(language_model), "--data", str(arc), "--output", str(tmp_path)]
        + ["--cpu", "--methods", "attribution, unified", "lrp", "input x", "--size", "2.8B"]
    )
    found = record(tmp_path, "arc_easy")
    assert set(found["scores"]) == {"Attribution, unified", "MambaLRP", "Input x gradient"}
    assert found["paper"]["Attribution, unified"] == {"activation": 0.939, "pruning": 1.082}
    rows = list(found["scores"].values())
    assert rows[0]["right"] == rows[1]["right"]
    assert all(row["pruning"]["value"] > 0 for row in rows)


# Alignments


def test_gold_links():
    assert alignments.gold_links("1-1 2p3", first=1) == ({(0, 0)}, {(0, 0), (1, 2)})
    assert alignments.gold_links("", first=0) == (set(), set())
    with pytest.raises(SystemExit, match="expected links such as 0-0"):
        alignments.gold_links("1:2", first=0)
    with pytest.raises(SystemExit, match="--first-index"):
        alignments.gold_links("0-0", first=1)


def test_the_error_rate_of_sentences_together():
    predicted = [{(0, 0), (1, 1)}, {(0, 1)}]
    sure, possible = [{(0, 0)}, {(0, 0), (1, 1)}], [{(0, 0), (1, 1)}, {(0, 0), (1, 1), (0, 1)}]
    counts = [alignments.counts(*s) for s in zip(predicted, sure, possible, strict=True)]

    def numbered(sets):
        return {(n, *link) for n, links in enumerate(sets) for link in links}

    expected = alignment_error_rate(numbered(predicted), numbered(sure), numbered(possible))
    assert float(alignments.error_rate(torch.stack(counts))) == pytest.approx(expected)


def test_scores_of_pieces_become_scores_of_words():
    scores = torch.tensor([[1.0, 2.0, 4.0], [3.0, 0.0, 2.0], [5.0, 5.0, 1.0]])
    found = alignments.word_map(scores, [0, 1, 1], [0, 0, 1], (2, 2))
    assert found.tolist() == [[2.0, 4.0], [5.0, 6.0]]
    words = tokenizer()
    ids, owner = alignments.pieces(words, ["ab", "c"], starts=True)
    assert words.decode(ids) == "ab c"
    assert owner == [0, 0, 1, 1]
    assert words.decode(alignments.pieces(words, ["ab", "c"], starts=False)[0]) == " ab c"


def test_alignments(language_model, tmp_path):
    files = {
        "de": "ein Haus\nja\ndas ist gut\n",
        "en": "a house\nyes\nthat is good\n",
        "gold.talp": "1-1 2-2\n1-1\n1-1 2-2 3-3 2p3\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, "latin-1")
    common = ["--checkpoint", str(language_model), "--cpu", "--encoding", "latin-1"]
    common += ["--output", str(tmp_path), "--choosing", "1"]
    for option, name in (("alignments", "gold.talp"), ("source", "de"), ("target", "en")):
        common += [f"--{option}", str(tmp_path / name)]
    alignments.main([*common, "--first-index", "1"])
    found = record(tmp_path, "alignments")
    assert list(found["scores"]) == list(alignments.ROWS)
    assert found["paper"]["LaTIM (l2), best layer"]["aer"] == 0.46
    assert found["about"]["sentences"] == 2
    for name, row in found["scores"].items():
        assert 0 <= row["aer"]["value"] <= 1
        assert (found["about"]["best layers"][name] is None) == ("best layer" not in name)
    with pytest.raises(SystemExit, match=r"no sentences: give --source and --target, or --data"):
        alignments.main([*common[:-2], "--first-index", "1"])


def test_alignments_of_a_data_set_of_translations(language_model, tmp_path):
    rows = {"translation": [{"de": "ja", "en": "yes"}, {"de": "ein Haus", "en": "a house"}]}
    datasets.Dataset.from_dict(rows).to_parquet(tmp_path / "iwslt.parquet")
    (tmp_path / "awesome").write_text("0-0\n0-0 1-1\n")
    alignments.main(
        ["--checkpoint", str(language_model), "--data", str(tmp_path / "iwslt.parquet"), "--cpu"]
        + ["--alignments", str(tmp_path / "awesome"), "--choosing", "1", "--output", str(tmp_path)]
        + ["--methods", "lrp", "--table", "iwslt-de-en", "--size", "M1L"]
    )
    found = record(tmp_path, "alignments")
    assert found["scores"]["MambaLRP"]["aer"]["samples"] == 1
    assert found["paper"]["MambaLRP"]["aer"] == 0.68


def test_sentences_and_links_have_to_fit():
    with pytest.raises(SystemExit, match="words that"):
        alignments.sentence_pairs(["ja"], ["yes"], ["0-1"], first=0)
    with pytest.raises(SystemExit, match=r"have \(1, 1, 2\) sentences"):
        alignments.sentence_pairs(["ja"], ["yes"], ["0-0", ""], first=0)
    with pytest.raises(SystemExit, match="sentence 2 has no words: ' ', 'no'"):
        alignments.sentence_pairs(["ja", " "], ["yes", "no"], ["0-0", ""], first=0)


def test_lines_end_at_newlines_only(tmp_path):
    (tmp_path / "de").write_bytes("a\u2028b\r\n\nc\x85d\re\n".encode())
    assert alignments.lines(tmp_path / "de") == ["a\u2028b", "", "c\x85d\re"]


# AMPLIFY


SNARK = "Which statement is sarcastic?\nOptions:\n(A) Nice weather - really nice\n(B) It rains"
FALLACY = "- odd: is this valid?\nOptions:\n- valid \n- invalid"


def test_questions_of_the_published_tasks():
    common_sense = {
        "question": "Where?",
        "choices": {"label": ["A", "B"], "text": ["here", "there"]},
        "answerKey": "B",
    }
    snark, fallacy, third = amplify.questions(
        [{"input": SNARK, "target": "(B)"}, {"input": FALLACY, "target": "invalid"}, common_sense]
    )
    assert (snark.options, snark.right) == (("(A)", "(B)"), 1)
    assert (fallacy.options, fallacy.right) == (("valid", "invalid"), 1)
    assert third == amplify.Question("Where?\n(A) here\n(B) there", ("(A)", "(B)"), 1)
    with pytest.raises(SystemExit, match="none of the options"):
        amplify.questions([{"input": SNARK, "target": "(C)"}])


def test_questions_of_a_file_come_in_one_order(tmp_path):
    examples = [{"input": f"{k}?\nOptions:\n- yes\n- no", "target": "no"} for k in range(6)]
    (tmp_path / "task.json").write_text(json.dumps({"examples": examples}))
    found = amplify.load(str(tmp_path / "task.json"), 4)
    assert [q.text for q in found] == [
        q.text for q in amplify.load(str(tmp_path / "task.json"), 6)
    ][:4]
    assert len({q.text for q in found}) == 4
    datasets.Dataset.from_list(examples).to_parquet(tmp_path / "task.parquet")
    assert {q.right for q in amplify.load(str(tmp_path / "task.parquet"), None)} == {1}


def test_a_rationale_is_one_line_of_the_model_s(language_model):
    class Model(torch.nn.Module):
        device = torch.device("cpu")

        def generate(self, ids: Tensor, **options: object) -> Tensor:
            assert options["max_new_tokens"] == 9
            assert options["do_sample"] is False
            more = tokenizer()(" The key words\nAnswer: x").input_ids
            return torch.cat([ids, torch.tensor([more])], 1)

    assert amplify.Answerer(Model(), tokenizer()).line("Rationale:", most=9) == "The key words"


def test_shots_are_the_most_confident_mistakes():
    assert amplify.confidence(torch.tensor([0.7, 0.2, 0.1]), 1) == pytest.approx(0.5)
    assert amplify.confidence(torch.tensor([0.7, 0.2, 0.1]), 0) == pytest.approx(-0.5)
    sure = {"p": [0.6, 0.4], "q": [0.1, 0.9], "r": [0.2, 0.8]}

    class Proxy:
        def probabilities(self, prompt: str, question: amplify.Question) -> Tensor:
            assert prompt == f"Question: {question.text}\nAnswer:"
            return torch.tensor(sure[question.text])

    questions = [amplify.Question(text, ("x", "y"), 0) for text in sure]
    assert [q.text for q in amplify.shots(Proxy(), questions, 2)] == ["q", "r"]


def test_the_rationale_names_the_words_that_the_explanation_picks(language_model):
    words = tokenizer()
    proxy = amplify.Answerer(MambaForCausalLM.from_pretrained(language_model), words)
    question = amplify.Question("The rain, oh the rain is fine", ("good", "bad"), 0)

    def explain(prompt: Tensor, answer: Tensor) -> Tensor:
        assert words.decode(prompt[0]) == "Question: The rain, oh the rain is fine\nAnswer:"
        assert words.decode(answer) == " good"
        text = words.decode(prompt[0])
        relevance = torch.zeros(1, len(text))
        for word, each in (("rain", 1.0), ("oh", 4.0), ("fine", 1.5), ("Answer", 9.0)):
            relevance[0, text.index(word) : text.index(word) + len(word)] = each
        relevance[0, text.rindex("rain") : text.rindex("rain") + 4] = 1.0
        return relevance

    found = amplify.key_words(proxy, explain, question, 2)
    assert found == ["rain", "oh"]
    assert amplify.key_words(proxy, explain, question, 3) == ["rain", "oh", "fine"]
    reason = amplify.rationale(["rain", "oh", "fine"], "good")
    clues = "are important clues to predict good as the correct answer."
    assert reason == f"The key words: rain, oh and fine {clues}"
    assert amplify.rationale(["rain"], "good").startswith("The key words: rain are")
    assert amplify.few_shot([(question, reason)]) == (
        f"Question: The rain, oh the rain is fine\nRationale: {reason}\nAnswer: good\n\n"
    )
    assert "Rationale" not in amplify.few_shot([(question, None)])


def test_amplify(language_model, tmp_path):
    examples = [
        {"input": f"{k}?\nOptions:\n(A) no\n(B) oh", "target": f"({'AB'[k % 2]})"} for k in range(5)
    ]
    (tmp_path / "snarks.json").write_text(json.dumps({"canary": "x", "examples": examples}))
    amplify.main(
        ["--data", str(tmp_path / "snarks.json"), "--checkpoint", str(language_model), "--cpu"]
        + ["--proxy", str(language_model), "--shots", "1", "--words", "2", "--validation", "0.4"]
        + ["--methods", "attribution, unified", "saliency", "--output", str(tmp_path)]
    )
    found = record(tmp_path, "amplify")
    names = ["Vanilla", "Shots without rationales", "Attribution, unified", "Saliency"]
    assert list(found["scores"]) == names
    assert all(row["accuracy"]["samples"] == 3 for row in found["scores"].values())
    assert found["curves"]["Vanilla"] == ""
    assert found["curves"]["Saliency"].count("The key words: ") == 1
    assert found["paper"]["Attribution, unified"]["accuracy"] == 56.15


# What they share


def test_local_files_of_every_kind_are_data_sets(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": "y"}\n{"text": "z"}\n')
    assert harness.dataset(str(tmp_path / "a.jsonl"), None, "test", 2)["text"] == ["x", "y"]
    every = harness.dataset(str(tmp_path / "a.jsonl"), None, "test", None, seed=1)
    assert sorted(every["text"]) == ["x", "y", "z"]


def test_names_of_the_hub_are_asked_of_the_hub(monkeypatch):
    def load(*names: str, split: str) -> datasets.Dataset:
        assert (*names, split) == ("allenai/ai2_arc", "ARC-Easy", "test")
        return datasets.Dataset.from_dict({"a": [1, 2]})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert harness.dataset("allenai/ai2_arc", "ARC-Easy", "test", 9)["a"] == [1, 2]


def test_the_paper_s_numbers_stand_next_to_ours():
    scores = {"A": {"x": Interval(0.5, 0.25, 0.75, 9)}, "B": {"x": Interval(0.1, 0.1, 0.1, 9)}}
    text = harness.table(scores, {"A": {"x": 51.2}}, {"x": ("X ↑", 100)})
    assert text.splitlines()[2:] == [
        "| A | 50.0 [25.0, 75.0] (51.2) |",
        "| B | 10.0 [10.0, 10.0] |",
    ]


def test_a_missing_package_is_named():
    with pytest.raises(SystemExit, match=r"no_such_package is not installed.*\.\[papers\]"):
        harness.required("no_such_package")


def test_methods_explain_in_the_shape_of_their_input() -> None:
    from explanations import of_images, of_token_ids

    model = VisionMamba((8, 8), 4, classes=3, width=8, depth=1, state=4).eval()
    images, classes = torch.rand(2, 3, 8, 8), torch.tensor([0, 2])
    for name, method in of_images(model, BLACK).items():
        assert method(images, classes).shape == images.shape, name
    language = MambaForCausalLM(config()).eval()
    ids = torch.randint(256, (2, 4))
    last: Callable[..., Tensor] = lambda x: language(x).logits[:, -1]  # noqa: E731
    for name, method in of_token_ids(last, language.get_input_embeddings(), 256).items():
        assert method(ids, target=classes).shape == ids.shape, name


def test_every_method_of_the_library_is_compared() -> None:
    from explanations import ROWS

    own = {name for name, cls in methods().items() if cls.__module__.startswith("captum_ssm.")}
    assert own == {name for name, _ in ROWS.values()}
