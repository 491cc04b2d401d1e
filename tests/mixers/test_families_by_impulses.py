"""Impulse probes of every family: a model's own scan function, measured.

The scan is linear in its values. A real forward pass records its other arguments; with them and
a unit impulse at token j it returns column j of the implicit attention. Softmax attention
returns its probabilities itself. No formula of this library is in any of it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import (
    CONV_FAMILIES,
    DELTA_FAMILIES,
    FAMILIES,
    HYBRIDS,
    KDA_FAMILIES,
    SSD_FAMILIES,
    build,
    modeling_of,
    padded,
    skip_what_fails_by_itself,
)
from models import S6_FAMILIES, Gives, ids, s6_paths, tiny, without_cache
from torch import Tensor, nn

from captum_ssm import hidden_attention
from captum_ssm.mixers import find_mixers

LENGTHS = (1, 2, 3, 19, 35)
DELTA_LENGTHS = (1, 2, 3, 64, 65)  # of functions that take chunks of 64
S6_LENGTHS = (1, 2, 3, 7, 19)  # of a loop over tokens, once per head and column
TOLERANCE = 2e-5

# A scan with everything but its values fixed: values (B, L, M, P) to outputs (B, L, M, P).
Scan = Callable[[Tensor], Tensor]
Measure = Callable[[nn.Module, dict[str, Tensor], Any], dict[str, Tensor]]


def impulses(scan: Scan, shape: tuple[int, ...]) -> Tensor:
    """The matrices of a scan over values of ``shape (B, L, M, P)``: ``(B, M, L, L)``."""
    columns = []
    for j in range(shape[1]):
        impulse = torch.zeros(shape)
        impulse[:, j] = 1
        out = scan(impulse)
        # All channels of a map are carried alike.
        torch.testing.assert_close(out, out[..., :1].expand_as(out), atol=1e-5, rtol=1e-5)
        columns.append(out[..., 0])
    return torch.stack(columns, -1).transpose(1, 2)


def function_probe(
    name: str, values: int | str, *, tokens_last: bool = False, of: str = "", **without: Any
) -> Measure:
    """A scan that is a function of the modeling file; ``values`` names its value argument.

    With ``tokens_last`` it takes ``(B, D, L)`` and may add a bias. Only calls by mixers whose class
    has a name that ends like ``of`` count.
    """

    def measure(model, inputs, monkeypatch) -> dict[str, Tensor]:
        modeling = modeling_of(model, name)
        original = getattr(modeling, name)
        paths = {module: path for path, module in model.named_modules()}
        calls: dict[str, tuple[tuple, dict]] = {}
        visited: list[nn.Module] = []

        def spy(*args, **kwargs):
            calls[paths[visited[-1]]] = args, kwargs
            return original(*args, **kwargs)

        # A scan is called by the innermost module that was entered last.
        hooks = [m.register_forward_pre_hook(lambda m, _: visited.append(m)) for m in mixers(model)]
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(modeling, name, spy)
            for mixer in mixers(model):
                for attribute, value in mixer.__dict__.items():
                    if value is original:
                        patch.setitem(mixer.__dict__, attribute, spy)
            # A cache would put zeros ahead of few tokens.
            model(**inputs, **({"use_cache": False} if tokens_last else {}))
        for hook in hooks:
            hook.remove()

        def matrices(args, kwargs) -> Tensor:
            given = args[values] if isinstance(values, int) else kwargs[values]
            given = given.mT if tokens_last else given
            per_channel = given.dim() == 3
            shape = (*given.shape, 1) if per_channel else tuple(given.shape)

            def scan(v: Tensor) -> Tensor:
                v = v[..., 0] if per_channel else v
                if tokens_last:
                    return (run(v.mT) - run(0 * v.mT)).mT[..., None]
                out = run(v)
                return out[..., None] if per_channel else out

            def run(v: Tensor) -> Tensor:
                positional, named = list(args), kwargs | without
                if isinstance(values, int):
                    positional[values] = v
                else:
                    named[values] = v
                out = original(*positional, **named)
                return out[0] if isinstance(out, tuple) else out

            return impulses(scan, shape)

        kinds = {path: type(model.get_submodule(path)).__name__ for path in calls}
        return {p: matrices(*call) for p, call in calls.items() if kinds[p].endswith(of)}

    return measure


def mixers(model: nn.Module) -> list[nn.Module]:
    return [module for _, module in find_mixers(model)]


def probe_s6(model, inputs, monkeypatch) -> dict[str, Tensor]:
    """S6's scan, channels ahead of tokens; Zamba has one per head of channels."""
    modeling = modeling_of(model, "mamba_selective_scan")
    original, calls = modeling.mamba_selective_scan, []

    def spy(*args, **kwargs):
        calls.append((args, kwargs))
        return original(*args, **kwargs)

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(modeling, "mamba_selective_scan", spy)
        model(**inputs)

    def matrices(args, kwargs) -> Tensor:
        values, *coefficients = args
        named = kwargs | {"D": None, "z": None, "return_last_state": False}

        def scan(v: Tensor) -> Tensor:
            return original(v[..., 0].mT, *coefficients, **named).mT[..., None]

        return impulses(scan, (*values.mT.shape, 1))

    paths = s6_paths(model)
    heads = len(calls) // len(paths)
    assert heads == getattr(mixers(model)[0], "n_mamba_heads", 1)
    assert len(calls) == heads * len(paths)
    parts = [matrices(*call) for call in calls]
    joined = [torch.cat(parts[i : i + heads], 1) for i in range(0, len(parts), heads)]
    return dict(zip(paths, joined, strict=True))


