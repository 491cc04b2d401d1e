"""What a mixer's linear layers computed in a call, so that it is not computed again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.mixers.linear_layers import is_plain, wraps_weight
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.clones import address, is_same
from captum_ssm.utils.copies import original
from captum_ssm.utils.watch_modules import watch_modules


class LinearCalls:
    """What linear layers are given and return.

    Attributes:
        uncalled (set of nn.Module): wrapped layers that the module did not call. It multiplies
            with their weights itself, without what the wrappers add.

    Examples::

        >>> whole = nn.Sequential(nn.Linear(2, 3))
        >>> (layer,), x, calls = whole, torch.randn(1, 2), LinearCalls()
        >>> with calls.of(whole):
        ...     y = whole(x)
        >>> torch.equal(calls.find(layer, x), y), calls.find(layer, 2 * x) is None
        (True, True)
    """

    def __init__(self) -> None:
        # A layer, or its weight: an offloaded layer has another one at each call.
        self._calls: list[tuple[Any, Tensor, Tensor, int]] = []
        self.uncalled: set[nn.Module] = set()

    @contextmanager
    def of(self, module: nn.Module) -> Iterator[None]:
        """Keep the calls of a module's own layers, in this thread."""

        def keep(layer: Any, args: Any, kwargs: Any, result: Tensor) -> None:
            if args:
                self.add(original(layer), args[0].detach(), result.detach())

        wrapped = {original(layer): layer for layer in module.children() if wraps_weight(layer)}
        self.uncalled.update(wrapped)
        called = watch_modules(
            wrapped.values(), before=lambda layer, *_: self.uncalled.discard(original(layer))
        )
        with called, watch_modules(filter(is_plain, module.children()), after=keep):
            yield

    def add(self, layer: nn.Module | Tensor, inputs: Tensor, result: Tensor) -> None:
        """Keep what a layer returned; its weight alone says that it is a product with that."""
        self._calls.append((layer, inputs, result, result._version))

    def keep_only(self, tokens: Tensor, output: Tensor) -> None:
        """Let go of all calls, except those given as many tokens, and what ``output`` came of.

        Args:
            tokens (Tensor): ``(B, L, E)``, what the mixer was given.
            output (Tensor): ``(B, L, E)``, what it returned. All in its dtype.
        """
        self._calls = [
            (layer, x, y, version)
            for layer, x, y, version in self._calls
            if (x.shape == tokens.shape or y.is_set_to(output))
            and x.dtype == y.dtype == output.dtype
        ]

    def nbytes_without(self, *others: Tensor) -> int:
        """The size of what the layers were given and returned, without tensors held elsewhere."""
        sizes = {address(x): x.nbytes for _, *ends, _ in self._calls for x in ends}
        for x in others:
            sizes.pop(address(x), None)
        return sum(sizes.values())

    def forget(self) -> None:
        """Let go of all calls."""
        self._calls.clear()

    def find(self, layer: Any, x: Tensor) -> Tensor | None:
        """What a layer returned for ``x``, unless that was changed in place since."""
        for known, inputs, result, version in self._calls:
            # Under autocast a layer returns another dtype than it was given.
            alike = inputs.dtype == x.dtype == result.dtype and inputs.shape == x.shape
            is_module = isinstance(known, nn.Module)
            if alike and (known is layer if is_module else is_same(known, layer.weight)):
                is_it = inputs.is_set_to(x) or torch.equal(inputs, x)
                is_it = is_it and result._version == version and _is_linear(known, inputs, result)
                return result if is_it else None
        return None

    def given_for(self, output: Tensor, weight: Tensor) -> Tensor | None:
        """What the layer with the matrix ``weight`` was given when it returned ``output``."""
        for layer, inputs, result, version in self._calls:
            of_layer = address(getattr(layer, "weight", layer)) == address(weight)
            if of_layer and result.is_set_to(output) and result._version == version:
                return inputs if _is_linear(layer, inputs, result) else None
        return None


def _is_linear(layer: Any, inputs: Tensor, result: Tensor) -> bool:
    # Whether a layer computed what its weights say, for each token: its forward may be another one,
    # or a hook may change what it returns. Sums of the channels with random signs tell.
    if isinstance(layer, Tensor):  # the weight itself
        return True
    weight = layer.weight.detach()
    if not inputs.dtype == weight.dtype == result.dtype:  # autocast
        return False
    with torch.autocast(weight.device.type, enabled=False):
        return _is_product(layer, inputs, weight, result)


def _is_product(layer: Any, inputs: Tensor, weight: Tensor, result: Tensor) -> bool:
    inputs, result = (x.detach().flatten(0, -2) for x in (inputs, result))
    signs = random_signs(weight)
    row = signs @ weight
    expected = inputs @ row
    if layer.bias is not None:
        expected = expected + layer.bias.detach() @ signs
    size = torch.linalg.vector_norm(inputs, dim=-1) * torch.linalg.vector_norm(row)
    size = size + torch.linalg.vector_norm(result, dim=-1)
    return bool(((result @ signs - expected).abs() <= 1e-5 * size).all())


def random_signs(weight: Tensor) -> Tensor:
    """A sign for each row of ``weight (out, in)``: ``(out,)``, of its dtype and device."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 2, (len(weight),), generator=generator).to(weight) * 2 - 1


class KnownProduct(torch.autograd.Function):
    """What a linear layer is known to return for x: only its gradient is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, known: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.set_materialize_grads(False)
        return known

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        (weight,) = ctx.saved_tensors
        return None if gradient is None else gradient @ weight, None, None
