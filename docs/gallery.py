"""The pictures of the gallery, and the page: every method on the same text and the same image.

They are made at every build, with the models of `captum_ssm.examples`, so that they show what the
library computes today. That takes a few seconds.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import transformers
from matplotlib.colors import to_hex
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from captum_ssm import Explanation, examples, explain, hidden_attention
from captum_ssm.attr import methods
from captum_ssm.examples.digits import held_out_digits
from captum_ssm.visualization import (
    color_limit,
    image_overlay,
    interaction_map,
    readable_tokens,
    relevance_colors,
)

ROOT = Path(__file__).resolve().parent.parent
STORY = "Anna has a red ball. Tom has a blue kite. The dogs near the tree bark. Anna's ball is"
FIRST = ("mamba-lrp", "latim")
LAYER = -1
SIGN = 8  # tokens of the pages' sign


def write(folder: Path) -> None:
    """For each method `NAME.html`, the text, and `NAME.png`, the image; two maps; the page.

    The page is `page/page.html`, and that of the landing page `page/first.html`: a folder of its
    own, which the documentation serves as it is.
    """
    (folder / "page").mkdir(parents=True, exist_ok=True)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    reader, tokenizer = examples.load("stories-mamba")
    ids = tokenizer(STORY, return_tensors="pt").input_ids
    words = readable_tokens(tokenizer.convert_ids_to_tokens(ids[0].tolist()))
    every = [*FIRST, *(name for name in methods() if name not in FIRST)]
    why = explain(reader, tokenizer, STORY, methods=every, target=" red", against=" blue")
    text, asked = examples.sample("stories-mamba"), {"target": " bark", "against": " sings"}
    page = explain(reader, tokenizer, text, methods=every, maps=True, lens=True, **asked)
    page.to_html(folder / "page" / "page.html")
    first(reader, tokenizer).to_html(folder / "page" / "first.html")

    viewer, _ = examples.load("digits-vim")
    samples = held_out_digits(3)
    image, digit = samples.images[2:], int(samples.labels[2])

    for name, method in methods().items():
        of_words = why.relevance(name)[: len(words)]
        (folder / f"{name}.html").write_text(marked(of_words, words), encoding="utf-8")
        of_pixels = method(viewer).attribute(image, target=digit)
        figure = image_overlay(of_pixels, ((image + 0.5) / 2).clamp(0, 1))
        figure.savefig(folder / f"{name}.png", dpi=130)

    maps = {
        "matrix": list(hidden_attention(reader, ids, reduction="mean").values())[LAYER],
        "vectors": methods()["latim"](reader).interactions(ids, layer=LAYER),
    }
    for name, found in maps.items():
        interaction_map(found[0], words).savefig(folder / f"{name}.png", dpi=110)
    plt.imsave(folder / "sign.png", sign(maps["matrix"][0, -SIGN:, -SIGN:].numpy()))
    plt.imsave(folder / "blank.png", np.zeros((1, 1, 4)))


def first(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Explanation:
    """The page that the landing page shows, and whose code it shows."""
    text = examples.sample("stories-mamba")
    return explain(model, tokenizer, text, target=" bark", against=" sings")


def sign(found: np.ndarray) -> np.ndarray:
    """The sign of these pages: a corner of a map, nothing above its diagonal."""
    colors = relevance_colors()(0.5 + found / color_limit(found) / 2)
    colors[..., 3] = np.tri(len(found))
    return colors.repeat(32, 0).repeat(32, 1)


def marked(relevance: np.ndarray, words: Sequence[str]) -> str:
    """A text with relevance as its background, less the last word, which says its number."""
    *shown, last = relevance.tolist()
    limit, colors = color_limit(relevance[:-1]), relevance_colors()
    total = np.abs(relevance).sum()
    marks = []
    for word, value in zip(words[:-1], shown, strict=True):
        color = colors(0.5 + value / limit / 2)
        marks.append(
            f'<mark style="background:{to_hex(color)};color:{"#fff" if color[1] < 0.5 else "#000"}"'
            f' title="{value:+.3g}, {abs(value) / total:.0%} of all">{html.escape(word)}</mark>'
        )
    text = " ".join([*marks, f"<b>{html.escape(words[-1])}</b>"])
    share = f"The last word, where the question is asked, has {abs(last) / total:.0%}."
    return f'<div class="marked"><p>{text} …</p><small>{share}</small></div>'
