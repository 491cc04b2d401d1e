"""What an explanation is made of: plain data, for people to keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from captum_ssm.explanation.pictures import Picture
from captum_ssm.explanation.replayed import Replay

# What an output is: what follows a token, or of the whole input; the label of the token itself;
# an answer that is a part of the text, and the tokens where that starts and ends; several tokens
# of a continuation, explained together.
ROLES = NEXT, LABEL, SPAN, START, END, PART = ("next", "label", "span", "start", "end", "part")
# What says which of its own words an answer rests on, where hops go through them.
THROUGH = RELEVANCE, SWAPS = ("relevance", "swaps")


@dataclass(frozen=True)
class Token:
    """A token of a text, with the part of the text that it stands for.

    Args:
        text (str): its part of the text as typed, with the white space before it: the texts of
            all tokens join to the whole text. A special token has its own name, such as ``<s>``.
        id (int): in the model's vocabulary.
        start, end (int): where ``text`` lies in the example's text. Equal for special tokens.
        read_as (str, optional): what the model reads in the place of a text that the tokenizer does
            not know, such as ``<unk>``. Default: None

    Examples::

        >>> explain(model, tokenizer, "w3 w4").examples[0].tokens[1]
        Token(text=' w4', id=4, start=2, end=5, read_as=None)
    """

    text: str
    id: int
    start: int
    end: int
    read_as: str | None = None


@dataclass(frozen=True)
class Span:
    """Neighboring tokens whose relevance is summed: a word, a sentence, or a named part.

    Args:
        name (str): of a part that was named, or ``""``.
        first, end (int): tokens ``first .. end - 1``.

    Examples::

        >>> explanation = explain(model, tokenizer, "w3 w4 w5", units={"both": (0, 5)})
        >>> explanation.examples[0].units["span"][0]
        Span(name='both', first=0, end=2)
    """

    name: str
    first: int
    end: int


@dataclass(frozen=True)
class Answer:
    """What the model may put out at one position, and how likely it is there.

    Args:
        text (str): the token's text, the class's label, or a part of the text.
        id (int): in the model's vocabulary, or the class. An answer that is a part of a text of L
            tokens, or of a continuation, has its first token times L plus its last one; a start or
            an end is a token.
        probability (float or None): by the model's softmax, or its sigmoid where several labels
            may hold; None for a number that is not a probability's logit, such as a
            forecast.
        logit (float): before it.
        rank (int): among all answers, from 1 on.
        row (int, optional): the row of relevance that explains it, if it is explained.
            Default: None

    Examples::

        >>> (output,) = explain(model, tokenizer, "w3 w4", target="w5").examples[0].outputs
        >>> output.answers[output.chosen].text, output.answers[output.chosen].row
        ('w5', 0)
    """

    text: str
    id: int
    probability: float | None
    logit: float
    rank: int
    row: int | None = None


@dataclass(frozen=True)
class Contrast:
    """An answer explained against another: the score of one minus that of the other.

    Args:
        answer, against (int): indices among the output's answers.
        row (int): the row of relevance that explains the difference.

    Examples::

        >>> explanation = explain(model, tokenizer, "w3 w4", target="w5", against="w6")
        >>> (contrast,) = explanation.examples[0].outputs[0].contrasts
        >>> explanation.examples[0].relevance["mamba-lrp"][contrast.row].shape
        (3,)
    """

    answer: int
    against: int
    row: int


@dataclass(frozen=True)
class Output:
    """One position at which the model puts something out.

    Args:
        position (int, optional): the token at which it is read; the answer follows it, or is its
            label. None where the output is of the whole text, of a part, or of an image.
        answers (tuple of Answer): the likeliest and the explained ones, by rank.
        chosen (int): the index of the answer that is explained first: the one in the text, or the
            target.
        contrasts (tuple of Contrast, optional): Default: ``()``
        lens (tuple of tuple of Answer, optional): the likeliest answers after each layer, by the
            model's own final norm and head (the logit lens). Default: ``()``
        role (str, optional): ``"next"``, or ``"label"`` for a token's own label; of an answer that
            is a part of the text ``"span"``, and ``"start"`` and ``"end"`` for where it does; of
            several tokens of a continuation that one row explains ``"part"``. Default: ``"next"``
        among (int, optional): how many answers the model chooses from. Default: None
        read_at (int, optional): the token from whose vector alone a model with one output for a
            whole text reads it: the last one, or one such as ``[CLS]``. None where that is not
            known, or all tokens are read. Default: None
        part (tuple, optional): the tokens ``(first, end)`` of a continuation, ``first .. end - 1``,
            that one row explains together. Default: None
        hops (tuple of int, optional): the rows of hop 1, 2, ...: relevance that the chosen answer's
            row, hop 0, has on tokens of the continuation is handed on to what these were written
            from. Default: ``()``
        through (str, optional): what says which tokens of the continuation hops go through,
            ``"relevance"``, or ``"swaps"`` of them. Default: ``"relevance"``

    Examples::

        >>> explanation = explain(model, tokenizer, "w3 w4", target="w5 w6", lens=True)
        >>> [output.position for output in explanation.examples[0].outputs]
        [1, 2]
        >>> len(explanation.examples[0].outputs[0].lens)  # layers
        2
    """

    position: int | None
    answers: tuple[Answer, ...]
    chosen: int
    contrasts: tuple[Contrast, ...] = ()
    lens: tuple[tuple[Answer, ...], ...] = ()
    role: str = NEXT
    among: int | None = None
    read_at: int | None = None
    part: tuple[int, int] | None = None
    hops: tuple[int, ...] = ()
    through: str = RELEVANCE

    def last_of(self, count: int) -> int:
        """The last of ``count`` tokens that the output may be read from."""
        if self.part is not None:
            return self.part[1] - 2
        return count - 1 if self.position is None else self.position

    @property
    def reading_token(self) -> int | None:
        """The one token at which the output is read, if it is one."""
        return self.read_at if self.position is None else self.position


@dataclass(frozen=True, eq=False)
class Maps:
    """One map per layer: which token reads how much of which.

    Args:
        name (str): what is drawn, such as "hidden attention".
        unit (str): of a value, such as "mean over channels".
        layers (dict): by the layer's name, ``(L, L)``, rows are queries.

    Examples::

        >>> (maps,) = explain(model, tokenizer, "w3 w4 w5", maps=True).examples[0].maps
        >>> {name: one.shape for name, one in maps.layers.items()}
        {'backbone.layers.0.mixer': (4, 4), 'backbone.layers.1.mixer': (4, 4)}
    """

    name: str
    unit: str
    layers: Mapping[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Validation:
    """How the explained score falls while parts of the input are removed, most relevant first.

    The method whose curve has the smallest area names best what the model reads. Random orders
    tell what any order would do. The token at which an answer is read is not removed.

    Args:
        score (str): what is on the curves, ``"logit"``: the mean over the example's outputs.
        removed (str): what a removed part becomes, such as "by <unk>".
        shares (tuple of float): S shares of the parts that are removed, ascending.
        curves (dict): by the name of the method, ``(S,)``.
        random (numpy.ndarray): ``(N, S)``, of N random orders.

    Examples::

        >>> validation = explain(model, tokenizer, "w3 w4 w5", validate=True).examples[0].validation
        >>> validation.winner, len(validation.curves["mamba-lrp"])
        ('mamba-lrp', 11)
    """

    score: str
    removed: str
    shares: tuple[float, ...]
    curves: Mapping[str, np.ndarray]
    random: np.ndarray

    @property
    def areas(self) -> dict[str, float]:
        """The mean height of each method's curve: the lower the better."""
        return {name: float(_area(curve, self.shares)) for name, curve in self.curves.items()}

    @property
    def random_area(self) -> float:
        """The mean height of the curves of random orders."""
        return float(_area(self.random, self.shares).mean())

    @property
    def winner(self) -> str:
        """The method with the smallest area."""
        areas = self.areas
        return min(areas, key=lambda name: areas[name])

    @property
    def falls(self) -> bool:
        """Whether the score falls at all, by a tenth, once everything is removed."""
        first, *_, last = self.random.mean(0)
        return bool(first - last > 0.1 * abs(first))

    @property
    def is_telling(self) -> bool:
        """Whether the winner's score falls faster than by four of five random orders."""
        return self.beaten(self.winner) >= 0.8 * len(self.random)

    def beaten(self, method: str) -> int:
        """How many of the random orders have a larger area than a method."""
        return int((_area(self.random, self.shares) > self.areas[method]).sum())

    def __str__(self) -> str:
        areas, N = self.areas, len(self.random)
        lines = [
            f"Mean {self.score} while the most relevant parts are replaced {self.removed} "
            "(the lower the better):",
            *(
                f"  {name:24} {areas[name]:+8.3f}   better than {self.beaten(name)} of {N} random"
                for name in sorted(areas, key=lambda name: areas[name])
            ),
            f"  {'random':24} {self.random_area:+8.3f}",
        ]
        return "\n".join(lines)


