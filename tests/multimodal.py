"""Language models that read images and sound, small and random, and processors for them."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
import transformers
from models import without_biases
from torch import Tensor, nn


def qwen() -> tuple[nn.Module, dict[str, Tensor]]:
    """Qwen3.5 with an image of 4 by 4 patches, of which four make a token."""
    _, text = families.SPECS["qwen3_5"]
    vision = families.VISION | dict(patch_size=4, num_position_embeddings=16)
    config = transformers.Qwen3_5Config(
        text_config=families.SHARED | text,
        vision_config=vision,
        image_token_id=30,
        video_token_id=32,
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


MULTIMODAL = {
    "Qwen3_5ForConditionalGeneration": qwen,
    "Lfm2VlForConditionalGeneration": lfm2,
    "Nemotron3_5TranscribeForConditionalGeneration": nemotron,
}


def multimodal(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """One of :data:`MULTIMODAL` by its name, without bias terms, and what its processor returns.

    A test of a model that the installed transformers does not have is skipped.
    """
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    model, inputs = MULTIMODAL[name]()
    return without_biases(families.randomize(model, 0)).eval(), inputs


PLACEHOLDER, WORDS = 30, tuple(f"w{k}" for k in range(30))


def qwen_processor() -> Any:
    """The processor of :func:`qwen`, for images alone: that of videos needs torchvision."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    words = {word: k for k, word in enumerate((*WORDS, "<image>", "<user>"))}
    inner = Tokenizer(models.WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="w0", additional_special_tokens=["<image>", "<user>"]
    )
    size = {"shortest_edge": 16 * 16, "longest_edge": 16 * 32}
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, size=size, resample=0
    )
    return _without_video(images, tokenizer)


def _without_video(images: Any, tokenizer: Any) -> Any:
    from transformers import Qwen3VLProcessor
    from transformers.processing_utils import ProcessorMixin

    class WithoutVideo(Qwen3VLProcessor):
        def __init__(self, image_processor=None, tokenizer=None, chat_template=None):
            self.image_token, self.video_token = "<image>", "<video>"
            self.image_token_id, self.video_token_id = PLACEHOLDER, -1
            self.vision_start_token = self.vision_end_token = ""
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    template = (
        "{% for message in messages %}<user> {% if message.content is string %}"
        "{{ message.content }}{% else %}{% for part in message.content %}"
        "{% if part.type == 'image' %}<image> {% else %}{{ part.text }} {% endif %}{% endfor %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %} w1{% endif %}"
    )
    return WithoutVideo(images, tokenizer, chat_template=template)
