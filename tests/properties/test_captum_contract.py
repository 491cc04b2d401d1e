"""Captum's contract: what goes in, what comes out, and what the model may look like."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from captum.attr import NoiseTunnel
from captum.metrics import infidelity, sensitivity_max
from families import build
from methods import MAPS, METHODS, OF_A_TARGET, assert_close, each, each_method
from models import (
    OUTPUT_FORMS,
    S6_FAMILIES,
    VOCABULARY,
    Classifier,
    WithOutput,
    embed,
    ids,
    recast,
    tiny,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import BatchEncoding

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    effective_receptive_field,
    hidden_attention,
)
from captum_ssm.capture.model import parameter_names


@each_method
@pytest.mark.parametrize("family", [*S6_FAMILIES, "mamba2"])
def test_every_form_of_input(method, family):
    model, tokens = build(family), ids(2, 7)
    embeddings = embed(model, tokens)
    truth = method(model).attribute(tokens, target=4)
    assert truth.shape == (2, 7)
    assert truth.dtype == torch.float32
    assert not truth.requires_grad

    from_embeddings = method(model).attribute(embeddings, target=4)
    by_callable = method(lambda e: model(inputs_embeds=e), model=model)
    assert from_embeddings.shape == embeddings.shape
    assert_close(from_embeddings.sum(-1), truth)
    even = bool((from_embeddings == from_embeddings[..., :1]).all())
    assert even != (method is MambaLRP)  # which has relevance per feature
    assert_close(by_callable.attribute(embeddings, target=4), from_embeddings)
    assert_close(method(lambda t: model(t), model).attribute(tokens, target=4), truth)

    (in_a_tuple,) = method(model).attribute((tokens,), target=4)
    assert_close(in_a_tuple, truth)
    assert isinstance(method(model).attribute((embeddings,), target=4), tuple)


@each_method
def test_the_inputs_are_left_alone(method):
    model, tokens = tiny(), ids(2, 7)
    embeddings = embed(model, tokens).requires_grad_()
    before = embeddings.detach().clone()
    found = method(model).attribute(embeddings, target=4)
    assert embeddings.grad is None
    assert embeddings.requires_grad
    assert torch.equal(embeddings, before)
    assert not found.requires_grad
    strided = embed(model, ids(2, 14))[:, ::2]
    found = method(model).attribute(strided, target=4)
    assert_close(found, method(model).attribute(strided.contiguous(), target=4))


@each_method
def test_further_arguments(method):
    model, tokens = tiny(), ids(2, 7)
    truth = method(model).attribute(tokens, target=4)
    no_cache = {"use_cache": False, "return_dict": False}
    kept = {"logits_to_keep": 1} if "logits_to_keep" in parameter_names(model) else {}
    for extra in (no_cache, kept, {"labels": tokens}):
        found = method(model).attribute(tokens, target=4, additional_forward_args=extra)
        assert_close(found, truth)
    for extra in (2.0, (2.0,), (2.0, None)):
        scaled = method(lambda t, a, b=None: a * model(t).logits, model)
        found = scaled.attribute(tokens, target=4, additional_forward_args=extra)
        if method in OF_A_TARGET:
            assert not torch.allclose(found, truth)  # twice the gradient
        else:
            assert_close(found, truth)


@each_method
@pytest.mark.parametrize("form", OUTPUT_FORMS)
def test_every_form_of_output(method, form):
    model, tokens = tiny(), ids(2, 7)
    wrapped = WithOutput(model, OUTPUT_FORMS[form])
    truth = method(model).attribute(tokens, target=4)
    assert_close(method(wrapped).attribute(tokens, target=4), truth)


TOKEN_TARGETS = {
    "int": (4, [(6, 4), (6, 4)]),
    "0-d tensor": (torch.tensor(4), [(6, 4), (6, 4)]),
    "1-D tensor": (torch.tensor([4, 9]), [(6, 4), (6, 9)]),
    "1-D tensor of one": (torch.tensor([4]), [(6, 4), (6, 4)]),
    "list": ([4, 9], [(6, 4), (6, 9)]),
    "tuple": ((3, 9), [(3, 9), (3, 9)]),
    "list of tuples": ([(3, 9), (5, 4)], [(3, 9), (5, 4)]),
}


@pytest.mark.parametrize("form", TOKEN_TARGETS)
def test_every_form_of_target_for_token_logits(form):
    model, tokens = tiny(), ids(2, 7)
    target, pairs = TOKEN_TARGETS[form]
    truth = []
    for b, (position, token) in enumerate(pairs):
        only = MambaAttribution(lambda t, p=position, k=token: model(t).logits[:, p, k], model)
        truth.append(only.attribute(tokens[b : b + 1], position=position)[0])
    assert_close(MambaAttribution(model).attribute(tokens, target=target), torch.stack(truth))


CLASS_TARGETS = {
    "int": (4, [4, 4]),
    "0-d tensor": (torch.tensor(4), [4, 4]),
    "1-D tensor": (torch.tensor([4, 1]), [4, 1]),
    "1-D tensor of one": (torch.tensor([4]), [4, 4]),
    "list": ([4, 1], [4, 1]),
    "tuple": ((4,), [4, 4]),
    "list of tuples": ([(4,), (1,)], [4, 1]),
}


@pytest.mark.parametrize("form", CLASS_TARGETS)
def test_every_form_of_target_for_classes(form):
    model, tokens = Classifier("last"), ids(2, 7)
    target, classes = CLASS_TARGETS[form]
    truth = [
        MambaAttribution(lambda t, c=c: model(t)[:, c], model).attribute(tokens[b : b + 1])[0]
        for b, c in enumerate(classes)
    ]
    assert_close(MambaAttribution(model).attribute(tokens, target=target), torch.stack(truth))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_output_an_example_needs_no_target(shape):
    model, tokens = Classifier("last"), ids(2, 7)
    truth = MambaAttribution(model).attribute(tokens, target=3)
    one = MambaAttribution(lambda t: model(t)[:, 3].reshape(-1, *shape), model)
    assert_close(one.attribute(tokens), truth)


def test_outputs_with_more_axes_than_tokens():
    # (B, 8, 5) of three tokens can't be token logits: a target names one entry of it, as in Captum.
    model, tokens = Classifier("last"), ids(2, 3)
    squares = torch.arange(8.0)[:, None].square()
    many = MambaAttribution(lambda t: model(t)[:, None] * squares, model)
    truth = MambaAttribution(lambda t: 9 * model(t)[:, 2], model).attribute(tokens)
    assert_close(many.attribute(tokens, target=(3, 2)), truth)
    assert_close(many.attribute(tokens, target=[(3, 2), (3, 2)]), truth)


def same_as_position(method, model, tokens, position, **kwargs):
    explain = method(model)
    found = explain.attribute(tokens, target=3, **kwargs)
    assert_close(found, explain.attribute(tokens, target=3, position=position, **kwargs))


@each_method
@pytest.mark.parametrize(("pool", "position"), [("last", 6), ("middle", 3)])
def test_the_token_that_a_classifier_pools_is_found(method, pool, position):
    model, tokens = Classifier(pool), ids(2, 7)
    same_as_position(method, model, tokens, position)
    same_as_position(method, model, embed(model, tokens), position)


@each_method
def test_the_token_that_transformers_classifier_pools_is_found(method):
    model, tokens = tiny("jamba_classifier"), ids(3, 7)
    same_as_position(method, model, tokens, 6)
    tokens[0, 5:] = 0  # it pools the last token that is not the pad id
    tokens[1, :2] = 0
    extra = {"attention_mask": (tokens != 0).long()}
    for given in ({}, {"additional_forward_args": extra}):
        same_as_position(method, model, tokens, torch.tensor([4, 6, 6]), **given)


@each_method
def test_a_masked_mean_is_found(method):
    model, tokens = Classifier("masked mean"), ids(2, 7)
    mask = torch.ones(2, 7, dtype=torch.long)
    mask[0, 4:] = 0
    explain = method(model)
    found = explain.attribute(tokens, target=3, additional_forward_args=mask)
    assert (found[0, 4:] == 0).all()
    for b, n in enumerate((4, 7)):
        row, ones = tokens[b : b + 1, :n], torch.ones(1, n, dtype=torch.long)
        alone = explain.attribute(row, target=3, additional_forward_args=ones)
        assert_close(found[b : b + 1, :n], alone)


def padded(side: str) -> tuple[Tensor, Tensor, list[slice]]:
    """A batch of sequences of 7, 4 and 1 tokens, its mask, and where the tokens are."""
    tokens, mask = ids(3, 7), torch.ones(3, 7, dtype=torch.long)
    places = [slice(0, 7)]
    for b, n in ((1, 4), (2, 1)):
        place = slice(7 - n, 7) if side == "left" else slice(0, n)
        places.append(place)
        mask[b] = 0
        mask[b, place] = 1
    tokens[mask == 0] = 0
    return tokens, mask, places


def ways_to_give_a_mask(method, model, tokens, mask):
    embeddings = embed(model, tokens)
    explain = method(model)
    yield explain, tokens, mask
    yield explain, tokens, (mask,)
    yield explain, tokens, {"attention_mask": mask}
    yield explain, tokens, {"attention_mask": mask.bool()}
    yield explain, embeddings, mask
    yield explain, embeddings, {"attention_mask": mask}
    yield method(lambda t: model(t, attention_mask=mask), model), tokens, None
    yield method(lambda t, m: model(input_ids=t, attention_mask=m), model), tokens, mask
    yield method(lambda e: model(inputs_embeds=e, attention_mask=mask), model), embeddings, None


@each_method
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_is_explained_as_if_alone(method, side):
    model = tiny()
    tokens, mask, places = padded(side)
    explain = method(model)
    alone = [
        explain.attribute(tokens[b : b + 1, place], target=4 + b) for b, place in enumerate(places)
    ]
    target = torch.arange(4, 7)
    for way, inputs, extra in ways_to_give_a_mask(method, model, tokens, mask):
        found = way.attribute(inputs, target=target, additional_forward_args=extra)
        assert found.shape == inputs.shape
        found = found.sum(-1) if found.dim() == 3 else found
        assert (found[mask == 0] == 0).all()
        for b, place in enumerate(places):
            assert_close(found[b : b + 1, place], alone[b])


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((method, {}) for method in METHODS),
        *((method, {"normalize_rows": True, "sign": "clamp"}) for method in MAPS),
        (LaTIM, {"layer": 0, "aggregation": "l2"}),
    ],
)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", [*S6_FAMILIES, "mamba2"])
def test_padding_in_each_family(method, side, family, options):
    tokens, mask, places = padded(side)
    explain = method(build(family))
    found = explain.attribute(tokens, 4, {"attention_mask": mask}, **options)
    assert (found[mask == 0] == 0).all()
    for b, place in enumerate(places):
        row = tokens[b : b + 1, place]
        alone = explain.attribute(row, target=4, **options)
        assert_close(found[b : b + 1, place], alone, 1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_whole_rollouts_and_maps(side):
    model = tiny()
    tokens, mask, places = padded(side)
    extra = {"additional_forward_args": {"attention_mask": mask}}
    for options in ({}, {"normalize_rows": True}):
        whole = MambaRollout(model).rollout(tokens, **extra, **options)
        of_class = MambaAttribution(model).rollout(tokens, 4, **extra, **options)
        for b, place in enumerate(places):
            row = tokens[b : b + 1, place]
            for rho, alone in (
                (whole, MambaRollout(model).rollout(row, **options)),
                (of_class, MambaAttribution(model).rollout(row, 4, **options)),
            ):
                assert_close(rho[b : b + 1, place, place], alone)
                assert rho[b].count_nonzero() == rho[b, place, place].count_nonzero()
    for formulation in ("hidden", "unified"):
        options = {"formulation": formulation, "layers": 0}
        maps, rows, mean = (
            hidden_attention(model, tokens, **extra, **options, **more).popitem()[1]
            for more in ({}, {"rows": [2, 6]}, {"rows": [2, 6], "reduction": "mean"})
        )
        assert torch.equal(rows == 0, maps[:, :, [2, 6]] == 0)
        assert_close(rows, maps[:, :, [2, 6]])
        assert_close(mean, rows.mean(1))
        for b, place in enumerate(places):
            (alone,) = hidden_attention(model, tokens[b : b + 1, place], **options).values()
            assert_close(maps[b : b + 1, :, place, place], alone)


@each_method
@pytest.mark.parametrize("family", ["mamba", "mamba2", "recurrent_gemma", "jamba"])
def test_one_token(method, family):
    relevance = method(build(family)).attribute(ids(2, 1), target=5)
    assert relevance.shape == (2, 1)
    assert relevance.isfinite().all()


@each_method
def test_a_tokenizers_whole_output(method, tokenizer):
    model = tiny()
    encoding = tokenizer(["w3 w4 w5 w6", "w7 w8"], return_tensors="pt", padding=True)
    mask = {"attention_mask": encoding["attention_mask"]}
    truth = method(model).attribute(encoding["input_ids"], 4, mask)
    taken = {k: encoding[k] for k in ("input_ids", "attention_mask")}
    for whole in (taken, BatchEncoding(taken)):
        assert_close(method(model).attribute(whole, target=4), truth)
    ids_alone = {"input_ids": encoding["input_ids"]}
    assert_close(method(model).attribute(ids_alone, 4, mask), truth)
    with pytest.raises(TypeError, match="additional_forward_args"):
        method(model).attribute(encoding["input_ids"], target=4, **mask)
    with pytest.raises(TypeError, match="input_ids"):
        method(model).attribute(mask, target=4)
    with pytest.raises(TypeError, match="expected a dict"):
        method(model).attribute(taken, 4, (None,))


class TakesABatch(nn.Module):
    """A model whose forward takes a tokenizer's output whole, and adds its results to it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch):
        return {**batch, "scores": self.inner(**batch).logits}


