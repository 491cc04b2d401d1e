"""What all tests share."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

# That mixers are exact is tested of every family, everywhere.
EXACT = "test_the_unified_operator_and_the_biases_are_the_mixer"

# Nothing that imports leave is garbage, and looking for it takes a quarter of their time.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but rarely: each time it looks through a million objects."""
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave families like others to slow runs, and out what needs a CUDA device without one."""
    of_family = [
        (item.callspec.params["family"], item)
        for item in items
        if "family" in getattr(getattr(item, "callspec", None), "params", ())
    ]
    if of_family:
        from families import ALIKE  # with all of transformers, which tests of kernels do not need

        for family, item in of_family:
            if family in ALIKE and item.originalname != EXACT:
                item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("cuda")]
    items[:] = [item for item in items if item not in set(left_out)]
    config.hook.pytest_deselected(items=left_out)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors cost a hundred times more where idle threads wait for a busy core.

    A test of threading sets its own number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test starts from the same random state.

    That of the CPU: torch.manual_seed would also keep a stack trace per kind of device and test.
    """
    torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Words w3, w4, ... as ids 3, 4, ..., after three special tokens, for the tiny models."""
    from models import VOCABULARY, word_tokenizer

    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, VOCABULARY))]
    numbered = {word: i for i, word in enumerate(words)}
    return word_tokenizer(numbered, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
