"""The models that come with the package are the trained ones, and answer as these do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from folders import ROOT
from safetensors.torch import load_file
from transformers.utils import logging

from captum_ssm import examples
from captum_ssm.examples import signals

TRAINED = ROOT / "tutorials" / "models"
FOLDERS = (TRAINED, Path(examples.__file__).parent / "data")
TOKENIZERS = [path for folder in FOLDERS for path in sorted(folder.glob("*/tokenizer_config.json"))]
NEXT_WORD = {
    "chains": "c",
    "chat": "blue",
    "copying": "d",
    "documents": "pink",
    "stories": "bark",
}


def says(word):
    return lambda model, scores, tokenizer: tokenizer.decode(scores[0, -1].argmax()) == word


ANSWERS = {
    **{kind: says(word) for kind, word in NEXT_WORD.items()},
    "digits": lambda model, scores, processor: scores.argmax() == 6,
    "reviews": lambda model, scores, tokenizer: scores.argmax() == 1,
}
LANGUAGE = [name for name in examples.names() if name.split("-")[0] in {*NEXT_WORD} - {"chat"}]


@pytest.mark.parametrize("name", examples.names())
def test_weights_are_the_trained_ones_in_half_the_size(name):
    packed = load_file(examples.folder(name) / "model.safetensors")
    trained = load_file(TRAINED / name / "model.safetensors")
    assert packed.keys() == trained.keys()
    for key, weight in packed.items():
        assert weight.dtype == torch.float16
        torch.testing.assert_close(weight, trained[key].half(), atol=0, rtol=0)


@pytest.mark.parametrize("path", TOKENIZERS, ids=lambda path: "/".join(path.parts[-3:-1]))
def test_tokenizers_are_named_as_the_oldest_transformers_knows_them(path):
    settings = json.loads(path.read_text(encoding="utf-8"))
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not {"backend", "extra_special_tokens"} & set(settings)  # of transformers 5


@pytest.mark.parametrize("name", [*LANGUAGE, "chat-mamba", "reviews-jamba", "digits-vim"])
@torch.no_grad()
def test_a_sample_is_answered_right(name):
    model, companion = examples.load(name)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    batch = _batch(companion, examples.sample(name))
    scores = model(batch.pixel_values) if "digits" in name else model(**batch).logits
    assert ANSWERS[name.split("-")[0]](model, scores, companion)


def _batch(companion, sample):
    if isinstance(sample, list):
        return companion.apply_chat_template(
            sample, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    return companion(sample, return_tensors="pt")


@torch.no_grad()
def test_models_of_series_are_as_good_as_when_they_were_trained():
    forecaster, companion = examples.load("series-forecaster")
    assert companion is None
    bursts, forecasts = signals.held_out_bursts(), signals.held_out_forecasts()
    assert signals.forecast_scores(forecaster, forecasts)["r2"] > 0.9
    labels = examples.load("series-classifier")[0](bursts.series).argmax(1)
    assert float((labels == bursts.labels).float().mean()) > 0.97
    for name, series in (("classifier", bursts.series), ("forecaster", forecasts.series)):
        torch.testing.assert_close(examples.sample(f"series-{name}"), series[:1])


@torch.no_grad()
def test_rounding_the_weights_keeps_the_answers():
    model, _ = examples.load("copying-mamba")
    from transformers import MambaForCausalLM

    trained = MambaForCausalLM.from_pretrained(TRAINED / "copying-mamba").eval()
    source = torch.rand(20, 26, generator=torch.Generator().manual_seed(1)).argsort(1)[:, :20]
    ids = torch.cat([source, torch.full((20, 1), 26), source[:, :-1]], 1)
    ours, theirs = (each(ids).logits[:, 20:].softmax(-1) for each in (model, trained))
    assert ours.argmax(-1).equal(theirs.argmax(-1))
    torch.testing.assert_close(ours, theirs, atol=5e-3, rtol=0)


def test_all_of_them_fit_into_a_megabyte_and_a_half():
    files = [path for path in examples.folder("digits-vim").parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1.5e6  # a wheel compresses them by a tenth


def test_a_name_that_does_not_exist_is_answered_with_those_that_do():
    with pytest.raises(ValueError, match=r"no example is named 'StoriesMamba'; expected one of"):
        examples.load("StoriesMamba")
    for near in ("stories_mamba", "stories-mambo", "Stories-Mamba"):
        with pytest.raises(ValueError, match=r"Did you mean 'stories-mamba'\?"):
            examples.sample(near)
    with pytest.raises(ValueError, match=r"'series-forecaster'.*\]\.$"):
        examples.folder("xyz")


def test_loading_prints_nothing_and_leaves_the_process_as_it_was(capfd):
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    examples.load("stories-mamba")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert capfd.readouterr() == ("", "")


def test_nothing_is_loaded_before_it_is_used():
    code = (
        "import sys, captum_ssm\n"
        "captum_ssm.examples.names()\n"
        "assert not {'transformers', 'captum_ssm.models'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
