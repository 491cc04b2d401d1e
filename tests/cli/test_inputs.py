"""The texts of a file."""

import pytest
from commands import explain

from captum_ssm import Explanation
from captum_ssm.cli.inputs import read_texts


def written(path, text: str):
    path.write_text(text, encoding="utf-8")
    return path


def test_lines_are_counted_as_in_an_editor(tmp_path):
    found = read_texts(written(tmp_path / "a.txt", "\ufeffone\n\n  \ntwo three\n"))
    assert found == ([1, 4], ["one", "two three"], {})


def test_a_table(tmp_path):
    path = tmp_path / "a.csv"
    found = read_texts(written(path, 'id,text,target\n1,"one,\ntwo",x\n\n3,,y\n4,four,z\n'))
    assert found == ([3, 6], ["one,\ntwo", "four"], {"target": ["x", "z"]})
    assert read_texts(written(path, "prompt\none\n")) == ([2], ["one"], {})


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "\n \n", "which holds no text; write one per line"),
        ("a.csv", "", r"with the columns \(none\); expected one that is named text"),
        ("a.csv", "id,words\n1,a\n", "with the columns id, words; expected one that is named text"),
        ("a.csv", "text,target\na,b\nc\n", "a.csv, line 3: the column target is empty"),
    ],
)
def test_a_file_without_texts(tmp_path, name, text, message):
    with pytest.raises(ValueError, match=message):
        read_texts(written(tmp_path / name, text))


def test_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ValueError, match="which cannot be read as text"):
        read_texts(path)


def test_a_table_in_and_a_table_out(folder, tmp_path, capsys):
    pandas = pytest.importorskip("pandas")
    table = written(tmp_path / "in.csv", "text,target,against\nw3 w4,w5,w6\nw4 w8 w9,w7,w5\n")
    out, data = tmp_path / "out.csv", tmp_path / "out.json"
    for path in (out, data):
        assert explain("--input", str(table), "--output", str(path), model=folder) == 0
    assert "line 3: w4 w8 w9 w7  ->  'w7'" in capsys.readouterr().out
    found = pandas.read_csv(out, keep_default_na=False)
    expected = Explanation.load(data).to_pandas()
    assert list(found.columns) == list(expected.columns)
    assert found["value"].to_numpy() == pytest.approx(expected["value"].to_numpy())
    assert set(zip(found["answer"], found["against"], strict=True)) >= {
        ("w5", "w6"),
        ("w7", "w5"),
    }
    assert explain("--input", str(table), "--target", "w5", model=folder) == 1
    assert "--target was given, and" in capsys.readouterr().err


def test_a_wrong_line_is_named(tmp_path, capsys):
    table = written(tmp_path / "a.csv", "text,target\nthe dogs,bark\n\nthe bird,zzz\n")
    assert explain("--input", str(table), model="stories-mamba") == 1
    said = capsys.readouterr().err
    assert f"error: {table}, line 4: --target is 'zzz', which the tokenizer reads as" in said
