"""A browser, for the page and the widget, and models that many tests explain."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from models import VOCABULARY, tiny, word_tokenizer

from captum_ssm import examples


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium to open pages with")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


@pytest.fixture(scope="module")
def words() -> Any:
    """The tokenizer of ``w0``, ``w1``, ..., a token each."""
    return word_tokenizer({f"w{i}": i for i in range(VOCABULARY)})


@pytest.fixture(scope="module")
def stories() -> Any:
    """A model that was trained, and its tokenizer."""
    return examples.load("stories-mamba")
