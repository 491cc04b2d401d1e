"""The effective receptive field: known profiles, areas by hand, units, averages, pictures."""

import itertools
import math

import numpy as np
import pytest
import torch
from matplotlib.colors import LogNorm
from models import ids, randomize, tiny
from running_mean import RunningMean, freeze_running_mean
from torch import Tensor, nn

from captum_ssm import (
    InputError,
    ReceptiveField,
    TargetError,
    UnsupportedModelError,
    effective_receptive_field,
    register_mixer,
)
from captum_ssm.models import BidirectionalMamba, VisionMamba
from captum_ssm.visualization import receptive_field_map


def boxes(count: int, kernel: int, axes: int, channels: int = 1) -> nn.Module:
    """Convolutions with kernels of ones, of odd size: the profile is that of repeated boxes."""
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[axes]
    pads = kernel // 2
    layers = [kind(channels, channels, kernel, padding=pads, bias=False) for _ in range(count)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    return nn.Sequential(*layers).double()


def repeated(count: int, kernel: int) -> np.ndarray:
    profile = np.ones(1)
    for _ in range(count):
        profile = np.convolve(profile, np.ones(kernel))
    return profile / profile.max()


class Decay(nn.Module):
    """h_t = rate h_(t-1) + x_t for series (B, L, F); what is returned is h."""

    def __init__(self, rate: float = 0.7) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        h, out = torch.zeros_like(x[:, 0]), []
        for token in x.unbind(1):
            h = self.rate * h + token
            out.append(h)
        return torch.stack(out, 1)


def of(values: Tensor, center=None) -> ReceptiveField:
    return ReceptiveField(values.double() / values.max(), "a unit", 1, "gradient", center)


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("channels", [1, 3])
def test_box_convolutions_have_their_binomial_profile_and_zeros_outside(axes, channels):
    x = torch.randn(2, channels, *[11] * axes, dtype=torch.float64)
    field = effective_receptive_field(boxes(3, 3, axes, channels), x, channels=1)
    profile = np.zeros(11)
    profile[2:9] = repeated(3, 3)
    expected = profile
    for _ in range(axes - 1):
        expected = np.multiply.outer(expected, profile)
    np.testing.assert_allclose(field.map.numpy(), expected, atol=1e-12)
    assert bool((field.map[torch.as_tensor(expected == 0)] == 0).all())  # exactly
    assert field.center == (5,) * axes
    assert field.area(1.0).side == 7
    assert field.area(1.0).places == 7**axes
    assert field.inputs == 2


def test_boxes_of_two_are_binomial_coefficients():
    layers = [nn.Conv1d(1, 1, 2, bias=False) for _ in range(6)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    field = effective_receptive_field(nn.Sequential(*layers), torch.randn(1, 1, 7), channels=1)
    expected = torch.tensor([math.comb(6, k) for k in range(7)])
    torch.testing.assert_close(field.map, expected / 20.0, check_dtype=False)


def test_a_stride_moves_the_center():
    net = nn.Conv2d(3, 4, 4, stride=4)
    field = effective_receptive_field(net, torch.randn(1, 3, 16, 24), position=(1, -1))
    inside = torch.zeros(16, 24, dtype=torch.bool)
    inside[4:8, 20:24] = True
    assert torch.equal(field.map > 0, inside)
    assert field.center == (6, 22)
    assert field.unit == "place (1, 5) of 4 x 6, over 4 channels"


@pytest.mark.parametrize("position", [None, 3, -1])
def test_a_decay_is_found_and_nothing_after_the_query(position):
    field = effective_receptive_field(Decay(), torch.randn(3, 10, 2).double(), position=position)
    query = {None: 5, 3: 3, -1: 9}[position]
    expected = torch.zeros(10, dtype=torch.float64)
    expected[: query + 1] = 0.7 ** torch.arange(query, -1, -1.0, dtype=torch.float64)
    torch.testing.assert_close(field.map, expected)
    assert not field.map[query + 1 :].any()
    profile = field.profile()
    torch.testing.assert_close(profile[: query + 1], expected[: query + 1].flip(0) / expected.sum())
    assert field.area(1.0).side == query + 1
    assert field.area(0.5).side == field.area(0.5).places  # a window that ends at the query


def test_implicit_maps_of_a_known_decay(own_registry):
    register_mixer(RunningMean, freeze_running_mean)
    torch.manual_seed(0)
    model = nn.Sequential(RunningMean(), RunningMean(), nn.Linear(8, 5)).double()
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    age = (torch.arange(7)[:, None] - torch.arange(7)).clamp(min=0)
    product = torch.eye(7, dtype=torch.float64)
    for mixer in (model[0], model[1]):
        rate = mixer.rate.detach()[:, None, None]
        map_ = torch.exp(-rate * age).tril().mean(0)
        product = map_ / map_.sum(1, keepdim=True) @ product  # no residual stream
    for position in (None, 2, -1):
        field = effective_receptive_field(model, x, by="implicit", position=position)
        row = product[3 if position is None else position]
        torch.testing.assert_close(field.map, row / row.max())
        assert field.center == (3 if position is None else position % 7,)


@pytest.mark.parametrize("by", ["gradient", "implicit"])
def test_a_causal_model_of_ids(by):
    model = tiny()
    field = effective_receptive_field(model, ids(2, 9), by=by)
    assert field.map.shape == (9,)
    assert field.center == (4,)
    assert not field.map[5:].any()
    assert bool((field.map[:5] > 0).all())
    assert field.profile().shape == (5,)
    assert float(field.profile().sum()) == pytest.approx(1)


@pytest.mark.parametrize("by", ["gradient", "implicit"])
def test_long_inputs_are_asked_at_the_same_token(by):
    # The wiring of more than 256 tokens is measured on 32 of them.
    field = effective_receptive_field(tiny(), ids(8, 60), by=by, position=-10)
    assert field.center == (50,)
    assert bool((field.map[:51] > 0).all())
    assert not field.map[51:].any()
    series = randomize(Flipped()).eval()
    field = effective_receptive_field(series, torch.randn(2, 300, 3), by=by, position=40)
    assert field.map.shape == (300,)
    assert field.center == (40,)
    assert not field.map[:40].any()


@pytest.mark.parametrize("by", ["gradient", "implicit"])
def test_padding_is_not_read(by):
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[:, :3] = 0
    options = {"additional_forward_args": {"attention_mask": mask}, "position": -1, "by": by}
    field = effective_receptive_field(tiny(), ids(2, 9), **options)
    assert not field.map[:3].any()
    assert bool((field.map[3:] > 0).all())


def sides_by_hand(values: np.ndarray, share: float) -> int:
    needed = share * values.sum() * (1 - 1e-12)
    for side in range(1, max(values.shape) + 1):
        widths = [min(side, n) for n in values.shape]
        starts = [range(n - w + 1) for n, w in zip(values.shape, widths, strict=True)]
        for corner in itertools.product(*starts):
            at = tuple(slice(s, s + w) for s, w in zip(corner, widths, strict=True))
            if values[at].sum() >= needed:
                return side
    raise AssertionError


@pytest.mark.parametrize("shape", [(23,), (9, 12), (4, 6, 5)])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 1.0])
def test_areas_agree_with_numpy(shape, share):
    generator = torch.Generator().manual_seed(len(shape))
    values = torch.rand(shape, generator=generator, dtype=torch.float64) ** 8
    field = of(values)
    found = field.area(share)
    flat = np.sort(field.map.numpy(), axis=None)[::-1]
    sums = flat.cumsum()
    assert found.places == int(np.argmax(sums >= share * sums[-1] * (1 - 1e-12))) + 1
    assert found.share == found.places / flat.size
    assert found.side == sides_by_hand(field.map.numpy(), share)


