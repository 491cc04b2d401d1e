"""Small models in the form of papers' repositories, which need CUDA and cannot be installed here.

Each has the parts of the original in its order: the convolution, the scans and their orders, gates,
norms, what lies between the layers, and the head. ``benchmarks/repositories.py`` explains the
originals, where their code has been fetched.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import channels_first
import torch
import wild
from long_convolutions import response
from models import randomize
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.models import BidirectionalMamba

E = channels_first.WIDTH


def mamba(width: int = E) -> nn.Module:
    """mamba-ssm's ``Mamba``."""
    return BidirectionalMamba(width, state=3, bimamba_type="none")


def made(model: nn.Module) -> Any:
    """In eval mode, with weights that leave no entry of a map near zero."""
    return randomize(model).eval()


class VSSBlock(nn.Module):
    """VMamba's block: SS2D of an image ``(B, E, H, W)`` and an MLP, each in the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.norm2 = channels_first.Norm(E), channels_first.Norm(E)
        self.op = channels_first.Images(E)
        self.mlp = nn.Sequential(nn.Conv2d(E, 12, 1), nn.GELU(), nn.Conv2d(12, E, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.op(self.norm(x))
        return x + self.mlp(self.norm2(x))


class VSSM(nn.Module):
    """VMamba: two stages, with a convolution of stride 2 between them."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, E, 4, 4)
        self.stages = nn.ModuleList(VSSBlock() for _ in range(2))
        self.downsample = nn.Conv2d(E, E, 3, 2, 1)
        self.norm, self.head = channels_first.Norm(E), nn.Linear(E, classes)

    def maps(self, x: Tensor) -> list[Tensor]:
        first = self.stages[0](self.patch_embed(x))
        return [first, self.stages[1](self.downsample(first))]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.maps(x)[-1]).mean((2, 3)))


class EncoderDecoder(nn.Module):
    """mmseg's segmenter: the backbone's maps, enlarged to the finest one, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = VSSM()
        self.fuse, self.conv_seg = nn.Conv2d(2 * E, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, inputs: Tensor, mode: str = "tensor") -> Tensor:
        fine, coarse = self.backbone.maps(inputs)
        coarse = F.interpolate(coarse, fine.shape[2:], mode="bilinear")
        return self.conv_seg(self.fuse(torch.cat([fine, coarse], 1)).relu())


class RoIHead(nn.Module):
    """mmdet's head of boxes: 3 x 3 numbers inside each box, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.fc_cls = nn.Linear(9 * E, 16), nn.Linear(16, 4)
        self.fc_reg = nn.Linear(16, 12)

    def _bbox_forward(self, x: tuple[Tensor, ...], rois: Tensor) -> dict[str, Tensor]:
        size = 4 * torch.tensor(x[0].shape[:1:-1])  # (W, H) of the image
        start, end = (2 * part / size - 1 for part in (rois[:, 1:3], rois[:, 3:5]))
        at = torch.tensor([1 / 6, 1 / 2, 5 / 6])
        steps = torch.stack(torch.meshgrid(at, at, indexing="xy"), -1)  # (3, 3, 2)
        grid = start[:, None, None] + steps * (end - start)[:, None, None]
        found = F.grid_sample(x[0][rois[:, 0].long()], grid, align_corners=False)
        hidden = self.shared(found.flatten(1)).relu()
        return {"cls_score": self.fc_cls(hidden), "bbox_pred": self.fc_reg(hidden)}


class Detector(nn.Module):
    """mmdet's two-stage detector, without what proposes boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.roi_head = VSSM(), RoIHead()
        self.lateral = nn.ModuleList(nn.Conv2d(E, E, 1) for _ in range(2))

    def extract_feat(self, images: Tensor) -> tuple[Tensor, ...]:
        fine, coarse = (f(x) for f, x in zip(self.lateral, self.backbone.maps(images), strict=True))
        return fine + F.interpolate(coarse, fine.shape[2:]), coarse


class MambaVisionMixer(nn.Module):
    """S6 of one half of the channels next to a convolution of the other, joined at the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.half = half = width // 2
        self.in_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.conv1d_x, self.conv1d_z = (
            nn.Conv1d(half, half, 3, padding="same", groups=half) for _ in range(2)
        )
        self.x_proj, self.dt_proj = nn.Linear(half, 7), nn.Linear(1, half)
        self.A_log, self.D = nn.Parameter(torch.randn(half, 3)), nn.Parameter(torch.randn(half))

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(x).mT.chunk(2, 1)
        u, z = F.silu(self.conv1d_x(u)).mT, F.silu(self.conv1d_z(z)).mT
        step, B, C = self.x_proj(u).split([1, 3, 3], -1)
        y = wild.scan(u, F.softplus(self.dt_proj(step)), -self.A_log.exp(), B, C, self.D)
        return self.out_proj(torch.cat([y, z], -1))


