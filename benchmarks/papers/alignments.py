"""Word alignments from a translating Mamba (Pitorro & Treviso, 2025, section 4.2, table 3).

    python benchmarks/papers/alignments.py --checkpoint my-mamba-130m-iwslt17-de-en \\
        --source DeEn/de --target DeEn/en --alignments DeEn/alignmentDeEn.talp \\
        --first-index 1 --encoding latin-1

    python benchmarks/papers/alignments.py --checkpoint my-mamba-130m-iwslt17-de-en \\
        --data iwslt17-de-en-test.parquet --languages de en --alignments awesome-align.txt \\
        --table iwslt-de-en

The checkpoint is a language model fine-tuned on "source separator target" (the paper's, on IWSLT17,
are not published). The text is forced: each word of the reference translation is aligned to the
source word with the highest score, and the links are compared with gold ones by the alignment error
rate (Och & Ney, 2003) over all sentences. The gold file has one line per sentence, as "0-0 1p2": a
minus for a sure link, a p for a possible one, source first. Vilar et al.'s (2006) German-English
alignments are such a file, whose words count from one; for IWSLT17 the paper took what AwesomeAlign
(Dou & Neubig, 2021) finds, which writes such files too, counting from zero.

A token's row is the one that predicts it, at the token before it. Scores of a source word's
pieces are added and those of a target word's pieces averaged (Kobayashi et al., 2020). Methods
that explain one layer are read at the layer that does best on the first --choosing sentences, and
scored on the others; Mamba-Attribution, a product over layers, starts at that layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from explanations import chosen
from harness import dataset, options, processes, report
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from captum_ssm import LaTIM, MambaAttribution, MambaLRP, hidden_attention
from captum_ssm.explanation.make.answers.captum_llm import continuation_relevance
from captum_ssm.metrics import bootstrap, evaluate, links

COLUMNS = {"aer": ("AER ↓", 1)}
NOTES = (
    "Alignment error rate over all sentences, with 95% bootstrap intervals over sentences; in "
    "round brackets Pitorro & Treviso (2025), table 3, for the setting named above. Best layers "
    "are chosen on sentences that are not scored."
)
# Table 3: data, then model ("M1S" is Mamba-130m, "M1L" Mamba-370m, "M2" Mamba-2), then method.
ROWS = (
    "MambaLRP",
    "LaTIM (ALTI-Logit)",
    "Mamba-Attention, best layer",
    "Mamba-Attribution, best layer",
    "LaTIM (l2), best layer",
    "LaTIM (ALTI), best layer",
)
TABLE = {
    "gold-de-en": {
        "M1S": (0.50, 0.68, 0.84, 0.86, 0.46, 0.55),
        "M1L": (0.47, 0.69, 0.85, 0.87, 0.44, 0.54),
        "M2S": (None, 0.63, 0.84, 0.78, 0.49, 0.51),
        "M2L": (None, 0.69, 0.85, 0.70, 0.52, 0.51),
    },
    "iwslt-de-en": {
        "M1S": (0.65, 0.67, 0.79, 0.81, 0.47, 0.52),
        "M1L": (0.68, 0.71, 0.79, 0.82, 0.49, 0.53),
        "M2S": (None, 0.60, 0.72, 0.81, 0.43, 0.47),
        "M2L": (None, 0.74, 0.79, 0.81, 0.49, 0.47),
    },
    "iwslt-fr-en": {
        "M1S": (0.65, 0.71, 0.80, 0.73, 0.46, 0.53),
        "M1L": (0.66, 0.69, 0.79, 0.68, 0.48, 0.53),
        "M2S": (None, 0.62, 0.69, 0.72, 0.35, 0.38),
        "M2L": (None, 0.76, 0.78, 0.66, 0.37, 0.38),
    },
}
Pair = tuple[list[str], list[str], set[tuple[int, int]], set[tuple[int, int]]]
"""Source words, target words, sure links and possible links (source, target), the sure included."""
Maps = Callable[[Tensor, int], list[Tensor]]
"""Ids ``(1, L)`` and the target's start, to maps ``(T, L - 1)``, one per layer or one in all."""


