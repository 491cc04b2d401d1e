r"""A loop over tokens whose coefficients are computed in its steps, read off the calls it made.

A step is what was called after the result of the step before it. A loop is a scan if its steps
have *values* :math:`v_t`, which do not depend on earlier steps, and *states* :math:`h_t`, which
hold all that the step's result depends on of earlier steps, with

.. math::
    h_t = \sum_s W_{ts} \odot v_s

where all else is held at what it was. Nothing is known of the functions that are called. Each is
called again with changed arguments, and counts as linear where its result changes in proportion; a
change ends at all others, whose results are coefficients. So W is what the model's own code returns
of one impulse per token. Where it is a product of decays, one run with all impulses at once tells.
What a step makes of its state, such as a gate or a skip, is called again on other states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from captum_ssm.discovery.scans.form import Candidate
from captum_ssm.discovery.scans.forms.states import diagonal_states
from captum_ssm.discovery.scans.steps import (
    LARGEST,
    LINEAR,
    LoopRerun,
    LoopSteps,
    NotRead,
    Slot,
    before,
    in_double,
    is_number,
)
from captum_ssm.discovery.scans.trace import Traced
from captum_ssm.operators import DiagonalOperator, PermutedOperator, TokenOperator, WeightsOperator

_FIRST = 4  # steps that readings of the values are tried on
_AT_ONCE = 8  # readings that are tried in one run


def read_loop(
    parts: Sequence[Traced | None], gathered: Tensor, axis: int, tolerance: float
) -> Iterator[Candidate]:
    """What a loop over tokens may compute.

    ``parts`` tell, by token, how the result of its step was made, and ``gathered`` are the results.
    ``tolerance`` is the relative error of what the model computed.

    Raises:
        NotRead: after the last candidate, to say what stands in the way; nothing of what is not a
            recurrence.
    """
    made = [(part, at) for at, part in enumerate(parts) if part is not None]
    made.sort(key=lambda step: step[0].call.order)
    if len(parts) < 2 or len({part.call.order for part, _ in made}) < len(parts):
        raise NotRead("")
    at, why = tuple(at for _, at in made), ""
    for steps in LoopSteps.of([part for part, _ in made]).readings():
        try:
            yield from _read(steps, at, gathered, axis, tolerance)
        except NotRead as error:
            why = why or str(error)
    raise NotRead(why)


def _read(
    steps: LoopSteps, at: tuple[int, ...], gathered: Tensor, axis: int, tolerance: float
) -> Iterator[Candidate]:
    if not steps.calls[0] or not steps.is_recurrent():
        raise NotRead("")
    if not steps.are_alike:
        raise NotRead("its steps do not all call the same functions")
    yield from _Loop(steps, at, gathered, axis, tolerance).candidates()


@dataclass(frozen=True, eq=False)
class _Reading:
    # Where the values are read in each step, and the state that is made of them in each.
    slots: list[Slot]
    states: list[Traced]


@dataclass(frozen=True, eq=False)
class _Loop:
    # The steps of a loop, which token each of them is, the tensor, with the axis of the tokens,
    # that their results are gathered in, and the relative error of what the model computed.
    steps: LoopSteps
    at: tuple[int, ...]
    gathered: Tensor
    axis: int
    tolerance: float

    def candidates(self) -> Iterator[Candidate]:
        """What the loop may compute: its states are its results, or what these are made of.

        Raises:
            NotRead: after the last candidate.
        """
        readings, others, mixed = [*self._readings()], list[tuple[int, _Reading]](), set[int]()
        for first in range(0, len(readings), _AT_ONCE):
            for number, reading in self._states(readings[first : first + _AT_ONCE], mixed):
                if number:
                    others.append((number, reading))
                else:
                    yield from self._of(reading)
        for _, reading in sorted(others, key=lambda other: other[0]):
            yield from self._of(reading)
        whys = [self._ended(), "its steps mix channels, so no map per head holds them"]
        whys = [why for why, holds in zip(whys, (whys[0], mixed), strict=True) if holds]
        raise NotRead("; ".join(whys) or "its steps add up more than one thing of their tokens")

    def _readings(self) -> Iterator[list[Slot]]:
        # Where the values may be: what each step reads anew, and not of earlier steps. The last
        # such reading first, then all of the same thing.
        steps, seen = self.steps, set[tuple[Slot, ...]]()
        for slot, alike in steps.slots():
            if slot[0] >= len(steps.calls[0]):
                continue
            made = [steps.made(step, slot) for step in range(len(steps.calls))]
            is_new = None not in made and len({*made}) == len(made)
            if not is_new or not is_number(steps.calls[-1][-1 - slot[0]].leaves[slot[1]]):
                continue
            if any(steps.depends(read, step) for step, read in enumerate(made)):
                continue
            for slots in ([slot], alike):
                if tuple(slots) not in seen:
                    seen.add(tuple(slots))
                    yield slots

    def _states(
        self, readings: Sequence[list[Slot]], mixed: set[int]
    ) -> Iterator[tuple[int, _Reading]]:
        # What is made in each step of the values by some readings, and holds all that the result of
        # the step depends on of earlier steps, with the number of its call. Noted are calls
        # whose channels are mixed.
        rerun, first = LoopRerun(self.steps), self.steps.calls[0]
        read = [first[-1 - slots[0][0]].values()[slots[0][1]] for slots in readings]
        noise = [_noise(x) for x in read]

        def change(step: int, slot: Slot, x: Tensor) -> Tensor | None:
            changed = [n for n, slots in enumerate(readings) if slot in slots]
            if not changed:
                return None
            rows = in_double(x).new_zeros(len(readings), 3, *x.shape)
            for n in changed:
                rows[n, 0] = in_double(x)
                if step == 0:
                    rows[n, 1], rows[n, 2] = 1, noise[n].view(x.shape)
            return rows.flatten(0, 1)

        known = rerun.changes(change, most=_FIRST)
        for number, call in enumerate(reversed(first)):
            for output in sorted(made.output for made in known if made.call is call):
                states = [Traced(call, output) for call in self.steps.at(number)]
                if not all(made in known for made in states[:_FIRST]) or not self._hold(states):
                    continue
                recorded = [rerun.values[made] for made in states[:_FIRST]]
                for n, slots in enumerate(readings):
                    changes = [known[made][3 * n : 3 * n + 3] for made in states[:_FIRST]]
                    is_state, is_mixed = self._are_states(recorded, changes, noise[n])
                    mixed |= {number} if is_mixed else set()
                    if is_state and not is_mixed:
                        yield number, _Reading(slots, states)

    def _are_states(
        self, recorded: Sequence[Tensor], changes: Sequence[Tensor], noise: Tensor
    ) -> tuple[bool, bool]:
        # Whether what steps made is all made of the values, and whether channels are mixed: by how
        # it changes with the values, with ones as the first of them, and with noise.
        are_alike = changes[0][0].squeeze().shape == noise.squeeze().shape
        if not are_alike or not any(bool(x[1].any()) for x in changes[1:]):
            return False, False
        pairs = zip(changes, recorded, strict=True)
        return (
            all(_is_close(x[0], y, self.tolerance) for x, y in pairs),
            not all(_is_close(x[2], noise.view_as(x[2]) * x[1]) for x in changes),
        )

    def _hold(self, states: Sequence[Traced]) -> bool:
        # Whether a step's result depends on earlier steps by way of its state only.
        steps = self.steps
        for step, (result, state) in enumerate(zip(steps.results, states, strict=True)):
            calls = before(result, since=steps.begins, without=state)
            reads = {read for call in calls for read in call.made if read != state}
            if any(steps.is_carried(read, step) for read in reads):
                return False
        return True

    def _of(self, reading: _Reading) -> Iterator[Candidate]:
        # What the loop computes of the values by a reading.
        rerun, order = LoopRerun(self.steps), torch.tensor(self.at, device=self.gathered.device)
        states, (number, argument) = reading.states, reading.slots[0]
        with torch.no_grad():
            recorded = [made.call.outputs(made.call.values())[made.output] for made in states]
        after = partial(self._after, states, recorded[0].shape)
        # A loop over the tokens of one example gathers (L, D).
        shape = torch.Size([1] * (self.gathered.dim() == 2) + [*recorded[0].shape])
        recorded = [x.reshape(shape) for x in recorded]
        read = [call.values()[argument].reshape(shape) for call in self.steps.at(number)]
        values, returned = self._by_token(read), self._by_token(recorded)
        changes = partial(self._changes, rerun, reading, shape)
        for candidate in _candidates(changes, values, len(read)):
            operator = candidate.operator
            if bool((order.diff() != 1).any()):
                operator = PermutedOperator(operator, order)
            yield replace(candidate, operator=operator, returned=returned, after=after)

    def _by_token(self, of_steps: Sequence[Tensor]) -> Tensor:
        # What steps made, (B, ...) each, as one (B, L, D); (B, L, 2, D) of complex numbers.
        x = torch.stack([of_steps[step] for step in self._step_of], 1).flatten(2)
        return torch.stack([x.real, x.imag], 2) if x.is_complex() else x

    @property
    def _step_of(self) -> list[int]:
        # By token.
        return sorted(range(len(self.at)), key=lambda step: self.at[step])

    def _changes(
        self, rerun: LoopRerun, reading: _Reading, shape: torch.Size, impulses: Tensor
    ) -> Tensor:
        # How the states change with impulses (I, L), by step, in all channels of the values:
        # (L, I, B, D).
        def change(step: int, slot: Slot, x: Tensor) -> Tensor | None:
            if slot not in reading.slots:
                return None
            size = impulses[:, step].to(in_double(x)).view(-1, *[1] * x.dim())
            return size.expand(-1, *x.shape)

        known = rerun.changes(change, {*reading.states})
        like = next(iter(known.values()))
        none = like.new_zeros(len(impulses), *shape)
        return torch.stack([known.get(m, none).view_as(none) for m in reading.states]).flatten(3)

    def _after(self, states: Sequence[Traced], shape: torch.Size, y: Tensor) -> Tensor:
        # What the loop gathers of other states (B, L, D).
        y = torch.complex(*y.unbind(2)) if y.dim() == 4 else y
        parts = [*self.gathered.unbind(self.axis)]
        for at, state, result, calls in zip(
            self.at, states, self.steps.results, self.steps.calls, strict=True
        ):
            known = {state: y[:, at].reshape(shape)}
            for call in calls:
                if call.order > state.call.order and any(m in known for m in call.made):
                    read = zip(call.values(), call.made, strict=True)
                    outputs = call.outputs([known.get(m, x) if m else x for x, m in read])
                    known |= {Traced(call, n): x for n, x in enumerate(outputs)}
            parts[at] = known[result].reshape(parts[at].shape)
        return torch.stack(parts, self.axis)

    def _ended(self) -> str:
        # What earlier steps made is followed to where it is not linear.
        rerun, last = LoopRerun(self.steps), len(self.at) - 1

        def change(step: int, slot: Slot, x: Tensor) -> Tensor | None:
            made = self.steps.made(step, slot)
            if step < last or not is_number(x) or not self.steps.is_carried(made, step):
                return None
            return _noise(x)[None]

        rerun.changes(change)
        ended = ", ".join(dict.fromkeys(rerun.ended.values()))
        return ended and (
            "what its steps add up depends on earlier steps, by way of functions that are not "
            f"linear ({ended})"
        )


def _candidates(
    changes: Callable[[Tensor], Tensor], values: Tensor, length: int
) -> Iterator[Candidate]:
    # A sum with decays, of real or complex numbers; then whatever maps there are.
    sums = changes(torch.ones(1, length))[:, 0].transpose(0, 1)
    ratio = (sums[:, 1:] - 1) / sums[:, :-1]
    decays = torch.cat([torch.ones_like(ratio[:, :1]), ratio], 1)
    dtype = torch.promote_types(values.dtype, torch.float32)
    if sums.is_complex():
        parts = torch.stack([decays.real, decays.imag], 2).to(dtype)
        if bool(parts.isfinite().all()):
            yield from diagonal_states(parts, values)
        return
    if bool(((decays > 0) & (decays <= 1 + LINEAR)).all()):
        step = -decays.clamp(max=1).log().to(dtype)
        ones = torch.ones_like(step)
        state = ones[..., :1, None]
        operator: TokenOperator = DiagonalOperator(step, ones, -ones[0, 0, :, None], state, state)
        yield Candidate(operator=operator, values=values, layouts=("BLD",))
    if values.numel() * length > LARGEST:
        raise NotRead(f"its maps of {length} tokens have more than 2^28 numbers")
    maps = changes(torch.eye(length)).permute(2, 3, 0, 1)  # (B, D, L, L)
    width = next(width for width in range(maps.shape[1], 0, -1) if _are_heads(maps, width))
    operator = WeightsOperator(maps[:, ::width].to(dtype), width=width)
    yield Candidate(operator=operator, values=values, layouts=("BLD",))


def _noise(x: Tensor) -> Tensor:
    # As much as a tensor holds, without a generator.
    count = torch.arange(1, x.numel() + 1, device=x.device)
    return in_double((count * count.double().sqrt()).cos().view(x.shape).to(in_double(x)))


def _are_heads(maps: Tensor, width: int) -> bool:
    # Whether groups of so many channels have one map each.
    if maps.shape[1] % width:
        return False
    heads = maps.unflatten(1, (-1, width))
    return width == 1 or _is_close(heads[:, :, :1].expand_as(heads), heads)


def _is_close(x: Tensor, y: Tensor, tolerance: float = LINEAR) -> bool:
    return float((x - y).norm()) <= tolerance * float(y.norm())
