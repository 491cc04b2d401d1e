"""Metrics of layers: knockout, similarity of tokens, influence by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from captum_ssm._capture import unwrap
from captum_ssm._hidden_attention import hidden_attention
from captum_ssm._nested import first_of, with_first
from captum_ssm.metrics.perturbation import classes, read_logits
from captum_ssm.mixers import find_mixers


def layer_knockout(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Tensor,
    *,
    model: Any = None,
    layers: Sequence[str] | None = None,
    replacement: str = "zero",
    batch_size: int | None = None,
) -> dict[str, Tensor]:
    """How much the target's score drops when a mixer is knocked out: a causal check.

    As in Meng et al. (2022) and, for Mamba, Sharma et al. (2024). The residual stream is kept.

    Args:
        forward_func (Callable): inputs to logits ``(B, V)``.
        inputs (Tensor): of any form the model takes.
        target (Tensor): ``(B,)``, the class whose logit is the score.
        model (nn.Module, optional): the model that ``forward_func`` runs, if it is a function.
            Default: None
        layers (sequence of str, optional): paths of mixers, which are knocked out one at a
            time; None for all known mixers. Default: None
        replacement (str, optional): what replaces a mixer's output, ``"zero"`` or its ``"mean"``
            over the batch and its tokens. Default: ``"zero"``
        batch_size (int, optional): examples run at once; None for all. Default: None

    Returns:
        dict: by path, ``(B,)``: the score of the whole model minus the score without the layer,
        in logits.

    Raises:
        ValueError: for layers that are not mixers of the model, or an unknown ``replacement``.
            Other errors are those of :func:`perturbation`.

    Examples::

        >>> last = lambda ids: model(ids).logits[:, -1]
        >>> found = layer_knockout(last, input_ids, torch.tensor([token]), model=model)
        >>> list(found)
        ['backbone.layers.0.mixer', 'backbone.layers.1.mixer']
    """
    if replacement not in ("zero", "mean"):
        raise ValueError(f"replacement is {replacement!r}; expected 'zero' or 'mean'.")
    root = unwrap(forward_func if model is None else model)
    mixers = dict(find_mixers(root))
    chosen = list(mixers) if layers is None else list(layers)
    unknown = [path for path in chosen if path not in mixers]
    if unknown or not chosen:
        raise ValueError(f"layers holds {unknown or 'nothing'}; expected some of {list(mixers)}.")

    def score() -> Tensor:
        with torch.no_grad():
            parts = inputs.split(len(inputs) if batch_size is None else batch_size)
            logits = torch.cat([read_logits(forward_func(part)) for part in parts])
        return logits.gather(1, classes("target", target, logits)[:, None])[:, 0]

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        first = first_of(output)
        if first is not output:
            return with_first(output, hook(module, args, first))
        if replacement == "zero":
            return torch.zeros_like(output)
        return output.flatten(0, -2).mean(0).expand_as(output)

    whole, drops = score(), {}
    for path in chosen:
        with mixers[path].register_forward_hook(hook):
            drops[path] = whole - score()
    return drops


def token_similarity(tokens: Tensor) -> Tensor:
    r"""How alike the tokens of a layer are (Ali et al., appendix: oversmoothing).

    .. math::
        M = \frac{2}{L (L - 1)} \sum_{i < j} \frac{h_i^\top h_j}{\|h_i\| \|h_j\|}

    Args:
        tokens (Tensor): h, ``(B, L, E)``, L at least 2.

    Returns:
        Tensor: ``(B,)``, in [-1, 1]; 1 if all tokens point in the same direction.

    Raises:
        ValueError: for tokens of another shape, or fewer than two.

    Examples::

        >>> [round(float(m), 3) for m in token_similarity(torch.ones(2, 5, 3))]
        [1.0, 1.0]
    """
    L = tokens.shape[1]
    if tokens.dim() != 3 or L < 2:
        raise ValueError(f"tokens have shape {tuple(tokens.shape)}; expected (B, L, E), L > 1.")
    unit = nn.functional.normalize(tokens.double(), dim=-1)
    # The sum over all pairs is the square of the sum; a zero vector has similarity 0 to all.
    total = unit.sum(1).square().sum(-1) - unit.square().sum((1, 2))
    return total / (L * (L - 1))


def oversmoothing(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    *,
    model: Any = None,
    leave_out: Sequence[int] = (),
) -> dict[str, Tensor]:
    """:func:`token_similarity` after every block, in forward order: ``{path: (B,)}``.

    A block is the module that holds a known mixer. The tokens are its output, or the first
    tensor of its output.

    Args:
        forward_func (Callable): runs the model on the inputs.
        inputs, model: as for :func:`layer_knockout`.
        leave_out (sequence of int, optional): tokens that are not compared; the paper excludes
            the CLS token. Default: none

    Raises:
        ValueError: if fewer than two tokens are left to compare.

    Examples::

        >>> list(oversmoothing(model, input_ids))
        ['backbone.layers.0', 'backbone.layers.1']
    """
    root = unwrap(forward_func if model is None else model)
    excluded = list(leave_out)
    found: dict[str, Tensor] = {}

    def compare(block: str, module: nn.Module, args: Any, output: Any) -> None:
        first = first_of(output)
        gone = {t % first.shape[1] for t in excluded}
        kept = [t for t in range(first.shape[1]) if t not in gone]
        found[block] = token_similarity(first.detach()[:, kept])

    with ExitStack() as hooks, torch.no_grad():
        for path, _ in find_mixers(root):
            block = path.rpartition(".")[0]
            handle = root.get_submodule(block).register_forward_hook(partial(compare, block))
            hooks.enter_context(handle)
        forward_func(inputs)
    return found


def cls_influence(
    model: Any, inputs: Tensor, position: int, *, batch_size: int | None = None, **options: Any
) -> dict[str, Tensor]:
    """The influence of all tokens on one; its mean over inputs is Ali et al.'s figure 2.

    Args:
        model (nn.Module): the model.
        inputs, batch_size: as for :func:`layer_knockout`.
        position (int): the token that is influenced, such as the CLS token of a vision model.
        **options: of :func:`captum_ssm.hidden_attention`, such as ``formulation``.

    Returns:
        dict: by path of a mixer, ``(B, L)``: the magnitude of its row at ``position``.

    Raises:
        ValueError, TypeError: as for :func:`captum_ssm.hidden_attention`.

    Examples::

        >>> found = cls_influence(model, input_ids, 3)
        >>> found["backbone.layers.0.mixer"].mean(0).shape
        torch.Size([7])
    """
    parts = [
        hidden_attention(model, part, reduction="mean", rows=position, **options)
        for part in inputs.split(len(inputs) if batch_size is None else batch_size)
    ]
    return {path: torch.cat([maps[path][:, 0] for maps in parts]).abs() for path in parts[0]}


def position_bias(influence: Tensor, position: int) -> Tensor:
    """Rank correlation between influence and nearness along the sequence (Spearman's rho).

    Args:
        influence (Tensor): ``(..., L)``, of each token on the token at ``position``, which is
            itself excluded.
        position (int): the token that is influenced.

    Returns:
        Tensor: ``(...)``, in [-1, 1]; 1 if a nearer token always has more influence, 0 for no
        bias.

    Raises:
        ValueError: for a position outside the sequence.

    Examples::

        >>> position_bias(torch.tensor([0.1, 0.2, 0.3, 9.0]), 3)
        tensor(1.)
    """
    L = influence.shape[-1]
    if not -L <= position < L:
        raise ValueError(f"position is {position}; expected -{L} .. {L - 1}, for {L} tokens.")

    from scipy.stats import rankdata

    distance = np.arange(L) - position % L
    others = distance != 0
    values = influence.detach().double().cpu().numpy()[..., others]
    ranks = (torch.from_numpy(rankdata(v, axis=-1)) for v in (-np.abs(distance[others]), values))
    x, y = (r - r.mean(-1, keepdim=True) for r in ranks)
    # Pearson's correlation of the ranks, 0 if they are all equal.
    return nn.functional.cosine_similarity(x, y, dim=-1).to(influence.device, torch.float32)
