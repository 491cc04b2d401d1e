"""The documentation: every public name says what it takes, and its examples run."""

import ast
import dataclasses
import doctest
import importlib
import inspect
import json
import os
import re
import textwrap
from pathlib import Path

import captum
import matplotlib
import nbformat
import pages
import pytest
import torch
from families import TRANSFORMERS_4
from models import VOCABULARY, ids, tiny, word_tokenizer
from typing_extensions import is_typeddict

import captum_ssm
import captum_ssm.visualization
from captum_ssm import continuation_relevance
from captum_ssm.explanation.page import notebook_bundle

matplotlib.use("Agg")

from folders import GENERATED, ROOT, pages_of_docs

DOCS = ROOT / "docs"
PAGES = pages_of_docs()
NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))
# Inputs whose deciding tokens are known: each module is used by its name.
GENERATORS = ("chains", "copying", "digits", "documents", "scenes", "signals", "stories", "typeseg")
MODULES = (
    "captum_ssm",
    "captum_ssm.attr",
    "captum_ssm.examples",
    "captum_ssm.explanation",
    "captum_ssm.explanation.make.answers.captum_llm",
    "captum_ssm.interventions",
    "captum_ssm.metrics",
    "captum_ssm.mixers",
    "captum_ssm.models",
    "captum_ssm.operators",
    "captum_ssm.explanation.page",
    "captum_ssm.discovery.scans",
    "captum_ssm.kernels",
    "captum_ssm.visualization",
    *(f"captum_ssm.examples.{name}" for name in GENERATORS),
)


