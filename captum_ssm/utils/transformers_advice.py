"""What transformers prints while it loads a model: progress bars, and advice on kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

from captum_ssm.utils.blocks import contextmanager, undo


@contextmanager
def without_advice() -> Iterator[None]:
    """Without progress bars and advice; errors are still printed, and all is as before after it."""
    from transformers.utils import logging

    with ExitStack() as stack, stack:
        undo(stack, logging.set_verbosity, logging.get_verbosity())
        if logging.is_progress_bar_enabled():
            undo(stack, logging.enable_progress_bar)
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        yield
