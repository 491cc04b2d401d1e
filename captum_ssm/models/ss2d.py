"""SS2D, the four-direction scan of VMamba (Liu et al., 2024), over the tokens of one image."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.models.s6 import initial_dt_bias, s6
from captum_ssm.operators.conv import depthwise_conv


class SS2D(nn.Module):
    r"""S6 over an image's patches: row by row, column by column, and both reversed.

    .. math::
        u, z = W_{in} x, \quad v = \mathrm{SiLU}(\mathrm{conv}_{2d}(u)), \quad
        y = W_{out}\, \mathrm{SiLU}(z) \odot
            \mathrm{LayerNorm}\Big(\sum_k P_k^\top S_k(P_k v)\Big)

    `VMamba <https://arxiv.org/abs/2401.10166>`_ (the ``v0`` and ``v2`` forward types), with the
    published names of the weights. Tokens are a sequence ``(B, L, E)``, row by row.

    Args:
        width (int): E.
        grid (tuple of int): (H, W), rows and columns of patches.
        state (int, optional): N. Default: 16
        expand (float, optional): D = expand * E. Default: 2
        conv (int, optional): kernel size of the convolution, odd. Default: 3
        dt_rank (int, optional): None for E / 16, rounded up. Default: None
        gated (bool, optional): whether there is a gate z. Default: True
        bias (bool, optional): of the input and output projections. Default: False

    Raises:
        ValueError: for an even ``conv``.

    Examples::

        >>> mixer = SS2D(16, grid=(4, 4), state=4)
        >>> mixer(torch.randn(1, 16, 16)).shape
        torch.Size([1, 16, 16])
        >>> maps = hidden_attention(mixer, torch.randn(1, 16, 16), reduction="mean")
    """

    def __init__(
        self,
        width: int,
        grid: tuple[int, int],
        *,
        state: int = 16,
        expand: float = 2,
        conv: int = 3,
        dt_rank: int | None = None,
        gated: bool = True,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if conv % 2 == 0:
            raise ValueError(f"conv is {conv}; expected an odd kernel size.")
        self.grid, self.gated = grid, gated
        inner, rank = int(expand * width), dt_rank or math.ceil(width / 16)
        self.in_proj = nn.Linear(width, (2 if gated else 1) * inner, bias=bias)
        self.act = nn.SiLU()
        self.conv2d = nn.Conv2d(inner, inner, conv, groups=inner, padding=conv // 2)
        projections = torch.empty(4, rank + 2 * state, inner).uniform_(-1, 1)
        self.x_proj_weight = nn.Parameter(projections / math.sqrt(inner))
        steps = torch.empty(4, inner, rank).uniform_(-1, 1)
        self.dt_projs_weight = nn.Parameter(steps / math.sqrt(rank))
        self.dt_projs_bias = nn.Parameter(initial_dt_bias(4, inner))
        self.A_logs = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(4 * inner, 1))
        self.Ds = nn.Parameter(torch.ones(4 * inner))
        self.out_norm = nn.LayerNorm(inner)
        self.out_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Mixed tokens ``(B, L, E)`` of ``hidden_states (B, L, E)``.

        Raises:
            ValueError: if the number of tokens is not H W.
        """
        rows, columns = self.grid
        if hidden_states.shape[1] != rows * columns:
            raise ValueError(
                f"hidden_states has {hidden_states.shape[1]} tokens; expected {rows} x {columns}, "
                "the grid."
            )
        u, *z = self.in_proj(hidden_states).chunk(2 if self.gated else 1, -1)
        psi = depthwise_conv(u, self.conv2d.weight[:, 0], self.grid)
        v = self.act(psi if self.conv2d.bias is None else psi + self.conv2d.bias)
        orders = enumerate(scan_orders(self.grid, v.device))
        y = torch.stack([self._scan(v[:, o], k)[:, torch.argsort(o)] for k, o in orders]).sum(0)
        normed = self.out_norm(y.to(self.out_norm.weight.dtype))
        return self.out_proj(normed * F.silu(z[0]) if z else normed)

    def _scan(self, v: Tensor, k: int) -> Tensor:
        return s6(
            v,
            lambda v: v @ self.x_proj_weight[k].mT,
            lambda step: step @ self.dt_projs_weight[k].mT + self.dt_projs_bias[k],
            self.A_logs.chunk(4)[k],
            self.Ds.chunk(4)[k],
        )


def scan_orders(grid: tuple[int, int], device: torch.device | None = None) -> list[Tensor]:
    """VMamba's four orders of a grid's tokens, ``(L,)`` each: rows, columns, both reversed."""
    rows = torch.arange(grid[0] * grid[1], device=device)
    columns = rows.view(grid).mT.flatten()
    return [rows, columns, rows.flip(0), columns.flip(0)]
