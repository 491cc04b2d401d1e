"""How a module takes its tokens and returns them, in other forms than ``(B, L, E)`` and alone."""

from __future__ import annotations

from typing import Any

from captum_ssm.utils.nested import map_tensors, tensors_in

# In place of the channels' axis, of tokens (L, B, E).
TOKENS_FIRST = 2


def tokens_moved(values: Any, source: int, destination: int) -> Any:
    """Nested values with an axis of the tokens among them moved, of three axes or more.

    The tokens are the first of these. The axis is that of the channels, or ``TOKENS_FIRST``.
    """
    is_tokens = (x for x in tensors_in(values) if x.dim() >= 3 and x.is_floating_point())
    tokens = None if source == destination else next(is_tokens, None)
    if tokens is None:
        return values
    is_first = TOKENS_FIRST in (source, destination)
    moved = tokens.transpose(0, 1) if is_first else tokens.movedim(source, destination)
    return map_tensors(lambda x: moved if x is tokens else x, values)
