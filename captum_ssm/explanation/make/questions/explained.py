"""The example that an explained text becomes, and what questions share that read it once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from captum_ssm.attr import LaTIM
from captum_ssm.explanation import Example, Maps, Span
from captum_ssm.explanation.make.inputs.media import check_ids
from captum_ssm.explanation.make.inputs.reading import TokenizedText
from captum_ssm.explanation.make.questions.base import Choices, Questions, Setup, Steps, to_numpy
from captum_ssm.explanation.make.questions.circuits import circuits
from captum_ssm.explanation.make.questions.kinds import Task
from captum_ssm.explanation.make.questions.observed import Look, Seen
from captum_ssm.explanation.make.relevance.run import Run
from captum_ssm.explanation.units import PATTERNS, matched, named, with_pictures, within
from captum_ssm.inspection.implicit_attention import hidden_attention
from captum_ssm.utils.memory import memory_limit, require

WIDTH = 60  # characters of a text that names its example


@dataclass(frozen=True)
class OneTextQuestion(ABC):
    """What is asked about one text, whatever the model tells of it."""

    setup: Setup
    task: Task
    text: TokenizedText

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return len(self.text.tokens)

    def answer(self) -> Steps[Example]:
        """The text, explained."""
        setup = self.setup
        ids = torch.tensor([self.text.ids], device=next(setup.model.parameters()).device)
        check_ids(ids, setup.model, self.text.media)
        if setup.lens:
            setup.note("no lens: the model has no vocabulary")
        run = self.task.run_on(self.text)
        seen = yield Look(run, ids, first=self.task.first)
        choices = Choices(self.task.names.__getitem__, self.task.probabilities)
        questions = Questions(setup, run, choices)
        self.ask(questions, seen)
        return (yield from explained_text(questions, ids, self.text, self.size))

    @abstractmethod
    def ask(self, questions: Questions, seen: Seen) -> None:
        """Add the outputs that are explained, given what the model returned."""


def explained_text(
    questions: Questions, ids: Tensor, whole: TokenizedText, prompt: int
) -> Steps[Example]:
    """The questions about one text, explained.

    ``ids (1, n)`` are the first n tokens of the whole text, which the model reads; ``prompt`` is
    how many tokens are those of the prompt.
    """
    L = len(whole.tokens)
    questions.require_memory(L)
    # Maps come first, since those that are too large are refused before any row is computed.
    tokens = torch.tensor([whole.ids], device=ids.device)
    maps = _maps(questions.setup, questions.run, tokens)
    relevance, deltas = yield from questions.explained(
        ids, lambda rows: nn.functional.pad(rows, (0, L - rows.shape[1]))
    )
    return Example(
        _shortened(whole.turns.title(whole.text) if whole.turns else whole.text),
        tuple(questions.outputs),
        relevance,
        deltas,
        whole.tokens,
        prompt,
        _units(whole, prompt, questions.setup.spans),
        maps=maps,
        validation=questions.validation,
        circuits=circuits(questions, ids, whole.tokens),
        pictures=() if whole.media is None else whole.media.pictures,
    )


def _units(
    whole: TokenizedText, prompt: int, spans: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[Span, ...]]:
    units = {unit: matched(whole.tokens, unit) for unit in PATTERNS}
    if len(units["line"]) < 2:
        del units["line"]
    if whole.turns:
        turns = whole.turns.spans(whole.tokens, prompt)
        units = {unit: within(parts, turns) for unit, parts in units.items()} | {"turn": turns}
    pictures = () if whole.media is None else whole.media.pictures
    if pictures:
        units = with_pictures(units, pictures, len(whole.tokens))
    if spans:
        units["span"] = named(whole.tokens, spans)
    return units


def _maps(setup: Setup, run: Run, ids: Tensor) -> tuple[Maps, ...]:
    if not setup.maps:
        return ()
    means = hidden_attention(
        setup.model,
        ids,
        additional_forward_args=run.extra(ids),
        layers=setup.layers,
        reduction="mean",
        memory_limit=setup.memory_limit,
    )
    maps = {}
    if "hidden-attention" in setup.maps:
        maps["hidden-attention"] = Maps(
            "hidden attention",
            "mean over channels",
            {name: to_numpy(mean[0]) for name, mean in means.items()},
        )
    if "latim" in setup.maps:
        with memory_limit(setup.memory_limit):
            size = 4 * ids.shape[1] ** 2
            require(
                len(setup.maps) * len(means) * size,
                f"maps of {len(means)} layers, {len(setup.maps)} kinds and {ids.shape[1]} tokens",
                [("layers=-1, one layer", len(setup.maps) * size)],
            )
        method = LaTIM(setup.model, memory_limit=setup.memory_limit)
        interactions = partial(
            method.interactions,
            ids,
            additional_forward_args=run.extra(ids),
            aggregation="l2",
            activation="gate",
        )
        maps["latim"] = Maps(
            "LaTIM", "l2 norm", {name: to_numpy(interactions(name)[0]) for name in means}
        )
    return tuple(maps[name] for name in setup.maps)


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= WIDTH else line[: WIDTH - 1].rstrip() + "…"
