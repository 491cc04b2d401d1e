"""The circuit of each explained answer: which token reads which other one, in which layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from captum_ssm.attr import FlowGraph, RelevanceFlow
from captum_ssm.explanation import Answer, Output, Token
from captum_ssm.explanation.make.questions import FAILS, Questions
from captum_ssm.explanation.make.rows import Question
from captum_ssm.explanation.parts import NEXT
from captum_ssm.utils.progress import progress

SHARE = 0.9  # of the size of all edges, which those of a graph hold
PATHS = 5
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
        setup.note("no circuit: the answer is no entry of what the model returns")
        return ()
    flow = RelevanceFlow(setup.model, memory_limit=setup.memory_limit)
    found = []
    for output, answer, question in progress(list(_asked(questions)), "circuits"):
        # A model that predicts the next token reads nothing after it.
        read = inputs
        if output.role == NEXT and question.position is not None:
            read = inputs[:, : question.position + 1]
        try:
            graph = flow.graph(
                read,
                question.place(question.answer),
                questions.run.extra(read),
                share=SHARE,
                tokens=[token.text for token in tokens[: read.shape[1]]],
            )
        except FAILS as error:
            setup.note(f"no circuit: {str(error).splitlines()[0]}")
            return ()
        found.append(_told(graph, output, answer))
    return tuple(found)


def _asked(questions: Questions) -> Iterator[tuple[Output, Answer, Question]]:
    for output in questions.outputs:
        answer = output.answers[output.chosen]
        if answer.row is not None:
            yield output, answer, questions.questions[answer.row]


def _told(graph: FlowGraph, output: Output, answer: Answer) -> dict[str, Any]:
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
    ).to_dict()
