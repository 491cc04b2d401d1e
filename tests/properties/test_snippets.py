"""Every piece of code of the README and the documentation runs, in an empty folder.

The pieces of a page run in order, in one namespace. A comment before a piece says if that is not
possible: ``<!-- not run: why -->`` leaves the piece out, and ``<!-- in a checkout: why -->`` runs
its page where the repository's folders are. :data:`MARKED` has them all. ``test_an_installed_copy``
runs the pages once more with an installed wheel.
"""

import json
import os
import re
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch
from folders import ROOT, pages_of_docs

import captum_ssm

matplotlib.use("Agg")

DOCS = ROOT / "docs"
MARKED = {
    ("getting_started.md", "not run"),  # a model of the hub
    ("how_to/images_in_texts.md", "not run"),  # a model of the hub
    ("how_to/large_models.md", "not run"),  # a server
    ("how_to/segmentation.md", "in a checkout"),  # a model that the wheel has no room for
}
# Pages that a test of what they teach runs, with more around them.
ELSEWHERE = {
    "recipes.md": "properties/test_recipes.py",
    **dict.fromkeys(
        (f"recipes/{path.name}" for path in (DOCS / "recipes").glob("*.md")),
        "properties/test_recipe_pages.py",
    ),
    **dict.fromkeys(
        (f"recipes/{name}.md" for name in ("hybrids", "linear_rnns", "mamba", "qwen3_next", "vim")),
        "properties/test_language_recipes.py",
    ),
    "add_a_family.md": "mixers/test_families.py",
    "development/add_a_method.md": "properties/test_toy_method.py",
    "development/add_a_scan_form.md": "discovery/test_scans.py",
}
NEEDS = {
    "how_to/large_models.md": "accelerate",
    "how_to/inseq.md": "inseq",
    "how_to/neighbors.md": "bertviz",
    "how_to/transformer_lens.md": "transformer_lens",
    "how_to/datasets.md": "pyarrow",
    "how_to/served_models.md": "pyarrow",
    "reference/metrics.md": "accelerate",
}
# The oldest transformers whose names a page uses; it says what the names were before.
SINCE = {"how_to/long_prompts.md": "5.24"}


def pieces(text):
    """The code of a page, each piece with the mark that stands before it."""
    pattern = r"(?:<!-- ([^:]+): [^\n]+ -->\n\n)?^```python\n(.*?)^```$"
    return [(m[2], m[1]) for m in re.finditer(pattern, text, re.DOTALL | re.MULTILINE)]


def pages():
    """The pieces of each page that has some, by its path below docs/."""
    found = {}
    for path in sorted([ROOT / "README.md", *pages_of_docs()]):
        name = path.relative_to(DOCS).as_posix() if path.is_relative_to(DOCS) else path.name
        found[name] = pieces(path.read_text(encoding="utf-8"))
    return {name: each for name, each in found.items() if each and name not in ELSEWHERE}


PAGES = pages()


def run(page):
    """Run the pieces of a page in the current folder; the names that they leave."""
    names = {"__name__": "snippets"}
    for code, mark in PAGES[page]:
        if mark != "not run":
            exec(compile(code, page, "exec"), names)
    plt.close("all")
    return names


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.filterwarnings("ignore::captum_ssm.kernels.ExtensionWarning")
@pytest.mark.filterwarnings("ignore:Input Tensor . did not already require gradients")  # Captum's
@pytest.mark.filterwarnings("ignore:Contrastive inputs do not match")  # inseq's, said always
@pytest.mark.filterwarnings("ignore:unclosed file .*bertviz:ResourceWarning")
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, own_registry):
    pytest.importorskip(NEEDS.get(page, "torch"))
    pytest.importorskip("transformers", minversion=SINCE.get(page))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    if any(mark == "in a checkout" for _, mark in PAGES[page]):
        for folder in ("tutorials", "benchmarks"):
            (tmp_path / folder).symlink_to(ROOT / folder)
    names = run(page)
    check = CHECKS.get(page, CHECKS.get(Path(page).stem))
    if check is not None:
        check(names, tmp_path)


def test_few_pieces_are_left_out_and_each_says_why():
    assert {(page, mark) for page in PAGES for _, mark in PAGES[page] if mark} == MARKED
    for page, test in ELSEWHERE.items():
        assert Path(page).name in (ROOT / "tests" / test).read_text(encoding="utf-8")
    every = "".join(path.read_text("utf-8") for path in [ROOT / "README.md", *DOCS.rglob("*.md")])
    assert "```{code-block} python" not in every  # nor is one hidden from this test
    assert pieces("<!-- not run: a reason -->\n\n```python\nx\n```\n") == [("x\n", "not run")]


