"""Public models with the inputs that they are made for: images, pixels, tables, baskets, series.

Each package is installed, without its dependencies, into a temporary folder (or into `--folder`,
which is kept), and each repository cloned next to it. The model is built as its own README or
scripts say, at its own size. Weights are random but moved, so that no special value fits by
accident, except those of opensr-mamba, which come with it. Every method is asked for a map of the
shape of the inputs. Shown are

- its time, as a multiple of the model's own forward and backward, which it takes turns with;
- for methods that claim to add up, by how much relevance misses the score with bias terms at zero,
  relative to the score;
- "WRONG" where relevance is not zero and the gradient is, at an entry of a floating input (for
  methods that explain tokens: at a place, in all of its features), or the shape is not the input's;
- "refused" where the library says that it cannot do it. `--errors` prints why.

A model whose packages or repository cannot be got, as without a network, is skipped, and `--save`
keeps what an earlier run found of it. All of them take about ten minutes.

    python benchmarks/any_input.py --save
    python benchmarks/any_input.py mambavision --errors
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.machinery
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    UnifiedImplicitAttention,
    hidden_attention,
)

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from mamba_ssm_cpu import on_cpu

sys.path.pop()

# Versions are those of the table in README.md.
PACKAGES = {
    "einops": "0.8.2",
    "mamba4rec": "0.1.10",
    "mambavision": "1.2.0",
    "mambular": "1.5.1",
    "opensr-mamba": "0.0.1",
    "timm": "1.0.22",
}
REPOSITORIES = {
    "S-D-Mamba": ("wzhwzhwzh0921/S-D-Mamba", "e7e8bf04066135afa43d85b0a87afa97cda16e3f"),
    "TimeMachine": ("Atik-Ahamed/TimeMachine", "5bf17a728349c674eceafc28a90f22b904e38c2d"),
    "VideoMamba": ("OpenGVLab/VideoMamba", "f3427e42cb8453a523aec3a6f86d57b5bc1de5c3"),
}
# By model, in the order of the table.
NEEDS = {
    "mambavision": ("einops", "timm", "mambavision"),
    "opensr-mamba": ("einops", "timm", "opensr-mamba"),
    "mambular": ("mambular",),
    "mamba4rec": ("mamba4rec",),
    "S-Mamba": ("einops", "S-D-Mamba"),
    "TimeMachine": ("TimeMachine",),
    "TimeMachine mixed": ("TimeMachine",),
    "VideoMamba": ("einops", "timm", "VideoMamba"),
}
# What timm imports and is not used here.
VISION = [
    f"torchvision{part}"
    for part in (
        "",
        ".transforms",
        ".transforms.functional",
        ".ops.misc",
        ".ops",
        ".datasets",
        ".models",
        ".models.feature_extraction",
    )
]
# What is added, and belongs to no input.
CONSTANTS = ("bias", "running_mean")
METHODS = (
    RawAttention,
    MambaRollout,
    MambaAttribution,
    UnifiedImplicitAttention,
    LaTIM,
    MambaLRP,
)


@dataclass
class Case:
    """A model and what it is explained at.

    Args:
        model (nn.Module): what is explained.
        inputs (Tensor or tuple of Tensor): the model's inputs.
        target (int or tuple): as in Captum.
        forward (Callable, optional): runs the model on the inputs. Default: None, the model itself
        trained (bool, optional): leave the weights as they are. Default: False
    """

    model: nn.Module
    inputs: Any
    target: Any
    forward: Callable[..., Tensor] | None = None
    trained: bool = False


def settings(**values: Any) -> types.SimpleNamespace:
    """What a repository's command line would hold."""
    return types.SimpleNamespace(**values)


def series(steps: int, variables: int) -> Tensor:
    """Random walks with mean zero: models add a detached mean to the forecast."""
    walks = torch.randn(1, steps, variables).cumsum(1)
    return walks - walks.mean(1, keepdim=True)


def mambavision(folder: Path) -> Case:
    """Images (3, 224, 224): MambaVision-T, convolutions, Mamba and attention in four stages."""
    from mambavision.models.mamba_vision import MambaVision

    model = MambaVision(
        depths=[1, 3, 8, 4], num_heads=[2, 4, 8, 16], window_size=[8, 8, 14, 7], dim=80, in_dim=32,
        mlp_ratio=4, resolution=224, drop_path_rate=0.2,
    )  # fmt: skip
    return Case(model, torch.randn(1, 3, 224, 224), 1)


