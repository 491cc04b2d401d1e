"""Tokens that a model fills with images or sound, in the place of placeholders."""

from __future__ import annotations

import gc
from collections.abc import Callable

import families
import pytest
import torch
from models import without_biases
from multimodal import MULTIMODAL, multimodal
from torch import Tensor, nn
from torch.testing import assert_close

from captum_ssm import (
    InputError,
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    RelevanceFlow,
    UnifiedImplicitAttention,
)

FREE = (RawAttention, MambaRollout)
METHODS = (*FREE, MambaAttribution, UnifiedImplicitAttention, LaTIM, MambaLRP)
IDS = torch.tensor([[1, 2, -1, -1, -1, 3, 4], [5, -1, -1, 6, -1, 7, 8]])


def by_scatter(x: Tensor, there: Tensor, image: Tensor) -> Tensor:
    return x.masked_scatter(there[..., None], image)


def by_index(x: Tensor, there: Tensor, image: Tensor) -> Tensor:
    x[there] = image.flatten(0, 1)
    return x


def by_choice(x: Tensor, there: Tensor, image: Tensor) -> Tensor:
    return torch.where(
        there[..., None], torch.zeros_like(x).masked_scatter(there[..., None], image), x
    )


def by_parts(x: Tensor, there: Tensor, image: Tensor) -> Tensor:
    pictures = iter(image.flatten(0, 1))
    rows = [
        torch.stack(
            [next(pictures) if is_one else token for token, is_one in zip(*row, strict=True)]
        )
        for row in zip(x, there.tolist(), strict=True)
    ]
    return torch.stack(rows)


class WithImages(nn.Module):
    """A language model that reads images where ids are negative, three tokens each."""

    def __init__(self, merge: Callable[..., Tensor], family: str = "mamba2") -> None:
        super().__init__()
        self.language = without_biases(families.build(family))
        table = self.language.get_input_embeddings()
        self.see = nn.Linear(5, table.embedding_dim, bias=False)
        self.merge = merge

    def get_input_embeddings(self) -> nn.Module:
        return self.language.get_input_embeddings()

    def merged(self, input_ids: Tensor, images: Tensor) -> Tensor:
        there = input_ids < 0
        x = self.get_input_embeddings()(input_ids.masked_fill(there, 0))
        return self.merge(x, there, self.see(images))

    def forward(self, input_ids: Tensor, images: Tensor | None = None) -> Tensor:
        return self.language(inputs_embeds=self.merged(input_ids, images)).logits


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1))


def options(method: type) -> dict[str, int]:
    return {} if method in FREE else {"target": 3}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("merge", [by_scatter, by_index, by_choice, by_parts])
def test_same_as_of_the_embeddings(
    method: type, merge: Callable[..., Tensor], images: Tensor
) -> None:
    model = WithImages(merge)
    found = method(model).attribute(IDS, additional_forward_args=images, **options(method))
    with torch.no_grad():
        merged = model.merged(IDS, images)
    expected = method(model.language).attribute(merged, **options(method)).sum(-1)
    assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert bool((found[IDS < 0] != 0).any())


@pytest.mark.parametrize("merge", [by_scatter, by_index])
def test_what_the_images_have_is_what_their_tokens_had(
    merge: Callable[..., Tensor], images: Tensor
) -> None:
    model = WithImages(merge)
    ids, images = IDS[:1], images[:1]
    of_tokens = MambaLRP(model).attribute(ids, target=3, additional_forward_args=images)
    of_both = MambaLRP(model).attribute((ids, images), target=3)
    assert_close(of_both[0], of_tokens.masked_fill(ids < 0, 0), rtol=1e-4, atol=1e-6)
    of_images = of_tokens.masked_fill(ids >= 0, 0).sum(1)
    assert_close(of_both[1].sum((1, 2)), of_images, rtol=1e-4, atol=1e-6)


def test_edges_end_at_filled_tokens(images: Tensor) -> None:
    model = WithImages(by_scatter)
    edges = RelevanceFlow(model).edges(IDS, target=3, against=None, additional_forward_args=images)
    expected = MambaLRP(model).attribute(IDS, target=3, additional_forward_args=images)
    assert max(own for errors in edges.errors.values() for own in errors) < 1e-5
    assert_close(edges.relevance, expected, rtol=1e-4, atol=1e-6)


class ImagesFirst(WithImages):
    """A language model whose images are tokens of their own, in front."""

    def merged(self, input_ids: Tensor, images: Tensor) -> Tensor:
        return torch.cat([self.see(images), self.get_input_embeddings()(input_ids)], 1)


@pytest.mark.parametrize("method", METHODS)
def test_images_beside_the_tokens_are_told(method: type, images: Tensor) -> None:
    model, ids = ImagesFirst(by_scatter), IDS.clamp(min=0)
    with pytest.warns(UserWarning, match="3 tokens that the model reads are made of no id"):
        found = method(model).attribute(ids, additional_forward_args=images, **options(method))
    if method is MambaLRP:
        of_both = MambaLRP(model).attribute((ids, images), **options(method))
        assert_close(of_both[0], found, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            score = model(ids, images)[:, -1, 3]
        assert_close(of_both[0].sum(1) + of_both[1].sum((1, 2)), score, rtol=1e-4, atol=1e-6)


def test_tokens_that_a_mask_erases_are_not_filled() -> None:
    class Masked(WithImages):
        def merged(self, input_ids: Tensor, images: Tensor) -> Tensor:
            return self.get_input_embeddings()(input_ids) * images[..., None]

    is_kept = IDS[:1] >= 0
    relevance = RawAttention(Masked(by_scatter)).attribute(
        IDS[:1].clamp(min=0), additional_forward_args=is_kept.float()
    )
    assert bool((relevance[~is_kept] == 0).all() and (relevance[is_kept] != 0).any())


def live() -> int:
    return sum(isinstance(one, torch.Tensor) for one in gc.get_objects())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fills", [True, False])
def test_nothing_of_a_run_waits_for_the_garbage_collector(
    fills: bool, method: type, images: Tensor
) -> None:
    model = WithImages(by_scatter)
    explain = method(model if fills else model.language).attribute
    ids, extra = (IDS, images) if fills else (IDS.clamp(min=0), None)
    for _ in range(2):  # what is known of a model is kept
        explain(ids, additional_forward_args=extra, **options(method))
    gc.collect()
    gc.disable()
    try:
        before = live()
        explain(ids, additional_forward_args=extra, **options(method))
        assert live() == before
    finally:
        gc.enable()


def test_placeholders_that_are_looked_up_are_refused(images: Tensor) -> None:
    class LooksUp(WithImages):
        def merged(self, input_ids: Tensor, images: Tensor) -> Tensor:
            return self.get_input_embeddings()(input_ids)

    with pytest.raises(InputError, match=r"inputs holds ids from -1 to 8; .* 0 \.\. 36"):
        RawAttention(LooksUp(by_scatter)).attribute(IDS, additional_forward_args=images)


@pytest.mark.parametrize("name", MULTIMODAL)
def test_models_of_images_and_sound(name: str) -> None:
    model, inputs = multimodal(name)
    with torch.no_grad():
        score = model(**inputs).logits[:, -1, 3]
    relevance, delta = MambaLRP(model).attribute(inputs, target=3, return_convergence_delta=True)
    assert_close(relevance.sum(1), score, rtol=1e-4, atol=1e-6)
    assert delta.abs().max() < 1e-5
    rollout = MambaRollout(model).attribute(inputs)
    assert bool((relevance[:, 2:6] != 0).all() and (rollout[:, 2:6] != 0).all())
