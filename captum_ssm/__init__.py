"""captum_ssm: attribution for state-space models and gated linear RNNs, as a Captum plugin."""

from captum_ssm import interventions as interventions
from captum_ssm import metrics as metrics
from captum_ssm import visualization as visualization
from captum_ssm._cost import Estimate, estimate
from captum_ssm._errors import (
    InputError,
    ReconstructionError,
    TargetError,
    UnsupportedModelError,
)
from captum_ssm._hidden_attention import hidden_attention, token_grids
from captum_ssm._memory import MemoryLimitError
from captum_ssm._receptive_field import Area, ReceptiveField, effective_receptive_field
from captum_ssm._supported import MixerSupport, Support, supported
from captum_ssm.attr import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    UnifiedImplicitAttention,
)
from captum_ssm.generation import SSMLLMAttribution
from captum_ssm.mixers import FrozenMixer, MixerCall, register_mixer
from captum_ssm.scans import register_scan

__version__ = "0.1.0"

__all__ = [
    "Area",
    "Estimate",
    "FrozenMixer",
    "InputError",
    "LaTIM",
    "MambaAttribution",
    "MambaLRP",
    "MambaRollout",
    "MemoryLimitError",
    "MixerCall",
    "MixerSupport",
    "RawAttention",
    "ReceptiveField",
    "ReconstructionError",
    "SSMLLMAttribution",
    "Support",
    "TargetError",
    "UnifiedImplicitAttention",
    "UnsupportedModelError",
    "effective_receptive_field",
    "estimate",
    "hidden_attention",
    "register_mixer",
    "register_scan",
    "supported",
    "token_grids",
]
