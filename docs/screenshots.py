"""Take the pictures of the page that the README and the documentation show.

Models of the tutorials are explained, their pages are opened in headless Chromium, and the
pictures are written to docs/images. The fonts are those of the machine; the pictures in the
repository were taken with Inter and Charis SIL installed.

    python docs/screenshots.py                        # or only some: page_hero page_long
    python docs/screenshots.py --pages docs/pages     # keep the pages as well
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright

from captum_ssm import examples, explain
from captum_ssm.examples.digits import compose, glyphs
from captum_ssm.examples.stories import COLORS, KINDS, OBJECTS, PRONOUNS, held_out_story
from captum_ssm.examples.typeseg import TypeSeg
from captum_ssm.explanation import Explanation, Report, summarize

ROOT = Path(__file__).resolve().parent.parent
METHODS = ("mamba-lrp", "latim", "unified", "mamba-attribution")
STORY = (
    "Anna has a red ball. Tom has a blue kite. The dogs near the tree bark. Mia has a green cup. "
    "Tom sings because he is happy. Anna's ball is"
)
CONTINUATION = " red. Tom's kite is blue. The dogs near the bird bark. Mia sings because she"

# Per picture: the page, its state, the window's size, and the token that is pointed at.
PICTURES = {
    "page_hero": ("why", "", (960, 520), None),
    "page_light": ("stories", "t=0", (1240, 860), 3),
    "page_dark": ("stories", "t=13&map=0.1&theme=dark", (1240, 1100), None),
    "page_contrast": ("contrast", "n=5", (1240, 860), None),
    "page_methods": ("stories", "t=6&view=all", (1240, 860), 9),
    "page_copying": ("copying", "t=7&map=out", (1240, 1240), None),
    "page_long": ("long", "t=0", (1240, 900), None),
    "page_image": ("digits", "view=all", (1240, 1120), None),
    "page_series": ("forecast", "", (1240, 900), None),
    "page_answer": ("answer", "", (1240, 900), None),
    "page_chat": ("chat", "t=0&template=0&own=1", (1240, 900), None),
    "page_circuit": ("circuit", "", (1240, 900), None),
    "page_report": ("corpus", "", (1240, 900), None),
    "page_report_code": ("code", "", (1240, 1460), None),
    "page_narrow": ("stories", "t=13", (390, 844), None),
}


def told(text: str, title: str, target: str, **options: object) -> Explanation:
    model, tokenizer = examples.load("stories-mamba")
    return explain(model, tokenizer, text, target=target, title=title, **options)


def stories() -> Explanation:
    everything = {"methods": METHODS, "alternatives": 3, "maps": True, "lens": True}
    return told(STORY, "Anna's ball, Tom's kite", CONTINUATION, **everything)


def contrast() -> Explanation:
    options = {"methods": METHODS, "against": " blue", "maps": True, "lens": True}
    return told(STORY, "Red or blue?", " red", **options)


def long() -> Explanation:
    """The story after a hundred facts about others."""
    rng = random.Random(7)
    people, colors, things = sorted(PRONOUNS), COLORS, OBJECTS
    facts = [
        f"{rng.choice(people)} has a {rng.choice(colors)} {rng.choice(things)}. "
        for _ in range(300)
    ]
    return told("".join(facts) + STORY, "Two thousand tokens", CONTINUATION, alternatives=1)


def why() -> Explanation:
    """The page of the demo, and of the first lines of the README."""
    sys.path.insert(0, str(ROOT / "tutorials"))
    import copying_demo

    return copying_demo.why()


def copying(word: str = "qwertyuiopasdfghjklz") -> Explanation:
    model, tokenizer = examples.load("copying-mamba")
    text = " ".join([*word, "<SEP>"])
    return explain(
        model, tokenizer, text, target=" " + " ".join(word), title="A copied string",
        methods=METHODS, maps=True,
    )  # fmt: skip


def chat() -> Explanation:
    model, tokenizer = examples.load("chat-mamba")
    facts = "Anna has a red ball. Tom has a blue kite."
    messages = [
        {"role": "system", "content": "Answer with one word."},
        {"role": "user", "content": f"{facts} Who has a kite?"},
        {"role": "assistant", "content": "Tom."},
        {"role": "user", "content": "What color is Anna's ball?"},
    ]
    return explain(
        model, tokenizer, messages=messages, max_new_tokens=5, title="A chat", methods=METHODS,
        alternatives=2,
    )  # fmt: skip


def answer() -> Explanation:
    """A whole answer, of which each token is explained."""
    model, tokenizer = examples.load("stories-mamba")
    text = "Anna has a red ball. Tom has a blue kite. Mia has a green cup."
    return explain(model, tokenizer, text, max_new_tokens=20, alternatives=0, title="Three things")


def circuit() -> Explanation:
    """A hybrid: two recurrent layers below one of attention."""
    model, tokenizer = examples.load("stories-qwen3next")
    return explain(model, tokenizer, STORY, circuit=True, title="Anna's ball")


def digits() -> Explanation:
    model, _ = examples.load("digits-vim")
    images, labels = glyphs("test")
    samples = compose(images[:4], labels[:4], torch.Generator().manual_seed(0))
    options = {"methods": METHODS, "alternatives": 2, "mean": [0.25] * 3, "std": [0.5] * 3}
    return explain(model, samples.images, title="Digits in clutter", **options)


def forecast() -> Explanation:
    import pandas

    model, _ = examples.load("series-forecaster")
    names = ["demand", "price", "supply", "first mark", "second mark"]
    table = pandas.DataFrame(examples.sample("series-forecaster")[0], columns=names)
    return explain(model, table, target="price, 3 ahead", methods=METHODS, title="A forecast")


def corpus(count: int = 2000) -> Report:
    """Held-out stories by two models."""
    rng = random.Random(0)
    drawn = [held_out_story(rng, rng.choice((12, 20, 28)), KINDS[k % 3]) for k in range(count)]
    texts, targets = [], []
    for story in drawn:
        end = story.questions[-1].position + 1
        said = " ".join(story.words[:end]).replace(" 's", "'s").replace(" .", ".")
        texts.append(said)
        targets.append(" " + story.words[end])
    first, other = (
        explain(*examples.load(name), texts, target=targets, alternatives=1)
        for name in ("stories-mamba", "stories-mamba2")
    )
    kinds = [story.questions[-1].kind for story in drawn]
    return summarize(first, by=kinds, against=other, title=f"{count:,} stories")


class Characters:
    """A tokenizer of ASCII texts, of which each character is a token."""

    def __call__(self, text: str, **options: object) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def encode(self, text: str, **options: object) -> list[int]:
        return list(text.encode("ascii"))

    def decode(self, ids: int | list[int], **options: object) -> str:
        return bytes([ids] if isinstance(ids, int) else ids).decode("ascii")

    def convert_ids_to_tokens(self, ids: int | list[int]) -> str | list[str]:
        return chr(ids) if isinstance(ids, int) else [chr(one) for one in ids]


def code(count: int = 500) -> Report:
    """Code with lines of another language in it: why has the hundredth character its label?"""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from typeseg_labels import pasted

    rng = random.Random(0)
    drawn = [pasted(rng) for _ in range(count)]
    texts = [bytes(ids.tolist()).decode("ascii") for ids, *_ in drawn]
    model = TypeSeg().eval()
    options = {"labels": list(model.labels), "position": 100, "alternatives": 0}
    found = explain(model, Characters(), texts, **options)
    return summarize(found, by=[host for *_, (host, _) in drawn], title=f"{count} pieces of code")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "pictures", nargs="*", default=[*PICTURES], help="their names; default: all"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--pages", type=Path, help="keep the pages in this folder")
    args = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("There is no chromium on the path; expected Debian's package chromium.")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as temporary:
        folder = args.pages or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        shown = {PICTURES[picture][0] for picture in args.pictures}
        for make in (
            why,
            stories,
            contrast,
            long,
            copying,
            answer,
            chat,
            circuit,
            digits,
            forecast,
            corpus,
            code,
        ):
            if make.__name__ in shown:
                make().to_html(folder / f"{make.__name__}.html")
        browser = playwright.chromium.launch(executable_path=chromium)
        for picture in args.pictures:
            name, state, (width, height), token = PICTURES[picture]
            tab = browser.new_page(viewport={"width": width, "height": height})
            tab.goto(f"{(folder / f'{name}.html').resolve().as_uri()}#{state}")
            tab.locator(".part:not(.gone), .picture, .series").first.wait_for(state="attached")
            tab.wait_for_timeout(500)
            if token is not None:
                tab.locator(f"[id$='-{token}']").first.hover()
            tab.screenshot(path=args.output / f"{picture}.png")
            print(args.output / f"{picture}.png")
            tab.close()
        browser.close()


if __name__ == "__main__":
    main()
