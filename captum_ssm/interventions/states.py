"""What a layer remembers: its state at a token, by source token, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from captum_ssm.capture import FrozenCall, Request, exact_arithmetic, freeze
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.interventions.selection import Tokens, mask_of
from captum_ssm.mixers import FrozenMixer
from captum_ssm.mixers.memory import memory_of, reads, states_of
from captum_ssm.operators.recurrence import StateOperator


@dataclass(frozen=True)
class LayerState:
    """The state of a layer after some tokens.

    Args:
        values (Tensor): ``(B, R, D, N)``: of each channel the N states of a diagonal recurrence; or
            ``(B, R, H, K, P)``: of each head the matrix of linear attention or the delta rule, that
            its keys write and its queries read.
        positions (Tensor): ``(R,)``, the tokens.
        mixer (FrozenMixer): the layer's.

    Examples::

        >>> state = captum_ssm.interventions.states(model, input_ids, positions=[3, 6])
        >>> layer = state["backbone.layers.0.mixer"]
        >>> layer.values.shape, layer.features().shape
        (torch.Size([1, 2, 32, 4]), (2, 128))
    """

    values: Tensor
    positions: Tensor
    mixer: FrozenMixer

    def features(self) -> np.ndarray:
        """One row per example and position, ``(B R, ...)``, as scikit-learn takes them."""
        rows: np.ndarray = self.values.flatten(0, 1).flatten(1).cpu().numpy()
        return rows

    def by_source(self, position: int) -> Tensor:
        """What each token wrote of the state after one of them, which is their sum.

        Args:
            position (int): of the sequence, negative from the end.

        Returns:
            Tensor: ``(B, L, D, N)`` or ``(B, L, H, K, P)``.
        """
        operator, v = memory_of(self.mixer), self.mixer.values
        B, _, D, M = operator.sizes
        row = positions_of("position", position, operator)
        with exact_arithmetic():
            parts = []
            for read in reads(operator):
                of_map = read.map_rows(row.expand(B, 1), 0, M)[:, :, 0]  # (B, M, L)
                parts.append(of_map.mT.repeat_interleave(D // M, -1) * v)
            return operator.joined_states(parts)

    def memory_length(self, positions: Tokens = None) -> Tensor:
        r"""How many steps until half of what a token wrote is left, exact for this input.

        A write is the vector that a token adds to the state of a channel or head per unit of its
        value. What is left of it after later tokens' decay, and after the delta rule's erasing,
        is compared by its norm. One scan per state and token.

        Args:
            positions (int, slice, sequence or Tensor, optional): the writing tokens; None for all.
                Default: None

        Returns:
            Tensor: ``(B, R, M)`` float, one per channel or head; infinite where half or more is
            left at the end of the sequence, and NaN where nothing was written (padding).
        """
        operator, lengths = memory_of(self.mixer), []
        at = positions_of("positions", positions, operator)
        with exact_arithmetic():
            for t in at.tolist():
                size = left_of_writes(operator, t)
                gone = size <= size[:, :1] / 2
                steps = gone.int().argmax(1).to(size.dtype)
                steps = torch.where(gone.any(1), steps, torch.inf)
                lengths.append(torch.where(size[:, 0] > 0, steps, torch.nan))
        return torch.stack(lengths, 1)


def states(
    model: Any,
    inputs: Any,
    *,
    layers: int | str | list[int | str] | None = None,
    positions: Tokens = -1,
    additional_forward_args: Any = None,
    check: bool = True,
) -> dict[str, LayerState]:
    r"""The recurrent state :math:`h_t` of layers after some tokens, as the model keeps it.

    Of a diagonal recurrence (Mamba, RG-LRU, HGRN) each channel has N states,
    :math:`h_t = a_t h_{t-1} + b_t v_t`; of linear attention and the delta rule each head has a
    matrix of keys by values. Where a model keeps it scaled (RWKV-4, xLSTM: by the largest exponent
    so far), so it is here; where a layer norm per head follows (xLSTM, RetNet), the values are
    less their mean over the head. States are computed by scans, from the frozen mixers of one run.

    Args:
        model (nn.Module or nnsight model): the model.
        inputs (Tensor or dict): as for ``attribute``.
        layers (int, str or list, optional): mixers by index or path; None for all that keep a
            state. Default: None
        positions (int, slice, sequence or Tensor, optional): tokens, the same in every example;
            None for all. Default: -1
        additional_forward_args, check (optional): as for
            :func:`~captum_ssm.interventions.patched`.

    Returns:
        dict: a :class:`LayerState` for each layer's path.

    Raises:
        UnsupportedModelError: for a layer without a state, such as softmax attention, or with
            several (scans in more than one order).
        ValueError: for a layer that is not there, tokens outside the sequence, or a mixer whose
            frozen operator does not reproduce its output.

    Examples::

        >>> result = captum_ssm.interventions.states(model, input_ids, layers=0, positions=None)
        >>> result["backbone.layers.0.mixer"].values.shape  # after every token
        torch.Size([1, 7, 32, 4])
    """
    request = Request.of(model, None, inputs, additional_forward_args)
    return {layer.name: _state(layer, positions) for layer in state_layers(request, layers, check)}


def state_layers(request: Request, layers: Any, check: bool) -> list[FrozenCall]:
    """The frozen layers that keep a state, or those that were asked for.

    Raises:
        UnsupportedModelError: for a model without any.
        ValueError: for a layer that is not there.
    """
    frozen = freeze(request, query=False, check=check)
    chosen = frozen.select(layers)
    if layers is None:
        chosen = [layer for layer in chosen if has_operator(memory_of, layer.mixer)]
    if not chosen:
        raise UnsupportedModelError(
            f"none of the {len(frozen.layers)} mixers of this model keeps a state of one scan; "
            "expected a recurrent layer."
        )
    return chosen


def _state(layer: FrozenCall, positions: Tokens) -> LayerState:
    mixer, operator = layer.mixer, memory_of(layer.mixer)
    at = positions_of("positions", positions, operator)
    with exact_arithmetic():
        parts = [part[:, at] for part in states_of(mixer)]
        return LayerState(operator.joined_states(parts), at, mixer)


def positions_of(what: str, chosen: Tokens, operator: StateOperator) -> Tensor:
    """The chosen tokens, the same in every example, in ascending order: ``(R,)``."""
    return mask_of(what, chosen, (1, operator.length), operator.device)[0].nonzero()[:, 0]


def state_operator(mixer: FrozenMixer) -> StateOperator:
    """The recurrence whose state can be exchanged for that of another run, or an error."""
    operator = mixer.recurrence
    if isinstance(operator, StateOperator) and mixer.memory is None:
        return operator
    raise UnsupportedModelError(
        f"this mixer is a {type(operator).__name__}, whose state after a token cannot be "
        "exchanged for that of another run: it is all keys and values, or one of several states, "
        "or scaled by what that run has seen; expected a recurrent layer with one plain state. "
        "Patch the values or the output, or name other layers."
    )


def has_operator(of: Callable[[FrozenMixer], StateOperator], mixer: FrozenMixer) -> bool:
    """Whether :func:`memory_of` or :func:`state_operator` returns an operator for a mixer."""
    try:
        of(mixer)
    except UnsupportedModelError:
        return False
    return True


def left_of_writes(operator: StateOperator, t: int) -> Tensor:
    """The norm of what token t wrote, after it and after each later one, ``(B, L - t, M)``."""
    B, L, D, _ = operator.sizes
    impulse = torch.zeros(B, L, D, dtype=operator.dtype, device=operator.device)
    impulse[:, t] = 1
    left = operator.joined_states([read.matvec(impulse) for read in reads(operator)])
    left = left[..., 0] if left.dim() == 5 else left  # a head's channels are alike
    return torch.linalg.vector_norm(left, dim=-1)[:, t:]