class Attention(nn.Module):
    """Softmax attention among all tokens of a window."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MambaVision(nn.Module):
    """Convolutions, then windows of tokens in which S6 and attention take turns.

    Args:
        window (int, optional): tokens on a side; as many as the picture has at its usual size.
    """

    def __init__(self, width: int = 8, window: int = 4) -> None:
        super().__init__()
        self.window = window
        stem = nn.Conv2d(3, 6, 3, 2, 1)
        self.patch_embed = nn.Sequential(stem, nn.ReLU(), nn.Conv2d(6, width, 4, 4))
        self.mixers = nn.ModuleList([MambaVisionMixer(width), Attention(width)])
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.norm, self.head = nn.BatchNorm2d(width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        B, C, H, W = x.shape
        w = self.window
        x = x.view(B, C, H // w, w, W // w, w).permute(0, 2, 4, 3, 5, 1).reshape(-1, w * w, C)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            x = x + mixer(norm(x))
        x = x.view(B, H // w, W // w, w, w, C).permute(0, 5, 1, 3, 2, 4).reshape(B, C, H, W)
        return self.head(self.norm(x).mean((2, 3)))


class UMambaBot(nn.Module):
    """U-Mamba: a U-shape of convolutions whose bottleneck is a Mamba, with no way around it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv3d(1, E, 3, padding=1), nn.Conv3d(E, E, 2, 2)
        self.act, self.norm, self.mamba = nn.LeakyReLU(), nn.LayerNorm(E), mamba()
        self.instance = nn.InstanceNorm3d(E, affine=True)
        self.merge, self.seg = nn.Conv3d(2 * E, E, 3, padding=1), nn.Conv3d(E, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.act(self.instance(self.stem(x)))
        x = self.down(skip)
        x = self.mamba(self.norm(x.flatten(2).mT)).mT.reshape(x.shape)
        x = torch.cat([F.interpolate(x, skip.shape[2:]), skip], 1)
        return self.seg(self.act(self.merge(x)))


class SegMamba(nn.Module):
    """SegMamba: S6 in three orders (forward, backward, across slices), then enlarged."""

    def __init__(self, slices: int = 2, **_: Any) -> None:
        super().__init__()
        self.slices, self.in_proj, self.out_proj = slices, nn.Linear(E, 16), nn.Linear(8, E)
        self.ways = nn.ModuleList(wild.Mixer(E) for _ in range(3))
        self.stem, self.norm = nn.Conv3d(4, E, 2, 2), nn.LayerNorm(E)
        self.encoder1, self.out = nn.Conv3d(4, E, 3, padding=1), nn.Conv3d(2 * E, 4, 1)

    def mixed(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(x).chunk(2, -1)
        ahead, back, across = self.ways
        place = torch.arange(x.shape[1]).view(self.slices, -1).mT.flatten()
        y = ahead.mixed(u) + back.mixed(u.flip(1)).flip(1)
        y = y + across.mixed(u[:, place])[:, place.argsort()]
        return self.out_proj(y * F.silu(z))

    def forward(self, x: Tensor) -> Tensor:
        fine, x = self.encoder1(x), self.stem(x)
        tokens = x.flatten(2).mT
        x = (tokens + self.mixed(self.norm(tokens))).mT.reshape(x.shape)
        return self.out(torch.cat([fine, F.interpolate(x, fine.shape[2:])], 1))


class VideoMamba(nn.Module):
    """VideoMamba: patches of all frames one after the other behind a CLS token, both ways."""

    def __init__(self, frames: int = 2, side: int = 2) -> None:
        super().__init__()
        self.patch_embed = nn.Conv3d(3, E, (1, 8, 8), (1, 8, 8))
        self.cls_token, self.pos_embed = (
            nn.Parameter(torch.randn(1, n, E)) for n in (1, side * side)
        )
        self.temporal_pos_embedding = nn.Parameter(torch.randn(1, frames, E))
        self.layers = nn.ModuleList(BidirectionalMamba(E, state=3) for _ in range(2))
        self.norms, self.head = nn.ModuleList(nn.RMSNorm(E) for _ in range(3)), nn.Linear(E, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(3).movedim(1, -1)  # (B, T, H W, E)
        x = x + self.pos_embed[:, None] + self.temporal_pos_embedding[:, :, None]
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x.flatten(1, 2)], 1)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x))
        return self.head(self.norms[-1](x)[:, 0])


