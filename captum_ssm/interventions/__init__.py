"""What a model does without an edge, or with other values: its own run, changed inside mixers."""

from captum_ssm.interventions.attribution import attribution_patching
from captum_ssm.interventions.circuit import circuit
from captum_ssm.interventions.diagnostics import StateReport, state_report
from captum_ssm.interventions.features import scaled_features
from captum_ssm.interventions.knockout import knockout
from captum_ssm.interventions.patching import Patching, activation_patching, patched
from captum_ssm.interventions.reference import Reference
from captum_ssm.interventions.states import LayerState, states
from captum_ssm.interventions.swaps import swap_effects
from captum_ssm.interventions.token_knockout import LayerSweep, TokenKnockout
from captum_ssm.interventions.value_zeroing import value_zeroing

__all__ = [
    "LayerState",
    "LayerSweep",
    "Patching",
    "Reference",
    "StateReport",
    "TokenKnockout",
    "activation_patching",
    "attribution_patching",
    "circuit",
    "knockout",
    "patched",
    "scaled_features",
    "state_report",
    "states",
    "swap_effects",
    "value_zeroing",
]
