"""Mamba-Attribution: hidden attention weighted by gradients (Ali et al., 2025, section 3.3)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from captum_ssm._captum import TargetType, log_usage
from captum_ssm.attr._base import TokenAttribution, format_attributions
from captum_ssm.attr._maps import (
    LayerMaps,
    MapChoices,
    MapOptions,
    rollout_matrix,
    rollout_row,
)

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

    Args:
        forward_func (nn.Module, nnsight model or Callable): what is explained.
        model (nn.Module or nnsight model, optional): the model ``forward_func`` runs; required
            where it is a plain callable. Default: None
        check (bool, optional): see :class:`~captum_ssm.ReconstructionError`. Default: True
        interpolate_mode, memory_limit, remote (optional): see
            :class:`~captum_ssm.attr.TokenAttribution`. Default: None

    Examples::

        >>> relevance = MambaAttribution(model).attribute(input_ids, target=token)  # (B, L)
    """

    @log_usage()
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
        r"""Relevance of each input token for the target.

        Args:
            inputs (Tensor or tuple of one Tensor): token ids ``(B, L)``, embeddings
                ``(B, L, E)`` or images ``(B, C, H, W)``.
            target (int, tuple, Tensor or list, optional): the explained output, in every form
                Captum takes. For logits ``(B, L, V)`` an int or one id an example names the
                token read at ``position``, a tuple ``(position, token)`` sets both. As in Captum,
                -1 is the last class or token. May be None where the model returns one value per
                example. Default: None
            additional_forward_args (Any, optional): further arguments of ``forward_func``, as
                in Captum; a dict is passed by keyword. Default: None
            position (int or Tensor, optional): the token whose row is explained, an int or
                ``(B,)``; None for the one the model reads its output from. Default: None
            start_layer (int, optional): the first layer of the product. Default: 0
            return_convergence_delta (bool, optional): must be False. Default: False
            **options: how a layer's map is made from its channels (``reduction``, ``sign``,
                ``discard_ratio``, ``min_max``, ``normalize_rows``); see
                :class:`~captum_ssm.attr.MapOptions`. ``sign`` defaults to ``"clamp"`` here
                (eq. 24); with ``sign=None`` a row costs linear time.

        Returns:
            Tensor or tuple of one Tensor: of the shape of ``inputs``; zero on padding.

        Raises:
            ValueError: for inputs, a target, a position or options that are not accepted, an
                unsupported model, or a mixer whose frozen operator does not reproduce its
                output.
            TypeError: for inputs of a wrong type or dtype.
        """
        self._no_delta(return_convergence_delta)
        chosen = MapOptions.of(_PAPER | options)
        frozen = self._freeze(
            inputs, additional_forward_args, position, target=target, gradients=True
        )
        with self._computing():
            maps = LayerMaps(
                frozen.from_layer(start_layer),
                chosen,
                frozen.mask,
                gradients=True,
            )
            return format_attributions(rollout_row(maps, frozen.require_query()), frozen, inputs)

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
        chosen = MapOptions.of(_PAPER | options)
        frozen = self._freeze(
            inputs, additional_forward_args, position, target=target, gradients=True
        )
        with self._computing():
            maps = LayerMaps(
                frozen.from_layer(start_layer),
                chosen,
                frozen.mask,
                gradients=True,
            )
            return frozen.mask_matrix(rollout_matrix(maps))
