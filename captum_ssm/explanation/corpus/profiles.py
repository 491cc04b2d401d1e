"""Where each example looks, as a vector; how typical it is; groups of examples that look alike."""

from __future__ import annotations

import numpy as np

from captum_ssm.explanation.corpus.readings import TENTHS, Reading, rows_of_kind

MOST_KEYS = 100  # of a profile; the rest of the relevance is one more
MOST_GROUPS = 8
LEAST_SILHOUETTE = 0.1  # of groups that are worth a name: below, examples differ by degrees
SAMPLE = 800  # examples by which the number of groups is chosen


def profiles(readings: list[Reading], units: str) -> np.ndarray:
    """One row per example: the square roots of its shares by tenth of the text and by unit.

    The Euclidean distance of two rows is the Hellinger distance of their shares, between 0 and 1,
    with positions and units counting half each.

    Args:
        readings (list of Reading): of N examples.
        units (str): ``"word"`` or ``"token"``.

    Returns:
        numpy.ndarray: ``(N, 10 + K + 1)``, the K units with the most relevance, and the rest.
    """
    tenths = np.zeros((len(readings), TENTHS))
    for k, keys, numbers in rows_of_kind(readings, "tenth"):
        tenths[k, keys] = numbers[:, 1]
    totals: dict[str, float] = {}
    for _, keys, numbers in rows_of_kind(readings, units):
        for key, total in zip(keys, numbers[:, 1], strict=True):
            totals[key] = totals.get(key, 0.0) + total
    largest = sorted(totals, key=lambda key: -totals[key])[:MOST_KEYS]
    column = {key: c for c, key in enumerate(largest)}
    words = np.zeros((len(readings), len(largest) + 1))
    for k, keys, numbers in rows_of_kind(readings, units):
        columns = [column.get(key, len(largest)) for key in keys]
        np.add.at(words[k], columns, numbers[:, 1])
    halves = [np.sqrt(np.maximum(part, 0) / 2) for part in (tenths, words)]
    return np.concatenate(halves, axis=1) / np.sqrt(2)


def distances(rows: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """How far each example is from the mean of its group, ``(N,)``, 0 to 1: 0 is typical."""
    far = np.zeros(len(rows))
    for group in np.unique(groups):
        inside = groups == group
        far[inside] = np.linalg.norm(rows[inside] - rows[inside].mean(0), axis=1)
    return far


def plane(rows: np.ndarray) -> np.ndarray:
    """Two coordinates per example, ``(N, 2)``: the first two principal components."""
    centered = rows - rows.mean(0)
    _, _, axes = np.linalg.svd(centered.T @ centered, hermitian=True)
    axes = axes[:2]
    strongest = np.abs(axes).argmax(axis=1)
    axes = axes * np.sign(axes[np.arange(len(axes)), strongest])[:, None]  # else of either sign
    return centered @ axes.T


def grouped(rows: np.ndarray) -> np.ndarray | None:
    """Groups of examples that look alike, by k-means; as many as the silhouette says.

    Args:
        rows (numpy.ndarray): profiles, ``(N, ...)``.

    Returns:
        numpy.ndarray: ``(N,)``, from the largest group, 0, on; all 0 where no division is better
        than :data:`LEAST_SILHOUETTE`. None without scikit-learn.
    """
    try:
        from sklearn.cluster import KMeans
        from sklearn.metrics import silhouette_score
    except ImportError:
        return None
    none = np.zeros(len(rows), dtype=int)
    chosen = rows[:: -(-len(rows) // SAMPLE)]
    best, most = LEAST_SILHOUETTE, 1
    distinct = len(np.unique(chosen.round(9), axis=0))
    for k in range(2, min(MOST_GROUPS, distinct - 1, len(chosen) // 3) + 1):
        labels = KMeans(k, n_init=4, random_state=0).fit_predict(chosen)
        score = silhouette_score(chosen, labels)
        if score > best:
            best, most = score, k
    if most == 1:
        return none
    labels = KMeans(most, n_init=4, random_state=0).fit_predict(rows)
    by_size = np.argsort(-np.bincount(labels), kind="stable")
    return np.argsort(by_size)[labels]
