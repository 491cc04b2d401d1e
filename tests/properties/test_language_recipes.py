"""The recipes of language models and of Vision Mamba, on the models' own classes at a small size.

RWKV-7's class needs flash-linear-attention: ``tests/fla/test_recipe_of_rwkv7.py`` runs its code.
"""

import re
from types import SimpleNamespace

import pytest
import torch
import transformers
from families import build
from folders import ROOT
from models import VOCABULARY, word_tokenizer
from test_recipes import family_of
from vision_models import small

from captum_ssm import LaTIM, MambaLRP, explain

FOLDER = ROOT / "docs" / "recipes"
PAGES = ("hybrids.md", "linear_rnns.md", "mamba.md", "qwen3_next.md", "vim.md")
TEXTS = {name: (FOLDER / name).read_text(encoding="utf-8") for name in PAGES}
# A row of a page's table names checkpoints and a class; RWKV-7's is not of transformers.
ROW = re.compile(r"^\|.*?`([\w-]+/[\w.-]+)`[^|]*\| `(\w+ForCausalLM)` \|", re.MULTILINE)
ROWS = [(page, *row) for page, text in TEXTS.items() for row in ROW.findall(text)]
EVERY_RUN = {"Mamba2ForCausalLM", "Qwen3_5ForCausalLM", "FalconH1ForCausalLM", "xLSTMForCausalLM"}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
SMALLER = {"segment=1024": "segment=2", "1, 3, 224, 224": "1, 3, 32, 32"}


def code(page, until=None):
    text = TEXTS[page].partition(until)[0] if until else TEXTS[page]
    found = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    for given, smaller in SMALLER.items():
        found = found.replace(given, smaller)
    return found


def run(page, checkpoint, until=None):
    """A page's code with the name of a checkpoint in place of its own."""
    source = re.sub(r'name = ".*"', f'name = "{checkpoint}"', code(page, until), count=1)
    names = {"__name__": page}
    exec(compile(source, page, "exec"), names)
    return names


@pytest.fixture
def hub(monkeypatch, tmp_path, own_registry):
    """In place of a hub: a tokenizer of the pages' words, and small models of a class."""
    monkeypatch.chdir(tmp_path)
    written = " ".join(re.findall(r'"([A-Z][^"]*)"', "".join(TEXTS.values())))
    words = [w for w in dict.fromkeys(f"user assistant are is {written}".split())][:VOCABULARY]
    words += [f"w{k}" for k in range(VOCABULARY - len(words))]
    tokenizer = word_tokenizer({word: k for k, word in enumerate(words)}, eos_token=words[-1])
    tokenizer.chat_template = TEMPLATE
    asked = []

    def serve(kind):
        family = family_of(kind)
        if not hasattr(transformers, kind):
            pytest.skip(f"this transformers has no {kind}")
        model = build(family)
        assert type(model).__name__ == kind

        def load(name, **options):
            asked.append(name)
            return model

        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", load)
        monkeypatch.setattr(
            transformers.AutoTokenizer, "from_pretrained", lambda name, **_: tokenizer
        )
        return SimpleNamespace(model=model, tokenizer=tokenizer, asked=asked, folder=tmp_path)

    return serve


def rows_of(page):
    return [
        pytest.param(*row[1:], marks=[] if row[2] in EVERY_RUN else pytest.mark.slow, id=row[2])
        for row in ROWS
        if row[0] == page
    ]


@pytest.mark.every_case
@pytest.mark.parametrize(("checkpoint", "kind"), rows_of("mamba.md"))
def test_the_page_of_mamba(checkpoint, kind, hub):
    served = hub(kind)
    names = run("mamba.md", checkpoint)
    assert served.asked == [checkpoint]
    assert (served.folder / "why.html").exists()
    relevance, batch = names["relevance"], names["batch"]
    assert not batch.attention_mask.all()
    assert not relevance[batch.attention_mask == 0].any()
    for row, text in zip(relevance, names["texts"], strict=True):
        ids = served.tokenizer(text, return_tensors="pt").input_ids
        found = MambaLRP(names["margin"], served.model).attribute(
            ids, additional_forward_args=torch.ones_like(ids)
        )
        torch.testing.assert_close(row[: ids.shape[1]], found[0], rtol=1e-3, atol=1e-5)
    whole = MambaLRP(served.model).attribute(names["ids"], target=names["plural"])
    torch.testing.assert_close(names["relevance_of_all"], whole, rtol=1e-3, atol=1e-5)


