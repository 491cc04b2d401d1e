"""What the library makes of the models of papers' repositories, on a CPU and at a small size.

Their code is not a part of this repository. FOLDER holds a checkout of each, by the name below (those that
are missing are left out). Imports that need CUDA or more packages are replaced: kernels by the reference
functions of mamba-ssm, timm's and nnU-Net's helpers by their few lines. Weights are random.

    python benchmarks/repositories.py FOLDER            # prints the table of docs/recipes.md
    python benchmarks/repositories.py FOLDER VMamba

Caduceus' code needs transformers 4. MONAI and dynamic_network_architectures have to be installed for SegMamba and
U-Mamba, einops for most.
"""  # noqa: E501

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import mamba_ssm_cpu
from models import randomize

import captum_ssm

# A model, its inputs, and from what both are called, if that is not the model itself.
Built = tuple[nn.Module, Tensor | tuple[Tensor, ...], Callable[..., Any] | None]


def stand_in(name: str, path: Path | None = None, **names: Any) -> ModuleType:
    """A module of that name, or a package whose files are in a folder."""
    module = ModuleType(name)
    vars(module).update(names)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = [] if path is None else [str(path)]
    sys.modules[name] = module
    return module


def load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class DropPath(nn.Identity):
    """timm's, which does nothing in eval mode."""

    drop_prob = 0.0


