"""Every layer is what its frozen operator says: map by map, and as a whole.

Impulse probes: what a layer's own scan returns of one token's values is a column of its map. A
forward pass records the arguments of the scan, fla's recurrence or its naive form; with them and
other values it is called again. No formula of this library is in any of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import explained
import layers
import pytest
import torch
from explained import EXPLAINED, UNPADDED, Arguments, scans_replaced, some_fast
from families import padded
from frozen import assert_reconstructs, frozen_layers
from models import Gives, ids
from torch import Tensor, nn

from captum_ssm.mixers import FrozenMixer

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # fla's advice on options
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of kernels that NumPy runs
]
TOLERANCE = 2e-5
CHUNK = (64, 65)  # the tokens of a chunk of fla's, and one more
LENGTHS = (1, 2, 9, *CHUNK)


def scan_calls(model: nn.Module, run: Callable[[], object]) -> list[tuple[Callable, Arguments]]:
    """The scans that the layers' files call in a run, with their arguments by name."""
    found: list[tuple[Callable, Arguments]] = []

    def noted(function: Callable) -> Callable[[Arguments], Any]:
        def call(named: Arguments) -> Any:
            found.append((function, named))
            return function(**named)

        return call

    with scans_replaced(model, noted):
        run()
    return found


def columns_of_heads(scan: Callable, named: Arguments, length: int, tokens: Tensor) -> Tensor:
    """The maps of a scan of values ``(B, S L, H, P)``, S steps per token, one per step and head.

    Their columns ``tokens``: ``(B, S H, L, columns)``.
    """
    v = named["v"]
    steps, P = v.shape[-3] // length, v.shape[-1]
    at = (tokens[:, None] * steps + torch.arange(steps)).flatten()
    found = []
    for some in at.split(P):
        impulses = torch.zeros_like(v)
        impulses.movedim(-3, 0)[some, ..., torch.arange(len(some))] = 1  # a channel for each
        found.append(scan_of(scan, named, "v")(impulses)[..., : len(some)])
    y = torch.cat(found, -1)  # (B, L, H, columns S)
    y = y if y.shape[-3] == length else y[..., steps - 1 :: steps, :, :]
    maps = torch.cat([y[..., step::steps] for step in range(steps)], -2).transpose(-2, -3)
    return maps if v.dim() == 4 else maps[None]


def columns_of_channels(scan: Callable[[Tensor], Tensor], unit: Tensor, tokens: Tensor) -> Tensor:
    """Columns of a scan whose channels differ, ``(B, D, L, columns)``, of a token's ``unit``."""
    found = []
    for j in tokens.tolist():
        impulses = torch.zeros_like(unit)
        impulses[:, j] = unit[:, j]
        found.append(scan(impulses).flatten(2))
    return torch.stack(found, -1).transpose(1, 2)


def scan_of(function: Callable, named: Arguments, values: str) -> Callable[[Tensor], Tensor]:
    """What a function returns of other values."""

    def scan(x: Tensor) -> Tensor:
        y = function(**named | {values: x})
        return y[0] if isinstance(y, tuple) else y

    return scan


def unpacked(maps: Tensor, mask: Tensor) -> Tensor:
    """Maps over the packed tokens of all rows, ``(1, M, T, T)``, as ``(B, M, L, L)``."""
    B, L = mask.shape
    at = mask.flatten().nonzero()[:, 0]
    whole = torch.zeros(maps.shape[1], B * L, B * L)
    whole[:, at[:, None], at] = maps[0]
    blocks = whole.unflatten(1, (B, L)).unflatten(3, (B, L))
    assert not any(blocks[:, b, :, c].any() for b in range(B) for c in range(B) if b != c)
    return torch.stack([blocks[:, b, :, b] for b in range(B)])


def measured_by_calls(
    model: nn.Module, run: Callable[[], object], mask: Tensor, tokens: Tensor
) -> list[Tensor]:
    """Columns of the maps of each layer's scan, a function that the layer's file calls."""
    found = []
    for scan, named in scan_calls(model, run):
        packed = named.get("cu_seqlens", named.get("cu_seqlens_q")) is not None
        length = int(mask.sum()) if packed else mask.shape[1]
        at = torch.arange(length) if packed else tokens
        if "v" not in named:
            # HGRN's values have the input gate in them already: the impulse carries it.
            unit = 1 - named["g"].exp()
            maps = columns_of_channels(scan_of(scan, named, "x"), unit, at)
        elif named.keys() >= {"q", "b", "w"}:
            # Gated DeltaNet 2 has a factor for each channel of the values.
            unit = torch.ones_like(named["v"])
            maps = columns_of_channels(scan_of(scan, named, "v"), unit, at)
        else:
            maps = columns_of_heads(scan, named, length, at)
        found.append(unpacked(maps, mask) if packed else maps)
    return found


