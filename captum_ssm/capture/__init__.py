"""Running the user's model once, and what is made of that run.

The model runs under nnsight on copies of its modules that are thrown away, so that nothing has to
be put back. A call goes through these files:

- ``model`` and ``check_inputs`` say what counts as a model and an input, and ``arguments`` which
  arguments a model does not read; ``request`` has all of it;
  ``readout`` makes a model that ends at directions of one module's output;
- ``unknown_mixers`` searches for mixers that no adapter is registered for;
- ``thrown_away`` makes the copies, and ``session`` opens nnsight on them; ``record`` runs the model
  there; ``visits`` follows its mixers, and ``substitute`` puts frozen ones in their place where a
  gradient is asked for;
  ``embedded_ids`` and ``reuse`` keep what the run computed anyway, and ``filled_tokens`` finds the
  tokens of images and sound;
- ``recording`` is what the run left, ``remote`` makes the same of a run on a server;
- ``target`` reads the query tokens and the score of a target, ``span_target`` those of an answer;
- ``check`` recomputes each frozen mixer, to the ``tolerances`` of its dtype, ``finite`` looks at
  its numbers, ``wider_dtype`` runs it once more where rounding leaves a doubt, ``honesty`` (by
  ``held_run``, ``token_steps`` and ``promise``) and ``randomness`` test whether one run can be
  trusted at all, ``operations`` tells for which others what was found of it holds, and
  ``long_text`` whether what was measured on a text's beginning does for all of it;
- ``frozen_model`` is the result, and ``freezing`` makes it of a request.
"""

from captum_ssm.capture.freezing import freeze
from captum_ssm.capture.frozen_model import FrozenCall, FrozenModel, exact_arithmetic
from captum_ssm.capture.model import (
    check_forward,
    check_model,
    is_model,
    resolve_model,
    unwrap,
    with_owner,
)
from captum_ssm.capture.readout import Readout
from captum_ssm.capture.remote import check_remote
from captum_ssm.capture.request import Request
from captum_ssm.capture.substitute import FrozenStandIns

__all__ = [
    "FrozenCall",
    "FrozenModel",
    "FrozenStandIns",
    "Readout",
    "Request",
    "check_forward",
    "check_model",
    "check_remote",
    "exact_arithmetic",
    "freeze",
    "is_model",
    "resolve_model",
    "unwrap",
    "with_owner",
]
