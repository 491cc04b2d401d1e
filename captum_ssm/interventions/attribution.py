"""Attribution patching: the effects of patching to first order, for all activations at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from captum_ssm.attr.flow.activations import Activations, ActivationStandIns, coefficients_of
from captum_ssm.attr.relevance import coefficients_at
from captum_ssm.attr.relevance_stand_ins import with_leaves
from captum_ssm.capture import FrozenCall, exact_arithmetic, freeze
from captum_ssm.capture.recording import gradients_at
from captum_ssm.errors import UnsupportedModelError, brief
from captum_ssm.interventions.editing import edited
from captum_ssm.interventions.open_mixer import OpenMixer
from captum_ssm.interventions.patching import Pair, Patching, check_component
from captum_ssm.interventions.runs import Runs
from captum_ssm.interventions.selection import Layers
from captum_ssm.interventions.states import state_operator
from captum_ssm.mixers import FrozenMixer
from captum_ssm.mixers.memory import changes_of_state, states_of
from captum_ssm.utils.allocator import workspace
from captum_ssm.utils.offload import moved
from captum_ssm.utils.retry import retry_with_copies

RULES = ("gradient", "relp")


@workspace()
def attribution_patching(
    forward_func: Callable[..., Any],
    clean: Any,
    corrupted: Any,
    *,
    target: Any = None,
    position: Any = None,
    rule: str = "relp",
    components: Sequence[str] = ("output", "values"),
    layers: Layers = None,
    model: Any = None,
    additional_forward_args: Any = None,
    check: bool = True,
) -> dict[str, Patching]:
    r"""The effects of :func:`activation_patching` to first order: two runs and one backward pass.

    An activation's effect is what patching changes of it, times a coefficient of the score at it in
    the corrupted run. ``"gradient"``: the gradient (Nanda, attribution patching, 2023). ``"relp"``:
    the propagation coefficient of MambaLRP, the gradient of the network whose data-dependent parts
    are frozen (Jafari et al., `RelP <https://arxiv.org/abs/2508.21258>`_, 2025), which holds over
    larger changes.

    Args:
        forward_func, clean, corrupted, target, position: as for :func:`activation_patching`.
        layers, model, additional_forward_args, check (optional): as for it, too.
        rule (str, optional): ``"gradient"`` or ``"relp"``. Default: ``"relp"``
        components (sequence of str, optional): any of ``"output"``, ``"values"`` and ``"state"``.
            Default: ``("output", "values")``

    Returns:
        dict: a :class:`Patching` for each component.

    Raises:
        ValueError: for inputs that do not fit, an unknown rule, component or layer, or a mixer
            whose frozen operator does not reproduce its output.
        UnsupportedModelError: for a mixer that was measured, whose parts have no graph, and for
            ``"state"`` of a layer without a state that can be exchanged.

    Examples::

        >>> other = input_ids.clone()
        >>> other[0, 2] = 7
        >>> result = captum_ssm.interventions.attribution_patching(
        ...     model, input_ids, other, target=5
        ... )
        >>> result["values"].effects.shape
        torch.Size([1, 2, 7])
    """
    if rule not in RULES:
        raise ValueError(f"rule is {brief(rule)}; expected one of {RULES}.")
    wanted = [components] if isinstance(components, str) else list(components)
    for component in wanted:
        check_component(component)
    pair = Pair.of(forward_func, model, clean, corrupted, additional_forward_args, check)
    runs = Runs(pair.corrupted, target, position)
    with torch.no_grad():
        total = Runs(pair.clean, target, position).scores()[0] - runs.scores()[0]
    slopes_of = _gradients if rule == "gradient" else _coefficients
    slopes = retry_with_copies(lambda: slopes_of(pair, runs, check))
    by_name = [{layer.name: layer for layer in run.layers} for run in (pair.clean, pair.corrupted)]
    results = {}
    for component in wanted:
        names = [call.name for call in pair.calls(component, layers)]
        with exact_arithmetic():
            effects = [
                _effect(component, slopes[name], *(run[name] for run in by_name)) for name in names
            ]
        results[component] = Patching(torch.stack(effects, 1), total, names)
    return results


def _effect(
    component: str, slopes: Activations, clean: FrozenCall, corrupted: FrozenCall
) -> Tensor:
    # The effect of patching each token, (B, L).
    slopes = moved(slopes, slopes.output.device, clean.device)
    if component == "output":
        change = clean.call.output - corrupted.call.output
        return (change * slopes.output).reshape(*clean.shape, -1).sum(-1)
    theirs, mine = clean.mixer, corrupted.mixer
    if component == "state":
        return _state_effect(slopes.mixed[0], theirs, mine)
    effects = []
    scans = zip(theirs.scans_in_order(), mine.scans_in_order(), slopes.values, strict=True)
    for (source, order, _), (scan, _, _), slope in scans:
        effect = ((source.values - scan.values) * slope).sum(-1)
        effects.append(effect if order is None else effect[:, torch.argsort(order)])
    return torch.stack(effects).sum(0)


def _state_effect(mixed: Tensor, theirs: FrozenMixer, mine: FrozenMixer) -> Tensor:
    # The slope at the n-th state after a token: what a change of it alone would change.
    for mixer in (theirs, mine):
        state_operator(mixer)  # raises
    total = mixed.new_zeros(mixed.shape[:2])
    per_state = zip(changes_of_state(mine), states_of(theirs), states_of(mine), strict=True)
    for change, other, state in per_state:
        total += ((other - state) * change.rmatvec(mixed)).sum(-1)
    return total


def _gradients(pair: Pair, runs: Runs, check: bool) -> dict[str, Activations]:
    # Zeros with a gradient are added to each activation that is patched.
    zeros: dict[str, Activations] = {}

    def zero(x: Tensor) -> Tensor:
        return torch.zeros_like(x).requires_grad_()

    def edit(opened: OpenMixer) -> Tensor:
        scans = [scan for scan, _, _ in opened.mixer.scans_in_order()]
        here = zeros[opened.name] = Activations(
            opened.mixer,
            inputs=[zero(scan.inputs) for scan in scans],
            values=[zero(scan.values) for scan in scans],
            mixed=[zero(y) for y in opened.mixed],
            gated=zero(opened.gated),
            output=zero(opened.call.output),
        )
        parts = zip(scans, here.values, here.mixed, strict=True)
        returned = [scan.mix(scan.values + v) + y for scan, v, y in parts]
        return opened.returning_mixed(returned) + here.output

    with torch.inference_mode(False), torch.enable_grad():
        with edited(pair.model, None, edit, check=check):
            score = runs.scores()[0]
        gradients = coefficients_of([*zeros.values()], lambda x: gradients_at(x, score))
    return dict(zip(zeros, gradients, strict=True))


def _coefficients(pair: Pair, runs: Runs, check: bool) -> dict[str, Activations]:
    # The coefficients of MambaLRP at activations inside of the frozen mixers.
    request = with_leaves(pair.corrupted.request)
    rules = ActivationStandIns(request)
    frozen = freeze(
        request,
        position=runs.position,
        target=runs.target,
        query=False,
        also=rules.picks,
        substitution=rules,
        check=check,
        wiring=False,
    )
    names = [layer.name for layer in frozen.layers]
    inside = [activations for activations in rules.made_of if isinstance(activations, Activations)]
    if len(inside) != len(names):
        raise UnsupportedModelError(
            "a mixer of this model was measured, and runs as it is in relevance propagation, so "
            "its values have no coefficients; expected rule='gradient', or an adapter registered "
            "with captum_ssm.register_mixer(module_type, freeze)."
        )
    score, starts = frozen.require_score(), rules.starts()
    coefficients = coefficients_of(inside, lambda x: coefficients_at(x, score, starts))
    return dict(zip(names, coefficients, strict=True))
