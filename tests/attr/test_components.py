"""Direct logit attribution: what the parts of a model write adds up to its score."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, build, padded, skip_what_fails_by_itself
from models import ids
from torch import Tensor, nn

import captum_ssm
from captum_ssm import RelevanceFlow, UnsupportedModelError
from captum_ssm.attr.flow.components import Components

L = 9
# Their streams are mixed, gated or normed from block to block.
NO_SUM = ("minimax", "glm5_next", "inkling2", "zaya")
# Where the last norm and the unembedding of a family are.
HEADS = {
    "mamba": ("backbone.norm_f", "lm_head"),
    "mamba2": ("backbone.norm_f", "lm_head"),
    "jamba": ("model.final_layernorm", "lm_head"),
    "qwen3_next": ("model.norm", "lm_head"),
    "bamba": ("model.final_layernorm", "lm_head"),
    "nemotron_h": ("model.norm_f", "lm_head"),
}


@pytest.mark.filterwarnings("ignore:.*reads the padding", "ignore:relevance goes through")
@pytest.mark.parametrize("side", [None, "right"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in NO_SUM])
def test_all_parts_add_up_to_the_score_minus_biases_after_the_stream(family, side):
    skip_what_fails_by_itself(family, L, side)
    extra = None if side is None else {"attention_mask": padded(side, length=L)}
    found = RelevanceFlow(build(family)).components(ids(2, L), 5, extra)
    assert found.error < 1e-6
    scale = found.values.abs().amax()
    torch.testing.assert_close(found.by_token.sum(2), found.values, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.values.sum(1) / scale, found.score / scale, rtol=0, atol=1e-6)
    is_biased = family == "rwkv"  # its last norm has a bias
    assert (found.values[:, -1].abs().amax() > 1e-2 * scale) == is_biased
    if not is_biased:
        assert found.values[:, -1].abs().amax() < 2e-6 * scale
    assert found.names[0] == "embedding"
    assert found.names[-1] == "bias"
    for name, layer in found.edges.items():
        at = found.names.index(name)
        assert found.kinds[at] == layer.kind
        torch.testing.assert_close(layer.out.sum(1), found.values[:, at], rtol=1e-4, atol=1e-5)


@pytest.mark.every_case
@pytest.mark.parametrize("family", [f for f in NO_SUM if f in FAMILIES])
def test_streams_that_blocks_do_not_add_to_are_refused(family):
    with pytest.raises(UnsupportedModelError, match="does not reach the output by addition alone"):
        RelevanceFlow(build(family)).components(ids(1, L), 5)


@pytest.mark.parametrize("family", [f for f in HEADS if f in FAMILIES])
def test_a_part_writes_its_output_times_the_direction_of_the_target(family):
    # By hand: the outputs that hooks see, over the last norm's denominator, times its weights and
    # the target's row of the unembedding.
    model, tokens = build(family), ids(2, L)
    found = RelevanceFlow(model).components(tokens, 5, against=None)
    norm, head = (model.get_submodule(path) for path in HEADS[family])
    outputs: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}

    def keep(path: str):
        def hook(module: nn.Module, args: tuple, result: object) -> None:
            first = result if torch.is_tensor(result) else result[0]
            outputs[path] = first.reshape(2, L, -1)[:, -1]
            if args:
                inputs[path] = args[0]

        return hook

    paths = [*found.names[1:-1], HEADS[family][0]]
    hooks = [model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
    with torch.no_grad():
        logits = model(tokens).logits[:, -1]
    for hook in hooks:
        hook.remove()
    stream = inputs[HEADS[family][0]][:, -1]
    eps = getattr(norm, "variance_epsilon", None) or norm.eps
    rms = (stream.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    weight = norm(stream) / (stream / rms)
    direction = weight * head.weight[5] / rms
    expected = torch.stack([(outputs[path] * direction).sum(1) for path in paths[:-1]], 1)
    torch.testing.assert_close(found.values[:, 1:-1], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.score, logits[:, 5])


def test_a_mixers_part_is_split_over_the_tokens_that_it_read_it_from():
    # A change of the values at one token, the coefficients being constant.
    model, tokens = build("mamba2"), ids(1, L)
    found = RelevanceFlow(model).components(tokens, 5, formulation="hidden")
    layer = found.edges["backbone.layers.1.mixer"]
    matrix = layer.matrix()
    assert not matrix[:, :-1].any()  # only the last token is read
    at = found.names.index(layer.name)
    own = layer.skip + layer.gate + layer.bias
    torch.testing.assert_close(matrix.sum(1) + own, found.by_token[:, at], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(layer.heads().sum(1), matrix, rtol=1e-4, atol=1e-6)
    # In the last layer no other way than the direct one is left, as far as edges go.
    whole = RelevanceFlow(model).edges(tokens, 5)["backbone.layers.1.mixer"]
    torch.testing.assert_close(whole.matrix(), matrix, rtol=1e-4, atol=1e-6)


def test_shares_and_the_table_tell_of_each_kind():
    found = RelevanceFlow(build("jamba")).components(ids(1, L), 5)
    assert set(found.by_kind()) == {"embedding", "recurrence", "attention", "mlp", "bias"}
    total = sum(float(share) for share in found.shares().values())
    assert total == pytest.approx(1, abs=1e-5)
    lines = str(found).splitlines()
    assert lines[1].startswith("embedding")
    assert lines[-1].split() == ["score", f"{float(found.score):+.3f}"]
    assert any(line.startswith("all recurrence") for line in lines)
    words = [f"w{t}" for t in range(L)]
    assert f"w{L - 1} [{L - 1}] " in found.table(tokens=words).splitlines()[1]


def test_what_a_part_writes_in_half_precision():
    found = RelevanceFlow(build("mamba2").bfloat16()).components(ids(1, L), 5)
    assert isinstance(found, Components)
    assert found.error < 2e-2


@pytest.mark.parametrize("name", ["copying-mamba", "stories-qwen3next"])
def test_trained_models_too(name):
    model, tokenizer = captum_ssm.examples.load(name)
    tokens = tokenizer(captum_ssm.examples.sample(name), return_tensors="pt")["input_ids"]
    answer = int(model(tokens).logits[0, -1].argmax())
    found = RelevanceFlow(model).components(tokens, answer)
    assert found.error < 1e-6
    torch.testing.assert_close(found.values.sum(1), found.score, rtol=1e-5, atol=1e-5)
    assert found.values[0].max() > 0.3 * found.score[0]


def test_mixers_that_write_can_be_patched_by_their_names():
    model, tokens = build("jamba"), ids(1, L)
    other = tokens.flip(1)
    found = RelevanceFlow(model).components(tokens, 5)
    mixers = [
        name
        for name, kind in zip(found.names, found.kinds, strict=True)
        if kind in ("recurrence", "attention")
    ]
    exact = captum_ssm.interventions.activation_patching(
        model, tokens, other, target=5, layers=mixers, perturbations_per_eval=L
    )
    first_order = captum_ssm.interventions.attribution_patching(
        model, tokens, other, target=5, layers=mixers, components=("output",)
    )["output"]
    assert exact.layers == first_order.layers == mixers
    # By hand: the attention layer's output at the last token, taken from the other run.
    layer = model.get_submodule(mixers[1])
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: tuple, result: tuple) -> None:
        kept.append(result[0])

    def put(module: nn.Module, args: tuple, result: tuple) -> tuple:
        changed = result[0].clone()
        changed[:, -1] = kept[0][:, -1]
        return (changed, *result[1:])

    scores = []
    with torch.no_grad():
        for hook, given in ((keep, tokens), (None, other), (put, other)):
            handle = None if hook is None else layer.register_forward_hook(hook)
            scores.append(model(given).logits[0, -1, 5])
            if handle is not None:
                handle.remove()
    torch.testing.assert_close(exact.effects[0, 1, -1], scores[2] - scores[1], rtol=1e-4, atol=1e-5)
