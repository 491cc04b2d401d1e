"""Operations of ``torch.ops.captum_ssm``, each described once, at its PyTorch form."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import Tensor

Form = TypeVar("Form", bound=Callable[..., Tensor])


def operation(
    schema: str,
    container: type,
    *,
    fake: Callable[..., Tensor],
    backward: Callable[..., Tensor] | None = None,
) -> Callable[[Form], Form]:
    """Define an operation, and register the decorated function as its PyTorch form.

    The PyTorch form serves every backend; a compiled kernel registered for CPU or CUDA takes
    precedence. The schema lists the coefficients' tensors in the order of the ``container``'s
    fields; the three functions receive them as one ``container``.

    Args:
        schema (str): the operation's name and schema.
        container (type): the dataclass of the coefficients.
        fake (callable): an empty result of the right shape, for tracing.
        backward (callable, optional): the gradient of the first argument, from that of the result
            and all arguments. All other gradients are computed with the PyTorch form, run again in
            the backward pass: they are rarely needed (the methods freeze the coefficients),
            so nothing is saved for them. Default: None
    """
    name = f"captum_ssm::{schema[: schema.index('(')]}"
    torch.library.define(name, schema[schema.index("(") :])
    arguments = re.findall(r"(\w+)[,)]", schema)
    of_container = {field.name for field in fields(container)}
    own = [k for k, argument in enumerate(arguments) if argument in of_container]
    first, last = own[0], own[-1] + 1

    def gathered(args: Sequence[Any]) -> tuple[Any, ...]:
        return (*args[:first], container(*args[first:last]), *args[last:])

    def setup_context(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:last])
        ctx.constants = inputs[last:]
        # A pass that does not reach the result asks for nothing, instead of the gradient of zeros.
        ctx.set_materialize_grads(False)

    def register(form: Form) -> Form:
        def gradients(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
            args = [*ctx.saved_tensors, *ctx.constants]
            needed = list(ctx.needs_input_grad)
            grads: list[Tensor | None] = [None] * len(args)
            if grad is None:
                return tuple(grads)
            if backward is not None and needed[0]:
                grads[0], needed[0] = backward(grad, *gathered(args)), False
            wanted = [k for k, need in enumerate(needed) if need]
            if wanted:
                with torch.enable_grad():
                    for k in wanted:
                        args[k] = args[k].detach().requires_grad_()
                    # One token alone does not depend on the rates: nothing came before it.
                    found = torch.autograd.grad(
                        form(*gathered(args)),
                        [args[k] for k in wanted],
                        grad,
                        allow_unused=True,
                        materialize_grads=True,
                    )
                for k, g in zip(wanted, found, strict=True):
                    grads[k] = g
            return tuple(grads)

        # Results must not alias arguments, and must be contiguous like the kernels' own.
        torch.library.impl(name, "CompositeExplicitAutograd")(
            lambda *args: form(*gathered(args)).contiguous()
        )
        torch.library.register_fake(name)(lambda *args: fake(*gathered(args)))
        torch.library.register_autograd(name, gradients, setup_context=setup_context)
        return form

    return register
