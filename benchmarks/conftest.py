"""What the benchmarks' tests share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the library's tests: idle threads that wait for a busy core cost far more than they do.

    It is also what torchrun gives each process, whose numbers are compared with.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
