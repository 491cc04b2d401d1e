"""A corpus of explanations as a report: means by brute force, groups, slices, and two runs."""

import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pages
import pytest
from folders import ROOT
from scipy import stats

from captum_ssm import examples, explain, explain_dataset
from captum_ssm.cli import main
from captum_ssm.explanation import Explanation, Slice, summarize
from captum_ssm.explanation.corpus import page_data
from captum_ssm.explanation.corpus.page_data import report_data
from captum_ssm.explanation.corpus.readings import bin_of
from captum_ssm.utils.intervals import moderated_halves


def one_row(texts: list[str], rows: list[list[float]], answers: list[str]) -> Explanation:
    """Texts whose last token is read, each with one answer that one row explains."""
    examples = []
    for text, row, answer in zip(texts, rows, answers, strict=True):
        one = pages.story(text, answer, name=text)
        (output,) = one.outputs[:1]
        relevance = {"mamba-lrp": np.array([row], np.float32)}
        chosen = replace(output.answers[0], row=0)
        output = replace(output, answers=(chosen,), contrasts=(), lens=())
        examples.append(
            replace(one, outputs=(output,), relevance=relevance, deltas={}, maps=(), units={})
        )
    found = pages.explanation(*examples)
    return replace(found, methods=found.methods[:1])


TEXTS = ["a b c d", "b a c d", "a a b d", "c b a d"]
ROWS = [[3, 1, 0, 9, 0], [1, 3, -4, 9, 0], [2, 2, 4, 9, 0], [0, 1, 1, 9, 0]]


@pytest.fixture(scope="module")
def small():
    return one_row(TEXTS, ROWS, [" x", " y", " x", " y"])


def test_mean_shares_are_those_of_brute_force(small):
    found = {one.key: one for one in summarize(small).shares["token"]}
    # The last word is the reading token, which is left out, and so is the answer.
    assert set(found) == {"a", "b", "c"}
    per_example = []
    for text, row in zip(TEXTS, ROWS, strict=True):
        words, sizes = text.split()[:3], np.abs(row[:3]) / np.abs(row[:3]).sum()
        per_example.append({w: [sizes[k] for k in range(3) if words[k] == w] for w in words})
    for key, entry in found.items():
        means = [np.mean(one[key]) for one in per_example if key in one]
        assert entry.examples == len(means)
        assert entry.share == pytest.approx(np.mean(means))
        sums = [sum(one.get(key, [0])) for one in per_example]
        assert entry.total == pytest.approx(np.mean(sums))
        assert entry.low <= entry.share <= entry.high
    assert sum(one.total for one in found.values()) == pytest.approx(1)
    (c,) = (one for one in found.values() if one.key == "c")
    assert c.leaning == pytest.approx((0 - 4 / 8 + 0) / (4 / 8 + 0))


def test_tenths_keep_all_relevance_and_distances_count_from_the_answer(small):
    report = summarize(small)
    assert sum(one.share for one in report.shares["tenth"]) == pytest.approx(1)
    by_distance = {one.key: one.share for one in report.shares["distance"]}
    sizes = np.array([np.abs(row[:3]) / np.abs(row[:3]).sum() for row in ROWS])
    for distance in (1, 2, 3):
        assert by_distance[distance] == pytest.approx(sizes[:, 3 - distance].mean())
    kept = summarize(small, reading_token=True).shares["distance"]
    assert 0 in {one.key for one in kept}
    assert report.own == pytest.approx(np.mean([9 / np.abs(row[:4]).sum() for row in ROWS]))


def test_bins_of_places_double():
    assert [bin_of(k) for k in (0, 15, 16, 31, 32, 100, -5, -40)] == [
        0,
        15,
        16,
        16,
        32,
        64,
        -5,
        -32,
    ]


