"""A layer that starts close to linear attention (Trockman et al., 2024).

Mimetic Initialization Helps State Space Models Learn to Recall, https://arxiv.org/abs/2410.11135.
"""

from __future__ import annotations

import math

import torch
from transformers import PreTrainedModel


@torch.no_grad()
def mimic_attention(model: PreTrainedModel, layer: int) -> None:
    """Initialize one layer close to linear attention, after Trockman et al. (2024).

    Its state hardly fades, its steps are one, and its keys are read off as its queries are, so that
    tokens read those before them by how alike they are.  Here a key is read one token late, which
    the paper leaves to training: what came before the present symbols is then like what came before
    the symbol to copy.
    """
    mixer = model.backbone.layers[layer].mixer
    mixer.A_log.fill_(math.log(1e-3))
    step = mixer.dt_bias if hasattr(mixer, "dt_bias") else mixer.dt_proj.bias
    step.fill_(math.log(math.expm1(1.0)))
    if hasattr(mixer, "dt_proj"):  # Mamba: x_proj reads steps, keys and queries off its channels
        rank, state, half = mixer.time_step_rank, mixer.ssm_state_size, mixer.intermediate_size // 2
        mixer.dt_proj.weight.zero_()
        early, late = slice(0, half), slice(half, 2 * half)
        mixer.in_proj.weight[late] = mixer.in_proj.weight[early]
        read = mixer.x_proj.weight
        read[-state:, late] = 0
        read[rank:-state, early] = 0
        read[rank:-state, late] = read[-state:, early]
    else:  # Mamba-2: in_proj reads gates, values, keys, queries and steps off the stream
        rows, width = mixer.in_proj.weight, mixer.n_groups * mixer.ssm_state_size
        rows[-mixer.num_heads :] = 0
        early, late = slice(-width, None), slice(-2 * width, -width)
        of_channels = rows[: -mixer.num_heads]
        of_channels[late] = of_channels[early]
    taps, bias = mixer.conv1d.weight, mixer.conv1d.bias  # the last tap is of the present token
    taps[early, :, 0] = 0
    taps[late, :, :-1] = taps[early, :, 1:]
    taps[late, :, -1] = 0
    bias[late] = bias[early]
