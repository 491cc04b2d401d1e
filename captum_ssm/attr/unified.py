"""Unified implicit attention (Zimerman, Ali & Wolf, ICLR 2025)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from typing_extensions import Unpack

from captum_ssm.attr.maps.maps import MapChoices, MapOptions, raw_row, rollout_row
from captum_ssm.attr.maps.method import RolloutAttribution
from captum_ssm.attr.options import Arguments
from captum_ssm.errors import brief
from captum_ssm.mixers import check_components

AGGREGATIONS = ("raw", "rollout", "attribution")


class UnifiedImplicitAttention(RolloutAttribution):
    r"""Implicit attention of the whole mixer: convolution, activation, gate and norm folded in.

    Per channel the mixer, up to its output projection, is the matrix

    .. math::
        H = \mathrm{diag}(\mathrm{norm})\, \mathrm{diag}(\mathrm{gate})\, \tilde\alpha\,
        \mathrm{diag}(\mathrm{activation})\, \mathrm{Conv}

    with everything data-dependent frozen (Zimerman, Ali & Wolf, `Explaining Modern Gated-Linear
    RNNs via a Unified Implicit Attention Formulation <https://arxiv.org/abs/2405.16504>`_,
    eq. 9, 11, 17, 21, 24, 29). Its channel mean takes the place of the hidden attention in raw
    attention, rollout and attribution (their table 1). A row costs time linear in the sequence
    for ``"raw"`` and ``"rollout"``, and for ``"attribution"`` with ``sign=None``.

    The arguments are those of :class:`~captum_ssm.attr.TokenAttribution`.

    Examples::

        >>> method = UnifiedImplicitAttention(model)
        >>> relevance = method.attribute(input_ids, target=token)  # (B, L)
        >>> without_gate = method.attribute(
        ...     input_ids, target=token, components=("conv", "activation")
        ... )
    """

    name = "unified"
    summary = "the whole mixer's attention times gradients, multiplied over layers"
    cost = "quadratic"

    @classmethod
    def needs_target(cls, **options: Any) -> bool:
        """Whether the aggregation takes gradients."""
        return options.get("aggregation", "attribution") == "attribution"

    def _attribute(
        self,
        arguments: Arguments,
        *,
        aggregation: Literal["raw", "rollout", "attribution"] = "attribution",
        components: Iterable[str] | None = None,
        start_layer: int = 0,
        grid: int | None = None,
        **options: Unpack[MapChoices],
    ) -> Any:
        r"""Relevance of each input token, for the target if gradients are taken.

        Args:
            aggregation (str, optional): ``"raw"`` averages the layers' rows, ``"rollout"``
                multiplies :math:`I + H` over layers, ``"attribution"`` does so with the
                gradient-weighted, clamped maps (Ali et al., eq. 24).
                Default: ``"attribution"``
            components (iterable of str, optional): the parts folded in, any of ``"conv"``,
                ``"activation"``, ``"gate"``, ``"norm"``, ``"skip"``; None for those of the paper's
                equation of the family: all except the skip (and RWKV-4's token shift, its
                ``"conv"``). Default: None
            **options: how a layer's map is made, see :class:`~captum_ssm.attr.MapChoices`.
                ``sign`` defaults to ``"clamp"`` for ``"attribution"``.
        """
        unified = {"aggregation": aggregation, "components": components, **options}
        maps = self._maps(arguments, unified, start_layer=start_layer, grid=grid)
        return self._relevance(maps, raw_row if aggregation == "raw" else rollout_row)

    def _map_options(
        self,
        *,
        aggregation: str = "attribution",
        components: Iterable[str] | None = None,
        **choices: Any,
    ) -> MapOptions:
        if aggregation not in AGGREGATIONS:
            raise ValueError(
                f"aggregation is {brief(aggregation)}; expected one of {AGGREGATIONS}."
            )
        gradients = aggregation == "attribution"
        paper = {"sign": "clamp"} if gradients else {}
        return MapOptions.of(
            paper | choices,
            gradients=gradients,
            formulation="unified",
            components=check_components("unified", components),
        )
