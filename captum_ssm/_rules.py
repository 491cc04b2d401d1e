"""Rules for relevance on the nodes of an autograd graph: one rule per kind of node.

Linear operations conserve gradient times input. Everything else between two frozen mixers (MLPs,
experts and their routers, gates, soft caps, norms) is in the graph that autograd recorded,
whichever module computed it, so the rules are attached to the graph's nodes. The values of the
forward pass do not change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.nn import functional as F

from captum_ssm._in_place import COPY_SLICES, is_hidden, is_overwritten

Node = Any  # torch.autograd.graph.Node; its saved tensors have no static types
Rule = Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]]

# Coefficients: the results of these nodes are constants.
_CONSTANT = (
    "Exp",
    "Exp2",
    "Hardsigmoid",
    "Reciprocal",
    "Rsqrt",
    "SafeSoftmax",
    "Sigmoid",
    "SigmoidFunction",  # of flash-linear-attention
    "Softmax",
)
# Products, and which inputs are the factors: each gets half of the relevance if both depend on
# the tokens.
_ADDED = ("Addbmm", "Addcmul", "Addmm", "Addmv", "Addr", "Baddbmm")  # to the first input
_PLAIN = ("Bmm", "Convolution", "Dot", "Mm", "Mul", "Mv", "Vdot")
_PRODUCTS = dict.fromkeys(_ADDED, (1, 2)) | dict.fromkeys(_PLAIN, (0, 1))
# Activations, zero at zero: their argument times a constant.
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Hardswish": F.hardswish,
    "Mish": F.mish,
    "Silu": F.silu,
}

_FUSED_ACTIVATIONS = (
    "Gelu",
    "Glu",
    "SquaredReLUFunction",
    "SwiGLUFunction",
    "SwiGLULinearFunction",
    "SwishFunction",
)


_BATCH_NORMS = ("CudnnBatchNorm", "MiopenBatchNorm", "NativeBatchNorm")

# Neither linear, nor with a rule: their plain gradient is kept.
_WITHOUT_RULE = (
    *("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Cosh", "Cumprod", "Elu", "Erf"),
    *("Erfc", "Expm1", "Log", "Log10", "Log1P", "Log2", "LogSigmoid", "LogSoftmax", "Logsumexp"),
    *("Prod", "Sin", "Sinh", "Softplus", "Tan"),
    "torch::jit::(anonymous namespace)::DifferentiableGraph",  # of scripted functions
)
# Functions defined in Python that have one, that are linear, or whose module is replaced (norms,
# which also return the residual stream). Those of this library are linear, or obey the rules.
_FUNCTIONS = (
    *("LayerNormF", "RotaryEmbedding", "SquaredReLU", "SwiGLU", "Swish", "TokenShift"),
    *("CrossMerge", "CrossScan", "LocalReverse", "LocalScan"),  # of images, in several orders
)
_OURS = "GeneratedBackwardFor_captum_ssm_"


@contextmanager
def ruled(
    ends: Sequence[Node], starts: Sequence[Node], *, centered: bool = True
) -> Iterator[dict[Node, bool]]:
    """Attach the rules to the nodes between ``starts`` and ``ends``; gradients then obey them.

    Args:
        ends (sequence of Node): where gradients are put in.
        starts (sequence of Node): where they are read.
        centered (bool, optional): a norm subtracts the mean over channels on the way back too.
            Default: True

    Yields:
        dict: whether relevance goes on from a node to one of the starts, for each node visited.
    """
    rules, carries = _find_rules(ends, starts, centered)
    with ExitStack() as stack:
        # The user's own graph may share these nodes.
        for node, rule in rules:
            stack.callback(node.register_hook(rule).remove)
        yield carries


def _find_rules(
    ends: Sequence[Node], starts: Sequence[Node], centered: bool
) -> tuple[list[tuple[Node, Rule]], dict[Node, bool]]:
    visited, carries = _carrying(ends, starts)
    for node, carrying in visited:
        if carrying and _kind(node) == COPY_SLICES:
            is_hidden(node)  # raises, unless nothing more can be seen
    rules = [(node, _rule(node, carrying, centered)) for node, carrying in visited]
    return [(node, rule) for node, rule in rules if rule is not None], carries


def _carrying(
    ends: Sequence[Node], starts: Sequence[Node]
) -> tuple[list[tuple[Node, set[int]]], dict[Node, bool]]:
    # The nodes between, each with the inputs by which relevance goes on to a start.
    visited: list[tuple[Node, set[int]]] = []
    carries: dict[Node, bool] = dict.fromkeys(starts, True)
    stack = list(ends)
    while stack:
        node = stack[-1]
        children = [child for child, _ in node.next_functions]
        followed = {i: children[i] for i in _followed(node) if children[i] is not None}
        unvisited = [child for child in followed.values() if child not in carries]
        if node in carries:
            stack.pop()
        elif unvisited:
            stack.extend(unvisited)
        else:
            carrying = {i for i, child in followed.items() if carries[child]}
            carries[node] = bool(carrying)
            visited.append((node, carrying))
    return visited, carries


def goes_through_activation(end: Node, start: Node) -> bool:
    """Whether an activation, or a product of two signals, as in an MLP, lies between two nodes."""

    def bends(node: Node, carrying: set[int]) -> bool:
        kind = _kind(node)
        if kind in _PRODUCTS:
            return carrying.issuperset(_PRODUCTS[kind])
        return bool(carrying) and (kind in _ACTIVATIONS or kind in _FUSED_ACTIVATIONS)

    return any(bends(node, carrying) for node, carrying in _carrying([end], [start])[0])


def without_rule(carries: Mapping[Node, bool]) -> list[str]:
    """The functions that relevance goes through by their plain gradient, by name.

    Args:
        carries (dict): of :func:`ruled`, whose rules are still attached.
    """
    unknown = {_kind(node) for node, carry in carries.items() if carry and _is_unknown(node)}
    return sorted(
        "a function applied in place to a view" if x == COPY_SLICES else x for x in unknown
    )


def _is_unknown(node: Node) -> bool:
    kind, name = _kind(node), node.name()
    if kind == COPY_SLICES:
        return is_hidden(node)
    if not isinstance(node, BackwardCFunction):
        return kind in _WITHOUT_RULE
    defined_in = type(node)._forward_cls.__module__  # type: ignore[attr-defined]
    is_ours = name.startswith(_OURS) or defined_in.startswith("captum_ssm.")
    return not (is_ours or kind.startswith(_FUNCTIONS))


def mean_size(node: Node) -> int | None:
    """The channels over which a norm's node takes the mean that it subtracts; 0 for other nodes.

    None for a fused norm, which takes that of all.
    """
    kind = _kind(node)
    if kind == "NativeLayerNorm":
        return math.prod(node._saved_normalized_shape)
    if kind == "NativeGroupNorm":  # token by token
        return node._saved_C // node._saved_group if node._saved_HxW == 1 else 0
    if _is_mean_of_channels(node):
        return node._saved_self_sym_sizes[-1]
    return None if "LayerNorm" in kind else 0


def _is_mean_of_channels(node: Node) -> bool:
    if _kind(node) != "Mean" or not hasattr(node, "_saved_dim"):
        return False
    sizes = node._saved_self_sym_sizes
    return node._saved_keepdim and list(node._saved_dim) in ([2**64 - 1], [len(sizes) - 1])


def is_constant(x: Tensor) -> bool:
    """Whether no relevance goes on from a tensor, because what computed it counts as constant."""
    return x.grad_fn is not None and not _followed(x.grad_fn)


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm, by its class or its class's name."""
    return isinstance(module, nn.LayerNorm) or "norm" in type(module).__name__.lower()


