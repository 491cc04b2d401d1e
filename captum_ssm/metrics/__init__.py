"""Metrics: which explanation to trust."""

from captum_ssm.metrics.alignment import (
    alignment_error_rate,
    alignment_scores,
    decomposition_error,
    hit_rate,
    links,
)

__all__ = [
    "alignment_error_rate",
    "alignment_scores",
    "decomposition_error",
    "hit_rate",
    "links",
]
