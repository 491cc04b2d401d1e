"""The steps of a loop over tokens, and how what they make changes with what they read.

A step is what was called after the result of the step before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor
from torch.func import vmap

from captum_ssm.discovery.scans.trace import Traced, TracedCall, version_of
from captum_ssm.utils.memory import is_lack_of_memory

# The numbers of all maps together; those of longer sequences would not fit into memory.
LARGEST = 1 << 28
LINEAR = 1e-6  # relative error of what a linear function returns in float64
_FACTOR = -1.7  # of a change, to see whether a result changes in proportion

# A slot of each step: which call, counted from the step's end, and which of its arguments.
Slot = tuple[int, int]
# By step, slot and argument: how that argument changes, ``(I, ...)`` of I runs; None as it is.
Change = Callable[[int, Slot, Tensor], Tensor | None]


class NotRead(Exception):
    """Says why a loop is not a scan."""


@dataclass(frozen=True, eq=False)
class LoopSteps:
    """The steps of a loop, in the order in which they ran.

    Args:
        results (tuple of Traced): what each of them returned.
        calls (tuple): the calls of each; of the first one, those that are like the last calls of
            the second one.
    """

    results: tuple[Traced, ...]
    calls: tuple[tuple[TracedCall, ...], ...]

    @classmethod
    def of(cls, results: Sequence[Traced]) -> LoopSteps:
        """The steps that end with some results."""
        orders = [made.call.order for made in results]
        later = [
            before(made, since=order + 1)
            for made, order in zip(results[1:], orders[:-1], strict=True)
        ]
        first = before(results[0], most=len(later[0]))
        pairs = zip(reversed(first), reversed(later[0]), strict=False)
        unlike = (n for n, (a, b) in enumerate(pairs) if a.function != b.function)
        alike = next(unlike, min(len(first), len(later[0])))
        return cls(tuple(results), (first[len(first) - alike :], *later))

    def readings(self) -> Iterator[LoopSteps]:
        """The steps as they ran; then with a first one like the others, if one can be made."""
        yield self
        second, first = self.calls[1], self.calls[0]
        for after in range(min(len(first) + 1, len(second))):
            if (steps := self._from_zeros(second, after)) is not None:
                yield steps
                return

    def _from_zeros(self, second: tuple[TracedCall, ...], after: int) -> LoopSteps | None:
        # A first step that makes b where others make a h + b does so too, of a state of zeros.
        # The last calls of each, so many, are after that.
        first, (result, *_), others = self.calls[0], self.results, self.calls[2:]
        early = second[: len(second) - len(first)]
        carried = {result, *(made for call in first for made in call.made if made is not None)}
        if not any(read in carried for call in early for read in call.made):
            return None
        last, call = first[len(first) - after :], second[-1 - after]
        reads = [
            read
            for a, b in zip(last, second[len(second) - after :], strict=True)
            for read in zip(a.made, b.made, strict=True)
        ]
        made = next((x for x, y in reads if y is not None and y.call is call), None)
        made = made if after else result
        start = None if made is None else _of_zeros(call, made, self)
        if made is None or start is None:
            return None
        second = second[-len(others[0]) :] if others else second
        start = replace(start, order=(last or second)[0].order - 0.5)
        instead: dict[TracedCall, TracedCall] = {}

        def read(x: Traced) -> Traced:
            return Traced(start, 0) if x == made else Traced(instead.get(x.call, x.call), x.output)

        def rewritten(call: TracedCall) -> TracedCall:
            reads = [None if x is None else read(x) for x in call.made]
            return instead.setdefault(call, replace(call, made=reads))

        calls = [[rewritten(call) for call in of_step] for of_step in (last, second, *others)]
        calls[0].insert(0, start)
        return LoopSteps(tuple(map(read, self.results)), tuple(map(tuple, calls)))

    @property
    def are_alike(self) -> bool:
        """Whether all steps call the same functions in the same order."""
        called = [[call.function for call in calls] for calls in self.calls[1:]]
        return bool(self.calls[0]) and all(functions == called[0] for functions in called)

    @property
    def begins(self) -> float:
        """The order of the loop's first call."""
        return self.calls[0][0].order

    def is_carried(self, made: Traced | None, step: int) -> bool:
        """Whether what a step reads was made in an earlier step."""
        before = self.results[step - 1].call.order if step else -1
        return made is not None and self.begins <= made.call.order <= before

    def is_recurrent(self) -> bool:
        """Whether the last step reads what earlier ones made."""
        return any(
            self.is_carried(made, len(self.calls) - 1)
            for call in self.calls[-1]
            for made in call.made
        )

    def depends(self, made: Traced | None, step: int) -> bool:
        """Whether what a step reads depends on earlier steps."""
        if made is None or self.is_carried(made, step):
            return made is not None
        calls = before(made, since=self.begins)
        return any(self.is_carried(read, step) for call in calls for read in call.made)

    def slots(self) -> Iterator[tuple[Slot, list[Slot]]]:
        """The slots at which a step reads, the last first, with all that read the same numbers."""
        reads = [
            ((at, n), None if call.made[n] is None else _place(call, n))
            for at, call in enumerate(reversed(self.calls[-1]))
            for n in range(len(call.made))
        ]
        for slot, place in reads:
            yield slot, [other for other, same in reads if place is not None and same == place]

    def at(self, number: int) -> list[TracedCall]:
        """The call of each step at a number, counted from the step's end."""
        return [calls[-1 - number] for calls in self.calls]

    def made(self, step: int, slot: Slot) -> Traced | None:
        """How what a step reads at a slot was made."""
        return self.calls[step][-1 - slot[0]].made[slot[1]]