def gold_links(line: str, first: int) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Sure and possible links of a line such as ``1-1 2p3``, whose words count from ``first``."""
    sure, possible = set(), set()
    for each in line.split():
        parts = each.replace("p", "-").split("-")
        if len(parts) != 2 or not all(part.isdigit() for part in parts):
            raise SystemExit(
                f"{each!r} is no link; expected links such as 0-0 (sure) and 0p0 (possible)."
            )
        link = (int(parts[0]) - first, int(parts[1]) - first)
        if min(link) < 0:
            raise SystemExit(f"{each!r} lies before the first word; see --first-index.")
        possible.add(link)
        if "p" not in each:
            sure.add(link)
    return sure, possible


def lines(path: Path, encoding: str = "utf-8") -> list[str]:
    """A file's lines; other separators, such as U+2028, stand within sentences."""
    with path.open(encoding=encoding, newline="\n") as file:
        return [line.removesuffix("\n").removesuffix("\r") for line in file]


def sentence_pairs(
    source: Sequence[str], target: Sequence[str], gold: Sequence[str], first: int
) -> list[Pair]:
    """Sentences, parted at spaces, with their gold links."""
    if not len(source) == len(target) == len(gold):
        counts = len(source), len(target), len(gold)
        raise SystemExit(f"source, target and alignments have {counts} sentences.")
    pairs = []
    for number, (s, t, g) in enumerate(zip(source, target, gold, strict=True), 1):
        sure, possible = gold_links(g, first)
        words = s.split(), t.split()
        if not all(words):
            raise SystemExit(
                f"sentence {number} has no words: {s!r}, {t!r}; take that line out of the source, "
                "the target and the alignments."
            )
        if any(i >= len(words[0]) or j >= len(words[1]) for i, j in possible):
            raise SystemExit(f"{g!r} links words that {s!r} and {t!r} do not have.")
        pairs.append((*words, sure, possible))
    return pairs


def pieces(tokenizer: Any, words: list[str], *, starts: bool) -> tuple[list[int], list[int]]:
    """Token ids of words, and which word each is of; ``starts`` where nothing stands before."""
    ids, owner = [], []
    for k, word in enumerate(words):
        text = word if k == 0 and starts else f" {word}"
        found = tokenizer(text, add_special_tokens=False).input_ids
        ids += found
        owner += [k] * len(found)
    return ids, owner


def word_map(
    scores: Tensor, source: list[int], target: list[int], shape: tuple[int, int]
) -> Tensor:
    """Scores ``(T, S)`` of tokens as scores of words ``(target, source)``."""
    onto = torch.zeros(len(source), shape[1], dtype=scores.dtype)
    onto[torch.arange(len(source)), torch.tensor(source)] = 1
    out = torch.zeros(shape[0], len(target), dtype=scores.dtype)
    out[torch.tensor(target), torch.arange(len(target))] = 1
    return (out / out.sum(1, keepdim=True).clamp(min=1)) @ scores @ onto


def counts(predicted: set[Any], sure: set[Any], possible: set[Any]) -> Tensor:
    """What the error rate is made of: the sizes of A & S, A & P, A and S."""
    sizes = len(predicted & sure), len(predicted & possible), len(predicted), len(sure)
    return torch.tensor(sizes, dtype=torch.float64)


def error_rate(numbers: Tensor) -> Tensor:
    """The alignment error rate of sentences' ``counts (B, 4)``, taken together."""
    in_sure, in_possible, found, sure = numbers.sum(0)
    return 1 - (in_sure + in_possible) / (found + sure)


