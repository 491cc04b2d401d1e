"""How well a token-to-token map agrees with a known alignment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

Links = Iterable[tuple[int, int]]


def alignment_scores(scores: Tensor, truth: Tensor, mask: Tensor | None = None) -> dict[str, float]:
    """AUC, average precision and recall at K of a map against a ground-truth matrix.

    Scored per query row, as in the evaluation of word-level explanations by Fomicheva et al.
    (2021) that Pitorro & Treviso (2025, section 4.1) use; then averaged over the rows whose
    truth marks at least one token, but not all of them.

    Args:
        scores (Tensor): ``(..., R, L)``, higher is more relevant.
        truth (Tensor): of the same shape or broadcastable to it, nonzero where a token belongs
            to a query.
        mask (Tensor, optional): of the same shape or broadcastable to it, zero for tokens that
            are not candidates (the future, padding). Default: None

    Returns:
        dict: ``"auc"``, ``"ap"`` and ``"recall_at_k"``, where K is the number of tokens marked
        in the row; ``"rows"``, the number of rows they are averaged over.

    Raises:
        ValueError: if shapes do not fit, scores are not finite, or no row can be scored.

    Examples::

        >>> scores = torch.tensor([[0.9, 0.1, 0.2], [0.3, 0.1, 0.2]])
        >>> result = alignment_scores(scores, torch.tensor([[1, 0, 0], [1, 0, 0]]))
        >>> result["auc"], result["recall_at_k"]
        (1.0, 1.0)
    """
    try:
        truth = truth.expand_as(scores)
        mask = torch.ones_like(scores) if mask is None else mask.expand_as(scores)
    except RuntimeError as error:
        raise ValueError(
            f"scores has shape {tuple(scores.shape)} and truth {tuple(truth.shape)}; expected "
            "truth and mask that broadcast to the scores."
        ) from error
    if not bool(torch.isfinite(scores).all()):
        raise ValueError("scores holds NaN or Inf; expected finite values.")
    per_row = _row_scores(_rows(scores), _rows(truth) != 0, _rows(mask) != 0)
    if not len(per_row):
        raise ValueError(
            "truth marks no token, or all of them, in every row: nothing to score; expected a row "
            "with tokens of both kinds."
        )
    auc, ap, recall = per_row.mean(0).tolist()
    return {"auc": auc, "ap": ap, "recall_at_k": recall, "rows": len(per_row)}


def _row_scores(scores: Tensor, truth: Tensor, keep: Tensor) -> Tensor:
    # AUC, AP and recall at K of each row with tokens of both kinds, (N, 3). All rows at once:
    # scikit-learn's functions take one, at milliseconds each.
    marked, others = (truth & keep).sum(-1), (~truth & keep).sum(-1)
    both = (marked > 0) & (others > 0)
    marked, others, keep = marked[both], others[both], keep[both]
    scores = scores[both].masked_fill(~keep, -torch.inf)  # the last ones, where they do not count
    order = scores.argsort(dim=-1, descending=True, stable=True)
    ranked, right = scores.gather(-1, order), (truth[both] & keep).gather(-1, order)
    kept = keep.gather(-1, order)
    hits, misses = right.cumsum(-1).double(), (kept & ~right).cumsum(-1).double()
    # Tokens of one score share a threshold: each counts as if it were the last of them.
    rank = torch.arange(scores.shape[-1], device=scores.device)
    is_last = torch.nn.functional.pad(ranked.diff(dim=-1) != 0, (0, 1), value=True)
    last = torch.where(is_last, rank, rank[-1]).flip(-1).cummin(-1).values.flip(-1)
    through = misses.gather(-1, last)
    is_first = torch.nn.functional.pad(ranked.diff(dim=-1) != 0, (1, 0), value=True)
    first = torch.where(is_first, rank, 0).cummax(-1).values
    before = torch.nn.functional.pad(misses, (1, 0)).gather(-1, first)
    hits = hits.gather(-1, last)
    precision = hits / (hits + through).clamp(min=1)
    auc = 1 - (right * (before + through) / 2).sum(-1) / (marked * others)
    ap = (right * precision).sum(-1) / marked
    recall = (right & (rank < marked[:, None])).sum(-1).double() / marked
    return torch.stack([auc, ap, recall], -1)


def hit_rate(scores: Tensor, source: Tensor, within: int = 1) -> float:
    """The share of queries whose largest score is at the right token, or close to it.

    Args:
        scores (Tensor): ``(..., R, L)``.
        source (Tensor): ``(..., R)`` int64, the right token of each query.
        within (int, optional): largest distance, in tokens, that counts as a hit; 1 is the
            three diagonals of Pitorro & Treviso (2025, section 4.1). Default: 1

    Returns:
        float: in [0, 1].

    Raises:
        ValueError: if ``source`` does not give one token per query.

    Examples::

        >>> hit_rate(torch.eye(4), torch.tensor([0, 1, 2, 0]))
        0.75
    """
    best = scores.argmax(-1)
    try:
        source = source.expand(best.shape)
    except RuntimeError as error:
        raise ValueError(
            f"source has shape {tuple(source.shape)} for scores of shape {tuple(scores.shape)}; "
            f"expected one token per query, {tuple(best.shape)}."
        ) from error
    return float(((best - source).abs() <= within).double().mean())


def alignment_error_rate(predicted: Links, sure: Links, possible: Links | None = None) -> float:
    r"""Alignment error rate with sure and possible links (Och & Ney, 2003).

    :math:`1 - (|A \cap S| + |A \cap P|) / (|A| + |S|)`, where P includes S.

    Args:
        predicted (iterable of pairs): A, links (source, target).
        sure (iterable of pairs): S.
        possible (iterable of pairs, optional): P; S is added to it. Default: None

    Returns:
        float: in [0, 1]; 0 if every predicted link is right and no sure link is missing.

    Raises:
        ValueError: if there is neither a predicted nor a sure link.

    Examples::

        >>> alignment_error_rate({(0, 0), (1, 1)}, sure={(0, 0)}, possible={(1, 1)})
        0.0
    """
    claimed, must = set(predicted), set(sure)
    may = must | set(possible or ())
    if not claimed and not must:
        raise ValueError(
            "neither predicted nor sure holds a link, so the rate is not defined; expected at "
            "least one."
        )
    return 1 - (len(claimed & must) + len(claimed & may)) / (len(claimed) + len(must))


def links(scores: Tensor, rows: Iterable[int] | None = None) -> set[tuple[int, int]]:
    """Each query's best token as a link ``(token, query)``.

    Args:
        scores (Tensor): ``(R, L)``.
        rows (iterable of int, optional): the queries; None for all. Default: None

    Examples::

        >>> sorted(links(torch.eye(3)))
        [(0, 0), (1, 1), (2, 2)]
    """
    best = scores.argmax(-1).tolist()
    queries = set(range(len(best)) if rows is None else rows)
    return {(j, i) for i, j in enumerate(best) if i in queries}


def decomposition_error(
    latim: Any, inputs: Any, *, activation: str = "gate", additional_forward_args: Any = None
) -> list[float]:
    """LaTIM's decomposition error in each layer (Pitorro & Treviso, 2025, section 3.3, table 4).

    Args:
        latim (LaTIM): the method.
        inputs, activation, additional_forward_args: as for :meth:`captum_ssm.LaTIM.attribute`.

    Returns:
        list of float: per layer, the norm of its output minus the sum of the contributions,
        relative to the norm of its output, averaged over examples. Zero for ``"gate"``, up to
        rounding.

    Raises:
        ValueError, TypeError: as for :meth:`captum_ssm.LaTIM.layer_errors`.

    Examples::

        >>> errors = decomposition_error(LaTIM(model), input_ids)
        >>> all(error < 1e-4 for error in errors)
        True
    """
    errors = latim.layer_errors(
        inputs, activation=activation, additional_forward_args=additional_forward_args
    )
    return [float(error.mean()) for error in errors]


def _rows(values: Tensor) -> Tensor:
    return values.detach().reshape(-1, values.shape[-1]).double()
