"""Tokens that a model fills with images or sound, in the place of placeholders."""

from __future__ import annotations

import gc
from collections.abc import Callable

import families
import pytest
import torch
import transformers
from models import without_biases
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


def qwen() -> tuple[nn.Module, dict[str, Tensor]]:
    """Qwen3.5 with an image of 4 by 4 patches, of which four make a token."""
    _, text = families.SPECS["qwen3_5"]
    vision = families.VISION | dict(patch_size=4, num_position_embeddings=16)
    config = transformers.Qwen3_5Config(
        text_config=families.SHARED | text, vision_config=vision, image_token_id=30
    )
    ids = torch.tensor([[1, 2, 30, 30, 30, 30, 4, 5]])
    return transformers.Qwen3_5ForConditionalGeneration(config), {
        "input_ids": ids,
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == 30).long(),
    }


def lfm2() -> tuple[nn.Module, dict[str, Tensor]]:
    """LFM2-VL with an image of 4 by 4 patches."""
    _, text = families.SPECS["lfm2"]
    vision = dict(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_patches=16,
        patch_size=4,
    )
    config = transformers.Lfm2VlConfig(
        text_config=families.SHARED | text | {"model_type": "lfm2"},
        vision_config=vision | {"model_type": "siglip2_vision_model"},
        image_token_id=30,
        downsample_factor=2,
        projector_hidden_size=16,
    )
    return transformers.Lfm2VlForConditionalGeneration(config), {
        "input_ids": torch.tensor([[1, 2, 30, 30, 30, 30, 4, 5]]),
        "pixel_values": torch.randn(1, 16, 3 * 4 * 4),
        "spatial_shapes": torch.tensor([[4, 4]]),
        "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
    }


def nemotron() -> tuple[nn.Module, dict[str, Tensor]]:
    """Nemotron's transcriber, whose placeholders of sound are not in the vocabulary."""
    text = families.build("nemotron_h").config
    heard = dict(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_mel_bins=16,
    )
    speakers = dict(hidden_size=8, audio_hidden_size=16)
    config = transformers.Nemotron3_5TranscribeConfig(
        audio_config=dict(
            asr_config=heard,
            diarization_config=dict(audio_config=dict(heard), head_config=speakers),
        ),
        text_config=text,
        audio_token_id=text.vocab_size,
        word_timestamp_config=dict(
            hidden_size=16,
            intermediate_size=16,
            num_attention_heads=2,
            vocab_size=20,
            blank_token_id=19,
        ),
    )
    return transformers.Nemotron3_5TranscribeForConditionalGeneration(config), {
        "input_ids": torch.tensor([[1, 2, *[text.vocab_size] * 4, 3, 4]]),
        "input_features": torch.randn(1, 32, 16),
        "input_features_mask": torch.ones(1, 32, dtype=torch.long),
    }


MODELS = {
    "Qwen3_5ForConditionalGeneration": qwen,
    "Lfm2VlForConditionalGeneration": lfm2,
    "Nemotron3_5TranscribeForConditionalGeneration": nemotron,
}


@pytest.mark.parametrize("name", MODELS)
def test_models_of_images_and_sound(name: str) -> None:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model = without_biases(families.randomize(model, 0)).eval()
    with torch.no_grad():
        score = model(**inputs).logits[:, -1, 3]
    relevance, delta = MambaLRP(model).attribute(inputs, target=3, return_convergence_delta=True)
    assert_close(relevance.sum(1), score, rtol=1e-4, atol=1e-6)
    assert delta.abs().max() < 1e-5
    rollout = MambaRollout(model).attribute(inputs)
    assert bool((relevance[:, 2:6] != 0).all() and (rollout[:, 2:6] != 0).all())
