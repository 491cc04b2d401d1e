"""From tokens to pixels: which token is which patch of a series, an image, a video or a volume."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

INTERPOLATIONS = ("bilinear", "nearest", "bicubic")
# What torch calls linear along each of so many axes.
_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


@dataclass(frozen=True)
class TokenGrid:
    """Which token of a sequence is which patch of an image, of a series, or of a volume.

    A vision model provides one by a method ``token_grid(height, width)``, for images of that
    size; a model of videos or volumes by ``token_grid(depth, height, width)``, one of series by
    ``token_grid(length)``. Tokens that are not patches (CLS, registers) do not appear in it.

    Args:
        index (Tensor): ``(H, W)`` int64, the token of each patch, top row first; or ``(L,)``, or
            ``(D, H, W)``.
        mode (str, optional): how relevance of patches is interpolated to pixels,
            ``"bilinear"`` (linear along every axis), ``"nearest"`` or, for images, ``"bicubic"``.
            Default: ``"bilinear"``

    Raises:
        ValueError: for an index that is not of integers along one to three axes, or an unknown
            ``mode``.

    Examples::

        >>> grid = TokenGrid(1 + torch.arange(6).view(2, 3))  # a CLS token, 2 x 3 patches
        >>> relevance = torch.tensor([[9.0, 1, 2, 3, 4, 5, 6]])
        >>> grid.patches(relevance)
        tensor([[[1., 2., 3.],
                 [4., 5., 6.]]])
        >>> grid.pixels(relevance, (32, 48)).shape
        torch.Size([1, 32, 48])

    In a model::

        def token_grid(self, height, width):
            rows, columns = height // 16, width // 16
            return TokenGrid(1 + torch.arange(rows * columns).view(rows, columns))
    """

    index: Tensor
    mode: str = "bilinear"

    def __post_init__(self) -> None:
        if self.index.dim() not in _LINEAR or self.index.is_floating_point():
            raise ValueError(
                f"index has shape {tuple(self.index.shape)} and dtype {self.index.dtype}; "
                "expected (H, W), (L,) or (D, H, W), int64: the token of each patch."
            )
        if self.mode not in INTERPOLATIONS:
            raise ValueError(f"mode is {self.mode!r}; expected one of {INTERPOLATIONS}.")

    @property
    def shape(self) -> tuple[int, ...]:
        """Patches along each axis, such as (H, W)."""
        return tuple(self.index.shape)

    def patches(self, relevance: Tensor) -> Tensor:
        """The relevance of patches ``(..., H, W)``, from that of tokens ``(..., L)``."""
        return relevance[..., self.index.to(relevance.device)]

    def pixels(self, relevance: Tensor, size: tuple[int, ...]) -> Tensor:
        """Token relevance ``(B, L)`` interpolated to an image of ``size``: ``(B, *size)``."""
        patches = self.patches(relevance)[:, None]
        mode = self.mode
        if mode == "bilinear" or (mode == "bicubic" and len(size) != 2):
            mode = _LINEAR[len(size)]
        aligned = {} if mode == "nearest" else {"align_corners": False}
        return nn.functional.interpolate(patches, size=size, mode=mode, **aligned)[:, 0]


def find_token_grid(
    model: nn.Module, arguments: Mapping[str, Any], images: Tensor, tokens: int
) -> TokenGrid | None:
    """The grid of a model's tokens, or None for inputs that have none, or if it is unknown.

    A method ``token_grid(height, width)`` of the model or of a module in it returns it; else it is
    derived from an attribute ``patch_embed`` as in timm and in the published Vision Mamba, with its
    ``grid_size`` or its convolution ``proj``, and the published flags for the CLS token.

    ``images`` are the explained inputs, ``(B, C, *size)``; those among the ``arguments`` of the
    model's ``forward`` may have another size. ``tokens`` is L, the length of its mixers' sequence.
    """
    axes = images.dim() - 2
    if axes not in _LINEAR or not images.is_floating_point():
        return None
    passed = [a for a in arguments.values() if torch.is_tensor(a) and a.dim() == images.dim()]
    seen = passed[0] if passed else images
    size = tuple(map(int, seen.shape[2:]))
    for module in model.modules():
        method = getattr(module, "token_grid", None)
        if callable(method) and len(signature(method).parameters) == axes:
            grid: TokenGrid = method(*size)
            last = int(grid.index.max())
            if last >= tokens:
                raise ValueError(
                    f"token_grid of {type(module).__name__} names token {last} for images of "
                    f"{' x '.join(map(str, size))}; expected tokens 0 .. {tokens - 1}, as in its "
                    "mixers' sequence."
                )
            return grid
    if arguments and not passed:
        return None  # the model makes its images of something else, perhaps with other axes
    for module in model.modules():
        embed = getattr(module, "patch_embed", None)
        if isinstance(embed, nn.Module) and axes == 2:
            return _published_grid(module, embed, seen, tokens)
    return None


def cls_positions(kind: str | None, patches: int) -> list[int]:
    """Positions of the CLS tokens in a sequence with ``patches`` patches, as published.

    ``kind`` is ``"start"``, ``"middle"``, ``"end"``, ``"ends"`` or None.
    """
    positions = {
        None: [],
        "start": [0],
        "middle": [patches // 2],
        "end": [patches],
        "ends": [0, patches + 1],
    }
    if kind not in positions:
        raise ValueError(f"cls is {kind!r}; expected one of {tuple(positions)}.")
    return positions[kind]


def patch_index(kind: str | None, shape: tuple[int, int]) -> Tensor:
    """The token of each patch ``(H, W)``, skipping the CLS tokens of :func:`cls_positions`."""
    patches = shape[0] * shape[1]
    cls = cls_positions(kind, patches)
    return torch.tensor([t for t in range(patches + len(cls)) if t not in cls]).view(shape)


def _published_grid(
    model: nn.Module, embed: nn.Module, images: Tensor, tokens: int
) -> TokenGrid | None:
    shape = _patch_shape(embed, images)
    if shape is None:
        return None
    extra = tokens - shape[0] * shape[1]
    if extra == 0:
        return TokenGrid(patch_index(None, shape))
    if extra == 2 and getattr(model, "use_double_cls_token", False):
        return TokenGrid(patch_index("ends", shape))
    if extra == 1 and getattr(model, "use_middle_cls_token", False):
        return TokenGrid(patch_index("middle", shape))
    if extra == 1 and (hasattr(model, "cls_token") or hasattr(model, "if_cls_token")):
        return TokenGrid(patch_index("start", shape))
    return None


def _patch_shape(embed: nn.Module, images: Tensor) -> tuple[int, int] | None:
    proj = getattr(embed, "proj", None)
    if isinstance(proj, nn.Conv2d) and not isinstance(proj.padding, str):
        sides = zip(
            images.shape[-2:], proj.kernel_size, proj.stride, proj.padding, proj.dilation,
            strict=True,
        )  # fmt: skip
        rows, columns = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sides)
        return int(rows), int(columns)
    size = getattr(embed, "grid_size", None)
    return None if size is None else (int(size[0]), int(size[1]))
