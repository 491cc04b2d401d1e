"""Patching: what a run would have been with some activations of another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from captum_ssm.capture import FrozenCall, FrozenModel, Request, freeze
from captum_ssm.errors import InputError, UnsupportedModelError
from captum_ssm.interventions.editing import edited
from captum_ssm.interventions.open_mixer import OpenMixer
from captum_ssm.interventions.runs import Runs, bar, times
from captum_ssm.interventions.selection import Layers, Tokens, mask_of, run_layers
from captum_ssm.interventions.states import has_operator, state_operator
from captum_ssm.mixers import FrozenMixer
from captum_ssm.operators import TokenOperator
from captum_ssm.operators.part import part_of
from captum_ssm.utils.allocator import workspace
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.integers import count_of
from captum_ssm.utils.offload import moved

COMPONENTS = ("output", "values", "state")


@dataclass(frozen=True)
class Patching:
    """What patching each layer at each token does to the score.

    Args:
        effects (Tensor): ``(B, W, L)``: the score of the corrupted run with a layer's activation
            at a token patched, minus that of the corrupted run.
        total (Tensor): ``(B,)``: the score of the clean run minus that of the corrupted one.
        layers (list of str): the paths of the W layers; of a mixer that runs several times,
            ``"path:k"`` is its call k, and its path the first one.

    Examples::

        >>> result = captum_ssm.interventions.activation_patching(
        ...     model, input_ids.flip(1), input_ids, target=5, layers=0, perturbations_per_eval=7
        ... )
        >>> result.shares.shape, list(result.rows())
        (torch.Size([1, 1, 7]), ['backbone.layers.0.mixer'])
    """

    effects: Tensor
    total: Tensor
    layers: list[str]

    @property
    def shares(self) -> Tensor:
        """The effects as shares of the total, ``(B, W, L)``."""
        return self.effects / self.total[:, None, None]

    def rows(self, example: int = 0) -> dict[str, Tensor]:
        """One example's effects by layer, ``(L,)`` each, as ``layer_overview`` takes them."""
        return dict(zip(self.layers, self.effects[example], strict=True))


@contextmanager
def patched(
    model: Any,
    inputs: Any,
    *,
    component: str = "output",
    layers: Layers = None,
    tokens: Tokens = None,
    additional_forward_args: Any = None,
    check: bool = True,
) -> Iterator[None]:
    r"""Run the model, inside the block, with activations that it has on other inputs.

    Args:
        model (nn.Module or nnsight model): the model that the block runs.
        inputs (Tensor or dict): where the activations come from, of the same batch and length as
            what the block runs on.
        component (str, optional): ``"output"``: what the mixer returns. ``"values"``: what its
            recurrence is given, :math:`v_t`; the coefficients stay those of the block's run.
            ``"state"``: the recurrence's state after a token, :math:`h_t`, as that token and later
            ones read it; of one token per example. Default: ``"output"``
        layers, check (optional): as for :func:`~captum_ssm.interventions.knockout`; of a mixer that
            runs several times, each call is patched with its own activation. Layers that do not run
            on ``inputs``, or keep no state, are left out of None.
        tokens (int, slice, sequence or Tensor, optional): the patched tokens, as ``sources`` there.
            Default: None, all
        additional_forward_args (Any, optional): further arguments of the model for ``inputs``.
            Default: None

    Raises:
        ValueError: for an unknown component, or a layer that is not there or is edited already.
        InputError: from the run, for activations of another shape, or tokens outside of it.
        UnsupportedModelError: for ``"state"`` of a layer without a state that can be exchanged.

    Examples::

        >>> other = input_ids.clone()
        >>> other[0, 2] = 7
        >>> with captum_ssm.interventions.patched(model, other, layers=0, tokens=2):
        ...     logits = model(input_ids).logits
    """
    frozen = _recorded(Request.of(model, None, inputs, additional_forward_args), check)
    calls = _patched_calls(frozen, component, layers)
    paths = [call.call.path for call in calls]
    with edited(model, paths, _patch(frozen, calls, component, tokens), check=check):
        yield