def probe_rg_lru(model, inputs, monkeypatch) -> dict[str, Tensor]:
    """``_rnn_scan``, whose values are gated ahead of it: an impulse carries its token's gate."""
    maps = {}
    for path, block in find_mixers(model):
        if not hasattr(block, "rg_lru"):
            continue
        unit, seen = block.rg_lru, {}
        scan = type(unit)._rnn_scan

        def spy(self, scan=scan, seen=seen, unit=unit, **kwargs):
            if self is unit:
                seen.update(kwargs)
            return scan(self, **kwargs)

        hook = unit.register_forward_pre_hook(lambda m, args, seen=seen: seen.update(v=args[0]))
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(type(unit), "_rnn_scan", spy)
            model(**inputs)
        hook.remove()
        values = seen.pop("v")
        gating = seen["hidden_states"] / values
        seen["recurrent_states"] = None
        maps[path] = impulses(
            lambda v, s=seen, g=gating, u=unit, scan=scan: scan(
                u, **(s | {"hidden_states": g * v[..., 0]})
            )[0][..., None],
            (*values.shape, 1),
        )
    return maps


def probe_mlstm(model, inputs, monkeypatch) -> dict[str, Tensor]:
    """xLSTM's backend module, heads ahead of tokens."""
    seen: dict[str, dict[str, Any]] = {}
    hooks = [
        layer.mlstm_backend.register_forward_pre_hook(
            lambda m, args, kwargs, path=path: seen.update({path: kwargs}), with_kwargs=True
        )
        for path, layer in find_mixers(model)
    ]
    with torch.no_grad():
        model(**inputs)
    for hook in hooks:
        hook.remove()

    def matrices(path: str) -> Tensor:
        backend, kwargs = model.get_submodule(path).mlstm_backend, seen[path]
        B, H, L, P = kwargs["value"].shape

        def scan(v: Tensor) -> Tensor:
            return backend(**(kwargs | {"value": v.transpose(1, 2)}))[0].transpose(1, 2)

        return impulses(scan, (B, L, H, P))

    return {path: matrices(path) for path in seen}


