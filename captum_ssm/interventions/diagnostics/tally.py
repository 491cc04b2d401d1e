"""What is kept of many inputs: counts of half-lives, and means with intervals over inputs."""

from __future__ import annotations

import numpy as np

# Half-lives from 1/16 of a token to 2**20 tokens, 32 bins per octave: 1.1 % at most from a middle.
_PER_OCTAVE, _LOWEST, _BINS = 32, -4, 24 * 32
_MIDDLES = 2.0 ** ((np.arange(_BINS) + 0.5) / _PER_OCTAVE + _LOWEST)


class Lifetimes:
    """Half-lives of M channels or heads, some of them only known to be longer.

    Quantiles are of the Kaplan-Meier estimate: a write that outlives its text counts among those
    at risk up to there, and not as one that lives forever. They are infinite where too few ended.
    """

    def __init__(self, M: int) -> None:
        self.counts = np.zeros((2, M, _BINS))  # still there at the end, and over

    def add(self, tokens: np.ndarray, is_over: np.ndarray, is_written: np.ndarray) -> None:
        """Half-lives ``(n, M)``."""
        with np.errstate(divide="ignore"):
            index = np.floor((np.log2(tokens) - _LOWEST) * _PER_OCTAVE)
        index = np.clip(np.nan_to_num(index), 0, _BINS - 1).astype(int)
        unit = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
        keep = is_written
        np.add.at(self.counts, (is_over[keep].astype(int), unit[keep], index[keep]), 1)

    def quantile(self, level: float) -> np.ndarray:
        """Half-lives ``(M,)`` that a part ``level`` of the writes do not outlive."""
        at_risk = self.counts.sum(0)[:, ::-1].cumsum(-1)[:, ::-1]
        alive = (1 - self.counts[1] / np.maximum(at_risk, 1)).cumprod(-1)
        is_reached = alive <= 1 - level + 1e-9
        return np.where(is_reached.any(-1), _MIDDLES[is_reached.argmax(-1)], np.inf)

    def outliving(self) -> np.ndarray:
        """The part ``(M,)`` of writes of which more than half is left at the end of the text."""
        total = self.counts.sum((0, 2))
        return np.where(total > 0, self.counts[0].sum(-1) / np.maximum(total, 1), np.nan)


class Medians:
    """The median over inputs of each input's median, and an interval for it from their ranks."""

    def __init__(self, M: int) -> None:
        self.inputs = Lifetimes(M)

    def add(self, medians: np.ndarray) -> None:
        """Medians ``(M,)`` of one input; infinite ones are longer than all others."""
        known = np.isfinite(medians)[None]
        largest = np.where(known, medians, 2.0**30)
        self.inputs.add(largest, known, np.full(known.shape, True))

    def summary(self) -> np.ndarray:
        """Median, low and high end of the 95 % interval, ``(3, M)``; no ends below six inputs."""
        n = self.inputs.counts.sum((0, 2)).max()
        spread = 0.98 / np.sqrt(n)
        low, high = max(0.5 - spread, 1 / n), min(0.5 + spread, 1.0)
        summary = np.stack([self.inputs.quantile(level) for level in (0.5, low, high)])
        if n < 6:
            summary[1:] = np.nan
        return summary


class Means:
    """Means over inputs, and their 95 % intervals; NaN is not counted."""

    def __init__(self) -> None:
        self.count: np.ndarray | float = 0.0
        self.total: np.ndarray | float = 0.0
        self.squares: np.ndarray | float = 0.0

    def add(self, values: np.ndarray) -> None:
        known = np.isfinite(values)
        values = np.where(known, values, 0)
        self.count = self.count + known
        self.total = self.total + values
        self.squares = self.squares + values**2

    def summary(self) -> np.ndarray:
        """Count, mean, low and high end, stacked; the ends are NaN for fewer than two inputs."""
        n = np.asarray(self.count, dtype=float)
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = self.total / n
            variance = np.maximum(self.squares / n - mean**2, 0) * n / (n - 1)
            half = 1.96 * np.sqrt(variance / n)
        return np.stack([n, mean, mean - half, mean + half])