def methods(model: Any) -> Iterator[tuple[str, Maps]]:
    """The methods of table 3, by the paper's names."""
    latim = LaTIM(model)
    layers = range(model.config.num_hidden_layers)

    def over_all(method: Any, **options: Any) -> Maps:
        return lambda ids, start: [
            continuation_relevance(method, ids[:, :start], ids[0, start:], **options)
        ]

    def attention(ids: Tensor, start: int) -> list[Tensor]:
        rows = list(range(start - 1, ids.shape[1] - 1))
        maps = hidden_attention(model, ids[:, :-1], reduction="mean", rows=rows)
        return [rows[0].abs() for rows in maps.values()]

    def attribution(ids: Tensor, start: int) -> list[Tensor]:
        method = MambaAttribution(model)
        return [
            continuation_relevance(method, ids[:, :start], ids[0, start:], start_layer=layer)
            for layer in layers
        ]

    def interactions(aggregation: str) -> Maps:
        return lambda ids, start: [
            latim.interactions(ids[:, :-1], layer, aggregation, activation="silu")[0, start - 1 :]
            for layer in layers
        ]

    yield "MambaLRP", over_all(MambaLRP(model))
    yield "LaTIM (ALTI-Logit)", over_all(latim)
    yield "Mamba-Attention, best layer", attention
    yield "Mamba-Attribution, best layer", attribution
    yield "LaTIM (l2), best layer", interactions("l2")
    yield "LaTIM (ALTI), best layer", interactions("alti")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--checkpoint", required=True, help="a folder or hub name")
    parser.add_argument("--alignments", type=Path, required=True, help="one line per sentence")
    parser.add_argument("--first-index", type=int, default=0, help="of a word in the alignments")
    parser.add_argument("--source", type=Path, help="one line per sentence")
    parser.add_argument("--target", type=Path, help="one line per sentence")
    parser.add_argument("--encoding", default="utf-8", help="of source and target")
    parser.add_argument(
        "--data", help="instead: a data set with a column translation; hub name, folder or file"
    )
    parser.add_argument("--split", default="test", help="of --data")
    parser.add_argument("--languages", nargs=2, default=["de", "en"], help="of --data")
    parser.add_argument("--separator", default="\n", help="between source and target, as trained")
    parser.add_argument("--choosing", type=int, default=50, help="sentences that choose the layer")
    parser.add_argument("--table", choices=list(TABLE), default="gold-de-en", help="the paper's")
    parser.add_argument("--size", choices=["M1S", "M1L", "M2S", "M2L"], default="M1S")
    args = parser.parse_args(arguments)
    accelerator = processes(args.cpu)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint).eval().to(accelerator.device)
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint)
    if args.data is not None:
        rows = dataset(args.data, None, args.split, None)["translation"]
        texts = [[row[language] for row in rows] for language in args.languages]
    elif args.source is not None and args.target is not None:
        texts = [lines(path, args.encoding) for path in (args.source, args.target)]
    else:
        raise SystemExit("no sentences: give --source and --target, or --data.")
    pairs = sentence_pairs(*texts, lines(args.alignments), args.first_index)[: args.limit]
    if not 0 < args.choosing < len(pairs):
        raise SystemExit(f"--choosing {args.choosing}: there are {len(pairs)} sentences in all.")
    between = tokenizer(args.separator, add_special_tokens=False).input_ids
    scores, best = {}, {}
    for name, method in chosen(dict(methods(model)), args.methods).items():

        def score(batch: list[Pair], method: Any = method) -> Tensor:
            ((source, target, sure, possible),) = batch
            head, of_source = pieces(tokenizer, source, starts=True)
            tail, of_target = pieces(tokenizer, target, starts=False)
            start = len(head) + len(between)
            ids = torch.tensor([[*head, *between, *tail]], device=accelerator.device)
            shape = len(target), len(source)
            maps = [
                word_map(rows[:, : len(head)].double().cpu(), of_source, of_target, shape)
                for rows in method(ids, start)
            ]
            return torch.stack([counts(links(each), sure, possible) for each in maps])[None]

        found = evaluate(score, pairs, batch_size=1, accelerator=accelerator)  # (B, layers, 4)
        choosing, scoring = found[: args.choosing], found[args.choosing :]
        layer = int(torch.stack([error_rate(each) for each in choosing.unbind(1)]).argmin())
        best[name] = layer if found.shape[1] > 1 else None
        scores[name] = {"aer": bootstrap(scoring[:, layer], statistic=error_rate)}
    about = {
        "checkpoint": args.checkpoint,
        "sentences": len(pairs) - args.choosing,
        "best layers": best,
        "the paper's": f"{args.table}, {args.size}",
    }
    known = zip(ROWS, TABLE[args.table][args.size], strict=True)
    paper = {name: {"aer": value} for name, value in known if value is not None}
    report(accelerator, args.output, "alignments", about, scores, paper, COLUMNS, NOTES)


if __name__ == "__main__":
    main()
