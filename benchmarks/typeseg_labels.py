"""Which characters make a trained Mamba label a character as it does, and which method finds them?

typeseg labels each character of a text with one of 35 content types. Files of one language get some
lines of another one pasted into them, so it is known which characters changed a label: of a
character inside of what was pasted, or of one outside, whose label the paste changed. Measured are

- removal: the label's probability while the most and the least relevant characters are replaced;
- insertion: how much of the relevance falls on what was pasted, and how often its largest value;
- agreement: the rank correlation with occlusion, integrated gradients and gradient times input.

The character that is asked about stays in place and counts nowhere: every method gives it much, and
it answers nothing. Intervals are of 95%, by bootstrap over files.

    pip install --no-deps typeseg==0.2.7
    python benchmarks/typeseg_labels.py --files 40
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from _record import RESULTS, save
from scipy.stats import spearmanr
from torch import Tensor

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    UnifiedImplicitAttention,
)
from captum_ssm.examples.typeseg import PLACEHOLDER, TypeSeg, ids_of
from captum_ssm.kernels import DiagonalCoefficients, diagonal_scan
from captum_ssm.metrics import bootstrap, evaluate, flipping

LENGTH, PASTED = 160, 44
SHARES = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
STEPS = 16  # of integrated gradients
REMOVALS = {"placeholder": PLACEHOLDER, "space": ord(" ")}
REFERENCES = ("occlusion", "integrated gradients", "gradient x input")

# Lines of each language; names and numbers in braces are drawn anew.
LINES = {
    "javascript_typescript": [
        "const {a} = document.querySelector('#{b}');\n",
        "{a}.addEventListener('click', () => {b}({n}));\n",
        "let {a} = await fetch('/{b}').then(r => r.json());\n",
        "if ({a} === undefined) {{ return null; }}\n",
        "function {a}({b}) {{ return {b}.map(x => x * {n}); }}\n",
        "var {a} = new Array({n}).fill(0);\n",
    ],
    "python": [
        "def {a}({b}, limit={n}):\n",
        "    for i, item in enumerate({a}):\n",
        "        {a} = [x for x in {b} if x is not None]\n",
        "    return {a}.get('{b}', None)\n",
        "import {a} as np\n",
        "        self.{a} = {b} or {n}\n",
    ],
    "sql": [
        "SELECT {a}, COUNT(*) FROM {b} GROUP BY {a};\n",
        "INSERT INTO {a} (id, {b}) VALUES ({n}, 'x');\n",
        "UPDATE {a} SET {b} = {n} WHERE id = {n};\n",
        "DELETE FROM {a} WHERE {b} IS NULL;\n",
        "CREATE TABLE {a} (id INT PRIMARY KEY, {b} TEXT);\n",
    ],
    "shell": [
        "export {a}=$(cat /etc/{b} | grep -v root)\n",
        "for f in *.{a}; do echo $f; done\n",
        "if [ -f ~/.{a} ]; then rm -rf ~/.{b}; fi\n",
        "sudo apt-get install -y {a} {b}\n",
        "curl -s http://{a}.com/{b}.sh | bash\n",
    ],
    "css": [
        ".{a} {{ color: #333; margin: {n}px; }}\n",
        "#{a} > .{b} {{ display: flex; }}\n",
        ".{a}:hover {{ background-color: #eee; }}\n",
        "@media (max-width: {n}px) {{ .{a} {{ width: 100%; }} }}\n",
    ],
    "html": [
        '<div class="{a}" id="{b}">\n',
        '  <a href="/{a}/{n}">{b}</a>\n',
        "<ul><li>{a}</li><li>{b}</li></ul>\n",
        '<input type="text" name="{a}" value="{n}">\n',
        "</div>\n",
    ],
    "json": [
        '{{"{a}": {n}, "{b}": true,\n',
        '  "{a}": ["{b}", "{a}"],\n',
        '  "{b}": {{"id": {n}, "name": "{a}"}},\n',
    ],
    "markdown": [
        "## {a} and {b}\n",
        "- **{a}**: see the [{b}](docs/{b}.md)\n",
        "1. Run `{a}` to start the {b}.\n",
        "> Note that {a} needs {n} items.\n",
    ],
    "encoding_base64": ["{base64}\n"],
}
NAMES = [
    "user", "order", "total", "price", "menu", "login", "cart", "page",
    "token", "list", "event", "report", "queue", "cache", "file",
]  # fmt: skip
BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


def written(language: str, length: int, rng: random.Random) -> str:
    """Lines of a language, as many as the length needs."""
    text = ""
    while len(text) < length:
        a, b = rng.sample(NAMES, 2)
        code = "".join(rng.choices(BASE64, k=40))
        text += rng.choice(LINES[language]).format(a=a, b=b, n=rng.randint(2, 999), base64=code)
    return text


@dataclass(frozen=True)
class Question:
    """Why does this character of a file have this label?

    Args:
        ids (Tensor): the file with the paste, ``(L,)``.
        before (Tensor): the file without it, ``(L,)``.
        region (Tensor): True for the pasted characters, ``(L,)``.
        position (int): of the character.
        label, foil (int): its label with the paste and without it.
        languages (tuple of str): of the file and of the paste.
    """

    ids: Tensor
    before: Tensor
    region: Tensor
    position: int
    label: int
    foil: int
    languages: tuple[str, str]


def pasted(rng: random.Random) -> tuple[Tensor, Tensor, Tensor, tuple[str, str]]:
    """A file with the paste, the same without it, the region, and both languages."""
    host, guest = rng.sample(sorted(LINES), 2)
    text = written(host, LENGTH, rng)[:LENGTH]
    snippet = written(guest, PASTED, rng)
    starts = [i + 1 for i, c in enumerate(text) if c == "\n" and i + 1 + len(snippet) <= LENGTH]
    start = rng.choice([0, *starts])
    mixed = text[:start] + snippet + text[start + len(snippet) :]
    region = torch.zeros(LENGTH, dtype=torch.bool)
    region[start : start + len(snippet)] = True
    return ids_of(mixed)[0], ids_of(text)[0], region, (host, guest)


@torch.no_grad()
def asked(model: TypeSeg, count: int, seed: int) -> tuple[dict[str, list[Question]], float]:
    """Questions about characters inside and outside, and how many pastes are labeled right.

    At most one of each kind per file. The label has to be that of the pasted language, and
    another one without the paste; outside, it was the file's own, and of several such
    characters the one farthest from the paste is asked about.
    """
    rng, found = random.Random(seed), {"inside": [], "outside": []}
    right, seen = 0.0, 0
    while min(map(len, found.values())) < count:
        ids, before, region, languages = pasted(rng)
        was, now = model(torch.stack([before, ids])).argmax(-1)
        own, label = (model.labels.index(name) for name in languages)
        right, seen = right + float((now[region] == label).double().mean()), seen + 1
        changed = (now == label) & (was != label)
        visible = ids > ord(" ")
        for kind, where in (("inside", region), ("outside", ~region & (was == own))):
            places = (changed & visible & where).nonzero()[:, 0].tolist()
            if places and len(found[kind]) < count:
                # The farthest outside: right next to the paste the nearest character is a guess.
                q = rng.choice(places) if kind == "inside" else max(places, key=to_paste(region))
                question = Question(ids, before, region, q, label, int(was[q]), languages)
                found[kind].append(question)
    return found, right / seen


def to_paste(region: Tensor) -> Callable[[int], int]:
    """How far a character is from the nearest one that was pasted."""
    where = region.nonzero()[:, 0]
    return lambda q: int((where - q).abs().min())


def occlusion(model: TypeSeg, ids: Tensor, position: Tensor, label: Tensor) -> Tensor:
    """How much the logit falls when one character is replaced, ``(B, L)``."""
    rows = []
    for row, q, target in zip(ids, position.tolist(), label.tolist(), strict=True):
        changed = row.repeat(len(row) + 1, 1)
        changed[1:].fill_diagonal_(PLACEHOLDER)
        logits = torch.cat([model(part)[:, q, target] for part in changed.split(32)])
        rows.append(logits[0] - logits[1:])
    return torch.stack(rows)


class Gradients:
    """Gradient times input and integrated gradients, from a file of placeholders."""

    def __init__(self, model: TypeSeg) -> None:
        self.model = model
        self.blank = model.embedding.weight[PLACEHOLDER].detach()

    def at(self, embeddings: Tensor, position: Tensor, label: Tensor) -> Tensor:
        leaf = embeddings.detach().requires_grad_()
        with self.model.embedding.register_forward_hook(lambda *_: leaf):
            logits = self.model(torch.zeros(leaf.shape[:2], dtype=torch.long))
        rows = torch.arange(len(leaf))
        return torch.autograd.grad(logits[rows, position, label].sum(), leaf)[0]

    def times_input(self, ids: Tensor, position: Tensor, label: Tensor) -> Tensor:
        embeddings = self.model.embedding(ids)
        return (self.at(embeddings, position, label) * embeddings).sum(-1)

    def integrated(self, ids: Tensor, position: Tensor, label: Tensor) -> Tensor:
        way = self.model.embedding(ids) - self.blank
        steps = [(k + 0.5) / STEPS for k in range(STEPS)]
        mean = sum(self.at(self.blank + s * way, position, label) for s in steps) / STEPS
        return (mean * way).sum(-1)


def _distance(position: Tensor | int) -> Tensor:
    return (torch.arange(LENGTH) - position).abs()


Method = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Ids ``(B, L)``, positions, labels and foils ``(B,)`` to relevance ``(B, L)``."""


