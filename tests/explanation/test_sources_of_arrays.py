"""Pictures in folders, arrays in files and series in columns, as data sets, and bad rows."""

import numpy as np
import pandas
import pytest
from models import VOCABULARY, tiny, word_tokenizer

from captum_ssm import InputError, MemoryLimitError, examples, explain, explain_dataset
from captum_ssm.cli import main
from captum_ssm.explanation import open_dataset
from captum_ssm.explanation.make.inputs import arrays


@pytest.fixture
def pictures(tmp_path):
    """Two pictures in folders by class, one of another size, and two files that are none."""
    folder = tmp_path / "pictures"
    for name in ("ones", "turned"):
        (folder / name).mkdir(parents=True)
    picture = examples.sample("digits-vim")
    picture.save(folder / "ones" / "a.png")
    picture.rotate(90).resize((60, 50)).save(folder / "turned" / "b.PNG")
    (folder / "turned" / "c.png").write_text("not a picture")
    (folder / "notes.txt").write_text("not looked at")
    return folder


def series():
    """Three series of a forecaster, of which the second holds NaN."""
    one = examples.sample("series-forecaster")[0].float().numpy()
    found = np.stack([one, one, one[::-1]])
    found[1, 3, 2] = np.nan
    return found


def run(*args, capsys=None):
    status = main(["run", *map(str, args)])
    return status, capsys.readouterr()


def test_a_folder_of_pictures(pictures, tmp_path, capsys):
    output = tmp_path / "why"
    status, said = run(pictures, "--model", "digits-vim", "--output", output, capsys=capsys)
    assert status == 0
    assert "explained 2 rows, 1 failed" in said.out
    found = open_dataset(output)
    assert found.column("row.file") == ["ones/a.png", "turned/b.PNG", "turned/c.png"]
    assert found.column("row.label") == ["ones", "turned", "turned"]
    assert list(found.errors) == [2]
    assert "not an image" in found.errors[2]
    model, processor = examples.load("digits-vim")
    alone = explain(model, processor, pictures / "ones" / "a.png", show_progress=False)
    np.testing.assert_allclose(found[0].relevance(), alone.relevance(), rtol=1e-3, atol=1e-5)
    # Another picture in a file's place is other data.
    examples.sample("digits-vim").rotate(180).save(pictures / "ones" / "a.png")
    status, said = run(pictures, "--model", "digits-vim", "--output", output, capsys=capsys)
    assert status == 1
    assert "data" in said.err


def test_what_is_for_texts_is_refused(pictures, tmp_path, capsys):
    given = (pictures, "--model", "digits-vim", "--output", tmp_path / "why", "--hops", 2)
    status, said = run(*given, capsys=capsys)
    assert status == 1
    assert "--hops was given, which is for texts" in said.err


@pytest.mark.parametrize("ending", [".npy", ".npz", ".parquet"])
def test_series_in_files(ending, tmp_path, capsys):
    path, values, columns = tmp_path / f"rows{ending}", series(), ("--columns", "series=x")
    if ending == ".npy":
        np.save(path, values)
        columns = ()
    elif ending == ".npz":
        np.savez(path, x=values, year=np.arange(3), target=np.array(["feature 1, 2 ahead"] * 3))
    else:
        table = {"x": [one.tolist() for one in values], "year": range(3)}
        pandas.DataFrame(table).to_parquet(path)
    output = tmp_path / "why"
    given = (path, "--model", "series-forecaster", "--output", output, *columns)
    assert run(*given, capsys=capsys)[0] == 0
    found = open_dataset(output)
    assert list(found.errors) == [1]
    assert "nan at (3, 2)" in found.errors[1]
    np.testing.assert_allclose(found[2].examples[0].series, values[2], rtol=1e-6)
    if columns:
        assert found.column("row.year") == [0, 1, 2]
    model, _ = examples.load("series-forecaster")
    target = "feature 1, 2 ahead" if ending == ".npz" else None
    alone = explain(model, None, values[2], target=target, show_progress=False)
    np.testing.assert_allclose(found[2].relevance(), alone.relevance(), rtol=1e-3, atol=1e-5)


def test_arrays_of_other_lengths_and_empty_folders_are_named(tmp_path):
    np.savez(tmp_path / "rows.npz", x=np.zeros((3, 4)), y=np.zeros(2))
    model, _ = examples.load("series-forecaster")
    with pytest.raises(InputError, match=r"holds x \(3, 4\), y \(2,\); expected one row"):
        explain_dataset(model, None, tmp_path / "rows.npz", tmp_path / "a")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="a folder without pictures"):
        explain_dataset(model, None, tmp_path / "empty", tmp_path / "b")


