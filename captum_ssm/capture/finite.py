"""Whether numbers are finite, and what is to blame where they are not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.errors import InputError
from captum_ssm.mixers import MixerCall
from captum_ssm.utils.nested import tensors_in


def check_finite(call: MixerCall) -> None:
    """Raise `InputError` where a mixer returned NaN or Inf."""
    if not all(bool(torch.isfinite(end)) for end in torch.aminmax(call.output)):
        raise InputError(
            f"the output of {call.path} holds NaN or Inf: look for them in the model's weights or "
            "in the inputs, or run the model in a wider dtype."
        )


def check_relevance(relevance: Any, model: nn.Module) -> None:
    """Raise `InputError` where relevance holds NaN or Inf, naming the weights that do.

    A score may be finite all the same: its gradient, or a map, multiplies such a weight by zero.
    """
    if all(is_finite(x) for x in tensors_in(relevance)):
        return
    weights = (*model.named_parameters(), *model.named_buffers())
    names = [n for n, x in weights if not (x.is_meta or is_finite(x))]
    if names:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        reason = f"found such numbers in {', '.join(names[:3])}{more} of the model; expected finite"
        reason += " weights there: a weight that is not used in the output is still multiplied by 0"
    else:
        reason = "all weights are finite, so numbers overflow on the way; run the model in a wider"
        reason += " dtype"
    raise InputError(f"the relevance holds NaN or Inf: {reason}.")


def is_finite(x: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor Inf; numbers of one byte are taken for finite."""
    if not x.is_floating_point() or x.itemsize < 2 or x.numel() == 0:
        return True
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(x.detach()))
