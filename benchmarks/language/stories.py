"""Stories: a small English in which the word that decides every answer is known.

    Anna has a red ball. Tom has a blue kite. The dogs near the bird bark. Anna's ball is red.
    Tom sings because he is happy.

A story says first what people have and then goes on with sentences of three kinds, each of which
has one word that can be known from one word before it:

========= ============================================= ============== ==========================
kind      example                                       rests on       rivals, which look like it
========= ============================================= ============== ==========================
color     Anna 's ball is **red**                       the color in   the other people's colors
                                                        Anna's fact
animal    The dogs near the bird **bark**               the subject    the nearer animal
pronoun   Tom sings near the hill because **he**        the name       the story's other names
========= ============================================= ============== ==========================

A fact is found by its owner: objects repeat among people, colors do not. Each animal has a verb of
its own, which agrees with it in number, so that the subject alone decides, over up to two phrases
between them.

Training and held-out stories are told apart by their sentences: one in eight, chosen by a hash of
its words, is reserved. :func:`make_story` uses no reserved sentence or nothing else, so that no
fact of a held-out story (its owner, color and object together) was ever trained on.
"""

from __future__ import annotations

import random
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

PRONOUNS = {
    **dict.fromkeys(("Anna", "Emma", "Lucy", "Mia"), "she"),
    **dict.fromkeys(("Ben", "Paul", "Sam", "Tom"), "he"),
}
COLORS = ("red", "blue", "green", "yellow", "black", "white", "brown", "pink")
OBJECTS = ("ball", "box", "kite", "cup", "hat", "book", "car", "doll")
VERBS = {
    "dog": "barks",
    "bird": "sings",
    "cat": "sleeps",
    "horse": "runs",
    "frog": "jumps",
    "duck": "swims",
}
ANIMALS = [(noun, f"{noun}s") for noun in VERBS]
VERBS |= {f"{noun}s": verb[:-1] for noun, verb in VERBS.items()}
PLACES = ("house", "tree", "river", "hill")
PREPOSITIONS = ("near", "behind", "under")
MOODS = ("happy", "tired", "hungry", "cold")
FUNCTION_WORDS = ("has", "a", "The", "the", "is", "'s", "because", "she", "he", ".")

UNKNOWN, PADDING = "<unk>", "<pad>"
WORDS: tuple[str, ...] = (
    *(UNKNOWN, PADDING),
    *FUNCTION_WORDS,
    *PRONOUNS,
    *COLORS,
    *OBJECTS,
    *VERBS,
    *VERBS.values(),
    *PLACES,
    *PREPOSITIONS,
    *MOODS,
)
IDS = {word: index for index, word in enumerate(WORDS)}
UNKNOWN_ID, PADDING_ID = IDS[UNKNOWN], IDS[PADDING]

KINDS = ("color", "animal", "pronoun")
PEOPLE = 4
"""People in a story at most; at least two."""

EVALUATION_SEED = 20_002

_HELD_OUT_ONE_IN = 8


@dataclass(frozen=True)
class Question:
    """A word of a story that can be known from an earlier one.

    Attributes:
        kind: One of :data:`KINDS`.
        position: The token at which the answer is predicted; the answer is the token after it.
        cause: The token that the answer rests on.
        rivals: Tokens that would lead to another answer, were they taken for the cause.
    """

    kind: str
    position: int
    cause: int
    rivals: tuple[int, ...]


@dataclass(frozen=True)
class Story:
    """A story's words and the questions in it, in order."""

    words: tuple[str, ...]
    questions: tuple[Question, ...]

    @property
    def ids(self) -> list[int]:
        """The words' token ids."""
        return [IDS[word] for word in self.words]


def is_held_out(sentence: list[str]) -> bool:
    """Whether a sentence, by a hash of its words, is reserved for evaluation."""
    return zlib.crc32(" ".join(sentence).encode()) % _HELD_OUT_ONE_IN == 0


