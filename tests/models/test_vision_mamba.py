"""Vision Mamba and SS2D: the published numbers, their operators, and relevance on pixels."""

import pytest
import torch
from captum.attr import IntegratedGradients, LayerAttribution, NoiseTunnel, visualization
from methods import each
from models import golden, randomize
from torch import Tensor, nn
from torch.nn import functional as F
from vision_models import images, isotropic, small

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaRollout,
    RawAttention,
    ReconstructionError,
    UnifiedImplicitAttention,
    hidden_attention,
)
from captum_ssm.capture import Request, freeze
from captum_ssm.models import BidirectionalMamba, TokenGrid, VisionMamba, s6
from captum_ssm.models.vision_mamba import find_cls

GOLDEN, WEIGHTS, CONFIG = golden("vim_tiny")
CLS = ("start", "middle", "end", "ends", None)


def test_golden_logits_and_mixers():
    g, model, seen = GOLDEN, VisionMamba.from_state_dict(WEIGHTS), {}
    for n, layer in enumerate(model.layers):
        layer.mixer.register_forward_hook(lambda m, a, out, n=n: seen.update({n: (a[0], out)}))
    with torch.no_grad():
        logits = model(g["image"])
    torch.testing.assert_close(logits, g["logits"], rtol=1e-5, atol=1e-5)
    for n, (x, y) in seen.items():
        torch.testing.assert_close(x, g[f"mixer{n}_in"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(y, g[f"mixer{n}_out"], rtol=1e-5, atol=1e-5)


def test_golden_matrices_of_both_directions():
    g, model = GOLDEN, VisionMamba.from_state_dict(WEIGHTS)
    found = hidden_attention(model, g["image"])
    frozen = freeze(Request.of(model, None, g["image"]))
    assert list(found) == [f"layers.{n}.mixer" for n in range(4)]
    for n, layer in enumerate(frozen.layers):
        truth = [g[f"attn_matrix_{way}_fp32_L{n}"] for way in "ab"]
        torch.testing.assert_close(found[layer.name], truth[0] + truth[1], atol=1e-4, rtol=0)
        for part, expected in zip(layer.mixer.recurrence.parts, truth, strict=True):
            torch.testing.assert_close(part.matrix(), expected, atol=1e-4, rtol=0)
        assert truth[1].triu(1).abs().max() > 0.01
        assert truth[1].tril(-1).abs().max() == 0


def test_golden_configuration_is_read_off_the_weights():
    model, config = VisionMamba.from_state_dict(WEIGHTS), CONFIG
    grid = model.token_grid(32, 32)
    assert model.image_size == (config["img_size"],) * 2
    assert model.cls_tokens() == [config["cls_pos"]] == [8]
    assert grid.shape == (4, 4)
    assert grid.index.flatten().tolist() == [t for t in range(17) if t != 8]
    mixer = model.layers[0].mixer
    assert (mixer.bimamba_type, mixer.if_divide_out) == ("v2", True)
    assert mixer.A_log.shape == (48, config["ssm_cfg"]["d_state"])


@pytest.mark.parametrize("wrapper", [None, "model", "module."])
def test_a_published_checkpoint_at_224_pixels(wrapper):
    """The sizes of the published tiny model, at a depth that a test can afford."""
    torch.manual_seed(0)
    source = VisionMamba(depth=3)
    state = source.state_dict()
    assert state["pos_embed"].shape == (1, 197, 192)
    if wrapper == "model":
        state = {"model": state, "epoch": 300}
    elif wrapper == "module.":
        state = {f"module.{name}": value for name, value in state.items()}
    model = VisionMamba.from_state_dict(state)
    assert (model.image_size, model.cls_tokens()) == ((224, 224), [98])
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert torch.equal(model(x), source.eval()(x))
    relevance = MambaAttribution(model).attribute(x, target=7)
    assert relevance.shape == x.shape
    assert relevance.abs().max() > 0


def test_a_published_checkpoint_with_overlapping_patches():
    state = VisionMamba(224, 16, 8, width=8, depth=1).state_dict()
    assert state["pos_embed"].shape[1] == 27 * 27 + 1
    model = VisionMamba.from_state_dict(state)
    assert (model.image_size, model.patch_embed.proj.stride) == ((224, 224), (8, 8))
    assert VisionMamba.from_state_dict(state, image_size=432).patch_embed.proj.stride == (16, 16)
    assert VisionMamba.from_state_dict(state, stride=16).image_size == (432, 432)


OPTIONS = {
    "v1": {"bimamba_type": "v1"},
    "one direction": {"bimamba_type": "none"},
    "layer norm": {"norm": "layer"},
    "biases": {"bias": True, "conv_bias": False},
    "layer scale": {"layer_scale": 0.3},
    "no positions": {"positions": False},
    "features": {"classes": 0},
    "two cls": {"cls": "ends"},
    "no cls": {"cls": None},
    "overlap": {"stride": 2},
    "grey": {"channels": 1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_state_dicts_come_back(name):
    model = small(**OPTIONS[name])
    again = VisionMamba.from_state_dict(model.state_dict(), image_size=(12, 20))
    x = images(colours=OPTIONS[name].get("channels", 3))
    with torch.no_grad():
        torch.testing.assert_close(again(x), model(x))


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({"cls": "start"}, {"cls": "start"}, "start"),
        ({"cls": None, "pool": "last"}, {"pool": "last"}, None),
        ({"if_divide_out": False}, {"if_divide_out": False}, "middle"),
    ],
)
def test_what_weights_do_not_tell_can_be_said(changes, options, expected):
    model = small(**changes)
    again = VisionMamba.from_state_dict(model.state_dict(), image_size=(12, 20), **options)
    assert again.cls == expected
    with torch.no_grad():
        torch.testing.assert_close(again(images()), model(images()))


@pytest.mark.parametrize("kind", ["start", "middle", "end"])
@pytest.mark.parametrize("shape", [(14, 14), (5, 9)])
def test_find_cls_from_smooth_positions(kind, shape):
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.meshgrid(*(torch.arange(n) / n for n in shape), indexing="ij")
    waves = torch.randn(2, 16, generator=generator) * 4
    grid = torch.sin(rows[..., None] * waves[0] + columns[..., None] * waves[1]).flatten(0, 1)
    grid = grid + 0.05 * torch.randn(grid.shape, generator=generator)
    at = {"start": 0, "middle": len(grid) // 2, "end": len(grid)}[kind]
    token = torch.randn(1, 16, generator=generator)
    assert find_cls(torch.cat([grid[:at], token, grid[at:]])[None], shape) == kind


def test_errors_of_loading():
    state = small().state_dict()
    with pytest.raises(ValueError, match="15 patches, which do not form a square"):
        VisionMamba.from_state_dict(state)
    with pytest.raises(ValueError, match="do not give the 15 patches"):
        VisionMamba.from_state_dict(state, image_size=16)
    with pytest.raises(ValueError, match="not the weights of a VisionMamba"):
        VisionMamba.from_state_dict({"weight": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"unknown \['rope"):
        VisionMamba.from_state_dict(state | {"rope.freqs": torch.zeros(1)}, image_size=(12, 20))
    with pytest.raises(ValueError, match=r"\(B, C, 12, 20\)"):
        small()(images(size=(12, 16)))
    for bad in ({"cls": "left"}, {"pool": "max"}, {"norm": "batch"}, {"bimamba_type": "v3"}):
        with pytest.raises(ValueError, match="; expected"):
            small(**bad)


MIXERS = {
    "v2": small,
    "v2 whole": lambda: small(if_divide_out=False),
    "v1": lambda: small(bimamba_type="v1"),
    "one direction": lambda: small(bimamba_type="none"),
    "layer scale": lambda: small(layer_scale=0.3, bias=True),
    "no conv bias": lambda: small(conv_bias=False),
    "ss2d": isotropic,
    "ss2d without gate": lambda: isotropic(gated=False, bias=True, conv=5),
}


@pytest.mark.parametrize("kind", MIXERS)
def test_impulses_through_the_models_own_scan(kind, monkeypatch):
    """Column j of a map is what the model's scan makes of a unit value at j."""
    model, calls = MIXERS[kind](), []
    scan = s6.selective_scan
    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(s6, "selective_scan", lambda *args: calls.append(args) or scan(*args))
        model(images())
    maps = list(hidden_attention(model, images()).values())
    ways = len(calls) // len(maps)
    for n, found in enumerate(maps):
        B, D, L, _ = found.shape
        rows = torch.arange(L)
        columns = [rows.view(3, 5).mT.flatten()] if ways == 4 else []
        scans = [rows, *columns, rows.flip(0), *(c.flip(0) for c in columns)][:ways]
        truth = torch.zeros_like(found)
        for order, args in zip(scans, calls[n * ways : (n + 1) * ways], strict=True):
            for t in range(L):
                impulse = torch.zeros(B, L, D, dtype=torch.float64)
                impulse[:, t] = 1
                truth[:, :, order, order[t]] += scan(impulse, *args[1:5]).mT
        torch.testing.assert_close(found, truth, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", MIXERS)
def test_the_unified_operator_is_the_mixer(kind):
    """Without its constants (the convolution's bias, offsets) a mixer is its unified operator."""
    model = MIXERS[kind]()
    everything = ("conv", "activation", "gate", "norm", "skip")
    for layer in freeze(Request.of(model, None, images())).layers:
        module = layer.call.module
        operator = layer.mixer.operator("unified", everything)
        u = layer.mixer.inputs
        constant = layer.mixer.operator("unified", ("activation", "gate", "norm", "skip"))
        conv = getattr(module, "conv2d", None) or module.conv1d
        found = operator.matvec(u)
        if kind in ("v1", "one direction", "ss2d", "ss2d without gate") and conv.bias is not None:
            found = found + constant.matvec(conv.bias.expand_as(u))
        elif conv.bias is not None:
            for scan, order, weight in layer.mixer.scans_in_order():
                bias = scan.operator("unified", everything[1:]).matvec(scan.conv_bias.expand_as(u))
                found = found + weight * bias[:, torch.argsort(order)]
        out = module.out_proj(found + layer.mixer.remainder())
        gamma = getattr(module, "gamma", None)
        expected = out if gamma is None else out * gamma
        frozen = layer.mixer.detach_coefficients()
        for found in (expected, layer.mixer.output(), frozen.output()):
            torch.testing.assert_close(found, layer.call.output, rtol=1e-8, atol=1e-9)
        torch.testing.assert_close(
            operator.matrix("mean"), operator.matrix().mean(1), rtol=1e-9, atol=1e-10
        )


def test_unified_is_halved_where_the_model_halves():
    x = images()
    for components in (None, [], ["conv"], ["gate", "skip"]):
        options = {"formulation": "unified", "components": components}
        halved, whole = (
            hidden_attention(m, x, layers=0, **options)["layers.0.mixer"]
            for m in (small(), small(if_divide_out=False))
        )
        torch.testing.assert_close(2 * halved, whole)
    hidden = [hidden_attention(m, x, layers=0) for m in (small(), small(if_divide_out=False))]
    torch.testing.assert_close(hidden[0]["layers.0.mixer"], hidden[1]["layers.0.mixer"])


class PublishedMamba(BidirectionalMamba):
    """The published module as far as this library sees it: its class, flags and two paths."""

    def __init__(self, *args, if_devide_out: bool, use_fast_path: bool = True, **kwargs) -> None:
        super().__init__(*args, if_divide_out=if_devide_out, **kwargs)
        del self.if_divide_out
        self.if_devide_out, self.use_fast_path = if_devide_out, use_fast_path

    def forward(self, hidden_states: Tensor, inference_params=None) -> Tensor:
        u, z = self.in_proj(hidden_states).chunk(2, -1)
        L = u.shape[1]

        def run(u, z, conv, x_proj, dt_proj, A_log, D, behind=lambda t: t):
            v = behind(F.silu(conv(u.mT)[..., :L].mT))
            step, B, C = x_proj(v).split([dt_proj.in_features, *[A_log.shape[1]] * 2], -1)
            dt, state, out = F.softplus(dt_proj(step)), 0, []
            for t in range(L):
                state = state * torch.exp(-dt[:, t, :, None] * A_log.exp())
                state = state + (dt[:, t] * v[:, t])[..., None] * B[:, t, None]
                out.append((state * C[:, t, None]).sum(-1) + D * v[:, t])
            return torch.stack(out, 1) * F.silu(z)

        own = (self.conv1d, self.x_proj, self.dt_proj)
        y = run(u, z, *own, self.A_log, self.D)
        if self.use_fast_path and self.bimamba_type == "v1":
            y = y + run(u, z.flip(1), *own, self.A_b_log, self.D, lambda t: t.flip(1)).flip(1)
        elif self.use_fast_path and self.bimamba_type == "v2":
            back = (self.conv1d_b, self.x_proj_b, self.dt_proj_b, self.A_b_log, self.D_b)
            y = y + run(u.flip(1), z.flip(1), *back).flip(1)
            y = y / 2 if self.if_devide_out else y
        out = self.out_proj(y)
        return out if self.gamma is None else out * self.gamma


PublishedMamba.__module__ = "mamba_ssm.modules.mamba_simple"
PublishedMamba.__qualname__ = "Mamba"


@pytest.mark.parametrize("kind", ["v1", "v2", "none"])
@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("halved", [True, False])
@pytest.mark.parametrize("scale", [None, 0.4])
def test_the_published_module_is_recognised(kind, fast, halved, scale):
    theirs = PublishedMamba(
        8, state=4, bimamba_type=kind, if_devide_out=halved, use_fast_path=fast, layer_scale=scale
    )
    ours = BidirectionalMamba(
        8, state=4, bimamba_type=kind if fast else "none", if_divide_out=halved, layer_scale=scale
    )
    randomize(theirs)
    ours.load_state_dict({k: v for k, v in theirs.state_dict().items() if k in ours.state_dict()})
    x = torch.randn(2, 9, 8)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    for formulation in ("hidden", "unified"):
        found, expected = (
            next(iter(hidden_attention(nn.Sequential(m), x, formulation=formulation).values()))
            for m in (theirs, ours)
        )
        torch.testing.assert_close(found, expected)


def test_a_mixer_that_computes_something_else_is_noticed():
    model = small()
    model.layers[1].mixer.bimamba_type = "v1"
    model.layers[1].mixer.forward = lambda x: BidirectionalMamba.forward(small().layers[1].mixer, x)
    with pytest.raises(ReconstructionError, match=r"layers\.1\.mixer"):
        RawAttention(model).attribute(images())


def explicit(model, x, target, formulation) -> dict[str, Tensor]:
    """The three methods' relevance of tokens ``(B, L)``, from whole matrices and autograd."""
    maps = hidden_attention(model, x, formulation=formulation, reduction="mean")
    projections, seen = [model.get_submodule(path).out_proj for path in maps], []
    hooks = [p.register_forward_pre_hook(lambda _, args: seen.append(args[0])) for p in projections]
    gradients = torch.autograd.grad(model(x)[:, target].sum(), seen)
    for hook in hooks:
        hook.remove()
    (query,) = freeze(Request.of(model, None, x)).require_query()
    query = query[:, None]
    eye = torch.eye(query.shape[-1], dtype=torch.float64)
    rollout = attribution = eye
    for alpha, gradient in zip(maps.values(), gradients, strict=True):
        rollout = (eye + alpha) @ rollout
        scaled = gradient.mean(-1)[..., None] * alpha
        attribution = (eye + scaled.clamp(min=0)) @ attribution
    found = {
        "raw": torch.stack([*maps.values()]).mean(0),
        "rollout": rollout,
        "attribution": attribution,
    }
    return {name: (query @ whole)[:, 0] for name, whole in found.items()}


@pytest.mark.parametrize("kind", MIXERS)
@pytest.mark.parametrize("formulation", ["hidden", "unified"])
def test_methods_are_their_formulas(kind, formulation):
    """Both directions are added before anything else; the gradient is that of out_proj's input."""
    model, x = MIXERS[kind](), images()
    index = model.token_grid(12, 20).index if "ss2d" not in kind else torch.arange(15).view(3, 5)
    methods = {"raw": RawAttention, "rollout": MambaRollout, "attribution": MambaAttribution}
    for name, tokens in explicit(model, x, 2, formulation).items():
        unified = formulation == "unified"
        method = UnifiedImplicitAttention if unified else methods[name]
        options = {"aggregation": name} if unified else {}
        explain = method(model, interpolate_mode="nearest")
        found = explain.attribute(x, target=2, **options).sum(1)[:, ::4, ::4]
        torch.testing.assert_close(found, tokens[:, index], rtol=1e-7, atol=1e-10)


def test_scan_learns_and_infers_alike():
    model = small().float()
    with torch.no_grad():
        fast = model(images().float())
    slow = model(images().float())
    torch.testing.assert_close(fast, slow.detach(), rtol=1e-4, atol=1e-5)
    slow.sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())


def token_relevance(model, x, method=MambaAttribution, **options) -> Tensor:
    """Relevance of tokens ``(B, L)``: the method on the embeddings behind the same blocks."""

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            for layer in self.model.layers:
                x = layer(x)
            x = self.model.norm_f(x)
            places = self.model.cls_tokens() or slice(None)
            return self.model.head(x[:, places].mean(1))

    explain = method(Blocks().eval())
    return explain.attribute(model.embed(x).detach(), target=2, **options).sum(-1)


@each([RawAttention, MambaRollout, MambaAttribution])
@pytest.mark.parametrize("cls", CLS)
def test_relevance_of_patches_on_pixels(method, cls):
    model, x = small(cls=cls), images()
    tokens = token_relevance(model, x, method)
    patches = model.token_grid(12, 20).patches(tokens)  # (B, 3, 5)
    assert patches.shape == (2, 3, 5)
    nearest = method(model, interpolate_mode="nearest").attribute(x, target=2)
    assert nearest.shape == x.shape
    truth = patches.repeat_interleave(4, 1).repeat_interleave(4, 2)
    torch.testing.assert_close(nearest.sum(1), truth)
    even = method(model, interpolate_mode="nearest", feature_share="even")
    color = even.attribute(x, target=2)
    torch.testing.assert_close(color, (truth / 3)[:, None].expand_as(x))
    bilinear = method(model).attribute(x, target=2)
    truth = LayerAttribution.interpolate(patches[:, None], (12, 20), "bilinear")[:, 0]
    torch.testing.assert_close(bilinear.sum(1), truth)


@pytest.mark.parametrize("cls", CLS)
@pytest.mark.parametrize("pool", ["mean", "last"])
def test_the_readout_is_found(cls, pool):
    model, x = small(cls=cls, pool=pool), images()
    (query,) = freeze(Request.of(model, None, x)).require_query()
    expected = torch.zeros(16 + (cls == "ends") - (cls is None), dtype=torch.float64)
    places = model.cls_tokens() or ([14] if pool == "last" else list(range(15)))
    expected[places] = 1 / len(places)
    torch.testing.assert_close(query, expected.expand(2, -1))
    assert places == {"start": [0], "middle": [7], "end": [15], "ends": [0, 16]}.get(cls, places)


def test_any_patch_or_cls_can_be_asked():
    model, x = small(), images()
    index = model.token_grid(12, 20).index
    found = [RawAttention(model).attribute(x, position=p) for p in (None, 7, int(index[2, 1]))]
    torch.testing.assert_close(found[0], found[1])
    assert not torch.allclose(found[0], found[2])
    maps = hidden_attention(model, x, reduction="mean")
    row = torch.stack(list(maps.values())).mean(0)[:, index[2, 1]]
    nearest = RawAttention(model, interpolate_mode="nearest").attribute(x, position=index[2, 1])
    torch.testing.assert_close(nearest.sum(1)[:, ::4, ::4], row[:, index])
    each = RawAttention(model).attribute(x, position=index[[0, 2], [3, 1]])
    torch.testing.assert_close(each[1], found[2][1])


def test_tuples_no_grad_dtypes_and_callables():
    model, x = small(), images()
    expected = MambaAttribution(model).attribute(x, target=2)
    with torch.no_grad():
        (found,) = MambaAttribution(model).attribute((x,), target=2)
    torch.testing.assert_close(found, expected)
    called = MambaAttribution(lambda pixels: model(pixels) * 1, model=model)
    torch.testing.assert_close(called.attribute(x, target=2), expected)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.2)):
        found = MambaAttribution(small().to(dtype)).attribute(x.to(dtype), target=2)
        error = (found.double() - expected).abs().max() / expected.abs().max()
        assert error < tolerance


def test_images_the_model_resizes():
    model, x = small(positions=False), images(size=(24, 40))
    explain = MambaAttribution(lambda pixels: model(F.avg_pool2d(pixels, 2)), model=model)
    found = explain.attribute(x, target=2)
    assert found.shape == x.shape
    small_map = MambaAttribution(model).attribute(F.avg_pool2d(x, 2), target=2)
    torch.testing.assert_close(F.avg_pool2d(found, 2), small_map, atol=0.02, rtol=0.5)


def test_models_without_positions_take_any_size():
    model = small(positions=False)
    for size in ((12, 20), (16, 8), (4, 4)):
        x = images(size=size)
        assert MambaRollout(model).attribute(x).shape == x.shape


def test_captums_own_tools_work_as_they_are():
    model, x = small().float(), images().float()
    explain = MambaAttribution(model)
    torch.manual_seed(0)
    noisy = NoiseTunnel(explain).attribute(x, target=2, nt_samples=3, nt_samples_batch_size=1)
    assert noisy.shape == x.shape
    heat = explain.attribute(x, target=2)[0].permute(1, 2, 0).numpy()
    original = x[0].permute(1, 2, 0).sigmoid().numpy()
    figure, _ = visualization.visualize_image_attr(
        heat, original, method="blended_heat_map", sign="all", use_pyplot=False
    )
    assert figure is not None
    gradients = IntegratedGradients(model).attribute(x, target=2, n_steps=3)
    assert gradients.shape == x.shape


class Foreign(nn.Module):
    """A vision model of another make around our blocks, with attributes as in timm."""

    def __init__(self, token: int | None, flags: dict, grid_only: bool = False) -> None:
        super().__init__()
        model = small(cls=None, positions=False)
        self.layers, self.norm_f, self.head = model.layers, model.norm_f, model.head
        self.patch_embed = nn.Module()
        convolution = model.patch_embed.proj
        if grid_only:
            self.patch_embed.grid_size = (3, 5)
            self.patch_embed.tokens = convolution
        else:
            self.patch_embed.proj = convolution
        self.convolve = [convolution]
        self.token = token
        vars(self).update(flags)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.convolve[0](pixels).flatten(2).mT
        if self.token is not None:
            x = torch.cat([x[:, : self.token], torch.ones_like(x[:, :1]), x[:, self.token :]], 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm_f(x).mean(1))


@pytest.mark.parametrize(
    ("token", "flags"),
    [
        (None, {}),
        (0, {"cls_token": 1}),
        (7, {"use_middle_cls_token": True}),
        (0, {"if_cls_token": True}),
    ],
)
@pytest.mark.parametrize("grid_only", [True, False])
def test_grids_of_foreign_models(token, flags, grid_only):
    model, x = Foreign(token, flags, grid_only).eval(), images()
    found = RawAttention(model, interpolate_mode="nearest").attribute(x, position=4)
    assert found.shape == x.shape
    row = torch.stack(list(hidden_attention(model, x, reduction="mean").values())).mean(0)[:, 4]
    kept = [t for t in range(row.shape[1]) if t != token]
    torch.testing.assert_close(found.sum(1)[:, ::4, ::4].flatten(1), row[:, kept])


def test_a_grid_that_is_not_known_is_measured():
    model, x = Foreign(0, {}).eval(), images()
    measured = RawAttention(model).attribute(x)
    assert measured.shape == x.shape
    assert len(hidden_attention(model, x)) == 2
    model.token_grid = lambda height, width: TokenGrid(1 + torch.arange(15).view(3, 5), "nearest")
    first = RawAttention(model).attribute(x)
    assert torch.equal(first, RawAttention(model, interpolate_mode="nearest").attribute(x))
    assert not torch.equal(first, RawAttention(model, interpolate_mode="bilinear").attribute(x))
    model.token_grid = lambda height, width: TokenGrid(torch.arange(30).view(5, 6))
    with pytest.raises(ValueError, match="names token 29"):
        RawAttention(model).attribute(x)


def test_interpolations_are_named():
    with pytest.raises(ValueError, match=r"interpolate_mode is 'cubic'; .*'bilinear', 'nearest'"):
        RawAttention(small(), interpolate_mode="cubic")
    with pytest.raises(ValueError, match=r"expected \(H, W\)"):
        TokenGrid(torch.arange(4.0))


@pytest.mark.parametrize("layer", [None, 0])
def test_the_delta_is_that_of_tokens_not_of_interpolated_pixels(layer):
    model, x = small(), torch.randn(2, 3, 12, 20, dtype=torch.float64)
    _, delta = LaTIM(model).attribute(
        x, target=1, layer=layer, activation="gate", return_convergence_delta=True
    )
    assert float(delta.abs().max()) < 1e-9 * float(model(x).detach().abs().max())