class Mlp(nn.Module):
    """timm's."""

    def __init__(self, in_features: int, hidden_features: int, act_layer: Any, drop: float) -> None:
        super().__init__()
        self.fc1, self.act = nn.Linear(in_features, hidden_features), act_layer()
        self.fc2 = nn.Linear(hidden_features, in_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class KNN(nn.Module):
    """knn_cuda's."""

    def __init__(self, k: int, transpose_mode: bool) -> None:
        super().__init__()
        self.k = k

    def forward(self, points: Tensor, queries: Tensor) -> Any:
        return torch.cdist(queries, points).topk(self.k, largest=False)


def farthest(points: Tensor, count: int) -> Tensor:
    """PointNet++'s choice of centers."""
    chosen = torch.zeros(len(points), 1, dtype=torch.long)
    for _ in range(count - 1):
        centers = points.gather(1, chosen[..., None].expand(-1, -1, 3))
        more = torch.cdist(points, centers).amin(2).argmax(1, keepdim=True)
        chosen = torch.cat([chosen, more], 1)
    return points.gather(1, chosen[..., None].expand(-1, -1, 3))


def helpers() -> None:
    """What the repositories import of packages that are not needed."""
    layers = {
        "DropPath": DropPath,
        "LayerNorm2d": nn.LayerNorm,
        "lecun_normal_": nn.init.normal_,
        "to_2tuple": lambda x: x if isinstance(x, tuple) else (x, x),
        "trunc_normal_": nn.init.trunc_normal_,
    }
    keep = lambda f: f  # noqa: E731
    for name in ("timm", "timm.models", "fvcore", "nnunetv2", "nnunetv2.utilities"):
        stand_in(name)
    stand_in("timm.models.layers", **layers)
    stand_in("timm.models.registry", register_model=keep)
    stand_in("timm.models._builder", resolve_pretrained_cfg=None, _update_default_kwargs=None)
    parts = {"Mlp": Mlp, "PatchEmbed": None, "_load_weights": None, "VisionTransformer": nn.Module}
    stand_in("timm.models.vision_transformer", _cfg=dict, **parts)
    counters = ("FlopCountAnalysis", "flop_count_str", "flop_count", "parameter_count")
    stand_in("fvcore.nn", **dict.fromkeys(counters))
    plans = "nnunetv2.utilities.plans_handling"
    stand_in(plans)
    stand_in(f"{plans}.plans_handler", ConfigurationManager=None, PlansManager=None)
    stand_in("nnunetv2.utilities.network_initialization", InitWeights_He=None)


def inner(
    xz: Any, conv: Any, bias: Any, x_proj: Any, dt_proj: Any, A: Any, *others: Any, **options: Any
) -> Any:
    """The fused function of the forks of mamba-ssm, as their reference writes it."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_ref

    (x, z), N = xz.chunk(2, 1), A.shape[-1]
    x = F.silu(F.conv1d(F.pad(x, (conv.shape[-1] - 1, 0)), conv, bias, groups=len(conv)))
    step, B, C = F.linear(x.mT, x_proj).split([dt_proj.shape[1], N, N], -1)
    delta, D = (step @ dt_proj.T).mT, others[2]
    return selective_scan_ref(x, delta, A, B.mT, C.mT, D, z=z, **options)


def fork(path: Path) -> None:
    """A repository's own ``Mamba`` in place of mamba-ssm's."""
    import mamba_ssm.ops.selective_scan_interface as interface

    interface.mamba_inner_fn_no_out_proj = inner
    interface.bimamba_inner_fn = None
    stand_in("causal_conv1d", causal_conv1d_fn=None, causal_conv1d_update=None)
    module = load("mamba_ssm.modules.mamba_simple", path)
    del sys.modules["causal_conv1d"]
    sys.modules["mamba_ssm"].Mamba = module.Mamba


def vim(root: Path) -> Built:
    fork(root / "mamba-1p1p1/mamba_ssm/modules/mamba_simple.py")
    sys.path.insert(0, str(root / "vim"))
    model = load("models_mamba", root / "vim/models_mamba.py").VisionMamba(
        img_size=32, patch_size=8, stride=8, depth=2, embed_dim=16, num_classes=5, rms_norm=True,
        fused_add_norm=False, if_abs_pos_embed=True, bimamba_type="v2", if_cls_token=True,
        if_devide_out=True, use_middle_cls_token=True, drop_path_rate=0.0,
    )  # fmt: skip
    return model, torch.rand(1, 3, 32, 32), None


def vmamba(root: Path) -> Built:
    for name, module in mamba_ssm_cpu._triton().items():
        sys.modules[name] = module
    sys.path.insert(0, str(root / "classification/models"))
    scans = load("csm_triton", root / "classification/models/csm_triton.py")
    scans.torch = SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch)})
    scans.torch.cuda = SimpleNamespace(device=lambda device: contextlib.nullcontext())
    model = load("vmamba", root / "classification/models/vmamba.py").VSSM(
        depths=[1, 1], dims=8, num_classes=5, drop_path_rate=0.0, ssm_d_state=1,
        ssm_conv_bias=False, forward_type="v05_noz", downsample_version="v3",
        patchembed_version="v2", norm_layer="ln2d",
    )  # fmt: skip
    return model, torch.rand(1, 3, 32, 32), None


def mambavision(root: Path) -> Built:
    stand_in("mambavision")
    folder = root / "mambavision/models"
    stand_in("mambavision.models", folder)
    model = load("mambavision.models.mamba_vision", folder / "mamba_vision.py").MambaVision(
        dim=8, in_dim=8, depths=[1, 1, 4, 2], window_size=[8, 8, 4, 2], mlp_ratio=2,
        num_heads=[1, 1, 2, 2], num_classes=5, drop_path_rate=0.0,
    )  # fmt: skip
    return model, torch.rand(1, 3, 64, 64), None


def umamba(root: Path) -> Built:
    kind = load("umamba", root / "umamba/nnunetv2/nets/UMambaBot_3d.py").UMambaBot
    model = kind(
        input_channels=1, n_stages=3, features_per_stage=[4, 4, 8], conv_op=nn.Conv3d,
        kernel_sizes=[[3] * 3] * 3, strides=[[1] * 3, [2] * 3, [2] * 3], n_conv_per_stage=[1] * 3,
        num_classes=2, n_conv_per_stage_decoder=[1] * 2, conv_bias=True, nonlin=nn.LeakyReLU,
        norm_op=nn.InstanceNorm3d, norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin_kwargs={"inplace": True}, deep_supervision=False,
    )  # fmt: skip
    return model, torch.rand(1, 1, 8, 8, 8), None


def videomamba(root: Path) -> Built:
    fork(root / "mamba/mamba_ssm/modules/mamba_simple.py")
    model = load("videomamba", root / "videomamba/video_sm/models/videomamba.py").VisionMamba(
        img_size=16, patch_size=8, depth=2, embed_dim=16, num_classes=5, num_frames=4,
        drop_path_rate=0.0, rms_norm=False, fused_add_norm=False,
    )  # fmt: skip
    return model, torch.rand(1, 3, 4, 16, 16), None


def pointmamba(root: Path) -> Built:
    class Names(dict):  # addict's
        __getattr__, __setattr__ = dict.__getitem__, dict.__setitem__

    stand_in("addict", Dict=Names)
    stand_in("utils").misc = stand_in("utils.misc", fps=farthest)
    messages = ("get_missing_parameters_message", "get_unexpected_parameters_message")
    stand_in("utils.checkpoint", **dict.fromkeys(messages))
    stand_in("utils.logger", print_log=print)
    stand_in("extensions")
    stand_in("extensions.chamfer_dist", ChamferDistanceL1=None, ChamferDistanceL2=None)
    stand_in("knn_cuda", KNN=KNN)
    stand_in("models", root / "models")
    registry = SimpleNamespace(register_module=lambda: lambda kind: kind)
    stand_in("models.build", MODELS=registry)
    kind = load("models.point_mamba_scan", root / "models/point_mamba_scan.py").PointMambaScan
    settings = SimpleNamespace(trans_dim=16, depth=2, cls_dim=5, group_size=8, num_group=12)
    settings.encoder_dims, settings.avg_head = 16, True
    return kind(settings), torch.rand(1, 64, 3), None


def caduceus(root: Path, both_strands: bool = False) -> Built:
    folder = root / "caduceus"
    stand_in("caduceus", folder)
    module = load("caduceus.modeling_caduceus", folder / "modeling_caduceus.py")
    config = load("caduceus.configuration_caduceus", folder / "configuration_caduceus.py")
    complement = {k: {7: 10, 8: 9, 9: 8, 10: 7}.get(k, k) for k in range(16)}
    model = module.CaduceusForMaskedLM(
        config.CaduceusConfig(
            d_model=16, n_layer=2, vocab_size=12, fused_add_norm=False, residual_in_fp32=False,
            rcps=both_strands, complement_map=complement,
        )
    )  # fmt: skip
    return model, torch.randint(7, 11, (1, 20)), None


def hyenadna(root: Path) -> Built:
    import transformers.tokenization_utils_base as base

    stand_in("torchvision")
    stand_in("torchvision.ops", StochasticDepth=lambda *_, **__: nn.Identity())
    tokenizers = {"AddedToken": base.AddedToken, "PreTrainedTokenizer": object}
    stand_in("transformers.tokenization_utils", **tokenizers)
    layer = {"l_max": 34, "order": 2, "filter_order": 16, "emb_dim": 5, "w": 10}
    model = load("standalone_hyenadna", root / "standalone_hyenadna.py").HyenaDNAModel(
        d_model=16, n_layer=2, d_inner=32, vocab_size=12, layer=layer, use_head=True, n_classes=2,
        pad_vocab_size_multiple=1,
    )  # fmt: skip
    return model, torch.randint(7, 11, (1, 20)), None


def s_mamba(root: Path) -> Built:
    stand_in("reformer_pytorch", LSHSelfAttention=None)
    for name in ("utils", "layers", "model"):
        stand_in(name, root / name)
    settings = SimpleNamespace(seq_len=24, pred_len=6, d_model=16, d_state=4, d_ff=32, e_layers=2)
    settings.dropout, settings.use_norm, settings.embed, settings.freq = 0.1, True, "timeF", "h"
    settings.activation, settings.output_attention, settings.class_strategy = "gelu", False, ""
    model = load("model.S_Mamba", root / "model/S_Mamba.py").Model(settings)
    return model, torch.randn(1, 24, 4), lambda series: model(series, None, None, None)


def mamba4rec(root: Path) -> Built:
    class Recommender(nn.Module):  # RecBole's
        def __init__(self, config: Any, dataset: Any) -> None:
            super().__init__()
            self.n_items = dataset.n_items

        def gather_indexes(self, x: Tensor, at: Tensor) -> Tensor:
            return x[torch.arange(len(x)), at]

    for name in ("recbole", "recbole.model"):
        stand_in(name)
    stand_in("recbole.model.abstract_recommender", SequentialRecommender=Recommender)
    stand_in("recbole.model.loss", BPRLoss=None)
    settings = {"hidden_size": 16, "num_layers": 2, "dropout_prob": 0.2, "d_state": 4, "d_conv": 4}
    settings |= {"expand": 2, "loss_type": "CE"}
    kind = load("mamba4rec", root / "mamba4rec.py").Mamba4Rec
    model = kind(settings, SimpleNamespace(n_items=50))
    items = torch.tensor([[3, 17, 8, 42, 5, 0, 0]]), torch.tensor([5])
    return model, items, lambda *given: model(*given) @ model.item_embedding.weight.T


MODELS: dict[str, tuple[str, Callable[[Path], Built]]] = {
    "Vision Mamba": ("Vim", vim),
    "VMamba": ("VMamba", vmamba),
    "MambaVision": ("MambaVision", mambavision),
    "U-Mamba (bottleneck)": ("U-Mamba", umamba),
    "VideoMamba": ("VideoMamba", videomamba),
    "PointMamba": ("PointMamba", pointmamba),
    "Caduceus-PH": ("caduceus", caduceus),
    "Caduceus-PS": ("caduceus", lambda root: caduceus(root, both_strands=True)),
    "HyenaDNA": ("hyena-dna", hyenadna),
    "S-Mamba": ("S-D-Mamba", s_mamba),
    "Mamba4Rec": ("Mamba4Rec", mamba4rec),
}


def row(name: str, build: Callable[[Path], Built], root: Path) -> str:
    torch.manual_seed(0)
    model, inputs, run = build(root)
    randomize(model).eval()
    first, *others = inputs if isinstance(inputs, tuple) else (inputs,)
    found = captum_ssm.supported(
        run or model, first, model=model, additional_forward_args=tuple(others) or None
    )
    classes = ", ".join(dict.fromkeys(f"`{mixer.kind}`" for mixer in found.mixers))
    errors = [mixer.error for mixer in found.mixers if mixer.error is not None]
    refused = [method for method, why in found.methods.items() if why is not None]
    works = "all" if not refused else f"all except {', '.join(refused)}"
    error = f"{max(errors):.0e}" if errors else "not measured"
    return f"| {name} | {classes} | {error} | {works} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="of the table; all by default")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| model | mixers | largest error | methods |", "|---|---|---|---|", sep="\n")
    for name, (folder, build) in MODELS.items():
        if (args.names and name not in args.names) or not (args.folder / folder).is_dir():
            continue
        before, path = dict(sys.modules), [*sys.path]
        with mamba_ssm_cpu.on_cpu():
            helpers()
            try:
                print(row(name, build, args.folder / folder), flush=True)
            except Exception as error:
                print(f"| {name} | | | {type(error).__name__}: {str(error)[:200]} |", flush=True)
        for added in set(sys.modules) - set(before):
            if not added.startswith(("torch", "transformers", "captum", "numpy")):
                del sys.modules[added]
        sys.path[:] = path


if __name__ == "__main__":
    main()
