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
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from captum_ssm.examples.split import is_reserved

__all__ = [
    "COLORS",
    "IDS",
    "KINDS",
    "OBJECTS",
    "PEOPLE",
    "PRONOUNS",
    "VERBS",
    "WORDS",
    "Story",
    "StoryQuestion",
    "StoryQuestions",
    "held_out_questions",
    "held_out_story",
    "is_held_out",
    "make_batch",
    "make_story",
]

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
PEOPLE = 4  # at most in a story; at least two


@dataclass(frozen=True)
class StoryQuestion:
    """A word of a story that can be known from an earlier one.

    Args:
        kind (str): One of :data:`KINDS`.
        position (int): The token at which the answer is predicted; the answer is the token after
            it.
        cause (int): The token that the answer rests on.
        rivals (tuple of int): Tokens that would lead to another answer, were they taken for the
            cause.

    Examples::

        >>> question = stories.StoryQuestion("animal", position=4, cause=1, rivals=(4,))
        >>> "The dogs near the bird bark .".split()[question.cause]
        'dogs'
    """

    kind: str
    position: int
    cause: int
    rivals: tuple[int, ...]


@dataclass(frozen=True)
class Story:
    """A story's words and the questions in it, in order.

    Args:
        words (tuple of str): The words and the signs, of :data:`WORDS`.
        questions (tuple of StoryQuestion): What can be known from an earlier word.

    Examples::

        >>> [stories.WORDS[i] for i in stories.Story(("Anna", "sings", "."), ()).ids]
        ['Anna', 'sings', '.']
    """

    words: tuple[str, ...]
    questions: tuple[StoryQuestion, ...]

    @property
    def ids(self) -> list[int]:
        """The words' token ids."""
        return [IDS[word] for word in self.words]


def is_held_out(sentence: list[str]) -> bool:
    """Whether a sentence, by a hash of its words, is reserved for evaluation.

    Args:
        sentence (list of str): Its words, the full stop included.

    Returns:
        Whether no training story has this sentence.

    Examples::

        >>> stories.is_held_out("The dogs near the bird bark .".split())
        False
    """
    return is_reserved(" ".join(sentence))


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
        rng (random.Random): The source of all randomness.
        length (int): Sentences are added until the story has so many words.
        held_out (bool, optional): The side of the split its sentences come from. Default: False
        people (int, optional): How many people have something. Default: 4
        last (str, optional): A kind of question: one sentence with it is added at the end. A color
            is asked for only when everyone's has been told. Default: None

    Returns:
        The story.

    Examples::

        >>> import random
        >>> story = stories.make_story(random.Random(0), length=20, last="animal")
        >>> story.questions[-1].kind
        'animal'
    """
    words: list[str] = []
    questions: list[StoryQuestion] = []
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
            questions.append(StoryQuestion(kind, start + 3, at + 3, tuple(rivals)))
        elif kind == "animal":
            words.extend(_drawn(lambda: _animal(rng), held_out))
            questions.append(StoryQuestion(kind, len(words) - 3, start + 1, (len(words) - 3,)))
        else:
            words.extend(_drawn(lambda: _mood(rng, names[: people - len(facts)]), held_out))
            other = {"he": "she", "she": "he"}[PRONOUNS[words[start]]]
            rivals = (i for i, word in enumerate(words) if PRONOUNS.get(word) == other)
            questions.append(StoryQuestion(kind, len(words) - 5, start, tuple(rivals)))

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
    while is_held_out(words := sentence()) != held_out:
        pass
    return words


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

    Args:
        n (int): How many.
        rng (random.Random): The source of all randomness.
        length (int): How many words each has.
        people (int, optional): In a story at most this many people have something. Default: 4

    Returns:
        Token ids ``(n, length)``, int64, and a boolean tensor ``(n, length)`` that marks the
        positions whose next token is an answer.

    Examples::

        >>> import random
        >>> tokens, asked = stories.make_batch(8, random.Random(0), length=24)
        >>> tokens.shape
        torch.Size([8, 24])
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

    The question has a rival. A question about a color has the colors of all other people as rivals.

    Args:
        rng (random.Random): The source of all randomness.
        length (int): The story before the question has at least so many words.
        kind (str): One of :data:`KINDS`.
        people (int, optional): How many people have something. Default: 4

    Returns:
        The story.

    Examples::

        >>> import random
        >>> story = stories.held_out_story(random.Random(0), 20, "pronoun")
        >>> story.words[story.questions[-1].cause] in stories.PRONOUNS
        True
    """
    while True:
        story = make_story(rng, length, held_out=True, people=people, last=kind)
        if story.questions[-1].rivals:
            return story


@dataclass(frozen=True)
class StoryQuestions:
    """Held-out stories of one length, each cut where its last question is asked.

    Args:
        tokens (Tensor): Token ids, ``(n, length)``; the last token predicts the answer.
        answers (Tensor): The answers' ids, ``(n,)``.
        foils (Tensor): What the last rival would lead to, ids ``(n,)``.
        causes (Tensor): The token that each answer rests on, ``(n,)``.
        rivals (Tensor): Marks the tokens that would lead to another answer, ``(n, length)``,
            boolean.

    Examples::

        >>> asked = stories.held_out_questions(2, "color")
        >>> bool((asked.tokens[[0, 1], asked.causes] == asked.answers).all())
        True
    """

    tokens: Tensor
    answers: Tensor
    foils: Tensor
    causes: Tensor
    rivals: Tensor


def held_out_questions(
    n: int, kind: str, seed: int = 0, *, people: int = PEOPLE, length: int | None = None
) -> StoryQuestions:
    """Questions of one kind, on held-out stories.

    Every question has a rival. A question about a color has the colors of all other people as
    rivals.

    Args:
        n (int): How many.
        kind (str): One of :data:`KINDS`.
        seed (int, optional): The same seed gives the same questions. Default: 0
        people (int, optional): How many people have something. Default: 4
        length (int, optional): The number of words, the same for all. None is enough for so many
            people. Default: None

    Returns:
        The questions, with what each answer rests on.

    Raises:
        ValueError: If sentences do not add up to such a length.

    Examples::

        >>> asked = stories.held_out_questions(3, "animal")
        >>> asked.tokens.shape, asked.causes.shape
        (torch.Size([3, 48]), torch.Size([3]))
    """
    length = 12 + 9 * people if length is None else length
    rng = random.Random(seed)
    gives = dict(zip(COLORS, COLORS, strict=True)) | VERBS | PRONOUNS
    tokens: list[list[int]] = []
    answers, foils, causes = [], [], []
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
        what = f"kind {kind!r} have {length} words, {people} people"
        raise ValueError(f"no questions of {what}; ask for more words, or fewer people.")
    return StoryQuestions(
        torch.tensor(tokens),
        torch.tensor(answers),
        torch.tensor(foils),
        torch.tensor(causes),
        rivals,
    )
