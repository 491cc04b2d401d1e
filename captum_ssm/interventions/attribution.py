"""Attribution patching: the effects of patching to first order, for all activations at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from captum_ssm._capture import FrozenLayer, Request, exact_arithmetic, freeze
from captum_ssm._capture.checking import Rebuilt
from captum_ssm._capture.recording import gradients_at
from captum_ssm._errors import UnsupportedModelError
from captum_ssm._workspace import workspace
from captum_ssm.attr._relevance import coefficients_at
from captum_ssm.attr.mamba_lrp import Rules, has_a_rule, with_leaves
from captum_ssm.interventions._editing import OpenMixer, edited
from captum_ssm.interventions._runs import Runs
from captum_ssm.interventions._selection import Layers
from captum_ssm.interventions.patching import Pair, Patching, check_component, state_operator
from captum_ssm.interventions.states import states_of
from captum_ssm.mixers import FrozenMixer, MixerCall
from captum_ssm.operators import DiagonalOperator, TokenOperator

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
        >>> found = captum_ssm.interventions.attribution_patching(
        ...     model, input_ids, other, target=5
        ... )
        >>> found["values"].effects.shape
        torch.Size([1, 2, 7])
    """
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}; expected one of {RULES}.")
    wanted = [components] if isinstance(components, str) else list(components)
    for component in wanted:
        check_component(component)
    pair = Pair.of(forward_func, model, clean, corrupted, additional_forward_args, check)
    runs = Runs(pair.corrupted, target, position)
    with torch.no_grad():
        total = Runs(pair.clean, target, position).scores()[0] - runs.scores()[0]
    slopes = (_gradients if rule == "gradient" else _coefficients)(pair, runs, check)
    by_name = [{layer.name: layer for layer in run.layers} for run in (pair.clean, pair.corrupted)]
    found = {}
    for component in wanted:
        names = pair.layers(component, layers)
        with exact_arithmetic():
            effects = [
                _effect(component, slopes[name], *(run[name] for run in by_name)) for name in names
            ]
        found[component] = Patching(torch.stack(effects, 1), total, names)
    return found


@dataclass(frozen=True)
class _Slopes:
    """Coefficients of the score in one layer.

    Args:
        output (Tensor): at what the mixer returns, ``(B, L, E)``.
        values, mixed (list of Tensor): at what each scan is given and returns, ``(B, L, D)``, in
            the scan's order.
    """

    output: Tensor
    values: list[Tensor]
    mixed: list[Tensor]

    @property
    def leaves(self) -> list[Tensor]:
        return [self.output, *self.values, *self.mixed]

    def holding(self, others: Iterator[Tensor]) -> _Slopes:
        """The same with other tensors, in the order of the leaves."""
        return _Slopes(
            next(others), [next(others) for _ in self.values], [next(others) for _ in self.mixed]
        )


def _effect(component: str, slopes: _Slopes, clean: FrozenLayer, own: FrozenLayer) -> Tensor:
    # Of patching each token, (B, L).
    if component == "output":
        change = clean.call.output - own.call.output
        return (change * slopes.output).reshape(*clean.shape, -1).sum(-1)
    theirs, mine = clean.mixer, own.mixer
    if component == "state":
        return _state_effect(slopes.mixed[0], theirs, mine)
    found = []
    scans = zip(theirs.scans_in_order(), mine.scans_in_order(), slopes.values, strict=True)
    for (source, order, _), (scan, _, _), slope in scans:
        effect = ((source.values - scan.values) * slope).sum(-1)
        found.append(effect if order is None else effect[:, torch.argsort(order)])
    return torch.stack(found).sum(0)


