"""Checkpoints of small models whose tokens are words, for every release of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _training import save
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast


def word_tokenizer(
    words: Sequence[str], unknown: str, padding: str, special: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Words as tokens: ``Anna's`` is ``Anna`` and ``'s``, and a sign is a token.

    Args:
        words (sequence of str): the vocabulary, in the order of the ids.
        unknown, padding (str): which of the words stand for others, and for nothing.
        special (sequence of str): further words that are marks and not text, such as ``<end>``.
    """
    marks = [unknown, padding, *special]
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=unknown))
    pattern = Regex("|".join([*marks, r"'s", r"\w+", r"[^\w\s]"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern, "removed", invert=True)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex(r"^(?!'s|[.,?])"), " "),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=unknown,
        pad_token=padding,
        additional_special_tokens=list(special) or None,
        clean_up_tokenization_spaces=False,
    )


def save_portably(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, directory: Path
) -> None:
    """Save model and tokenizer in the words that every release of transformers reads."""
    save(model, directory)
    tokenizer.save_pretrained(directory)
    name_portably(directory)
    path = directory / "config.json"
    settings = json.loads(path.read_text())
    settings.pop("time_step_limit", None)  # infinite by default, which is written in two ways
    path.write_text(json.dumps(settings, indent=2) + "\n")


def name_portably(directory: Path) -> None:
    """Name what a saved tokenizer is and has in the words of transformers 4, which 5 reads too."""
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings.pop("backend", None)
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    special = settings.pop("extra_special_tokens", None)
    if special:
        settings["additional_special_tokens"] = special
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def loading(name: str) -> str:
    """How the card of a language model in ``tutorials/models`` loads it."""
    return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("tutorials/models/{name}").eval()
tokenizer = AutoTokenizer.from_pretrained("tutorials/models/{name}")
```"""


def save_and_judge(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    directory: Path,
    evaluate: Callable[[PreTrainedModel], dict[str, Any]],
    card: Callable[[dict[str, Any]], str],
) -> None:
    """Save, and judge what was written, on the code that others will run, not what is in memory.

    ``evaluate`` takes the model as it was saved to its metrics, and ``card`` these to the text of
    the README.md, next to the checkpoint in ``directory``.
    """
    save_portably(model, tokenizer, directory)
    saved = type(model).from_pretrained(directory, local_files_only=True).eval()
    metrics = evaluate(saved)
    print(metrics)
    (directory / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    (directory / "README.md").write_text(card(metrics))
