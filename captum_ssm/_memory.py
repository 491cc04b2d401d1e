"""How much memory a request takes, and keeping to a limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

_LIMIT: ContextVar[int | None] = ContextVar("captum_ssm_memory_limit", default=None)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class MemoryLimitError(ValueError):
    """A request does not fit ``memory_limit``; the message says what would.

    Examples::

        >>> try:
        ...     hidden_attention(model, input_ids, memory_limit=100)
        ... except MemoryLimitError as error:
        ...     print("more than memory_limit=100 B" in str(error))
        True
    """


@contextmanager
def memory_limit(limit: int | None) -> Iterator[None]:
    """Keep the working memory of what runs inside to about ``limit`` bytes (None: no limit)."""
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise ValueError(
            f"memory_limit is {limit!r}; accepted are a positive number of bytes, None."
        )
    token = _LIMIT.set(limit)
    try:
        yield
    finally:
        _LIMIT.reset(token)


def tile_entries(default: int) -> int:
    """The numbers a working tile may hold: ``default``, or less under a memory limit."""
    limit = _LIMIT.get()
    # A tile exists a few times over: what is read, what is made of it, and the sum.
    return default if limit is None else max(1, min(default, limit // 32))


@contextmanager
def limited_graph(model: torch.nn.Module, what: str) -> Iterator[None]:
    """Raise `MemoryLimitError` once the graph recorded inside keeps more bytes than the limit.

    Args:
        model (nn.Module): its parameters and buffers are not counted.
        what (str): the request, for the message.
    """
    limit = _LIMIT.get()
    if limit is None:
        yield
        return
    own = {_storage(t) for t in (*model.parameters(), *model.buffers())}
    saved: Counter[int] = Counter()  # how often a storage is kept
    total = 0

    class Kept:
        # Stands in the graph for a tensor, and is counted for as long as it is there.
        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal total
            self.tensor, self.storage = tensor, _storage(tensor)
            total += 0 if saved[self.storage] else tensor.untyped_storage().nbytes()
            saved[self.storage] += 1

        def __del__(self) -> None:
            nonlocal total
            saved[self.storage] -= 1
            total -= 0 if saved[self.storage] else self.tensor.untyped_storage().nbytes()

    def pack(tensor: torch.Tensor) -> torch.Tensor | Kept:
        if _storage(tensor) in own:
            return tensor
        kept = Kept(tensor)
        if total > limit:
            raise MemoryLimitError(
                f"{what} keeps what every layer computes, which is more than memory_limit="
                f"{readable_bytes(limit)}. Explain fewer or shorter examples at a time, or raise "
                "memory_limit."
            )
        return kept

    def unpack(kept: torch.Tensor | Kept) -> torch.Tensor:
        return kept.tensor if isinstance(kept, Kept) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def require(needed: int, what: str, would_fit: Sequence[tuple[str, int]] = ()) -> None:
    """Raise `MemoryLimitError` where ``what`` needs more bytes than the limit allows.

    Args:
        needed (int): bytes.
        what (str): the request, for the message.
        would_fit (sequence of pairs, optional): other requests and their bytes; those that fit
            are named. Default: ()
    """
    limit = _LIMIT.get()
    if limit is None or needed <= limit:
        return
    fits = [f"{name} ({readable_bytes(size)})" for name, size in would_fit if size <= limit]
    advice = f"What would fit: {'; '.join(fits)}." if fits else "Raise memory_limit."
    raise MemoryLimitError(
        f"{what} needs {readable_bytes(needed)}, more than memory_limit="
        f"{readable_bytes(limit)}. {advice}"
    )


def readable_bytes(count: float) -> str:
    """``1536`` as ``"1.5 KiB"``."""
    for unit in _UNITS:
        if count < 1024 or unit == _UNITS[-1]:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


@dataclass(frozen=True)
class Estimate:
    """What a request will cost, beside the model's own forward pass.

    Args:
        result_bytes (int): what is returned.
        working_bytes (int): the most that exists at a time besides: the recorded tokens of all
            mixers, one mixer's coefficients, a tile.
        flops (int): floating point operations of the request, leading order.
        layers (int): mixers involved.

    Examples::

        >>> estimate(model, input_ids).layers
        2
    """

    result_bytes: int
    working_bytes: int
    flops: int
    layers: int

    @property
    def total_bytes(self) -> int:
        """Result and working memory together."""
        return self.result_bytes + self.working_bytes

    def __str__(self) -> str:
        return (
            f"{self.layers} mixers: returns {readable_bytes(self.result_bytes)}, works in "
            f"{readable_bytes(self.working_bytes)}, {self.flops / 1e9:.1f} GFLOP"
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

    The model itself is run on the first few tokens only, to read its sizes.

    Args:
        model (nn.Module or nnsight model): holds the mixers.
        inputs (Tensor): token ids ``(B, L)`` or embeddings ``(B, L, E)`` of the length in
            question; their values do not matter.
        request (str, optional): ``"row"`` (``attribute`` of a method whose row costs linear
            time), ``"streamed"`` (one whose maps are built in row tiles: ``MambaAttribution``,
            any ``sign`` or reduction), ``"rollout"`` (whole ``(B, L, L)`` products) or
            ``"hidden_attention"``. Default: ``"row"``
        layers, formulation, components, reduction (optional): as for
            :func:`~captum_ssm.hidden_attention`.
        rows (int, optional): how many rows of each map are asked for; None for all.
            Default: None
        additional_forward_args (Any, optional): as in Captum; tensors of one entry a token, such
            as a mask, are cut like the inputs. Default: None

    Returns:
        Estimate: bytes and floating point operations.

    Raises:
        ValueError: for inputs or a request that are not accepted, or an unsupported model.
        TypeError: for inputs of a wrong type or dtype.

    Examples::

        >>> print(estimate(model, input_ids, request="hidden_attention"))
        2 mixers: returns ... KiB, works in ... KiB, 0.0 GFLOP
    """
    from captum_ssm._errors import InputError
    from captum_ssm._frozen import check_inputs, exact_arithmetic, freeze, resolve_model
    from captum_ssm.attr._base import single_input

    requests = ("row", "streamed", "rollout", "hidden_attention")
    if request not in requests:
        raise ValueError(f"request is {request!r}; accepted are {requests}.")
    if rows is not None and (not isinstance(rows, int) or rows < 1):
        raise ValueError(f"rows is {rows!r}; accepted are how many rows, at least 1, and None.")
    tensor = single_input(inputs)
    check_inputs(tensor, resolve_model(model, None))
    if tensor.dim() == 4:
        raise InputError(
            f"inputs has shape {tuple(tensor.shape)}; estimate takes token ids (B, L) and "
            "embeddings (B, L, E). The methods take images."
        )
    B, L = tensor.shape[:2]
    sample = tensor[:1, : min(L, 8)]
    extra = _cut(additional_forward_args, (B, L), sample.shape[1])
    frozen = freeze(model, None, sample, extra, query=False, check=False)
    chosen = frozen.select(layers)
    R = L if rows is None else rows
    entry = torch.finfo(chosen[0].call.dtype).bits // 8
    recorded = sum(2 * layer.call.output.shape[-1] for layer in frozen.layers) * B * L * entry
    result = coefficients = tile = flops = 0
    for layer in chosen:
        with exact_arithmetic():
            mixer = layer.mixer
            operator = mixer.operator(formulation, components)
        D, M = operator.channels, operator.maps
        own = sum(t.numel() for t in tensors_of(mixer)) // sample.shape[1]
        coefficients = max(coefficients, own * B * L * entry)
        state = _state_size(operator)
        if request == "row":
            flops += 6 * B * L * D * state
        elif request == "hidden_attention":
            maps = 1 if reduction else M
            result += B * maps * R * L * entry
            tile = max(tile, min(B * M * R * L, 1 << 24) * entry)
            flops += B * R * L * D * state
        else:
            tile = max(tile, B * 256 * L * entry)
            flops += B * L * L * D * state
    if request == "rollout":
        result = B * L * L * entry
        tile += 2 * B * L * L * entry
        flops += len(chosen) * 2 * B * L**3
    elif request != "hidden_attention":
        result = tensor.numel() * entry
    return Estimate(result, recorded + coefficients + tile, int(flops), len(chosen))


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


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors held by a frozen mixer or operator, each once."""
    from dataclasses import fields, is_dataclass

    seen: set[int] = set()

    def walk(value: Any) -> Iterator[torch.Tensor]:
        if torch.is_tensor(value):
            if id(value) not in seen:
                seen.add(id(value))
                yield value
        elif isinstance(value, (tuple, list)):
            for item in value:
                yield from walk(item)
        elif is_dataclass(value):
            for f in fields(value):
                yield from walk(getattr(value, f.name))

    return walk(value)


def _state_size(operator: Any) -> int:
    # N, the state behind each channel; the key width of attention.
    from captum_ssm.operators import DiagonalOperator, LinearAttentionOperator, SoftmaxOperator

    for kind, size in (
        (DiagonalOperator, lambda o: o.A.shape[-1]),
        (LinearAttentionOperator, lambda o: o.query.shape[-1]),
        (SoftmaxOperator, lambda o: o.query.shape[-1]),
    ):
        if isinstance(operator, kind):
            return size(operator)
    inner = getattr(operator, "inner", None) or getattr(operator, "first", None)
    if inner is not None:
        return _state_size(inner)
    parts = getattr(operator, "parts", ())
    return sum(_state_size(part) for part in parts) if parts else 1
