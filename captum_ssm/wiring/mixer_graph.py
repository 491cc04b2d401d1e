"""The graph of one run, cut at its mixers, and what is known of the tokens that each is given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from captum_ssm.errors import UnsupportedModelError
from captum_ssm.graph.points import Point
from captum_ssm.graph.reachability import nodes_before, takes_steps
from captum_ssm.graph.segments import SegmentGraph
from captum_ssm.wiring.cuts import InputCut, RunCuts
from captum_ssm.wiring.inputs import InputMap, feature_axis, stem_of
from captum_ssm.wiring.token_order import Orders
from captum_ssm.wiring.wiring import INPUT, TokenMap, side_by_side

# Operations in which tokens act on one another, and which no measured transport may hide.
MIXERS = (
    "Softmax",
    "ScaledDotProduct",
    "CumSum",
    "Cumsum",
    "Rnn",
    "Lstm",
    "Gru",
    "Stack",
    "Unbind",
)
ADVICE = (
    "A map through the layers would be wrong. The maps of single layers are right all the same "
    "(captum_ssm.hidden_attention), and MambaLRP goes through the model's own graph: look at its "
    "convergence delta. Or register the module that mixes the tokens with "
    "captum_ssm.register_mixer."
)
_UNKNOWN = TokenMap(source=torch.empty(0))


class MixerGraph:
    """Where mixers are entered and left, what reads what, and in which orders.

    Mixers are numbered from 0 in forward order. The inputs are below zero, from INPUT down, and the
    output comes last.

    Args:
        cuts (RunCuts): with at least one port.
        output (Point, optional): what the model returned, if it depends on the mixers.
        batch (int): B.
        in_grid (bool): whether the way from the input does not have to be measured.

    Attributes:
        end (int): the number of the output.
        entries (dict of int to Point): the tokens that each mixer, and the output, is given; None
            where these depend on nothing that was recorded.
        exits (dict of int to Point): those that each mixer returned, and those of the inputs.
        reads (dict of int to set): what each reads, also by way of the residual stream.
        before (dict of int to frozenset): the mixers and inputs that each mixer depends on.
        direct (dict of int to frozenset): what each reads by way of no other mixer.
        groups (list of list of int): the mixers of each step.
        inputs (tuple of InputMap): how the entries of each input make up tokens.
        cut (SegmentGraph): what is read by way of no other mixer, or input.
        orders (Orders): in which order each is given the tokens, as far as it is known.
        links (dict): how each reads others, as far as it is known.
        step_of (dict): the step of each mixer, and each input for itself.
        grid_of (dict): by mixer and input, the first one whose tokens are the same.
    """

    def __init__(self, cuts: RunCuts, output: Point | None, batch: int, *, in_grid: bool) -> None:
        self.batch, self.end = batch, len(cuts.ports)
        self.names = [port.name for port in cuts.ports]
        self.exits = {i: port.exit for i, port in enumerate(cuts.ports)}
        self.entries = {i: port.entry for i, port in enumerate(cuts.ports)}
        self.entries[self.end] = output
        starts = {INPUT - k: start.point for k, start in cuts.starts.items()}
        self.cut = SegmentGraph(starts | self.exits)
        self.inputs = self._input_maps(cuts.starts)
        if not in_grid:
            self.exits |= {INPUT - k: input_map.leaf for k, input_map in enumerate(self.inputs)}
        self.reads = {i: {*self.read_by(i) & self.exits.keys()} for i in self.entries}
        self.before: dict[int, frozenset[int]] = {}
        self.direct = self._direct()
        self._refuse_lost()
        self.groups = side_by_side(self.direct)
        self.orders = Orders(batch)
        self.links: dict[tuple[int, int], TokenMap] = {}
        self.step_of = {i: i for i in self.exits if i < 0}
        self.step_of |= {i: s for s, group in enumerate(self.groups) for i in group}
        self.grid_of = {i: i for i in self.exits if i < 0}

    def _direct(self) -> dict[int, frozenset[int]]:
        # Without a graph the output comes from the mixers that nothing else reads.
        for i in self.entries:
            read = self.read_by(i)
            self.before[i] = read.union(*(self.before.get(j, ()) for j in read))
        direct = {i: self.nearest(read) for i, read in self.reads.items()}
        if not direct[self.end]:
            direct[self.end] = frozenset(range(self.end)).difference(*direct.values())
        return direct

    def nearest(self, read: Iterable[int]) -> frozenset[int]:
        """What is read, except what others among it are made of."""
        return frozenset(read).difference(*(self.before.get(j, ()) for j in read))

    def _input_maps(self, starts: dict[int, InputCut]) -> tuple[InputMap, ...]:
        if not starts or sorted(starts) != list(range(len(starts))):
            return ()
        maps = []
        for k, start in sorted(starts.items()):
            # Tokens that are made of it without another mixer between.
            read_by = ((root, self.read_by(i)) for i, root in self.entries.items())
            mine = [root for root, read in read_by if root and INPUT - k in read and max(read) < 0]
            leaf = start.point
            stem = None
            if start.embedded:
                mine = []
            elif mine and leaf.channels is not None:
                stem = stem_of(mine, leaf, self.batch)
                axis = feature_axis(mine[0] if stem is None else stem, leaf, self.batch)
                leaf = replace(leaf, channels=axis)
            maps.append(InputMap(leaf, start.values, tuple(mine), self.batch, stem))
        return tuple(maps)

    def _refuse_lost(self) -> None:
        lost = [i for i in range(self.end) if not self.direct[i]]
        if lost and any(i < 0 for read in self.direct.values() for i in read):
            tokens, first = (tuple(self.exits[i].shape[:-1]) for i in (lost[0], 0))
            calls = f"{tokens} in call {lost[0] + 1} of {self.end}, {first} in the first"
            raise UnsupportedModelError(
                f"{self.name(lost[0])} is given tokens that do not come from the input ({calls}), "
                "but from constants (a learned sequence, zeros, as in the branch without a "
                "condition of classifier-free guidance) or by a way that cannot be differentiated "
                "(generate(), torch.no_grad()), or from an argument that is not an input; expected "
                "a forward_func that runs the model once, on the inputs. Explain that argument too "
                "(inputs=(x, other)), give it the branch that reads the inputs, or use MambaLRP, "
                "which goes through the model's own graph."
            )

    def refuse_calls(self) -> None:
        """Raise where a mixer is run for each example, or changes the number of tokens."""
        calls = Counter(self.names)
        for i, name in enumerate(self.names):
            entry, exit = self.entries[i], self.exits[i]
            if entry is not None and entry.tokens != exit.tokens:
                raise UnsupportedModelError(
                    f"{name} is given {entry.tokens} tokens and returns {exit.tokens}, so that its "
                    "maps are not over the tokens of one sequence; expected a mixer that returns "
                    "one token for each. Register an adapter with captum_ssm.register_mixer."
                )
            if exit.shape[0] % self.batch != 0:
                raise UnsupportedModelError(
                    f"the model runs {name} on tokens {(*exit.shape,)}, {calls[name]} times for "
                    f"{self.batch} examples, and maps through the layers are of all at once; "
                    "explain one example at a time."
                )

    def name(self, i: int) -> str:
        """What i is called in messages."""
        if i < 0:
            return "the input" if len(self.inputs) == 1 else f"input {INPUT - i}"
        return self.names[i] if i < self.end else "the output"

    def tokens(self, i: int) -> int:
        """T, of one example, after a mixer or of an input."""
        return self.exits[i].tokens // self.batch

    def leaf(self, i: int) -> Point:
        """The tokens that a mixer returned, or those of an input."""
        return self.exits[i] if i >= 0 else self.inputs[INPUT - i].leaf

    @property
    def leaves(self) -> list[Point]:
        """The exits."""
        return list(self.exits.values())

    def leads(self, i: int) -> list[int]:
        """What i reads directly: of mixers side by side the first one."""
        direct = sorted(self.direct[i], reverse=True)
        return sorted({self.step_of[j]: j for j in direct}.values())

    def lead(self, i: int) -> int:
        """The first mixer side by side with one."""
        return next((group[0] for group in self.groups if i in group), i)

    def read_by(self, i: int) -> frozenset[int]:
        """The mixers and inputs, read by way of no other, whose sum is the stream given to i."""
        entry = self.entries.get(i)
        return frozenset() if entry is None else self.cut.read_by(entry.edge)

    def put(self, i: int) -> None:
        """Note whose tokens are those of i, a mixer whose links are known."""
        linked = [j for j in self.direct[i] if self.links.get((i, j), _UNKNOWN).keeps_positions]
        self.grid_of[i] = self.grid_of[linked[0]] if linked else self.grid_of.get(self.lead(i), i)

    def first(self, i: int) -> int:
        """The first of the mixers that work on the tokens of i."""
        return next((k for k in range(i + 1) if self.is_same_grid(k, i)), i)

    def is_same_grid(self, i: int, j: int) -> bool:
        """Whether the tokens of i are those of j, from one mixer to the next."""
        return self.grid_of[i] == self.grid_of[j]

    def order(self, i: int) -> Tensor:
        """Which of the model's tokens each token of a mixer, an input or the output is."""
        order, point = self.orders.get(i), self.exits.get(i) or self.entries[i]
        assert point is not None
        return torch.arange(point.tokens) if order is None else order

    def in_order(self, i: int, numbers: Tensor) -> Tensor:
        """Numbers of the tokens of i, as in :meth:`order`, in the model's order: ``(B, T)``."""
        flat = torch.empty_like(numbers.flatten())
        flat[self.order(i).to(flat.device)] = numbers.flatten()
        return flat.view(self.batch, -1)

    def windows(self, i: int) -> Tensor | None:
        """The order of one example's tokens in a mixer's windows, ``(W, l)``."""
        order, shape, T = self.orders.get(i), self.exits[i].shape, self.tokens(i)
        windows = shape[0] // self.batch if len(shape) == 3 else 1
        if order is None:
            return None if windows == 1 else torch.arange(T).view(windows, -1)
        local = self.orders.of_example(order, T, T)
        if local is None:
            raise UnsupportedModelError(
                f"{self.name(i)} is given the tokens of each example in an order of its own; "
                "explain one example at a time."
            )
        return local.view(windows, -1)

    def refuse_mixers(self, i: int, j: int) -> None:
        """Raise where tokens act on one another before i."""
        root = self.entries[i]
        if root is None:
            return
        ends = {leaf.edge.node for leaf in self.leaves}
        nodes = nodes_before([root.edge.node], ends) - ends
        kinds = sorted({node.name().partition("Backward")[0] for node in nodes})
        known = [kind for kind in kinds if kind.startswith(MIXERS)]
        if known or takes_steps(nodes):
            kind = (*known, "a loop over tokens")[0]
            raise self.refused(i, j, f"by an operation that is no known mixer ({kind})")

    def refused(self, i: int, j: int, how: str) -> UnsupportedModelError:
        """What is raised where tokens are mixed between j and i."""
        return UnsupportedModelError(
            f"between {self.name(j)} and {self.name(i)} tokens are mixed {how}. {ADVICE}"
        )
