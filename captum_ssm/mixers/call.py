"""What an adapter is given: a recorded call of a mixer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import Parameter
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.errors import UnsupportedModelError
from captum_ssm.mixers.layout import tokens_moved
from captum_ssm.mixers.linear_calls import KnownProduct, LinearCalls
from captum_ssm.mixers.linear_layers import by_token, is_plain, width_of
from captum_ssm.mixers.past import Past, by_channel
from captum_ssm.utils.lazy import cached_property
from captum_ssm.utils.nested import first_of, with_first
from captum_ssm.utils.offload import weights_loaded
from captum_ssm.utils.signatures import signature

# What a module raises, or an adapter or a variant of one, that a call does not fit.
MISFITS = (ValueError, RuntimeError, TypeError, AttributeError, LookupError, AssertionError)


class ScanResults(Protocol):
    """What the scan functions of a call returned, for when its module runs once more."""

    def find(self, call: Any) -> Any | None:
        """What the same call of a function returned; None if that is not known."""

    def forget(self) -> None:
        """Let go of all results."""


@dataclass(frozen=True)
class MixerCall:
    """One call of a mixer module in a forward pass, with its arguments and its result.

    Args:
        path (str): the module's name in the model.
        module (nn.Module): the mixer.
        args (tuple): positional arguments of its forward.
        kwargs (dict): keyword arguments of its forward.
        result (Any): what its forward returned.
        gradient (Tensor, optional): gradient of the target with respect to ``output``,
            ``(B, L, E)``. Default: None
        order (int, optional): its position among the calls of a forward pass. Default: 0
        linears (LinearCalls, optional): what its linear layers computed in the call, which is
            then not computed again. Default: None
        scans (ScanResults, optional): what its scan functions returned in the call. Default: None
        channels (int, optional): the axis of the channels in the tokens that the module takes and
            returns; ``TOKENS_FIRST`` for ``(L, B, E)``. In ``args``, ``kwargs`` and ``result`` they
            are ``(B, L, E)``. Default: -1
        adds_input (bool, optional): whether the module adds its tokens to ``result``. Default:
            False
        past (Past, optional): what the mixer has kept of earlier tokens; None where its tokens are
            the first. Default: None

    Examples::

        >>> module = model.backbone.layers[0].mixer
        >>> x = torch.randn(1, 7, 16)
        >>> call = MixerCall("mixer", module, (x,), {}, module(x))
        >>> call.tokens().shape, call.output.shape
        (torch.Size([1, 7, 16]), torch.Size([1, 7, 16]))
    """

    path: str
    module: Any  # an nn.Module; adapters read attributes of its class
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    gradient: Tensor | None = None
    order: int = 0
    linears: LinearCalls | None = None
    scans: ScanResults | None = None
    channels: int = -1
    adds_input: bool = False
    past: Past | None = None

    @classmethod
    def of(
        cls,
        path: str,
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        *,
        channels: int = -1,
        adds_input: bool = False,
    ) -> MixerCall:
        """A call of a module, of what it takes and returns; the options are those of a call."""
        args, kwargs = tokens_moved((args, kwargs), channels, -1)
        call = cls(path, module, args, kwargs, None, channels=channels, adds_input=adds_input)
        return call if result is None else call._returning(result)

    @property
    def own(self) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """``args``, ``kwargs`` and ``result`` as the module takes and returns them."""
        args, kwargs = tokens_moved((self.args, self.kwargs), -1, self.channels)
        if (result := self.result) is not None and self.adds_input:
            result = with_first(result, self.output + self.given_tokens())
        return args, kwargs, tokens_moved(result, -1, self.channels)

    def run(self, module: nn.Module | None = None) -> MixerCall:
        """This call with what the module, or another one, returns for ``args`` and ``kwargs``."""
        args, kwargs, _ = self.own
        result = (self.module if module is None else module)(*args, **kwargs)
        return self._returning(result)

    def _returning(self, result: Any) -> MixerCall:
        # This call with what the module returned.
        result = tokens_moved(result, self.channels, -1)
        if self.adds_input:
            result = with_first(result, first_of(result) - self.given_tokens())
        return replace(self, result=result)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the call, by their names in the module's ``forward``."""
        return bound_arguments(self.module, self.args, self.kwargs)

    @property
    def output(self) -> Tensor:
        """The mixed tokens ``(B, L, E)``: the result, or its first element."""
        return first_of(self.result)

    @property
    def dtype(self) -> torch.dtype:
        """The working dtype: float64 if the mixer's output is float64, else float32."""
        return torch.float64 if self.output.dtype == torch.float64 else torch.float32

    def tokens(self, name: str = "hidden_states") -> Tensor:
        """The mixer's input tokens ``(B, L, E)``, in the working dtype."""
        return self.given_tokens(name).to(self.dtype)

    def given_tokens(self, name: str = "hidden_states") -> Tensor:
        """The mixer's input tokens ``(B, L, E)``, as they were given.

        Raises:
            TypeError: for a call without a tensor of its own, such as one that is given a tuple.
        """
        value = self.arguments.get(name)
        if value is None:
            values = (*self.args, *self.kwargs.values())
            value = next((a for a in values if torch.is_tensor(a)), None)
        if value is None:
            kinds = [type(a).__name__ for a in values]
            raise TypeError(f"{self.path} is given {kinds}; expected tokens (B, L, E), a tensor.")
        return value

    def token_mask(self, name: str = "attention_mask") -> Tensor | None:
        """The ``(B, L)`` padding mask passed to the mixer, in the working dtype, or None."""
        mask = self.arguments.get(name)
        if not torch.is_tensor(mask) or mask.dim() != 2:
            return None
        return mask.to(self.output.device, self.dtype)

    def state(self, convert: Callable[[Tensor], Tensor] = by_channel) -> Tensor | None:
        """The state ``(B, N, D)`` at first, of the cache's form by ``convert``; None for zero."""
        return None if self.past is None else self.past.tokens_of(convert)

    def before(self, x: Tensor, count: int) -> Tensor | None:
        """The inputs ``(B, count, D)`` before those of ``x (B, L, D)``; None for zeros."""
        return None if self.past is None or not count else self.past.before(x, count)

    def linear(self, layer: nn.Module, x: Tensor) -> Tensor:
        """``layer(x)`` for ``x (..., in)`` in the working dtype: ``(..., out)``.

        A layer without a plain weight tensor (quantized, with LoRA) computes in its own dtype.

        Raises:
            UnsupportedModelError: such a layer makes tokens of others.
        """
        with weights_loaded(layer):
            weight = getattr(layer, "weight", None)
            if torch.is_tensor(weight):
                x = x.to(weight.device)
            if not self._is_plain(layer):  # its weight may be that of a layer inside of it
                is_floating = torch.is_tensor(weight) and weight.is_floating_point()
                like: Any = weight if is_floating else self.output
                y, is_mixed = by_token(layer, x.to(like.dtype))
                if is_mixed:
                    raise UnsupportedModelError(
                        f"a {type(layer).__name__} in {self.path} makes each token of others too; "
                        "expected a layer of each by itself. Mix them in a module before the mixer."
                    )
                return y.to(self.dtype)
            known = None if self.linears is None else self.linears.find(layer, x)
            if known is not None:
                has_graph = known.requires_grad or not x.requires_grad
                return known if has_graph else KnownProduct.apply(x, weight, known)
            bias = None if layer.bias is None else self.parameter(layer.bias)
            return F.linear(x, self.parameter(layer.weight), bias)

    def projected(self, weight: Tensor) -> Tensor | None:
        """What the module's output projection was given, ``(B, L, D)``.

        None where that was not kept: where it is not a plain linear layer with the matrix
        ``weight``, or is not the last that the module computes.
        """
        y = None if self.linears is None else self.linears.given_for(self.output, weight)
        return y if y is None or y.dtype == self.output.dtype else None

    def weight(self, layer: Any) -> Tensor:
        """The matrix ``(out, in)`` of a linear layer; of a quantized one by its results for ones.

        Raises:
            UnsupportedModelError: a layer without a plain weight tensor takes no unit vectors.
        """
        if self._is_plain(layer):
            return self.parameter(layer.weight)
        ones = torch.eye(width_of(layer), dtype=self.output.dtype, device=self.output.device)
        try:
            with torch.no_grad():
                return (self.linear(layer, ones) - self.linear(layer, 0 * ones[:1])).mT
        except MISFITS as error:
            raise UnsupportedModelError(
                f"the matrix of a {type(layer).__name__} in {self.path} is read off its outputs "
                f"for unit vectors {(*ones.shape,)}, for which it raises {type(error).__name__}: "
                f"{error}. Expected a layer that takes any tokens, each by itself, as nn.Linear."
            ) from error

    def _is_plain(self, layer: Any) -> TypeGuard[nn.Linear]:
        return is_plain(layer) or (self.linears is not None and layer in self.linears.uncalled)

    def parameter(self, value: Tensor) -> Tensor:
        """A parameter of any shape, detached, in the working dtype."""
        return value.detach().to(self.dtype)

    def decay_rate(self, A_log: Tensor) -> Tensor:
        """``-exp(A_log)``, of any shape, computed in float32 whatever the model's dtype."""
        return -torch.exp(A_log.detach().float()).to(self.dtype)


