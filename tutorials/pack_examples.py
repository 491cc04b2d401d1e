"""Write the models of `captum_ssm.examples` from the trained ones in `tutorials/models`.

Weights become float16, which halves the wheel; the answers stay (tests/examples). Each model gets
the input of `captum_ssm.examples.sample`, and the copying model a tokenizer.

    python tutorials/pack_examples.py                    # or the names of some models
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from copying_demo import letters
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import ViTImageProcessorPil

from captum_ssm.examples import folder, names, signals
from captum_ssm.examples.digits import held_out_digits

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "benchmarks"))

from _words import name_portably  # noqa: E402

TEXTS = {
    "chains": "a = c; f = 31; p = f; k = 17; c = n; e = p; n = k; b = e; ? a =",
    "documents": "document 1: Anna has a red ball in Rome since Monday. "
    "document 2: Tom has a blue kite in Oslo since Friday. say a pink hat in Paris since Sunday! "
    "document 3: Mia has a green cup in Cairo since Tuesday. ? What does Anna have? a",
    "stories": "The bird near the dogs sings. The dogs near the bird",
    "reviews": "I saw it with my funny sister. The plot was not good, but the music was moving.",
    "copying": "q w e r t y u i o p a s d f g h j k l z <SEP> q w e r t y u i o p a s",
}

CHAT = [
    {"role": "system", "content": "Answer with one word."},
    {
        "role": "user",
        "content": "Anna has a red ball. Tom has a blue kite. What color is Tom's kite?",
    },
]


def write_sample(name: str, path: Path) -> None:
    """One held-out input, next to the weights."""
    kind = name.split("-")[0]
    if kind in TEXTS:
        (path / "sample.txt").write_text(TEXTS[kind] + "\n", encoding="utf-8")
    elif kind == "chat":
        (path / "sample.json").write_text(json.dumps(CHAT, indent=1) + "\n", encoding="utf-8")
    elif kind == "digits":
        canvas = held_out_digits(1).images[0] / 2 + 0.25  # from -0.5..1.5 to 0..1
        pixels = canvas.clamp(0, 1).mul(255).round().byte().permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(path / "sample.png")
    else:
        held_out = {
            "series-classifier": lambda: signals.held_out_bursts(),
            "series-forecaster": lambda: signals.held_out_forecasts(),
        }[name]()
        save_file({"series": held_out.series[:1]}, path / "sample.safetensors")


def main() -> None:
    for name in sys.argv[1:] or names():
        source, target = HERE / "models" / name, folder(name)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        state = load_file(source / "model.safetensors")
        halves = {key: value.half() for key, value in state.items()}
        save_file(halves, target / "model.safetensors", metadata={"format": "pt"})
        for path in [
            *source.glob("*config.json"),
            *source.glob("tokenizer.json"),
            *source.glob("chat_template.jinja"),
        ]:
            shutil.copy(path, target)
        if name == "copying-mamba":
            letters().save_pretrained(target)
            name_portably(target)
        if name == "digits-vim":
            settings = {
                "size": {"height": 40, "width": 40},
                "image_mean": [0.25] * 3,
                "image_std": [0.5] * 3,
            }
            ViTImageProcessorPil(**settings).save_pretrained(target)
        write_sample(name, target)
        print(f"{name:24s} {sum(p.stat().st_size for p in target.iterdir()) / 1000:6.1f} kB")


if __name__ == "__main__":
    main()