def activation_factor(act: Callable[[Tensor], Tensor], psi: Tensor) -> Tensor:
    """The factor f with ``act(psi) = f * psi``, in the shape of psi: for SiLU the sigmoid.

    Near zero, where the quotient is not defined, it is the factor at 1e-4.

    Args:
        act (Callable): an activation with ``act(0) = 0``, such as SiLU, GELU or ReLU.
        psi (Tensor): its argument, of any shape.

    Examples::

        >>> psi = torch.randn(1, 7, 4)
        >>> factor = activation_factor(nn.functional.gelu, psi)
        >>> torch.testing.assert_close(factor * psi, nn.functional.gelu(psi))
    """
    if act is F.silu or isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation":
        return torch.sigmoid(psi)
    tiny = 1e-4
    safe = torch.where(psi.abs() < tiny, torch.full_like(psi, tiny), psi)
    return act(safe) / safe


def _kind(node: Node) -> str:
    # "SiluBackward0" to "Silu".
    return node.name().partition("Backward")[0]


def _followed(node: Node) -> Sequence[int]:
    # The inputs of a node that relevance can go to; the others are constants.
    kind, count = _kind(node), len(node.next_functions)
    if kind in _CONSTANT:
        return ()
    if kind == "Pow":
        exponent = node._saved_exponent
        if torch.is_tensor(exponent):  # the base may be a number, which is not an input
            return (0,) if count == 2 else ()
        return (0,) if exponent > 0 else ()
    if kind == "Div":  # a denominator
        return (0,)
    if kind == "Addcdiv":
        return (0, 1)
    if kind == COPY_SLICES and is_overwritten(node):
        return range(1, count)
    if kind.startswith("ScaledDotProduct"):  # attention's probabilities
        return (2,)
    return range(count)


