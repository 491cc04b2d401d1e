r"""The WKV mixer of RWKV-4 (Peng et al., 2023; Zimerman et al., eq. 18-21).

In transformers: Rwkv. An exponential average of values with a decay per channel and a bonus for
the current token:

.. math::
    \alpha_{ij} = e^{k_j - (i - 1 - j) w} / d_i \ (j < i), \qquad \alpha_{ii} = e^{u + k_i} / d_i

with :math:`d_i` the sum of the numerators. The running maximum of the exponents is subtracted,
so that large keys do not overflow.

The values mix each token with the one before, :math:`v_t = W (\mu \odot x_t + (1 - \mu) \odot
x_{t-1})`, before their projection, so :math:`\mu` has a value per input feature e, not per
channel d. A convolution of :math:`u = W x` with the taps :math:`(1 - \bar\mu_d, \bar\mu_d)` per
channel approximates this, with :math:`\bar\mu_d` the mean of :math:`\mu` weighted by
:math:`W_{de}^2`: the smallest residual for features of equal variance. The residual is added after
the convolution, like a bias. It is zero if all features have the same :math:`\mu`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from captum_ssm.kernels.convolution import causal_conv
from captum_ssm.mixers._call import MixerCall
from captum_ssm.mixers._frozen_mixer import FrozenMixer
from captum_ssm.mixers._parts import one_state, previous
from captum_ssm.mixers._registry import adapts
from captum_ssm.operators import DiagonalOperator, SkipOperator, SumOperator


def wkv_peak(key: Tensor, decay: Tensor) -> Tensor:
    """The largest exponent in the state after token j, max over i <= j of k_i - (j - i) w.

    Args:
        key (Tensor): k, ``(B, L, D)``.
        decay (Tensor): w > 0, ``(D,)``.
    """
    L = key.shape[1]
    faded = torch.arange(L, dtype=torch.float64, device=key.device)[:, None] * decay.double()
    return ((key.double() + faded).cummax(1).values - faded).to(key.dtype)


def wkv_state(key: Tensor, decay: Tensor) -> DiagonalOperator:
    """The recurrence of WKV's numerator, of which the largest exponent is taken out."""
    peak = wkv_peak(key, decay)
    dt = torch.zeros_like(key)
    dt[:, 1:] = (peak[:, 1:] - peak[:, :-1] + decay).clamp(min=0)
    return one_state(dt, torch.exp(key - peak))


def wkv_operator(key: Tensor, decay: Tensor, bonus: Tensor) -> SumOperator:
    """WKV of k ``(B, L, D)``, w > 0 ``(D,)`` and u ``(D,)``.

    It is the past, a recurrence after a shift by one token, plus the current token.
    """
    D = key.shape[-1]
    peak = wkv_peak(key, decay)
    # The state is read one token later: shift by one.
    before = torch.cat([torch.full_like(peak[:, :1], -torch.inf), peak[:, :-1]], 1)
    top = torch.maximum(before, key + bonus)
    dt = torch.zeros_like(key)
    dt[:, 2:] = (before[:, 2:] - before[:, 1:-1] + decay).clamp(min=0)
    right = torch.zeros_like(key)
    right[:, 1:] = torch.exp(key[:, :-1] - before[:, 1:])
    past = one_state(dt, right, left=torch.exp(before - top))
    own = torch.exp(key + bonus - top)
    total = past.matvec(torch.ones_like(key)) + own
    shift = torch.zeros(D, 2, dtype=key.dtype, device=key.device)
    shift[:, 0] = 1.0
    return SumOperator((past.compose(left=1 / total, conv=shift), SkipOperator(own / total)))


@adapts("RwkvSelfAttention")
def freeze_wkv(call: MixerCall) -> FrozenMixer:
    """RWKV-4's time mixing."""
    module = call.module
    x = call.tokens("hidden")
    shifted = previous(x)

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
    return FrozenMixer(
        recurrence=wkv_operator(key, decay, call.parameter(module.time_first)),
        memory=lambda: wkv_state(key, decay),
        inputs=inputs,
        out_proj=lambda y: call.linear(module.output, y),
        out_weight=call.weight(module.output),
        conv=taps,
        conv_bias=values - causal_conv(inputs, taps),
        gate=gate,
        # Eq. 18 has no token shift of the values, which is the convolution here.
        paper_components=("activation", "gate", "norm"),
    )
