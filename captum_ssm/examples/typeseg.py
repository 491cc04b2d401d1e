"""typeseg's trained Mamba in plain PyTorch, with the weights of the installed package.

``typeseg`` (Apache-2.0, ``pip install --no-deps typeseg==0.2.7``) labels every character of a text
with one of 35 content types. Its six bidirectional Mamba layers run in NumPy or ONNX there; this is
the same model as modules of PyTorch, which can be explained. Nothing of the package is copied.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["PLACEHOLDER", "TypeSeg", "ids_of", "selective_scan"]

# Bytes of other characters than ASCII's visible ones are all one token, also used for removal.
PLACEHOLDER = 128


Filled = TypeVar("Filled", bound=nn.Module)


class TypeSegWeights:
    """The package's arrays, by the names they were trained under."""

    def __init__(self) -> None:
        stored = np.load(str(files("typeseg") / "data" / "mamba_al.npz"))
        self.arrays = {name: torch.from_numpy(stored[name]).float() for name in stored.files}

    def __call__(self, *path: str) -> Tensor:
        return self.arrays["__".join(path)]

    def linear(self, *path: str) -> nn.Linear:
        kernel, bias = self(*path, "kernel"), self(*path, "bias")
        return _filled(nn.Linear(*kernel.shape), kernel.mT, bias)

    def norm(self, *path: str) -> nn.LayerNorm:
        scale, bias = self(*path, "scale"), self(*path, "bias")
        return _filled(nn.LayerNorm(len(scale), eps=1e-6), scale, bias)

    def conv(self, *path: str) -> nn.Conv1d:
        kernel, bias = self(*path, "kernel"), self(*path, "bias")  # (K, 1, D)
        K, _, D = kernel.shape
        return _filled(nn.Conv1d(D, D, K, groups=D), kernel.permute(2, 1, 0), bias)


def _filled(module: Filled, weight: Tensor, bias: Tensor) -> Filled:
    module.load_state_dict({"weight": weight, "bias": bias})
    return module


def selective_scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor) -> Tensor:
    """The scan of a Mamba, step by step.

    Args:
        x (Tensor): Its input, ``(B, L, D)``.
        dt (Tensor): The step sizes, ``(B, L, D)``.
        A (Tensor): ``(D, N)``.
        B (Tensor): ``(B, L, N)``.
        C (Tensor): ``(B, L, N)``.
        D (Tensor): The skip, ``(D,)``.

    Returns:
        ``(B, L, D)``.

    Examples::

        >>> ones = torch.ones(1, 3, 2)
        >>> zeros = torch.zeros(2, 2)
        >>> typeseg.selective_scan(ones, ones, zeros, ones, ones, zeros[0])[0, :, 0]
        tensor([2., 4., 6.])
    """
    state, read = x.new_zeros(*x[:, 0].shape, A.shape[1]), []
    for t in range(x.shape[1]):
        state = (dt[:, t, :, None] * A).exp() * state
        state = state + (dt[:, t] * x[:, t])[..., None] * B[:, t, None]
        read.append((state @ C[:, t, :, None])[..., 0])
    return torch.stack(read, 1) + D * x


class TypeSegMixer(nn.Module):
    """One Mamba that reads in both directions, with the same coefficients."""

    def __init__(self, weights: TypeSegWeights, block: str, scan: Callable[..., Tensor]) -> None:
        super().__init__()
        self.scan = scan
        self.in_proj, self.x_proj, self.dt_proj, self.out_proj = (
            weights.linear(block, f"Dense_{i}") for i in range(4)
        )
        self.conv1d = weights.conv(block, "Conv_0")
        self.A_log = nn.Parameter(weights(block, "A_log"))
        self.D = nn.Parameter(weights(block, "D"))

    def forward(self, hidden: Tensor) -> Tensor:
        x, gate = self.in_proj(hidden).chunk(2, -1)
        x = F.silu(self.conv1d(F.pad(x.mT, (1, 2))).mT)  # one token before, two after
        N = self.A_log.shape[1]
        step, B, C = self.x_proj(x).split([self.dt_proj.in_features, N, N], -1)
        dt = F.softplus(self.dt_proj(step)) + 1e-4
        A = -self.A_log.exp()
        forward = self.scan(x, dt, A, B, C, self.D)
        x, dt, B, C = (t.flip(1) for t in (x, dt, B, C))
        backward = self.scan(x, dt, A, B, C, self.D).flip(1)
        return self.out_proj((forward + backward) * F.silu(gate))


class TypeSeg(nn.Module):
    """Token ids ``(B, L)`` to logits ``(B, L, 35)``; ``labels`` names the 35.

    Args:
        scan (Callable, optional): What computes the scan, with the arguments of
            :func:`selective_scan`. Default: :func:`selective_scan`

    Raises:
        ModuleNotFoundError: If typeseg is not installed.

    Examples::

        >>> model = typeseg.TypeSeg().eval()  # doctest: +SKIP
        >>> model(typeseg.ids_of("SELECT 1")).shape  # doctest: +SKIP
        torch.Size([1, 8, 35])
    """

    def __init__(self, scan: Callable[..., Tensor] = selective_scan) -> None:
        super().__init__()
        weights = TypeSegWeights()
        self.embedding = nn.Embedding.from_pretrained(weights("Embed_0", "embedding"))
        blocks = [f"CheckpointMambaBlock1D_{i}" for i in range(6)]
        self.norms = nn.ModuleList(weights.norm(block, "LayerNorm_0") for block in blocks)
        self.mixers = nn.ModuleList(TypeSegMixer(weights, block, scan) for block in blocks)
        self.norm_f = weights.norm("LayerNorm_0")
        self.head = weights.linear("Dense_0")
        self.labels = json.loads((files("typeseg") / "data" / "manifest.json").read_text())[
            "labels"
        ]

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding, where transformers' models have it.

        Returns:
            The module.
        """
        return self.embedding

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``(B, L, 35)`` of token ids ``(B, L)``.

        Args:
            ids (Tensor): ``(B, L)``.

        Returns:
            ``(B, L, 35)``.
        """
        hidden = self.embedding(ids)
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            hidden = hidden + mixer(norm(hidden))
        return self.head(self.norm_f(hidden))


def ids_of(text: str) -> Tensor:
    """The token ids of an ASCII text.

    Args:
        text (str): The text.

    Returns:
        The ids, ``(1, L)``.

    Examples::

        >>> typeseg.ids_of("ab")
        tensor([[97, 98]])
    """
    return torch.tensor([list(text.encode("ascii"))])
