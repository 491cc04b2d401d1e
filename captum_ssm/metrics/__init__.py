"""Metrics: which explanation to trust."""

from typing import TYPE_CHECKING

from captum_ssm.errors import renamed
from captum_ssm.metrics.agreement import Agreement, knockout_agreement
from captum_ssm.metrics.alignment import (
    alignment_error_rate,
    alignment_scores,
    decomposition_error,
    hit_rate,
    links,
)
from captum_ssm.metrics.circuits import CircuitFaithfulness, circuit_faithfulness
from captum_ssm.metrics.evaluation import evaluate
from captum_ssm.metrics.interval import Interval, bootstrap
from captum_ssm.metrics.layers import (
    cls_influence,
    layer_knockout,
    oversmoothing,
    position_bias,
    token_similarity,
)
from captum_ssm.metrics.perturbation import (
    Curve,
    activation,
    delta_af,
    flipping,
    perturbation,
    pruning,
)
from captum_ssm.metrics.segmentation import SegmentationScores, average_precision, segmentation
from captum_ssm.metrics.shares import part_shares
from captum_ssm.metrics.smallest_circuit import Circuit, find_circuit, find_circuits

__all__ = [
    "Agreement",
    "Circuit",
    "CircuitFaithfulness",
    "Curve",
    "Interval",
    "SegmentationScores",
    "activation",
    "alignment_error_rate",
    "alignment_scores",
    "average_precision",
    "bootstrap",
    "circuit_faithfulness",
    "cls_influence",
    "decomposition_error",
    "delta_af",
    "evaluate",
    "find_circuit",
    "find_circuits",
    "flipping",
    "hit_rate",
    "knockout_agreement",
    "layer_knockout",
    "links",
    "oversmoothing",
    "part_shares",
    "perturbation",
    "position_bias",
    "pruning",
    "segmentation",
    "token_similarity",
]

if not TYPE_CHECKING:
    __getattr__ = renamed(__name__, Estimate="Interval")
