"""The effective receptive field: which places of the input one unit really depends on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm._captum import TargetType, is_tuple
from captum_ssm._capture import (
    FrozenModel,
    Request,
    check_forward,
    exact_arithmetic,
    freeze,
    is_model,
)
from captum_ssm._capture.model import extract_logits
from captum_ssm._capture.target import captum_score
from captum_ssm._capture.tracing import on_thrown_away
from captum_ssm._checkpoints import without_checkpoints
from captum_ssm._clones import repeated
from captum_ssm._errors import InputError, TargetError
from captum_ssm._integers import as_index
from captum_ssm._workspace import workspace
from captum_ssm.attr._inputs import of_inputs
from captum_ssm.attr._maps import MapOptions, StageMaps
from captum_ssm.mixers import check_components, find_mixers

MEASURES = ("gradient", "implicit")


@dataclass(frozen=True)
class Area:
    """How much of the input holds a share of a receptive field.

    Args:
        places (int): the fewest places (pixels, steps, tokens) that hold it.
        share (float): the same as a part of the input, in (0, 1].
        side (int): of the smallest square that holds it, wherever it lies; of series and text the
            length of the shortest window, of volumes and videos the edge of the smallest cube.
            Along an axis of the input that is shorter it is cut.

    Examples::

        >>> field = effective_receptive_field(nn.Conv1d(2, 3, 5), torch.randn(4, 2, 9), channels=1)
        >>> field.area(1.0).side
        5
    """

    places: int
    share: float
    side: int


@dataclass(frozen=True, eq=False)
class ReceptiveField:
    """The effective receptive field of one unit.

    Args:
        map (Tensor): over the places of the input, ``(L,)``, ``(H, W)`` or ``(D, H, W)``, float64
            on the CPU, in [0, 1]: the largest entry is one.
        unit (str): the unit that was asked, in words.
        inputs (int): the number of inputs averaged.
        by (str): ``"gradient"`` or ``"implicit"``.
        center (tuple of int, optional): the place of the input where the unit lies, in proportion
            to the axes of its own grid; None for a unit without a place. Default: None

    Examples::

        >>> field = effective_receptive_field(model, input_ids, position=-1)
        >>> print(field)  # doctest: +SKIP
        effective receptive field by gradient, of place 6 of 7, over 50 channels; 1 input
        50% in 2 of 7 places (28.6%), in a window of 3
        90% in 5 of 7 places (71.4%), in a window of 6
    """

    map: Tensor
    unit: str
    inputs: int
    by: str
    center: tuple[int, ...] | None = None

    def area(self, share: float = 0.5) -> Area:
        """How much of the input holds this share of the field.

        Args:
            share (float, optional): of the sum over the map, above 0 and at most 1. Default: 0.5

        Raises:
            ValueError: for another share.

        Examples::

            >>> effective_receptive_field(model, input_ids).area(0.9).places <= 7
            True
        """
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ValueError(f"share is {share!r}; expected a number above 0 and at most 1.")
        # The sums of whole maps are equal up to rounding only.
        needed = share * float(self.map.sum()) * (1 - 1e-12)
        sums = self.map.flatten().sort(descending=True).values.cumsum(0)
        places = min(int((sums < needed).sum()) + 1, len(sums))
        smallest, largest = 1, max(self.map.shape)
        while smallest < largest:
            side = (smallest + largest) // 2
            if _largest_sum(self.map, side) >= needed:
                largest = side
            else:
                smallest = side + 1
        return Area(places, places / len(sums), smallest)

    def profile(self, center: int | Sequence[int] | None = None) -> Tensor:
        """The share of the field at each distance from the unit, ``(R,)``, starting at zero.

        Of a causal model this is the distance back from the query. On several axes the distance is
        the largest of those along each, so that entry r is a square ring of side 2 r + 1.

        Args:
            center (int or sequence of int, optional): the place to start from; None for the
                unit's own. Default: None

        Raises:
            ValueError: for a unit without a place, or a place outside the input.

        Examples::

            >>> field = effective_receptive_field(model, input_ids, position=-1)
            >>> field.profile().shape
            torch.Size([7])
        """
        if center is None and self.center is None:
            raise ValueError(
                f"the unit is {self.unit}, which lies at no place of the input; pass center=."
            )
        start = self.center if center is None else _index("center", center, self.map.shape)
        assert start is not None
        axes = [torch.arange(n) - at for n, at in zip(self.map.shape, start, strict=True)]
        distance = torch.stack(torch.meshgrid(*axes, indexing="ij")).abs().amax(0).flatten()
        sums = self.map.new_zeros(int(distance.max()) + 1)
        return sums.index_add_(0, distance, self.map.flatten()) / self.map.sum()

    def __repr__(self) -> str:
        kind = {1: "a window", 2: "a square"}.get(self.map.dim(), "a cube")
        of = _times(self.map.shape)
        count = f"{self.inputs} input{'' if self.inputs == 1 else 's'}"
        lines = [f"effective receptive field by {self.by}, of {self.unit}; {count}"]
        for share in (0.5, 0.9):
            found = self.area(share)
            lines.append(
                f"{share:.0%} in {found.places} of {of} places ({found.share:.1%}), in {kind} of "
                f"{found.side}"
            )
        return "\n".join(lines)


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
    unit: _Unit | None = None
    size: tuple[int, ...] | None = None
    count = 0
    for batch in _batches(inputs):
        known = nn.Identity() if model is None and not is_model(forward_func) else model
        if by == "implicit":
            known = model  # Request.of says what is missing
        request = Request.of(forward_func, known, batch, additional_forward_args)
        if len(request.inputs) > 1:
            raise ValueError(
                f"inputs is a tuple of {len(request.inputs)}; expected one tensor. Other inputs of "
                "the model go into additional_forward_args, batches into a list."
            )
        shape = tuple(request.inputs[0].shape[1:])
        if size not in (None, shape):
            raise InputError(
                f"inputs holds batches of shapes (B, *{size}) and (B, *{shape}); expected one size "
                "in all of them: crop or resize."
            )
        size = shape
        if by == "implicit":
            maps, unit = _implicit(request, position, check)
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


@dataclass(frozen=True)
class _Unit:
    # What is asked. A place of the output, or a token of it or of the last mixers, if any.
    text: str
    center: tuple[int, ...] | None = None
    place: tuple[int, ...] | None = None
    axis: int | None = None  # of the output's channels
    from_mixer: bool = False


def _check_options(by: Any, target: Any, positive: Any, channels: Any) -> None:
    if by not in MEASURES:
        raise ValueError(f"by is {by!r}; expected one of {MEASURES}.")
    if channels is not None and as_index(channels) is None:
        raise TypeError(f"channels is {channels!r}; expected the index of an axis, or None.")
    if by == "implicit" and (target is not None or positive or channels is not None):
        raise ValueError(
            "by is 'implicit', which asks a token of the last mixers and measures the axes; "
            "target=, positive= and channels= are for by='gradient': pass position= alone."
        )


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


def _implicit(request: Request, position: Any, check: bool) -> tuple[Tensor, _Unit]:
    """Maps ``(B, *places)`` by implicit maps, and the unit that was asked."""
    frozen = freeze(request, query=False, check=check)
    tensor, ways = request.inputs[0], frozen.wiring.inputs
    axis = _features_axis(tensor, None)
    if ways and tensor.is_floating_point() and ways[0].leaf.channels is not None:
        axis = ways[0].leaf.channels % tensor.dim()
    size = _places(tensor, axis)
    unit = _of_tokens(frozen, position, size)
    assert unit.place is not None
    folded = check_components("unified", None)
    options = MapOptions(formulation="unified", components=folded, sign="absolute")
    asked = frozen.at(unit.place[0])
    with exact_arithmetic():
        rows = _rolled(StageMaps(asked, asked.layers, options))
        if _is_in_place(frozen, size):
            row, mask = rows[0], frozen.mask
            return (row if mask is None or mask.shape != row.shape else row * mask), unit
        found = of_inputs(rows, asked, "even", "nearest")
    found = found[0] if is_tuple(found) else found
    return (found if axis is None else found.sum(axis)), unit


def _rolled(maps: StageMaps) -> list[Tensor]:
    """The query's row of the product of I + A (no I without a residual): ``(B, L)`` per input."""

    def step(stage: int, w: Tensor) -> dict[int, Tensor]:
        m = maps.at(stage)
        assert m is not None
        sums = m.row_sums()
        found = dict.fromkeys(maps.streams(stage, m), w)
        # A row that reads nothing, of padding, has no sum to divide by.
        row = m.rmatvec(torch.where(sums > 0, w / sums, 0))
        found[stage] = row + w if stage in found else row
        return found

    return maps.wiring.back(maps.frozen.require_query(), step)