def opensr(folder: Path) -> Case:
    """Pixels (3, 8, 8) to (3, 32, 32): the trained super-resolution model of opensr-mamba."""
    from opensr_mamba.mamba.main import MambaSR

    model = MambaSR(
        img_size=8, in_chans=3, embed_dim=60, depths=[2, 2, 2, 2], d_state=16, mlp_ratio=1.5,
        upscale=4, attention_type="sigmoid_02", upsampler="pixelshuffledirect",
        resi_connection="1conv", operation_attention="sum",
    )  # fmt: skip
    weights = folder / "opensr_mamba" / "mamba" / "weights" / "srmodel.pth"
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))

    def forward(images: Tensor) -> Tensor:
        return model(images, save_attention_maps=True)[0]

    return Case(model, torch.rand(1, 3, 8, 8), (0, 16, 16), forward, trained=True)


def mambular(folder: Path) -> Case:
    """Tables: six numbers and four categories, each embedded by a module of its own."""
    parts = ("mambular", "mambular.base_models", "mambular.base_models.utils", "mambular.configs")
    hollow(folder, *parts)
    from mambular.base_models.mambular import Mambular
    from mambular.configs.mambular_config import DefaultMambularConfig

    numbers = {f"number {i}": {"dimension": 1} for i in range(6)}
    categories = {f"category {i}": {"dimension": 1, "categories": 5 + i} for i in range(4)}
    config = DefaultMambularConfig()
    model = Mambular((numbers, categories, {}), num_classes=3, config=config)

    def forward(numbers: Tensor, categories: Tensor) -> Tensor:
        return model([*numbers.split(1, 1)], [*categories.split(1, 1)], [])

    return Case(model, (torch.randn(2, 6), torch.randint(5, (2, 4))), 1, forward)


def mamba4rec(folder: Path) -> Case:
    """Baskets: ids of the items that a user took, and the next one."""
    hollow(folder, "mamba4rec", "dill", "sklearn", "sklearn.metrics", "sklearn.model_selection")
    for name in ("Trainer", "TrainingArguments"):  # they need further packages
        setattr(sys.modules["transformers"], name, None)
    from mamba4rec.train import TrainModel, Vocab

    vocabulary = Vocab({f"item {i}": (i, f"item {i}") for i in range(1000)})
    trainer = TrainModel.__new__(TrainModel)
    trainer._vocab, trainer._device = vocabulary, "cpu"
    trainer._create_model()
    return Case(trainer._model, torch.randint(1000, (1, 50)), 7)


def s_mamba(folder: Path) -> Case:
    """Series (96, 21): S-Mamba, whose tokens are the variables, and a forecast of 96 steps."""
    hollow(folder, "reformer_pytorch")
    sys.path.insert(0, str(folder / "S-D-Mamba"))
    from model.S_Mamba import Model

    model = Model(settings(
        seq_len=96, pred_len=96, output_attention=False, use_norm=True, d_model=128, embed="timeF",
        freq="h", dropout=0.1, class_strategy="projection", d_state=16, d_ff=128, e_layers=2,
        activation="gelu",
    ))  # fmt: skip

    def forward(series: Tensor) -> Tensor:
        return model(series, None, None, None)

    return Case(model, series(96, 21), (95, 3), forward)


def timemachine(folder: Path) -> Case:
    """Series (96, 7): TimeMachine, four Mambas on two scales, each variable by itself."""
    sys.path.insert(0, str(folder / "TimeMachine" / "TimeMachine_supervised"))
    from models.TimeMachine import Model

    model = Model(settings(
        seq_len=96, pred_len=96, enc_in=7, revin=1, n1=64, n2=32, dropout=0.1, ch_ind=1,
        d_state=32, dconv=2, e_fact=1, residual=1,
    ))  # fmt: skip
    return Case(model, series(96, 7), (95, 3))