# With an installed wheel, in a folder of its own: each page that runs anywhere.
INSTALLED = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
import captum_ssm, test_snippets
for page in json.loads(sys.argv[1]):
    os.makedirs(page), os.chdir(page)
    test_snippets.run(page)
    os.chdir(sys.argv[2])
print(captum_ssm.__file__)
"""


BUILT = (".so", ".pyc", ".pyd")
INSTALLED_PAGES = ["README.md", "getting_started.md"]
PORTABLE = [
    page
    for page in PAGES
    if "in a checkout" not in dict(PAGES[page]).values()
    and find_spec(NEEDS.get(page, "torch")) is not None
    and any("examples" in code for code, _ in PAGES[page])
]


@pytest.mark.slow
@pytest.mark.parametrize("pages", [INSTALLED_PAGES, PORTABLE], ids=["two", "all"])
def test_an_installed_copy(pages, tmp_path):
    built, site, work = (tmp_path / name for name in ("tree", "site", "work"))
    for folder in (built, work):
        folder.mkdir()
    for name in ("setup.py", "setup.cfg", "LICENSE", "README.md", "captum_ssm"):
        (built / name).symlink_to(ROOT / name)
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run(
        [sys.executable, "-c", build],
        cwd=built,
        env=os.environ | {"CAPTUM_SSM_BUILD": "0"},
        check=True,
        capture_output=True,
    )
    (wheel,) = (built / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    held = {str(path.relative_to(site)) for path in (site / "captum_ssm").rglob("*.*")}
    tree = ROOT / "captum_ssm"
    needed = [path for path in tree.rglob("*.*") if path.is_file() and path.suffix not in BUILT]
    assert {str(path.relative_to(ROOT)) for path in needed} <= held  # models and pages as well
    search = os.pathsep.join(map(str, [site, ROOT / "tests", ROOT / "tests" / "properties"]))
    ran = subprocess.run(
        [sys.executable, "-c", INSTALLED, json.dumps(pages), str(work)],
        cwd=work,
        env=os.environ | {"PYTHONPATH": search},
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == str(site / "captum_ssm" / "__init__.py")


def as_alone(names, folder):
    """Each text of the padded batch is explained as it is by itself."""
    for i, text in enumerate(names["texts"]):
        ids = names["tokenizer"](text, return_tensors="pt").input_ids
        alone = names["method"].attribute(ids, target=names["targets"][i])[0]
        padded = names["relevance"][i]
        torch.testing.assert_close(padded[: len(alone)], alone, atol=1e-5, rtol=1e-4)
        assert not padded[len(alone) :].any()
    assert not names["batch"].attention_mask.all()


def generated(names, folder):
    """Both ways give the same numbers, up to what falls on the continuation."""
    found, rows = names["result"].token_attr, names["rows"]
    assert found.shape == (2, names["prompt_ids"].shape[1])
    torch.testing.assert_close(rows[:, : found.shape[1]], found, atol=1e-5, rtol=1e-4)


def chatted(names, folder):
    """The color in the first turn of the user, and the system's order, make the answer."""
    (example,) = names["chat"].examples
    answer = [token.text.strip() for token in example.tokens[example.prompt :]]
    assert answer == ["red", ".", "<end>"]
    by_turn = dict(zip(names["names"], names["by_turn"], strict=True))
    assert min(by_turn["user 1"], by_turn["system 1"]) > 10 * abs(by_turn["assistant 1"])
    relevance = names["chat"].relevance()
    told = next(span for span in example.units["turn"] if span.name == "user 1")
    strongest = told.first + int(abs(relevance[told.first : told.end]).argmax())
    assert example.tokens[strongest].text.strip() == "red"
    texts = [token.text.strip() for token in names["explanation"].examples[0].tokens]
    assert texts[-6:-4] == ["red", "."]
    assert (folder / "answer.html").exists()
    assert (folder / "chat.html").exists()


def of_shape(names, folder):
    assert names["relevance"].shape == names["ids"].shape
    assert names["relevance"].abs().sum() > 0


def drawn(names, folder):
    assert names["relevance"].shape == names["images"].shape
    assert (folder / "overlay.png").stat().st_size > 0


