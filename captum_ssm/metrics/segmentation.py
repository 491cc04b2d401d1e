"""Segmentation by an explanation: pixel accuracy, mIoU and mAP against object masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from captum_ssm.metrics.interval import Interval, bootstrap


@dataclass(frozen=True)
class SegmentationScores:
    """Counts of pixels per image, from which the scores of a segmentation are taken.

    Args:
        correct (Tensor): ``(B,)``, pixels on the right side of the threshold.
        labelled (Tensor): ``(B,)``, pixels that are labelled.
        intersection, union (Tensor): ``(B, 2)``, for background and foreground.
        ap (Tensor): ``(B,)``, average precision per image.

    Examples::

        >>> masks = torch.zeros(2, 4, 4, dtype=torch.long)
        >>> masks[:, :2] = 1
        >>> result = segmentation(masks.float(), masks)
        >>> float(result.ap.mean())
        1.0
    """

    correct: Tensor
    labelled: Tensor
    intersection: Tensor
    union: Tensor
    ap: Tensor

    def pixel_accuracy(self, **options: Any) -> Interval:
        """Share of all images' pixels that are right; the options are :func:`bootstrap`'s."""
        return bootstrap(
            self.correct, self.labelled, statistic=lambda c, n: c.sum() / n.sum(), **options
        )

    def miou(self, **options: Any) -> Interval:
        """Intersection over union, over all images, mean of background and foreground."""

        def ratio(intersection: Tensor, union: Tensor) -> Tensor:
            return (intersection.sum(0) / union.sum(0).clamp(min=1)).mean()

        return bootstrap(self.intersection, self.union, statistic=ratio, **options)

    def map(self, **options: Any) -> Interval:
        """Mean average precision over images."""
        return bootstrap(self.ap, **options)


def segmentation(
    attributions: Tensor, masks: Tensor, *, threshold: str | float = "mean"
) -> SegmentationScores:
    """Pixel accuracy, mIoU and mAP of relevance maps (Chefer et al., 2021).

    Ali et al. (table 2) and Zimerman et al. (table 3) compare with that paper's numbers. A map is
    rescaled to [0, 1] and is foreground where it exceeds its threshold.

    Args:
        attributions (Tensor): ``(B, C, H, W)``, or ``(B, H, W)``, of any scale and sign.
        masks (Tensor): ``(B, H, W)``, 1 for the object, 0 for background, -1 if not labelled.
        threshold (str or float, optional): ``"mean"`` of each rescaled map, or a number in
            [0, 1]. Default: ``"mean"``

    Returns:
        SegmentationScores: as defined in that paper: accuracy and IoU are counted over all
        pixels of the data set; average precision is per image, of background and foreground
        together.

    Raises:
        ValueError: if shapes do not fit or relevance is not finite.

    Examples::

        >>> segmentation(torch.rand(2, 3, 4, 4), torch.randint(0, 2, (2, 4, 4))).union.shape
        torch.Size([2, 2])
    """
    maps = attributions.sum(1) if attributions.dim() == 4 else attributions
    if maps.shape != masks.shape:
        raise ValueError(
            f"attributions have shape {tuple(attributions.shape)} and masks "
            f"{tuple(masks.shape)}; expected (B, C, H, W) or (B, H, W), and (B, H, W)."
        )
    if not bool(torch.isfinite(maps).all()):
        raise ValueError("attributions hold NaN or Inf; expected finite values.")
    maps = maps.detach().double().flatten(1).cpu()
    truth = masks.long().flatten(1).cpu()
    low, high = maps.amin(1, keepdim=True), maps.amax(1, keepdim=True)
    maps = (maps - low) / (high - low).clamp(min=1e-30)
    cut = maps.mean(1, keepdim=True) if threshold == "mean" else float(threshold)
    foreground, known = maps > cut, truth >= 0
    sides = [(~foreground, truth == 0), (foreground, truth == 1)]
    return SegmentationScores(
        correct=((foreground == (truth == 1)) & known).sum(1),
        labelled=known.sum(1),
        intersection=torch.stack([(f & t).sum(1) for f, t in sides], 1),
        union=torch.stack([((f & known) | t).sum(1) for f, t in sides], 1),
        ap=torch.stack(
            [
                average_precision(torch.cat([1 - m[k], m[k]]), torch.cat([t[k] == 0, t[k] == 1]))
                for m, t, k in zip(maps, truth, known, strict=True)
            ]
        ),
    )


def average_precision(scores: Tensor, truth: Tensor) -> Tensor:
    """The mean over thresholds of precision, weighted by the recall each adds.

    Args:
        scores, truth (Tensor): ``(n,)`` each, true for positives; the result is 0 without them.

    Examples::

        >>> float(average_precision(torch.tensor([0.9, 0.1]), torch.tensor([True, False])))
        1.0
    """
    order = scores.argsort(descending=True)
    ranked, hits = scores[order], truth[order].double().cumsum(0)
    if hits[-1] == 0:
        return hits[-1]
    # Equal scores share one threshold: the end of their run.
    end = torch.searchsorted(-ranked, -ranked, right=True) - 1
    precision = hits[end] / (end + 1)
    return (precision * truth[order]).sum() / hits[-1]
