"""What print(explanation) shows: few lines, with the parts that have the most relevance."""

import re
from dataclasses import replace

import numpy as np
import pages
import pytest

from captum_ssm import explain
from captum_ssm.explanation.lines import told_probability

ALL = {
    "texts": pages.many,
    "hostile": pages.hostile,
    "a long text": lambda: pages.long(3000),
    **{
        make.__name__: lambda make=make: pages.explanation(make())
        for make in (
            *(pages.answer_at_once, pages.picture, pages.film, pages.series, pages.row),
            *(pages.classes, pages.tags, pages.places, pages.unknown, pages.chat, pages.checked),
        )
    },
}


@pytest.mark.parametrize("name", ALL)
def test_any_explanation_is_printed_in_few_lines(name):
    explanation = ALL[name]()
    first, *lines = str(explanation).split("\n")
    assert first == repr(explanation)
    assert 2 <= len(lines) <= 28
    assert all(line.isprintable() and len(line) < 110 for line in lines)
    assert any(re.search(r" [+-]\d\S*  [#-]+$", line) for line in lines)


def numbers(lines):
    """The numbers of the lines of a table, the largest first."""
    values = [float(match[1]) for line in lines if (match := re.search(r" ([+-]\d\S*)( |$)", line))]
    return sorted(values, key=abs, reverse=True)


def test_the_tokens_with_the_most_relevance_are_printed(model, words):
    found = explain(model, words, "w3 w4 w5 w6 w7 w8 w9", target="w10")
    _, heading, *table, count, own = str(found).split("\n")
    assert heading.startswith("'w10', probability ")
    relevance = found.relevance()[:6]
    largest = np.sort(np.argsort(-abs(relevance))[:5])
    assert [line.split()[:2] for line in table] == [[str(i), f"w{3 + i}"] for i in largest]
    assert [float(line.split()[2]) for line in table] == pytest.approx(relevance[largest], rel=1e-3)
    assert count == "the 5 largest of 6 tokens"
    assert own.startswith("not shown: 'w9', at which the answer is read")


def test_a_contrast_is_printed_in_place_of_the_answer_by_itself(model, words):
    found = explain(
        model, words, "w3 w4 w5", target="w6", against="w7", methods=["rollout", "latim"]
    )
    lines = str(found).split("\n")
    assert lines[1] == "'w6', not 'w7', by rollout"
    assert "'w6', not 'w7', by latim" in lines
    both = explain(model, words, [f"w3 w{k} w5" for k in range(4, 9)], target="w6")
    assert "w3 w4 w5 w6" in str(both)
    assert str(both).endswith("2 more: explanation[i].relevance(method, output), or to_html(path)")


@pytest.mark.parametrize(
    ("value", "says"), [(0.99996, "1.0000"), (0.5, "0.5000"), (3e-6, "3e-06"), (0.0, "0.0000")]
)
def test_a_small_probability_is_not_told_as_zero(value, says):
    assert told_probability(value) == says
    example = pages.classes()
    answers = tuple(replace(one, probability=value) for one in example.outputs[0].answers)
    output = replace(example.outputs[0], answers=answers, contrasts=())
    changed = replace(example, outputs=(output,))
    assert f", probability {says}; " in str(pages.explanation(changed))


@pytest.mark.parametrize("name", ["picture", "film"])
def test_patches_of_pictures_are_summed(name):
    found = ALL[name]()
    (example,) = found.examples
    row = found.relevance()
    grid = (1,) * (row.ndim - len(example.grid)) + example.grid
    cells = [np.array_split(np.arange(n), k) for n, k in zip(row.shape, grid, strict=True)]
    places = ([c[i] for c, i in zip(cells, at, strict=True)] for at in np.ndindex(grid))
    sums = [row[np.ix_(*place)].sum() for place in places]
    expected = sorted(sums, key=abs, reverse=True)[:5]
    assert numbers(str(found).split("\n")[2:7]) == pytest.approx(expected, rel=1e-3)


def test_values_of_series_and_tables_are_named():
    found = ALL["series"]()
    (example,) = found.examples
    row = found.relevance()
    step, feature = np.unravel_index(abs(row).argmax(), row.shape)
    strongest = str(found).split("\n")[2]
    assert strongest.startswith(f"  {example.features[feature]}, step {step} ")
    assert numbers([strongest]) == pytest.approx([row[step, feature]], rel=1e-3)
    table = ALL["row"]()
    at = abs(table.relevance()).argmax()
    assert str(table).split("\n")[2].startswith(f"  {table.examples[0].features[at]} ")