def of_inputs(names, folder):
    """Relevance has the shape of each input; a sum's is that of its parts."""
    for found in (names["of_series"], names["by_token"]):
        assert found.shape == names["series"].shape
    assert names["of_static"].shape == names["static"].shape
    whole, last = names["whole"], names["last"]
    assert whole.shape == last.shape == names["images"].shape
    assert not torch.allclose(whole, last)
    parts = [
        captum_ssm.MambaLRP(names["model"]).attribute((names["series"], names["static"]), (11, k))
        for k in range(5)
    ]
    torch.testing.assert_close(sum(part[0] for part in parts), names["relevance"][0])


def segmented(names, folder):
    images = names["images"]
    for name in ("relevance", "in_box", "of_pixel", "read"):
        assert names[name].shape == images.shape
        assert names[name].abs().sum() > 0
    assert (folder / "segmentation.png").stat().st_size > 0


def intervened(names, folder):
    """The copied symbol is missed without its edges; patching its value brings it back."""
    assert names["whole"].argmax() == names["target"]
    assert names["whole"][names["target"]] - names["without"][names["target"]] > 5
    assert names["effects"][0, :20].argmax() == 19
    assert names["sweep"].relevance.shape[2] == 40
    assert names["exact"].shares.amax() > 0.8
    assert names["estimate"].effects.shape == names["exact"].effects.shape
    assert names["parts"].shape[:2] == names["ids"].shape
    assert names["features"].shape == (1, names["state"].values[0, 0].numel())
    assert names["agreement"].overlap.shape == (1,)
    assert (folder / "sweep.png").stat().st_size > 0


def compared(names, folder):
    """The check holds a curve for each method of the last explanation."""
    assert names["explanation"].methods[0].name in names["validation"].curves
    assert len(names["validation"].curves) == 2


def started(names, folder):
    """The copied letter is found, and the decomposition leaves nothing out."""
    assert names["text"].split()[names["relevance"][0].argmax()] == "t"
    assert abs(float(names["delta"])) < 1e-3
    assert (folder / "layer.png").exists()
    assert "<script" in (folder / "why.html").read_text(encoding="utf-8")  # the page is whole


def demonstrated(names, folder):
    """The page of the first lines is the one that `make demo` leaves, byte by byte."""
    sys.path.insert(0, str(ROOT / "tutorials"))
    import copying_demo

    copying_demo.why().to_html(folder / "demo.html")
    assert (folder / "why.html").read_bytes() == (folder / "demo.html").read_bytes()
    assert names["review"].relevance().argmax() == 3  # "not"
    assert (folder / "review.html").exists()
    words = names["tokenizer"].convert_ids_to_tokens(names["ids"][0])
    assert names["relevance"].shape == (1, len(words)) == (1, 12)
    assert words[names["relevance"][0, :-1].argmax()] == "dogs"


def landed(names, folder):
    """The page of the first lines is the one next to them, byte by byte."""
    sys.path.insert(0, str(DOCS))
    import gallery

    gallery.first(names["model"], names["tokenizer"]).to_html(folder / "first.html")
    assert (folder / "why.html").read_bytes() == (folder / "first.html").read_bytes()
    assert 'src="_static/first.html"' in (DOCS / "index.md").read_text(encoding="utf-8")


def without_the_bridge(names, folder):
    model, _ = captum_ssm.examples.load("stories-qwen3next")
    ids, found = names["ids"], names["relevance"]
    truth = captum_ssm.MambaLRP(model).attribute(ids, target=int(model(ids).logits[0, -1].argmax()))
    torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-4)
    maps = captum_ssm.hidden_attention(model, ids, reduction="mean")
    for found, truth in zip(names["maps"].values(), maps.values(), strict=True):
        torch.testing.assert_close(found, truth, atol=1e-6, rtol=1e-4)


def of_the_probe(names, folder):
    assert int(names["relevance"].abs().argmax()) == 3  # "red", after both facts
    assert names["relevance"][0, 3] > 2 * names["relevance"][0].abs().sort().values[-2]
    assert list(names["written"]) == ["state"]
    hits = (names["centered"] @ names["directions"].T).argmax(1)
    assert (hits == torch.tensor(names["first"])).float().mean() > 0.99


CHECKS = {
    "README": demonstrated,
    "getting_started": started,
    "any_input": of_inputs,
    "chat": chatted,
    "compare_with_captum": compared,
    "features": of_the_probe,
    "generation": generated,
    "hybrids": of_shape,
    "index.md": landed,
    "images": drawn,
    "interventions": intervened,
    "large_models": of_shape,
    "long_sequences": of_shape,
    "padding_and_positions": as_alone,
    "segmentation": segmented,
    "transformer_lens": without_the_bridge,
}
