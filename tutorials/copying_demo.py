"""The demo: two answers whose right explanation is known.

A small Mamba trained on stories continues with *bark*, not *sings*, because of the word *dogs*:
`why.html`, the page at the top of the README. Another Mamba copies strings, so the source token of
each letter is known: the script prints the source token that each method points to, and writes two
pictures and the page `copying.html`.

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

# By the table of the README.
BEST = "mamba-lrp"
SYMBOLS = [*string.ascii_lowercase, "<SEP>"]


def methods() -> list[str]:
    """Every method, first the one that finds most copied tokens."""
    return sorted(captum_ssm.attr.methods(), key=lambda name: name != BEST)


def letters() -> Any:
    """The tokenizer of the copying model: letters between spaces, and the separator."""
    backend = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(SYMBOLS)}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


def why() -> captum_ssm.Explanation:
    """What the first lines of the README explain."""
    model, tokenizer = captum_ssm.examples.load("stories-mamba")
    text = captum_ssm.examples.sample("stories-mamba")
    return captum_ssm.explain(model, tokenizer, text, target=" bark", against=" sings")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--string", default="qwertyuiopasdfghjklz", help="16 to 24 letters, copied")
    parser.add_argument("--copied", type=int, default=12, help="which copied token is explained")
    parser.add_argument("--output", type=Path, default=Path("out"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=captum_ssm.kernels.ExtensionWarning)

    n = len(args.string)
    if not 0 <= args.copied < n:
        parser.error(f"--copied is {args.copied}; the string has letters 0 to {n - 1}")
    args.output.mkdir(parents=True, exist_ok=True)
    why().to_html(args.output / "why.html")
    print(captum_ssm.kernels.extension_report())
    copied(args.string, args.copied, args.output)
    print(f"\nwrote {args.output}/copying.png and {args.output}/methods.png")
    for page in ("why", "copying"):
        print(f"open the page: {(args.output / f'{page}.html').resolve()}")


def copied(source: str, k: int, output: Path) -> None:
    """The source token of letter ``k`` by each method; two pictures, and a page of all letters."""
    model, tokenizer = captum_ssm.examples.load("copying-mamba")
    n = len(source)
    # The model has read the source, the separator and the copy so far.
    tokens = [*source, "<SEP>", *source[:k]]
    ids = torch.tensor([tokenizer.convert_tokens_to_ids(tokens)])
    with torch.no_grad():
        probabilities = model(ids).logits[0, -1].softmax(-1)
    target = int(probabilities.argmax())
    answer = tokenizer.convert_ids_to_tokens(target)
    print(f"reads    {' '.join(tokens)}")
    print(
        f"predicts {answer!r} with probability {float(probabilities[target]):.4f}; "
        f"right is {source[k]!r}, source token {k}\n"
    )

    rows: dict[str, Tensor] = {}
    for name in methods():
        method = captum_ssm.attr.methods()[name](model)
        relevance = method.attribute(ids, target=target)[0]
        rows[type(method).__name__] = relevance[:n]
        best = int(relevance[:n].argmax())
        print(f"{type(method).__name__:26s} points to source token {best:2d} {tokens[best]!r}")

    # Every step of the copy, one row each: the step's own position and the token it predicts.
    letter_ids = tokenizer.convert_tokens_to_ids([*source])
    separator = tokenizer.convert_tokens_to_ids("<SEP>")
    whole = torch.tensor([[*letter_ids, separator, *letter_ids[:-1]]])
    steps = [(n + i, letter_ids[i]) for i in range(n)]
    relevance = captum_ssm.MambaLRP(model).attribute(whole.expand(n, -1), target=steps)
    figure = interaction_map(
        relevance[:, :n],
        [*source],
        row_tokens=[*source],
        title="MambaLRP: the source token that each predicted token rests on",
    )
    figure.axes[0].set(xlabel="source token", ylabel="predicted token")
    figure.savefig(output / "copying.png", dpi=130)
    title = f"Why {answer!r}? The source string, by every method"
    layer_overview(rows, tokens[:n], title=title).savefig(output / "methods.png", dpi=130)
    # The whole copy, by every method: a page that is opened in a browser.
    explanation = captum_ssm.explain(
        model,
        tokenizer,
        " ".join([*source, "<SEP>"]),
        target=" ".join(source),
        methods=methods(),
        maps=True,
        lens=True,
        title="A small Mamba copies a string: what does it read?",
    )
    explanation.to_html(output / "copying.html")


if __name__ == "__main__":
    main()