def _by_gradient(
    request: Request,
    unit: _Unit | None,
    target: Any,
    position: Any,
    positive: bool,
    channels: int | None,
) -> tuple[Tensor, _Unit]:
    """Maps ``(B, *places)`` by gradients, and the unit, which is found for the first batch."""
    tensor = request.inputs[0]
    axis = _features_axis(tensor, channels)
    with torch.inference_mode(False), torch.enable_grad():
        leaf, output, mixed = _run(request)
        if unit is None:
            places = _places(tensor, axis)
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
        (found,) = torch.autograd.grad(score, leaf, allow_unused=True)
    found = torch.zeros_like(leaf) if found is None else found.double()
    size = found.clamp(min=0) if positive else found.abs()
    if not tensor.is_floating_point():
        return size.sum(-1), unit
    return (size if axis is None else size.sum(axis)), unit


@repeated
def _run(request: Request) -> tuple[Tensor, Tensor, Tensor | None]:
    """The input or its embeddings, the output, and that of the last mixer, in one graph."""
    tensor = request.inputs[0]
    embedded: list[Tensor] = []
    mixed: list[Tensor] = []

    def embed(table: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        ids = args[0] if args else None
        if embedded or not torch.is_tensor(ids) or ids.numel() != tensor.numel():
            return None
        if not torch.equal(ids.view_as(tensor), tensor):
            return None
        embedded.append(output.detach().view(*tensor.shape, -1).requires_grad_())
        return embedded[0].view_as(output)

    def keep(mixer: nn.Module, args: Any, output: Any) -> None:
        mixed[:] = [extract_logits(output)]

    leaf = tensor.detach().clone()
    if tensor.is_floating_point():
        leaf.requires_grad_()
    with on_thrown_away(request) as (of_copies, copies), without_checkpoints():
        for _, mixer in find_mixers(copies.root):
            mixer.register_forward_hook(keep)
        if request.by_ids:
            for table in copies.root.modules():
                if isinstance(table, nn.Embedding):
                    table.register_forward_hook(embed)
        output = extract_logits(of_copies.run((leaf,)))
    if request.by_ids and not embedded:
        raise ValueError(
            f"inputs holds ids, of {tensor.dtype}, and no nn.Embedding was given them; expected "
            "floats, or a model (pass model=) that embeds them."
        )
    return (embedded[0] if embedded else leaf), output, (mixed[0] if mixed else None)


def _unit_of(
    request: Request,
    output: Tensor,
    mixed: Tensor | None,
    size: tuple[int, ...],
    axis: int | None,
    target: Any,
    position: Any,
) -> _Unit:
    if target is not None and position is None:
        return _Unit(f"target {target!r}")
    n = len(size)
    if output.dim() == n + 2 or tuple(output.shape[1:]) == size:
        dense = output.dim() == n + 2
        # Of ids and univariate series, which have no such axis, the channels are the last.
        channels = (-1 if axis is None else axis) % output.dim() if dense else None
        shape = _places(output, channels)
        place = _index("position", position, shape)
        width = 1 if channels is None else output.shape[channels]
        text = f"{_named('place', place, shape)}{_over(target, width)}"
        return _Unit(text, _proportional(place, shape, size), place, channels)
    if mixed is None:
        raise ValueError(
            f"the output has shape {tuple(output.shape)}, without the places of inputs of shape "
            f"{tuple(request.inputs[0].shape)}, and no known mixer was run; pass target=, or a "
            "forward_func that returns features (B, C, H, W) or (B, L, C)."
        )
    frozen = freeze(request, query=False, check=False)
    found = _of_tokens(frozen, position, size)
    assert found.place is not None
    if output.dim() == 3 and output.shape[1] == frozen.shape[1]:  # features of the tokens
        return _Unit(f"{found.text}{_over(target, output.shape[-1])}", found.center, found.place, 2)
    order = frozen.layers[-1].order
    token = found.place[0]
    if order is not None:
        token = int((order.flatten() == token).nonzero()[0, 0])
    text = f"{found.text} (output of {frozen.layers[-1].name}){_over(target, mixed.shape[-1])}"
    return _Unit(text, found.center, (token,), 2, from_mixer=True)


def _is_in_place(frozen: FrozenModel, size: tuple[int, ...]) -> bool:
    """Whether the tokens are the input's: no grid is needed, and a long run has measured none."""
    return frozen.wiring.is_simple and size == (frozen.shape[1],)


def _of_tokens(frozen: FrozenModel, position: Any, size: tuple[int, ...]) -> _Unit:
    """The token of the last mixers at a place of their grid, the central one by default."""
    tokens = frozen.shape[1]
    grid = None if _is_in_place(frozen, size) else frozen.grids[-1]
    is_token = as_index(position) is not None
    if grid is None or (is_token and len(grid.shape) > 1):
        (token,) = _index("position", position, (tokens,))
        text = _named("token", (token,), (tokens,))
        if grid is None:
            lies = (token,) if size == (tokens,) else None
            return _Unit(f"{text} of the last mixers", lies, (token,))
        here = (grid.index == token).nonzero().tolist()
        center = _proportional(here[0], grid.shape, size) if here else None
        return _Unit(f"{text} of the last mixers", center, (token,))
    place = _index("position", position, grid.shape)
    text = f"{_named('place', place, grid.shape)} of the last mixers' grid"
    return _Unit(text, _proportional(place, grid.shape, size), (int(grid.index[place]),))


def _at_place(output: Tensor, unit: _Unit, target: Any) -> Tensor:
    """The values at a place, of all channels or of one: ``(B, C)``."""
    assert unit.place is not None
    values = output[..., None] if unit.axis is None else output.movedim(unit.axis, -1)
    for at in unit.place:
        values = values[:, at]
    if target is None:
        return values
    channel, count = as_index(target), values.shape[-1]
    if channel is None or not -count <= channel < count:
        raise TargetError(
            f"target is {target!r} with a position; expected one of the {count} channels there, "
            f"0 .. {count - 1} (or -{count} .. -1 from the end)."
        )
    return values[:, [channel]]


def _features_axis(tensor: Tensor, channels: int | None) -> int | None:
    """The axis of an input's features; None for ids, and for floats ``(B, L)``."""
    if not tensor.is_floating_point() or (tensor.dim() < 3 and channels is None):
        return None
    usual = 2 if tensor.dim() == 3 else 1
    axis = usual if channels is None else channels
    if not -tensor.dim() <= axis < tensor.dim() or axis % tensor.dim() == 0:
        raise ValueError(
            f"channels is {channels!r} for inputs of shape {tuple(tensor.shape)}; expected the "
            f"axis of their features, 1 .. {tensor.dim() - 1} (or negative, from the end)."
        )
    return axis % tensor.dim()


def _places(tensor: Tensor, channels: int | None) -> tuple[int, ...]:
    return tuple(n for axis, n in enumerate(tensor.shape) if axis not in (0, channels))


def _index(name: str, value: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """A place on axes of ``shape``, from zero on; the central one for None."""
    if value is None:
        return tuple(n // 2 for n in shape)
    given = (value,) if as_index(value) is not None else value
    try:
        place = [as_index(one) for one in given]
    except TypeError:
        place = [None]
    pairs = list(zip(place, shape, strict=False))
    inside = all(i is not None and -n <= i < n for i, n in pairs)
    if len(place) != len(shape) or not inside:
        one = "an int" if len(shape) == 1 else f"{len(shape)} ints"
        raise ValueError(
            f"{name} is {value!r}; expected {one}, a place on the {_times(shape)} there are "
            "(negative from the end)."
        )
    return tuple(i % n for i, n in pairs if i is not None)


def _proportional(
    place: Sequence[int], shape: Sequence[int], size: Sequence[int]
) -> tuple[int, ...] | None:
    """The place of the input where one of a grid lies; None where their axes differ."""
    if len(shape) != len(size):
        return None
    ends = zip(place, shape, size, strict=True)
    return tuple((2 * at + 1) * n // (2 * count) for at, count, n in ends)


def _largest_sum(values: Tensor, side: int) -> float:
    """The largest sum over a cube of this side."""
    for axis, n in enumerate(values.shape):
        width = min(side, n)
        first = torch.zeros_like(values.narrow(axis, 0, 1))
        sums = torch.cat([first, values.cumsum(axis)], axis)
        left = sums.shape[axis] - width
        values = sums.narrow(axis, width, left) - sums.narrow(axis, 0, left)
    return float(values.max())


def _named(what: str, place: Sequence[int], shape: Sequence[int]) -> str:
    at = str(place[0]) if len(place) == 1 else str(tuple(place))
    return f"{what} {at} of {_times(shape)}"


def _over(target: Any, channels: int) -> str:
    if target is not None:
        return f", channel {target}"
    return "" if channels == 1 else f", over {channels} channels"


def _times(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))