def timemachine_mixed(folder: Path) -> Case:
    """Series (96, 7): TimeMachine, whose tokens are the variables."""
    case = timemachine(folder)
    from models.TimeMachine import Model

    configs = case.model.configs
    configs.ch_ind = 0
    return Case(Model(configs), case.inputs, case.target)


def videomamba(folder: Path) -> Case:
    """Videos (3, 4, 64, 64): VideoMamba-Ti, 4 of its 24 blocks."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "mamba_ssm"]:
        del sys.modules[name]  # its own form of the package
    stand_ins(causal_conv1d=_causal_conv, causal_conv1d_cuda=None)
    sys.path.insert(0, str(folder / "VideoMamba" / "mamba"))
    sys.path.append(str(folder / "VideoMamba" / "videomamba" / "video_sm"))
    hollow(folder / "VideoMamba" / "mamba", "mamba_ssm")
    from mamba_ssm.modules import mamba_simple
    from mamba_ssm.ops import selective_scan_interface as scans

    def without_projection(xz: Tensor, *weights: Any, **options: Any) -> Tensor:
        width = xz.shape[1] // 2
        four, rest = weights[:4], weights[4:]
        return scans.mamba_inner_ref(xz, *four, torch.eye(width), None, *rest, **options).mT

    scans.selective_scan_fn = scans.selective_scan_ref
    mamba_simple.mamba_inner_fn_no_out_proj = without_projection
    models = folder / "VideoMamba" / "videomamba" / "video_sm" / "models"
    source = types.ModuleType("videomamba")
    text = (models / "videomamba.py").read_text().replace("@register_model", "")
    exec(compile(text, "videomamba.py", "exec"), vars(source))
    model = source.VisionMamba(
        img_size=64, num_frames=4, num_classes=400, depth=4, fused_add_norm=False, rms_norm=False,
    )  # fmt: skip
    return Case(model, torch.randn(1, 3, 4, 64, 64), 1)


CASES: dict[str, Callable[[Path], Case]] = {
    "mambavision": mambavision,
    "opensr-mamba": opensr,
    "mambular": mambular,
    "mamba4rec": mamba4rec,
    "S-Mamba": s_mamba,
    "TimeMachine": timemachine,
    "TimeMachine mixed": timemachine_mixed,
    "VideoMamba": videomamba,
}


def _causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    padded = F.pad(x, (weight.shape[1] - 1, 0))
    y = F.conv1d(padded, weight[:, None], bias, groups=weight.shape[0])
    return F.silu(y) if activation else y


class _Names(type):
    """A class with any attribute."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Empty(types.ModuleType):
    """Stands for a module whose names are imported and never used in what is run here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (nn.Module,), {})


def hollow(folder: Path, *names: str) -> None:
    """Packages without what their own ``__init__`` imports, and without those not installed."""
    for name in names:
        module = _Empty(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        module.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], child, module)


def stand_ins(causal_conv1d: Any, causal_conv1d_cuda: Any) -> None:
    """Modules of compiled kernels, for a CPU."""
    for name in ("causal_conv1d", "causal_conv1d_cuda", "selective_scan_cuda"):
        hollow(Path(), name)
    sys.modules["causal_conv1d"].causal_conv1d_fn = causal_conv1d


def get(folder: Path, name: str) -> str | None:
    """Put what a model needs into the folder, once. Returns why that is not possible, if so."""
    folder.mkdir(parents=True, exist_ok=True)
    for need in NEEDS[name]:
        try:
            (_clone if need in REPOSITORIES else _install)(folder, need)
        except subprocess.CalledProcessError as error:
            return f"{need} could not be got: {error.stderr.strip().splitlines()[-1]}"
    return None


def _install(folder: Path, name: str) -> None:
    # Without its dependencies.
    version = PACKAGES[name]
    if (folder / f"{name.replace('-', '_')}-{version}.dist-info").exists():
        return
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    _run([*pip, f"{name}=={version}"])


def _clone(folder: Path, name: str) -> None:
    if (folder / name).exists():
        return
    repository, commit = REPOSITORIES[name]
    part = folder / f"{name}.part"
    shutil.rmtree(part, ignore_errors=True)
    _run(["git", "clone", "--quiet", f"https://github.com/{repository}", str(part)])
    _run(["git", "-C", str(part), "checkout", "-q", commit])
    part.rename(folder / name)


def _run(command: list[str]) -> None:
    quiet = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    subprocess.run(command, check=True, capture_output=True, text=True, env=quiet)


def moved(model: nn.Module) -> nn.Module:
    """The model with weights away from special values (zeros, ones, equal rows)."""
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            size = p.abs().mean().clamp(min=0.1 if p.dim() == 1 else 0)
            p.add_(0.1 * size * torch.randn(p.shape, generator=noise).to(p.dtype))
    return model


def tensors(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


class Explained:
    """A case with its own gradient."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = (case.model if case.trained else moved(case.model)).eval()
        self.forward = case.forward or self.model
        self.inputs = tensors(case.inputs)
        self.writes_in_place = False
        self.score, self.gradients = self.backward()

    def backward(self) -> tuple[Tensor, list[Tensor | None]]:
        """The model's own forward and backward, to its floating inputs and parameters."""
        leaves = [x.clone().requires_grad_() if x.is_floating_point() else x for x in self.inputs]
        if not self.writes_in_place:
            try:
                return self._backward(leaves)
            except RuntimeError:  # it writes into what a gradient of its own needs
                self.writes_in_place = True
        # Much slower than a plain pass.
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            return self._backward(leaves)

    def _backward(self, leaves: list[Tensor]) -> tuple[Tensor, list[Tensor | None]]:
        output = self.forward(*leaves)
        output = getattr(output, "logits", output)
        if not self.inputs[0].is_floating_point():
            score = output[:, -1, self.case.target]
        else:
            target = tensors(self.case.target)
            score = output[(slice(None), *target)]
        wanted = [x for x in leaves if x.is_floating_point()]
        queue = list(
            torch.autograd.grad(score.sum(), [*wanted, *self.model.parameters()], allow_unused=True)
        )
        return score.detach(), [queue.pop(0) if x.is_floating_point() else None for x in leaves]

    def method(self, kind: type, **options: Any) -> Any:
        if self.case.forward is None:
            return kind(self.model, **options)
        return kind(self.forward, model=self.model, **options)

    def attribute(self, kind: type, **options: Any) -> Any:
        """Relevance by a method made with these options."""
        more = {"activation": "gate"} if kind is LaTIM else {}
        method = self.method(kind, **options)
        return method.attribute(self.case.inputs, target=self.case.target, **more)

    def wrong(self, kind: type, found: Any) -> str | None:
        """What is certainly wrong with a map."""
        for one, x, g in zip(tensors(found), self.inputs, self.gradients, strict=True):
            if one.shape != x.shape:
                return f"shape {tuple(one.shape)} for {tuple(x.shape)}"
            if not bool(torch.isfinite(one).all()):
                return "not finite"
            if g is None:
                continue
            unread = g == 0
            if kind is not MambaLRP and x.dim() > 2:
                axis = -1 if x.dim() == 3 else 1
                unread = unread.all(axis, keepdim=True).expand(x.shape)
            stray = one.abs()[unread]
            if stray.numel() and float(stray.max()) > 1e-5 * float(one.abs().max()):
                return f"{float(stray.sum() / one.abs().sum()):.1%} where the gradient is zero"
        return None

    def missed(self, kind: type) -> float:
        """By how much relevance misses the score, relative to it, bias terms at zero."""
        kept = {k: v.clone() for k, v in self.model.state_dict().items()}
        for name, p in [*self.model.named_parameters(), *self.model.named_buffers()]:
            if name.endswith(CONSTANTS):
                p.data.zero_()
        options = {"activation": "gate"} if kind is LaTIM else {}
        score, _ = self.backward()
        _, delta = self.method(kind).attribute(
            self.case.inputs, target=self.case.target, return_convergence_delta=True, **options
        )
        self.model.load_state_dict(kept)
        return float((delta / score).abs().max())

    def cost(self, kind: type, repeats: int, **options: Any) -> float:
        """Its time over that of forward and backward, one after the other: the median."""
        ratios = []
        for _ in range(repeats):
            start = process_time()
            self.backward()
            middle = process_time()
            self.attribute(kind, **options)
            ratios.append((process_time() - middle) / (middle - start))
        return median(ratios)


