"""Circuits as data: kept, opened again, and refused where something is wrong."""

import copy
import json
import re
from dataclasses import replace

import flow_graphs
import numpy as np
import pages
import pytest

from captum_ssm.explanation import Explanation
from captum_ssm.explanation.circuits import MOST_EDGES, check_circuit
from captum_ssm.explanation.page import page_html
from captum_ssm.explanation.page.data import page_data


def test_the_graphs_of_the_tests_balance():
    graph = flow_graphs.flow_graph()
    nodes = {(s, t): value for s, t, value, *_ in graph["nodes"]}
    stays = {(s, t): value for s, t, value, *_ in graph["stays"]}
    for (s, t), value in nodes.items():
        into = sum(e[3] for e in graph["edges"] if (e[0] + 1, e[2]) == (s, t))
        out = sum(e[3] for e in graph["edges"] if (e[0], e[1]) == (s, t))
        if s:
            np.testing.assert_allclose(into + stays[s - 1, t], value, atol=1e-12)
        if s < len(graph["layers"]):
            np.testing.assert_allclose(out + stays.get((s, t), 0), value, atol=1e-12)


@pytest.mark.parametrize("make", [flow_graphs.flow_graph, flow_graphs.shifted, flow_graphs.deep])
def test_a_circuit_is_kept_with_its_explanation(make, tmp_path):
    graph = make()
    check_circuit(graph)
    explanation = pages.explanation(flow_graphs.explained(graph))
    explanation.save(tmp_path / "why.json")
    again = Explanation.load(tmp_path / "why.json")
    assert again.examples[0].circuits == explanation.examples[0].circuits
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "why.json").read_bytes()


def test_a_file_without_circuits_opens(tmp_path):
    pages.explanation(replace(pages.story(), maps=())).save(tmp_path / "old.json")
    held = json.loads((tmp_path / "old.json").read_text())
    del held["examples"][0]["circuits"]
    (tmp_path / "old.json").write_text(json.dumps(held))
    assert Explanation.load(tmp_path / "old.json").examples[0].circuits == ()


def test_the_page_has_what_it_draws_and_no_more():
    explanation = pages.explanation(flow_graphs.explained(flow_graphs.flow_graph()))
    (circuit,) = page_data(explanation)["examples"][0]["circuits"]
    assert {"tokens", "nodes", "stays", "edges", "paths", "curve"} <= {*circuit}
    assert not {"format", "title", "model"} & {*circuit}
    assert page_data(pages.explanation())["examples"][0]["circuits"] == []


NESTED = json.loads("[" * 50 + "]" * 50)
WRONG = {
    "format": ["captum_ssm.flow/2", None],
    "tokens": [[], "text", [1, 2], None],
    "at": [-1, 16, 1.5, None, True],
    "answer": [None, 3],
    "cause": [16, "Anna"],
    "score": [3.0, {"of": "logit"}, {"of": 1, "value": 1.0}, {"of": "logit", "value": np.nan}],
    "layers": [[], [{"name": "a"}], {"name": "a"}, [NESTED]],
    "relevance": [[1.0], [np.nan] * 16, [np.inf] * 16, None],
    "nodes": [[[4, 0, 1.0]], [[0, 16, 1.0]], [[0, 0, None]], [[0, 0, np.nan]], [[0, 0]], NESTED],
    "stays": [[[3, 0, 1.0]], [[0, 0, np.inf]], [[0.5, 0, 1.0]], NESTED],
    "edges": [
        [[3, 0, 1, 1.0]],
        [[0, 16, 1, 1.0]],
        [[0, 0, 16, 1.0]],
        [[0, 0, 1, np.nan]],
        [[0, 0, 1, 1.0, [np.inf]]],
        [[0, 0, 1, 1.0, None, "jump"]],
        [[0, 0, 1, 1.0, None, "mix", 3]],
        [[0, 0, 1]],
        [[0, -1, 1, 1.0]],
        [3],
        NESTED,
        [[0, 0, 1, 1.0]] * (MOST_EDGES + 1),
    ],
    "ranked": [-1, 7, None, 1.5],
    "of": [0, -1, "all"],
    "curve": [[[1, np.nan]], [[2, 0.5], [1, 0.7]], [[0, 0.5]], [[1]], NESTED],
    "held": [np.nan, -0.5, 1.5],
    "alone": [{"edges": 1}, {"edges": 1, "right": 1}, 3],
    "paths": [
        [{"share": 1.0}],
        [{"share": np.nan, "nodes": [[0, 0], [1, 0], [2, 0], [3, 0]]}],
        [{"share": 1.0, "nodes": [[0, 0], [1, 0]]}],
        [{"share": 1.0, "nodes": [[0, 0], [1, 0], [3, 0], [2, 0]]}],
        [{"share": 1.0, "nodes": [[0, 16], [1, 0], [2, 0], [3, 0]]}],
        NESTED,
    ],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_a_damaged_circuit_is_refused_where_it_is_wrong(name, value):
    example = flow_graphs.explained(flow_graphs.flow_graph())
    graph = copy.deepcopy(example.circuits[0]) | {name: value}
    with pytest.raises(ValueError, match=re.escape(f".circuits[0].{name}")):
        page_html(pages.explanation(replace(example, circuits=(graph,))))


def test_a_damaged_circuit_of_a_file_is_refused(tmp_path):
    path = tmp_path / "why.json"
    pages.explanation(flow_graphs.explained(flow_graphs.flow_graph())).save(path)
    text = path.read_text()
    for old, new, message in (
        ('"at":15', '"at":99', r"examples\[0\].circuits\[0\].at is 99"),
        ('"ranked":6', '"ranked":1e999', "finite"),
        ('"curve":[[1,', '"curve":[[NaN,', "NaN"),
        ('"paths":[', '"paths":' + "[" * 100_000, "JSON"),
    ):
        assert old in text
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(ValueError, match=message):
            Explanation.load(path)


def test_a_circuit_has_tokens_of_its_text_alone():
    example = flow_graphs.explained(flow_graphs.flow_graph())
    with pytest.raises(ValueError, match="at most the text's 3 tokens"):
        page_html(
            pages.explanation(
                replace(
                    example,
                    tokens=example.tokens[:3],
                    prompt=2,
                    outputs=(replace(example.outputs[0], position=2),),
                    relevance={k: v[:, :3] for k, v in example.relevance.items()},
                )
            )
        )
