"""ALTI-Logit through one residual stream (Pitorro & Treviso, 2025, eq. 7-8)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from captum_ssm._capture import FrozenLayer, FrozenModel
from captum_ssm._progress import Bar
from captum_ssm.attr._alti import Alti, of_tiles
from captum_ssm.attr._contributions import Contributions
from captum_ssm.attr._residual import ResidualStream
from captum_ssm.operators.composed import sum_of


def logit_row(
    frozen: FrozenModel,
    text: FrozenModel,
    stream: ResidualStream,
    activation: str,
    tolerance: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Relevance ``(B, L)`` of eq. 8 at the query, and what belongs to it.

    The bias terms' share of the score, ``(B,)``, and the bound on what the tolerance changes of
    the relevance, ``(B,)``. Vectors are those of ``text``: of one example where all are the same
    text, so that they are made once for all targets.
    """
    direction = stream.direction
    B, L = frozen.shape
    N = text.shape[0]
    v, bias, bound = direction.new_zeros(B, L), direction.new_zeros(B), direction.new_zeros(B)
    layers = dict(zip(map(id, frozen.layers), text.layers, strict=True))
    with Bar("LaTIM, layers", len(stream.stages)) as bar:
        for stage in reversed(stream.stages):
            parts = Contributions.of(
                text, [layers[id(layer)] for layer in stage.layers], activation
            )
            v = v + (direction * stage.local).sum(-1)
            if bool((v != 0).any()):
                alti = Alti(parts, (stage.before + stage.mixed)[:N], stage.before[:N])
                carried, wrong = alti.carry(v.view(N, -1, L), tolerance, bar.advance)
                v, bound = carried.view(B, L), bound + wrong.view(B)
            else:
                bar.advance()
            v = v + torch.cat([parts.dot_row(one) for one in direction.split(N)])
            bias = bias + bias_part(stream, parts)
    return v + (direction * stream.stages[0].before).sum(-1), bias, bound


def logit_matrix(frozen: FrozenModel, stream: ResidualStream, activation: str) -> Tensor:
    """Eq. 8 for every query token: ``(B, L, L)``."""
    direction = stream.direction
    first = (direction * stream.stages[0].before).sum(-1)
    total = torch.diag_embed(first)
    # R: how much of each token's stream is which input token's.
    mixing = torch.eye(first.shape[1], dtype=first.dtype, device=first.device)
    mixing = mixing.expand(first.shape[0], -1, -1)
    with Bar("LaTIM, layers", len(stream.stages)) as bar:
        for stage in stream.stages:
            parts = Contributions.of(frozen, stage.layers, activation)
            total = total + parts.dot_matrix(direction) @ mixing
            alti = Alti(parts, stage.before + stage.mixed, stage.before)
            mixing = of_tiles(alti.tiles(_every_row(frozen)), first.shape[1]) @ mixing
            total = total + (direction * stage.local).sum(-1, keepdim=True) * mixing
            bar.advance()
    return total


def decomposed(frozen: FrozenModel, stream: ResidualStream, layer: int | str | None) -> Tensor:
    """What vectors and bias terms add up to, ``(B,)``: the score, or one layer's part of it.

    They do not where the score is read by a function without a rule.
    """
    if frozen.unruled and layer is None:
        return frozen.require_score().to(stream.direction)
    vectors = stream.final if layer is None else output_of([frozen.select_one(layer)])
    return (stream.direction * vectors).sum((1, 2))


def bias_part(stream: ResidualStream, parts: Contributions) -> Tensor:
    return (stream.direction * parts.bias()).sum((1, 2))


def output_of(layers: Sequence[FrozenLayer]) -> Tensor:
    return sum_of([layer.call.output.to(layer.call.dtype) for layer in layers])


def _every_row(frozen: FrozenModel) -> Tensor:
    return torch.arange(frozen.shape[1], device=frozen.layers[0].call.output.device)
