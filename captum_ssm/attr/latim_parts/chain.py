r"""ALTI-Logit through the layers of a model (Pitorro & Treviso, 2025, eq. 7-8).

Each mixer adds its output y to a residual stream. Let :math:`d` be the score's coefficients at y,
along the ways that lead around all later mixers. Then the score is, except for bias terms,

.. math::
    s = \langle d_0, h \rangle + \sum_\lambda \langle d_\lambda, y_\lambda \rangle,

where h is the stream before the first mixer, and each y is the sum of its vectors. Relevance is
mixed within a layer by ALTI, and carried between layers as the wiring says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from captum_ssm.attr.latim_parts.alti import Alti, of_tiles
from captum_ssm.attr.latim_parts.contributions import Contributions
from captum_ssm.capture import FrozenCall, FrozenModel
from captum_ssm.capture.span_target import token_ids
from captum_ssm.errors import TargetError
from captum_ssm.operators.composed import sum_of
from captum_ssm.utils.integers import as_integers
from captum_ssm.utils.progress import Bar
from captum_ssm.wiring.wiring import INPUT


@dataclass(frozen=True)
class LayerStep:
    """Mixers side by side in a residual stream, and how the score reads what they add to it.

    Groups are mixers, with the score's coefficients at what these returned; the direction is that
    of its coefficients at the stream before them. What else is added to each token until the next
    step is local, if it is not frozen. All are ``(B, T, E)``.
    """

    groups: list[tuple[list[FrozenCall], Tensor]]
    before: Tensor
    direction: Tensor
    local: Tensor | None = None

    @property
    def layers(self) -> list[FrozenCall]:
        """All mixers."""
        return [layer for group, _ in self.groups for layer in group]

    def added(self) -> Tensor:
        """What the mixers add to the score, ``(B,)``."""
        return sum_of([dot(direction, output_of(group)) for group, direction in self.groups])

    def alti(self, parts: Contributions) -> Alti:
        """The mixing of the mixers' vectors with the stream, of the first examples if these do."""
        return Alti(parts, self.before[: parts.batch])


