"""What lies between two points of an autograd graph: which token reads which, and how strongly.

A point is a tensor of tokens that a run left in its graph. Gradients put in at one point (the
root) and read at an earlier one (the leaf) say how the root's tokens depend on the leaf's. Where a
token is not read its gradient is exactly zero, in half precision too; this is what the measurements
here rest on. Tokens are all axes but that of the channels, flattened: the patches of an image, or
windows that lie in the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode

from captum_ssm._saved import Save, saving

Result = TypeVar("Result")

# Operations whose inputs are multiplied.
_FACTORS = ("Mul", "Div")
# Those that keep what they are given, as it is or in a sum.
_VIEWS = ("Clone", "ToCopy", "View", "Reshape", "Unsafe", "Transpose", "T0", "Permute")
_KEEPING = ("Add", *_VIEWS)


@dataclass(frozen=True, eq=False)
class Point:
    """A tensor of tokens in an autograd graph. It holds the graph, not the values.

    Args:
        edge (GradientEdge): where the tensor came from.
        shape (tuple of int): of the tensor.
        dtype (torch.dtype): of the tensor.
        device (torch.device): of the tensor.
        channels (int, optional): the axis of the channels; None where each entry is a token of
            its own. Default: -1
    """

    edge: GradientEdge
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    channels: int | None = -1

    @classmethod
    def of(cls, x: Tensor, channels: int | None = -1) -> Point:
        """The point of a tensor that requires a gradient."""
        return cls(get_gradient_edge(x), x.shape, x.dtype, x.device, channels)

    def before_move(self, channels: int) -> Point:
        """The point of what this is, where its channels were moved last from the axis given."""
        if channels == -1:
            return self
        ((node, output),) = self.edge.node.next_functions
        assert node is not None
        shape = list(self.shape)
        shape.insert(channels % len(shape), shape.pop())
        edge = GradientEdge(node, output)
        return replace(self, edge=edge, shape=tuple(shape), channels=channels)

    def is_at(self, other: Point) -> bool:
        """Whether the two are of one tensor, with its channels on the same axis."""
        axes = {
            None if point.channels is None else point.channels % len(point.shape)
            for point in (self, other)
        }
        here, there = self.edge, other.edge
        return here.node is there.node and here.output_nr == there.output_nr and len(axes) == 1

    @property
    def tokens(self) -> int:
        """T, the number of tokens in the whole batch."""
        return math.prod(self.shape) // self.width

    @property
    def width(self) -> int:
        """E, the number of channels."""
        return 1 if self.channels is None else self.shape[self.channels]

    def flat(self, x: Tensor) -> Tensor:
        """A tensor of this shape as ``(T, E)``."""
        if self.channels is None:
            return x.reshape(-1, 1)
        return x.movedim(self.channels, -1).reshape(-1, self.width)

    def unflat(self, x: Tensor) -> Tensor:
        """``x (T, E)`` in this point's shape."""
        if self.channels is None:
            return x.reshape(self.shape)
        moved = list(self.shape)
        moved.append(moved.pop(self.channels))
        return x.reshape(moved).movedim(-1, self.channels)

    def noise(self, generator: torch.Generator) -> Tensor:
        """Normal numbers ``(T, E)``, the same on every device; complex where the tensor is."""
        kind = torch.complex64 if self.dtype.is_complex else None
        x = torch.randn(self.tokens, self.width, generator=generator, dtype=kind)
        return x.to(self.device, self.dtype)

    def rank_one(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Normal numbers ``(T, 1)`` and ``(E,)``, whose products are as good as :meth:`noise`."""
        rows = torch.randn(self.tokens, 1, generator=generator)
        kind = torch.complex64 if self.dtype.is_complex else None
        columns = torch.randn(self.width, generator=generator, dtype=kind)
        return rows.to(self.device, self.dtype), columns.to(self.device, self.dtype)


def gradients(
    roots: Sequence[Point], seeds: Sequence[Tensor], leaves: Sequence[Point]
) -> list[Tensor | None]:
    """The gradients at ``leaves``, ``(T, E)`` each, of ``seeds (T, E)`` put in at ``roots``.

    None for a leaf that no root depends on. The graph is kept.
    """
    found = torch.autograd.grad(
        [root.edge for root in roots],
        [leaf.edge for leaf in leaves],
        [root.unflat(seed) for root, seed in zip(roots, seeds, strict=True)],
        retain_graph=True,
        allow_unused=True,
    )
    return [None if g is None else leaf.flat(g) for leaf, g in zip(leaves, found, strict=True)]


def visit_gradients(
    roots: Sequence[Point],
    seeds: Sequence[Callable[[], Tensor]],
    leaves: Sequence[Point],
    visit: Callable[[int, Tensor], None],
) -> None:
    """Show the gradients of :func:`gradients` one by one, each gone before the next is made.

    All seeds and gradients of a deep model on a long input take more memory than its graph. The
    graph is kept. ``visit`` takes the number of a leaf, which is not where the graph starts, and
    the gradient there, ``(T, E)``.
    """
    before = [
        GradientEdge(node, k)
        for leaf in leaves
        for node, k in leaf.edge.node.next_functions
        if node is not None
    ]
    nothing = [
        torch.zeros((), dtype=root.dtype, device=root.device).expand(root.shape) for root in roots
    ]

    def put(root: Point, seed: Callable[[], Tensor], gradient: Tensor | None) -> Tensor:
        added = root.unflat(seed())
        return added if gradient is None else gradient + added

    def look(i: int, leaf: Point, gradient: Tensor | None) -> Tensor | None:
        if gradient is not None:
            visit(i, leaf.flat(gradient))
        return gradient

    with ExitStack() as stack:
        for root, seed in zip(roots, seeds, strict=True):
            stack.enter_context(_passing(root.edge, partial(put, root, seed)))
        for i, leaf in enumerate(leaves):
            stack.enter_context(_passing(leaf.edge, partial(look, i, leaf)))
        torch.autograd.grad(
            [root.edge for root in roots], before, nothing, retain_graph=True, allow_unused=True
        )


@contextmanager
def closed(edges: Iterable[GradientEdge]) -> Iterator[None]:
    """No gradient passes these tensors meanwhile."""

    def close(gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else torch.zeros_like(gradient)

    with ExitStack() as stack:
        for edge in edges:
            stack.enter_context(_passing(edge, close))
        yield


@contextmanager
def _passing(
    edge: GradientEdge, change: Callable[[Tensor | None], Tensor | None]
) -> Iterator[None]:
    # What a tensor is given as its gradient goes through a function meanwhile.
    def prehook(given: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        k = edge.output_nr
        return (*given[:k], change(given[k]), *given[k + 1 :])

    hook = edge.node.register_prehook(prehook)
    try:
        yield
    finally:
        hook.remove()


def past_writes(run: Callable[[], Result]) -> Result:
    """What ``run()`` returns, also of a model that writes into what its gradient needs.

    Such a model is run once more, with copies of all that its graph keeps.
    """
    try:
        return run()
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise

    def copied(x: Tensor, save: Save) -> Callable[[], Tensor]:
        return save(x if isinstance(x, torch.nn.Parameter) else x.detach().clone())

    with saving(copied):
        return run()


class RankOneProducts(TorchDispatchMode):
    r"""Every matrix product :math:`A B` is :math:`(A a) (b^\top B)` with random vectors a and b.

    For a backward pass of which only the zeros matter: through MLPs it is little else than matrix
    products. No zero is new, with probability one: gradients are linear in each matrix
    :math:`a b^\top` between two factors, and what is zero for all matrices of rank one is zero for
    the identity, which is a sum of such. Zeros are lost where a product picks some of the rows that
    it sums over.
    """

    # Such as attention that PyTorch compiles.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Values that checkpointing computes once more have to be right.
        is_backward = func is torch.ops.aten.mm.default and not torch.is_grad_enabled()
        if not is_backward or any(type(x) is not Tensor for x in args):
            return func(*args, **(kwargs or {}))
        first, second = args
        a, b = torch.randn(2, len(second), generator=self.generator).to(first)
        return torch.outer(first @ (a / len(second) ** 0.5), b @ second)


class WithoutZeroKernels(TorchDispatchMode):
    """Convolutions with a kernel of zeros are not computed.

    PyTorch's second derivative of a convolution takes that of its weight too, asked for or not: as
    a convolution with the gradient that was put in as its kernel. Derivatives along directions put
    in zeros.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = args[1] if func in _CONVOLUTIONS else None
        if kernel is None or bool(kernel.any()):
            return func(*args, **(kwargs or {}))
        x, _, *rest = args
        shape = func(x.to("meta"), kernel.to("meta"), *rest, **(kwargs or {})).shape
        return x.new_zeros(shape)


_CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten._convolution.default)