def test_a_profile_is_of_square_rings():
    field = of(torch.ones(5, 7), center=(2, 3))
    torch.testing.assert_close(
        field.profile(), torch.tensor([1, 8, 16, 10]).double() / 35, check_dtype=False
    )
    assert field.profile(center=(0, 0))[-1] == pytest.approx(5 / 35)
    with pytest.raises(ValueError, match="pass center="):
        of(torch.ones(5)).profile()
    with pytest.raises(ValueError, match=r"center is 9"):
        of(torch.ones(5)).profile(9)


def test_batches_are_averaged_as_one_batch():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 4, 3))
    x = torch.randn(6, 3, 12, 12)
    whole = effective_receptive_field(net, x)
    for batches in (list(x.split(4)), (one for one in x.split(1)), torch.utils.data.DataLoader(x)):
        field = effective_receptive_field(net, batches)
        torch.testing.assert_close(field.map, whole.map, rtol=1e-5, atol=1e-7)
        assert field.inputs == 6


def test_positive_is_the_formula_of_the_published_code():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Conv2d(8, 4, 3))
    x = torch.randn(5, 3, 12, 10)
    leaf = x.clone().requires_grad_()
    outputs = net(leaf)
    size = outputs.shape
    central = outputs[:, :, size[2] // 2, size[3] // 2].relu().sum()
    published = torch.autograd.grad(central, leaf)[0].relu().sum((0, 1)).double()
    field = effective_receptive_field(net, x, positive=True)
    torch.testing.assert_close(field.map, published / published.max())
    assert not torch.allclose(field.map, effective_receptive_field(net, x).map)


def test_channels_and_targets():
    net = nn.Conv2d(3, 4, 3, padding=1)
    x = torch.randn(2, 3, 8, 8)
    one = effective_receptive_field(net, x, position=(2, 3), target=1)
    entry = effective_receptive_field(net, x, target=(1, 2, 3))
    torch.testing.assert_close(one.map, entry.map)
    assert (one.center, entry.center) == ((2, 3), None)
    last = effective_receptive_field(
        lambda x: net(x.movedim(-1, 1)).movedim(1, -1), x.movedim(1, -1), channels=-1
    )
    torch.testing.assert_close(last.map, effective_receptive_field(net, x).map)
    flat = effective_receptive_field(lambda x: net(x).sum(1), x)  # (B, H, W)
    torch.testing.assert_close(flat.map, last.map)


class Flipped(nn.Module):
    """A classifier whose mixer is given the tokens in reverse: it reads later ones."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(3, 8)
        self.mixer = BidirectionalMamba(8, state=3, bimamba_type="none")
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.mixer(self.inp(x).flip(1)).flip(1)).mean(1))


def test_a_classifier_is_asked_at_the_last_mixers_central_token():
    model = randomize(Flipped()).eval()
    x = torch.randn(2, 9, 3)
    for by in ("gradient", "implicit"):
        field = effective_receptive_field(model, x, by=by)
        assert field.center == (4,)
        assert not field.map[:4].any()
        assert bool((field.map[4:8] > 0).all())
    first = effective_receptive_field(model, x, position=0)
    assert bool((first.map > 0).all())
    assert "output of mixer" in first.unit


@pytest.mark.parametrize("by", ["gradient", "implicit"])
def test_patches_around_a_class_token(by):
    torch.manual_seed(0)
    model = randomize(VisionMamba((12, 20), 4, classes=5, width=8, depth=2, state=4, dt_rank=2))
    images = torch.randn(2, 3, 12, 20)
    field = effective_receptive_field(model.eval(), images, by=by)
    assert field.map.shape == (12, 20)
    assert field.center == (6, 10)
    assert field.unit.startswith("place (1, 2) of 3 x 5 of the last mixers' grid")
    own = field.map[4:8, 8:12].mean()
    assert own > field.map.mean()
    token = effective_receptive_field(model, images, by=by, position=8)  # the class token is 7
    torch.testing.assert_close(token.map, field.map)
    assert effective_receptive_field(model, images, by=by, position=7).center is None
    if by == "implicit":  # each pixel of a patch gets the same
        patches = field.map.unflatten(1, (5, 4)).unflatten(0, (3, 4))
        assert torch.equal(patches, patches[:, :1, :, :1].expand_as(patches))


class Video(nn.Module):
    """Two patches each of time, height and width, and a causal mixer over all."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Conv3d(2, 8, (2, 4, 4), stride=(2, 4, 4))
        self.mixer = BidirectionalMamba(8, state=3, bimamba_type="none")
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mixer(self.inp(x).flatten(2).mT).mean(1))