def bound_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call of ``module``, by their names in its ``forward``.

    Arguments collected by ``**kwargs`` are listed with the others. If a subclass takes ``*args``
    and passes them on, the names are those of the base class.
    """
    bindings: list[tuple[int, dict[str, Any]]] = []
    for cls in type(module).__mro__:
        if "forward" not in vars(cls):
            continue
        taken = signature(vars(cls)["forward"])
        try:
            by_name = dict(taken.bind(module, *args, **kwargs).arguments)
        except TypeError:  # the arguments do not fit this class's forward
            continue
        unnamed = 0
        for name, parameter in taken.parameters.items():
            if parameter.kind is Parameter.VAR_KEYWORD:
                by_name.update(by_name.pop(name, {}))
            elif parameter.kind is Parameter.VAR_POSITIONAL:
                unnamed = len(by_name.get(name, ()))
        bindings.append((unnamed, by_name))
    return min(bindings, key=lambda binding: binding[0])[1] if bindings else dict(kwargs)


_CACHES = ("cache", "past_key_value", "inference_params")


def without_caches(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments with None for generation caches, by their names; numbers stay."""

    def without(value: Any) -> Any:
        if isinstance(value, bool):
            return False
        # Indices are positions in a cache.
        is_index = torch.is_tensor(value) and value.dtype == torch.int64
        return value if isinstance(value, int) or is_index else None

    is_cache = {name: any(part in name for part in _CACHES) for name in kwargs}
    return {name: without(value) if is_cache[name] else value for name, value in kwargs.items()}
