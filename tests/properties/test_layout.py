"""The layout of the package: what keeps a large tree easy to read.

lint-imports checks imports, and ruff how much a function does.
"""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import captum_ssm

ROOT = Path(captum_ssm.__file__).parent
TESTS = Path(__file__).parents[1]
FILES = sorted(ROOT.rglob("*.py"))
LINES = 400
CODE = 50  # lines of a function, without its signature, docstring and comments

# Words that meant several things. The glossary has the words that took their place.
RETIRED = {
    "FrozenLayer",
    "Way",
    "Transport",
    "Patches",
    "Through",
    "Link",
    "Port",
    "Cuts",
    "Substitution",
    "Rules",
    "Made",
    "PlacedOperator",
    "Ask",
    "Asked",
    "asks",
    "TextOptions",
    "speaks",
    "past_writes",
    "read_past",
    "Stage",
    "_Step",
    "stage",
    "Read",
    "CutGraph",
    "Start",
    "Exchange",
    "exchanges",
    "recognized",
    "vecmat",
    "behind",
    "beside",
}


@cache
def trees() -> list[tuple[str, ast.Module]]:
    names = [path.relative_to(ROOT).as_posix() for path in FILES]
    return [(name, ast.parse((ROOT / name).read_text(encoding="utf-8"))) for name in names]


def test_only_the_front_and_the_errors_stand_at_the_root():
    names = {path.name for path in ROOT.glob("*.py")}
    assert names == {"__init__.py", "__main__.py", "errors.py"}


def test_file_names_have_no_underscore_at_the_front():
    names = {path.stem for path in FILES} | {path.parent.name for path in FILES}
    assert {name for name in names if name.startswith("_")} == {"__init__", "__main__"}


def test_every_folder_begins_with_a_page():
    for name, tree in trees():
        if name.endswith("__init__.py"):
            assert ast.get_docstring(tree), name


def test_the_page_of_a_folder_names_only_what_exists():
    for path in ROOT.rglob("__init__.py"):
        page = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        for name in re.findall(r":mod:`\.?(\w+)`", page):
            there = path.parent / name
            assert there.is_dir() or there.with_suffix(".py").exists(), f"{path} names {name}"


def test_files_are_short():
    lengths = {p.relative_to(ROOT).as_posix(): len(p.read_text().splitlines()) for p in FILES}
    assert {name: length for name, length in lengths.items() if length > LINES} == {}


def test_functions_are_short():
    lengths = {}
    for file, tree in trees():
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = node.body[1:2] if ast.get_docstring(node) else node.body[:1]
                code = lines[first[0].lineno - 1 : node.end_lineno] if first else []
                count = sum(bool(line.strip()) and line.strip()[0] != "#" for line in code)
                lengths[f"{file}: {node.name}"] = count
    assert {name: length for name, length in lengths.items() if length > CODE} == {}


def test_every_class_has_a_name_of_its_own():
    names = [
        node.name for _, tree in trees() for node in tree.body if isinstance(node, ast.ClassDef)
    ]
    assert [name for name, count in Counter(names).items() if count > 1] == []


def test_retired_words_stay_retired():
    for name, tree in trees():
        for node in ast.walk(tree):
            word = getattr(node, "id", None) or getattr(node, "attr", None)
            defined = getattr(node, "name", None) or (isinstance(node, ast.arg) and node.arg)
            assert not {word, defined} & RETIRED, f"{name} uses {word or defined}"


def test_values_are_named_by_what_they_hold():
    """Words that say nothing name parameters of lambdas, and fields that users know, alone."""
    words = {"found", "given", "one", "own"}
    for name, tree in trees():
        lambdas = (node for node in ast.walk(tree) if isinstance(node, ast.Lambda))
        allowed = {argument for each in lambdas for argument in each.args.args}
        classes = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        lines = (line for each in classes for line in each.body if isinstance(line, ast.AnnAssign))
        fields = {line.target for line in lines}
        for node in {*ast.walk(tree)} - fields:
            is_stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            is_argument = isinstance(node, ast.arg) and node not in allowed
            word = node.id if is_stored else node.arg if is_argument else ""
            assert word not in words, f"{name}:{node.lineno} names a value {word}"


def test_test_files_are_named_after_what_they_test():
    """A file or folder of the package, or that and more words: ``attr/test_latim_grids.py``.

    Behavior across folders is tested here, in ``properties``; ``fla`` needs Triton.
    """
    folders = {path.parent for path in TESTS.glob("*/test_*.py")}
    others = {"properties", "fla"}
    assert {folder.name for folder in folders if not (ROOT / folder.name).is_dir()} <= others
    lost = []
    for path in TESTS.glob("*/test_*.py"):
        inside = (ROOT / path.parent.name).rglob("*")
        subjects = {p.stem for p in inside if p.is_dir() or p.suffix in (".py", ".js")}
        words = path.stem.split("_")[1:]
        names = {"_".join(words[: n + 1]) for n in range(len(words))}
        if path.parent.name not in others and not names & (subjects | {path.parent.name}):
            lost.append(f"{path.parent.name}/{path.name}")
    assert lost == []
    names = Counter(p.name for p in TESTS.glob("*/test_*.py") if p.parent.name != "fla")
    assert [name for name, count in names.items() if count > 1] == []  # pytest imports by name


def test_comments_and_docstrings_are_sentences_with_a_subject():
    # Each of these refers to something that the reader has not been told of yet.
    fragment = re.compile(
        r'("""|# |^ *// |/\*\*? )(Of|That of|The same|Those|Nor)\b.*', re.MULTILINE
    )
    kinds = {".py", ".js", ".css", ".cpp", ".h", ".cu", ".cuh"}
    folders = [ROOT, *(ROOT.parent / name for name in ("csrc", "tests", "benchmarks", "tutorials"))]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in kinds]
    assert len(files) > len(FILES)
    found = {str(p): fragment.search(p.read_text(encoding="utf-8")) for p in files}
    assert {name: match.group() for name, match in found.items() if match} == {}


def test_scripts_of_the_page_share_no_name():
    # They are joined into one script, in which a name that is declared twice is an error.
    scripts = sorted((ROOT / "explanation/page/static").glob("*.js"))
    declared = r"^(?:export )?(?:async )?(?:const|let|function|class) (\w+)"
    names = Counter(
        name for path in scripts for name in re.findall(declared, path.read_text(), re.MULTILINE)
    )
    assert [name for name, count in names.items() if count > 1] == []
    assert len(names) > 100


def test_the_map_of_the_code_names_only_what_exists():
    root = ROOT.parent
    page = (root / "docs/development/architecture.md").read_text(encoding="utf-8")
    inside = {p.relative_to(root).as_posix() for d in (ROOT, root / "csrc") for p in d.rglob("*")}
    form = r"(?:\w+/)+(?:\w+\.\w+)?|\b\w+\.(?:py|js|css|cpp|h)\b"
    named = {name.rstrip("/") for name in re.findall(form, re.sub(r"\]\(.*?\)", "]", page))}
    assert len(named) > 60
    lost = [name for name in named if not any(f"/{p}".endswith(f"/{name}") for p in inside)]
    assert set(lost) <= {"captum_ssm", "csrc"}, f"the page names what is not there: {lost}"