@pytest.mark.parametrize("by", ["gradient", "implicit"])
def test_videos(by):
    model = randomize(Video()).eval()
    x = torch.randn(1, 2, 4, 8, 8)
    field = effective_receptive_field(model, x, by=by, position=(0, 1, 1))
    assert field.map.shape == (4, 8, 8)
    assert not field.map[2:].any()  # frames after that of the unit
    assert bool(field.map[:2].any())
    assert field.area(1.0).share <= 0.5
    assert "cube" in str(field)
    assert len(receptive_field_map(field).axes) == 4  # one per axis, and the scale


def test_inference_mode_and_the_model_are_left_as_they_were():
    model = tiny()
    hooks = [len(m._forward_hooks) for m in model.modules()]
    with torch.inference_mode():
        inside = effective_receptive_field(model, ids(1, 7))
    torch.testing.assert_close(inside.map, effective_receptive_field(model, ids(1, 7)).map)
    assert hooks == [len(m._forward_hooks) for m in model.modules()]
    assert all(p.grad is None for p in model.parameters())


def conv(x: Tensor) -> Tensor:
    return nn.functional.avg_pool2d(x, 2)


X = torch.ones(1, 3, 8, 8)


@pytest.mark.parametrize(
    ("error", "match", "arguments"),
    [
        (ValueError, "by is 'gradients'", {"by": "gradients"}),
        (ValueError, "position is 4; expected 2 ints", {"position": 4}),
        (ValueError, r"position is \(4, 0\); expected 2 ints", {"position": (4, 0)}),
        (ValueError, r"position is 1.5", {"position": 1.5}),
        (ValueError, "channels is 7", {"channels": 7}),
        (TypeError, "channels is 'last'", {"channels": "last"}),
        (TargetError, "expected one of the 3 channels", {"position": (0, 0), "target": 3}),
        (TargetError, "does not select one value", {"target": (0, 9, 9)}),
        (ValueError, "pass position= alone", {"by": "implicit", "target": 0}),
        (ValueError, "the model it runs is not known", {"by": "implicit"}),
    ],
)
def test_bad_arguments(error, match, arguments):
    with pytest.raises(error, match=match):
        effective_receptive_field(conv, X, **arguments)