@workspace()
def activation_patching(
    forward_func: Callable[..., Any],
    clean: Any,
    corrupted: Any,
    *,
    target: Any = None,
    position: Any = None,
    component: str = "output",
    layers: Layers = None,
    model: Any = None,
    additional_forward_args: Any = None,
    perturbations_per_eval: int = 1,
    show_progress: bool = False,
    check: bool = True,
) -> Patching:
    """Activation patching: the corrupted run with one activation of the clean one, for each.

    One run for each layer and token, several at once in a batch. Positive effects move the score
    towards the clean run's where that is the higher one.

    Args:
        forward_func (nn.Module or Callable): what is explained.
        clean, corrupted (Tensor): inputs of the same shape, as for ``attribute``.
        target, position (optional): the score, as for ``attribute``. Default: None
        component, layers, check (optional): as for :func:`patched`.
        model (nn.Module, optional): the model that ``forward_func`` runs. Default: None
        additional_forward_args (Any, optional): further arguments, of both. Default: None
        perturbations_per_eval, show_progress (optional): as for
            :meth:`~captum_ssm.interventions.TokenKnockout.attribute`, by token.

    Returns:
        Patching: with effects ``(B, W, L)``.

    Raises:
        ValueError: for inputs that do not fit, an unknown component or layer, or a mixer whose
            frozen operator does not reproduce its output.
        UnsupportedModelError: for ``"state"`` of a layer without a state that can be exchanged.

    Examples::

        >>> other = input_ids.clone()
        >>> other[0, 2] = 7
        >>> result = captum_ssm.interventions.activation_patching(
        ...     model, input_ids, other, target=5, perturbations_per_eval=7
        ... )
        >>> result.effects.shape
        torch.Size([1, 2, 7])
    """
    pair = Pair.of(forward_func, model, clean, corrupted, additional_forward_args, check)
    calls = pair.calls(component, layers)
    runs = Runs(pair.corrupted, target, position)
    B, L = pair.corrupted.shape
    count = count_of("perturbations_per_eval", perturbations_per_eval, 1)
    rows = []
    with torch.no_grad(), bar("activation patching", len(calls) * L, show_progress) as done:
        total = Runs(pair.clean, target, position).scores()[0] - (
            corrupted_score := runs.scores()[0]
        )
        for call in calls:
            effects = []
            for tokens in torch.arange(L).split(count):
                k = len(tokens)
                at = tokens[:, None].repeat_interleave(B, 0)  # (k B, 1)
                edit = _patch(pair.clean, [call], component, at)
                with edited(pair.model, call.call.path, edit, check=check):
                    effects.append(runs.scores(k) - corrupted_score)
                done(k)
            rows.append(torch.cat(effects).T)
    return Patching(torch.stack(rows, 1), total, [call.name for call in calls])


@dataclass(frozen=True)
class Pair:
    """A clean and a corrupted run."""

    model: Any
    clean: FrozenModel
    corrupted: FrozenModel

    @classmethod
    def of(
        cls,
        forward_func: Callable[..., Any],
        model: Any,
        clean: Any,
        corrupted: Any,
        extra: Any,
        check: bool,
    ) -> Pair:
        """Both runs, of inputs of the same shape."""
        requests = [Request.of(forward_func, model, x, extra) for x in (clean, corrupted)]
        shapes = [tuple(request.inputs[0].shape) for request in requests]
        if shapes[0] != shapes[1]:
            raise InputError(
                f"clean has shape {shapes[0]} and corrupted {shapes[1]}; expected the same shape: "
                "token t of one takes the place of token t of the other."
            )
        return cls(requests[0].model, *(_recorded(request, check) for request in requests))

    def calls(self, component: str, layers: Layers) -> list[FrozenCall]:
        """The clean calls of the chosen layers, whose tokens have to be the model's."""
        calls = _patched_calls(self.clean, component, layers)
        for call in calls:
            if call.shape != self.clean.shape:
                raise UnsupportedModelError(
                    f"{call.name} works on other tokens than the last mixer; expected layers that "
                    "all read the same tokens. Name others in layers."
                )
        return calls


def check_component(component: str) -> None:
    """Raise for an unknown component."""
    if component not in COMPONENTS:
        raise ValueError(f"component is {component!r}; expected one of {COMPONENTS}.")


