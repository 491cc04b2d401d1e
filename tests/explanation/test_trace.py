"""Whole answers as one target, and hops along the words that the model wrote itself."""

import random

import pytest
import torch
from captum.attr import LayerIntegratedGradients, TextTokenInput
from families import build
from models import WORDS, ids, tiny, without_biases
from torch import Tensor

from captum_ssm import (
    InputError,
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    RelevanceFlow,
    SSMLLMAttribution,
    TargetError,
    UnifiedImplicitAttention,
    continuation_relevance,
    examples,
    trace,
    trace_rows,
)
from captum_ssm.attr import SpanTarget
from captum_ssm.examples.chains import encode, make_puzzle
from captum_ssm.interventions import swap_effects

METHODS = {
    "raw": (RawAttention, {}),
    "rollout": (MambaRollout, {"normalize_rows": True}),
    "whole maps": (MambaRollout, {"min_max": True, "discard_ratio": 0.3}),
    "unified rollout": (UnifiedImplicitAttention, {"aggregation": "rollout"}),
    "latim": (LaTIM, {"activation": "silu"}),
    "latim of a layer": (LaTIM, {"layer": 1, "aggregation": "alti"}),
    "lrp": (MambaLRP, {}),
}
POSITIONS, TOKENS, WEIGHTS = [5, 6, 8], [3, 9, 20], [1.0, 0.5, -2.0]
PROMPT = 5


def text(length: int = 11) -> tuple[Tensor, Tensor]:
    tokens = ids(1, length)
    return tokens[:, :PROMPT], tokens[0, PROMPT:]


@pytest.mark.parametrize("name", METHODS)
def test_a_span_is_the_weighted_sum_of_its_tokens(name):
    kind, options = METHODS[name]
    method, inputs = kind(tiny()), ids(2, 10)
    found = method.attribute(inputs, target=SpanTarget(POSITIONS, TOKENS, WEIGHTS), **options)
    rows = [
        weight * method.attribute(inputs, target=(position, token), **options)
        for position, token, weight in zip(POSITIONS, TOKENS, WEIGHTS, strict=True)
    ]
    torch.testing.assert_close(found, sum(rows), rtol=1e-5, atol=1e-5)
    assert method.is_additive(**options) == (name != "whole maps")


@pytest.mark.parametrize("score", ["logit", "log_prob", "contrast"])
def test_the_score_of_a_span_is_that_of_its_tokens(score):
    model, inputs = tiny(), ids(2, 10)
    logits = model(inputs).logits
    at = logits[:, POSITIONS]
    answer = at[:, range(3), TOKENS]
    if score == "log_prob":
        answer = at.log_softmax(-1)[:, range(3), TOKENS]
    if score == "contrast":
        rest = torch.ones_like(at).scatter(
            2, torch.tensor(TOKENS)[None, :, None].expand(2, 3, 1), 0
        )
        weights = at.softmax(-1) * rest
        answer = answer - (weights * at).sum(-1) / weights.sum(-1)
    target = SpanTarget(POSITIONS, TOKENS, WEIGHTS, score)
    expected = (answer * torch.tensor(WEIGHTS)).sum(1)
    torch.testing.assert_close(target.read(logits, 10), expected)


def test_each_example_has_its_own_span():
    method, inputs = MambaLRP(tiny()), ids(2, 10)
    positions, tokens = [[2, 5], [7, -1]], [[3, 4], [5, -1]]
    found = method.attribute(inputs, target=SpanTarget(positions, tokens))
    for k in range(2):
        alone = method.attribute(inputs[k : k + 1], target=SpanTarget(positions[k], tokens[k]))
        torch.testing.assert_close(found[k : k + 1], alone)


def test_edges_of_a_span_are_the_sum_of_those_of_its_tokens():
    flow, inputs = RelevanceFlow(tiny()), ids(1, 10)
    whole = flow.edges(inputs, SpanTarget(POSITIONS, TOKENS, WEIGHTS))
    each = [flow.edges(inputs, pair) for pair in zip(POSITIONS, TOKENS, strict=True)]
    for name, edges in whole.items():
        parts = [w * one[name].matrix() for w, one in zip(WEIGHTS, each, strict=True)]
        torch.testing.assert_close(edges.matrix(), sum(parts), rtol=1e-5, atol=1e-5)


def test_a_frozen_run_reads_a_span():
    inputs, target = ids(1, 10), SpanTarget(POSITIONS, TOKENS)
    method = RawAttention(tiny())
    again = method.freeze_once(inputs).attribute(inputs, target=target)
    assert torch.equal(again, method.attribute(inputs, target=target))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SpanTarget([1], [2, 3]), "same shape"),
        (lambda: SpanTarget([], []), "at least one token"),
        (lambda: SpanTarget([1.5], [2]), "expected integers"),
        (lambda: SpanTarget([1], [2], score="prob"), "score is 'prob'"),
        (lambda: SpanTarget([1, 2], [2, 3], [1.0]), "one weight per token"),
    ],
)
def test_bad_spans_are_named(make, message):
    with pytest.raises(TargetError, match=message):
        make()


