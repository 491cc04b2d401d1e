"""Small models of every form of input and output, and the table of what explains them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from models import made
from torch import Tensor, nn

from captum_ssm import UnsupportedModelError
from captum_ssm.attr import methods
from captum_ssm.models import BidirectionalMamba, TokenGrid

E = 16


class Body(nn.Module):
    """Residual layers of mixers over tokens ``(B, L, E)``."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.mixers = nn.ModuleList(
            BidirectionalMamba(E, state=4, bimamba_type="none") for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(E) for _ in range(layers))

    def forward(self, h: Tensor) -> Tensor:
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            h = h + mixer(norm(h))
        return h

    def on_image(self, h: Tensor) -> Tensor:
        """All of them over the pixels of ``(B, E, H, W)``."""
        return self(h.flatten(2).mT).mT.reshape(h.shape)


class Classifier(nn.Module):
    """Any way from the inputs to tokens, a body, and a head on the mean of the tokens."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.body, self.norm, self.head = Body(), nn.LayerNorm(E), nn.Linear(E, classes)

    def tokens(self, *inputs: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.tokens(*inputs)).mean(1)))


class Series(Classifier):
    def __init__(self, features: int = 3) -> None:
        super().__init__()
        self.inp = nn.Linear(features, E)

    def tokens(self, x: Tensor) -> Tensor:
        return self.inp(x)


class ChannelsFirst(Series):
    def tokens(self, x: Tensor) -> Tensor:
        return self.inp(x.mT)


class Univariate(Series):
    def __init__(self) -> None:
        super().__init__(1)

    def tokens(self, x: Tensor) -> Tensor:
        return self.inp(x[..., None])


class PatchWeights(Classifier):
    """Patches of 4 steps of ``(B, F, L)``."""

    def __init__(self, features: int = 3) -> None:
        super().__init__()
        self.inp = nn.Conv1d(features, E, 4, stride=4)

    def tokens(self, x: Tensor) -> Tensor:
        return self.inp(x).mT


class Stem(Classifier):
    """Convolutions that overlap, over ``(B, F, L)``."""

    def __init__(self, features: int = 3) -> None:
        super().__init__()
        self.inp = nn.Sequential(
            nn.Conv1d(features, E, 3, stride=2, padding=1), nn.GELU(), nn.Conv1d(E, E, 3, padding=1)
        )

    def tokens(self, x: Tensor) -> Tensor:
        return self.inp(x).mT


class Two(Classifier):
    """Two series of the same steps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, E), nn.Linear(5, E)

    def tokens(self, x: Tensor, z: Tensor) -> Tensor:
        return self.first(x) + self.second(z)


class Static(Two):
    """A series, and features that hold for all of it."""

    def tokens(self, x: Tensor, z: Tensor) -> Tensor:
        return self.first(x) + self.second(z)[:, None]


