r"""The WKV mixer of RWKV-4 (Peng et al., 2023; Zimerman et al., eq. 18-21).

In transformers: Rwkv. The average is in :mod:`captum_ssm.operators.wkv`. Its values mix each token
with the one before, :math:`v_t = W (\mu \odot x_t + (1 - \mu) \odot x_{t-1})`, before their
projection, so :math:`\mu` has a value per input feature e, not per channel d. A convolution of
:math:`u = W x` with the taps :math:`(1 - \bar\mu_d, \bar\mu_d)` per channel approximates this, with
:math:`\bar\mu_d` the mean of :math:`\mu` weighted by :math:`W_{de}^2`: the smallest residual for
features of equal variance. The residual is added after the convolution, like a bias. It is zero if
all features have the same :math:`\mu`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from captum_ssm.kernels.convolution import causal_conv
from captum_ssm.mixers.call import MixerCall
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.mixers.parts import previous, projection
from captum_ssm.mixers.past import Past, check_state
from captum_ssm.mixers.registry import adapts
from captum_ssm.operators import LatterOperator, TokenOperator, wkv_operator, wkv_state


@adapts("RwkvSelfAttention")
def freeze_wkv(call: MixerCall) -> FrozenMixer:
    """RWKV-4's time mixing."""
    module = call.module
    x = call.tokens("hidden")
    shifted = previous(x, call.before(x, 1))

    def project(layer: torch.nn.Module, mix: Tensor) -> Tensor:
        share = call.parameter(mix)
        return call.linear(layer, x * share + shifted * (1 - share))

    key = project(module.key, module.time_mix_key)
    inputs = call.linear(module.value, x)
    squares = call.weight(module.value).square()
    total = squares.sum(1).clamp(min=1e-30)
    share = squares @ call.parameter(module.time_mix_value).flatten() / total
    taps = torch.stack([1 - share, share], -1)
    values = project(module.value, module.time_mix_value)
    gate = torch.sigmoid(project(module.receptance, module.time_mix_receptance))
    decay = torch.exp(call.parameter(module.time_decay))
    state, bonus = call.state(), call.parameter(module.time_first)
    if state is None:
        recurrence: TokenOperator = wkv_operator(key, decay, bonus)
    else:
        before = call.before(key, 1)
        assert before is not None
        recurrence = LatterOperator(wkv_operator(torch.cat([before, key], 1), decay, bonus), 1)
    return FrozenMixer(
        recurrence=recurrence,
        state=state,
        memory=lambda: wkv_state(key, decay),
        inputs=inputs,
        **projection(call, module.output),
        conv=taps,
        conv_bias=values - causal_conv(inputs, taps),
        gate=gate,
        # Eq. 18 has no token shift of the values, which is the convolution here.
        paper_components=("activation", "gate", "norm"),
    )


def past_of(module: Any, arguments: dict[str, Any], tokens: Tensor) -> Past | None:
    """What RWKV's list of states holds for a layer: an average of values, as one token before.

    Its numerator, denominator and largest exponent are those of one token, whose value is the
    average and whose key is the logarithm of the denominator.
    """
    states = arguments.get("state")
    if not isinstance(states, (list, tuple)) or len(states) != 5:
        return None
    shift, numerator, total, peak = (x[:, None, :, module.layer_id].clone() for x in states[1:])
    if not bool(total.any()):
        return None
    check_state("states of examples", shift, (tokens.shape[0], 1, tokens.shape[2]))
    return Past((shift, peak + total.log()), numerator / total)


freeze_wkv.past_of = past_of  # type: ignore[attr-defined]