@pytest.mark.parametrize(
    ("target", "options", "message"),
    [
        (SpanTarget([99], [1]), {}, "sequence of 10 tokens"),
        (SpanTarget([9], [1000]), {}, "outside the vocabulary"),
        (SpanTarget([9], [1]), {"position": 3}, "which has its own"),
        (SpanTarget([[9], [8], [7]], [[1]] * 3), {}, "3 rows for a batch of 1"),
    ],
)
def test_spans_that_do_not_fit_the_text_are_named(target, options, message):
    with pytest.raises(TargetError, match=message):
        MambaLRP(tiny()).attribute(ids(1, 10), target=target, **options)


def test_a_span_that_holds_padding_is_named():
    mask = torch.ones(1, 10, dtype=torch.long)
    mask[:, :3] = 0
    with pytest.raises(InputError, match="padding"):
        RawAttention(tiny()).attribute(
            ids(1, 10),
            target=SpanTarget([2, 5], [1, 2]),
            additional_forward_args={"attention_mask": mask},
        )


@pytest.mark.parametrize("name", [*METHODS, "attribution"])
@pytest.mark.parametrize("signs", ["net", "positive"])
def test_hops_are_those_of_the_matrix_of_rows(name, signs):
    kind, options = METHODS.get(name, (MambaAttribution, {}))
    method, (prompt, continuation) = kind(tiny()), text()
    rows = continuation_relevance(method, prompt, continuation, **options)
    found = trace(method, prompt, continuation, span=(-3, -2), hops=3, signs=signs, **options)
    scores = None
    if name == "lrp" or name == "latim":
        logits = tiny()(ids(1, 10)).logits[0, PROMPT - 1 :]
        scores = logits.gather(1, continuation[:, None])[:, 0]
    expected = trace_rows(rows, PROMPT, scores=scores, span=(3, 4), hops=3, signs=signs)
    torch.testing.assert_close(found.relevance, expected.relevance, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.kept, expected.kept, rtol=1e-4, atol=1e-5)
    assert found.span == (3, 4)
    assert found.relevance.shape == (4, 10)


def test_all_hops_together_are_the_closed_form():
    # r_prompt + r_gen (I - R_gen,gen)^-1 R_gen,prompt, with rows that add up to one.
    generator = torch.Generator().manual_seed(0)
    T = 7
    rows = torch.rand(T, PROMPT + T - 1, generator=generator, dtype=torch.float64)
    for k in range(T):
        rows[k, PROMPT + k :] = 0
    shares = rows / rows.sum(1, keepdim=True)
    own, given = shares[:, PROMPT:], shares[:, :PROMPT]
    inverse = torch.linalg.inv(torch.eye(T - 1, dtype=torch.float64) - own[:-1])
    expected = rows[-1, :PROMPT] + rows[-1, PROMPT:] @ inverse @ given[:-1]
    found = trace_rows(rows, PROMPT, span=(-1, -1), least=0.0)
    torch.testing.assert_close(found.total[:PROMPT], expected)
    assert float(found.total[PROMPT:].abs().sum()) < 1e-12
    torch.testing.assert_close(found.total.sum(), rows[-1].sum())


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next", "rwkv"])
def test_a_hop_adds_up_to_what_the_one_before_handed_on(family):
    model = without_biases(build(family))
    prompt, continuation = text()
    found = trace(MambaLRP(model), prompt, continuation, hops=3)
    handed = (found.relevance - found.kept).sum(1)
    missed = handed[:-1] - found.relevance[1:].sum(1) - found.delta[1:]
    assert float(missed.abs().max()) < 1e-5 * float(found.relevance.abs().sum())


def test_a_trace_ends_where_little_is_left():
    rows = torch.tensor([[1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.5, 0.0, 0.5]])
    found = trace_rows(rows, 1, span=(2, 2), least=0.1)
    assert found.hops == 1
    assert found.handed_on.tolist() == pytest.approx([0.5, 0.1])
    assert trace_rows(rows, 1, span=(2, 2), least=0.0).hops == 2
    assert trace_rows(rows, 1, span=(2, 2), hops=5).relevance.shape == (6, 3)


def test_tokens_without_a_positive_score_keep_their_relevance():
    rows = torch.tensor([[-1.0, 0.0], [0.4, 0.6]])
    found = trace_rows(rows, 1, span=(1, 1))
    assert found.hops == 0
    assert found.total.tolist() == pytest.approx([0.4, 0.6])


def test_continuation_relevance_returns_a_row_per_hop():
    prompt, continuation = text()
    method = MambaLRP(tiny())
    one = continuation_relevance(method, prompt, continuation, span=(2, 4))
    each = continuation_relevance(method, prompt, continuation)
    assert one.shape == (1, 10)
    torch.testing.assert_close(one[0], each[2:5].sum(0), rtol=1e-5, atol=1e-5)
    assert continuation_relevance(method, prompt, continuation, hops=2).shape == (3, 10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(span=(3, 99)), "span is"),
        (dict(span=(4, 3)), "span is"),
        (dict(span="all"), "span is"),
        (dict(hops=-1), "hops is -1"),
        (dict(signs="both"), "signs is 'both'"),
        (dict(through="gates"), "through is 'gates'"),
        (dict(least=2), "least is 2"),
        (dict(score="prob"), "attr_target is 'prob'"),
        (dict(return_error_bound=True), "the result holds relevance alone"),
        (dict(return_states=True), "the result holds relevance alone"),
    ],
)
def test_bad_questions_about_an_answer_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        trace(RawAttention(tiny()), *text(), **options)