def make_story(
    rng: random.Random,
    length: int,
    *,
    held_out: bool = False,
    people: int = PEOPLE,
    last: str | None = None,
) -> Story:
    """One story.

    Args:
        rng: Source of all randomness.
        length: Sentences are added until the story has so many words.
        held_out: The side of the split its sentences come from.
        people: How many people have something.
        last: A kind of question: one sentence with it is added at the end. A color is asked
            for only when everyone's has been told.
    """
    words: list[str] = []
    questions: list[Question] = []
    facts = _facts(rng, people, held_out)
    names = [fact[0] for fact in facts]  # those met already are names[: people - len(facts)]
    owners: dict[str, int] = {}  # where the facts begin that were not asked about

    def add(kind: str) -> None:
        start = len(words)
        if kind == "fact":
            fact = facts.pop(0)
            owners[fact[0]] = start
            words.extend(fact)
        elif kind == "color":
            at = owners.pop(rng.choice(list(owners)))
            color = words[at + 3]
            rivals = (i for i, word in enumerate(words) if word in COLORS and word != color)
            words.extend([words[at], "'s", words[at + 4], "is", color, "."])
            questions.append(Question(kind, start + 3, at + 3, tuple(rivals)))
        elif kind == "animal":
            words.extend(_drawn(lambda: _animal(rng), held_out))
            questions.append(Question(kind, len(words) - 3, start + 1, (len(words) - 3,)))
        else:
            words.extend(_drawn(lambda: _mood(rng, names[: people - len(facts)]), held_out))
            other = {"he": "she", "she": "he"}[PRONOUNS[words[start]]]
            rivals = (i for i, word in enumerate(words) if PRONOUNS.get(word) == other)
            questions.append(Question(kind, len(words) - 5, start, tuple(rivals)))

    add("fact")
    # Before a last question about a color everyone's has been told.
    while len(words) < length or (last == "color" and facts):
        # One owner is left for the last question.
        ask = len(owners) > (last == "color")
        weights = {"fact": 2 * len(facts), "color": 2 * ask, "animal": 1, "pronoun": 1}
        add(*rng.choices(list(weights), list(weights.values())))
    if last is not None:
        add(last)
    return Story(tuple(words), tuple(questions))


def _drawn(sentence: Callable[[], list[str]], held_out: bool) -> list[str]:
    while is_held_out(found := sentence()) != held_out:
        pass
    return found


def _facts(rng: random.Random, people: int, held_out: bool) -> list[list[str]]:
    facts: list[list[str]] = []
    while len(facts) < people:
        name, color, thing = (rng.choice(x) for x in (list(PRONOUNS), COLORS, OBJECTS))
        fact = [name, "has", "a", color, thing, "."]
        taken = {word for other in facts for word in (other[0], other[3])}
        if is_held_out(fact) == held_out and not taken & {name, color}:
            facts.append(fact)
    return facts


def _animal(rng: random.Random) -> list[str]:
    subject, nearer = (rng.choice(pair) for pair in rng.sample(ANIMALS, 2))
    phrase = [rng.choice(PREPOSITIONS), "the", rng.choice(PLACES)] if rng.random() < 0.5 else []
    phrase += [rng.choice(PREPOSITIONS), "the", nearer]
    return ["The", subject, *phrase, VERBS[subject], "."]


def _mood(rng: random.Random, names: list[str]) -> list[str]:
    name = rng.choice(names)
    verb = VERBS[rng.choice(ANIMALS)[0]]
    phrase = [rng.choice(PREPOSITIONS), "the", rng.choice(PLACES)] if rng.random() < 0.5 else []
    return [name, verb, *phrase, "because", PRONOUNS[name], "is", rng.choice(MOODS), "."]


