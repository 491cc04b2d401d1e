"""What a token shift moves between neighbors, outside of a mixer's scan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from captum_ssm.attr.flow.activations import BlockStream, PropagatedRun
from captum_ssm.attr.flow.layer_edges import LayerEdges
from captum_ssm.attr.flow.stream import BlockNodes, total_of
from captum_ssm.graph.relevance_rules import ruled
from captum_ssm.operators.composed import sum_of

# A block's tokens are out of balance where they miss so much of its largest relevance.
_BALANCED = 1e-5


def with_shifts(
    blocks: Sequence[BlockNodes],
    layers: Sequence[LayerEdges],
    run: PropagatedRun,
    formulation: str,
) -> list[BlockNodes]:
    """Blocks with what their token shifts move, where the books of a block do not balance.

    Args:
        blocks (sequence of BlockNodes): by block of the run.
        layers (sequence of LayerEdges): by mixer of the run.
        run (PropagatedRun): with its graph.
        formulation (str): of the edges.
    """
    if len(blocks) != len(run.streams):
        return list(blocks)
    return [
        replace(block, shifts=_shifts(block, stream, run, formulation))
        if _has_one_mixer(stream) and _is_off(block, layers[block.mixers[0]])
        else block
        for block, stream in zip(blocks, run.streams, strict=True)
    ]


def _has_one_mixer(stream: BlockStream) -> bool:
    # Whether a block has one, and works on a row of tokens.
    in_a_row = all(x.dim() == 3 for x in (*stream.before, *stream.after))
    return in_a_row and len(stream.mixers) == 1


def _is_off(block: BlockNodes, layer: LayerEdges) -> bool:
    carried = block.after - layer.out + layer.out_of + layer.skip + layer.gate
    scale = torch.maximum(block.before.abs().amax(), block.after.abs().amax())
    return bool((block.before - carried).abs().amax() > _BALANCED * scale)


def _shifts(
    block: BlockNodes, stream: BlockStream, run: PropagatedRun, formulation: str
) -> tuple[Tensor, Tensor]:
    # What the token before gives to each token, (B, L): into what its edges start at, and past the
    # scan, as a shift in an MLP does. The relevance of every second token is propagated; what then
    # arrives at the tokens between comes from their neighbors.
    kept, device = run.kept[block.mixers[0]], block.before.device
    starts = kept.values if formulation == "hidden" else kept.inputs
    after, before, sources = map(run.with_coefficients, (stream.after, stream.before, starts))
    given = [x for x, _ in before]
    cut = [x for x in kept.mixed if x.requires_grad]
    roots = [x.grad_fn for x, _ in (*after, *sources)]
    ends = [torch.autograd.graph.get_gradient_edge(x).node for x in given]
    color = torch.arange(given[0].shape[1], device=device) % 2
    found = torch.zeros(2, *given[0].shape[:2], device=device)
    with torch.enable_grad(), ruled(roots, ends):
        for one in (0, 1):
            at = (color == one)[:, None]
            into = _pulled(sources, given, at)
            past = _pulled(after, [kept.output, *cut, *given], at)
            inside = _pulled([*zip(cut, past[1:], strict=False)], given)
            around = [a - b for a, b in zip(past[1 + len(cut) :], inside, strict=True)]
            totals = (
                _total(into, given, device),
                _total([past[0], *around], [kept.output, *given], device),
            )
            for n, total in enumerate(totals):
                found[n, :, 1:] += torch.where(at[1:, 0], total[:, :-1], 0)
    return found[0], found[1]


def _total(
    coefficients: Sequence[Tensor], tensors: Sequence[Tensor], device: torch.device
) -> Tensor:
    parts = (total_of(g, x, device) for g, x in zip(coefficients, tensors, strict=True))
    return sum_of([part for part in parts if part is not None])


def _pulled(
    outputs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor], at: Tensor | None = None
) -> list[Tensor]:
    # From outputs with their gradients, of some tokens only.
    if not outputs:
        return [torch.zeros_like(x) for x in inputs]
    gradients = [g if at is None else g * at.to(g.device) for _, g in outputs]
    found = torch.autograd.grad(
        [x for x, _ in outputs], list(inputs), gradients, retain_graph=True, allow_unused=True
    )
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]
