"""The edges of one token mixer, as an operator over tokens, and the books that they balance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from captum_ssm.attr.flow.activations import Activations
from captum_ssm.attr.relevance import times
from captum_ssm.capture import FrozenCall
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.mixers import FrozenMixer
from captum_ssm.mixers.components import COMPONENTS
from captum_ssm.mixers.reordered import ReorderedMixer
from captum_ssm.operators import PermutedOperator, SoftmaxOperator, SumOperator, TokenOperator
from captum_ssm.operators.composed import sum_of
from captum_ssm.utils.integers import from_start
from captum_ssm.utils.lazy import cached_property

# Tiles of rows of so many entries are ranked at a time.
_TILE = 1 << 22


class Ranking(NamedTuple):
    """The largest edges between tokens of a mixer, and what all of its edges say of its tokens.

    Args:
        values, targets, sources (Tensor): ``(B, k)``, the edges, the largest first.
        own (Tensor): ``(B, L)``, what each token reads from itself.
        positive (Tensor): ``(B, L)``, the sum of all positive edges into each token from others.
        total (Tensor): ``(B,)``, the size of all edges between tokens.
        reads_later (bool): whether any edge is from a later token.
    """

    values: Tensor
    targets: Tensor
    sources: Tensor
    own: Tensor
    positive: Tensor
    total: Tensor
    reads_later: bool


@dataclass(frozen=True)
class LayerEdges:
    r"""The relevance that flows along each edge j -> i of one token mixer.

    In the network that MambaLRP propagates through, a mixer's scan is
    :math:`y_i = \sum_j \alpha_{ij} v_j + s_i \odot v_i` with constant :math:`\alpha` and s. With
    the propagation coefficient g at y,

    .. math::
        E_{ij} = \sum_d g_{id}\, \alpha^{m(d)}_{ij} v_{jd}, \qquad
        \langle g_{out}, out \rangle_i = \sum_j E_{ij} + skip_i + gate_i + bias_i .

    The matrix is made only by the methods that return it.

    Args:
        name (str): the mixer's path.
        operator (TokenOperator): E is the sum of its channels' maps.
        out (Tensor): ``(B, L)``, the relevance of what the mixer returns at each token.
        skip (Tensor): ``(B, L)``, what goes through the scan's skip; zero for ``"unified"`` edges,
            which include it.
        gate (Tensor): ``(B, L)``, what the gate's argument takes by the half rule; of a mixer that
            was measured, all that is neither an edge nor the skip nor a bias.
        bias (Tensor): ``(B, L)``, what the biases of the convolution, the norm and the output
            projection contribute, and what a centered norm subtracts.
        drawn (Tensor): ``(B, L)``, the relevance of each token as a source of the edges: of the
            scan's value, or of the mixer's input for ``"unified"``.
        formulation (str): ``"hidden"`` or ``"unified"``.
        kind (str): ``"attention"`` for softmax attention, else ``"recurrence"``.
        heads_count (int): M, the number of the mixer's maps.

    Examples::

        >>> layer = RelevanceFlow(model).edges(input_ids, target=5)["backbone.layers.1.mixer"]
        >>> layer.rows(torch.tensor([6])).shape, layer.kind
        (torch.Size([1, 1, 7]), 'recurrence')
        >>> bool(layer.error.abs().max() < 1e-5)
        True
    """

    name: str
    operator: TokenOperator = field(repr=False)
    out: Tensor = field(repr=False)
    skip: Tensor = field(repr=False)
    gate: Tensor = field(repr=False)
    bias: Tensor = field(repr=False)
    drawn: Tensor = field(repr=False)
    formulation: str
    kind: str
    heads_count: int

    def matrix(self) -> Tensor:
        """Every edge, ``(B, L, L)``, ``[i, j]`` for j -> i."""
        return self.operator.matrix("mean") * self.operator.channels

    def tile(self, start: int, stop: int) -> Tensor:
        """The edges into the tokens ``start .. stop - 1``: ``(B, stop - start, L)``."""
        return self.operator.row_tile(start, stop) * self.operator.channels

    def rows(self, index: Tensor) -> Tensor:
        """The edges into the tokens ``index``, ``(R,)`` or ``(B, R)``: ``(B, R, L)``.

        Positions are negative from the end.

        Raises:
            InputError: for positions outside the tokens.
        """
        return self.operator.rows(self._readers(index), "mean") * self.operator.channels

    def _readers(self, index: Tensor | None) -> Tensor:
        # Tokens that read, (B, R), from 0 on; None for all.
        B, L = self.operator.batch, self.operator.length
        index = torch.arange(L) if index is None else torch.as_tensor(index)
        index = index if index.dim() else index[None]
        told = f"index is {index.tolist()}, outside the {L} tokens of {self.name}"
        return from_start(index, L, told).to(self.operator.device).expand(B, index.shape[-1])

    def heads(self, index: Tensor | None = None, groups: int | None = None) -> Tensor:
        """The edges by head (of a mixer with one map per channel: by channel).

        Args:
            index (Tensor, optional): ``(R,)`` or ``(B, R)``, the tokens that read; None for all.
                Default: None
            groups (int, optional): sums over so many equal groups of channels instead.
                Default: None

        Returns:
            Tensor: ``(B, M, R, L)``; over M they add up to the edges.

        Raises:
            ValueError: for a number of groups that does not divide the channels.
            InputError: for positions outside the tokens.
        """
        operator, count = self.operator, self.heads_count if groups is None else groups
        if count < 1 or operator.channels % count:
            raise ValueError(
                f"groups is {groups}; expected a divisor of the {operator.channels} channels of "
                f"{self.name}."
            )
        index = self._readers(index)
        width = operator.channels // count
        starts = range(0, operator.channels, width)
        parts = [operator.map_rows(index, start, start + width).sum(1) for start in starts]
        return torch.stack(parts, 1)

    @cached_property
    def into(self) -> Tensor:
        """What the edges into each token carry, ``(B, L)``, in time linear in L."""
        return self.operator.row_sums() * self.operator.channels

    @cached_property
    def out_of(self) -> Tensor:
        """What the edges out of each token carry, ``(B, L)``, in time linear in L."""
        return _columns(self.operator)

    def ranking(self, k: int) -> Ranking:
        """The k largest edges between tokens, and sums of all edges, from tiles of rows."""
        B, L = self.operator.batch, self.operator.length
        step, live = max(1, _TILE // (B * L)), (self.out != 0).any(0)
        diagonal, positive = torch.zeros_like(self.out), torch.zeros_like(self.out)
        largest, total, reads_later = [], torch.zeros_like(self.out[:, 0]), False
        for start in range(0, L, step):
            stop = min(L, start + step)
            if not bool(live[start:stop].any()):
                continue
            tile = self.tile(start, stop)
            reads_later = reads_later or bool(tile.triu(start + 1).any())
            diagonal[:, start:stop] = tile.diagonal(start, 1, 2)
            tile.diagonal(start, 1, 2).zero_()
            positive[:, start:stop] = tile.clamp(min=0).sum(2)
            total += tile.abs().sum((1, 2))
            size = tile.abs().flatten(1)
            best, at = size.topk(min(k, size.shape[1]), 1)
            largest.append((best, tile.flatten(1).gather(1, at), start + at // L, at % L))
        if not largest:
            none = self.out[:, :0]
            return Ranking(none, none.long(), none.long(), diagonal, positive, total, reads_later)
        size, *parts = (torch.cat(part, 1) for part in zip(*largest, strict=True))
        at = size.topk(min(k, size.shape[1]), 1).indices
        values, targets, sources = (part.gather(1, at) for part in parts)
        return Ranking(values, targets, sources, diagonal, positive, total, reads_later)

    @property
    def error(self) -> Tensor:
        """The relevance of the mixer's output that no term accounts for, ``(B, L)``."""
        return self.out - self.into - self.skip - self.gate - self.bias

    @property
    def source_error(self) -> Tensor:
        """The relevance of each source that its edges and the skip do not carry, ``(B, L)``."""
        return self.drawn - self.out_of - self.skip

    @property
    def relative_errors(self) -> tuple[float, float]:
        """The largest :attr:`error` and :attr:`source_error`, over the largest ``out``."""
        scale = float(self.out.abs().amax().clamp(min=1e-30))
        return (
            float(self.error.abs().amax()) / scale,
            float(self.source_error.abs().amax()) / scale,
        )