def make_batch(
    n: int, rng: random.Random, length: int, *, people: int = PEOPLE
) -> tuple[Tensor, Tensor]:
    """Stories to train on, cut to one length.

    Returns:
        Token ids ``(n, length)``, int64, and a boolean tensor ``(n, length)`` that marks the
        positions whose next token is an answer.
    """
    tokens = torch.empty(n, length, dtype=torch.int64)
    asked = torch.zeros(n, length, dtype=torch.bool)
    for row in range(n):
        story = make_story(rng, length, people=rng.randint(2, people))
        tokens[row] = torch.tensor(story.ids[:length])
        at = [q.position for q in story.questions if q.position < length - 1]
        asked[row, at] = True
    return tokens, asked


def held_out_story(rng: random.Random, length: int, kind: str, people: int = PEOPLE) -> Story:
    """A held-out story that ends with a question of a kind.

    The question has a rival; of a color there are those of all other people. The arguments are
    those of :func:`make_story`.
    """
    while True:
        story = make_story(rng, length, held_out=True, people=people, last=kind)
        if story.questions[-1].rivals:
            return story


@dataclass(frozen=True)
class Questions:
    """Held-out stories of one length, each cut where its last question is asked.

    Attributes:
        tokens: Token ids, ``(n, length)``; the last token predicts the answer.
        answers: The answers' ids, ``(n,)``.
        foils: What the last rival would lead to, ids ``(n,)``.
        causes: The token that each answer rests on, ``(n,)``.
        rivals: Marks the tokens that would lead to another answer, ``(n, length)``, boolean.
    """

    tokens: Tensor
    answers: Tensor
    foils: Tensor
    causes: Tensor
    rivals: Tensor


def held_out_questions(
    n: int, kind: str, seed: int = 0, *, people: int = PEOPLE, length: int | None = None
) -> Questions:
    """Questions of one kind, on held-out stories.

    Every question has a rival; of a color there are those of all other people.

    Args:
        n: How many.
        kind: One of :data:`KINDS`.
        seed: The same seed gives the same questions.
        people: How many people have something.
        length: Number of words, the same for all. ``None`` is enough for so many people.

    Raises:
        ValueError: where sentences do not add up to such a length.
    """
    length = 12 + 9 * people if length is None else length
    rng = random.Random(seed)
    gives = dict(zip(COLORS, COLORS, strict=True)) | VERBS | PRONOUNS
    tokens, answers, foils, causes = [], [], [], []
    rivals = torch.zeros(n, length, dtype=torch.bool)
    for _ in range(1000 * n + 1000):
        if len(tokens) == n:
            break
        story = held_out_story(rng, length - 8, kind, people)
        question = story.questions[-1]
        if question.position == length - 1:
            rivals[len(tokens), list(question.rivals)] = True
            tokens.append(story.ids[:length])
            answers.append(story.ids[length])
            foils.append(IDS[gives[story.words[question.rivals[-1]]]])
            causes.append(question.cause)
    else:
        raise ValueError(f"no questions of kind {kind!r} have {length} words, {people} people")
    columns = (torch.tensor(column) for column in (tokens, answers, foils, causes))
    return Questions(*columns, rivals)


@torch.no_grad()
def accuracy(
    model: PreTrainedModel, stories: int, people: int = PEOPLE, seed: int = EVALUATION_SEED
) -> dict[str, float]:
    """The share of held-out questions of each kind whose answer the model gives first.

    They are asked after stories of many lengths, so that no habit of one length can pass.
    """
    shares = {}
    for kind in KINDS:
        rng = random.Random(seed)
        by_length = defaultdict(list)
        for _ in range(stories):
            words = rng.randint(6 * people, 12 * people)
            story = held_out_story(rng, words, kind, people)
            end = story.questions[-1].position + 2
            by_length[end].append(story.ids[:end])
        right = 0
        for rows in by_length.values():
            ids = torch.tensor(rows)
            logits = model(ids[:, :-1], use_cache=False).logits[:, -1]
            right += int((logits.argmax(-1) == ids[:, -1]).sum())
        shares[kind] = right / stories
    return shares


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words as tokens, as a tokenizer of transformers: ``Anna's`` is ``Anna`` and ``'s``."""
    from _words import word_tokenizer

    return word_tokenizer(WORDS, UNKNOWN, PADDING)
