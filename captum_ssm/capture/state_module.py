"""What returns features of a mixer's recurrent state, for a :class:`~captum_ssm.Readout`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.capture.check import Deviation, Rebuilt, check_reconstruction
from captum_ssm.discovery.search import MeasuredAdapter
from captum_ssm.errors import InputError, UnsupportedModelError
from captum_ssm.mixers import FrozenMixer, MixerCall, find_adapter
from captum_ssm.mixers.call import without_caches
from captum_ssm.mixers.memory import state_reader
from captum_ssm.mixers.registry import layout_of, past_before, remember
from captum_ssm.utils.copies import original


class StateModule(nn.Module):
    """A module that takes what a mixer takes, and returns features of its state.

    It is a mixer itself, which is frozen by the adapter of the other one. That is checked against
    what the other one returns.

    Args:
        path (str): of the mixer, for messages.
        mixer (nn.Module): which is not a part of this module, and stays as it is.
        directions (Tensor): ``(F, ...)``, one state of the mixer per feature.

    Raises:
        InputError: for directions without a state's shape.
    """

    def __init__(self, path: str, mixer: nn.Module, directions: Tensor) -> None:
        super().__init__()
        if directions.dim() not in (3, 4):
            raise InputError(
                f"directions have shape {tuple(directions.shape)}; expected (F, D, N) for a "
                "diagonal recurrence, or (F, H, K, P) for linear attention and the delta rule."
            )
        self.register_buffer("directions", directions, persistent=False)
        self.read_of = (path, mixer)
        remember({self: freeze_state})

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)
        remember({self: freeze_state})

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The features ``(B, L, F)``, for the arguments of the mixer."""
        result = next((x for x in (*args, *kwargs.values()) if torch.is_tensor(x)), None)
        return freeze_state(MixerCall("", self, args, kwargs, result)).output()

    def frozen(self, call: MixerCall) -> FrozenMixer:
        """The mixer in a call of this module, checked.

        Raises:
            UnsupportedModelError: for a mixer that is not registered, or one that begins with what
                a cache holds.
            ReconstructionError: for an adapter that does not reproduce what the mixer returns.
        """
        path, mixer = self.read_of[0], original(self.read_of[1])
        adapter = find_adapter(mixer)
        if adapter is None or isinstance(adapter, MeasuredAdapter):
            how = "measured" if adapter else "not known to be a mixer"
            raise UnsupportedModelError(
                f"{path} ({type(mixer).__name__}) is {how}, so no gradient of its state is known; "
                "expected a mixer of a registered class (captum_ssm.register_mixer registers one). "
                "captum_ssm.interventions.states reads states of measured ones."
            )
        with torch.no_grad():
            result = mixer.forward(*call.args, **without_caches(call.kwargs))
        mixer_call = MixerCall.of(path, mixer, call.args, call.kwargs, result, **layout_of(mixer))
        if past_before(mixer_call) is not None:
            raise UnsupportedModelError(
                f"{path} is called with a cache that is not empty; expected the whole text, for a "
                "readout of its state."
            )
        frozen = adapter(mixer_call)
        with torch.no_grad():
            deviation = Deviation.of(mixer_call, Rebuilt.of(frozen))
            check_reconstruction(path, mixer_call, deviation, mixer_call.token_mask())
        return frozen


def freeze_state(call: MixerCall) -> FrozenMixer:
    """The adapter of a :class:`StateModule`."""
    return state_reader(call.module.frozen(call), call.module.directions)


# As the mixer that is read, whose class is registered.
freeze_state.known = "registered"  # type: ignore[attr-defined]
