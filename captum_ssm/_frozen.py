"""From a model and an input to a frozen model: captured, checked, with its query and its target.

Everything the methods share before they differ: running ``forward_func`` the way Captum does,
finding the padding, the token whose row is explained and the score that is explained, and the
reconstruction check.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from captum_ssm._captum import format_additional_forward_args, select_targets
from captum_ssm._capture import Capture, capture, is_model, is_norm, unwrap
from captum_ssm._devices import moved, weights_loaded
from captum_ssm._errors import InputError, ReconstructionError, TargetError
from captum_ssm._grid import TokenGrid, find_token_grid
from captum_ssm._remote import check_remote, remote_capture
from captum_ssm.mixers import FrozenMixer, MixerCall, find_adapter
from captum_ssm.mixers._base import is_quantised
from captum_ssm.operators import DiagonalOperator

# Largest error of a reconstruction, relative to the largest entry of the mixer's output. A
# model in half precision rounds at every step; the frozen operator does not.
TOLERANCE = {
    torch.float64: 1e-4,
    torch.float32: 1e-3,
    torch.float16: 3e-2,
    torch.bfloat16: 1.5e-1,
}


@dataclass(frozen=True)
class FrozenLayer:
    """One visited mixer: its recorded call and its frozen form.

    Args:
        name (str): the module's path; a module's later visits carry ``":1"``, ``":2"``, ...
        call (MixerCall): what was recorded.
        stage (int): its step through the residual stream; mixers that a block runs side by
            side, on the same tokens, share one.
        freeze (Callable): reads the operator off the call, and checks it.
    """

    name: str
    call: MixerCall
    stage: int
    freeze: Callable[[], FrozenMixer] = field(repr=False)

    @property
    def mixer(self) -> FrozenMixer:
        """The operator, made anew at each access: of a deep model only one needs to exist."""
        return self.freeze()


@dataclass(frozen=True)
class FrozenModel:
    """A model frozen at one input.

    Args:
        layers (list of FrozenLayer): its mixers, in forward order.
        shape (tuple of int): (B, L).
        mask (Tensor, optional): ``(B, L)``, 1 for tokens and 0 for padding. Default: None
        query (Tensor, optional): ``(B, L)``, weights of the tokens whose rows are explained:
            one token, or an even share of each where the model pools by mean. Default: None
        score (Tensor, optional): ``(B,)``, the explained score, where gradients were asked.
            Default: None
        norms (list of MixerCall, optional): the norms outside the mixers, where asked for.
            Default: ()
        grid (TokenGrid, optional): which token is which patch, where the input is an image and
            the model tells. Default: None
    """

    layers: list[FrozenLayer]
    shape: tuple[int, int]
    mask: Tensor | None = None
    query: Tensor | None = None
    score: Tensor | None = None
    norms: Sequence[MixerCall] = ()
    grid: TokenGrid | None = None

    def require_query(self) -> Tensor:
        """The query's weights, ``(B, L)``, of a model frozen with one."""
        assert self.query is not None
        return self.query

    def at(self, position: int | Tensor) -> FrozenModel:
        """The same frozen model, asked for the row of another token."""
        mask = None if self.mask is None else self.mask != 0
        query = _query(position, *self.shape, mask, self.layers[0].call)
        return replace(self, query=query.to(self.layers[0].call.dtype))

    def row_index(self, rows: int | Sequence[int] | Tensor) -> Tensor:
        """Asked rows, an int, ``(R,)`` or ``(B, R)``, as positions ``(B, R)`` from the start."""
        B, L = self.shape
        index = as_integers(rows, self.layers[0].call.output.device)
        if index is None or index.dim() > 2:
            raise TypeError(f"rows is {rows!r}; accepted are an int, (R,) or (B, R) integers.")
        if index.numel() == 0 or (index.dim() == 2 and index.shape[0] != B):
            raise ValueError(
                f"rows has shape {tuple(index.shape)}; accepted are an int, (R,) and ({B}, R)."
            )
        if bool(((index < -L) | (index >= L)).any()):
            raise ValueError(
                f"rows holds {index.tolist()}, outside the sequence: it has {L} tokens, so 0 .. "
                f"{L - 1} (or -{L} .. -1 from the end) is accepted."
            )
        return (index % L).reshape(-1, index.shape[-1] if index.dim() else 1).expand(B, -1)

    def from_layer(self, start: int) -> list[FrozenLayer]:
        """The layers from stage ``start`` (negative from the end) on."""
        count, index = self.layers[-1].stage + 1, as_index(start)
        if index is None or not -count <= index < count:
            raise ValueError(
                f"start_layer is {start!r}; this model has {count} layers of mixers, so 0 .. "
                f"{count - 1} is accepted."
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
                f"{given}; this model has {count} mixers, to be named by index 0 .. "
                f"{count - 1} or by path: {', '.join(by_name)}."
            )
        return self.layers[index]


