"""A text with images or sound: its relevance by token, and where in the images it lies."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from multimodal import MULTIMODAL, PLACEHOLDER, multimodal, qwen_processor
from PIL import Image
from torch import Tensor, nn

from captum_ssm import Explanation, InputError, MambaLRP, explain
from captum_ssm.explanation import Token
from captum_ssm.explanation.make.inputs.media import media_of
from captum_ssm.explanation.make.inputs.patches import DERIVED, NOT_KNOWN, pictured
from captum_ssm.explanation.make.inputs.reading import TokenizedText, read_ids
from captum_ssm.utils.watch_modules import watch_modules

QWEN, LFM2, SOUND = MULTIMODAL
TEXT = "w1 w2 <image> w4 w5"


@pytest.fixture(scope="module", params=MULTIMODAL)
def any_model(request: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    return multimodal(request.param)


@pytest.fixture(scope="module")
def reader() -> nn.Module:
    """A Qwen3.5 that reads images."""
    return multimodal(QWEN)[0]


@pytest.fixture(scope="module")
def processor() -> Any:
    pytest.importorskip(
        "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl",
        reason="an older transformers, whose image processors need torchvision",
    )
    return qwen_processor()


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8))


def extended(inputs: dict[str, Tensor], ids: list[int]) -> dict[str, Tensor]:
    """What a processor returned, with the tokens of a continuation."""
    found = {**inputs, "input_ids": torch.cat([inputs["input_ids"], torch.tensor([ids])], 1)}
    if "mm_token_type_ids" in inputs:
        found["mm_token_type_ids"] = nn.functional.pad(inputs["mm_token_type_ids"], (0, len(ids)))
    return found


def test_rows_are_those_of_attribute_and_add_up(any_model) -> None:
    model, inputs = any_model
    target = [3, 9, 4]
    found = explain(model, None, inputs, target=target, alternatives=1, methods=("mamba-lrp",))
    whole = extended(inputs, target[:-1])
    P = inputs["input_ids"].shape[1]
    with torch.no_grad():
        logits = model(**whole).logits[0]
    for k, token in enumerate(target):
        expected = MambaLRP(model).attribute(whole, target=(P - 1 + k, token))
        row = found.relevance(output=k)
        np.testing.assert_allclose(row[:-1], expected[0], rtol=1e-3, atol=1e-6)
        assert row.sum() == pytest.approx(float(logits[P - 1 + k, token]), rel=1e-3, abs=1e-5)
    (one,) = found.examples[0].pictures
    assert one.tokens == (2, 3, 4, 5)
    assert bool((found.relevance()[list(one.tokens)] != 0).all())


def test_a_whole_answer_is_the_sum_of_its_rows(any_model) -> None:
    model, inputs = any_model
    found = explain(model, None, inputs, target=[3, 9, 4], span=(0, 2), hops=1)
    single = explain(model, None, inputs, target=[3, 9, 4])
    expected = sum(single.relevance(output=k) for k in range(3))
    np.testing.assert_allclose(found.relevance(), expected, rtol=1e-3, atol=1e-6)


def test_writes_what_generate_writes(any_model) -> None:
    model, inputs = any_model
    with torch.no_grad():
        expected = model.generate(**inputs, max_new_tokens=3, do_sample=False)
    found = explain(model, None, inputs, max_new_tokens=3)
    assert [token.id for token in found.examples[0].tokens] == expected[0].tolist()


def test_units_are_of_text_or_of_an_image(any_model) -> None:
    model, inputs = any_model
    found = explain(model, None, inputs, target=[3])
    (example,) = found.examples
    (one,) = example.pictures
    names = [span.name for span in example.units["modality"]]
    assert names == ["text", one.name, "text"]
    row = found.relevance()
    assert found.relevance(units="modality")[1] == pytest.approx(row[2:6].sum(), rel=1e-4)
    ends = [span.end for span in example.units["word"]]
    assert {3, 4, 5, 6} <= {*ends}
    table = found.to_pandas("modality")
    assert table.text[1] == one.name
    assert found.to_pandas().text[2].startswith(f"{one.name}, ")


def test_an_explanation_with_images_is_kept(any_model, tmp_path) -> None:
    model, inputs = any_model
    found = explain(model, None, inputs, target=[3])
    found.save(tmp_path / "why.json")
    again = Explanation.load(tmp_path / "why.json")
    assert again.to_html() == found.to_html()
    before, after = found.examples[0].pictures[0], again.examples[0].pictures[0]
    assert (after.name, after.tokens, after.grid) == (before.name, before.tokens, before.grid)
    if before.image is not None:
        np.testing.assert_array_equal(after.image, before.image)
    assert float(abs(found.difference(again).relevance()).max()) == 0
    held = json.loads((tmp_path / "why.json").read_text())
    held["examples"][0]["pictures"][0]["tokens"][0] = 99
    (tmp_path / "why.json").write_text(json.dumps(held))
    with pytest.raises(ValueError, match=r"pictures\[0\].tokens is .*99.*; expected tokens 0 \.\."):
        Explanation.load(tmp_path / "why.json")


def test_explanations_of_different_images_are_not_compared(reader, processor) -> None:
    first, second = (
        explain(reader, processor, {"text": TEXT, "images": picture(16, 16, seed)}, target=[3])
        for seed in (0, 1)
    )
    with pytest.raises(ValueError, match="not the same in both"):
        first.difference(second)


def merged(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """The tokens ``(L, E)`` that the layers of the language model are given."""
    seen: list[Tensor] = []

    def look(part: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(kwargs["inputs_embeds"])

    with torch.no_grad(), watch_modules([model.model.language_model], before=look):
        model(**inputs)
    return seen[0][0]


def test_a_cell_is_where_the_pixels_of_its_token_are(reader, processor) -> None:
    # A change of the pixels of one place changes the token that is drawn there the most.
    images = [picture(16, 24), picture(24, 16, 1)]
    text = "w1 <image> w2 <image> w3"
    found = explain(reader, processor, {"text": text, "images": images}, target=[3])
    first, second = found.examples[0].pictures
    assert (first.name, first.grid, second.name, second.grid) == (
        *("image 1", (2, 3)),
        *("image 2", (3, 2)),
    )
    before = merged(reader, processor(text=text, images=images, return_tensors="pt"))
    for k, one in enumerate((first, second)):
        for (row, column), token in np.ndenumerate(one.cells):
            changed = [np.array(image) for image in images]
            changed[k][8 * row : 8 * row + 8, 8 * column : 8 * column + 8] ^= 255
            others = [Image.fromarray(image) for image in changed]
            after = merged(reader, processor(text=text, images=others, return_tensors="pt"))
            assert int((after - before).norm(dim=1).argmax()) == token


def test_the_picture_is_the_one_that_was_given(reader, processor) -> None:
    image = picture(16, 24)
    given = {"text": TEXT, "images": image}
    found = explain(reader, processor, given, target="w3")
    (shown,) = found.examples[0].pictures
    np.testing.assert_array_equal(shown.image, np.array(image))
    # What a processor returned has the pixels alone, as it normalized them.
    made = processor(**given, return_tensors="pt")
    again = explain(reader, processor, made, target="w3")
    np.testing.assert_array_equal(again.relevance(), found.relevance())
    np.testing.assert_allclose(
        again.examples[0].pictures[0].image.astype(int), np.array(image), atol=1
    )
    several = explain(reader, processor, [given, {**made, "images": image}], target="w3")
    np.testing.assert_array_equal(several.examples[1].pictures[0].image, np.array(image))
    np.testing.assert_allclose(several.relevance(example=1), found.relevance(), rtol=1e-4)


def test_a_text_without_images_is_a_text(reader, processor) -> None:
    found = explain(reader, processor, "w1 w2 w3", target="w4")
    assert found.examples[0].pictures == ()
    assert found.examples[0].text == "w1 w2 w3 w4"


def with_pixels(count: int, size: int, model: nn.Module) -> Any:
    """The pictures of a text with so many placeholders and one image ``(3, size, size)``."""
    ids = [1, *[PLACEHOLDER] * count, 2]
    inputs = {"input_ids": torch.tensor([ids]), "pixel_values": torch.zeros(1, 3, size, size)}
    text = read_ids(None, ids, "the text", [PLACEHOLDER])
    return pictured(text, media_of(inputs), model, None).media.pictures


def test_a_grid_that_is_not_known_is_not_drawn(reader) -> None:
    (derived,) = with_pixels(16, 32, reader)
    assert (derived.grid, derived.note) == ((4, 4), DERIVED)
    (unknown,) = with_pixels(12, 32, reader)
    assert unknown.grid is None
    assert unknown.note == NOT_KNOWN.format("image")


REFUSED = {
    "no placeholder": (
        {"text": "w1 w2", "images": picture(16, 16)},
        InputError,
        "does not take the text 'w1 w2' with 1 images.* holds 0 of its placeholder '<image>'",
    ),
    "too many images": (
        {"text": TEXT, "images": [picture(16, 16)] * 2},
        InputError,
        "with 2 images.* holds 1 of its placeholder",
    ),
    "no file": (
        {"text": TEXT, "images": "there_is_none.png"},
        InputError,
        "there is no file 'there_is_none.png'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_processor_does_not_take(name: str, reader, processor) -> None:
    given, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        explain(reader, processor, given)


def test_texts_with_images_that_nothing_reads(reader, processor) -> None:
    given = {"text": TEXT, "images": picture(16, 16)}
    for other in (processor.tokenizer, None):
        with pytest.raises(TypeError, match="with images, and there is no processor; expected"):
            explain(reader, other, given)
    with pytest.raises(TypeError, match="Qwen2VLImageProcessorPil reads no texts; expected"):
        explain(reader, processor.image_processor, given)
    made = processor(**given, return_tensors="pt")
    cut = {**made, "pixel_values": made["pixel_values"][:-4]}
    with pytest.raises(
        InputError, match=r"does not take pixel_values \(12, 96\).* 4 of image; exp"
    ):
        explain(reader, processor, cut)
    both = processor(text=[TEXT, TEXT], images=[[picture(16, 16)]] * 2, return_tensors="pt")
    with pytest.raises(InputError, match="of 2 texts together; expected one text with its images"):
        explain(reader, processor, both)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(methods="saliency"), "saliency changes the embeddings .* pixel_values"),
        (dict(methods="feature-ablation"), "feature-ablation changes the embeddings"),
        (dict(validate=True), "validate removes tokens by their ids"),
        (dict(target="w3 w4", hops=1, through="swaps"), "through is 'swaps'"),
    ],
)
def test_methods_that_would_leave_images_out(options, words, reader, processor) -> None:
    with pytest.raises(InputError, match=words):
        explain(reader, processor, {"text": TEXT, "images": picture(16, 16)}, **options)


def test_all_methods_are_those_that_know_of_images(reader, processor) -> None:
    given = {"text": TEXT, "images": picture(16, 16)}
    found = explain(reader, processor, given, target="w3", methods="all")
    names = [method.name for method in found.methods]
    assert {"mamba-lrp", "latim", "rollout"} <= {*names}
    assert "saliency" not in names
    assert any("without saliency" in note for note in found.settings["notes"])


def test_the_circuit_and_the_lens_know_of_images(reader, processor) -> None:
    given = {"text": TEXT, "images": picture(16, 16)}
    found = explain(reader, processor, given, target="w3", circuit=True, lens=True, maps=True)
    (example,) = found.examples
    (graph,) = example.circuits
    assert graph["tokens"][2] == "image 1, row 1, column 1"
    plain = explain(reader, processor, given, target="w3").examples[0].outputs[0]
    last = example.outputs[0].lens[-1][0]
    assert (last.text, last.logit) == (
        plain.answers[0].text,
        pytest.approx(plain.answers[0].logit, rel=1e-4),
    )


def patched(image: Tensor, side: int) -> Tensor:
    """An image ``(3, H, W)`` as SigLIP 2 takes it: patches line by line, channels last."""
    _, H, W = image.shape
    cut = image.reshape(3, H // side, side, W // side, side)
    return cut.permute(1, 3, 2, 4, 0).reshape(-1, side * side * 3)


def test_places_of_an_image_by_its_patches() -> None:
    model, inputs = multimodal(LFM2)
    ids = torch.tensor([[1, *[PLACEHOLDER] * 2, 4]])
    inputs = {**inputs, "input_ids": ids, "spatial_shapes": torch.tensor([[2, 4]])}
    inputs["pixel_attention_mask"] = (torch.arange(16) < 8).long()[None]
    (one,) = explain(model, None, inputs, target=[3]).examples[0].pictures
    assert one.cells.tolist() == [[1, 2]]
    before = merged(model, inputs)
    for k, token in enumerate(one.tokens):
        pixels = inputs["pixel_values"].clone()
        pixels[0, 2 * k : 2 * k + 2] += 1  # of the upper line of patches
        pixels[0, 4 + 2 * k : 6 + 2 * k] += 1
        after = merged(model, {**inputs, "pixel_values": pixels})
        assert int((after - before).norm(dim=1).argmax()) == token


def test_parts_of_a_large_image_are_put_together() -> None:
    # As LFM2-VL cuts it: two lines of three parts, of 4 x 4 patches each, and a thumbnail.
    model, _ = multimodal(LFM2)
    image = torch.rand(3, 32, 48, generator=torch.Generator().manual_seed(0)) * 2 - 1
    parts = [
        image[:, 16 * r : 16 * r + 16, 16 * c : 16 * c + 16] for r in range(2) for c in range(3)
    ]
    thumbnail = torch.nn.functional.pad(patched(image[:, ::4, ::4], 4), (0, 0, 0, 10))
    pixels = torch.stack([*(patched(part, 4) for part in parts), thumbnail])
    texts = []
    for r in range(2):
        for c in range(3):
            texts += [f"<|img_row_{r + 1}_col_{c + 1}|>", *["<image>"] * 4]
    texts += ["<|img_thumbnail|>", *["<image>"] * 2, "<|image_end|>"]
    ids = [PLACEHOLDER if text == "<image>" else 1 for text in texts]
    tokens = tuple(Token(text, one, 0, 0) for text, one in zip(texts, ids, strict=True))
    shapes = torch.tensor([[4, 4]] * 6 + [[2, 3]])
    inputs = {"input_ids": torch.tensor([ids]), "pixel_values": pixels, "spatial_shapes": shapes}
    media = media_of(inputs)
    whole, small = pictured(TokenizedText("", tokens), media, model, None).media.pictures
    assert (whole.name, whole.grid) == ("image 1", (4, 6))
    assert (small.name, small.grid) == ("image 1, thumbnail", (1, 2))
    assert whole.cells[:2, :4].tolist() == [[1, 2, 6, 7], [3, 4, 8, 9]]
    assert whole.cells[2, 0] == 16  # of the second line of parts
    expected = ((image - image.min()) / (image.max() - image.min()) * 255).round()
    np.testing.assert_allclose(whole.image, expected.permute(1, 2, 0), atol=1)
    given = replace(media, images=(Image.new("RGB", (480, 320), "red"),))
    whole, small = pictured(TokenizedText("", tokens), given, model, None).media.pictures
    assert whole.image[0, 0].tolist() == small.image[0, 0].tolist() == [255, 0, 0]


def test_frames_of_a_video_are_pictures(reader) -> None:
    config = reader.config
    frame = [config.video_token_id] * 4
    ids = [1, *frame, 2, *frame, 3]
    inputs = {
        "input_ids": torch.tensor([ids]),
        "pixel_values_videos": torch.randn(32, 3 * 2 * 4 * 4),
        "video_grid_thw": torch.tensor([[2, 4, 4]]),
        "mm_token_type_ids": torch.tensor([[2 * (one == frame[0]) for one in ids]]),
    }
    found = explain(reader, None, inputs, target=[3])
    pictures = found.examples[0].pictures
    assert [one.name for one in pictures] == ["video 1, frame 1", "video 1, frame 2"]
    assert [one.tokens for one in pictures] == [(1, 2, 3, 4), (6, 7, 8, 9)]
    assert [one.image.shape for one in pictures] == [(16, 16, 3)] * 2
    relevance = MambaLRP(reader).attribute(inputs, target=3)
    np.testing.assert_allclose(found.relevance()[:-1], relevance[0], rtol=1e-4, atol=1e-6)


def test_a_conversation_with_images(reader, processor) -> None:
    said = [
        {
            "role": "user",
            "content": [
                {"type": "image", "image": picture(16, 24)},
                {"type": "text", "text": "w3"},
            ],
        }
    ]
    made = processor.apply_chat_template(
        said, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    found = explain(reader, processor, made, max_new_tokens=2)
    (one,) = found.examples[0].pictures
    assert one.grid == (2, 3)
    assert found.examples[0].prompt == made["input_ids"].shape[1]
    with pytest.raises(InputError, match=r"of type 'image'.*processor\.apply_chat_template"):
        explain(reader, processor, messages=said)
    text = [{"role": "user", "content": "w3 w4"}]
    assert explain(reader, processor, messages=text, target="w5").examples[0].pictures == ()
