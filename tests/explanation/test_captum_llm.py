"""Prompt and continuation under Captum's interface, against the methods position by position."""

import matplotlib
import pytest
import torch
from captum.attr import LayerIntegratedGradients, Saliency, TextTemplateInput, TextTokenInput
from families import build
from models import VOCABULARY, WORDS, Words, ids, tiny, word_tokenizer
from torch import Tensor, nn

from captum_ssm import (
    InputError,
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    SSMLLMAttribution,
    TargetError,
    UnifiedImplicitAttention,
    continuation_relevance,
)

matplotlib.use("Agg")

METHODS = {
    "raw": (RawAttention, {}),
    "rollout": (MambaRollout, {"normalize_rows": True}),
    "rollout, whole maps": (MambaRollout, {"min_max": True, "discard_ratio": 0.3}),
    "attribution": (MambaAttribution, {}),
    "attribution, whole maps": (MambaAttribution, {"discard_ratio": 0.3}),
    "unified rollout": (UnifiedImplicitAttention, {"aggregation": "rollout"}),
    "unified attribution": (UnifiedImplicitAttention, {}),
    "latim": (LaTIM, {"activation": "gate"}),
    "latim of a layer": (LaTIM, {"layer": 1, "aggregation": "alti"}),
    "lrp": (MambaLRP, {}),
}
PROMPT, CONTINUATION = 6, 4


def sample(length: int = PROMPT + CONTINUATION) -> tuple[Tensor, str, str]:
    tokens = ids(1, length)
    words = [f"w{i}" for i in tokens[0].tolist()]
    return tokens, " ".join(words[:PROMPT]), " ".join(words[PROMPT:])


def one_by_one(method, tokens: Tensor, **options) -> Tensor:
    """The method called on each prefix by itself: ``(T, P + T - 1)``."""
    rows = torch.zeros(CONTINUATION, PROMPT + CONTINUATION - 1)
    for k in range(CONTINUATION):
        stop = PROMPT + k
        target = int(tokens[0, stop])
        rows[k, :stop] = method.attribute(tokens[:, :stop], target=target, **options)[0]
    return rows


