"""Alignment metrics against scikit-learn and hand-worked cases."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score

from captum_ssm.metrics import alignment_error_rate, alignment_scores, hit_rate, links


@pytest.mark.parametrize("levels", [None, 4, 1])
@pytest.mark.parametrize("is_masked", [False, True])
def test_scores_are_the_means_of_scikit_learns(levels, is_masked) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 5, 12, generator=generator)
    if levels is not None:  # ties
        scores = (scores.sigmoid() * levels).floor() - levels / 2
    truth = (torch.rand(5, 12, generator=generator) < 0.3).int()
    keep = torch.rand(5, 12, generator=generator) < (0.7 if is_masked else 2)
    found = alignment_scores(scores, truth, keep.int() if is_masked else None)
    pairs = [(truth[r][keep[r]], scores[b, r][keep[r]]) for b in range(2) for r in range(5)]
    pairs = [(t, s) for t, s in pairs if 0 < int(t.sum()) < len(t)]
    assert found["rows"] == len(pairs)
    auc = sum(roc_auc_score(t, s) for t, s in pairs) / len(pairs)
    ap = sum(average_precision_score(t, s) for t, s in pairs) / len(pairs)
    assert found["auc"] == pytest.approx(auc)
    assert found["ap"] == pytest.approx(ap)


def test_recall_at_k_and_mask_by_hand() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.8, 0.7]])
    truth = torch.tensor([[1, 1, 0, 0]])
    # Two are marked; of the two best, 0 and 2, one is.
    assert alignment_scores(scores, truth)["recall_at_k"] == 0.5
    # Without token 2 the two best are 0 and 3.
    mask = torch.tensor([[1, 1, 0, 1]])
    found = alignment_scores(scores, truth, mask)
    assert found["recall_at_k"] == 0.5
    assert found["auc"] == 0.5


def test_hit_rate_accepts_neighbours() -> None:
    scores = torch.eye(6)[[1, 1, 5]]
    source = torch.tensor([1, 2, 2])
    assert hit_rate(scores, source) == pytest.approx(2 / 3)
    assert hit_rate(scores, source, within=0) == pytest.approx(1 / 3)


def test_alignment_error_rate_by_hand() -> None:
    sure, possible = {(0, 0), (1, 1)}, {(2, 1), (2, 2)}
    assert alignment_error_rate(sure, sure) == 0
    # A = {00, 21, 33}: one sure, one more possible: 1 - (1 + 2) / (3 + 2).
    assert alignment_error_rate({(0, 0), (2, 1), (3, 3)}, sure, possible) == pytest.approx(0.4)


def test_links_of_some_rows() -> None:
    scores = torch.eye(4)[[2, 0, 3, 1]]
    assert links(scores) == {(2, 0), (0, 1), (3, 2), (1, 3)}
    for rows in ([1, 3], (i for i in (1, 3)), iter(torch.tensor([1, 3]).tolist()), {3, 1, 99}):
        assert links(scores, rows) == {(0, 1), (1, 3)}
    assert links(scores, []) == set()


def test_links_may_come_from_generators() -> None:
    pairs = [(0, 0), (2, 1), (3, 3)]
    found, sure, possible = (iter(x) for x in (pairs, [(0, 0), (1, 1)], [(2, 1), (2, 2)]))
    assert alignment_error_rate(found, sure, possible) == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("call", "part"),
    [
        (lambda: alignment_scores(torch.ones(2, 3), torch.ones(2, 4)), "broadcast"),
        (lambda: alignment_scores(torch.full((1, 3), torch.nan), torch.eye(3)[:1]), "NaN"),
        (lambda: alignment_scores(torch.rand(1, 3), torch.zeros(1, 3)), "nothing to score"),
        (lambda: alignment_error_rate([], []), "not defined"),
        (lambda: hit_rate(torch.eye(3), torch.zeros(3, 1).long()), r"\(3, 1\) .* \(3,\)"),
        (lambda: hit_rate(torch.eye(3), torch.zeros(2).long()), "one token per query"),
    ],
)
def test_bad_calls(call, part: str) -> None:
    with pytest.raises(ValueError, match=part):
        call()
