"""Figures and pages of real attributions, made without a screen."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from captum.attr import visualization as captum_visualization
from matplotlib.figure import Figure
from models import ids, tiny

from captum_ssm import LaTIM, MambaLRP, hidden_attention
from captum_ssm.models import VisionMamba
from captum_ssm.visualization import (
    image_overlay,
    interaction_map,
    layer_overview,
    readable_tokens,
    text_html,
    text_record,
)

L = 9
TOKENS = ["<s>", "The", "Ġcat", "Ġ&", "Ċ", "$x$", "ĠÐ´Ð°", "<b>", ""]  # noqa: RUF001


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
    assert axes.get_title() == "layer 0"
    shown = axes.images[0]
    assert shown.get_array().shape == (L, L)
    assert shown.get_clim() == (0, pytest.approx(float(matrix.max())))  # norms: not signed
    assert size_of(figure, tmp_path / "map.png") > 5000


def test_interaction_map_of_signed_rows(tmp_path):
    relevance = MambaLRP(tiny()).attribute(ids(1, L).expand(2, -1), target=[(3, 5), (8, 5)])
    figure = interaction_map(relevance.bfloat16(), TOKENS, row_tokens=["a", "b"])
    low, high = figure.axes[0].images[0].get_clim()
    assert low == -high  # zero is in the middle of the colours
    size_of(figure, tmp_path / "rows.png")


def test_a_letter_without_a_glyph_is_spelled_out(tmp_path):
    figure = interaction_map(torch.eye(2), ["漢", "a"])  # a missing glyph would be a warning
    size_of(figure, tmp_path / "map.png")
    assert tick_labels(figure.axes[0].xaxis)[0] in ("漢", "\\u6f22")


def test_long_sequences_label_some_tokens():
    figure = interaction_map(torch.rand(200, 200), ["t"] * 200, max_labels=50)
    assert len(figure.axes[0].get_xticks()) == 50
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
    assert f"{float(relevance.sum()):.2f}" in page
    assert page.count("<mark") == 2 * L + 3
    assert page.count("<tr>") == page.count("</tr>") == 4


def test_the_records_are_captums(capsys):
    pytest.importorskip("IPython")
    relevance = MambaLRP(tiny()).attribute(ids(1, L), target=5)[0]
    record = text_record(relevance, TOKENS, predicted="w5", probability=0.5)
    table = captum_visualization.visualize_text([record]).data
    words = table[table.index("<mark") : table.rindex("</mark>")]
    assert words in text_html([record])


def drawn(figure: Figure, cell: int = 1) -> np.ndarray:
    """What lies on top in a cell of a figure."""
    return np.asarray(figure.axes[cell].images[-1].get_array())


def test_images_and_their_relevance(tmp_path):
    torch.manual_seed(0)
    model = VisionMamba(image_size=16, patch_size=4, classes=3, width=12, depth=2).eval()
    images = torch.rand(2, 3, 16, 16)
    relevance = MambaLRP(model).attribute(images, target=1)
    titles = ["one", "two"]
    figure = image_overlay(relevance, images, titles=titles, show_colorbar=True)
    assert isinstance(figure, Figure)
    cells = [axes for axes in figure.axes if axes.images]
    assert [cell.get_title() for cell in cells] == ["one", "", "two", ""]
    for k in range(2):
        picture, (_, heat) = cells[2 * k].images[-1], cells[2 * k + 1].images
        expected = (images[k] * 255).int().permute(1, 2, 0).numpy()
        assert np.array_equal(picture.get_array(), expected)
        # Captum clips the largest values, and only those.
        total = relevance[k].sum(0).numpy()
        scaled = np.asarray(heat.get_array())
        inside = np.abs(scaled) < 1
        assert 0.5 < inside.mean() < 1
        ratio = scaled[inside] / total[inside]
        assert np.allclose(ratio, ratio[0], rtol=1e-4)
        assert np.array_equal(np.sign(scaled), np.sign(total))
        assert heat.get_clim() == (-1, 1)
    assert size_of(figure, tmp_path / "images.png") > 5000


each_drawing = pytest.mark.parametrize(
    "method", ["heat_map", "blended_heat_map", "masked_image", "alpha_scaling"]
)


@each_drawing
@pytest.mark.parametrize("sign", ["positive", "negative", "absolute_value"])
def test_each_way_to_draw_is_captums_own(method, sign):
    torch.manual_seed(0)
    image, relevance = torch.rand(1, 3, 6, 8), torch.randn(1, 3, 6, 8)
    figure = image_overlay(relevance, image, methods=["original_image", method], signs=sign)
    theirs, axes = captum_visualization.visualize_image_attr(
        relevance[0].permute(1, 2, 0).numpy(),
        image[0].permute(1, 2, 0).numpy(),
        method,
        sign,
        use_pyplot=False,
    )
    assert np.allclose(drawn(figure), np.asarray(axes.images[-1].get_array()), atol=1e-5)
    assert figure.axes[1].images[-1].get_clim() == axes.images[-1].get_clim()
    assert isinstance(theirs, Figure)


def test_the_sign_is_chosen_for_the_relevance():
    image, relevance = torch.rand(1, 3, 4, 4), torch.rand(1, 4, 4)
    assert figure_limits(image_overlay(relevance, image)) == (0, 1)
    assert figure_limits(image_overlay(relevance - 0.5, image)) == (-1, 1)
    methods = ["masked_image", "heat_map"]
    figure = image_overlay(relevance - 0.5, image, methods=methods, signs=["positive", "all"])
    assert (drawn(figure, 0) > 0).any(2).sum() < 16
    assert (drawn(figure) < 0).any()
    image_overlay(relevance - 0.5, image, methods="alpha_scaling")  # which takes no "all"


def figure_limits(figure: Figure) -> tuple[float, float]:
    return figure.axes[1].images[-1].get_clim()


@each_drawing
def test_nothing_of_a_sign_is_nothing_drawn(method, tmp_path):
    images = torch.rand(2, 3, 4, 4)
    relevance = torch.stack([torch.ones(4, 4), -torch.ones(4, 4)])
    for sign, empty in (("positive", 1), ("negative", 0)):
        figure = image_overlay(relevance, images, methods=[method], signs=sign)
        assert not drawn(figure, empty).any()
        assert drawn(figure, 1 - empty).any()
        size_of(figure, tmp_path / f"{sign}.png")
    assert not drawn(image_overlay(0 * relevance, images, methods=[method]), 0).any()


def test_small_relevance_is_drawn_without_a_warning():
    relevance = torch.rand(1, 3, 4, 4)
    images = torch.rand(1, 3, 4, 4)
    small = drawn(image_overlay(1e-9 * relevance, images))
    assert np.allclose(small, drawn(image_overlay(relevance, images)), atol=1e-5)


def test_images_of_any_values():
    relevance = torch.rand(1, 4, 4)
    levels = torch.randint(0, 256, (1, 3, 4, 4), dtype=torch.uint8)
    expected = levels[0].permute(1, 2, 0).numpy()
    # Rounded down by Captum, so one level may be missing.
    for images in (levels, levels.int(), levels / 255, (levels / 255).bfloat16()):
        shown = drawn(image_overlay(relevance, images), 0)
        off = 2 if images.dtype == torch.bfloat16 else 1
        assert np.abs(shown.astype(int) - expected).max() <= off
    dark = drawn(image_overlay(relevance, torch.ones(1, 3, 4, 4, dtype=torch.uint8)), 0)
    assert (dark <= 1).all()  # one of 255 levels, not all of them
    normalised = (levels / 255 - 0.45) / 0.22
    stretched = drawn(image_overlay(relevance, normalised), 0)
    low, high = int(expected.min()), int(expected.max())
    truth = (expected.astype(float) - low) / (high - low) * 255
    assert np.abs(stretched - truth).max() <= 1.01
    grey = drawn(image_overlay(relevance, levels[:, :1]), 0)
    assert grey.shape == (4, 4, 3)
    assert np.abs(grey.astype(int) - expected[..., :1]).max() <= 1


@pytest.mark.parametrize("records", [text_record(torch.ones(1), ["a"]), [1], ["record"], 3])
def test_a_page_of_something_else(records):
    with pytest.raises(TypeError, match=r"expected a list .* text_html\(\[record\]\)"):
        text_html(records)


AB, IMAGE, HEAT = ["a", "b"], torch.rand(1, 3, 4, 4), torch.rand(1, 4, 4)
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
            partial(image_overlay, titles="ab"),
            (HEAT.expand(2, -1, -1), IMAGE.expand(2, -1, -1, -1)),
            "titles is 'ab'; expected one per image, 2",
        ),
        (partial(image_overlay, signs="both"), (HEAT, IMAGE), "signs is 'both'; expected one of"),
        (partial(image_overlay, signs=["all"] * 3), (HEAT, IMAGE), "one for each of the 2 methods"),
        (partial(image_overlay, methods=["map"]), (HEAT, IMAGE), r"methods is \['map'\]; expected"),
        (
            partial(image_overlay, methods=["masked_image"], signs="all"),
            (HEAT, IMAGE),
            "'all', which masked_image cannot draw",
        ),
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
    environment = {"PATH": "", "MPLBACKEND": "Agg", "PYTHONPATH": str(Path(__file__).parents[1])}
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
