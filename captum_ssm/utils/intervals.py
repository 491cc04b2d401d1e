"""Confidence intervals. Nothing here needs PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

PRIOR = 4.0  # degrees of freedom that the variance of all means lends to each


@dataclass(frozen=True)
class Interval:
    """A score over samples and its confidence interval.

    Args:
        value (float): the score over all samples.
        low, high (float): the ends of the interval.
        samples (int): number of samples.

    Examples::

        >>> captum_ssm.metrics.Interval(0.5, 0.4, 0.6, samples=100).low
        0.4
    """

    value: float
    low: float
    high: float
    samples: int

    def __str__(self) -> str:
        if self.samples == 1:  # which says nothing of others
            return f"{self.value:.3f}"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def moderated_halves(
    counts: np.ndarray,
    variances: np.ndarray,
    trend: np.ndarray | None = None,
    prior: float = PRIOR,
) -> np.ndarray:
    """Half the width of the 95% interval of each of many means, by the moderated t-statistic.

    A variance of few samples says little: two equal ones have none. Each variance is averaged with
    the one that all means have in common, which counts as ``prior`` more degrees of freedom
    (Smyth, 2004, "Linear models and empirical Bayes methods", equation for the posterior variance,
    with a prior that is given and not estimated). A mean of one sample has an interval as well.

    Args:
        counts (numpy.ndarray): samples of each mean, ``(K,)``, at least 1.
        variances (numpy.ndarray): their variance with n - 1 in the denominator, ``(K,)``; of one
            sample 0.
        trend (numpy.ndarray, optional): what the common variance is in proportion to, ``(K,)``,
            such as ``mean * (1 - mean)`` of shares; None for one variance. Default: None
        prior (float, optional): Default: 4

    Returns:
        numpy.ndarray: ``(K,)``; infinite where no mean has two samples.

    Examples::

        >>> moderated_halves(np.array([2, 100]), np.array([0.0, 1.0])).round(2)
        array([1.62, 0.2 ])
    """
    from scipy import stats

    freedom = counts - 1.0
    if not freedom.sum() > 0:
        return np.full(len(counts), np.inf)
    shape = np.ones(len(counts)) if trend is None else trend
    common = shape * (freedom * variances).sum() / max((freedom * shape).sum(), 1e-300)
    posterior = (freedom * variances + prior * common) / (freedom + prior)
    return stats.t.ppf(0.975, freedom + prior) * np.sqrt(posterior / counts)
