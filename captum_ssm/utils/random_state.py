"""The states of the process's random generators."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import torch

from captum_ssm.utils.blocks import contextmanager, undo


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Put back what the block draws from Python's, NumPy's and PyTorch's own generators.

    Those of all GPUs are among them, as a model may be spread over several.
    """
    python, host = random.getstate(), torch.get_rng_state()
    numpy = np.random.get_state()  # noqa: NPY002
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def put_back() -> None:
        torch.set_rng_state(host)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        if devices:
            torch.cuda.set_rng_state_all(devices)

    with ExitStack() as stack, stack:
        undo(stack, put_back)
        yield
