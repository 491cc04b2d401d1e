"""Operations of ``torch.ops.captum_ssm``, each described once, at its PyTorch form."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from captum_ssm.kernels.extension import NAMESPACE

Form = TypeVar("Form", bound=Callable[..., Any])
Gradients = Sequence[Tensor | None]


def operation(
    schema: str,
    container: type,
    *,
    fake: Callable[..., Any],
    backward: Callable[..., Gradients] | None = None,
) -> Callable[[Form], Form]:
    """Define an operation, and register the decorated function as its PyTorch form.

    The PyTorch form serves every backend; a compiled kernel registered for CPU or CUDA takes
    precedence. The schema lists the coefficients' tensors in the order of the ``container``'s
    fields; the three functions receive them as one ``container``.

    Args:
        schema (str): the operation's name and schema.
        container (type): the dataclass of the coefficients.
        fake (callable): an empty result of the right shape, for tracing.
        backward (callable, optional): the gradients of all arguments of the schema, in its order,
            from those of the results, all arguments, and a list of which gradients are needed; the
            others may be None. None computes them with the PyTorch form, run again in the backward
            pass. Either way the gradients are differentiable. Default: None
    """
    name = f"{NAMESPACE}::{schema[: schema.index('(')]}"
    torch.library.define(name, schema[schema.index("(") :])
    arguments = re.findall(r"(\w+)[,)]", schema[: schema.index("->")])
    of_container = {field.name for field in fields(container)}
    indices = [k for k, argument in enumerate(arguments) if argument in of_container]
    first, last = indices[0], indices[-1] + 1

    def gathered(args: Sequence[Any]) -> tuple[Any, ...]:
        return (*args[:first], container(*args[first:last]), *args[last:])

    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        # Where autograd has no gradient for a result, there is nothing to compute.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:last])
        ctx.constants = inputs[last:]

    def register(form: Form) -> Form:
        def gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
            needed = list(ctx.needs_input_grad)
            if all(g is None for g in grads):
                return (None,) * len(needed)
            args = [*ctx.saved_tensors, *ctx.constants]
            if backward is None:
                return tuple(_through(lambda *args: form(*gathered(args)), args, needed, grads))
            of_all = backward(*grads, *gathered(args), needed)
            return tuple(g if need else None for g, need in zip(of_all, needed, strict=True))

        def implementation(*args: Any) -> Any:
            # Results must not alias arguments, and must be contiguous like the kernels' own.
            results = form(*gathered(args))
            if isinstance(results, Tensor):
                return results.contiguous()
            return tuple(x.contiguous() for x in results)

        torch.library.impl(name, "CompositeExplicitAutograd")(implementation)
        torch.library.register_fake(name)(lambda *args: fake(*gathered(args)))
        torch.library.register_autograd(name, gradients, setup_context=setup_context)
        return form

    return register


def _through(
    function: Callable[..., Any], args: list[Any], needed: Sequence[bool], grads: Gradients
) -> Gradients:
    """The gradients of a differentiable function that is run again.

    They have a graph of their own if a second derivative is asked for.
    """
    again = torch.is_grad_enabled()
    wanted = [k for k, need in enumerate(needed) if need]
    with torch.enable_grad():
        for k in wanted:
            args[k] = args[k].view_as(args[k]) if again else args[k].detach().requires_grad_()
        results = function(*args)
        results = (results,) if isinstance(results, Tensor) else results
        known = [(y, g) for y, g in zip(results, grads, strict=True) if g is not None]
        pairs = [(y, g) for y, g in known if y.requires_grad]
        # One token alone does not depend on the rates: nothing came before it.
        gradients = torch.autograd.grad(
            [y for y, _ in pairs],
            [args[k] for k in wanted],
            [g for _, g in pairs],
            create_graph=again,
            allow_unused=True,
            materialize_grads=True,
        )
    by_position = dict(zip(wanted, gradients, strict=True))
    return [by_position.get(k) for k in range(len(args))]


def only_wanted(tensors: Sequence[Tensor | None], wanted: Sequence[bool]) -> tuple[Tensor, ...]:
    """The tensors that are wanted, an empty one in place of each other."""
    like = next(x for x in tensors if x is not None)
    return tuple(
        like.new_empty(0) if x is None or not want else x
        for x, want in zip(tensors, wanted, strict=True)
    )


def empty_like_wanted(
    tensors: Sequence[Tensor | None], wanted: Sequence[bool]
) -> tuple[Tensor, ...]:
    """Empty gradients of the arguments that are wanted, for tracing."""
    return only_wanted([None if x is None else x.new_empty(x.shape) for x in tensors], wanted)
