"""A mixer without an adapter that has the parts of S6, SSD or SS2D, by their usual names.

The scan may be written out in the module's own code, or run in a fused kernel: what the module does
with its parts is found by trying the variants that people write. One counts only if it is proven,
on a few of the module's tokens made larger (where a recurrence adds the most), then on all of them,
as they are and larger.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from captum_ssm._nested import map_tensors, tensors_in
from captum_ssm.mixers._call import MISFITS, MixerCall, without_caches
from captum_ssm.mixers._named import form_of, names_of, note_miss
from captum_ssm.mixers._variants import Trial, Variant, trials

# The largest error relative to what the recurrence adds, of larger tokens. Right variants err by
# 1e-6, wrong ones by 1e-2.
TOLERANCE = 1e-4
# Of the tokens as they are, a recurrence may be smaller than what the rest rounds to.
_ROUNDING = 5e-6
# The standard deviation of larger tokens: an S6 recurrence grows with the cube of its tokens.
_LARGE = 30.0
_SHORT = 12  # tokens
_OUTPUTS = 32  # channels of the output that variants are compared on

_ACCEPTED: WeakKeyDictionary[type[nn.Module], Variant] = WeakKeyDictionary()


def recognize_all(calls: Iterable[MixerCall]) -> dict[nn.Module, Variant]:
    """The recognized among the modules of some calls, each with its proven variant.

    Where a module of a class was refused, the others of the class are not tried.
    """
    found: dict[nn.Module, Variant] = {}
    refused: set[type[nn.Module]] = set()
    for call in calls:
        kind = type(call.module)
        variant = None if kind in refused else recognize(call)
        if variant is None:
            refused.add(kind)
        else:
            found[call.module] = variant
    return found


def recognize(call: MixerCall) -> Variant | None:
    """The variant that a call's module is proven to compute; None if there is none.

    Args:
        call (MixerCall): of any module that has the parts of a form.
    """
    with torch.inference_mode(False), torch.no_grad():
        try:
            search = _Search(_working(call))
            variant = search.run()
        except MISFITS as error:  # its parts are not what they are called, or take other shapes
            text = str(error).strip().partition("\n")[0]
            note_miss(call.module, f"{_has(call.module)}, but cannot be run again alone: {text}")
            return None
    if variant is None:
        search.note_miss(call.module)
    else:
        _ACCEPTED[type(call.module)] = variant
    return variant


class _Search:
    def __init__(self, call: MixerCall) -> None:
        self.call = call
        self.short = _again(call, _LARGE, _SHORT)
        self.nearest, self.error = "", float("inf")

    def run(self) -> Variant | None:
        """The first proven variant, the one of another module of the class before all others."""
        known = _ACCEPTED.get(type(self.call.module))
        if known is not None and self._holds(known):
            return known
        weight, bias = self._projection()
        large = self._closest(weight, bias)
        return next((variant for variant in large if self._holds(variant)), None)

    def note_miss(self, module: nn.Module) -> None:
        """Remember the nearest variant."""
        nearest = "but no variant fits its shapes"
        if self.nearest:
            nearest = (
                f"and is nearest to {self.nearest}: off by {self.error:.1e} of what its recurrence "
                f"adds, expected at most {TOLERANCE:.0e}"
            )
        note_miss(module, f"{_has(module)}, {nearest}", self.error)

    def _closest(self, weight: Tensor, bias: Tensor) -> Iterator[Variant]:
        # Those that agree on a few large tokens.
        want = self.short.output.flatten(1, -2)[..., :_OUTPUTS]
        for trial in self._trials():
            error = _error(trial, weight, bias, want)
            if error <= TOLERANCE:
                yield trial.variant
            else:
                self._note(trial.variant, error)

    def _trials(self) -> Iterator[Trial]:
        for attempt in trials(self.short):
            try:
                yield from attempt()
            except MISFITS:
                continue

    def _projection(self) -> tuple[Tensor, Tensor]:
        layer = self.call.module.out_proj
        weight = self.call.weight(layer)
        bias = self.call.linear(layer, weight.new_zeros(1, weight.shape[1]))
        return weight[:_OUTPUTS], bias[0, :_OUTPUTS]

    def _holds(self, variant: Variant) -> bool:
        # On a few large tokens, on all tokens as they are, on all of them made larger.
        tried: list[float] = []
        try:
            for call, is_large in self._proofs():
                error, of_recurrence = _errors(call, variant)
                tried.append(of_recurrence)
                rounds = not is_large and error <= _ROUNDING
                if not (error <= TOLERANCE and (of_recurrence <= TOLERANCE or rounds)):
                    self._note(variant, max(tried))
                    return False
        except MISFITS:
            return False
        return True

    def _proofs(self) -> Iterator[tuple[MixerCall, bool]]:
        yield self.short, True
        yield _again(self.call, _LARGE / 10, _SHORT), False
        yield self.call, False
        yield _again(self.call, _LARGE), True

    def _note(self, variant: Variant, error: float) -> None:
        if error < self.error:
            self.nearest, self.error = str(variant), error


def _error(trial: Trial, weight: Tensor, bias: Tensor, want: Tensor) -> float:
    # Relative to what the recurrence adds, on some channels of the output.
    found = trial.gated @ weight.mT
    size = float(found.norm()) * trial.share
    error = float((found + bias - want).norm()) / max(size, 1e-30)
    return error if error == error else float("inf")


def _errors(call: MixerCall, variant: Variant) -> tuple[float, float]:
    # The largest of the examples' relative errors: of the output, and of what the recurrence adds.
    mixer = variant(call)
    gated = mixer.gated_output()
    found = mixer.out_proj(gated)
    want = call.output.reshape(found.shape).to(found)
    off, size = (x.flatten(1).norm(dim=1).clamp(min=1e-30) for x in (found - want, want))
    error = off / size
    of_recurrence = error / mixer.recurrence_share(gated).clamp(min=1e-30)
    return float(error.amax()), float(of_recurrence.amax())


def _working(call: MixerCall) -> MixerCall:
    # In float32 at least, without a cache.
    call = replace(call, kwargs=without_caches(call.kwargs))
    if call.output.dtype.itemsize > 2:
        return call

    def wide(x: Tensor) -> Tensor:
        return x.float() if x.is_floating_point() else x

    args, kwargs = map_tensors(wide, (call.args, call.kwargs))
    return _run(replace(call, module=copy.deepcopy(call.module).float()), args, kwargs)


def _again(call: MixerCall, size: float, length: int | None = None) -> MixerCall:
    # The module on its tokens made larger: on the first ones, where they are all that it takes.
    tokens = call.given_tokens()
    larger = (tokens * (size / tokens.float().std().clamp(min=1e-12))).to(tokens)
    given = list(tensors_in((call.args, call.kwargs)))
    if length is not None and len(given) == 1:
        larger = larger[:1, :length] if tokens.dim() == 3 else larger[:1]
    args, kwargs = map_tensors(lambda x: larger if x is tokens else x, (call.args, call.kwargs))
    return _run(call, args, kwargs)


def _run(call: MixerCall, args: tuple[object, ...], kwargs: Mapping[str, object]) -> MixerCall:
    return replace(call, args=args, kwargs=dict(kwargs), result=call.module(*args, **kwargs))


def _has(module: nn.Module) -> str:
    return f"has the parts of {form_of(module)} ({names_of(module)})"