def layer_edges(
    layer: FrozenCall, activations: Activations, coefficients: Activations, formulation: str
) -> LayerEdges:
    """The edges of one mixer, over the model's tokens.

    ``formulation`` is ``"hidden"`` or ``"unified"``.
    """
    mixer, name = activations.mixer, layer.name
    order = order_of(layer, mixer)
    g = [x.detach() for x in coefficients.mixed]
    if formulation == "hidden":
        operator, drawn, skip = _hidden(mixer, activations, coefficients, g)
        bias = torch.zeros_like(skip)
    else:
        operator, drawn = _unified(mixer, activations, coefficients, g)
        skip = torch.zeros_like(drawn)
        pairs = zip(mixer.scans_in_order(), g, strict=True)
        bias = _of_scans(mixer, [_conv_bias(scan, x) for (scan, _, _), x in pairs])
    out, gated = (
        x.reshape(*activations.gated.shape[:2], -1).sum(-1)
        for x in times(
            (activations.output, activations.gated), (coefficients.output, coefficients.gated)
        )
    )
    offset = 0.0 if mixer.offset is None else (coefficients.gated * mixer.offset).sum(-1)
    bias = bias + out - gated + offset
    if mixer.own is not None:
        weight, values = mixer.own
        of_own = (coefficients.gated * weight.detach() * values.detach()).sum(-1)
        skip, drawn, bias = skip + of_own, drawn + of_own, bias - of_own
    if mixer.dense_skip is not None:
        past = (coefficients.output.reshape(mixer.dense_skip.shape) * mixer.dense_skip).sum(-1)
        skip, drawn, bias = skip + past, drawn + past, bias - past
    mixed = [x.sum(-1) for x in times(activations.with_skips(), g)]
    if activations.is_measured:  # whether its gate is an activation was not
        gate = gated - offset - _of_scans(mixer, mixed)
    else:
        halved = [scan.gate_argument is not None for scan, _, _ in mixer.scans_in_order()]
        gate = _of_scans(mixer, [y * is_half for y, is_half in zip(mixed, halved, strict=True)])
    if order is not None:
        back = torch.argsort(order).to(out.device)
        operator = PermutedOperator(operator, order.to(out.device))
        out, skip, gate, bias, drawn = (x[:, back] for x in (out, skip, gate, bias, drawn))
    scan = mixer.scans_in_order()[0][0]
    return LayerEdges(
        name,
        operator,
        out,
        skip,
        gate,
        bias,
        drawn,
        formulation,
        "attention" if isinstance(scan.recurrence, SoftmaxOperator) else "recurrence",
        scan.recurrence.maps,
    )


