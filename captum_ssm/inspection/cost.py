"""What a call uses in memory and time, extrapolated from the same call on fewer tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from captum_ssm.attr import TokenAttribution
from captum_ssm.capture import Request, is_model
from captum_ssm.errors import brief
from captum_ssm.inspection.meter import Measurement, fitted, grown, measured
from captum_ssm.utils.integers import as_integers
from captum_ssm.utils.memory import readable_bytes
from captum_ssm.utils.nested import map_tensors

CHUNK = 64  # lengths are multiples of it, or of the longer chunks that a model pads to
TILE_ROWS = 256  # of maps: on more tokens a tile is told from a whole map
BUDGET = 1 << 29  # bytes that a call on so many tokens may use


@dataclass(frozen=True)
class Estimate:
    """The resource usage of a call.

    Args:
        result_bytes (int): what is returned.
        low (int): the most bytes at a time in addition to the result, the model's weights and its
            inputs, if all grow linearly in the number of tokens.
        high (int): the same, if tensors with two token axes grow quadratically.
        seconds, forwards (float): on this machine, and in forward passes of the model.

    Examples::

        >>> estimate(MambaRollout(model), input_ids).result_bytes
        28
    """

    result_bytes: int
    low: int
    high: int
    seconds: float = field(compare=False)
    forwards: float = field(compare=False)

    @property
    def total_bytes(self) -> int:
        """Result and working memory together: what to plan for."""
        return self.result_bytes + self.high

    def __str__(self) -> str:
        result, low, high = map(readable_bytes, (self.result_bytes, self.low, self.high))
        works = high if low == high else f"{low} to {high}"
        return f"returns {result}, works in {works}, takes {self.forwards:.1f} forward passes"


def estimate(method: Any, inputs: Any, **options: Any) -> Estimate:
    """The resource usage of a call, extrapolated from the same call on fewer tokens.

    The call is made on the first 127 and 191 tokens of the first example, and on 319 and 575
    where that takes less than 512 MiB (more, where the model pads its input to long chunks).
    Shorter inputs, and images, are run as they are. The total is within a factor of two of the
    measured peak in the library's tests; time is rougher.

    Args:
        method (TokenAttribution or Callable): a method, whose ``attribute`` is estimated; another
            function of it; or ``functools.partial(hidden_attention, model)``.
        inputs (Tensor, tuple of one Tensor, or dict): as for the call.
        **options: all other arguments of the call. Tensors of one entry per token are cut like
            the inputs; ``position``, ``rows`` and a target's position are moved in proportion.

    Returns:
        Estimate: bytes and time.

    Raises:
        ValueError, TypeError: whatever the call raises, and for a ``method`` that is none.

    Examples::

        >>> print(estimate(MambaLRP(model), input_ids, target=token))
        returns 28 B, works in ... KiB, takes ... forward passes
        >>> estimate(MambaRollout(model).rollout, input_ids).result_bytes
        196
    """
    args: tuple[Any, ...] = ()
    while isinstance(method, partial):
        args, options, method = method.args + args, method.keywords | options, method.func
    extra = options.pop("additional_forward_args", None)
    owner = getattr(method, "__self__", method)
    if isinstance(owner, TokenAttribution):
        call = owner.attribute if method is owner else method
        return Costs(owner._request(inputs, extra)).of(partial(call, *args), **options)
    model: Any = options.get("model", args[0] if args else None)
    if not is_model(model) or not callable(method):
        raise TypeError(
            f"method is {brief(method)}; expected a method such as MambaRollout(model), a function "
            "of it such as its rollout, or functools.partial(hidden_attention, model)."
        )
    return Costs(Request.of(model, None, inputs, extra)).of(partial(method, *args), **options)


class Costs:
    """The resource usage of calls on one request."""

    def __init__(self, request: Request) -> None:
        self.request, self.batch = request, request.batch
        # Only texts are cut: a model of series or images may take one size only.
        self.length = request.inputs[0].shape[1] if request.is_text else 1
        self.lengths: list[int] = []  # of the calls that were made last
        self._run = cache(lambda tokens: self._measured(_forward, tokens).seconds)
        chunks = (getattr(module, "chunk_size", None) for module in request.module.modules())
        self._chunk = max([CHUNK, *(c for c in chunks if isinstance(c, int))])

    def of(self, call: Callable[..., Any], **options: Any) -> Estimate:
        """The resource usage of one call."""

        def made(sample: Request, tokens: int) -> Any:
            cut_options = {name: self._cut_option(tokens, name, v) for name, v in options.items()}
            extra = sample.named or sample.positional or None
            return call(inputs=sample.given, additional_forward_args=extra, **cut_options)

        return self._extrapolated(made)

    def of_forward(self) -> Estimate:
        """The resource usage of a forward pass of the model, without gradients."""
        return self._extrapolated(_forward)

    def _extrapolated(self, call: Callable[[Request, int], Any]) -> Estimate:
        measurements: list[Measurement] = []
        for lengths in self._lengths():
            if (
                measurements
                and measurements[-1].peak[0] * (lengths[-1] / self.lengths[-1]) ** 2 > BUDGET
            ):
                break
            self.lengths, measurements = lengths, [self._measured(call, n) for n in lengths]

        def total(values: list[float]) -> int:
            fixed, growing = fitted(self.lengths, values, self.length)
            return round(fixed + self.batch * growing)

        result = total([r.result[1] for r in measurements])
        low = total([r.peak[0] - r.result[0] for r in measurements])
        high = total([r.peak[1] for r in measurements]) - result
        runs = [self._run(n) for n in self.lengths]
        rest = [max(0.0, r.seconds - run) for r, run in zip(measurements, runs, strict=True)]
        forward = runs[-1] * self.length / self.lengths[-1]
        seconds = forward + grown(self.lengths, rest, self.length)
        return Estimate(result, low, max(low, high), self.batch * seconds, seconds / forward)

    def _lengths(self) -> Iterator[list[int]]:
        # One token less than whole chunks: a number that other axes are not likely to have.
        chunk = self._chunk
        above = (TILE_ROWS // chunk + 1) * chunk
        for first, second in dict.fromkeys([(2 * chunk, 3 * chunk), (above, 2 * above - chunk)]):
            if second > self.length:
                yield [self.length]
                return
            yield [first - 1, second - 1]

    def _measured(self, call: Callable[[Request, int], Any], tokens: int) -> Measurement:
        sample = map_tensors(partial(self._cut, tokens), self.request)
        module = sample.module
        owned = [*module.parameters(), *module.buffers(), *sample.inputs]
        return measured(lambda: call(sample, tokens), owned, tokens, self.length / tokens)

    def _cut(self, tokens: int, value: Tensor) -> Tensor:
        # The first tokens of the first example.
        value = value[:1] if value.shape[:1] == (self.batch,) else value
        if value.shape[1:2] != (self.length,):
            return value
        value = value[:, :tokens]
        # A mask that begins with padding would leave nothing to explain.
        return value if bool(value.any()) else torch.ones_like(value)

    def _cut_option(self, tokens: int, name: str, value: Any) -> Any:
        if name == "target" and isinstance(value, list):
            return [self._cut_option(tokens, name, item) for item in value[:1]]
        if name == "target" and isinstance(value, tuple) and len(value) == 2:
            return self._cut_option(tokens, "position", value[0]), value[1]
        device = self.request.inputs[0].device
        index = as_integers(value, device) if name in ("position", "rows") else None
        if index is not None:
            value = index % self.length * tokens // self.length
            if name == "rows" and index.dim() < 2:  # those of all examples
                return value
        return map_tensors(partial(self._cut, tokens), value)


@torch.no_grad()
def _forward(sample: Request, tokens: int) -> Any:
    return sample.run()