def freeze(
    forward_func: Callable[..., Any],
    model: Any,
    inputs: Tensor,
    additional_forward_args: Any = None,
    *,
    position: Any = None,
    target: Any = None,
    query: bool = True,
    gradients: bool = False,
    norms: bool = False,
    check: bool = True,
    remote: bool | str = False,
) -> FrozenModel:
    """Run the model once and freeze every mixer it visits.

    Args:
        forward_func (Callable): what is explained.
        model (nn.Module or nnsight model, optional): the model it runs, where it is not one.
        inputs (Tensor): ids ``(B, L)``, embeddings ``(B, L, E)`` or images ``(B, C, H, W)``.
        additional_forward_args (Any, optional): as in Captum; a dict is passed by keyword.
        position (int or Tensor, optional): the query token; None for the model's own readout.
        target (Any, optional): as in Captum; used only with ``gradients``.
        query (bool, optional): find the token whose row is explained; not needed for whole
            matrices. Default: True
        gradients (bool, optional): also compute the gradient of the target's score with
            respect to each mixer's output. Default: False
        norms (bool, optional): also keep the norms outside the mixers. Default: False
        check (bool, optional): raise where a frozen mixer does not reproduce its output.
            Default: True
        remote (bool or str, optional): where an nnsight model runs, as in its ``trace``.
            Default: False
    """
    model = resolve_model(forward_func, model)
    check_remote(remote, forward_func, model)
    inputs = check_inputs(inputs, model)
    extra = extra_arguments(forward_func, inputs, additional_forward_args)

    def run() -> Any:
        return call_forward(forward_func, inputs, extra)

    also = is_norm if norms else None
    if remote:
        asked = module_arguments(unwrap(model), inputs, extra, by_name=True)
        captured = remote_capture(model, remote, *asked, gradients=gradients, also=also)
    else:
        captured = capture(
            run,
            model,
            gradients=gradients,
            also=also,
            # What replaces a mixer has to be checked against it.
            substitute=_with_quick_gradient if gradients and check else None,
        )
    B, L = token_shape(captured.calls, inputs)
    mask = padding_mask(captured, B, L)
    check_finite(captured.calls)

    # A model may be spread over devices; what the methods see is on that of its first mixer.
    home = captured.calls[0].output.device
    weights = score = None
    if gradients:
        weights, score = read_score(captured, target, position, mask, (B, L))
        with torch.inference_mode(False), torch.enable_grad():
            captured = captured.with_gradients(score).detached()
        score = score.detach()
    elif query and position is None and not _is_per_token(extract_logits(captured.output), L):
        with torch.inference_mode(False), torch.enable_grad():
            if remote:
                raise ValueError(
                    f"remote is {remote!r}, and the model pools its tokens; the token that it "
                    "reads its output from is looked for in a run here only: pass position="
                )
            weights = _probe_readout(capture(run, model, gradients=True))
    elif query:
        weights = _query(position, B, L, mask, captured.calls[0])
    dtype = captured.calls[0].dtype
    return FrozenModel(
        _freeze_calls(captured.calls, mask, check, home),
        (B, L),
        None if mask is None else mask.to(dtype),
        None if weights is None else weights.to(home, dtype),
        score,
        [_brought(norm, home) for norm in captured.others],
        find_token_grid(unwrap(model), captured.arguments, inputs, L),
    )