def dependencies(roots: Sequence[Point | None], leaves: Sequence[Point]) -> list[frozenset[int]]:
    """The leaves that each root depends on, read off the graph without a backward pass.

    Leaves before another leaf count too. A root that is None depends on nothing.
    """
    bits = {leaf.edge.node: 1 << i for i, leaf in enumerate(leaves)}
    known: dict[Node, int] = {}
    _add_bits([root.edge.node for root in roots if root is not None], bits, known)
    return [
        frozenset() if root is None else frozenset(_members(known[root.edge.node]))
        for root in roots
    ]


def _add_bits(roots: Iterable[Node], bits: Mapping[Node, int], known: dict[Node, int]) -> None:
    # To what is known by node, for all nodes before the roots: the bits of those it depends on.
    for root in roots:
        stack = [root]
        before: dict[Node, list[Node]] = {}  # of the nodes on the stack: slow to ask for
        while stack:
            node = stack[-1]
            if node in known:
                stack.pop()
            elif node not in before:
                before[node] = [n for n, _ in node.next_functions if n is not None]
                stack.extend(n for n in before[node] if n not in known)
            else:
                stack.pop()
                found = bits.get(node, 0)
                for n in before.pop(node):
                    found |= known[n]
                known[node] = found


def _members(bits: int) -> Iterator[int]:
    return (i for i in range(bits.bit_length()) if bits >> i & 1)


