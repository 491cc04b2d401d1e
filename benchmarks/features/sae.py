"""A sparse autoencoder of the residual stream of a small language model, and what its features do.

A top-k SAE (Gao et al., 2024) is trained on what the first block of a stories model returns. Then
held-out questions are asked, of which one word decides the answer, and for each the features are
ranked by their relevance for the answer against its rival. How much of the score is lost without
the best feature, in a run of the model? And is the feature at the word that decides?

    python benchmarks/features/sae.py ----record
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from captum_ssm import Readout, RelevanceFlow, examples
from captum_ssm.attr.flow.features import FeatureRelevance
from captum_ssm.examples import stories
from captum_ssm.interventions import scaled_features

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _record import RESULTS, save


class TopKSAE(nn.Module):
    """An encoder of F features of which the k largest are kept at each token, and a decoder."""

    def __init__(self, width: int, features: int, k: int) -> None:
        super().__init__()
        self.encoder, self.k = nn.Linear(width, features), k
        self.decoder = nn.Parameter(nn.functional.normalize(self.encoder.weight.detach().clone()))
        self.bias = nn.Parameter(torch.zeros(width))

    def encode(self, x: Tensor) -> Tensor:
        z = self.encoder(x - self.bias).relu()
        return torch.where(z >= z.topk(self.k).values[..., -1:], z, 0)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x) @ self.decoder + self.bias


def streams(
    model: nn.Module, layer: nn.Module, stories_read: int, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """What the layer returns at each word of stories, ``(words, E)``, and the words' ids."""
    everything = Readout(model, layer, torch.eye(model.config.hidden_size))
    found = []
    with torch.no_grad():
        for _ in range(stories_read // 64):
            tokens, _ = stories.make_batch(64, rng, 48)
            found.append((everything(tokens).flatten(0, 1), tokens.flatten()))
    x, words = zip(*found, strict=True)
    return torch.cat(x), torch.cat(words)


def train(x: Tensor, sae: TopKSAE, steps: int, batch: int = 1024) -> None:
    optimizer = torch.optim.Adam(sae.parameters(), 2e-3)
    for _ in range(steps):
        rows = x[torch.randint(len(x), (batch,))]
        loss = (sae(rows) - rows).square().sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():  # rows of length one, so that a value is a length
            sae.decoder.copy_(nn.functional.normalize(sae.decoder))


def explained_variance(x: Tensor, sae: TopKSAE) -> float:
    with torch.no_grad():
        return float(1 - (sae(x) - x).square().sum() / (x - x.mean(0)).square().sum())


def named(x: Tensor, words: Tensor, sae: TopKSAE) -> tuple[list[str], Tensor]:
    """For each feature the word at which it is most active in sum, and that word's share of it."""
    with torch.no_grad():
        sums = torch.zeros(len(stories.WORDS), len(sae.decoder)).index_add_(0, words, sae.encode(x))
    share, word = (sums / sums.sum(0).clamp(min=1e-9)).max(0)
    return [stories.WORDS[k] for k in word.tolist()], share


def causal_check(model: nn.Module, readout: Readout, kind: str, count: int) -> dict[str, float]:
    """What the answer's lead over its rival loses without one feature at one token."""
    asked = stories.held_out_questions(count, kind)
    drops: dict[str, list[float]] = {"best": [], "random active": [], "expected": []}
    hits = {"at the deciding word": 0, "at the word that asks": 0}
    generator = torch.Generator().manual_seed(0)
    for row in range(count):
        tokens = asked.tokens[row : row + 1]
        pair = int(asked.answers[row]), int(asked.foils[row])

        def lead() -> float:
            with torch.no_grad():
                logits = model(tokens).logits[0, -1]  # noqa: B023
            return float(logits[pair[0]] - logits[pair[1]])  # noqa: B023

        found: FeatureRelevance = RelevanceFlow(model).features(
            tokens, pair[0], readout=readout, against=pair[1]
        )
        flat = found.relevance[0].flatten().argmax()
        token, feature = divmod(int(flat), found.relevance.shape[-1])
        hits["at the deciding word"] += token == int(asked.causes[row])
        hits["at the word that asks"] += token == tokens.shape[1] - 1
        active = (found.values[0] > 0).nonzero()
        other = active[torch.randint(len(active), (1,), generator=generator)][0].tolist()
        whole = lead()
        for name, (at, which) in {"best": (token, feature), "random active": other}.items():
            with scaled_features(readout, which, tokens=at):
                drops[name].append(whole - lead())
        drops["expected"].append(float(found.relevance[0, token, feature]))
    return {
        **{name: float(torch.tensor(each).mean()) for name, each in drops.items()},
        **{name: number / count for name, number in hits.items()},
        "correlation": float(
            torch.corrcoef(torch.tensor([drops["best"], drops["expected"]]))[0, 1]
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="stories-mamba")
    parser.add_argument("--layer", default="backbone.layers.0")
    parser.add_argument("--features", type=int, default=192)
    parser.add_argument("--active", type=int, default=6)
    parser.add_argument("--stories", type=int, default=1600)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--questions", type=int, default=20)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, _ = examples.load(options.model)
    layer = model.get_submodule(options.layer)
    start = time.perf_counter()
    x, words = streams(model, layer, options.stories, random.Random(0))
    held_out = len(x) // 10
    sae = TopKSAE(model.config.hidden_size, options.features, options.active)
    train(x[held_out:], sae, options.steps)
    explained = explained_variance(x[:held_out], sae)
    names, share = named(x[:held_out], words[:held_out], sae)
    seconds, selective = time.perf_counter() - start, int((share > 0.5).sum())
    print(f"explained variance {explained:.3f} after {seconds:.0f} s")
    print(f"features with over half of their activity at one word: {selective}")
    readout = Readout(model, layer, sae.encode, names, decoder=sae.decoder)
    results = {
        kind: causal_check(model, readout, kind, options.questions) for kind in stories.KINDS
    }
    for kind, found in results.items():
        print(kind, {name: round(value, 3) for name, value in found.items()})
    if options.record:
        facts = {k: v for k, v in vars(options).items() if k != "record"}
        rows = [{"kind": kind, **found} for kind, found in results.items()]
        path = RESULTS / "sae_features.json"
        save(
            path,
            "sae_features",
            rows,
            explained=explained,
            selective=selective,
            seconds=seconds,
            **facts,
        )


if __name__ == "__main__":
    main()