def test_each_shape_is_tried_once(tmp_path, monkeypatch):
    calls, tried = [], arrays._tried
    monkeypatch.setattr(arrays, "_tried", lambda *args: calls.append(args[2]) or tried(*args))
    model, _ = examples.load("series-forecaster")
    values = series()[[0, 2, 0]]
    found = explain_dataset(model, None, [*values], tmp_path)
    assert found.errors == {}
    # Once where rows are measured, and once where they are explained.
    assert len(calls) == 2 * len(set(calls)) > 2
    alone = [explain(model, None, one, show_progress=False) for one in values]
    for one, other in zip(found, alone, strict=True):
        np.testing.assert_allclose(one.relevance(), other.relevance(), rtol=1e-3, atol=1e-5)


def test_bad_rows_of_every_kind_are_recorded_by_their_index(tmp_path):
    words = word_tokenizer({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0")
    long = " ".join(["w3"] * 400)
    rows = [
        {"text": "w3 w4", "target": "w5"},
        {"text": "", "target": "w5"},
        {"text": None, "target": "w5"},
        {"text": 17, "target": "w5"},
        {"text": ["w3", "w4"], "target": "w5"},
        {"text": long, "target": "w5"},
        {"text": "w3 w4", "target": "nobody"},
        {"text": "w3 w4", "target": 10**6},
        {"target": "w5"},
        "w3 w4",
        {"text": "w3 w4", "target": "w5", "span": "w9"},
        {"text": "w6 w7", "target": "w8"},
    ]
    found = explain_dataset(tiny(), words, rows, tmp_path, memory_limit=40_000)
    assert {*range(len(rows))} - {*found.errors} == {0, 11}
    kinds = {index: error.partition(":")[0] for index, error in found.errors.items()}
    assert kinds[5] == MemoryLimitError.__name__
    assert "nobody" in found.errors[6]
    assert [one.examples[0].text for one in found] == ["w3 w4 w5", "w6 w7 w8"]


def test_pictures_of_pil_are_rows_and_columns(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    model, processor = examples.load("digits-vim")
    picture = examples.sample("digits-vim")
    path = tmp_path / "a.png"
    picture.save(path)
    stored = path.read_bytes()
    column = [{"image": one, "label": 3} for one in (picture, stored, str(path))]
    column += [{"image": {"bytes": stored, "path": None}, "label": 3}]
    column += [{"image": {"bytes": None, "path": str(path)}, "label": 3}]
    held = datasets.Dataset.from_dict({"image": [picture], "label": [3]})
    held = held.cast_column("image", datasets.Image())
    forms = {"list": [picture], "columns": column, "held": held}
    expected = explain(model, processor, path, target=3, show_progress=False).relevance()
    for name, rows in forms.items():
        named = {"columns": {"image": "image", "target": "label"}}
        how = {"target": 3} if name == "list" else named
        found = explain_dataset(model, processor, rows, tmp_path / name, **how)
        assert found.errors == {}, name
        for one in found:
            np.testing.assert_allclose(one.relevance(), expected, rtol=1e-3, atol=1e-5)
    with pytest.raises(InputError, match=r"data\.hash was"):
        explain_dataset(model, processor, [picture.rotate(90)], tmp_path / "list", target=3)
    found = explain_dataset(model, processor, [{"image": b"none"}], tmp_path / "none")
    assert "image holds bytes that PIL cannot open" in found.errors[0]


def test_rows_of_ids_are_integers_of_a_vocabulary(tmp_path):
    words = word_tokenizer({f"w{i}": i for i in range(VOCABULARY)})
    bad = [[-1, 3], [2**70], [3.5], [True], []]
    ids = [[3, 4], [[3, 4]], np.array([3, 4])]
    columns = [{"input_ids": one} for one in (*ids, *bad)]
    for name, rows, good in (("columns", columns, 3), ("bare", [ids[0], *bad], 1)):
        found = explain_dataset(tiny(), words, rows, tmp_path / name)
        assert {*found.errors} == {*range(good, len(rows))}, name
        for index in (good, good + 1):
            assert "expected a list of integers from 0 on" in found.errors[index]
    masked = [{"input_ids": [0, 3, 4], "attention_mask": [False, True, True]}]
    found = explain_dataset(tiny(), words, masked, tmp_path / "masked")
    assert [token.id for token in found[0].examples[0].tokens[:2]] == [3, 4]


def test_pictures_of_other_modes_have_the_colors_that_the_processor_expects(tmp_path):
    model, processor = examples.load("digits-vim")
    picture = examples.sample("digits-vim")
    gray = picture.convert("L")
    rows = [picture, picture.convert("RGBA"), gray, gray.convert("RGB")]
    found = explain_dataset(model, processor, rows, tmp_path, target=3)
    assert found.errors == {}
    for k in (0, 2):
        np.testing.assert_allclose(found[k].relevance(), found[k + 1].relevance(), rtol=1e-4)
