"""Show the circuit of a prediction: which token reads which other one, in which layer."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

from captum_ssm.cli.arguments import (
    DATA,
    PICTURES,
    add_output,
    check_output,
    check_text,
    numbers,
    write,
)
from captum_ssm.cli.loading import (
    MODEL,
    add_loading,
    check_loading,
    load_model,
    load_tokenizer,
    quiet,
)
from captum_ssm.cli.terminal import visible
from captum_ssm.explanation.make import explain


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.usage = f"{parser.prog} MODEL (--text TEXT | --ids IDS) [options]"
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    inputs = parser.add_mutually_exclusive_group(required=True)
    inputs.add_argument("--text", help="The text that the model reads.")
    inputs.add_argument("--ids", help="Token ids in place of a text, such as '3,1,4'.")
    parser.add_argument(
        "--target",
        help="The continuation that is explained, one circuit per token, or with --ids its token "
        "ids; for a classifier a class or its label. Default: what the model predicts",
    )
    parser.add_argument(
        "--against",
        help="Another continuation, token id or class: what is explained is the target's score "
        "minus that of this one. Default: all other answers, by their probabilities",
    )
    parser.add_argument(
        "--edges",
        type=int,
        default=10,
        metavar="N",
        help="How many of the largest edges are printed. Default: 10",
    )
    add_output(
        parser,
        "Where to write a page (.html), the data (.json) or a picture of the first circuit "
        "(.png, .svg, .pdf).",
    )
    add_loading(parser)


def run(args: argparse.Namespace) -> None:
    """Explain, print, and write."""
    check_output(args.output, (*DATA, *PICTURES))
    check_text(args.text)
    if args.edges < 0:
        raise ValueError(f"--edges is {args.edges}; expected 0 or more.")
    asked: dict[str, Any] = {"inputs": args.text, "target": args.target, "against": args.against}
    if args.ids is not None:
        asked = {
            "inputs": [numbers(args.ids, "--ids")],
            "target": numbers(args.target, "--target"),
            "against": numbers(args.against, "--against"),
        }
    check_loading(args)
    with quiet():
        model = load_model(args, images=False)
        tokenizer = load_tokenizer(args.model) if args.ids is None else None
        explanation = explain(model, tokenizer, **asked, circuit=True)
    (example,) = explanation.examples
    if not example.circuits:
        raise ValueError(
            f"{args.model} has no circuit here: {'; '.join(explanation.settings['notes'])}"
        )
    for circuit in example.circuits:
        _show(circuit, args.edges)
    title, graph = explanation.title, example.circuits[0]
    write(explanation, args.output, figure=partial(_figure, graph, title), dpi=200)


def _figure(circuit: Mapping[str, Any], title: str) -> Any:
    from captum_ssm.visualization import flow_graph

    return flow_graph(circuit, title=title)


def _show(circuit: Mapping[str, Any], count: int) -> None:
    score = circuit["score"]["value"]
    foil = f" against {_named(circuit['against'])}" if circuit.get("against") else ""
    print(f"{_named(circuit['answer'])}{foil}, score {score:+.4g}, read at {_token(circuit, -1)}\n")
    print("Paths, by their share of the score:")
    for path in circuit["paths"]:
        print(f"  {path['share']:6.1%}  {_way(circuit, path['nodes'])}")
    ranked = circuit["edges"][: min(count, circuit["ranked"])]
    print(f"\nThe largest {len(ranked)} of {circuit['of']:,} edges between tokens:")
    for layer, source, target, value, *_ in ranked:
        kind = circuit["layers"][layer]["kind"]
        reads = f"{_token(circuit, target)} reads {_token(circuit, source)}"
        print(f"  {value:+9.4g}  {value / (score or 1):7.1%}  layer {layer}, {kind}: {reads}")
    print()


def _way(circuit: Mapping[str, Any], nodes: list[list[int]]) -> str:
    # The tokens of a path, and the layers in which it goes from one to the next.
    text = _token(circuit, nodes[0][1])
    for (layer, source), (end, target) in pairwise(nodes):
        if source != target:
            way = "by the token shift of" if end == layer else "in"
            text += f" -> {_token(circuit, target)} {way} layer {layer}"
    return text if "->" in text else f"{text} keeps its own"


def _token(circuit: Mapping[str, Any], t: int) -> str:
    position = circuit["at"] if t < 0 else t
    return f"{_named(circuit['tokens'][position])} ({position})"


def _named(text: str) -> str:
    return f"'{visible(text.strip() or text)}'"
