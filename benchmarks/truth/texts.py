"""Tasks of tokens. All else than the cause is redrawn by renaming, which keeps a text's sense."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from captum_ssm.examples import chains, copying, stories

from . import models
from .task import ANY_OTHER, Examples, Task

REDRAWS = 3
COPIED = 33  # tokens up to the question: the string, the separator, and what is copied already
LENGTHS = range(17, 25)  # of the strings


def renamed(
    ids: Tensor, groups: list[Tensor], fixed: set[int], generator: torch.Generator
) -> Tensor:
    """A text in which words take the place of others of their group, everywhere alike.

    Args:
        ids (Tensor): ``(L,)``.
        groups (list of Tensor): words that can stand for one another, ``(n, forms)`` each: a row
            has the forms of one word, such as noun and verb, which are renamed together.
        fixed (set of int): ids that stay, and whose place no other word takes.
        generator (torch.Generator): draws the order.

    Returns:
        Tensor: ``(L,)``. Each word of a group with two or more that are free is another one.
    """
    table = torch.arange(max(int(ids.max()), *(int(g.max()) for g in groups)) + 1)
    for group in groups:
        free = torch.tensor([k for k, row in enumerate(group.tolist()) if not fixed & set(row)])
        order = free[torch.randperm(len(free), generator=generator)]
        table[group[order]] = group[order.roll(1)]
    return table[ids]


def _column(ids: object) -> Tensor:
    return torch.tensor(list(ids))[:, None]  # type: ignore[call-overload]


def _asked(
    ids: Tensor,
    cause: Tensor,
    answer: Tensor,
    other: Tensor,
    given: Tensor,
    groups: list[Tensor],
    fixed: list[set[int]],
    generator: torch.Generator,
    skipped: Tensor | None = None,
) -> Examples:
    # Questions at the last token; `given` is the token that makes `other` right.
    marks = torch.zeros_like(ids, dtype=torch.bool)
    redrawn = [
        torch.stack(
            [renamed(row, groups, own, generator) for row, own in zip(ids, fixed, strict=True)]
        )
        for _ in range(REDRAWS)
    ]
    return Examples(
        inputs=ids,
        target=answer,
        cause=marks.scatter(1, cause[:, None], True),
        swapped=ids.scatter(1, cause[:, None], given[:, None]),
        redrawn=torch.stack(redrawn),
        answer=answer,
        other=other,
        skipped=marks if skipped is None else skipped,
    )


def _copying(count: int, generator: torch.Generator) -> list[Examples]:
    # Longer strings are asked for earlier symbols, so that all texts have one length.
    lengths = torch.tensor(LENGTHS).repeat(-(-count // len(LENGTHS)))[:count]
    ids = torch.cat(
        [copying.held_out_batch(1, generator, n).inputs[:, :COPIED] for n in lengths.tolist()]
    )
    at = COPIED - 1 - lengths
    answer = ids.gather(1, at[:, None])[:, 0]
    other = (answer + 11) % copying.SEPARATOR_ID
    # The symbol before the cause says where the copy is, and stays.
    fixed = [set(row[k - 1 : k + 1]) for row, k in zip(ids.tolist(), at.tolist(), strict=True)]
    copied = torch.arange(COPIED) > lengths[:, None]
    letters = [_column(range(copying.SEPARATOR_ID))]
    return [_asked(ids, at, answer, other, other, letters, fixed, generator, copied)]


def _passkey(count: int, generator: torch.Generator) -> list[Examples]:
    records = models.passkey_records()
    batch = records.held_out_batch(count, generator, records.CONTEXT)
    ids, answer, cause = batch.prompt, batch.targets[:, 0], batch.answer_positions[:, 0]
    low, high = records.FIRST_DIGIT_ID, records.FIRST_KEY_ID
    groups = [_column(r) for r in (range(low), range(low, high), range(high, records.KEY_ID))]
    other = (answer - low + 3) % (high - low) + low
    fixed = [{int(a), int(row[-1])} for a, row in zip(answer, ids, strict=True)]
    return [_asked(ids, cause, answer, other, other, groups, fixed, generator)]


def _names(pronoun: str) -> Tensor:
    return _column(stories.IDS[n] for n, p in stories.PRONOUNS.items() if p == pronoun)


def _story_groups() -> list[Tensor]:
    ids, verbs = stories.IDS, stories.VERBS
    animals = [(n, f"{n}s", verbs[n], verbs[f"{n}s"]) for n, _ in stories.ANIMALS]
    words = stories.COLORS, stories.OBJECTS, stories.PLACES, stories.PREPOSITIONS, stories.MOODS
    return [
        torch.tensor([[ids[word] for word in row] for row in animals]),
        *map(_names, ("she", "he")),
        *(_column(ids[word] for word in group) for group in words),
    ]


def _stories(kind: str, count: int, generator: torch.Generator) -> list[Examples]:
    seed = int(torch.randint(2**31, (), generator=generator))
    asked = stories.held_out_questions(count, kind, seed)
    ids, rows = asked.tokens, torch.arange(count)
    cause = ids[rows, asked.causes]
    # The word that would make the foil right.
    causing = {stories.IDS[verb]: stories.IDS[noun] for noun, verb in stories.VERBS.items()}
    causing |= {stories.IDS["she"]: stories.IDS["Anna"], stories.IDS["he"]: stories.IDS["Tom"]}
    given = torch.tensor([causing.get(foil, foil) for foil in asked.foils.tolist()])
    fixed = [{c, a} for c, a in zip(cause.tolist(), asked.answers.tolist(), strict=True)]
    if kind == "color":  # a fact is found by its owner
        for own, words in zip(fixed, ids[:, -4:].tolist(), strict=True):
            own |= set(words)
    return [
        _asked(
            ids, asked.causes, asked.answers, asked.foils, given, _story_groups(), fixed, generator
        )
    ]


def _chains(count: int, generator: torch.Generator) -> list[Examples]:
    rng = random.Random(int(torch.randint(2**31, (), generator=generator)))
    puzzles = [chains.make_puzzle(rng, held_out=True) for _ in range(count)]
    ids = torch.tensor([chains.encode(p.prompt + p.aloud[:-2]) for p in puzzles])
    last = [p.positions(p.links[-1]) for p in puzzles]
    cause = torch.tensor([at[-1] for at in last])
    answer = torch.tensor([chains.IDS[p.answer] for p in puzzles])
    other = torch.tensor([chains.IDS[p.records[p.others[-1]][1]] for p in puzzles])
    groups = [_column(chains.IDS[w] for w in ws) for ws in (chains.VARIABLES, chains.NUMBERS)]
    fixed = [{int(a), chains.IDS[p.thoughts[-1]]} for a, p in zip(answer, puzzles, strict=True)]
    return [_asked(ids, cause, answer, other, other, groups, fixed, generator)]


def _pasted(count: int, generator: torch.Generator) -> list[Examples]:
    """Code with lines of another language, and a character of them in the middle of the file."""
    typed = models.typeseg_labels()
    rng = random.Random(int(torch.randint(2**31, (), generator=generator)))
    model = models.typeseg()
    rows: list[list[Tensor]] = []
    while len(rows) < count:
        ids, before, region, (host, guest) = typed.pasted(rng)
        if not region[models.ASKED] or ids[models.ASKED] <= ord(" "):
            continue
        cause = region.clone()
        cause[models.ASKED] = False
        again = []
        for _ in range(REDRAWS):
            text = typed.ids_of(typed.written(host, len(ids), rng)[: len(ids)])[0]
            again.append(torch.where(region, ids, text))
        swapped = torch.where(cause, before, ids)
        label = torch.tensor(model.labels.index(guest))
        rows.append([ids, label, cause, swapped, torch.stack(again)])
    ids, label, cause, swapped, again = (torch.stack(part) for part in zip(*rows, strict=True))
    other = torch.full_like(label, ANY_OTHER)
    skipped = torch.zeros_like(cause)
    return [Examples(ids, label, cause, swapped, again.transpose(0, 1), label, other, skipped)]


TOKENS = torch.arange(4096)


def _language(
    name: str,
    family: str,
    about: str,
    model: str,
    draw: Callable[[int, torch.Generator], list[Examples]],
    blank: int,
) -> Task:
    load = partial(models.language, model)
    return Task(name, family, about, load, draw, TOKENS, blank, model)


def text_tasks() -> list[Task]:
    """The tasks whose inputs are token ids."""
    copied = "the letter that is repeated next, where it stands in the string"
    told = {
        "color": "the color in the owner's fact",
        "animal": "the subject of the verb, not the nearer noun",
        "pronoun": "the name at the head of the sentence",
    }
    found = [
        _language(m, "copying", copied, m, _copying, copying.SEPARATOR_ID)
        for m in ("copying-mamba", "copying-mamba2")
    ]
    value = "the value behind the key that is asked for, among other records"
    found.append(_language("passkey-mamba", "passkey", value, "passkey-mamba", _passkey, 0))
    for model in ("stories-mamba", "stories-mamba2", "stories-qwen3next"):
        found += [
            _language(
                f"{model}, {kind}", "stories", told[kind], model, partial(_stories, kind),
                stories.UNKNOWN_ID,
            )
            for kind in stories.KINDS
        ]  # fmt: skip
    number = "the number in the record that the last thought names"
    found.append(
        _language("chains-mamba2", "chains", number, "chains-mamba2", _chains, chains.IDS["<unk>"])
    )
    if models.has_typeseg():
        lines = "the pasted lines around a character that is labeled with their language"
        typed = Task(
            "typeseg", "code", lines, models.typeseg_asked, _pasted, TOKENS, models.PLACEHOLDER
        )
        found.append(typed)
    return found
