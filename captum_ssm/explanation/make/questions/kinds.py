"""What a model of texts puts out: scores of tokens, of classes, or of spans of the text.

Nothing is assumed. The model is run on the first text, and the last axis of its output is compared
with the labels, the vocabulary, the width of the embeddings, and the module that made it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from captum_ssm.capture.model import extract_logits, input_embeddings, parameter_names
from captum_ssm.explanation.make.inputs.reading import TokenizedText
from captum_ssm.explanation.make.questions.base import SOFTMAX
from captum_ssm.explanation.make.questions.labels import configured, names_of
from captum_ssm.explanation.make.questions.observed import Observed, bound_logits, observed
from captum_ssm.explanation.make.relevance.run import Run
from captum_ssm.graph.relevance_rules import is_norm
from captum_ssm.utils.nested import first_of

LONGER = 4  # tokens that are added to a text, to see whether the model reads them

Kind = Literal["tokens", "classes", "labels", "spans"]


@dataclass(frozen=True)
class Task:
    """What a model puts out for a text.

    Args:
        kind (str): ``"tokens"`` is the next token at each one, ``"classes"`` one of them for the
            text, ``"labels"`` one for each token, ``"spans"`` where an answer starts and ends.
        run (Run): of the model.
        names (tuple of str, optional): of classes or labels. Default: ``()``
        probabilities (Callable, optional): of answers, from their logits ``(V,)``; None for numbers
            that are not logits. Default: softmax
        first (list of Observed, optional): the run on the text that told the kind, until it is
            taken. Default: ``[]``
    """

    kind: Kind
    run: Run
    names: tuple[str, ...] = ()
    probabilities: Callable[[Tensor], Tensor] | None = SOFTMAX
    first: list[Observed] = field(default_factory=list)

    def run_on(self, text: TokenizedText) -> Run:
        """The run on one text, with its token types."""
        arguments = arguments_of(self.run.module, text)
        return replace(self.run, named=arguments, media=text.media)


def task_of(
    module: nn.Module, text: TokenizedText, tokenizer: Any, labels: Any, is_one: bool = True
) -> Task:
    """What a model puts out, as its output for one text tells.

    ``is_one`` tells that there is no other text: where there are, texts of a language model that
    reads no later token are padded.

    Raises:
        ValueError: for an output that is none of these, such as hidden states.
    """
    ids = torch.tensor([text.ids], device=next(module.parameters()).device)
    run = Run(module, arguments_of(module, text), media=text.media)
    first = observed(run, ids)
    task = _told_by(first, run, ids, tokenizer, labels)
    if task.kind == "tokens" and not is_one:
        is_causal = _reads_no_later_token(run, ids, extract_logits(first.output))
        task = replace(task, run=replace(run, is_causal=is_causal))
    return replace(task, first=[first])


def _reads_no_later_token(run: Run, ids: Tensor, logits: Tensor) -> bool:
    # Whether logits (1, L, V) stay as they are where other tokens follow the text's L.
    L, likely = ids.shape[1], logits[0, -1].topk(2).indices
    longer = torch.cat([ids.expand(2, -1), likely[:, None].expand(-1, LONGER)], 1)
    try:
        with torch.no_grad():
            after = run(longer)[:, :L]
    except Exception:  # whatever the model raises
        return False
    return bool((after - logits).abs().max() <= 1e-4 * logits.abs().max())


def _told_by(first: Observed, run: Run, ids: Tensor, tokenizer: Any, labels: Any) -> Task:
    module = run.module
    if bound_logits(first.output, ids) is not None:
        return Task("spans", Run(module, read=_joined, takes_several=_takes_several(run, ids)))
    logits = extract_logits(first.output)
    axes = Axes(module, tokenizer, labels, first.maker)
    shape, L = tuple(logits.shape), ids.shape[1]
    if logits.dim() == 3 and shape[:2] == (1, L):
        return _per_token(run, axes, shape[2])
    if logits.dim() in (1, 2) and shape[0] == 1:
        return _per_text(run, axes, shape, ids)
    raise ValueError(
        f"the model returns an output of shape {shape} for ids of shape {tuple(ids.shape)}; "
        "expected logits (B, L, V) or (B, L, labels), one row per token, or (B, classes). Other "
        "outputs are explained by the methods' own attribute, with a target that selects one "
        "number: MambaLRP(model).attribute(ids, target=...). Of a model that puts several tokens "
        "in the place of an image's one, pass ids with a placeholder for each, if it takes them."
    )


def arguments_of(module: nn.Module, text: TokenizedText) -> dict[str, Tensor]:
    """The token types of a text, if the model takes them."""
    if not text.types or "token_type_ids" not in parameter_names(module):
        return {}
    return {"token_type_ids": torch.tensor([text.types])}


@dataclass(frozen=True)
class Axes:
    """What the last axis of a model's output may be.

    ``maker`` is the module that returned the very tensor that the model returns, if one did.
    """

    module: nn.Module
    tokenizer: Any
    labels: Any
    maker: nn.Module | None

    def are_labels(self, size: int) -> bool:
        """Whether there are so many names of classes."""
        labels = configured(self.module) if self.labels is None else self.labels
        return len(labels) == size

    def are_tokens(self, size: int) -> bool:
        """Whether the vocabulary has so many tokens."""
        config = getattr(self.module, "config", None)
        sizes = {getattr(config, "vocab_size", None), *self._tables("num_embeddings")}
        head = getattr(self.module, "get_output_embeddings", None)
        with_head = head() if callable(head) else None
        sizes.add(getattr(with_head, "out_features", None))
        if hasattr(self.tokenizer, "__len__"):
            sizes.add(len(self.tokenizer))
        return size in sizes

    def are_features(self, size: int) -> bool:
        """Whether the output is hidden states: as wide as embeddings, and not made by a head."""
        if self.maker is not None and is_norm(self.maker):
            return True
        return size in self._tables("embedding_dim") and not isinstance(self.maker, nn.Linear)

    def features(self, shape: str, size: int) -> ValueError:
        """The error for hidden states."""
        name = type(self.module).__name__
        return ValueError(
            f"{name} returns hidden states of shape {shape}, as wide as its embeddings, and not "
            "scores of tokens or labels; expected the whole model with its head, such as a "
            f"...ForCausalLM or ...ForSequenceClassification in place of its {name}. If the last "
            f"axis is classes, labels= names these {size}."
        )

    def _tables(self, side: str) -> set[int]:
        table = input_embeddings(self.module)
        tables = [part for part in self.module.modules() if isinstance(part, nn.Embedding)]
        return {
            getattr(embedding, side) for embedding in (table, *tables) if hasattr(embedding, side)
        }


def _per_token(run: Run, axes: Axes, size: int) -> Task:
    is_named = axes.labels is not None and axes.are_labels(size)
    if not is_named and axes.are_tokens(size) and not (axes.maker and is_norm(axes.maker)):
        return Task("tokens", run)
    if not is_named and not axes.are_labels(size) and axes.are_features(size):
        raise axes.features(f"(1, L, {size})", size)
    names = names_of(axes.labels, axes.module, size)
    return Task("labels", run, names, _probabilities(axes.module, size))


def _per_text(run: Run, axes: Axes, shape: tuple[int, ...], ids: Tensor) -> Task:
    size = shape[-1]
    if not axes.are_labels(size) and size > 1:
        if axes.are_features(size):
            raise axes.features(str(shape), size)
        if axes.are_tokens(size):
            raise ValueError(
                f"the model returns scores of shape {shape}, one per token of the vocabulary, for "
                "the last token alone; expected logits (B, L, V), one row per token."
            )
    names = names_of(axes.labels, axes.module, size)
    run = Run(
        run.module,
        read=extract_logits if len(shape) == 2 else lambda output: extract_logits(output)[:, None],
        takes_several=_takes_several(run, ids),
    )
    return Task("classes", run, names, _probabilities(axes.module, size))


def _probabilities(module: nn.Module, size: int) -> Callable[[Tensor], Tensor] | None:
    # As pipelines of transformers have it.
    problem = getattr(getattr(module, "config", None), "problem_type", None)
    if problem == "regression":
        return None
    is_each_alone = problem == "multi_label_classification" or size == 1
    return torch.sigmoid if is_each_alone else SOFTMAX


def _joined(output: Any) -> Tensor:
    # (B, 2, L), of starts and ends.
    pair = output if type(output) is tuple else (output["start_logits"], output["end_logits"])
    return torch.stack(pair, 1)


def _takes_several(run: Run, ids: Tensor) -> bool:
    # Some models cannot tell the padding of one text from that of another, and refuse several.
    two = ids.expand(2, -1)
    try:
        with torch.no_grad():
            output = run.module(two, **run.arguments(two))
    except Exception:  # whatever the model raises
        return False
    return len(first_of(output)) == 2