@each_method
def test_a_tokenizers_output_that_forward_takes_whole(method, tokenizer):
    model = tiny()
    encoding = tokenizer(["w3 w4 w5 w6", "w7 w8"], return_tensors="pt", padding=True)
    taken = {k: encoding[k] for k in ("input_ids", "attention_mask")}
    truth = method(model).attribute(taken, target=4)
    assert_close(method(TakesABatch(model)).attribute(taken, target=4), truth)


@pytest.mark.parametrize("method", [RawAttention, MambaRollout])
def test_a_frozen_method_wants_the_same_arguments(method):
    mask = torch.ones(2, 7, dtype=torch.long)
    other = mask.clone()
    other[0, :3] = 0
    frozen = method(tiny()).freeze_once(ids(2, 7), {"attention_mask": mask})
    found = frozen.attribute(ids(2, 7), None, {"attention_mask": mask.clone()}, position=5)
    assert_close(found, method(tiny()).attribute(ids(2, 7), position=5))
    for extra in (None, {"attention_mask": other}, {}):
        with pytest.raises(ValueError, match="freeze_once"):
            frozen.attribute(ids(2, 7), None, extra, position=5)


@each_method
def test_a_mask_of_ones_changes_nothing(method):
    model, tokens = tiny("jamba"), ids(2, 7)
    extra = {"attention_mask": torch.ones(2, 7, dtype=torch.long)}
    assert_close(
        method(model).attribute(tokens, target=4, additional_forward_args=extra),
        method(model).attribute(tokens, target=4),
    )