class IdsAndValues(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.second = nn.Embedding(11, E), nn.Linear(5, E)

    def tokens(self, ids: Tensor, z: Tensor) -> Tensor:
        return self.table(ids) + self.second(z)


class Tabular(Classifier):
    """One token per feature of ``(B, F)``."""

    def __init__(self, features: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(features, E))
        self.bias = nn.Parameter(torch.zeros(features, E))

    def tokens(self, x: Tensor) -> Tensor:
        return x[..., None] * self.weight + self.bias


class Images(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Conv2d(3, E, 4, stride=4)

    def tokens(self, x: Tensor) -> Tensor:
        return self.inp(x).flatten(2).mT


class Video(Classifier):
    """Tubelets of ``(B, C, T, H, W)``, or blocks of a volume."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Conv3d(2, E, (2, 4, 4), stride=(2, 4, 4))

    def tokens(self, x: Tensor) -> Tensor:
        return self.inp(x).flatten(2).mT


class Hierarchy(nn.Module):
    """Two stages of an image: 8 x 8 tokens, then 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.merge = nn.Conv2d(3, E, 2, stride=2), nn.Conv2d(E, E, 2, stride=2)
        self.one, self.two = Body(1), Body(1)
        self.norm, self.head = nn.LayerNorm(E), nn.Linear(E, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.two.on_image(self.merge(self.one.on_image(self.inp(x))))
        return self.head(self.norm(h.flatten(2).mean(2)))


class UShape(Hierarchy):
    """Down and up again, with a skip connection, to a map of 5 classes per pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(E, E, 2, stride=2)
        self.three, self.head = Body(1), nn.ConvTranspose2d(E, 5, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.one.on_image(self.inp(x))
        coarse = self.two.on_image(self.merge(fine))
        return self.head(self.three.on_image(self.up(coarse) + fine))


class Forecast(nn.Module):
    """12 steps of 5 features, read from all tokens of ``(B, 24, 5)``."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.body, self.norm = nn.Linear(5, E), Body(), nn.LayerNorm(E)
        self.head = nn.Linear(24 * E, 60)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.inp(x))).flatten(1)).view(-1, 12, 5)


class PerStep(Forecast):
    """One output per step, read from that step's token."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(E, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(self.inp(x))))


def noise(*shape: int, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@dataclass(frozen=True)
class Form:
    """One form of input: a model that takes it, an input, and a target."""

    model: Callable[[], nn.Module]
    inputs: Any
    target: Any = 1


IDS = torch.tensor([[1, 4, 9, 9, 0, 3, 2, 7], [5, 1, 1, 8, 10, 3, 6, 2]])
FORMS = {
    "series `(B, L, F)`": Form(Series, noise(2, 8, 3)),
    "channels first `(B, F, L)`": Form(ChannelsFirst, noise(2, 3, 8)),
    "one variable `(B, L)`": Form(Univariate, noise(2, 8)),
    "patches of a series": Form(PatchWeights, noise(2, 3, 16)),
    "a strided stem": Form(Stem, noise(2, 3, 16)),
    "table `(B, F)`": Form(Tabular, noise(2, 6)),
    "two series, a tuple": Form(Two, (noise(2, 8, 3), noise(2, 8, 5))),
    "a series and static features, a tuple": Form(Static, (noise(2, 8, 3), noise(2, 5))),
    "ids and values, a tuple": Form(IdsAndValues, (IDS, noise(2, 8, 5))),
    "image `(B, C, H, W)`": Form(Images, noise(2, 3, 8, 12)),
    "image, two grids": Form(Hierarchy, noise(2, 3, 16, 16)),
    "video `(B, C, T, H, W)`": Form(Video, noise(2, 2, 4, 8, 8)),
    "volume `(B, C, D, H, W)`": Form(Video, noise(1, 2, 8, 8, 8)),
    "forecast `(B, 12, 5)`": Form(Forecast, noise(2, 24, 5), (3, 2)),
    "an output per step": Form(PerStep, noise(2, 8, 5), (3, 2)),
    "segmentation, a U-shape": Form(UShape, noise(2, 3, 16, 16), (2, 5, 5)),
}


def options(method: type) -> dict[str, str]:
    """The options with which a method's relevance adds up."""
    return {"activation": "gate"} if method.name == "latim" else {}


def table() -> str:
    """Which method explains which form of input, as Markdown."""
    known = methods()
    lines = ["| input | " + " | ".join(f"`{cls.__name__}`" for cls in known.values()) + " |"]
    lines.append("|---" * (len(known) + 1) + "|")
    for name, form in FORMS.items():
        model, cells = made(form.model), []
        for cls in known.values():
            try:
                cls(model).attribute(form.inputs, target=form.target, **options(cls))
                cells.append("✓")
            except UnsupportedModelError:
                cells.append("—")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def grid(rows: int, columns: int) -> TokenGrid:
    return TokenGrid(torch.arange(rows * columns).view(rows, columns))