def _area(curve: np.ndarray, shares: tuple[float, ...]) -> np.ndarray:
    values, widths = np.asarray(curve, dtype=float), np.diff(shares)
    return ((values[..., 1:] + values[..., :-1]) / 2 * widths).sum(-1) / widths.sum()


@dataclass(frozen=True, eq=False)
class Example:
    """A text, image, video, series or row, what the model makes of it, and its relevance.

    Args:
        name (str): for lists of several examples.
        outputs (tuple of Output): in the text's order; an image has one.
        relevance (dict): by the name of the method, ``(R, L)`` float32, one row for each answer
            and contrast that is explained; ``(R, H, W)`` for an image,
            ``(R, T, H, W)`` for a video, ``(R, T, F)`` for a series, ``(R, F)`` for a row of a
            table.
        deltas (dict): by the name of the method, ``(R,)``: what it claims to add up to minus the
            relevance's sum, of methods that claim that: the score, or of Captum's methods the score
            minus that at their baseline.
        tokens (tuple of Token): L of them: the prompt, then the continuation (the target, or the
            token that the model predicts). Empty for an image.
        prompt (int): how many of the tokens are the prompt's.
        units (dict): by name (``"word"``, ``"sentence"``, ``"line"`` where there are several, or
            ``"span"`` for named parts), spans that cover all tokens in order.
        image (numpy.ndarray, optional): ``(H, W, 3)``, or a video's frames ``(T, H, W, 3)``, bytes.
            Default: None
        grid (tuple, optional): rows and columns of the image's patches; of a video also, in front,
            how many lie one after the other. Default: None
        maps (tuple of Maps, optional): Default: ``()``
        validation (Validation, optional): how the score falls while parts are removed.
            Default: None
        series (numpy.ndarray, optional): ``(T, F)`` float32, T time steps of F features, or
            ``(F,)``, a row of a table. Default: None
        features (tuple of str, optional): their names. Default: ``()``
        circuits (tuple of dict, optional): of some of the answers, which token read which other one
            in which layer: flow graphs, of the format ``captum_ssm.flow/1``, with the answer's text
            as ``"answer"``. Default: ``()``
        reasoning (tuple, optional): the tokens ``(first, end)`` of the continuation,
            ``first .. end - 1``, in which the model thinks before it answers. Default: None
        pictures (tuple of Picture, optional): which tokens of a text are images or sound, and where
            in the images they lie. Default: ``()``
        replay (Replay, optional): of a record of a served model how far its log probabilities are
            from those here. Default: None

    Examples::

        >>> example = explain(model, tokenizer, "w3 w4 w5", target="w6 w7").examples[0]
        >>> example.text, example.prompt
        ('w3 w4 w5 w6 w7', 3)
    """

    name: str
    outputs: tuple[Output, ...]
    relevance: Mapping[str, np.ndarray]
    deltas: Mapping[str, np.ndarray]
    tokens: tuple[Token, ...] = ()
    prompt: int = 0
    units: Mapping[str, tuple[Span, ...]] = field(default_factory=dict)
    image: np.ndarray | None = None
    grid: tuple[int, ...] | None = None
    maps: tuple[Maps, ...] = ()
    validation: Validation | None = None
    series: np.ndarray | None = None
    features: tuple[str, ...] = ()
    circuits: tuple[Mapping[str, Any], ...] = ()
    reasoning: tuple[int, int] | None = None
    replay: Replay | None = None
    pictures: tuple[Picture, ...] = ()

    @property
    def text(self) -> str:
        """The whole text, special tokens left out."""
        return "".join(token.text for token in self.tokens if token.end > token.start)


@dataclass(frozen=True)
class Method:
    """How relevance was computed.

    Args:
        name (str): as :func:`captum_ssm.attr.methods` names it, such as ``"mamba-lrp"``, or a name
            of Captum's method, such as ``"saliency"``.
        title (str): for people, such as ``"MambaLRP"``.
        note (str): one line on what it computes.
        adds_up (bool): whether its relevance sums to the score.
        options (dict): those it was given.

    Examples::

        >>> (method,) = explain(model, tokenizer, "w3 w4").methods
        >>> method.title, method.adds_up
        ('MambaLRP', True)
    """

    name: str
    title: str
    note: str
    adds_up: bool
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class ExplanationData:
    """What an :class:`Explanation` holds, for the modules that it is built on."""

    title: str
    model: str
    methods: tuple[Method, ...]
    examples: tuple[Example, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
