"""Metrics of layers: knockout, similarity of tokens, influence by position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.capture import unwrap
from captum_ssm.inspection.implicit_attention import hidden_attention
from captum_ssm.interventions.selection import Layers, chosen_layers
from captum_ssm.metrics.agreement import rank_correlation
from captum_ssm.metrics.logits import batched_logits, classes
from captum_ssm.mixers import find_mixers
from captum_ssm.utils.clones import repeated
from captum_ssm.utils.copies import copied, original
from captum_ssm.utils.nested import first_of, with_first
from captum_ssm.utils.watch_modules import watch_modules


def layer_knockout(
    forward_func: Callable[..., Any],
    inputs: Tensor,
    target: Tensor,
    *,
    model: Any = None,
    layers: Layers = None,
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
        layers (int, str, slice or sequence, optional): mixers by index or path, which are knocked
            out one at a time; None for all known mixers. Default: None
        replacement (str, optional): what replaces a mixer's output, ``"zero"`` or its ``"mean"``
            over the batch and its tokens. Default: ``"zero"``
        batch_size (int, optional): examples run at once; None for all. Default: None

    Returns:
        dict: by path, ``(B,)``: the score of the whole model minus the score without the layer,
        in logits.

    Raises:
        UnsupportedModelError: the model holds no mixer that is known.
        ValueError: for layers that are not mixers of the model, or an unknown ``replacement``.
            Other errors are those of :func:`perturbation`.

    Examples::

        >>> last = lambda ids: model(ids).logits[:, -1]
        >>> result = layer_knockout(last, input_ids, torch.tensor([token]), model=model)
        >>> list(result)
        ['backbone.layers.0.mixer', 'backbone.layers.1.mixer']
    """
    if replacement not in ("zero", "mean"):
        raise ValueError(f"replacement is {replacement!r}; expected 'zero' or 'mean'.")
    network = unwrap(forward_func if model is None else model)
    mixers = chosen_layers(network, layers)

    @repeated
    def score() -> Tensor:
        with copied(network):
            logits = batched_logits(forward_func, (inputs,), batch_size)
        return logits.gather(1, classes("target", target, logits)[:, None])[:, 0]

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        first = first_of(output)
        if replacement == "zero":
            return with_first(output, torch.zeros_like(first))
        return with_first(output, first.flatten(0, -2).mean(0).expand_as(first))

    whole, drops = score(), {}
    for path, mixer in mixers.items():
        with watch_modules([mixer], after=hook):
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
    network = unwrap(forward_func if model is None else model)
    excluded = list(leave_out)
    similarity: dict[str, Tensor] = {}

    paths = [path.rpartition(".")[0] for path, _ in find_mixers(network)]
    blocks = {network.get_submodule(path): path for path in paths}

    def compare(block: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        first = first_of(output)
        gone = {t % first.shape[1] for t in excluded}
        compared = [t for t in range(first.shape[1]) if t not in gone]
        similarity[blocks[original(block)]] = token_similarity(first.detach()[:, compared])

    @repeated
    def run() -> None:
        with watch_modules(blocks, after=compare), copied(network), torch.no_grad():
            forward_func(inputs)

    run()
    return similarity


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

        >>> result = cls_influence(model, input_ids, 3)
        >>> result["backbone.layers.0.mixer"].mean(0).shape
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
    distance = (torch.arange(L) - position % L).abs()
    others = distance != 0
    rho = rank_correlation(-distance[others], influence.detach().cpu()[..., others])
    return rho.to(influence.device, torch.float32)