def is_read_past(root: Point, leaf: Point, between: Point) -> bool:
    """Whether a root depends on a leaf by another way too than through a point between them."""
    return leaf.edge.node in nodes_before([root.edge.node], {between.edge.node})


@dataclass(frozen=True)
class Joints:
    """Where the graph before a root joins that before an earlier point, by no leaf.

    Args:
        stream (list of GradientEdge): before no other joint, and of no finer tokens than the point:
            the residual stream around a mixer whose tokens the point holds.
        past (list of GradientEdge): the others, by which something skips what leads to the point.
        leaves (frozenset of int): those that the root reads by no joint.
    """

    stream: list[GradientEdge]
    past: list[GradientEdge]
    leaves: frozenset[int]


class SegmentGraph:
    """A graph that is cut at its leaves: how its tensors read these by way of no other one.

    Args:
        leaves (mapping of int to Point): by name, where it is cut.
    """

    def __init__(self, leaves: Mapping[int, Point]) -> None:
        self._names = list(leaves)
        self._ends = {leaf.edge.node: 1 << k for k, leaf in enumerate(leaves.values())}
        self._known = dict(self._ends)

    def read_by(self, edge: GradientEdge) -> frozenset[int]:
        """The leaves that a tensor reads by way of no other."""
        return self._named(self._bits(edge))

    def joints(self, root: Point, entry: Point) -> Joints:
        """Where the graph before ``root`` joins that before ``entry``, an earlier point."""
        before = nodes_before([entry.edge.node], self._ends)
        found, direct = dict[GradientEdge, set[Node]](), 0
        for _, edge in edges_before(root.edge.node, self._ends, lambda one: one.node not in before):
            if edge.node in self._ends:
                direct |= self._ends[edge.node]
            elif edge.node in before and edge.node.next_functions:  # a parameter has none
                found[edge] = nodes_before([edge.node], self._ends)
        stream = [
            edge
            for edge in found
            if _times_finer(edge, entry.tokens) <= 1
            and not any(edge.node in known for o, known in found.items() if o.node is not edge.node)
        ]
        past = [edge for edge in found if edge not in stream]
        return Joints(stream, past, self._named(direct))

    def added(
        self, root: Point, passed: Collection[int], before: Collection[int], tokens: int | None
    ) -> frozenset[int]:
        """The leaves read by what is added, on the way to ``root``, to what comes of some leaves.

        Factors are not added: a gate is no residual stream. Nor are finer tokens, as those of a
        skip connection.

        Args:
            root (Point): after the leaves.
            passed (collection of int): the leaves on whose way it is added.
            before (collection of int): what is added reads no others.
            tokens (int, optional): T, those of the leaves passed, where there are finer ones.
        """
        found, others = 0, ~self._bits_of(before)
        for edge in self._sides(root, passed):
            read = self._bits(edge)
            if not read & others and (tokens is None or _times_finer(edge, tokens) < 2):
                found |= read
        return self._named(found)

    def is_added(self, root: Point, passed: Collection[int], point: Point) -> bool:
        """Whether a point itself is added, on the way to ``root``, to what comes of some leaves."""

        def keeps(edge: GradientEdge) -> bool:
            name = edge.node.name()
            is_scaled = name.startswith(_FACTORS) and len(list(_inputs(edge.node))) == 1
            return edge.node not in self._ends and (is_scaled or name.startswith(_KEEPING))

        def kept(edge: GradientEdge) -> Iterator[GradientEdge]:
            yield edge
            if keeps(edge):
                yield from (one for _, one in edges_before(edge.node, self._ends, keeps))

        at = point.edge.node, point.edge.output_nr
        kept_of = map(kept, self._sides(root, passed))
        return any((one.node, one.output_nr) == at for edges in kept_of for one in edges)

    def _sides(self, root: Point, passed: Collection[int]) -> Iterator[GradientEdge]:
        # What is added on the way from a root to some leaves, and does not come of them.
        through = self._bits_of(passed)

        def passes(edge: GradientEdge) -> bool:
            return self._bits(edge) & through != 0

        for node, edge in edges_before(root.edge.node, self._ends, passes):
            if not passes(edge) and not node.name().startswith(_FACTORS):
                yield edge

    def _bits(self, edge: GradientEdge) -> int:
        if edge.node not in self._known:
            _add_bits([edge.node], self._ends, self._known)
        return self._known[edge.node]

    def _bits_of(self, names: Collection[int]) -> int:
        return sum(1 << self._names.index(name) for name in names)

    def _named(self, bits: int) -> frozenset[int]:
        return frozenset(self._names[k] for k in _members(bits))


