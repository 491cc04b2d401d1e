"""Whether a call is a scan: our operator, of its arguments, returns what the function returned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from captum_ssm.discovery.scans.calls import (
    FunctionCall,
    handled_by,
    is_loop,
    is_product,
    is_sum,
    not_intercepted,
)
from captum_ssm.discovery.scans.form import Candidate, ScanForm, forms_of
from captum_ssm.discovery.scans.forms.arguments import working_dtype
from captum_ssm.discovery.scans.forms.states import is_hidden
from captum_ssm.discovery.scans.impulses import candidates_by_impulses, measurable_values
from captum_ssm.discovery.scans.packed import joined, sequences
from captum_ssm.discovery.scans.recurrences import read_loop
from captum_ssm.discovery.scans.steps import NotRead
from captum_ssm.mixers.call import ScanResults
from captum_ssm.operators import TokenOperator, WeightsOperator
from captum_ssm.utils.nested import first_of, with_first
from captum_ssm.utils.precision import kernels_dtype

# The largest error relative to what the recurrence adds, by the coarsest dtype of the arguments.
# In float32 right operators err by at most 1e-6.
TOLERANCE = {
    torch.float64: 1e-6,
    torch.float32: 1e-4,
    torch.float16: 1.2e-2,
    torch.bfloat16: 4e-2,
}
# Where the recurrence adds less than this, the rounding of the rest may be more than is tolerated.
_SMALL = 1e-2
# For each tolerance, the share at which one rounding of the rest is as much as is tolerated.
_HIDDEN = {error: torch.finfo(dtype).eps / error for dtype, error in TOLERANCE.items()}


@dataclass(frozen=True, eq=False)
class Scan:
    r"""A proven call: it returned :math:`g \odot (\alpha v + s \odot v)`.

    Args:
        operator (TokenOperator): :math:`\alpha`, without a graph.
        values (Tensor): v, ``(B, L, D)``, with its graph.
        skip (Tensor, optional): s, broadcasts to ``(B, L, D)``.
        gate (Tensor, optional): g, ``(B, L, D)``, with its graph.
        layout (str): that of the result.
        mixed (Tensor): :math:`\alpha v + s v`, ``(B, L, D)``, linear in v on the graph.
        name (str): of the function.
        error (float): relative to what the recurrence adds.
        returned (Tensor, optional): what is described here, where the call returned something that
            it made of that. Default: None
        after (Callable, optional): what it made of that. Default: None
    """

    operator: TokenOperator
    values: Tensor
    skip: Tensor | None
    gate: Tensor | None
    layout: str
    mixed: Tensor
    name: str
    error: float
    returned: Tensor | None = None
    after: Callable[[Tensor], Tensor] | None = None

    def result(self, mixed: Tensor, of_call: Any) -> Any:
        """What the function returns for other ``mixed (B, L, D)``, at the values of ``of_call``."""
        want = first_tensor(of_call) if self.returned is None else self.returned
        assert want is not None
        y = _in_layout(mixed if self.gate is None else mixed * self.gate, self.layout, want)
        assert y is not None
        y = y.to(want.dtype)
        y = y + (want - y).detach()
        return with_first(of_call, y if self.after is None else self.after(y))

    def silenced(self, of_call: Any) -> Any:
        """What the function returns where the scan is zero."""
        if self.after is None or self.returned is None:
            return silenced(of_call)
        return with_first(of_call, self.after(0 * self.returned))


def first_tensor(result: Any) -> Tensor | None:
    """The result of a function, or the first element of a tuple."""
    value = first_of(result)
    return value if torch.is_tensor(value) else None


def prove(call: FunctionCall, result: Any) -> Scan | None:
    """The call as a scan, if an operator of some form returns what it returned."""
    want = first_tensor(result)
    if want is None or not want.is_floating_point():
        return None
    scans = (
        _proven(call, form, roles, want, enlarged=False)
        for form in forms_of(list(call.arguments))
        for roles in form.roles(call.arguments)
    )
    return next((scan for scan in scans if scan is not None), None)


def _of_product(call: FunctionCall) -> Scan | None:
    # The matrix itself is the operator. Zeros are right too, where an activation leaves no weight.
    weights, values = call.args
    dtype = working_dtype(weights, values)
    operator = WeightsOperator(weights.detach().to(dtype)[:, None], width=values.shape[-1])
    v = values.to(dtype)
    mixed = operator.matvec(v)
    if not bool(mixed.isfinite().all()):
        return None
    return Scan(operator, v, None, None, "BLD", mixed, call.function.__qualname__, 0.0)


@dataclass(eq=False)
class ScanCalls:
    """Handles the calls of a run, for :func:`intercepted`: what is a scan is taken.

    A form explains a call best, then forms of calls inside of it that are all that its values go
    through, then impulses of its values, then anything inside of it.

    Args:
        take (Callable): takes a call, its scan and its result, and returns what takes the place of
            the result.
        forms_only (bool, optional): nothing is measured with impulses, and products with a matrix
            are left alone. Default: False
        known (ScanResults, optional): the calls of another run. What one returned there, it
            returns here. Default: None
    """

    take: Callable[[FunctionCall, Scan, Any], Any]
    forms_only: bool = field(default=False, kw_only=True)
    known: ScanResults | None = field(default=None, kw_only=True)
    taken: int = field(default=0, init=False)
    unread: str = field(default="", init=False)  # why the last loop that is not a scan is not one

    def __call__(self, call: FunctionCall) -> Any:
        # A product or a sum is one of many in a scan, perhaps.
        if self.forms_only and (is_product(call.source) or is_sum(call.source)):
            return call.run()
        result = None if self.known is None else self.known.find(call)
        if result is None:
            with torch.no_grad(), not_intercepted():
                result = call.run()
        with not_intercepted():  # the operators that are tried have transforms and products too
            scan = self._find(call, result)
        if scan is None:
            return call.run()
        self.taken += 1
        return self.take(call, scan, result)

    def _find(self, call: FunctionCall, result: Any) -> Scan | None:
        if is_product(call.source):
            return _of_product(call)
        if is_loop(call.source):  # which cannot be run again alone
            loop: Any = call.function
            read = partial(read_loop, loop.parts, result, loop.axis)
            return prove(call, result) or self._read(call, result, read)
        if is_sum(call.source):
            of_run: Any = call.function
            return self._read(call, result, lambda tolerance: of_run.candidates())
        parts = sequences(call)
        if parts is not None:
            return self._find_in_each(parts, result)
        scan = prove(call, result)
        if scan is None and not self.forms_only:
            return _proven_by_impulses(call, first_tensor(result))
        return scan

    def _read(
        self,
        call: FunctionCall,
        result: Tensor,
        candidates: Callable[[float], Iterator[Candidate]],
    ) -> Scan | None:
        # A loop, or a sum, as a scan by what was called in it.
        name = call.function.__qualname__
        if is_hidden(result):
            self.unread = f"{name} is not a scan: torch.vmap hides an axis of its results"
            return None
        real = result.real if result.is_complex() else result
        tolerance = _tolerance(call, real)
        try:
            with torch._C.DisableTorchFunction():
                for candidate in candidates(tolerance):
                    for scan, _ in _compared(call, candidate, result):
                        if scan.error <= tolerance:
                            return scan
        except NotRead as error:
            self.unread = f"{name} is not a scan: {error}" if str(error) else ""
        return None

    def _find_in_each(self, parts: list[tuple[FunctionCall, slice]], result: Any) -> Scan | None:
        # Each sequence of a packed row is proven on its own. The scan is that of the whole row.
        want, scans, results = first_tensor(result), list[Scan](), list[Tensor]()
        for call, _ in parts:
            with torch.no_grad(), not_intercepted():
                returned = first_tensor(call.run())
            scan = self._find(call, returned)
            if returned is None or scan is None:
                return None
            results.append(returned)
            scans.append(scan)
        first = scans[0]
        if want is None or any(scan.layout != first.layout for scan in scans):
            return None
        whole = torch.cat(results, 0 if first.layout == "LHP" else 1)
        tolerance = _tolerance(parts[0][0], want)
        if whole.shape != want.shape or not (whole - want).norm() <= tolerance * want.norm():
            return None
        row: dict[str, Any] = {}
        for name in ("values", "skip", "gate", "mixed"):
            tensors = [getattr(scan, name) for scan in scans]
            in_all = all(x is not None for x in tensors)
            pairs = zip(tensors, scans, strict=True)
            row[name] = torch.cat([x.expand_as(s.values) for x, s in pairs], 1) if in_all else None
        operator = joined([scan.operator for scan in scans], [at for _, at in parts])
        return replace(first, operator=operator, error=max(scan.error for scan in scans), **row)


def _proven_by_impulses(call: FunctionCall, want: Tensor | None) -> Scan | None:
    # The call as a scan, if it is linear in its values head by head, and does more than the scans
    # inside of it: its maps are measured.
    name = None if want is None else measurable_values(call, want)
    if want is None or name is None or not _adds_to_inner(call, want):
        return None
    for candidate in candidates_by_impulses(call, name, want.detach()):
        for scan, _ in _compared(call, candidate, want):
            if scan.error <= _tolerance(call, want):
                return scan
    return None


def silenced(result: Any) -> Any:
    """What a function returned, with zeros in place of its numbers."""
    return tree_map(lambda x: 0 * x if torch.is_tensor(x) else x, result)


def _adds_to_inner(call: FunctionCall, want: Tensor) -> bool:
    # Whether a call returns something where the scans inside of it return zeros.
    silence = ScanCalls(lambda call, scan, result: silenced(result), forms_only=True)
    with torch.no_grad(), handled_by(silence):
        rest = first_tensor(call.run())
    return rest is None or float(rest.norm()) > _SMALL * float(want.norm())


def _proven(
    call: FunctionCall, form: ScanForm, roles: dict[str, str], want: Tensor, *, enlarged: bool
) -> Scan | None:
    arguments = form.arguments(roles, call.arguments, want.detach())
    if arguments is None:
        return None
    coarsest = max(TOLERANCE.get(arguments[role].dtype, 1.0) for role in form.needed)
    tolerance = max(coarsest, _tolerance(call, want))
    if tolerance == 1.0:  # not floating point
        return None
    for candidate in form.build(**arguments):
        for scan, share in _compared(call, candidate, want):
            is_told = enlarged or share >= min(_SMALL, _HIDDEN.get(tolerance, _SMALL))
            if scan.error <= tolerance and is_told:
                return scan
            is_near = share < _SMALL and scan.error <= tolerance * _SMALL / share
            if is_near and not enlarged and _holds_enlarged(call, form, roles, scan, share):
                return scan
    return None


def _compared(
    call: FunctionCall, candidate: Candidate, want: Tensor
) -> Iterator[tuple[Scan, float]]:
    # Scans with and without the skip and a gate, and the share of the recurrence in the result.
    # The coefficients are constants, the values and gates keep their graph.
    operator = candidate.operator.detach()
    v = candidate.values.to(operator.dtype)
    recurrence, name = operator.matvec(v), call.function.__qualname__
    want = want if candidate.returned is None else candidate.returned
    skips = (None,) if candidate.skip is None else (candidate.skip.detach(), None)
    for skip, gate, layout in product(skips, (*candidate.gates, None), candidate.layouts):
        mixed = recurrence if skip is None else recurrence + skip.to(v) * v
        with torch.no_grad():
            error, share = _error(recurrence, mixed, gate, layout, want)
        scan = Scan(operator, v, skip, gate, layout, mixed, name, error)
        yield replace(scan, returned=candidate.returned, after=candidate.after), share


def _tolerance(call: FunctionCall, want: Tensor) -> float:
    dtype = call.half or want.dtype
    return TOLERANCE.get(kernels_dtype(want.device) if dtype == torch.float32 else dtype, 1.0)


def _error(
    recurrence: Tensor, mixed: Tensor, gate: Tensor | None, layout: str, want: Tensor
) -> tuple[float, float]:
    # The error relative to what the recurrence adds, and its share of the whole.
    y, added = (t if gate is None else t * gate for t in (mixed, recurrence))
    returned, size = _in_layout(y, layout, want), float(added.norm())
    if returned is None or size == 0:
        return torch.inf, 1.0
    return float((returned - want).norm()) / size, size / max(float(want.norm()), 1e-300)


def _holds_enlarged(
    call: FunctionCall, form: ScanForm, roles: dict[str, str], scan: Scan, share: float
) -> bool:
    # The function itself is called again, with the recurrence as large as the rest.
    if not form.enlarge or is_loop(call.source):
        return False
    factor = share ** (-1 / len(form.enlarge))
    names = [roles[role] for role in form.enlarge]
    again = call.with_arguments({name: call.arguments[name].detach() * factor for name in names})
    with torch.no_grad(), not_intercepted():
        want = first_tensor(again.run())
        enlarged = None if want is None else _proven(again, form, roles, want, enlarged=True)
    return enlarged is not None and enlarged.layout == scan.layout


def _in_layout(y: Tensor, layout: str, like: Tensor) -> Tensor | None:
    # y (B, L, D) in a function's layout; None where that has another shape than a tensor like it.
    axes = layout.replace("S", "")
    if len(axes) != like.dim() or (axes[0] == "L" and len(y) > 1):
        return None
    if "H" in axes:
        H, D = like.shape[axes.index("H")], y.shape[-1]
        P = like.shape[-1] if axes != layout else D // H
        if H * P == 0 or D % (H * P):
            return None
        y = y.unflatten(-1, (-1, H, P)).sum(2) if axes != layout else y.unflatten(-1, (H, P))
        # Heads of values that were padded with zeros, to the width of their keys.
        y = F.pad(y, (0, max(0, like.shape[-1] - P)))
    y = y[0] if axes[0] == "L" else y.transpose(1, 2) if axes[2] == "L" else y
    return y if y.shape == like.shape else None
