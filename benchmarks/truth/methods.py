"""The entrants: each is one function from a model, inputs and targets to relevance.

    def method(model, inputs, target):
        return relevance

``inputs`` are token ids ``(B, L)`` or numbers ``(B, ...)``, and ``target (B,)`` is the entry of the
output that is explained: of the logits ``(B, C)``, or of ``(B, L, V)`` at the last token. Relevance
has the shape of the inputs, or ``(B, U)`` by unit. A positive number supports the target.
"""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from captum import attr as captum
from torch import Tensor, nn

import captum_ssm
from captum_ssm.interventions import TokenKnockout

from . import models
from .task import logits_of

Method = Callable[[nn.Module, Tensor, Tensor], Tensor]


def ours(method: type, **options: Any) -> Method:
    """A method of this library."""

    def relevance(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        found: Tensor = method(model).attribute(inputs, target=target, **options)
        return found

    return relevance


def knockout(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    """What the answer's logit loses when later tokens no longer read a token.

    Raises:
        ValueError: for typeseg. Each of its many runs would measure its mixers anew, for hours.
    """
    if isinstance(model, models.AskedCharacter):
        raise ValueError("left out for its cost: hours")
    tokens = TokenKnockout(model)
    return tokens.attribute(inputs, target=target, formulation="unified", perturbations_per_eval=16)


@contextmanager
def embedded(model: nn.Module, inputs: Tensor) -> Iterator[tuple[Callable[..., Tensor], Tensor]]:
    """A function of numbers, and the numbers: a text's embeddings, or the inputs themselves."""
    if inputs.is_floating_point():
        yield lambda x: logits_of(model(x)), inputs
        return
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    given: list[Tensor] = []
    with embedding.register_forward_hook(lambda *_: given[0] if given else None):

        def forward(x: Tensor) -> Tensor:
            given[:] = [x]
            blank = torch.zeros(x.shape[:2], dtype=torch.long)
            return logits_of(model(blank))

        yield forward, embedding(inputs).detach()


def by_gradient(method: type, **options: Any) -> Method:
    """A method of Captum that takes gradients, with Captum's own defaults: from a baseline of 0."""

    def relevance(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        with embedded(model, inputs) as (forward, x), torch.enable_grad():
            found = method(forward).attribute(x.requires_grad_(), target=target, **options)
        return found if inputs.is_floating_point() else found.sum(-1)

    return relevance


def by_removal(method: type, **options: Any) -> Method:
    """A method of Captum that removes units: a token, a patch, a frame becomes ``model.blank``."""

    def relevance(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        units: Any = model.units
        units = units[: inputs.shape[1]] if units.dim() == 1 else units
        removing = method(lambda x: logits_of(model(x)))
        rows = [
            removing.attribute(
                row[None],
                target=one[None],
                feature_mask=units[None].contiguous(),  # Captum takes views of it
                baselines=model.blank,
                **options,
            )
            for row, one in zip(inputs, target, strict=True)
        ]
        found = torch.cat(rows)
        # Each entry has its unit's number; sums over units count it once.
        sizes = units.flatten().bincount()[units]
        return found / sizes

    return relevance


def random(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    """Normal noise."""
    return torch.randn(inputs.shape)


def later(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    """The later (of an image: the lower) a unit stands, the more it has."""
    units: Any = model.units
    units = units[: inputs.shape[1]] if units.dim() == 1 else units
    sizes = units.flatten().bincount()[units]
    return ((1.0 + units) / sizes).expand(inputs.shape)


def looks(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    """What meets the eye: the last token that is the answer, the largest value, the brightest."""
    if inputs.is_floating_point():
        return inputs
    order = 1 + torch.arange(inputs.shape[1]) / inputs.shape[1]
    return (inputs == target[:, None]) * order + order / 1000


def _methods() -> dict[str, Method]:
    c = captum_ssm
    unified, attribution = c.UnifiedImplicitAttention, c.MambaAttribution
    found = {
        "MambaLRP": ours(c.MambaLRP),
        "LaTIM": ours(c.LaTIM),
        "LaTIM, silu (paper)": ours(c.LaTIM, activation="silu"),
        "LaTIM, flow_logit": ours(c.LaTIM, aggregation="flow_logit"),
        "LaTIM, alti, last layer": ours(c.LaTIM, aggregation="alti", layer=-1),
        "LaTIM, l2, last layer": ours(c.LaTIM, aggregation="l2", layer=-1),
        "UnifiedImplicitAttention": ours(unified),
        "Unified, rollout": ours(unified, aggregation="rollout"),
        "Unified, raw": ours(unified, aggregation="raw"),
        "MambaAttribution": ours(attribution),
        "MambaRollout": ours(c.MambaRollout),
        "MambaRollout, absolute": ours(c.MambaRollout, sign="absolute"),
        "RawAttention": ours(c.RawAttention),
        "RawAttention, absolute": ours(c.RawAttention, sign="absolute"),
        "TokenKnockout": knockout,
        "InputXGradient (Captum)": by_gradient(captum.InputXGradient),
        "Saliency (Captum)": by_gradient(captum.Saliency),
        "IntegratedGradients (Captum)": by_gradient(
            captum.IntegratedGradients, internal_batch_size=64
        ),
        "FeatureAblation (Captum)": by_removal(captum.FeatureAblation, perturbations_per_eval=64),
        "ShapleyValueSampling (Captum)": by_removal(
            captum.ShapleyValueSampling, n_samples=5, perturbations_per_eval=64
        ),
        "random": random,
        "position: later": later,
        "same token, brightness": looks,
    }
    return found


METHODS = _methods()
HEURISTICS = ("random", "position: later", "same token, brightness")
SLOW = ("TokenKnockout", "ShapleyValueSampling (Captum)")  # not part of the quick run


class UsageError(ValueError):
    """A command line that names what there is not."""


def from_file(place: str) -> tuple[str, Any]:
    """A function of a file, ``path/to/file.py:function``, with its name.

    An error of the function is printed with its traceback, of which a record keeps the last line.

    Raises:
        UsageError: for a place without a file or without such a function in it.
    """
    path, _, name = place.rpartition(":")
    if not path:
        raise UsageError(f"the function is {place!r}; expected path/to/file.py:function.")
    if not Path(path).is_file():
        raise UsageError(f"{place!r}: there is no file {path}; expected path/to/file.py:function.")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise UsageError(f"{path} has no function {name!r}; expected one of its functions.")

    def told(*args: Any) -> Any:
        try:
            return function(*args)
        except Exception:
            traceback.print_exc()
            raise

    return name, told


def relevance_of(
    method: Method, task: Any, model: nn.Module, inputs: Tensor, target: Tensor
) -> Tensor:
    """Relevance by unit ``(B, U)``, of finite numbers.

    Raises:
        TypeError: for relevance that is not a tensor.
        ValueError: for relevance of another shape, or that is not finite.
    """
    found = method(model, inputs.clone(), target.clone())
    if not isinstance(found, Tensor):
        raise TypeError(f"the method returned {type(found).__name__}; expected a tensor.")
    found = found.detach()
    units = int(task.units_of(inputs).max()) + 1
    if found.shape == (len(inputs), units):
        by_unit = found.double()
    elif found.shape == inputs.shape:
        by_unit = task.per_unit(found)
    else:
        raise ValueError(
            f"the relevance has shape {tuple(found.shape)}; expected that of the inputs, "
            f"{tuple(inputs.shape)}, or one number per unit, {(len(inputs), units)}."
        )
    if not bool(torch.isfinite(by_unit).all()):
        raise ValueError("the relevance holds NaN or Inf; expected finite numbers.")
    return by_unit
