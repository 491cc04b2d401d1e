"""Mamba-Attribution: hidden attention weighted by gradients (Ali et al., 2025, section 3.3)."""

from __future__ import annotations

from typing import Any

from captum_ssm.attr.maps.maps import MapOptions
from captum_ssm.attr.maps.method import RolloutAttribution


class MambaAttribution(RolloutAttribution):
    r"""Class-specific rollout: hidden attention times the gradient of the target's score.

    .. math::
        \beta^\lambda = I + \big(\mathbb{E}_d[\nabla \hat y'^{\lambda, d}] \odot
        \mathbb{E}_d[\alpha^{\lambda, d}]\big)^+, \qquad
        \rho = \prod_{\lambda = 1}^{\Lambda} \beta^\lambda,

    read at the query's row (Ali et al.,
    `The Hidden Attention of Mamba Models <https://arxiv.org/abs/2403.01590>`_, eq. 24). The
    gradient is taken with respect to the mixer's gated output :math:`\hat y'`, the input of its
    output projection; entry i of it scales row i.

    ``sign`` defaults to ``"clamp"`` here (eq. 24); with ``sign=None`` a row costs linear time.

    The arguments are those of :class:`~captum_ssm.attr.TokenAttribution`.

    Examples::

        >>> relevance = MambaAttribution(model).attribute(input_ids, target=token)  # (B, L)
    """

    name = "mamba-attribution"
    summary = "hidden attention times gradients, multiplied over layers"
    cost = "quadratic"

    def _map_options(self, **choices: Any) -> MapOptions:
        # Eq. 24 keeps the positive part of gradient times attention.
        return MapOptions.of({"sign": "clamp", **choices}, gradients=True)