def _with_quick_gradient(call: MixerCall) -> Any:
    """The call's result, with a graph of our own where the model's would be slow.

    Without compiled kernels a diagonal recurrence runs in Python, one token at a time, and its
    backward pass costs quadratic time. The adapter computes the same from the same tokens by the
    chunked scan. The values stay the model's own.
    """
    adapter, value = find_adapter(call.module), call.output
    # Registered by others, an adapter may well read its coefficients without a graph.
    if adapter is None or not adapter.__module__.startswith("captum_ssm."):
        return call.result
    if value.device.type != "cpu" or not call.tokens().requires_grad:
        return call.result
    with weights_loaded(call.module):
        mixer = adapter(call)
    if not isinstance(mixer.recurrence, DiagonalOperator):
        return call.result
    quick = mixer.output().to(value.dtype)
    quick = quick + (value - quick).detach()
    if isinstance(call.result, (tuple, list)):
        return type(call.result)([quick, *call.result[1:]])
    return quick


def read_score(
    captured: Capture, target: Any, position: Any, mask: Tensor | None, shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The query's weights ``(B, L)`` and the explained score ``(B,)`` of a run with its graph."""
    B, L = shape
    logits = extract_logits(captured.output)
    target, position = _split_target(target, position, logits, L)
    with torch.inference_mode(False), torch.enable_grad():
        if position is None and not _is_per_token(logits, L):
            weights = _probe_readout(captured)
        else:
            weights = _query(position, B, L, mask, captured.calls[0])
        score = _score(logits, _for_autograd(target), weights)
    if not bool(torch.isfinite(score).all()):
        raise InputError(
            f"the explained score is {score.tolist()}: look for NaN or Inf in the weights behind "
            "the last mixer, or choose another target."
        )
    return weights, score


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Without gradients, and in the operators' own dtype wherever the caller's autocast is on."""
    devices = [d for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    with torch.no_grad(), ExitStack() as stack:
        for device in devices:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def resolve_model(forward_func: Any, model: Any) -> Any:
    """The module or nnsight model whose mixers are explained."""
    if model is not None:
        return check_model(model)
    if is_model(forward_func):
        return forward_func
    raise ValueError(
        f"forward_func is a {type(forward_func).__name__}, not a torch module, so the "
        "model it runs is not known; pass it: Method(forward_func, model=model)."
    )


def check_model(model: Any) -> Any:
    """``model``, or a TypeError where it is no torch module."""
    if is_model(model):
        return model
    raise TypeError(
        f"model is {_kind(model)}; accepted are a torch.nn.Module and an nnsight-wrapped model."
    )


def check_forward(forward_func: Any) -> None:
    """Raise unless ``forward_func`` is a model, or a function that may run one."""
    if isinstance(forward_func, type) or not (is_model(forward_func) or callable(forward_func)):
        raise TypeError(
            f"forward_func is {_kind(forward_func)}; accepted are a torch.nn.Module, an "
            "nnsight-wrapped model and a function that runs one."
        )


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__} itself, not a model made of it"
    return f"a {type(value).__name__}"


def check_inputs(inputs: Any, model: Any) -> Tensor:
    """``inputs`` as the model takes them, where they are of a form the library explains.

    Raises:
        InputError: for a wrong shape, no values at all, or ids outside the vocabulary.
        TypeError: for something else than a dense tensor, or a wrong dtype.
    """
    accepted = (
        "accepted are token ids (B, L) of an integer dtype, embeddings (B, L, E) and images "
        "(B, C, H, W) of a floating dtype"
    )
    if not isinstance(inputs, Tensor):
        raise TypeError(f"inputs is a {type(inputs).__name__}; {accepted}.")
    if inputs.layout != torch.strided:
        raise TypeError(
            f"inputs is a tensor of layout {inputs.layout}; {accepted}, dense: "
            "inputs.to_dense() is."
        )
    shape = tuple(inputs.shape)
    if inputs.dim() not in (2, 3, 4):
        raise InputError(f"inputs has shape {shape}; {accepted}.")
    odd = inputs.is_complex() or inputs.dtype == torch.bool
    if odd or inputs.is_floating_point() != (inputs.dim() > 2):
        kind = "ids" if inputs.dim() == 2 else "embeddings or images"
        raise TypeError(
            f"inputs has shape {shape}, so it holds {kind}, but its dtype is {inputs.dtype}; "
            f"{accepted}."
        )
    if inputs.numel() == 0:
        raise InputError(f"inputs is empty, of shape {shape}; give at least one token.")
    if inputs.is_meta:
        raise InputError(
            "inputs is on the device meta, where tensors have no values; make it on the "
            "model's device."
        )
    return as_ids("inputs", inputs, model) if inputs.dim() == 2 else inputs


def as_ids(name: str, ids: Tensor, model: Any) -> Tensor:
    """Ids of any integer dtype in one that embeddings take; raises for what is no id."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name} is {ids.dtype}; accepted are token ids of an integer dtype.")
    if ids.dtype not in (torch.int32, torch.int64):
        ids = ids.long()
    size = getattr(_embeddings(unwrap(model)), "num_embeddings", None)
    if size is not None and not (int(ids.min()) >= 0 and int(ids.max()) < size):
        raise InputError(
            f"{name} holds ids from {int(ids.min())} to {int(ids.max())}; the model's vocabulary "
            f"has ids 0 .. {size - 1}."
        )
    return ids


