"""The effective receptive field: which places of the input one unit really depends on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.capture import Request, check_forward, freeze, is_model
from captum_ssm.capture.model import extract_logits
from captum_ssm.capture.target import captum_score
from captum_ssm.capture.thrown_away import on_thrown_away
from captum_ssm.errors import InputError, TargetError, brief
from captum_ssm.inspection.receptive_field.implicit import implicit_maps
from captum_ssm.inspection.receptive_field.result import ReceptiveField, index_of
from captum_ssm.inspection.receptive_field.unit import (
    Unit,
    features_axis,
    named,
    over_channels,
    places_of,
    proportional,
    unit_of_tokens,
)
from captum_ssm.mixers import find_mixers
from captum_ssm.utils.allocator import workspace
from captum_ssm.utils.captum_api import TargetType, is_tuple
from captum_ssm.utils.clones import repeated
from captum_ssm.utils.integers import as_index, index_in
from captum_ssm.utils.plain_graph import plain_graph
from captum_ssm.utils.watch_modules import watch_modules

MEASURES = ("gradient", "implicit")


@workspace()
def effective_receptive_field(
    forward_func: Any,
    inputs: Any,
    *,
    model: Any = None,
    target: TargetType = None,
    position: int | Sequence[int] | None = None,
    by: str = "gradient",
    positive: bool = False,
    channels: int | None = None,
    additional_forward_args: Any = None,
    check: bool = True,
) -> ReceptiveField:
    r"""Which places of the input one unit depends on, averaged over inputs (Luo et al., 2016).

    ``by="gradient"`` works with every differentiable model, with or without mixers. For the
    output y at place p, and the input x at place q (of ids, their embeddings), it is

    .. math::
        F_q = \frac{1}{n} \sum_{x} \sum_f \Big| \frac{\partial \sum_c y_{p, c}}{\partial x_{q, f}}
        \Big|

    divided by its largest entry. The code of RepLKNet, which VMamba's is made from, keeps only
    the positive outputs and the positive gradients: ``positive=True``.

    ``by="implicit"`` is the row of the central token in the product over layers of
    :math:`I + A`, without I where no residual stream is added. A is :math:`|M|` with rows that add
    up to one, where M is a layer's exact implicit map (the whole mixer, as in
    :class:`~captum_ssm.UnifiedImplicitAttention`, averaged over channels). So layers do not cancel
    one another, and the residual stream counts as much as the mixer, as in attention rollout. It
    shows what mixers pass between tokens, and no MLP. From tokens to the input's places it goes by
    the measured transport; each pixel of a patch of a known grid gets the same. Time is quadratic
    in the number of tokens.

    Args:
        forward_func (nn.Module, nnsight model or Callable): what is measured.
        inputs (Tensor, dict, or iterable of these): ids ``(B, L)`` or floats ``(B, ...)``; or
            batches of them, all of one size, such as a list or ``(x for x, _ in loader)``.
        model (nn.Module or nnsight model, optional): the model that ``forward_func`` runs;
            needed for a plain callable with ids, or whose output has no places, and for
            ``"implicit"``. Default: None
        target (int, tuple, Tensor or list, optional): for ``"gradient"``. With ``position`` the
            one channel of the output there; without, what it is for Captum. None is the sum over
            channels. Default: None
        position (int or sequence of int, optional): the place of the output that is asked, one
            index per axis, negative from the end; of a model whose output has no places, such as
            a classifier, and for ``"implicit"``, that of the last mixers' tokens: an int is a
            token, a sequence a place of their grid. None is the central one. Default: None
        by (str, optional): ``"gradient"`` or ``"implicit"``. Default: ``"gradient"``
        positive (bool, optional): for ``"gradient"``: :math:`\max(y, 0)` in the place of y, and
            :math:`\max(\cdot, 0)` in that of the absolute value. Default: False
        channels (int, optional): for ``"gradient"``: the axis of the features of floats, and of
            an output of as many axes; None is the last of ``(B, L, F)``, and the second of
            images and volumes. ``"implicit"`` measures it. Default: None
        additional_forward_args (Any, optional): as for ``attribute`` of a method, the same for
            every batch. Default: None
        check (bool, optional): for ``"implicit"``, as for
            :class:`~captum_ssm.attr.TokenAttribution`. Default: True

    Returns:
        ReceptiveField: the map, and how large it is.

    Raises:
        ValueError: for an output without places of a model without known mixers, a ``position``
            outside it, batches of different sizes, options that do not fit, or a unit that
            depends on no place.
        TypeError: for inputs of a wrong type.

    Examples::

        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1))
        >>> field = effective_receptive_field(net, torch.randn(16, 3, 32, 32))
        >>> int((field.map > 0).sum()), field.center  # 5 x 5 pixels
        (25, (16, 16))
        >>> field.area(1.0)
        Area(places=25, share=0.0244140625, side=5)
        >>> last = effective_receptive_field(model, input_ids, position=-1, by="implicit")
        >>> last.map.shape
        torch.Size([7])
    """
    check_forward(forward_func)
    _check_options(by, target, positive, channels)
    total: Tensor | None = None
    unit: Unit | None = None
    size: tuple[int, ...] | None = None
    count = 0
    for batch in _batches(inputs):
        # Request.of says what is missing where implicit maps are asked of a plain function.
        is_free = by == "gradient" and model is None and not is_model(forward_func)
        known = nn.Identity() if is_free else model
        request = Request.of(forward_func, known, batch, additional_forward_args)
        size = _require_size(request, size)
        if by == "implicit":
            maps, unit = implicit_maps(request, position, check)
        else:
            maps, unit = _by_gradient(request, unit, target, position, positive, channels)
        maps = maps.double().cpu()
        total = maps.sum(0) if total is None else total + maps.sum(0)
        count += len(maps)
    if total is None or unit is None:
        raise InputError("inputs holds no batch; expected a tensor, or an iterable of tensors.")
    if not bool(torch.isfinite(total).all()):
        raise InputError("the receptive field is not finite: look for NaN or Inf in the weights.")
    if not bool((total > 0).any()):
        raise InputError(
            f"{unit.text[:1].upper()}{unit.text[1:]} depends on no place of the input; choose "
            "another position= or target=."
        )
    return ReceptiveField(total / total.max(), unit.text, count, by, unit.center)


def _check_options(by: Any, target: Any, positive: Any, channels: Any) -> None:
    if by not in MEASURES:
        raise ValueError(f"by is {brief(by)}; expected one of {MEASURES}.")
    if channels is not None and as_index(channels) is None:
        raise TypeError(f"channels is {brief(channels)}; expected the index of an axis, or None.")
    if by == "implicit" and (target is not None or positive or channels is not None):
        raise ValueError(
            "by is 'implicit', which asks a token of the last mixers and measures the axes; "
            "target=, positive= and channels= are for by='gradient': pass position= alone."
        )


def _require_size(request: Request, size: tuple[int, ...] | None) -> tuple[int, ...]:
    # The size of a batch, which has to be that of the batches before it.
    if len(request.inputs) > 1:
        raise ValueError(
            f"inputs is a tuple of {len(request.inputs)}; expected one tensor. Other inputs of the "
            "model go into additional_forward_args, batches into a list."
        )
    shape = tuple(request.inputs[0].shape[1:])
    if size not in (None, shape):
        raise InputError(
            f"inputs holds batches of shapes (B, *{size}) and (B, *{shape}); expected one size "
            "in all of them: crop or resize."
        )
    return shape


def _batches(inputs: Any) -> Iterator[Any]:
    is_one = torch.is_tensor(inputs) or is_tuple(inputs) or isinstance(inputs, Mapping)
    if not is_one and not isinstance(inputs, Iterable):
        raise TypeError(
            f"inputs is a {type(inputs).__name__}; expected a tensor, or an iterable of tensors."
        )
    for batch in [inputs] if is_one else inputs:
        if not is_one and not torch.is_tensor(batch) and not isinstance(batch, Mapping):
            raise TypeError(
                f"inputs holds a {type(batch).__name__}; expected tensors: of a loader of images "
                "and labels, pass (x for x, _ in loader)."
            )
        yield batch


def _by_gradient(
    request: Request,
    unit: Unit | None,
    target: Any,
    position: Any,
    positive: bool,
    channels: int | None,
) -> tuple[Tensor, Unit]:
    """Maps ``(B, *places)`` by gradients, and the unit, which the first batch tells."""
    tensor = request.inputs[0]
    axis = features_axis(tensor, channels)
    with torch.inference_mode(False), torch.enable_grad():
        embedded, output, mixed = _run(request)
        if unit is None:
            places = places_of(tensor, axis)
            unit = _unit_of(request, output, mixed, places, axis, target, position)
        if unit.from_mixer:
            assert mixed is not None
            # Windows may lie in the batch, and an image's tokens on two axes.
            output = mixed.reshape(len(tensor), -1, mixed.shape[-1])
        if unit.place is None:
            values = captum_score(output, target, len(tensor))[:, None]
        else:
            values = _at_place(output, unit, target)
        score = (values.clamp(min=0) if positive else values).sum()
        if not score.requires_grad:
            raise ValueError(
                f"{unit.text} has no gradient; expected a differentiable model: leave out "
                "torch.no_grad() and detach() in forward_func."
            )
        (gradient,) = torch.autograd.grad(score, embedded, allow_unused=True)
    gradient = torch.zeros_like(embedded) if gradient is None else gradient.double()
    size = gradient.clamp(min=0) if positive else gradient.abs()
    if not tensor.is_floating_point():
        return size.sum(-1), unit
    return (size if axis is None else size.sum(axis)), unit


@repeated
def _run(request: Request) -> tuple[Tensor, Tensor, Tensor | None]:
    """The input or its embeddings, the output, and that of the last mixer, in one graph."""
    tensor = request.inputs[0]
    embedded: list[Tensor] = []
    mixed: list[Tensor] = []

    def embed(table: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor | None:
        ids = args[0] if args else None
        if embedded or not torch.is_tensor(ids) or ids.numel() != tensor.numel():
            return None
        if not torch.equal(ids.view_as(tensor), tensor):
            return None
        embedded.append(output.detach().view(*tensor.shape, -1).requires_grad_())
        return embedded[0].view_as(output)

    def keep(mixer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        mixed[:] = [extract_logits(output)]

    inputs = tensor.detach().clone()
    if tensor.is_floating_point():
        inputs.requires_grad_()
    with on_thrown_away(request) as (of_copies, copies), plain_graph():
        mixers = [mixer for _, mixer in find_mixers(copies.root)]
        tables = [module for module in copies.root.modules() if isinstance(module, nn.Embedding)]
        with (
            watch_modules(mixers, after=keep),
            watch_modules(tables if request.by_ids else (), after=embed),
        ):
            output = extract_logits(of_copies.run((inputs,)))
    if request.by_ids and not embedded:
        raise ValueError(
            f"inputs holds ids, of {tensor.dtype}, and no nn.Embedding was given them; expected "
            "floats, or a model (pass model=) that embeds them."
        )
    return (embedded[0] if embedded else inputs), output, (mixed[0] if mixed else None)


def _unit_of(
    request: Request,
    output: Tensor,
    mixed: Tensor | None,
    size: tuple[int, ...],
    axis: int | None,
    target: Any,
    position: Any,
) -> Unit:
    if target is not None and position is None:
        return Unit(f"target {target!r}")
    n = len(size)
    if output.dim() == n + 2 or tuple(output.shape[1:]) == size:
        dense = output.dim() == n + 2
        # Ids and univariate series have no such axis: there the channels are the last.
        channels = (-1 if axis is None else axis) % output.dim() if dense else None
        shape = places_of(output, channels)
        place = index_of("position", position, shape)
        width = 1 if channels is None else output.shape[channels]
        text = f"{named('place', place, shape)}{over_channels(target, width)}"
        return Unit(text, proportional(place, shape, size), place, channels)
    if mixed is None:
        raise ValueError(
            f"the output has shape {tuple(output.shape)}, without the places of inputs of shape "
            f"{tuple(request.inputs[0].shape)}, and no known mixer was run; pass target=, or a "
            "forward_func that returns features (B, C, H, W) or (B, L, C)."
        )
    frozen = freeze(request, query=False, check=False)
    unit = unit_of_tokens(frozen, position, size)
    assert unit.place is not None
    if output.dim() == 3 and output.shape[1] == frozen.shape[1]:  # features of the tokens
        return replace(unit, text=unit.text + over_channels(target, output.shape[-1]), axis=2)
    order = frozen.layers[-1].order
    token = unit.place[0]
    if order is not None:
        token = int((order.flatten() == token).nonzero()[0, 0])
    text = f"{unit.text} (output of {frozen.layers[-1].name})"
    text += over_channels(target, mixed.shape[-1])
    return Unit(text, unit.center, (token,), 2, from_mixer=True)


def _at_place(output: Tensor, unit: Unit, target: Any) -> Tensor:
    """The values at a place, of all channels or of one: ``(B, C)``."""
    assert unit.place is not None
    values = output[..., None] if unit.axis is None else output.movedim(unit.axis, -1)
    for at in unit.place:
        values = values[:, at]
    if target is None:
        return values
    count = values.shape[-1]
    channel = index_in(target, count)
    if channel is None:
        raise TargetError(
            f"target is {brief(target)} with a position; expected one of the {count} channels "
            f"there, 0 .. {count - 1} (or -{count} .. -1 from the end)."
        )
    return values[:, [channel]]
