"""The census of token mixers names every class of the installed packages."""

import sys

import pytest
import transformers
from families import FAMILIES, build
from folders import ROOT
from models import ids

from captum_ssm.mixers import registered

sys.path.insert(0, str(ROOT / "benchmarks"))
import census

TABLE = census.load()
# How a class may stand in the table.
KNOWN = {"registered", "measured", "recognized", "scans alone", "part", "refused", "not run"}


@pytest.mark.parametrize("package", ["transformers", "mamba_ssm", "fla"])
def test_the_table_names_every_class_of_mixers(package):
    if not census.names_in(package):
        pytest.skip(f"{package} is not installed")
    if package == "transformers" and transformers.__version__.startswith("4."):
        pytest.skip("the table is that of transformers 5")
    missing = sorted(census.names_in(package).keys() - TABLE[package].keys())
    assert not missing, "run benchmarks/census.py --save, and explain what is new"


def test_every_row_says_how_or_why():
    for rows in TABLE.values():
        for name, row in rows.items():
            assert row["known"] in KNOWN, name
            if row["known"] in ("registered", "measured", "recognized"):
                assert row["error"] <= 1e-5, name
            elif row["known"] != "not run":
                assert row["why"], name


def test_every_recurrent_mixer_of_transformers_is_explained():
    rows = TABLE["transformers"]
    recurrent = [name for name, scans in census.names_in("transformers").items() if scans]
    known = {name: rows[name]["known"] for name in recurrent if name in rows}
    assert known
    assert set(known.values()) <= {"registered", "part"}, known


def test_every_recurrent_mixer_of_mamba_ssm_is_explained():
    known = {name: row["known"] for name, row in TABLE["mamba_ssm"].items() if name != "MHA"}
    assert set(known) >= {"Mamba", "Mamba2", "Mamba2Simple", "Mamba3"}
    assert set(known.values()) == {"registered"}, known


def test_every_layer_of_fla_that_is_not_explained_says_why():
    for name, row in TABLE["fla"].items():
        assert "error" in row or row["why"], name


def test_classes_with_an_adapter_are_registered():
    names = {name.rpartition(".")[2] for name in registered()}
    rows = TABLE["transformers"]
    for name in names & rows.keys():
        assert rows[name]["known"] in ("registered", "not run"), name


@pytest.mark.parametrize("family", ["lfm2", "zaya"])
def test_a_row_is_what_a_model_gives(family):
    if family not in FAMILIES:
        pytest.skip("not in this transformers")
    found = census.mixers_of(build(family), ids(2, 11))
    assert found
    for name, row in found.items():
        assert row["known"] == TABLE["transformers"][name]["known"]
        assert row.get("error", 0.0) <= 1e-5


def test_what_is_new_is_said():
    before = {
        "A": {"known": "refused", "why": "no scan"},
        "B": {"known": "measured", "error": 1e-7},
    }
    after = {"A": {"known": "measured", "error": 1e-7}, "C": {"known": "not run"}}
    assert [*census.changes(before, after)] == [
        "changed  A: refused: no scan -> measured, error 1e-07",
        "gone     B",
        "new      C: not run",
    ]


def test_the_page_shows_the_table():
    text = census.PAGE.read_text()
    shown = text.partition(census.BEGIN)[2].partition(census.END)[0]
    for rows in TABLE.values():
        for name in rows:
            assert f"`{name}`" in shown