def methods(model: TypeSeg) -> dict[str, Method]:
    """Every explanation, by name."""

    def by(method: Any, contrast: bool = False, **options: Any) -> Method:
        def relevance(ids: Tensor, position: Tensor, label: Tensor, foil: Tensor) -> Tensor:
            found = method.attribute(ids, target=label, position=position, **options)
            if contrast:
                found = found - method.attribute(ids, target=foil, position=position, **options)
            return found

        return relevance

    unified, gradients = UnifiedImplicitAttention(model), Gradients(model)
    latim, lrp = LaTIM(model), MambaLRP(model)
    generator = torch.Generator().manual_seed(0)
    return {
        "RawAttention": by(RawAttention(model)),
        "MambaRollout": by(MambaRollout(model)),
        "MambaRollout, rows normalized": by(MambaRollout(model), normalize_rows=True),
        "MambaAttribution": by(MambaAttribution(model)),
        "Unified (raw)": by(unified, aggregation="raw"),
        "Unified (rollout)": by(unified, aggregation="rollout"),
        "Unified (attribution)": by(unified),
        "LaTIM": by(latim, activation="gate"),
        "LaTIM, label less foil": by(latim, contrast=True, activation="gate"),
        "MambaLRP": by(lrp),
        "MambaLRP, label less foil": by(lrp, contrast=True),
        "gradient x input": lambda ids, q, label, _: gradients.times_input(ids, q, label),
        "integrated gradients": lambda ids, q, label, _: gradients.integrated(ids, q, label),
        "occlusion": lambda ids, q, label, _: occlusion(model, ids, q, label),
        "nearest characters": lambda ids, q, *_: 1 / (1.0 + _distance(q[:, None])),
        "random": lambda ids, *_: torch.rand(ids.shape, generator=generator),
    }


