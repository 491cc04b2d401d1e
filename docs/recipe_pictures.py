"""The pictures of docs/recipes: small models in the form of the repositories', soon trained.

    python docs/recipe_pictures.py            # or the names of some pages

Each learns for a minute a question whose answer has a known cause. The cause's share of the
relevance is printed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import torch
from torch import Tensor, nn
from torch.nn import functional as F

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "tests"))

import channels_first  # noqa: E402

channels_first.WIDTH = 16  # wide enough to learn something

import repositories as small  # noqa: E402

from captum_ssm import MambaLRP  # noqa: E402

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

OUT = HERE / "images" / "recipes"
Batch = tuple[Tensor, Tensor]


def train(model: nn.Module, score: Callable[[Tensor], Tensor], batch: Callable[[], Batch]) -> float:
    """Train for a minute at most; the share of new examples that is answered right."""
    optimizer, end = torch.optim.Adam(model.parameters(), 5e-3), time.process_time() + 60
    model.train()
    for _ in range(600):
        inputs, labels = batch()
        found = score(inputs)
        if labels.is_floating_point():
            loss = F.mse_loss(found, labels)
        else:
            loss = F.cross_entropy(found, labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if time.process_time() > end:
            break
    model.eval()
    inputs, labels = batch()
    with torch.no_grad():
        found = score(inputs)
    if labels.is_floating_point():
        return 1 - float((found - labels).square().mean() / labels.var())
    return float((found.argmax(1) == labels).float().mean())


def said(page: str, quality: float, relevance: Tensor, cause: Tensor) -> None:
    """Print how good the model is, and which share of the relevance its cause has."""
    size = relevance.detach().abs()
    share = float(size[cause.expand_as(size)].sum() / size.sum())
    print(f"{page}: quality {quality:.2f}, {share:.0%} of the relevance at the cause")


def saved(page: str, figure: plt.Figure) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUT / f"{page}.png", dpi=110, bbox_inches="tight")
    plt.close(figure)


def bars(count: int, size: tuple[int, int] = (32, 32)) -> tuple[Tensor, Tensor, Tensor]:
    """Images, labels, and where it is: a bar that lies (0) or stands (1), next to a disk."""
    images, labels = 0.2 * torch.rand(count, 3, *size), torch.randint(2, (count,))
    where = torch.zeros(count, *size, dtype=torch.bool)
    for k in range(count):
        y, x, other, at = (int(torch.randint(2, n - 14, ())) for n in (*size, *size))
        h, w = (12, 4) if labels[k] else (4, 12)
        images[k, :, other : other + 6, at : at + 6] = 0.6
        images[k, :, y : y + h, x : x + w] = 1.0
        where[k, y : y + h, x : x + w] = True
    return images, labels, where


def heat(axis: plt.Axes, relevance: Tensor, image: Tensor | None = None) -> None:
    top = float(relevance.abs().max())
    if image is not None:
        axis.imshow(image, cmap="gray", vmin=0, vmax=1)
    axis.imshow(relevance, cmap="PuOr_r", vmin=-top, vmax=top, alpha=0.75)
    axis.axis("off")


def of_images(page: str, model: nn.Module, size: tuple[int, int] = (32, 32)) -> None:
    quality = train(model, model, lambda: bars(32, size)[:2])
    images, labels, where = bars(3, size)
    relevance = MambaLRP(model).attribute(images, target=labels).sum(1)
    said(page, quality, relevance, where)
    figure, axes = plt.subplots(2, 3, figsize=(6, 4))
    for k in range(3):
        axes[0, k].imshow(images[k].movedim(0, -1))
        axes[0, k].set_title(["lies", "stands"][int(labels[k])])
        axes[0, k].axis("off")
        heat(axes[1, k], relevance[k], images[k].mean(0))
    saved(page, figure)


def vmamba() -> None:
    of_images("vmamba", small.VSSM(classes=2), (24, 24))


def mambavision() -> None:
    of_images("mambavision", small.MambaVision(16))


def detector() -> None:
    model = small.Detector()

    def two() -> tuple[Tensor, Tensor, Tensor]:
        images, _, _ = bars(16)
        images = torch.cat([images, bars(16)[0]], 3)  # one on each side
        return images, *boxes(images)

    def boxes(images: Tensor) -> tuple[Tensor, Tensor]:
        side = torch.randint(2, (len(images),))
        found, labels = [], []
        for image, s in zip(images, side.tolist(), strict=True):
            half = image[0, :, 32 * s : 32 * s + 32] == 1
            y, x = half.nonzero().amin(0).tolist()
            h, w = (half.nonzero().amax(0) - half.nonzero().amin(0) + 1).tolist()
            found.append([x + 32 * s - 1, y - 1, x + 32 * s + w + 1, y + h + 1])
            labels.append(int(h > w))
        return torch.tensor(found, dtype=torch.float), torch.tensor(labels)

    def rois(box: Tensor) -> Tensor:
        return torch.cat([torch.arange(len(box), dtype=torch.float)[:, None], box], 1)

    current: list[Tensor] = []

    def batch() -> Batch:
        images, box, labels = two()
        current[:] = [rois(box)]
        return images, labels

    def score(images: Tensor) -> Tensor:
        return model.roi_head._bbox_forward(model.extract_feat(images), current[0])["cls_score"]

    quality = train(model, score, batch)
    images, labels = batch()
    images, labels, current[0] = images[:1], labels[:1], current[0][:1]
    relevance = MambaLRP(score, model).attribute(images, target=labels).sum(1)
    x1, y1, x2, y2 = current[0][0, 1:].long().tolist()
    where = torch.zeros_like(relevance, dtype=torch.bool)
    where[:, y1:y2, x1:x2] = True
    said("detector", quality, relevance, where)
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.6))
    axes[0].imshow(images[0].movedim(0, -1))
    axes[0].axis("off")
    heat(axes[1], relevance[0], images[0].mean(0))
    for axis in axes:
        axis.add_patch(plt.Rectangle((x1, y1), x2 - x1, y2 - y1, fill=False, color="tab:green"))
    saved("detector", figure)


def volumes() -> None:
    model, size = small.UMambaBot(), (8, 12, 12)
    axes_of = torch.meshgrid(*(torch.arange(n) for n in size), indexing="ij")

    def batch() -> Batch:
        volume, mask = 0.2 * torch.rand(4, 1, *size), torch.zeros(4, *size, dtype=torch.long)
        for k in range(4):
            for light, side in ((1.0, 0), (0.5, 6)):
                c = torch.randint(2, 5, (3,)) + torch.tensor([0, side if k % 2 else 6 - side, 1])
                ball = sum((a - b) ** 2 for a, b in zip(axes_of, c, strict=True)) <= 5
                volume[k, 0][ball] = light
                mask[k][ball] = int(light == 1)
        return volume, mask

    quality = train(model, model, batch)
    volume, mask = (x[:1] for x in batch())
    relevance = MambaLRP(lambda v: (model(v)[:, 1] * mask).sum((1, 2, 3)), model).attribute(volume)
    said("volumes", quality, relevance[:, 0], mask.bool())
    middle = int(mask[0].sum((1, 2)).argmax())
    figure, axes = plt.subplots(2, 3, figsize=(6, 4))
    for axis, at in zip(axes.T, (middle - 1, middle, middle + 1), strict=True):
        at = min(max(at, 0), size[0] - 1)
        axis[0].imshow(volume[0, 0, at], cmap="gray", vmin=0, vmax=1)
        axis[0].set_title(f"slice {at}")
        axis[0].axis("off")
        heat(axis[1], relevance[0, 0, at], volume[0, 0, at])
    saved("volumes", figure)


def videomamba() -> None:
    model = small.VideoMamba(frames=4, side=2)

    def clips(count: int) -> tuple[Tensor, Tensor, Tensor]:
        video, labels = 0.2 * torch.rand(count, 3, 4, 16, 16), torch.randint(2, (count,))
        for k in range(count):
            y = int(torch.randint(1, 11, ()))
            for t in range(4):
                x = 1 + 3 * (t if labels[k] else 3 - t)
                video[k, :, t, y : y + 4, x : x + 4] = 1.0
        return video, labels, (video == 1).all(1)

    quality = train(model, model, lambda: clips(32)[:2])
    video, labels, where = clips(8)
    video, labels, where = (x[labels == 1][:1] for x in (video, labels, where))
    relevance = MambaLRP(model).attribute(video, target=labels).sum(1)
    said("videomamba", quality, relevance, where)
    figure, axes = plt.subplots(2, 4, figsize=(7, 3.6))
    for t in range(4):
        axes[0, t].imshow(video[0, :, t].movedim(0, -1))
        axes[0, t].set_title(f"frame {t + 1}")
        axes[0, t].axis("off")
        top = relevance.abs().max()
        shown = axes[1, t].imshow(relevance[0, t], cmap="PuOr_r", vmin=-top, vmax=top)
        shown.axes.axis("off")
    saved("videomamba", figure)


def pointmamba() -> None:
    model = small.PointMamba()
    model.groups, model.size = 10, 6

    def clouds(count: int) -> Batch:
        points, labels = F.normalize(torch.randn(count, 64, 3), dim=-1), torch.randint(2, (count,))
        height = torch.linspace(1.0, 1.8, 8)
        points[labels == 1, :8] = torch.stack([0 * height, 0 * height, height], -1)
        return points, labels

    quality = train(model, model, lambda: clouds(32))
    points, labels = clouds(8)
    points, labels = points[labels == 1][:1], labels[labels == 1][:1]
    relevance = MambaLRP(model).attribute(points, target=labels).sum(-1)
    said("pointmamba", quality, relevance, torch.arange(64)[None] < 8)
    figure = plt.figure(figsize=(4.5, 4))
    axis = figure.add_subplot(projection="3d")
    top = float(relevance.abs().max())
    x, y, z = points[0].T
    axis.scatter(x, y, z, c=relevance[0], cmap="PuOr_r", vmin=-top, vmax=top, edgecolors="gray")
    axis.set_axis_off()
    saved("pointmamba", figure)


def bars_over(page: str, names: list[str], relevance: Tensor) -> None:
    figure, axis = plt.subplots(figsize=(7, 2))
    colors = ["tab:orange" if value > 0 else "tab:blue" for value in relevance.tolist()]
    axis.bar(range(len(names)), relevance, color=colors)
    axis.set_xticks(range(len(names)), names)
    axis.set_ylabel("relevance")
    axis.spines[["top", "right"]].set_visible(False)
    saved(page, figure)


def genomes() -> None:
    model, at = small.Language(small.BiMamba(), small.BiMamba()), 9

    def batch(count: int = 32) -> Batch:
        ids = torch.randint(4, (count, 16))
        labels = 3 - ids[:, at - 2]  # A with T, C with G
        ids[:, at] = 4
        return ids, labels

    def score(ids: Tensor) -> Tensor:
        return model(ids).logits[:, at]

    quality = train(model, score, batch)
    ids, labels = batch(1)
    relevance = MambaLRP(model).attribute(ids, target=(at, int(labels)))[0]
    said("genomes", quality, relevance, torch.arange(16) == at - 2)
    bars_over("genomes", ["ACGT?"[k] for k in ids[0].tolist()], relevance)


def mamba4rec() -> None:
    model, lengths = small.Mamba4Rec(), torch.full((32,), 10)

    def score(items: Tensor) -> Tensor:
        return model(items, lengths[: len(items)]) @ model.item_embedding.weight.T

    def batch(count: int = 32) -> Batch:
        items, key = torch.randint(20, 50, (count, 10)), torch.randint(1, 9, (count,))
        place = torch.randint(10, (count,))
        items[torch.arange(count), place] = key
        return items, key + 8

    quality = train(model, score, batch)
    items, labels = batch(1)

    def lead(items: Tensor) -> Tensor:  # over the other items that may follow
        found = score(items)[:, 9:17]
        return found[:, labels[0] - 9] - found.mean(1)

    relevance = MambaLRP(lead, model).attribute(items)[0]
    said("mamba4rec", quality, relevance, items[0] < 9)
    bars_over("mamba4rec", [str(k) for k in items[0].tolist()], relevance)


def s_mamba() -> None:
    model = small.SMamba(SimpleNamespace(seq_len=24, pred_len=4))

    def score(series: Tensor) -> Tensor:
        return model(series, None, None, None)[:, :, 1]

    def batch(count: int = 32) -> Batch:
        noise = torch.randn(count, 34, 4)
        series = sum(noise[:, k : k + 28] for k in range(4)) / 2
        series[:, 6:, 1] = series[:, :-6, 3]
        return series[:, :24], series[:, 24:, 1]

    quality = train(model, score, batch)
    series, _ = batch(1)
    relevance = MambaLRP(score, model).attribute(series, target=1)[0]
    cause = torch.zeros(24, 4, dtype=torch.bool)
    cause[:, 3] = True
    said("s_mamba", quality, relevance, cause)
    figure, axes = plt.subplots(2, 1, figsize=(7, 4), sharex=True)
    for k, line in enumerate(series[0].T):
        axes[0].plot(line - 3 * k, label=f"variable {k}")
    axes[0].legend(loc="upper left", ncols=4, fontsize=7)
    axes[0].set_yticks([])
    top = float(relevance.abs().max())
    axes[1].imshow(relevance.T, cmap="PuOr_r", vmin=-top, vmax=top, aspect="auto")
    axes[1].set_yticks(range(4), [f"variable {k}" for k in range(4)])
    axes[1].set_xlabel("step")
    saved("s_mamba", figure)


PAGES = (
    detector,
    genomes,
    mamba4rec,
    mambavision,
    pointmamba,
    s_mamba,
    videomamba,
    vmamba,
    volumes,
)

if __name__ == "__main__":
    for make in PAGES:
        if not sys.argv[1:] or make.__name__ in sys.argv[1:]:
            torch.manual_seed(0)
            make()