def measured_by_stubs(
    layer: nn.Module, run: Callable[[], object], length: int, tokens: Tensor
) -> Tensor:
    """The columns of Mamba and Mamba-2, whose scans are written out: what is around is replaced."""
    seen: dict[str, Any] = {}
    hooks = [
        module.register_forward_hook(lambda m, args, y, name=name: seen.update({name: y}))
        for name, module in layer.named_children()
    ]
    hooks.append(
        layer.register_forward_pre_hook(
            lambda m, args, kwargs: seen.update(call=(args, kwargs)), with_kwargs=True
        )
    )
    run()
    for hook in hooks:
        hook.remove()
    args, kwargs = seen["call"]
    width, mixed = layer.intermediate_size, layer.act(seen["conv1d"][..., :length]).clone()
    stubs = {
        "conv1d": lambda x: mixed,
        "act": lambda x: x,
        "x_proj": lambda x: seen["x_proj"],
        "norm": lambda y, gate: y,
        "out_proj": lambda y: y,
    }
    if hasattr(layer, "x_proj"):  # Mamba, whose gate is then one
        stubs["in_proj"] = lambda x: torch.ones(*x.shape[:2], 2 * width)

    def scan(values: Tensor) -> Tensor:
        mixed[:, :width] = values.mT
        return layer(*args, **kwargs)[0]

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        for name, stub in stubs.items():
            if name in layer._modules:
                patch.setitem(layer._modules, name, Gives(stub))
            elif hasattr(layer, name):
                patch.setattr(layer, name, stub)
        patch.setitem(layer._parameters, "D", torch.zeros_like(layer.D))
        maps = columns_of_channels(scan, torch.ones(len(mixed), length, width), tokens)
    of_heads = maps.unflatten(1, (getattr(layer, "num_heads", width), -1))
    torch.testing.assert_close(of_heads, of_heads[:, :, :1].expand_as(of_heads))
    return of_heads[:, :, 0]


def map_of(mixer: FrozenMixer, maps: int) -> Tensor:
    operator = mixer.operator("hidden")
    if type(mixer).__name__ == "FrozenScans":
        # NSA's of few tokens: softmax attentions, each of which has a gate after it.
        operator = mixer.operator("unified", ("gate",))
    return operator.matrix()[:, :: operator.maps // maps]


def assert_is_its_scan(model: nn.Module, ids: Tensor, mask: Tensor | None = None) -> None:
    inputs = {} if mask is None else {"attention_mask": mask}
    length = ids.shape[1]
    tokens = torch.linspace(0, length - 1, min(length, 16)).long()

    def run() -> None:
        with torch.no_grad():
            model(ids, **inputs)

    frozen = frozen_layers(model, ids, mask, check=True)
    written_out = [m for m in model.modules() if type(m).__name__ in ("Mamba", "Mamba2")]
    real = torch.ones(ids.shape) if mask is None else mask
    with torch.no_grad():
        truths = [measured_by_stubs(layer, run, length, tokens) for layer in written_out]
        truths = truths or measured_by_calls(model, run, real, tokens)
    for layer, truth in zip(frozen, truths, strict=True):
        assert_reconstructs(layer, mask)
        of_real = real[:, None, :, None] * real[:, None, None, tokens]
        ours = map_of(layer.mixer, truth.shape[1])[..., tokens] * of_real
        truth = truth * of_real
        assert ours.shape == truth.shape
        assert truth.abs().max() > 1e-3
        assert (ours - truth).abs().max() <= TOLERANCE * truth.abs().max(), layer.name


@pytest.mark.usefixtures("naive")
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", layers.LAYERS)
def test_a_registered_layer_is_its_naive_scan(name, length):
    assert_is_its_scan(layers.build(name), ids(2, length))


@pytest.mark.usefixtures("naive")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", layers.LAYERS)
def test_a_registered_layer_under_a_padding_mask(name, side):
    assert_is_its_scan(layers.build(name), ids(2, 9), padded(side))


@pytest.mark.usefixtures("recurrences")
@pytest.mark.parametrize("length", LENGTHS[:3])
@pytest.mark.parametrize("name", EXPLAINED)
def test_a_layer_is_its_scan(name, length):
    assert_is_its_scan(explained.build(name), ids(2, length))


@pytest.mark.slow
@pytest.mark.usefixtures("recurrences")
@pytest.mark.parametrize("length", CHUNK)
@pytest.mark.parametrize("name", EXPLAINED)
def test_a_layer_is_its_scan_over_a_chunk(name, length):
    assert_is_its_scan(explained.build(name), ids(1, length))


@pytest.mark.usefixtures("recurrences")
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", some_fast([n for n in EXPLAINED if n not in UNPADDED]))
def test_a_layer_under_a_padding_mask(name, side):
    assert_is_its_scan(explained.build(name), ids(2, 9), padded(side))