def order_of(layer: FrozenCall, mixer: FrozenMixer) -> Tensor | None:
    """The token of the model that each of a mixer's tokens is, ``(L,)``; None for the same.

    Raises:
        UnsupportedModelError: for a mixer that works on windows of the tokens.
    """
    # A mixer that was frozen after the run is over the model's tokens already.
    if layer.order is None or isinstance(mixer, ReorderedMixer):
        return None
    if len(layer.order) > 1:
        raise UnsupportedModelError(
            f"{layer.name} works on {len(layer.order)} windows of the tokens, whose edges cannot "
            "be followed yet; expected mixers of one sequence."
        )
    return layer.order[0]


def mean_of(runs: Sequence[LayerEdges]) -> LayerEdges:
    """The mean of one mixer's edges over several runs."""
    share = 1 / len(runs)
    factor = torch.full_like(runs[0].out, share)[..., None]
    factor = factor.expand(*runs[0].out.shape, runs[0].operator.channels)
    operator = SumOperator(tuple(run.operator.scaled(factor, None) for run in runs))

    means: dict[str, Any] = {
        name: share * sum_of([getattr(run, name) for run in runs])
        for name in ("out", "skip", "gate", "bias", "drawn")
    }
    return replace(runs[0], operator=operator, **means)


def _hidden(
    mixer: FrozenMixer, activations: Activations, coefficients: Activations, g: Sequence[Tensor]
) -> tuple[TokenOperator, Tensor, Tensor]:
    scans = mixer.scans_in_order()
    values = [v.detach() for v in activations.values]
    parts: list[TokenOperator] = []
    for (scan, order, _), x, v in zip(scans, g, values, strict=True):
        part = scan.recurrence.detach().scaled(x, v)
        parts.append(part if order is None else PermutedOperator(part, order))
    drawn = [(c * v).sum(-1) for c, v in zip(coefficients.values, values, strict=True)]
    skip = [
        0 * v[..., 0] if scan.skip is None else (x * scan.skip.detach() * v).sum(-1)
        for (scan, _, _), x, v in zip(scans, g, values, strict=True)
    ]
    operator = parts[0] if len(parts) == 1 else SumOperator(tuple(parts))
    # Several scans may be given one tensor, and a skip of the module's own may read another one.
    if activations.is_measured and (len(parts) > 1 or activations.added is not None):
        return operator, _columns(operator) + _of_scans(mixer, skip), _of_scans(mixer, skip)
    return operator, _of_scans(mixer, drawn), _of_scans(mixer, skip)


