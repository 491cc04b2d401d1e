"""The demo: one copied token, explained by every method.

The model is a small Mamba trained to copy strings (tutorials/models/copying-mamba), so the right
explanation is known: the source token that is copied. The script prints the source token each
method points to, and writes two pictures and a page, `copying.html`, where every method can be
looked at token by token.

    python tutorials/copying_demo.py --output out
"""

from __future__ import annotations

import argparse
import string
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

import captum_ssm
from captum_ssm.visualization import interaction_map, layer_overview

HERE = Path(__file__).resolve().parent
# By the table of the README.
BEST = "mamba-lrp"
SYMBOLS = [*string.ascii_lowercase, "<SEP>"]


def methods() -> dict[str, dict[str, Any]]:
    """Every method, with the options used here: first the one that finds most copied tokens."""
    options = {"latim": {"activation": "gate"}}
    names = sorted(captum_ssm.attr.methods(), key=lambda name: name != BEST)
    return {name: options.get(name, {}) for name in names}


def letters() -> Any:
    """A tokenizer of letters between spaces: the model came without one."""
    backend = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(HERE / "models" / "copying-mamba"))
    parser.add_argument("--string", default="qwertyuiopasdfghjklz", help="16 to 24 letters, copied")
    parser.add_argument("--copied", type=int, default=12, help="which copied token is explained")
    parser.add_argument("--output", type=Path, default=Path("out"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=captum_ssm.kernels.ExtensionWarning)

    source = [SYMBOLS.index(letter) for letter in args.string]
    n = len(source)
    if not 0 <= args.copied < n:
        parser.error(f"--copied is {args.copied}; the string has letters 0 to {n - 1}")
    # The model has read the source, the separator and the copy so far.
    ids = torch.tensor([[*source, SYMBOLS.index("<SEP>"), *source[: args.copied]]])
    tokens = [SYMBOLS[i] for i in ids[0].tolist()]

    model = transformers.AutoModelForCausalLM.from_pretrained(args.model).eval()
    with torch.no_grad():
        probabilities = model(ids).logits[0, -1].softmax(-1)
    target = int(probabilities.argmax())
    print(f"kernels: {'compiled' if captum_ssm.kernels.extension_loaded() else 'PyTorch'}")
    print(f"reads    {' '.join(tokens)}")
    print(
        f"predicts {SYMBOLS[target]!r} with probability {float(probabilities[target]):.4f}; "
        f"right is {args.string[args.copied]!r}, source token {args.copied}\n"
    )

    rows: dict[str, Tensor] = {}
    for name, options in methods().items():
        method = captum_ssm.attr.methods()[name](model)
        relevance = method.attribute(ids, target=target, **options)[0]
        rows[type(method).__name__] = relevance
        best = int(relevance[:n].argmax())
        print(f"{type(method).__name__:26s} points to source token {best:2d} {tokens[best]!r}")

    args.output.mkdir(parents=True, exist_ok=True)
    # Every step of the copy, one row each: the step's own position and the token it predicts.
    whole = torch.tensor([[*source, SYMBOLS.index("<SEP>"), *source[:-1]]])
    steps = [(n + k, source[k]) for k in range(n)]
    relevance = captum_ssm.MambaLRP(model).attribute(whole.expand(n, -1), target=steps)
    figure = interaction_map(
        relevance[:, :n],
        list(args.string),
        row_tokens=list(args.string),
        title="MambaLRP: the source token that each predicted token rests on",
    )
    figure.axes[0].set(xlabel="source token", ylabel="predicted token")
    figure.savefig(args.output / "copying.png", dpi=130)
    overview = {name: row[:n] for name, row in rows.items()}
    layer_overview(
        overview, tokens[:n], title=f"Why {SYMBOLS[target]!r}? The source string, by every method"
    ).savefig(args.output / "methods.png", dpi=130)
    # The rest of the copy, by every method: a page that is opened in a browser.
    explanation = captum_ssm.explain(
        model,
        letters(),
        " ".join(tokens),
        target=" ".join(args.string[args.copied :]),
        methods=methods(),
        maps=True,
        lens=True,
        title="A small Mamba copies a string: what does it read?",
    )
    explanation.to_html(args.output / "copying.html")
    print(f"\nwrote {args.output}/copying.png and {args.output}/methods.png")
    print(f"open the page: {(args.output / 'copying.html').resolve()}")


if __name__ == "__main__":
    main()
