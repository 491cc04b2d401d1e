"""One explained example in a few numbers: which of its parts carry how much of the relevance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from captum_ssm.explanation.parts import END, LABEL, START, Example, Output
from captum_ssm.explanation.tables import shares, told_answer
from captum_ssm.explanation.units import bounds_of, read_apart, texts_of

TENTHS = 10
EXACT = 16  # positions up to this one are told apart; further ones share a bin, each twice as wide
WIDTH = 90  # characters of a text that is listed

# A part's share is what all of its tokens carry; a token's is its own.
SUMMED = ("part", "tenth", "layer")


@dataclass(frozen=True)
class ExampleFacts:
    """What a report tells of one example by itself.

    Args:
        index (int): its row of the data.
        name, text (str): the example's, shortened.
        target, prediction (str): what is explained, and the likeliest answers at its position.
        right (bool or None): whether they are the same; None where no target was given.
        probability (float or None): of the target; of several tokens, the product.
        length (int): tokens that are read.
        own (float): the reading token's share, which the other numbers leave out.
    """

    index: int
    name: str
    text: str
    target: str
    prediction: str
    right: bool | None
    probability: float | None
    length: int
    own: float

    @property
    def facts(self) -> dict[str, Any]:
        """These fields by name."""
        return {fact.name: getattr(self, fact.name) for fact in fields(ExampleFacts)}


@dataclass(frozen=True)
class Reading(ExampleFacts):
    """What is known of one example.

    Args:
        units (tuple of str): the texts of its units, as far as it is read.
        vector (numpy.ndarray): their shares, ``(units,)``.
        kinds (dict): by the kind of key: keys ``(K,)``, and ``(K, 4)``: the mean share of a token
            with it, the sum of their shares, the sum with signs, and how many they are.
    """

    units: tuple[str, ...]
    vector: np.ndarray
    kinds: dict[str, tuple[list[Any], np.ndarray]]


@dataclass
class _Sums:
    # Shares of tokens by what they have in common, summed over outputs.
    found: dict[str, dict[Any, np.ndarray]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(lambda: np.zeros(3)))
    )

    def add(self, kind: str, keys: list[Any], share: np.ndarray, signed: np.ndarray) -> None:
        for key, size, sign in zip(keys, share.tolist(), signed.tolist(), strict=True):
            entry = self.found[kind][key]
            entry[0] += size
            entry[1] += sign
            entry[2] += 1

    def over(self, outputs: int) -> dict[str, tuple[list[Any], np.ndarray]]:
        kinds = {}
        for kind, sums in self.found.items():
            total, signed, count = np.stack(list(sums.values())).T
            mean = total / (outputs if kind in SUMMED else count)
            numbers = [mean, total / outputs, signed / outputs, count / outputs]
            kinds[kind] = (list(sums), np.stack(numbers, axis=1))
        return kinds


def read(
    example: Example,
    method: str,
    index: int,
    units: str,
    label: str | None = None,
    is_asked: bool = False,
    reading_token: bool | None = None,
) -> Reading:
    """The reading of an example by one method.

    Args:
        example (Example): a text.
        method (str): the method's name.
        index (int): its row of the data.
        units (str): of the vector; tokens where the example does not have them.
        label (str, optional): the right answer, where that is not what is explained. Default: None
        is_asked (bool, optional): whether the target was given, so that the prediction may be
            wrong. Default: False
        reading_token (bool, optional): whether the token at which the answer is read counts; None
            as on the page. Default: None
    """
    units = units if units in example.units else "token"
    outputs = [output for output in example.outputs if _counts(output)]
    sums, vector, owns, lengths = _Sums(), np.zeros(0), [], []
    for output in outputs:
        values, apart = _values(example, method, output, reading_token)
        total = float(np.abs(values).sum()) or 1.0
        owns.append(0.0 if apart is None else abs(float(values[apart])) / total)
        counted = np.ones(len(values), dtype=bool)
        if apart is not None:
            counted[apart], values[apart] = False, 0.0
        lengths.append(len(values))
        at = output.reading_token
        share = shares(values)
        signed = share * np.sign(values)
        _add_positions(sums, share, signed, counted, len(values) - 1 if at is None else at)
        row = _add_units(sums, "token", example, values, counted)
        if units != "token":
            row = _add_units(sums, units, example, values, counted)
        for spans in ("span", "turn"):
            _add_parts(sums, spans, example, share, signed)
        _add_layers(sums, example, output)
        vector = row if not len(vector) else vector + row
    target, prediction, probability = _answers(example, outputs)
    read_units = sum(first < max(lengths) for first, _ in bounds_of(example, units))
    texts = tuple(texts_of(example, units)[:read_units])
    right = target == prediction if is_asked else None
    if label is not None:
        target, right = label, prediction == label
    return Reading(
        index, shortened(example.name), shortened(example.text), target, prediction, right,
        probability, max(lengths), float(np.mean(owns)), texts,
        (vector / len(outputs)).astype(np.float32)[:read_units], sums.over(len(outputs)),
    )  # fmt: skip


def shortened(text: str) -> str:
    """A text in one line, its end in view: that is what most answers follow."""
    line = " ".join(text.split())
    return line if len(line) <= WIDTH else "… " + line[2 - WIDTH :].partition(" ")[2]


def bin_of(number: int) -> int:
    """The bin of a position: itself up to 15, and the first of 16 .. 31, 32 .. 63 and so on."""
    size = abs(number)
    return number if size < EXACT else int(np.sign(number)) * 2 ** (size.bit_length() - 1)


def _counts(output: Output) -> bool:
    # A start and an end are told by the answer between them.
    return output.role not in (START, END) and output.answers[output.chosen].row is not None


def _values(
    example: Example, method: str, output: Output, reading_token: bool | None
) -> tuple[np.ndarray, int | None]:
    # What is read, and the token to leave out.
    row = output.answers[output.chosen].row
    assert row is not None
    values = np.array(example.relevance[method][row], dtype=np.float64)
    last = max(output.last_of(len(values)), int(np.flatnonzero(values)[-1]) if values.any() else 0)
    apart = None if reading_token else output.reading_token
    return values[: last + 1], read_apart(example, output) if reading_token is None else apart


def _add_positions(
    sums: _Sums, share: np.ndarray, signed: np.ndarray, counted: np.ndarray, at: int
) -> None:
    L, positions = len(share), np.flatnonzero(counted)
    for kind, keys in (
        ("start", positions),
        ("end", L - 1 - positions),
        ("distance", at - positions),
    ):
        sums.add(kind, [bin_of(int(k)) for k in keys], share[positions], signed[positions])
    # A token that reaches over the border of two tenths is divided between them.
    edges, borders = np.linspace(0, 1, L + 1), np.linspace(0, 1, TENTHS + 1)
    tenths = [
        np.diff(np.interp(borders, edges, np.concatenate([[0.0], part.cumsum()])))
        for part in (share, signed)
    ]
    sums.add("tenth", list(range(TENTHS)), *tenths)


def _add_units(
    sums: _Sums, units: str, example: Example, values: np.ndarray, counted: np.ndarray
) -> np.ndarray:
    # The shares of all units, zero for those that are not read.
    bounds = bounds_of(example, units)
    firsts = np.array([a for a, _ in bounds])
    padded = np.zeros(len(example.tokens))
    padded[: len(values)] = values
    summed = np.add.reduceat(padded, firsts)
    share = shares(summed)
    read = [i for i, (a, b) in enumerate(bounds) if counted[a:b].any()]
    keys = [text.strip() or text for text in texts_of(example, units)]
    picked = share[read]
    sums.add(units, [keys[i] for i in read], picked, picked * np.sign(summed[read]))
    return share


def _add_parts(
    sums: _Sums, units: str, example: Example, share: np.ndarray, signed: np.ndarray
) -> None:
    spans = [s for s in example.units.get(units, ()) if s.name and s.first < len(share)]
    pairs = [(share[s.first : s.end].sum(), signed[s.first : s.end].sum()) for s in spans]
    if pairs:
        sums.add("part", [s.name for s in spans], *np.array(pairs).T)


def _add_layers(sums: _Sums, example: Example, output: Output) -> None:
    # How much of what the layers' maps read of other tokens, at this position, each layer reads.
    if not example.maps or output.position is None:
        return
    layers = example.maps[0].layers
    rows = [np.abs(layer[output.position, : output.position]).sum() for layer in layers.values()]
    share = shares(np.array(rows, dtype=np.float64))
    sums.add("layer", list(layers), share, share)


def _answers(example: Example, outputs: list[Output]) -> tuple[str, str, float | None]:
    # A continuation of several tokens is told as a whole; labels of tokens by the first of them.
    told = outputs if outputs[0].role != LABEL else outputs[:1]
    after = [o for o in told if o.position is None or o.position >= example.prompt - 1]
    told = [o for o in after or told if o.part is None] or told
    answer = told_answer(told)
    target, prediction = (text.strip() or text for text in (answer.target, answer.prediction))
    return target, prediction, answer.probability


def rows_of_kind(readings: list[Reading], kind: str) -> Iterator[tuple[int, list[Any], np.ndarray]]:
    """Each reading that has this kind of keys: its index in the list, its keys, its numbers."""
    for k, reading in enumerate(readings):
        if kind in reading.kinds:
            yield k, *reading.kinds[kind]