@each_method
def test_a_mask_that_a_batch_shares(method):
    model, tokens, mask = tiny(), ids(2, 7), torch.ones(1, 7, dtype=torch.long)
    mask[:, :3] = 0
    explain = method(model)
    found = explain.attribute(tokens, target=4, additional_forward_args={"attention_mask": mask})
    assert (found[:, :3] == 0).all()
    assert_close(found[:, 3:], explain.attribute(tokens[:, 3:], target=4))


@each_method
def test_a_mask_that_only_the_mixers_see(method):
    # forward_func runs a part of the model, so that the model's own forward is never called.
    model = tiny()
    tokens, mask, _ = padded("left")

    def head_of_backbone(t):
        return model.lm_head(model.backbone(t, attention_mask=mask).last_hidden_state)

    found = method(head_of_backbone, model).attribute(tokens, target=4)
    truth = method(model).attribute(tokens, target=4, additional_forward_args=mask)
    assert_close(found, truth)


@each_method
def test_a_pad_id_alone_says_nothing(method):
    # Mamba's pad id is also its BOS: without a mask, it is a token like any other.
    model, tokens = tiny(), ids(2, 7)
    tokens[:, 0] = tokens[:, -1] = 0
    found = method(model).attribute(tokens, target=4)
    assert_close(found, method(model).attribute(tokens, target=4, position=6))
    assert (found != 0).any(0).all() or method in OF_A_TARGET


