"""What the scripts on text share: what stands for a removed token, and padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def unknown_id(tokenizer: Any) -> int:
    """The id of what stands for a removed token: UNK, or the end of text where there is none."""
    for token in (tokenizer.unk_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id):
        if token is not None:
            return int(token)
    raise SystemExit("the tokenizer has no unk, eos or pad token to put for removed tokens.")


def padded(texts: Sequence[Sequence[int]], padding: int) -> tuple[Tensor, Tensor]:
    """Ids ``(B, L)``, padded on the right, and their mask of ones and zeros."""
    length = max(len(ids) for ids in texts)
    ids = torch.tensor([[*text, *[padding] * (length - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (length - len(text)) for text in texts])
    return ids, mask
