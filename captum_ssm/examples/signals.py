"""Two tasks on float series whose decisive step and feature are known, for every answer.

**Forecast.** A series ``(64, 5)`` has three signals, new at every step, and two marks: a pulse at
one step each. The step under the first mark decides the next six steps of all features, the step
under the second mark the six after those. Which signal decides which feature is fixed
(:data:`SOURCES`), and its value there fades along the six steps. All other values of the signals
decide nothing.

**Classification.** A series ``(6, 96)``, channels first, is waves and noise, with a short burst in
every feature. One burst, in any feature at any step, is one of four patterns: the class. The others
have the same size and no class: they change sign at every step.

Draws are continuous, so that other seeds are other series: the held-out ones are those of
:data:`HELD_OUT_SEED`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = [
    "CLASSES",
    "FEATURES",
    "HORIZON",
    "PATTERN",
    "SIGNALS",
    "Bursts",
    "Forecasts",
    "burst_scores",
    "forecast_scores",
    "held_out_bursts",
    "held_out_forecasts",
    "make_bursts",
    "make_forecasts",
    "patterns",
    "r_squared",
]

HELD_OUT_SEED = 20_002

STEPS = 64
HORIZON = 12
FEATURES = ("demand", "price", "supply", "first mark", "second mark")
SIGNALS = 3
# The signal that decides the forecast of each feature.
SOURCES = (1, 2, 0, 0, 2)
# The mark whose step decides each step of the forecast, and how much is left of the value then.
MARKS = tuple(SIGNALS + h // 6 for h in range(HORIZON))
LEVELS = tuple(0.9 ** (h % 6) for h in range(HORIZON))

CHANNELS = 6
LENGTH = 96
CLASSES = ("rise", "fall", "hill", "valley")
PATTERN = 8


@dataclass(frozen=True)
class Forecasts:
    """Series with their future, and what decides it.

    Args:
        series (Tensor): ``(B, 64, 5)``.
        future (Tensor): The next steps, ``(B, 12, 5)``.
        steps (Tensor): The step of the one value that each entry of the future is made of,
            ``(B, 12, 5)``.
        features (Tensor): The feature of that value, ``(B, 12, 5)``.
        marks (Tensor): The features whose pulse at that step says so, ``(12,)``.

    Examples::

        >>> forecasts = signals.held_out_forecasts(4)
        >>> forecasts.decisive(step=2, feature=1).sum((1, 2))
        tensor([1, 1, 1, 1])
    """

    series: Tensor
    future: Tensor
    steps: Tensor
    features: Tensor
    marks: Tensor

    def __len__(self) -> int:
        return len(self.series)

    def decisive(self, step: int, feature: int) -> Tensor:
        """Where the value is that decides an entry of the future.

        Args:
            step (int): Which of the 12 next steps.
            feature (int): Which of the 5 features.

        Returns:
            A boolean ``(B, 64, 5)``, true at one entry per series.
        """
        mask = torch.zeros_like(self.series, dtype=torch.bool)
        rows = torch.arange(len(self))
        mask[rows, self.steps[:, step, feature], self.features[:, step, feature]] = True
        return mask


@dataclass(frozen=True)
class Bursts:
    """Series with their classes, and where the pattern is that decides it.

    Args:
        series (Tensor): ``(B, 6, 96)``, channels first.
        labels (Tensor): Indices of :data:`CLASSES`, ``(B,)``.
        features (Tensor): The feature that has the pattern, ``(B,)``.
        starts (Tensor): The first of the :data:`PATTERN` steps of the pattern, ``(B,)``.
        masks (Tensor): Marks the entries of the pattern, ``(B, 6, 96)``, boolean.

    Examples::

        >>> bursts = signals.held_out_bursts(3)
        >>> bursts.masks.sum((1, 2))
        tensor([8, 8, 8])
    """

    series: Tensor
    labels: Tensor
    features: Tensor
    starts: Tensor
    masks: Tensor

    def __len__(self) -> int:
        return len(self.series)


def make_forecasts(count: int, generator: torch.Generator, length: int = STEPS) -> Forecasts:
    """Fresh series with their future.

    Args:
        count (int): How many.
        generator (torch.Generator): The source of all randomness.
        length (int, optional): The number of steps of a series. Default: 64

    Returns:
        The series, and what decides the future.

    Examples::

        >>> signals.make_forecasts(8, torch.Generator().manual_seed(0)).future.shape
        torch.Size([8, 12, 5])
    """
    series = torch.randn(count, length, len(FEATURES), generator=generator)
    series[..., SIGNALS:] *= 0.05
    marked = torch.rand(count, length, generator=generator).argsort(1)[:, :2]  # two steps
    rows = torch.arange(count)[:, None]
    series[rows, marked, SIGNALS + torch.arange(2)] += 3.0

    marks = torch.tensor(MARKS)
    shape = (count, HORIZON, len(FEATURES))
    steps = marked[:, marks - SIGNALS, None].expand(shape)
    features = torch.tensor(SOURCES).expand(shape)
    future = series[rows[..., None], steps, features] * torch.tensor(LEVELS)[:, None]
    return Forecasts(series, future, steps, features, marks)


def patterns() -> Tensor:
    """The patterns of the classes, each of mean 0 and root mean square 1.

    Returns:
        ``(4, 8)``.

    Examples::

        >>> signals.patterns().shape
        torch.Size([4, 8])
    """
    t = torch.linspace(-1, 1, PATTERN)
    hill = torch.cos(math.pi * t)
    shapes = torch.stack([t, -t, hill, -hill])
    shapes = shapes - shapes.mean(1, keepdim=True)
    return shapes / shapes.square().mean(1, keepdim=True).sqrt()


def make_bursts(count: int, generator: torch.Generator) -> Bursts:
    """Fresh series with their classes.

    Args:
        count (int): How many.
        generator (torch.Generator): The source of all randomness.

    Returns:
        The series, and where the pattern is.

    Examples::

        >>> signals.make_bursts(8, torch.Generator().manual_seed(0)).series.shape
        torch.Size([8, 6, 96])
    """

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    # Slow waves of any phase, and noise.
    period = 16 + 32 * torch.rand(count, CHANNELS, 1, generator=generator)
    phase = 2 * math.pi * torch.rand(count, CHANNELS, 1, generator=generator)
    series = 0.5 * torch.sin(2 * math.pi * torch.arange(LENGTH) / period + phase)
    series = series + 0.2 * torch.randn(count, CHANNELS, LENGTH, generator=generator)

    labels, features = draw(len(CLASSES), count), draw(CHANNELS, count)
    rows = torch.arange(count)
    signs = (-1.0) ** (torch.arange(PATTERN) + draw(2, count, CHANNELS, 1))
    bursts = signs * (0.5 + torch.rand(count, CHANNELS, PATTERN, generator=generator))
    bursts[rows, features] = patterns()[labels]
    starts = draw(LENGTH - PATTERN + 1, count, CHANNELS)
    at = starts[..., None] + torch.arange(PATTERN)
    series = series.scatter_add(-1, at, 2 * bursts)

    masks = torch.zeros_like(series, dtype=torch.bool)
    starts = starts[rows, features]
    at = starts[:, None] + torch.arange(PATTERN)
    masks[rows[:, None], features[:, None], at] = True
    return Bursts(series, labels, features, starts, masks)


def held_out_forecasts(count: int = 200) -> Forecasts:
    """Series that no model was trained on, the same at every call.

    Args:
        count (int, optional): How many. Default: 200

    Returns:
        The series, and what decides the future.

    Examples::

        >>> signals.held_out_forecasts(4).series.shape
        torch.Size([4, 64, 5])
    """
    return make_forecasts(count, torch.Generator().manual_seed(HELD_OUT_SEED))


def held_out_bursts(count: int = 1000) -> Bursts:
    """Series that no model was trained on, the same at every call.

    Args:
        count (int, optional): How many. Default: 1000

    Returns:
        The series, and where the pattern is.

    Examples::

        >>> len(signals.held_out_bursts(4))
        4
    """
    return make_bursts(count, torch.Generator().manual_seed(HELD_OUT_SEED))


def r_squared(forecast: Tensor, future: Tensor) -> float:
    """The share of the future's variance that a forecast explains, the mean over its entries.

    Args:
        forecast (Tensor): What a model says, ``(B, ...)``.
        future (Tensor): What came, of the same shape.

    Returns:
        R²: 1 for a perfect forecast, 0 for the future's mean.

    Examples::

        >>> future = signals.held_out_forecasts(50).future
        >>> signals.r_squared(future, future)
        1.0
    """
    unexplained = (forecast - future).square().mean(0) / future.var(0, correction=0)
    return float((1 - unexplained).mean())


@torch.no_grad()
def forecast_scores(model: nn.Module, forecasts: Forecasts) -> dict[str, float]:
    """R² on the series, and after redrawing either the decisive values or all others.

    The marks stay. A model that reads the right values loses everything with the former, and
    nothing with the latter.

    Args:
        model (nn.Module): Series ``(B, 64, 5)`` to forecasts ``(B, 12, 5)``.
        forecasts (Forecasts): The series, and what decides their future.

    Returns:
        ``r2``, ``r2_decisive_redrawn`` and ``r2_others_redrawn``.

    Examples::

        >>> model, _ = captum_ssm.examples.load("series-forecaster")
        >>> scores = signals.forecast_scores(model, signals.held_out_forecasts(50))
        >>> scores["r2"] > 0.9 > 0.1 > scores["r2_decisive_redrawn"]
        True
    """
    series, future = forecasts.series, forecasts.future
    fresh = torch.randn(series.shape, generator=torch.Generator().manual_seed(0))
    signals = torch.arange(len(FEATURES)) < SIGNALS
    decisive = torch.stack(
        [forecasts.decisive(h, f) for h in range(HORIZON) for f in range(len(FEATURES))]
    ).any(0)
    others = signals & ~decisive
    return {
        "r2": r_squared(model(series), future),
        "r2_decisive_redrawn": r_squared(model(torch.where(decisive, fresh, series)), future),
        "r2_others_redrawn": r_squared(model(torch.where(others, fresh, series)), future),
    }


@torch.no_grad()
def burst_scores(model: nn.Module, bursts: Bursts) -> dict[str, float]:
    """The share of classes named right, and of the labels still named without the pattern.

    What the pattern covered is then 0, and a model that reads the pattern is left with a guess.

    Args:
        model (nn.Module): Series ``(B, 6, 96)`` to logits ``(B, 4)``.
        bursts (Bursts): The series, and where the pattern is.

    Returns:
        ``accuracy`` and ``accuracy_without_pattern``.

    Examples::

        >>> model, _ = captum_ssm.examples.load("series-classifier")
        >>> signals.burst_scores(model, signals.held_out_bursts(50))["accuracy"] > 0.9
        True
    """

    def accuracy(series: Tensor) -> float:
        return float((model(series).argmax(1) == bursts.labels).float().mean())

    return {
        "accuracy": accuracy(bursts.series),
        "accuracy_without_pattern": accuracy(bursts.series.masked_fill(bursts.masks, 0.0)),
    }
