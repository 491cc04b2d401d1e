"""The published site: what its address adds to a build, and the build's place among the versions.

``make docs`` needs none of this. Where ``DOCS_URL`` says what address the pages will have, a build
also has a sitemap, cards for social media and a choice of versions; ``DOCS_VERSION`` is a release's
``X.Y``, or nothing for the main branch. Then

    python docs/publishing.py docs/_build/html SITE

copies the build into SITE, the folder that the address serves: ``latest/`` is the main branch,
``X.Y/`` a release, ``stable/`` a copy of the newest release. These addresses do not change.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LATEST, STABLE = "latest", "stable"
VERSION = re.compile(r"\d+\.\d+")
# A card has the strongest color of relevance, and a font that comes with matplotlib.
CARD = {"line_color": "#b9540b", "font": "DejaVu Sans"}


def address(environment: Mapping[str, str] = os.environ) -> str:
    """Where the site will be, without a slash at its end; empty for a build that stays here."""
    return environment.get("DOCS_URL", "").rstrip("/")


def version_of(environment: Mapping[str, str] = os.environ) -> str:
    """``latest`` or the ``X.Y`` of a release.

    Raises:
        ValueError: ``DOCS_VERSION`` is something else.
    """
    version = environment.get("DOCS_VERSION") or LATEST
    if version != LATEST and not VERSION.fullmatch(version):
        raise ValueError(f"DOCS_VERSION is {version!r}; expected X.Y, such as 1.0, or nothing.")
    return version


def settings(site: str, version: str, sign: str, blank: str) -> dict[str, Any]:
    """What Sphinx is told of the address: options by name, ``extensions`` among them.

    A release tells search engines that it is ``stable/``, so that they lead to one version of a
    page. ``sign`` and ``blank`` are pictures of the cards, seen from the folder of the sources: one
    is at the top, and the other in the place of the extension's own logo.
    """
    home = f"{site}/{LATEST if version == LATEST else STABLE}/"
    return {
        "extensions": ["sphinx_sitemap", "sphinxext.opengraph"],
        "html_baseurl": home,
        "sitemap_url_scheme": "{link}",
        "sitemap_excludes": ["search.html", "genindex.html", "_modules/*"],
        "ogp_site_url": home,
        "ogp_site_name": "captum_ssm",
        "ogp_social_cards": CARD | {"image": sign, "image_mini": blank},
        "ogp_enable_meta_description": True,
    }


def theme_settings(site: str, version: str) -> dict[str, Any]:
    """What the theme is told of the address: the choice of versions, and which one this is."""
    return {
        "switcher": {"json_url": f"{site}/switcher.json", "version_match": version},
        "check_switcher": False,  # the file is there once the site is
        "show_version_warning_banner": True,
        "navbar_end": ["version-switcher", "theme-switcher", "navbar-icon-links"],
    }


def links_of(notebook: str, environment: Mapping[str, str] = os.environ) -> str:
    """A line for a tutorial's page: its file, and Colab where the repository is known."""
    repository = environment.get("GITHUB_REPOSITORY")
    found = [f"{{download}}`Download this notebook <../../tutorials/{notebook}.ipynb>`"]
    if repository:
        ref = environment.get("GITHUB_REF_NAME", "main")
        place = f"{repository}/blob/{ref}/tutorials/{notebook}.ipynb"
        colab = f"https://colab.research.google.com/github/{place}"
        found.insert(0, f"{{bdg-link-primary}}`Open in Colab <{colab}>`")
    return " ".join(found)


def place(build: Path, folder: Path, site: str, version: str) -> None:
    """Copy a build into the folder that is served, and write what leads to its versions."""
    copied(build, folder / version)
    releases = sorted(
        (path.name for path in folder.iterdir() if VERSION.fullmatch(path.name)),
        key=lambda name: tuple(map(int, name.split("."))),
        reverse=True,
    )
    if version in releases[:1]:
        copied(build, folder / STABLE)
    entries = [{"name": "latest (main)", "version": LATEST, "url": f"{site}/{LATEST}/"}]
    for name in releases:
        newest = name == releases[0]
        entry = {"version": name, "url": f"{site}/{STABLE if newest else name}/"}
        entries.append(entry | ({"name": f"{name} (stable)", "preferred": True} if newest else {}))
    if not releases:
        entries[0]["preferred"] = True
    first = STABLE if releases else LATEST
    written = {
        "switcher.json": json.dumps(entries, indent=1) + "\n",
        "index.html": INDEX.format(first=first),
        "sitemap.xml": SITEMAP.format(url=f"{site}/{first}/sitemap.xml"),
        ".nojekyll": "",  # GitHub would leave out folders that begin with an underscore
    }
    for name, text in written.items():
        (folder / name).write_text(text, encoding="utf-8")


def copied(build: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(build, target, ignore=shutil.ignore_patterns(".doctrees", ".buildinfo*"))


INDEX = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>captum_ssm</title>
<meta http-equiv="refresh" content="0; url={first}/">
<link rel="canonical" href="{first}/">
<p>The documentation is in <a href="{first}/">{first}/</a>.</p>
</html>
"""

SITEMAP = """<?xml version="1.0" encoding="utf-8"?>
<sitemapindex xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">
<sitemap><loc>{url}</loc></sitemap>
</sitemapindex>
"""

if __name__ == "__main__":
    built, served = (Path(argument) for argument in sys.argv[1:])
    if not address():
        sys.exit("DOCS_URL is not set; expected the address of the site.")
    served.mkdir(parents=True, exist_ok=True)
    place(built, served, address(), version_of())
