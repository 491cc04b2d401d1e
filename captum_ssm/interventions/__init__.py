"""What a model does without an edge, or with other values: its own run, changed inside mixers."""

from captum_ssm.interventions.knockout import knockout
from captum_ssm.interventions.states import LayerState, states
from captum_ssm.interventions.token_knockout import LayerSweep, TokenKnockout

__all__ = ["LayerState", "LayerSweep", "TokenKnockout", "knockout", "states"]
