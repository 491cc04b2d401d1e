r"""From per-channel operators to one map per layer, and from maps to a row of relevance.

A layer's map is :math:`M = f(g \odot \mathrm{red}_d[\alpha^d])`: the channels reduced, rows
scaled by a gradient where a method has one, then the published choices f. Rows of it are summed
(raw attention) or carried through the layers (rollout). Wherever f leaves M linear in the
operator a row costs linear time and no ``(L, L)`` tensor exists. Else the rows that are asked for
are built: a few by themselves, in linear time each; many in row tiles.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import TypedDict

from captum_ssm.capture import FrozenCall, FrozenModel
from captum_ssm.errors import brief
from captum_ssm.operators import REDUCTIONS, TokenOperator
from captum_ssm.operators.composed import sum_of
from captum_ssm.utils.memory import require, tile_entries

SIGNS = (None, "clamp", "absolute")


class MapChoices(TypedDict, total=False):
    """How a layer's map is made from its channels: options of every method of maps.

    Args:
        reduction (str): over channels. Default: ``"mean"``
        sign (str, optional): ``"clamp"`` drops negative entries, ``"absolute"`` drops signs, None
            keeps them. Default: None, except where a method's page says otherwise
        discard_ratio (float): share of the nonzero entries of each map, the smallest by
            magnitude, that is set to zero, in [0, 1). Default: 0.0
        min_max (bool): rescale the nonzero entries of each map to [0, 1]. Default: False
        normalize_rows (bool): divide each row, with the residual's identity where there is one,
            by its sum. Default: False
        tolerance (float): share of the carried weight, in [0, 1), whose rows of a layer are not
            made, where rows are made in tiles: those tiles that carry the least. What they would
            pass on stays with the tokens themselves. Default: 0.0, exact

    With the defaults a row costs time linear in the sequence; with a ``sign`` or another
    ``reduction`` its rows are made in tiles; with ``discard_ratio`` or ``min_max`` whole maps are.

    Examples::

        >>> paper = captum_ssm.attr.MapChoices(sign="absolute", normalize_rows=True)
        >>> MambaRollout(model).attribute(input_ids, **paper).shape
        torch.Size([1, 7])
    """

    reduction: Literal["mean", "max", "min", "prod"]
    sign: Literal["clamp", "absolute"] | None
    discard_ratio: float
    min_max: bool
    normalize_rows: bool
    tolerance: float


@dataclass(frozen=True)
class MapOptions:
    """:class:`MapChoices`, checked, and what maps are made from.

    The operator is that of a formulation and its components. With ``gradients`` rows are scaled by
    the mean gradient of the score (Ali et al., eq. 24).

    Raises:
        ValueError: for a ``reduction``, ``sign``, ``discard_ratio`` or ``tolerance`` that is not
            expected.
    """

    formulation: str = "hidden"
    components: Iterable[str] | None = None
    reduction: str = "mean"
    sign: str | None = None
    discard_ratio: float = 0.0
    min_max: bool = False
    normalize_rows: bool = False
    tolerance: float = 0.0
    gradients: bool = False

    def __post_init__(self) -> None:
        if self.reduction not in REDUCTIONS:
            raise ValueError(f"reduction is {brief(self.reduction)}; expected one of {REDUCTIONS}.")
        if self.sign not in SIGNS:
            raise ValueError(f"sign is {self.sign!r}; expected one of {SIGNS}.")
        if not _is_share(self.discard_ratio):
            raise ValueError(f"discard_ratio is {self.discard_ratio!r}; expected 0 <= r < 1.")
        if not _is_share(self.tolerance):
            raise ValueError(f"tolerance is {self.tolerance!r}; expected 0 <= tolerance < 1.")

    @classmethod
    def of(cls, choices: Mapping[str, Any], **fixed: Any) -> MapOptions:
        """The options of a method called with ``choices``, or a TypeError for other names."""
        known = tuple(MapChoices.__annotations__)
        unknown = [name for name in choices if name not in known]
        if unknown:
            raise TypeError(f"there is no option {unknown[0]!r}; expected any of {known}.")
        return cls(**fixed, **choices)

    @property
    def is_linear(self) -> bool:
        """Whether a map is linear in its operator, so that a row costs linear time."""
        return self.reduction == "mean" and self.sign is None and not self.is_global

    @property
    def is_global(self) -> bool:
        """Whether an entry depends on the whole map, so that all of it has to exist."""
        return self.discard_ratio > 0 or self.min_max


@dataclass(frozen=True)
class MixerMap:
    """One mixer's map M, ``(B, L, L)``, that never has to exist.

    ``row_scale (B, L)`` is the gradient that scales rows; ``mask (B, L)`` is zero for padding;
    ``adds_input`` says whether the mixer also adds its input, which M does not hold.
    """

    operator: TokenOperator
    options: MapOptions
    row_scale: Tensor | None = None
    mask: Tensor | None = None
    adds_input: bool = False

    def matrix(self) -> Tensor:
        """M, ``(B, L, L)``, before row normalisation."""
        return self._rows(slice(0, self.operator.length))

    def rmatvec(self, w: Tensor) -> Tensor:
        """w^T M for ``w (B, L)``: ``(B, L)``."""
        options, operator = self.options, self.operator
        if options.is_linear:
            row = operator.rmatvec(w if self.row_scale is None else w * self.row_scale, "mean")
            return row if self.mask is None else row * self.mask
        out, asked = torch.zeros_like(w), (w != 0).any(0).nonzero()[:, 0]
        if asked.numel() == 0:
            return out
        tiles: Iterable[slice | Tensor] = [asked]
        if options.is_global or asked.numel() > 8:
            made = list(self._tiles(int(asked[0]), int(asked[-1]) + 1))
            tiles = _carrying(w, made, options.tolerance)
        for at in tiles:
            out += torch.einsum("bi,bij->bj", w[:, at], self._rows(at))
        return out

    def row_sums(self) -> Tensor:
        """Row sums of M, ``(B, L)``."""
        if self.options.is_linear:
            sums = self.operator.row_sums(self.mask)
            return sums if self.row_scale is None else sums * self.row_scale
        tiles = self._tiles(0, self.operator.length)
        return torch.cat([self._rows(at).sum(-1) for at in tiles], 1)

    def _tiles(self, start: int, stop: int) -> Iterator[slice]:
        if self.options.is_global:
            yield slice(0, self.operator.length)
            return
        # Enough rows that what a tile costs once, its columns' coefficients, does not count.
        entries = tile_entries(1 << 28) // (self.operator.batch * self.operator.length)
        step = max(1, min(256, entries))
        for first in range(start, stop, step):
            yield slice(first, min(stop, first + step))

    def _rows(self, at: slice | Tensor) -> Tensor:
        options, operator = self.options, self.operator
        if options.reduction == "mean" and isinstance(at, slice):
            rows = operator.row_tile(at.start, at.stop)
        else:
            index = torch.arange(operator.length, device=operator.device)[at]
            rows = operator.rows(index.expand(operator.batch, -1), options.reduction)
        if self.row_scale is not None:
            rows = rows * self.row_scale[:, at, None]
        if self.mask is not None:
            rows = rows * self.mask[:, None, :]
        if options.sign == "clamp":
            rows = rows.clamp(min=0)
        elif options.sign == "absolute":
            rows = rows.abs()
        if options.discard_ratio:
            rows = torch.stack([_discard(m, options.discard_ratio) for m in rows])
        if options.min_max:
            rows = torch.stack([_min_max(m) for m in rows])
        return rows


@dataclass(frozen=True)
class LayerMap:
    """One layer's map: that of its mixer, or the sum over mixers that run side by side."""

    parts: list[MixerMap]

    def matrix(self) -> Tensor:
        """M, ``(B, L, L)``, before row normalisation."""
        return torch.stack([part.matrix() for part in self.parts]).sum(0)

    def rmatvec(self, w: Tensor) -> Tensor:
        """w^T M for ``w (B, L)``: ``(B, L)``."""
        return torch.stack([part.rmatvec(w) for part in self.parts]).sum(0)

    def row_sums(self) -> Tensor:
        """Row sums of M, ``(B, L)``."""
        return torch.stack([part.row_sums() for part in self.parts]).sum(0)


