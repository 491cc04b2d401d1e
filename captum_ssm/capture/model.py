"""What counts as a model, and what a model says of itself."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from typing_extensions import TypeIs

from captum_ssm.errors import TargetError, UnsupportedModelError, brief
from captum_ssm.utils.integers import as_index, index_in
from captum_ssm.utils.signatures import signature

if TYPE_CHECKING:
    from nnsight import Envoy


def is_model(value: Any) -> bool:
    """Whether ``value`` is a torch module or an nnsight-wrapped one."""
    return isinstance(value, nn.Module) or is_wrapped(value)


def is_wrapped(value: Any) -> TypeIs[Envoy]:
    """Whether ``value`` is an nnsight model."""
    # Another thread may be importing it.
    envoy = getattr(sys.modules.get("nnsight.intervention.envoy"), "Envoy", None)
    return envoy is not None and isinstance(value, envoy)


def unwrap(model: nn.Module | Envoy) -> nn.Module:
    """The torch module inside a model that nnsight or torch.compile may have wrapped."""
    if is_wrapped(model):
        return model._module
    compiled = type(model).__name__ == "OptimizedModule"
    return model._modules.get("_orig_mod") or model if compiled else model


def resolve_model(forward_func: Any, model: Any) -> Any:
    """The module or nnsight model whose mixers are explained."""
    if model is not None:
        check_model(model)
        part, whole = unwrap(model), forward_func
        if isinstance(whole, nn.Module) and part is not unwrap(whole) and _path(part, whole):
            raise ValueError(
                f"model is {_told(part, whole)}, and forward_func the model that it is a part of; "
                "expected model only where forward_func is a function. A layer is an option of "
                "attribute: LaTIM(model).attribute(inputs, layer=layer)."
            )
        return model
    if is_model(forward_func):
        return forward_func
    raise ValueError(
        f"forward_func is a {type(forward_func).__name__}, not a torch module, so the "
        "model it runs is not known; pass it: Method(forward_func, model=model)."
    )


def with_owner(forward_func: Any, model: Any) -> tuple[Any, Any]:
    """``forward_func`` and the model that it runs: a method of a model is known to run that.

    A model's own ``forward`` is the model itself.

    Raises:
        TypeError: for ``generate``, which runs the model once for each token that it writes.
    """
    owner = getattr(forward_func, "__self__", None)
    if model is not None or isinstance(forward_func, nn.Module) or not is_model(owner):
        return forward_func, model
    name = getattr(forward_func, "__name__", "")
    if name == "forward":
        return owner, None
    if name == "generate":
        raise TypeError(
            f"forward_func is the generate of {type(owner).__name__}, which runs the model once "
            "for each token that it writes; expected the model. explain(model, tokenizer, text, "
            "max_new_tokens=40) explains what it writes."
        )
    return forward_func, owner


def check_model(model: Any) -> Any:
    """``model``, or a TypeError if it is no torch module."""
    if is_model(model):
        return model
    raise TypeError(
        f"model is {_kind(model)}; expected a torch.nn.Module or an nnsight-wrapped model."
    )


def mixer_index(layer: Any, model: nn.Module, paths: Sequence[str], told: str) -> int:
    """The index, from 0 on, of a mixer that is named by its path or its index, or is itself given.

    An index may be negative, from the end. ``told`` names it in the error: ``"layer is"``.

    Raises:
        ValueError: for a mixer that is not there.
    """
    count, what, inside = len(paths), brief(layer), list[str]()
    if isinstance(layer, nn.Module):
        what, layer = _told(layer, model), _path(layer, model)
        inside = [path for path in paths if path.startswith(f"{layer}.")]
    index = paths.index(layer) if layer in paths else index_in(layer, count)
    if index is None:
        shown = paths if count <= 8 else [*paths[:3], "..", paths[-1]]
        near = f" It holds the mixer {inside[0]}." if len(inside) == 1 else ""
        raise ValueError(
            f"{told} {what}; this model has {count} mixer{'s' * (count != 1)}: expected an index 0 "
            f".. {count - 1}, a mixer itself, or a path: {', '.join(shown)}.{near}"
        )
    return index


def _path(part: nn.Module, model: nn.Module) -> str | None:
    # Where a module is in a model: "" for the model itself, None where it is not in it.
    return {module: path for path, module in model.named_modules()}.get(part)


def _told(part: nn.Module, model: nn.Module) -> str:
    # A module in an error: its path and its class.
    path, kind = _path(part, model), type(part).__name__
    return f"a {kind} of another model" if path is None else f"{path or 'the model'}, a {kind}"


def listed_layers(layers: Any) -> list[Any]:
    """One or several layers, named by index, by path or by themselves, as a list."""
    is_several = isinstance(layers, Iterable) and not isinstance(layers, (str, nn.Module))
    return list(layers) if is_several and as_index(layers) is None else [layers]


def refuse_scripted(model: nn.Module) -> None:
    """Raise if a module of the model is compiled by TorchScript."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"{path or 'model'} is a torch.jit.ScriptModule, in which no graph can be read; "
                "expected modules of Python. Explain the model as it was before scripting; code "
                "that scripts by itself runs unscripted with PYTORCH_JIT=0 in the environment."
            )