@pytest.mark.parametrize("name", METHODS)
def test_each_token_is_explained_as_by_itself(name):
    kind, options = METHODS[name]
    model = tiny()
    tokens, prompt, continuation = sample()
    expected = one_by_one(kind(model), tokens, **options)
    rows = continuation_relevance(
        kind(model), tokens[:, :PROMPT], tokens[0, PROMPT:], internal_batch_size=3, **options
    )
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-6)

    inp = TextTokenInput(prompt, WORDS)
    result = SSMLLMAttribution(kind(model), WORDS).attribute(inp, continuation, **options)
    torch.testing.assert_close(result.token_attr, expected[:, :PROMPT], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(result.seq_attr, result.token_attr.sum(0))
    assert result.input_tokens == prompt.split()
    assert result.output_tokens == continuation.split()


@pytest.mark.parametrize("family", ["mamba2", "recurrent_gemma", "qwen3_next"])
@pytest.mark.parametrize("kind", [MambaRollout, MambaLRP])
def test_other_families(family, kind):
    model = build(family)
    tokens, _, _ = sample()
    rows = continuation_relevance(kind(model), tokens[:, :PROMPT], tokens[0, PROMPT:])
    expected = one_by_one(kind(model), tokens)
    torch.testing.assert_close(rows, expected, rtol=1e-3, atol=1e-5)


def test_methods_without_a_target_run_the_model_once():
    model, (tokens, _, _) = tiny(), sample()
    runs = []
    for kind in (RawAttention, MambaAttribution, LaTIM):  # the first look runs it more often
        continuation_relevance(kind(model), tokens[:, :PROMPT], tokens[0, PROMPT:])
    model.register_forward_hook(lambda *_: runs.append(1))

    def runs_of(kind, **options) -> int:
        runs.clear()
        continuation_relevance(kind(model), tokens[:, :PROMPT], tokens[0, PROMPT:], **options)
        return len(runs)

    for kind in (RawAttention, MambaRollout):
        assert runs_of(kind) == 1
    for kind in (MambaAttribution, MambaLRP, LaTIM):
        assert runs_of(kind) == 1
        assert runs_of(kind, internal_batch_size=2) == 2


def test_log_probabilities():
    model = tiny()
    tokens, prompt, continuation = sample()

    def log_probabilities(x):
        return model(x).logits.log_softmax(-1)

    expected = one_by_one(MambaAttribution(log_probabilities, model=model), tokens)
    llm = SSMLLMAttribution(MambaAttribution(model), WORDS, attr_target="log_prob")
    result = llm.attribute(TextTokenInput(prompt, WORDS), continuation)
    torch.testing.assert_close(result.token_attr, expected[:, :PROMPT], rtol=1e-4, atol=1e-6)
    logits = SSMLLMAttribution(MambaAttribution(model), WORDS)
    other = logits.attribute(TextTokenInput(prompt, WORDS), continuation)
    assert not torch.allclose(result.token_attr, other.token_attr)


def test_the_model_generates_the_continuation():
    model = tiny()
    _, prompt, _ = sample()
    method = MambaLRP(model)
    llm = SSMLLMAttribution(method, WORDS)
    arguments = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
    result = llm.attribute(TextTokenInput(prompt, WORDS), gen_args=arguments)
    assert result.token_attr.shape == (3, PROMPT)
    given = WORDS.encode(" ".join([prompt, *result.output_tokens]), return_tensors="pt")
    with torch.no_grad():
        predicted = model(given[:, :-1]).logits[0, PROMPT - 1 :].argmax(-1)
    assert predicted.tolist() == given[0, PROMPT:].tolist()
    assert method.forward_func is model  # the given method is as it was


def test_the_plots_of_captum_work():
    _, prompt, continuation = sample()
    llm = SSMLLMAttribution(LaTIM(tiny()), WORDS)
    result = llm.attribute(TextTokenInput(prompt, WORDS), continuation)
    for plot in (result.plot_token_attr, result.plot_seq_attr):
        figure, axes = plot(show=False)
        assert [t.get_text() for t in axes.get_xticklabels()] == prompt.split()
        matplotlib.pyplot.close(figure)
    assert set(result.seq_attr_dict) == set(prompt.split())


def test_skipped_tokens_are_left_out():
    tokens, prompt, continuation = sample()
    skipped = int(tokens[0, 2])
    llm = SSMLLMAttribution(MambaRollout(tiny()), WORDS)
    whole = llm.attribute(TextTokenInput(prompt, WORDS), continuation)
    part = llm.attribute(TextTokenInput(prompt, WORDS, skip_tokens=[skipped]), continuation)
    keep = [i for i, t in enumerate(tokens[0, :PROMPT].tolist()) if t != skipped]
    torch.testing.assert_close(part.token_attr, whole.token_attr[:, keep])


def test_a_continuation_given_as_ids_and_an_nnsight_model():
    from nnsight import NNsight

    tokens, prompt, continuation = sample()
    inp = TextTokenInput(prompt, WORDS)
    expected = SSMLLMAttribution(MambaLRP(tiny()), WORDS).attribute(inp, continuation)
    llm = SSMLLMAttribution(MambaLRP(NNsight(tiny())), WORDS)
    result = llm.attribute(inp, tokens[0, PROMPT:])
    torch.testing.assert_close(result.token_attr, expected.token_attr)


def test_captums_own_methods_still_work():
    tokenizer = word_tokenizer({f"w{i}": i for i in range(VOCABULARY)})
    model = tiny()
    method = LayerIntegratedGradients(model, model.get_input_embeddings())
    _, prompt, continuation = sample()
    inp = TextTokenInput(prompt, tokenizer)
    result = SSMLLMAttribution(method, tokenizer).attribute(inp, continuation, n_steps=2)
    assert result.token_attr.shape == (CONTINUATION, PROMPT)
    ours = SSMLLMAttribution(MambaLRP(model), tokenizer).attribute(inp, continuation)
    assert ours.output_tokens == result.output_tokens
    assert ours.input_tokens == result.input_tokens


def test_words_that_the_tokenizer_does_not_know():
    words = {"<unk>": 0, **{f"w{i}": i for i in range(3, VOCABULARY)}}
    tokenizer = word_tokenizer(words, unk_token="<unk>")
    model = tiny()
    known = TextTokenInput("w3 w4", tokenizer)
    captums = LayerIntegratedGradients(model, model.get_input_embeddings())
    for method in (MambaRollout(model), captums):
        llm = SSMLLMAttribution(method, tokenizer)
        with pytest.raises(TargetError, match=r"target is 'w5 zebra'.* reads as w5 <unk>.* w10, "):
            llm.attribute(known, target="w5 zebra")
    llm = SSMLLMAttribution(MambaRollout(model), tokenizer)
    assert llm.attribute(known, target="w5 <unk>").token_attr.shape == (2, 2)
    assert llm.attribute(known, target=torch.tensor([5, 0])).token_attr.shape == (2, 2)
    with pytest.warns(UserWarning, match="reads the prompt as <unk> w4: a part of it is not in"):
        llm.attribute(TextTokenInput("zebra w4", tokenizer), target="w5")
    # Where it also begins or ends texts it is no sign of an unknown word.
    tokenizer.eos_token = "<unk>"
    ending = TextTokenInput("w4 <unk>", tokenizer)
    assert llm.attribute(ending, target="w5").token_attr.shape[0] == 1


def attribute(kind=MambaRollout, target="w3 w4", llm=None, **options):
    inp = TextTokenInput(sample()[1], WORDS)
    return SSMLLMAttribution(kind(tiny()), WORDS, **(llm or {})).attribute(inp, target, **options)


BAD_CALLS = {
    "an empty text": (dict(target=""), InputError, "continuation has shape"),
    "a batch of ids": (dict(target=ids(2, 3)), InputError, "continuation has shape"),
    "a list": (dict(target=[3]), TypeError, "str or Tensor"),
    "a position": (dict(position=2), ValueError, "position was given, but"),
    "a delta": (
        dict(kind=MambaLRP, return_convergence_delta=True),
        ValueError,
        "return_convergence_delta was given",
    ),
    "an unknown score": (
        dict(llm={"attr_target": "prob"}),
        ValueError,
        "attr_target is 'prob'; expected",
    ),
    "no batch": (
        dict(internal_batch_size=0),
        ValueError,
        "internal_batch_size is 0; expected an integer from 1 on",
    ),
    "no number for a batch": (
        dict(internal_batch_size=None),
        ValueError,
        "internal_batch_size is None; expected an integer from 1 on",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_says_what_is_wrong(name):
    options, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        attribute(**options)


@pytest.mark.parametrize(
    ("method", "tokenizer", "error", "message"),
    [
        (
            RawAttention(tiny()),
            None,
            TypeError,
            "tokenizer is a NoneType without encode, decode, convert_ids_to_tokens",
        ),
        (
            RawAttention(tiny()),
            type("NoText", (Words,), {"decode": None})(),
            TypeError,
            "tokenizer is a NoText without decode; expected",
        ),
        (Saliency(tiny()), WORDS, AssertionError, "does not support"),
        (
            RawAttention(lambda x: x, model=nn.Linear(2, 2)),
            WORDS,
            ValueError,
            "forward_func=function",
        ),
    ],
)
def test_methods_and_tokenizers_that_do_not_fit(method, tokenizer, error, message):
    with pytest.raises(error, match=message):
        SSMLLMAttribution(method, tokenizer)


@pytest.mark.parametrize("kind", [RawAttention, MambaLRP])
@pytest.mark.parametrize(
    ("prompt", "continuation", "error", "message"),
    [
        (ids(2, 4), ids(1, 3)[0], InputError, "the prompt has shape"),
        ([3, 4], ids(1, 3)[0], TypeError, "the prompt is a list"),
        (ids(1, 4).float(), ids(1, 3)[0], TypeError, "the prompt is"),
        (ids(1, 4), "w3 w4", TypeError, "the continuation is a str; .* token ids"),
        (ids(1, 4), [2.5], TypeError, "the continuation is torch.float32; expected token ids"),
        (ids(1, 4), [3, 37], InputError, "the continuation holds ids from 3 to 37; .* 0 .. 36"),
        (ids(1, 4), [-1], InputError, "ids from -1 to -1"),
    ],
)
def test_ids_that_are_none(kind, prompt, continuation, error, message):
    given = torch.tensor(continuation) if isinstance(continuation, list) else continuation
    with pytest.raises(error, match=message):
        continuation_relevance(kind(tiny()), prompt, given)


def test_a_prompt_that_is_no_tokens():
    llm = SSMLLMAttribution(RawAttention(tiny()), WORDS)
    for prompt in ("w3 w4", TextTemplateInput("w3 {}", ["w4"])):
        message = f"inp is a {type(prompt).__name__}; expected a prompt in tokens"
        with pytest.raises(TypeError, match=message):
            llm.attribute(prompt, target="w5")


def test_a_name_for_a_method():
    with pytest.raises(TypeError, match=r"method is a str; .* MambaLRP\(model\)"):
        continuation_relevance("latim", ids(1, 4), ids(1, 3)[0])
