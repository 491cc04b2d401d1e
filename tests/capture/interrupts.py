"""Signals that come at a chosen moment of a call of the library."""

import contextlib
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch._dynamo
from models import ids, tiny
from torch import nn
from unchanged import fingerprint

import captum_ssm
from captum_ssm import RelevanceFlow
from captum_ssm.attr import Edge
from captum_ssm.interventions import circuit
from captum_ssm.metrics import circuit_faithfulness
from captum_ssm.utils import blocks, copies, patch_functions

ROOT = str(Path(captum_ssm.__file__).parent)
CONTEXTS = contextlib.__file__
TARGET = 4
RANKED = [
    Edge("model.layers.0.mamba", 4, 2),
    Edge("model.layers.1.self_attn", 4, 1),
    Edge("model.layers.1.self_attn", 3, 0),
]

Call = Callable[[nn.Module, torch.Tensor], Any]


class Moment(NamedTuple):
    file: str
    event: str
    line: int
    count: int  # how often it came before, and now


class Stopped(KeyboardInterrupt):
    pass


def within_circuit(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with circuit(model, RANKED), torch.no_grad():
        return model(tokens).logits


def faithfulness(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return circuit_faithfulness(model, tokens, RANKED, TARGET, ks=(1, 2)).scores


CALLS: dict[str, Call] = {
    name: lambda model, tokens, method=method: method(model).attribute(tokens, target=TARGET)
    for name, method in captum_ssm.attr.methods().items()
} | {
    "edges": lambda m, tokens: RelevanceFlow(m).edges(tokens, TARGET).relevance,
    "graph": lambda m, tokens: RelevanceFlow(m).graph(tokens, TARGET).score,
    "components": lambda m, tokens: RelevanceFlow(m).components(tokens, TARGET).score,
    "circuit": within_circuit,
    "circuit_faithfulness": faithfulness,
}


def process() -> dict[str, object]:
    """What of the process a call could leave changed."""
    return {
        "backward": torch.Tensor.backward,
        "calls": nn.Module._call_impl,
        "open": sum(len(change._threads) for change in blocks._ALL),
        "stance": torch._dynamo.eval_frame._stance,
        "running": copies._RUNNING.get(),
        "functions": len(patch_functions._EXCHANGED),
        "bodies": dict(patch_functions._BODIES.get()),
        "filters": list(warnings.filters),
        "modes": torch._C._len_torch_function_stack(),
        "grad": torch.is_grad_enabled(),
        "random": random.getstate(),
    }


def moments_of(run: Callable[[], Any]) -> list[Moment]:
    """The moments of a call at which a signal may come: each line and function of the library when
    the call first comes to it, and those of the standard library's contexts each time."""
    moments: list[Moment] = []
    _traced(_Watch(moments.append), run)
    return sorted({m for m in moments if m.count == 1 or m.file == CONTEXTS})


def interrupted_at(moment: Moment, run: Callable[[], Any]) -> bool:
    """Whether a call that is interrupted at a moment ended there."""

    def stop(now: Moment) -> None:
        if now == moment:
            sys.settrace(None)
            raise Stopped

    with suppress(Stopped):
        _traced(_Watch(stop, moment.file), run)
        return False
    return True


class _Watch:
    # Tells a function of each moment in some files.
    def __init__(self, tell: Callable[[Moment], None], file: str | None = None) -> None:
        self.tell, self.file = tell, file
        self.counts: Counter[tuple[str, str, int]] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        is_ours = file.startswith(ROOT) or file == CONTEXTS
        if not (is_ours if self.file is None else file == self.file):
            return None
        if event in ("call", "line"):
            place = file, event, frame.f_lineno
            self.counts[place] += 1
            del frame, argument  # which the traceback of an interrupt would keep alive
            self.tell(Moment(*place, self.counts[place]))
        return self


def left_changed(name: str, first: int = 0, step: int = 1) -> tuple[list[Moment], list[Moment]]:
    """The moments at which a call was interrupted, and those that left something changed.

    ``first`` and ``step`` say every how many of its moments, from which one on; of those in the
    standard library's contexts, which come again and again, it is a twentieth of that.
    """
    model, tokens = tiny("jamba"), ids(1, 5)

    def run() -> Any:
        return CALLS[name](model, tokens)

    truth, stopped, changed = run(), [], []
    for moment in [*_some(moments_of(run), first, step)]:
        before = fingerprint(model), process()
        if interrupted_at(moment, run):
            stopped.append(moment)
        if (fingerprint(model), process()) != before:
            changed.append(moment)
    torch.testing.assert_close(run(), truth)
    return stopped, changed


def _some(moments: list[Moment], first: int, step: int) -> Iterator[Moment]:
    in_contexts = [moment for moment in moments if moment.file == CONTEXTS]
    yield from in_contexts[first :: 20 * step]
    yield from [moment for moment in moments if moment.file != CONTEXTS][first::step]


def _traced(tracer: Callable[..., Any], run: Callable[[], Any]) -> None:
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        run()
    finally:
        sys.settrace(before)