def before(
    made: Traced, since: float = 0, most: int | None = None, without: Traced | None = None
) -> tuple[TracedCall, ...]:
    """The calls that something was made by, in their order.

    Args:
        made (Traced): how it was made.
        since (float, optional): the order of the first call that counts. Default: 0
        most (int, optional): how many calls, the last ones. Default: all
        without (Traced, optional): the calls that only this was made by are left out. Default: None
    """
    if made == without:
        return ()
    calls, waiting = dict[float, TracedCall](), {made.call.order: made.call}
    while waiting and (most is None or len(calls) < most):
        call = waiting.pop(max(waiting))
        if call.order >= since:
            calls[call.order] = call
            read = [x for x in call.made if x is not None and x != without]
            waiting |= {x.call.order: x.call for x in read}
    return tuple(calls[order] for order in sorted(calls))


def _place(call: TracedCall, argument: int) -> tuple[object, ...]:
    # Where an argument has its numbers: two slices of one token, ``u[:, t]`` twice, have the same.
    x = call.leaves[argument]
    return x.data_ptr(), x.dtype, x.shape, x.stride(), call.versions[argument]


def _of_zeros(call: TracedCall, made: Traced, steps: LoopSteps) -> TracedCall | None:
    # A call of the second step as it makes something of the first one, where what it reads of that
    # step is zeros; None where it does not.
    first, second = steps.calls[:2]
    carried = {made, *(Traced(call, n) for call in first for n in range(len(call.leaves)))}
    since = steps.results[0].call.order + 1

    def is_carried(x: Traced | None) -> bool:
        calls = () if x is None else before(x, since=since)
        return not carried.isdisjoint([x, *(read for call in calls for read in call.made)])

    known = {
        x: leaf for of in (*first, *second) for x, leaf in zip(of.made, of.leaves, strict=True)
    }
    result, of_state = known.get(made), [is_carried(x) for x in call.made]
    if not any(of_state) or not is_number(result):
        return None
    leaves = [
        torch.zeros_like(x) if is_state else x
        for x, is_state in zip(call.leaves, of_state, strict=True)
    ]
    for n, leaf in enumerate(leaves):
        if of_state[n] or not is_number(leaf) or leaf.shape != result.shape:
            continue
        taken, reads = [*leaves], [made if k == n else None for k in range(len(leaves))]
        taken[n] = result
        returned = call.outputs(taken)
        if len(returned) == 1 and torch.equal(returned[0], result):
            return replace(call, leaves=taken, made=reads, versions=[*map(version_of, taken)])
    return None


