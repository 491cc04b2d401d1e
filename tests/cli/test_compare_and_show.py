"""What opens saved explanations: ``compare`` and ``show``."""

import pytest
from commands import explain

from captum_ssm import Explanation
from captum_ssm.cli import main


def test_two_explanations_compared(folder, tmp_path, capsys):
    paths = [tmp_path / f"{name}.json" for name in "abc"]
    for path, activation in zip(paths, ("gate", "silu"), strict=False):
        given = ("--text", "w3 w4", "--target", "w5", "--activation", activation)
        assert explain(*given, "--methods", "latim", "--output", str(path), model=folder) == 0
    capsys.readouterr()
    assert main(["compare", *map(str, paths[:2]), "--output", str(paths[2])]) == 0
    said = capsys.readouterr().out
    one, other, less = (Explanation.load(path).relevance() for path in paths)
    assert (less == one - other).all()
    assert all(f"{value:+.4g}" in said for value in less[:2].tolist())
    assert main(["compare", str(paths[0]), str(tmp_path / "nothing.json")]) == 1
    assert f"No such file: {tmp_path / 'nothing.json'}" in capsys.readouterr().err


def test_a_page_is_opened(tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    page = tmp_path / "a.html"
    page.write_text("a page")
    assert main(["show", str(page)]) == 0
    assert opened == [page.as_uri()]
    assert str(page) in capsys.readouterr().out
    for name, message in (
        ("no.html", "No such file: "),
        ("a.txt", "ends in .html or .json"),
    ):
        (tmp_path / "a.txt").touch()
        assert main(["show", str(tmp_path / name)]) == 1
        assert message in capsys.readouterr().err
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    assert main(["show", str(page)]) == 1
    assert "no browser could be started; open" in capsys.readouterr().err


@pytest.fixture
def one(folder, tmp_path, capsys):
    """A file with two methods, and one with one of them."""
    paths = [tmp_path / f"{name}.json" for name in ("both", "latim")]
    for path, names in zip(paths, (["latim", "mamba-lrp"], ["latim"]), strict=True):
        given = ("--text", "w3 w4 w8", "--target", "w5", "--methods", *names)
        assert explain(*given, "--output", str(path), model=folder) == 0
    capsys.readouterr()
    return paths


def test_two_methods_of_one_file_compared(one, tmp_path, capsys):
    both = str(one[0])
    found = Explanation.load(both)
    shares = [row / abs(row).sum() for row in (found.relevance(m.name) for m in found.methods)]
    target = tmp_path / "less.json"
    for given in ([both], [both, "--methods", "LaTIM", "mamba_lrp"]):
        assert main(["compare", *given, "--output", str(target)]) == 0
        said = capsys.readouterr().out
        assert "latim minus mamba-lrp, in shares of each method's total magnitude" in said
        less = Explanation.load(target)
        assert [method.name for method in less.methods] == ["latim minus mamba-lrp"]
        assert less.relevance() == pytest.approx(shares[0] - shares[1], abs=1e-6)
        assert all(f"{value:+.4g}" in said for value in less.relevance()[:2].tolist())
        page = less.to_html()
        assert "latim minus mamba-lrp" in page


def test_files_of_different_methods_compared(one, folder, tmp_path, capsys):
    latim = str(one[1])
    lrp, table = str(tmp_path / "lrp.json"), tmp_path / "less.csv"
    assert explain("--text", "w3 w4 w8", "--target", "w5", "--output", lrp, model=folder) == 0
    assert main(["compare", latim, lrp, "--output", str(table)]) == 0
    assert "latim minus mamba-lrp" in capsys.readouterr().out
    rows = table.read_text(encoding="utf-8").splitlines()
    assert rows[0].startswith("example,method,output,answer,against,unit,position,text,value")
    assert main(["compare", lrp, latim, "--methods", "mamba-lrp", "mamba-lpr"]) == 1
    said = capsys.readouterr().err
    assert f"--methods holds 'mamba-lpr'; {latim} has latim" in said
    assert main(["compare", lrp]) == 1
    assert f"{lrp} has mamba-lrp; expected two methods" in capsys.readouterr().err


def test_the_page_of_a_saved_explanation_is_kept(one, tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    page = tmp_path / "kept.html"
    assert main(["show", str(one[0]), "--output", str(page)]) == 0
    assert opened == [page.as_uri()]
    assert "w8" in page.read_text(encoding="utf-8")
    assert capsys.readouterr().out == f"The page is {page}\n"
    assert main(["show", str(one[0])]) == 0
    assert capsys.readouterr().out.startswith("The page is ")
    assert opened[-1].endswith("/both.html")
    assert opened[-1] != opened[0]
    assert main(["show", str(page), "--output", str(page)]) == 1
    assert "--output was given, and FILE is a page already" in capsys.readouterr().err
