"""captum_ssm: attribution for state-space models and gated linear RNNs, as a Captum plugin.

Names are imported when they are first used: a saved explanation opens without PyTorch.
"""

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from captum_ssm import attr as attr
    from captum_ssm import examples as examples
    from captum_ssm import explanation as explanation
    from captum_ssm import interventions as interventions
    from captum_ssm import kernels as kernels
    from captum_ssm import metrics as metrics
    from captum_ssm import mixers as mixers
    from captum_ssm import models as models
    from captum_ssm import operators as operators
    from captum_ssm import visualization as visualization
    from captum_ssm.attr import (
        LaTIM,
        MambaAttribution,
        MambaLRP,
        MambaRollout,
        RawAttention,
        RelevanceFlow,
        UnifiedImplicitAttention,
    )
    from captum_ssm.capture import Readout
    from captum_ssm.discovery.scans import register_scan
    from captum_ssm.errors import (
        InputError,
        ReconstructionError,
        TargetError,
        UnsupportedModelError,
    )
    from captum_ssm.explanation import Explanation
    from captum_ssm.explanation.make import explain
    from captum_ssm.explanation.make.answers.captum_llm import (
        SSMLLMAttribution,
        continuation_relevance,
    )
    from captum_ssm.explanation.make.answers.trace import Trace, trace, trace_rows
    from captum_ssm.explanation.make.dataset import ExplainBatches, ServedLog, explain_dataset
    from captum_ssm.explanation.make.served import replay
    from captum_ssm.inspection.cost import Estimate, estimate
    from captum_ssm.inspection.implicit_attention import hidden_attention, token_grids
    from captum_ssm.inspection.receptive_field import (
        Area,
        ReceptiveField,
        effective_receptive_field,
    )
    from captum_ssm.inspection.support import MixerSupport, Support, supported
    from captum_ssm.mixers import FrozenMixer, MixerCall, register_mixer
    from captum_ssm.utils.memory import MemoryLimitError

__version__ = "1.0.0rc1"

__all__ = [
    "Area",
    "Estimate",
    "ExplainBatches",
    "Explanation",
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
    "Readout",
    "ReceptiveField",
    "ReconstructionError",
    "RelevanceFlow",
    "SSMLLMAttribution",
    "ServedLog",
    "Support",
    "TargetError",
    "Trace",
    "UnifiedImplicitAttention",
    "UnsupportedModelError",
    "continuation_relevance",
    "effective_receptive_field",
    "estimate",
    "explain",
    "explain_dataset",
    "hidden_attention",
    "register_mixer",
    "register_scan",
    "replay",
    "supported",
    "token_grids",
    "trace",
    "trace_rows",
]

# The module of each name; those of the attribution methods are in attr.
_MODULES = {
    **dict.fromkeys(("Estimate", "estimate"), "inspection.cost"),
    **dict.fromkeys(("ExplainBatches", "ServedLog", "explain_dataset"), "explanation.make.dataset"),
    **dict.fromkeys(("InputError", "ReconstructionError"), "errors"),
    **dict.fromkeys(("TargetError", "UnsupportedModelError"), "errors"),
    **dict.fromkeys(("Trace", "trace", "trace_rows"), "explanation.make.answers.trace"),
    **dict.fromkeys(("hidden_attention", "token_grids"), "inspection.implicit_attention"),
    **dict.fromkeys(("Area", "ReceptiveField"), "inspection.receptive_field"),
    "Readout": "capture",
    **dict.fromkeys(("MixerSupport", "Support", "supported"), "inspection.support"),
    **dict.fromkeys(("FrozenMixer", "MixerCall", "register_mixer"), "mixers"),
    "Explanation": "explanation",
    "MemoryLimitError": "utils.memory",
    "effective_receptive_field": "inspection.receptive_field",
    "SSMLLMAttribution": "explanation.make.answers.captum_llm",
    "continuation_relevance": "explanation.make.answers.captum_llm",
    "explain": "explanation.make",
    "replay": "explanation.make.served",
    "register_scan": "discovery.scans",
}

# Folders that had another name in 0.1.0.
_RENAMED = {
    "_cli": "cli",
    "generation": "explanation.make.answers.captum_llm",
    "ops": "kernels",
    "page": "explanation.page",
    "scans": "discovery.scans",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        value = getattr(import_module(f"captum_ssm.{_MODULES.get(name, 'attr')}"), name)
        globals()[name] = value
        return value
    if name in _RENAMED:
        raise AttributeError(f"captum_ssm.{name} is now captum_ssm.{_RENAMED[name]}.", name=name)
    module = f"captum_ssm.{name}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
    raise AttributeError(f"module 'captum_ssm' has no attribute {name!r}", name=name)


def __dir__() -> list[str]:
    dunders = {name for name in globals() if name.startswith("__")}
    return sorted({*dunders, *__all__, *(module.name for module in iter_modules(__path__))})
