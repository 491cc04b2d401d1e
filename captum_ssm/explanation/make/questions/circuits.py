"""The circuit of each explained answer: which token reads which other one, in which layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from captum_ssm.attr import Edge, FlowGraph, RelevanceFlow
from captum_ssm.explanation import Answer, Output, Token
from captum_ssm.explanation.make.questions.base import FAILS, Questions
from captum_ssm.explanation.make.relevance.rows import Question
from captum_ssm.explanation.parts import NEXT, PART
from captum_ssm.explanation.pictures import picture_names
from captum_ssm.inspection.support import first_line
from captum_ssm.interventions import circuit
from captum_ssm.utils.progress import progress

SHARE = 0.9  # of the size of all edges, which those of a graph hold
PATHS = 5
COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50, 80)  # edges with which the model runs alone
CURVES = 8  # outputs of one text, at most, for which these runs are made
SEARCHED = 30  # paths among which one from another token than the output's is looked for


def circuits(
    questions: Questions, inputs: Tensor, tokens: Sequence[Token]
) -> tuple[dict[str, Any], ...]:
    """One flow graph for what is explained first at each output of a text.

    Args:
        questions (Questions): what is asked of the text.
        inputs (Tensor): what the model reads, ``(1, n)``.
        tokens (sequence of Token): of the text, n or more.

    Returns:
        tuple of dict: of the format captum_ssm.flow/1. A model that has no such graph is noted in
        the settings.
    """
    setup = questions.setup
    if not setup.circuit:
        return ()
    if not questions.run.is_plain:
        setup.note("no circuit: the answer is not an entry of what the model returns")
        return ()
    flow = RelevanceFlow(setup.model, memory_limit=setup.memory_limit)
    pictures = () if questions.run.media is None else questions.run.media.pictures
    texts = picture_names(pictures, [token.text for token in tokens])
    graphs = []
    for output, answer, foil, question in progress(list(_asked(questions)), "circuits"):
        # A model that predicts the next token reads nothing after it.
        text = inputs
        if output.role == NEXT and question.position is not None:
            text = inputs[:, : question.position + 1]
        try:
            graph = flow.graph(
                text,
                question.entry(question.answer),
                questions.run.extra(text),
                against="others" if foil is None else question.entry(foil.id),
                share=SHARE,
                tokens=texts[: text.shape[1]],
            )
        except FAILS as error:
            setup.note(f"no circuit: {first_line(error)}")
            return ()
        curve = {}
        if len(questions.outputs) <= CURVES:
            with torch.no_grad():
                curve = _curve(questions, text, question, graph)
        against = {} if foil is None else {"against": foil.text}
        graphs.append(_told(graph, output, answer, curve | against))
    return tuple(graphs)


def _curve(
    questions: Questions, tokens: Tensor, question: Question, graph: FlowGraph
) -> dict[str, Any]:
    # Runs of the model with the largest edges only, and what each token reads from itself: the
    # share of the score they recover, from that without edges to that with all of them, and
    # whether the answer comes first. Coefficients are those of the whole run.
    index = 0 if question.position is None else (0, question.position)
    whole = questions.run(tokens)[index].float()
    contrast = _contrast(whole, question)
    names = [name for layer in graph.layers for name in layer.name.split(" + ")]
    self_edges = [(name, t, t) for name in names for t in range(tokens.shape[1])]
    rows = {}
    try:
        for k in (0, *(k for k in COUNTS if k <= len(graph.edges))):
            edges = [Edge(edge.layer, edge.target, edge.source) for edge in graph.edges[:k]]
            with circuit(
                questions.setup.model,
                [*self_edges, *edges],
                formulation=graph.formulation,
                coefficients="whole",
            ):
                rows[k] = questions.run(tokens)[index].float()
    except FAILS as error:
        questions.setup.note(f"no curve of a circuit: {first_line(error)}")
        return {}
    scores = {k: float(row @ contrast) for k, row in rows.items()}
    none = scores.pop(0)
    full = float(whole @ contrast)
    if abs(full - none) < 1e-6:
        return {}
    curve = [(k, float(f"{(score - none) / (full - none):.4g}")) for k, score in scores.items()]
    if not curve:
        return {}
    few = next((k for k, share in curve if abs(share - 1) <= 0.1), max(scores))
    right = int(rows[few].argmax()) == question.answer
    return {"curve": [list(point) for point in curve], "alone": {"edges": few, "right": right}}


def _contrast(logits: Tensor, question: Question) -> Tensor:
    # The weights (V,) of the logits in the score that the graph explains.
    if question.against is None:
        others = logits.clone()
        others[question.answer] = -torch.inf
        contrast = -others.softmax(-1)
    else:
        contrast = torch.zeros_like(logits)
        contrast[question.against] = -1.0
    contrast[question.answer] = 1.0
    return contrast


def _asked(
    questions: Questions,
) -> Iterator[tuple[Output, Answer, Answer | None, Question]]:
    # At each output its answer, the one that it is held against, and what is asked of both.
    for output in questions.outputs:
        answer = output.answers[output.chosen]
        if answer.row is None or output.role == PART:
            continue
        if not output.contrasts:
            yield output, answer, None, questions.questions[answer.row]
        for contrast in output.contrasts:
            yield (
                output,
                answer,
                output.answers[contrast.against],
                questions.questions[contrast.row],
            )


def _told(
    graph: FlowGraph, output: Output, answer: Answer, facts: dict[str, Any]
) -> dict[str, Any]:
    # The page tells the path of another token than the one at which the answer is read.
    paths = graph.paths(PATHS)
    if all(path.nodes[0][1] in graph.at for path in paths):
        paths += [path for path in graph.paths(SEARCHED) if path.nodes[0][1] not in graph.at][:1]
    return graph.with_facts(
        answer=answer.text,
        predicted=output.answers[0].text,
        paths=[
            {"share": path.share, "nodes": [list(node) for node in path.nodes]} for path in paths
        ],
        **facts,
    ).to_dict()
