"""What the model would answer after each layer: its own final norm and head on the stream there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.graph.relevance_rules import is_norm
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.nested import first_of
from captum_ssm.utils.watch_modules import watch_modules


class Lens:
    """The logit lens, read off the model's own run.

    The blocks are the children of a ``ModuleList``, the norm is the last one that runs before the
    head, and both are checked: the last block's output has to give the model's own logits.

    Args:
        model (nn.Module): a language model with ``get_output_embeddings``.
        positions (list of int): the tokens at which answers are read, R of them.
    """

    def __init__(self, model: nn.Module, positions: list[int]) -> None:
        self.model, self.positions = model, positions
        find = getattr(model, "get_output_embeddings", None)
        self.head = find() if callable(find) else None
        self._lists: dict[nn.ModuleList, list[Tensor]] = {}
        self._norm: tuple[nn.Module, Tensor] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Records what is needed of the run of the model inside."""
        norms = filter(is_norm, self.model.modules())
        lists = [module for module in self.model.modules() if isinstance(module, nn.ModuleList)]
        self._lists = {layers: [] for layers in lists}
        with watch_modules(norms, after=self._keep_norm), ExitStack() as stack:
            for layers in lists:
                stack.enter_context(watch_modules(layers, after=partial(self._keep, layers)))
            yield

    def layers(self, logits: Tensor) -> list[Tensor] | None:
        """The logits after each layer, ``(R, V)`` each; None where the lens does not fit.

        Args:
            logits (Tensor): the model's own, ``(R, V)``.
        """
        if self.head is None or self._norm is None:
            return None
        norm, last = self._norm
        for module, streams in self._lists.items():
            fits = len(streams) == len(module) > 0 and streams[-1].shape == last.shape
            if not fits or not torch.equal(streams[-1], last):
                continue
            after = [self._answers(norm, stream) for stream in streams]
            for ending in self._endings(after[-1], logits):
                if (ending(after[-1]) - logits).abs().max() <= 1e-3 * logits.abs().max():
                    return [ending(scores) for scores in after]
        return None

    def _endings(self, last: Tensor, logits: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
        # What models do with the head's output: nothing, a factor, or a soft cap.
        factor = (last * logits).sum() / last.square().sum().clamp(min=1e-30)
        yield lambda x: factor * x
        for name, cap in vars(getattr(self.model, "config", None) or object).items():
            if "cap" in name and isinstance(cap, (int, float)) and cap > 0:
                yield partial(_capped, cap)

    def _answers(self, norm: nn.Module, stream: Tensor) -> Tensor:
        assert self.head is not None
        weight = self.head.weight
        return self.head(norm(stream[None]).to(weight.dtype))[0].float()

    def _keep(self, module: nn.ModuleList, _: nn.Module, args: Any, kw: Any, output: Any) -> None:
        first = first_of(output)
        if torch.is_tensor(first) and first.dim() == 3:
            self._lists[module].append(first[0, self.positions].detach())

    def _keep_norm(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if args and torch.is_tensor(args[0]) and args[0].dim() == 3:
            self._norm = module, args[0][0, self.positions].detach()


def _capped(cap: float, x: Tensor) -> Tensor:
    return cap * (x / cap).tanh()
