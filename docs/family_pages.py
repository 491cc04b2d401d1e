"""A page for each family of models: a model of it that was trained here, explained.

The pages are listed in ``family_pages.yml``, and made at every build by running the code that each
of them shows. Numbers in their texts are computed from what that code found.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from gallery import marked
from matplotlib.figure import Figure

from captum_ssm import hidden_attention
from captum_ssm.visualization import image_overlay, series_plot, video_strip

HERE = Path(__file__).resolve().parent
Names = dict[str, Any]  # what a page's code leaves
Facts = dict[str, Any]  # what a page's text says, by the name in its braces


@dataclass(frozen=True)
class Family:
    """A page: its file's name, its texts and its code, and what computes facts and picture."""

    name: str
    title: str
    lead: str
    code: str
    look: list[str]
    facts: str
    more: str
    draw: str = ""
    alt: str = ""


def families() -> list[Family]:
    """All pages, in their order."""
    listed = yaml.safe_load((HERE / "family_pages.yml").read_text(encoding="utf-8"))
    stripped = ("lead", "more", "alt")
    return [
        Family(**each | {key: each.get(key, "").strip() for key in stripped}) for each in listed
    ]


def shares(relevance: np.ndarray) -> np.ndarray:
    """Which share of all magnitude each entry has."""
    size = np.abs(relevance)
    return size / size.sum()


def versus(names: Names) -> str | None:
    """The answer that the explained one is compared with."""
    contrasts = names["why"].examples[0].outputs[0].contrasts
    return " sings" if contrasts and "against" in names["code"] else None


def reading(names: Names) -> int:
    """The place of the word that reads: the last one of what a classifier is given."""
    example = names["why"].examples[0]
    place = example.outputs[0].position
    return len(example.tokens) - 1 if place is None else place


def of_words(names: Names) -> Facts:
    """Relevance and shares of the words before the one that reads, and the layers' mean maps."""
    why, against, reader = names["why"], versus(names), reading(names)
    lrp, latim = (why.relevance(name, against=against) for name in ("mamba-lrp", "latim"))
    ids = names["tokenizer"](names["text"], return_tensors="pt").input_ids
    found = hidden_attention(names["model"], ids, reduction="mean").values()
    maps = [each[0].numpy() for each in found]
    return {
        "relevance": lrp,
        "lrp": shares(lrp[:reader]),
        "latim": shares(latim[:reader]),
        "reader": lrp[reader],
        "score": lrp.sum(),
        "read": [shares(each[-1]) for each in maps],  # by the last word
        "own": [shares(each).trace() for each in maps],
        "negative": [shares(each)[each < 0].sum() for each in maps],
    }


def half(relevance: np.ndarray) -> int:
    """How few entries hold half of all magnitude."""
    return int((np.sort(shares(relevance).ravel())[::-1].cumsum() < 0.5).sum()) + 1


def of_patches(names: Names) -> Facts:
    why = names["why"]

    def patches(name: str) -> np.ndarray:
        return shares(why.relevance(name).reshape(10, 4, 10, 4).sum((1, 3)))

    return {
        "mamba_lrp": half(patches("mamba-lrp")),
        "latim": half(patches("latim")),
        "unified": half(patches("unified")),
        "corner": patches("latim")[6:, 6:].sum(),
        "whole": why.relevance("mamba-lrp").sum(),
        "versus": why.relevance("mamba-lrp", against="8").sum(),
    }


def of_mask(names: Names) -> Facts:
    mask, objects = names["mask"].float(), names["scenes"].objects[:1]
    found = shares(names["relevance"][0].sum(0).numpy())
    near = torch.nn.functional.max_pool2d(mask, 9, stride=1, padding=4)
    return {
        "inside": found[mask[0].numpy() > 0].sum(),
        "area": float(mask.mean()),
        "near": found[near[0].numpy() > 0].sum(),
        "other": found[objects[0].numpy() == 2].sum(),
    }


