"""Properties that are computed once, without a lock.

:class:`functools.cached_property` of Python 3.10 and 3.11 holds one lock for all objects of a class
while it computes: threads wait for one another, and a child that is forked meanwhile hangs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class cached_property(functools.cached_property):
        """As that of Python 3.12."""

        func: Callable[[Any], Any]
        attrname: str

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            if instance is None:
                return self
            held = vars(instance)
            if self.attrname not in held:
                held[self.attrname] = self.func(instance)
            return held[self.attrname]


__all__ = ["cached_property"]
