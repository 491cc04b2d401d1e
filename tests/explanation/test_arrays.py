"""What an input is: images, videos, series and tables, as people have them."""

import numpy as np
import pandas
import pytest
import torch
from models import tiny
from PIL import Image
from torch import nn
from transformers import MambaConfig, MambaModel
from vision_models import vim

from captum_ssm import Explanation, MambaLRP, explain
from captum_ssm.errors import InputError
from captum_ssm.explanation.make.inputs.arrays import arranged, inputs_for
from captum_ssm.models import BidirectionalMamba


class Series(nn.Module):
    """A series ``(B, T, 4)`` to a forecast ``(B, 3)``, however many axes come before."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = MambaConfig(vocab_size=4, hidden_size=16, state_size=4, num_hidden_layers=1)
        self.embed, self.body = nn.Linear(4, 16), MambaModel(config)
        self.head = nn.Linear(16, 3)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        states = self.body(inputs_embeds=self.embed(series)).last_hidden_state
        return self.head(states[:, -1])


class ChannelsFirst(nn.Module):
    """A series ``(B, 4, T)`` through a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.mixer = nn.Conv1d(4, 16, 2, stride=2), BidirectionalMamba(16, state=4)
        self.head = nn.Linear(16, 3)

    def forward(self, series: torch.Tensor) -> torch.Tensor:
        tokens = self.stem(series).mT
        return self.head((tokens + self.mixer(tokens)).mean(1))


