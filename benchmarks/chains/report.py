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


def _hops(methods: dict[str, Any], signs: str) -> str:
    body = []
    for name, found in methods.items():
        hops = found["hops"][signs]
        for k in range(len(hops["right record"])):
            body.append([name if k == 0 else "", str(k), *(shown(hops[c][k]) for c in hops)])
    columns = list(next(iter(methods.values()))["hops"][signs])
    return lines(["method", "hop", *columns], body)


def _weights(methods: dict[str, Any]) -> str:
    body = []
    for name, found in methods.items():
        for signs, ways in found["weights"].items():
            for way, table in ways.items():
                body.append([name, signs, way, *(shown(value) for value in table.values())])
    columns = ["order (AUC)", "whole chain before the other", "distance to equal shares"]
    return lines(["method", "signs", "weights", *columns], body)


def _direct(methods: dict[str, Any]) -> str:
    body = [
        [name, *(shown(found["direct effects"][c]) if c in found["direct effects"] else "" for c in
                 ("correlation", "thought"))]
        for name, found in methods.items()
    ]  # fmt: skip
    return lines(["method", "correlation", "most relevant thought has the largest effect"], body)


def report(row: dict[str, Any]) -> str:
    """The Markdown file next to the JSON."""
    methods = {name: found for name, found in row["methods"].items() if "error" not in found}
    failed = [f"{n}: {f['error']}" for n, f in row["methods"].items() if "error" in f]
    form = "written down before the number" if row["aloud"] else "answered at once"
    return f"""# {row["model"]}

Two chains of {row["links"]} links, {form}; {row["examples"]} held-out chains explained, all
continued without a mistake. Intervals are 95% bootstraps over chains.

## Interventions

{_interventions(row)}

## Hops

Shares of each hop's relevance on the prompt, of its positive part: the record that the hop is
about (the last one for hop 0, and so on backwards), the rest of the asked chain, the other chain;
how often the record with the largest share is the right one; and how much of all relevance of the
hop lies on words of the continuation, from which the next hop starts.

{_hops(methods, "positive")}

## Signs and weights

Every record of the asked chain is needed: the answer changes with each of them and with none of the
other chain's. Ways to summarize the hops, against that.

{_weights(methods)}

## Direct effects

Relevance of thoughts and records for each word of the chain, against the fall of the word's logit
when one of them is swapped and everything else is kept.

{_direct(methods)}
{"".join(f"{chr(10)}Not measured: {line}" for line in failed)}
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
