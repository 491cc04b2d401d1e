"""Whether a model's output is random from run to run."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import nn

from captum_ssm.capture.model import extract_logits
from captum_ssm.utils.blocks import bound, contextmanager

# So many runs are compared, until one differs; so many where that was done before.
_RUNS, _AGAIN = 8, 2
# In this thread, what notes that a run drew random numbers.
_NOTED: ContextVar[list[bool] | None] = ContextVar("captum_ssm_random", default=None)


@contextmanager
def noting_draws() -> Iterator[list[bool]]:
    """Note of each run inside the block whether it drew random numbers."""
    noted: list[bool] = []
    with bound(_NOTED, noted):
        yield noted


@contextmanager
def one_run(model: nn.Module) -> Iterator[None]:
    """One run of a model, or of its copy."""
    noted = _NOTED.get()
    if noted is None:
        yield
        return
    before = _states(model)
    yield
    noted.append(any(a != b for a, b in zip(before, _states(model), strict=True)))


def warn_of_randomness(
    module: nn.Module, run: Callable[[], Any], *, was_steady: bool = False
) -> bool:
    """Warn where a model that drew random numbers returns something else when it runs again.

    A layer that is dropped as a whole, or not, returns the same in some pairs of runs. Fewer are
    made where the model ``was_steady`` in an earlier call: its numbers may have no effect at all.

    Returns:
        bool: whether all runs returned the same.
    """
    first, change = extract_logits(run()), 0.0
    if not first.is_floating_point():
        return False
    size = float(torch.linalg.vector_norm(first))
    for _ in range((_AGAIN if was_steady else _RUNS) - 1):
        other = extract_logits(run())
        if other.shape != first.shape:
            return False
        change = float(torch.linalg.vector_norm(other - first)) / max(size, 1e-30)
        if change > 16 * torch.finfo(first.dtype).eps:
            break
    else:
        return True
    training = [name or "the model" for name, m in module.named_modules() if m.training]
    what = f", as {training[0]} is in train mode: call model.eval()" if training else ""
    warnings.warn(
        f"{type(module).__name__} draws random numbers while it runs, and its output "
        f"changes by {change:.1%} from run to run, so the relevance is of one run{what}. "
        "Fix the seed (torch.manual_seed) for the same one again, or average over runs.",
        UserWarning,
        stacklevel=2,
    )
    return False


def _states(model: nn.Module) -> list[Any]:
    # The states of the process's random generators, and of those that modules keep.
    numpy: Any = np.random.get_state()  # noqa: NPY002
    states: list[Any] = [_bytes(torch.get_rng_state()), random.getstate()]
    states.append((numpy[1].tobytes(), *numpy[2:]))
    if torch.cuda.is_initialized():
        states += [_bytes(state) for state in torch.cuda.get_rng_state_all()]
    for module in model.modules():
        # isinstance() of a torch.Generator takes ten times as long.
        generators = [v for v in vars(module).values() if issubclass(type(v), _GENERATORS)]
        states += map(_state, generators)
    return states


_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return _bytes(generator.get_state())
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    is_python = isinstance(generator, random.Random)
    return repr(generator.getstate() if is_python else generator.get_state())


def _bytes(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()
