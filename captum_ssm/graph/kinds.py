"""Kinds of nodes of an autograd graph, by what relevance does at them.

A kind is a node's name without ``Backward`` at its end: ``SiluBackward0`` is of the kind ``Silu``,
and ``SliceBackward0_copy`` of the kind ``Slice``.
A kind in none of these tables, nor in that of the rules, is a function without a rule.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from captum_ssm.graph.in_place import COPY_SLICES, is_hidden, is_overwritten

Node = Any  # torch.autograd.graph.Node; its saved tensors have no static types

# Coefficients: the results of these nodes are constants. Steps have no gradient either.
CONSTANT = frozenset(
    (
        *("Bernoulli", "Ceil", "Eq", "Exp", "Exp2", "Floor", "Ge", "Gt", "Hardsigmoid", "Le", "Lt"),
        *("MaskedSoftmax", "Ne", "Normal", "Reciprocal", "Round", "Rsqrt", "SafeSoftmax", "Sgn"),
        *("Sigmoid", "SigmoidFunction", "Sign", "Softmax", "SparseSoftmax", "Trunc"),
    )
)
# The inputs that relevance can go to, where the others are coefficients: denominators, matrices
# that are inverted, weights, logarithms, indices.
FOLLOWED = {
    **dict.fromkeys(("Addcdiv", "Lerp"), (0, 1)),
    **dict.fromkeys(("CholeskySolve", "Copysign", "Div", "GridSampler2D", "GridSampler3D"), (0,)),
    **dict.fromkeys(("Ldexp", "PreluKernel", "SpecialXlog1Py", "TriangularSolve", "Xlogy"), (0,)),
    **dict.fromkeys(("LinalgLuSolve", "LinalgSolveEx", "LinalgSolveTriangular"), (1,)),
    **dict.fromkeys(("CudnnAttention", "EfficientAttention", "FlashAttention"), (2,)),
}
# Their nodes save the result alone, which several complex arguments have.
OF_RESULT = ("Expm1", "Tanh")
# Products, and which inputs are the factors: those that depend on the tokens share the relevance.
PRODUCTS = {
    **dict.fromkeys(("Addbmm", "Addcmul", "Addmm", "Addmv", "Addr", "Baddbmm"), (1, 2)),
    **dict.fromkeys(("Bmm", "ConvTbc", "Convolution", "Dot", "GroupedMm", "LinalgCross"), (0, 1)),
    **dict.fromkeys(("Linear", "MkldnnLinear", "Mm", "Mul", "Mv", "Vdot"), (0, 1)),
    "Trilinear": (0, 1, 2),
}
# Sums that are not linear: the inputs whose product is one summand.
_SUMMANDS = {
    **dict.fromkeys(("Addbmm", "Addcdiv", "Addcmul", "Addmm", "Addmv"), ((0,), (1, 2))),
    **dict.fromkeys(("Addr", "Baddbmm"), ((0,), (1, 2))),
    "Lerp": ((0, 2), (1, 2)),
}
# Products with a matrix.
MATRICES = frozenset(PRODUCTS) - {"Addcmul", "LinalgCross", "Mul"}
# Gradient times input is the output: linear, or of degree one, such as a maximum or a norm; up to
# constants that the function itself puts, such as padding or a limit.
_LINEAR = """
    Abs Add Alias Amax Amin Aminmax AsStrided BlockDiag Cat Cdist ChannelShuffle
    Clamp ClampMax ClampMin Clone Coalesce Col2Im Complex Conj ConjPhysical ConstantPadNd
    Cummax Cummin Cumsum Deg2Rad DiagEmbed Diagonal DiagonalScatter Dist Embedding EmbeddingBag
    EuclideanDist Expand FftC2C FftC2R FftR2C Fill Flip Fmax Fmin Frexp FusedDropout Gather
    Hardshrink Hardtanh Hypot Im2Col Imag Index IndexAdd IndexCopy IndexFill IndexPut IndexReduce
    IndexSelect Kthvalue LazyClone LeakyRelu Lift LiftFresh LinalgVectorNorm MaskedFill
    MaskedScatter MaskedSelect Max Maximum Mean Median Min Minimum MkldnnReshape Mode NanToNum
    Nanmedian Nansum NarrowCopy NativeDropout Neg NegView Nextafter NllLoss NllLoss2D Norm Pdist
    Permute PinMemory PixelShuffle PixelUnshuffle Put Rad2Deg Real Relu Repeat
    ReshapeAlias ReshapeCopy Roll Rot90 RreluWithNoise Rsub Scatter ScatterAdd ScatterReduce
    SegmentReduce Select SelectScatter Slice SliceInverse SliceScatter Sort SparseSum Split
    SplitWithSizes Squeeze Stack Std StdMean Sub Sum T Take Threshold ToCopy ToDense ToMkldnn
    ToPaddedTensor ToSparse Topk Trace Transpose Tril Triu Unbind Unfold UnsafeIndex
    UnsafeIndexPut UnsafeMaskedIndex UnsafeMaskedIndexPutAccumulate UnsafeSplit
    UnsafeSplitWithSizes UnsafeView Unsqueeze Values View ViewAsComplex ViewAsReal Where Zero
    torch::autograd::AccumulateGrad torch::autograd::CopyBackwards torch::autograd::Gather
    torch::autograd::Scatter
