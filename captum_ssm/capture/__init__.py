"""Running the user's model: one way down, a concern per file.

:mod:`model` (what counts as a model) < :mod:`request` (its input and arguments) < :mod:`wiring`
(how its mixers hang together) < :mod:`mixer_graph` (the graph of a run between them),
:mod:`token_map`, :mod:`streams`, :mod:`skips` and :mod:`readout` (what is read off it) <
:mod:`measure` (all of that, in order) < :mod:`tracing` (a
model under nnsight) < :mod:`recording` (what one run of it left) < :mod:`visits` (of its mixers) <
:mod:`record` (the run) and :mod:`remote` (the same on a server) <
:mod:`discovery` (mixers that no adapter knows), :mod:`target` (the query and the score) and
:mod:`checking` (does a frozen mixer compute what the mixer did) < :mod:`substitution` (frozen
mixers that stand in for a model's own) < :mod:`frozen` (what all
of it makes) < :mod:`freezing`.
"""

from captum_ssm.capture.freezing import freeze
from captum_ssm.capture.frozen_model import FrozenLayer, FrozenModel, exact_arithmetic
from captum_ssm.capture.model import check_forward, check_model, is_model, resolve_model, unwrap
from captum_ssm.capture.remote import check_remote
from captum_ssm.capture.request import Request
from captum_ssm.capture.substitute import Substitution

__all__ = [
    "FrozenLayer",
    "FrozenModel",
    "Request",
    "Substitution",
    "check_forward",
    "check_model",
    "check_remote",
    "exact_arithmetic",
    "freeze",
    "is_model",
    "resolve_model",
    "unwrap",
]
