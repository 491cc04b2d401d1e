"""What all tests share."""

import gc
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch

# In fast runs, a product of methods (or families) and other cases keeps one case in so many.
KEPT_ONE_IN = 4
MANY = 180  # cases of one test, such as shapes times dtypes

TESTS = str(Path(__file__).parent)

# Nothing that imports leave is garbage, and looking for it takes a quarter of their time.
gc.disable()


def pytest_collection_finish() -> None:
    """Collect garbage from now on, but rarely."""
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True, scope="session")
def few_functions() -> Iterator[None]:
    """A search for scans looks at functions that may be one, that tests define, or that are new.

    A process of tests has a hundred thousand, and in each of a thousand searches the same few of
    those that were imported before may be scans. They are frozen: the collector looks at no other.
    """
    from captum_ssm.discovery.scans import calls

    may_scan = {f for f in calls.candidate_functions() if type(f) is FunctionType}
    looked = calls.all_functions()
    known = may_scan | {f for f in looked if f.__code__.co_filename.startswith(TESTS)}
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "frozen_functions", lambda: known)
        # Counting a million frozen objects takes as long as a search.
        patch.setattr(gc, "get_freeze_count", lambda: 1)
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as slow what fast runs leave out, and deselect what needs a missing CUDA device.

    A test that has to run in full, always, says so: ``@pytest.mark.every_case``.
    """
    thinned = [item for item in items if not item.get_closest_marker("every_case")]
    each = (_of_similar_families, _of_other_families, _thinned_products, _of_many_cases)
    for left_out_of in each:
        for item in left_out_of(thinned):
            item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    on_cuda = {item for item in items if item.get_closest_marker("cuda")}
    items[:] = [item for item in items if item not in on_cuda]
    config.hook.pytest_deselected(items=on_cuda)


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _of_similar_families(items: list[pytest.Item]) -> list[pytest.Item]:
    """The cases of families that are explained by the adapters of other families in the tests."""
    of_family = [item for item in items if "family" in _parameters(item)]
    if not of_family:
        return []
    from families import ALIKE  # It imports all of transformers, which kernels' tests do not need.

    return [item for item in of_family if _parameters(item)["family"] in ALIKE]


def _of_other_families(items: list[pytest.Item]) -> list[pytest.Item]:
    """The cases that fast runs leave out of tests of one family each.

    A third of the families stay in each test, and a third of a file's tests for each family.
    """
    files: dict[Any, tuple[dict[str, int], dict[str, int]]] = {}
    left_out = []
    for item in items:
        if list(_parameters(item)) != ["family"] or item.get_closest_marker("slow"):
            continue
        tests, families = files.setdefault(item.path, ({}, {}))
        test = tests.setdefault(item.originalname, len(tests))
        family = families.setdefault(item.callspec.id, len(families))
        if (test + family) % 3:
            left_out.append(item)
    return left_out


def _of_many_cases(items: list[pytest.Item]) -> list[pytest.Item]:
    """The cases that fast runs leave out of tests of very many: two of three, all over them."""
    tests: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if not item.get_closest_marker("slow"):
            tests.setdefault((item.path, item.originalname), []).append(item)
    many = (cases for cases in tests.values() if len(cases) > MANY)
    # Sideways, so that no axis of three loses a value.
    return [item for cases in many for k, item in enumerate(cases) if (k + k // 3 + k // 9) % 3]


def _thinned_products(items: list[pytest.Item]) -> list[pytest.Item]:
    """The cases that fast runs leave out of tests of methods (or families) times other cases.

    The cases that stay lie on diagonals, so that each method and each other case is still run:

    ============  =======  ======  ==========
    .             no mask  a mask  in a tuple
    ============  =======  ======  ==========
    MambaLRP      runs
    MambaRollout                   runs
    LaTIM                  runs
    RawAttention  runs
    ============  =======  ======  ==========
    """
    products: dict[Any, list[tuple[pytest.Item, str, str]]] = {}
    for item in items:
        parameters = _parameters(item)
        axis = next((name for name in ("method", "family") if name in parameters), None)
        if axis is None or len(parameters) == 1 or item.get_closest_marker("slow"):
            continue
        value = parameters[axis]
        row = value if isinstance(value, str) else getattr(value, "__name__", str(value))
        column = item.callspec.id.replace(row, "", 1)
        products.setdefault((item.path, item.originalname), []).append((item, row, column))
    left_out = []
    for cases in products.values():
        rows = list(dict.fromkeys(row for _, row, _ in cases))
        columns = list(dict.fromkeys(column for _, _, column in cases))
        step = min(KEPT_ONE_IN, len(rows), len(columns))
        for item, row, column in cases:
            is_on_a_diagonal = (rows.index(row) + columns.index(column)) % step == 0
            if not is_on_a_diagonal:
                left_out.append(item)
    return left_out


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


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    from captum_ssm.mixers import registry

    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))


@pytest.fixture(scope="module")
def mamba() -> torch.nn.Module:
    """A tiny random Mamba, which the tests of a file share."""
    from models import tiny

    return tiny("mamba")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Words w3, w4, ... as ids 3, 4, ..., after three special tokens, for the tiny models."""
    from models import VOCABULARY, word_tokenizer

    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(3, VOCABULARY))]
    numbered = {word: i for i, word in enumerate(words)}
    return word_tokenizer(numbered, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
