"""Models and arguments that are not what they seem: methods, meta, masks and misspelt names."""

from contextlib import nullcontext

import pytest
import torch
from families import build
from models import ids, tiny
from torch import nn

from captum_ssm import InputError, MambaLRP, MambaRollout
from captum_ssm.interventions import TokenKnockout

READ = ids(1)


class Scored(nn.Module):
    """A model with a method of its own, and with arguments that its forward looks up by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny()

    def forward(self, input_ids, **kwargs):
        mask = kwargs.get("keep_mask")
        return self.inner(input_ids, attention_mask=mask, use_cache=False).logits

    def score(self, input_ids):
        return self(input_ids)[:, -1, 5]


@pytest.mark.parametrize("method", [MambaLRP, MambaRollout, TokenKnockout])
def test_the_forward_of_a_model_is_the_model(method):
    model = tiny()
    bound, plain = method(model.forward), method(model)
    assert bound.forward_func is model
    asked = {"target": 5}
    torch.testing.assert_close(
        bound.attribute(READ, **asked), plain.attribute(READ, **asked), rtol=0, atol=0
    )


def test_a_method_of_a_model_runs_that_model():
    model = Scored().eval()
    found = MambaLRP(model.score).attribute(READ)
    expected = MambaLRP(model).attribute(READ, target=5)
    torch.testing.assert_close(found, expected)


def test_generate_is_not_the_model():
    with pytest.raises(TypeError, match=r"generate of MambaForCausalLM.*max_new_tokens"):
        MambaLRP(tiny().generate)


def test_options_of_captums_methods_are_answered():
    for name, said in {"baselines": "no baseline", "attention_mask": "forward_args="}.items():
        with pytest.raises(TypeError, match=f"no option '{name}'.*{said}"):
            MambaLRP(tiny()).attribute(READ, target=5, **{name: READ})


def test_a_misspelt_argument_is_not_ignored():
    method = MambaLRP(tiny())
    mask = torch.ones_like(READ)
    with pytest.raises(InputError, match=r"'atention_mask', which no module.*'attention_mask'"):
        method.attribute(READ, target=5, additional_forward_args={"atention_mask": mask})
    with pytest.warns(UserWarning, match="'zzz', which no module of the model reads"):
        method.attribute(READ, target=5, additional_forward_args={"zzz": mask})
    method.attribute(READ, target=5, additional_forward_args={"attention_mask": mask})


def test_an_argument_that_code_looks_up_is_known():
    model = Scored().eval()
    mask = torch.ones_like(READ)
    mask[:, 0] = 0
    plain = MambaLRP(model).attribute(READ, target=5)
    given = {"additional_forward_args": {"keep_mask": mask}}
    assert not torch.equal(MambaLRP(model).attribute(READ, target=5, **given), plain)
    with pytest.raises(InputError, match="Did you mean 'keep_mask'"):
        MambaLRP(model).attribute(READ, target=5, additional_forward_args={"keepmask": mask})


def test_another_word_is_no_misspelling():
    """A model that takes any argument and does not read this one is told of, and explained."""
    model = build("xlstm")
    plain = MambaLRP(model).attribute(READ, target=5)
    for name in ("attention_mask", "attentive"):
        given = {"additional_forward_args": {name: torch.ones_like(READ)}}
        told = pytest.warns(UserWarning, match="no module of the model reads")
        with told if name != "attention_mask" else nullcontext():
            found = MambaLRP(model).attribute(READ, target=5, **given)
        torch.testing.assert_close(found, plain)


def test_a_model_on_meta_is_told():
    with pytest.raises(InputError, match="the weights of MambaForCausalLM are on the device meta"):
        MambaLRP(tiny().to("meta")).attribute(READ, target=5)


def test_a_mask_that_the_model_does_not_take_is_told():
    mask = torch.ones(1, 1, READ.shape[1], READ.shape[1])
    given = {"additional_forward_args": {"attention_mask": mask}}
    with pytest.raises(InputError, match=r"an attention_mask of shape \(1, 1, 7, 7\); expected"):
        MambaLRP(tiny()).attribute(READ, target=5, **given)


def test_a_loss_is_not_an_output_of_rows():
    model = tiny()

    def loss(input_ids):
        return model(input_ids, labels=input_ids).loss

    with pytest.raises(TypeError, match="a tensor without axes; expected a tensor of one row per"):
        MambaLRP(loss, model=model).attribute(READ)
