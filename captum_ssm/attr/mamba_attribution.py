"""Mamba-Attribution: hidden attention weighted by gradients (Ali et al., 2025, section 3.3)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from captum_ssm._captum import TargetType
from captum_ssm._capture import FrozenModel
from captum_ssm.attr._base import TokenAttribution, format_attributions
from captum_ssm.attr._maps import LayerMaps, MapChoices, MapOptions, rollout_matrix, rollout_row

# Eq. 24 keeps the positive part of gradient times attention.
_PAPER = MapChoices(sign="clamp")


class MambaAttribution(TokenAttribution):
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

    @classmethod
    def reads_whole_maps(cls, **options: Any) -> bool:
        """Whether the options rescale whole maps."""
        return MapOptions.rescales(options)

    def attribute(
        self,
        inputs: Any,
        target: TargetType = None,
        additional_forward_args: Any = None,
        *,
        position: Any = None,
        start_layer: int = 0,
        return_convergence_delta: bool = False,
        **options: Unpack[MapChoices],
    ) -> Any:
        """Relevance of each input token for the target.

        Args:
            start_layer (int, optional): the first layer of the product. Default: 0
            **options: how a layer's map is made, see :class:`~captum_ssm.attr.MapChoices`.
                ``sign`` defaults to ``"clamp"`` here (eq. 24); with ``sign=None`` a row costs
                linear time.
        """
        frozen, maps = self._maps(
            inputs, target, additional_forward_args, position, start_layer, options
        )
        with self._computing():
            return format_attributions(rollout_row(maps, frozen.require_query()), frozen)

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

        The arguments are those of :meth:`attribute`. It takes memory quadratic in the sequence.

        Raises:
            ValueError, TypeError: as for :meth:`attribute`.
            MemoryLimitError: where the matrices do not fit ``memory_limit``.

        Examples::

            >>> MambaAttribution(model).rollout(input_ids, target=token).shape
            torch.Size([1, 7, 7])
        """
        frozen, maps = self._maps(
            inputs, target, additional_forward_args, position, start_layer, options
        )
        with self._computing():
            return frozen.mask_matrix(rollout_matrix(maps))

    def _maps(
        self,
        inputs: Any,
        target: TargetType,
        additional_forward_args: Any,
        position: Any,
        start_layer: int,
        options: MapChoices,
    ) -> tuple[FrozenModel, LayerMaps]:
        chosen = MapOptions.of(_PAPER | options)
        request = self._request(inputs, additional_forward_args)
        frozen = self._freeze(request, position, target=target, gradients=True)
        layers = frozen.from_layer(start_layer)
        return frozen, LayerMaps(layers, chosen, frozen.mask, gradients=True)
