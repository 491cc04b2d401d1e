"""The rule of each kind of node: how to change its gradients so that relevance is conserved.

Rules keep detached tensors: a rule that referred to its own node would never be freed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.graph.kinds import PRODUCTS, Node, followed_by, kind_of

Rule = Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]]
NodeRule = Callable[[Node, bool], Rule | None]  # of a node, and whether norms are centered

# Functions whose nodes save their argument, by kind, and where they save parameters.
_OF_SELF: dict[str, tuple[Callable[..., Tensor], dict[str, str]]] = {
    "Asin": (torch.asin, {}),
    "Asinh": (torch.asinh, {}),
    "Atan": (torch.atan, {}),
    "Atanh": (torch.atanh, {}),
    "Clamp": (torch.clamp, {"min": "_saved_min", "max": "_saved_max"}),
    "ClampMax": (torch.clamp, {"max": "_saved_max"}),
    "ClampMin": (torch.clamp, {"min": "_saved_min"}),
    "Erf": (torch.erf, {}),
    "Erfinv": (torch.erfinv, {}),
    "Gelu": (F.gelu, {"approximate": "_saved_approximate"}),
    "Hardswish": (F.hardswish, {}),
    "Hardtanh": (torch.clamp, {"min": "_saved_min_val", "max": "_saved_max_val"}),
    "Log1P": (torch.log1p, {}),
    "Mish": (F.mish, {}),
    "Silu": (F.silu, {}),
    "Sin": (torch.sin, {}),
    "Sinh": (torch.sinh, {}),
    "Softshrink": (F.softshrink, {"lambd": "_saved_lambd"}),
    "SpecialEntr": (torch.special.entr, {}),
    "SpecialI1": (torch.special.i1, {}),
    "SpecialI1E": (torch.special.i1e, {}),
}


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


def rule_of(
    node: Node, carrying: Set[int], gates: Set[int] = frozenset(), *, centered: bool = True
) -> Rule | None:
    """How to change the gradients of a node; None for a linear node or one without a rule.

    Relevance goes on by the ``carrying`` inputs; of a product, ``gates`` are coefficients. If
    ``centered``, a norm subtracts the mean over channels on the way back too.
    """
    kind, followed = kind_of(node), followed_by(node)
    if kind == "Pow" and len(node.next_functions) == 2:
        return _power(node._saved_self.detach(), node._saved_exponent.detach())
    if len(followed) < len(node.next_functions):
        return _scaled({i: None for i in range(len(node.next_functions)) if i not in followed})
    if kind in PRODUCTS:
        return _product(carrying & set(PRODUCTS[kind]), gates)
    rule = RULES.get(kind)
    return rule(node, centered) if carrying and rule is not None else None


def is_mean_of_channels(node: Node) -> bool:
    """Whether a node takes the mean over the last axis and keeps the axis."""
    if kind_of(node) != "Mean" or not hasattr(node, "_saved_dim"):
        return False
    sizes = node._saved_self_sym_sizes
    return node._saved_keepdim and list(node._saved_dim) in ([2**64 - 1], [len(sizes) - 1])


def _mean(node: Node, centered: bool) -> Rule | None:
    # Norms subtract such means.
    return None if centered or not is_mean_of_channels(node) else lambda inner, outer: (None,)


def _scaled(shares: Mapping[int, complex | None]) -> Rule:
    # The gradients at some inputs times a number, or dropped.
    def scaled(gradient: Any, i: int) -> Any:
        if gradient is None or i not in shares:
            return gradient
        return None if shares[i] is None else gradient * shares[i]

    return lambda inner, outer: tuple(scaled(gradient, i) for i, gradient in enumerate(inner))


def _pulled(pull: Callable[[Tensor], Tensor]) -> Rule:
    # The gradient at the first input is made anew of that at the output.
    return lambda inner, outer: (pull(outer[0]), *inner[1:])


def _degree(degree_of: Callable[[Node], complex]) -> NodeRule:
    # Gradient times input of such a function is its degree times the output.
    return lambda node, centered: _scaled({0: 1 / degree_of(node).conjugate()})


def _product(factors: Set[int], gates: Set[int]) -> Rule | None:
    if len(factors) < 2:
        return None
    share = 1 / len(factors - gates)
    return _scaled({i: None if i in gates else share for i in factors})


def _power(base: Tensor, exponent: Tensor) -> Rule:
    # The base times a constant. With an exponent that is not positive, it is a denominator.
    def rule(inner: Sequence[Any], outer: Sequence[Any]) -> tuple[Any, ...]:
        if inner[0] is None:
            return (None, None)
        factor = torch.where(exponent.real > 0, base ** (exponent - 1), 0).conj()
        return ((outer[0] * factor).sum_to_size(base.shape).to(base.dtype), None)

    return rule


def _by_factor(factor_of: Callable[[Node], Tensor | None]) -> NodeRule:
    # An activation is its argument times a constant.
    def rule_of_node(node: Node, centered: bool) -> Rule | None:
        factor = factor_of(node)
        return None if factor is None else _pulled(lambda gradient: gradient * factor.conj())

    return rule_of_node


def _of_self(function: Callable[..., Tensor], saved: Mapping[str, str]) -> NodeRule:
    def factor(node: Node) -> Tensor | None:
        options = {name: getattr(node, where) for name, where in saved.items()}
        act, x = partial(function, **options) if options else function, node._saved_self.detach()
        # A limit that is not zero at zero puts a constant there; one that is computed is itself
        # what is put.
        is_put = any(limit is not None for limit, _ in node.next_functions[1:])
        is_put = is_put or (bool(options) and bool(act(x.new_zeros(x.shape)).any()))
        return None if is_put else activation_factor(act, x)

    return _by_factor(factor)


def _of_result(inverse: Callable[[Tensor], Tensor], y: Tensor, high: float | None) -> Tensor:
    # The factor of a function from its result, if the node saves only that. A result that is
    # rounded to its limit, -1 or ``high``, counts as the last one before it.
    wide, eps = y.double(), torch.finfo(y.dtype).eps / 2
    safe = torch.where(wide.abs() < 1e-4, 1e-4, wide)
    safe = safe.clamp(eps - 1, None if high is None else high - eps)
    return (safe / inverse(safe)).to(y.dtype)


def _of_saved_result(inverse: Callable[[Tensor], Tensor], high: float | None) -> NodeRule:
    def factor(node: Node) -> Tensor | None:
        y = node._saved_result.detach()
        return None if y.is_complex() else _of_result(inverse, y, high)

    return _by_factor(factor)


def _elu(node: Node) -> Tensor:
    # A node of one in place saves only its result.
    is_celu = kind_of(node) == "Celu"
    alpha, scale = node._saved_alpha, 1 if is_celu else node._saved_scale
    inner = 1 / alpha if is_celu else node._saved_input_scale
    if hasattr(node, "_saved_self"):
        x = node._saved_self.detach() * inner
        factor = activation_factor(torch.expm1, x)
        return torch.where(x > 0, scale, alpha * scale * inner * factor)
    y = node._saved_result.detach()
    factor = _of_result(torch.log1p, y.clamp(max=0) / (alpha * scale), None)
    return torch.where(y > 0, scale, alpha * scale * inner * factor)


def _glu(node: Node, centered: bool) -> Rule:
    # The gate, a sigmoid of the second half, is a constant. A negative dim is saved unsigned.
    dim = _signed(node._saved_dim)

    def rule(inner: Sequence[Any], outer: Sequence[Any]) -> tuple[Any, ...]:
        signal, gate = inner[0].chunk(2, dim)
        return (torch.cat([signal, torch.zeros_like(gate)], dim),)

    return rule


def _swiglu(node: Node, centered: bool) -> Rule:
    # SiLU(gate) signal, with or without a linear layer after it: each factor gets half of the
    # relevance, which is the signal times its gradient.
    gate, signal = (saved.detach() for saved in node.saved_tensors[:2])
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
    return _pulled(lambda gradient: _through_norm(gradient, scale, dims, centered))


def _layer_norm(node: Node, centered: bool) -> Rule:
    return _norm(node, node._saved_result2, centered)


def _rms_norm(node: Node, centered: bool) -> Rule:
    return _norm(node, node._saved_result1, False)


def _group_norm(node: Node, centered: bool) -> Rule:
    scale, weight, groups = node._saved_result2.detach(), node._saved_weight, node._saved_group

    def pull(gradient: Tensor) -> Tensor:
        flat = gradient.flatten(2) if gradient.dim() > 2 else gradient.unsqueeze(-1)  # (B, C, -1)
        if weight is not None:
            flat = flat * weight.detach()[:, None]
        parts = flat.unflatten(1, (groups, -1))
        pulled = _through_norm(parts, scale[:, :, None, None], (2, 3), centered)
        return pulled.reshape(gradient.shape)

    return _pulled(pull)


def _batch_norm(node: Node, centered: bool) -> Rule | None:
    # An instance norm is one too: each channel of each example is a channel, in training mode.
    training, weight = node._saved_training, node._saved_weight
    if training:
        scale = node._saved_result2.detach()
    elif kind_of(node) == "NativeBatchNorm":
        # Linear, but PyTorch 2.13's own gradient of one example is wrong on a CPU where channels
        # are last in the gradient that comes in, as they are before tokens.
        scale = torch.rsqrt(node._saved_running_var.detach() + node._saved_eps)
    else:
        return None
    scale = scale if weight is None else scale * weight.detach()

    def pull(gradient: Tensor) -> Tensor:
        transposed = gradient.transpose(1, -1)  # (B, ..., C)
        dims = tuple(range(transposed.dim() - 1))
        pulled = _through_norm(transposed, scale, dims, centered and training)
        return pulled.transpose(1, -1).to(gradient.dtype)

    return _pulled(pull)


def _through_norm(gradient: Tensor, scale: Tensor, dims: tuple[int, ...], centered: bool) -> Tensor:
    # The gradient at the input of a norm with a constant scale.
    pulled = gradient * scale
    return pulled - pulled.mean(dims, keepdim=True) if centered else pulled


def _added_norm(node: Node, centered: bool) -> Rule | None:
    # mamba-ssm's fused norm of the sum of a layer's output and the residual.
    if not hasattr(node, "prenorm"):
        return None
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


def _var_mean(node: Node, centered: bool) -> Rule:
    # Only the variance, the first result, is of degree two.
    x, dims, keeps = node._saved_self, node._saved_dim, node._saved_keepdim
    axes = [_signed(d) for d in dims or range(x.dim())]
    count, shape = math.prod(x.shape[d] for d in axes), x.shape

    def rule(inner: Sequence[Any], outer: Sequence[Any]) -> tuple[Any, ...]:
        if outer[1] is None:
            return (0.5 * inner[0],)
        mean = outer[1] / count
        for d in () if keeps else sorted(d % len(shape) for d in axes):
            mean = mean.unsqueeze(d)
        return (0.5 * (inner[0] + mean),)

    return rule


def _signed(dim: int) -> int:
    # Nodes save negative numbers of axes as unsigned ones.
    return dim - 2**64 if dim >= 2**63 else dim


# Functions that are zero at zero: their argument times a constant.
_ACTIVATIONS: dict[str, NodeRule] = {
    **{kind: _of_self(*how) for kind, how in _OF_SELF.items()},
    **dict.fromkeys(("Celu", "Elu"), _by_factor(_elu)),
    "Expm1": _of_saved_result(torch.log1p, None),
    "SwishFunction": _by_factor(lambda node: torch.sigmoid(node.saved_tensors[0].detach())),
    "Tanh": _of_saved_result(torch.atanh, 1),
}
# The rules of the other kinds, by kind. Fused functions are those of flash-linear-attention.
RULES: dict[str, NodeRule] = {
    **_ACTIVATIONS,
    **dict.fromkeys(("CudnnBatchNorm", "MiopenBatchNorm", "NativeBatchNorm"), _batch_norm),
    **dict.fromkeys(("SwiGLUFunction", "SwiGLULinearFunction"), _swiglu),
    **dict.fromkeys(("SquaredReLUFunction", "Var"), _degree(lambda node: 2)),
    "FusedRmsNorm": _rms_norm,
    "Glu": _glu,
    "LayerNormFn": _added_norm,
    "LinalgDet": _degree(lambda node: max(node._saved_A.shape[-1], 1)),
    "Mean": _mean,
    "NativeGroupNorm": _group_norm,
    "NativeLayerNorm": _layer_norm,
    "Pow": _degree(lambda node: node._saved_exponent),
    "Sqrt": _degree(lambda node: 0.5),
    "VarMean": _var_mean,
}
# Activations as in an MLP; tanh is a soft cap, and limits are hard ones.
BENDING = frozenset(
    (*_ACTIVATIONS, "Glu", "SquaredReLUFunction", "SwiGLUFunction", "SwiGLULinearFunction")
) - {"Clamp", "ClampMax", "ClampMin", "Hardtanh", "Tanh"}
