"""Activation and pruning of reviews on IMDB (Ali et al., appendix A; Zimerman et al., appendix C).

    python benchmarks/papers/imdb.py --limit 500

Explained is the true class by a Mamba-130m fine-tuned on IMDB. Activation: from a review of UNK the
most relevant tokens come back first, and the area under the probability of the true class (AUAC)
is the score. Pruning: the least relevant tokens, by magnitude, become UNK first, and the area
under the mean squared change of the logits (AU-MSE) is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from explanations import chosen, of_this_library, of_token_ids
from harness import dataset, options, processes, report, required
from text import padded, unknown_id
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, MambaConfig, MambaModel

from captum_ssm.metrics import activation, evaluate, pruning

CHECKPOINT = "trinhxuankhai/mamba_text_classification"
COLUMNS = {"activation": ("AUAC ↑", 1), "pruning": ("AU-MSE ↓", 1)}
NOTES = (
    "Area under the probability of the true class as tokens come back (AUAC) and under the mean "
    "squared change of the logits as they go (AU-MSE), with 95% bootstrap intervals over reviews. "
    "The papers show curves only (Ali et al., figure 5; Zimerman et al., figure 6), no numbers: "
    "the curves are in the .json."
)


class MeanPooledMamba(nn.Module):
    """A Mamba whose tokens are averaged and classified, as the checkpoint of both papers does.

    Args:
        config (MambaConfig): of the backbone.
        classes (int): how many logits.
    """

    def __init__(self, config: MambaConfig, classes: int) -> None:
        super().__init__()
        self.backbone = MambaModel(config)
        self.classification_head = nn.Linear(config.hidden_size, classes)

    @classmethod
    def from_folder(cls, folder: Path) -> MeanPooledMamba:
        """The published format: mamba_ssm's config.json and names of weights."""
        config = json.loads((folder / "config.json").read_text())
        pytorch = folder / "pytorch_model.bin"
        if pytorch.is_file():
            state = torch.load(pytorch, map_location="cpu", weights_only=True)
        else:
            state = required("safetensors.torch").load_file(folder / "model.safetensors")
        names = {"backbone.embedding.": "backbone.embeddings."}
        names["classification_head.classification_head."] = "classification_head."
        for old, new in names.items():
            state = {key.replace(old, new): value for key, value in state.items()}
        (vocabulary, width) = state["backbone.embeddings.weight"].shape
        inner, rank = state["backbone.layers.0.mixer.dt_proj.weight"].shape
        model = cls(
            MambaConfig(
                vocab_size=vocabulary,
                hidden_size=width,
                num_hidden_layers=config["n_layer"],
                state_size=state["backbone.layers.0.mixer.A_log"].shape[1],
                expand=inner // width,
                time_step_rank=rank,
                conv_kernel=state["backbone.layers.0.mixer.conv1d.weight"].shape[-1],
                residual_in_fp32=config.get("residual_in_fp32", True),
            ),
            len(state["classification_head.bias"]),
        )
        model.load_state_dict(state)
        return model.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        """Logits ``(B, classes)`` of ids ``(B, L)``; padding does not count."""
        tokens = self.backbone(input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask[..., None].to(tokens.dtype)
        return SimpleNamespace(
            logits=self.classification_head((tokens * weights).sum(1) / weights.sum(1))
        )

    def get_input_embeddings(self) -> nn.Module:
        """Where token ids enter."""
        return self.backbone.get_input_embeddings()


def classifier(name: str) -> tuple[Any, Any]:
    """A fine-tuned model and its tokenizer, by folder or hub name.

    The format of the papers' checkpoint, or any that transformers knows as a classifier.
    """
    folder = Path(name)
    if not folder.is_dir():
        folder = Path(required("huggingface_hub").snapshot_download(name))
    config = json.loads((folder / "config.json").read_text())
    if "model_type" in config:
        model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    else:
        model = MeanPooledMamba.from_folder(folder)
    return model, AutoTokenizer.from_pretrained(folder)


def padding_id(model: Any, unknown: int) -> int:
    """What to fill shorter reviews up with.

    transformers' classifiers read the rightmost id that is not their configuration's padding,
    whatever the mask says; the papers' checkpoint goes by the mask, whatever the id.

    ``unknown`` is the id of removed tokens, which must not be taken for padding.
    """
    if isinstance(model, MeanPooledMamba):
        return unknown
    padding = model.config.get_text_config().pad_token_id
    if padding is None or padding == unknown:
        raise SystemExit(
            f"the model's pad_token_id is {padding} and removed tokens become {unknown}: "
            "it classifies at the last token that is not padding, so the two have to differ; "
            "set pad_token_id in its config.json to an id that reviews do not have."
        )
    return padding


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__)
    parser.add_argument("--checkpoint", default=CHECKPOINT, help="a folder or hub name")
    parser.add_argument("--data", default="stanfordnlp/imdb", help="hub name, folder or file")
    parser.add_argument("--split", default="test")
    parser.add_argument("--max-length", type=int, default=512, help="tokens of a review")
    parser.add_argument("--batch-size", type=int, default=8)
    args = parser.parse_args(arguments)
    accelerator = processes(args.cpu)
    model, tokenizer = classifier(args.checkpoint)
    model = model.to(accelerator.device)
    unknown = unknown_id(tokenizer)
    padding = padding_id(model, unknown)
    # The files are sorted by class.
    reviews = dataset(args.data, None, args.split, args.limit, seed=0)
    limits = {"truncation": True, "max_length": args.max_length}

    def logits(ids: Tensor, mask: Tensor) -> Tensor:
        return model(ids, attention_mask=mask).logits

    ours = {
        name: lambda ids, target, mask, method=method, options=options: method.attribute(
            ids, target, additional_forward_args={"attention_mask": mask}, **options
        )
        for name, (method, options) in of_this_library(model).items()
    }
    theirs = {
        name: lambda ids, target, mask, method=method: method(
            ids, target=target, additional_forward_args=(mask,)
        )
        for name, method in of_token_ids(logits, model.get_input_embeddings(), unknown).items()
    }
    scores, curves = {}, {}
    for name, method in chosen(ours | theirs, args.methods).items():

        def score(batch: list[dict[str, Any]], method: Any = method) -> dict[str, Any]:
            ids, mask = padded([tokenizer(r["text"], **limits).input_ids for r in batch], padding)
            ids, mask = ids.to(accelerator.device), mask.to(accelerator.device)
            labels = torch.tensor([r["label"] for r in batch], device=ids.device)
            relevance = method(ids, labels, mask).detach()
            run = (lambda x: logits(x, mask), ids, relevance)
            removal = {"removal": unknown, "mask": mask}
            return {
                "activation": activation(*run, labels, **removal),
                "pruning": pruning(*run, **removal),
            }

        found = evaluate(score, reviews, batch_size=args.batch_size, accelerator=accelerator)
        scores[name] = {key: curve.estimate() for key, curve in found.items()}
        curves[name] = {key: curve.mean().tolist() for key, curve in found.items()}
    about = {"checkpoint": args.checkpoint, "data": args.data, "reviews": len(reviews)}
    report(accelerator, args.output, "imdb", about, scores, {}, COLUMNS, NOTES, curves)


if __name__ == "__main__":
    main()