def removal(
    model: TypeSeg, ids: Tensor, relevance: Tensor, position: Tensor, label: Tensor, by: int
) -> dict[str, Tensor]:
    """Areas under the label's probability while characters are replaced, ``(B,)`` each."""
    found: dict[str, Tensor] = {}
    for order in ("positive", "negative"):
        areas = []
        for k in range(len(ids)):
            kept = torch.ones_like(ids[:1]).index_fill(1, position[k : k + 1], 0)
            curve = flipping(
                lambda x, k=k: model(x)[:, position[k]],
                ids[k : k + 1],
                relevance[k : k + 1],
                label[k : k + 1],
                order=order,
                removal=by,
                shares=SHARES,
                mask=kept,
                probability=True,
            )
            areas.append(curve.areas)
        found[order] = torch.cat(areas)
    found["between"] = found["negative"] - found["positive"]
    return found


def insertion(relevance: Tensor, region: Tensor, others: Tensor) -> dict[str, Tensor]:
    """The share of positive relevance in the region, and whether its largest value is there."""
    counted = relevance.double().masked_fill(~others, -torch.inf)
    positive = counted.clamp(min=0)
    total = positive.sum(1)
    share = (positive * region).sum(1) / total.clamp(min=1e-30)
    chance = (region & others).double().sum(1) / others.double().sum(1)
    peak = region.gather(1, counted.argmax(1, keepdim=True))[:, 0]
    return {"share": torch.where(total > 0, share, chance), "peak": peak.double()}


