"""Reviews: a small English in which the words that decide a film's label are known.

    I saw it with my funny sister. The plot was not good, but the music was very moving.

A review has sentences of judgments about the film and sentences that judge nothing. A judgment
gives its word's sign to the film, and twice that with "very"; "not" turns the sign. The label is
the sign of the sum: positive, negative, or mixed where it is zero. Sentences that judge nothing
may praise or blame people with the same words: a model that only counts words is wrong about
those.

Training and held-out reviews are told apart by their judgments: one in eight pairs of a subject
and a word, chosen by a hash, is reserved. Every held-out review has a reserved pair.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from captum_ssm.examples.split import is_reserved

LABELS = ("negative", "mixed", "positive")
SUBJECTS = ("plot", "acting", "music", "ending", "cast", "story", "dialogue", "camera")
PEOPLE = ("sister", "brother", "friend", "neighbor", "teacher")
DAYS = ("Monday", "Friday", "Sunday")
GOOD = ("good", "great", "moving", "funny", "clever", "charming", "warm", "brilliant")
BAD = ("bad", "dull", "weak", "awful", "boring", "clumsy", "cold", "stupid")
SIGNS = dict.fromkeys(GOOD, 1) | dict.fromkeys(BAD, -1)
FUNCTION_WORDS = (
    *("The", "the", "was", "not", "very", "but", "and", ",", ".", "I", "saw", "it", "with"),
    *("my", "on", "My", "chose", "film", "long", "two", "hours", "It", "lasts"),
)

UNKNOWN, PADDING = "<unk>", "<pad>"
WORDS = (UNKNOWN, PADDING, *FUNCTION_WORDS, *SUBJECTS, *PEOPLE, *DAYS, *GOOD, *BAD)
IDS = {word: index for index, word in enumerate(WORDS)}

EVALUATION_SEED = 20_003


@dataclass(frozen=True)
class Judgment:
    """What one clause says about the film.

    Attributes:
        word: The position of the word that judges.
        modifiers: The positions of "not" and "very" before it.
        value: What the clause adds to the film's sum: 1 or 2, with its sign.
    """

    word: int
    modifiers: tuple[int, ...]
    value: int


@dataclass(frozen=True)
class Review:
    """A review's words, what they say about the film, and the judging words about people."""

    words: tuple[str, ...]
    judgments: tuple[Judgment, ...]
    rivals: tuple[int, ...]

    @property
    def ids(self) -> list[int]:
        """The words' token ids."""
        return [IDS[word] for word in self.words]

    @property
    def label(self) -> int:
        """An index of :data:`LABELS`."""
        total = sum(judgment.value for judgment in self.judgments)
        return 1 + (total > 0) - (total < 0)

    @property
    def text(self) -> str:
        """The review as people write it."""
        return " ".join(self.words).replace(" ,", ",").replace(" .", ".")


def is_held_out(subject: str, word: str) -> bool:
    """Whether a pair, by a hash of its words, is reserved for evaluation."""
    return is_reserved(f"{subject} {word}")


def make_review(rng: random.Random, *, held_out: bool = False) -> Review:
    """One review; a held-out one has a reserved pair, and any other has none."""
    while True:
        review, pairs = _drawn(rng)
        if any(is_held_out(*pair) for pair in pairs) == held_out:
            return review


def of_each_label(rng: random.Random, *, held_out: bool = False) -> Iterator[Review]:
    """Reviews without end, whose labels take turns."""
    wanted = 0
    while True:
        review = make_review(rng, held_out=held_out)
        if review.label == wanted:
            yield review
            wanted = (wanted + 1) % len(LABELS)


def _drawn(rng: random.Random) -> tuple[Review, list[tuple[str, str]]]:
    words: list[str] = []
    judgments: list[Judgment] = []
    rivals: list[int] = []
    pairs: list[tuple[str, str]] = []
    judging = [True] * rng.randint(1, 3) + [False] * rng.randint(0, 2)
    rng.shuffle(judging)
    subjects = rng.sample(SUBJECTS, len(SUBJECTS))
    for is_judgment in judging:
        if not is_judgment:
            _add_remark(rng, words, rivals)
            continue
        for k in range(rng.randint(1, 2)):
            subject, word = subjects.pop(), rng.choice(list(SIGNS))
            words += [",", rng.choice(("but", "and")), "the"] if k else ["The"]
            words += [subject, "was"]
            modifiers = [m for m in ("not", "very") if rng.random() < 0.3]
            positions = tuple(range(len(words), len(words) + len(modifiers)))
            words += [*modifiers, word]
            value = SIGNS[word] * (-1 if "not" in modifiers else 1)
            value *= 2 if "very" in modifiers else 1
            judgments.append(Judgment(len(words) - 1, positions, value))
            pairs.append((subject, word))
        words.append(".")
    return Review(tuple(words), tuple(judgments), tuple(rivals)), pairs


def _add_remark(rng: random.Random, words: list[str], rivals: list[int]) -> None:
    # Judges a person, or nothing.
    word = rng.choice(list(SIGNS))
    kind = rng.randrange(4)
    if kind == 0:
        words += ["I", "saw", "it", "on", rng.choice(DAYS), "."]
    elif kind == 1:
        words += ["It", "lasts", "two", "long", "hours", "."]
    elif kind == 2:
        words += ["I", "saw", "it", "with", "my", word, rng.choice(PEOPLE), "."]
        rivals.append(len(words) - 3)
    else:
        words += ["My", rng.choice(PEOPLE), ",", "very", word, ",", "chose", "the", "film", "."]
        rivals.append(len(words) - 6)
