"""The notebooks install what they need where it is missing, as on Colab, and nothing elsewhere."""

import ast
import builtins
import sys

import nbformat
import pytest
from folders import ROOT
from IPython.core.inputtransformer2 import TransformerManager
from test_install import declared, distribution

NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))
# In the repository they lie next to the notebooks, which go on without them.
NEXT_TO = {"trained-models"}


def code_of(path):
    """The code cells of a notebook in plain Python, the first of which installs."""
    cells = nbformat.read(path, as_version=4).cells
    assert [cell.cell_type for cell in cells[:2]] == ["markdown", "code"]
    transformed = TransformerManager().transform_cell
    return [transformed(cell.source) for cell in cells if cell.cell_type == "code"]


def imported_by(code):
    """The modules whose names a cell imports."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


class Shell:
    """What a cell sees of IPython: magics, which are written down."""

    def __init__(self):
        self.ran = []

    def run_line_magic(self, name, line):
        self.ran.append((name, line))


def installed_by(code, monkeypatch, missing=()):
    """What an install cell runs where some packages are missing."""
    shell, plain = Shell(), builtins.__import__

    def imported(name, *args, **options):
        if name.partition(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}")
        return plain(name, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", imported)
        exec(code, {"get_ipython": lambda: shell})
    return shell.ran


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_installs_what_it_needs_where_it_is_missing(path, monkeypatch):
    first, *rest = code_of(path)
    ran = installed_by(first, monkeypatch, missing={"captum_ssm"})
    assert {name for name, _ in ran} == {"pip"}
    assert all(line.startswith("install --quiet ") for _, line in ran)
    words = " ".join(line.removeprefix("install ") for _, line in ran).split()
    packages = {distribution(word.partition("==")[0]) for word in words if word[:2] != "--"}
    assert "captum-ssm" in packages
    known = packages | declared("options", "install_requires") | {"captum-ssm"} | NEXT_TO
    used = {name.partition(".")[0] for cell in rest for name in imported_by(cell)}
    assert {distribution(name) for name in used - set(sys.stdlib_module_names)} <= known


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_installs_nothing_where_all_is_there(path, monkeypatch):
    if path.stem == "Why_Is_This_Character_JavaScript":
        pytest.importorskip("typeseg")
    assert installed_by(code_of(path)[0], monkeypatch) == []
