"""What a user passed to ``attribute``, checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from captum_ssm.capture.finite import is_finite
from captum_ssm.capture.model import input_embeddings, is_model, is_wrapped, parameter_names, unwrap
from captum_ssm.errors import InputError
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.captum_api import format_additional_forward_args
from captum_ssm.utils.nested import tensors_in
from captum_ssm.utils.watch_modules import watch_modules

_EXPECTED = (
    "expected token ids (B, L) of an integer dtype, or values (B, ...) of a floating dtype "
    "(embeddings, series, images, volumes)"
)
_OF_LANGUAGE = (
    "expected token ids (B, L) of an integer dtype, embeddings (B, L, E) or images (B, C, H, W) "
    "of a floating dtype"
)
# Where a tokenizer's or an image processor's output holds the input itself.
INPUT_NAMES = ("input_ids", "inputs_embeds", "pixel_values")


def split_encoding(inputs: Any, extra: Any) -> tuple[Any, Any]:
    """Inputs and further arguments; of a tokenizer's whole output its ids are the inputs."""
    if not isinstance(inputs, Mapping):
        return inputs, extra
    named = dict(inputs)
    name = next((n for n in INPUT_NAMES if n in named), None)
    if name is None:
        raise TypeError(
            f"inputs is a {type(inputs).__name__} of {sorted(map(str, named))}; expected one of "
            f"{', '.join(INPUT_NAMES)} in it, as a tokenizer returns."
        )
    if extra is not None and not isinstance(extra, dict):
        raise TypeError(
            f"inputs is a {type(inputs).__name__} and additional_forward_args a "
            f"{type(extra).__name__}; expected a dict, whose arguments join those of inputs."
        )
    tensor = named.pop(name)
    return tensor, {**named, **(extra or {})}


def check_text(ids: Tensor, model: Any) -> Tensor:
    """Ids of a text as :func:`check_inputs` returns them.

    Raises:
        InputError: for ids outside the vocabulary too.
    """
    _check_vocabulary("inputs", ids, model)
    return check_inputs(ids, model)


def check_inputs(inputs: Any, model: Any) -> Tensor:
    """``inputs`` as the model takes them, if they are of a form the library explains.

    Ids outside the vocabulary may be placeholders, which a model looks up as others:
    :func:`ids_explained` refuses those that it does not.

    Raises:
        InputError: for a wrong shape, no values at all, or NaN and Inf.
        TypeError: for anything except a dense tensor, or a wrong dtype.
    """
    if not isinstance(inputs, Tensor):
        raise TypeError(f"inputs is a {type(inputs).__name__}; {_EXPECTED}.{_advice(inputs)}")
    if inputs.layout != torch.strided or inputs.is_nested:
        kind = "a nested tensor" if inputs.is_nested else f"a tensor of layout {inputs.layout}"
        advice = "inputs.to_padded_tensor(0)" if inputs.is_nested else "inputs.to_dense()"
        raise TypeError(f"inputs is {kind}; {_EXPECTED}, dense: pass {advice}.")
    if torch.empty(0).device.type == "meta":  # the default device; asked for, torch 2.6 may fail
        raise InputError(
            "the default device is meta, on which new tensors have no values; expected a device "
            "that computes: call torch.set_default_device(None) before explaining."
        )
    shape = tuple(inputs.shape)
    if inputs.dim() < 2:
        raise InputError(
            f"inputs has shape {shape}; {_EXPECTED}: the first axis is the examples, "
            "as in inputs[None] of one."
        )
    _check_dtype(inputs)
    if inputs.numel() == 0:
        raise InputError(f"inputs is empty, of shape {shape}; give at least one token.")
    if inputs.is_meta:
        raise InputError(
            "inputs is on the device meta, where tensors have no values; create it on the "
            "model's device."
        )
    if not is_finite(inputs):
        raise InputError(
            f"inputs has shape {shape} and holds NaN or Inf; expected finite values: fill in those "
            "that are missing, and tell the model which they are by an argument of its own."
        )
    if not is_wrapped(model):  # nnsight loads weights when the model first runs
        _check_weights(unwrap(model))
    if getattr(input_embeddings(unwrap(model)), "num_embeddings", None) is not None:
        _check_language(inputs)
    if not is_traceable_wrapper_subclass(inputs):
        # A subclass (torchvision's images) may wrap results anew, which then have other nodes.
        inputs = inputs.as_subclass(Tensor)
    # Which ids a table was given is told by their memory: each has its own.
    return inputs if inputs.is_floating_point() else _whole_numbers("inputs", inputs).contiguous()