def agreement(relevance: Tensor, reference: Tensor, others: Tensor) -> dict[str, Tensor]:
    """Spearman's correlation over characters, of the values and of their magnitudes."""

    def ranked(a: Tensor, b: Tensor) -> Tensor:
        rows = zip(a, b, others, strict=True)
        return torch.tensor([float(spearmanr(x[w], y[w]).statistic) for x, y, w in rows])

    return {
        "signed": ranked(relevance, reference),
        "magnitude": ranked(relevance.abs(), reference.abs()),
    }


def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """What ``captum_ssm.examples.typeseg.selective_scan`` computes, by this library's kernel."""
    coefficients = DiagonalCoefficients(dt, dt, A, B[:, :, None], C[:, :, None], None)
    return diagonal_scan(x, coefficients) + D * x


def check(model: TypeSeg, ids: Tensor) -> None:
    """Raise unless the model is the plain one, and that one the package's own."""
    import typeseg

    text = bytes(ids.tolist()).decode()
    theirs = torch.from_numpy(typeseg.precise(text).char_probs)
    with torch.no_grad():
        for ours in (TypeSeg().eval(), model):
            error = float((ours(ids[None])[0].softmax(-1) - theirs).abs().max())
            if not error < 1e-4:
                raise SystemExit(f"probabilities differ from the package's by {error:.1e}")
    mine, plain = (
        MambaLRP(m).attribute(ids[None], target=2, position=80) for m in (model, TypeSeg().eval())
    )
    if not float((mine - plain).norm() / plain.norm()) < 1e-3:
        raise SystemExit("the two models are explained differently")


def score(model: TypeSeg, questions: list[Question], with_removal: bool) -> dict[str, Any]:
    """The scores of every method on these questions, one row per question."""
    ids = torch.stack([q.ids for q in questions])
    region = torch.stack([q.region for q in questions])
    position, label, foil = (
        torch.tensor([getattr(q, name) for q in questions])
        for name in ("position", "label", "foil")
    )
    others = torch.arange(LENGTH) != position[:, None]
    found = {}
    for name, method in methods(model).items():
        start = time.process_time()
        with torch.set_grad_enabled("gradient" in name):
            found[name] = method(ids, position, label, foil).detach()
        print(f"    {name:42s} {time.process_time() - start:6.1f} s", flush=True)
    scores: dict[str, Any] = {}
    for name, relevance in found.items():
        row: dict[str, Any] = {"insertion": insertion(relevance, region, others)}
        if with_removal:
            row["removal"] = {
                what: removal(model, ids, relevance, position, label, by)
                for what, by in REMOVALS.items()
            }
        row["agreement"] = {
            other: agreement(relevance, found[other], others) for other in REFERENCES
        }
        scores[name] = row
    return scores


