"""The widget in a real JupyterLab: its keys are not the notebook's, and it follows the theme.

It needs a ``jupyter-lab`` on the path, of any environment (``pip install jupyterlab``): anywidget's
own part of it is this environment's.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import nbformat
import pytest
from folders import ROOT
from nbformat.v4 import new_code_cell, new_notebook

LAB = shutil.which("jupyter-lab")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(LAB is None, reason="no jupyter-lab on the path"),
]
CODE = """\
from captum_ssm import examples, explain

model, tokenizer = examples.load("stories-mamba")
explain(model, tokenizer, "The dogs near the bird", methods=["mamba-lrp", "rollout"])"""
SECONDS = 120


@pytest.fixture
def lab(tmp_path):
    """The address of a notebook in a JupyterLab of its own, with a kernel of this Python."""
    kernel = tmp_path / "kernels" / "here"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "here", "language": "python"}
    (kernel / "kernel.json").write_text(json.dumps(spec))
    notebook = new_notebook(
        cells=[new_code_cell(CODE), new_code_cell("1 + 1")],
        metadata={"kernelspec": {"name": "here", "display_name": "here", "language": "python"}},
    )
    (tmp_path / "work").mkdir()
    nbformat.write(notebook, tmp_path / "work" / "why.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    places = {name: str(tmp_path / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR")}
    places |= {"JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings")}
    places |= {"JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces")}
    extensions = os.pathsep.join([str(tmp_path), str(Path(sys.prefix) / "share" / "jupyter")])
    server = subprocess.Popen(
        [LAB, "--no-browser", "--allow-root", f"--port={port}", "--IdentityProvider.token=t"],
        cwd=tmp_path / "work",
        env=os.environ | places | {"JUPYTER_PATH": extensions, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}/lab/tree/why.ipynb?token=t"
    try:
        _wait_for(address)
        yield address
    finally:
        server.terminate()
        server.wait(30)


def _wait_for(address):
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        with suppress(URLError, ConnectionError), urlopen(address, timeout=5):
            return
        time.sleep(0.2)
    pytest.fail(f"JupyterLab did not start in {SECONDS} seconds")


def test_keys_and_themes(browser, lab):
    tab = browser.new_page(viewport={"width": 1300, "height": 950})
    tab.set_default_timeout(1000 * SECONDS)
    tab.goto(lab)
    tab.locator(".jp-CodeCell:visible").first.click()
    tab.get_by_text("here | Idle").wait_for()
    tab.keyboard.press("Shift+Enter")
    page = tab.locator(".captum-page")
    page.locator(".text").wait_for()
    method = page.locator("[aria-label='Method'] [aria-checked=true]")
    assert method.inner_text() == "MambaLRP"
    # The notebook's m makes a cell Markdown, and its d d deletes one.
    page.locator(".question").click()
    tab.keyboard.press("m")
    tab.keyboard.press("d")
    assert page.get_attribute("data-theme") == "dark"
    tab.keyboard.press("d")
    assert method.inner_text() == "Mamba Rollout"
    assert tab.locator(".jp-CodeCell:visible").count() == 2
    assert tab.locator(".jp-MarkdownCell:visible").count() == 0
    # The widget follows the notebook's theme while it is shown.
    assert page.get_attribute("data-theme") == "light"
    tab.locator(".lm-MenuBar-item", has_text="Settings").click()
    tab.locator(".lm-Menu-item", has_text="Theme").first.hover()
    tab.locator(".lm-Menu-item", has_text="JupyterLab Dark").first.click()
    tab.locator(".captum-page[data-theme=dark]").wait_for()
    tab.close()
