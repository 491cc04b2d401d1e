"""What transformers prints while it loads a model: progress bars, and advice on kernels."""

from __future__ import annotations

from collections.abc import Iterator

from captum_ssm.utils.blocks import contextmanager


@contextmanager
def without_advice() -> Iterator[None]:
    """Without progress bars and advice; errors are still printed, and all is as before after it."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
