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
    for item in _of_products(items):
        item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    left_out = [item for item in items if item.get_closest_marker("cuda")]
    items[:] = [item for item in items if item not in set(left_out)]
    config.hook.pytest_deselected(items=left_out)


def _of_products(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    # Of a test of each method, or family, in several other respects: what of the product is left to
    # slow runs. Of three methods one stays for each of the others, another one for the next.
    tests: dict[Any, dict[pytest.Item, tuple[str, str]]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is None or item.get_closest_marker("slow") or item.originalname == EXACT:
            continue
        axis = next((name for name in ("method", "family") if name in callspec.params), None)
        if axis is None or len(callspec.params) == 1:
            continue
        value = callspec.params[axis]
        one = value if isinstance(value, str) else getattr(value, "__name__", str(value))
        test = tests.setdefault((item.path, item.originalname), {})
        test[item] = one, callspec.id.replace(one, "", 1)
    for test in tests.values():
        ones, others = (list(dict.fromkeys(pair[k] for pair in test.values())) for k in (0, 1))
        step = min(3, len(ones), len(others))
        for item, (one, other) in test.items():
            if (ones.index(one) + others.index(other)) % step:
                yield item


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
