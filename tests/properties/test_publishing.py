"""The published site: its versions under addresses that stay, its sitemap, cards and links."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import numpy as np
import pytest
import yaml
from folders import ROOT

SITE = "https://example.org/captum_ssm"
WORKFLOW = (ROOT / ".github/workflows/docs.yml").read_text(encoding="utf-8")


@pytest.fixture
def publishing(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("publishing")


def placed(publishing, tmp_path, *versions):
    """A site after builds of some versions, each with a page that says which build it is."""
    site, build = tmp_path / "site", tmp_path / "html"
    for folder in (site, build / ".doctrees", build / "_static"):
        folder.mkdir(parents=True)
    for count, version in enumerate(versions):
        (build / "index.html").write_text(f"{version} {count}")
        publishing.place(build, site, SITE, version)
    return site


def folders(site):
    return {path.name: path.joinpath("index.html").read_text() for path in site.glob("*/")}


def test_a_first_site_leads_to_the_main_branch(publishing, tmp_path):
    site = placed(publishing, tmp_path, "latest")
    assert folders(site) == {"latest": "latest 0"}
    (entry,) = json.loads((site / "switcher.json").read_text())
    assert entry["url"] == f"{SITE}/latest/"
    assert entry["preferred"]
    assert 'url=latest/"' in (site / "index.html").read_text()
    assert (site / ".nojekyll").exists()
    assert not (site / "latest/.doctrees").exists()
    assert (site / "latest/_static").exists()


def test_stable_is_the_newest_release_and_no_address_moves(publishing, tmp_path):
    order = ["1.2", "latest", "1.10", "1.2"]  # the last is a patch of the older release
    site = placed(publishing, tmp_path, *order)
    assert folders(site) == {
        "1.2": "1.2 3",
        "latest": "latest 1",
        "1.10": "1.10 2",
        "stable": "1.10 2",
    }
    entries = json.loads((site / "switcher.json").read_text())
    assert [entry["version"] for entry in entries] == ["latest", "1.10", "1.2"]
    assert [entry["url"].removeprefix(SITE) for entry in entries] == [
        "/latest/",
        "/stable/",
        "/1.2/",
    ]
    assert [entry["version"] for entry in entries if entry.get("preferred")] == ["1.10"]
    assert 'url=stable/"' in (site / "index.html").read_text()
    (place,) = ElementTree.parse(site / "sitemap.xml").findall(".//{*}loc")
    assert place.text == f"{SITE}/stable/sitemap.xml"


def test_the_version_is_a_release_or_the_main_branch(publishing):
    assert publishing.version_of({}) == publishing.version_of({"DOCS_VERSION": ""}) == "latest"
    assert publishing.version_of({"DOCS_VERSION": "1.10"}) == "1.10"
    with pytest.raises(ValueError, match=r"expected X\.Y"):
        publishing.version_of({"DOCS_VERSION": "v1.0.0"})
    assert publishing.address({}) == ""
    assert publishing.address({"DOCS_URL": f"{SITE}/"}) == SITE


def test_a_tutorial_opens_in_colab_where_its_repository_is_known(publishing):
    known = {"GITHUB_REPOSITORY": "someone/captum_ssm", "GITHUB_REF_NAME": "v1.0.0"}
    notebook = "tutorials/Time_Series.ipynb"
    assert (ROOT / notebook).exists()
    address = f"colab.research.google.com/github/someone/captum_ssm/blob/v1.0.0/{notebook}"
    assert address in publishing.links_of("Time_Series", known)
    for environment in (known, {}):
        assert f"<../../{notebook}>" in publishing.links_of("Time_Series", environment)
    assert "Colab" not in publishing.links_of("Time_Series", {})


def test_the_workflow_gives_what_a_build_reads():
    for name in ("DOCS_URL", "DOCS_VERSION"):
        assert f"{name}: $" in WORKFLOW
    assert "python docs/publishing.py html site" in WORKFLOW
    (pattern,) = re.findall(r"s\|(\S+)\|\\1\|p", WORKFLOW)
    for tag, version in {"v1.2.3": "1.2", "v1.10.0": "1.10", "v1.0.0rc1": None}.items():
        found = re.match(pattern, f"refs/tags/{tag}")
        assert (found and found[1]) == version


@pytest.fixture
def published(tmp_path):
    """Runs the workflow's last step on a repository of this machine: what its branch then holds."""
    repository = tmp_path / "repository.git"
    subprocess.run(["git", "init", "--quiet", "--bare", repository], check=True)
    (*_, step) = yaml.safe_load(WORKFLOW)["jobs"]["pages"]["steps"]
    script = re.sub(r"remote=.*", f'remote="{repository}"', step["run"])
    places = os.pathsep.join([str(tmp_path / "bin"), os.environ["PATH"]])
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").symlink_to(sys.executable)
    given = {"PATH": places, "DOCS_URL": SITE, "GITHUB_ACTOR": "someone", "GITHUB_SHA": "0"}

    def publish(version, text, script=script):
        work = tmp_path / text
        (work / "html").mkdir(parents=True)
        (work / "html/index.html").write_text(text)
        (work / "docs").symlink_to(ROOT / "docs")
        environment = {**os.environ, **given, "DOCS_VERSION": version}
        ran = subprocess.run(
            ["bash", "-e", "-c", script], cwd=work, env=environment, capture_output=True, text=True
        )
        show = ["git", "-C", repository, "ls-tree", "-r", "--name-only", "gh-pages"]
        listed = subprocess.run(show, capture_output=True, text=True).stdout.splitlines()
        return ran, {name for name in listed if name.endswith("/index.html")}

    return publish


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_the_workflow_keeps_the_versions_that_are_there(published):
    ran, pages = published("", "first")
    assert ran.returncode == 0, ran.stderr
    assert pages == {"latest/index.html"}
    ran, pages = published("1.0", "second")
    assert ran.returncode == 0, ran.stderr
    assert pages == {"latest/index.html", "1.0/index.html", "stable/index.html"}


