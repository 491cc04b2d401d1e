"""What a layer remembers: its state at a token, by source token, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm._capture import FrozenLayer, Request, exact_arithmetic, freeze
from captum_ssm._errors import UnsupportedModelError
from captum_ssm.interventions._selection import Tokens, mask_of
from captum_ssm.mixers import FrozenMixer
from captum_ssm.operators import DiagonalOperator, LinearAttentionOperator, TokenOperator


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
        found: np.ndarray = self.values.flatten(0, 1).flatten(1).cpu().numpy()
        return found

    def by_source(self, position: int) -> Tensor:
        """What each token wrote of the state after one of them, which is their sum.

        Args:
            position (int): of the sequence, negative from the end.

        Returns:
            Tensor: ``(B, L, D, N)`` or ``(B, L, H, K, P)``.
        """
        operator, v = _memory(self.mixer), self.mixer.values
        B, L, D, M = operator.sizes
        row = mask_of("position", position, (1, L), v.device)[0].nonzero()[:, 0]
        with exact_arithmetic():
            parts = []
            for read in _reads(operator):
                of_map = read.map_rows(row.expand(B, 1), 0, M)[:, :, 0]  # (B, M, L)
                parts.append(of_map.mT.repeat_interleave(D // M, -1) * v)
            return _stacked(parts, operator)

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
        operator = _memory(self.mixer)
        B, L, D, _ = operator.sizes
        at = mask_of("positions", positions, (1, L), operator.device)[0].nonzero()[:, 0]
        found = []
        with exact_arithmetic():
            for t in at.tolist():
                impulse = torch.zeros(B, L, D, dtype=operator.dtype, device=operator.device)
                impulse[:, t] = 1
                left = _stacked([read.matvec(impulse) for read in _reads(operator)], operator)
                left = left[..., 0] if left.dim() == 5 else left  # a head's channels are alike
                size = torch.linalg.vector_norm(left, dim=-1)[:, t:]  # (B, L - t, M)
                gone = size <= size[:, :1] / 2
                steps = gone.int().argmax(1).to(size.dtype)
                steps = torch.where(gone.any(1), steps, torch.inf)
                found.append(torch.where(size[:, 0] > 0, steps, torch.nan))
        return torch.stack(found, 1)


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

        >>> found = captum_ssm.interventions.states(model, input_ids, layers=0, positions=None)
        >>> found["backbone.layers.0.mixer"].values.shape  # after every token
        torch.Size([1, 7, 32, 4])
    """
    request = Request.of(model, None, inputs, additional_forward_args)
    frozen = freeze(request, query=False, check=check)
    found = {}
    for layer in frozen.select(layers):
        if layers is None and not has_state(layer):
            continue
        found[layer.name] = _state(layer, positions)
    if not found:
        raise UnsupportedModelError(
            f"none of the {len(frozen.layers)} mixers of this model keeps a state of one scan; "
            "expected a recurrent layer."
        )
    return found


def has_state(layer: FrozenLayer) -> bool:
    """Whether a layer keeps one state."""
    try:
        _memory(layer.mixer)
    except UnsupportedModelError:
        return False
    return True


def _state(layer: FrozenLayer, positions: Tokens) -> LayerState:
    mixer = layer.mixer
    operator, values = _memory(mixer), mixer.values
    L = operator.length
    at = mask_of("positions", positions, (1, L), values.device)[0].nonzero()[:, 0]
    with exact_arithmetic():
        parts = [part[:, at] for part in states_of(mixer)]
        return LayerState(_stacked(parts, operator), at, mixer)


def states_of(mixer: FrozenMixer) -> Iterator[Tensor]:
    """Each of the N states after every token, ``(B, L, D)``."""
    return (read.matvec(mixer.values) for read in _reads(_memory(mixer)))


def _memory(mixer: FrozenMixer) -> DiagonalOperator | LinearAttentionOperator:
    operator = mixer.recurrence if mixer.memory is None else mixer.memory()
    if isinstance(operator, (DiagonalOperator, LinearAttentionOperator)):
        return operator
    raise UnsupportedModelError(
        f"this mixer is a {type(operator).__name__}, which keeps no state of one scan; expected a "
        "recurrent layer that reads its tokens in their order. Softmax attention keeps all keys "
        "and values, and a mixer of several directions a state for each: name other layers."
    )


def _reads(operator: DiagonalOperator | LinearAttentionOperator) -> Iterator[TokenOperator]:
    # For each of the N states, the operator that returns it: it is read by a unit vector.
    if isinstance(operator, DiagonalOperator):
        for n in range(operator.C.shape[-1]):
            unit = F.one_hot(torch.tensor(n), operator.C.shape[-1]).to(operator.C)
            yield replace(operator, C=unit.expand_as(operator.C), left=None)
    else:
        for n in range(operator.query.shape[-1]):
            unit = F.one_hot(torch.tensor(n), operator.query.shape[-1]).to(operator.query)
            yield replace(operator, query=unit.expand_as(operator.query), bonus=None)


def _stacked(parts: list[Tensor], operator: DiagonalOperator | LinearAttentionOperator) -> Tensor:
    # (B, L, D) for each state: (B, L, D, N), or (B, L, H, N, P).
    if isinstance(operator, DiagonalOperator):
        return torch.stack(parts, -1)
    heads = [part.unflatten(-1, (-1, operator.width)) for part in parts]
    return torch.stack(heads, -2)