def test_the_page_says_what_it_leaves_out(small, monkeypatch):
    report = summarize(small)
    assert not any("evenly spaced" in note for note in report_data(report)["notes"])
    monkeypatch.setattr(page_data, "MOST_LISTED", 2)
    monkeypatch.setattr(page_data, "MOST_TEXTS", 1)
    data = report_data(report)
    listed, told = data["listed"]["index"], " ".join(data["notes"])
    assert {0, 2, *data["rows"]} == {*listed}
    assert f"have {len(listed)} of 4, evenly spaced" in told
    assert "pages of their own: 1, the most" in told
    part = Slice("n", "", (), None, None, {}, (), (), ())
    slices = tuple(replace(part, name=str(k)) for k in range(41))
    data = report_data(replace(report, slices=slices))
    assert len(data["slices"]) == page_data.MOST_SLICES
    assert "the first 40 of 41 slices" in " ".join(data["notes"])


def test_what_all_examples_share_takes_no_room_from_them(small):
    report = summarize(small)
    many = {"target": ["is"] * 200_000}
    told = {row: replace(one, settings=many) for row, one in report.shown.items()}
    rows = report_data(replace(report, shown=told))["rows"]
    assert rows == report_data(report)["rows"] == list(report.shown)


def test_texts_of_one_token_which_has_all_relevance_are_among_the_others():
    # Their only token is the reading token, which is left out: the other shares stay.
    loaded = examples.load("stories-mamba")
    ones = explain(*loaded, ["Anna", "Tom"])
    others = explain(*loaded, ["Anna has a red", "Tom has a blue"])
    both, few = (summarize(some, against=some) for some in (ones + others, others))
    shares = [{one.key: one.share for one in report.shares["token"]} for report in (both, few)]
    assert shares[0] == shares[1]
    assert both.change is not None
    assert few.change is not None
    assert {*both.change.shares} == {*few.change.shares}
    alone = summarize(ones)
    assert {*alone.shares} == {"tenth"}
    assert "2 examples" in str(alone)
    assert alone.to_html()


def test_rare_tokens_do_not_come_first():
    rng = np.random.default_rng(0)
    texts = ["often b c d"] * 40 + ["rare b c d"]
    rows = [[3 + rng.normal() / 5, 3, 4, 9, 0] for _ in range(40)] + [[8, 1, 1, 9, 0]]
    first, *_, last = summarize(one_row(texts, rows, [" x"] * 41)).shares["token"]
    assert (first.key, last.key) == ("c", "rare")
    assert last.share > first.share


def test_moderated_intervals_cover_and_converge_to_students():
    rng = np.random.default_rng(1)
    samples = rng.normal(size=(4000, 3))
    variances = samples.var(axis=1, ddof=1)
    half = moderated_halves(np.full(4000, 3), variances)
    assert (np.abs(samples.mean(1)) < half).mean() >= 0.95
    alone = stats.t.ppf(0.975, 2) * np.sqrt(variances / 3)
    assert half.mean() < 0.7 * alone.mean()
    own = moderated_halves(np.array([12]), np.array([4.0]), prior=0)
    assert own[0] == pytest.approx(stats.t.ppf(0.975, 11) * np.sqrt(4 / 12))


def test_slices_divide_the_examples_and_say_what_sets_them_apart():
    texts = ["a b c d"] * 20 + ["a b c d"] * 20
    rng = np.random.default_rng(2)
    rows = [[8 + rng.random(), 1, 1, 9, 0] for _ in range(20)]
    rows += [[1, 1, 8 + rng.random(), 9, 0] for _ in range(20)]
    found = one_row(texts, rows, [" x"] * 20 + [" y"] * 20)
    labels = ["x"] * 20 + ["y"] * 15 + ["x"] * 5
    report = summarize(found, by=[1] * 10 + [2] * 30, labels=labels)
    for by in {one.by for one in report.slices}:
        rows_of = [i for one in report.slices if one.by == by for i in one.examples]
        assert sorted(rows_of) == list(range(40))
    assert {one.by for one in report.slices} == {"group", "column", "prediction", "target"}
    groups = {one.name: one for one in report.slices if one.by == "group"}
    assert {frozenset(one.examples) for one in groups.values()} == {
        frozenset(range(20)),
        frozenset(range(20, 40)),
    }
    (of_a,) = (one for one in groups.values() if 0 in one.examples)
    assert of_a.name == "\u201ca\u201d"
    gap = next(one for one in of_a.apart if one.key == "a")
    assert gap.here > 0.75 > 0.2 > gap.elsewhere
    assert gap.low > 0.6
    (wrong,) = (one for one in report.slices if one.name == "wrong")
    assert wrong.examples == tuple(range(35, 40))
    assert report.right == 35 / 40
    assert set(of_a.typical) | set(of_a.untypical) <= set(range(20))