@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_the_workflow_stops_where_the_branch_cannot_be_read(published):
    (*_, step) = yaml.safe_load(WORKFLOW)["jobs"]["pages"]["steps"]
    gone = re.sub(r"remote=.*", 'remote="/nowhere"', step["run"])
    ran, pages = published("", "first", gone)
    assert ran.returncode not in (0, 2)
    assert not pages


@pytest.mark.parametrize(("version", "home"), [("latest", "latest"), ("1.0", "stable")])
def test_a_build_for_an_address_has_a_sitemap_cards_and_versions(
    version, home, publishing, tmp_path
):
    for extension in ("sphinx_sitemap", "sphinxext.opengraph", "pydata_sphinx_theme"):
        if find_spec(extension.partition(".")[0]) is None:
            pytest.skip(f"{extension} is not installed")
    source, out = tmp_path / "docs", tmp_path / "html"
    source.mkdir()
    (source / "index.rst").write_text("Recipes\n=======\n\nCode for each kind of model.\n")
    for name in ("sign.png", "blank.png"):
        plt.imsave(source / name, np.ones((4, 4, 4)))
    settings = publishing.settings(SITE, version, "sign.png", "blank.png")
    settings |= {"html_theme": "pydata_sphinx_theme", "project": "captum_ssm"}
    settings["html_theme_options"] = publishing.theme_settings(SITE, version)
    lines = [f"{name} = {value!r}\n" for name, value in settings.items()]
    (source / "conf.py").write_text("".join(lines))
    build = [sys.executable, "-W", "ignore", "-m", "sphinx", "-q", "-W", str(source), str(out)]
    ran = subprocess.run(build, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    listed = [place.text for place in ElementTree.parse(out / "sitemap.xml").findall(".//{*}loc")]
    assert listed == [f"{SITE}/{home}/index.html"]
    page = (out / "index.html").read_text(encoding="utf-8")
    assert f'<link rel="canonical" href="{listed[0]}" />' in page
    (card,) = re.findall(r'<meta property="og:image" content="([^"]+)"', page)
    picture = plt.imread(out / card.removeprefix(f"{SITE}/{home}/"))
    assert picture.shape[:2] == (600, 1146)
    assert len(np.unique(picture)) > 50  # words are written there
    assert f"{SITE}/switcher.json" in page
    assert f"theme_switcher_version_match = '{version}'" in page


def test_links_that_lead_nowhere_are_found(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "docs")
    links = importlib.import_module("links")
    (tmp_path / "a b").mkdir()
    pages = {
        "index.html": '<h1 id="top"></h1><a href="#top">1</a><a href="a%20b/#x.y">2</a>'
        '<a href="https://example.org/none">3</a><img src="data:,none"><a href="a%20b">4</a>',
        "a b/index.html": '<i id="x.y"></i><a href="../index.html#top">1</a><a href="#none">2</a>'
        '<a href="../index.html#none">3</a><script src="../none.js"></script>',
    }
    for name, text in pages.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = [(page.replace(os.sep, "/"), link) for page, link in links.broken(tmp_path)]
    assert found == [
        ("a b/index.html", link) for link in ("#none", "../index.html#none", "../none.js")
    ]
