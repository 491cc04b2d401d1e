"""What a model makes of another word in the place of one that it wrote."""

import random

import pytest
import torch
from models import ids, tiny

from captum_ssm import InputError, examples
from captum_ssm.examples.chains import encode, make_puzzle
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


def test_one_candidate_is_the_likeliest_other_one():
    model, tokens = tiny(), ids(1, 9)
    prompt, written = tokens[:, :P], tokens[0, P:]
    with torch.no_grad():
        ranked = model(tokens[:, :-1]).logits[0, P - 1 :].argsort(1, descending=True)
    others = torch.where(ranked[:, 0] == written, ranked[:, 1], ranked[:, 0])
    assert bool((others != written).all())
    by_hand = swap_effects(model, prompt, written, others=others)
    assert torch.equal(swap_effects(model, prompt, written, candidates=1), by_hand)
    same = swap_effects(model, prompt, written, others=written)
    assert float(same.abs().max()) < 1e-5 < float(by_hand.abs().max())


def test_candidates_are_weighted_by_how_they_fit_between_their_neighbors():
    # A word that the model writes without the prompt follows: what comes before it has to fit.
    model, tokens = tiny(), ids(1, 7)
    prompt, written = tokens[:, :P], tokens[0, P:]
    with torch.no_grad():
        alone = model(torch.cat([prompt[:, -1:], written[None, :1]], 1)).logits[0, -1]
        written[1] = alone.argmax()
        logs = model(torch.cat([prompt, written[None, :-1]], 1)).logits[0, P - 1 :].log_softmax(-1)
        logs[0, written[0]] = -torch.inf
        candidates, fits, scores = logs[0].topk(3).indices, [], []
        for token in candidates:
            swapped = torch.cat([prompt, torch.stack([token, written[1]])[None]], 1)
            after = model(swapped).logits[0, P - 1 :]
            fits.append(logs[0, token] + after[1].log_softmax(0)[written[1]])
            scores.append(after.gather(1, written[:, None])[:, 0])
        whole = model(torch.cat([prompt, written[None, :-1]], 1)).logits[0, P - 1 :]
    expected = whole.gather(1, written[:, None])[:, 0] - torch.stack(fits).softmax(0) @ torch.stack(
        scores
    )
    found = swap_effects(model, prompt, written, candidates=3, batch_size=2)
    torch.testing.assert_close(found[1:, 0], expected[1:])


def test_signs_that_are_written_in_any_case_are_not_replaced():
    model, _ = examples.load("chains-mamba2")
    numbers = random.Random(5)
    for _ in range(3):
        puzzle = make_puzzle(numbers, held_out=True)
        found = swap_effects(
            model, *(torch.tensor(encode(part)) for part in (puzzle.prompt, puzzle.aloud))
        )
        size = found.abs().amax(0)
        assert not size[1::2].any()
        # Each thought decides on the next one, and on nothing after it.
        thoughts = found[2::2, 0:-1:2]
        assert float(thoughts.diagonal().min()) > 5 * float(thoughts.tril(-1).abs().max())


def test_after_a_prompt_of_one_token_every_word_is_replaced():
    tokens = ids(1, 5)
    found = swap_effects(tiny(), tokens[:, :1], tokens[0, 1:], candidates=2)
    assert bool((found.abs().amax(0) > 0).all())


@pytest.mark.parametrize("name", ["candidates", "batch_size"])
def test_numbers_below_one_are_named(name):
    tokens = ids(1, 9)
    with pytest.raises(InputError, match=f"{name} is 0"):
        swap_effects(tiny(), tokens[:, :P], tokens[0, P:], **{name: 0})


def test_others_of_another_length_are_named():
    tokens = ids(1, 9)
    with pytest.raises(InputError, match="a token for each of the 5"):
        swap_effects(tiny(), tokens[:, :P], tokens[0, P:], others=tokens[0, :2])
