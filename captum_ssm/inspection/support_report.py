"""What is found out about a model, and how it is told."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from captum_ssm.errors import renamed
from captum_ssm.utils.tables import html_table, text_table


@dataclass(frozen=True)
class MixerSupport:
    """One visited mixer.

    Args:
        name (str): the module's path.
        kind (str): the module's class.
        known (str): how it is known: ``"registered"``, ``"measured"`` (its scans were recorded
            and proven) or ``"recognized"`` (by an adapter of another class, and proven).
        step (int): its step through the model.
        tokens (int): L.
        grid (tuple of int, optional): the patches of the input that they are, along each axis;
            None where they form no grid.
        order (str): in which it reads the model's tokens: ``"forward"``, ``"backward"``, both,
            ``"its own"``, a number of orders or of windows.
        maps (int): M, channels or heads with a map of their own.
        error (float): of its reconstruction, relative to the output. NaN if it failed.
        recurrence_error (float): the same, relative to what the recurrence adds.
        problem (str, optional): why it cannot be explained. Default: None
        neighbor_share (float, optional): the share of neighboring tokens in what its scan is given,
            by a token shift that no map shows. Default: 0.0

    Examples::

        >>> first = captum_ssm.supported(model, input_ids).mixers[0]
        >>> first.name, first.kind, first.order, first.maps
        ('backbone.layers.0.mixer', 'MambaMixer', 'forward', 32)
    """

    name: str
    kind: str
    known: str
    step: int
    tokens: int
    grid: tuple[int, ...] | None
    order: str
    maps: int
    error: float
    recurrence_error: float
    problem: str | None = None
    neighbor_share: float = 0.0

    if not TYPE_CHECKING:
        __getattr__ = renamed(exchanged="neighbor_share", stage="step")

    @property
    def finding(self) -> str:
        """How well it is reproduced, or why it cannot be explained."""
        if self.problem is not None:
            return self.problem
        if not self.neighbor_share:
            return f"{self.error:.0e}"
        share = f"up to {max(self.neighbor_share, 0.01):.0%} is read from neighbors before the scan"
        return f"{self.error:.0e}; {share}"

    @property
    def shown_tokens(self) -> str:
        """The tokens along each axis of their grid, such as ``"8 x 8"``, or their number."""
        return str(self.tokens) if self.grid is None else " x ".join(map(str, self.grid))


@dataclass(frozen=True)
class Support:
    """What of a model can be explained at one input. Print it.

    Args:
        mixers (list of MixerSupport): in forward order.
        between (str): what lies between them.
        methods (dict of str to str): by name, why it does not work; None where it does.
        held (float, optional): the share of what the score reads that the maps of the mixers hold;
            the rest goes around them, and only a rollout and MambaLRP follow it. Default: 1.0
        outside (dict of str to int, optional): the largest modules with weights that hold no mixer,
            counted by class. Default: ``{}``
        mixing (dict of str to int, optional): those of them in which tokens act on one another,
            which no map shows. Default: ``{}``
        target (Any, optional): what the methods were tried on. Default: None

    Examples::

        >>> captum_ssm.supported(model, input_ids).between
        'each token is processed by itself and keeps its position'
    """

    mixers: list[MixerSupport]
    between: str
    methods: dict[str, str | None]
    held: float = 1.0
    outside: Mapping[str, int] = field(default_factory=dict)
    mixing: Mapping[str, int] = field(default_factory=dict)
    target: Any = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        lines = [
            "Mixers are the layers in which tokens read from one another. Each acts as matrices",
            "of tokens by tokens (maps), one per channel or head. The error says how far these",
            "are from what the layer itself returned, relative to it:",
            *indented([_MIXERS, *self._grouped()]),
            *(line[0].upper() + line[1:] for line in self.surroundings),
        ]
        return "\n".join([*lines, "", "Methods, tried on this input:", *indented(self._tried())])

    def _tried(self) -> list[tuple[str, str]]:
        # What stands in the way of several methods is told once, before them.
        said = {None: "works", self.between: "does not work with what is between the mixers"}
        return [(name, said.get(why) or str(why)) for name, why in self.methods.items()]

    def _grouped(self) -> list[tuple[str, ...]]:
        # One row for all mixers that differ in their names and errors alone.
        groups: dict[tuple[str, ...], list[MixerSupport]] = {}
        for m in self.mixers:
            told = (m.kind, _KNOWN[m.known], m.shown_tokens, m.order, str(m.maps))
            groups.setdefault((*told, m.problem or ""), []).append(m)
        return [
            (shortened([m.name for m in group]), *told, max(group, key=lambda m: m.error).finding)
            for (*told, _), group in groups.items()
        ]

    def _repr_html_(self) -> str:
        # A notebook shows it for the value of a cell.
        around = "".join(f"<p>{html.escape(line)}</p>" for line in self.surroundings)
        return (
            html_table(("method", "on this model"), self._tried(), "What can be explained")
            + html_table(_MIXERS, self._grouped(), "Mixers, in forward order")
            + around
        )

    @property
    def surroundings(self) -> list[str]:
        """What lies outside of the mixers, and between them, as lines."""
        outside = Counter(self.outside) - Counter(self.mixing)
        lines = [f"other layers, each on one token at a time: {counted(outside)}"]
        if self.mixing:
            mixing = counted(self.mixing)
            lines.append(f"other layers in which tokens act on one another, in no map: {mixing}")
        return [*lines, f"between the mixers: {self.between}"]


_MIXERS = ("layers", "class", "known", "tokens", "order", "maps", "error")
_KNOWN = {
    "registered": "by its class",
    "recognized": "by its form",
    "measured": "measured on a run",
}


def indented(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of a table as lines, two spaces to the right."""
    return [f"  {line}" for line in text_table(rows)]


def shortened(paths: Sequence[str]) -> str:
    """Module paths that differ in one number as one: ``layers.{0-2, 4}.mixer``."""
    if len(paths) == 1:
        return paths[0]
    parts = [path.split(".") for path in paths]
    varying = [i for i, column in enumerate(zip(*parts, strict=False)) if len(set(column)) > 1]
    same_length = len({len(p) for p in parts}) == 1
    if not same_length or len(varying) != 1 or not all(p[varying[0]].isdigit() for p in parts):
        return f"{paths[0]} .. {paths[-1]}"
    at = varying[0]
    numbers = [int(p[at]) for p in parts]
    splits = np.flatnonzero(np.diff(numbers) != 1) + 1
    ends = [(run[0], run[-1]) for run in np.split(numbers, splits)]
    runs = [str(first) if first == last else f"{first}-{last}" for first, last in ends]
    shown = [*runs[:2], "..", runs[-1]] if len(runs) > 4 else runs
    return ".".join([*parts[0][:at], "{" + ", ".join(shown) + "}", *parts[0][at + 1 :]])


def counted(kinds: Mapping[str, int]) -> str:
    """Classes with their numbers, such as ``"Linear, 4 x LayerNorm"``."""
    return ", ".join(f"{n} x {kind}" if n > 1 else kind for kind, n in kinds.items()) or "nothing"
