"""A score with its confidence interval, by bootstrap over samples (Efron, 1979)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from captum_ssm.utils.intervals import Interval


def bootstrap(
    *values: Tensor,
    statistic: Callable[..., Tensor] | None = None,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Interval:
    """A statistic of samples with its percentile interval, by :func:`scipy.stats.bootstrap`.

    Args:
        *values (Tensor): ``(B, ...)`` each, aligned by sample.
        statistic (Callable, optional): takes the values of the drawn samples, ``(B, ...)`` each,
            in float64 on the CPU, and returns a scalar. None is the mean of the first.
            Default: None
        resamples (int, optional): number of times that B samples are drawn, with replacement.
            Default: 1000
        level (float, optional): confidence level. Default: 0.95
        seed (int, optional): the same seed draws the same samples for the same B, so that methods
            scored on one data set are compared on the same draws. Default: 0

    Returns:
        Interval: NaN for no samples; of width 0 for one.

    Raises:
        ValueError: for values of different numbers of samples, or a ``level`` outside (0, 1).

    Examples::

        >>> result = bootstrap(torch.arange(100.0))
        >>> result.value, result.low < result.value < result.high
        (49.5, True)
    """
    B = values[0].shape[0]
    if any(v.shape[0] != B for v in values):
        raise ValueError(
            f"values hold {[v.shape[0] for v in values]} samples; expected as many in each."
        )
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; expected 0 < level < 1.")
    wide = [v.detach().double().cpu() for v in values]

    def of_samples(drawn: np.ndarray, axis: int | None = None) -> Any:
        if statistic is None:
            return each[drawn].mean(axis)
        return float(statistic(*(v[drawn] for v in wide)))

    indices = np.arange(B)
    each = wide[0].reshape(B, -1).mean(1).numpy() if B else indices
    value = float(of_samples(indices)) if B else float("nan")
    if B < 2:
        return Interval(value, value, value, B)

    from scipy import stats

    # Indices are drawn, not values: which ones depends on the seed and on B alone.
    ends = stats.bootstrap(
        (indices,),
        of_samples,
        n_resamples=resamples,
        batch=100,  # as much of the B x resamples indices is in memory at once
        vectorized=statistic is None,
        confidence_level=level,
        method="percentile",
        rng=seed,
    ).confidence_interval
    return Interval(value, float(ends.low), float(ends.high), B)