def _advice(inputs: Any) -> str:
    if isinstance(inputs, list) and any(torch.is_tensor(item) for item in inputs):
        return " Several inputs go into a tuple."
    if isinstance(inputs, np.ndarray):
        return " Pass torch.from_numpy(inputs)."
    return " Pass tokenizer(text, return_tensors='pt')." if isinstance(inputs, (str, list)) else ""


def _check_dtype(inputs: Tensor) -> None:
    shape = tuple(inputs.shape)
    if inputs.is_complex() or inputs.dtype == torch.bool:
        raise TypeError(f"inputs has shape {shape} and dtype {inputs.dtype}; {_EXPECTED}.")
    if inputs.dtype == torch.uint8 and inputs.dim() > 2:
        raise TypeError(
            f"inputs has shape {shape} and dtype torch.uint8, as images have in bytes; expected "
            "floats, as the model reads them: processor(image, return_tensors='pt').pixel_values, "
            "or inputs.float() where the model itself scales and normalizes bytes. Pass ids as "
            "inputs.long()."
        )


def _check_weights(model: nn.Module) -> None:
    # What accelerate offloads, or nnsight loads later, is on meta until it is needed.
    is_meta = any(weight.is_meta for weight in model.parameters())
    if is_meta and not any(hasattr(part, "_hf_hook") for part in model.modules()):
        raise InputError(
            f"the weights of {type(model).__name__} are on the device meta, where tensors have no "
            "values; load them, such as by from_pretrained."
        )


@contextmanager
def masks_explained(model: nn.Module, named: Mapping[str, Any]) -> Iterator[None]:
    """Say of a run that fails with a mask of more axes than tokens have that it may be the mask."""
    try:
        yield
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        mask = named.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.dim() <= 2:
            raise
        raise InputError(
            f"{type(model).__name__} does not run with an attention_mask of shape "
            f"{tuple(mask.shape)}; expected (B, L), 1 for tokens and 0 for padding. It raises: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        ) from error


def _check_language(inputs: Tensor) -> None:
    # What a model with a vocabulary takes: nothing else is ids, or embeddings.
    shape = tuple(inputs.shape)
    if inputs.dim() not in (2, 3, 4):
        raise InputError(f"inputs has shape {shape}; {_OF_LANGUAGE}.")
    if inputs.is_floating_point() != (inputs.dim() > 2):
        kind = "ids" if inputs.dim() == 2 else "embeddings or images"
        raise TypeError(
            f"inputs has shape {shape}, so it holds {kind}, but its dtype is {inputs.dtype}; "
            f"{_OF_LANGUAGE}. Captum's NoiseTunnel adds noise to its inputs, so give it "
            "embeddings: model.get_input_embeddings()(ids)."
        )


def check_together(inputs: Sequence[Tensor], model: Any) -> None:
    """Raise unless several inputs fit each other, and none only looks like one."""
    ids = [x for x in inputs if not x.is_floating_point()]
    if len(ids) > 1 and input_embeddings(unwrap(model)) is not None:
        raise ValueError(
            f"inputs is a tuple of {len(inputs)}, of which {len(ids)} hold integers; expected one "
            "tensor of ids. Other arguments of the model go into additional_forward_args."
        )
    sizes = [x.shape[0] for x in inputs]
    if len(set(sizes)) != 1:
        shapes = [tuple(x.shape) for x in inputs]
        raise InputError(
            f"inputs holds tensors of shapes {shapes}; expected at least one, and the same number "
            "of examples in each (their first axis)."
        )


def as_ids(name: str, ids: Tensor, model: Any) -> Tensor:
    """Ids of any integer dtype in one that embeddings take; raises for what is no id."""
    ids = _whole_numbers(name, ids)
    _check_vocabulary(name, ids, model)
    return ids


def _whole_numbers(name: str, ids: Tensor) -> Tensor:
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name} is {ids.dtype}; expected token ids of an integer dtype.")
    return ids if ids.dtype in (torch.int32, torch.int64) else ids.long()


def _check_vocabulary(name: str, ids: Tensor, model: Any) -> None:
    size = getattr(input_embeddings(unwrap(model)), "num_embeddings", None)
    if size is not None and bool(is_placeholder(ids, size).any()):
        raise InputError(
            f"{name} holds ids from {int(ids.min())} to {int(ids.max())}; the model's vocabulary "
            f"has ids 0 .. {size - 1}. Use the tokenizer that belongs to the model."
        )


def is_placeholder(ids: Tensor, rows: int) -> Tensor:
    """Which ids a table of so many rows does not embed, in their shape."""
    return (ids < 0) | (ids >= rows)


