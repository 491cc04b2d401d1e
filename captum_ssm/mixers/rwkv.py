r"""The WKV mixer of RWKV-4 (Peng et al., 2023; Zimerman et al., eq. 18-21).

In transformers: Rwkv. An exponential average of values with a decay per channel and a bonus for
the current token:

.. math::
    \alpha_{ij} = e^{k_j - (i - 1 - j) w} / d_i \ (j < i), \qquad \alpha_{ii} = e^{u + k_i} / d_i

with :math:`d_i` the sum of the numerators. The running maximum of the exponents is taken out, so
that large keys do not overflow.

The values mix each token with the one before, :math:`v_t = W (\mu \odot x_t + (1 - \mu) \odot
x_{t-1})`, ahead of their projection and so with a share for each feature of the model's width,
not for each channel. Per channel d it is a convolution of :math:`u = W x` with the taps
:math:`(1 - \bar\mu_d, \bar\mu_d)`, the mean of :math:`\mu` weighted by :math:`W_{de}^2`, which
leave the least for features of equal variance. What they leave is added behind the convolution,
like a bias, and is nothing where all features share one mix.
"""

from __future__ import annotations

import torch
from torch import Tensor

from captum_ssm.mixers._base import FrozenMixer, MixerCall, adapts, previous
from captum_ssm.operators import DiagonalOperator, SkipOperator, SumOperator
from captum_ssm.operators.conv import causal_conv


def wkv_operator(key: Tensor, decay: Tensor, bonus: Tensor) -> SumOperator:
    """The operator of WKV.

    Args:
        key (Tensor): k, ``(B, L, D)``.
        decay (Tensor): w > 0, ``(D,)``.
        bonus (Tensor): u, ``(D,)``.

    Returns:
        SumOperator: the past, a recurrence behind a shift by one token, plus the current token.
    """
    B, L, D = key.shape
    # The largest exponent in the state behind token j, max over i <= j of k_i - (j - i) w.
    faded = torch.arange(L, dtype=torch.float64, device=key.device)[:, None] * decay.double()
    peak = ((key.double() + faded).cummax(1).values - faded).to(key.dtype)
    # Everything below is seen one token later, where the state is read.
    before = torch.cat([torch.full_like(peak[:, :1], -torch.inf), peak[:, :-1]], 1)
    top = torch.maximum(before, key + bonus)
    dt = torch.zeros_like(key)
    dt[:, 2:] = (before[:, 2:] - before[:, 1:-1] + decay).clamp(min=0)
    right = torch.zeros_like(key)
    right[:, 1:] = torch.exp(key[:, :-1] - before[:, 1:])
    ones = torch.ones(B, L, 1, 1, dtype=key.dtype, device=key.device)
    past = DiagonalOperator(
        dt=dt,
        right=right,
        A=-torch.ones(D, 1, dtype=key.dtype, device=key.device),
        B=ones,
        C=ones,
        left=torch.exp(before - top),
    )
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
    recurrence = wkv_operator(
        key, torch.exp(call.parameter(module.time_decay)), call.parameter(module.time_first)
    )
    return FrozenMixer(
        recurrence=recurrence,
        inputs=inputs,
        out_proj=lambda y: call.linear(module.output, y),
        out_weight=call.weight(module.output),
        conv=taps,
        conv_bias=values - causal_conv(inputs, taps),
        gate=gate,
        # Eq. 18 has no token shift of the values.
        paper_components=("activation", "gate", "norm"),
    )
