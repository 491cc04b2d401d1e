"""Adapters: one small file per architecture family, from a recorded call to a frozen mixer."""

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