def one(name: str, folder: Path, repeats: int) -> dict[str, Any]:
    """What is made of one model."""
    torch.manual_seed(0)
    found: dict[str, Any] = {"input": (CASES[name].__doc__ or "").partition(":")[0], "methods": {}}
    with on_cpu() as _:
        explained = Explained(CASES[name](folder))
        start = process_time()
        explained.backward()
        found["seconds"] = process_time() - start
        for kind in METHODS:
            found["methods"][kind.__name__] = _one(explained, kind, repeats)
        if explained.case.forward is None:
            try:
                maps = hidden_attention(explained.model, explained.case.inputs, rows=0)
                found["hidden_attention"] = f"{len(maps)} layers"
            except (ValueError, TypeError, RuntimeError) as error:
                found["hidden_attention"] = f"{type(error).__name__}: {error}"
    return found


def _one(explained: Explained, kind: type, repeats: int) -> dict[str, Any]:
    try:
        wrong = explained.wrong(kind, explained.attribute(kind))
    except (ValueError, TypeError, RuntimeError, AssertionError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    row: dict[str, Any] = {"cost": explained.cost(kind, repeats)}
    if explained.inputs[0].dim() == 4 and kind is not MambaLRP:
        row["interpolated"] = explained.cost(kind, repeats, interpolate_mode="bilinear")
    if wrong is not None:
        row["wrong"] = wrong
    if kind in (LaTIM, MambaLRP):
        row["missed"] = explained.missed(kind)
    return row


def shown(row: dict[str, Any]) -> str:
    """One cell of the table."""
    if "refused" in row:
        return "refused"
    wrong = f" WRONG: {row['wrong']}" if "wrong" in row else ""
    missed = f", {row['missed']:.0e}" if "missed" in row else ""
    grid = f" ({row['interpolated']:.1f} interpolated)" if "interpolated" in row else ""
    return f"{row['cost']:.1f} times{grid}{missed}{wrong}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="some of them; all by default")
    parser.add_argument("--folder", type=Path, help="where the packages are installed and kept")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--errors", action="store_true", help="print why a method refuses")
    parser.add_argument("--save", action="store_true", help="write results/any_input.json")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if args.one:
            sys.path.append(str(folder))  # last
            hollow(folder, *VISION)
            with contextlib.redirect_stdout(io.StringIO()):  # some of them print
                found = one(args.models[0], folder, args.repeats)
            print(json.dumps(found))
            return
        results = {}
        print("| model | input | own s |", " | ".join(kind.__name__ for kind in METHODS), "|")
        print("|---" * (3 + len(METHODS)) + "|")
        for name in args.models or CASES:
            missing = get(folder, name)
            if missing is not None:
                print(f"| {name} | skipped: {missing} |", flush=True)
                continue
            # Packages of the same name exclude one another.
            command = [sys.executable, __file__, name, "--one", "--folder", str(folder)]
            command += ["--repeats", str(args.repeats)]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode:
                reason = run.stderr.strip().splitlines()[-1]
                print(f"| {name} | failed: {reason} |", flush=True)
                results[name] = {"failed": reason}
                continue
            found = results[name] = json.loads(run.stdout.splitlines()[-1])
            cells = [shown(row) for row in found["methods"].values()]
            print(f"| {name} | {found['input']} | {found['seconds']:.2f} |", end=" ")
            print(" | ".join(cells), "|", flush=True)
            for kind, row in found["methods"].items():
                if args.errors and "refused" in row:
                    print(f"    {kind}: {row['refused']}")
            if args.errors:
                print(f"    hidden_attention: {found.get('hidden_attention')}")
        if args.save:
            record(results)


def record(results: dict[str, dict[str, Any]]) -> None:
    """Write the results, and what an earlier run found of the other models."""
    from _record import RESULTS, save

    path = RESULTS / "any_input.json"
    former = json.loads(path.read_text()) if path.exists() else {"rows": []}
    kept = {row["model"]: {"found": former["date"], **row} for row in former["rows"]}
    rows = [
        {"model": name, **results[name]} if name in results else kept[name]
        for name in CASES
        if name in results or name in kept
    ]
    save(path, "any_input", rows, cpu_time=True)


if __name__ == "__main__":
    main()
