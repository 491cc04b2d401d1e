"""Vision Mamba (Zhu et al., 2024), compact, on any device, with the published weights' names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.kernels.convolution import causal_conv
from captum_ssm.models.s6 import initial_dt_bias, s6
from captum_ssm.models.token_grid import TokenGrid, cls_positions, patch_index
from captum_ssm.models.vision_weights import grid_shape_of, pair, plain_weights, size_and_stride

DIRECTIONS = ("none", "v1", "v2")
# The published names of the CLS tokens, by their number.
CLS_TOKENS = {0: (), 1: ("cls_token",), 2: ("cls_token_head", "cls_token_tail")}


class BidirectionalMamba(nn.Module):
    r"""The mixer of Vision Mamba: S6 over the tokens, forward and backward.

    .. math::
        u, z = W_{in} x, \qquad
        y = c\, W_{out}\, \mathrm{SiLU}(z) \odot \big(S(u) + P\, S_b(P u)\big)

    where S is the convolution, its SiLU and the scan with its skip, and P reverses the order.
    In ``"v2"`` all weights of the backward direction are separate. In ``"v1"`` all are shared
    except the decay rates, and the backward direction scans the output of the forward
    convolution. Parameters have the names of the published module.

    Args:
        width, state, conv, expand, dt_rank, bias: as for :class:`SS2D`. Default: ``conv=4``
        bimamba_type (str, optional): ``"v1"``, ``"v2"``, or ``"none"`` for the forward
            direction only. Default: ``"v2"``
        if_divide_out (bool, optional): c = 1/2 (``"v2"`` only, as published). Default: True
        conv_bias (bool, optional): of the convolutions. Default: True
        layer_scale (float, optional): initial value of a learned factor per output channel;
            None for no such factor. Default: None

    Raises:
        ValueError: for an unknown ``bimamba_type``.

    Examples::

        >>> mixer = BidirectionalMamba(16, state=4)
        >>> (weights,) = hidden_attention(mixer, torch.randn(1, 9, 16), reduction="mean").values()
        >>> bool(weights[0, 0, 1:].any())  # the first token reads later ones
        True
    """

    def __init__(
        self,
        width: int,
        *,
        state: int = 16,
        conv: int = 4,
        expand: int = 2,
        dt_rank: int | None = None,
        bimamba_type: str = "v2",
        if_divide_out: bool = True,
        conv_bias: bool = True,
        bias: bool = False,
        layer_scale: float | None = None,
    ) -> None:
        super().__init__()
        if bimamba_type not in DIRECTIONS:
            raise ValueError(f"bimamba_type is {bimamba_type!r}; expected one of {DIRECTIONS}.")
        self.bimamba_type = bimamba_type
        self.if_divide_out = if_divide_out and bimamba_type == "v2"
        inner = expand * width
        rank = dt_rank or math.ceil(width / 16)
        self.in_proj = nn.Linear(width, 2 * inner, bias=bias)
        self.out_proj = nn.Linear(inner, width, bias=bias)
        self.gamma = None if layer_scale is None else nn.Parameter(layer_scale * torch.ones(width))
        self.act = nn.SiLU()
        for suffix in ("", "_b") if bimamba_type == "v2" else ("",):
            convolution = nn.Conv1d(
                inner, inner, conv, groups=inner, padding=conv - 1, bias=conv_bias
            )
            steps = nn.Linear(rank, inner)
            nn.init.uniform_(steps.weight, -(rank**-0.5), rank**-0.5)
            steps.bias = nn.Parameter(initial_dt_bias(inner))
            self.add_module(f"conv1d{suffix}", convolution)
            self.add_module(f"x_proj{suffix}", nn.Linear(inner, rank + 2 * state, bias=False))
            self.add_module(f"dt_proj{suffix}", steps)
            self.register_parameter(f"D{suffix}", nn.Parameter(torch.ones(inner)))
        # The published names of the decay rates: A_log, and A_b_log for the backward direction.
        for name in ("A_log",) if bimamba_type == "none" else ("A_log", "A_b_log"):
            rates = torch.arange(1.0, state + 1).log().repeat(inner, 1)
            self.register_parameter(name, nn.Parameter(rates))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Mixed tokens ``(B, L, E)`` of ``hidden_states (B, L, E)``."""
        u, z = self.in_proj(hidden_states).chunk(2, -1)
        v = self._convolved(u)
        y = self._scan(v, "A_log")
        if self.bimamba_type == "v1":
            y = y + self._scan(v.flip(1), "A_b_log").flip(1)
        elif self.bimamba_type == "v2":
            backward = self._convolved(u.flip(1), "_b")
            y = y + self._scan(backward, "A_b_log", "_b").flip(1)
        y = y.to(z.dtype) * F.silu(z)
        out = self.out_proj(y / 2 if self.if_divide_out else y)
        return out if self.gamma is None else out * self.gamma

    def _convolved(self, u: Tensor, suffix: str = "") -> Tensor:
        conv = getattr(self, f"conv1d{suffix}")
        psi = causal_conv(u, conv.weight[:, 0])
        return self.act(psi if conv.bias is None else psi + conv.bias)

    def _scan(self, v: Tensor, rates: str, suffix: str = "") -> Tensor:
        names = f"x_proj{suffix}", f"dt_proj{suffix}", rates, f"D{suffix}"
        return s6(v, *(getattr(self, name) for name in names))


