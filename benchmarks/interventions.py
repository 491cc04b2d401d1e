"""What interventions cost, how well cheap patching follows exact patching, and which explanation
agrees with knockout.

    python benchmarks/interventions.py cost --lengths 1024 16384 --cpu-time
    python benchmarks/interventions.py circuits --width 256 --layers 4 --cpu-time
    python benchmarks/interventions.py sweep --cpu-time
    python benchmarks/interventions.py patching
    python benchmarks/interventions.py agreement

``cost``: one knockout run of all layers over the model's own forward, checked first against the run
with no source, which it has to equal. ``circuits``: one run with 20 edges only over the model's own
forward; a run with one edge is first checked against a knockout that leaves it. ``sweep``:
TokenKnockout in batches over one run per token.
``patching``: rank correlation of attribution patching (gradients, RelP) with activation patching.
``agreement``: rank correlation and top-5 overlap of each method's relevance with TokenKnockout's,
on copying, passkey, stories and digits, with 95% intervals over examples, and how often its largest
entry is the token that decides.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from _timing import keep, options, parsed, rounded, seconds
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.examples import stories
from captum_ssm.examples.copying import (
    SEPARATOR_ID,
    held_out_batch,
    predicting_positions,
    source_positions,
)
from captum_ssm.examples.digits import held_out_digits
from captum_ssm.interventions import (
    TokenKnockout,
    activation_patching,
    attribution_patching,
    circuit,
    knockout,
)
from captum_ssm.metrics import bootstrap, knockout_agreement
from captum_ssm.models import VisionMamba

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "tutorials" / "models"
for folder in ("passkey", "papers"):
    sys.path.append(str(ROOT / "benchmarks" / folder))
import records  # noqa: E402
from explanations import of_images, of_this_library, of_token_ids  # noqa: E402

LENGTH = 20
PATCH, EMPTY = 4, -0.5  # of the digits model, and of its canvas
TOGETHER = 40  # runs of a knockout that are joined to one
READERS = ("later", "query")
KNOCKOUT = {"later": "Knockout, from all later tokens", "query": "Knockout, from the query only"}


def shaped(kind: str, width: int, layers: int, vocabulary: int) -> Any:
    """A model of random weights in the shape of a published one."""
    torch.manual_seed(0)
    shared = dict(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers, use_cache=False
    )
    if kind == "mamba":
        config = transformers.MambaConfig(**shared, state_size=16)
        return transformers.MambaForCausalLM(config).eval()
    config = transformers.Mamba2Config(
        **shared, state_size=64, head_dim=64, num_heads=width // 32, n_groups=1
    )
    return transformers.Mamba2ForCausalLM(config).eval()


def cost(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One knockout run over the model's own forward."""
    rows = []
    for kind in args.models:
        model = shaped(kind, args.width, args.layers, args.vocabulary)
        for length in args.lengths:
            ids = torch.randint(1000, (1, length), generator=torch.Generator().manual_seed(0))

            def own(model: Any = model, ids: Tensor = ids) -> Tensor:
                with torch.no_grad():
                    return model(ids).logits

            def knocked(
                sources: Any = slice(100, 200), model: Any = model, ids: Tensor = ids, **more: Any
            ) -> Tensor:
                with torch.no_grad(), knockout(model, sources=sources, **more):
                    return model(ids).logits

            if not torch.equal(knocked(sources=[]), own()):
                raise SystemExit(f"{kind}: a knockout of nothing changes the logits")
            row = {"model": kind, "tokens": length}
            row["forward"], row["knockout"], row["unchecked"] = seconds(
                own, knocked, partial(knocked, check=False), repeats=args.repeats
            )
            row["ratio"] = row["knockout"] / row["forward"]
            rows.append(row)
            print(rounded(row))
    return rows