class PointMamba(nn.Module):
    """PointMamba: groups of near points, ordered along two curves, one after the other."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.groups, self.size = 6, 4
        self.encoder, self.pos = nn.Linear(3, E), nn.Linear(3, E)
        self.layers = nn.ModuleList(mamba() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(E) for _ in range(3))
        self.head = nn.Linear(E, 5)
        randomize(self)

    def load_model_from_ckpt(self, path: str) -> None:
        """As the original, which reads a file."""

    def forward(self, points: Tensor) -> Tensor:
        chosen = [torch.zeros(len(points), 1, dtype=torch.long)]  # the farthest, one by one
        for _ in range(self.groups - 1):
            centers = self.at(points, torch.cat(chosen, 1))
            chosen.append(torch.cdist(points, centers).amin(2).argmax(1, keepdim=True))
        centers = self.at(points, torch.cat(chosen, 1))  # (B, G, 3)
        near = torch.cdist(centers, points).topk(self.size, largest=False).indices
        around = self.at(points, near.flatten(1)).unflatten(1, near.shape[1:]) - centers[:, :, None]
        tokens = self.encoder(around).relu().amax(2) + self.pos(centers)
        curves = [centers[..., axis].argsort(1) for axis in (0, 1)]
        x = torch.cat([self.at(tokens, curve) for curve in curves], 1)
        for norm, layer in zip(self.norms, self.layers, strict=False):
            x = x + layer(norm(x))
        return self.head(self.norms[-1](x).mean(1))

    @staticmethod
    def at(x: Tensor, index: Tensor) -> Tensor:
        return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


class Language(nn.Module):
    """Embeddings, a residual stream of mixers, and a head that returns ``logits``."""

    def __init__(self, *mixers: nn.Module, vocabulary: int = 12) -> None:
        super().__init__()
        self.embeddings, self.mixers = nn.Embedding(vocabulary, E), nn.ModuleList(mixers)
        self.norms = nn.ModuleList(nn.LayerNorm(E) for _ in (*mixers, None))
        self.lm_head = nn.Linear(E, vocabulary, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def forward(self, input_ids: Tensor) -> SimpleNamespace:
        x = self.embeddings(input_ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=False):
            x = x + mixer(norm(x))
        return SimpleNamespace(logits=self.lm_head(self.norms[-1](x)))


class BiMamba(nn.Module):
    """Caduceus' wrapper: two Mambas with shared projections, the second one reads backward."""

    def __init__(self) -> None:
        super().__init__()
        self.mamba_fwd, self.mamba_rev = mamba(), mamba()
        self.mamba_rev.in_proj = self.mamba_fwd.in_proj
        self.mamba_rev.out_proj = self.mamba_fwd.out_proj

    def forward(self, x: Tensor) -> Tensor:
        return self.mamba_fwd(x) + self.mamba_rev(x.flip(1)).flip(1)


def fftconv(u: Tensor, k: Tensor, D: Tensor) -> Tensor:
    """HyenaDNA's convolution, as long as the input."""
    n = 2 * u.shape[-1]
    product = torch.fft.rfft(u, n=n) * (torch.fft.rfft(k, n=n) / n)
    return torch.fft.irfft(product, n=n, norm="forward")[..., : u.shape[-1]] + u * D[:, None]


class Hyena(nn.Module):
    """HyenaDNA's operator of order two: a long convolution between two gates."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.short_filter = nn.Conv1d(3 * E, 3 * E, 3, padding=2, groups=3 * E)
        self.kernel, self.bias = nn.Parameter(response(E, 32)), nn.Parameter(torch.randn(E))

    def forward(self, x: Tensor) -> Tensor:
        L = x.shape[1]
        gate, x1, v = self.short_filter(self.in_proj(x).mT)[..., :L].chunk(3, 1)
        return self.out_proj((fftconv(v * x1, self.kernel[:, :L], self.bias) * gate).mT)


class SMamba(nn.Module):
    """S-Mamba: each variable's history is a token; they are mixed forward and backward."""

    def __init__(self, configs: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(configs.seq_len, E)
        self.attention, self.attention_r = mamba(), mamba()
        self.norm, self.projector = nn.LayerNorm(E), nn.Linear(E, configs.pred_len)

    def forward(self, x_enc: Tensor, x_mark_enc: Any, x_dec: Any, x_mark_dec: Any) -> Tensor:
        means = x_enc.mean(1, keepdim=True).detach()
        x = x_enc - means
        deviation = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + 1e-5)
        tokens = self.embed((x / deviation).mT)
        tokens = tokens + self.attention(tokens) + self.attention_r(tokens.flip(1)).flip(1)
        return self.projector(self.norm(tokens)).mT * deviation + means


class Mamba4Rec(nn.Module):
    """Mamba4Rec: items are embedded, normed and mixed; the last one is read."""

    def __init__(self, config: Any = None, dataset: Any = None) -> None:
        super().__init__()
        self.item_embedding = nn.Embedding(50, E, padding_idx=0)
        self.norm, self.layers = nn.LayerNorm(E), nn.ModuleList(mamba() for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(E) for _ in range(2))

    def forward(self, item_seq: Tensor, item_seq_len: Tensor) -> Tensor:
        x = self.norm(self.item_embedding(item_seq))
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = norm(x + layer(x))
        return x[torch.arange(len(x)), item_seq_len - 1]
