"""What a mixer keeps of the tokens before its first one, and where a cache has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.errors import InputError, UnsupportedModelError

STALE = (
    "Pass a cache that this model filled, with as many examples as the inputs have, and which "
    "nothing has been added to since."
)


@dataclass(frozen=True, eq=False)
class Past:
    """What a mixer has kept of earlier tokens when it is called, and what it keeps for later ones.

    Args:
        tails (sequence of Tensor, optional): the last inputs of its convolutions and token shifts,
            ``(B, K - 1, D)`` or longer, in the order in which its adapter asks for them. Empty
            where no token came before. Of attention, the keys of the tokens before. Default: ()
        state (Tensor, optional): of its recurrence, as values of N tokens, ``(B, N, D)``: each is
            the part of the state that the n-th unit vector reads. Of attention, the values of the
            tokens before. Default: None, which is zero
        is_cached (bool, optional): whether ``state`` is in the form of the model's own cache, which
            the adapter converts. Default: False

    Examples::

        >>> past = Past()
        >>> past.before(torch.ones(1, 5, 2), 3).abs().max(), past.then(None).tails[0].shape
        (tensor(0.), torch.Size([1, 3, 2]))
    """

    tails: Sequence[Tensor] = ()
    state: Tensor | None = None
    is_cached: bool = False
    _kept: list[Tensor] = field(default_factory=list, repr=False)

    def before(self, x: Tensor, count: int) -> Tensor:
        """The ``count`` inputs before those of ``x (B, L, D)``, whose last ones are kept."""
        tail = self.recall(x, count)
        self.keep(torch.cat([tail, x[:, -count:]], 1)[:, -count:])
        return tail

    def keep(self, x: Tensor) -> None:
        """Keep what :meth:`recall` returns of it for later tokens."""
        self._kept.append(x)

    def recall(self, x: Tensor, count: int, ahead: int = 0) -> Tensor:
        """What was kept for the next, ``(B, count, D)`` for ``x (B, L, D)``.

        Zeros at first; that of so many tokens further with ``ahead``.
        """
        B, _, D = x.shape
        k = len(self._kept) + ahead
        if not self.tails and self.state is None:
            tail = x.new_zeros(B, count, D)
        else:
            tail = self.tails[k].to(x)[:, -count:] if k < len(self.tails) else x.new_zeros(0)
            check_state("inputs of a convolution", tail, (B, count, D))
        return tail

    def tokens_of(self, convert: Callable[[Tensor], Tensor]) -> Tensor | None:
        """The state ``(B, N, D)``; ``convert`` makes it of the form that the cache has."""
        if self.state is None or not self.is_cached:
            return self.state
        return convert(self.state)

    def then(self, state: Tensor | None) -> Past:
        """What the mixer has kept after its tokens, given the ``state`` after the last of them."""
        return Past(tuple(self._kept), state)

    @property
    def tensors(self) -> list[Tensor]:
        """The tails, and the state if there is one."""
        return [*self.tails, *([] if self.state is None else [self.state])]

    @property
    def tokens(self) -> int | None:
        """How many tokens came before, of attention, which keeps each; None of other mixers."""
        is_attention = len(self.tails) == 1 and self.tails[0].dim() == 4
        return self.tails[0].shape[2] if is_attention else None

    def of(self, tensors: Sequence[Tensor]) -> Past:
        """It with other tensors in the places of :attr:`tensors`, and nothing kept yet."""
        n = len(self.tails)
        return replace(
            self,
            tails=tuple(tensors[:n]),
            state=None if self.state is None else tensors[n],
            _kept=[],
        )

    def anew(self) -> Past:
        """It with nothing kept yet."""
        return self.of(self.tensors)


def by_channel(state: Tensor) -> Tensor:
    """A state ``(B, ..., N)`` of N numbers per channel, as tokens ``(B, N, D)``."""
    return state.flatten(1, -2).mT


def by_key(state: Tensor) -> Tensor:
    """A state ``(B, H, N, P)``, a row per dimension of the keys, as tokens ``(B, N, H P)``."""
    return state.transpose(1, 2).flatten(2)


def check_state(what: str, state: Tensor, expected: tuple[int, ...]) -> None:
    """Raise unless what a cache holds has the expected shape."""
    if tuple(state.shape) != expected:
        raise InputError(
            f"the cache holds {what} of shape {tuple(state.shape)}; expected {expected}. {STALE}"
        )


def past_of(module: Any, arguments: dict[str, Any], tokens: Tensor) -> Past | None:
    """A copy of what a cache of transformers holds for a mixer; None for an empty one, or none.

    Raises:
        InputError: for a cache of another model, or of another number of examples.
        UnsupportedModelError: for a filled cache of transformers 4.
    """
    # A module that several layers share is told which one it is.
    index = arguments.get("layer_idx", getattr(module, "layer_idx", None))
    caches = (x for x in arguments.values() if isinstance(getattr(x, "layers", None), list))
    cache = next(caches, None)
    if cache is None or not isinstance(index, int):
        _check_position(arguments)
        return None
    linear = getattr(cache, "linear_cache", [])  # MiniMax's
    if index < len(linear) and torch.is_tensor(linear[index]):
        return Past((), linear[index].detach().clone(), is_cached=True)
    if index >= len(cache.layers):
        if cache.layers and _is_filled(cache.layers[0]):
            raise InputError(
                f"the cache is of {len(cache.layers)} layers, and the model has a layer {index}. "
                f"{STALE}"
            )
        return None
    past = _past_in(cache.layers[index], is_attention=_is_attention(module))
    conv = getattr(module, "conv1d", getattr(module, "conv", None))
    for x in () if past is None else past.tensors:
        check_state("states of examples", x, (tokens.shape[0], *x.shape[1:]))
    if past is not None and isinstance(conv, nn.Conv1d):
        for x in past.tails:
            check_state("inputs of a convolution", x, (*x.shape[:2], conv.in_channels))
    return past


def _check_position(arguments: dict[str, Any]) -> None:
    # Layers of transformers 4 are told how many tokens their caches hold, which have other forms.
    position = arguments.get("cache_position")
    if torch.is_tensor(position) and position.numel() and int(position.flatten()[0]) > 0:
        raise UnsupportedModelError(
            "the model goes on from a cache that is not empty, and caches of transformers 4 are "
            "not read; expected a call that runs the model once, on the whole text and without a "
            "cache, or transformers 5."
        )


def _is_attention(module: Any) -> bool:
    return not any(hasattr(module, name) for name in ("conv1d", "conv", "A_log"))


def _past_in(layer: Any, *, is_attention: bool) -> Past | None:
    if is_attention:
        values = getattr(layer, "values", None)
        if not torch.is_tensor(values) or not values.numel():
            return None
        keys = layer.keys.detach().clone()
        return Past((keys,), values.detach().clone(), is_cached=True)
    has = getattr(layer, "has_previous_state", None)
    if not isinstance(has, dict) or not any(has.values()):
        return None
    tails = [layer.conv_states[k].mT.detach().clone() for k, filled in has.items() if filled]
    state = layer.recurrent_states.get(0) if layer.is_recurrent_states_initialized.get(0) else None
    return Past(tuple(tails), None if state is None else state.detach().clone(), is_cached=True)


def _is_filled(layer: Any) -> bool:
    return any(_past_in(layer, is_attention=kind) is not None for kind in (True, False))
