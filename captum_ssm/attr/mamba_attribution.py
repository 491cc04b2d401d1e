"""Mamba-Attribution: hidden attention weighted by gradients (Ali et al., 2025, section 3.3)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from captum_ssm._captum import TargetType
from captum_ssm.attr._map_attribution import MapAttribution
from captum_ssm.attr._maps import MapChoices, rollout_row


class MambaAttribution(MapAttribution):
    r"""Class-specific rollout: hidden attention times the gradient of the target's score.

    .. math::
        \beta^\lambda = I + \big(\mathbb{E}_d[\nabla \hat y'^{\lambda, d}] \odot
        \mathbb{E}_d[\alpha^{\lambda, d}]\big)^+, \qquad
        \rho = \prod_{\lambda = 1}^{\Lambda} \beta^\lambda,

    read at the query's row (Ali et al.,
    `The Hidden Attention of Mamba Models <https://arxiv.org/abs/2403.01590>`_, eq. 24). The
    gradient is taken with respect to the mixer's gated output :math:`\hat y'`, the input of its
    output projection; entry i of it scales row i.

    The arguments are those of :class:`~captum_ssm.attr.TokenAttribution`.

    Examples::

        >>> relevance = MambaAttribution(model).attribute(input_ids, target=token)  # (B, L)
    """

    name = "mamba-attribution"
    summary = "hidden attention times gradients, multiplied over layers"
    cost = "quadratic"

    def attribute(
        self,
        inputs: Any,
        target: TargetType = None,
        additional_forward_args: Any = None,
        *,
        position: Any = None,
        start_layer: int = 0,
        grid: int | None = None,
        return_convergence_delta: bool = False,
        **options: Unpack[MapChoices],
    ) -> Any:
        """Relevance of each input token for the target.

        Args:
            **options: how a layer's map is made, see :class:`~captum_ssm.attr.MapChoices`.
                ``sign`` defaults to ``"clamp"`` here (eq. 24); with ``sign=None`` a row costs
                linear time.
        """
        asked = inputs, target, additional_forward_args, position
        maps = self._maps(*asked, options, start_layer=start_layer, grid=grid, gradients=True)
        return self._relevance(maps, rollout_row)

    def rollout(
        self,
        inputs: Any,
        target: TargetType = None,
        additional_forward_args: Any = None,
        *,
        position: Any = None,
        start_layer: int = 0,
        **options: Unpack[MapChoices],
    ) -> Tensor:
        r"""The whole product :math:`\rho`, ``(B, L, L)``, for the target read at ``position``.

        The arguments are those of :meth:`attribute`; memory and errors are as for
        :meth:`MambaRollout.rollout <captum_ssm.attr.MambaRollout.rollout>`.
        """
        asked = inputs, target, additional_forward_args, position
        maps = self._maps(*asked, options, start_layer=start_layer, gradients=True)
        return self._rollout(maps)
