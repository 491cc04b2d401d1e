"""A score with its confidence interval, by bootstrap over samples (Efron, 1979)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Estimate:
    """A score over samples and its confidence interval.

    Args:
        value (float): the score over all samples.
        low (float): lower end of the interval.
        high (float): upper end of the interval.
        samples (int): how many samples it is taken over.

    Examples::

        >>> captum_ssm.metrics.Estimate(0.5, 0.4, 0.6, samples=100).low
        0.4
    """

    value: float
    low: float
    high: float
    samples: int

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def bootstrap(
    *values: Tensor,
    statistic: Callable[..., Tensor] | None = None,
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> Estimate:
    """A statistic of samples with its percentile interval, samples drawn with replacement.

    Args:
        *values (Tensor): ``(B, ...)`` each, aligned by sample.
        statistic (Callable, optional): takes the values of drawn samples ``(..., B, ...)``, the
            samples on dimension 0, and returns a scalar. None is the mean of the first.
            Default: None
        resamples (int, optional): how many times samples are drawn. Default: 1000
        level (float, optional): of the interval. Default: 0.95
        seed (int, optional): the same draws for the same number of samples, so that methods
            scored on one data set are compared on the same draws. Default: 0

    Returns:
        Estimate: NaN where there is no sample.

    Raises:
        ValueError: for values of different numbers of samples, or a ``level`` outside (0, 1).

    Examples::

        >>> found = bootstrap(torch.arange(100.0))
        >>> found.value, found.low < found.value < found.high
        (49.5, True)
    """
    B = values[0].shape[0]
    if any(v.shape[0] != B for v in values):
        raise ValueError(f"values hold {[v.shape[0] for v in values]} samples; give as many each.")
    if not 0 < level < 1:
        raise ValueError(f"level is {level}; accepted is 0 < level < 1.")
    if B == 0:
        return Estimate(float("nan"), float("nan"), float("nan"), 0)
    function = (lambda *v: v[0].mean()) if statistic is None else statistic
    wide = [v.detach().double().cpu() for v in values]
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(B, (resamples, B), generator=generator)
    found = torch.stack([function(*(v[at] for v in wide)) for at in drawn])
    ends = torch.quantile(found, torch.tensor([(1 - level) / 2, (1 + level) / 2]).double())
    return Estimate(float(function(*wide)), float(ends[0]), float(ends[1]), B)
