"""Features of a recurrent state, and what happens when they are removed from it.

A feature is a color as it is written: the mean change of the state at that word of many stories,
apart from what all colors have in common. Then held-out questions for a color are asked. By how
much does the answer's lead over its rival fall in a run of the model without the most relevant
feature of the state, at the token where it is most relevant, and by how much as relevance said?
And without a random one there?

    python benchmarks/features/states.py --record
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from captum_ssm import Readout, RelevanceFlow, examples
from captum_ssm.examples import stories
from captum_ssm.interventions import scaled_features, states

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _record import RESULTS, save


def colors_of(model: nn.Module, mixer: str, count: int) -> Readout:
    """A feature for each color: 1 where the state holds once what that word usually writes."""
    tokens, _ = stories.make_batch(count, random.Random(0), 48)
    with torch.no_grad():
        change = states(model, tokens, layers=mixer, positions=None)[mixer].values.diff(dim=1)
    words = [stories.IDS[color] for color in stories.COLORS]
    atoms = torch.stack([change[tokens[:, 1:] == word].mean(0) for word in words])
    atoms = atoms - atoms.mean(0)
    sizes = atoms.flatten(1).square().sum(1).view(-1, *[1] * (atoms.dim() - 1))
    return Readout(model, mixer, atoms / sizes, stories.COLORS, decoder=atoms, side="state")


def lost_and_said(model: nn.Module, readout: Readout, count: int) -> dict[str, list[float]]:
    """For each question what the lead loses without a feature, and the feature's relevance."""
    asked = stories.held_out_questions(count, "color")
    generator = torch.Generator().manual_seed(0)
    found: dict[str, list[float]] = {"best": [], "its relevance": [], "random": [], "its own": []}
    for row in range(count):
        tokens = asked.tokens[row : row + 1]
        answer, foil = int(asked.answers[row]), int(asked.foils[row])

        def lead(tokens: Tensor = tokens, answer: int = answer, foil: int = foil) -> float:
            with torch.no_grad():
                logits = model(tokens).logits[0, -1]
            return float(logits[answer] - logits[foil])

        of = RelevanceFlow(model).features(tokens, answer, readout=readout, against=foil)
        best = of.top(1)[0]
        other = int(torch.randint(len(readout.names), (1,), generator=generator))
        whole = lead()
        for name, said, feature in (
            ("best", "its relevance", best.feature),
            ("random", "its own", other),
        ):
            with scaled_features(readout, feature, tokens=best.token):
                found[name].append(whole - lead())
            found[said].append(float(of.relevance[0, best.token, feature]))
    return found


def compared(lost: list[float], said: list[float]) -> dict[str, float]:
    a, b = torch.tensor(lost), torch.tensor(said)
    return {
        "lost": float(a.abs().mean()),
        "said": float(b.abs().mean()),
        "same sign": float((a.sign() == b.sign()).float().mean()),
        "correlation": float(torch.corrcoef(torch.stack([a, b]))[0, 1]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["stories-mamba", "stories-mamba2"])
    parser.add_argument("--mixer", default="backbone.layers.0.mixer")
    parser.add_argument("--stories", type=int, default=256)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    rows = []
    for name in options.models:
        model, _ = examples.load(name)
        found = lost_and_said(
            model, colors_of(model, options.mixer, options.stories), options.questions
        )
        for feature, said in (("best", "its relevance"), ("random", "its own")):
            row = compared(found[feature], found[said])
            rows.append({"model": name, "feature": feature, **row})
            print(name, feature, {key: round(value, 2) for key, value in row.items()})
    if options.record:
        facts = {k: v for k, v in vars(options).items() if k not in ("record", "models")}
        save(RESULTS / "state_features.json", "state_features", rows, **facts)


if __name__ == "__main__":
    main()
