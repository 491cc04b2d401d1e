"""A tiny model on disk."""

import pytest
from models import VOCABULARY, tiny, word_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> str:
    """A tiny model and a tokenizer of words for it."""
    path = str(tmp_path_factory.mktemp("model"))
    tiny().save_pretrained(path)
    word_tokenizer({f"w{i}": i for i in range(VOCABULARY)}).save_pretrained(path)
    return path