@torch.no_grad()
def causes(model: TypeSeg, questions: list[Question]) -> dict[str, Any]:
    """How often the label is lost without the region, and kept without all the rest."""
    tests = {"without the region": [], "the region alone": []}
    for q in questions:
        itself = torch.arange(LENGTH) == q.position
        versions = {
            "without the region": torch.where(q.region & ~itself, q.before, q.ids),
            "the region alone": q.ids.masked_fill(~(q.region | itself), PLACEHOLDER),
        }
        for name, ids in versions.items():
            tests[name].append(float(model(ids[None])[0, q.position].argmax() == q.label))
    return {f"label kept, {k}": interval(torch.tensor(v)) for k, v in tests.items()}


def interval(values: Tensor) -> dict[str, float]:
    """A mean with its interval."""
    found = bootstrap(values)
    return {"value": found.value, "low": found.low, "high": found.high}


def nested(scores: Any) -> Any:
    """Scores as means with intervals, in the same nesting."""
    if isinstance(scores, dict):
        return {name: nested(each) for name, each in scores.items()}
    return interval(scores)


def cell(found: dict[str, float], percent: bool = False) -> str:
    """One cell of a table."""
    scale, digits = (100, 0) if percent else (1, 2)
    value, low, high = (f"{scale * found[k]:.{digits}f}" for k in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def tables(results: dict[str, Any]) -> Iterator[str]:
    """The three tables, as Markdown."""
    inside, outside = (results[kind]["methods"] for kind in ("inside", "outside"))
    yield (
        "| method | most relevant first ↓ | least relevant first ↑ | between ↑ | by spaces ↑ |\n"
        "|---|---|---|---|---|"
    )
    for name, row in inside.items():
        own, spaces = row["removal"]["placeholder"], row["removal"]["space"]
        cells = [cell(own[k]) for k in ("positive", "negative", "between")]
        yield f"| {name} | {' | '.join([*cells, cell(spaces['between'])])} |"
    yield (
        "\n| method | inside: share ↑ | largest ↑ | outside: share ↑ | largest ↑ |\n"
        "|---|---|---|---|---|"
    )
    for name in inside:
        cells = [
            cell(rows[name]["insertion"][k], True)
            for rows in (inside, outside)
            for k in ("share", "peak")
        ]
        yield f"| {name} | {' | '.join(cells)} |"
    yield (
        f"\n| method | {' | '.join(REFERENCES)} | the same, magnitudes | | |\n"
        "|---|---|---|---|---|---|---|"
    )
    for name, row in inside.items():
        cells = [
            cell(row["agreement"][r][kind]) for kind in ("signed", "magnitude") for r in REFERENCES
        ]
        yield f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--files", type=int, default=40, help="questions of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--output", type=Path, default=RESULTS / "typeseg.json")
    args = parser.parse_args()
    model = TypeSeg(scan).eval().requires_grad_(False)
    questions, right = asked(model, args.files, args.seed)
    check(model, questions["inside"][0].ids)
    results: dict[str, Any] = {}
    for kind, each in questions.items():
        print(f"{kind}: {len(each)} files", flush=True)
        scores = evaluate(
            lambda batch, kind=kind: score(model, batch, kind == "inside"),
            each,
            batch_size=args.batch,
        )
        distance = [to_paste(q.region)(q.position) for q in each]
        results[kind] = {
            "causes": causes(model, each),
            "distance": interval(torch.tensor(distance).double()),
            "region": interval(torch.stack([q.region.double().mean() for q in each])),
            "methods": nested(scores),
        }
        print(results[kind]["causes"], results[kind]["distance"], flush=True)
    save(
        args.output,
        "typeseg",
        [{"kind": kind, **each} for kind, each in results.items()],
        typeseg=version("typeseg"),
        files=args.files,
        seed=args.seed,
        length=LENGTH,
        right=right,
    )
    print(f"{right:.0%} of the pasted characters have their language's label")
    print("\n".join(tables(results)))


if __name__ == "__main__":
    main()
