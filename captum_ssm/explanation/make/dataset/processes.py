"""Which of several processes this one is."""

from __future__ import annotations

import os
from typing import Any

from captum_ssm.errors import InputError


def this_process(process: Any, accelerator: Any) -> tuple[int, int]:
    """The number of this process, and how many there are.

    Args:
        process (tuple, optional): ``(k, n)``, as the caller says.
        accelerator (accelerate.Accelerator, optional): in place of it. With neither, what
            ``torchrun`` and ``accelerate launch`` tell each process (``RANK``, ``WORLD_SIZE``).

    Raises:
        InputError: for what is not one of n processes.
    """
    if accelerator is not None:
        return accelerator.process_index, accelerator.num_processes
    if process is None:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    numbers = tuple(process) if isinstance(process, (tuple, list)) else ()
    is_right = len(numbers) == 2 and all(type(one) is int for one in numbers)
    if not is_right or not 0 <= numbers[0] < numbers[1]:
        raise InputError(f"process is {process!r}; expected (k, n), 0 <= k < n.")
    return numbers[0], numbers[1]
