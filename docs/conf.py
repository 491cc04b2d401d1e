"""Sphinx configuration. In this folder: ``python -m sphinx -W . _build/html``.

The package that is documented is the one that Python finds there: the installed one.
"""

import base64
import json
import re
import shutil
import sys
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.util import logging

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))

import family_pages  # noqa: E402
import gallery  # noqa: E402
import links  # noqa: E402
import publishing  # noqa: E402

import captum_ssm  # noqa: E402

logger = logging.getLogger(__name__)

project = "captum_ssm"
author = "the captum_ssm authors"
release = version = captum_ssm.__version__

extensions = [
    "mathml",
    "myst_nb",
    "sphinx_design",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
nb_execution_mode = "off"
nb_output_stderr = "remove"
myst_enable_extensions = ["attrs_block", "colon_fence", "dollarmath"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say them, with shapes
toc_object_entries_show_parents = "hide"
napoleon_use_rtype = False
html_math_renderer = "mathml"
html_title = f"captum_ssm {version}"

html_theme = "pydata_sphinx_theme"
html_theme_options = {
    "logo": {"text": "captum_ssm"},
    "header_links_before_dropdown": 6,
    "navbar_persistent": ["search-button"],
    "navigation_depth": 2,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": [],
    "footer_end": ["theme-version"],
    "pygments_light_style": "github-light-high-contrast",
    "pygments_dark_style": "github-dark-high-contrast",
}
# A page without a section has nothing for the sidebar to list.
html_sidebars = {"index": [], "getting_started": []}
html_context = {"default_mode": "auto"}  # light or dark as the reader's system is
html_static_path = ["_static", "_build/gallery/page"]
html_css_files = ["custom.css"]
html_js_files = ["living.js"]
html_favicon = "_build/gallery/sign.png"
html_show_copyright = False
html_copy_source = False

# The gallery is made at every build, and so are the pages of families in docs/models.
GALLERY = DOCS / "_build" / "gallery"
gallery.write(GALLERY)
family_pages.write(DOCS / "models", GALLERY / "models", GALLERY / "page" / "models")

# Where the pages will be served, if that is known.
SITE = publishing.address()
if SITE:
    pictures = html_favicon, "_build/gallery/blank.png"
    options = publishing.settings(SITE, publishing.version_of(), *pictures)
    extensions += options.pop("extensions")
    globals().update(options)
    html_theme_options |= publishing.theme_settings(SITE, publishing.version_of())

# The tutorials, and the first figure of each for its card.
THUMBNAILS = DOCS / "_build" / "thumbnails"
shutil.rmtree(DOCS / "tutorials", ignore_errors=True)
(DOCS / "tutorials").mkdir()
THUMBNAILS.mkdir(exist_ok=True)
for notebook in sorted((DOCS.parent / "tutorials").glob("*.ipynb")):
    text = notebook.read_text(encoding="utf-8").replace("](../docs/", "](../")
    # A page in a frame is this site's own, and may be told whether it is light or dark.
    read = json.loads(text.replace(' sandbox=\\"allow-scripts\\"', ""))
    cells = read["cells"]
    cells[0]["source"] += ["\n\n", publishing.links_of(notebook.stem)]
    (DOCS / "tutorials" / notebook.name).write_text(json.dumps(read), encoding="utf-8")
    data = [output.get("data", {}) for cell in cells for output in cell.get("outputs", ())]
    figures = [each["image/png"] for each in data if "image/png" in each]
    for figure in figures[:1]:
        (THUMBNAILS / f"{notebook.stem}.png").write_bytes(base64.b64decode(figure))


def require_alternative_texts(app, doctree, page):
    """A picture that nothing says in words is a warning, and with ``-W`` an error."""
    for image in doctree.findall(nodes.image):
        if not image.get("alt"):
            logger.warning("%s has no alternative text", image["uri"], location=image)


def require_no_network(app, exception):
    """A page that loads something from elsewhere is a warning: the pages are read offline too."""
    elsewhere = re.compile(
        r'<(?:script|link(?! rel="canonical")|img|iframe)\b[^>]*(?:src|href)="(?:https?:)?//[^"]*'
    )
    for page in Path(app.outdir).rglob("*.html"):
        for found in elsewhere.findall(page.read_text(encoding="utf-8")):
            logger.warning("%s loads %s", page.name, found)


def require_whole_links(app, exception):
    """A link to a page or a place that the site does not have is a warning."""
    for page, link in [] if exception else links.broken(Path(app.outdir)):
        logger.warning("%s links to %s, which is not there", page, link)


def add_targets_of_sources(app, doctree, page):
    """Ids that the pages of source files link to.

    Such a page names all that its file defines by the module of what was documented first, which
    may be another one: `register_mixer` is of `captum_ssm`, `find_adapter` of `captum_ssm.mixers`.
    """
    wanted = {
        (source, name): f"{module}.{name}"
        for source, found in app.env._viewcode_modules.items()
        if found
        for _, _, used, module in [found]
        for name, where in used.items()
        if where == page
    }
    for signature in doctree.findall(addnodes.desc_signature):
        name = signature.get("fullname") or ""
        module = sys.modules.get(signature.get("module"))
        source = getattr(getattr(module, name.split(".")[0], None), "__module__", None)
        target = wanted.get((source, name))
        if target and target not in signature["ids"]:
            signature["ids"].append(target)


def name_toggles(app, page, template, context, doctree):
    """The theme's toggles in the sidebar are arrows without a word, which screen readers need."""
    make = context.get("generate_toctree_html")

    def named(*args, **kwargs):
        tree = make(*args, **kwargs)
        for toggle in tree.select("details > summary") if hasattr(tree, "select") else ():
            if not toggle.get_text(strip=True):
                toggle["aria-label"] = f"Pages of {toggle.find_parent('li').a.get_text(strip=True)}"
        return tree

    if make:
        context["generate_toctree_html"] = named


def setup(app):
    app.connect("doctree-resolved", add_targets_of_sources)
    app.connect("html-page-context", name_toggles, priority=900)  # after the theme
    app.connect("build-finished", require_whole_links)
    app.connect("doctree-resolved", require_alternative_texts)
    app.connect("build-finished", require_no_network)
