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

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nb_execution_mode = "off"
nb_output_stderr = "remove"
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say them, with shapes
napoleon_use_rtype = False
html_theme = "furo"
html_title = f"captum_ssm {version}"

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
