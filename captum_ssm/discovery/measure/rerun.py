"""A module that ran once more, cut, and what is said where it cannot be measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from captum_ssm.discovery.measure.cut_run import CutRun
from captum_ssm.discovery.scans import is_product
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.graph.points import Point
from captum_ssm.graph.reachability import reaches_by_sums
from captum_ssm.graph.readers import Entries, entries
from captum_ssm.graph.relevance_rules import ruled
from captum_ssm.mixers.call import MixerCall
from captum_ssm.utils.lazy import cached_property
from captum_ssm.utils.precision import kernels_dtype

# Rounding of products, of values that are compared with what they should be.
_ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2}


class NotMeasured(UnsupportedModelError):
    """A part of a module could not be measured: ``why``.

    Args:
        call (MixerCall): of the module.
        why (str): what could not be measured.
        unread (str, optional): why a loop in it is not a scan. Default: ""
    """

    def __init__(self, call: MixerCall, why: str, unread: str = "") -> None:
        self.why, self.unread = unread or why, unread
        super().__init__(
            f"{call.path} ({type(call.module).__name__}) holds scans, but cannot be measured: "
            f"{self.why}. Register an adapter with captum_ssm.register_mixer(module_type, freeze)."
        )


@dataclass(frozen=True)
class Rerun:
    """A module's call and its cut run. The tokens are flattened: the output is ``(B, L, E)``."""

    call: MixerCall
    run: CutRun

    @property
    def B(self) -> int:
        """The number of examples."""
        return self.run.output.shape[0]

    @property
    def E(self) -> int:
        """The width of the output."""
        return self.run.output.shape[-1]

    @property
    def T(self) -> int:
        """B L, the tokens of all examples."""
        return self.run.output.numel() // self.E

    @property
    def L(self) -> int:
        """The tokens of one example."""
        return self.T // self.B

    @cached_property
    def tokens(self) -> Point:
        """The tokens that the module was given."""
        return Point.of(self.run.tokens)

    @property
    def may_add_input(self) -> bool:
        """Whether the output may be a sum of the tokens and of what is made of them."""
        output, start = self.run.output, self.tokens.edge.node
        is_like = output.requires_grad and output.shape == self.run.tokens.shape
        return is_like and reaches_by_sums(Point.of(output).edge.node, start, {start})

    def refused(self, why: str) -> NotMeasured:
        """The error for what cannot be measured."""
        # A loop beside a scan is not the reason.
        has_scan = any(not is_product(cut.function) for cut in self.run.scans)
        return NotMeasured(self.call, why, "" if has_scan else self.run.unread)


def ruled_entries(
    later: Point, earlier: Point, *, centered: bool = True, where: Tensor | None = None
) -> Entries | None:
    """As :func:`entries`, with activations, norms and products by the rules of relevance."""
    with ruled([later.edge.node], [earlier.edge.node], centered=centered):
        return entries(later, earlier, where=where)


def is_close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    return is_small(a.double() - b.double(), b)


def is_small(x: Tensor, of: Tensor) -> bool:
    """Whether a tensor is no more than the rounding of another one."""
    return float(x.norm()) <= _ROUNDING[kernels_dtype(of.device)] * float(of.norm())