@pytest.fixture
def check_outputs(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tutorials")
    return importlib.import_module("check_outputs")


def public(name):
    """What a module lists as its own, or else all in it that has a public name."""
    module = importlib.import_module(name)
    keys = getattr(module, "__all__", [key for key in vars(module) if key[0] != "_"])
    return {key: getattr(module, key) for key in keys}


def documented():
    """The public objects, by the name a reader would import them by."""
    found = {}
    for name in MODULES:
        listed = hasattr(importlib.import_module(name), "__all__")
        for key, value in public(name).items():
            own = listed or getattr(value, "__module__", None) == name
            if own and callable(value) and value not in found.values():
                found[f"{name}.{key}"] = value
    return found


PUBLIC = documented()


def examples():
    finder = doctest.DocTestFinder(recurse=True)
    found = []
    for name, value in PUBLIC.items():
        for test in finder.find(value, name, module=False, globs={}):
            if test.examples:
                found.append(pytest.param(test, id=test.name))
    return found


def namespace(folder: Path):
    """What the examples take for granted: the library, a model, its input."""
    names = {}
    for name in MODULES:
        names |= public(name)
    names |= {name: getattr(captum_ssm.examples, name) for name in GENERATORS}
    return names | {
        "TextTokenInput": captum.attr.TextTokenInput,
        "captum": captum,
        "captum_ssm": captum_ssm,
        "continuation_relevance": continuation_relevance,
        "dataclasses": dataclasses,
        "folder": folder,
        "input_ids": ids(1, 7),
        "model": tiny(),
        "nn": torch.nn,
        "token": 5,
        "tokenizer": word_tokenizer({f"w{i}": i for i in range(VOCABULARY)}),
        "tokens": [f"w{i}" for i in ids(1, 7)[0].tolist()],
        "torch": torch,
    }


@pytest.mark.every_case
@pytest.mark.parametrize("test", examples())
def test_an_example_of_a_docstring_runs(test, tmp_path, own_registry):
    if TRANSFORMERS_4 and "use_cache=True" in test.docstring:
        pytest.skip("caches of transformers 4 are others")
    test.globs = namespace(tmp_path)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    report = []
    doctest.DocTestRunner(optionflags=options).run(test, out=report.append)
    assert not report, "".join(report)


@pytest.mark.every_case
@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_has_an_example_and_says_what_it_takes(name):
    value = PUBLIC[name]
    told = inspect.getdoc(value) or ""
    assert ">>> " in told
    if inspect.isclass(value) and issubclass(value, (Exception, Warning)):
        return
    # A dict with named keys has no signature.
    given = value.__annotations__ if is_typeddict(value) else inspect.signature(value).parameters
    takes = [p for p in given if p not in ("args", "kwargs", "self")]
    unnamed = [p for p in takes if not re.search(rf"\b{p}\b", told)]
    refers = re.search(r"are those of|as for", told)
    assert not unnamed or refers, unnamed


def functions(name):
    """A public function or class's own functions, each with the docstring that speaks of it."""
    value = PUBLIC[name]
    if not inspect.isclass(value):
        return [(name, value, inspect.getdoc(value))]
    found = []
    for key, method in vars(value).items():
        method = getattr(method, "__func__", method)  # of a class method
        # What a dataclass makes by itself has no source.
        if inspect.isfunction(method) and Path(method.__code__.co_filename).exists():
            if key in ("__init__", "__post_init__"):
                found.append((f"{name}.{key}", method, inspect.getdoc(value)))
            elif key[0] != "_":
                # Operators alone have the docstrings of their base class.
                inherits = issubclass(value, captum_ssm.operators.TokenOperator)
                told = inspect.getdoc(getattr(value, key)) if inherits else method.__doc__
                found.append((f"{name}.{key}", method, told))
    return found


@pytest.mark.every_case
@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_and_its_methods_are_documented(name):
    assert inspect.getdoc(PUBLIC[name])
    for path, function, told in functions(name):
        assert told, path
        refers = re.search(r"are those of", told)
        body = ast.parse(textwrap.dedent(inspect.getsource(function)))
        if any(isinstance(node, ast.Raise) for node in ast.walk(body)):
            assert "Raises:" in told or refers, f"{path} raises"
        takes = inspect.signature(function, eval_str=False).parameters.values()
        tensors = [p.name for p in takes if re.match(r"(torch\.)?Tensor", str(p.annotation))]
        if tensors:
            shaped = re.search(r"\(B|\(\.\.\.|``\(|any shape|as for", told)
            assert shaped or refers, f"{path}: which shape have {tensors}?"


def listed():
    """The pages that the navigation leads to, with those of the generated folders."""
    found = []
    for page in PAGES:
        folder = page.parent.relative_to(DOCS)
        for toctree in re.findall(r"```{toctree}(.*?)```", page.read_text("utf-8"), re.DOTALL):
            entries = re.findall(r"^(?:.* <)?([\w./]+)>?$", toctree, re.MULTILINE)
            found += [Path(os.path.normpath(folder / entry)).as_posix() for entry in entries]
    return found


def test_every_page_is_linked_and_every_link_leads_somewhere():
    names = {page.relative_to(DOCS).with_suffix("").as_posix() for page in PAGES}
    pages = [entry for entry in listed() if Path(entry).parent.name not in GENERATED]
    assert sorted(pages) == sorted(names - {"index"})
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            if not link.startswith(("http", "_build/")):
                assert (page.parent / link).exists(), f"{page}: {link}"


def test_every_tutorial_is_listed():
    entries = [entry for entry in listed() if entry.startswith("tutorials/")]
    assert sorted(entries) == [f"tutorials/{path.stem}" for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_is_committed_with_its_outputs(path, check_outputs):
    notebook = check_outputs.read(path)
    assert all(cell.execution_count for cell in check_outputs.code_cells(notebook))
    text = path.read_text(encoding="utf-8")
    assert "image/png" in text or "captum-data" in text  # a figure, or a page
    assert check_outputs.WIDGET not in text
    assert not check_outputs.problems(notebook, notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_tutorial_needs_no_checkout(path, check_outputs):
    """A run of the notebooks, in an empty folder, proves that; this says it early."""
    code = "\n".join(cell.source for cell in check_outputs.code_cells(check_outputs.read(path)))
    assert not re.search(r"sys\.path|\.\./|benchmarks", code)


def test_the_tutorials_stay_small():
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 6.0e6  # a page has 0.2 MB


@pytest.mark.parametrize(
    ("committed", "run", "same"),
    [
        ("LaTIM 63.1%, AP 0.59", "LaTIM  63.2%,  AP 0.58", True),
        ("LaTIM 63.1%", "LaTIM 61.1%", False),
        ("LaTIM 63.1%", "MambaLRP 63.1%", False),
        ("8 of 8 right", "7 of 8 right", False),
        ("error 6e-07", "error 9e-08", True),
        ("sum \N{MINUS SIGN}1.23", "sum 1.23", False),
        ("background:#fdfefe", "background:#fdfeff", True),
        ("image/png", "", False),
    ],
)
def test_outputs_are_compared_up_to_rounding(committed, run, same, check_outputs):
    assert check_outputs.agree(committed, run) == same


def test_pages_are_compared_by_their_data_up_to_rounding(check_outputs, tmp_path):
    def saved(explanation):
        output = nbformat.v4.new_output("execute_result", data=notebook_bundle(explanation)[0])
        cells = [nbformat.v4.new_code_cell("explain(...)", outputs=[output])]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "saved.ipynb")
        return check_outputs.read(tmp_path / "saved.ipynb")

    def scaled(factor):
        example = pages.story()
        rows = {name: rows * factor for name, rows in example.relevance.items()}
        return pages.explanation(dataclasses.replace(example, relevance=rows))

    committed = saved(pages.explanation())
    (output,) = committed.cells[0].outputs
    assert sorted(output.data) == ["text/html", "text/plain"]
    later = dataclasses.replace(pages.explanation(), versions={"torch": "99.0"})
    for same in (later, scaled(1.001)):
        assert not check_outputs.problems(committed, saved(same))
    (found,) = check_outputs.problems(committed, saved(scaled(1.1)))
    assert "other outputs" in found
    output.data["text/html"] = output.data["text/html"].replace("srcdoc=", "src=")
    assert check_outputs.problems(committed, saved(later))


def test_what_depends_on_the_machine_is_refused(check_outputs):
    cell = nbformat.v4.new_code_cell("1", outputs=[nbformat.v4.new_output("stream", text="")])
    notebook = nbformat.v4.new_notebook(cells=[cell])
    for text in ("<Generator at 0x7f83047f1830>", "/home/anna/model.safetensors"):
        cell.outputs[0].text = text
        (found,) = check_outputs.problems(notebook, notebook)
        assert "machine" in found
    cell.outputs = [nbformat.v4.new_output("stream", name="stderr", text="a warning")]
    (found,) = check_outputs.problems(notebook, notebook)
    assert "stderr" in found
    cell.outputs = [nbformat.v4.new_output("display_data", data={"image/png": "iVBO"})]
    (found,) = check_outputs.problems(notebook, notebook)
    assert "alternative text" in found


def test_the_tables_of_the_pages_are_those_that_their_script_writes(monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    pages = importlib.import_module("tables").pages()
    assert {path.name for path in pages} >= {"README.md", "choosing.md", "truth.md"}
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, f"run python docs/tables.py: {path.name}"


def test_no_page_shows_a_directive_that_only_the_build_reads():
    """A page is read on GitHub, too, where an included file is a line of code."""
    for page in PAGES:
        assert "{include}" not in page.read_text(encoding="utf-8"), page


def test_the_table_of_rows_says_how_it_was_measured():
    measured = json.loads((ROOT / "benchmarks/results/linear_row.json").read_text())
    threads = {1: "one thread"}.get(measured["threads"], f"{measured['threads']} threads")
    assert f"by {measured['clock']} on {threads} of a CPU" in (DOCS / "measured.md").read_text()
