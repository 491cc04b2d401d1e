"""How large is the effective receptive field of trained models, and of the same ones at random?

- digits-vim (`tutorials/models`): the central patch of the last mixer, over held-out canvases.
- opensr-mamba, a published super-resolution of Sentinel-2 images by four (MambaIR's blocks), with
  the weights that its package ships: which pixels is the central super-resolved pixel made from?
  It is given crops of scikit-learn's two photographs, as reflectances up to 0.3: a shift of domain.
  Its scan is this library's kernel, with mamba_ssm's signature: no GPU is needed.

Each is measured trained and at its own random initialization, by gradient and, where it can be, by
implicit maps. Areas are those of the averaged map; the intervals, of 95%, are of the mean of the
areas of single inputs, by bootstrap. Writes `results/receptive_field.json`, a table, and a picture.

    python benchmarks/receptive_field.py --picture docs/images/receptive_field.png
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from _record import RESULTS, save
from safetensors.torch import load_file
from sklearn.datasets import load_sample_images
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm import ReceptiveField, UnsupportedModelError, effective_receptive_field
from captum_ssm.examples.digits import held_out_digits
from captum_ssm.kernels import DiagonalCoefficients, diagonal_scan
from captum_ssm.metrics import bootstrap
from captum_ssm.models import VisionMamba
from captum_ssm.visualization import receptive_field_map

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("opensr-mamba==0.0.1", "einops==0.8.2")
# opensr_mamba.load_models has these, and asks for a GPU.
OPTIONS = {
    "in_chans": 3,
    "embed_dim": 60,
    "depths": [2, 2, 2, 2],
    "d_state": 16,
    "mlp_ratio": 1.5,
    "upscale": 4,
    "attention_type": "sigmoid_02",
    "upsampler": "pixelshuffledirect",
    "resi_connection": "1conv",
    "operation_attention": "sum",
}


def selective_scan_fn(
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    z: None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = True,
    return_last_state: bool = False,
) -> Tensor:
    """mamba_ssm's scan, as opensr-mamba calls it: u ``(B, D, L)``, B and C ``(B, G, N, L)``."""
    assert z is None
    assert delta_bias is not None
    assert delta_softplus
    assert not return_last_state
    dt = F.softplus(delta + delta_bias[:, None]).mT
    B, C = (x.permute(0, 3, 1, 2) for x in (B, C))
    return diagonal_scan(u.mT, DiagonalCoefficients(dt, dt, A, B, C)).mT + D[:, None] * u


class DropPath(nn.Identity):
    """timm's, of a model that is not trained."""


def stand_in(name: str, **values: Any) -> None:
    """A package that opensr-mamba imports, with no more than what it uses of it."""
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(values)
    sys.modules[name] = module


def opensr(folder: Path, trained: bool, size: int) -> nn.Module:
    """opensr-mamba's super-resolution of red, green and blue by four."""
    stand_in("mamba_ssm")
    stand_in("mamba_ssm.ops")
    stand_in("mamba_ssm.ops.selective_scan_interface", selective_scan_fn=selective_scan_fn)
    stand_in("timm.layers", DropPath=DropPath)
    stand_in("timm", layers=sys.modules["timm.layers"])
    stand_in("timm.models")
    initial = nn.init.trunc_normal_
    stand_in("timm.models.layers", to_2tuple=lambda n: (n, n), trunc_normal_=initial)
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    from opensr_mamba.mamba.main import MambaSR

    torch.manual_seed(0)
    model = MambaSR(img_size=size, **OPTIONS)
    if trained:
        weights = str(files("opensr_mamba.mamba.weights") / "srmodel.pth")
        model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return model.eval()


def photographs(count: int, size: int) -> Tensor:
    """Crops ``(count, 3, size, size)`` of two photographs, as reflectances up to 0.3."""
    images = torch.stack([torch.from_numpy(image) for image in load_sample_images().images])
    small = F.avg_pool2d(images.permute(0, 3, 1, 2).float() / 255 * 0.3, 2)
    generator = torch.Generator().manual_seed(0)
    crops = []
    for k in range(count):
        y, x = (int(torch.randint(n - size, (), generator=generator)) for n in small.shape[2:])
        crops.append(small[k % len(small), :, y : y + size, x : x + size])
    return torch.stack(crops)