class GridMaps:
    """The maps of some layers of a model, by step, each made anew when it is asked for."""

    def __init__(
        self, frozen: FrozenModel, layers: Sequence[FrozenCall], options: MapOptions
    ) -> None:
        self.steps: dict[int, list[FrozenCall]] = {}
        for layer in layers:
            self.steps.setdefault(layer.step, []).append(layer)
        self.frozen, self.options = frozen, options
        self.wiring = frozen.require_wiring()

    def at(self, step: int) -> LayerMap | None:
        """The map of a step; None where none of its layers was chosen."""
        if step not in self.steps:
            return None
        return LayerMap([self._part(layer) for layer in self.steps[step]])

    def streams(self, step: int, chosen: LayerMap | None) -> set[int]:
        """The steps before which residual streams leave that are added to what this one returns.

        Each way around the mixers counts once: also that inside of a mixer which adds its input to
        what it returns, as Inkling's convolutions do.
        """
        steps = {step - back for back in self.wiring.steps[step].around}
        if chosen is not None and any(part.adds_input for part in chosen.parts):
            steps.add(step)
        return steps

    def _part(self, layer: FrozenCall) -> MixerMap:
        mixer = layer.mixer
        operator = mixer.operator(self.options.formulation, self.options.components)
        scale = None
        if self.options.gradients:
            assert layer.call.gradient is not None
            scale = mixer.mean_gated_gradient(layer.call.gradient)
        adds_input = mixer.adds_input and "skip" not in (self.options.components or ())
        return MixerMap(operator, self.options, scale, self.frozen.mask_of(layer), adds_input)


