"""What scan functions returned while a mixer ran, for when it is run once more to be frozen.

A scan that is written as a loop in Python is most of what such a mixer takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from captum_ssm.discovery.scans.calls import FunctionCall, intercepted, is_built_in, not_intercepted
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.clones import address
from captum_ssm.utils.nested import detached, same_values, tensors_in


class KeptScans:
    """Calls of scan functions in one run of a module, and what they returned.

    Args:
        room (int): the bytes that they may hold. What returned more is not kept.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self._calls: list[tuple[FunctionCall, Any, list[int]]] = []

    @contextmanager
    def running(self, functions: Iterable[Callable[..., Any]]) -> Iterator[None]:
        """Keep the calls of functions. PyTorch's own attention is fast, and is not kept."""
        with intercepted(self._run, [f for f in functions if not is_built_in(f)]):
            yield

    def find(self, call: FunctionCall) -> Any | None:
        """What the same call returned, unless that was changed in place since."""
        for known, result, versions in self._calls:
            is_same = known.source is call.source and known.half is call.half
            if is_same and same_values((known.args, known.kwargs), (call.args, call.kwargs)):
                return result if _versions(result) == versions else None
        return None

    def forget(self) -> None:
        """Let go of all calls."""
        self._calls.clear()

    def _run(self, call: FunctionCall) -> Any:
        with not_intercepted():
            result = call.run()
        recorded = detached((call, result))
        tensors = [*tensors_in((recorded[0].args, recorded[0].kwargs)), *tensors_in(recorded[1])]
        size = sum({address(x): x.nbytes for x in tensors}.values())
        # Nothing says whether tensors made under inference mode were changed since.
        if size <= self.room and not any(x.is_inference() for x in tensors):
            self.room -= size
            self._calls.append((*recorded, _versions(recorded[1])))
        return result


def _versions(result: Any) -> list[int]:
    return [x._version for x in tensors_in(result)]