@pytest.mark.every_case
@pytest.mark.parametrize(("checkpoint", "kind"), rows_of("qwen3_next.md"))
def test_the_page_of_qwen3_next(checkpoint, kind, hub):
    served = hub(kind)
    names = run("qwen3_next.md", checkpoint)
    assert (served.folder / "answer.html").exists()
    spans = [span.name for span in names["why"].examples[0].units["turn"]]
    assert "user 1" in spans
    assert names["by_turn"].shape == (len(spans),)
    assert abs(names["by_turn"]).sum() > 0
    own = names["own"]
    assert {path.rpartition(".")[2] for path in own} == {"linear_attn", "self_attn"}
    assert all(0 < share < 1 for share in own.values())


@pytest.mark.every_case
@pytest.mark.parametrize(("checkpoint", "kind"), rows_of("hybrids.md"))
def test_the_page_of_hybrids(checkpoint, kind, hub):
    served = hub(kind)
    names = run("hybrids.md", checkpoint)
    assert (served.folder / "why.html").exists()
    assert min(len(paths) for paths in names["layers"].values()) > 0
    modules = dict(served.model.named_modules())
    for each, paths in names["layers"].items():
        for path in paths:
            assert ("Attention" in type(modules[path]).__name__) == (each == "attention")
    assert len(set(names["margins"].values())) == 4
    assert names["margins"]["whole"] == pytest.approx(names["margin"]())  # all is as before


@pytest.mark.every_case
@pytest.mark.parametrize(("checkpoint", "kind"), rows_of("linear_rnns.md")[:2])
def test_the_page_of_linear_rnns(checkpoint, kind, hub):
    served = hub(kind)
    names = run("linear_rnns.md", checkpoint, until="## RWKV-7")
    assert len(names["why"].examples) == 2
    for k, text in enumerate(names["texts"]):
        alone = explain(served.model, served.tokenizer, text, target=" are", against=" is")
        found = names["why"].relevance(against=" is", example=k)
        torch.testing.assert_close(
            torch.tensor(found), torch.tensor(alone.relevance(against=" is")), rtol=1e-3, atol=1e-5
        )
    assert names["kept"]
    assert all(value > 0 for value in names["kept"].values())


def test_the_page_of_vision_mamba(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = {"model": small((32, 32)).float().state_dict()}
    torch.save(checkpoint, "vim_t_midclstok_76p1acc.pth")
    names = {"__name__": "vim.md"}
    exec(compile(code("vim.md"), "vim.md", "exec"), names)
    for found in (*names["maps"].values(), names["difference"]):
        assert found.shape == names["images"].shape
        assert found.abs().sum() > 0
    model, images, label = names["model"], names["images"], names["label"]
    assert names["second"] != label
    pair = [LaTIM(model).attribute(images, target=each) for each in (label, names["second"])]
    found = LaTIM(names["lead"], model).attribute(images)
    torch.testing.assert_close(found, pair[0] - pair[1], rtol=1e-3, atol=1e-5)
    assert (tmp_path / "why.png").exists()
    assert (tmp_path / "why.html").exists()


def test_every_model_of_the_recipes_has_a_page():
    asked = "Mamba Mamba2 FalconMamba Qwen3Next Qwen3_5 NemotronH FalconH1 Jamba Zamba RWKV7"
    kinds = [kind for _, _, kind in ROWS] + re.findall(
        "`(RWKV7ForCausalLM)`", "".join(TEXTS.values())
    )
    assert {f"{name}ForCausalLM" for name in f"{asked} RecurrentGemma xLSTM".split()} <= set(kinds)
    index = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert f"(recipes/{page})" in index
