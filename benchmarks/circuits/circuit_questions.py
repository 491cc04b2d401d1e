"""Questions whose deciding token is known, with a wrong answer and a corrupted input for each."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from captum_ssm.examples import copying, stories

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "passkey"))
import records
from _training import MODELS

LENGTH = 20
NAMES = (
    "copying-mamba",
    "copying-mamba2",
    "passkey-mamba",
    "stories-mamba",
    "stories-mamba2",
    "stories-qwen3next",
    "stories-recurrentgemma",
    "stories-rwkv",
)


@dataclass(frozen=True)
class Questions:
    """Questions of one length.

    Args:
        ids (Tensor): ``(B, L)``.
        answers, foils (Tensor): ``(B,)``, the right token, and what a rival would lead to.
        positions (Tensor): ``(B,)``, the token at which the answer is predicted.
        corrupted (Tensor): ``(B, L)``, with another token in place of the one that decides, so
            that the foil is right.
    """

    ids: Tensor
    answers: Tensor
    foils: Tensor
    positions: Tensor
    corrupted: Tensor

    def __getitem__(self, part: Any) -> Questions:
        names = ("ids", "answers", "foils", "positions", "corrupted")
        return Questions(*(getattr(self, name)[part] for name in names))

    def __len__(self) -> int:
        return len(self.ids)


def load(name: str) -> Any:
    """A trained model of this repository, by its name, or by the folder of a checkpoint."""
    torch.manual_seed(0)
    path = Path(name) if Path(name).is_dir() else MODELS / name
    return transformers.AutoModelForCausalLM.from_pretrained(path).eval()


def questions(
    name: str,
    count: int,
    seed: int,
    people: int = stories.PEOPLE,
    length: int | None = None,
) -> Questions:
    """Held-out questions of a model's task; ``length`` is that of stories, in words."""
    kind = Path(name).name.partition("-")[0]
    if kind == "stories":
        return _stories(count, seed, people, length)
    if length is not None:
        raise SystemExit(f"{name}: only stories have a length of one's choice")
    return (_copying if kind == "copying" else _passkey)(count, seed)


@torch.no_grad()
def answered(model: Any, q: Questions) -> Questions:
    """The questions that a model answers right, in the same order."""
    at = torch.arange(len(q))
    likeliest = torch.cat([model(ids[None]).logits.argmax(-1) for ids in q.ids])
    return q[likeliest[at, q.positions] == q.answers]


def _copying(count: int, seed: int) -> Questions:
    generator = torch.Generator().manual_seed(seed)
    batch = copying.held_out_batch(count, generator, LENGTH)
    k = 4 + torch.arange(count) % (LENGTH - 8)
    answers = batch.targets.gather(1, k[:, None])[:, 0]
    foils = (answers + 11) % copying.SEPARATOR_ID
    corrupted = batch.inputs.scatter(1, k[:, None], foils[:, None])
    return Questions(batch.inputs, answers, foils, LENGTH + k, corrupted)


def _passkey(count: int, seed: int) -> Questions:
    batch = records.held_out_batch(count, torch.Generator().manual_seed(seed), records.CONTEXT)
    ids, answers, causes = batch.prompt, batch.targets[:, 0], batch.answer_positions[:, 0]
    other = (batch.asked[:, 0] + 1) % batch.starts.shape[1]
    foils = ids.gather(1, batch.starts.gather(1, other[:, None]) + 2)[:, 0]
    low = records.FIRST_DIGIT_ID
    foils = torch.where(foils == answers, (answers - low + 3) % len(records.DIGITS) + low, foils)
    corrupted = ids.scatter(1, causes[:, None], foils[:, None])
    return Questions(ids, answers, foils, torch.full_like(answers, ids.shape[1] - 1), corrupted)


def _stories(count: int, seed: int, people: int, length: int | None) -> Questions:
    each = -(-count // len(stories.KINDS))
    drawn = [
        stories.held_out_questions(each, kind, seed, people=people, length=length)
        for kind in stories.KINDS
    ]
    ids, answers, foils, causes = (
        torch.stack([getattr(q, key) for q in drawn], 1).flatten(0, 1)
        for key in ("tokens", "answers", "foils", "causes")
    )
    causing = {stories.IDS[verb]: stories.IDS[noun] for noun, verb in stories.VERBS.items()}
    causing |= {stories.IDS[color]: stories.IDS[color] for color in stories.COLORS}
    causing |= {stories.IDS["she"]: stories.IDS["Anna"], stories.IDS["he"]: stories.IDS["Tom"]}
    given = torch.tensor([causing[int(foil)] for foil in foils])
    corrupted = ids.scatter(1, causes[:, None], given[:, None])
    last = torch.full_like(answers, ids.shape[1] - 1)
    return Questions(ids, answers, foils, last, corrupted)[:count]
