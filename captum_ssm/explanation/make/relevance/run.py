"""How a model is run on an example, or on several as one batch, and what of its output is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.capture.model import extract_logits, parameter_names
from captum_ssm.explanation.make.inputs.media import Media


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
        media (Media, optional): images and sound that the model reads with each text.
            Default: None
        is_causal (bool, optional): whether the output at a token depends on no later one, so that
            texts of several lengths go together, padded at their ends. Default: False
    """

    module: nn.Module
    named: Mapping[str, Tensor] = field(default_factory=dict)
    read: Callable[[Any], Tensor] = extract_logits
    takes_several: bool = True
    is_causal: bool = False
    media: Media | None = None

    def __call__(self, inputs: Tensor) -> Tensor:
        parts = inputs.split(self.most(len(inputs)))
        return torch.cat([self._of(part) for part in parts]) if len(parts) > 1 else self._of(inputs)

    def _of(self, inputs: Tensor) -> Tensor:
        return self.read(self.module(inputs, **self.arguments(inputs)))

    def arguments(self, inputs: Tensor) -> dict[str, Any]:
        """The further arguments for inputs ``(n, L)``, which may be the first tokens alone."""
        # Nothing is generated, and a cache that is written in place takes no gradient.
        by_name: dict[str, Any] = {}
        if "use_cache" in parameter_names(self.module):
            by_name["use_cache"] = False
        return (
            by_name
            | {
                name: value[:, : inputs.shape[1]].to(inputs.device).expand(len(inputs), -1)
                for name, value in self.named.items()
            }
            | ({} if self.media is None else self.media.on(inputs))
        )

    def extra(self, inputs: Tensor) -> dict[str, Any] | None:
        """The further arguments as a method's ``attribute`` takes them; None for none."""
        return self.arguments(inputs) if self.named or self.media else None

    @property
    def is_plain(self) -> bool:
        """Whether answers are entries of what the model itself returns."""
        return self.read is extract_logits

    def most(self, count: int) -> int:
        """How many of so many inputs the model takes at a time."""
        return count if self.takes_several else 1


@dataclass(frozen=True)
class OneInput:
    """One input ``(1, ...)`` of a model, and how the model is run on it."""

    run: Run
    inputs: Tensor

    @property
    def is_text(self) -> bool:
        """Whether it is token ids ``(1, L)``."""
        return are_ids(self.inputs)

    @property
    def size(self) -> int:
        """How many tokens a text has, or how many numbers another input."""
        return self.inputs.shape[1] if self.is_text else self.inputs[0].numel()

    @property
    def group(self) -> tuple[Any, ...]:
        """What inputs that may be parts of one batch have in common."""
        shape = () if self.run.is_causal and self.is_text else tuple(self.inputs.shape)
        return self.is_text, shape, tuple(sorted(self.run.named)), id(self.run.media)

    def until(self, end: int) -> OneInput:
        """The first ``end`` tokens of a text."""
        arguments = {name: value[:, :end] for name, value in self.run.named.items()}
        return OneInput(replace(self.run, named=arguments), self.inputs[:, :end])


def are_ids(inputs: Tensor) -> bool:
    """Whether inputs are token ids: images, series and rows of a table are floats."""
    return not inputs.is_floating_point()


def joined(several: Sequence[OneInput]) -> OneInput:
    """Inputs of one group as one batch ``(B, ...)``: texts are padded at their ends."""
    first = several[0]
    if all(example.inputs is first.inputs for example in several):
        # Methods see that it is one input, and share what they can.
        return OneInput(first.run, first.inputs.expand(len(several), *first.inputs.shape[1:]))
    size = max(example.inputs.shape[1] for example in several)
    inputs = torch.cat(
        [
            nn.functional.pad(example.inputs, (0, size - example.inputs.shape[1]))
            for example in several
        ]
        if first.is_text
        else [example.inputs for example in several]
    )
    arguments = {
        name: torch.cat([example.run.named[name] for example in several])
        for name in first.run.named
    }
    return OneInput(replace(first.run, named=arguments), inputs)
