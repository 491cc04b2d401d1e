"""Rows with bad ones among them, and a tiny model that explains them."""

from typing import Any

from models import VOCABULARY, tiny, word_tokenizer

from captum_ssm import explain_dataset
from captum_ssm.explanation import ExplainedDataset

ROWS = 22
BAD: dict[int, Any] = {3: "", 8: None, 13: 7, 17: ["w3"]}


def rows() -> list[dict[str, Any]]:
    texts = [" ".join(f"w{3 + (5 * i + j) % 30}" for j in range(1 + i % 5)) for i in range(ROWS)]
    found = [
        {"text": text, "target": f"w{3 + i}", "year": 1990 + i, "list": [i]}
        for i, text in enumerate(texts)
    ]
    for i, bad in BAD.items():
        found[i]["text"] = bad
    return found


def explained(folder: Any, **options: Any) -> ExplainedDataset:
    tokenizer = word_tokenizer({f"w{i}": i for i in range(VOCABULARY)})
    asked = {"dataset": rows(), "rows_per_shard": 4, "maps": True} | options
    return explain_dataset(tiny(), tokenizer, output=folder, **asked)
