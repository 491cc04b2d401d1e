"""Relevance of tokens by knockout: batches, spans, queries, padding, and its errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from families import build, padded
from models import Classifier, WithOutput, embed, ids
from torch import Tensor, nn

from captum_ssm import InputError, UnsupportedModelError
from captum_ssm.attr import SpanTarget
from captum_ssm.interventions import TokenKnockout, knockout

L = 7


def by_hand(model: nn.Module, tokens: Tensor, target: int, targets=None, **options) -> Tensor:
    """One run per token, one example at a time."""
    found = torch.zeros(tokens.shape)
    with torch.no_grad():
        for b, one in enumerate(tokens):
            plain = model(one[None]).logits[0, -1, target]
            for j in range(tokens.shape[1]):
                others = [i for i in range(tokens.shape[1]) if i != j]
                read = others if targets is None else [i for i in targets if i != j]
                with knockout(model, sources=j, targets=read, **options):
                    found[b, j] = plain - model(one[None]).logits[0, -1, target]
    return found


@pytest.mark.parametrize("family", ["mamba", "jamba"])
@pytest.mark.parametrize("readers", ["later", "query"])
def test_it_is_the_loss_of_one_run_a_token(family, readers):
    model, tokens = build(family), ids(2, L)
    truth = by_hand(model, tokens, 5, None if readers == "later" else [L - 1], layers=[0, 1])
    method = TokenKnockout(model)
    options = {"target": 5, "layers": [0, 1], "readers": readers}
    found = method.attribute(tokens, **options)
    torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-4)
    assert (found[:, -1] == 0).all()
    assert found[:, :-1].abs().min() > 0
    for count in (3, L, 50):
        joined = method.attribute(tokens, perturbations_per_eval=count, **options)
        torch.testing.assert_close(joined, found, atol=1e-5, rtol=1e-4)


def test_targets_and_positions_per_example(mamba):
    tokens, method = ids(2, L), TokenKnockout(mamba)
    truth = torch.cat(
        [
            method.attribute(tokens[b : b + 1], target=(p, t))
            for b, (p, t) in enumerate([(3, 5), (5, 8)])
        ]
    )
    assert (truth[0, 4:] == 0).all()
    for count in (1, 4):
        for options in (
            {"target": [(3, 5), (5, 8)]},
            {"target": torch.tensor([5, 8]), "position": torch.tensor([3, 5])},
            {"target": np.array([5, 8]), "position": np.array([3, 5])},
            {"target": SpanTarget([[3], [5]], [[5], [8]])},
        ):
            found = method.attribute(tokens, perturbations_per_eval=count, **options)
            torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("count", [1, 3])
def test_one_score_for_several_examples_is_refused(mamba, count):
    tokens, method = (
        ids(2, L),
        TokenKnockout(lambda x: mamba(x).logits[:, -1, 5].sum(0, True), mamba),
    )
    with pytest.raises(InputError, match="expected one per example"):
        method.attribute(tokens, perturbations_per_eval=count)


class OfCodebooks(nn.Module):
    """Each token is the sum of what three tables hold of its codes, ``(B, 3, L)``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        width = inner.config.hidden_size
        self.inner, self.tables = inner, nn.ModuleList(nn.Embedding(9, width) for _ in range(3))

    def forward(self, codes: Tensor) -> Tensor:
        tokens = sum(table(codes[:, k]) for k, table in enumerate(self.tables))
        return self.inner(inputs_embeds=tokens).logits[:, -1]


def test_a_token_of_several_entries_shares_its_loss_among_them(mamba):
    model, codes = OfCodebooks(mamba).eval(), ids(1, 3 * L).view(1, 3, L) % 9
    found = TokenKnockout(model).attribute(codes, target=5)
    assert found.shape == codes.shape
    with torch.no_grad(), knockout(model, sources=2, targets=[0, 1, 3, 4, 5, 6]):
        without = model(codes)[0, 5]
    lost = model(codes)[0, 5] - without
    torch.testing.assert_close(found[0, :, 2].sum(), lost, atol=1e-5, rtol=1e-4)


