"""The code of the how-to pages runs as it is printed, from the repository's folder."""

import re
import sys
import warnings

import matplotlib
import matplotlib.pyplot as plt
import pytest
import torch

import captum_ssm

matplotlib.use("Agg")

from folders import ROOT

PAGES = {
    page.stem: re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    for page in sorted((ROOT / "docs" / "how_to").glob("*.md"))
}
NEEDS = {"large_models": "accelerate"}


@pytest.mark.parametrize("page", [page for page, blocks in PAGES.items() if blocks])
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    pytest.importorskip(NEEDS.get(page, "torch"))
    monkeypatch.chdir(tmp_path)
    for folder in ("tutorials", "benchmarks"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    names = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", captum_ssm.kernels.ExtensionWarning)
        for block in PAGES[page]:
            exec(compile(block, f"{page}.md", "exec"), names)
    plt.close("all")
    CHECKS[page](names, tmp_path)


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


CHECKS = {
    "any_input": of_inputs,
    "chat": chatted,
    "compare_with_captum": compared,
    "generation": generated,
    "hybrids": of_shape,
    "images": drawn,
    "interventions": intervened,
    "large_models": of_shape,
    "long_sequences": of_shape,
    "padding_and_positions": as_alone,
    "segmentation": segmented,
}
