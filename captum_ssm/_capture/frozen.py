"""From a request to a frozen model: run, frozen, checked, with its query and its score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm._capture.checking import check_reconstruction, warn_if_padding_is_read
from captum_ssm._capture.discovery import find_unknown_mixers
from captum_ssm._capture.recording import Recording, check_finite, record
from captum_ssm._capture.remote import record_remotely
from captum_ssm._capture.request import Request
from captum_ssm._capture.target import one_query, probe_readout, query_weights, read_score
from captum_ssm._devices import moved, weights_loaded
from captum_ssm._grid import TokenGrid, find_token_grid
from captum_ssm._integers import as_index, as_integers
from captum_ssm._nested import detached
from captum_ssm.mixers import FrozenMixer, MixerCall, find_adapter
from captum_ssm.mixers.discovery import MeasuredAdapter
from captum_ssm.operators import DiagonalOperator


@dataclass(frozen=True)
class Made:
    """A mixer that was frozen while the model ran, and its output ``(B, L, E)``."""

    mixer: FrozenMixer | None
    output: Tensor
    rounding: float


@dataclass
class FrozenLayer:
    """One visited mixer: its recorded call and its frozen form.

    Args:
        name (str): the module's path; a module's later visits carry ``":1"``, ``":2"``, ...
        call (MixerCall): what was recorded, on the device of the first mixer.
        stage (int): its step through the residual stream; mixers that a block runs side by
            side, on the same tokens, share one.
        source (MixerCall): what was recorded, on the device of its own weights.
        made (Made, optional): what was frozen while the model ran.
        mask (Tensor, optional): ``(B, L)``, zero for padding.
        check (bool): compare the frozen mixer with what the mixer returned.
    """

    name: str
    call: MixerCall
    stage: int
    source: MixerCall = field(repr=False)
    made: Made | None = field(repr=False)
    mask: Tensor | None = field(repr=False)
    check: bool = field(repr=False)
    is_new: bool = field(default=True, init=False, repr=False)

    @property
    def mixer(self) -> FrozenMixer:
        """The frozen mixer, checked the first time.

        It is read anew at each access, unless it was frozen while the model ran: of a deep model
        only one needs to exist.
        """
        with exact_arithmetic():
            mixer = None if self.made is None else self.made.mixer
            if mixer is None:
                mixer = self._read()
            if self.is_new:
                warn_if_padding_is_read(self.name, self.source, mixer, self.mask)
            self.is_new = False
        device = self.call.output.device
        return mixer if self.source.output.device == device else moved(mixer, device)

    def _read(self) -> FrozenMixer:
        adapter, call = find_adapter(self.source.module), self.source
        assert adapter is not None
        with weights_loaded(call.module):
            mixer = adapter(call)
        if self.check and self.is_new:
            check_reconstruction(self.name, call, mixer.output(), self.mask, mixer.rounding)
        return mixer


@dataclass(frozen=True)
class FrozenModel:
    """A model frozen at one input.

    Args:
        request (Request): what was run.
        layers (list of FrozenLayer): its mixers, in forward order.
        shape (tuple of int): (B, L).
        mask (Tensor, optional): ``(B, L)``, 1 for tokens and 0 for padding. Default: None
        query (Tensor, optional): ``(B, L)``, weights of the tokens whose rows are explained:
            one token, or an even share of each where the model pools by mean. Default: None
        score (Tensor, optional): ``(B,)``, the explained score, where gradients were asked.
            Default: None
        others (list of MixerCall, optional): calls outside the mixers, where asked for.
            Default: ()
        grid (TokenGrid, optional): which token is which patch, where the input is an image and
            the model tells. Default: None
    """

    request: Request
    layers: list[FrozenLayer]
    shape: tuple[int, int]
    mask: Tensor | None = None
    query: Tensor | None = None
    score: Tensor | None = None
    others: Sequence[MixerCall] = ()
    grid: TokenGrid | None = None

    def require_query(self) -> Tensor:
        """The query's weights, ``(B, L)``, of a model frozen with one."""
        assert self.query is not None
        return self.query

    def require_score(self) -> Tensor:
        """The explained score, ``(B,)``, of a model frozen with gradients."""
        assert self.score is not None
        return self.score

    def at(self, position: int | Tensor) -> FrozenModel:
        """The same frozen model, asked for the row of another token."""
        mask = None if self.mask is None else self.mask != 0
        call = self.layers[0].call
        query = one_query(position, self.shape, mask, call.output.device)
        return replace(self, query=query.to(call.dtype))

    def row_index(self, rows: int | Sequence[int] | Tensor) -> Tensor:
        """Asked rows, an int, ``(R,)`` or ``(B, R)``, as positions ``(B, R)`` from the start."""
        B, L = self.shape
        index = as_integers(rows, self.layers[0].call.output.device)
        if index is None or index.dim() > 2:
            raise TypeError(f"rows is {rows!r}; expected an int, (R,) or (B, R) integers.")
        if index.numel() == 0 or (index.dim() == 2 and index.shape[0] != B):
            raise ValueError(
                f"rows has shape {tuple(index.shape)}; expected an int, (R,) or ({B}, R)."
            )
        if bool(((index < -L) | (index >= L)).any()):
            raise ValueError(
                f"rows holds {index.tolist()}, outside the sequence of {L} tokens: expected "
                f"0 .. {L - 1} (or -{L} .. -1 from the end)."
            )
        return (index % L).reshape(-1, index.shape[-1] if index.dim() else 1).expand(B, -1)

    def from_layer(self, start: int) -> list[FrozenLayer]:
        """The layers from stage ``start`` (negative from the end) on."""
        count, index = self.layers[-1].stage + 1, as_index(start)
        if index is None or not -count <= index < count:
            raise ValueError(
                f"start_layer is {start!r}; this model has {count} layers of mixers: expected "
                f"0 .. {count - 1} (or -{count} .. -1 from the end)."
            )
        return [layer for layer in self.layers if layer.stage >= index % count]

    def mask_matrix(self, matrix: Tensor) -> Tensor:
        """``matrix (B, ..., L, L)`` with the rows and columns of padding set to zero."""
        if self.mask is None:
            return matrix
        mask = self.mask.reshape(self.shape[0], *[1] * (matrix.dim() - 3), self.shape[1])
        return matrix * mask[..., None] * mask[..., None, :]

    def select(self, layers: int | str | Sequence[int | str] | None) -> list[FrozenLayer]:
        """The layers named by index (negative from the end) or path; None for all."""
        if layers is None:
            return self.layers
        try:
            wanted = [layers] if isinstance(layers, (int, str)) else list(layers)
        except TypeError:  # one number, of numpy or torch
            wanted = [layers]  # type: ignore[list-item]
        if not wanted:
            raise ValueError("layers is empty; name at least one, or pass None for all.")
        return [self._layer(item, f"layers holds {item!r}") for item in wanted]

    def select_one(self, layer: int | str | None) -> FrozenLayer:
        """The layer named by its index (negative from the end) or its path."""
        return self._layer(layer, f"layer is {layer!r}")

    def _layer(self, name: int | str | None, given: str) -> FrozenLayer:
        by_name = {layer.name: i for i, layer in enumerate(self.layers)}
        count = len(self.layers)
        index = by_name.get(name) if isinstance(name, str) else as_index(name)
        if index is None or not -count <= index < count:
            raise ValueError(
                f"{given}; this model has {count} mixers: expected an index 0 .. {count - 1}, or "
                f"a path: {', '.join(by_name)}."
            )
        return self.layers[index]