class Block(nn.Module):
    """A mixer with its norm, on the residual stream: ``x + mixer(norm(x))``."""

    def __init__(self, mixer: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """``(B, L, E)`` to ``(B, L, E)``; the residual stream is in float32 at least."""
        wide = torch.promote_types(x.dtype, torch.float32)
        weight: Tensor = self.norm.weight  # type: ignore[assignment]
        return x.to(wide) + self.mixer(self.norm(x.to(weight.dtype))).to(wide)


class PatchEmbed(nn.Module):
    """Patches of an image as tokens, row by row: ``(B, C, H, W)`` to ``(B, L, E)``."""

    def __init__(
        self, channels: int, width: int, patch: tuple[int, int], stride: tuple[int, int]
    ) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, stride)

    def forward(self, images: Tensor) -> Tensor:
        return self.proj(images).flatten(2).mT


class VisionMamba(nn.Module):
    """An image classifier of Mamba blocks over patches, with the published weights' names.

    Zhu et al., `Vision Mamba <https://arxiv.org/abs/2401.09417>`_.

    Args:
        image_size (int or (int, int), optional): height and width. Default: 224
        patch_size (int or (int, int), optional): Default: 16
        stride (int or (int, int), optional): distance between patches; None for the patch size,
            which is no overlap. Default: None
        channels (int, optional): color channels of an image. Default: 3
        classes (int, optional): V; 0 returns the pooled token ``(B, E)``. Default: 1000
        width (int, optional): E. Default: 192
        depth (int, optional): number of blocks. Default: 24
        cls (str, optional): position of the CLS token, ``"start"``, ``"middle"``, ``"end"``,
            ``"ends"`` (two, averaged), or None for none. Default: ``"middle"``
        pool (str, optional): the readout of a model without a CLS token, the ``"mean"`` over
            tokens or the ``"last"`` token. Default: ``"mean"``
        norm (str, optional): ``"rms"`` or ``"layer"``. Default: ``"rms"``
        positions (bool, optional): learned absolute positions; without them images may have
            any size. Default: True
        eps (float, optional): of the norms. Default: 1e-5
        **mixer: options of :class:`BidirectionalMamba`.

    Raises:
        ValueError: for an unknown ``cls``, ``pool``, ``norm`` or ``bimamba_type``.

    Examples::

        >>> model = VisionMamba(image_size=32, patch_size=8, classes=5, width=16, depth=2).eval()
        >>> images = torch.randn(2, 3, 32, 32)
        >>> MambaAttribution(model).attribute(images, target=4).shape
        torch.Size([2, 3, 32, 32])

    Published weights: ``VisionMamba.from_state_dict(torch.load("vim_t_midclstok.pth"))``.
    """

    def __init__(
        self,
        image_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        stride: int | tuple[int, int] | None = None,
        *,
        channels: int = 3,
        classes: int = 1000,
        width: int = 192,
        depth: int = 24,
        cls: str | None = "middle",
        pool: str = "mean",
        norm: str = "rms",
        positions: bool = True,
        eps: float = 1e-5,
        **mixer: Any,
    ) -> None:
        super().__init__()
        if norm not in ("rms", "layer"):
            raise ValueError(f"norm is {norm!r}; expected 'rms' or 'layer'.")
        if pool not in ("mean", "last"):
            raise ValueError(f"pool is {pool!r}; expected 'mean' or 'last'.")
        self.image_size = pair(image_size)
        patch = pair(patch_size)
        self.cls, self.pool = cls, pool
        step = patch if stride is None else pair(stride)
        self.patch_embed = PatchEmbed(channels, width, patch, step)
        rows, columns = self.grid_shape(*self.image_size)
        extra = len(cls_positions(cls, rows * columns))
        for name in CLS_TOKENS[extra]:
            self.register_parameter(name, nn.Parameter(torch.zeros(1, 1, width)))
        shape = (1, rows * columns + extra, width)
        self.pos_embed = nn.Parameter(torch.zeros(shape)) if positions else None
        kind = nn.RMSNorm if norm == "rms" else nn.LayerNorm
        self.layers = nn.ModuleList(
            Block(BidirectionalMamba(width, **mixer), kind(width, eps=eps)) for _ in range(depth)
        )
        self.norm_f = kind(width, eps=eps)
        self.head = nn.Linear(width, classes) if classes else nn.Identity()
        self._initialize(depth)

    @classmethod
    def from_state_dict(
        cls,
        state: Mapping[str, Any],
        /,
        *,
        image_size: int | tuple[int, int] | None = None,
        stride: int | tuple[int, int] | None = None,
        **options: Any,
    ) -> VisionMamba:
        """A model with these weights, in eval mode; sizes are read off the weights.

        The weights do not tell the CLS token's position, or whether the output is halved. The
        position is derived from the position embeddings (:func:`find_cls`). The output is halved
        for ``v2``, as published.

        Args:
            state (mapping): a state dict in the published names; it may be under ``"model"``
                in a checkpoint, and its names may start with ``"module."``.
            image_size (int or (int, int), optional): height and width. None for square images
                whose patches do not overlap, or for the published models' 224 pixels if
                patches at half their size's distance fit. Default: None
            stride (int or (int, int), optional): distance between patches; None for the one
                that ``image_size`` implies, else the patch size. Default: None
            **options: arguments of the constructor that the weights do not determine: ``cls``,
                ``pool``, ``if_divide_out``, ``eps``.

        Raises:
            ValueError: if the weights are not those of this model, or sizes contradict each
                other.
        """
        sd = plain_weights(state)
        embed, pos = sd["patch_embed.proj.weight"], sd.get("pos_embed")
        patch = (embed.shape[2], embed.shape[3])
        tokens = sum(name.startswith("cls_token") for name in sd)
        size, step = size_and_stride(pos, tokens, patch, image_size, stride)
        if tokens != 1:
            options["cls"] = "ends" if tokens == 2 else None
        elif "cls" not in options:
            grid = grid_shape_of(size, patch, step)
            options["cls"] = "middle" if pos is None else find_cls(pos, grid)
        prefix = "layers.0.mixer."
        mixer = {name[len(prefix) :]: w for name, w in sd.items() if name.startswith(prefix)}
        kind = "v2" if "x_proj_b.weight" in mixer else "v1" if "A_b_log" in mixer else "none"
        model = cls(
            size,
            patch,
            step,
            channels=embed.shape[1],
            classes=sd["head.weight"].shape[0] if "head.weight" in sd else 0,
            width=embed.shape[0],
            depth=1 + max(int(name.split(".")[1]) for name in sd if name.startswith("layers.")),
            norm="layer" if "norm_f.bias" in sd else "rms",
            positions=pos is not None,
            state=mixer["A_log"].shape[1],
            conv=mixer["conv1d.weight"].shape[-1],
            expand=mixer["A_log"].shape[0] // embed.shape[0],
            dt_rank=mixer["dt_proj.weight"].shape[1],
            bimamba_type=kind,
            conv_bias="conv1d.bias" in mixer,
            bias="in_proj.bias" in mixer,
            layer_scale=1.0 if "gamma" in mixer else None,
            **options,
        )
        missing, unexpected = model.load_state_dict(sd, strict=False)
        if missing or unexpected:
            raise ValueError(
                f"these are not the weights of a VisionMamba: missing {missing[:5]}, unknown "
                f"{unexpected[:5]}; expected the published names (rotary positions are not "
                "supported)."
            )
        return model.to(embed.dtype).eval()

    def grid_shape(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches of an image."""
        proj = self.patch_embed.proj
        return grid_shape_of((height, width), proj.kernel_size, proj.stride)

    def token_grid(self, height: int, width: int) -> TokenGrid:
        """Which token is which patch of the image."""
        return TokenGrid(patch_index(self.cls, self.grid_shape(height, width)))

    def cls_tokens(self, height: int | None = None, width: int | None = None) -> list[int]:
        """Positions of the CLS tokens in the sequence, for ``position=``."""
        size = self.image_size if height is None or width is None else (height, width)
        rows, columns = self.grid_shape(*size)
        return cls_positions(self.cls, rows * columns)

    def embed(self, images: Tensor) -> Tensor:
        """The tokens ``(B, L, E)`` of ``images (B, C, H, W)``, with CLS tokens and positions.

        Raises:
            ValueError: for images of a size that the positions do not fit.
        """
        size = (int(images.shape[-2]), int(images.shape[-1]))
        if images.dim() != 4 or (self.pos_embed is not None and size != self.image_size):
            raise ValueError(
                f"images have shape {tuple(images.shape)}; expected (B, C, "
                f"{self.image_size[0]}, {self.image_size[1]})."
            )
        x = self.patch_embed(images)
        positions = self.cls_tokens(*size)
        for at, name in zip(positions, CLS_TOKENS[len(positions)], strict=True):
            token = getattr(self, name).expand(len(x), -1, -1)
            x = torch.cat([x[:, :at], token, x[:, at:]], 1)
        return x if self.pos_embed is None else x + self.pos_embed

    def forward_features(self, images: Tensor) -> Tensor:
        """The tokens after the last norm, ``(B, L, E)``."""
        x = self.embed(images)
        for layer in self.layers:
            x = layer(x)
        return self.norm_f(x.to(self.norm_f.weight.dtype))

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(B, V)`` of ``images (B, C, H, W)``."""
        x = self.forward_features(images)
        pooled = self.cls_tokens(int(images.shape[-2]), int(images.shape[-1]))
        if not pooled and self.pool == "last":
            pooled = [x.shape[1] - 1]
        return self.head((x[:, pooled] if pooled else x).mean(1))

    def _initialize(self, depth: int) -> None:
        for name, p in self.named_parameters():
            if name.startswith(("cls_token", "pos_embed", "head.weight")):
                nn.init.trunc_normal_(p, std=0.02)
            elif name == "head.bias":
                nn.init.zeros_(p)
            elif name.endswith("out_proj.weight"):
                with torch.no_grad():
                    p.div_(math.sqrt(depth))


def find_cls(pos_embed: Tensor, shape: tuple[int, int]) -> str:
    """The position of a CLS token, from trained position embeddings: a heuristic for Vision Mamba.

    In trained models the embeddings of vertically adjacent patches are similar. That shows only
    if the CLS token's embedding is removed at the right position. The mean of 1 minus their cosine
    similarity counts as trained below 0.8, and as better where it is 1% below that of
    ``"middle"``.

    ``pos_embed`` is ``(1, L, E)``, of H W patches of an image of ``shape`` (H, W) and one CLS
    token. The result is ``"start"``, ``"middle"`` or ``"end"``; the published ``"middle"`` if no
    other position is clearly better, as with weights that were not trained.
    """
    apart = {}
    for kind in ("start", "middle", "end"):
        grid = pos_embed.detach()[0].double()[patch_index(kind, shape)]  # (H, W, E)
        unit = F.normalize(grid - grid.mean((0, 1)), dim=-1)
        apart[kind] = 1 - float((unit[1:] * unit[:-1]).sum(-1).mean())
    best = min(apart, key=apart.__getitem__)
    is_trained, is_better = apart[best] < 0.8, apart[best] < 0.99 * apart["middle"]
    return best if is_trained and is_better else "middle"
