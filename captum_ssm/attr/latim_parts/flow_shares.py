"""Target-specific mixing: the edges of a relevance flow in place of ALTI's rows."""

from __future__ import annotations

import torch
from torch import Tensor

from captum_ssm.attr.flow.edges import RelevanceEdges
from captum_ssm.attr.flow.stream import KNOWN_STREAM
from captum_ssm.attr.latim_parts.alti import shares_of
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.operators.composed import sum_of


def flow_shares(edges: RelevanceEdges, step: int) -> Tensor:
    """The mixing P of a step's mixers for each example's target, ``(B, L, L)``.

    With E the ``"unified"`` edges and :math:`o_j` what token j passes on by no edge (the residual
    stream, an MLP, the gate's argument),

    .. math:: P_{ij} \\propto [E_{ij} + \\delta_{ij}\\, o_i]_+ .

    Raises:
        UnsupportedModelError: for mixers that are not all of a block's.
    """
    mixers = edges.steps[step]
    block = next((block for block in edges.blocks if list(block.mixers) == mixers), None)
    layers = [edges[m] for m in mixers]
    if block is None or layers[0].drawn.shape != block.before.shape:
        names = ", ".join(layer.name for layer in layers)
        raise UnsupportedModelError(
            f"the residual stream around {names} was not found, so it is not known what passes "
            f"these mixers by; {KNOWN_STREAM} Use aggregation='alti_logit'."
        )
    passing = block.before - sum_of([layer.drawn for layer in layers])
    whole = sum_of([layer.matrix() for layer in layers]) + torch.diag_embed(passing)
    return shares_of(whole.clamp(min=0), torch.arange(whole.shape[1], device=whole.device))