def of_frames(names: Names) -> Facts:
    frame, other = (int(names["clips"].frames[k]) for k in (1, 0))

    def tubelets(relevance: np.ndarray) -> np.ndarray:
        return shares(relevance).reshape(8, -1).sum(1)

    return {
        "frame": frame,
        "lrp": tubelets(names["why"].relevance("mamba-lrp"))[frame // 2],
        "of_frame": shares(names["why"].relevance("mamba-lrp"))[frame].sum(),
        "latim": tubelets(names["why"].relevance("latim"))[frame // 2],
        "of_plus": tubelets(names["plus"].relevance())[other // 2],
    }


def of_steps(names: Names) -> Facts:
    lrp, latim = (shares(names["why"].relevance(name)) for name in ("mamba-lrp", "latim"))
    step, feature = np.unravel_index(lrp.argmax(), lrp.shape)
    return {
        "step": int(step),
        "feature": names["FEATURES"][feature],
        "lrp": lrp.max(),
        "mark": lrp[step, names["FEATURES"].index("first mark")],
        "of_step": lrp[step].sum(),
        "latim_step": latim[step].sum(),
    }


def overlay(names: Names) -> Figure:
    pixels = names["processor"](names["picture"], return_tensors="pt").pixel_values
    return image_overlay(torch.tensor(names["why"].relevance("latim"))[None], pixels)


def mask_overlay(names: Names) -> Figure:
    return image_overlay(names["relevance"], names["images"])


def strip(names: Names) -> Figure:
    return video_strip(torch.tensor(names["why"].relevance()), names["clips"].clips[1])


def lines(names: Names) -> Figure:
    relevance = torch.tensor(names["why"].relevance())
    return series_plot(relevance, names["series"][0], features=names["FEATURES"])


FACTS: dict[str, Callable[[Names], Facts]] = {
    "words": of_words,
    "patches": of_patches,
    "mask": of_mask,
    "frames": of_frames,
    "steps": of_steps,
}
PICTURES: dict[str, Callable[[Names], Figure]] = {
    "overlay": overlay,
    "mask_overlay": mask_overlay,
    "strip": strip,
    "lines": lines,
}


@contextmanager
def checkout(folder: Path) -> Iterator[None]:
    """Run in a folder with links to the checkout's, and leave the search path as it was."""
    for name in ("tutorials", "benchmarks"):
        if not (folder / name).exists():
            (folder / name).symlink_to(HERE.parent / name)
    before, path = Path.cwd(), [*sys.path]
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path


def run(family: Family, folder: Path) -> Names:
    """Run a page's code in a folder; the names that it leaves, and the code."""
    names: Names = {"__name__": family.name}
    with checkout(folder), warnings.catch_warnings():
        # RWKV's page says it.
        warnings.filterwarnings("ignore", message="between mixers tokens read")
        exec(compile(family.code, f"{family.name}.md", "exec"), names)
    return names | {"code": family.code}


def page(family: Family, facts: Facts) -> str:
    """The Markdown of a page."""
    kind = "living tall" if family.draw else "living"
    shown = (
        f'<iframe class="{kind}" src="../_static/models/{family.name}.html" '
        f'title="{family.title}: an explanation as an interactive page"></iframe>'
        if "to_html" in family.code
        else picture(family)
    )
    look = "\n".join("- " + " ".join(line.format(**facts).split()) for line in family.look)
    parts = (
        f"# {family.title}\n\n{family.lead}",
        shown,
        f"## What to look at\n\n{look}",
        f"## The code\n\n```python\n{family.code}```",
        family.more,
    )
    return "\n\n".join(parts) + "\n"


def picture(family: Family) -> str:
    return f"![{family.alt}](../_build/gallery/models/{family.name}.png)"


def card(family: Family, names: Names) -> str:
    """What the index shows of a page: its picture, or its words."""
    shown = picture(family)
    if not family.draw:
        example = names["why"].examples[0]
        relevance = names["why"].relevance(against=versus(names))[: reading(names) + 1]
        words = [token.text.strip() for token in example.tokens[: len(relevance)]]
        shown = f"```{{raw}} html\n{marked(relevance, words)}\n```"
    head = f"::::{{grid-item-card}} {family.title}\n:link: {family.name}\n:link-type: doc"
    return f"{head}\n\n{shown}\n::::"


INDEX = """# A gallery of families

One small trained model of each family, explained by the lines that its page shows. What these
models are asked has known answers, so that you can check what you see. [Families](../families.md)
has the others that are supported, and [recipes](../recipes.md) have code for the models that people
use.

:::::{{grid}} 1 1 2 2
:gutter: 3

{cards}
:::::

```{{toctree}}
:hidden:

{names}
```
"""


def write(sources: Path, pictures: Path, pages: Path) -> None:
    """The pages' Markdown, their pictures, and the living pages, each into its folder."""
    for folder in (sources, pictures, pages):
        folder.mkdir(parents=True, exist_ok=True)
    cards = []
    for family in families():
        names = run(family, pictures)
        if family.draw:
            PICTURES[family.draw](names).savefig(pictures / f"{family.name}.png", dpi=110)
        if "to_html" in family.code:
            (pictures / "why.html").replace(pages / f"{family.name}.html")
        text = page(family, FACTS[family.facts](names))
        (sources / f"{family.name}.md").write_text(text, encoding="utf-8")
        cards.append(card(family, names))
    listed = "\n".join(family.name for family in families())
    index = INDEX.format(cards="\n\n".join(cards), names=listed)
    (sources / "index.md").write_text(index, encoding="utf-8")