def _embeddings(model: nn.Module) -> Any:
    # The table of a language model, or None.
    find = getattr(model, "get_input_embeddings", None)
    try:
        return find() if callable(find) else None
    except (AttributeError, NotImplementedError):
        return None


def extract_logits(output: Any) -> Tensor:
    """The tensor a model returns: itself, ``.logits``, or the first tensor it holds."""
    if torch.is_tensor(output):
        return output
    logits = getattr(output, "logits", None)
    if torch.is_tensor(logits):
        return logits
    values = output.values() if isinstance(output, dict) else output
    if isinstance(output, (dict, tuple, list)):
        for value in values:
            if torch.is_tensor(value):
                return value
    raise TypeError(
        f"forward_func returned a {type(output).__name__}; accepted are a tensor, a ModelOutput "
        "with logits, or a tuple whose first tensor is explained."
    )


def check_reconstruction(name: str, call: MixerCall, rebuilt: Tensor, mask: Tensor | None) -> None:
    """Raise `ReconstructionError` unless ``rebuilt (B, L, E)`` is the mixer's output."""
    expected = call.output
    expected = expected.to(rebuilt.dtype)
    error, size = _largest(rebuilt - expected), _largest(expected)
    if mask is not None:
        mask = mask.to(error.device)
        error, size = error * mask, size * mask
    relative = (error.amax() / size.amax().clamp(min=1e-12)).item()
    tolerance = TOLERANCE[call.output.dtype]
    if is_quantised(call.module):  # which may round what enters a layer
        tolerance = max(tolerance, TOLERANCE[torch.float16])
    if not relative <= tolerance:
        raise ReconstructionError(
            f"the frozen operator of {name} ({type(call.module).__name__}) does not "
            f"reproduce its output: largest error {relative:.2e} of the largest entry, accepted "
            f"is {tolerance:.0e} for {call.output.dtype}. The mixer computes something this "
            "library does not know (a variant, a patched kernel, a generation cache that is not "
            "empty), or the model changes its result in place; register an adapter with "
            "register_mixer, or pass check=False to look at the operator all the same."
        )


def _largest(x: Tensor) -> Tensor:
    # The largest size of an entry of each token, without a copy of x.
    return torch.linalg.vector_norm(x, float("inf"), dim=-1)


