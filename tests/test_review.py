"""Ways of using the library that once went wrong."""

import copy
import warnings

import numpy as np
import pytest
import torch
from families import build, padded
from models import embed, ids, tiny
from test_public_names import RunningMean
from torch import nn
from torch.utils.checkpoint import checkpoint

import captum_ssm.mixers
from captum_ssm import (
    FrozenMixer,
    InputError,
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    TargetError,
    UnifiedImplicitAttention,
    estimate,
    hidden_attention,
    register_mixer,
)
from captum_ssm._capture import freeze
from captum_ssm.mixers import _base as registry
from captum_ssm.operators import DiagonalOperator

GRADIENTS = [MambaAttribution, UnifiedImplicitAttention, LaTIM, MambaLRP]
METHODS = [RawAttention, MambaRollout, *GRADIENTS]
TOKENS = ids(2, 9)


# ---- models as they come out of training ------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("method", GRADIENTS)
def test_a_checkpointed_model_in_training_mode(method, reentrant):
    model = tiny()
    expected = method(model).attribute(TOKENS, target=5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer transformers have another name for it
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    torch.testing.assert_close(method(model).attribute(TOKENS, target=5), expected)
    assert model.training
    assert all(layer.gradient_checkpointing for layer in model.backbone.layers)


class Checkpointed(nn.Module):
    """A model that checkpoints a block by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny()

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        embeddings = self.get_input_embeddings()(tokens)
        run = self.model.backbone
        hidden = checkpoint(lambda e: run(inputs_embeds=e)[0], embeddings, use_reentrant=True)
        return self.model.lm_head(hidden)


@pytest.mark.parametrize("method", [MambaAttribution, LaTIM])
def test_a_graph_that_misses_the_mixers_raises(method):
    with pytest.raises(ValueError, match="does not depend differentiably"):
        method(Checkpointed()).attribute(TOKENS, target=5)


def test_a_graph_that_checkpointing_hides_raises():
    with pytest.raises(ValueError, match="run it without"):
        MambaLRP(Checkpointed()).attribute(TOKENS, target=5)


@pytest.mark.parametrize("method", GRADIENTS)
def test_a_head_behind_a_detached_backbone_raises(method):
    model = tiny()

    def forward(tokens):
        with torch.no_grad():
            hidden = model.backbone(tokens)[0]
        return model.lm_head(hidden)

    with pytest.raises(ValueError, match="does not depend differentiably"):
        method(forward, model).attribute(TOKENS, target=5)


@pytest.mark.parametrize("inplace", [True, False])
def test_a_compiled_model_is_run_without_its_compiler(inplace):
    model = tiny()
    expected = [method(model).attribute(TOKENS, target=5) for method in METHODS]
    calls = []

    def backend(graph, example_inputs):
        calls.append(graph)
        return graph.forward

    compiled = copy.deepcopy(model)
    if inplace:
        compiled.compile(backend=backend)
    else:
        compiled = torch.compile(compiled, backend=backend)
    for method, value in zip(METHODS, expected, strict=True):
        torch.testing.assert_close(method(compiled).attribute(TOKENS, target=5), value)
    inputs = embed(model, TOKENS)
    found = MambaRollout(compiled).attribute(inputs).sum(-1)
    torch.testing.assert_close(found, MambaRollout(model).attribute(TOKENS))
    assert list(hidden_attention(compiled, TOKENS)) == list(hidden_attention(model, TOKENS))
    assert not calls
    if inplace:
        assert compiled._compiled_call_impl is not None


# ---- short inputs, padding --------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mamba", "mamba2", "recurrent_gemma", "jamba"])
@pytest.mark.parametrize("method", METHODS)
def test_one_token(method, family):
    relevance = method(build(family)).attribute(ids(2, 1), target=5)
    assert relevance.shape == (2, 1)
    assert relevance.isfinite().all()


def test_contributions_are_exact_where_padding_enters_the_state():
    # RecurrentGemma's convolution and recurrence do not look at the mask.
    extra = {"attention_mask": padded("left")}
    latim = LaTIM(build("recurrent_gemma"))
    for error in latim.layer_errors(TOKENS, activation="gate", additional_forward_args=extra):
        assert error.max() < 1e-4


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["mamba", "recurrent_gemma"])
def test_contributions_to_and_of_padding_are_zero(family, side):
    model, mask = build(family), padded(side)
    extra = {"attention_mask": mask}
    latim = LaTIM(model)
    options = {"activation": "gate", "additional_forward_args": extra}
    vectors = latim.contributions(TOKENS, -1, range(9), **options)
    outside = mask == 0
    assert (vectors[outside] == 0).all()
    assert (vectors.mT.transpose(1, 3)[outside] == 0).all()
    found = latim.interactions(TOKENS, -1, "l2", **options)
    torch.testing.assert_close(found, vectors.norm(dim=-1))


# ---- LaTIM's map of every token to the logits -------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_logits_map_with_padding(side):
    model, mask = tiny(), padded(side)
    extra = {"attention_mask": mask}
    found = LaTIM(model).interactions(
        TOKENS, aggregation="alti_logit", activation="gate", additional_forward_args=extra
    )
    last = torch.where(mask.bool(), torch.arange(9), -1).amax(1)
    target = model(TOKENS, attention_mask=mask).logits.argmax(-1)[torch.arange(2), last]
    expected = LaTIM(model).attribute(
        TOKENS, target=target, additional_forward_args=extra, activation="gate"
    )
    torch.testing.assert_close(found[torch.arange(2), last], expected)


def test_the_logits_map_takes_what_attribute_takes():
    from nnsight import NNsight

    model = tiny()
    expected = LaTIM(model).interactions(TOKENS, aggregation="alti_logit")
    for wrapped, inputs in ((model, embed(model, TOKENS)), (NNsight(tiny()), TOKENS)):
        found = LaTIM(wrapped).interactions(inputs, aggregation="alti_logit")
        torch.testing.assert_close(found, expected)
    with pytest.raises(TargetError, match=r"0 \.\. 36"):
        LaTIM(model).interactions(TOKENS, aggregation="alti_logit", target=TOKENS + 100)
    with pytest.raises(ValueError, match="pass it: Method"):
        LaTIM(lambda t: model(t).logits).interactions(TOKENS, aggregation="alti_logit")


# ---- an adapter of the user's own -------------------------------------------------------------


class Decaying(RunningMean):
    """Its decay depends on the tokens."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, out = torch.zeros_like(x[:, 0]), []
        for token in x.unbind(1):
            h = torch.exp(-torch.sigmoid(token)) * h + token
            out.append(h)
        return self.out_proj(torch.stack(out, 1))


def test_an_adapter_may_read_its_coefficients_without_a_graph(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))

    @register_mixer(Decaying)
    def freeze_decaying(call):
        x = call.tokens("x")
        with torch.no_grad():
            state = torch.ones(*x.shape[:2], 1, 1)
            recurrence = DiagonalOperator(
                torch.sigmoid(x), torch.ones_like(x), -torch.ones(x.shape[-1], 1), state, state
            )
        return FrozenMixer(
            recurrence=recurrence,
            inputs=x,
            out_proj=lambda y: call.linear(call.module.out_proj, y),
            out_weight=call.parameter(call.module.out_proj.weight),
        )

    assert captum_ssm.mixers.find_adapter(Decaying()) is freeze_decaying
    model = nn.Sequential(Decaying(), Decaying(), nn.Linear(8, 5))
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    first, second = (
        freeze(model, None, x, target=2, gradients=True, check=check).layers[0].call.gradient
        for check in (True, False)
    )
    torch.testing.assert_close(first, second)