def meetings(roots: Sequence[Point], leaves: Sequence[Point]) -> Iterator[GradientEdge]:
    """The tensors that all ways from some roots to some leaves pass, the earliest first.

    The roots and the leaves themselves are left out.
    """
    ends = {leaf.edge.node for leaf in leaves}
    known = dict.fromkeys(ends, 1)
    _add_bits([root.edge.node for root in roots], {}, known)
    # Earlier ones first.
    nodes = [node for node, bits in known.items() if bits and node not in ends]
    ways: dict[Any, int] = dict.fromkeys(ends, 1)  # to the leaves
    for node in nodes:
        ways[node] = sum(ways.get(earlier, 0) for earlier, _ in node.next_functions)
    starts = [root.edge.node for root in roots if root.edge.node in ways]
    total = sum(ways[node] for node in starts)
    # From the roots, by node, and by which of the tensors that it returned: -1 to begin with.
    arriving = {node: dict[int, int]() for node in nodes}
    for node in starts:
        if node in arriving:
            arriving[node][-1] = 1 + arriving[node].get(-1, 0)
    for node in reversed(nodes):
        count = sum(arriving[node].values())
        for earlier, output in node.next_functions:
            if earlier is not None and earlier in arriving:
                arriving[earlier][output] = count + arriving[earlier].get(output, 0)
    for node in nodes:
        for output, count in arriving[node].items():
            # What as many ways pass as there are, all do.
            if output >= 0 and count * ways[node] == total:
                yield GradientEdge(node, output)


def edges_before(
    root: Node,
    ends: Collection[Node] = (),
    enters: Callable[[GradientEdge], bool] = lambda edge: True,
) -> Iterator[tuple[Node, GradientEdge]]:
    """The nodes from a root to the ends, each with each of its inputs.

    What is before an input is looked at only where the input is entered.
    """
    seen, stack = set(ends), [root]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for edge in _inputs(node):
            yield node, edge
            if enters(edge):
                stack.append(edge.node)


def _inputs(node: Node) -> Iterator[GradientEdge]:
    return (GradientEdge(n, output) for n, output in node.next_functions if n is not None)


