r"""Associative scans written in Python: :math:`h_t = a_t h_{t-1} + b_t`, of real or complex states.

``associative_scan(operator, (a, b))``, as S5 and LRU call it, under ``torch.vmap`` too. A complex
decay is a rotation and a decay, so that the maps from :math:`b_j` to :math:`h_i` are

.. math::
    \Re\, h_i = \sum_j R_{ij} (\cos\phi_{ij} \Re\, b_j - \sin\phi_{ij} \Im\, b_j), \qquad
    \Im\, h_i = \sum_j R_{ij} (\sin\phi_{ij} \Re\, b_j + \cos\phi_{ij} \Im\, b_j)

with :math:`\phi_{ij} = \Phi_i - \Phi_j`: four real maps per state, linear attention of two keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from captum_ssm.discovery.scans.form import Candidate, is_of_form, register_scan
from captum_ssm.operators import LinearAttentionOperator

_FUNCTORCH = torch._C._functorch


@register_scan(
    names={
        "operator": ("binary_operator", "combine_fn", "combine", "fn", "op"),
        "elems": ("elements", "xs"),
    }
)
def associative_scan(operator: Any, elems: Any) -> Iterator[Candidate]:
    """A scan by any operator, whose arguments are not tensors: its states are looked at instead."""
    yield from ()


@register_scan
def diagonal_states(state_decay: Tensor, state_inputs: Tensor) -> Iterator[Candidate]:
    """States ``(B, L, 1, P)``, or ``(B, L, 2, P)`` of real and imaginary parts, and their decay."""
    if state_decay.shape != state_inputs.shape:
        return
    parts = state_decay.double().unbind(2)
    size = parts[0].abs() if len(parts) == 1 else torch.hypot(*parts)
    log_decay = size.to(state_inputs.dtype).log()
    if len(parts) == 1:
        turned = torch.where(parts[0] < 0, -1.0, 1.0).cumprod(1)[..., None]
        pairs = [(turned, turned)]
    else:
        turned = torch.atan2(parts[1], parts[0]).cumsum(1)
        cos, sin = turned.cos(), turned.sin()
        key = torch.stack([cos, sin], -1)
        across, along = torch.stack([sin, -cos], -1), torch.stack([cos, sin], -1)
        pairs = [(along, key), (across, key), (-across, key), (along, key)]
    query, key = (torch.cat(x, 2).to(state_inputs.dtype) for x in zip(*pairs, strict=True))
    yield Candidate(
        operator=LinearAttentionOperator(
            query, key, log_decay.repeat(1, 1, len(pairs))[..., None], width=1
        ),
        # Each part goes to both.
        values=state_inputs.repeat_interleave(len(parts), 2).flatten(2),
        layouts=("BLSHP",),
    )


def is_associative(arguments: dict[str, Any]) -> bool:
    """Whether the arguments of a call, by name, are those of an associative scan of two tensors."""
    is_scan = is_of_form("associative_scan", arguments)
    return is_scan and any(map(_are_two, arguments.values()))


def with_states(
    arguments: dict[str, Any],
    result: Any,
    handle: Callable[[Callable[..., Any], Tensor, Tensor], Tensor],
) -> Any:
    """What an associative scan returned, with its states handled as those of a function.

    Args:
        arguments (dict): its arguments by name.
        result (Any): what it returned.
        handle (Callable): takes a function with the parameters of :func:`diagonal_states`, and
            its arguments, and returns what takes the place of its result, the states.
    """
    elems = next(x for x in arguments.values() if _are_two(x))
    if not _are_two(result) or result[1].shape != elems[1].shape:
        return result
    axis = next((arguments[name] for name in ("axis", "dim") if name in arguments), 0)
    layout, states = _Layout(result[1], axis, bool(arguments.get("reverse"))), (*elems, result[1])
    if not all(map(layout.fits, states)) or len({x.is_complex() for x in states}) > 1:
        return result
    decay, inputs, known = (layout.apart(x) for x in states)

    def associative_scan(state_decay: Tensor, state_inputs: Tensor) -> Tensor:
        return known

    associative_scan.__qualname__ = associative_scan.__name__
    with temporarily_clear_interpreter_stack():
        y = handle(associative_scan, decay, inputs)
    return type(result)((result[0], layout.together(y)))


def _are_two(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and len(x) == 2 and all(map(torch.is_tensor, x))


class _Layout:
    # How states (..., L, ...), perhaps of a batch that is hidden by vmap, are (B, L, parts, P).
    def __init__(self, states: Tensor, axis: int, backward: bool) -> None:
        self.level = _FUNCTORCH.maybe_get_level(states) if is_hidden(states) else 0
        self.axis = axis % states.dim() + bool(self.level)
        self.shape = _shown(states).shape  # with the hidden axis of the batch first
        self.backward = backward

    def fits(self, x: Tensor) -> bool:
        """Whether a tensor is one of states or is broadcast to them, hidden by the same vmap."""
        level = _FUNCTORCH.maybe_get_level(x) if is_hidden(x) else self.level
        axes = _shown(x).dim() + bool(self.level and not is_hidden(x))
        return level == self.level and axes == len(self.shape) and not is_hidden(_shown(x))

    def apart(self, x: Tensor) -> Tensor:
        """A tensor of states as ``(B, L, parts, P)``."""
        if self.level:
            x = _shown(x) if is_hidden(x) else x[None]
        x = x.expand(self.shape).movedim(self.axis, 0)
        x = x.flatten(2) if x.dim() > 2 else x[:, None]  # (L, B, P)
        x = torch.stack([x.real, x.imag], 2) if x.is_complex() else x[:, :, None]
        return (x.flip(0) if self.backward else x).transpose(0, 1)

    def together(self, y: Tensor) -> Tensor:
        """``y (B, L, parts, P)`` as the tensor of states that it is."""
        y = y.transpose(0, 1)
        y = y.flip(0) if self.backward else y
        y = torch.complex(*y.unbind(2)) if y.shape[2] == 2 else y[:, :, 0]
        shape = list(self.shape)
        y = y.reshape([shape.pop(self.axis), *shape]).movedim(0, self.axis)
        return _FUNCTORCH._add_batch_dim(y, 0, self.level) if self.level else y


def is_hidden(x: Tensor) -> bool:
    """Whether ``torch.vmap`` hides an axis of a tensor."""
    return bool(_FUNCTORCH.is_batchedtensor(x))


def _shown(x: Tensor) -> Tensor:
    # A tensor under vmap with the axis that it hides first.
    if not is_hidden(x):
        return x
    shown: Tensor = _FUNCTORCH.get_unwrapped(x).movedim(_FUNCTORCH.maybe_get_bdim(x), 0)
    return shown