def probe_lightning(model, inputs, monkeypatch) -> dict[str, Tensor]:
    """MiniMax's block loop, which is the module itself: its projection and norm are replaced."""

    class Recorder(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.seen = x
            return x

    class First(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.width = width

        def forward(self, x: Tensor) -> Tensor:
            return x[..., : self.width]

    maps = {}
    for path, module in find_mixers(model):
        if not hasattr(module, "slope_rate"):
            continue
        calls: list[dict[str, Any]] = []
        hook = module.register_forward_pre_hook(
            lambda m, args, kwargs, calls=calls: calls.append(kwargs), with_kwargs=True
        )
        with torch.no_grad():
            model(**inputs)
            qkv = module.act_fn(module.qkv_proj(calls[0]["hidden_states"]))
        hook.remove()
        H, P = module.num_attention_heads, module.head_dim
        parts, norm = qkv.unflatten(-1, (H, 3 * P)), Recorder()
        replaced = {
            "act_fn": nn.Identity(),
            "qkv_proj": nn.Identity(),
            "norm": norm,
            "output_gate": First(H * P),
            "out_proj": nn.Identity(),
        }

        def scan(v: Tensor, m=module, call=calls[0], parts=parts, norm=norm, P=P) -> Tensor:
            mixed = parts.clone()
            mixed[..., 2 * P :] = v
            m(**(without_cache(call) | {"hidden_states": mixed.flatten(2)}))
            return norm.seen.unflatten(-1, (-1, P))

        with monkeypatch.context() as patch, torch.no_grad():
            for name, stub in replaced.items():
                patch.setitem(module._modules, name, stub)
            maps[path] = impulses(scan, (*qkv.shape[:2], H, P))
    return maps


def probabilities(model, inputs, monkeypatch) -> dict[str, Tensor]:
    """Softmax attention's own weights, returned by transformers' eager function."""
    modeling = sys.modules[type(model).__module__]
    if not hasattr(modeling, "eager_attention_forward"):
        pytest.skip("transformers 4 has its own attention in this family")
    original = modeling.eager_attention_forward
    paths = {module: path for path, module in model.named_modules()}
    maps: dict[str, Tensor] = {}

    def spy(module, *args, **kwargs):
        out = original(module, *args, **kwargs)
        path, visit = paths[module], 0
        while f"{path}:{visit}" in maps or (visit == 0 and path in maps):
            visit += 1
        maps[f"{path}:{visit}" if visit else path] = out[1]
        return out

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(modeling, "eager_attention_forward", spy)
        model(**inputs)
    return maps


def eager_probabilities(model, inputs, monkeypatch) -> dict[str, Tensor]:
    """The probabilities of a model all of whose mixers are attention."""
    model.set_attn_implementation("eager")
    return probabilities(model, inputs, monkeypatch)


SSD = function_probe("mamba2_chunk_scan", 0, D=None)
DELTA = function_probe("torch_chunk_gated_delta_rule", 2)
CONV = function_probe("causal_conv1d_fn", 0, tokens_last=True)
RESIDUAL_CONV = function_probe("causal_conv1d_fn", 0, tokens_last=True, of="ShortConvolution")
PROBES: dict[str, Measure] = {
    **dict.fromkeys(S6_FAMILIES, probe_s6),
    **dict.fromkeys(SSD_FAMILIES, SSD),
    "recurrent_gemma": probe_rg_lru,
    "rwkv": function_probe("rwkv_linear_attention", 3),
    "xlstm": probe_mlstm,
    "xlstm_fused": probe_mlstm,
    "minimax": probe_lightning,
    **dict.fromkeys(DELTA_FAMILIES, DELTA),
    **dict.fromkeys(KDA_FAMILIES, function_probe("chunk_kimi_delta_attention", 2)),
    **dict.fromkeys(("lfm2", "lfm2_moe", "lfm3"), CONV),
    **dict.fromkeys(("inkling", "inkling2"), RESIDUAL_CONV),
    "zaya": eager_probabilities,
}
PROBES = {family: probe for family, probe in PROBES.items() if family in FAMILIES}
LENGTHS_OF = {
    **dict.fromkeys((*S6_FAMILIES, *CONV_FAMILIES), S6_LENGTHS),
    **dict.fromkeys((*DELTA_FAMILIES, *KDA_FAMILIES), DELTA_LENGTHS),
}


def assert_same(maps: dict[str, Tensor], truth: dict[str, Tensor], mask: Tensor | None) -> None:
    assert truth
    for path, expected in truth.items():
        if mask is not None:
            real = mask.to(expected.dtype)
            expected = expected * real[:, None, :, None] * real[:, None, None]
        assert maps[path].shape == expected.shape
        assert maps[path].dtype == torch.float32
        assert expected.abs().max() > 1e-3
        error = (maps[path] - expected).abs().max()
        assert error <= TOLERANCE * expected.abs().max(), path
    assert [path for path in maps if path in truth] == list(truth)  # in forward order


def test_every_family_has_a_probe():
    variants = {"falcon_h1_norm_first", "falcon_h1_no_norm"}  # the same scan, another norm
    assert set(PROBES) == set(FAMILIES) - variants


@pytest.mark.parametrize(
    ("family", "length"),
    [
        pytest.param(family, L, marks=pytest.mark.slow if L == 64 else ())
        for family in PROBES
        for L in LENGTHS_OF.get(family, LENGTHS)
    ],
)
def test_hidden_attention_is_what_impulses_measure(family, length, monkeypatch):
    skip_what_fails_by_itself(family, length)
    model, tokens = build(family), ids(2, length)
    truth = PROBES[family](model, {"input_ids": tokens}, monkeypatch)
    assert_same(hidden_attention(model, tokens), truth, None)


@pytest.mark.filterwarnings("ignore:.*reads the padding")
@pytest.mark.parametrize(
    ("family", "side"),
    [*itertools.product(PROBES, ("left", "right")), *((f, "middle") for f in S6_FAMILIES)],
)
def test_under_a_padding_mask(family, side, monkeypatch):
    model, tokens, mask = build(family), ids(2, 9), padded(side)
    if side == "middle":
        mask = torch.ones(2, 9, dtype=torch.long)
        mask[1, 3:5] = 0
    truth = PROBES[family](model, {"input_ids": tokens, "attention_mask": mask}, monkeypatch)
    maps = hidden_attention(model, tokens, additional_forward_args={"attention_mask": mask})
    assert_same(maps, truth, mask)


@pytest.mark.parametrize("family", S6_FAMILIES)
def test_maps_of_s6_differ_and_are_not_trivial(family, monkeypatch):
    # Else a test of maps could not tell which channel is which.
    model, tokens = tiny(family), ids(1, 7)
    for m in hidden_attention(model, tokens, layers=s6_paths(model)).values():
        flat = m[0].flatten(1)
        distance = torch.cdist(flat, flat).fill_diagonal_(float("inf"))
        assert distance.min() > 1e-3 * flat.norm(dim=1).mean()
    for length in S6_LENGTHS:
        for truth in probe_s6(model, {"input_ids": ids(2, length)}, monkeypatch).values():
            assert truth.tril().abs().median() > 1e-6 * truth.abs().max()


@pytest.mark.parametrize("act", ["silu", "gelu", "relu"])
def test_options_of_the_architecture(act, monkeypatch):
    changes = {"conv_kernel": 3, "use_conv_bias": False, "use_bias": True, "expand": 3}
    model, tokens = tiny("mamba", hidden_act=act, **changes), ids(2, 7)
    truth = probe_s6(model, {"input_ids": tokens}, monkeypatch)
    assert_same(hidden_attention(model, tokens), truth, None)


@pytest.mark.filterwarnings("ignore:.*reads the padding")
@pytest.mark.parametrize(
    ("length", "side"), [(1, None), (2, None), (19, None), (19, "left"), (19, "right")]
)
@pytest.mark.parametrize("family", HYBRIDS)
def test_softmax_attention_is_what_the_model_computes(family, length, side, monkeypatch):
    skip_what_fails_by_itself(family, length, side)
    model, tokens = build(family), ids(2, length)
    mask = None if side is None else padded(side, length=length)
    inputs = {} if mask is None else {"attention_mask": mask}
    maps = hidden_attention(model, tokens, additional_forward_args=inputs or None)
    model.set_attn_implementation("eager")
    truth = probabilities(model, {"input_ids": tokens} | inputs, monkeypatch)
    if family == "inkling2":  # the map of full attention includes a convolution, see below
        own = {path: p for path, p in truth.items() if path in maps}  # not those over depth
        truth = {path: p for path, p in own.items() if maps[path].shape == p.shape}
    assert_same(maps, truth, mask)
    again = hidden_attention(model, tokens, additional_forward_args=inputs or None)
    assert_same(again, truth, mask)


@pytest.mark.parametrize(("length", "side"), [(1, None), (2, None), (9, "left"), (9, "right")])
def test_a_convolution_with_taps_of_each_token_is_part_of_the_map(length, side, monkeypatch):
    if "inkling2" not in FAMILIES:
        pytest.skip("not in this transformers")
    model, tokens = build("inkling2"), ids(2, length)
    path, module = next(
        (p, m) for p, m in find_mixers(model) if type(m).__name__ == "Inkling2FullAttention"
    )
    mask = None if side is None else padded(side)
    inputs = {} if mask is None else {"attention_mask": mask}
    maps = hidden_attention(model, tokens, layers=[path], additional_forward_args=inputs or None)
    parts = {name: (module, name) for name in ("v_proj", "v_norm", "gate_proj", "o_proj")}
    if hasattr(module.v_proj, "sconv"):  # since transformers 5.24
        values, out = module.v_proj, module.o_proj
        parts = {"v_proj": (values, "linear"), "v_norm": (values, "norm")}
        parts |= {"gate_proj": (out, "gate_proj"), "o_proj": (out, "linear")}
    norm = getattr(*parts["v_norm"])
    calls: list[dict[str, Any]] = []
    norms: list[Tensor] = []
    hooks = [
        module.register_forward_pre_hook(lambda m, a, kw: calls.append(kw), with_kwargs=True),
        norm.register_forward_hook(lambda m, a, y: norms.append(y / a[0])),
    ]
    with torch.no_grad():
        model(tokens, **inputs)
    for hook in hooks:
        hook.remove()
    call = without_cache(calls[0])

    open_gate = Gives(lambda x: torch.full((*x.shape[:2], 32), torch.inf))
    columns = []
    with monkeypatch.context() as patch, torch.no_grad():
        for name, stub in {
            "v_norm": Gives(lambda v: v * norms[0]),
            "gate_proj": open_gate,
            "o_proj": nn.Identity(),
        }.items():
            parent, child = parts[name]
            patch.setitem(parent._modules, child, stub)
        for j in range(length):
            impulse = torch.zeros(2, length, 16)
            impulse[:, j] = 1
            parent, child = parts["v_proj"]
            patch.setitem(parent._modules, child, Gives(lambda x, v=impulse: v))
            columns.append(module(**call)[0])
    assert_same(maps, {path: torch.stack(columns, -1).transpose(1, 2)}, mask)