# ---- arguments --------------------------------------------------------------------------------


def test_layers_are_numbers_of_any_kind():
    model = tiny()
    for layers in (1, -1, np.int64(1), torch.tensor(1), range(1, 2), [torch.tensor(1)]):
        assert list(hidden_attention(model, TOKENS, layers=layers)) == ["backbone.layers.1.mixer"]
    for layers in (1.0, [0.0], [[0]], True):
        with pytest.raises(ValueError, match="layers holds"):
            hidden_attention(model, TOKENS, layers=layers)
    with pytest.raises(ValueError, match="start_layer is 'first'"):
        MambaRollout(model).attribute(TOKENS, start_layer="first")


@pytest.mark.parametrize(
    "method", [RawAttention, MambaRollout, MambaAttribution, UnifiedImplicitAttention]
)
def test_an_unknown_option_is_named_before_the_model_runs(method):
    def never(tokens):
        raise AssertionError

    with pytest.raises(TypeError, match=r"no option 'clamp'.*'reduction', 'sign'"):
        method(never, tiny()).attribute(TOKENS, target=5, clamp=True)


def test_estimate_takes_what_the_call_will():
    method = RawAttention(tiny())
    plain = estimate(method, TOKENS)
    for side in ("left", "right"):
        mask = padded(side)
        for extra in ({"attention_mask": mask}, {"attention_mask": mask.flip(0)}):
            found = estimate(method, TOKENS, additional_forward_args=extra)
            assert found.result_bytes == plain.result_bytes
    with pytest.raises(InputError, match="holds ids from"):
        estimate(method, TOKENS + 1000)
    with pytest.raises(TypeError, match="inputs is a list"):
        estimate(method, TOKENS.tolist())
