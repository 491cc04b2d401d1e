"""Sphinx configuration. Build with ``sphinx-build -W docs docs/_build/html``."""

import shutil
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]

import tables  # noqa: E402

import captum_ssm  # noqa: E402

project = "captum_ssm"
author = "the captum_ssm authors"
release = version = captum_ssm.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build"]
nb_execution_mode = "off"
nb_output_stderr = "remove"
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say them, with shapes
napoleon_use_rtype = False
html_title = f"captum_ssm {version}"

# Captum's theme, with room for wide tables.
html_theme = "alabaster"
html_theme_options = {
    "description": "Attribution for state-space models and gated linear RNNs, with Captum",
    "fixed_sidebar": True,
    "page_width": "1240px",
    "body_max_width": "auto",
    "sidebar_width": "270px",
    "show_powered_by": False,
    "show_relbar_bottom": True,
}
html_sidebars = {"**": ["about.html", "searchfield.html", "localtoc.html", "navigation.html"]}
html_static_path = ["_static"]
html_show_copyright = False
html_copy_source = False
pygments_style = "sphinx"

# The measured tables are read from the benchmarks' results at every build.
tables.write(DOCS / "_build" / "tables")

# The tutorials, with their outputs where `make notebooks` has run them.
EXECUTED = DOCS.parent / "out" / "notebooks"
shutil.rmtree(DOCS / "tutorials", ignore_errors=True)
(DOCS / "tutorials").mkdir()
for notebook in sorted((DOCS.parent / "tutorials").glob("*.ipynb")):
    executed = EXECUTED / notebook.name
    fresh = executed.exists() and executed.stat().st_mtime >= notebook.stat().st_mtime
    shutil.copy2(executed if fresh else notebook, DOCS / "tutorials")