class LoopRerun:
    """The steps of a loop called again, with changes that go on where functions are linear."""

    def __init__(self, steps: LoopSteps) -> None:
        self.steps = steps
        self.ended = dict[TracedCall, str]()  # the calls at which a change ended
        self.values = dict[Traced, Tensor]()  # what was made, where changes went on
        self._doubles = dict[int, tuple[Tensor, Tensor]]()

    @torch.no_grad()
    def changes(
        self, change: Change, ends: Collection[Traced] = (), most: int | None = None
    ) -> dict[Traced, Tensor]:
        """How what the steps, or the first ones, make changes, ``(I, ...)`` each.

        Args:
            change (Callable): how arguments change.
            ends (collection of Traced, optional): what is asked for; all where there are none.
                Default: ()
            most (int, optional): how many steps run. Default: all
        """
        calls, known = self.steps.calls[:most], dict[Traced, Tensor]()
        reads = Counter(made for step in calls for call in step for made in call.made)
        for step, at, call in self._in_order(calls):
            changed = dict[int, Tensor]()
            for n, read in enumerate(call.made):
                here = change(step, (at, n), call.leaves[n])
                before = None if read is None else known.get(read)
                both = [x for x in (here, before) if x is not None]
                if both:
                    changed[n] = sum(both[1:], both[0])
            outputs = self._called(call, changed) if changed else {}
            known |= {Traced(call, n): x for n, x in outputs.items()}
            for read in call.made if ends else ():
                reads[read] -= 1
                if read is not None and not reads[read] and read not in ends:
                    known.pop(read, None)
        return known

    @staticmethod
    def _in_order(
        calls: Sequence[Sequence[TracedCall]],
    ) -> Iterator[tuple[int, int, TracedCall]]:
        # Each call with its step and its number, counted from the step's end.
        for step, of_step in enumerate(calls):
            for n, call in enumerate(of_step):
                yield step, len(of_step) - 1 - n, call

    def _called(self, call: TracedCall, changed: dict[int, Tensor]) -> dict[int, Tensor]:
        # The changes of a call's outputs, where these are in proportion.
        leaves: list[Any] = [self._wide(x) for x in call.values()]
        count = len(next(iter(changed.values())))
        for n in call.written:
            changed.setdefault(n, leaves[n].new_zeros(count, *leaves[n].shape))
        if max(x.numel() for x in changed.values()) > LARGEST:
            raise NotRead("its state has too many numbers for an impulse per token")
        at, numbers = [*changed], list[int]()

        def outputs(*changes: Tensor) -> tuple[Tensor, ...]:
            moved = list(leaves)
            for n, x in zip(at, changes, strict=True):
                moved[n] = leaves[n] + x
            returned = call.outputs(moved)
            numbers[:] = [n for n, x in enumerate(returned) if is_number(x)]
            return tuple(returned[n] for n in numbers)

        # Next to each change, a multiple of it, and none at all.
        changes = changed.values()
        try:
            returned = vmap(outputs)(
                *(torch.cat([x, _FACTOR * x, torch.zeros_like(x[:1])]) for x in changes)
            )
        except (RuntimeError, ValueError, TypeError) as error:
            if is_lack_of_memory(error):
                raise
            returned = ()
        if not returned:
            self.ended[call] = call.name
            return {}
        is_linear = torch.ones(count, dtype=torch.bool, device=returned[0].device)
        result = dict[int, Tensor]()
        for n, y in zip(numbers, returned, strict=True):
            each, multiple, none = y[:count] - y[-1], y[count:-1] - y[-1], y[-1]
            differs, size = (x.flatten(1).norm(dim=1) for x in (multiple - _FACTOR * each, each))
            is_linear &= differs <= LINEAR * size + 1e-12 * float(none.norm())
            result[n], self.values[Traced(call, n)] = each, none
        if not bool(is_linear.all()):
            self.ended[call] = call.name
            result = {
                n: torch.where(is_linear.view(-1, *[1] * (x.dim() - 1)), x, 0)
                for n, x in result.items()
            }
        return {n: x for n, x in result.items() if bool(x.any())}

    def _wide(self, x: object) -> object:
        # A tensor of numbers in float64, converted once, and what a model converts numbers to.
        if isinstance(x, torch.dtype) and (x.is_floating_point or x.is_complex):
            return torch.promote_types(x, torch.float64)
        if not is_number(x):
            return x
        if id(x) not in self._doubles:
            self._doubles[id(x)] = x, in_double(x)
        return self._doubles[id(x)][1]


def is_number(x: object) -> TypeGuard[Tensor]:
    """Whether something is a tensor of real or complex numbers."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def in_double(x: Tensor) -> Tensor:
    """A tensor of real or complex numbers in float64, or complex128."""
    return x.to(torch.promote_types(x.dtype, torch.float64))