@dataclass(frozen=True)
class Decomposition:
    """A score ``(B,)`` as what the layers' vectors, the first stream and bias terms add up to.

    Steps are by step of the model's wiring. ``outside`` is relevance, in the shape of each input,
    of what the score reads of it outside the first stream, if anything.
    """

    frozen: FrozenModel
    steps: dict[int, LayerStep]
    score: Tensor
    outside: Sequence[Tensor] = ()
    with_stream: bool = True

    def at_grid(self, grid: int, mode: str | None) -> Decomposition:
        """Only the layers of one grid, from which relevance is interpolated if ``mode`` says how.

        The score is then the part that leads around all mixers of later grids.
        """
        on_grid = self.frozen.steps_of(grid)
        frozen = self.frozen if mode is None else self.frozen.from_grid(grid, mode)
        steps = {i: step for i, step in self.steps.items() if i in on_grid}
        first = steps[min(steps)]
        added = [dot(first.direction, first.before), *(step.added() for step in steps.values())]
        return Decomposition(frozen, steps, sum_of(added))

    def at_layer(self, layer: int | str) -> Decomposition:
        """Only what one layer adds to the score; relevance is not mixed by the layers before."""
        chosen = self.frozen.select_one(layer)
        step = self.steps.get(chosen.step, self.steps[max(self.steps)])
        # A mixer that is not given the stream is in no step: it is read as the last stream is.
        of_layer = {id(layer): d for group, d in step.groups for layer in group}
        direction = of_layer.get(id(chosen), step.direction)
        alone = replace(step, groups=[([chosen], direction)], local=None)
        return Decomposition(self.frozen, {chosen.step: alone}, alone.added(), (), False)

    def relevance(
        self,
        activation: str,
        tolerance: float = 0.0,
        *,
        is_one_text: bool = False,
        mixing: Callable[[int], Tensor] | None = None,
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Relevance ``(B, S)`` of each input's tokens, by input.

        And what it claims to add up to, ``(B,)``, and the bound on what the tolerance changes,
        ``(B,)``. Where all examples are one text, its vectors are made once for all targets.
        ``mixing`` gives a step's rows ``(B, L, L)`` in place of ALTI's.
        """
        frozen, claimed, bound = self.frozen, self.score, torch.zeros_like(self.score)
        text = frozen.of_first() if is_one_text else frozen
        layers = dict(zip(map(id, frozen.layers), text.layers, strict=True))
        B, N = frozen.shape[0], text.shape[0]

        def through(i: int, w: Tensor) -> dict[int | None, Tensor]:
            nonlocal claimed, bound
            if i not in self.steps:
                return {i: w}
            here = self.steps[i]
            groups = [[layers[id(layer)] for layer in group] for group, _ in here.groups]
            parts = [Contributions.of(text, group, activation) for group in groups]
            if here.local is not None:
                w = w + (here.direction * here.local).sum(-1)
            if mixing is not None:
                w = (w[:, None] @ mixing(i).to(w))[:, 0]
                bar.advance()
            elif bool((w != 0).any()):
                whole = parts[0]
                if len(parts) > 1:
                    whole = Contributions.of(text, list(chain(*groups)), activation)
                by_text = w.reshape(N, -1, w.shape[1])
                carried, wrong = here.alti(whole).carry(by_text, tolerance, bar.advance)
                w, bound = carried.view(B, -1), bound + wrong.view(B)
            else:
                bar.advance()
            for part, (_, direction) in zip(parts, here.groups, strict=True):
                w = w + torch.cat([part.dot_row(rows) for rows in direction.split(N)])
                claimed = claimed - dot(direction, part.bias())
            if self.with_stream and i == min(self.steps):
                w = w + (here.direction * here.before).sum(-1)
            return {i: w}

        with Bar("LaTIM, layers", len(self.steps)) as bar:
            rows = frozen.wiring.back(self._nothing(), through)
        return rows, claimed, bound

    def claimed(self) -> Tensor:
        """What relevance claims to add up to, ``(B,)``: the score minus the mixers' bias terms."""
        # The activation changes what relevance misses, not what is decomposed.
        bias = [
            dot(direction, Contributions.of(self.frozen, group, "gate").bias())
            for step in self.steps.values()
            for group, direction in step.groups
        ]
        return self.score - sum_of(bias)

    def matrix(self, activation: str) -> Tensor:
        """Relevance of each token for each query token, of layers in one chain: ``(B, L, L)``."""
        L = self.frozen.shape[1]
        first = self.steps[min(self.steps)]
        at_itself = (first.direction * first.before).sum(-1)
        total = torch.diag_embed(at_itself if self.with_stream else torch.zeros_like(at_itself))
        mixing: Tensor | None = None  # how much of each token's stream is which input token's
        with Bar("LaTIM, layers", len(self.steps)) as bar:
            for step in self.steps.values():
                parts = Contributions.of(self.frozen, step.layers, activation)
                dots = parts.dot_matrix(step.direction)
                total = total + (dots if mixing is None else dots @ mixing)
                if step.local is not None:
                    rows = step.alti(parts).tiles(torch.arange(L, device=dots.device))
                    mixed = of_tiles(rows, L)
                    mixing = mixed if mixing is None else mixed @ mixing
                    total = total + (step.direction * step.local).sum(-1, keepdim=True) * mixing
                bar.advance()
        return total

    def _nothing(self) -> list[Tensor]:
        # Zeros for the tokens that the output reads, (B, T) for each of its reads.
        wiring, B = self.frozen.wiring, self.frozen.shape[0]
        zeros = []
        for read, _ in wiring.output:
            source = None if read >= 0 else wiring.inputs[INPUT - read].leaf
            tokens = wiring.steps[read].tokens if source is None else source.tokens // B
            zeros.append(self.score.new_zeros(B, tokens))
        return zeros


def output_of(layers: Sequence[FrozenCall]) -> Tensor:
    """What layers side by side returned, in all, in the working dtype."""
    return sum_of([layer.call.output.to(layer.call.dtype) for layer in layers])


def dot(direction: Tensor, values: Tensor) -> Tensor:
    """The dot product over tokens and channels, ``(B,)``."""
    return (direction * values.to(direction)).sum((1, 2))


def logits_of_tokens(logits: Tensor, target: Tensor | None) -> Tensor:
    """The logit of one token per position, ``(B, L)``: of ``target``, or of the largest logit.

    Raises:
        ValueError: for an output of another shape than ``(B, L, V)``.
        TargetError: for a ``target`` that is not one token id per position.
    """
    if logits.dim() != 3:
        raise ValueError(
            f"the model returns an output of shape {tuple(logits.shape)}; interactions with "
            "aggregation='alti_logit' need logits (B, L, V), one row per token."
        )
    token = logits.argmax(-1) if target is None else as_integers(target, logits.device)
    if token is None or token.shape != logits.shape[:2]:
        shown = f"shape {tuple(target.shape)} and {target.dtype}" if torch.is_tensor(target) else ""
        raise TargetError(
            f"target is {shown or repr(target)}; expected one token id per position, "
            f"integers of shape {tuple(logits.shape[:2])}."
        )
    return logits.gather(-1, token_ids(token, logits.shape[-1])[..., None])[..., 0]
