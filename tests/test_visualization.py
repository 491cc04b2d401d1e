"""Figures and pages of real attributions, made without a screen."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from captum.attr import visualization as captum_visualization
from matplotlib.figure import Figure
from models import ids, tiny

from captum_ssm import LaTIM, MambaAttribution, MambaLRP, hidden_attention
from captum_ssm.models import VisionMamba
from captum_ssm.visualization import (
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


def test_captum_shows_an_image(tmp_path):
    model = VisionMamba(image_size=16, patch_size=4, classes=3, width=12, depth=2).eval()
    image = torch.rand(1, 3, 16, 16)
    relevance = MambaAttribution(model).attribute(image, target=1)
    figure, _ = captum_visualization.visualize_image_attr(
        relevance[0].permute(1, 2, 0).numpy(),
        image[0].permute(1, 2, 0).numpy(),
        "blended_heat_map",
        sign="absolute_value",
        use_pyplot=False,
    )
    size_of(figure, tmp_path / "image.png")


BAD_CALLS = {
    "a batch": (
        lambda: interaction_map(torch.zeros(1, 2, 2), ["a", "b"]),
        r"matrix has shape \(1, 2, 2\), but the labels are for \(2, 2\); .* without a batch axis",
    ),
    "too few tokens": (lambda: interaction_map(torch.zeros(2, 2), ["a"]), "labels are for"),
    "too few queries": (
        lambda: interaction_map(torch.zeros(2, 2), ["a", "b"], row_tokens=["a"]),
        r"labels are for \(1, 2\)",
    ),
    "nothing": (lambda: interaction_map(torch.zeros(0, 0), []), "there is nothing to show"),
    "not a number": (
        lambda: interaction_map(torch.full((1, 1), torch.nan), ["a"]),
        "matrix holds NaN or Inf",
    ),
    "rows of two lengths": (
        lambda: layer_overview({"x": torch.zeros(2), "y": torch.zeros(3)}, ["a", "b"]),
        r"rows\['y'\] has shape \(3,\)",
    ),
    "one row": (lambda: layer_overview(torch.zeros(2), ["a", "b"]), r"rows has shape \(2,\)"),
    "no row": (lambda: layer_overview({}, ["a"]), "nothing to show"),
    "relevance of a batch": (
        lambda: text_record(torch.zeros(1, 2), ["a", "b"]),
        r"relevance has shape \(1, 2\)",
    ),
    "no token": (lambda: text_record(torch.zeros(0), []), "nothing to show"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_a_bad_call_says_what_is_wrong(name):
    call, message = BAD_CALLS[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.slow
def test_without_a_screen_and_without_ipython(tmp_path):
    code = (
        "import sys; sys.modules['IPython'] = None\n"
        "import torch\n"
        "from captum_ssm.visualization import interaction_map, text_html, text_record\n"
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
