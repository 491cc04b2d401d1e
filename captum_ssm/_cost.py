"""What a request takes in memory and time, found out by short runs before it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm._capture import (
    FrozenLayer,
    FrozenModel,
    exact_arithmetic,
    freeze,
    resolve_model,
    single_input,
    unwrap,
)
from captum_ssm._capture.request import check_inputs
from captum_ssm._capture.target import extract_logits
from captum_ssm._errors import InputError
from captum_ssm._memory import readable_bytes
from captum_ssm._meter import Mark, Reading, fitted, grown, measured
from captum_ssm.attr._maps import LayerMaps, MapChoices, MapOptions, rollout_matrix, rollout_row
from captum_ssm.attr.latim import LaTIM
from captum_ssm.attr.mamba_lrp import MambaLRP
from captum_ssm.operators import (
    DiagonalOperator,
    LinearAttentionOperator,
    SoftmaxOperator,
    TokenOperator,
)

_MAPS = ("layers", "formulation", "components")
# By request: the arguments it takes.
REQUESTS = {
    "row": _MAPS,
    "streamed": _MAPS,
    "attribution": _MAPS,
    "rollout": _MAPS,
    "hidden_attention": (*_MAPS, "reduction", "rows"),
    "latim": (),
    "lrp": (),
}
# Lengths of the short runs: multiples of the chunks of 64 tokens that models pad to.
CHUNK = 64
SMALL = 50_000_000  # parameters; a smaller model is cheap enough to be run on more tokens


@dataclass(frozen=True)
class Estimate:
    """What a request will cost.

    Args:
        result_bytes (int): what is returned.
        working_bytes (int): the most that exists at a time besides, beyond the model's weights
            and its inputs: what a run of the model computes and, for a gradient, keeps; the
            recorded tokens of all mixers, one mixer's coefficients, a tile.
        flops (int): floating point operations on the mixers' operators, leading order; the runs
            of the model are not counted.
        layers (int): mixers involved.
        forwards (float): how long it takes, in forward passes of the model on the same inputs,
            as timed at short ones. Not compared. Default: NaN

    Examples::

        >>> estimate(model, input_ids).layers
        2
    """

    result_bytes: int
    working_bytes: int
    flops: int
    layers: int
    forwards: float = field(default=float("nan"), compare=False)

    @property
    def total_bytes(self) -> int:
        """Result and working memory together."""
        return self.result_bytes + self.working_bytes

    def __str__(self) -> str:
        return (
            f"{self.layers} mixers: returns {readable_bytes(self.result_bytes)}, works in "
            f"{readable_bytes(self.working_bytes)}, takes {self.forwards:.1f} forward passes"
        )


def estimate(
    model: Any,
    inputs: Any,
    *,
    request: str = "row",
    layers: int | str | Sequence[int | str] | None = None,
    formulation: str = "hidden",
    components: Iterable[str] | None = None,
    reduction: str | None = None,
    rows: int | None = None,
    additional_forward_args: Any = None,
) -> Estimate:
    """What a request on this model and these inputs would cost, before it is run.

    The request is made on the first tokens of the first example (64 and 128 of them, twice as
    many on a model of up to 50 million parameters, whole chunks on one that pads to chunks), and
    what that takes is carried to the length and the batch in question: a run and its graph
    linearly, softmax attention and maps quadratically, tiles as large as they become. Memory is
    within a factor of two of the measured peak in the library's tests. Time is rougher: it is of
    this machine, and of what else it is doing.

    Args:
        model (nn.Module or nnsight model): holds the mixers.
        inputs (Tensor): token ids ``(B, L)`` or embeddings ``(B, L, E)`` of the length in
            question; what stands behind the first few hundred tokens does not matter.
        request (str, optional): ``"row"``, ``attribute`` of a method whose row costs linear time
            (``RawAttention`` and the unified ``"raw"``, with a ``sign`` too; ``MambaRollout`` and
            the unified ``"rollout"``); ``"streamed"``, a rollout with a ``sign``, which builds
            the maps in row tiles;
            ``"attribution"``, ``MambaAttribution`` and the unified ``"attribution"`` with their
            gradients; ``"latim"``, ``LaTIM``'s ``"alti_logit"`` of all layers; ``"lrp"``,
            ``MambaLRP``; ``"rollout"``, whole ``(B, L, L)`` products; ``"hidden_attention"``.
            Default: ``"row"``
        layers, formulation, components, reduction (optional): as for
            :func:`~captum_ssm.hidden_attention`; the last for that request only, and none of
            them for ``"latim"`` and ``"lrp"``.
        rows (int, optional): how many rows of each map ``"hidden_attention"`` is asked for; None
            for all. Default: None
        additional_forward_args (Any, optional): as in Captum; tensors of one entry a token, such
            as a mask, are cut like the inputs. Default: None

    Returns:
        Estimate: bytes, operations and time.

    Raises:
        ValueError: for inputs, a request or an argument that are not accepted, or an unsupported
            model.
        TypeError: for inputs of a wrong type or dtype.

    Examples::

        >>> print(estimate(model, input_ids, request="hidden_attention"))
        2 mixers: returns ... KiB, works in ... KiB, takes ... forward passes
    """
    chosen = components if components is None or isinstance(components, str) else tuple(components)
    given = {
        "layers": layers,
        "formulation": None if formulation == "hidden" else formulation,
        "components": chosen,
        "reduction": reduction,
        "rows": rows,
    }
    _check_request(request, given)
    tensor = check_inputs(single_input(inputs), resolve_model(model, None))
    if tensor.dim() == 4:
        raise InputError(
            f"inputs has shape {tuple(tensor.shape)}; estimate takes token ids (B, L) and "
            "embeddings (B, L, E). The methods take images."
        )
    asked = Asked(request, layers, formulation, chosen, reduction, rows)
    return Costs(model, tensor, additional_forward_args).of(asked)


def _check_request(request: str, given: dict[str, Any]) -> None:
    if request not in REQUESTS:
        raise ValueError(f"request is {request!r}; accepted are {tuple(REQUESTS)}.")
    for name, value in given.items():
        if value is not None and name not in REQUESTS[request]:
            raise ValueError(
                f"{name} is {value!r}, and request is {request!r}, which takes "
                f"{', '.join(REQUESTS[request]) or 'no further arguments'}; leave {name} out."
            )
    rows = given["rows"]
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise ValueError(f"rows is {rows!r}; accepted are how many rows, at least 1, and None.")


class Costs:
    """The costs of requests on one model at one length and batch, from short runs.

    Args:
        model (nn.Module or nnsight model): holds the mixers.
        inputs (Tensor): of the length and batch in question: ids, embeddings, or images, one of
            which is run as it is.
        extra (Any, optional): additional arguments of the model. Default: None
    """

    def __init__(self, model: Any, inputs: Tensor, extra: Any = None) -> None:
        self.model, self.inputs, self.extra = model, inputs, extra
        # Also loads a model that nnsight has not loaded yet.
        frozen = freeze(model, None, *self._sample(8), query=False, check=False)
        self.layers, self.batch = frozen.layers, inputs.shape[0]
        module = unwrap(model)
        self._weights = [*module.parameters(), *module.buffers()]
        self._curved = any(_is_softmax(layer) for layer in self.layers)
        if inputs.dim() == 4:
            self.length = frozen.shape[1]
            self.lengths = [self.length]
        else:
            self.length = inputs.shape[1]
            self.lengths = _lengths(module, self.length, 3 if self._curved else 2)
        with exact_arithmetic():
            self._sizes = [_Size.of(layer) for layer in self.layers]
        self._target: int | None = None
        self._forward = [self._measure(self._run_forward, n) for n in self.lengths]

    @property
    def forward_bytes(self) -> int:
        """The most that a forward pass without gradients takes beside the weights."""
        return self._carried([reading.peak for reading in self._forward], self._curved)

    @property
    def forward_seconds(self) -> float:
        """How long such a pass takes."""
        return self._carried_time([reading.seconds for reading in self._forward])

    def of(self, asked: Asked) -> Estimate:
        """The cost of one request."""
        readings = [self._measure(asked.make, n) for n in self.lengths]
        names = [layer.name for layer in asked.chosen(self.layers)]
        sizes = [s for s in self._sizes if s.name in names]
        known = [asked.result(sizes, 1, n, self._entries(n)) for n in self.lengths]
        tiles = [asked.tile(sizes, 1, n) for n in self.lengths]
        # What is recorded, and one mixer's coefficients: all but the result and the tiles.
        rest = [
            max(r.kept, r.later_peak - k - t)
            for r, k, t in zip(readings, known, tiles, strict=True)
        ]
        run = self._carried([r.peak for r in readings], self._curved)
        later = self._carried(rest) + asked.tile(sizes, self.batch, self.length)
        # No run takes less than a forward pass, whatever else the machine did meanwhile.
        seconds = max(self.forward_seconds, self._carried_time([r.seconds for r in readings]))
        later_times = [r.later_seconds for r in readings]
        if asked.is_quadratic:
            seconds += self.batch * grown(self.lengths, later_times, self.length)
        else:
            seconds += self._carried_time(later_times)
        result = asked.result(sizes, self.batch, self.length, self._entries(self.length))
        return Estimate(
            int(result),
            int(max(run - result, later)),
            int(sum(asked.flops(s, self.batch, self.length) for s in sizes)),
            len(sizes),
            seconds / self.forward_seconds,
        )

    def _sample(self, tokens: int) -> tuple[Tensor, Any]:
        # The first tokens of the first example, and what the model takes beside them.
        if self.inputs.dim() == 4:
            return self.inputs[:1], self.extra
        shape = (self.inputs.shape[0], self.inputs.shape[1])
        return self.inputs[:1, :tokens], _cut(self.extra, shape, min(tokens, shape[1]))

    def _entries(self, tokens: int) -> int:
        # Of the relevance of one example.
        shape = self.inputs.shape
        return prod(shape[1:]) if len(shape) == 4 else tokens * prod(shape[2:])

    def _measure(self, make: Callable[..., Any], tokens: int) -> Reading:
        sample, extra = self._sample(tokens)
        owned = [*self._weights, sample]
        return measured(lambda mark: make(self.model, sample, extra, self._target, mark), owned)

    def _run_forward(
        self, model: Any, inputs: Tensor, extra: Any, target: int | None, mark: Mark
    ) -> None:
        with torch.no_grad():
            output = call_forward(model, inputs, extra_arguments(model, inputs, extra))
        # An output of one number an example is explained without a target.
        self._target = 0 if extract_logits(output).dim() > 1 else None

    def _carried(self, values: Sequence[float], curved: bool = False) -> int:
        fixed, growing = fitted(self.lengths, values, self.length, curved)
        return int(fixed + self.batch * growing)

    def _carried_time(self, values: Sequence[float]) -> float:
        fixed, growing = fitted(self.lengths, values, self.length)
        return fixed + self.batch * growing


@dataclass(frozen=True)
class Asked:
    """A request and its arguments; see :func:`estimate`."""

    request: str
    layers: Any = None
    formulation: str = "hidden"
    components: Any = None
    reduction: str | None = None
    rows: int | None = None

    @property
    def is_quadratic(self) -> bool:
        """Whether what follows the run takes time quadratic in the tokens."""
        return self.request not in ("row", "lrp") and self.rows is None

    def chosen(self, layers: list[FrozenLayer]) -> list[FrozenLayer]:
        """The layers it is about."""
        return FrozenModel(layers, (1, 1)).select(self.layers)

    def make(self, model: Any, inputs: Tensor, extra: Any, target: int | None, mark: Mark) -> None:
        """Make the request."""
        if self.request == "lrp":
            MambaLRP(model).attribute(inputs, target, extra)
        elif self.request == "latim":
            _MarkedLaTIM(model, mark).attribute(inputs, target, extra)
        else:
            self._make_maps(model, inputs, extra, target, mark)

    def _make_maps(
        self, model: Any, inputs: Tensor, extra: Any, target: int | None, mark: Mark
    ) -> None:
        gradients = self.request == "attribution"
        query = self.request in ("row", "streamed")
        frozen = freeze(model, None, inputs, extra, target=target, query=query, gradients=gradients)
        mark()
        layers = self.chosen(frozen.layers)
        with exact_arithmetic():
            if self.request == "hidden_attention":
                found = [self._rows(layer, frozen) for layer in layers]
                del found  # which existed together
                return
            choices = MapChoices(sign=None if self.request in ("row", "rollout") else "clamp")
            options = MapOptions.of(
                choices, formulation=self.formulation, components=self.components
            )
            maps = LayerMaps(layers, options, frozen.mask, gradients=gradients)
            if self.request == "rollout":
                frozen.mask_matrix(rollout_matrix(maps))
            else:
                rollout_row(maps, frozen.require_query())

    def _rows(self, layer: FrozenLayer, frozen: FrozenModel) -> Tensor:
        operator = layer.mixer.operator(self.formulation, self.components)
        if self.rows is None:
            return frozen.mask_matrix(operator.matrix(self.reduction))
        last = range(-min(self.rows, frozen.shape[1]), 0)
        return operator.rows(frozen.row_index(list(last)), self.reduction)

    def result(self, sizes: list[_Size], B: int, L: int, entries: int) -> int:
        """Bytes of what is returned, ``entries`` being those of one example's relevance."""
        entry = sizes[0].entry
        if self.request == "rollout":
            return B * L * L * entry
        if self.request != "hidden_attention":
            return B * entries * entry
        rows = L if self.rows is None else min(self.rows, L)
        return sum(B * self._maps(s) * rows * L * entry for s in sizes)

    def tile(self, sizes: list[_Size], B: int, L: int) -> int:
        """Bytes of the maps that exist for the time of a computation."""
        return max(self._tile(s, B, L) * s.entry for s in sizes)

    def _tile(self, size: _Size, B: int, L: int) -> int:
        if self.request == "lrp":
            return 0
        # The check of an attention layer's output builds its probabilities, whatever follows.
        least = _several(size, B, size.maps, L, L) if size.is_softmax else 0
        rows = L
        if self.request in ("streamed", "attribution"):
            rows = min(256, L)
        elif self.rows is not None:
            rows = min(self.rows, L)
        one = B * rows * L
        if self.request == "row":
            return least
        if self.request == "latim":
            columns = min(64 * L, max(L, (1 << 22) // (B * size.width)))
            return max(least, B * columns * (size.width + min(2048, size.channels)))
        if self.request == "hidden_attention" and self.reduction is None:
            # Kernels write the maps where they stay.
            return max(least, 0 if size.has_kernel else 2 * one * self._maps_in_mixer(size))
        if self.request == "hidden_attention" and self.reduction != "mean":
            return max(least, _several(size, B, self._maps_in_mixer(size), rows, L) + 2 * one)
        # Beside the map itself: what an operator without a kernel makes it from.
        made = 0 if size.has_kernel and self.formulation == "hidden" else 3 * one
        if self.request == "hidden_attention":
            return max(least, made)
        if self.request == "rollout":
            return max(least, made, one) + one
        return max(least, made, 2 * one)

    def _maps(self, size: _Size) -> int:
        return 1 if self.reduction else self._maps_in_mixer(size)

    def _maps_in_mixer(self, size: _Size) -> int:
        return size.maps if self.formulation == "hidden" else size.unified

    def flops(self, size: _Size, B: int, L: int) -> int:
        """Operations on the operator of one mixer, leading order."""
        state = B * L * size.channels * size.state
        if self.request == "row":
            return 6 * state
        if self.request == "lrp":
            return 12 * state  # the scan, and its adjoint
        if self.request == "latim":
            return 2 * B * L * L * size.channels * size.width
        if self.request == "hidden_attention":
            return state * (L if self.rows is None else min(self.rows, L))
        product = 2 * B * L**3 if self.request == "rollout" else 0
        return state * L + product


@dataclass(frozen=True)
class _Size:
    # Of one mixer.
    name: str
    maps: int
    unified: int  # maps of the unified formulation
    channels: int
    width: int
    state: int
    entry: int  # bytes of a number
    is_softmax: bool
    has_kernel: bool

    @classmethod
    def of(cls, layer: FrozenLayer) -> _Size:
        mixer = layer.mixer
        operator = mixer.operator()
        return cls(
            layer.name,
            operator.maps,
            mixer.operator("unified").maps,
            operator.channels,
            layer.call.output.shape[-1],
            _state(operator),
            layer.call.dtype.itemsize,
            _is_softmax(layer),
            isinstance(operator, (DiagonalOperator, LinearAttentionOperator)),
        )


def _several(size: _Size, B: int, maps: int, rows: int, L: int) -> int:
    # Entries of a tile of several maps, and of what it is made from.
    most, every = max(1 << 24, B * rows * L), B * maps * rows * L
    if size.has_kernel:
        return min(every, 2 * most) if every > most else every
    return 3 * min(every, most)


class _MarkedLaTIM(LaTIM):
    # Says where its run of the model ends.
    def __init__(self, model: Any, mark: Mark) -> None:
        super().__init__(model)
        self._mark = mark

    def _freeze(self, *args: Any, **kwargs: Any) -> FrozenModel:
        frozen = super()._freeze(*args, **kwargs)
        self._mark()
        return frozen


def _lengths(model: nn.Module, length: int, count: int) -> list[int]:
    # Some models pad to whole chunks: a run of fewer tokens says nothing of longer ones.
    chunks = [getattr(module, "chunk_size", None) for module in model.modules()]
    chunk = max([CHUNK, *(c for c in chunks if isinstance(c, int))])
    parameters = sum(p.numel() for p in model.parameters())
    if chunk == CHUNK and parameters <= SMALL:
        chunk *= 2
    longest = min(length, count * chunk)
    return sorted({longest * i // count for i in range(1, count + 1)} - {0})


def _is_softmax(layer: FrozenLayer) -> bool:
    with exact_arithmetic():
        return isinstance(layer.mixer.recurrence, SoftmaxOperator)


def _cut(value: Any, shape: tuple[int, int], tokens: int) -> Any:
    # Arguments of one entry a token, for the first tokens of the first example.
    if isinstance(value, dict):
        return {name: _cut(item, shape, tokens) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_cut(item, shape, tokens) for item in value)
    if not torch.is_tensor(value) or value.dim() < 2 or value.shape[1] != shape[1]:
        return value
    if value.shape[0] not in (1, shape[0]):
        return value
    first = value[:1, :tokens]
    # A mask that begins with padding would leave nothing to run.
    return first if bool(first.any()) else torch.ones_like(first)


def _state(operator: TokenOperator) -> int:
    # N, the state behind each channel; the key width of attention.
    if isinstance(operator, DiagonalOperator):
        return operator.A.shape[-1]
    if isinstance(operator, (LinearAttentionOperator, SoftmaxOperator)):
        return operator.query.shape[-1]
    inner = getattr(operator, "inner", None)
    parts = getattr(operator, "parts", ()) if inner is None else (inner,)
    return sum(_state(part) for part in parts) or 1
