"""How a model is run on an example, and what of its output is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.capture.model import extract_logits, parameter_names


@dataclass(frozen=True)
class Run:
    """A model as a function of inputs ``(n, ...)``, which returns what answers are read from.

    Args:
        module (nn.Module): the model.
        named (dict, optional): further arguments, one row for each, ``(1, L)``. Default: ``{}``
        read (Callable, optional): from the model's output to a tensor ``(n, ...)``.
            Default: its logits
        takes_several (bool, optional): whether the model takes more than one input at a time.
            Default: True
    """

    module: nn.Module
    named: Mapping[str, Tensor] = field(default_factory=dict)
    read: Callable[[Any], Tensor] = extract_logits
    takes_several: bool = True

    def __call__(self, inputs: Tensor) -> Tensor:
        parts = inputs.split(self.most(len(inputs)))
        return torch.cat([self._of(part) for part in parts]) if len(parts) > 1 else self._of(inputs)

    def _of(self, inputs: Tensor) -> Tensor:
        return self.read(self.module(inputs, **self.arguments(inputs)))

    def arguments(self, inputs: Tensor) -> dict[str, Any]:
        """The further arguments for inputs ``(n, L)``, which may be the first tokens alone."""
        # Nothing is generated, and a cache that is written in place takes no gradient.
        named: dict[str, Any] = {}
        if "use_cache" in parameter_names(self.module):
            named["use_cache"] = False
        return named | {
            name: value[:, : inputs.shape[1]].to(inputs.device).expand(len(inputs), -1)
            for name, value in self.named.items()
        }

    def extra(self, inputs: Tensor) -> dict[str, Any] | None:
        """The further arguments as a method's ``attribute`` takes them; None for none."""
        return self.arguments(inputs) if self.named else None

    @property
    def is_plain(self) -> bool:
        """Whether answers are entries of what the model itself returns."""
        return self.read is extract_logits

    def most(self, count: int) -> int:
        """How many of so many inputs the model takes at a time."""
        return count if self.takes_several else 1

    def with_arguments(self, named: Mapping[str, Tensor]) -> Run:
        """The run with further arguments of one example."""
        return replace(self, named=named)