def test_two_runs_are_compared_in_pairs(small):
    rows = [[1, 3, 0, 9, 0], *ROWS[1:]]
    other = one_row(TEXTS, rows, [" x", " y", " x", " z"])
    change = summarize(small, against=other).change
    assert change.examples == {0: pytest.approx(0.5), 1: 0.0, 2: 0.0, 3: 0.0}
    assert change.moved.value == pytest.approx(0.125)
    assert change.flipped == (3,)
    assert change.unpaired == 0
    assert summarize(small, against=small).change.shares["token"] == ()
    with pytest.raises(ValueError, match="none of the 4 examples is the same text"):
        summarize(small, against=one_row(["e f g h"], ROWS[:1], [" x"]))


def test_tables_print_and_errors(small, tmp_path, capsys):
    report = summarize(small, by=["a", "a", "b", "b"])
    assert list(report.to_pandas("examples")["column"]) == ["a", "a", "b", "b"]
    assert set(report.to_pandas()["kind"]) == set(report.shares)
    assert "a" in str(report)
    assert "4 examples of stories by MambaLRP" in str(report)
    for options, message in (
        ({"by": "topic"}, "an explanation has no columns"),
        ({"by": ["a"]}, "an explanation has no columns"),
        ({"by": [1, 2, 3]}, "by has 3 values for 4 examples"),
        ({"labels": ["x"]}, "labels has 1 values for 4 examples"),
        ({"method": "no"}, "method is 'no'; expected mamba-lrp"),
    ):
        with pytest.raises(ValueError, match=message):
            summarize(small, **options)
    with pytest.raises(ValueError, match="a report is of texts"):
        summarize(pages.explanation(pages.picture()))
    small.save(tmp_path / "why.json")
    page = tmp_path / "out.html"
    assert main(["report", str(tmp_path / "why.json"), "--html", str(page)]) == 0
    assert "4 examples" in capsys.readouterr().out
    assert page.read_text("utf-8") == summarize(small).to_html()


def test_a_folder_says_the_same_as_the_explanation_and_knows_its_columns(tmp_path):
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    model, tokenizer = examples.load("stories-mamba")
    texts = ["the dogs near the bird", "the dog near the birds", "the cat near the dog"]
    targets, kinds = ["bark", "barks", "bark"], ["many", "one", "one"]
    rows = [
        {"text": text, "target": target, "kind": kind}
        for text, target, kind in zip(texts, targets, kinds, strict=True)
    ]
    rows.insert(1, {"text": "", "target": "bark", "kind": "none"})
    explain_dataset(model, tokenizer, rows, tmp_path / "why", methods=["mamba-lrp"])
    report = summarize(tmp_path / "why", by="kind")
    whole = summarize(explain(model, tokenizer, texts, target=targets, methods=["mamba-lrp"]))
    assert report.title == whole.title == "What stories-mamba reads"
    assert report_data(report)["shown"]["title"] == report.title
    assert summarize(tmp_path / "why", against=tmp_path / "why").change.other == "why"
    assert list(report.errors) == [1]
    assert [one.index for one in report.examples] == [0, 2, 3]
    assert report.right == whole.right == pytest.approx(2 / 3)
    assert [one.examples for one in report.slices if one.by == "kind"] == [(2, 3), (0,)]
    for kind, entries in whole.shares.items():
        found = {one.key: one.share for one in report.shares[kind]}
        assert found == {one.key: pytest.approx(one.share, abs=1e-4) for one in entries}


def test_a_report_needs_no_torch_and_does_without_scikit_learn(small, tmp_path):
    small.save(tmp_path / "a.json")
    code = (
        "import sys\n"
        "sys.modules['sklearn'] = None\n"
        "from captum_ssm.explanation import summarize\n"
        "report = summarize('a.json')\n"
        "report.to_html('a.html')\n"
        "assert 'torch' not in sys.modules\n"
        "print(report.notes[0])\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "need scikit-learn" in run.stdout
