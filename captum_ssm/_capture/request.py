"""What is to be explained: a model, its input, its further arguments, and where it runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from captum_ssm._captum import format_additional_forward_args, is_tuple
from captum_ssm._capture.model import (
    input_embeddings,
    is_model,
    parameter_names,
    resolve_model,
    unwrap,
)
from captum_ssm._capture.randomness import one_run
from captum_ssm._errors import InputError
from captum_ssm._nested import same_values

_EXPECTED = (
    "expected token ids (B, L) of an integer dtype, or values (B, ...) of a floating dtype "
    "(embeddings, series, images, volumes)"
)
_OF_LANGUAGE = (
    "expected token ids (B, L) of an integer dtype, embeddings (B, L, E) or images (B, C, H, W) "
    "of a floating dtype"
)
# As in nnsight: True is the server of its configuration, a str another one's address.
Remote: TypeAlias = bool | str
# Where a tokenizer's or an image processor's output holds the input itself.
_INPUT_NAMES = ("input_ids", "inputs_embeds", "pixel_values")


@dataclass(frozen=True)
class Request:
    """One input of one model, checked, with everything needed to run it.

    Args:
        forward_func (Callable): what is explained.
        model (nn.Module or nnsight model): the model it runs.
        inputs (tuple of Tensor): what is explained, ids ``(B, L)`` or floats ``(B, ...)`` each.
        positional (tuple): further arguments of ``forward_func``.
        named (dict): further arguments by keyword.
        remote (bool or str, optional): where an nnsight model runs. Default: False
        packed (bool, optional): whether the inputs came in a tuple, as the result then does.
            Default: False
    """

    forward_func: Callable[..., Any]
    model: Any
    inputs: tuple[Tensor, ...]
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    remote: Remote = False
    packed: bool = False

    @classmethod
    def of(
        cls,
        forward_func: Callable[..., Any],
        model: Any,
        inputs: Any,
        additional_forward_args: Any = None,
        remote: Remote = False,
    ) -> Request:
        """A request for what a user passed to ``attribute``.

        Raises:
            InputError: for inputs of a wrong shape, without values, or with ids outside the
                vocabulary, and for arguments that do not fit them.
            TypeError: for inputs or arguments of a wrong type or dtype.
        """
        model = resolve_model(forward_func, model)
        extra = additional_forward_args
        given = inputs if is_tuple(inputs) else (inputs,)
        if len(given) == 1:
            one, extra = _split_encoding(given[0], extra)
            given = (one,)
        tensors = tuple(usable(check_inputs(one, model)) for one in given)
        _check_together(tensors, model)
        positional, named = _extra_arguments(forward_func, tensors, extra)
        return cls(
            forward_func,
            model,
            tensors,
            tuple(map(usable, positional)),
            {name: usable(value) for name, value in named.items()},
            remote,
            is_tuple(inputs),
        )

    @property
    def module(self) -> nn.Module:
        """The torch module of ``model``."""
        return unwrap(self.model)

    @property
    def batch(self) -> int:
        """B, the number of examples."""
        return self.inputs[0].shape[0]

    @property
    def given(self) -> Any:
        """The inputs as ``attribute`` takes them: in a tuple if they came in one."""
        return self.inputs if self.packed else self.inputs[0]

    @property
    def by_ids(self) -> bool:
        """Whether the (first) input is token ids."""
        return not self.inputs[0].is_floating_point()

    def speaks(self, output: Tensor) -> bool:
        """Whether an output is logits of tokens: ids came in, or a table has as many as it has."""
        tables = (m for m in self.module.modules() if isinstance(m, nn.Embedding))
        known = getattr(input_embeddings(self.module), "num_embeddings", None)
        sizes = {known, *(table.num_embeddings for table in tables)}
        return self.by_ids or (output.dim() > 0 and output.shape[-1] in sizes)

    @property
    def is_text(self) -> bool:
        """Whether the only input is ids ``(B, L)`` or token embeddings, which can be cut."""
        first = self.inputs[0]
        return len(self.inputs) == 1 and ((self.by_ids and first.dim() == 2) or self.is_embedded(0))

    def is_embedded(self, index: int) -> bool:
        """Whether an input is token embeddings, whose features mean nothing by themselves."""
        tensor = self.inputs[index]
        if tensor.dim() != 3 or not tensor.is_floating_point():
            return False
        model = unwrap(self.forward_func) if is_model(self.forward_func) else None
        if model is not None and _takes_embeddings(parameter_names(model), self.inputs):
            return True
        width = getattr(input_embeddings(self.module), "embedding_dim", None)
        return width == tensor.shape[-1]

    def has_variables(self, index: int) -> bool:
        """Whether an input is a series, whose variables share relevance by their gradients.

        The colors of a pixel share it by what they add to the tokens.
        """
        tensor = self.inputs[index]
        return tensor.is_floating_point() and tensor.dim() == 3 and not self.is_embedded(index)

    def run(self, inputs: tuple[Tensor, ...] | None = None) -> Any:
        """What ``forward_func`` returns on the inputs, or on others in their place."""
        inputs = self.inputs if inputs is None else inputs
        own = replace(
            self,
            positional=tuple(map(_copied, self.positional)),
            named={name: _copied(value) for name, value in self.named.items()},
        )
        with one_run(self.module):
            if not is_model(self.forward_func):
                return self.forward_func(*inputs, *own.positional, **own.named)
            module = unwrap(self.forward_func)
            args, kwargs = own._module_arguments(module, inputs)
            return module(*args, **kwargs)

    def arguments_by_name(self) -> dict[str, Any]:
        """What the model's ``forward`` is called with, all by name.

        Raises:
            TypeError: for positional arguments that have no name.
        """
        args, kwargs = self._module_arguments(self.module, self.inputs)
        names = parameter_names(self.module)
        if len(args) > len(names) or set(names[: len(args)]) & set(kwargs):
            raise TypeError(
                f"additional_forward_args holds {len(self.positional)} arguments without a name, "
                f"which forward of {type(self.module).__name__} cannot all take by position; pass "
                "a dict, by name."
            )
        return dict(zip(names, args, strict=False)) | kwargs

    def shortened(self, tokens: int) -> Request | None:
        """A request for 32 tokens of the first example, for inputs of more than ``tokens`` ones.

        None for fewer, and for what is no text. Arguments are cut where they have an axis of
        tokens.
        """
        text = self.inputs[0]
        B, L = text.shape[:2]
        if not self.is_text or tokens >= B * L or L <= 32:
            return None
        mask = self.named.get("attention_mask")
        first = 0
        if isinstance(mask, Tensor) and mask.shape == (B, L):
            first = min(int((mask[0] != 0).int().argmax()), L - 32)

        def cut(value: Any) -> Any:
            if not torch.is_tensor(value) or value.dim() < 2 or value.shape[1] != L:
                return value
            return value[:1, first : first + 32]

        named = {name: cut(value) for name, value in self.named.items()}
        positional = tuple(map(cut, self.positional))
        return replace(self, inputs=(cut(text),), positional=positional, named=named)

    def same_as(self, other: Request) -> bool:
        """Whether another request runs the same function on equal inputs and arguments."""
        mine, theirs = (
            (request.inputs, request.positional, request.named) for request in (self, other)
        )
        return self.forward_func is other.forward_func and same_values(mine, theirs)

    def _module_arguments(
        self, module: nn.Module, inputs: tuple[Tensor, ...]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named, names = dict(self.named), parameter_names(module)
        if "use_cache" in names[len(self.positional) + len(inputs) :]:
            # Nothing is generated here, and RWKV writes its cache in place, which no gradient
            # survives.
            named.setdefault("use_cache", False)
        if not _takes_embeddings(names, inputs):
            return (*inputs, *self.positional), named
        # Embeddings go where a language model takes them, not where it takes ids.
        by_name = dict(zip(names[1:], self.positional, strict=False))
        return (), {"inputs_embeds": inputs[0], **by_name, **named}


def _copied(value: Any) -> Any:
    # An argument that a run may write into, such as a generation cache, or a list of states.
    if torch.is_tensor(value) or isinstance(value, nn.Module) or callable(value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # it holds what cannot be copied
        return value


def _split_encoding(inputs: Any, extra: Any) -> tuple[Any, Any]:
    # A tokenizer's whole output: its ids are explained, the rest goes to the model.
    if not isinstance(inputs, Mapping):
        return inputs, extra
    named = dict(inputs)
    name = next((n for n in _INPUT_NAMES if n in named), None)
    if name is None:
        raise TypeError(
            f"inputs is a {type(inputs).__name__} of {sorted(map(str, named))}; expected one of "
            f"{', '.join(_INPUT_NAMES)} in it, as a tokenizer returns."
        )
    if extra is not None and not isinstance(extra, dict):
        raise TypeError(
            f"inputs is a {type(inputs).__name__} and additional_forward_args a "
            f"{type(extra).__name__}; expected a dict, whose arguments join those of inputs."
        )
    tensor = named.pop(name)
    return tensor, {**named, **(extra or {})}


def check_inputs(inputs: Any, model: Any) -> Tensor:
    """``inputs`` as the model takes them, if they are of a form the library explains.

    Raises:
        InputError: for a wrong shape, no values at all, or ids outside the vocabulary.
        TypeError: for anything except a dense tensor, or a wrong dtype.
    """
    if not isinstance(inputs, Tensor):
        raise TypeError(f"inputs is a {type(inputs).__name__}; {_EXPECTED}.")
    if inputs.layout != torch.strided or inputs.is_nested:
        kind = "a nested tensor" if inputs.is_nested else f"a tensor of layout {inputs.layout}"
        advice = "inputs.to_padded_tensor(0)" if inputs.is_nested else "inputs.to_dense()"
        raise TypeError(f"inputs is {kind}; {_EXPECTED}, dense: pass {advice}.")
    if torch.get_default_device().type == "meta":
        raise InputError(
            "the default device is meta, on which new tensors have no values; expected a device "
            "that computes: call torch.set_default_device(None) before explaining."
        )
    shape = tuple(inputs.shape)
    if inputs.dim() < 2:
        raise InputError(f"inputs has shape {shape}; {_EXPECTED}: the first axis is the examples.")
    if inputs.is_complex() or inputs.dtype == torch.bool:
        raise TypeError(f"inputs has shape {shape} and dtype {inputs.dtype}; {_EXPECTED}.")
    if inputs.numel() == 0:
        raise InputError(f"inputs is empty, of shape {shape}; give at least one token.")
    if inputs.is_meta:
        raise InputError(
            "inputs is on the device meta, where tensors have no values; create it on the "
            "model's device."
        )
    if getattr(input_embeddings(unwrap(model)), "num_embeddings", None) is not None:
        _check_language(inputs)
    if not is_traceable_wrapper_subclass(inputs):
        # A subclass (torchvision's images) may wrap results anew, which then have other nodes.
        inputs = inputs.as_subclass(Tensor)
    # Which ids a table was given is told by their memory: each has its own.
    return inputs if inputs.is_floating_point() else as_ids("inputs", inputs, model).contiguous()


def _check_language(inputs: Tensor) -> None:
    # What a model with a vocabulary takes: nothing else is ids, or embeddings.
    shape = tuple(inputs.shape)
    if inputs.dim() not in (2, 3, 4):
        raise InputError(f"inputs has shape {shape}; {_OF_LANGUAGE}.")
    if inputs.is_floating_point() != (inputs.dim() > 2):
        kind = "ids" if inputs.dim() == 2 else "embeddings or images"
        raise TypeError(
            f"inputs has shape {shape}, so it holds {kind}, but its dtype is {inputs.dtype}; "
            f"{_OF_LANGUAGE}."
        )


def _check_together(inputs: Sequence[Tensor], model: Any) -> None:
    # Several inputs: those that fit each other, and none that only looks like one.
    ids = [one for one in inputs if not one.is_floating_point()]
    if len(ids) > 1 and input_embeddings(unwrap(model)) is not None:
        raise ValueError(
            f"inputs is a tuple of {len(inputs)}, of which {len(ids)} hold integers; expected one "
            "tensor of ids. Other arguments of the model go into additional_forward_args."
        )
    sizes = [one.shape[0] for one in inputs]
    if len(set(sizes)) != 1:
        shapes = [tuple(one.shape) for one in inputs]
        raise InputError(
            f"inputs holds tensors of shapes {shapes}; expected at least one, and the same number "
            "of examples in each (their first axis)."
        )


def as_ids(name: str, ids: Tensor, model: Any) -> Tensor:
    """Ids of any integer dtype in one that embeddings take; raises for what is no id."""
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"{name} is {ids.dtype}; expected token ids of an integer dtype.")
    if ids.dtype not in (torch.int32, torch.int64):
        ids = ids.long()
    size = getattr(input_embeddings(unwrap(model)), "num_embeddings", None)
    if size is not None and not (int(ids.min()) >= 0 and int(ids.max()) < size):
        raise InputError(
            f"{name} holds ids from {int(ids.min())} to {int(ids.max())}; the model's vocabulary "
            f"has ids 0 .. {size - 1}."
        )
    return ids


def _takes_embeddings(names: Sequence[str], inputs: tuple[Tensor, ...]) -> bool:
    floats = [one.dim() == 3 and one.is_floating_point() for one in inputs]
    return floats == [True] and "inputs_embeds" in names and names[0] != "inputs_embeds"


def usable(value: Any) -> Any:
    """``value``; of a tensor made under inference mode a copy that can take part in autograd."""
    if torch.is_tensor(value) and value.is_inference():
        with torch.inference_mode(False):
            return value.clone()
    return value


def _extra_arguments(
    forward_func: Callable[..., Any], tensors: tuple[Tensor, ...], extra: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # Captum's additional_forward_args, positional and by name. What a function of the user's own
    # takes is its own affair; what goes to a model is checked.
    inputs = tensors[0]
    if isinstance(extra, tuple) and len(extra) == 1 and isinstance(extra[0], dict):
        extra = extra[0]  # as Captum's wrappers pass a dict on
    positional: tuple[Any, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(extra, dict):
        named = dict(extra)
    else:
        positional = format_additional_forward_args(extra) or ()
    for value in (*positional, *named.values()):
        is_mask = torch.is_tensor(value) and value.dim() == 2 and not value.is_floating_point()
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
        if _takes_embeddings(names, tensors):
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
            f"{embeddings.shape[-1]}; those of the model are of width {width}."
        )