def _recorded(request: Request, check: bool) -> FrozenModel:
    return freeze(request, query=False, wiring=False, check=check)


def _patched_calls(frozen: FrozenModel, component: str, layers: Layers) -> list[FrozenCall]:
    # The calls of the chosen layers. None stands for those that run, and, for states, have one.
    check_component(component)
    paths = run_layers(frozen, layers)
    calls = [call for path in paths for call in frozen.layers if call.call.path == path]
    if component != "state" or layers is not None:
        return calls
    with_state = [call for call in calls if has_operator(state_operator, call.mixer)]
    if not with_state:
        raise UnsupportedModelError(
            f"component is 'state', and no layer of {', '.join(paths)} keeps a state that can be "
            "exchanged; expected a model with such a layer. Patch 'output' or 'values'."
        )
    return with_state


def _patch(
    frozen: FrozenModel, calls: Sequence[FrozenCall], component: str, tokens: Tokens
) -> Callable[[OpenMixer], Tensor]:
    by_path: dict[str, list[FrozenCall]] = {}
    for layer in frozen.layers:
        by_path.setdefault(layer.call.path, []).append(layer)
    chosen = {call.name for call in calls}

    def edit(opened: OpenMixer) -> Tensor:
        of_path, operator = by_path[opened.path], opened.mixer.recurrence
        layer = of_path[opened.visit % len(of_path)]
        if layer.name not in chosen:
            return opened.returned
        current, other = opened.call.output, layer.source.output
        k = current.shape[0] // other.shape[0]
        if current.shape != (other.shape[0] * k, *other.shape[1:]):
            raise InputError(
                f"{opened.path} returns a tensor of shape {tuple(current.shape)} in this run and "
                f"{tuple(other.shape)} in the one its activations come from; expected inputs of "
                "the same batch and length."
            )
        mask = mask_of("tokens", tokens, (operator.batch, operator.length), current.device)
        if component == "output":
            at = mask.view(*current.shape[:-1], 1)
            return torch.where(at, times(other, k), opened.returned)
        mixer = moved(layer.mixer, layer.device, current.device)
        if component == "state":
            return opened.returning_mixed(_with_state(opened, mixer, mask, k))
        scans = zip(mixer.scans_in_order(), opened.mixer.scans_in_order(), strict=True)
        mixed = []
        for (source, order, _), (scan, _, _) in scans:
            here = mask if order is None else mask[:, order]
            values = torch.where(here[..., None], times(source.values, k), scan.values)
            mixed.append(scan.mix(values))
        return opened.returning_mixed(mixed)

    return edit


def _with_state(opened: OpenMixer, other: FrozenMixer, mask: Tensor, k: int) -> list[Tensor]:
    # The state after a token is that of a scan whose coefficients and values, up to it, are the
    # other run's. It is read with this run's own coefficients.
    if not bool((mask.sum(1) == 1).all()):
        raise InputError(
            "tokens of a state are expected to be one per example: the state after a token holds "
            "all tokens before it."
        )
    current, theirs = state_operator(opened.mixer), state_operator(other)
    examples = torch.arange(theirs.batch, device=mask.device).repeat(k)
    theirs = part_of(theirs, examples, 0, theirs.channels)  # type: ignore[assignment]
    last = mask.int().argmax(1)[:, None]
    at = torch.arange(mask.shape[1], device=mask.device)
    before, after = at <= last, at >= last
    changed: dict[str, Any] = {}
    for name in current.written_by:
        here, there = getattr(current, name), getattr(theirs, name)
        if here is not None:
            mask_of_field = before.view(*before.shape, *[1] * (here.dim() - 2))
            changed[name] = torch.where(mask_of_field, there, here)
    if getattr(current, "bonus", None) is not None:
        after = at > last  # a token reads the state before its own write
    operator: TokenOperator = replace(current, **changed)  # type: ignore[type-var]
    v, skip = opened.mixer.values, opened.mixer.skip
    values = torch.where(before[..., None], times(other.values, k), v)
    y = operator.matvec(values)
    y = y if skip is None else torch.addcmul(y, skip, v)
    return [torch.where(after[..., None], y, opened.mixed[0])]
