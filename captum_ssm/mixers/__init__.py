"""Adapters: one small file per architecture family, from a recorded call to a frozen operator."""

from captum_ssm.mixers import s6 as s6
from captum_ssm.mixers._base import (
    COMPONENTS,
    FORMULATIONS,
    FrozenMixer,
    MixerCall,
    check_components,
    find_adapter,
    find_mixers,
    register_mixer,
    registered,
)

__all__ = [
    "COMPONENTS",
    "FORMULATIONS",
    "FrozenMixer",
    "MixerCall",
    "check_components",
    "find_adapter",
    "find_mixers",
    "register_mixer",
    "registered",
]