@each_method
@pytest.mark.parametrize("family", S6_FAMILIES)
def test_a_batch_is_its_examples(method, family):
    model, tokens = tiny(family), ids(3, 9)
    together = method(model).attribute(tokens, target=[4, 9, 1])
    for b, token in enumerate([4, 9, 1]):
        alone = method(model).attribute(tokens[b : b + 1], target=token)
        assert_close(together[b : b + 1], alone, 1e-5)


@each_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["mamba", "jamba"])
def test_half_precision(method, dtype, family):
    half = recast(tiny(family), dtype)
    full = recast(half, torch.float32)  # of the same, rounded weights
    tokens = ids(2, 7)
    found = method(half).attribute(tokens, target=4, position=5)
    assert found.dtype == torch.float32
    truth = method(full).attribute(tokens, target=4, position=5)
    # Within what the model's own rounding does to its hidden states, and to its gradients.
    assert_close(found, truth, {torch.bfloat16: 0.15, torch.float16: 0.02}[dtype])
    embedded = method(half).attribute(embed(half, tokens), target=4, position=5)
    assert embedded.dtype == torch.float32
    assert_close(embedded.sum(-1), found, 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_maps_of_half_precision(dtype):
    half = recast(tiny(), dtype)
    full = recast(half, torch.float32)
    halves, fulls = (hidden_attention(m, ids(2, 7), layers=0) for m in (half, full))
    for path, truth in fulls.items():
        assert halves[path].dtype == torch.float32
        assert_close(halves[path], truth, {torch.bfloat16: 0.05, torch.float16: 0.005}[dtype])


@each_method
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_in_every_grad_mode(method, mode):
    model = tiny()
    tokens, mask, _ = padded("left")
    truth = method(model).attribute(tokens, target=4, additional_forward_args=mask)
    with mode():
        found = method(model).attribute(tokens, target=4, additional_forward_args=mask)
        # and on tensors that were made in that mode
        again = method(model).attribute(
            tokens.clone(), target=torch.tensor([4, 4, 4]), additional_forward_args=mask.clone()
        )
        embedded = method(model).attribute(
            embed(model, tokens), target=4, additional_forward_args={"attention_mask": mask + 0}
        )
    assert_close(found.clone(), truth)
    assert_close(again.clone(), truth)
    assert_close(embedded.sum(-1), truth)


@each_method
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_classifier_in_every_grad_mode(method, mode):
    model, tokens = Classifier("middle"), ids(2, 7)
    truth = method(model).attribute(tokens, target=3)
    with mode():
        found = method(model).attribute(tokens.clone(), target=torch.tensor([3, 3]))
    assert_close(found.clone(), truth)


@each_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(method, dtype):
    # The model computes as it is told to; the explanation of it is exact all the same.
    model, tokens = tiny(), ids(2, 7)
    truth = method(model).attribute(tokens, target=4)
    (plain,) = hidden_attention(model, tokens, layers=0).values()
    with torch.autocast("cpu", dtype):
        found = method(model).attribute(tokens, target=4)
        (maps,) = hidden_attention(model, tokens, layers=0).values()
        assert torch.is_autocast_enabled("cpu")
    assert found.dtype == torch.float32
    assert_close(found, truth, {torch.bfloat16: 0.1, torch.float16: 0.02}[dtype])
    assert_close(maps, plain)


@each_method
def test_from_several_threads(method):
    model, tokens = tiny(), ids(2, 7)
    truth = method(model).attribute(tokens, target=4)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: method(model).attribute(tokens, target=4), range(12)))
    for one in found:
        assert torch.equal(one, truth)


