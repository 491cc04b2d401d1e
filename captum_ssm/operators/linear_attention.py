r"""Linear attention with decay, and the delta rule: recurrences on a matrix-valued state.

Per head, with a state :math:`S \in \mathbb{R}^{N \times P}`:

.. math::
    S' = \mathrm{diag}(a_t) S_{t-1}, \qquad
    S_t = S' - e_t (r_t^\top S') + k_t v_t^\top, \qquad y_t = q_t^\top S_t

Without e and r this is linear attention with a decay per head (Mamba-2, RetNet, lightning
attention, mLSTM) or per key dimension (GLA, HGRN2, RWKV-6). With them it is the delta rule
(DeltaNet, Gated DeltaNet, Kimi Delta Attention, RWKV-7): before a value is written, what the
state holds under r_t is read and e_t takes it away. The matrix stays exact. With

.. math::
    K^{xy}_{tj} = \textstyle\sum_n x_{tn} y_{jn} \prod_{k=j+1}^{t} a_{kn},
    \qquad \alpha = K^{qk} - K^{qe} (I + \check K^{re})^{-1} \check K^{rk},

K lower triangular and :math:`\check K` strictly so. The kernels and their PyTorch forms are in
:mod:`captum_ssm.ops.linear`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from captum_ssm import ops
from captum_ssm.operators.heads import HeadOperator


@dataclass(frozen=True)
class LinearAttentionOperator(HeadOperator):
    """Linear attention with decay and an optional delta rule; one map per head.

    Args:
        query (Tensor): q, ``(B, L, H, N)``.
        key (Tensor): k, ``(B, L, H, N)``, with every factor of the value folded in.
        log_decay (Tensor): log a <= 0, ``(B, L, H, 1)`` for a decay per head or
            ``(B, L, H, N)`` for one per key dimension.
        width (int): P, the channels of a head.
        erase (Tensor, optional): e, ``(B, L, H, N)``. Default: None
        probe (Tensor, optional): r, ``(B, L, H, N)``, given with ``erase``. Default: None
        bonus (Tensor, optional): ``(B, L, H)``. With it the output reads the state ahead of the
            token's own decay and write, and the token's own value enters with this weight
            (RWKV). Default: None

    Raises:
        ValueError, TypeError: at the first use, for tensors that do not fit together.

    Examples::

        >>> query, key = torch.randn(2, 1, 5, 2, 3)
        >>> operator = LinearAttentionOperator(query, key, torch.zeros(1, 5, 2, 1), width=4)
        >>> scores = torch.einsum("bihn,bjhn->bhij", query, key).tril()  # without any decay
        >>> torch.testing.assert_close(operator.matrix(), scores)
    """

    query: Tensor
    key: Tensor
    log_decay: Tensor
    width: int
    erase: Tensor | None = None
    probe: Tensor | None = None
    bonus: Tensor | None = None

    @property
    def heads(self) -> tuple[int, int, int]:
        B, L, H, _ = self.query.shape
        return B, L, H

    @property
    def reference(self) -> Tensor:
        return self.query

    def matvec_heads(self, v: Tensor) -> Tensor:
        return ops.linear_scan(v.transpose(1, 2), *self._heads(0, self.maps)).transpose(1, 2)

    def rmatvec_heads(self, w: Tensor, start: int, stop: int) -> Tensor:
        return ops.linear_vecmat(w.transpose(1, 2), *self._heads(start, stop)).transpose(1, 2)

    def map_rows(self, index: Tensor, start: int, stop: int) -> Tensor:
        return ops.linear_rows(index, *self._heads(start, stop))

    def row_tile(self, start: int, stop: int) -> Tensor:
        return ops.linear_mean(*self._heads(0, self.maps), start, stop)

    def _heads(
        self, start: int, stop: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        at = slice(start, stop)
        return (
            self.query[:, :, at],
            self.key[:, :, at],
            self.log_decay[:, :, at],
            None if self.erase is None else self.erase[:, :, at],
            None if self.probe is None else self.probe[:, :, at],
            None if self.bonus is None else self.bonus[:, :, at],
        )
