"""Depthwise convolutions of tokens, along the sequence or over an image, and their adjoints."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from captum_ssm.kernels.convolution import causal_conv, causal_conv_transpose


def depthwise_conv(v: Tensor, taps: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
    """A depthwise convolution of ``v (B, L, D)``: ``(B, L, D)``.

    Causal with ``taps (D, K)``; over an image of ``grid`` (H, W), H W = L, with ``(D, Kh, Kw)``.
    """
    if grid is None:
        return causal_conv(v, taps)
    image = v.mT.unflatten(-1, grid)  # (B, D, H, W)
    padding = (taps.shape[-2] // 2, taps.shape[-1] // 2)
    out = nn.functional.conv2d(image, taps[:, None], padding=padding, groups=taps.shape[0])
    return out.flatten(2).mT


def depthwise_conv_transpose(
    w: Tensor, taps: Tensor, grid: tuple[int, int] | None = None
) -> Tensor:
    """The adjoint of :func:`depthwise_conv`: ``(B, L, D)`` to ``(B, L, D)``."""
    if grid is None:
        return causal_conv_transpose(w, taps)
    # The kernel size is odd and the padding is the same on both sides: the adjoint is the
    # convolution with the taps flipped.
    return depthwise_conv(w, taps.flip(-2, -1), grid)


def conv_columns(rows: Tensor, taps: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
    """Rows ``(B, D, R, L)`` times the matrix of a convolution of each of the D channels."""
    if grid is not None:
        B, D, R, L = rows.shape
        flat = rows.permute(0, 2, 3, 1).reshape(B * R, L, D)
        flat = depthwise_conv_transpose(flat, taps, grid)
        return flat.reshape(B, R, L, D).permute(0, 3, 1, 2)
    out = torch.zeros_like(rows)
    L, K = rows.shape[-1], taps.shape[-1]
    for lag in range(min(K, L)):
        out[..., : L - lag] += (rows * taps[:, None, K - 1 - lag, None])[..., lag:]
    return out


def tap_columns(
    taps: Tensor, length: int, grid: tuple[int, int] | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tap ``(D,)``, and the token ``(L,)`` that it reads at each token, -1 for none."""
    token = torch.arange(length, device=taps.device)
    if grid is None:
        for lag, tap in enumerate(taps.flip(-1)[:, :length].mT):
            yield tap, (token - lag).clamp(min=-1)
        return
    row, column = token // grid[1], token % grid[1]
    for a, b in itertools.product(range(taps.shape[1]), range(taps.shape[2])):
        y, x = row + a - taps.shape[1] // 2, column + b - taps.shape[2] // 2
        is_in = (y >= 0) & (y < grid[0]) & (x >= 0) & (x < grid[1])
        yield taps[:, a, b], torch.where(is_in, y * grid[1] + x, -1)


def join_taps(first: Tensor, second: Tensor) -> Tensor:
    """The taps of two convolutions in a row: ``(D, K1)``, ``(D, K2)`` to ``(D, K1 + K2 - 1)``."""
    K1, K2 = first.shape[1], second.shape[1]
    taps = first.new_zeros(first.shape[0], K1 + K2 - 1)
    for k in range(K1):
        taps[:, k : k + K2] += first[:, k, None] * second
    return taps