def test_a_model_loaded_in_inference_mode():
    with torch.inference_mode():
        model = tiny()
    tokens = ids(2, 7)
    assert_close(RawAttention(model).attribute(tokens), RawAttention(tiny()).attribute(tokens))
    with pytest.raises(ValueError, match="made under"):
        MambaAttribution(model).attribute(tokens, target=4)


@each_method
def test_a_frozen_model(method):
    model, tokens = tiny(), ids(2, 7)
    truth = method(model).attribute(tokens, target=4)
    last = model.backbone.layers[1]
    for trained in ((), last.parameters(), model.lm_head.parameters()):
        model.requires_grad_(False)
        for p in trained:
            p.requires_grad_(True)
        flags = [p.requires_grad for p in model.parameters()]
        assert_close(method(model).attribute(tokens, target=4), truth)
        assert_close(method(model).attribute(embed(model, tokens), target=4).sum(-1), truth)
        assert [p.requires_grad for p in model.parameters()] == flags


@each_method
@pytest.mark.parametrize("family", S6_FAMILIES)
def test_training_mode_is_left_as_it_was(method, family):
    model, tokens = tiny(family), ids(2, 7)
    truth = method(model).attribute(tokens, target=4)
    model.train()
    model.get_submodule("lm_head").eval()
    before = {name: m.training for name, m in model.named_modules()}
    assert_close(method(model).attribute(tokens, target=4), truth)
    assert {name: m.training for name, m in model.named_modules()} == before


