"""A page inside a page of the documentation is light or dark as that one is, at any time."""

from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pages
import pytest
from folders import ROOT

from captum_ssm.explanation.page import page_html

OUTER = """<!doctype html><html data-theme="{theme}"><script src="living.js"></script>
<iframe src="page.html" width="600" height="400"></iframe></html>"""
THEME = "document.querySelector('.captum-page').dataset.theme"


@pytest.fixture
def served(tmp_path):
    """A folder as a site: pages that are opened as files may not look into their frames."""
    script = (ROOT / "docs/_static/living.js").read_text(encoding="utf-8")
    (tmp_path / "living.js").write_text(script, encoding="utf-8")
    (tmp_path / "page.html").write_text(page_html(pages.explanation()), encoding="utf-8")

    class Quiet(SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *args):
            """Nothing: the console is the tests'."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield tmp_path, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("system", ["light", "dark"])
def test_a_frame_follows_the_page_around_it(browser, served, system):
    folder, address = served
    other = {"light": "dark", "dark": "light"}[system]
    (folder / "index.html").write_text(OUTER.format(theme=other))
    page = browser.new_page(color_scheme=system)
    page.goto(f"{address}/index.html")
    (inner,) = page.frames[1:]
    for theme in (other, system, other):
        page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        inner.wait_for_function(f"{THEME} === '{theme}'", timeout=5000)
    page.close()


def test_a_frame_of_a_file_follows_the_system(browser, served):
    folder, _ = served
    (folder / "index.html").write_text(OUTER.format(theme="light"))
    page = browser.new_page(color_scheme="dark")
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto((folder / "index.html").as_uri())
    (inner,) = page.frames[1:]
    inner.wait_for_function(f"{THEME} === 'dark'", timeout=5000)
    assert not errors
    page.close()