def test_rows_of_another_shape_are_named():
    with pytest.raises(InputError, match=r"\(T, P \+ T - 1\)"):
        trace_rows(torch.ones(3, 4), prompt=4)


def test_a_trace_by_swaps_adds_up_and_reads_its_own_words_by_their_effects():
    model, (prompt, continuation) = tiny(), text()
    method = MambaLRP(model)
    found = trace(method, prompt, continuation, hops=2, signs="positive", through="swaps")
    effects = swap_effects(model, prompt, continuation).clamp(min=0)
    scores = model(ids(1, 10)).logits[0, PROMPT - 1 :].detach()
    scores = scores.gather(1, continuation[:, None])[:, 0].clamp(min=0)
    shares = effects / (scores + effects.sum(1)).clamp(min=1e-30)[:, None]
    torch.testing.assert_close(found.relevance[0, PROMPT:], scores @ shares, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.relevance[0].sum(), scores.sum())
    handed = (found.relevance - found.kept).sum(1)
    torch.testing.assert_close(found.relevance[1:].sum(1), handed[:-1])
    logits = model(ids(1, 10)).logits[0, PROMPT - 1 :].detach()
    signed = logits.gather(1, continuation[:, None]).sum()
    torch.testing.assert_close(found.delta[0], signed - scores.sum())
    maps = trace(RawAttention(model), prompt, continuation, hops=1, through="swaps")
    assert maps.delta.isnan().all()


def test_effects_may_be_given():
    model, (prompt, continuation) = tiny(), text()
    effects = swap_effects(model, prompt, continuation)
    asked = {"span": (1, 2), "hops": 1}
    given = trace(MambaLRP(model), prompt, continuation, through=effects, **asked)
    found = trace(MambaLRP(model), prompt, continuation, through="swaps", **asked)
    torch.testing.assert_close(given.relevance, found.relevance, rtol=1e-4, atol=1e-5)
    rows = continuation_relevance(MambaLRP(model), prompt, continuation)
    scores = model(ids(1, 10)).logits[0, PROMPT - 1 :].detach()
    scores = scores.gather(1, continuation[:, None])[:, 0]
    by_rows = trace_rows(rows, PROMPT, scores=scores, through=effects, **asked)
    torch.testing.assert_close(by_rows.relevance, found.relevance, rtol=1e-3, atol=1e-4)
    with pytest.raises(InputError, match=r"through has shape \(2, 2\)"):
        trace_rows(rows, PROMPT, through=effects[:2, :2], **asked)


def test_swaps_name_the_record_that_a_thought_rests_on():
    # Handed on by relevance, most goes to words of form.
    model, _ = examples.load("chains-mamba2")
    numbers, right = random.Random(5), {"relevance": [0] * 4, "swaps": [0] * 4}
    for _ in range(6):
        puzzle = make_puzzle(numbers, held_out=True)
        prompt, words = torch.tensor([encode(puzzle.prompt)]), torch.tensor(encode(puzzle.aloud))
        names, after = [name for name, _ in puzzle.records], dict(puzzle.records)
        chain = [puzzle.asked]
        while chain[-1] in after:
            chain.append(after[chain[-1]])
        for through in right:
            found = trace(
                *(MambaLRP(model), prompt, words),
                span=(-2, -2),
                hops=3,
                signs="positive",
                through=through,
            )
            records = found.relevance[:, : 4 * len(names)].unflatten(1, (-1, 4)).sum(2).argmax(1)
            for hop, record in enumerate(records.tolist()):
                right[through][hop] += names[record] == chain[-2 - hop]
    assert right["swaps"] == [6, 6, 6, 6]
    assert right["relevance"][0] == 6 > max(right["relevance"][1:])


def test_captum_results_of_a_span_have_a_row_per_hop():
    words = " ".join(f"w{i}" for i in ids(1, 11)[0].tolist())
    prompt, answer = words.split()[:PROMPT], words.split()[PROMPT:]
    llm = SSMLLMAttribution(MambaLRP(tiny()), WORDS)
    inp = TextTokenInput(" ".join(prompt), WORDS, skip_tokens=prompt[:1])
    result = llm.attribute(inp, target=" ".join(answer), span=(-2, -1), hops=2)
    found = trace(MambaLRP(tiny()), *text(), span=(-2, -1), hops=2)
    torch.testing.assert_close(result.token_attr, found.relevance[:, 1:PROMPT])
    torch.testing.assert_close(result.seq_attr, found.total[1:PROMPT])
    assert result.output_tokens == [" ".join(answer[-2:]), "hop 1", "hop 2"]
    with pytest.raises(TypeError, match="trace_rows"):
        SSMLLMAttribution(LayerIntegratedGradients(tiny(), None), WORDS).attribute(inp, hops=1)