@each_method
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(method, reentrant):
    model, tokens = tiny(), ids(2, 7)
    truth = method(model).attribute(tokens, target=4)
    enable = getattr(model, "activation_checkpointing_enable", None)
    enable = enable or model.gradient_checkpointing_enable  # the name in transformers 4
    enable({"use_reentrant": reentrant})
    model.train()
    assert_close(method(model).attribute(tokens, target=4), truth)
    assert model.training
    assert all(layer.gradient_checkpointing for layer in model.backbone.layers)


class Checkpointed(nn.Module):
    """Its layers run under a checkpoint of their own forward's, whatever the mode."""

    def __init__(self, reentrant):
        super().__init__()
        self.model, self.reentrant = tiny(), reentrant
        self.fails = False

    def get_input_embeddings(self):
        return self.model.get_input_embeddings()

    def layer(self, layer, h, *, fails):
        if fails:
            raise KeyError("the layer")
        return layer(h)

    def forward(self, tokens):
        h = self.get_input_embeddings()(tokens)
        for layer in self.model.backbone.layers:
            if self.reentrant:
                h = checkpoint(partial(self.layer, fails=self.fails), layer, h, use_reentrant=True)
            else:
                h = checkpoint(
                    self.layer, layer, h, fails=self.fails, use_reentrant=False, early_stop=False
                )
        return self.model.lm_head(self.model.backbone.norm_f(h))


@each_method
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_model_that_checkpoints_its_layers(method, reentrant):
    model, tokens = Checkpointed(reentrant), ids(2, 7)
    truth = method(model.model).attribute(tokens, target=4)
    code = checkpoint.__code__
    assert_close(method(model).attribute(tokens, target=4), truth)
    model.fails = True
    with pytest.raises(KeyError, match="the layer"):
        method(model).attribute(tokens, target=4)
    assert checkpoint.__code__ is code


