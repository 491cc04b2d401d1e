"""How often a model of stories gives the right answer first."""

from __future__ import annotations

import random
from collections import defaultdict

import torch
from transformers import PreTrainedModel

from captum_ssm.examples.stories import KINDS, PEOPLE, held_out_story

EVALUATION_SEED = 20_002


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
