"""Models whose groups of mixers have a convolution between them."""

from __future__ import annotations

import inputs
from inputs import E
from torch import Tensor, nn

SIDE = 4


class Groups(inputs.Classifier):
    """Groups of mixers, a convolution behind each, and perhaps a stream around both."""

    def __init__(self, layers: int = 2, *, skip: bool = True) -> None:
        super().__init__()
        self.skip = skip
        self.inp = nn.Conv2d(3, E, 1)
        self.groups = nn.ModuleList(inputs.Body(layers) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(E, E, 3, padding=1) for _ in range(2))

    def conv(self, k: int, h: Tensor) -> Tensor:
        return self.convs[k](h.mT.reshape(len(h), E, SIDE, SIDE)).flatten(2).mT

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x).flatten(2).mT
        for k, group in enumerate(self.groups):
            y = self.conv(k, group(h))
            h = h + y if self.skip else y
        return self.head(self.norm(h.mean(1)))


class OnImages(Groups):
    """The stream is an image, of which each group is given other views as tokens."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.inp(x)
        for group, conv in zip(self.groups, self.convs, strict=True):
            h = h + conv(group.on_image(h))
        return self.head(self.norm((h + self.inp(x)).mean((2, 3))))
