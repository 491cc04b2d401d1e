"""The attribution methods, one a file."""

from captum_ssm.attr._base import TokenAttribution, methods
from captum_ssm.attr._maps import MapChoices
from captum_ssm.attr._options import Option
from captum_ssm.attr.latim import LaTIM
from captum_ssm.attr.mamba_attribution import MambaAttribution
from captum_ssm.attr.mamba_lrp import MambaLRP
from captum_ssm.attr.raw_attention import RawAttention
from captum_ssm.attr.rollout import MambaRollout
from captum_ssm.attr.unified import UnifiedImplicitAttention

__all__ = [
    "LaTIM",
    "MambaAttribution",
    "MambaLRP",
    "MambaRollout",
    "MapChoices",
    "Option",
    "RawAttention",
    "TokenAttribution",
    "UnifiedImplicitAttention",
    "methods",
]