def vim(trained: bool) -> nn.Module:
    """digits-vim, or its architecture at random."""
    torch.manual_seed(0)
    weights = load_file(ROOT / "tutorials" / "models" / "digits-vim" / "model.safetensors")
    model = VisionMamba.from_state_dict(weights)
    if not trained:
        model = VisionMamba(image_size=40, patch_size=4, classes=10, width=48, depth=4, state=4)
    return model.eval()


def measured(
    forward: Callable[..., Any], model: nn.Module, inputs: Tensor, by: str
) -> tuple[dict[str, Any], ReceptiveField | None]:
    """A row of the table, and the averaged field; or why there is none."""
    start = time.perf_counter()

    def field(of: Any) -> ReceptiveField:
        return effective_receptive_field(forward, of, model=model, by=by)

    try:
        singles = [field(one[None]) for one in inputs]
        average = field(list(inputs.split(1)))
    except UnsupportedModelError as error:
        return {"refused": str(error).split(". ")[0]}, None
    row: dict[str, Any] = {"unit": average.unit, "inputs": average.inputs}
    for share in (0.5, 0.9):
        found = average.area(share)
        each = bootstrap(torch.tensor([one.area(share).share for one in singles]))
        row[f"{share:.0%}"] = {
            "places": found.places,
            "share": found.share,
            "side": found.side,
            "of single inputs": {"value": each.value, "low": each.low, "high": each.high},
        }
    return {**row, "seconds": round(time.perf_counter() - start, 1)}, average


def table(rows: list[dict[str, Any]]) -> str:
    """The rows in Markdown."""
    lines = [
        "| model | by | 50% of the field | side | 90% of the field | side | single inputs, 50% |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        name = f"{row['model']}, {row['weights']}"
        if "refused" in row:
            lines.append(f"| {name} | {row['by']} | refused: {row['refused']} | | | | |")
            continue
        half, most = row["50%"], row["90%"]
        single = half["of single inputs"]
        lines.append(
            f"| {name} | {row['by']} | {half['share']:.1%} ({half['places']}) | {half['side']} | "
            f"{most['share']:.1%} ({most['places']}) | {most['side']} | "
            f"{single['value']:.1%} [{single['low']:.1%}, {single['high']:.1%}] |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where the package is installed and kept")
    parser.add_argument("--size", type=int, default=48, help="of the crops, in pixels")
    parser.add_argument("--crops", type=int, default=8)
    parser.add_argument("--canvases", type=int, default=32)
    parser.add_argument("--output", type=Path, default=RESULTS / "receptive_field.json")
    parser.add_argument("--picture", type=Path, help="of the averaged fields")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows, fields = [], {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        if not (folder / "opensr_mamba").exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--target", str(folder), *PACKAGES], check=True)
        for name in ("digits-vim", "opensr-mamba"):
            for weights in ("trained", "random"):
                if name == "digits-vim":
                    model = forward = vim(weights == "trained")
                    inputs = held_out_digits(args.canvases).images
                else:
                    model = opensr(folder, weights == "trained", args.size)
                    inputs = photographs(args.crops, args.size)

                    def forward(x: Tensor, model: nn.Module = model) -> Tensor:
                        return model(x, save_attention_maps=True)[0]

                for by in ("gradient", "implicit"):
                    row, field = measured(forward, model, inputs, by)
                    rows.append({"model": name, "weights": weights, "by": by, **row})
                    print(table(rows[-1:]).splitlines()[-1], flush=True)
                    if field is not None:
                        fields[f"{name}\n{weights}, by {by}"] = field
    details = {"packages": PACKAGES, "size": args.size, "canvases": args.canvases}
    save(args.output, "receptive_field", rows, **details)
    args.output.with_suffix(".md").write_text(f"{table(rows)}\n", encoding="utf-8")
    if args.picture is not None:
        receptive_field_map(fields).savefig(args.picture, dpi=75)


if __name__ == "__main__":
    main()