def _rule(node: Node, carrying: set[int], centered: bool = True) -> Rule | None:
    # How to change the gradients of a node, given which of its inputs carry it on; None for a
    # linear or unknown node. Rules keep detached tensors: a rule that referred to its own node
    # would never be freed.
    kind, followed = _kind(node), _followed(node)
    if kind == "CheckpointFunction":
        raise ValueError(
            f"forward_func runs a part of the model under {node.name()}, which hides that part's "
            "graph; expected a forward_func without it, or with torch.utils.checkpoint, which is "
            "switched off during the run. Turn checkpointing off."
        )
    if kind == "Pow" and len(node.next_functions) == 2:
        return _power(node._saved_self.detach(), node._saved_exponent.detach())
    if len(followed) < len(node.next_functions):
        return lambda inner, outer: tuple(g if i in followed else None for i, g in enumerate(inner))
    if not carrying:
        return None
    if not centered and _is_mean_of_channels(node):
        return lambda inner, outer: (None,)
    if kind in _PRODUCTS:
        factors = _PRODUCTS[kind]
        return _times(0.5, factors) if carrying.issuperset(factors) else None
    if kind == "Pow":
        return _times(1 / node._saved_exponent, (0,))
    if kind in ("Sqrt", "Var"):  # x to the power of one half, and of two
        return _times(2 if kind == "Sqrt" else 0.5, (0,))
    if kind == "Glu":
        return _signal_of_glu(node._saved_dim)
    if kind == "NativeLayerNorm":
        return _norm(node, node._saved_result2, centered=centered)
    if kind == "NativeGroupNorm":
        return _group_norm(node, centered)
    if kind in _BATCH_NORMS:
        return _batch_norm(node, centered)
    if kind == "FusedRmsNorm":
        return _norm(node, node._saved_result1, centered=False)
    if kind == "LayerNormFn" and hasattr(node, "prenorm"):
        return _added_norm(node)
    # Fused functions of flash-linear-attention.
    if kind == "SquaredReLUFunction":
        return _times(0.5, (0,))
    if kind in ("SwiGLUFunction", "SwiGLULinearFunction"):
        return _swiglu(*node.saved_tensors[:2])
    factor = _factor(node, kind)
    return None if factor is None else lambda inner, outer: (outer[0] * factor, *inner[1:])


def _times(share: float, inputs: Sequence[int]) -> Rule:
    return lambda inner, outer: tuple(
        g * share if i in inputs and g is not None else g for i, g in enumerate(inner)
    )


def _power(base: Tensor, exponent: Tensor) -> Rule:
    # The base times a constant. With an exponent that is not positive, it is a denominator.
    def rule(inner: Sequence[Any], outer: Sequence[Any]) -> tuple[Any, ...]:
        if inner[0] is None:
            return (None, None)
        factor = torch.where(exponent > 0, base ** (exponent - 1), 0)
        return ((outer[0] * factor).sum_to_size(base.shape).to(base.dtype), None)

    return rule


def _factor(node: Node, kind: str) -> Tensor | None:
    # f(x) / x of an activation.
    if kind == "Tanh":
        # The node saves only its result. If that is rounded to one, use the largest argument whose
        # tanh is below one.
        y = node._saved_result.detach()
        size = y.abs().double().clamp(1e-4, 1 - torch.finfo(y.dtype).eps / 2)
        return (size / torch.atanh(size)).to(y.dtype)
    if kind == "SwishFunction":  # of flash-linear-attention
        return torch.sigmoid(node.saved_tensors[0].detach())
    act = _ACTIVATIONS.get(kind)
    if kind == "Gelu":
        act = partial(F.gelu, approximate=node._saved_approximate)
    return None if act is None else activation_factor(act, node._saved_self.detach())


