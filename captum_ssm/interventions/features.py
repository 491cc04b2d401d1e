"""Features of the stream or a state, removed from a run or made larger: knockout, steering."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from captum_ssm.attr.flow.features import check_decoder
from captum_ssm.capture import Readout
from captum_ssm.capture.readout import stream_of
from captum_ssm.errors import UnsupportedModelError, brief
from captum_ssm.interventions.editing import Edit, edited
from captum_ssm.interventions.open_mixer import OpenMixer
from captum_ssm.interventions.selection import Tokens, mask_of
from captum_ssm.mixers import FrozenMixer
from captum_ssm.mixers.memory import changes_of_state, check_directions, memory_of, state_of
from captum_ssm.operators.composed import sum_of
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.nested import with_first
from captum_ssm.utils.watch_modules import watch_modules


@contextmanager
def scaled_features(
    readout: Readout,
    features: Tokens | str | Sequence[int | str],
    scale: float = 0.0,
    *,
    tokens: Tokens = None,
) -> Iterator[None]:
    r"""Run the readout's model, inside the block, with some features removed, or made larger.

    What the layer returns at token t changes by :math:`(s - 1) \sum_f z_{tf} d_f`, with
    :math:`z_{tf}` the value of feature f there and :math:`d_f` its row of the decoder. All else of
    the stream stays, the error of an SAE too. Gradients do not go through the values.

    Of a readout with ``side="state"`` it is the state after token t that changes, as that token and
    later ones read it. What is left of a change later on is part of the state: at the next chosen
    token the value is that of the state as it is then, so that nothing is removed twice.

    Args:
        readout (Readout): with a decoder. The block runs its model, or methods and readouts of it;
            with ``side="state"`` no method of frozen mixers.
        features (int, str, slice, sequence or Tensor): which features, by number, by name, or as a
            bool mask.
        scale (float, optional): the factor s; 0 removes them. Default: 0.0
        tokens (int, slice, sequence or Tensor, optional): at which tokens, as ``sources`` of
            :func:`~captum_ssm.interventions.knockout`. Default: None, all

    Raises:
        TypeError, ValueError: for a readout without a decoder, or a feature that it does not have.
        UnsupportedModelError: on leaving, where the block did not run the layer; or from the run,
            for a layer without a state of one scan.
        InputError: from the run, for tokens outside of it, or a decoder without a state's shape.

    Examples::

        >>> atoms = torch.eye(16)[:3]
        >>> readout = captum_ssm.Readout(model, "backbone.layers.0", atoms, decoder=atoms)
        >>> with captum_ssm.interventions.scaled_features(readout, 1):
        ...     logits = model(input_ids).logits
    """
    decoder = check_decoder(readout)
    chosen = _numbers(readout, features, len(decoder))
    if readout.side == "state":
        with edited(readout.model, readout.layer, _in_state(readout, chosen, scale, tokens)):
            yield
        return
    reached = False

    def change(module: Any, args: Any, kwargs: Any, result: Any) -> Any:
        nonlocal reached
        reached = True
        stream = stream_of("output", args, kwargs, result)
        x = stream_of(readout.side, args, kwargs, result)
        at = mask_of("tokens", tokens, (stream.shape[0], stream.shape[1]), stream.device)
        with torch.no_grad():
            values = readout.encode(x)[..., chosen].to(stream.device) * at[..., None]
            written: Tensor = values.float() @ decoder[chosen].to(values.device).float()
        return with_first(result, stream + ((scale - 1) * written).to(stream.dtype))

    with watch_modules([readout.module], after=change):
        yield
    if not reached:
        raise UnsupportedModelError(
            f"the block did not run {readout.layer}, so nothing was changed there; expected it to "
            "run the readout's model, uncompiled, in this thread."
        )


def _in_state(readout: Readout, chosen: list[int], scale: float, tokens: Tokens) -> Edit:
    def edit(opened: OpenMixer) -> Tensor:
        mixer = opened.mixer
        operator = memory_of(mixer)
        check_directions(operator, check_decoder(readout))
        (mixed,) = opened.mixed
        at = mask_of("tokens", tokens, (mixed.shape[0], mixed.shape[1]), mixed.device)
        with torch.no_grad():
            written = operator.split_states(_written(readout, mixer, chosen, scale, at))
            pairs = zip(written, changes_of_state(mixer), strict=True)
            change = sum_of([change.matvec(part) for part, change in pairs])
        return opened.returning_mixed([mixed + change])

    return edit


def _written(
    readout: Readout, mixer: FrozenMixer, chosen: list[int], scale: float, at: Tensor
) -> Tensor:
    # What is added to the state after each token of the mask `at`, (B, L, D, N) or (B, L, H, K, P).
    operator = memory_of(mixer)
    states = state_of(mixer)
    decoder = check_decoder(readout)[chosen].to(states)
    written, change = torch.zeros_like(states), torch.zeros_like(states[:, 0])
    for t in range(at.shape[1]):
        change = operator.carried(change, t)
        if bool(at[:, t].any()):
            state = (states[:, t] + change).flatten(1)
            values = readout.encode(state[:, None])[:, 0, chosen].to(states) * at[:, t, None]
            written[:, t] = (scale - 1) * torch.tensordot(values, decoder, 1)
            change = change + written[:, t]
    return written


def _numbers(readout: Readout, features: Any, count: int) -> list[int]:
    # The chosen features, each once.
    listed: Any = [features] if isinstance(features, str) else features
    if isinstance(listed, (list, tuple)):
        listed = [readout.index(x) if isinstance(x, str) else x for x in listed]
    mask = mask_of("features", listed, (1, count), torch.device("cpu"), "features")
    numbers: list[int] = mask[0].nonzero()[:, 0].tolist()
    if not numbers:
        raise ValueError(
            f"features is {brief(features)}; expected at least one of 0 .. {count - 1}, or names."
        )
    return numbers