def _unified(
    mixer: FrozenMixer, activations: Activations, coefficients: Activations, g: Sequence[Tensor]
) -> tuple[TokenOperator, Tensor]:
    inputs = mixer.inputs.detach()
    whole = mixer.with_row_factors(g).operator("unified", COMPONENTS).detach()
    operator = whole.scaled(None, inputs)
    if mixer.has_token_shift:  # a part of which counts as a bias, and is made of the inputs too
        coefficient = _through_conv(mixer, coefficients.values[0])
    elif len(g) > 1 or not activations.inputs[0].requires_grad:  # at which no coefficient is read
        return operator, _columns(operator)
    else:
        coefficient = coefficients.inputs[0]
    return operator, (coefficient * inputs).sum(-1)


def _through_conv(mixer: FrozenMixer, at_values: Tensor) -> Tensor:
    # Coefficients of what a mixer's convolution is given, from those of its values.
    u = mixer.inputs.detach().requires_grad_()
    with torch.enable_grad():
        v = replace(mixer, inputs=u, conv_bias=None).values
        (at_inputs,) = torch.autograd.grad(v, u, at_values.to(v.dtype))
    return at_inputs


def _columns(operator: TokenOperator) -> Tensor:
    # What the edges out of each token carry, (B, L).
    ones = torch.ones(operator.batch, operator.length, dtype=operator.dtype, device=operator.device)
    return operator.rmatvec(ones, "mean") * operator.channels


def _conv_bias(scan: FrozenMixer, g: Tensor) -> Tensor:
    # What the convolution's bias contributes to each token of a scan, (B, L).
    bias = scan.conv_bias if scan.image_conv is None else scan.image_conv.bias
    if bias is None:
        return torch.zeros_like(g[..., 0])
    v = bias.detach().expand_as(g)
    v = v if scan.activation is None else v * scan.activation.detach()
    y = scan.recurrence.detach().matvec(v.contiguous())
    y = y if scan.skip is None else y + scan.skip.detach() * v
    return (g * y).sum(-1)


def _of_scans(mixer: FrozenMixer, parts: Sequence[Tensor]) -> Tensor:
    # The sum of something of each scan, (B, L) in its order, in the mixer's.
    orders = [order for _, order, _ in mixer.scans_in_order()]
    pairs = zip(orders, parts, strict=True)
    return sum_of([x if order is None else x[:, torch.argsort(order)] for order, x in pairs])
