"""Explanations made by hand, for tests of the page and the page's benchmark: no model runs."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from captum_ssm.explanation import (
    Answer,
    Contrast,
    Example,
    Explanation,
    Maps,
    Method,
    Output,
    Span,
    Token,
    Validation,
)

STORY = "Anna has a red ball. Tom has a blue kite. Mia has a green cup. Anna's ball is"
CONTINUATION = " red. Tom's kite is blue."
METHODS = (
    Method("mamba-lrp", "MambaLRP", "gradient × input through the frozen operators", True),
    Method("raw-attention", "RawAttention", "hidden attention, mean over channels", False),
)
ALTERNATIVES = (" blue", " green", " pink", " black")


def tokens(text: str) -> tuple[Token, ...]:
    """Words with the space before them, and signs."""
    matches = re.finditer(r"\s*('?\w+|[^\w\s]|$)", text)
    return tuple(Token(m[0], len(m[0]), m.start(), m.end()) for m in matches if m[0])


def spans(pieces: tuple[Token, ...], starts: str, names: tuple[str, ...] = ()) -> tuple[Span, ...]:
    """Spans that begin with the first token, and with each whose text matches."""
    firsts = [k for k, token in enumerate(pieces) if not k or re.match(starts, token.text)]
    ends = [*firsts[1:], len(pieces)]
    names = names or ("",) * len(ends)
    return tuple(Span(*part) for part in zip(names, firsts, ends, strict=True))


def story(
    prompt: str = STORY, continuation: str = CONTINUATION, name: str = "Anna and Tom", seed: int = 0
) -> Example:
    """Each token of the continuation is explained; the first also against its alternatives."""
    rng = np.random.default_rng(seed)
    pieces = tokens(prompt + continuation)
    first = len(tokens(prompt))
    outputs, rows = [], []

    def row(position: int) -> int:
        values = rng.normal(0, 0.15, len(pieces)) ** 3
        values[position] = 3.0
        values[rng.integers(0, position)] = 2.5
        values[rng.integers(0, position)] = -1.0
        values[position + 1 :] = 0
        rows.append(values)
        return len(rows) - 1

    for position in range(first - 1, len(pieces) - 1):
        chosen = Answer(pieces[position + 1].text, 7, 0.9, 12.0, 1, row(position))
        others = [
            Answer(text, k, 0.05 / (k + 1), 6.0 - k, k + 2, row(position) if k < 2 else None)
            for k, text in enumerate(ALTERNATIVES)
        ]
        contrasts = (Contrast(0, 3, row(position)),) if position == first - 1 else ()
        lens = tuple(
            (Answer(chosen.text if k else " ball", 0, 0.3 + k * 0.3, 1.0, 1, None), *others[:3])
            for k in range(3)
        )
        outputs.append(Output(position, (chosen, *others), 0, contrasts, lens))
    relevance = np.stack(rows).astype(np.float32)
    size = min(len(pieces), 600)
    layers = {f"layer {k}": np.tril(rng.normal(size=(size, size))) ** 3 for k in range(3)}
    return Example(
        name=name,
        outputs=tuple(outputs),
        relevance={"mamba-lrp": relevance, "raw-attention": np.abs(relevance) * 1e-3},
        deltas={"mamba-lrp": np.full(len(rows), 0.25)},
        tokens=pieces,
        prompt=first,
        units={"word": spans(pieces, r"\s"), "sentence": spans(pieces, r"\s[A-Z]")},
        maps=(
            Maps("Hidden attention", "mean over channels", layers),
            Maps("LaTIM, l2", "length", {name: np.abs(layer) for name, layer in layers.items()}),
        ),
    )


def answer_at_once() -> Example:
    """The story, whose continuation one row explains, with two hops and a thought in front."""
    one = story()
    pieces, prompt = one.tokens, one.prompt
    L, part = len(pieces), (prompt + 2, len(pieces))
    text = "".join(token.text for token in pieces[part[0] :])
    R = len(one.relevance["mamba-lrp"])
    whole = Answer(text, part[0] * L + L - 1, None, 20.0, 1, R)
    output = Output(None, (whole,), 0, role="part", part=part, hops=(R + 1, R + 2))
    rows = np.random.default_rng(7).normal(0, 1, (3, L)).astype(np.float32)
    rows[:, L - 1] = 0
    return replace(
        one,
        outputs=(output, *one.outputs),
        relevance={name: np.concatenate([own, rows]) for name, own in one.relevance.items()},
        deltas={"mamba-lrp": np.full(R + 3, 0.25, np.float32)},
        maps=(),
        reasoning=(prompt, prompt + 2),
    )


def checked() -> Example:
    """The story, with a method whose order is better than all random ones, and one that is not."""
    shares = tuple(k / 10 for k in range(11))
    curves = {
        "mamba-lrp": np.array([6.0, 2.0, 1.0, *[0.0] * 8]),
        "raw-attention": np.linspace(6.0, 0.0, 11),
    }
    random = np.linspace(6.0, 0.0, 11) + np.linspace(-0.5, 0.5, 16)[:, None]
    return replace(story(), validation=Validation("logit", "by <unk>", shares, curves, random))


def many_curves(count: int = 9) -> Explanation:
    """The story by so many methods, whose curves of removal lie close together."""
    one = story()
    methods = tuple(Method(f"m{k}", f"Method {k}", "by hand", False) for k in range(count))
    steps = np.linspace(0, 1, 11)
    curves = {m.name: 6 * (1 - steps) ** (1.5 + 0.25 * k) for k, m in enumerate(methods)}
    random = np.outer(np.linspace(0.9, 1.1, 8), 6 * (1 - steps))
    check = Validation("logit", "by <unk>", tuple(steps.tolist()), curves, random)
    relevance = {m.name: one.relevance["mamba-lrp"] for m in methods}
    return replace(
        explanation(replace(one, relevance=relevance, deltas={}, validation=check)), methods=methods
    )


def picture(name: str = "A five") -> Example:
    """An image of 4 × 4 patches with three classes, one of them not explained."""
    rng = np.random.default_rng(1)
    y, x = np.mgrid[:32, :32]
    shade = 255 * np.exp(-((np.hypot(x - 16, y - 16) - 9) ** 2) / 8)
    image = np.stack([shade, shade * 0.9, 40 + 0 * shade], axis=-1).astype(np.uint8)
    patches = rng.normal(0, 1, (2, 4, 4))
    relevance = np.kron(patches, np.ones((8, 8))).astype(np.float32) / 64
    answers = (
        Answer("five", 5, 0.8, 4.0, 1, 0),
        Answer("six", 6, 0.15, 2.0, 2, 1),
        Answer("eight", 8, 0.01, 0.0, 3, None),
    )
    return Example(
        name=name,
        outputs=(Output(None, answers, 0),),
        relevance={"mamba-lrp": relevance, "raw-attention": np.abs(relevance)},
        deltas={"mamba-lrp": np.zeros(2)},
        image=image,
        grid=(4, 4),
    )


def film(name: str = "A clip") -> Example:
    """Six frames of 32 × 32 in patches of two frames and 8 × 8; one patch decides."""
    rng = np.random.default_rng(6)
    frames = rng.integers(0, 256, (6, 32, 32, 3)).astype(np.uint8)
    patches = rng.normal(0, 0.01, (2, 3, 4, 4)).astype(np.float32)
    patches[:, 1, 2, 3] = 2.0
    relevance = np.kron(patches, np.ones((1, 2, 8, 8))).astype(np.float32) / 128
    return replace(picture(name), relevance=_methods(relevance), image=frames, grid=(3, 4, 4))


def series(name: str = "load") -> Example:
    """A forecast from 48 time steps of three features; one of them decides, at one step."""
    rng = np.random.default_rng(4)
    values = rng.normal(size=(48, 3)).cumsum(0).astype(np.float32)
    relevance = rng.normal(0, 0.01, (1, 48, 3)).astype(np.float32)
    relevance[0, 30, 1], relevance[0, 12, 2] = 2.0, -1.0
    answer = Answer("load, 2 ahead", 4, None, 1.5, 1, 0)
    return Example(
        name=name,
        outputs=(Output(None, (answer,), 0),),
        relevance={"mamba-lrp": relevance, "raw-attention": np.abs(relevance)},
        deltas={"mamba-lrp": np.full(1, 0.5)},
        series=values,
        features=("wind", "load", "price"),
    )


def long_series(steps: int = 3000, features: int = 20) -> Example:
    """More steps than a screen has pixels; two steps of one feature decide."""
    rng = np.random.default_rng(5)
    values = rng.normal(size=(steps, features)).cumsum(0).astype(np.float32)
    relevance = rng.normal(0, 0.001, (1, steps, features)).astype(np.float32)
    relevance[0, 1501, 7], relevance[0, 1500, 7] = 2.0, -1.0
    names = tuple(f"a sensor with a long name, number {k}" for k in range(features))
    return replace(series("long"), relevance=_methods(relevance), series=values, features=names)


def row() -> Example:
    """A row of a table of five features, of which one decides."""
    relevance = np.array([[0.25, -2.0, 0.0, 0.5, 0.125]], dtype=np.float32)
    values = np.array([39, 1.5, 0, -3, 12345], dtype=np.float32)
    names = ("age", "rate", "none", "change", "income")
    return replace(series("row 1"), relevance=_methods(relevance), series=values, features=names)


def _methods(relevance: np.ndarray) -> dict[str, np.ndarray]:
    return {"mamba-lrp": relevance, "raw-attention": np.abs(relevance)}


def classes(name: str = "A review") -> Example:
    """A text of one of three classes, explained by itself and against another one."""
    answers = (
        Answer("positive", 2, 0.8, 4.0, 1, 0),
        Answer("mixed", 1, 0.15, 2.0, 2, 1),
        Answer("negative", 0, 0.01, 0.0, 3, None),
    )
    return _labeled(name, (Output(None, answers, 0, (Contrast(0, 1, 2),)),), 3)


def read_from(sign: str) -> Example:
    """The classes of a text, read from the first token with this text."""
    one = classes()
    at = next(k for k, token in enumerate(one.tokens) if token.text.strip() == sign)
    return replace(one, outputs=(replace(one.outputs[0], read_at=at),))


def tags(name: str = "Names") -> Example:
    """A label of each token: all but two tokens are no name."""
    pieces = tokens(STORY)
    outputs = []
    for k, piece in enumerate(pieces):
        label = "PERSON" if piece.text.strip() in ("Tom", "Mia") else "O"
        answers = (Answer(label, k % 2, 0.9, 3.0, 1, k), Answer("THING", 2, 0.1, 1.0, 2))
        outputs.append(Output(k, answers, 0, role="label"))
    return _labeled(name, tuple(outputs), len(outputs))


def places(name: str = "A question") -> Example:
    """The answer to a question, "a blue kite", with its start and its end."""
    L = len(tokens(STORY))
    whole = (
        Answer("a blue kite", 8 * L + 10, 0.6, 5.0, 1, 0),
        Answer("a red ball", 2 * L + 4, 0.1, 3.0, 2, 1),
    )
    start, end = Answer("a", 8, 0.7, 3.0, 1, 2), Answer("kite", 10, 0.8, 2.0, 1, 3)
    outputs = (
        Output(None, whole, 0, role="span"),
        Output(None, (start,), 0, role="start"),
        Output(None, (end,), 0, role="end"),
    )
    return _labeled(name, outputs, 4)


def _labeled(name: str, outputs: tuple[Output, ...], rows: int) -> Example:
    pieces = tokens(STORY)
    relevance = np.random.default_rng(2).normal(size=(rows, len(pieces))).astype(np.float32)
    return Example(
        name=name,
        outputs=outputs,
        relevance={"mamba-lrp": relevance, "raw-attention": np.abs(relevance)},
        deltas={"mamba-lrp": np.zeros(rows)},
        tokens=pieces,
        prompt=len(pieces),
        units={"word": spans(pieces, r"\s"), "sentence": spans(pieces, r"\s[A-Z]")},
    )


def explanation(
    *examples: Example, title: str = "Anna's ball", model: str = "stories"
) -> Explanation:
    return Explanation(
        title, model, METHODS, examples or (story(),), {"target": "red"}, {"captum_ssm": "0.1.0"}
    )


def long(length: int) -> Explanation:
    """A text of so many tokens, with the story's outputs at its end."""
    sentence = "The dogs near the tree bark, and Mia has a green cup because she is happy. "
    prompt = sentence * (length // len(tokens(sentence)))
    return explanation(story(prompt + STORY, name="long"), title=f"{length:,} tokens")


def many(count: int = 200) -> Explanation:
    """Short stories of several answers and probabilities."""
    rng = np.random.default_rng(3)
    examples = []
    for k in range(count):
        who, color = ("Anna", "Tom", "Mia")[k % 3], ("red", "blue", "green")[rng.integers(3)]
        text = f"{who} has a {color} ball. The dogs near tree {k} bark. {who}'s ball is"
        one = story(text, f" {color}", name=f"{who} {k}", seed=k)
        output = one.outputs[0]
        likeliest = replace(output.answers[0], probability=float(rng.uniform(0.3, 0.99)))
        output = replace(output, answers=(likeliest, *output.answers[1:]), lens=())
        examples.append(replace(one, outputs=(output,), maps=()))
    return explanation(*examples, title=f"{count} stories")


def everywhere() -> Example:
    """Every token is explained, from the second on, as by ``position="all"``."""
    one = story()
    first = [replace(one.outputs[0], position=k) for k in range(one.prompt - 1)]
    return replace(one, outputs=(*first, *one.outputs))


def unknown(word: str = " kite") -> Example:
    """The story, with one word that the tokenizer does not know; it is also one of the answers."""
    one = story()
    read = [replace(t, read_as="<unk>") if t.text == word else t for t in one.tokens]
    return replace(one, tokens=tuple(read))


TURNS = (
    ("template", "<system>"),
    ("system 1", " Answer with one word."),
    ("template", " <end> <user>"),
    ("user 1", " Anna has a red ball. Tom has a blue kite. Who has a kite?"),
    ("template", " <end> <assistant>"),
    ("assistant 1", " Tom."),
    ("template", " <end> <user>"),
    ("user 2", " What color is Anna's ball?"),
    ("template", " <end> <assistant>"),
)


def chat() -> Example:
    """A conversation, whose answer is the assistant's second turn."""
    one = story("".join(text for _, text in TURNS), " red.", name="What color is Anna's ball?")
    turns, first = [], 0
    for name, text in (*TURNS, ("assistant 2", " red.")):
        turns.append(Span(name, first, first + len(tokens(text))))
        first = turns[-1].end
    return replace(one, units={**one.units, "turn": tuple(turns)}, maps=one.maps[:1])


HOSTILE = (
    "</script><img src=x onerror=\"document.title='owned'\">",
    "<!--<script>",
    " <svg onload=document.title='owned'>",
    "\u202eright to left\u202c",
    "\x00\x07\u200b",
    " '\"`${1}&lt;b&gt;",
    "javascript:document.title='owned'",
    "\n\n\t",
    "",
    " 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 👩‍👧 e\u0301\u0301",
    "\ud800\u2028",
)


def hostile() -> Explanation:
    """Texts that try to leave their place, wherever an explanation has text."""
    image, markup = picture(HOSTILE[0]), HOSTILE[0]
    words = [HOSTILE[k % len(HOSTILE)] for k in range(33)]
    pieces = tuple(Token(text, 0, k, k + len(text)) for k, text in enumerate(words))
    answers = tuple(Answer(text, 0, 0.1, 1.0, k + 1, k) for k, text in enumerate(HOSTILE))
    outputs = tuple(
        Output(position, answers, position % 11, (), (answers[:3],) * 2)
        for position in (20, 25, 32)
    )
    rng = np.random.default_rng(2)
    relevance = rng.normal(size=(len(HOSTILE), 33)).astype(np.float32)
    text = Example(
        name=markup,
        outputs=outputs,
        relevance={markup: relevance},
        deltas={},
        tokens=pieces,
        prompt=21,
        units={"word": (Span("", 0, 20), Span("", 20, 33)), "span": (Span(markup, 0, 33),)},
        maps=(Maps(markup, markup, {markup: np.tril(rng.normal(size=(33, 33)))}),),
    )
    image = Example(
        name=markup,
        outputs=(Output(None, answers, 0),),
        relevance={markup: np.repeat(image.relevance["mamba-lrp"][:1], len(HOSTILE), axis=0)},
        deltas={},
        image=image.image,
        grid=image.grid,
    )
    return Explanation(
        f"</title>{markup}", markup, (Method(markup, markup, markup, True),), (text, image),
        {markup: markup}, {markup: markup},
    )  # fmt: skip


def serious_violations(tab: Any) -> list[Any]:
    """What axe-core finds serious or critical on a page, with the first elements."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="no axe-core")
    return [
        (rule["id"], [node["html"][:200] for node in rule["nodes"]][:3])
        for rule in axe.Axe().run(tab).response["violations"]
        if rule["impact"] in ("serious", "critical")
    ]
