"""Chats: questions about who has what, whose answers rest on known words of earlier turns.

    system     Answer with one word.
    user       Anna has a red ball. Tom has a blue kite. What color is Anna's ball?
    assistant  red.
    user       Who has a kite?
    assistant  Tom.

Without the system's turn the assistant answers in a sentence ("Anna's ball is red."), so both the
fact and the form of an answer have a known source. Facts are told in the first turn of the user,
and people, colors and objects are different in each.

Training and held-out chats are told apart by their facts: one in eight (its owner, color and object
together), chosen by a hash, is reserved. All questions of a held-out chat are about reserved facts.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from captum_ssm.examples.split import is_reserved
from captum_ssm.examples.stories import COLORS, OBJECTS

PEOPLE = ("Anna", "Emma", "Lucy", "Mia", "Ben", "Paul", "Sam", "Tom")
ROLES = ("system", "user", "assistant")
END = "<end>"
MARKS = (*(f"<{role}>" for role in ROLES), END)
UNKNOWN, PADDING = "<unk>", "<pad>"
ORDER = "Answer with one word ."
FUNCTION_WORDS = (
    *("has", "have", "a", "is", "'s", ".", "?", "What", "color", "Who", "does"),
    *("Answer", "with", "one", "word"),
)
WORDS = (UNKNOWN, PADDING, *MARKS, *FUNCTION_WORDS, *PEOPLE, *COLORS, *OBJECTS)
IDS = {word: index for index, word in enumerate(WORDS)}

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The tokenizer's chat template; the generation prompt is the assistant's mark."""

EVALUATION_SEED = 20_004


@dataclass(frozen=True)
class Fact:
    """Who has what: ``Anna has a red ball.``"""

    person: str
    color: str
    thing: str

    @property
    def words(self) -> list[str]:
        """The sentence."""
        return [self.person, "has", "a", self.color, self.thing, "."]

    @property
    def is_held_out(self) -> bool:
        """Whether it is reserved for evaluation, by a hash of its words."""
        return is_reserved(" ".join(self.words))


@dataclass(frozen=True)
class Chat:
    """Turns of words, ``(role, words)``; the last is an assistant's."""

    turns: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def messages(self) -> list[dict[str, str]]:
        """What a chat template takes."""
        return [{"role": role, "content": as_text(words)} for role, words in self.turns]

    @property
    def words(self) -> list[str]:
        """The words with the template's marks, up to the end of the last turn."""
        return [w for role, words in self.turns for w in (f"<{role}>", *words, END)]

    @property
    def answers(self) -> list[range]:
        """The positions of each of the assistant's turns with its end, among the words."""
        answers, start = [], 0
        for role, words in self.turns:
            if role == "assistant":
                answers.append(range(start + 1, start + len(words) + 2))
            start += len(words) + 2
        return answers


def as_text(words: tuple[str, ...]) -> str:
    """Words as people write them."""
    text = " ".join(words)
    for sign in (" .", " ?", " 's"):
        text = text.replace(sign, sign.strip())
    return text


def make_chat(
    rng: random.Random, *, held_out: bool = False, people: int = 3, rounds: int = 2
) -> Chat:
    """A chat of one to ``rounds`` questions about up to ``people`` facts."""
    facts = _facts(rng, rng.randint(2, people), held_out)
    asked = [fact for fact in facts if fact.is_held_out == held_out]
    is_short = rng.random() < 0.5
    turns = [("system", tuple(ORDER.split()))] if is_short else []
    told = tuple(word for fact in facts for word in fact.words)
    for _ in range(rng.randint(1, rounds)):
        question, answer = _round(rng, rng.choice(asked), is_short)
        turns += [("user", told + question), ("assistant", answer)]
        told = ()
    return Chat(tuple(turns))


def _facts(rng: random.Random, count: int, held_out: bool) -> list[Fact]:
    while True:
        columns = (rng.sample(words, count) for words in (PEOPLE, COLORS, OBJECTS))
        facts = [Fact(*fact) for fact in zip(*columns, strict=True)]
        reserved = [fact.is_held_out for fact in facts]
        if any(reserved) if held_out else not any(reserved):
            return facts


def _round(
    rng: random.Random, fact: Fact, is_short: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    person, color, thing = fact.person, fact.color, fact.thing
    question, answer, word = rng.choice(
        [
            (f"What color is {person} 's {thing} ?", f"{person} 's {thing} is {color} .", color),
            (f"Who has a {thing} ?", f"{person} has a {thing} .", person),
            (f"What does {person} have ?", f"{person} has a {color} {thing} .", thing),
        ]
    )
    return tuple(question.split()), tuple((f"{word} ." if is_short else answer).split())
