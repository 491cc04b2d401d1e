"""Scans that a module writes out: a loop over the tokens, whose results are gathered at its end.

``torch.stack(outputs, 1)``, or ``torch.cat`` of single tokens, is then what a scan function
returns, and the variables of the code around it, with the tensors of the module it belongs to,
are the arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.scans._form import forms_of, needed_names
from captum_ssm.scans._products import is_in_autograd_function, is_of_the_model

GATHERS = frozenset((torch.stack, torch.cat, torch.concat))


@dataclass(frozen=True)
class TokenLoop:
    """A place in a model's code where the results of a loop are gathered.

    Args:
        code (CodeType): of the function that the loop stands in.
        at (int): the instruction that gathers.
    """

    code: CodeType
    at: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "__qualname__", f"a loop in {self.code.co_qualname}")

    def __call__(self, **variables: Any) -> Tensor:
        raise NotImplementedError("a loop runs where it stands in its model's code only.")


@dataclass(frozen=True, eq=False)
class Gathered:
    """What a loop returned, as a function of the variables around it."""

    loop: TokenLoop
    result: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "__qualname__", self.loop.__qualname__)  # type: ignore[attr-defined]

    def __call__(self, **variables: Any) -> Tensor:
        return self.result


token_loop = TokenLoop((lambda: None).__code__, 0)


def run_gather(
    func: Any,
    args: Any,
    kwargs: Any,
    is_known: Callable[[TokenLoop], bool],
    handle: Callable[[Gathered, dict[str, Any]], Any],
) -> Any:
    """What one of :data:`GATHERS` returns.

    Args:
        func, args, kwargs: the call.
        is_known (Callable): whether a loop may be a scan.
        handle (Callable): takes what a known one returned and the variables around it, by name,
            and returns what takes its place.
    """
    result = func(*args, **kwargs)
    if not _is_of_tokens(func, args[0] if args else kwargs.get("tensors"), result):
        return result
    frames = list(_frames(sys._getframe(2)))
    frame = next(filter(is_of_the_model, frames), None)
    # What an autograd function calls does not know the graph.
    if frame is None or any(map(is_in_autograd_function, frames)):
        return result
    loop = TokenLoop(frame.f_code, frame.f_lasti)
    variables = _variables(frame)
    if not is_known(loop) or not any(True for _ in forms_of(list(variables))):
        return result
    return handle(Gathered(loop, result), variables)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _variables(frame: FrameType) -> dict[str, Tensor]:
    # The tensors that a frame has names for, and what a scan cannot do without of those of the
    # module whose method it is. The loop may have used others before, such as a bias.
    owner, needed = frame.f_locals.get("self"), needed_names()
    own = {**owner._buffers, **owner._parameters} if isinstance(owner, nn.Module) else {}
    named = {**{name: x for name, x in own.items() if name in needed}, **frame.f_locals}
    return {name: x for name, x in named.items() if torch.is_tensor(x)}


def _is_of_tokens(func: Any, parts: Any, result: Any) -> bool:
    # Whether a tensor for each token, of one axis less or of size one there, is gathered.
    if not isinstance(parts, (list, tuple)) or len(parts) < 2 or not torch.is_tensor(result):
        return False
    return result.dim() > 2 and (func is torch.stack or len(parts) in result.shape)
