"""The explanations that the papers compare, and Captum's, by the names the tables use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from captum.attr import (
    InputXGradient,
    IntegratedGradients,
    LayerGradientXActivation,
    LayerIntegratedGradients,
    Saliency,
)
from torch import Tensor, nn

from captum_ssm.attr import methods
from captum_ssm.models import VisionMamba

Explanation = Callable[[Tensor, Tensor], Tensor]
"""Images ``(B, 3, H, W)`` and classes ``(B,)`` to relevance in the images' shape."""


# The tables' rows: the name of a method and its options. "hidden" is Ali et al., "unified" Zimerman
# et al.
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "Raw attention, hidden": ("raw-attention", {}),
    "Raw attention, unified": ("unified", {"aggregation": "raw"}),
    "Rollout, hidden": ("rollout", {}),
    "Rollout, unified": ("unified", {"aggregation": "rollout"}),
    "Attribution, hidden": ("mamba-attribution", {}),
    "Attribution, unified": ("unified", {}),
    "LaTIM, ALTI-Logit": ("latim", {"activation": "gate"}),
    "MambaLRP": ("mamba-lrp", {}),
}


def of_this_library(forward_func: Any, model: Any = None) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Methods of this library and their options.

    The arguments are those of every method's constructor.
    """
    known = methods()
    return {row: (known[name](forward_func, model), opts) for row, (name, opts) in ROWS.items()}


def of_images(model: VisionMamba, baseline: Tensor | float) -> dict[str, Explanation]:
    """Explanations of a vision model; ``baseline`` is where integrated gradients start."""
    found: dict[str, Explanation] = {
        name: lambda x, t, method=method, options=options: method.attribute(x, t, **options)
        for name, (method, options) in of_this_library(model).items()
    }
    steps = {"n_steps": 32, "internal_batch_size": 256}

    def random_maps(x: Tensor, t: Tensor) -> Tensor:
        # Noise on the same grid of tokens and through the same interpolation as the methods' maps.
        size = (x.shape[-2], x.shape[-1])
        grid = model.token_grid(*size)
        tokens = torch.rand(len(x), int(grid.index.max()) + 1).to(x)
        return (grid.pixels(tokens, size) / x.shape[1])[:, None].expand_as(x)

    return found | {
        "Integrated gradients": lambda x, t: IntegratedGradients(model).attribute(
            x, torch.zeros_like(x) + baseline, target=t, **steps
        ),
        "Input x gradient": lambda x, t: InputXGradient(model).attribute(_leaf(x), target=t),
        "Saliency": lambda x, t: Saliency(model).attribute(_leaf(x), target=t),
        "Random maps": random_maps,
    }


def of_token_ids(
    forward_func: Callable[..., Tensor], embedding: nn.Module, unknown: int
) -> dict[str, Callable[..., Tensor]]:
    """Captum's methods on token ids, ``(B, L)`` to ``(B, L)``, through the embeddings.

    ``forward_func`` takes ids to scores, and runs ``embedding`` on them; ``unknown`` is the id that
    integrated gradients start from.
    """
    integrated = LayerIntegratedGradients(forward_func, embedding)
    product = LayerGradientXActivation(forward_func, embedding)
    gradient = LayerGradientXActivation(forward_func, embedding, multiply_by_inputs=False)
    steps = {"n_steps": 20, "internal_batch_size": 20}
    return {
        "Integrated gradients": lambda ids, **options: integrated.attribute(
            ids, torch.full_like(ids, unknown), **steps, **options
        ).sum(-1),
        "Input x gradient": lambda ids, **options: product.attribute(ids, **options).sum(-1),
        "Saliency": lambda ids, **options: gradient.attribute(ids, **options).abs().sum(-1),
        "Random scores": lambda ids, **options: torch.rand(ids.shape).to(ids.device),
    }


def chosen(methods: dict[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """The methods whose names hold one of ``names``, in any case of letters; None for all."""
    if names is None:
        return methods
    found = {
        name: method
        for name, method in methods.items()
        if any(part.lower() in name.lower() for part in names)
    }
    if not found:
        raise SystemExit(f"--methods {' '.join(names)}: none has such a name of {list(methods)}.")
    return found


def _leaf(x: Tensor) -> Tensor:
    return x.clone().requires_grad_()
