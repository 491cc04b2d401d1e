"""Which tokens, heads and layers an intervention is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from captum_ssm.capture import FrozenModel, Readout, unwrap
from captum_ssm.capture.model import listed_layers, mixer_index
from captum_ssm.errors import InputError, UnsupportedModelError, brief
from captum_ssm.mixers import find_mixers
from captum_ssm.utils.integers import as_integers, from_start

# Positions, negative from the end; a bool mask, (L,) or one row per example; None for all.
Tokens: TypeAlias = int | slice | Sequence[int] | Sequence[bool] | Tensor | None
Layers: TypeAlias = int | str | slice | Sequence[int | str] | None


def mask_of(
    what: str, chosen: Tokens, shape: tuple[int, int], device: torch.device, of: str = "tokens"
) -> Tensor:
    """The chosen tokens, heads or channels as a bool mask ``(B, L)``.

    ``chosen`` are integers, negative from the end, or bools; ``(L,)``, or one row per example. None
    chooses all. ``what`` and ``of`` name the argument, and what is chosen from, in errors.

    Raises:
        InputError: for integers outside, or of a wrong shape.
        TypeError: for anything else.
    """
    B, L = shape
    mask = torch.zeros(shape, dtype=torch.bool, device=device)
    if chosen is None:
        return ~mask
    if isinstance(chosen, slice):
        mask[:, chosen] = True
        return mask
    try:
        values = torch.as_tensor(chosen, device=device)
    except (TypeError, ValueError, RuntimeError):
        values = None
    if values is not None and values.numel() == 0:
        return mask
    if values is not None and values.dtype == torch.bool:
        if values.shape not in ((L,), (1, L), (B, L)):
            raise InputError(
                f"{what} is a mask of shape {tuple(values.shape)}; the layer is given {L} {of} in "
                f"{B} examples: expected ({L},) or ({B}, {L})."
            )
        return values.expand(B, L)
    index = None if values is None else as_integers(values, device)
    if index is None or index.dim() > 2:
        raise TypeError(
            f"{what} is {brief(chosen)}; expected an int, a slice, integers, a bool mask, or None "
            "for all."
        )
    if index.dim() == 2 and index.shape[0] not in (1, B):
        raise InputError(
            f"{what} has {index.shape[0]} rows for a batch of {B}; expected one row per example."
        )
    told = f"{what} holds {index.tolist()}, outside the {L} {of} of the layer"
    index = torch.atleast_2d(from_start(index, L, told)).expand(B, -1)
    return mask.scatter(1, index, True)


def run_layers(frozen: FrozenModel, layers: Layers) -> list[str]:
    """The paths of the mixers that :func:`chosen_layers` names; of None, those that were run.

    Raises:
        UnsupportedModelError: a mixer is named that was not run.
        ValueError: for a layer that is not there.
    """
    run = {layer.call.path: None for layer in frozen.layers}
    paths = list(chosen_layers(frozen.request.model, layers))
    missed = [path for path in paths if path not in run]
    if missed and layers is not None:
        raise UnsupportedModelError(
            f"{', '.join(missed)} did not run on these inputs; expected layers that do: name some "
            f"of {', '.join(run)}."
        )
    return [path for path in paths if path in run]


def chosen_layers(model: Any, layers: Layers) -> dict[str, nn.Module]:
    """The mixers named by index (in the order of the modules, negative from the end) or path.

    Those after the layer of a :class:`~captum_ssm.Readout` are not counted.

    Raises:
        UnsupportedModelError: the model holds no mixer that is known.
        ValueError: for a layer that is not there.
    """
    root = unwrap(model)
    not_run = root.later_modules() if isinstance(root, Readout) else ()
    mixers = {path: mixer for path, mixer in find_mixers(root) if mixer not in not_run}
    paths = list(mixers)
    if not paths:
        raise UnsupportedModelError(
            f"{type(unwrap(model)).__name__} holds no token mixer that captum_ssm knows yet. The "
            "mixers of a model without a registered one are found when it is run: call "
            "captum_ssm.supported(model, inputs) first."
        )
    if layers is None:
        return mixers
    wanted = listed_layers(range(len(paths))[layers] if isinstance(layers, slice) else layers)
    if not wanted:
        raise ValueError(f"layers is {brief(layers)}, which names none; expected at least one.")
    indices = (mixer_index(item, root, paths, "layers holds") for item in wanted)
    return {paths[index]: mixers[paths[index]] for index in indices}
