"""The numbers that texts print are those of the results, to the last printed digit."""

import importlib
import itertools
import json
import re

import pytest
import torch
from folders import ROOT

from captum_ssm.attr import methods
from captum_ssm.metrics import alignment_scores, hit_rate

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")

COPYING = {
    "`RawAttention`, best layer": "Mamba-Attention",
    'the same, `sign="absolute"`': "Mamba-Attention, absolute",
    "`MambaRollout`": "Rollout",
    "`MambaAttribution`": "Mamba-Attribution",
    "unified attention, best layer": "Unified (raw)",
    "`UnifiedImplicitAttention`": "Unified (attribution)",
    "`LaTIM` (l2), best layer": "LaTIM (l2, gate)",
    "`LaTIM` (ALTI), best layer": "LaTIM (ALTI, gate)",
    "`LaTIM` (ALTI-Logit)": "LaTIM (ALTI-Logit, gate)",
    "`LaTIM` (flow-logit)": "LaTIM (flow-logit, gate)",
    '`LaTIM` (l2, `"silu"`), best layer': "LaTIM (l2, silu)",
    '`LaTIM` (ALTI, `"silu"`), best layer': "LaTIM (ALTI, silu)",
    '`LaTIM` (ALTI-Logit, `"silu"`)': "LaTIM (ALTI-Logit, silu)",
    "`MambaLRP`": "MambaLRP",
}
IMAGES = {
    "`MambaAttribution` (Ali et al.)": "Attribution, hidden",
    "`UnifiedImplicitAttention` (Zimerman et al.)": "Attribution, unified",
    "`LaTIM` (ALTI-Logit)": "LaTIM, ALTI-Logit",
    "`MambaLRP`": "MambaLRP",
    "Captum's `IntegratedGradients`": "Integrated gradients",
    "Captum's `Saliency`": "Saliency",
    "brightness of the pixels": "Brightness",
    "random maps": "Random maps",
}


def results(path):
    return json.loads((ROOT / "benchmarks" / path).read_text(encoding="utf-8"))


def rows_after(heading, text=RESULTS):
    """The cells of the table after a heading, by the first one."""
    section = text.split(heading)[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in cells}


def tables(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("tables")


def test_the_results_say_what_copying_measured(monkeypatch):
    rows = rows_after("Which method finds the copied token?")
    found = [results(f"copying/results/{m}.json") for m in ("copying-mamba", "copying-mamba2")]
    random = tables(monkeypatch).chance(20)
    assert {f["length"] for f in found} == {20}
    for name, cells in rows.items():
        chance = name == "random maps"
        scores = [random if chance else f["methods"][COPYING[name]] for f in found]
        assert cells == [x for m in scores for x in (f"{m['hit']:.1%}", f"{m['ap']:.2f}")], name
    assert len(rows) == len(COPYING) + 1


def test_the_results_say_what_the_images_measured():
    rows = rows_after("Which explanation finds the object?")
    found = results("vision/results/digits-black.json")["scores"]
    for name, cells in rows.items():
        scores = (found[IMAGES[name]][key] for key in ("positive", "negative", "miou"))
        told = [[f"{100 * s[k]:.1f}" for k in ("value", "low", "high")] for s in scores]
        assert cells == [f"{value} [{low}, {high}]" for value, low, high in told], name
    assert len(rows) == len(IMAGES)


def test_the_readme_fits_on_few_screens():
    assert len(README.splitlines()) <= 130


@pytest.mark.parametrize(
    ("told", "method"),
    [
        ("MambaLRP points to the value in {}", "MambaLRP"),
        ("LaTIM's ALTI-Logit in {}", "LaTIM (ALTI-Logit, gate)"),
        ('`"silu"`: {}', "LaTIM (ALTI-Logit, silu)"),
        ("unified rollout in {}", "Unified (rollout)"),
        ("attention and its rollout in {}", "Mamba-Attention"),
        ("attention and its rollout in {}", "Rollout"),
    ],
)
def test_the_results_say_what_passkey_measured(told, method):
    share = results("passkey/results/passkey-mamba.json")["methods"][method]["contexts"]["256"]
    assert told.format(f"{share['token']:.0%}") in re.sub(r"\s+", " ", RESULTS)


def test_the_results_say_what_a_rollout_adds():
    whole = results("results/end_to_end_whole.json")["rows"][0]
    first, *_, longest = results("results/end_to_end_long.json")["rows"]
    assert (whole["length"], first["length"]) == (1024, 4096)
    (line,) = [line for line in RESULTS.splitlines() if "a rollout through a whole model" in line]
    assert f"adds {whole['rollout_extra_in_forwards']:.2f} of the model's own forward" in line
    assert f"{first['rollout_extra_in_own_forwards_at_most']:.2f} at 4,096" in line
    assert (longest["length"], longest["scan"]) == (65536, "captum_ssm")
    assert f"{longest['rollout_extra_in_forwards']:.2f} of a forward with ours in its place" in line


def test_random_maps_reach_the_scores_that_the_tables_give_them(monkeypatch):
    length = 4
    orders = torch.tensor(list(itertools.permutations(range(length)))).float()
    maps = orders[:, None].expand(-1, length, -1)  # every ranking of the tokens, in each row
    copied = torch.arange(length)
    truth = (copied[:, None] - copied).abs() <= 1
    measured = alignment_scores(maps, truth)
    measured["hit"] = hit_rate(maps, copied.expand(len(orders), -1))
    for key, value in tables(monkeypatch).chance(length).items():
        assert measured[key] == pytest.approx(value, abs=1e-9), key


def test_every_method_is_in_the_table_of_methods():
    text = (ROOT / "docs/how_to/command_line.md").read_text(encoding="utf-8")
    for name, method in methods().items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{name}` ")]
        told = [method.__name__, method.summary, method.cost]
        told += [f"`--{option.replace('_', '-')}`" for option in method.options()]
        assert all(part in row for part in told)


def test_every_measured_row_has_a_name_of_this_library():
    text = (ROOT / "docs/measured.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## .*", text, re.MULTILINE)
    assert len(headings) == len(set(headings)) == 12
    methods = text.split("## What a row costs")[0]
    names = re.findall(r"^\| (.*?) \| [\d.]+[%| ]", methods, re.MULTILINE)
    assert len(names) > 100
    known = r"`\w+`|\*(Captum's|at random|brightness of the pixels)\*"
    assert all(re.match(known, name) for name in names)
