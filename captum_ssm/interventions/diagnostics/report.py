"""State diagnostics over many inputs, one input at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import isnan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from captum_ssm.capture import Request
from captum_ssm.interventions.diagnostics.half_lives import half_lives, shares, state_sizes
from captum_ssm.interventions.diagnostics.tally import Lifetimes, Means, Medians
from captum_ssm.interventions.states import state_layers
from captum_ssm.mixers import FrozenMixer
from captum_ssm.mixers.memory import memory_of

Row = dict[str, Any]
SHOWN = 4  # tokens of a layer that are printed
_MEASURES = ("norm", "change", "used")


@dataclass(frozen=True)
class StateReport:
    """What the states of a model did on many inputs: three tables, each a list of rows.

    Args:
        half_lives (list): per layer and channel or head: ``half_life`` in tokens (the median over
            inputs of each input's median) with the ends ``low`` and ``high`` of its 95 % interval
            (NaN below six inputs), the quantiles ``q10`` and ``q90`` of all writes, and
            ``outlives``, the part of writes of which more than half is left at the end of their
            text.
        positions (list): per layer, ``measure`` and range of positions ``start <= t < stop``:
            ``mean``, ``low``, ``high`` and ``inputs``. Measures by head (a diagonal layer is one)
            are the ``norm`` of the state, its relative ``change`` by a token, ``used`` (the
            participation ratio of its squared singular values over the possible rank), and
            ``share``, what tokens at these positions hold of later states, over an even share;
            ``half_life``, whose ends are the quartiles of its writes, has no head.
        sinks (list): per layer, head and token: ``share`` of later states over an even share, with
            its interval and the number of inputs; the largest share first.
        inputs (int): how many there were.

    Examples::

        >>> report = captum_ssm.interventions.state_report(model, [input_ids, input_ids.flip(-1)])
        >>> report.to_pandas("half_lives").columns[:3].tolist()
        ['layer', 'head', 'half_life']
    """

    half_lives: list[Row]
    positions: list[Row]
    sinks: list[Row]
    inputs: int

    def __str__(self) -> str:
        lines = [f"States over {self.inputs} inputs. Half-lives in tokens, by layer and head:"]
        for row in self.half_lives:
            ends = f"{row['low']:.3g} to {row['high']:.3g}"
            lines.append(
                f"  {row['layer']} {row['head']:>3}  {row['half_life']:>6.3g} ({ends}), "
                f"{row['outlives']:.0%} outlive their text"
            )
        lines.append("Tokens by their share of later states over an even share, at one head:")
        for layer in dict.fromkeys(row["layer"] for row in self.sinks):
            # Rare tokens, whose share has no interval, come last.
            of_layer = [row for row in self.sinks if row["layer"] == layer]
            of_layer.sort(key=lambda row: (isnan(row["low"]), -row["low"], -row["share"]))
            told = (
                f"{str(row['text'] or row['token']).strip()} {row['share']:.2g}"
                for row in of_layer[:SHOWN]
            )
            lines.append(f"  {layer}  {', '.join(told)}")
        return "\n".join(lines)

    def to_pandas(self, table: str = "half_lives") -> Any:
        """A table as a ``pandas.DataFrame``.

        Args:
            table (str, optional): ``"half_lives"``, ``"positions"`` or ``"sinks"``.
                Default: ``"half_lives"``

        Raises:
            ValueError: for another table.
        """
        if table not in ("half_lives", "positions", "sinks"):
            raise ValueError(f"table is {table!r}; expected 'half_lives', 'positions' or 'sinks'.")
        import pandas as pd

        return pd.DataFrame(getattr(self, table))


def state_report(
    model: Any,
    inputs: Iterable[Any],
    tokenizer: Any = None,
    *,
    layers: int | str | list[int | str] | None = None,
    samples: int = 32,
    check: bool = True,
) -> StateReport:
    r"""How long states keep what is written, which tokens fill them, and how full they are.

    Each input is run once by itself, and only counts and sums are kept. A write's half-life is
    the number of tokens until half of its norm is left, as in
    :meth:`~captum_ssm.interventions.LayerState.memory_length`, interpolated between tokens; where
    more is left at the end of the text, it enters as a censored observation (Kaplan and Meier).

    Args:
        model (nn.Module or nnsight model): the model.
        inputs (iterable): texts, or token ids ``(L,)`` or ``(1, L)``, without padding; a generator
            is read once.
        tokenizer (optional): for texts, and for the texts of tokens. Default: None
        layers (int, str or list, optional): as for :func:`~captum_ssm.interventions.states`.
        samples (int, optional): positions of an input at which writes and states are measured,
            evenly spaced; four of them, at quarters of the text, are read for shares.
            Default: 32
        check (bool, optional): as for :func:`~captum_ssm.interventions.states`.

    Returns:
        StateReport: plain data.

    Raises:
        UnsupportedModelError: for a layer that keeps no state of one scan.
        ValueError: if there are no inputs, or an input is not one sequence of ids.
        TypeError: for a text without a tokenizer.

    Examples::

        >>> report = captum_ssm.interventions.state_report(model, [input_ids], samples=4)
        >>> sorted({row["measure"] for row in report.positions})
        ['change', 'half_life', 'norm', 'share', 'used']
    """
    tallies: dict[str, _Layer] = {}
    count = 0
    for count, text_or_ids in enumerate(inputs, 1):
        ids = _ids(text_or_ids, tokenizer, count - 1)
        for layer in state_layers(Request.of(model, None, ids, None), layers, check):
            tally = tallies.setdefault(layer.name, _Layer(memory_of(layer.mixer).maps))
            tally.add(layer.mixer, ids[0].tolist(), samples)
    if not count:
        raise ValueError("inputs is empty; expected at least one text or sequence of token ids.")
    rows: tuple[list[Row], list[Row], list[Row]] = ([], [], [])
    for name, tally in tallies.items():
        for table, new in zip(rows, tally.tables(tokenizer), strict=True):
            table.extend({"layer": name, **row} for row in new)
    half, positions, sinks = rows
    return StateReport(half, positions, sorted(sinks, key=lambda r: -r["share"]), count)


def _ids(text_or_ids: Any, tokenizer: Any, index: int) -> Tensor:
    if isinstance(text_or_ids, str):
        if tokenizer is None:
            raise TypeError(f"input {index} is a text; give a tokenizer too, or token ids.")
        text_or_ids = tokenizer(text_or_ids, return_tensors="pt")["input_ids"]
    ids = torch.as_tensor(text_or_ids)
    ids = ids[None] if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.shape[0] != 1 or not ids.shape[1]:
        raise ValueError(
            f"input {index} has shape {tuple(ids.shape)}; expected one sequence of token ids, "
            "(L,) or (1, L), with at least one token. Give the sequences of a batch one by one."
        )
    return ids


class _Layer:
    # Sums over inputs of one layer.
    def __init__(self, M: int) -> None:
        self.lives, self.medians = Lifetimes(M), Medians(M)
        self.by_bin: dict[int, Lifetimes] = defaultdict(lambda: Lifetimes(1))
        self.means: dict[tuple[str, int], Means] = defaultdict(Means)
        self.tokens: dict[int, Means] = defaultdict(Means)

    def add(self, mixer: FrozenMixer, ids: list[int], samples: int) -> None:
        L = len(ids)
        at = torch.linspace(0, L - 1, min(samples, L)).round().long()
        bins = _bins(at.numpy())
        self._add_lives(mixer, at, bins)
        sizes = state_sizes(mixer, at.to(mixer.values.device))
        for measure in _MEASURES:
            self._add(measure, bins, getattr(sizes, measure)[0].cpu().numpy())
        self._add_shares(mixer, ids)

    def _add_lives(self, mixer: FrozenMixer, at: Tensor, bins: np.ndarray) -> None:
        measured = half_lives(mixer, at.to(mixer.values.device))
        lives = [
            x[0].cpu().numpy() for x in (measured.tokens, measured.is_over, measured.is_written)
        ]
        alone = Lifetimes(lives[0].shape[1])
        alone.add(*lives)
        self.lives.counts += alone.counts
        self.medians.add(alone.quantile(0.5))
        for k in np.unique(bins).tolist():
            self.by_bin[k].add(*(x[bins == k].reshape(-1, 1) for x in lives))

    def _add(self, measure: str, bins: np.ndarray, values: np.ndarray) -> None:
        for k in np.unique(bins).tolist():
            self.means[measure, k].add(values[bins == k].mean(0))

    def _add_shares(self, mixer: FrozenMixer, ids: list[int]) -> None:
        L = len(ids)
        count = np.zeros((L, 1))
        total: np.ndarray = np.zeros((L, 1))
        for t in sorted({max(L * quarter // 4 - 1, 0) for quarter in (1, 2, 3, 4)}):
            share = shares(mixer, t)[0].double().cpu().numpy() * (t + 1)
            total = total + np.pad(share, ((0, L - t - 1), (0, 0)))
            count[: t + 1] += 1
        lift = total / count
        self._add("share", _bins(np.arange(L)), lift)
        of_input = np.asarray(ids)
        for token in np.unique(of_input).tolist():
            self.tokens[token].add(lift[of_input == token].mean(0))

    def tables(self, tokenizer: Any) -> tuple[list[Row], list[Row], list[Row]]:
        return self._half_lives(), self._positions(), self._sinks(tokenizer)

    def _half_lives(self) -> list[Row]:
        columns = (
            *self.medians.summary(),
            self.lives.quantile(0.1),
            self.lives.quantile(0.9),
            self.lives.outliving(),
        )
        names = ("half_life", "low", "high", "q10", "q90", "outlives")
        return [
            {"head": m, **dict(zip(names, row, strict=True))}
            for m, row in enumerate(np.stack(columns, 1).tolist())
        ]

    def _positions(self) -> list[Row]:
        rows: list[Row] = []
        for (measure, k), means in self.means.items():
            about = {"measure": measure, "start": 2**k - 1, "stop": 2 ** (k + 1) - 1}
            rows += [{**about, **row} for row in _by_head(means, "mean")]
        for k, lives in self.by_bin.items():
            middle, low, high = (float(lives.quantile(q)[0]) for q in (0.5, 0.25, 0.75))
            about = {"measure": "half_life", "start": 2**k - 1, "stop": 2 ** (k + 1) - 1}
            rows.append({**about, "head": None, "mean": middle, "low": low, "high": high})
        return sorted(rows, key=lambda row: (row["measure"], row["head"] or 0, row["start"]))

    def _sinks(self, tokenizer: Any) -> list[Row]:
        rows: list[Row] = []
        for token, means in self.tokens.items():
            text = None if tokenizer is None else tokenizer.convert_ids_to_tokens(token)
            rows += [{"token": token, "text": text, **row} for row in _by_head(means, "share")]
        return rows


def _bins(t: np.ndarray) -> np.ndarray:
    # Positions 0; 1, 2; 3 to 6; 7 to 14; and so on.
    bins: np.ndarray = np.floor(np.log2(t + 1)).astype(int)
    return bins


def _by_head(means: Means, name: str) -> list[Row]:
    return [
        {"head": m, "inputs": int(n), name: mean, "low": low, "high": high}
        for m, (n, mean, low, high) in enumerate(means.summary().T.tolist())
    ]
