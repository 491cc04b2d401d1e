"""Whether the examples of a batch act on one another."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor

from captum_ssm.capture.model import extract_logits
from captum_ssm.capture.request import Request
from captum_ssm.capture.session import on_thrown_away
from captum_ssm.mixers.registry import known_of
from captum_ssm.utils.clones import repeated

# The smallest change that counts, as a share of the output. Products of other shapes, as in experts
# that are sent other tokens, are rounded in another way.
_LEAST = 1e-3


@repeated
def warn_of_shared_examples(request: Request) -> None:
    """Warn where the output of an example changes when the first example is another one.

    Examples act on one another by statistics of a batch in train mode, or by a head that compares
    them. A model is run twice for this, once in each mode (train or eval).

    Args:
        request (Request): of several examples; nothing is done for one.
    """
    known, model = known_of(request.module), request.module
    if request.inputs[0].shape[0] < 2:
        return
    is_training = any(module.training for module in model.modules())
    if is_training not in known.shared:
        known.shared[is_training] = _share(request)
    share = known.shared[is_training]
    if not share > _LEAST:
        return
    in_training = " Some of its modules are in train mode: call model.eval()." * is_training
    warnings.warn(
        f"Examples of a batch act on one another in {type(model).__name__}: the output of others "
        f"changes by {share:.1%} when the first one is another. The relevance of an example is "
        f"spread over its own tokens only.{in_training} Explain one example at a time to leave the "
        "others out.",
        UserWarning,
        stacklevel=2,
    )


def _share(request: Request) -> float:
    # How much the output of other examples changes with the first one, 0 where it has none for
    # each.
    changed = replace(request, inputs=tuple(map(_with_other_first, request.inputs)))
    with torch.no_grad():
        before, after = map(_output, (request, changed))
    if before.shape != after.shape or before.shape[0] != request.inputs[0].shape[0]:
        return 0.0
    return float((before - after)[1:].abs().amax() / before[1:].abs().amax())


def _with_other_first(inputs: Tensor) -> Tensor:
    # The first example is turned around along its first axis.
    other = inputs.clone()
    other[0] = inputs[0].flip(0)
    return other


def _output(request: Request) -> Tensor:
    with on_thrown_away(request) as (of_copies, _):
        return extract_logits(of_copies.run()).detach().double()
