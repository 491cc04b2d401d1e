"""Vision Mamba (Zhu et al., 2024), compact, on any device, with the published weights' names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm._grid import TokenGrid, cls_positions, patch_index
from captum_ssm.models._scan import selective_scan
from captum_ssm.operators.conv import causal_conv

DIRECTIONS = ("none", "v1", "v2")
POOLS = ("mean", "last")
PUBLISHED_SIZE = 224


class BidirectionalMamba(nn.Module):
    r"""The mixer of Vision Mamba: S6 over the tokens, forwards and backwards.

    .. math::
        u, z = W_{in} x, \qquad
        y = c\, W_{out}\, \mathrm{SiLU}(z) \odot \big(S(u) + P\, S_b(P u)\big)

    with S the convolution, its SiLU and the scan with its skip, and P the reversed order.
    ``"v2"`` gives the backward direction weights of its own throughout. ``"v1"`` shares them all
    but the decay rates, and scans what the forward convolution returned. Parameters have the
    names of the published module.

    Args:
        width (int): E, channels of a token.
        state (int, optional): N. Default: 16
        conv (int, optional): taps of the convolutions. Default: 4
        expand (int, optional): D = expand * E. Default: 2
        dt_rank (int, optional): None for E / 16, rounded up. Default: None
        bimamba_type (str, optional): ``"v1"``, ``"v2"``, or ``"none"`` for the forward
            direction alone. Default: ``"v2"``
        if_divide_out (bool, optional): c = 1/2 (``"v2"`` only, as published). Default: True
        conv_bias (bool, optional): Default: True
        bias (bool, optional): of the input and output projections. Default: False
        layer_scale (float, optional): start of a learned factor per output channel.
            Default: None

    Raises:
        ValueError: for an unknown ``bimamba_type``.

    Examples::

        >>> mixer = BidirectionalMamba(16, state=4)
        >>> mixer(torch.randn(1, 9, 16)).shape
        torch.Size([1, 9, 16])
        >>> (weights,) = hidden_attention(mixer, torch.randn(1, 9, 16), reduction="mean").values()
        >>> bool(weights[0, 0, 1:].any())  # the first token is told of later ones
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
            raise ValueError(f"bimamba_type is {bimamba_type!r}; accepted are {DIRECTIONS}.")
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
            self.add_module(f"conv1d{suffix}", convolution)
            self.add_module(f"x_proj{suffix}", nn.Linear(inner, rank + 2 * state, bias=False))
            self.add_module(f"dt_proj{suffix}", _step_projection(rank, inner))
            self.register_parameter(f"D{suffix}", nn.Parameter(torch.ones(inner)))
        # The published names of the decay rates: A_log, and A_b_log for the way back.
        for name in ("A_log",) if bimamba_type == "none" else ("A_log", "A_b_log"):
            rates = torch.arange(1.0, state + 1).log().repeat(inner, 1)
            self.register_parameter(name, nn.Parameter(rates))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Mixed tokens ``(B, L, E)`` of ``hidden_states (B, L, E)``."""
        u, z = self.in_proj(hidden_states).chunk(2, -1)
        if self.bimamba_type == "v2":
            y = self._scan(self._convolved(u), "A_log")
            back = self._scan(self._convolved(u.flip(1), "_b"), "A_b_log", "_b")
            y = y + back.flip(1)
        else:
            v = self._convolved(u)
            y = self._scan(v, "A_log")
            if self.bimamba_type == "v1":
                y = y + self._scan(v.flip(1), "A_b_log").flip(1)
        y = y.to(z.dtype) * F.silu(z)
        out = self.out_proj(y / 2 if self.if_divide_out else y)
        return out if self.gamma is None else out * self.gamma

    def _convolved(self, u: Tensor, suffix: str = "") -> Tensor:
        conv = getattr(self, f"conv1d{suffix}")
        psi = causal_conv(u, conv.weight[:, 0])
        return self.act(psi if conv.bias is None else psi + conv.bias)

    def _scan(self, v: Tensor, rates: str, suffix: str = "") -> Tensor:
        state = getattr(self, rates).shape[1]
        found = getattr(self, f"x_proj{suffix}")(v)
        step, B, C = found.split([found.shape[-1] - 2 * state, state, state], -1)
        dt = F.softplus(getattr(self, f"dt_proj{suffix}")(step))
        wide = torch.promote_types(v.dtype, torch.float32)
        A, D = (getattr(self, name).to(wide) for name in (rates, f"D{suffix}"))
        v, dt, B, C = (t.to(wide) for t in (v, dt, B, C))
        return selective_scan(v, dt, -torch.exp(A), B, C, D)


class Block(nn.Module):
    """A mixer behind its norm, on the residual stream: ``x + mixer(norm(x))``."""

    def __init__(self, mixer: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """``(B, L, E)`` to ``(B, L, E)``, the stream in float32 at least."""
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

    Zhu et al., `Vision Mamba <https://arxiv.org/abs/2401.09417>`_. It runs without compiled
    kernels; its mixers are what this library explains.

    Args:
        image_size (int or (int, int), optional): height and width. Default: 224
        patch_size (int or (int, int), optional): Default: 16
        stride (int or (int, int), optional): between patches; None for patches side by side.
            Default: None
        channels (int, optional): colours of an image. Default: 3
        classes (int, optional): V; 0 returns the pooled token ``(B, E)``. Default: 1000
        width (int, optional): E. Default: 192
        depth (int, optional): number of blocks. Default: 24
        cls (str, optional): where the CLS token stands, ``"start"``, ``"middle"``, ``"end"``,
            ``"ends"`` (two, averaged), or None for none. Default: ``"middle"``
        pool (str, optional): what a model without a CLS token reads its output from, the
            ``"mean"`` over tokens or the ``"last"`` token. Default: ``"mean"``
        norm (str, optional): ``"rms"`` or ``"layer"``. Default: ``"rms"``
        positions (bool, optional): learned absolute positions; without them images of any size
            are taken. Default: True
        eps (float, optional): of the norms. Default: 1e-5
        **mixer: see :class:`BidirectionalMamba`.

    Raises:
        ValueError: for a ``cls``, ``pool``, ``norm`` or ``bimamba_type`` that is not accepted.

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
            raise ValueError(f"norm is {norm!r}; accepted are 'rms' and 'layer'.")
        if pool not in POOLS:
            raise ValueError(f"pool is {pool!r}; accepted are {POOLS}.")
        self.image_size = _pair(image_size)
        patch = _pair(patch_size)
        self.cls, self.pool = cls, pool
        self.patch_embed = PatchEmbed(
            channels, width, patch, patch if stride is None else _pair(stride)
        )
        rows, columns = self.grid_shape(*self.image_size)
        extra = len(cls_positions(cls, rows * columns))
        for name in {0: (), 1: ("cls_token",), 2: ("cls_token_head", "cls_token_tail")}[extra]:
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
        """The model whose weights these are, in eval mode; sizes are read off the weights.

        Where the CLS token stands and whether the output is halved are not among the weights.
        The position comes from the position embeddings: taken out at the right place it leaves
        a grid whose columns agree (:func:`find_cls`); where no place is clearly better, and for
        the halving, the published rule holds (in the middle; ``v2`` halves).

        Args:
            state (mapping): a state dict in the published names; a checkpoint that holds it
                under ``"model"``, and names that start with ``"module."``, are accepted.
            image_size (int or (int, int), optional): height and width; None for square images
                of patches side by side, or of the published models' 224 pixels where patches
                at half their distance fit it. Default: None
            stride (int or (int, int), optional): between patches; None where ``image_size``
                says it, or for patches side by side. Default: None
            **options: arguments of the constructor that the weights leave open: ``cls``,
                ``pool``, ``if_divide_out``, ``eps``.

        Raises:
            ValueError: the weights hold something this model does not have, or sizes that do
                not fit together.
        """
        sd = _plain(state)
        embed, pos = sd["patch_embed.proj.weight"], sd.get("pos_embed")
        patch = (embed.shape[2], embed.shape[3])
        tokens = sum(name.startswith("cls_token") for name in sd)
        size, step = _image_size(pos, tokens, patch, image_size, stride)
        if tokens != 1:
            options["cls"] = "ends" if tokens == 2 else None
        elif "cls" not in options:
            rows, columns = ((n - p) // s + 1 for n, p, s in zip(size, patch, step, strict=True))
            options["cls"] = "middle" if pos is None else find_cls(pos, (rows, columns))
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
                f"these are no weights of a VisionMamba: missing {missing[:5]}, not known "
                f"{unexpected[:5]} (rotary positions are not supported)."
            )
        return model.to(embed.dtype).eval()

    def grid_shape(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches of an image."""
        proj = self.patch_embed.proj
        sides = zip((height, width), proj.kernel_size, proj.stride, strict=True)
        rows, columns = ((n - k) // s + 1 for n, k, s in sides)
        return rows, columns

    def token_grid(self, height: int, width: int) -> TokenGrid:
        """Which token is which patch; the CLS token is none."""
        return TokenGrid(patch_index(self.cls, self.grid_shape(height, width)))

    def cls_tokens(self, height: int | None = None, width: int | None = None) -> list[int]:
        """Where the CLS tokens stand in the sequence, for ``position=``."""
        size = self.image_size if height is None or width is None else (height, width)
        rows, columns = self.grid_shape(*size)
        return cls_positions(self.cls, rows * columns)

    def embed(self, images: Tensor) -> Tensor:
        """The tokens ``(B, L, E)`` of ``images (B, C, H, W)``, CLS and positions included.

        Raises:
            ValueError: for images of another size than the positions.
        """
        size = (int(images.shape[-2]), int(images.shape[-1]))
        if images.dim() != 4 or (self.pos_embed is not None and size != self.image_size):
            raise ValueError(
                f"images have shape {tuple(images.shape)}; accepted is (B, C, "
                f"{self.image_size[0]}, {self.image_size[1]})."
            )
        x = self.patch_embed(images)
        for at, token in zip(self.cls_tokens(*size), self._cls_parameters(), strict=True):
            x = torch.cat([x[:, :at], token.expand(len(x), -1, -1), x[:, at:]], 1)
        return x if self.pos_embed is None else x + self.pos_embed

    def forward_features(self, images: Tensor) -> Tensor:
        """The tokens behind the last norm, ``(B, L, E)``."""
        x = self.embed(images)
        for layer in self.layers:
            x = layer(x)
        return self.norm_f(x.to(self.norm_f.weight.dtype))

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(B, V)`` of ``images (B, C, H, W)``."""
        x = self.forward_features(images)
        places = self.cls_tokens(int(images.shape[-2]), int(images.shape[-1]))
        if not places and self.pool == "last":
            places = [x.shape[1] - 1]
        return self.head((x[:, places] if places else x).mean(1))

    def _cls_parameters(self) -> list[nn.Parameter]:
        names = {None: (), "ends": ("cls_token_head", "cls_token_tail")}
        return [getattr(self, name) for name in names.get(self.cls, ("cls_token",))]

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
    """Where a CLS token stands, from trained position embeddings.

    Training makes the embeddings of patches above one another alike. Without the CLS token's own
    embedding, and only then, the embeddings fall into such columns.

    Args:
        pos_embed (Tensor): ``(1, L, E)``.
        shape (tuple of int): (H, W), rows and columns of patches; L = H W + 1.

    Returns:
        str: ``"start"``, ``"middle"`` or ``"end"``; the published ``"middle"`` where no other
        place is clearly better, as with weights that were not trained.
    """
    apart = {}
    for kind in ("start", "middle", "end"):
        grid = pos_embed.detach()[0].double()[patch_index(kind, shape)]  # (H, W, E)
        unit = F.normalize(grid - grid.mean((0, 1)), dim=-1)
        apart[kind] = 1 - float((unit[1:] * unit[:-1]).sum(-1).mean())
    best = min(apart, key=apart.__getitem__)
    is_trained, is_better = apart[best] < 0.8, apart[best] < 0.99 * apart["middle"]
    return best if is_trained and is_better else "middle"


def _plain(state: Mapping[str, Any]) -> dict[str, Tensor]:
    for wrapper in ("model", "state_dict", "model_ema"):
        if isinstance(state.get(wrapper), Mapping):
            state = state[wrapper]
            break
    sd = {name.removeprefix("module."): value for name, value in state.items()}
    if "patch_embed.proj.weight" not in sd or "layers.0.mixer.A_log" not in sd:
        raise ValueError(
            "these are no weights of a VisionMamba: patch_embed.proj.weight or "
            f"layers.0.mixer.A_log is missing among {sorted(sd)[:5]}, ..."
        )
    return sd


def _image_size(
    pos: Tensor | None,
    tokens: int,
    patch: tuple[int, int],
    image_size: int | tuple[int, int] | None,
    stride: int | tuple[int, int] | None,
) -> tuple[tuple[int, int], tuple[int, int]]:
    # Height and width, and the stride, that give as many patches as there are positions.
    step = patch if stride is None else _pair(stride)
    if pos is None:
        return (224, 224) if image_size is None else _pair(image_size), step
    patches = pos.shape[1] - tokens
    if image_size is None:
        side = math.isqrt(patches)
        if side * side != patches:
            raise ValueError(
                f"pos_embed has {patches} patches, which form no square; pass image_size."
            )
        if stride is None and _is_published_half_stride(side, patch):
            return (PUBLISHED_SIZE, PUBLISHED_SIZE), (patch[0] // 2, patch[1] // 2)
        size = ((side - 1) * step[0] + patch[0], (side - 1) * step[1] + patch[1])
        return size, step
    size = _pair(image_size)
    steps = [step] if stride is not None else [patch, *((s, s) for s in range(1, patch[0]))]
    for s in steps:
        if math.prod((n - p) // q + 1 for n, p, q in zip(size, patch, s, strict=True)) == patches:
            return size, s
    raise ValueError(
        f"images of {size} in patches of {patch} do not give the {patches} patches of pos_embed; "
        "pass the image_size and stride the weights were trained with."
    )


def _is_published_half_stride(side: int, patch: tuple[int, int]) -> bool:
    # The published models with overlapping patches: as many as fit at half a patch's distance.
    return all(
        side * p != PUBLISHED_SIZE and (side - 1) * (p // 2) + p == PUBLISHED_SIZE for p in patch
    )


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _step_projection(rank: int, inner: int) -> nn.Linear:
    # As in Mamba: steps start log-uniform between 0.001 and 0.1.
    layer = nn.Linear(rank, inner)
    nn.init.uniform_(layer.weight, -(rank**-0.5), rank**-0.5)
    dt = torch.exp(torch.rand(inner) * math.log(100.0) + math.log(1e-3)).clamp(min=1e-4)
    with torch.no_grad():
        layer.bias.copy_(dt + torch.log(-torch.expm1(-dt)))
    return layer
