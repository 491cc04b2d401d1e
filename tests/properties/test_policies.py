"""The promises of the project: versions, deprecations, release notes, workflows."""

import ast
import re
from configparser import ConfigParser

import pytest
import yaml
from folders import ROOT
from packaging.requirements import Requirement
from packaging.version import Version

import captum_ssm

POLICIES = (ROOT / "docs" / "development" / "policies.md").read_text(encoding="utf-8")
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
MESSAGE = re.compile(
    r"^(?P<old>\S+) is now (?P<new>\S+); (?P<version>\d+\.\d+) removes (?P=old)\.$"
)


def problems(source: str, version: str) -> list[str]:
    """What is wrong with the deprecations in a file, at a version."""
    found = []
    for node in ast.walk(ast.parse(source)):
        for call in getattr(node, "decorator_list", ()):
            name = ast.unparse(getattr(call, "func", call))
            if name.rpartition(".")[2] != "deprecated":
                continue
            given = call.args[0] if isinstance(call, ast.Call) and call.args else None
            told = MESSAGE.match(given.value) if isinstance(given, ast.Constant) else None
            if told is None:
                found.append(f"{node.name}: expected 'old is now new; X.Y removes old.'")
            elif Version(told["version"]) <= Version(version):
                found.append(f"{node.name}: {told['version']} has come")
    return found


def toy(message: str) -> str:
    return f"@deprecated({message!r})\ndef old(x):\n    return x\n"


@pytest.mark.parametrize(
    ("message", "version", "told"),
    [
        ("old is now captum_ssm.new; 1.2 removes old.", "1.1.3", None),
        ("old is now captum_ssm.new; 1.2 removes old.", "1.2.0", "1.2 has come"),
        ("old is now captum_ssm.new; 1.2 removes old.", "1.3.0", "1.2 has come"),
        ("old is gone", "1.0", "expected 'old is now new"),
    ],
)
def test_a_deprecation_names_its_replacement_and_its_end(message, version, told):
    found = problems(toy(message), version)
    assert (told is None and not found) or told in found[0]


def test_the_example_of_the_policy_is_one():
    (code,) = re.findall(r"```python\n(.*?)```", POLICIES, re.DOTALL)
    assert not problems(code, "1.1")
    assert problems(code, "1.2") == ["old_name: 1.2 has come"]


def test_no_deprecation_is_overdue():
    for path in sorted((ROOT / "captum_ssm").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "deprecated" in text:  # parsing all files takes seconds
            assert not problems(text, captum_ssm.__version__), path


def test_the_promised_versions_are_the_bounds_of_the_package_and_are_tested():
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = config["options"]["install_requires"].strip().splitlines()
    bounds = {r.name: str(r.specifier).removeprefix(">=") for r in map(Requirement, lines)}
    bounds["Python"] = config["options"]["python_requires"].removeprefix(">=").strip()
    table = dict(re.findall(r"^\| (\w+) \| ([\d.]+) \| [^|]+ \|$", POLICIES, re.MULTILINE))
    assert set(table) == {"Python", "torch", "captum", "transformers"}
    assert table == {name: bounds[name] for name in table}
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))["jobs"]
    oldest = (ROOT / ".ci" / "oldest.txt").read_text("utf-8").splitlines()
    tried = dict(line.split("==") for line in oldest if "==" in line)
    for name in set(bounds) - {"Python", "torch"}:
        assert not bounds[name] or re.fullmatch(rf"{re.escape(bounds[name])}\.\d+", tried[name])
    assert jobs["oldest"]["env"]["PIP_CONSTRAINT"].endswith("/.ci/oldest.txt")
    assert f"TORCH=torch=={bounds['torch']}.0 " in jobs["oldest"]["steps"][-1]["run"]
    pythons = re.findall(r"Python :: (3\.\d+)", config["metadata"]["classifiers"])
    assert jobs["tests"]["strategy"]["matrix"]["python"] == pythons
    assert pythons[0] == table["Python"]


def test_only_the_job_that_publishes_may_and_it_stores_no_token():
    for path in WORKFLOWS:
        text = path.read_text(encoding="utf-8")
        workflow = yaml.safe_load(text)
        assert workflow["permissions"]["contents"] == "read"
        assert "secrets." not in text
        for name, job in workflow["jobs"].items():
            may = job.get("permissions", {}).get("id-token") == "write"
            assert may == (name == "publish")
            pushes = job.get("permissions", {}).get("contents") == "write"
            assert pushes == ((path.name, name) == ("docs.yml", "pages"))
            for step in job["steps"]:
                assert re.search(r"@[0-9a-f]{40}$", step.get("uses", "@" + "0" * 40))
                is_checkout = step.get("uses", "").startswith("actions/checkout@")
                assert not is_checkout or step["with"]["persist-credentials"] is False
    publish = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"][
        "publish"
    ]
    assert publish["environment"] == "release"
    assert set(publish["needs"]) == {"source", "wheels", "try"}


def test_a_release_note_has_a_kind_that_the_tool_knows():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    kinds = re.findall(r'\[\[tool\.towncrier\.type\]\]\ndirectory = "(\w+)"', text)
    assert kinds == ["added", "changed", "deprecated", "fixed"]
    notes = [path for path in (ROOT / "changes").iterdir() if path.name != "README.md"]
    for path in notes:
        assert re.fullmatch(rf"(\d+|\+\w+)(\.\d+)?\.({'|'.join(kinds)})\.md", path.name), path.name
        assert path.read_text(encoding="utf-8").strip()
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert changelog.count("<!-- towncrier release notes start -->") == 1


def test_the_recipe_is_of_this_version_and_its_requirements():
    recipe = (ROOT / "recipe" / "recipe.yaml").read_text(encoding="utf-8")
    assert f"version: {captum_ssm.__version__}\n" in recipe
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    names = {Requirement(x).name for x in config["options"]["install_requires"].split("\n") if x}
    renamed = {"matplotlib": "matplotlib-base", "torch": "pytorch"}
    run = yaml.safe_load(re.sub(r"\$\{\{.*?\}\}", "x", recipe))["requirements"]["run"]
    assert {line.split()[0] for line in run} == {renamed.get(x, x) for x in names} | {"python"}


def test_the_forms_of_the_repository_can_be_read():
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        if path.name != "config.yml":
            assert form["name"]
            assert form["description"]
            assert any(part.get("validations", {}).get("required") for part in form["body"])
    assert len(forms) == 4


def test_every_page_that_assistants_are_sent_to_exists():
    for name in ("llms.txt", "AGENTS.md"):
        text = (ROOT / name).read_text(encoding="utf-8")
        links = re.findall(r"\]\(([^)#]+)\)", text) + re.findall(r"`(docs/[\w/.]+|\w+\.md)`", text)
        assert links
        for link in links:
            assert (ROOT / link).exists(), f"{name}: {link}"


def test_every_reference_of_the_paper_is_in_its_bibliography_and_no_other():
    paper = (ROOT / "paper" / "paper.md").read_text(encoding="utf-8")
    cited = set(re.findall(r"@(\w+)", paper))
    listed = re.findall(r"^@\w+\{(\w+),", (ROOT / "paper" / "paper.bib").read_text(), re.MULTILINE)
    assert cited == set(listed)
    assert len(listed) == len(cited)
    words = len(re.sub(r"^---.*?^---", "", paper, flags=re.DOTALL | re.MULTILINE).split())
    assert 250 <= words <= 1750  # as JOSS asks