def _freeze_calls(
    calls: list[MixerCall], mask: Tensor | None, check: bool, home: torch.device
) -> list[FrozenLayer]:
    layers: list[FrozenLayer] = []
    visits: dict[str, int] = {}
    for call in calls:
        adapter = find_adapter(call.module)
        assert adapter is not None
        seen = visits.get(call.path, 0)
        visits[call.path] = seen + 1
        name = f"{call.path}:{seen}" if seen else call.path
        stage, here = 0, _brought(call, home)
        if layers:
            beside = _side_by_side(layers[-1].call, here)
            stage = layers[-1].stage + (0 if beside else 1)
        freeze = _Freeze(name, call, adapter, mask, check, home)
        layers.append(FrozenLayer(name, here, stage, freeze))
    return layers


def _brought(call: MixerCall, home: torch.device) -> MixerCall:
    return call if call.output.device == home else moved(call, home)


class _Freeze:
    # Reads a mixer off its call each time it is asked, and checks what it read the first time.
    def __init__(
        self,
        name: str,
        call: MixerCall,
        adapter: Any,
        mask: Tensor | None,
        check: bool,
        home: torch.device,
    ) -> None:
        self.name, self.call, self.adapter, self.mask = name, call, adapter, mask
        self.check, self.home = check, home

    def __call__(self) -> FrozenMixer:
        with exact_arithmetic():
            with weights_loaded(self.call.module):
                mixer = self.adapter(self.call)
            if self.check:
                check_reconstruction(self.name, self.call, mixer.output(), self.mask)
                self.check = False
        return mixer if self.call.output.device == self.home else moved(mixer, self.home)


def _side_by_side(first: MixerCall, second: MixerCall) -> bool:
    # Two mixers of one block that were given the same tokens, up to a multiplier, run side by
    # side (Falcon-H1); one behind the other, the second would have been given something else.
    parents = [call.path.rpartition(".")[0] for call in (first, second)]
    if parents[0] != parents[1] or first.path == second.path:
        return False
    x, y = first.tokens().double(), second.tokens().double()
    if x.shape != y.shape:
        return False
    inner = (x * y).sum() ** 2
    return bool(inner >= (1 - 1e-4) * x.square().sum() * y.square().sum())


def call_forward(forward_func: Callable[..., Any], inputs: Tensor, extra: Any) -> Any:
    function = unwrap(forward_func) if is_model(forward_func) else forward_func
    if isinstance(function, nn.Module):
        args, kwargs = module_arguments(function, inputs, extra)
    else:
        args, kwargs = (inputs, *extra[0]), extra[1]
    return function(
        *map(_for_autograd, args), **{name: _for_autograd(value) for name, value in kwargs.items()}
    )


