"""Value zeroing (Mohebbi et al., 2023): how much a token changes when another's value is zero."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.capture import Request, exact_arithmetic, freeze, unwrap
from captum_ssm.capture.thrown_away import run_on_copies
from captum_ssm.errors import InputError, brief
from captum_ssm.interventions.editing import edited
from captum_ssm.interventions.open_mixer import OpenMixer
from captum_ssm.interventions.runs import Runs, bar
from captum_ssm.mixers import FrozenMixer
from captum_ssm.utils.allocator import workspace
from captum_ssm.utils.integers import count_of
from captum_ssm.utils.nested import first_of
from captum_ssm.utils.watch_modules import watch_modules


@workspace()
def value_zeroing(
    model: Any,
    inputs: Any,
    layer: int | str,
    *,
    at: str | None = None,
    additional_forward_args: Any = None,
    perturbations_per_eval: int = 1,
    show_progress: bool = False,
    check: bool = True,
) -> Tensor:
    r"""How much each token changes, :math:`1 - \cos`, when the value of another one is zero.

    Mohebbi et al. (`Quantifying Context Mixing in Transformers
    <https://arxiv.org/abs/2301.12971>`_, 2023), for any mixer: :math:`v_j` is zero in one layer,
    whose coefficients stay as they are.

    Args:
        model (nn.Module or nnsight model): the model.
        inputs (Tensor or dict): as for ``attribute``.
        layer (int or str): the mixer, by index or module path.
        at (str, optional): path of a module whose output (or its first element) is compared, of a
            run of the model with the value at zero: the block around the mixer, or a later one.
            None compares what the mixer returns, on frozen operators, without another run.
            Default: None
        additional_forward_args, perturbations_per_eval, show_progress, check (optional): as for
            :func:`~captum_ssm.interventions.activation_patching`.

    Returns:
        Tensor: ``(B, L, L)``: row i holds the change of token i without the value of each token j.

    Raises:
        ValueError: for a layer or a module that is not there, or a mixer whose frozen operator does
            not reproduce its output.
        InputError: for a module ``at`` that does not return one vector per token.

    Examples::

        >>> change = captum_ssm.interventions.value_zeroing(model, input_ids, 0)
        >>> change.shape, bool((change.triu(1).abs() < 1e-5).all())  # later tokens change nothing
        (torch.Size([1, 7, 7]), True)
    """
    request = Request.of(model, None, inputs, additional_forward_args)
    frozen = freeze(request, query=False, wiring=False, check=check)
    chosen = frozen.select_one(layer)
    B, L = chosen.shape
    columns = []
    if at is None:
        with exact_arithmetic(), bar("value zeroing", L, show_progress) as done:
            mixer = chosen.mixer
            unchanged = mixer.output()
            for j in range(L):
                zeroed = mixer.projected(mixer.gated_output_of(_without(mixer, torch.tensor([j]))))
                columns.append(_change(zeroed, unchanged))
                done(1)
        return torch.stack(columns, -1)
    with torch.no_grad(), bar("value zeroing", L, show_progress) as done:
        module, runs = _module(model, at), Runs(frozen, None, None)
        unchanged = _output(module, at, runs, 1, (B, L))
        count = count_of("perturbations_per_eval", perturbations_per_eval, 1)
        for tokens in torch.arange(L).split(count):
            k = len(tokens)
            zero = tokens.repeat_interleave(B)

            def edit(opened: OpenMixer, zero: Tensor = zero) -> Tensor:
                if opened.name != chosen.name:
                    return opened.returned
                return opened.returning_mixed(_without(opened.mixer, zero))

            with edited(model, chosen.call.path, edit, check=check):
                zeroed = _output(module, at, runs, k, (B, L))
            columns += _change(zeroed.unflatten(0, (k, B)), unchanged)
            done(k)
    return torch.stack(columns, -1)


def _change(tokens: Tensor, before: Tensor) -> Tensor:
    # A token that is zero, such as padding, has no angle, and may be what it was before.
    is_same = (tokens == before).all(-1)
    return (1 - F.cosine_similarity(tokens, before, -1)).masked_fill(is_same, 0)


def _without(mixer: FrozenMixer, tokens: Tensor) -> list[Tensor]:
    # What the scans return if the value of one token per example is zero.
    mixed = []
    for scan, order, _ in mixer.scans_in_order():
        positions = torch.arange(scan.values.shape[1], device=scan.values.device)
        positions = positions if order is None else order
        others = positions != tokens.to(positions.device)[:, None]
        mixed.append(scan.mix(scan.values * others[..., None]))
    return mixed


def _module(model: Any, at: str) -> torch.nn.Module:
    modules = dict(unwrap(model).named_modules())
    if at not in modules:
        raise ValueError(f"at is {brief(at)}; expected the path of a module of the model.")
    return modules[at]


def _output(module: torch.nn.Module, at: str, runs: Runs, k: int, shape: tuple[int, int]) -> Tensor:
    outputs: list[Any] = []
    with watch_modules([module], after=lambda *call: outputs.append(call[-1])):
        run_on_copies(runs.request(k))
    output = first_of(outputs[-1] if outputs else None)
    if not torch.is_tensor(output) or tuple(output.shape[:2]) != (shape[0] * k, shape[1]):
        got = tuple(output.shape) if torch.is_tensor(output) else type(output).__name__
        raise InputError(
            f"the module {at} returned {got} in this run; expected one vector per token, "
            f"({shape[0] * k}, {shape[1]}, E). Name another module."
        )
    return output.to(torch.promote_types(output.dtype, torch.float32))