@pytest.mark.parametrize(
    ("error", "match", "inputs"),
    [
        (TypeError, "expected a tensor, or an iterable", 3),
        (TypeError, r"\(x for x, _ in loader\)", [(X, 1)]),
        (ValueError, "inputs is a tuple of 2", (X, X)),
        (InputError, "holds no batch", []),
        (InputError, "expected one size", [X, X[..., :4]]),
        (InputError, "holds NaN or Inf", X * float("nan")),
    ],
)
def test_bad_inputs(error, match, inputs):
    with pytest.raises(error, match=match):
        effective_receptive_field(lambda x: conv(x) ** 2, inputs)


def test_what_has_no_unit():
    with pytest.raises(ValueError, match="without the places of inputs"):
        effective_receptive_field(nn.Sequential(nn.Flatten(), nn.Linear(192, 10)), X)
    with pytest.raises(InputError, match="depends on no place"):
        effective_receptive_field(lambda x: x * 0, X)
    with pytest.raises(ValueError, match="has no gradient"):
        effective_receptive_field(lambda x: conv(x).detach(), X)
    with pytest.raises(ValueError, match="and no nn"):
        effective_receptive_field(lambda x: x[..., None].float(), ids(1, 5))
    with pytest.raises(UnsupportedModelError):
        effective_receptive_field(nn.Conv2d(3, 3, 3), X, by="implicit")
    with pytest.raises(ValueError, match="share is 0"):
        of(torch.ones(3)).area(0)


def test_maps_are_drawn_on_one_scale():
    fields = {name: of(torch.rand(16, 16) + 1e-6, (8, 8)) for name in "abc"}
    figure = receptive_field_map(fields, decades=3, title="three")
    *cells, bar = figure.axes
    assert [cell.get_title() for cell in cells] == ["a", "b", "c"]
    norms = [cell.images[0].norm for cell in cells]
    assert all(isinstance(norm, LogNorm) for norm in norms)
    assert {(norm.vmin, norm.vmax) for norm in norms} == {(1e-3, 1.0)}
    assert "90%" in cells[0].get_xlabel()
    assert bar.get_ylabel()
    figure.canvas.draw()


def test_series_are_drawn_as_curves():
    fields = {str(n): of(torch.arange(1, n + 1.0), (n - 1,)) for n in (6, 9)}
    figure = receptive_field_map(fields)
    curves, windows = figure.axes
    assert [len(line.get_ydata()) for line in curves.lines[::2]] == [6, 9]
    assert len(windows.patches) == 4
    widths = [patch.get_width() for patch in windows.patches]
    assert widths == [fields[n].area(s).side for n in ("6", "9") for s in (0.5, 0.9)]
    figure.canvas.draw()


def test_a_picture_needs_fields_of_one_kind():
    for fields in ({}, {"a": of(torch.ones(3)), "b": of(torch.ones(3, 3))}):
        with pytest.raises(ValueError, match="draw series and images separately"):
            receptive_field_map(fields)
    with pytest.raises(ValueError, match="decades is 0"):
        receptive_field_map(of(torch.ones(3)), decades=0)