def _state_effect(mixed: Tensor, theirs: FrozenMixer, mine: FrozenMixer) -> Tensor:
    # The slope at the n-th state after a token: what a write into it alone would change.
    operator = state_operator(mine)
    state_operator(theirs)
    total = mixed.new_zeros(mixed.shape[:2])
    changes = (a - b for a, b in zip(states_of(theirs), states_of(mine), strict=True))
    write: TokenOperator
    for n, change in enumerate(changes):
        if isinstance(operator, DiagonalOperator):
            unit = torch.zeros_like(operator.B)
            unit[..., n] = 1
            write = replace(operator, B=unit, right=torch.ones_like(operator.right))
        else:
            unit = torch.zeros_like(operator.key)
            unit[..., n] = 1
            bonus = None if operator.bonus is None else torch.zeros_like(operator.bonus)
            write = replace(operator, key=unit, bonus=bonus)
        total += (change * write.rmatvec(mixed)).sum(-1)
    return total


def _gradients(pair: Pair, runs: Runs, check: bool) -> dict[str, _Slopes]:
    # Zeros with a gradient, added where an activation is.
    leaves: dict[str, _Slopes] = {}

    def zeros(x: Tensor) -> Tensor:
        return torch.zeros_like(x).requires_grad_()

    def edit(found: OpenMixer) -> Tensor:
        scans = [scan for scan, _, _ in found.mixer.scans_in_order()]
        here = _Slopes(
            zeros(found.call.output),
            [zeros(scan.values) for scan in scans],
            [zeros(y) for y in found.mixed],
        )
        leaves[found.path] = here
        mixed = [
            scan.mix(scan.values + v) + y
            for scan, v, y in zip(scans, here.values, here.mixed, strict=True)
        ]
        gated = found.mixer.gated_output_of(mixed)
        own = found.call.output
        change = found.mixer.projected(gated) - found.output
        return own + change.reshape(own.shape).to(own.dtype) + here.output

    with torch.inference_mode(False), torch.enable_grad():
        with edited(pair.model, None, edit, check=check):
            score = runs.scores()[0]
        flat = [leaf for here in leaves.values() for leaf in here.leaves]
        found = iter(_or_zero(flat, gradients_at(flat, score)))
    return {name: here.holding(found) for name, here in leaves.items()}


def _coefficients(pair: Pair, runs: Runs, check: bool) -> dict[str, _Slopes]:
    # MambaLRP's, at activations inside of the frozen mixers.
    request = with_leaves(pair.corrupted.request)
    rules = _Kept(request)
    frozen = freeze(
        request,
        position=runs.position,
        target=runs.target,
        query=False,
        also=has_a_rule,
        substitution=rules,
        check=check,
        wiring=False,
    )
    names = [layer.name for layer in frozen.layers]
    if len(rules.kept) != len(names):
        raise UnsupportedModelError(
            "a mixer of this model was measured, and runs as it is in relevance propagation, so "
            "its values have no coefficients; expected rule='gradient', or an adapter registered "
            "with captum_ssm.register_mixer(module_type, freeze)."
        )
    flat = [leaf for here in rules.kept for leaf in here.leaves]
    coefficients = coefficients_at(flat, frozen.require_score(), rules.starts())
    found = iter(_or_zero(flat, coefficients))
    return {n: here.holding(found) for n, here in zip(names, rules.kept, strict=True)}


def _or_zero(leaves: list[Tensor], found: list[Tensor | None]) -> list[Tensor]:
    return [
        torch.zeros_like(leaf) if one is None else one
        for leaf, one in zip(leaves, found, strict=True)
    ]


class _Kept(Rules):
    # The rules of MambaLRP, with the activations inside of each mixer kept in the graph.
    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.kept: list[_Slopes] = []
        self.kept_bytes = math.inf

    def rebuilt(self, mixer: FrozenMixer, call: MixerCall) -> Rebuilt:
        frozen = mixer.detach_coefficients()
        scans = [scan for scan, _, _ in frozen.scans_in_order()]
        mixed = [scan.mixed for scan in scans]
        rebuilt = Rebuilt.of(frozen, call, mixed)
        self.kept.append(_Slopes(rebuilt.output, [scan.values for scan in scans], mixed))
        return rebuilt
