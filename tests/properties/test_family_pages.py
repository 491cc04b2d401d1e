"""The pages of families: their code runs, and what they say of the result is so."""

import importlib
import re

import pytest
import torch
import yaml
from folders import ROOT
from matplotlib.figure import Figure

NAMES = [
    each["name"] for each in yaml.safe_load((ROOT / "docs/family_pages.yml").read_text("utf-8"))
]
STORIES = ("mamba", "mamba2", "qwen3next", "recurrentgemma", "rwkv4")
DOGS, ARTICLE, BIRD = 8, 10, 1


@pytest.fixture(scope="module")
def pages():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        yield importlib.import_module("family_pages")


@pytest.fixture(scope="module")
def made(pages, tmp_path_factory):
    """What a page's code leaves, and its facts, computed once for each page."""
    cache = {}

    def make(name):
        if name not in cache:
            (family,) = (each for each in pages.families() if each.name == name)
            folder = tmp_path_factory.mktemp(name)
            names = pages.run(family, folder)
            cache[name] = family, names, pages.FACTS[family.facts](names), folder
        return cache[name]

    return make


@pytest.mark.every_case
@pytest.mark.parametrize("name", NAMES)
def test_a_page_shows_what_its_code_found(name, pages, made):
    family, names, facts, folder = made(name)
    text = pages.page(family, facts)
    assert f"```python\n{family.code}```" in text
    assert len(re.findall(r"^- ", text, re.MULTILINE)) == 3
    assert "{" not in text.replace(family.code, "")  # no fact is left out
    if "to_html" in family.code:
        assert f"_static/models/{name}.html" in text
        assert "<script" in (folder / "why.html").read_text(encoding="utf-8")
    else:
        assert family.alt in text
    if family.draw:
        assert isinstance(pages.PICTURES[family.draw](names), Figure)
        assert len(family.alt) > 20
    assert pages.card(family, names).startswith("::::{grid-item-card} ")


@pytest.mark.parametrize("name", STORIES)
def test_the_subject_is_the_strongest_word_before_the_one_that_reads(name, made):
    _, names, facts, _ = made(name)
    words = [token.text.strip() for token in names["why"].examples[0].tokens]
    assert (words[BIRD], words[DOGS], words[ARTICLE]) == ("bird", "dogs", "the")
    assert facts["lrp"].argmax() == DOGS
    assert facts["relevance"][DOGS] > 0
    assert torch.tensor(facts["lrp"]).sum() == pytest.approx(1)


def test_what_the_pages_say_of_single_models(made):
    mamba, mamba2, qwen, griffin, rwkv = (made(name)[2] for name in STORIES)
    assert mamba["relevance"][BIRD] < 0
    assert set(mamba["latim"].argsort()[-2:]) == {DOGS, DOGS - 1}  # with its article
    assert mamba["negative"][0] > 0.5
    assert mamba2["lrp"].argsort()[-2] == ARTICLE
    assert mamba2["read"][1].argmax() == ARTICLE
    assert mamba2["latim"].argmax() == DOGS
    assert qwen["negative"][2] == 0
    assert set(qwen["read"][2].argsort()[-2:]) == {DOGS, BIRD}
    assert qwen["relevance"][BIRD] < 0
    assert qwen["own"][0] > 0.95
    assert griffin["reader"] > griffin["score"] / 2
    assert griffin["negative"] == [0, 0, 0]
    assert griffin["read"][2][DOGS] < 0.01
    assert rwkv["lrp"][DOGS] > max(each["lrp"][DOGS] for each in (mamba, mamba2, qwen, griffin))
    assert rwkv["latim"].argmax() == ARTICLE
    assert rwkv["negative"] == [0, 0, 0]


def test_what_the_page_says_of_a_classifier(made):
    _, names, facts, _ = made("jamba")
    words = [token.text.strip() for token in names["why"].examples[0].tokens]
    assert (words[5], words[11], words[18]) == ("funny", "not", "moving")
    assert facts["lrp"].argmax() == 11
    assert facts["relevance"][18] > 0
    assert facts["read"][1].argmax() == 5
    assert facts["lrp"][5] < 0.05


def test_what_the_pages_say_of_pictures_videos_and_series(made):
    vim, unet, video, series = (
        made(name)[2] for name in ("vision_mamba", "vmamba", "video", "series")
    )
    assert max(vim["mamba_lrp"], vim["latim"], vim["unified"]) <= 10
    assert vim["corner"] < 16 / 100
    assert 0.8 * vim["whole"] < vim["versus"] < vim["whole"]
    assert unet["inside"] > 5 * unet["area"]
    assert unet["near"] > 0.7
    assert unet["other"] < 0.01
    assert video["frame"] == 6
    assert min(video["lrp"], video["latim"]) > 0.5
    assert video["of_plus"] < 1 / 8
    assert (series["step"], series["feature"]) == (44, "price")
    assert series["lrp"] > series["mark"] > 0.1
    assert series["of_step"] > 0.5