def raw_row(maps: GridMaps) -> list[Tensor]:
    """The query's row, averaged over steps: ``(B, L)`` for each input."""
    query, wiring = maps.frozen.require_query(), maps.wiring
    asked: dict[int, Tensor] = {}
    if wiring.unheld is not None:
        warnings.warn(
            f"{wiring.unheld}, which the maps of single layers do not show. A rollout follows it.",
            UserWarning,
            stacklevel=2,
        )

    def ask(step: int, w: Tensor) -> dict[int | None, Tensor]:
        asked[step] = w
        return {step: w}

    def add(step: int, row: Tensor) -> dict[int | None, Tensor]:
        m, w = maps.at(step), asked[step]
        if m is not None:
            row = row + m.rmatvec(_over(w, m.row_sums()) if maps.options.normalize_rows else w)
        return {step: row}

    wiring.back(query, ask, to_inputs=False)
    rows = wiring.back([torch.zeros_like(w) for w in query], add)
    count = sum(step in asked for step in maps.steps)  # by the output
    return [row / max(1, count) for row in rows]


def rollout_row(maps: GridMaps, *, are_means: bool = False) -> list[Tensor]:
    r"""The query's row of :math:`\prod_\lambda (I + M_\lambda)`, latest leftmost.

    ``(B, L)`` for each input. I is the residual stream. Of mixers in series in one branch it goes
    around all of them: :math:`I + M_2 M_1`. Without one there is no I. Rows are normalized with the
    I that they have: those of :math:`M_1` by themselves; or with ``are_means`` all rows of M, in
    the place of other normalization, so that each token reads a mean, and I stays as it is.
    """

    def through(step: int, w: Tensor) -> dict[int | None, Tensor]:
        m = maps.at(step)
        streams = maps.streams(step, m)
        if m is None:  # not chosen: the tokens go around it
            return {min(streams, default=step): w}
        if are_means:
            return {None: m.rmatvec(_over(w, m.row_sums())), **dict.fromkeys(streams, w)}
        if maps.options.normalize_rows:
            w = _over(w, len(streams) + m.row_sums())
        return {None: m.rmatvec(w), **dict.fromkeys(streams, w)}

    return maps.wiring.back(maps.frozen.require_query(), through)


def rollout_matrix(maps: GridMaps) -> Tensor:
    """The whole product of :func:`rollout_row`: ``(B, L, L)``."""
    count = len(maps.frozen.request.inputs)
    if count > 1:
        raise ValueError(
            f"inputs is a tuple of {count}; a whole rollout has one axis of input tokens: expected "
            "one tensor. attribute() takes several."
        )
    B, L = maps.frozen.input_shape
    call = maps.frozen.layers[0].call
    size = B * L**2 * call.dtype.itemsize
    require(3 * size, "a rollout of every token", [("attribute(), one row", size // 64)])

    def through(step: int, before: dict[int | None, Tensor]) -> Tensor:
        m = maps.at(step)
        streams = maps.streams(step, m)
        if m is None:
            return before[min(streams, default=step)]
        beta = m.matrix()
        sums = len(streams) + beta.sum(-1, keepdim=True)
        rho = sum_of([beta @ before[None], *(before[i] for i in streams)])
        return _over(rho, sums) if maps.options.normalize_rows else rho

    start = torch.eye(L, dtype=call.dtype, device=call.output.device).expand(B, -1, -1)
    return maps.wiring.forth(start, through)


def _carrying(w: Tensor, tiles: list[slice], tolerance: float) -> Iterator[slice]:
    # The tiles of rows without those of least weight, which together carry at most the tolerance.
    weight = torch.stack([w[:, at].abs().sum(1) for at in tiles])  # one row per tile, (tiles, B)
    share = (weight / weight.sum(0).clamp(min=1e-30)).amax(1)
    least = share.argsort()
    skipped = int((share[least].cumsum(0) <= tolerance).sum())
    made = set(least[skipped:].tolist())
    return (at for i, at in enumerate(tiles) if i in made)


def _over(values: Tensor, sums: Tensor) -> Tensor:
    # A row that holds nothing (padding; all negative, and clamped), or whose entries cancel, has
    # no sum to divide by.
    return torch.where(sums == 0, 0, values / sums)


def _is_share(ratio: Any) -> bool:
    try:
        return bool(0 <= ratio < 1)
    except (TypeError, RuntimeError):  # a word; a tensor of several
        return False


def _discard(matrix: Tensor, ratio: float) -> Tensor:
    size = matrix.abs()
    nonzero = size[size > 0]
    dropped = int(ratio * nonzero.numel())
    if dropped == 0:
        return matrix
    threshold = nonzero.kthvalue(dropped).values
    return torch.where(size > threshold, matrix, 0)


def _min_max(matrix: Tensor) -> Tensor:
    support = matrix != 0
    if not bool(support.any()):
        return matrix
    values = matrix[support]
    low, high = values.min(), values.max()
    return torch.where(support, (matrix - low) / (high - low).clamp(min=1e-12), 0)
