"""From a recorded call of a mixer to a frozen mixer, by an adapter.

``families`` has the adapters, one file per architecture family; ``parts`` is what they share:
padding, convolutions, norms. An adapter is found in the ``registry``, is given a ``call`` and
returns a ``frozen_mixer``. ``reordered`` puts a mixer's tokens into the model's order,
``components`` are the parts that a map can include, ``past`` is what a mixer keeps of earlier
tokens, and ``memory`` its state. ``linear_layers`` reads layers that others quantized or wrapped.
"""

from captum_ssm.mixers.call import MixerCall
from captum_ssm.mixers.components import COMPONENTS, FORMULATIONS, check_components
from captum_ssm.mixers.families import attention as attention
from captum_ssm.mixers.families import convolved_attention as convolved_attention
from captum_ssm.mixers.families import delta as delta
from captum_ssm.mixers.families import fla as fla
from captum_ssm.mixers.families import griffin as griffin
from captum_ssm.mixers.families import lightning as lightning
from captum_ssm.mixers.families import mamba3 as mamba3
from captum_ssm.mixers.families import rwkv as rwkv
from captum_ssm.mixers.families import s6 as s6
from captum_ssm.mixers.families import short_convolution as short_convolution
from captum_ssm.mixers.families import ssd as ssd
from captum_ssm.mixers.families import vision as vision
from captum_ssm.mixers.families import xlstm as xlstm
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.mixers.parts import (
    ShortConv,
    activation_factor,
    masked_tokens,
    rms_factor,
    short_conv,
)
from captum_ssm.mixers.registry import find_adapter, find_mixers, register_mixer, registered

__all__ = [
    "COMPONENTS",
    "FORMULATIONS",
    "FrozenMixer",
    "MixerCall",
    "ShortConv",
    "activation_factor",
    "check_components",
    "find_adapter",
    "find_mixers",
    "masked_tokens",
    "register_mixer",
    "registered",
    "rms_factor",
    "short_conv",
]
