"""Take the pictures of the page that the README and the documentation show.

Models of the tutorials are explained, their pages are opened in headless Chromium, and the
pictures are written to docs/images. The fonts are those of the machine; the pictures in the
repository were taken with Inter and Charis SIL installed.

    python docs/screenshots.py
    python docs/screenshots.py --pages docs/pages     # keep the pages as well
"""

from __future__ import annotations

import argparse
import random
import shutil
import string
import sys
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from captum_ssm import explain
from captum_ssm.explanation import Explanation
from captum_ssm.models import VisionMamba

ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "tutorials" / "models"
METHODS = ("mamba-lrp", "latim", "unified", "mamba-attribution")
STORY = (
    "Anna has a red ball. Tom has a blue kite. The dogs near the tree bark. Mia has a green cup. "
    "Tom sings because he is happy. Anna's ball is"
)
CONTINUATION = " red. Tom's kite is blue. The dogs near the bird bark. Mia sings because she"

# Per picture: the page, its state, the window's size, and the token that is pointed at.
PICTURES = {
    "page_hero": ("contrast", "", (760, 480), None),
    "page_light": ("stories", "t=0", (1240, 860), 3),
    "page_dark": ("stories", "t=13&map=0.1&theme=dark", (1240, 1100), None),
    "page_contrast": ("contrast", "n=5", (1240, 860), None),
    "page_methods": ("stories", "t=6&view=all", (1240, 860), 9),
    "page_copying": ("copying", "t=7&map=out", (1240, 1240), None),
    "page_long": ("long", "t=0", (1240, 900), None),
    "page_image": ("digits", "view=all", (1240, 1120), None),
    "page_chat": ("chat", "template=0&own=1", (1240, 900), None),
    "page_narrow": ("stories", "t=13", (390, 844), None),
}


def told(text: str, title: str, target: str, **options: object) -> Explanation:
    folder = MODELS / "stories-mamba"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return explain(model, tokenizer, text, target=target, title=title, **options)


def stories() -> Explanation:
    everything = {"methods": METHODS, "alternatives": 3, "maps": True, "lens": True}
    return told(STORY, "Anna's ball, Tom's kite", CONTINUATION, **everything)


def contrast() -> Explanation:
    options = {"methods": METHODS, "against": " blue", "maps": True, "lens": True}
    return told(STORY, "Red or blue?", " red", **options)


def long() -> Explanation:
    """The story after a hundred facts about others."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "language"))
    import stories as made

    rng = random.Random(7)
    people, colors, things = sorted(made.PRONOUNS), made.COLORS, made.OBJECTS
    facts = [
        f"{rng.choice(people)} has a {rng.choice(colors)} {rng.choice(things)}. "
        for _ in range(300)
    ]
    return told("".join(facts) + STORY, "Two thousand tokens", CONTINUATION, alternatives=1)


def copying(word: str = "qwertyuiopasdfghjklz") -> Explanation:
    model = AutoModelForCausalLM.from_pretrained(MODELS / "copying-mamba").eval()
    tokenizer = letters(model.config.vocab_size)
    text = " ".join([*word, "<SEP>"])
    return explain(
        model, tokenizer, text, target=" " + " ".join(word), title="A copied string",
        methods=METHODS, maps=True,
    )  # fmt: skip


def chat() -> Explanation:
    folder = MODELS / "chat-mamba"
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
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


def letters(size: int) -> PreTrainedTokenizerFast:
    """The symbols of the copying model, written with spaces between them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = [*string.ascii_lowercase, "<SEP>"]
    names += [f"#{k}" for k in range(len(names), size)]
    words = models.WordLevel({name: k for k, name in enumerate(names)}, unk_token="#27")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def digits() -> Explanation:
    sys.path.insert(0, str(ROOT / "benchmarks" / "vision"))
    import data

    weights = load_file(MODELS / "digits-vim" / "model.safetensors")
    model = VisionMamba.from_state_dict(weights).eval()
    glyphs, labels = data.digits("test")
    samples = data.compose(glyphs[:4], labels[:4], torch.Generator().manual_seed(0))
    options = {"methods": METHODS, "alternatives": 2, "mean": [0.25] * 3, "std": [0.5] * 3}
    return explain(model, samples.images, title="Digits in clutter", **options)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--pages", type=Path, help="keep the pages in this folder")
    args = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("There is no chromium on the path; expected Debian's package chromium.")
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as temporary:
        folder = args.pages or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for make in (stories, contrast, long, copying, chat, digits):
            make().to_html(folder / f"{make.__name__}.html")
        browser = playwright.chromium.launch(executable_path=chromium)
        for picture, (name, state, (width, height), token) in PICTURES.items():
            tab = browser.new_page(viewport={"width": width, "height": height})
            tab.goto(f"{(folder / f'{name}.html').resolve().as_uri()}#{state}")
            tab.locator(".part:not(.gone), .picture").first.wait_for()
            tab.wait_for_timeout(500)
            if token is not None:
                tab.locator(f"[id$='-{token}']").first.hover()
            tab.screenshot(path=args.output / f"{picture}.png")
            print(args.output / f"{picture}.png")
            tab.close()
        browser.close()


if __name__ == "__main__":
    main()