def test_spans_are_removed_together(mamba):
    tokens, method = ids(2, L), TokenKnockout(mamba)
    spans = torch.tensor([[0, 0, 1, 1, 1, 2, 3]])
    found = method.attribute(tokens, target=5, feature_mask=spans, perturbations_per_eval=3)
    for start, stop in ((0, 2), (2, 5)):
        others = [i for i in range(L) if not start <= i < stop]
        with torch.no_grad():
            plain = mamba(tokens).logits[:, -1, 5]
            with knockout(mamba, sources=slice(start, stop), targets=others):
                lost = plain - mamba(tokens).logits[:, -1, 5]
        for j in range(start, stop):
            torch.testing.assert_close(found[:, j], lost, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_has_no_relevance_and_changes_none(side):
    model, tokens = build("mamba"), ids(2, 9)
    mask = padded(side)
    extra = {"attention_mask": mask}
    method = TokenKnockout(model)
    found = method.attribute(tokens, target=5, additional_forward_args=extra)
    joined = method.attribute(
        tokens, target=5, additional_forward_args=extra, perturbations_per_eval=4
    )
    torch.testing.assert_close(joined, found, atol=1e-5, rtol=1e-4)
    assert (found[mask == 0] == 0).all()
    alone = method.attribute(tokens[1:, mask[1] != 0], target=5)
    torch.testing.assert_close(found[1:, mask[1] != 0], alone, atol=1e-5, rtol=1e-4)


def test_embeddings_functions_and_classifiers(mamba):
    tokens = ids(2, L)
    truth = TokenKnockout(mamba).attribute(tokens, target=5)
    found = TokenKnockout(mamba).attribute(embed(mamba, tokens), target=5)
    torch.testing.assert_close(found.sum(-1), truth, atol=1e-5, rtol=1e-4)
    wrapped = WithOutput(mamba, lambda logits: (logits, None))
    (in_tuple,) = TokenKnockout(wrapped).attribute((tokens,), target=5)
    torch.testing.assert_close(in_tuple, truth)
    function = TokenKnockout(lambda x: mamba(x).logits, model=mamba)
    torch.testing.assert_close(function.attribute(tokens, target=5), truth)
    classifier = Classifier("mean")
    pooled = TokenKnockout(classifier).attribute(tokens, target=2)
    assert pooled.shape == tokens.shape
    with torch.no_grad():
        plain = classifier(tokens)[:, 2]
        with knockout(classifier, sources=2, targets=[0, 1, 3, 4, 5, 6]):
            lost = plain - classifier(tokens)[:, 2]
    torch.testing.assert_close(pooled[:, 2], lost, atol=1e-5, rtol=1e-4)


def test_the_sweep_over_layers(mamba):
    tokens, method = ids(2, L), TokenKnockout(mamba)
    found = method.sweep(tokens, target=5, perturbations_per_eval=L)
    assert found.layers == [("backbone.layers.0.mixer",), ("backbone.layers.1.mixer",)]
    for w in range(2):
        row = method.attribute(tokens, target=5, layers=w)
        torch.testing.assert_close(found.relevance[:, w], row, atol=1e-5, rtol=1e-4)
    whole = method.sweep(tokens, target=5, window=2).relevance[:, 0]
    torch.testing.assert_close(whole, method.attribute(tokens, target=5), atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="window is 3 and stride 1"):
        method.sweep(tokens, target=5, window=3)


def test_a_progress_bar(mamba, capsys):
    TokenKnockout(mamba).attribute(ids(1, 3), target=5, show_progress=True)
    assert "3/3" in capsys.readouterr().err


def test_bad_input(mamba):
    method, tokens = TokenKnockout(mamba), ids(2, L)
    for options, error, match in (
        ({"readers": "all"}, ValueError, "readers is 'all'"),
        ({"perturbations_per_eval": 0}, ValueError, "perturbations_per_eval is 0"),
        ({"feature_mask": torch.zeros(3, L)}, InputError, "feature_mask is"),
        ({"layers": 7}, ValueError, "layers holds 7"),
    ):
        with pytest.raises(error, match=match):
            method.attribute(tokens, target=5, **options)
    with pytest.raises(TypeError, match="forward_func is"):
        TokenKnockout(nn.Linear)
    with pytest.raises(ValueError, match="pass it"):
        TokenKnockout(lambda x: x)
    with pytest.raises(UnsupportedModelError, match="no token mixer"):
        TokenKnockout(nn.Linear(2, 2)).attribute(torch.randn(1, 3, 2), target=0)
