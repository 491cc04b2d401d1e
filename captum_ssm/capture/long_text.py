"""Whether a wiring that was measured on a text's beginning is that of the whole text.

The graph between the mixers of a long text takes much memory. Where tokens stay apart at its
beginning, the model runs once more without its mixers, with half of the tokens moved in all that
these return and that tables embed: the other tokens have to stay what they were.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.capture.held_run import OTHER_CHOICE, HeldRun
from captum_ssm.capture.model import extract_logits
from captum_ssm.capture.recording import Recording
from captum_ssm.capture.token_steps import STEP
from captum_ssm.mixers.registry import known_of
from captum_ssm.utils.lazy import cached_property
from captum_ssm.utils.plain_graph import plain_graph
from captum_ssm.wiring.mixing_test import halves

# The smallest change that counts, of the largest one.
_LEAST = 1e-3
# Tokens that are moved together where they read their neighbors, of which a quarter may be read.
_BLOCK = 64
# Tokens whose changes are looked at together.
_TOGETHER = 256
# Numbers of an output that may be made twice; of a longer one no more than its tokens is looked at.
_MOST = 1 << 27


class _ActsOnOthersError(Exception):
    """A token changed that was not moved, or it is not known which tokens a tensor holds."""


class _AllSeenError(Exception):
    """All was compared: the rest of the run would take as much memory as the output."""


def stays_apart(recording: Recording, *, reads_neighbors: bool = False) -> bool:
    """Whether no token acts on another between the mixers of a run, however far they are apart.

    It is looked at once for what a run calls, up to the longest text. Where tokens read their
    neighbors, as by a token shift, whether none acts on one farther away.
    """
    known, made_of = known_of(recording.request.module), recording.operations
    tokens = recording.shape[1]
    if any(made_of <= seen and tokens <= most for seen, most in known.long.items()):
        return True
    results: dict[str, list[object]] = {}
    for call in recording.calls:
        results.setdefault(call.path, []).append(call.result)
    ends = [call.given_tokens() for call in recording.calls]
    output = extract_logits(recording.output)
    if output.numel() <= _MOST:
        ends.append(output)
    block, reach = (_BLOCK, _BLOCK // 4) if reads_neighbors else (1, 0)
    blocks = halves(-(-tokens // block), torch.Generator().manual_seed(0))
    try:
        for half in islice(blocks, 2):  # one, and the rest
            with suppress(_AllSeenError), ExitStack() as copies, torch.no_grad(), plain_graph():
                _MovedRun(
                    recording.request,
                    copies,
                    with_output=True,
                    results=results,
                    before=list(ends),
                    chosen=half.repeat_interleave(block)[:tokens],
                    reach=reach,
                )
    except (_ActsOnOthersError, *OTHER_CHOICE):
        return False
    known.long[made_of] = tokens
    return True


@dataclass
class _MovedRun(HeldRun):
    # A run in which some tokens are moved (T,), and others, not next to these, have to stay.
    before: list[Tensor] = field(kw_only=True)
    chosen: Tensor = field(kw_only=True)
    reach: int = field(kw_only=True)

    def _start(self, value: Tensor) -> Tensor:
        shape = [1] * value.dim()
        shape[self._axis(value)] = -1
        generator = torch.Generator().manual_seed(0)
        step = STEP * value.std() * torch.randn(value.shape[-1], generator=generator).to(value)
        return torch.where(self.chosen.view(shape).to(value.device), value + step, value)

    def _end(self, name: str, value: Tensor) -> None:
        before, axis = self.before.pop(0), self._axis(value)
        if before.shape != value.shape:
            raise _ActsOnOthersError
        pairs = zip(before.split(_TOGETHER, axis), value.split(_TOGETHER, axis), strict=True)
        changes = [(a - b).abs().movedim(axis, 0).flatten(1).amax(1) for a, b in pairs]
        change = torch.cat(changes).cpu()
        if bool((change[self._stays] > _LEAST * change[self.chosen].amax()).any()):
            raise _ActsOnOthersError
        if not self.before:
            raise _AllSeenError

    @cached_property
    def _stays(self) -> Tensor:
        near = F.max_pool1d(self.chosen.float()[None], 2 * self.reach + 1, 1, self.reach)[0]
        return near == 0

    def _axis(self, value: Tensor) -> int:
        # The axis of the tokens.
        axes = [d for d in range(1, value.dim()) if value.shape[d] == len(self.chosen)]
        if not axes:
            raise _ActsOnOthersError
        return axes[0]