def nodes_before(roots: Iterable[Node], ends: Collection[Node] = ()) -> set[Node]:
    """Some nodes and those that they depend on; the ends too, but not what is before these."""
    seen: set[Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            if node not in ends:
                stack.extend(n for n, _ in node.next_functions if n is not None)
    return seen


def _times_finer(edge: GradientEdge, tokens: int) -> float:
    # How many times as many tokens a tensor holds, channels being its second or last axis.
    shape = shape_of(edge)
    sizes = [math.prod(shape) / shape[axis] for axis in (1, -1) if len(shape) > 1]
    return min(sizes, default=math.inf) / tokens


def shape_of(edge: GradientEdge) -> tuple[int, ...]:
    """The shape of a tensor in the graph."""
    return tuple(edge.node._input_metadata[edge.output_nr].shape)


def readers(
    root: Point,
    leaf: Point,
    channels: Tensor | None = None,
    seed: int = 0,
    *,
    tokens: Tensor | None = None,
    labels: Tensor | None = None,
) -> Tensor | None:
    """The token of ``root`` that reads each token of ``leaf``, ``(T,)`` int64; -1 for none.

    None where several root tokens read one leaf token. Two backward passes: seeded with random
    vectors :math:`r_t`, then with :math:`c_t r_t` for known numbers :math:`c_t`, the gradient at a
    token that only root token t reads is multiplied by exactly :math:`c_t`. Where several read it,
    the two gradients are not parallel. Where that is not clear, and in half precision, where the
    factors are too coarse, it is :func:`readers_by_bits`.

    Args:
        root (Point): where gradients are put in.
        leaf (Point): where they are read.
        channels (Tensor, optional): the channels of the root to look at. Default: None
        seed (int, optional): of the random vectors. Default: 0
        tokens (Tensor, optional): the tokens of the root to look at. Default: None
        labels (Tensor, optional): a number below T for each token of the root, returned in its
            place; tokens with the same number count as one. Default: None
    """
    if min(torch.finfo(p.dtype).bits for p in (root, leaf)) < 32:
        return readers_by_bits(root, leaf, channels, seed=seed, tokens=tokens, labels=labels)
    T = root.tokens
    place = torch.arange(T, device=root.device) if labels is None else labels
    codes = (1 + place / T).to(root.dtype)[:, None]
    r = _noise_in(root, channels, tokens, seed)
    ((first,), (second,)) = (gradients([root], [s], [leaf]) for s in (r, r * codes))
    if first is None or second is None:
        return torch.full((leaf.tokens,), -1, device=leaf.device)
    found, is_clear = decoded(first, second, T)
    if found is not None and not is_clear:
        # Several readers, or gradients that are rounding: those through the norm of a multiple.
        return readers_by_bits(root, leaf, channels, seed=seed, tokens=tokens, labels=labels)
    return found


def decoded(first: Tensor, second: Tensor, count: int) -> tuple[Tensor | None, bool]:
    """The number k at each token whose second vector ``(E,)`` is its first times 1 + k / count.

    They are ``(T,)`` int64, -1 for a first vector of zeros; None where vectors are not parallel.
    And whether they are clear of rounding.
    """
    if first.is_complex():
        first, second = (torch.view_as_real(x).flatten(1) for x in (first, second))
    a, b = first.double(), second.double()
    size = a.square().sum(-1)
    ratio = (a * b).sum(-1) / size.clamp(min=1e-300)
    rest = (b - ratio[:, None] * a).norm(dim=-1) / size.sqrt().clamp(min=1e-150)
    if bool((rest > 0.01)[size > 1e-4 * size.amax()].any()):
        return None, False
    found = (ratio - 1) * count
    number = found.round()
    # Gradients so small that they are rounded may give any number, and infinite ones none.
    clear = ((found - number).abs() <= 0.25) & (rest <= 0.05 / count)
    clear &= (number >= 0) & (number < count)
    is_read = size != 0
    return torch.where(is_read & clear, number, -1).long(), bool((clear | ~is_read).all())


def readers_by_bits(
    root: Point,
    leaf: Point,
    channels: Tensor | None = None,
    *,
    by_channel: bool = False,
    seed: int = 0,
    tokens: Tensor | None = None,
    labels: Tensor | None = None,
) -> Tensor | None:
    """:func:`readers` from exact zeros alone, in 2 log2(T) passes: for half precision.

    With ``by_channel`` each channel of the leaf is looked at by itself, ``(T, E)``.
    """
    r = _noise_in(root, channels, tokens, seed)
    place = torch.arange(root.tokens, device=root.device) if labels is None else labels
    found: Tensor | None = None
    for bit in range(max(1, (root.tokens - 1).bit_length())):
        hits = []
        for value in (0, 1):
            chosen = ((place >> bit) & 1) == value
            (g,) = gradients([root], [r * chosen[:, None]], [leaf])
            if g is None:
                return torch.full((leaf.tokens,), -1, device=leaf.device)
            hits.append(g != 0 if by_channel else (g != 0).any(-1))
        if bool((hits[0] & hits[1]).any()):
            return None
        if found is None:
            found = torch.where(hits[0] | hits[1], 0, -1)
        found = torch.where(hits[1], found | (1 << bit), found)
    is_valid = found is not None and bool((found <= int(place.max())).all())
    return found if is_valid else None


@dataclass(frozen=True)
class Entries:
    """The entry of a root that reads each entry of a leaf, and the factor with which it does.

    Args:
        token (Tensor): ``(T, E)`` of the leaf, the token of the root; -1 for none.
        channel (Tensor): ``(T, E)``, its channel; -1 for none.
        factor (Tensor): ``(T, E)``, zero for none.
    """

    token: Tensor
    channel: Tensor
    factor: Tensor


def entries(root: Point, leaf: Point, *, where: Tensor | None = None) -> Entries | None:
    """The entries of ``root`` that read those of ``leaf``, where each is read by at most one.

    None where an entry is read by several. Four backward passes: seeded with ones, with a number
    for each token, with a number for each channel, and with random numbers as a proof.

    With ``where``, ``(T, E)`` bool, only some entries of the root are looked at.
    """
    T, E = root.tokens, root.width
    ones = torch.ones(T, E, dtype=root.dtype, device=root.device)
    if where is not None:
        ones = ones * where
    if root.is_at(leaf):
        token, channel = torch.meshgrid(
            *(torch.arange(n, device=root.device) for n in (T, E)), indexing="ij"
        )
        read = ones != 0
        return Entries(torch.where(read, token, -1), torch.where(read, channel, -1), ones.double())
    by_token = 1 + torch.arange(T, device=root.device)[:, None] / T
    by_channel = 1 + torch.arange(E, device=root.device) / E
    noise = root.noise(torch.Generator().manual_seed(0))
    found = []
    for seed in (ones, ones * by_token, ones * by_channel, ones * noise):
        (g,) = gradients([root], [seed.to(root.dtype)], [leaf])
        if g is None:
            nothing = torch.full((leaf.tokens, leaf.width), -1, device=leaf.device)
            return Entries(nothing, nothing, 0.0 * nothing)
        found.append(g.double())
    factor, tokens, channels, proof = found
    read = factor != 0
    safe = torch.where(read, factor, 1)
    token = ((tokens / safe - 1) * T).round().long().clamp(0, T - 1)
    channel = ((channels / safe - 1) * E).round().long().clamp(0, E - 1)
    expected = factor * noise.double()[token, channel]
    scale = factor.abs() * (1 + noise.double()[token, channel].abs())
    if bool((((proof - expected).abs() > 1e-3 * scale) & (read | (proof != 0))).any()):
        return None
    return Entries(torch.where(read, token, -1), torch.where(read, channel, -1), factor)


def is_closed(root: Tensor, given: Collection[Tensor], parameters: Collection[int]) -> bool:
    """Whether a tensor depends on some tensors, and else on nothing but some parameters."""
    ends = {(edge.node, edge.output_nr) for edge in map(get_gradient_edge, given)}
    stops = {node for node, _ in ends}
    start = get_gradient_edge(root).node
    for _, edge in edges_before(start, (), lambda edge: edge.node not in stops):
        leaf = getattr(edge.node, "variable", None)
        if edge.node in stops:
            if (edge.node, edge.output_nr) not in ends:
                return False
        elif leaf is not None and id(leaf) not in parameters:
            return False
    return True


def before_view(point: Point) -> Point | None:
    """What a tensor is a view or a copy of, its channels last; None where it is computed."""
    node = point.edge.node
    given = [GradientEdge(n, k) for n, k in node.next_functions if n is not None]
    if len(given) != 1 or not node.name().startswith(_VIEWS):
        return None
    return replace(point, edge=given[0], shape=shape_of(given[0]), channels=-1)


def _noise_in(root: Point, channels: Tensor | None, tokens: Tensor | None, seed: int) -> Tensor:
    r = root.noise(torch.Generator().manual_seed(seed))
    for axis, index in ((1, channels), (0, tokens)):
        if index is not None:
            kept = torch.zeros_like(r)
            kept.index_copy_(axis, index, r.index_select(axis, index))
            r = kept
    return r
