"""Whether autograd tells the truth about what lies between the mixers of a model.

What is measured on a graph is wrong where a part of the model hides from it: a ``detach()`` or
``torch.no_grad()`` around some tokens, a straight-through estimator, a backward pass of its own. So
the model is run again with what its mixers returned held, and some tokens of it and of the inputs
moved a little. A token that changes, and of which the graph says that it depends on none of these,
is made of something that the graph does not show, and relevance would lie on other tokens. Where
the tokens are the right ones, the sizes are compared: a small step of all of them against the
graph's derivative along it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.capture.held_run import HeldRun
from captum_ssm.capture.promise import Promise
from captum_ssm.capture.record import GradientsStayOn, record
from captum_ssm.capture.request import Request
from captum_ssm.capture.token_steps import STEP, steps_of_others, steps_of_some
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.mixers.registry import known_of
from captum_ssm.utils.clones import repeated
from captum_ssm.utils.plain_graph import plain_graph
from captum_ssm.utils.retry import retry_with_copies

# Texts are cut to so many tokens.
_FEW = 32
# The smallest change that counts, of the largest one.
_LEAST = 1e-3
# The sizes are compared by a step forth and one back, of so much of the tokens' size, of the eps of
# their dtype: what is rounded in them is then as small as what is not linear.
_POWER = 1 / 3
# The smallest share of a token's change that counts; and how much more than what the two steps have
# in common, by which the change is not linear, or jumps.
_LEAST_SHARE, _TIMES_BENT = 0.02, 3
# Steps are halved so often to see whether what they change jumps.
_HALVINGS = 12
# A value is rounded by so many eps, through all that is computed on the way.
_ROUNDINGS = 8


@dataclass(frozen=True)
class Hidden:
    """What is made of tokens in a way that its graph does not show.

    Args:
        name (str): what it is.
        share (float, optional): the part of a small change there that the graph does not show,
            where it shows the tokens that it comes from. Default: None, where it does not
        is_choice (bool, optional): it stays as it is until it jumps. Default: False
    """

    name: str
    share: float | None = None
    is_choice: bool = False

    @property
    def is_wiring(self) -> bool:
        """Whether small changes go other ways than the graph shows."""
        return self.share is None and not self.is_choice

    def __str__(self) -> str:
        if self.is_choice:
            return (
                f"{self.name} depends on a choice between tokens (an order, a threshold, the "
                "largest of them), which the explanation takes as a constant"
            )
        part = "" if self.share is None else f", for {self.share:.0%} of what they change there"
        return (
            f"{self.name} depends on tokens in a way that autograd does not show (a detach() or "
            "torch.no_grad() around some of them, a straight-through estimator, or a backward pass "
            f"of its own){part}"
        )


def check_honesty(
    request: Request,
    structure: frozenset[Any],
    operations: frozenset[Any],
    *,
    with_output: bool = True,
) -> None:
    """Raise where tokens are made of others than the graph between the mixers shows.

    Where they are made of these by more than it shows, or by a choice, a warning says so.

    Args:
        request (Request): of a model that runs here. A text is looked at by some of its tokens.
        structure (frozenset): what the graph is made of. A model is looked at once for each.
        operations (frozenset): those of it that are functions which the run called.
        with_output (bool, optional): look at what the output is made of, too. Whole maps do not
            depend on it. Default: True

    Raises:
        UnsupportedModelError: naming what is made so.
    """
    known = known_of(request.module)
    # What is hidden may be gone from a graph that is made of less.
    is_known = structure == known.hidden_in if known.hidden else structure <= known.honest
    hidden: Hidden | None = known.hidden
    if not with_output and (hidden or not is_known):
        hidden = _look_before_the_output(request, structure, operations)
    elif not is_known:
        hidden = look_for_hidden(request, structure, operations)
    if hidden is not None and hidden.is_wiring:
        raise UnsupportedModelError(
            f"{hidden}, so that it cannot be told which row of a map is read where. Expected "
            "mixers that are connected by differentiable operations. The maps of single layers "
            "are right all the same (captum_ssm.hidden_attention)."
        )
    _warn(hidden)


def warn_of_hidden(model: nn.Module) -> None:
    """Warn where :func:`look_for_hidden` last found something in a model."""
    _warn(known_of(model).hidden)


def _warn(hidden: Hidden | None) -> None:
    if hidden is not None:
        warnings.warn(
            f"{hidden}, so relevance may be missing, or lie on other tokens. It is right where "
            "only coefficients are hidden, such as gates and norms.",
            UserWarning,
            stacklevel=2,
        )


@repeated
def look_for_hidden(
    request: Request, structure: frozenset[Any], operations: frozenset[Any]
) -> Hidden | None:
    """What is made of tokens in a way that its graph does not show, which is remembered.

    The arguments are those of :func:`check_honesty`.
    """
    known = known_of(request.module)
    if _is_of_inference(request):
        return None
    known.hidden = hidden = _found(request, operations)
    if hidden is None:
        known.honest |= structure
    else:
        known.hidden_in = structure
    return hidden


@repeated
def _look_before_the_output(
    request: Request, structure: frozenset[Any], operations: frozenset[Any]
) -> Hidden | None:
    known, key = known_of(request.module), ("before the output", structure)
    if key in known.honest or _is_of_inference(request):
        return None
    hidden = _found(request, operations, with_output=False)
    known.honest |= frozenset() if hidden else {key}
    return hidden


def _is_of_inference(request: Request) -> bool:
    # Weights that were made under inference mode have no graph, and nobody counts writes to them.
    return any(p.is_inference() for p in request.module.parameters())


def _found(
    request: Request, operations: frozenset[Any], *, with_output: bool = True
) -> Hidden | None:
    short = request.shortened(_FEW)
    if short is not None:
        with suppress(Exception):  # a model, or an argument, that cannot be shortened
            if operations <= record(short).operations:  # else a branch is for long texts
                return _looked_at(short, with_output)
    return _looked_at(request, with_output)


def _looked_at(request: Request, with_output: bool) -> Hidden | None:
    def look() -> Hidden | None:
        with ExitStack() as copies:
            return _hidden(partial(HeldRun, request, copies, with_output))

    with plain_graph(), torch.inference_mode(False):
        # A model may write into what its own backward pass needs.
        return retry_with_copies(look)


def _hidden(held: Callable[[], HeldRun]) -> Hidden | None:
    # What depends on more than the graph shows.
    with torch.enable_grad():
        run = held()
        if not any(end.requires_grad for _, end in run.ends):  # all of it runs under no_grad()
            with GradientsStayOn():
                run = held()
        promise = Promise([end for _, end in run.ends], run.starts)
    is_compared, reason = False, "none of them was seen in a run"
    unshown: Hidden | None = None
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        several = steps_of_some(run.starts, generator)
        # The last of them are taken only where the sizes leave a doubt.
        tried = [(steps, False) for steps in several[:-1]]
        if run.with_output:
            others = steps_of_others(run.starts, promise, generator)
            tried += [(steps, True) for steps in others]
        for steps, are_others in tried:
            outcome = _from_others(run, promise, steps, choices=are_others)
            if isinstance(outcome, Hidden) and outcome.is_wiring:
                return outcome if run.is_repeated() else None
            if isinstance(outcome, str):
                reason = outcome
            else:
                is_compared, unshown = True, unshown or outcome
        small = _Small.of(run, promise) if is_compared else None
        if small is not None and small.misses(run):
            outcome = _from_others(run, promise, several[-1])
            more = outcome if isinstance(outcome, Hidden) else _unshown(run, promise, small)
            unshown = more or unshown
    if unshown is not None and run.is_repeated():
        return unshown
    if not is_compared:
        warnings.warn(
            f"{type(run.request.module).__name__} could not be run with its tokens moved a little "
            f"({reason}), so nothing checks that autograd shows all that lies between its mixers. "
            "The relevance is right if no detach() or torch.no_grad() hides a part of it.",
            UserWarning,
            stacklevel=2,
        )
    return None


def _from_others(
    run: HeldRun, promise: Promise, steps: Sequence[Tensor], *, choices: bool = False
) -> Hidden | str | None:
    # What steps of some tokens change, and the graph says that it does not depend on these; why
    # they cannot be compared, in words. What jumps may be a mere choice, such as an order.
    after = run.moved(steps)
    if isinstance(after, str):
        return after
    moved = [
        (name, _changes(before, there))
        for (name, before), there in zip(run.ends, after, strict=True)
    ]
    least = _LEAST * max(float(change.nan_to_num(posinf=0.0).amax()) for _, change in moved)
    choice = None
    for k, ((name, change), depends) in enumerate(zip(moved, promise(steps), strict=True)):
        doubtful = (~depends & (change > least)).nonzero().tolist()
        denied = [
            tuple(index) for index in doubtful if not promise.is_shown(k, tuple(index), steps)
        ]
        if denied:
            token = max(denied, key=lambda one: change[one])
            first, jump = _beginning(run, k, token, steps, float(change[token]))
            # A maximum over tokens, of which the graph shows the largest, only bends where others
            # become the largest.
            jumps = jump > _LEAST_SHARE * float(change[token])
            if first == 0 or (jumps and not choices):
                return Hidden(name)
            if jumps:
                choice = choice or Hidden(name, is_choice=True)
    return choice


def _beginning(
    run: HeldRun, end: int, token: tuple[int, ...], steps: Sequence[Tensor], change: float
) -> tuple[float, float]:
    # The part of the steps up to which they do not change a token, and by how much it jumps there.
    before = run.ends[end][1]
    eps = torch.finfo(before.dtype).eps
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        after = run.moved([middle * step for step in steps])
        if isinstance(after, str):
            break  # it runs other parts there
        moved = float(_changes(before, after[end])[token])
        if moved > 0:
            high, change = middle, moved
        else:
            low = middle
    size = float(before[token].nan_to_num(0.0, 0.0, 0.0).double().norm())
    return low, change - 2 * _ROUNDINGS * eps * size


def _changes(before: Tensor, after: Tensor) -> Tensor:
    # By how much each token changes: infinitely where a number is none any more. What is infinite
    # in both, such as a masked logit, does not.
    change = (after.double() - before.double()).abs().masked_fill(after == before, 0.0)
    return change.masked_fill(before.isnan(), 0.0).nan_to_num(torch.inf, torch.inf).amax(-1)


@dataclass(frozen=True)
class _Small:
    # A small step of all tokens: its length, the eps of what is computed, the ends after it, and
    # what the graph's derivative says that it changes.
    steps: list[Tensor]
    length: float
    eps: float
    after: list[Tensor]
    promised: list[Tensor]

    @classmethod
    def of(cls, run: HeldRun, promise: Promise) -> _Small | None:
        # None where the ends cannot be compared.
        dtypes = {x.dtype for x in (*run.starts, *(end for _, end in run.ends))}
        eps = max(torch.finfo(dtype).eps for dtype in dtypes)
        generator = torch.Generator().manual_seed(1)
        length = eps**_POWER
        # Each number moves by a part of itself: a token of zero would move too far for its norm.
        noise = (torch.randn(x.shape, generator=generator).to(x) for x in run.starts)
        steps = [length * r * x.detach() for r, x in zip(noise, run.starts, strict=True)]
        after = run.moved(steps)
        return (
            None if isinstance(after, str) else cls(steps, length, eps, after, promise.along(steps))
        )

    def misses(self, run: HeldRun) -> bool:
        # Whether a change is not what the derivative says, or bends.
        for (_, before), there, known in zip(run.ends, self.after, self.promised, strict=True):
            changed = there.double() - before.double()
            least = _LEAST_SHARE * changed.norm(dim=-1)
            allowed = least + _ROUNDINGS * self.eps * before.norm(dim=-1)
            if bool(((changed - known).norm(dim=-1) > allowed).any()):
                return True
        return False


def _unshown(run: HeldRun, promise: Promise, small: _Small) -> Hidden | None:
    # What a small step of all tokens changes by more, or less, than the graph's derivative says.
    steps, length = small.steps, small.length
    back = run.moved([-step for step in steps])
    if isinstance(back, str):
        return None
    for k, (name, before) in enumerate(run.ends):
        here, there, before, known = (
            x.double() for x in (small.after[k], back[k], before, small.promised[k])
        )
        changed, bent = (here - there) / 2, (here + there) / 2 - before
        missing, size = changed - known, changed.norm(dim=-1)
        allowed = (
            _LEAST_SHARE * torch.maximum(size, known.norm(dim=-1))
            + _TIMES_BENT * bent.norm(dim=-1)
            + _ROUNDINGS * small.eps * before.norm(dim=-1)
        )
        doubtful = (missing.norm(dim=-1) > allowed) & (size > _LEAST * size.amax())
        if not bool(doubtful.any()):
            continue
        seed = torch.nn.functional.normalize(missing, dim=-1) * doubtful[..., None]
        # A kernel's backward pass may stand in the derivative as zero.
        left = float((seed * changed).sum()) - promise.of(k, seed, steps)
        if left <= float(allowed[doubtful].sum()):
            continue
        after = run.moved([STEP / length * step for step in steps])
        far = None if isinstance(after, str) else (after[k].double() - before) * (length / STEP)
        if far is None or (
            _goes_on(changed, far, doubtful) and _goes_on(missing, far - known, doubtful)
        ):
            return Hidden(name, min(1.0, left / float(size[doubtful].sum())))
    return None


def _goes_on(change: Tensor, far: Tensor, at: Tensor) -> bool:
    # Whether a change by small steps is there in long ones too, in their unit. What is rounded
    # stands still in small ones, and a norm of nearly nothing does in long ones.
    small, far = change[at], far[at]
    return float((small * far).sum()) > 0.5 * float(small.square().sum())