def test_the_receptive_field_of_a_model_that_checkpoints():
    model, tokens = Checkpointed(True), ids(1, 7)
    truth = effective_receptive_field(model.model, tokens, target=4, position=-1)
    found = effective_receptive_field(model, tokens, target=4, position=-1)
    assert_close(found.map, truth.map)


@each([*MAPS, MambaLRP])  # LaTIM needs a norm behind the mixers
def test_a_block_that_several_layers_share(method):
    class Twice(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            block = self.model.backbone.layers[0]
            return self.model.lm_head(block(block(x)))

    model = Twice(tiny())
    x = torch.randn(2, 7, 16)
    maps = hidden_attention(model, x)
    path = "model.backbone.layers.0.mixer"
    assert list(maps) == [path, path + ":1"]
    assert not torch.allclose(*maps.values())
    (alone,) = hidden_attention(model.model.backbone.layers[0], x).values()
    assert_close(maps[path], alone)
    found = method(model).attribute(x, target=3)
    assert found.shape == x.shape
    layers = hidden_attention(model, x, layers=[path + ":1", 0], reduction="mean")
    assert_close(layers[path + ":1"], maps[path + ":1"].mean(1))


@each_method
@pytest.mark.parametrize("nt_type", ["smoothgrad", "smoothgrad_sq", "vargrad"])
def test_noise_tunnel(method, nt_type):
    model = tiny()
    x = embed(model, ids(2, 7))
    tunnel = NoiseTunnel(method(model))
    options = {"nt_type": nt_type, "nt_samples": 4, "target": torch.tensor([4, 9])}
    found = tunnel.attribute(x, stdevs=0.05, **options)
    assert found.shape == x.shape
    truth = method(model).attribute(x, target=torch.tensor([4, 9]))
    still = tunnel.attribute(x, stdevs=0.0, **options)
    if nt_type == "smoothgrad":
        assert_close(still, truth)
        assert_close(found, truth, 0.5)
        assert not torch.allclose(found, truth)
    elif nt_type == "smoothgrad_sq":
        assert_close(still, truth**2)
    else:
        assert found.max() > 100 * still.abs().max()


@each_method
def test_noise_tunnel_passes_everything_on(method):
    model = tiny()
    tokens, mask, _ = padded("left")
    x = embed(model, tokens)
    truth = method(model).attribute(x, target=4, additional_forward_args=mask)
    tunnel = NoiseTunnel(method(model))
    still = {"nt_samples": 2, "stdevs": 0.0}
    assert_close(tunnel.attribute(x, target=4, additional_forward_args=mask, **still), truth)
    (found,) = tunnel.attribute((x,), target=4, additional_forward_args=(mask,), **still)
    assert_close(found, truth)
    by_name = still | {"additional_forward_args": {"attention_mask": mask}}
    assert_close(tunnel.attribute(x, target=4, nt_samples_batch_size=1, **by_name), truth)
    options = {"position": 3} | ({"normalize_rows": True} if method in MAPS else {})
    truth = method(model).attribute(x, target=4, **options)
    assert_close(tunnel.attribute(x, target=4, **options, **still), truth)


@each_method
def test_sensitivity(method):
    model = tiny()
    x = embed(model, ids(2, 7))
    found, still = (
        sensitivity_max(
            method(model).attribute, x, perturb_radius=radius, n_perturb_samples=3, target=4
        )
        for radius in (0.01, 0.0)
    )
    assert found.shape == (2,)
    assert ((found > 0) & (found < 1)).all()
    assert (still < 1e-5).all()


@each_method
def test_infidelity(method):
    model = tiny()
    x = embed(model, ids(2, 7))
    explain = method(lambda e: model(inputs_embeds=e).logits[:, -1], model)

    def perturb(inputs):
        noise = torch.randn_like(inputs) * 0.01
        return noise, inputs - noise

    relevance = explain.attribute(x, target=4)
    found = infidelity(explain.forward_func, perturb, x, relevance, n_perturb_samples=3, target=4)
    assert found.shape == (2,)
    assert torch.isfinite(found).all()


CAPTUM_NAMES = {
    "LaTIM": "LaTIM",
    "MambaAttribution": "Mamba Attribution",
    "MambaLRP": "MambaLRP",
    "MambaRollout": "Mamba Rollout",
    "RawAttention": "Raw Attention",
    "UnifiedImplicitAttention": "Unified Implicit Attention",
}


@each_method
def test_what_captum_looks_for(method):
    explain = method(tiny())
    assert callable(explain.attribute.__wrapped__)
    assert explain.get_name() == CAPTUM_NAMES[method.__name__]
    assert explain.has_convergence_delta() is (method not in MAPS)
    if method not in MAPS:
        found, delta = explain.attribute(ids(), target=4, return_convergence_delta=True)
        assert torch.equal(found, explain.attribute(ids(), target=4))
        assert delta.shape == (2,)


@each_method
def test_forward_func_is_read_at_call_time(method):
    one, other, tokens = tiny(seed=0), tiny(seed=1), ids(2, 7)
    explain = method(one)
    explain.forward_func = other
    assert_close(explain.attribute(tokens, target=4), method(other).attribute(tokens, target=4))
    # Captum's wrappers put a function of theirs in the model's place.
    explain = method(one)
    explain.forward_func = lambda t: one(t).logits[:, 3]
    truth = method(one).attribute(tokens, target=4, position=3)
    assert_close(explain.attribute(tokens, target=4, position=3), truth)


def test_nothing_is_touched_at_construction():
    model = tiny()
    before = [list(m.__dict__) for m in model.modules()]
    for method in METHODS:
        method(model)
    assert [list(m.__dict__) for m in model.modules()] == before


@each_method
def test_a_model_wrapped_by_nnsight(method):
    from nnsight import NNsight

    model, tokens = tiny(), ids(2, 7)
    truth = method(model).attribute(tokens, target=4)
    wrapped = NNsight(model)
    for explain in (
        method(wrapped),
        method(lambda t: model(t), wrapped),
        method(model, wrapped),
        method(lambda t: model(t).logits, model),
    ):
        assert_close(explain.attribute(tokens, target=4), truth)
    assert_close(method(wrapped).attribute(embed(model, tokens), target=4).sum(-1), truth)
    maps = hidden_attention(wrapped, tokens)
    assert list(maps) == ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]