def _signal_of_glu(dim: int) -> Rule:
    # The gate, a sigmoid of the second half, is a constant. A negative dim is saved unsigned.
    dim = dim - 2**64 if dim >= 2**63 else dim

    def rule(inner: Sequence[Any], outer: Sequence[Any]) -> tuple[Any, ...]:
        signal, gate = inner[0].chunk(2, dim)
        return (torch.cat([signal, torch.zeros_like(gate)], dim),)

    return rule


def _swiglu(gate: Tensor, signal: Tensor) -> Rule:
    # SiLU(gate) signal, with or without a linear layer after it: each factor gets half of the
    # relevance, which is the signal times its gradient.
    gate, signal = gate.detach(), signal.detach()
    ratio = signal / torch.where(gate.abs() < 1e-6, 1e-6, gate)

    def rule(inner: Sequence[Any], outer: Sequence[Any]) -> tuple[Any, ...]:
        half = 0.5 * inner[1]
        return (half * ratio, half, *inner[2:])

    return rule


def _norm(node: Node, scale: Tensor, centered: bool) -> Rule:
    # A norm is linear if its denominator, one over scale, is a constant.
    scale, weight = scale.detach(), node._saved_weight
    scale = scale if weight is None else scale * weight.detach()
    dims = tuple(range(-len(node._saved_normalized_shape), 0))

    def rule(inner: Sequence[Any], outer: Sequence[Any]) -> tuple[Any, ...]:
        return (_through_norm(outer[0], scale, dims, centered), *inner[1:])

    return rule


def _group_norm(node: Node, centered: bool) -> Rule:
    scale, weight, groups = node._saved_result2.detach(), node._saved_weight, node._saved_group

    def rule(inner: Sequence[Any], outer: Sequence[Any]) -> tuple[Any, ...]:
        given = outer[0].flatten(2) if outer[0].dim() > 2 else outer[0].unsqueeze(-1)  # (B, C, -1)
        if weight is not None:
            given = given * weight.detach()[:, None]
        parts = given.unflatten(1, (groups, -1))
        pulled = _through_norm(parts, scale[:, :, None, None], (2, 3), centered)
        return (pulled.reshape(outer[0].shape), *inner[1:])

    return rule


def _batch_norm(node: Node, centered: bool) -> Rule | None:
    # An instance norm is one too: each channel of each example is a channel, in training mode.
    training, weight = node._saved_training, node._saved_weight
    if training:
        scale = node._saved_result2.detach()
    elif _kind(node) == "NativeBatchNorm":
        # Linear, but PyTorch 2.13's own gradient of one example is wrong on a CPU where channels
        # are last in the gradient that comes in, as they are before tokens.
        scale = torch.rsqrt(node._saved_running_var.detach() + node._saved_eps)
    else:
        return None
    scale = scale if weight is None else scale * weight.detach()

    def rule(inner: Sequence[Any], outer: Sequence[Any]) -> tuple[Any, ...]:
        given = outer[0].transpose(1, -1)  # (B, ..., C)
        dims = tuple(range(given.dim() - 1))
        pulled = _through_norm(given, scale, dims, centered and training)
        return (pulled.transpose(1, -1).to(outer[0].dtype), *inner[1:])

    return rule


def _through_norm(given: Tensor, scale: Tensor, dims: tuple[int, ...], centered: bool) -> Tensor:
    # The gradient at the input of a norm with a constant scale.
    pulled = given * scale
    return pulled - pulled.mean(dims, keepdim=True) if centered else pulled


def _added_norm(node: Node) -> Rule | None:
    # mamba-ssm's fused norm of the sum of a layer's output and the residual.
    _, weight, bias, weight1, _, rowscale, _, _, rstd = node.saved_tensors
    if node.has_x1 or weight1 is not None or rowscale is not None:
        return None
    scale, centered = rstd.detach().unsqueeze(-1) * weight.detach(), not node.is_rms_norm
    prenorm, shape = node.prenorm, node.x_shape_og
    # Its tensor inputs: the layer's output, the weight, the bias if any, the residual if any.
    takes = (0, 2 if bias is None else 3) if node.has_residual else (0,)

    def rule(inner: Sequence[Any], outer: Sequence[Any]) -> tuple[Any, ...]:
        pulled = scale.new_zeros(shape)
        if outer[0] is not None:
            pulled = _through_norm(outer[0], scale.view(shape), (-1,), centered)
        if prenorm and outer[1] is not None:
            pulled = pulled + outer[1]
        return tuple(
            pulled.to(g.dtype) if i in takes and g is not None else g for i, g in enumerate(inner)
        )

    return rule