def circuits(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One run with 20 edges only over the model's own forward."""
    rows = []
    for kind in args.models:
        model = shaped(kind, args.width, args.layers, args.vocabulary)
        for length in args.lengths:
            generator = torch.Generator().manual_seed(0)
            ids = torch.randint(1000, (1, length), generator=generator)
            pairs = torch.rand(20, 2, generator=generator).sort(1, descending=True).values * length
            edges = [(n % args.layers, *pair) for n, pair in enumerate(pairs.long().tolist())]

            def own(model: Any = model, ids: Tensor = ids) -> Tensor:
                with torch.no_grad():
                    return model(ids).logits

            def kept(
                model: Any = model, ids: Tensor = ids, edges: Any = edges, **more: Any
            ) -> Tensor:
                with torch.no_grad(), circuit(model, edges, **more):
                    return model(ids).logits

            one = {"sources": edges[0][2], "targets": edges[0][1], "layers": 0, "keep": True}
            with knockout(model, layers=slice(1, None)), knockout(model, **one):
                truth = own()
            if not torch.allclose(kept(edges=edges[:1]), truth, atol=1e-4):
                raise SystemExit(f"{kind}: a circuit of one edge is not a knockout of the others")
            row = {"model": kind, "tokens": length}
            runs = {
                "circuit": kept,
                "unchecked": partial(kept, check=False),
                "unified": partial(kept, formulation="unified"),
                "whole": partial(kept, coefficients="whole"),
            }
            row["forward"], *times = seconds(own, *runs.values(), repeats=args.repeats)
            row |= dict(zip(runs, times, strict=True))
            row["ratio"] = row["circuit"] / row["forward"]
            rows.append(row)
            print(rounded(row))
    return rows


def copying(kind: str) -> Any:
    """The model trained to copy."""
    return transformers.AutoModelForCausalLM.from_pretrained(MODELS / f"copying-{kind}").eval()


def sweep(args: argparse.Namespace) -> list[dict[str, Any]]:
    """TokenKnockout in batches over one run per token."""
    rows = []
    batch = held_out_batch(1, torch.Generator().manual_seed(0), LENGTH)
    for kind in ("mamba", "mamba2"):
        method = TokenKnockout(copying(kind))
        target = int(batch.targets[0, -1])

        def run(count: int, method: TokenKnockout = method, target: int = target) -> Tensor:
            return method.attribute(batch.inputs, target=target, perturbations_per_eval=count)

        if not torch.allclose(run(1), run(40), atol=1e-4):
            raise SystemExit(f"{kind}: batches change the relevance")
        row: dict[str, Any] = {"model": kind, "tokens": batch.inputs.shape[1]}
        row["one by one"], row["batched"] = seconds(
            partial(run, 1), partial(run, 40), repeats=args.repeats
        )
        row["ratio"] = row["one by one"] / row["batched"]
        rows.append(row)
        print(rounded(row))
    return rows


def pairs(name: str) -> tuple[Any, Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """A model, clean and corrupted inputs, and a score: the answer's logit less the other one's."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODELS / name).eval()
    if name.startswith("copying"):
        clean = held_out_batch(8, torch.Generator().manual_seed(1), LENGTH).inputs
        place = LENGTH - 6
        corrupted, position = clean.clone(), LENGTH + place
        corrupted[:, place] = (corrupted[:, place] + 11) % SEPARATOR_ID
        answers = clean[:, place], corrupted[:, place]
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(MODELS / name)
        text = "{0} has a {1} ball. {0}'s ball is"
        names, colors = ("Anna", "Tom"), ("red", "blue")
        clean, corrupted = (
            tokenizer([text.format(n, c) for n in names], return_tensors="pt").input_ids
            for c in colors
        )
        position = -1
        ids = [tokenizer(f" {c}", add_special_tokens=False).input_ids[0] for c in colors]
        answers = torch.tensor(ids)[:, None].expand(-1, len(names)).unbind()

    def difference(inputs: Tensor) -> Tensor:
        logits = model(inputs).logits[:, position]
        k = len(inputs) // len(clean)
        right, wrong = (logits.gather(1, a.repeat(k)[:, None])[:, 0] for a in answers)
        return right - wrong

    return model, clean, corrupted, difference


def patching(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Correlation of attribution patching with activation patching."""
    rows = []
    for name in ("copying-mamba", "copying-mamba2", "stories-qwen3next"):
        model, clean, corrupted, score = pairs(name)
        for component in ("output", "values", "state"):
            truth = activation_patching(
                score, clean, corrupted, model=model, component=component, perturbations_per_eval=40
            )
            for rule in ("gradient", "relp"):
                found = attribution_patching(
                    score, clean, corrupted, model=model, rule=rule, components=[component]
                )[component]
                x, y = (t.effects.flatten().double() for t in (found, truth))
                ranks = [t.argsort().argsort().double() for t in (x, y)]
                row = {
                    "model": name,
                    "component": component,
                    "rule": rule,
                    "pearson": float(torch.corrcoef(torch.stack([x, y]))[0, 1]),
                    "spearman": float(torch.corrcoef(torch.stack(ranks))[0, 1]),
                    "best share": float(truth.shares.amax((1, 2)).mean()),
                }
                rows.append(row)
                print(rounded(row))
    return rows


@dataclass(frozen=True)
class Asked:
    """Examples of a task, one question each, and what explains them.

    Args:
        effects (dict): names to functions from nothing to the effects of knockout, ``(B, L)``.
        explanations (dict): names to functions from nothing to relevance, ``(B, L)``.
        mask (Tensor): the tokens that count, ``(B, L)``: those before the query.
        cause (Tensor, optional): the token that is known to decide the answer, ``(B,)``.
    """

    effects: dict[str, Callable[[], Tensor]]
    explanations: dict[str, Callable[[], Tensor]]
    mask: Tensor
    cause: Tensor | None = None


def of_text(
    model: Any, ids: Tensor, answer: Tensor, position: Tensor, cause: Tensor, formulation: str
) -> Asked:
    """Questions to a language model whose answer rests on one known token."""
    examples = torch.arange(len(ids))
    asked = {"target": answer, "position": position}

    def logits(x: Tensor) -> Tensor:
        at = position.repeat_interleave(len(x) // len(ids))
        return model(x, use_cache=False).logits[torch.arange(len(x)), at]

    captum = of_token_ids(logits, model.get_input_embeddings(), unknown=0)
    captum.pop("Integrated gradients")  # it starts from a token that these models do not know
    own = of_this_library(model)
    return Asked(
        {
            readers: partial(
                TokenKnockout(model).attribute,
                ids,
                readers=readers,
                formulation=formulation,
                perturbations_per_eval=TOGETHER,
                **asked,
            )
            for readers in READERS
        },
        {name: partial(m.attribute, ids, **options, **asked) for name, (m, options) in own.items()}
        | {name: partial(method, ids, target=answer) for name, method in captum.items()},
        torch.arange(ids.shape[1]) < position[examples, None],
        cause,
    )


def of_copying(kind: str, count: int, formulation: str) -> Asked:
    """Symbols in the middle of a copied string."""
    batch = held_out_batch(count, torch.Generator().manual_seed(2), LENGTH)
    k = 4 + torch.arange(count) % (LENGTH - 8)
    target = batch.targets.gather(1, k[:, None])[:, 0]
    return of_text(
        copying(kind),
        batch.inputs,
        target,
        predicting_positions(LENGTH)[k],
        source_positions(LENGTH)[k],
        formulation,
    )


def of_passkey(count: int, formulation: str) -> Asked:
    """Values looked up by their key."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODELS / "passkey-mamba").eval()
    batch = records.held_out_batch(count, torch.Generator().manual_seed(2), records.CONTEXT)
    position = batch.predicting_positions.expand(count)
    return of_text(
        model,
        batch.inputs,
        batch.targets[:, 0],
        position,
        batch.answer_positions[:, 0],
        formulation,
    )


def of_stories(name: str, count: int, formulation: str) -> Asked:
    """A third of the questions of each kind."""
    model = transformers.AutoModelForCausalLM.from_pretrained(MODELS / name).eval()
    drawn = [stories.held_out_questions(count // 3, kind) for kind in stories.KINDS]
    ids, answers, causes = (
        torch.cat([getattr(q, key) for q in drawn]) for key in ("tokens", "answers", "causes")
    )
    position = torch.full_like(answers, ids.shape[1] - 1)
    return of_text(model, ids, answers, position, causes, formulation)


def of_digits(count: int, formulation: str) -> Asked:
    """Images and their predicted class, patch by patch."""
    weights = load_file(MODELS / "digits-vim" / "model.safetensors")
    model = VisionMamba.from_state_dict(weights)
    images = held_out_digits(count).images
    with torch.no_grad():
        classes = model(images).argmax(1)

    def by_patch(explain: Callable[..., Tensor], *args: Any, **options: Any) -> Tensor:
        relevance = explain(*args, **options).detach().sum(1, keepdim=True)
        return F.avg_pool2d(relevance, PATCH).flatten(1)

    effects = {
        readers: partial(
            by_patch,
            TokenKnockout(model).attribute,
            images,
            target=classes,
            readers=readers,
            formulation=formulation,
            perturbations_per_eval=TOGETHER,
        )
        for readers in READERS
    }
    found = of_images(model, EMPTY)
    found["Random scores"] = found.pop("Random maps")
    found.pop("Integrated gradients")
    patches = images[0, 0].numel() // PATCH**2
    return Asked(
        effects,
        {name: partial(by_patch, method, images, classes) for name, method in found.items()},
        torch.ones(count, patches, dtype=torch.bool),
    )


def agreement(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each method's relevance against TokenKnockout's effects, on four tasks."""
    tasks: dict[str, Callable[[int, str], Asked]] = {
        "copying-mamba": partial(of_copying, "mamba"),
        "copying-mamba2": partial(of_copying, "mamba2"),
        "passkey-mamba": of_passkey,
        "stories-mamba": partial(of_stories, "stories-mamba"),
        "stories-mamba2": partial(of_stories, "stories-mamba2"),
        "digits-vim": of_digits,
    }
    rows = []
    for task in args.tasks or tasks:
        torch.manual_seed(0)
        asked = tasks[task](args.examples, args.formulation)
        effects = {readers: run() for readers, run in asked.effects.items()}
        found = {KNOCKOUT[readers]: one for readers, one in effects.items()}
        found |= {name: run().detach() for name, run in asked.explanations.items()}
        for name, relevance in found.items():
            row: dict[str, Any] = {"model": task, "n": len(relevance), "method": name}
            for readers, one in effects.items():
                agreed = knockout_agreement(relevance, one, mask=asked.mask, k=args.k)
                row[readers] = {key: asdict(e) for key, e in agreed.estimate().items()}
            if asked.cause is not None:
                largest = relevance.masked_fill(~asked.mask, -torch.inf).argmax(1)
                row["cause"] = asdict(bootstrap((largest == asked.cause).double()))
            rows.append(row)
            print(task, name, *(f"{row['later'][key]['value']:.2f}" for key in ("rank", "overlap")))
    return rows


def main() -> None:
    """Run one of the benchmarks and save its rows."""
    parser = options(__doc__, "interventions", repeats=3)
    parser.add_argument("what", choices=("cost", "circuits", "sweep", "patching", "agreement"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024])
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--examples", type=int, default=24)
    parser.add_argument("--tasks", nargs="+", help="of agreement, by model; default: all")
    parser.add_argument("--formulation", choices=("hidden", "unified"), default="hidden")
    parser.add_argument("--k", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=["mamba", "mamba2"])
    args = parsed(parser)
    name = args.what if args.formulation == "hidden" else f"{args.what}-unified"
    args.benchmark = f"interventions: {name}"
    args.output = args.output.with_stem(f"{args.output.stem}-{name}")
    keep(args, globals()[args.what](args))


if __name__ == "__main__":
    main()