@each_method
@pytest.mark.parametrize("kind", ["LanguageModel", "TransformersModel", "lazy"])
def test_nnsights_language_model(method, kind, tokenizer, tmp_path):
    from nnsight import LanguageModel, NNsightDeprecationWarning, TransformersModel

    model = tiny()
    if kind == "LanguageModel":
        with pytest.warns(NNsightDeprecationWarning, match="TransformersModel"):
            wrapped = LanguageModel(model, tokenizer=tokenizer)
    elif kind == "TransformersModel":
        wrapped = TransformersModel(model, tokenizer=tokenizer, task="text-generation")
    else:  # loaded when it is first run
        model.save_pretrained(tmp_path)
        wrapped = TransformersModel(str(tmp_path), tokenizer=tokenizer, task="text-generation")
        assert not wrapped.dispatched
    tokens = tokenizer("w5 w9 w21 w4", return_tensors="pt").input_ids
    assert tokens.tolist() == [[5, 9, 21, 4]]
    truth = method(tiny()).attribute(tokens, target=4)
    assert_close(method(wrapped).attribute(tokens, target=4), truth)
    assert_close(method(lambda t: wrapped._module(t), wrapped).attribute(tokens, target=4), truth)
    embeddings = embed(tiny(), tokens)
    assert_close(method(wrapped).attribute(embeddings, target=4).sum(-1), truth)
    with wrapped.trace(tokens):
        logits = wrapped.lm_head.output.save()
    assert logits.shape == (1, 4, VOCABULARY)  # it still traces
