"""The tables of `evaluate_chains.py`, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def shown(interval: Sequence[float]) -> str:
    """A mean with its 95% interval."""
    value, low, high = interval
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    rule = "|".join(["---"] * len(head))
    return (
        "\n".join(f"| {' | '.join(row)} |" for row in [head])
        + "\n"
        + "\n".join([f"|{rule}|", *(f"| {' | '.join(row)} |" for row in rows)])
    )


def _interventions(row: dict[str, Any]) -> str:
    parts = []
    for kind, title in (
        ("swapped", "A thought is swapped for the other chain's, and the model goes on"),
        ("records", "A record is changed for the other chain's, or removed, and the model answers"),
    ):
        table = row["interventions"][kind]
        if table:
            columns = list(next(iter(table.values())))
            body = [[where, *(shown(found[c]) for c in columns)] for where, found in table.items()]
            parts.append(f"{title}:\n\n{lines([kind, *columns], body)}")
    return "\n\n".join(parts)


def _hops(methods: dict[str, Any], way: str, signs: str) -> str:
    body, columns = [], ["right record", "rest of the chain", "other chain", "largest is right"]
    columns.append("handed on")
    for name, found in methods.items():
        (hops,) = [h for h in found["hops"] if (h["way"], h["signs"]) == (way, signs)]
        for k in range(len(hops["right record"])):
            body.append([name if k == 0 else "", str(k), *(shown(hops[c][k]) for c in columns)])
    return lines(["method", "hop", *columns], body)


def _summaries(methods: dict[str, Any]) -> str:
    measures = {
        "order": "order (AUC)",
        "whole chain first": "whole chain before the other",
        "distance": "distance to equal shares",
    }
    body = [
        [
            name,
            *(row[key] for key in ("way", "signs", "summary")),
            *(shown(row[m]) for m in measures),
        ]
        for name, found in methods.items()
        for row in found["summaries"]
        if row["signs"] == "positive" or row["way"] == "thoughts, by swaps"
    ]
    return lines(["method", "handed on by", "signs", "summary", *measures.values()], body)


def _direct(methods: dict[str, Any]) -> str:
    columns = {
        "correlation": "correlation, thoughts and records",
        "records only": "correlation, records",
        "thought": "most relevant thought has the largest effect",
    }
    body = [
        [
            name,
            *(shown(found["direct effects"][c]) for c in columns if c in found["direct effects"]),
        ]
        for name, found in methods.items()
    ]
    known = next(iter(methods.values()))["direct effects"]
    return lines(["method", *(said for c, said in columns.items() if c in known)], body)


def report(row: dict[str, Any]) -> str:
    """The Markdown file next to the JSON."""
    methods = row["methods"]
    form = "written down before the number" if row["aloud"] else "answered at once"
    ways = dict.fromkeys(h["way"] for h in next(iter(methods.values()))["hops"])
    hops = "\n\n".join(f"Handed on by: {way}.\n\n{_hops(methods, way, 'positive')}" for way in ways)
    return f"""# {row["model"]}

Two chains of {row["links"]} links, {form}; {row["examples"]} held-out chains explained, all
continued without a mistake. Intervals are 95% bootstraps over chains.

## Interventions

{_interventions(row)}

## Direct effects

Relevance of thoughts and records for each word of the chain, against the fall of the word's logit
when one of them is swapped and everything else is kept.

{_direct(methods)}

## Hops

Shares of each hop's relevance on the prompt, of its positive part: the record that the hop is
about (the last one for hop 0, and so on backwards), the rest of the asked chain, the other chain;
how often the record with the largest share is the right one; and how much of all relevance of the
hop lies on words of the continuation, from which the next hop starts.

{hops}

## Summaries

A right answer needs every record of the asked chain and none of the other's; the table of
interventions has how far the model's own answers do. Ways to sum the hops up, against that.

{_summaries(methods)}
"""


def document_report(row: dict[str, Any]) -> str:
    """The Markdown file of `evaluate_documents.py`."""
    body = []
    for name, kinds in row["methods"].items():
        for kind, found in kinds.items():
            body.append([name, kind, *(shown(value) for value in found.values())])
    columns = list(next(iter(row["methods"].values()))["plain"])
    truth = [[name, shown(value)] for name, value in row["interventions"].items()]
    return f"""# {row["model"]}

Three documents, and a question about one: {row["examples"]} held-out prompts without an order,
with a remark, and with an order that the model obeys, all answered right. Shares of the relevance
on the prompt, of its {row["signs"]} part, by `captum_ssm.metrics.part_shares`: of the part that the
answer is from (the asked document, or the order), of the order or remark, and of the question.
"Interval above all others" counts prompts in which the right part's 95% interval over the answer's
tokens lies above the intervals of all other documents and of the order or remark.
Intervals in this table are 95% bootstraps over prompts.

{lines(["the order is obeyed; then", "share of prompts"], truth)}

{lines(["method", "prompts", *columns], body)}
"""