"""
LINEAR = frozenset(_LINEAR.split())
_LINEAR_FAMILIES = (
    *("AdaptiveAvgPool", "AdaptiveMaxPool", "AvgPool", "FractionalMaxPool", "MaxPool", "MaxUnpool"),
    *("ReflectionPad", "ReplicationPad", "ScaledDotProduct", "Upsample"),
)
# Between two values: with a constant added to them, they are gates such as a sigmoid.
_BOUNDED = ("Atan", "Clamp", "Erf", "Hardtanh", "Tanh")
_LIMITS = ("Clamp", "Hardtanh")
_SUMS = ("Add", "Rsub", "Sub")

# Functions defined in Python that have a rule, that are linear, or whose module is replaced (norms,
# which also return the residual stream). Those of this library are linear, or obey the rules.
_FUNCTIONS = (
    *("LayerNormF", "RotaryEmbedding", "SquaredReLU", "SwiGLU", "Swish", "TokenShift"),
    *("CrossMerge", "CrossScan", "LocalReverse", "LocalScan"),  # of images, in several orders
    "GeneratedBackwardFor_transformers_grouped_mm_fallback",  # experts, without torch's grouped_mm
)
_OURS = "GeneratedBackwardFor_captum_ssm_"


def kind_of(node: Node) -> str:
    """The kind of a node."""
    return _kind(node.name())


@functools.cache
def _kind(name: str) -> str:
    return re.sub(r"(Backward)?\d*(_copy)?$", "", name)


def followed_by(node: Node) -> Sequence[int]:
    """The inputs of a node that relevance can go to; the others are constants."""
    kind, count = kind_of(node), len(node.next_functions)
    if kind in CONSTANT or getattr(node, "_saved_rounding_mode", None) is not None:
        return ()
    if kind in FOLLOWED:
        return FOLLOWED[kind]
    if kind == "Pow":
        exponent = node._saved_exponent
        if torch.is_tensor(exponent):  # the base may be a number, which is not an input
            return (0,) if count == 2 and bool((exponent.real > 0).any()) else ()
        return (0,) if exponent.real > 0 else ()
    if kind == COPY_SLICES and is_overwritten(node):
        return range(1, count)
    if kind.startswith("ScaledDotProduct"):  # attention's probabilities
        return (2,)
    return range(count)


def is_without_rule(node: Node, has_rule: Container[str]) -> bool:
    """Whether relevance goes through a node by its plain gradient, which may not conserve it."""
    kind, name = kind_of(node), node.name()
    if kind == COPY_SLICES:
        return is_hidden(node)
    if isinstance(node, BackwardCFunction):
        defined_in = type(node)._forward_cls.__module__  # type: ignore[attr-defined]
        is_ours = name.startswith(_OURS) or defined_in.startswith("captum_ssm.")
        return not (is_ours or kind.startswith(_FUNCTIONS))
    if getattr(node, "_saved_reduce", "") == "prod":
        return True
    if kind in OF_RESULT and node._saved_result.is_complex():
        return True
    known = kind in LINEAR or kind in PRODUCTS or kind in FOLLOWED or kind in has_rule
    return not (known or kind in CONSTANT or kind.startswith((*_LINEAR_FAMILIES, *_FUNCTIONS)))


def missing_in(node: Node, carries: Mapping[Node, bool]) -> set[str]:
    """The kinds of the coefficients that are summands, or parts, of a node's value.

    They are made of what carries relevance, which does not go on there.
    """
    if kind_of(node) == "Pow" and _is_partly_inverse(node._saved_exponent):
        return {"Pow"}
    alone = [(i,) for i in range(len(node.next_functions))]
    is_joined = kind_of(node) in LINEAR or kind_of(node) == COPY_SLICES
    kinds, seen = set[str](), set[Node]()
    for summand in alone if is_joined else _SUMMANDS.get(kind_of(node), ()):
        before = _inputs_in(node, summand)
        if not any(carries.get(child) for child, kind in before if kind is None):
            while before:
                child, kind = before.pop()
                if carries.get(child):
                    kinds.update(() if kind is None else (kind,))
                elif child not in seen:
                    seen.add(child)
                    further = _inputs_in(child, range(len(child.next_functions)))
                    before.extend((node, kind or stop) for node, stop in further)
    return kinds


def _is_partly_inverse(exponent: Any) -> bool:
    # Whether entries of a tensor are negative: those of the result are coefficients.
    return torch.is_tensor(exponent) and bool((exponent.real < 0).any())


def _inputs_in(node: Node, indices: Iterable[int]) -> list[tuple[Node, str | None]]:
    # Some inputs of a node, and its kind where relevance does not go on to them. Nothing is left
    # of what was overwritten.
    followed, inputs, kind = followed_by(node), node.next_functions, kind_of(node)
    indices = [i for i in indices if i in followed or kind != COPY_SLICES]
    return [
        (inputs[i][0], None if i in followed else kind) for i in indices if inputs[i][0] is not None
    ]


def is_gate(node: Node) -> bool:
    """Whether a factor is a bounded function and a constant, such as 1 + tanh(x): a coefficient.

    It is a sigmoid that is written in another way, as in a GELU or a hard swish that is written
    out. Else the constant's part of a product would be lost.
    """
    is_shifted = False
    while True:
        kind, inputs = kind_of(node), [n for n, _ in node.next_functions if n is not None]
        if kind in _BOUNDED:
            return is_shifted or (kind in _LIMITS and _adds_constant(inputs[0]))
        if len(inputs) != 1 or not (kind in LINEAR or kind in ("Div", "Mul")):
            return False
        is_shifted = is_shifted or _adds_constant(node)
        node = inputs[0]


def is_inverse(node: Node) -> bool:
    """Whether a value is a constant over another one, as that of a norm is over a token's size."""
    while kind_of(node) in LINEAR or kind_of(node) in ("Div", "Mul"):
        inputs = [child for child, _ in node.next_functions if child is not None]
        if kind_of(node) == "Div" and node.next_functions[0][0] is None:
            return True
        if len(inputs) != 1:
            return False
        node = inputs[0]
    return kind_of(node) in ("Pow", "Reciprocal", "Rsqrt") and not followed_by(node)


def _adds_constant(node: Node) -> bool:
    inputs = [child for child, _ in node.next_functions if child is not None]
    return kind_of(node) in _SUMS and len(inputs) == 1