class Table(nn.Module):
    """A row ``(B, F)`` whose features are tokens; with ``shared`` one layer embeds all of them."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared = nn.Linear(1, 16) if shared else None
        self.weight, self.bias = (nn.Parameter(torch.randn(6, 16)) for _ in range(2))
        self.mixer, self.head = BidirectionalMamba(16, state=4), nn.Linear(16, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows[..., None]
        tokens = rows * self.weight + self.bias if self.shared is None else self.shared(rows)
        return self.head((tokens + self.mixer(tokens)).mean(1))


class Pictures(nn.Module):
    """An image ``(B, channels, H, W)`` in patches of four, or with ``frames`` a video."""

    def __init__(self, channels: int = 3, frames: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        stem = nn.Conv3d if frames else nn.Conv2d
        self.stem = stem(channels, 16, (1, 4, 4) if frames else 4, (1, 4, 4) if frames else 4)
        self.mixer, self.head = BidirectionalMamba(16, state=4), nn.Linear(16, 2)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        tokens = self.stem(pixels).flatten(2).mT
        return self.head((tokens + self.mixer(tokens)).mean(1))


class FramesFirst(Pictures):
    """A video ``(B, T, C, H, W)``."""

    def __init__(self) -> None:
        super().__init__(frames=True)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return super().forward(pixels.transpose(1, 2))


def values(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def made(model: nn.Module) -> nn.Module:
    return model.eval()


MODELS = {
    "series": made(Series()),
    "channels first": made(ChannelsFirst()),
    "table": made(Table(False)),
    "shared": made(Table(True)),
    "color": made(Pictures()),
    "gray": made(Pictures(1)),
    "video": made(Pictures(frames=True)),
}


@pytest.mark.parametrize(
    ("model", "shape", "kind", "axes", "examples"),
    [
        ("series", (1, 50, 4), "series", "1tf", 1),  # was taken for an image of one channel
        ("series", (50, 4), "series", "1tf", 1),
        ("series", (3, 50, 4), "series", "1tf", 3),
        ("channels first", (4, 50), "series", "1ft", 1),
        ("channels first", (2, 4, 50), "series", "1ft", 2),
        ("table", (6,), "table", "1f", 1),
        ("table", (5, 6), "table", "1f", 5),
        ("shared", (2, 30), "series", "1t", 2),
        ("color", (3, 8, 8), "image", "1chw", 1),
        ("color", (8, 8, 3), "image", "1chw", 1),
        ("color", (2, 3, 8, 8), "image", "1chw", 2),
        ("color", (2, 8, 8, 3), "image", "1chw", 2),
        ("gray", (8, 8), "image", "1chw", 1),
        ("gray", (1, 8, 8), "image", "1chw", 1),
        ("video", (3, 5, 8, 8), "video", "1cthw", 1),
        ("video", (2, 3, 5, 8, 8), "video", "1cthw", 2),
        ("video", (2, 5, 3, 8, 8), "video", "1cthw", 2),
    ],
)
@pytest.mark.parametrize("form", ["tensor", "numpy"])
def test_an_array_is_what_the_model_reads(model, shape, kind, axes, examples, form):
    array = values(*shape)
    found = inputs_for(MODELS[model], array.numpy() if form == "numpy" else array)
    assert (found.kind, found.axes, len(found.examples)) == (kind, axes, examples)
    with torch.no_grad():
        assert all(len(MODELS[model](one)) == 1 for one in found.examples)


def test_axes_are_arranged_by_their_letters():
    array = values(2, 3, 4)
    assert torch.equal(arranged(array, "hwc->1chw"), array.permute(2, 0, 1)[None])
    assert torch.equal(arranged(array[0], "tf->1ft"), array[0].T[None])
    assert arranged(array[0, 0], "t->1ft").shape == (1, 1, 4)


def test_a_series_is_explained_as_the_method_explains_it():
    for name, shape in (("series", (1, 50, 4)), ("channels first", (1, 4, 50))):
        series = values(*shape)
        found = explain(MODELS[name], series, target=2, alternatives=0)
        expected = MambaLRP(MODELS[name]).attribute(series, target=2)[0].detach()
        expected = expected if name == "series" else expected.T
        np.testing.assert_array_equal(found.relevance(), expected.numpy())
        assert found.examples[0].series.shape == (50, 4)


def test_features_have_the_names_that_they_are_given(tokenizer):
    names = ["wind", "load", "sun", "price"]
    named = {"features": names, "alternatives": 0}
    (example,) = explain(MODELS["series"], values(50, 4), **named).examples
    plain = explain(MODELS["series"], values(50, 4), alternatives=0).examples[0]
    assert example.features == tuple(names)
    assert plain.features == ("feature 0", "feature 1", "feature 2", "feature 3")
    table = pandas.DataFrame(values(50, 4).numpy(), columns=list("abcd"))
    assert explain(MODELS["series"], table, **named).examples[0].features == tuple(names)
    assert explain(MODELS["series"], table, alternatives=0).examples[0].features == tuple("abcd")
    for wrong in (["wind"], "wind", []):
        with pytest.raises(ValueError, match="the series has 4 features: expected one name for"):
            explain(MODELS["series"], values(50, 4), features=wrong)
    with pytest.raises(ValueError, match="the image has no features"):
        explain(vim(), torch.zeros(3, 16, 16), features=names)
    with pytest.raises(TypeError, match="the input is a text"):
        explain(tiny(), tokenizer, "w3 w4", features=names)


def test_columns_tell_which_axis_is_time_and_name_the_features():
    table = pandas.DataFrame(values(50, 4).numpy(), columns=["wind", "load", "sun", "price"])
    for name in ("series", "channels first"):
        (example,) = explain(MODELS[name], table).examples
        assert example.features == ("wind", "load", "sun", "price")
        np.testing.assert_array_equal(example.series, table.to_numpy())
    integers = (table * 10).round().astype(int)
    assert explain(MODELS["series"], integers).relevance().shape == (50, 4)
    two = explain(MODELS["series"], [table, table.iloc[10:]])
    assert [one.series.shape for one in two.examples] == [(50, 4), (40, 4)]


def test_rows_of_a_table(tmp_path):
    table = pandas.DataFrame(values(3, 6).numpy(), columns=list("abcdef"))
    found = explain(MODELS["table"], table, labels=["no", "yes"], target="yes", alternatives=0)
    assert [one.name for one in found.examples] == ["row 1", "row 2", "row 3"]
    assert found.examples[1].features == tuple("abcdef")
    row = torch.tensor(table.to_numpy()[1:2])
    expected = MambaLRP(MODELS["table"]).attribute(row, target=1)[0].detach().numpy()
    np.testing.assert_array_equal(found.relevance(example=1), expected)
    found.save(tmp_path / "rows.json")
    again = Explanation.load(tmp_path / "rows.json")
    np.testing.assert_array_equal(again.relevance(example=1), expected)
    np.testing.assert_array_equal(again.examples[1].series, table.to_numpy()[1])
    assert again.to_html() == found.to_html()
    assert abs(found.difference(again).relevance(example=2)).max() == 0
    lists = explain(MODELS["table"], table.to_numpy().tolist(), target=1, alternatives=0)
    np.testing.assert_allclose(lists.relevance(example=1), expected, atol=1e-6)


@pytest.fixture
def photo() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)


def by_hand(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255


def test_a_picture_is_the_same_in_every_form(photo, tmp_path):
    path = tmp_path / "photo.png"
    Image.fromarray(photo).save(path)
    norm = dict(mean=[0.4, 0.5, 0.6], std=[0.2, 0.2, 0.3])
    pixels = torch.from_numpy(photo).permute(2, 0, 1) / 255 - torch.tensor(norm["mean"]).view(
        -1, 1, 1
    )
    pixels = pixels / torch.tensor(norm["std"]).view(-1, 1, 1)
    expected = explain(MODELS["color"], pixels, **norm)
    forms = {
        "bytes": photo,
        "bytes, channels first": photo.transpose(2, 0, 1),
        "tensor": torch.from_numpy(photo),
        "PIL": Image.fromarray(photo),
        "path": path,
        "text": str(path),
        "batch": photo[None],
        "transparent": Image.fromarray(photo).convert("RGBA"),
    }
    for name, form in forms.items():
        found = explain(MODELS["color"], form, **norm)
        np.testing.assert_array_equal(found.examples[0].image, photo, err_msg=name)
        np.testing.assert_allclose(found.relevance(), expected.relevance(), atol=1e-6)
    assert explain(MODELS["color"], path, **norm).examples[0].name == "photo.png"
    several = explain(MODELS["color"], [path, Image.fromarray(photo), photo], **norm)
    assert len(several) == 3
    by_function = explain(
        MODELS["color"],
        [path, path],
        processor=by_hand,
    )
    listed = explain(MODELS["color"], by_hand, [path, Image.fromarray(photo)])
    np.testing.assert_array_equal(listed.relevance(), by_function.relevance())
    assert by_function.examples[0].name == "photo.png"
    plain = explain(MODELS["color"], path)
    np.testing.assert_array_equal(by_function.relevance(example=1), plain.relevance())
    assert "not normalized" in plain.settings["notes"][0]


def test_a_video_is_explained_frame_by_frame(tmp_path):
    video, model = values(3, 5, 8, 8), MODELS["video"]
    found = explain(model, video, target=1, alternatives=0, methods=["mamba-lrp", "saliency"])
    expected = MambaLRP(model).attribute(video[None], target=1)[0].detach().sum(0)
    np.testing.assert_array_equal(found.relevance(), expected.numpy())
    (example,) = found.examples
    assert example.image.shape == (5, 8, 8, 3)
    assert example.grid == (5, 2, 2)
    assert "a video of 5 x 8 x 8" in repr(found)
    found.save(tmp_path / "why.json")
    again = Explanation.load(tmp_path / "why.json")
    np.testing.assert_array_equal(again.examples[0].image, example.image)
    assert again.to_html() == found.to_html()
    assert abs(found.difference(again).relevance("saliency")).max() == 0
    frames_first = made(FramesFirst())
    other = explain(frames_first, video.transpose(0, 1), target=1, alternatives=0)
    np.testing.assert_allclose(other.relevance(), found.relevance(), atol=1e-6)
    np.testing.assert_array_equal(other.examples[0].image, example.image)
    with pytest.raises(InputError, match="feature-ablation removes parts of a video"):
        explain(frames_first, video.transpose(0, 1), methods="feature-ablation")


def test_a_gray_picture_fits_a_gray_model_and_one_of_color(photo):
    gray = Image.fromarray(photo[..., 0])
    for name in ("gray", "color"):
        (example,) = explain(MODELS[name], gray).examples
        np.testing.assert_array_equal(example.image, np.stack([photo[..., 0]] * 3, -1))


BAD = {
    "channels": ("color", values(5, 8, 8), r"an image \(1, 5, 8, 8\).*to have 3 channels"),
    "features": ("series", values(50, 7), r"a series \(1, 50, 7\).*Linear\(in_features=4"),
    "axes": ("color", values(1, 1, 1, 1, 1, 1), "expected an image .C, H, W., a series"),
    "empty": ("series", values(0, 4), r"shape \(0, 4\); expected an image"),
    "nothing": ("series", [], "inputs is empty"),
    "mixed": ("series", [values(9, 4), pandas.DataFrame(values(9, 4))], "of one kind"),
    "NaN": ("series", values(9, 4) / 0 * 0, "holds NaN, Inf"),
    "words": ("series", pandas.DataFrame({"a": ["x"]}), "is a DataFrame, not all of numbers"),
    "no file": ("color", "missing.png", "there is no file 'missing.png'"),
    "no picture": ("color", __file__.replace(".py", ".py"), "a text, and there is no tokenizer"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_model_does_not_take_is_said(name):
    model, inputs, message = BAD[name]
    with pytest.raises((InputError, TypeError), match=message):
        explain(MODELS[model], inputs)


def test_means_of_another_number_are_refused(photo):
    with pytest.raises(InputError, match=r"mean holds 2 numbers, and the picture has 3 channel"):
        explain(MODELS["color"], photo, mean=[0.5, 0.5], std=[1, 1, 1])


def test_a_trial_leaves_no_hook():
    inputs_for(MODELS["series"], values(50, 4))
    assert not any(layer._forward_pre_hooks for layer in MODELS["series"].modules())
