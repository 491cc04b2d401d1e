"""A file of an explanation is written as a whole or not at all, also with its maps."""

import errno
import json
import sys
from dataclasses import replace

import numpy as np
import pages
import pytest

from captum_ssm.explanation import Explanation, Maps


def kept(number: float) -> Explanation:
    """An explanation whose title and map say which one it is."""
    found = pages.explanation(pages.story())
    (example,) = found.examples
    L = len(example.tokens)
    maps = (Maps("a map", "a unit", {"layer": np.full((L, L), number, np.float32)}),)
    return replace(found, title=str(number), examples=(replace(example, maps=maps),))


@pytest.mark.parametrize(
    "step", ["os.fsync", "os.replace", "captum_ssm.explanation.file.save_file"]
)
def test_a_write_that_fails_leaves_the_earlier_explanation(step, tmp_path, monkeypatch):
    path = tmp_path / "why.json"
    kept(1.0).save(path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    module, _, name = step.rpartition(".")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys.modules[module], name, full)
    with pytest.raises(OSError, match=r"why\.\w+ could not be written \(No space left on device\)"):
        kept(2.0).save(path)
    monkeypatch.undo()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
    kept(2.0).save(path)
    found = Explanation.load(path)
    assert found.title == str(found.examples[0].maps[0].layers["layer"][0, 0].item()) == "2.0"


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "kept").mkdir()
    path = tmp_path / "why.json"
    path.symlink_to(tmp_path / "kept" / "first.json")
    pages.explanation().save(path)
    assert path.is_symlink()
    assert [file.name for file in (tmp_path / "kept").iterdir()] == ["first.json"]
    assert Explanation.load(path).title == pages.explanation().title


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("outputs", 0, "answers", 0, "logit"), 10**400, "a number is 1000.*at most 64 bits"),
        (("outputs", 0, "answers", 0, "id"), 2**64, "a number is 1844.*at most 64 bits"),
        (("tokens",), -1, "tokens is -1; expected a list"),
        (("maps",), 7, r"maps\[0\] is 7; expected a list"),
        (("image",), {"shape": 7, "zlib": ""}, r"image\.shape is 7; expected a list"),
    ],
)
def test_what_is_of_another_type_or_size_is_told_as_damage(place, value, message, tmp_path):
    path = tmp_path / "why.json"
    pages.explanation(pages.story()).save(path)
    held = json.loads(path.read_text())
    *parents, last = place
    there = held["examples"][0]
    for key in parents:
        there = there[key]
    there[last] = value
    path.write_text(json.dumps(held))
    with pytest.raises(ValueError, match=message):
        Explanation.load(path)
