"""SS2D, the four-direction scan of VMamba (Liu et al., 2024), over the tokens of one image."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from captum_ssm.models._scan import selective_scan
from captum_ssm.operators.conv import depthwise_conv


class SS2D(nn.Module):
    r"""S6 over an image's patches row by row, column by column, and both backwards.

    .. math::
        u, z = W_{in} x, \quad v = \mathrm{SiLU}(\mathrm{conv}_{2d}(u)), \quad
        y = W_{out}\, \mathrm{SiLU}(z) \odot
            \mathrm{LayerNorm}\Big(\sum_k P_k^\top S_k(P_k v)\Big)

    `VMamba <https://arxiv.org/abs/2401.10166>`_ (the ``v0`` and ``v2`` forward types). Parameters
    have the published names, so that a published block's weights load. Tokens come as a
    sequence ``(B, L, E)``, row by row, as in every other mixer here.

    Args:
        width (int): E.
        grid (tuple of int): (H, W), rows and columns of patches.
        state (int, optional): N. Default: 16
        expand (float, optional): D = expand * E. Default: 2
        conv (int, optional): side of the convolution, odd. Default: 3
        dt_rank (int, optional): None for E / 16, rounded up. Default: None
        gated (bool, optional): False leaves z out. Default: True
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
            raise ValueError(f"conv is {conv}; accepted are odd sides.")
        self.grid, self.gated = grid, gated
        inner, rank = int(expand * width), dt_rank or math.ceil(width / 16)
        self.in_proj = nn.Linear(width, (2 if gated else 1) * inner, bias=bias)
        self.act = nn.SiLU()
        self.conv2d = nn.Conv2d(inner, inner, conv, groups=inner, padding=conv // 2)
        projections = torch.empty(4, rank + 2 * state, inner).uniform_(-1, 1)
        self.x_proj_weight = nn.Parameter(projections / math.sqrt(inner))
        steps = torch.empty(4, inner, rank).uniform_(-1, 1)
        self.dt_projs_weight = nn.Parameter(steps / math.sqrt(rank))
        dt = torch.exp(torch.rand(4, inner) * math.log(100.0) + math.log(1e-3)).clamp(min=1e-4)
        self.dt_projs_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        self.A_logs = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(4 * inner, 1))
        self.Ds = nn.Parameter(torch.ones(4 * inner))
        self.out_norm = nn.LayerNorm(inner)
        self.out_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Mixed tokens ``(B, L, E)`` of ``hidden_states (B, L, E)``.

        Raises:
            ValueError: for another number of tokens than H W.
        """
        rows, columns = self.grid
        if hidden_states.shape[1] != rows * columns:
            raise ValueError(
                f"hidden_states has {hidden_states.shape[1]} tokens; the grid is {rows} x "
                f"{columns}."
            )
        u = self.in_proj(hidden_states)
        z = None
        if self.gated:
            u, z = u.chunk(2, -1)
        psi = depthwise_conv(u, self.conv2d.weight[:, 0], self.grid)
        v = self.act(psi if self.conv2d.bias is None else psi + self.conv2d.bias)
        orders = enumerate(scan_orders(self.grid, v.device))
        y = torch.stack([self._scan(v[:, o], k)[:, torch.argsort(o)] for k, o in orders]).sum(0)
        normed = self.out_norm(y.to(self.out_norm.weight.dtype))
        return self.out_proj(normed if z is None else normed * F.silu(z))

    def _scan(self, v: Tensor, k: int) -> Tensor:
        state, inner = self.A_logs.shape[1], v.shape[-1]
        found = v @ self.x_proj_weight[k].mT
        step, B, C = found.split([found.shape[-1] - 2 * state, state, state], -1)
        dt = F.softplus(step @ self.dt_projs_weight[k].mT + self.dt_projs_bias[k])
        wide = torch.promote_types(v.dtype, torch.float32)
        A = -torch.exp(self.A_logs.view(4, inner, state)[k].to(wide))
        D = self.Ds.view(4, inner)[k].to(wide)
        v, dt, B, C = (t.to(wide) for t in (v, dt, B, C))
        return selective_scan(v, dt, A, B, C, D)


def scan_orders(grid: tuple[int, int], device: torch.device | None = None) -> list[Tensor]:
    """VMamba's four orders of a grid's tokens, ``(L,)`` each: rows, columns, both reversed."""
    rows = torch.arange(grid[0] * grid[1], device=device)
    columns = rows.view(grid).mT.flatten()
    return [rows, columns, rows.flip(0), columns.flip(0)]
