"""Errors name modules by their paths, and print no module's or array's whole repr."""

import re
from functools import partial

import numpy as np
import pytest
import torch
from models import ids, tiny
from torch import nn

from captum_ssm import (
    LaTIM,
    MambaLRP,
    RawAttention,
    SSMLLMAttribution,
    estimate,
    explain,
    hidden_attention,
    supported,
)
from captum_ssm.errors import brief
from captum_ssm.interventions import circuit, knockout
from captum_ssm.models import VisionMamba

TOKENS = ids(1, 7)
MANY = torch.arange(5000.0)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (nn.Linear(2, 3), "a Linear"),
        ([nn.Linear(2, 3), MANY], "[a Linear, of shape (5000,), from 0 to 4999]"),
        ({"mask": MANY > 3}, "{'mask': of shape (5000,), from 0 to 1}"),
        (torch.tensor([3, 4]), "[3, 4]"),
        (np.int64(4), "4"),
        (torch.zeros(2, device="meta"), "of shape (2,) and dtype torch.float32"),
        (np.full(99, "a"), "of shape (99,) and dtype <U1"),
        (torch.Tensor, "<class 'torch.Tensor'>"),
        ("w3", "'w3'"),
    ],
)
def test_values_in_errors(value, says):
    assert brief(value) == says
    assert len(brief("w" * 5000)) == 200


def test_a_layer_may_be_the_mixer_itself():
    model = tiny()
    mixers = [block.mixer for block in model.backbone.layers]
    latim, options = LaTIM(model), {"aggregation": "l2"}
    truth = latim.attribute(TOKENS, layer=1, **options)
    assert torch.equal(latim.attribute(TOKENS, layer=mixers[1], **options), truth)
    for layers in (mixers[1], [mixers[1]]):
        (name,) = hidden_attention(model, TOKENS, layers=layers)
        assert model.get_submodule(name) is mixers[1]
    with torch.no_grad(), knockout(model, layers=mixers[0]):
        of_module = model(TOKENS).logits
    with torch.no_grad(), knockout(model, layers=0):
        assert torch.equal(model(TOKENS).logits, of_module)
    with torch.no_grad(), circuit(model, [(mixers[0], 3, 2)]):
        of_module = model(TOKENS).logits
    with torch.no_grad(), circuit(model, [(0, 3, 2)]):
        assert torch.equal(model(TOKENS).logits, of_module)


def test_a_module_that_is_not_a_mixer_is_named_by_its_path():
    model = tiny()
    block = model.backbone.layers[1]
    calls = {
        "layer is": lambda layer: LaTIM(model).attribute(TOKENS, layer=layer, aggregation="l2"),
        "layers holds": lambda layer: hidden_attention(model, TOKENS, layers=layer),
        "edges holds": lambda layer: circuit(model, [(layer, 3, 2)]).__enter__(),
    }
    for told, call in calls.items():
        with pytest.raises(ValueError) as caught:
            call(block)
        message = str(caught.value)
        assert message.startswith(f"{told} backbone.layers.1, a {type(block).__name__};")
        assert "0 .. 1" in message
        assert message.endswith(" It holds the mixer backbone.layers.1.mixer.")
        with pytest.raises(ValueError, match=f"^{told} a Linear of another model;"):
            call(nn.Linear(2, 2))
        with pytest.raises(ValueError, match=f"^{told} the model, a {type(model).__name__};"):
            call(model)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m, part: estimate(m, TOKENS), "method is a MambaForCausalLM; expected a method"),
        (lambda m, part: MambaLRP(m).attribute(TOKENS, target=part), "target is a MambaBlock;"),
        (lambda m, part: MambaLRP(m).attribute(TOKENS, target="w3"), "explain(model, tokenizer"),
        (lambda m, part: MambaLRP(m).attribute("w3"), "Pass tokenizer(text, return_tensors='pt')"),
        (lambda m, part: MambaLRP(m).attribute([TOKENS, MANY]), "inputs go into a tuple"),
        (lambda m, part: MambaLRP(m).attribute(TOKENS.numpy()), "Pass torch.from_numpy(inputs)"),
        (lambda m, part: MambaLRP(m).attribute(TOKENS[0]), "as in inputs[None] of one"),
        (lambda m, part: MambaLRP(m).attribute(TOKENS.float()), "get_input_embeddings()(ids)"),
        (lambda m, part: SSMLLMAttribution(m, None), "attr_method is a MambaForCausalLM; exp"),
        (lambda m, part: explain(m, None, TOKENS, target=MANY), "target is of shape (5000,), from"),
        (lambda m, part: explain(m, None, TOKENS, position=part), "position is a MambaBlock;"),
        (lambda m, part: explain(m, None, TOKENS, methods=part), "methods holds a MambaBlock;"),
        (lambda m, part: LaTIM(m, layer=part), "LaTIM(model).attribute(inputs, layer=...)"),
        (lambda m, part: LaTIM(m, tolerance=0.1), "belongs to attribute"),
        (lambda m, part: MambaLRP(m, multiply_by_inputs=False), "have one form: drop it"),
        (lambda m, part: MambaLRP(m, chek=False), "Did you mean 'check'?"),
        (lambda m, part: LaTIM(m, part), "model is backbone.layers.0, a MambaBlock, and forward"),
    ],
)
def test_what_an_error_shows(call, says):
    model = tiny()
    with pytest.raises((ValueError, TypeError), match=re.escape(says)) as caught:
        call(model, model.backbone.layers[0])
    assert "\n" not in str(caught.value)


def test_a_method_with_arguments_of_its_own():
    class Seeded(RawAttention):
        def __init__(self, forward_func, seed=0, **others):
            super().__init__(forward_func, **others)
            self.seed = seed

    model = tiny()
    assert Seeded(model, seed=3, check=False).seed == 3
    with pytest.raises(
        TypeError, match=r"Seeded has no option .layer.; .*Did you mean .layers.[?]"
    ):
        Seeded(model, layer=3)


def test_bytes_of_images_are_refused_in_words():
    model = VisionMamba(image_size=16, patch_size=8, classes=3, width=16, depth=1).eval()
    image = torch.randint(256, (1, 3, 16, 16), dtype=torch.uint8)
    for call in (MambaLRP(model).attribute, partial(supported, model)):
        with pytest.raises(TypeError, match=r"as images have in bytes; .*pixel_values, .*float"):
            call(image, target=1)
    scaled = MambaLRP(lambda x: model(x / 255), model)
    bytes_as_floats = scaled.attribute(image.float(), target=1)
    torch.testing.assert_close(bytes_as_floats, MambaLRP(model).attribute(image / 255, target=1))
