"""Which frame decided, and which method finds it? ``python benchmarks/video/evaluate_video.py``.

The video model (``tutorials/models/moving-video``) is asked for the class it predicts, of held-out
clips that it gets right. How often the frame of largest relevance is the deciding one, and the
share of positive relevance in it; 95 percent bootstrap intervals over clips, and differences to
the plain gradient on the same clips. Writes ``results/video.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from captum.attr import InputXGradient, IntegratedGradients, Saliency
from clips import FRAMES, held_out_clips
from torch import Tensor, nn

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    UnifiedImplicitAttention,
)
from captum_ssm.metrics import bootstrap

# After this directory, so that files of the same name here come first.
sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tutorials"))
from _record import save
from trained_models import load

RESULTS = Path(__file__).resolve().parent / "results"
GRADIENT = "Saliency (Captum)"


def methods(model: nn.Module) -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Explanations by name, of clips and classes."""
    generator = torch.Generator().manual_seed(0)
    ours = (
        MambaLRP, LaTIM, MambaAttribution, UnifiedImplicitAttention, MambaRollout, RawAttention
    )  # fmt: skip
    found: dict[str, Any] = {method.__name__: method(model).attribute for method in ours}
    return found | {
        "IntegratedGradients (Captum)": lambda x, t: IntegratedGradients(model).attribute(
            x, target=t, n_steps=20, internal_batch_size=50
        ),
        "InputXGradient (Captum)": lambda x, t: InputXGradient(model).attribute(x, target=t),
        GRADIENT: lambda x, t: Saliency(model).attribute(x, target=t),
        "Random maps": lambda x, t: torch.rand(x.shape, generator=generator),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--clips", type=int, default=200)
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    model, clips = load("moving-video"), held_out_clips(args.clips)
    with torch.no_grad():
        right = model(clips.clips).argmax(1) == clips.labels
    videos, labels, frames = clips.clips[right], clips.labels[right], clips.frames[right]
    scores: dict[str, dict[str, Tensor]] = {}
    for name, method in methods(model).items():
        parts = [
            method(x, t).detach() for x, t in zip(videos.split(50), labels.split(50), strict=True)
        ]
        by_frame = torch.cat(parts).sum(1).flatten(2)  # (B, frames, pixels)
        positive = by_frame.clamp(min=0).sum(-1)
        scores[name] = {
            "largest": (by_frame.sum(-1).argmax(1) == frames).double(),
            "share": positive.gather(1, frames[:, None])[:, 0] / positive.sum(1).clamp(min=1e-30),
        }
        print(name, {key: float(one.mean()) for key, one in scores[name].items()}, flush=True)
    rows, table = [], []
    for name, found in scores.items():
        cells = []
        for key, values in found.items():
            whole, paired = (
                bootstrap(100 * values),
                bootstrap(100 * (values - scores[GRADIENT][key])),
            )
            rows.append(
                {"method": name, "score": key}
                | asdict(whole)
                | {"less the gradient's": asdict(paired)}
            )
            cells += [f"{e.value:.1f} [{e.low:.1f}, {e.high:.1f}]" for e in (whole, paired)]
        table.append(f"| {name} | " + " | ".join(cells) + " |")
    save(args.output / "video.json", "video", rows, clips=len(videos))
    text = [
        "# Explanations of the video model",
        "",
        f"{len(videos)} of {args.clips} held-out clips, those of the right class, of {FRAMES} "
        "frames of which one decides. In percent, 95% bootstrap intervals over clips.",
        "",
        "| method | its frame is the largest | less the gradient's | share of its frame | less the "
        "gradient's |",
        "|---|---|---|---|---|",
        *table,
        "",
        "A token is two frames, so methods of tokens cannot tell a frame from its neighbor by "
        "their maps; where they do, it is by how the token reads its pixels.",
        "",
        f"`python benchmarks/video/evaluate_video.py --clips {args.clips}`",
        "",
    ]
    (args.output / "video.md").write_text("\n".join(text))


if __name__ == "__main__":
    main()
