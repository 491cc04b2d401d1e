"""What a model makes of another word in the place of one that it wrote."""

import pytest
import torch
from models import ids, tiny

from captum_ssm import InputError
from captum_ssm.interventions import swap_effects

P = 4


def test_effects_are_those_of_each_text_by_itself():
    model, tokens = tiny(), ids(1, 9)
    prompt, written = tokens[:, :P], tokens[0, P:]
    others = (written + 1) % model.config.vocab_size

    def scores(texts):
        with torch.no_grad():
            return model(texts).logits[0, P - 1 :].log_softmax(-1).gather(1, written[:, None])[:, 0]

    whole = scores(tokens[:, :-1])
    expected = torch.zeros(5, 4)
    for i in range(4):
        swapped = tokens[:, :-1].clone()
        swapped[0, P + i] = others[i]
        expected[i + 1 :, i] = (whole - scores(swapped))[i + 1 :]
    options = {"others": others, "score": "log_prob"}
    found = swap_effects(model, prompt, written, batch_size=3, **options)
    torch.testing.assert_close(found, expected)


def test_a_word_is_replaced_by_the_likeliest_other_one():
    model, tokens = tiny(), ids(1, 9)
    prompt, written = tokens[:, :P], tokens[0, P:]
    with torch.no_grad():
        ranked = model(tokens[:, :-1]).logits[0, P - 1 :].argsort(1, descending=True)
    others = torch.where(ranked[:, 0] == written, ranked[:, 1], ranked[:, 0])
    assert bool((others != written).all())
    by_hand = swap_effects(model, prompt, written, others=others)
    assert torch.equal(swap_effects(model, prompt, written), by_hand)
    same = swap_effects(model, prompt, written, others=written)
    assert float(same.abs().max()) < 1e-5 < float(by_hand.abs().max())


def test_others_of_another_length_are_named():
    tokens = ids(1, 9)
    with pytest.raises(InputError, match="a token for each of the 5"):
        swap_effects(tiny(), tokens[:, :P], tokens[0, P:], others=tokens[0, :2])