def check_forward(forward_func: Any) -> None:
    """Raise unless ``forward_func`` is a model, or a function that may run one."""
    if isinstance(forward_func, type) or not (is_model(forward_func) or callable(forward_func)):
        raise TypeError(
            f"forward_func is {_kind(forward_func)}; expected a torch.nn.Module, an "
            "nnsight-wrapped model, or a function that runs one."
        )


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__} itself, not a model made of it"
    return f"a {type(value).__name__}"


def parameter_names(model: nn.Module) -> list[str]:
    """The names of the arguments of a model's ``forward``."""
    # The class has them: while a model is traced its modules carry another forward. A readout takes
    # the arguments of the model that it reads.
    model = getattr(model, "arguments_of", model)
    return list(signature(type(model).forward).parameters)[1:]


def input_embeddings(model: nn.Module) -> Any:
    """The embedding table of a language model, or None."""
    find = getattr(model, "get_input_embeddings", None)
    try:
        return find() if callable(find) else None
    except (AttributeError, NotImplementedError):
        return None


def extract_logits(output: Any) -> Tensor:
    """The tensor a model returns: itself, its ``logits``, or the first of floats that it holds.

    A loss, which has no axes, is passed over; without floats it is the first tensor.
    """
    if torch.is_tensor(output) and output.dim():
        return output
    is_dict = isinstance(output, Mapping)
    logits = output.get("logits") if is_dict else getattr(output, "logits", None)
    if torch.is_tensor(logits):
        return logits
    if is_dict or isinstance(output, (tuple, list)):
        values = output.values() if is_dict else output
        tensors = [value for value in values if torch.is_tensor(value) and value.dim()]
        if tensors:
            return next((x for x in tensors if x.is_floating_point()), tensors[0])
    kind = "tensor without axes" if torch.is_tensor(output) else type(output).__name__
    raise TypeError(
        f"forward_func returned a {kind}; expected a tensor of one row per example, a ModelOutput "
        "with logits, or a tuple whose first such tensor is explained."
    )


def is_hidden(output: Any) -> bool:
    """Whether the tensor that a model returns is its ``last_hidden_state``, which no head read."""
    return extract_logits(output) is getattr(output, "last_hidden_state", None)


def check_head(output: Any, target: Any) -> None:
    """Raise if a target of a language model names a token, and the model has no head.

    Raises:
        TargetError: for hidden states, whose entries are asked for by ``(position, feature)``.
    """
    if is_hidden(output):
        raise TargetError(
            f"the model returns hidden states of shape {tuple(extract_logits(output).shape)}, "
            f"whose last axis is features, not tokens, and target is {brief(target)}; expected the "
            "whole model with its head, such as a ...ForCausalLM or ...ForSequenceClassification, "
            "or (position, feature) for one number of the hidden states."
        )
