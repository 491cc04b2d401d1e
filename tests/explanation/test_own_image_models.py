"""A small model of the user's own: a vision tower whose features stand among a Mamba's tokens."""

import re

import numpy as np
import pytest
import torch
import transformers
from models import tiny
from torch import nn

from captum_ssm import InputError, MambaLRP, explain

IMAGE, L = 30, 8
IDS = torch.tensor([[1, 2, *[IMAGE] * 4, 5, 6]])


class ReadsImages(nn.Module):
    """Features of patches, in the place of placeholders, of one of them, or before the text."""

    def __init__(self, put: str = "each"):
        super().__init__()
        self.put, self.language = put, tiny()
        self.config = transformers.PretrainedConfig()
        self.patches = nn.Conv2d(3, 16, 8, 8)

    def get_input_embeddings(self):
        return self.language.get_input_embeddings()

    def forward(self, input_ids, pixel_values=None):
        text = self.get_input_embeddings()(input_ids)
        if pixel_values is not None:
            image = self.patches(pixel_values).flatten(2).mT
            if self.put == "each":
                text = text.masked_scatter((input_ids == IMAGE)[..., None], image)
            else:
                text = torch.cat([image, text], 1)
        return self.language(inputs_embeds=text)


class Processor:
    """The little that explain asks of one."""

    tokenizer, image_token_id = None, IMAGE


def encoded(ids=IDS):
    generator = torch.Generator().manual_seed(0)
    return {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16, generator=generator)}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return ReadsImages().eval()


def test_places_are_known_from_the_config_or_the_processor(model, recwarn):
    inputs = encoded()
    model.config.image_token_id = IMAGE
    by_config = explain(model, None, inputs, target=7)
    del model.config.image_token_id
    by_processor = explain(model, None, inputs, target=7, processor=Processor())
    assert not [w for w in recwarn if "placeholder" in str(w.message)]
    for found in (by_config, by_processor):
        (picture,) = found.examples[0].pictures
        assert picture.cells.tolist() == [[2, 3], [4, 5]]
        assert "image 1, row 2, column 1" in str(found) or "image 1" in repr(found)
        pixels = {"pixel_values": inputs["pixel_values"]}
        truth = MambaLRP(model).attribute(IDS, target=7, additional_forward_args=pixels)
        np.testing.assert_allclose(found.relevance()[:L], truth[0].detach(), rtol=1e-5, atol=1e-8)
    # A change of one patch is a change of one token, by the model's own tower.
    moved = inputs["pixel_values"].clone()
    moved[..., 8:, :8] += 1
    towers = [model.patches(x).flatten(2).mT for x in (inputs["pixel_values"], moved)]
    (changed,) = (towers[0] != towers[1]).any(-1)[0].nonzero()[:, 0].tolist()
    assert 2 + changed == picture.cells[1, 0]


def test_an_image_whose_tokens_are_not_known_is_named(model):
    with pytest.warns(UserWarning, match="pixel_values with a text of which no token is known"):
        found = explain(model, None, encoded(), target=7)
    assert not found.examples[0].pictures


def test_what_own_models_cannot_be_asked(model):
    before = ReadsImages("before").eval()
    with (
        pytest.warns(UserWarning, match="no token is known"),
        pytest.raises(ValueError, match=r"\(1, 8, 37\) for ids of shape \(1, 4\).* a placeholder"),
    ):
        explain(before, None, encoded(IDS[:, :4]), target=7)
    with pytest.raises(InputError, match="validate removes tokens by their ids"):
        explain(model, None, encoded(), validate=True, processor=Processor())
    meant = re.escape("Did you mean inputs={'text': ..., 'images': ...}?")
    with pytest.raises(TypeError, match=meant):
        explain(model, None, "w1", images=[1])