class Substitution:
    """What takes the mixers' place while a model runs under a gradient.

    Without compiled kernels a diagonal recurrence runs in Python, one token at a time, and its
    backward pass costs quadratic time. The adapter computes the same from the same tokens by the
    chunked scan, so the graph is ours and the values stay the model's own. What was frozen is
    kept, in the order of the mixers' calls.
    """

    def __init__(self) -> None:
        self.made: list[Made | None] = []

    def __call__(self, call: MixerCall) -> Any:
        """What the model goes on with in place of ``call.result``."""
        adapter = find_adapter(call.module)
        if adapter is None:
            return self._in_place(call, self.other(call))
        if not self.takes(call, adapter):
            self.made.append(None)
            return call.result
        check_finite(call)
        # A frozen mixer may hold the call it was read from, and is kept: without the graph of the
        # model's own result, which nothing needs.
        given = replace(call, result=detached(call.result))
        with _without_autocast():
            with weights_loaded(call.module):
                mixer = adapter(given)
            output, made = self.mixed(mixer)
        self.made.append(made)
        return self._in_place(call, output)

    def takes(self, call: MixerCall, adapter: Callable[..., Any]) -> bool:
        """Whether a mixer is frozen while the model runs."""
        # Registered by others, an adapter may well read its coefficients without a graph.
        # A measured mixer is run once more to be frozen, which cannot be done within its own run.
        known = adapter.__module__.startswith("captum_ssm.")
        known = known and not isinstance(adapter, MeasuredAdapter)
        return known and call.output.device.type == "cpu" and call.tokens().requires_grad

    def mixed(self, mixer: FrozenMixer) -> tuple[Tensor | None, Made]:
        """The output that takes the mixer's place, if any, and what is kept."""
        quick = isinstance(mixer.recurrence, DiagonalOperator)
        with torch.set_grad_enabled(quick):
            output = mixer.output()
        return output if quick else None, Made(detached(mixer), output.detach(), mixer.rounding)

    def other(self, call: MixerCall) -> Tensor | None:
        """What takes the place of another module's output, if anything."""
        return None

    def _in_place(self, call: MixerCall, output: Tensor | None) -> Any:
        if output is None:
            return call.result
        value = call.output
        output = output.to(value.dtype)
        output = output + (value - output).detach()  # the very values that the model computed
        if isinstance(call.result, (tuple, list)):
            return type(call.result)([output, *call.result[1:]])
        return output