def module_arguments(
    module: nn.Module, inputs: Tensor, extra: Any, *, by_name: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a model's ``forward`` is called with; with ``by_name`` only ``inputs`` by position."""
    positional, named = extra
    named, names = dict(named), _parameters(module)
    if "use_cache" in names[len(positional) + 1 :]:
        # Nothing is generated here, and RWKV writes its cache in place, which no gradient
        # survives.
        named.setdefault("use_cache", False)
    embeds = _takes_embeddings(names, inputs)
    if by_name:
        taken = inspect.signature(type(module).forward).parameters
        plain = [n for n in names if taken[n].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD][1:]
        if len(positional) > len(plain) or set(plain[: len(positional)]) & set(named):
            raise TypeError(
                f"additional_forward_args holds {len(positional)} arguments without a name, which "
                f"forward of {type(module).__name__} cannot all take by position; pass a dict, by "
                "name."
            )
    if embeds or by_name:
        named = {**dict(zip(names[1:], positional, strict=False)), **named}
        positional = ()
    if embeds:
        # Embeddings go where a language model takes them, not where it takes ids.
        return (), {"inputs_embeds": inputs, **named}
    return (inputs, *positional), named


def _parameters(model: nn.Module) -> list[str]:
    # Of the class: while a model is traced its modules carry another forward.
    return list(inspect.signature(type(model).forward).parameters)[1:]


def _takes_embeddings(names: Sequence[str], inputs: Tensor) -> bool:
    return inputs.dim() == 3 and "inputs_embeds" in names and names[0] != "inputs_embeds"


def _for_autograd(value: Any) -> Any:
    # A tensor made under torch.inference_mode() can't take part in autograd; its copy can.
    return value.clone() if torch.is_tensor(value) and value.is_inference() else value


def extra_arguments(
    forward_func: Callable[..., Any], inputs: Tensor, extra: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Captum's ``additional_forward_args``, positional and by name, where they fit the inputs.

    What a function of the user's own takes is its own affair; what goes to a model is checked.
    """
    if isinstance(extra, tuple) and len(extra) == 1 and isinstance(extra[0], dict):
        extra = extra[0]  # as Captum's wrappers pass a dict on
    if isinstance(extra, dict):
        positional, named = (), dict(extra)
    else:
        positional, named = format_additional_forward_args(extra) or (), {}
    for value in (*positional, *named.values()):
        is_mask = torch.is_tensor(value) and value.dim() == 2 and not value.is_floating_point()
        if is_mask and value.shape[0] not in (1, inputs.shape[0]):
            raise InputError(
                f"inputs has a batch of {inputs.shape[0]}, but additional_forward_args holds "
                f"a tensor of shape {tuple(value.shape)}; give one row an example (in a tuple, "
                "where a Captum method repeats the examples: it does not repeat a dict)."
            )
    if is_model(forward_func):
        model = unwrap(forward_func)
        names = _parameters(model)
        _check_mask({**dict(zip(names[1:], positional, strict=False)), **named}, inputs)
        if _takes_embeddings(names, inputs):
            _check_width(model, inputs)
    else:
        _check_mask_length(named.get("attention_mask"), inputs)
    return positional, named


def _check_mask(named: dict[str, Any], inputs: Tensor) -> None:
    mask = named.get("attention_mask")
    # Masks of more axes, and those of a model's own kind, are left to the model.
    if isinstance(mask, (bool, int, float, str, list, tuple, np.ndarray)):
        raise TypeError(
            f"attention_mask is a {type(mask).__name__}; accepted is a tensor (B, L), 1 for "
            "tokens and 0 for padding."
        )
    B = inputs.shape[0]
    if isinstance(mask, Tensor) and (mask.dim() < 2 or mask.shape[0] not in (1, B)):
        raise InputError(
            f"attention_mask has shape {tuple(mask.shape)} for inputs of shape "
            f"{tuple(inputs.shape)}; give one row an example, (B, L)."
        )
    _check_mask_length(mask, inputs)


def _check_mask_length(mask: Any, inputs: Tensor) -> None:
    if not isinstance(mask, Tensor) or mask.dim() != 2 or inputs.dim() == 4:
        return
    if mask.shape[1] != inputs.shape[1]:
        raise InputError(
            f"attention_mask has shape {tuple(mask.shape)} for inputs of shape "
            f"{tuple(inputs.shape)}; give one entry a token."
        )


def _check_width(model: nn.Module, embeddings: Tensor) -> None:
    table = _embeddings(model)
    width = table.embedding_dim if isinstance(table, nn.Embedding) else None
    if width not in (None, embeddings.shape[-1]):
        raise InputError(
            f"inputs has shape {tuple(embeddings.shape)}, so its embeddings are of width "
            f"{embeddings.shape[-1]}; those of the model are of width {width}."
        )


def token_shape(calls: list[MixerCall], inputs: Tensor) -> tuple[int, int]:
    shapes = {tuple(call.output.shape[:2]) for call in calls}
    if len(shapes) > 1:
        raise InputError(
            f"the model's mixers work on different numbers of tokens, {sorted(shapes)}; a map "
            "from input tokens to one query needs them to share one sequence."
        )
    B, L = shapes.pop()
    if inputs.shape[0] != B or (inputs.dim() < 4 and inputs.shape[1] != L):
        raise InputError(
            f"inputs has shape {tuple(inputs.shape)}, but the mixers saw (batch, tokens) = "
            f"{(B, L)}; forward_func has to pass each input token to the model as one token."
        )
    return B, L


def padding_mask(captured: Capture, B: int, L: int) -> Tensor | None:
    mask = captured.arguments.get("attention_mask")
    if not torch.is_tensor(mask):
        masks = (call.token_mask() for call in captured.calls)
        mask = next((m for m in masks if m is not None), None)
    if mask is None or tuple(mask.shape) not in ((B, L), (1, L)):
        return None
    mask = mask.expand(B, L)
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError(
            f"attention_mask holds values from {float(mask.min()):g} to {float(mask.max()):g}; "
            "accepted are 1 for tokens and 0 for padding."
        )
    empty = (mask != 0).sum(1) == 0
    if bool(empty.any()):
        raise InputError(
            f"attention_mask marks no token in row {int(empty.nonzero()[0])}: an example of "
            "padding only has nothing to explain; leave it out of the batch."
        )
    return (mask != 0).to(captured.calls[0].output.device)


def check_finite(calls: list[MixerCall]) -> None:
    for call in calls:
        if not all(bool(torch.isfinite(end)) for end in torch.aminmax(call.output)):
            raise InputError(
                f"the output of {call.path} holds NaN or Inf: look for them in the model's "
                "weights or in the inputs, or run the model in a wider dtype."
            )


def _is_per_token(logits: Tensor, tokens: int) -> bool:
    # A model may return the logits of its last tokens only, but not of more than there are.
    return logits.dim() == 3 and logits.shape[1] <= tokens


def _positions(position: Any, B: int, L: int, device: torch.device) -> Tensor:
    index = as_integers(position, device)
    if index is None or index.dim() > 1:
        raise TypeError(
            f"position is {position!r}, a {type(position).__name__}; accepted are an int, a "
            "(B,) integer tensor and None."
        )
    if index.dim() == 1 and index.shape[0] != B:
        raise InputError(f"position has {index.shape[0]} entries for a batch of {B}.")
    if bool(((index < -L) | (index >= L)).any()):
        raise InputError(
            f"position is {index.tolist()}, outside the sequence: it has {L} tokens, so 0 .. "
            f"{L - 1} (or -{L} .. -1 from the end) is accepted."
        )
    return (index % L).expand(B)


def _query(position: Any, B: int, L: int, mask: Tensor | None, call: MixerCall) -> Tensor:
    device = call.output.device
    if position is not None:
        index = _positions(position, B, L, device)
        if mask is not None and not bool(mask.gather(1, index[:, None]).all()):
            raise InputError(
                f"position {index.tolist()} falls on padding in at least one example; "
                "attention_mask marks the tokens that can be asked."
            )
    elif mask is not None:
        places = torch.arange(L, device=device)
        index = torch.where(mask, places, -1).amax(1)
    else:
        index = torch.full((B,), L - 1, device=device)
    return nn.functional.one_hot(index, L).to(call.dtype)


def _probe_readout(captured: Capture) -> Tensor:
    # Which tokens a pooled output is read from: those on which it depends through the last
    # mixer, everything behind which works on one token at a time. A fixed random direction,
    # so that no symmetry of the head cancels.
    logits, last = extract_logits(captured.output), captured.calls[-1].output
    generator = torch.Generator().manual_seed(0)
    shape = logits.shape[1:] if logits.dim() > 0 else logits.shape
    direction = torch.randn(shape, generator=generator).to(logits)
    energy = None
    if logits.requires_grad and last.requires_grad:
        (gradient,) = torch.autograd.grad(
            (logits * direction).sum(), last, retain_graph=True, allow_unused=True
        )
        energy = None if gradient is None else gradient.float().norm(dim=-1)
    if energy is None or not bool((energy.amax(1) > 0).all()):
        raise ValueError(
            "the token that the model reads its output from could not be found; pass position="
        )
    support = (energy > 1e-6 * energy.amax(1, keepdim=True)).to(energy.dtype)
    return support / support.sum(1, keepdim=True)


def _split_target(target: Any, position: Any, logits: Tensor, L: int) -> tuple[Any, Any]:
    # For logits (B, L, V) a tuple (position, token) sets both; per example, in a list.
    if not _is_per_token(logits, L):
        return target, position
    pairs = None
    if isinstance(target, tuple) and len(target) == 2:
        pairs = [target] * logits.shape[0]
    elif isinstance(target, list) and target and all(isinstance(t, tuple) for t in target):
        _check_count(len(target), logits.shape[0])
        pairs = target
    if pairs is None:
        return target, position
    if any(len(pair) != 2 for pair in pairs):
        raise TargetError(f"target is {target!r}; a tuple names (position, token).")
    if position is not None:
        raise TargetError(
            f"target is {target!r}, which names the position, and position={position!r} was "
            "given too; give one of them."
        )
    places, tokens = ([as_index(x) for x in side] for side in zip(*pairs, strict=True))
    if None in places or None in tokens:
        raise TargetError(
            f"target is {target!r}; a tuple names (position, token), and both are integers."
        )
    return tokens, torch.tensor(places)


def as_index(value: Any) -> int | None:
    """An integer of Python, numpy or torch as an int; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except (TypeError, ValueError):
        return None


def as_integers(value: Any, device: torch.device) -> Tensor | None:
    """Integers of Python, numpy or torch as an int64 tensor; None for anything else."""
    try:
        found = torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError):
        return None
    is_integer = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    return found.long() if is_integer else None


def _check_count(given: int, batch: int) -> None:
    if given != batch:
        raise TargetError(f"target has {given} entries for a batch of {batch}.")


def _score(logits: Tensor, target: Any, query: Tensor) -> Tensor:
    """The explained score of each example, ``(B,)``."""
    B, L = query.shape
    if not _is_per_token(logits, L):
        return _captum_score(logits, target, B)
    if target is None:
        raise TargetError(
            f"the model returns logits of shape {tuple(logits.shape)} and no target was given; "
            "pass a token id, one id an example, or (position, token)."
        )
    token = token_ids(_as_tokens(target, logits), logits.shape[-1])
    row = query.argmax(1).to(logits.device) - (L - logits.shape[1])
    if bool((row < 0).any()):
        raise InputError(
            f"the model returned logits for its last {logits.shape[1]} of {L} tokens, and the "
            "position asked for is before them."
        )
    return logits[torch.arange(B, device=logits.device), row, token]


def token_ids(target: Tensor, vocabulary: int) -> Tensor:
    """Targets as ids from 0 on; as in Captum and Python, -1 is the last of the vocabulary."""
    if bool(((target < -vocabulary) | (target >= vocabulary)).any()):
        raise TargetError(
            f"target is {_shown(target)}, outside the vocabulary: ids 0 .. {vocabulary - 1} (or "
            f"-{vocabulary} .. -1 from its end) are accepted."
        )
    return target % vocabulary


def _shown(values: Tensor) -> str:
    if values.numel() <= 16:
        return str(values.tolist())
    return f"of shape {tuple(values.shape)}, from {int(values.min())} to {int(values.max())}"


def _as_tokens(target: Any, logits: Tensor) -> Tensor:
    token = as_integers(target, logits.device)
    if token is None or token.dim() > 1:
        raise TargetError(
            f"target is {target!r}; for logits of shape {tuple(logits.shape)} accepted are a "
            "token id, one id an example (list or 1-D tensor), or (position, token)."
        )
    if token.dim() == 1 and token.numel() > 1:
        _check_count(token.numel(), logits.shape[0])
    return token.reshape(-1).expand(logits.shape[0])


def _captum_score(logits: Tensor, target: Any, B: int) -> Tensor:
    index = as_index(target)  # Captum knows Python's integers only
    try:
        score = select_targets(logits, target if index is None else index)
    except (AssertionError, IndexError, RuntimeError) as error:
        raise TargetError(
            f"target is {target!r}, which does not select one value per example of the output "
            f"of shape {tuple(logits.shape)}: {error}"
        ) from error
    if score.numel() not in (1, B):
        raise TargetError(
            f"the output has shape {tuple(logits.shape)} and target is {target!r}, which leaves "
            f"{tuple(score.shape)}; a target has to select one value per example."
        )
    return score.reshape(-1)
