"""Direct logit attribution: what each part of a model writes for an answer, by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from captum_ssm.attr.flow.direct import DirectRun
from captum_ssm.attr.flow.graph import check_texts
from captum_ssm.attr.flow.layer_edges import LayerEdges
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.utils.integers import example_index
from captum_ssm.utils.tables import text_table

KINDS = ("embedding", "recurrence", "attention", "mlp", "bias")
# The parts add up to what the stream holds, up to this share of the largest, in float32 and below.
_BALANCED = {torch.float64: 1e-6, torch.float32: 1e-4}
_BALANCED_IN_HALF = 5e-2


@dataclass(frozen=True, eq=False)
class Components:
    r"""What each part of a model writes directly for an answer.

    With MambaLRP's coefficient g at the residual stream after the last block, norms constant, and
    what each part adds to the stream, :math:`s = \sum_c \langle g, c \rangle + bias`. By token, an
    embedding and an MLP count for the token that they are written at, and a mixer for the tokens
    that it read it from: by its edges, with g in the place of the propagated coefficients. What its
    gate's argument takes by the half rule, its skip and its own biases stay at the token that
    reads.

    Args:
        names (list of str): C parts in forward order: "embedding", paths of modules, "bias".
        kinds (list of str): "embedding", "recurrence", "attention" (softmax), "mlp" for any other
            module that adds to the stream, and "bias" for the biases after the stream.
        values (Tensor): ``(B, C)``; they add up to the score.
        by_token (Tensor): ``(B, C, L)``, over the tokens they add up to the values.
        score (Tensor): ``(B,)``, what is explained.
        edges (dict of str to LayerEdges): by mixer's path, its direct edges: for rows and heads.
        error (float): the largest relative difference between the parts before the bias and what
            the stream after the last block says for the answer.

    Examples::

        >>> found = RelevanceFlow(model).components(input_ids, target=5)
        >>> found.names
        ['embedding', 'backbone.layers.0.mixer', 'backbone.layers.1.mixer', 'bias']
        >>> torch.allclose(found.values.sum(1), found.score, atol=1e-5)
        True
        >>> sorted(found.by_kind())
        ['bias', 'embedding', 'recurrence']
    """

    names: list[str]
    kinds: list[str]
    values: Tensor = field(repr=False)
    by_token: Tensor = field(repr=False)
    score: Tensor
    edges: dict[str, LayerEdges] = field(repr=False)
    error: float

    def by_kind(self) -> dict[str, Tensor]:
        """What all parts of a kind write together, ``(B,)`` for each; they add up to the score."""
        return {
            kind: self.values[:, [k == kind for k in self.kinds]].sum(1)
            for kind in KINDS
            if kind in self.kinds
        }

    def shares(self) -> dict[str, Tensor]:
        """:meth:`by_kind` as shares of the score, ``(B,)`` for each, which add up to one.

        A share is above one, or below zero, where kinds oppose each other.
        """
        return {kind: value / self.score for kind, value in self.by_kind().items()}

    def table(self, example: int = 0, tokens: Sequence[str] | None = None) -> str:
        """The parts of one example as a table, each with the two tokens that it says most of.

        Args:
            example (int, optional): which of the batch. Default: 0
            tokens (sequence of str, optional): the texts of the tokens. Default: their indices

        Raises:
            InputError: for an example outside the batch, or another number of texts than of tokens.
        """
        example = example_index(example, len(self.score))
        L = self.by_token.shape[-1]
        texts = [f"[{t}]" for t in range(L)]
        if tokens is not None:
            check_texts(tokens, L, "the table")
            texts = [f"{repr(word)[1:-1]} {at}" for word, at in zip(tokens, texts, strict=True)]
        score = float(self.score[example])
        rows = [("part", "kind", "writes", "share", "for the tokens")]
        values, by_token = self.values[example].tolist(), self.by_token[example]
        for name, kind, value, at in zip(self.names, self.kinds, values, by_token, strict=True):
            best = at.abs().topk(min(2, L)).indices.tolist()
            told = ", ".join(f"{texts[t]} {float(at[t]):+.2f}" for t in best if at[t] != 0)
            rows.append((name, kind, f"{value:+.3f}", f"{_share(value, score):+.0%}", told))
        rows += [
            (f"all {kind}", "", f"{float(value[example]):+.3f}", f"{share:+.0%}", "")
            for kind, value in self.by_kind().items()
            if self.kinds.count(kind) > 1
            for share in [_share(float(value[example]), score)]
        ]
        rows.append(("score", "", f"{score:+.3f}", "", ""))
        return "\n".join(text_table(rows, right=(2, 3)))

    def __str__(self) -> str:
        return self.table()


def _share(value: float, score: float) -> float:
    return value / score if score else math.nan


def components_of(run: DirectRun, layers: Sequence[LayerEdges], score: Tensor) -> Components:
    """The parts of a run that write for its score.

    Raises:
        UnsupportedModelError: for a stream that is not a sum of what the parts write.
    """
    run.check()
    device, score = layers[0].out.device, score.detach().to(layers[0].out.device)
    after = run.total(run.streams[-1].after).to(device)
    names, kinds, rows = [], [], []
    written = torch.zeros_like(after)
    for part, coefficient in run.parts:
        if isinstance(part, int):
            layer = layers[part]
            without_edges = layer.skip + layer.gate + layer.bias
            names.append(layer.name)
            kinds.append(layer.kind)
            rows.append((layer.out_of + without_edges).double())
            written = written + layer.out.double()
        elif coefficient is not None and bool(coefficient.any()):
            names.append(part.path)
            kinds.append("mlp")
            rows.append(_by_token(coefficient, part.output, after))
            written = written + rows[-1]
    embedding = run.total(run.streams[0].before).to(device)
    if not run.begins_plainly():  # a norm of the embeddings, with its bias, is a part of them
        embedding = after - written
    error = _relative(after.sum(1) - written.sum(1) - embedding.sum(1), [embedding, *rows])
    _check_balance(error, run.streams[-1].after[0].dtype)
    bias = score.double() - after.sum(1)
    reads = (run.at_streams[id(run.streams[-1].after[0])].flatten(2) != 0).any(-1).to(after)
    rows = [embedding, *rows, bias[:, None] * reads / reads.sum(1, keepdim=True).clamp(min=1)]
    by_token = torch.stack(rows, 1).to(torch.promote_types(score.dtype, torch.float32))
    return Components(
        ["embedding", *names, "bias"],
        ["embedding", *kinds, "bias"],
        by_token.sum(2),
        by_token,
        score,
        {layer.name: layer for layer in layers},
        error,
    )


def _by_token(coefficient: Tensor, x: Tensor, like: Tensor) -> Tensor:
    # (B, L), of what a module returned, (B, L, E) or (B * L, E).
    product = coefficient.double() * x.detach().double()
    return product.reshape(*like.shape, -1).sum(-1).to(like.device)


def _relative(difference: Tensor, rows: Sequence[Tensor]) -> float:
    scale = max(float(row.sum(1).abs().amax()) for row in rows)
    return float(difference.abs().amax()) / max(scale, 1e-30)


def _check_balance(error: float, dtype: torch.dtype) -> None:
    if error > _BALANCED.get(dtype, _BALANCED_IN_HALF):
        raise UnsupportedModelError(
            f"what the mixers, MLPs and the embedding write for the answer misses {error:.0%} of "
            "what the residual stream says for it after the last block, so something else writes "
            "to the stream; expected blocks that return what they are given plus what their mixers "
            "and MLPs return. Follow the relevance from layer to layer instead: "
            "RelevanceFlow.edges."
        )