def freeze(
    request: Request,
    *,
    position: Any = None,
    target: Any = None,
    query: bool = True,
    gradients: bool = False,
    also: Callable[[nn.Module], bool] | None = None,
    substitution: Substitution | None = None,
    check: bool = True,
) -> FrozenModel:
    """Run a request once and freeze every mixer it visits.

    Args:
        request (Request): what to run.
        position (int or Tensor, optional): the query token; None for the model's own readout.
        target (Any, optional): as in Captum; used only with gradients. Default: None
        query (bool, optional): find the token whose row is explained; not needed for whole
            matrices. Default: True
        gradients (bool, optional): also compute the gradient of the target's score with
            respect to each recorded output. Default: False
        also (Callable, optional): says which modules outside the mixers to keep too.
            Default: None
        substitution (Substitution, optional): takes the mixers' place; the score then keeps its
            graph, and no gradient is taken. Default: None
        check (bool, optional): raise where a frozen mixer does not reproduce its output.
            Default: True
    """
    find_unknown_mixers(request)
    own_graph = substitution is not None
    if substitution is None and gradients:
        substitution = Substitution()
    recording = _recorded(request, gradients or own_graph, also, substitution)
    mask = recording.mask
    recording.check_finite()

    weights = score = None
    if gradients or own_graph:
        weights, score = read_score(recording, target, position)
        if not own_graph:
            with torch.inference_mode(False), torch.enable_grad():
                recording = recording.with_gradients(score)
            score = score.detach()
        recording = detached(recording)
    elif query:
        weights = query_weights(recording, position)
        if weights is None:
            weights = _found_readout(request)
    device, dtype = recording.device, recording.calls[0].dtype
    made = substitution.made if substitution is not None and not request.remote else []
    return FrozenModel(
        request,
        _frozen_layers(recording, made, check),
        recording.shape,
        None if mask is None else mask.to(dtype),
        None if weights is None else weights.to(device, dtype),
        score,
        [_brought(call, device) for call in recording.others],
        find_token_grid(request.module, recording.arguments, request.inputs, recording.shape[1]),
    )


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Without gradients, and in the operators' own dtype wherever the caller's autocast is on."""
    with torch.no_grad(), _without_autocast():
        yield


@contextmanager
def _without_autocast() -> Iterator[None]:
    devices = [d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    with ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _recorded(
    request: Request,
    gradients: bool,
    also: Callable[[nn.Module], bool] | None,
    substitution: Substitution | None,
) -> Recording:
    if request.remote:
        return record_remotely(request, gradients=gradients, also=also)
    return record(request, gradients=gradients, also=also, substitute=substitution)


def _found_readout(request: Request) -> Tensor:
    if request.remote:
        raise ValueError(
            f"remote is {request.remote!r}, and the model pools its tokens; the token that it "
            "reads its output from is found only by a run here: pass position="
        )
    with torch.inference_mode(False), torch.enable_grad():
        return probe_readout(record(request, gradients=True))


def _frozen_layers(
    recording: Recording, made: Sequence[Made | None], check: bool
) -> list[FrozenLayer]:
    layers: list[FrozenLayer] = []
    visits: dict[str, int] = {}
    for i, call in enumerate(recording.calls):
        seen = visits.get(call.path, 0)
        visits[call.path] = seen + 1
        name = f"{call.path}:{seen}" if seen else call.path
        stage, here = 0, _brought(call, recording.device)
        if layers:
            parallel = _side_by_side(layers[-1].call, here)
            stage = layers[-1].stage + (0 if parallel else 1)
        known = made[i] if i < len(made) else None
        if known is not None and check:
            check_reconstruction(name, call, known.output, recording.mask, known.rounding)
        layers.append(FrozenLayer(name, here, stage, call, known, recording.mask, check))
    return layers


def _brought(call: MixerCall, device: torch.device) -> MixerCall:
    return call if call.output.device == device else moved(call, device)


def _side_by_side(first: MixerCall, second: MixerCall) -> bool:
    # Two mixers of one block that were given the same tokens, times one number, run side by side
    # (Falcon-H1). One after the other, the second is given what the first added to, however small.
    parents = [call.path.rpartition(".")[0] for call in (first, second)]
    if parents[0] != parents[1] or first.path == second.path:
        return False
    rounding = 2 * torch.finfo(first.output.dtype).eps
    x, y = first.tokens().double(), second.tokens().double()
    if x.shape != y.shape or not bool((x != 0).any()):
        return False
    scaled = x * ((x * y).sum() / x.square().sum())
    return bool(((y - scaled).abs() <= rounding * scaled.abs()).all())
