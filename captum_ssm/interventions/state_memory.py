"""Memory of a corpus: half-lives, sinks and saturation of the states of every layer and head."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from captum_ssm.capture import FrozenModel, Request, freeze
from captum_ssm.errors import InputError, UnsupportedModelError
from captum_ssm.interventions.states import (
    LayerState,
    StateOperator,
    layer_state,
    memory_of,
    with_states,
)
from captum_ssm.operators import DiagonalOperator

QUANTILES = (0.1, 0.5, 0.9)
# Half-lives are counted in bins of a 64th of an octave, so that quantiles are within 0.6%, from
# 2**-10 to 2**30 tokens; the last bin is of those that are longer or were not reached.
_PER_OCTAVE, _LOW, _HIGH = 64, -10, 30
_BINS = (_HIGH - _LOW) * _PER_OCTAVE + 1


@dataclass(frozen=True)
class LayerMemory:
    """What the states of one layer did over a corpus.

    A diagonal recurrence has H = 1: its channels and states are counted together.

    Args:
        kind (str): ``"diagonal"``, ``"linear attention"`` or ``"delta rule"``.
        half_lives (np.ndarray): ``(3, H)``, the quantiles 0.1, 0.5 and 0.9 in tokens; infinite
            where so many were not reached.
        unreached (np.ndarray): ``(H,)``, the share of half-lives that are infinite: nothing decays,
            or, of the delta rule, half or more was left at the end of the input.
        sinks (np.ndarray): ``(T, H)``, the mean share of the last state by source position.
        rank (np.ndarray): ``(R, H)``, effective over possible rank of matrix states, after 1, 2, 4,
            ... tokens; NaN for a diagonal recurrence, and for a state of zeros.
        change (np.ndarray): ``(R, H)``, the norm of the last token's change of the state over the
            state's norm; NaN for a state of zeros.
    """

    kind: str
    half_lives: np.ndarray
    unreached: np.ndarray
    sinks: np.ndarray
    rank: np.ndarray
    change: np.ndarray


@dataclass(frozen=True)
class TokenSink:
    """How much of the last states the occurrences of one token hold.

    Args:
        id (int): of the token.
        text (str): of the token; its id without a tokenizer.
        count (int): occurrences.
        shares (dict of str to float): by layer, the mean share of an occurrence, over the heads.
        excess (dict of str to float): by layer, the mean of that share over an even share, 1 / L.
    """

    id: int
    text: str
    count: int
    shares: dict[str, float] = field(repr=False)
    excess: dict[str, float] = field(repr=False)


@dataclass(frozen=True)
class StateReport:
    """Half-lives, sinks and saturation by layer; its text is a table.

    Args:
        layers (dict of str to LayerMemory): by the mixer's path.
        tokens (tuple of TokenSink): those with the most excess, as a mean over the layers, first.
        counts (np.ndarray): ``(T,)``, the sequences that have a token at each position.
        refused (dict of str to str): of mixers that were left out, why.

    Examples::

        >>> report = captum_ssm.interventions.state_report(model, input_ids)
        >>> report.layers["backbone.layers.0.mixer"].half_lives.shape
        (3, 1)
    """

    layers: dict[str, LayerMemory]
    tokens: tuple[TokenSink, ...]
    counts: np.ndarray
    refused: dict[str, str]

    @property
    def sequences(self) -> int:
        """How many sequences were read."""
        return int(self.counts[0])

    @property
    def after(self) -> np.ndarray:
        """After how many tokens saturation was measured, ``(R,)``."""
        return 2 ** np.arange(len(self.counts).bit_length())

    def rows(self) -> list[dict[str, Any]]:
        """One record per layer and head; rank and change are those after the most tokens."""
        return [
            {
                "layer": name,
                "head": head,
                "kind": layer.kind,
                **{
                    f"half_life_{q:g}": float(v)
                    for q, v in zip(QUANTILES, layer.half_lives[:, head], strict=True)
                },
                "unreached": float(layer.unreached[head]),
                "first_token": float(layer.sinks[0, head]),
                "rank": float(layer.rank[-1, head]),
                "change": float(layer.change[-1, head]),
            }
            for name, layer in self.layers.items()
            for head in range(len(layer.unreached))
        ]

    def to_pandas(self) -> Any:
        """:meth:`rows` as a ``pandas.DataFrame``.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(
                "to_pandas needs pandas, which is not installed; install it by `pip install "
                "pandas`, or take rows()."
            ) from error
        return pandas.DataFrame(self.rows())

    def __str__(self) -> str:
        rows = self.rows()
        table = [tuple(rows[0])]
        table += [tuple(c if isinstance(c, str) else f"{c:.3g}" for c in r.values()) for r in rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        sinks = ", ".join(
            f"{one.text!r} {np.mean(list(one.excess.values())):.2f} ({one.count})"
            for one in self.tokens[:10]
        )
        lines.append(f"tokens by their share of the last state over an even one (count): {sinks}")
        lines += [f"left out: {name}: {why}" for name, why in self.refused.items()]
        return "\n".join(lines)


def state_report(
    model: Any,
    inputs: Iterable[Any],
    *,
    tokenizer: Any = None,
    layers: int | str | list[int | str] | None = None,
    samples: int = 8,
    check: bool = True,
) -> StateReport:
    r"""How long layers remember, which tokens fill their states, and how full these are.

    - Half-lives, :math:`\log(1/2) / \log a_t` of the decay :math:`a_t` of each token, exact for
      scalar and diagonal decays. The delta rule also erases: there it is
      :meth:`LayerState.memory_length` of a few tokens of each input's first half. Where a model
      keeps its state scaled (RWKV-4, xLSTM), the decay is that of the scaled state.
    - Sinks: the norm of what each token wrote of the last state
      (:meth:`LayerState.by_source`), over the sum of these norms.
    - Saturation after 1, 2, 4, ... tokens: the effective rank of a head's matrix, the exponential
      of the entropy of its squared singular values over their sum, over the possible rank; and by
      how much the last token changed the state.

    Inputs are read one at a time, and only sums and counts are kept.

    Args:
        model (nn.Module or nnsight model): the model.
        inputs (iterable): of token ids ``(L,)`` or ``(B, L)``, without padding, or of texts.
        tokenizer (Callable, optional): of texts, and for the texts of tokens. Default: None
        layers (int, str or list, optional): mixers by index or path; None for all that keep a
            state. Default: None
        samples (int, optional): tokens per input of which the delta rule's half-lives are measured,
            by one scan per state and token. Default: 8
        check (bool, optional): as for :func:`~captum_ssm.interventions.states`. Default: True

    Returns:
        StateReport: by layer and head.

    Raises:
        UnsupportedModelError: no layer, or not each of the named ones, keeps a state of one scan.
        InputError: for no inputs, texts without a tokenizer, padding, or ids of another shape.

    Examples::

        >>> report = captum_ssm.interventions.state_report(model, [input_ids, input_ids[0, :5]])
        >>> report.sequences, report.counts.tolist()
        (2, [2, 2, 2, 2, 2, 1, 1])
    """
    if samples < 1:
        raise InputError(f"samples is {samples!r}; expected an integer of at least 1.")
    sums: dict[str, _Sums] = {}
    tokens: dict[int, int] = {}
    counts, refused = np.zeros(0), {}
    for ids in _each(inputs, tokenizer):
        frozen = freeze(Request.of(model, None, ids), query=False, check=check)
        _check_padding(frozen)
        refused = {} if layers is not None else _refused(frozen)
        for layer in with_states(frozen, layers):
            one = sums.setdefault(layer.name, _Sums(memory_of(layer.mixer)))
            one.add(layer_state(layer, _points(ids.shape[1])), ids, samples)
        for token in ids.flatten().tolist():
            tokens[token] = tokens.get(token, 0) + 1
        counts = _plus(counts, np.full(ids.shape[1], float(len(ids))))
    if not sums:
        raise InputError("inputs is empty; expected at least one text or tensor of token ids.")
    found = [_token(token, count, sums, tokenizer) for token, count in tokens.items()]
    found.sort(key=lambda one: -float(np.mean(list(one.excess.values()))))
    memories = {name: one.result(counts) for name, one in sums.items()}
    return StateReport(memories, tuple(found), counts.astype(int), refused)


class _Sums:
    """What is kept of one layer over the inputs."""

    def __init__(self, operator: StateOperator) -> None:
        if isinstance(operator, DiagonalOperator):
            self.kind, heads = "diagonal", 1
        else:
            self.kind = "linear attention" if operator.erase is None else "delta rule"
            heads = operator.query.shape[2]
        self.lives = np.zeros((heads, _BINS), dtype=np.int64)
        self.sinks = np.zeros((0, heads))
        self.points = np.zeros((0, 4, heads))  # sums of rank and change, and their counts
        self.by_token: dict[int, np.ndarray] = {}

    def add(self, state: LayerState, ids: Tensor, samples: int) -> None:
        for lives in _half_lives(state, samples):  # (..., H)
            self._count(lives)
        held = _per_head(state.by_source(-1))  # (B, L, H)
        shares = (held / held.sum(1, keepdim=True)).nan_to_num().cpu().numpy()
        self.sinks = _plus(self.sinks, shares.sum(0))
        L = ids.shape[1]
        flat = zip(ids.flatten().tolist(), shares.mean(-1).ravel().tolist(), strict=True)
        for token, share in flat:
            self.by_token.setdefault(token, np.zeros(2))[:] += share, share * L
        rank, change = _rank(state.values), _change(state)
        measured = torch.stack([rank, change], 2).cpu().numpy()  # (B, R, 2, H)
        known = np.isfinite(measured)
        both = np.concatenate([np.where(known, measured, 0), known], 2).sum(0)
        self.points = _plus(self.points, both[_is_point(state)])

    def _count(self, lives: Tensor) -> None:
        octaves = (lives.double().log2() - _LOW) * _PER_OCTAVE
        index = octaves.clamp(0, _BINS - 1).long().flatten(0, -2)  # (values, H)
        for head in range(len(self.lives)):
            self.lives[head] += torch.bincount(index[:, head], minlength=_BINS).cpu().numpy()

    def result(self, counts: np.ndarray) -> LayerMemory:
        below = self.lives.cumsum(1) / np.maximum(self.lives.sum(1, keepdims=True), 1)
        bins = np.array([(below < q - 1e-12).sum(1) for q in QUANTILES])
        lives = 2.0 ** ((bins + 0.5) / _PER_OCTAVE + _LOW)
        if self.kind == "delta rule":  # whole tokens
            lives = lives.round()
        lives[bins >= _BINS - 1] = np.inf
        with np.errstate(invalid="ignore"):
            rank, change = (self.points[:, k] / self.points[:, k + 2] for k in (0, 1))
        unreached = self.lives[:, -1] / np.maximum(self.lives.sum(1), 1)
        return LayerMemory(self.kind, lives, unreached, self.sinks / counts[:, None], rank, change)


def _half_lives(state: LayerState, samples: int) -> Iterator[Tensor]:
    operator = memory_of(state.mixer)
    if isinstance(operator, DiagonalOperator):
        for A in operator.A.mT:  # of each state, so that no more than the inputs' size is held
            yield (-math.log(2) / (operator.dt * A)).abs()[..., None]
    elif operator.erase is None:
        for log_decay in operator.log_decay.unbind(-1):  # (B, L, H)
            yield (-math.log(2) / log_decay).abs()
    else:
        half = max(1, operator.length // 2)
        at = sorted({k * half // samples for k in range(samples)})
        lengths = state.memory_length(at)
        if lengths.isnan().any():
            lengths = lengths[~lengths.isnan().any(-1)]  # tokens that wrote nothing
        yield lengths


def _per_head(values: Tensor) -> Tensor:
    # Norms: (B, L, H) of (B, L, H, K, P), and (B, L, 1) of a diagonal recurrence's (B, L, D, N).
    norms = torch.linalg.vector_norm(values.double(), dim=(-2, -1))
    return norms if values.dim() == 5 else norms[..., None]


def _points(length: int) -> list[int]:
    # The tokens after which a state is looked at, 2**k - 1, and the one before each.
    ends = [2**k - 1 for k in range(length.bit_length())]
    return sorted({max(0, at - back) for at in ends for back in (0, 1)})


def _is_point(state: LayerState) -> np.ndarray:
    after = state.positions.cpu().numpy() + 1
    chosen: np.ndarray = (after & (after - 1)) == 0
    return chosen


def _change(state: LayerState) -> Tensor:
    # (B, R, H); only meant at points, whose row before is that of the token before.
    values = state.values
    before = torch.cat([torch.zeros_like(values[:, :1]), values[:, :-1]], 1)
    return _per_head(values - before) / _per_head(values)


def _rank(values: Tensor) -> Tensor:
    if values.dim() == 4:
        return values.new_full((*values.shape[:2], 1), torch.nan, dtype=torch.float64)
    energy = torch.linalg.svdvals(values.double()).square()
    shares = energy / energy.sum(-1, keepdim=True)
    return torch.special.entr(shares).sum(-1).exp() / min(values.shape[-2:])


def _plus(sums: np.ndarray, more: np.ndarray) -> np.ndarray:
    # Sums by position; inputs differ in length.
    longer, shorter = (sums, more) if len(sums) >= len(more) else (more, sums)
    longer = longer.astype(float)
    longer[: len(shorter)] += shorter
    return longer


def _token(token: int, count: int, sums: dict[str, _Sums], tokenizer: Any) -> TokenSink:
    text = str(token) if tokenizer is None else tokenizer.decode([token])
    means = {name: one.by_token[token] / count for name, one in sums.items()}
    shares = {name: float(mean[0]) for name, mean in means.items()}
    return TokenSink(token, text, count, shares, {n: float(mean[1]) for n, mean in means.items()})


def _refused(frozen: FrozenModel) -> dict[str, str]:
    reasons = {}
    for layer in frozen.layers:
        try:
            memory_of(layer.mixer)
        except UnsupportedModelError as error:
            reasons[layer.name] = str(error)
    return reasons


def _check_padding(frozen: FrozenModel) -> None:
    if frozen.mask is not None and not frozen.mask.bool().all():
        raise InputError(
            "an input has padding, whose tokens would be counted; expected token ids without "
            "padding. Give the texts one by one."
        )


def _each(inputs: Iterable[Any], tokenizer: Any) -> Iterator[Tensor]:
    if isinstance(inputs, (str, dict)):
        raise InputError(
            f"inputs is a {type(inputs).__name__}; expected several, such as a list of one text."
        )
    for k, one in enumerate(inputs):
        if isinstance(one, str):
            if tokenizer is None:
                raise InputError(f"input {k} is a text; expected token ids, or tokenizer= too.")
            one = tokenizer(one)["input_ids"]
        ids = torch.as_tensor(one)
        if ids.dim() == 1:
            ids = ids[None]
        if ids.dim() != 2 or not ids.numel() or ids.is_floating_point():
            raise InputError(
                f"input {k} has shape {tuple(ids.shape)} and dtype {ids.dtype}; expected integer "
                "ids (L,) or (B, L) of at least one token. Give a single input in a list."
            )
        yield ids
