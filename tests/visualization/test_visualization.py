"""Figures and pages of real attributions, made without a screen."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from captum.attr import visualization as captum_visualization
from folders import ROOT
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from models import ids, tiny

from captum_ssm import LaTIM, MambaLRP, hidden_attention, visualization
from captum_ssm.models import VisionMamba
from captum_ssm.visualization import (
    color_limit,
    image_overlay,
    interaction_map,
    layer_overview,
    map_strip,
    readable_tokens,
    relevance_colors,
    series_plot,
    text_html,
    text_record,
    video_strip,
    volume_slices,
)
from captum_ssm.visualization.palette import AGAINST, FOR

L, AB = 9, ["a", "b"]
TOKENS = ["<s>", "The", "Ġcat", "Ġ&", "Ċ", "$x$", "ĠÐ´Ð°", "<b>", ""]  # noqa: RUF001


def test_the_public_names():
    assert visualization.__all__ == [
        *("color_limit", "flow_graph", "image_overlay", "interaction_map", "layer_overview"),
        "map_strip",
        *("readable_tokens", "receptive_field_map", "relevance_colors", "series_plot"),
        "state_plot",
        *("text_html", "text_record", "video_strip", "volume_slices"),
    ]


def size_of(figure: Figure, path: Path) -> int:
    figure.savefig(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    return path.stat().st_size


def tick_labels(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


@pytest.mark.parametrize(
    ("tokens", "shown"),
    [
        (["The", "Ġcat", "Ċ", "ĉ"], ["The", "␣cat", "⏎", "⇥"]),
        (["ĠvoilÃł", "ðŁĺĢ"], ["␣voilà", "😀"]),
        (["Ġ", "ðŁ"], ["␣", "\\xf0\\x9f"]),  # half a letter
        (["café", "▁the"], ["café", "␣the"]),  # not byte-level: left as it is
        (["▁a", "<0x0A>", "<0xE2>"], ["␣a", "⏎", "\\xe2"]),
        (["", "<SEP>", "two words"], ["∅", "<SEP>", "two␣words"]),
        (["##ing", "[CLS]"], ["##ing", "[CLS]"]),
        ([], []),
    ],
)
def test_readable_tokens(tokens, shown):
    assert readable_tokens(tokens) == shown


def test_every_byte_is_decoded_as_the_tokenizer_encodes_it():
    from tokenizers import pre_tokenizers

    text = "déjà vu\n\t漢字 😀 \x00\x7f\xad "
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
    shown = "".join(readable_tokens([piece for piece, _ in pieces]))
    assert shown == text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥")


def test_interaction_map_of_a_layer(tmp_path):
    matrix = LaTIM(tiny()).interactions(ids(1, L), layer=0)[0]
    figure = interaction_map(matrix, TOKENS, title="layer 0")
    (axes, _) = figure.axes
    labels = tick_labels(axes.xaxis)
    assert labels == ["<s>", "The", "␣cat", "␣&", "⏎", r"\$x\$", "␣да", "<b>", "∅"]
    assert tick_labels(axes.yaxis) == labels
    assert figure.get_suptitle() == "layer 0"
    shown = axes.images[0]
    assert shown.get_array().shape == (L, L)
    assert shown.get_clim() == (0, pytest.approx(float(matrix.max())))  # norms: not signed
    assert size_of(figure, tmp_path / "map.png") > 5000


def test_interaction_map_of_signed_rows(tmp_path):
    relevance = MambaLRP(tiny()).attribute(ids(1, L).expand(2, -1), target=[(3, 5), (8, 5)])
    figure = interaction_map(relevance.bfloat16(), TOKENS, row_tokens=["a", "b"])
    low, high = figure.axes[0].images[0].get_clim()
    assert low == -high  # zero is in the middle of the colors
    size_of(figure, tmp_path / "rows.png")


def test_a_letter_without_a_glyph_is_spelled_out(tmp_path):
    figure = interaction_map(torch.eye(2), ["漢", "a"])  # a missing glyph would be a warning
    size_of(figure, tmp_path / "map.png")
    assert tick_labels(figure.axes[0].xaxis)[0] in ("漢", "\\u6f22")


def test_long_sequences_label_some_tokens():
    matrix = torch.rand(200, 200)
    matrix[:, 101] = 3.0
    figure = interaction_map(matrix, ["t"] * 200, max_labels=50)
    ticks = figure.axes[0].get_xticks()
    assert 101 in ticks
    assert 40 < len(ticks) <= 50
    assert min(np.diff(ticks)) >= 4
    assert max(figure.get_size_inches()) <= 15


def test_layer_overview(tmp_path):
    maps = hidden_attention(tiny(layers=3), ids(1, L), reduction="mean", rows=-1)
    figure = layer_overview({path: m[0, 0] for path, m in maps.items()}, TOKENS, title="rows")
    assert tick_labels(figure.axes[0].yaxis) == list(maps)
    shown = figure.axes[0].images[0].get_array()
    assert abs(shown).max(1).tolist() == pytest.approx([1.0] * 3)
    size_of(figure, tmp_path / "layers.png")
    unnamed = layer_overview(torch.stack([m[0, 0] for m in maps.values()]), TOKENS)
    assert tick_labels(unnamed.axes[0].yaxis) == ["layer 0", "layer 1", "layer 2"]
    layer_overview(torch.zeros(2, L), TOKENS).savefig(tmp_path / "zeros.png")


def test_a_page_of_records_from_a_generator():
    records = [text_record(torch.ones(2), ["a", "b"])] * 2
    assert text_html(iter(records)) == text_html(records)


def test_a_page_of_text():
    relevance = MambaLRP(tiny()).attribute(ids(1, L), target=5)[0]
    records = [
        text_record(
            relevance, TOKENS, predicted="<SEP>", probability=0.25, true="a&b", target="MambaLRP"
        ),
        text_record(torch.zeros(L), TOKENS),
    ]
    assert float(records[0].word_attributions.abs().max()) == pytest.approx(1.0)
    page = text_html(records, title="Why <this>?")
    assert page.startswith("<!doctype html>")
    for part in ("Why &lt;this&gt;?", "&lt;SEP&gt; (0.25)", "a&amp;b", "␣cat", "␣да", "&lt;b&gt;"):
        assert part in page
    assert "<b> " not in page  # a token is no markup
    assert "nan" not in page
    assert f"{float(relevance.sum()):+.3g}".replace("-", "−") in page  # noqa: RUF001
    assert page.count("<mark") == 2 * L
    assert page.count("<tr>") == page.count("</tr>") == 3
    assert page.count("<th>") == 6
    assert "<th>True</th>" not in text_html(records[1:])  # which no record uses


def test_the_records_are_captums(capsys):
    pytest.importorskip("IPython")
    relevance = MambaLRP(tiny()).attribute(ids(1, L), target=5)[0]
    record = text_record(relevance, TOKENS, predicted="w5", probability=0.5)
    table = captum_visualization.visualize_text([record]).data
    assert "␣cat" in table
    assert f"{float(relevance.sum()):.2f}" in table


def test_a_page_of_captums_records():
    record = captum_visualization.VisualizationDataRecord(
        torch.tensor([0.5, -1.0]), 0.5, "w5", "w6", "w7", -0.5, ["a", "b"], 0.25
    )
    page = text_html([record])
    for part in ("w5 (0.50)", "w6", "w7", "−0.5", "+0.25", "token 1: −1, 67% of all"):  # noqa: RUF001
        assert part in page


def marks(page: str) -> list[tuple[str, str]]:
    """The background and the text color of each token of a page."""
    return re.findall(r'<mark style="background:(#\w{6});color:(#\w{6})"', page)


def test_the_colors_of_a_page_are_those_of_the_figures():
    relevance = torch.tensor([2.0, -2.0, 0.0, 1.0])
    page = text_html([text_record(relevance, list("abcd"))])
    found = [background for background, _ in marks(page)]
    assert found == [FOR[-1], AGAINST[-1], "#ffffff", FOR[2]]
    image = layer_overview(relevance[None], list("abcd")).axes[0].images[0]
    assert [to_hex(color) for color in image.cmap(image.norm(relevance.numpy()))] == found
    assert "token 3: +1, 20% of all" in page
    half = text_html([text_record(relevance / 2, list("abcd"), scale=2.0)])
    assert marks(half)[0][0] == FOR[2]


def luminance(color: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_stands_out_from_every_color():
    page = text_html([text_record(torch.linspace(-1, 1, 101), ["a"] * 101)])
    for pair in marks(page):
        dark, light = sorted(map(luminance, pair))
        assert (light + 0.05) / (dark + 0.05) >= 4.5


@pytest.mark.parametrize(
    ("relevance", "limit"),
    [
        (torch.zeros(3), 1.0),
        (torch.tensor([0.0] * 99 + [-2.0]), 2.0),  # one decisive token is never clipped
        (torch.tensor([1.0] * 99 + [2.0]), 1.0),  # a stray one of 2% is
        (torch.tensor([1.0] * 999 + [9.0]), 3.0),  # but not below a third
        (torch.tensor([1e-30, 2e-30]), 2e-30),
    ],
)
def test_where_the_color_is_strongest(relevance, limit):
    assert color_limit(relevance) == pytest.approx(limit)
    assert color_limit(-relevance) == pytest.approx(limit)
    largest = float(relevance.abs().max()) or 1.0
    assert color_limit(relevance, outliers=0) == pytest.approx(largest)


def test_one_palette():
    page_css = {"for": FOR, "against": AGAINST[::-1]}
    for sign, ramp in page_css.items():
        colors = relevance_colors(sign)
        assert [to_hex(colors(step / 4)) for step in range(5)] == list(ramp)
    assert to_hex(relevance_colors()(0.5)) == "#ffffff"
    # The magnitude is read from lightness alone, in both halves.
    for ramp in (FOR, AGAINST):
        lightness = [luminance(color) for color in ramp]
        assert lightness == sorted(lightness, reverse=True)


def test_the_scale_is_each_panels_own_shared_or_given():
    rows = torch.tensor([[1.0, -0.5, 0.25], [0.0, 4.0, -8.0]])
    tokens = list("abc")

    def drawn(scale):
        image = layer_overview(rows, tokens, scale=scale).axes[0].images[0]
        return torch.as_tensor(np.asarray(image.get_array())), image.get_clim()

    values, limits = drawn("each")
    assert torch.equal(values, rows / torch.tensor([[1.0], [8.0]]).double())
    assert limits == (-1, 1)
    for scale, limit in (("shared", 8), (2.5, 2.5)):
        values, limits = drawn(scale)
        assert torch.equal(values.float(), rows)
        assert limits == (-limit, limit)


def color_bar_labels(figure: Figure) -> list[str]:
    return tick_labels(figure.axes[-1].yaxis)


def test_the_color_bar_has_numbers():
    signed = interaction_map(torch.tensor([[0.5, -0.25]]), AB, row_tokens=["a"])
    assert color_bar_labels(signed) == ["−0.5 against", "−0.25", "0", "+0.25", "+0.5 for"]  # noqa: RUF001
    norms = interaction_map(torch.tensor([[0.5, 0.25]]), AB, row_tokens=["a"])
    assert color_bar_labels(norms) == ["0", "+0.25", "+0.5"]
    against = interaction_map(-torch.tensor([[0.5, 0.25]]), AB, row_tokens=["a"])
    assert color_bar_labels(against) == ["−0.5", "−0.25", "0"]  # noqa: RUF001
    assert against.axes[0].images[0].get_clim() == (-0.5, 0)


def test_the_maps_of_stages_are_each_on_their_own_grid(tmp_path):
    maps = [
        ("stage 0", torch.randn(12, 14)),
        ("stage 1", torch.randn(6, 7)),
        ("row", torch.ones(9)),
    ]
    figure = map_strip(maps, columns=2, title="stages")
    panels = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in panels] == ["stage 0", "stage 1", "row"]
    assert [axes.images[0].get_array().shape for axes in panels] == [(12, 14), (6, 7), (1, 9)]
    assert panels[0].get_xlabel().startswith("12 × 14  ·  1 = ")  # noqa: RUF001
    size_of(figure, tmp_path / "strip.png")
    assert map_strip(dict(maps), scale="shared").axes[1].get_xlabel() == "6 × 7"  # noqa: RUF001


def test_a_decisive_entry_of_a_long_map_is_drawn_and_labeled():
    matrix = torch.zeros(3, 5000)
    matrix[1, 3333] = -2.0
    figure = interaction_map(matrix, [f"w{i}" for i in range(5000)], row_tokens=["a", "b", "c"])
    axes = figure.axes[0]
    shown = np.asarray(axes.images[0].get_array())
    assert shown.shape[1] <= 512
    assert shown.min() == -2.0
    left, right, _, _ = axes.images[0].get_extent()
    cell = left + (shown.argmin() % shown.shape[1] + 0.5) * (right - left) / shown.shape[1]
    assert abs(cell - 3333) <= 5
    bold = [t.get_text() for t in axes.get_xticklabels() if t.get_fontweight() == "bold"]
    assert bold == ["w3333"]
    places = axes.get_xticks()
    assert np.diff(places).min() >= 5000 // 64  # no label runs into another


def alone(*shape: int) -> torch.Tensor:
    """Relevance of one decisive entry, in the middle."""
    relevance = torch.zeros(shape)
    relevance[tuple(n // 2 for n in shape)] = 1.0
    return relevance


LARGE = {
    "interaction_map": lambda: interaction_map(alone(3000, 3000), ["w"] * 3000),
    "layer_overview": lambda: layer_overview(alone(3, 3000), ["w"] * 3000),
    "map_strip": lambda: map_strip([("a", alone(999, 999)), ("b", alone(999, 999))]),
    "image_overlay": lambda: image_overlay(alone(1, 999, 999), torch.rand(1, 3, 999, 999)),
    "heat_map": lambda: image_overlay(
        alone(1, 999, 999), torch.rand(1, 3, 999, 999), drawing="heat_map"
    ),
    "series_plot": lambda: series_plot(
        alone(5000, 2), torch.zeros(5000, 2), features=["a name that needs much room", "b"]
    ),
    "video_strip": lambda: video_strip(alone(9, 500, 500), torch.rand(3, 9, 500, 500)),
    "volume_slices": lambda: volume_slices(alone(9, 500, 500), torch.rand(1, 9, 500, 500)),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_single_decisive_entry_is_seen(name):
    if name == "volume_slices" and matplotlib.__version_info__ < (3, 11):
        pytest.skip("older matplotlib paints over a single voxel of 500")
    figure = LARGE[name]()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3].astype(int)
    shown = [axes for axes in figure.axes[:-1] if axes.images]  # the last is the color bar
    if name == "video_strip":
        shown = [axes for axes in shown if axes.get_title() == "frame 4"]
    elif name in ("image_overlay", "heat_map", "series_plot"):
        shown = shown[1:]  # the image itself, or the other feature
    assert shown
    for axes in shown:
        left, bottom, right, top = (round(x) for x in axes.get_window_extent().extents)
        inside = pixels[len(pixels) - top : len(pixels) - bottom, left:right]
        assert (inside[..., 0] - inside[..., 2]).max() > 90, axes  # orange: more red than blue


def drawn(figure: Figure, cell: int = 1) -> np.ndarray:
    """What lies on top in a cell of a figure."""
    return np.asarray(figure.axes[cell].images[-1].get_array())


def test_images_and_their_relevance(tmp_path):
    torch.manual_seed(0)
    model = VisionMamba(image_size=16, patch_size=4, classes=3, width=12, depth=2).eval()
    images = torch.rand(2, 3, 16, 16)
    relevance = MambaLRP(model).attribute(images, target=1)
    figure = image_overlay(relevance, images, titles=["one", "two"])
    assert isinstance(figure, Figure)
    cells = [axes for axes in figure.axes if axes.images]
    assert [cell.get_ylabel() for cell in cells] == ["one", "", "two", ""]
    for k in range(2):
        picture, (gray, heat) = cells[2 * k].images[-1], cells[2 * k + 1].images
        expected = images[k].permute(1, 2, 0).numpy()
        assert np.array_equal(picture.get_array(), expected)
        assert np.allclose(gray.get_array(), 0.2 + 0.75 * expected.mean(2), atol=1e-6)
        total = relevance[k].sum(0)
        assert np.allclose(heat.get_array(), total / color_limit(total), rtol=1e-5)
        assert heat.get_clim() == (-1, 1)
        assert cells[2 * k + 1].get_xlabel() == f"1 = {color_limit(total):.2g}"
    assert size_of(figure, tmp_path / "images.png") > 5000


def test_methods_of_one_image_are_a_grid(tmp_path):
    image = torch.rand(1, 1, 8, 8)
    methods = {f"method {i}": torch.randn(1, 8, 8) for i in range(6)}
    figure = image_overlay(methods, image, contours=(0.5, 0.9), title="six methods")
    cells = [axes for axes in figure.axes if axes.images]
    assert [cell.get_title() for cell in cells] == ["image", *methods]
    rows = [cell.get_subplotspec().rowspan.start for cell in cells]
    assert rows == [0, 0, 0, 0, 1, 1, 1]
    width, height = figure.get_size_inches()
    assert width < 3 * height
    size_of(figure, tmp_path / "methods.png")


def test_methods_of_several_images_are_columns():
    images = torch.rand(3, 3, 4, 4)
    methods = {"a": torch.rand(3, 3, 4, 4), "b": 2 * torch.rand(3, 3, 4, 4)}
    figure = image_overlay(methods, images, titles=list("xyz"), scale="shared")
    assert drawn(figure, 5).max() == pytest.approx(float(methods["b"][1].sum(0).max()))
    limits = {axes.images[-1].get_clim() for axes in figure.axes if len(axes.images) == 2}
    assert limits == {(0, color_limit(torch.stack(list(methods.values())).sum(2)))}


def test_zero_relevance_leaves_the_image_visible():
    image, relevance = torch.rand(1, 3, 4, 4), torch.zeros(1, 4, 4)
    relevance[0, 1, 2] = -1.0
    heat = image_overlay(relevance, image).axes[1].images[-1]
    opacity = heat.cmap(heat.norm(heat.get_array()))[..., 3]
    assert opacity[1, 2] > 0.9
    assert (np.delete(opacity.ravel(), 6) == 0).all()
    alone = image_overlay(relevance, image, drawing="heat_map")
    assert len(alone.axes[1].images) == 1


def test_a_contour_holds_its_share():
    relevance = torch.zeros(1, 8, 8)
    relevance[0, 2:4, 2:4] = 1.0
    relevance[0, 6, 6] = -0.5
    figure = image_overlay(relevance, torch.rand(1, 3, 8, 8), contours=(0.8,))
    (contour,) = figure.axes[1].collections  # only around what is for the target
    (path,) = contour.get_paths()
    assert path.contains_points([(2, 2), (3, 3)]).all()
    assert not path.contains_points([(0, 0), (6, 6)]).any()


def test_small_relevance_is_drawn_without_a_warning():
    relevance = torch.rand(2, 3, 4, 4)
    images = torch.rand(2, 3, 4, 4)
    small = drawn(image_overlay(1e-9 * relevance, images))
    assert np.allclose(small, drawn(image_overlay(relevance, images)), atol=1e-5)


def test_images_of_any_values():
    relevance = torch.rand(1, 4, 4)
    levels = torch.randint(0, 256, (1, 3, 4, 4), dtype=torch.uint8)
    expected = levels[0].permute(1, 2, 0).numpy() / 255
    for images in (levels, levels.int(), levels / 255, (levels / 255).bfloat16()):
        shown = drawn(image_overlay(relevance, images), 0)
        off = 2 / 255 if images.dtype == torch.bfloat16 else 1e-6
        assert np.abs(shown - expected).max() <= off
    dark = drawn(image_overlay(relevance, torch.ones(1, 3, 4, 4, dtype=torch.uint8)), 0)
    assert (dark <= 1 / 254).all()  # one of 255 levels, not all of them
    normalized = (levels / 255 - 0.45) / 0.22
    stretched = drawn(image_overlay(relevance, normalized), 0)
    low, high = expected.min(), expected.max()
    assert np.abs(stretched - (expected - low) / (high - low)).max() <= 1e-5
    gray = drawn(image_overlay(relevance, levels[:, :1]), 0)
    assert gray.shape == (4, 4, 3)
    assert np.abs(gray - expected[..., :1]).max() <= 1e-6


SERIES = ["load (MW)", "wind (m/s)", "hour"]


def test_a_series_and_its_relevance(tmp_path):
    torch.manual_seed(0)
    series, relevance = torch.randn(48, 3), 0.01 * torch.randn(48, 3)
    relevance[17, 1] = -0.5
    figure = series_plot(
        relevance, series, features=SERIES, forecast=torch.randn(12, 3), mark=51, title="why?"
    )
    *lines, heat, _ = figure.axes
    assert [axes.get_ylabel() for axes in lines] == SERIES
    assert np.array_equal(heat.images[0].get_array(), relevance.T.numpy())
    assert heat.get_xlim() == (-0.5, 59.5)
    for k, axes in enumerate(lines):
        assert np.array_equal(axes.lines[0].get_ydata(), series[:, k].numpy())
        assert np.array_equal(axes.images[0].get_array(), relevance[None, :, k].numpy())
        assert any(set(line.get_xdata()) == {51} for line in axes.lines)  # the explained step
    assert [text.get_text() for text in lines[1].texts] == ["−0.5"]  # noqa: RUF001
    assert "explained" in [text.get_text() for text in lines[0].texts]
    assert size_of(figure, tmp_path / "series.png") > 5000


def test_series_of_other_shapes(tmp_path):
    series, relevance = torch.randn(20, 30), torch.rand(20, 30)
    relevance[4, 11] = 7.0
    relevance[18, 25] = 6.0
    times = [f"day {i}" for i in range(20)]
    figure = series_plot(relevance, series, max_lines=2, times=times, xlabel="day")
    lines = figure.axes[:2]
    assert [axes.get_ylabel() for axes in lines] == ["feature 11", "feature 25"]
    heat = figure.axes[2]
    assert {"feature 11", "feature 25"} <= set(tick_labels(heat.yaxis))
    size_of(figure, tmp_path / "many.png")
    assert "day 10" in tick_labels(heat.xaxis)
    turned = series_plot(relevance.T, series.T, channels_first=True, drawing="points")
    assert np.array_equal(drawn(turned, 6), relevance.T.numpy())
    one = series_plot(relevance[:, 0], series[:, 0])
    assert len([axes for axes in one.axes if axes.images]) == 1  # its background is the map
    size_of(series_plot(torch.zeros(5), torch.ones(5)), tmp_path / "zero.png")


def test_a_video_shows_its_most_relevant_frame(tmp_path):
    video, relevance = torch.rand(3, 50, 6, 8), 0.01 * torch.randn(3, 50, 6, 8)
    relevance[:, 31] -= 1
    figure = video_strip(relevance, video, frames=5, fps=10)
    frames = [axes for axes in figure.axes if axes.images]
    titles = [axes.get_title() for axes in frames]
    assert len(frames) == 5
    best = titles.index("frame 31, 3.10 s")
    bold = [axes.title.get_fontweight() == "bold" for axes in frames]
    assert bold == [k == best for k in range(5)]
    shown = np.asarray(frames[best].images[-1].get_array())
    assert np.allclose(shown, relevance[:, 31].sum(0), atol=1e-6)
    bars = figure.axes[5]
    heights = [bar.get_height() for bar in bars.patches]
    assert np.allclose(sum(heights), relevance.sum(), rtol=1e-3)
    size_of(figure, tmp_path / "video.png")
    batch = video_strip(relevance[None, :, :3], video[None, :, :3])
    assert len([axes for axes in batch.axes if axes.images]) == 3


def test_a_volume_is_cut_through_its_most_relevant_voxel(tmp_path):
    volume, relevance = torch.rand(1, 6, 7, 8), 0.01 * torch.randn(6, 7, 8)
    relevance[2, 5, 1] = -3.0
    figure = volume_slices(relevance, volume, axes=("axial", "coronal", "sagittal"))
    slices = figure.axes[:3]
    cuts = [relevance[2], relevance[:, 5], relevance[:, :, 1]]
    for axes, cut in zip(slices, cuts, strict=True):
        assert np.array_equal(axes.images[-1].get_array(), cut.numpy())
    assert [axes.get_title() for axes in slices] == [
        "axial = 2 of 6",
        "coronal = 5 of 7",
        "sagittal = 1 of 8",
    ]
    assert (slices[1].get_xlabel(), slices[1].get_ylabel()) == ("sagittal", "axial")
    crossed = [set(np.ravel([line.get_xdata() for line in axes.lines])) for axes in slices]
    assert all(place in found for place, found in zip((1, 1, 5), crossed, strict=True))
    size_of(figure, tmp_path / "volume.png")
    other = volume_slices(relevance, volume, at=(0, 0, 0), scale="each")
    assert other.axes[0].get_title().startswith("z = 0 of 6\n1 = ")


@pytest.mark.parametrize("records", [text_record(torch.ones(1), ["a"]), [1], ["record"], 3])
def test_a_page_of_something_else(records):
    with pytest.raises(TypeError, match=r"expected a list .* text_html\(\[record\]\)"):
        text_html(records)


IMAGE, HEAT, VOXELS = torch.rand(1, 3, 4, 4), torch.rand(1, 4, 4), torch.rand(2, 3, 4)
NAN, INF = torch.tensor(torch.nan), torch.tensor(torch.inf)


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (
            interaction_map,
            (torch.zeros(1, 2, 2), AB),
            r"matrix has shape \(1, 2, 2\), but the labels are for \(2, 2\); "
            ".* without a batch axis",
        ),
        (interaction_map, (torch.zeros(2, 2), ["a"]), "labels are for"),
        (
            partial(interaction_map, row_tokens=["a"]),
            (torch.eye(2), AB),
            r"labels are for \(1, 2\)",
        ),
        (interaction_map, (torch.zeros(0, 0), []), "there is nothing to show"),
        (interaction_map, (NAN.expand(1, 1), ["a"]), "matrix holds NaN or Inf"),
        (
            layer_overview,
            ({"x": torch.zeros(2), "y": torch.zeros(3)}, AB),
            r"rows\['y'\] has shape \(3,\)",
        ),
        (layer_overview, (torch.zeros(2), AB), r"rows has shape \(2,\)"),
        (layer_overview, ({}, ["a"]), "nothing to show"),
        (text_record, (torch.zeros(1, 2), AB), r"relevance has shape \(1, 2\)"),
        (text_record, (torch.zeros(0), []), "nothing to show"),
        (image_overlay, (IMAGE[0], IMAGE[0]), r"images has shape \(3, 4, 4\); .* images\[None\]"),
        (image_overlay, (IMAGE[:, :2], IMAGE[:, :2]), "one or three color channels"),
        (
            image_overlay,
            (torch.rand(1, 5), IMAGE),
            r"relevance has shape \(1, 5\) for images of shape \(1, 3, 4, 4\)",
        ),
        (image_overlay, (NAN.expand(1, 4, 4), IMAGE), "relevance holds NaN or Inf"),
        (image_overlay, (HEAT, INF.expand(1, 3, 4, 4)), "images holds NaN or Inf"),
        (
            image_overlay,
            ({"LaTIM": torch.rand(1, 5)}, IMAGE),
            r"relevance\['LaTIM'\] has shape \(1, 5\)",
        ),
        (image_overlay, ({}, IMAGE), "relevance holds 0 methods for 4 columns"),
        (
            partial(image_overlay, titles="ab"),
            (HEAT.expand(2, -1, -1), IMAGE.expand(2, -1, -1, -1)),
            "titles is 'ab'; expected one per image, 2",
        ),
        (partial(image_overlay, drawing="map"), (HEAT, IMAGE), "drawing is 'map'; expected one of"),
        (
            partial(image_overlay, contours=[50]),
            (HEAT, IMAGE),
            r"contours is \[50\]; expected shares",
        ),
        (partial(image_overlay, scale="all"), (HEAT, IMAGE), "scale is 'all'; expected 'each', 's"),
        (partial(layer_overview, scale=0.0), (torch.eye(2), AB), r"scale is 0\.0; expected"),
        (map_strip, ([],), "maps holds 0 maps"),
        (map_strip, ({"a": torch.zeros(1, 2, 2)},), r"the map 'a' has shape \(1, 2, 2\); expected"),
        (relevance_colors, ("up",), "sign is 'up'; expected one of"),
        (color_limit, (HEAT, 100), "outliers is 100; expected a percentage"),
        (color_limit, (torch.zeros(0),), "relevance is empty"),
        (series_plot, (HEAT, HEAT), r"series has shape \(1, 4, 4\); .* series\[0\] of a batch"),
        (series_plot, (HEAT[0], IMAGE[0]), r"relevance has shape \(4, 4\) for a series"),
        (partial(series_plot, features=AB), (HEAT[0], HEAT[0]), "expected one name per feature, 4"),
        (partial(series_plot, times=AB), (HEAT[0], HEAT[0]), "times has 2 entries"),
        (partial(series_plot, mark=-1), (HEAT[0], HEAT[0]), "mark is -1; .* starts at 4"),
        (partial(series_plot, drawing="x"), (HEAT[0], HEAT[0]), "drawing is 'x'"),
        (partial(series_plot, max_lines=0), (HEAT[0], HEAT[0]), "max_lines is 0"),
        (partial(series_plot, forecast=torch.ones(5)), (HEAT[0], HEAT[0]), "forecast is of 1 feat"),
        (video_strip, (HEAT, HEAT), r"video has shape \(1, 4, 4\); expected \(C, T, H, W\)"),
        (video_strip, (VOXELS, IMAGE), r"relevance has shape \(2, 3, 4\) for a video"),
        (partial(video_strip, frames=0), (VOXELS, VOXELS[None]), "frames is 0 and fps is None"),
        (volume_slices, (HEAT, VOXELS), r"volume has shape \(2, 3, 4\); expected \(C, D, H, W\)"),
        (
            partial(volume_slices, at=(0, 0, 4)),
            (VOXELS, VOXELS[None]),
            r"at is \(0, 0, 4\); expected a voxel of the volume of shape \(2, 3, 4\)",
        ),
        (partial(volume_slices, axes=AB), (VOXELS, VOXELS[None]), "expected three names"),
    ],
)
def test_a_bad_call_says_what_is_wrong(function, args, message):
    with pytest.raises(ValueError, match=message):
        function(*args)


@pytest.mark.slow
def test_without_a_screen_and_without_ipython(tmp_path):
    code = (
        "import sys; sys.modules['IPython'] = None\n"
        "import torch\n"
        "from captum_ssm.visualization import image_overlay, interaction_map, text_html\n"
        "from captum_ssm.visualization import text_record\n"
        "images = torch.rand(2, 3, 4, 4)\n"
        f"image_overlay(images, images).savefig({str(tmp_path / 'b.png')!r})\n"
        f"interaction_map(torch.eye(2), ['a', 'b']).savefig({str(tmp_path / 'a.png')!r})\n"
        "assert '<mark' in text_html([text_record(torch.ones(2), ['a', 'b'])])\n"
        "assert 'matplotlib.pyplot' not in sys.modules or not "
        "sys.modules['matplotlib.pyplot'].get_fignums()\n"
    )
    environment = {"PATH": "", "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=environment | {"HOME": str(tmp_path), "MPLCONFIGDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "a.png").exists()
    assert (tmp_path / "b.png").exists()
