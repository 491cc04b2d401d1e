"""Whether autograd tells the truth about what lies between the mixers of a model.

What is measured on a graph is wrong where a part of the model hides from it: a ``detach()`` or
``torch.no_grad()`` around some tokens, a straight-through estimator, a backward pass of its own. So
the model is run again with what its mixers returned held, and some tokens of it and of the inputs
moved a little. A token that changes, and of which the graph says that it depends on none of these,
is made of something that the graph does not show. What a token makes of itself is not asked.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.capture.embedded_ids import entries_of
from captum_ssm.capture.model import extract_logits
from captum_ssm.capture.request import Request
from captum_ssm.capture.session import on_thrown_away
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.mixers import MixerCall, find_mixers
from captum_ssm.mixers.registry import channels_of, known_of
from captum_ssm.utils.clones import repeated
from captum_ssm.utils.nested import first_of, map_tensors, tensors_in, with_first
from captum_ssm.utils.offload import reloaded_in_backward
from captum_ssm.utils.plain_graph import plain_graph
from captum_ssm.utils.retry import retry_with_copies
from captum_ssm.utils.watch_modules import watch_modules
from captum_ssm.wiring.mixing_test import halves

# Texts are cut to so many tokens.
_FEW = 32
# In so many steps some of the tokens are moved: two halves of them and their rests, which tell
# three of four pairs of tokens apart.
_STEPS = 4
# The size of a step, of that of the tokens: what is rounded between them has to move as well.
_STEP = 0.3
# The smallest change that counts, of the largest one.
_LEAST = 1e-3
# What a model raises when moved tokens choose otherwise, as by a router, than those that the held
# results of its mixers belong to: other shapes, or calls that were not made before.
_OTHER_CHOICE = (RuntimeError, ValueError, IndexError, KeyError, TypeError, AssertionError)


HIDDEN = (
    "depends on tokens in a way that autograd does not show (a detach() or torch.no_grad() around "
    "some of them, a straight-through estimator, or a backward pass of its own)"
)


def check_honesty(request: Request, structure: frozenset[Any]) -> None:
    """Raise where tokens are made of what the graph between the mixers does not show.

    Args:
        request (Request): of a model that runs here. A text is looked at by some of its tokens.
        structure (frozenset): what the graph is made of. A model is looked at once for each.

    Raises:
        UnsupportedModelError: naming what is made so.
    """
    known = known_of(request.module)
    if structure <= known.honest:
        return
    found = look_for_hidden(request)
    if found is not None:
        raise UnsupportedModelError(
            f"{found} {HIDDEN}, so that it cannot be told which row of a map is read where. "
            "Expected mixers that are connected by differentiable operations. The maps of single "
            "layers are right all the same (captum_ssm.hidden_attention)."
        )
    known.honest |= structure


def warn_of_hidden(model: nn.Module) -> None:
    """Warn where :func:`look_for_hidden` last found something in a model."""
    found = known_of(model).hidden
    if found is not None:
        warnings.warn(
            f"{found} {HIDDEN}, so relevance may be missing, or lie on other tokens. It is right "
            "where only coefficients are hidden, such as gates and norms.",
            UserWarning,
            stacklevel=2,
        )


@repeated
def look_for_hidden(request: Request) -> str | None:
    """The name of what is made of tokens in a way that its graph does not show, and remember it.

    Args:
        request (Request): as for :func:`check_honesty`.
    """
    known = known_of(request.module)
    if not any(p.is_inference() for p in request.module.parameters()):
        known.hidden = _found(request)
    return known.hidden


def _found(request: Request) -> str | None:
    short = request.shortened(_FEW)
    for one in (request,) if short is None else (short, request):
        try:
            with (
                plain_graph(),
                on_thrown_away(one) as (of_copies, copies),
                reloaded_in_backward(copies.root),
                torch.inference_mode(False),
            ):
                # A model may write into what its own backward pass needs.
                return retry_with_copies(lambda: _hidden(of_copies))
        except Exception:  # a model, or an argument, that cannot be shortened
            if one is request:
                raise
    return None


@dataclass
class _Run:
    # One run whose mixers return what is held: the inputs and what mixers returned (the starts),
    # what mixers are given and the output (the ends).
    request: Request
    held: Sequence[Tensor] = ()
    results: dict[nn.Module, list[Any]] = field(default_factory=dict)
    paths: dict[nn.Module, str] = field(default_factory=dict)
    starts: list[Tensor] = field(default_factory=list)
    ends: list[tuple[str, Tensor]] = field(default_factory=list)

    def __call__(self) -> _Run:
        inputs = [self._start(x) if x.is_floating_point() else x for x in self.request.inputs]
        model, torch_state = self.request.module, torch.random.get_rng_state()
        self.paths = {module: path for path, module in find_mixers(model)}
        if self.held:  # what mixers returned before is exchanged all the same
            for module in self.paths:
                again = iter(self.results.get(module, ()))
                module.__dict__["forward"] = partial(_next, again, module.forward)
        tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
        with (
            watch_modules(self.paths, after=self._after_mixer),
            watch_modules(tables, after=self._embedded),
        ):
            output = extract_logits(self.request.run(tuple(inputs)))
        torch.random.set_rng_state(torch_state)
        self._end("the output", output)
        return self

    def _end(self, name: str, value: Tensor) -> None:
        if value.is_floating_point():
            self.ends.append((name, value))

    def _start(self, value: Tensor) -> Tensor:
        k = len(self.starts)
        found = self.held[k] if k < len(self.held) else value.detach().clone().requires_grad_()
        self.starts.append(found)
        return found.clone()  # a model may write into it

    def _after_mixer(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> Any:
        path = self.paths[module]
        call = MixerCall.of(path, module, args, kwargs, result, channels=channels_of(module))
        self._end(path, call.given_tokens().clone())
        if not self.held:
            # A result with its graph would keep the mixer's weights and activations.
            detached = map_tensors(torch.Tensor.detach, result)
            self.results.setdefault(module, []).append(detached)
        return with_first(result, self._start(first_of(result)))

    def _embedded(self, module: nn.Module, args: Any, kwargs: Any, result: Tensor) -> Any:
        ids, inputs = next(tensors_in((args, kwargs))), self.request.inputs
        is_input = any(entries_of(ids, x) is not None for x in inputs if not x.is_floating_point())
        return self._start(result) if is_input else None


def _next(results: Iterator[Any], forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # What a mixer returned in the first run; it runs itself where it was not called so often.
    found = next(results, None)
    return forward(*args, **kwargs) if found is None else found


def _hidden(request: Request) -> str | None:
    # The name of what depends on more than the graph shows.
    with torch.enable_grad():
        run = _Run(request)()
        promise = _Promise([end for _, end in run.ends], run.starts)
    is_compared, reason = False, "none of them was seen in a run"
    with torch.no_grad():
        for steps in _steps(run.starts, torch.Generator().manual_seed(0)):
            held = [one.detach() + step for one, step in zip(run.starts, steps, strict=True)]
            try:
                after = _Run(request, held, run.results)().ends
            except _OTHER_CHOICE as error:
                reason = f"{type(error).__name__}: {error}"
                continue
            if [end.shape for _, end in after] != [end.shape for _, end in run.ends]:
                reason = "other mixers ran, or on other numbers of tokens"
                continue
            is_compared = True
            moved = [
                (name, (a.double() - b.double()).abs().amax(-1))
                for (name, a), (_, b) in zip(after, run.ends, strict=True)
            ]
            least = _LEAST * max(float(change.amax()) for _, change in moved)
            for k, ((name, change), depends) in enumerate(zip(moved, promise(steps), strict=True)):
                doubtful = (~depends & (change > least)).nonzero().tolist()
                if all(promise.is_shown(k, tuple(token), steps) for token in doubtful):
                    continue
                held = [one.detach() for one in run.starts]
                again = _Run(request, held, run.results)().ends
                if not all(
                    torch.equal(a, b) for (_, a), (_, b) in zip(again, run.ends, strict=True)
                ):
                    return None  # it is another one at each run
                return "the output" if name == "the output" else f"what {name} is given"
    if not is_compared:
        warnings.warn(
            f"{type(request.module).__name__} could not be run with its tokens moved a little "
            f"({reason}), so nothing checks that autograd shows all that lies between its mixers. "
            "The relevance is right if no detach() or torch.no_grad() hides a part of it.",
            UserWarning,
            stacklevel=2,
        )
    return None


def _steps(starts: Sequence[Tensor], generator: torch.Generator) -> list[list[Tensor]]:
    # Steps that move some of the tokens each.
    axes = [1 if x.dim() < 4 else -1 for x in starts]
    sizes = {x.shape[axis] for x, axis in zip(starts, axes, strict=True)}
    chosen = {n: [*islice(halves(n, generator), _STEPS)] for n in sizes}
    found = []
    for k in range(max(map(len, chosen.values()), default=0)):
        steps = []
        for x, axis in zip(starts, axes, strict=True):
            sets = chosen[x.shape[axis]]
            size = _STEP * x.detach().double().square().mean().sqrt()
            step = torch.randn(x.shape, generator=generator).to(x.device) * size.clamp(min=1e-6)
            shape = [1] * x.dim()
            shape[axis] = -1
            steps.append((step * sets[k % len(sets)].to(x.device).view(shape)).to(x.dtype))
        found.append(steps)
    return found


class _Promise:
    """Which tokens of the starts each token of the ends depends on, as the graph says.

    A call says so for all of them at once, by differentiating the backward pass. A kernel's own
    backward pass cannot be differentiated in its turn, and then stands there as if it depended on
    nothing: what a call denies is asked of the backward pass itself, one token at a time.
    """

    def __init__(self, ends: Sequence[Tensor], starts: Sequence[Tensor]) -> None:
        self.ends, self.starts = ends, starts
        self.duals = [torch.zeros_like(end, requires_grad=True) for end in ends]
        self.back: Sequence[Tensor | None] = [None] * len(starts)
        self._read: dict[tuple[int, tuple[int, ...]], list[Tensor | None]] = {}
        live = [k for k, end in enumerate(ends) if end.requires_grad]
        with suppress(RuntimeError):  # it says that it cannot be differentiated twice
            self.back = self._gradients(live, [self.duals[k] for k in live], create_graph=True)

    def __call__(self, steps: list[Tensor]) -> list[Tensor]:
        """Whether each token of the ends depends on one that a step moves.

        A moved token is not a number, which a derivative of zero passes on, such as that of a
        saturated tanh.
        """
        pairs = [
            (one, step.masked_fill(step != 0, torch.nan))
            for one, step in zip(self.back, steps, strict=True)
            if one is not None and one.requires_grad
        ]
        found: Sequence[Tensor] = self.duals  # zeros
        if pairs:
            outputs, given = zip(*pairs, strict=True)
            with suppress(RuntimeError):  # as above
                found = torch.autograd.grad(
                    outputs, self.duals, given, retain_graph=True, materialize_grads=True
                )
        return [(change.detach() != 0).any(-1) for change in found]

    def is_shown(self, end: int, token: tuple[int, ...], steps: list[Tensor]) -> bool:
        """Whether a backward pass from a token of an end comes to a token that a step moves."""
        if (end, token) not in self._read:
            seed = torch.zeros_like(self.ends[end])
            seed[token] = torch.nan
            is_live = self.ends[end].requires_grad
            found = self._gradients([end], [seed]) if is_live else [None] * len(steps)
            self._read[end, token] = [None if g is None else g != 0 for g in found]
        pairs = zip(self._read[end, token], steps, strict=True)
        return any(bool((read & (step != 0)).any()) for read, step in pairs if read is not None)

    def _gradients(
        self, ends: Sequence[int], seeds: Sequence[Tensor], **options: bool
    ) -> Sequence[Tensor | None]:
        live = [self.ends[k] for k in ends]
        return torch.autograd.grad(
            live, self.starts, seeds, retain_graph=True, allow_unused=True, **options
        )
