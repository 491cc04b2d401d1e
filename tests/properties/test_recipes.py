"""The recipes of docs/recipes.md, run on each model's own class at a small size."""

import re

import pytest
import torch
import transformers
from families import FAMILIES, build
from folders import ROOT
from models import VOCABULARY, JambaConfig, randomize, tiny, word_tokenizer
from transformers import JambaForSequenceClassification

from captum_ssm import MambaLRP

PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
ROWS = re.findall(r"^\| [\w. -]+ \| `(\S+/\S+)` \| `(\w+)` \|", PAGE, re.MULTILINE)
EVERY_RUN = ("MambaForCausalLM", "Zamba2ForCausalLM", "Qwen3NextForCausalLM")
WORDS = ["The", "keys", "to", "the", "cabinet", "plot", "was", "not", "good"]


def code(section: str) -> str:
    (found,) = re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL)
    return found


def run(source: str) -> dict:
    names = {"__name__": "recipe"}
    exec(compile(source, "recipes.md", "exec"), names)
    return names


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch, own_registry):
    monkeypatch.chdir(tmp_path)
    words = dict(zip(WORDS, range(len(WORDS)), strict=True))
    words |= {f"w{k}": k for k in range(len(WORDS), VOCABULARY)}
    tokenizer = word_tokenizer(words)
    load = lambda name: tokenizer  # noqa: E731
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", load)
    return tmp_path


def family_of(kind: str) -> str:
    """The family of the tests whose models are of a class."""
    prefix = kind.removesuffix("ForCausalLM")
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", prefix).lower()
    known = {"granite_moe_hybrid": "granitemoehybrid", "x_lstm": "xlstm", "qwen3next": "qwen3_next"}
    known["qwen3_5moe"] = "qwen3_5_moe"
    return known.get(spaced, spaced)


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("checkpoint", "kind"),
    [
        pytest.param(name, kind, marks=[] if kind in EVERY_RUN else pytest.mark.slow, id=kind)
        for name, kind in ROWS
    ],
)
def test_the_recipe_of_language_models(checkpoint, kind, in_a_folder, monkeypatch):
    family = family_of(kind)
    if family not in FAMILIES and not hasattr(transformers, kind):
        pytest.skip(f"this transformers has no {kind}")
    model, asked = build(family), []
    assert type(model).__name__ == kind

    def load(name):
        asked.append(name)
        return model

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
    source = code("Language models of transformers")
    names = run(re.sub(r'name = ".*"', f'name = "{checkpoint}"', source))
    assert asked == [checkpoint]
    (example,) = names["why"].examples
    assert {"mamba-lrp", "raw-attention"} <= set(example.relevance)
    assert all(abs(rows).sum() > 0 for rows in example.relevance.values())
    assert (in_a_folder / "why.html").exists()


def test_the_table_has_many_families():
    assert len(ROWS) == len(dict(ROWS)) >= 15
    assert set(EVERY_RUN) <= {kind for _, kind in ROWS}


def test_the_recipe_of_a_classifier(in_a_folder, monkeypatch):
    options = tiny("jamba").config.to_dict() | {"num_labels": 2}
    model = randomize(JambaForSequenceClassification(JambaConfig(**options))).eval()
    load = lambda name: model  # noqa: E731
    kind = transformers.AutoModelForSequenceClassification
    monkeypatch.setattr(kind, "from_pretrained", load)
    run(code("A classifier of texts"))
    assert (in_a_folder / "review.html").exists()


def test_the_recipe_of_recommendation():
    names = run(code("Recommendation: a sequence of items"))
    model, history = names["model"], names["history"]
    found, delta = MambaLRP(model).attribute(
        history, target=names["best"], return_convergence_delta=True
    )
    torch.testing.assert_close(found, names["relevance"])
    torch.testing.assert_close(found.sum() + delta[0], model(history).max(), rtol=1e-4, atol=1e-5)


def test_the_recipe_of_variables_as_tokens():
    names = run(code("Forecasts in which each variable is a token"))
    assert names["relevance"].shape == (1, 24, 4)
    assert (names["by_variable"].abs() > 0).all()