@contextmanager
def ids_explained(model: nn.Module, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Refuse ids of inputs that a table of the model has no row for, where it looks them up.

    A model may put other ids in the place of these, and sound or an image in the place of what it
    then looks up. A GPU that is asked for a row that is not there stops the whole process.

    Raises:
        InputError: before the table is asked.
    """
    ids = [x for x in inputs if not x.is_floating_point()]
    tables: dict[nn.Module, tuple[str, int]] = {}
    for path, module in model.named_modules():
        size = getattr(module, "num_embeddings", None)
        if isinstance(size, int) and any(bool(is_placeholder(x, size).any()) for x in ids):
            tables[module] = path, size

    def look(table: nn.Module, args: Any, kwargs: Any) -> None:
        asked, (path, size) = next(tensors_in((args, kwargs))), tables[table]
        if table is input_embeddings(model):
            _check_vocabulary("inputs", asked, model)
        elif bool(is_placeholder(asked, size).any()):
            raise InputError(
                f"{path} is asked for rows {int(asked.min())} to {int(asked.max())} and has rows "
                f"0 .. {size - 1}; expected ids, and a length, that it has rows for."
            )

    with watch_modules(tables, before=look):
        yield


def takes_embeddings(names: Sequence[str], inputs: tuple[Tensor, ...]) -> bool:
    """Whether inputs are token embeddings for a language model, given its arguments' names."""
    floats = [x.dim() == 3 and x.is_floating_point() for x in inputs]
    return floats == [True] and "inputs_embeds" in names and names[0] != "inputs_embeds"


def usable(value: Any) -> Any:
    """``value``; of a tensor made under inference mode a copy that can take part in autograd."""
    if torch.is_tensor(value) and value.is_inference():
        with torch.inference_mode(False):
            return value.clone()
    return value


def extra_arguments(
    forward_func: Callable[..., Any], tensors: tuple[Tensor, ...], extra: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Captum's ``additional_forward_args``, positional and by name.

    What a function of the user's own takes is its own affair; what goes to a model is checked.
    """
    inputs = tensors[0]
    if isinstance(extra, tuple) and len(extra) == 1 and isinstance(extra[0], dict):
        extra = extra[0]  # as Captum's wrappers pass a dict on
    named = dict(extra) if isinstance(extra, dict) else {}
    positional = () if isinstance(extra, dict) else format_additional_forward_args(extra) or ()
    for value in (*positional, *named.values()):
        # Other integers, such as the sizes of several images, have a first axis of their own.
        is_mask = torch.is_tensor(value) and value.dim() == 2 and not value.is_floating_point()
        is_mask = is_mask and value.shape[1] == inputs.shape[1]
        if is_mask and value.shape[0] not in (1, inputs.shape[0]):
            raise InputError(
                f"inputs has a batch of {inputs.shape[0]}, but additional_forward_args holds "
                f"a tensor of shape {tuple(value.shape)}; give one row per example (in a tuple, "
                "if a Captum method repeats the examples: it does not repeat a dict)."
            )
    if is_model(forward_func):
        model = unwrap(forward_func)
        names = parameter_names(model)
        by_name = dict(zip(names[len(tensors) :], positional, strict=False))
        _check_mask({**by_name, **named}, inputs)
        if takes_embeddings(names, tensors):
            _check_width(model, inputs)
    else:
        _check_mask_length(named.get("attention_mask"), inputs)
    return positional, named


def _check_mask(named: dict[str, Any], inputs: Tensor) -> None:
    mask = named.get("attention_mask")
    # Masks of more axes, and those of a model's own kind, are left to the model.
    if isinstance(mask, (bool, int, float, str, list, tuple, np.ndarray)):
        raise TypeError(
            f"attention_mask is a {type(mask).__name__}; expected a tensor (B, L), 1 for tokens "
            "and 0 for padding."
        )
    B = inputs.shape[0]
    if isinstance(mask, Tensor) and (mask.dim() < 2 or mask.shape[0] not in (1, B)):
        raise InputError(
            f"attention_mask has shape {tuple(mask.shape)} for inputs of shape "
            f"{tuple(inputs.shape)}; give one row per example, (B, L)."
        )
    _check_mask_length(mask, inputs)


def _check_mask_length(mask: Any, inputs: Tensor) -> None:
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return
    if inputs.is_floating_point() and inputs.dim() != 3:
        return
    if mask.shape[1] != inputs.shape[1]:
        raise InputError(
            f"attention_mask has shape {tuple(mask.shape)} for inputs of shape "
            f"{tuple(inputs.shape)}; give one entry per token."
        )


def _check_width(model: nn.Module, embeddings: Tensor) -> None:
    table = input_embeddings(model)
    width = table.embedding_dim if isinstance(table, nn.Embedding) else None
    if width not in (None, embeddings.shape[-1]):
        raise InputError(
            f"inputs has shape {tuple(embeddings.shape)}, so its embeddings are of width "
            f"{embeddings.shape[-1]}; expected those of the model, of width {width}."
        )
