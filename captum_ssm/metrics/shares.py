"""Which part of a prompt an answer is from: shares of relevance, with intervals over tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from captum_ssm.errors import brief
from captum_ssm.metrics.interval import Interval, bootstrap

SIGNS = ("positive", "net", "size")


def part_shares(
    rows: Tensor,
    parts: Mapping[str, Sequence[int]],
    *,
    signs: str = "positive",
    resamples: int = 1000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    r"""The share of an answer's relevance that lies on each named part of its prompt.

    A part's share is :math:`\sum_{t,\,i \in part} r_{ti} / \sum_{t,i} r_{ti}`, over the T tokens t
    of the answer and all tokens i before each. The interval is over the answer's tokens, by
    :func:`bootstrap`: it tells whether the whole answer comes from the part, or some of its words.

    Args:
        rows (Tensor): ``(T, L)``, one row per token of the answer, such as
            ``continuation_relevance`` returns, or ``relevance(output=k)`` of an explanation.
        parts (dict): by name, the positions of a part's tokens, such as ``range(0, 12)``. Parts
            need not cover the text; what lies on no part is missing from the shares.
        signs (str, optional): ``"positive"`` counts the relevance that supports the answer,
            ``"net"`` sums both signs, ``"size"`` counts magnitudes. Default: ``"positive"``
        resamples, level, seed (optional): as for :func:`bootstrap`.

    Returns:
        dict of Interval: by the names of ``parts``, in their order. NaN where the relevance of
        all rows sums to zero.

    Raises:
        ValueError: for rows of another shape or none at all, unknown ``signs``, a part without
            tokens, or positions that are repeated or outside the text.

    Examples::

        >>> rows = torch.tensor([[3.0, 1.0, 0.0], [2.0, 1.0, 1.0]])
        >>> shares = part_shares(rows, {"document 1": range(0, 1), "document 2": range(1, 3)})
        >>> shares["document 1"].value, shares["document 2"].value
        (0.625, 0.375)
    """
    if rows.dim() != 2 or 0 in rows.shape:
        raise ValueError(
            f"rows has shape {tuple(rows.shape)}; expected (T, L), one row per token of the answer."
        )
    if signs not in SIGNS:
        raise ValueError(f"signs is {brief(signs)}; expected one of {SIGNS}.")
    counted = {"positive": rows.clamp(min=0), "net": rows, "size": rows.abs()}[signs]
    whole = counted.sum(1)
    return {
        name: bootstrap(
            counted[:, _positions(name, part, rows.shape[1])].sum(1),
            whole,
            statistic=lambda part, whole: part.sum() / whole.sum(),
            resamples=resamples,
            level=level,
            seed=seed,
        )
        for name, part in parts.items()
    }


def _positions(name: str, part: Sequence[int], length: int) -> Tensor:
    positions = torch.as_tensor(list(part), dtype=torch.long)
    inside = bool(((positions >= 0) & (positions < length)).all())
    if not len(positions) or not inside or len(positions.unique()) < len(positions):
        raise ValueError(
            f"parts[{name!r}] is {brief(part)}; expected positions of tokens, each once, from 0 to "
            f"{length - 1}."
        )
    return positions
