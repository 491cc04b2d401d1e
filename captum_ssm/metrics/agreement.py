"""Agreement of relevance with interventions: does the score drop without the relevant tokens?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.metrics.interval import Interval, bootstrap
from captum_ssm.utils.integers import count_of


@dataclass(frozen=True)
class Agreement:
    """How well relevance agrees with the effects of an intervention, per example.

    Args:
        rank (Tensor): ``(B,)``, Spearman's rank correlation over an example's tokens; NaN where
            relevance or effects are the same for all tokens.
        overlap (Tensor): ``(B,)``, the share of the k most relevant tokens that are among the k of
            the largest effects.

    Examples::

        >>> Agreement(torch.tensor([0.5]), torch.tensor([1.0])).estimate()["overlap"].value
        1.0
    """

    rank: Tensor
    overlap: Tensor

    def estimate(self, **options: Any) -> dict[str, Interval]:
        """Both means with their intervals, over examples with a value; options as for the others'.

        Keyword arguments are those of :func:`captum_ssm.metrics.bootstrap`.
        """
        parts = {"rank": self.rank, "overlap": self.overlap}
        return {name: bootstrap(x[~x.isnan()], **options) for name, x in parts.items()}


def knockout_agreement(
    attributions: Tensor,
    effects: Tensor,
    *,
    k: int = 5,
    mask: Tensor | None = None,
    absolute: bool = False,
) -> Agreement:
    """Rank correlation and top-k overlap of relevance with what a knockout does to the score.

    Args:
        attributions (Tensor): relevance, ``(B, L)``, or ``(B, L, E)`` to be summed over features.
        effects (Tensor): ``(B, L)``, of
            :meth:`captum_ssm.interventions.TokenKnockout.attribute`, or of any other intervention.
        k (int, optional): tokens compared by the overlap; all of them in an example that has
            fewer. Default: 5
        mask (Tensor, optional): ``(B, L)``, zero for tokens that do not count: padding, and the
            query token, which has no edge to others. Default: None
        absolute (bool, optional): compare magnitudes. Default: False

    Returns:
        Agreement: per example; its ``estimate()`` has means with bootstrap intervals.

    Raises:
        ValueError: for shapes that do not agree, values that are not finite, or ``k`` below 1.

    Examples::

        >>> effects = captum_ssm.interventions.TokenKnockout(model).attribute(input_ids, target=5)
        >>> relevance = MambaLRP(model).attribute(input_ids, target=5)
        >>> knockout_agreement(relevance, effects, k=3).rank.shape
        torch.Size([1])
    """
    relevance = attributions.sum(-1) if attributions.dim() == 3 else attributions
    if relevance.dim() != 2 or relevance.shape != effects.shape:
        raise ValueError(
            f"attributions has shape {tuple(attributions.shape)} and effects "
            f"{tuple(effects.shape)}; expected (B, L) or (B, L, E), and (B, L)."
        )
    if mask is not None and mask.shape != effects.shape:
        raise ValueError(
            f"mask has shape {tuple(mask.shape)}; expected that of effects, {tuple(effects.shape)}."
        )
    k = count_of("k", k, 1)
    for name, x in (("attributions", relevance), ("effects", effects)):
        if not bool(torch.isfinite(x).all()):
            raise ValueError(f"{name} holds NaN or Inf; expected finite values.")
    ranks, overlaps = [], []
    for b in range(len(effects)):
        keep = slice(None) if mask is None else mask[b].to(effects.device) != 0
        x, y = (t[b].to(effects.device)[keep].double() for t in (relevance, effects))
        x, y = (t.abs() if absolute else t for t in (x, y))
        is_varied = all(len(t.unique()) > 1 for t in (x, y))
        ranks.append(float(rank_correlation(x, y)) if is_varied else float("nan"))
        count = min(k, len(x))
        first, second = (set(t.topk(count).indices.tolist()) for t in (x, y))
        overlaps.append(len(first & second) / count if count else float("nan"))
    return Agreement(torch.tensor(ranks), torch.tensor(overlaps))


def rank_correlation(x: Tensor, y: Tensor) -> Tensor:
    """Spearman's rho over the last axis, in float64 on the CPU; 0 where all values are equal."""
    from scipy.stats import rankdata

    ranks = (torch.from_numpy(rankdata(t.double().cpu().numpy(), axis=-1)) for t in (x, y))
    x, y = (r - r.mean(-1, keepdim=True) for r in ranks)
    return F.cosine_similarity(x, y, dim=-1)
