"""What is to be explained: a model, its input, its further arguments, and where it runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from captum_ssm.capture.arguments import check_names
from captum_ssm.capture.check_inputs import (
    INPUT_NAMES,
    check_inputs,
    check_together,
    extra_arguments,
    ids_explained,
    masks_explained,
    split_encoding,
    takes_embeddings,
    usable,
)
from captum_ssm.capture.model import (
    input_embeddings,
    is_model,
    parameter_names,
    resolve_model,
    unwrap,
)
from captum_ssm.capture.randomness import one_run
from captum_ssm.utils.captum_api import is_tuple
from captum_ssm.utils.nested import same_values, tensors_in

# As in nnsight: True is the server of its configuration, a str another one's address.
Remote: TypeAlias = bool | str


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
            InputError: for inputs of a wrong shape or without values, and for arguments that do
                not fit them.
            TypeError: for inputs or arguments of a wrong type or dtype.
        """
        model = resolve_model(forward_func, model)
        extra = additional_forward_args
        if is_model(forward_func) and isinstance(extra, dict):
            check_names(unwrap(forward_func), extra)
        parts = inputs if is_tuple(inputs) else (inputs,)
        if len(parts) == 1:
            forward_func = _taking_whole(forward_func, parts[0])
            only, extra = split_encoding(parts[0], extra)
            parts = (only,)
        tensors = tuple(usable(check_inputs(part, model)) for part in parts)
        check_together(tensors, model)
        positional, named = extra_arguments(forward_func, tensors, extra)
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
    def extra(self) -> Any:
        """The further arguments as ``attribute`` takes them in ``additional_forward_args``."""
        return self.named or self.positional or None

    @property
    def by_ids(self) -> bool:
        """Whether the (first) input is token ids."""
        return not self.inputs[0].is_floating_point()

    def has_others(self, count: int) -> bool:
        """Whether an argument besides the first input holds a sequence of so many tokens."""
        others = tensors_in((self.inputs[1:], self.positional, self.named))
        return any(x.dim() > 1 and x.shape[1] == count for x in others)

    def is_language_output(self, output: Tensor) -> bool:
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
        if model is not None and takes_embeddings(parameter_names(model), self.inputs):
            return True
        width = getattr(input_embeddings(self.module), "embedding_dim", None)
        return width == tensor.shape[-1]

    def has_variables(self, index: int) -> bool:
        """Whether an input is a series, whose variables share relevance by their gradients.

        The colors of a pixel share it by what they add to the tokens.
        """
        tensor = self.inputs[index]
        return tensor.is_floating_point() and tensor.dim() == 3 and not self.is_embedded(index)

    def run(
        self,
        inputs: tuple[Tensor, ...] | None = None,
        within: AbstractContextManager[Any] | None = None,
    ) -> Any:
        """What ``forward_func`` returns on the inputs, or on others in their place.

        Args:
            inputs (tuple of Tensor, optional): the others. Default: None
            within (context manager, optional): what ``forward_func`` alone runs in. Default: None
        """
        inputs = self.inputs if inputs is None else inputs
        request = replace(
            self,
            positional=tuple(map(_copied, self.positional)),
            named={name: _copied(value) for name, value in self.named.items()},
        )
        with one_run(self.module), ids_explained(self.module, inputs), within or nullcontext():
            if not is_model(self.forward_func):
                return self.forward_func(*inputs, *request.positional, **request.named)
            module = unwrap(self.forward_func)
            args, kwargs = request._module_arguments(module, inputs)
            with masks_explained(module, kwargs):
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

        return self.of_tokens(first, first + 32, slice(1))

    def of_tokens(self, first: int, stop: int, examples: slice = slice(None)) -> Request:
        """A request for tokens ``first .. stop - 1`` of a text, and for some of its examples.

        Arguments are cut where they have an axis of tokens.
        """
        text = self.inputs[0]

        def cut(value: Any) -> Any:
            if not torch.is_tensor(value) or value.dim() < 2 or value.shape[1] != text.shape[1]:
                return value
            return value[examples, first:stop]

        named = {name: cut(value) for name, value in self.named.items()}
        positional = tuple(map(cut, self.positional))
        return replace(self, inputs=(cut(text),), positional=positional, named=named)

    def same_as(self, other: Request) -> bool:
        """Whether another request runs the same function on equal inputs and arguments."""
        mine, theirs = (
            (request.inputs, request.positional, request.named) for request in (self, other)
        )
        return self.forward_func == other.forward_func and same_values(mine, theirs)

    def _module_arguments(
        self, module: nn.Module, inputs: tuple[Tensor, ...]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        named, names = dict(self.named), parameter_names(module)
        if "use_cache" in names[len(self.positional) + len(inputs) :]:
            # Nothing is generated here, and RWKV writes its cache in place, which no gradient
            # survives.
            named.setdefault("use_cache", False)
        if not takes_embeddings(names, inputs):
            return (*inputs, *self.positional), named
        # Embeddings go where a language model takes them, not where it takes ids.
        by_name = dict(zip(names[1:], self.positional, strict=False))
        return (), {"inputs_embeds": inputs[0], **by_name, **named}


@dataclass(frozen=True)
class _TakingWhole:
    # Gives a model the dict that its forward takes whole, of an input and arguments by name.
    model: nn.Module
    name: str

    def __call__(self, tensor: Tensor, **named: Any) -> Any:
        return self.model({self.name: tensor, **named})


def _taking_whole(forward_func: Callable[..., Any], inputs: Any) -> Callable[..., Any]:
    # A batch, as a tokenizer returns it, goes to a model whose forward takes one argument, whole.
    if not (isinstance(inputs, Mapping) and isinstance(forward_func, nn.Module)):
        return forward_func
    names = [name for name in INPUT_NAMES if name in inputs]
    is_one = len(parameter_names(forward_func)) == 1 < len(inputs)
    return _TakingWhole(forward_func, names[0]) if is_one and names else forward_func


def _copied(value: Any) -> Any:
    # An argument that a run may write into, such as a generation cache, or a list of states.
    if torch.is_tensor(value) or isinstance(value, nn.Module) or callable(value):
        return value
    try:
        return copy.deepcopy(value)
    except Exception:  # it holds what cannot be copied
        return value
