"""Unified implicit attention (Zimerman, Ali & Wolf, ICLR 2025)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from captum_ssm._captum import TargetType, log_usage
from captum_ssm._frozen import FrozenModel
from captum_ssm.attr._base import TokenAttribution, format_attributions
from captum_ssm.attr._maps import (
    LayerMaps,
    MapChoices,
    MapOptions,
    raw_row,
    rollout_matrix,
    rollout_row,
)
from captum_ssm.mixers import check_components

AGGREGATIONS = ("raw", "rollout", "attribution")


class UnifiedImplicitAttention(TokenAttribution):
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

    Args:
        forward_func (nn.Module, nnsight model or Callable): what is explained.
        model (nn.Module or nnsight model, optional): the model ``forward_func`` runs; required
            where it is a plain callable. Default: None
        check (bool, optional): see :class:`~captum_ssm.ReconstructionError`. Default: True
        interpolate_mode, memory_limit, remote (optional): see
            :class:`~captum_ssm.attr.TokenAttribution`. Default: None

    Examples::

        >>> method = UnifiedImplicitAttention(model)
        >>> relevance = method.attribute(input_ids, target=token)  # (B, L)
        >>> without_gate = method.attribute(
        ...     input_ids, target=token, components=("conv", "activation")
        ... )
    """

    @log_usage()
    def attribute(
        self,
        inputs: Any,
        target: TargetType = None,
        additional_forward_args: Any = None,
        *,
        position: Any = None,
        aggregation: str = "attribution",
        components: Iterable[str] | None = None,
        start_layer: int = 0,
        return_convergence_delta: bool = False,
        **options: Unpack[MapChoices],
    ) -> Any:
        r"""Relevance of each input token for the target.

        Args:
            inputs (Tensor or tuple of one Tensor): token ids ``(B, L)``, embeddings
                ``(B, L, E)`` or images ``(B, C, H, W)``.
            target (int, tuple, Tensor or list, optional): as for
                :class:`~captum_ssm.MambaAttribution`; ignored by ``"raw"`` and ``"rollout"``.
                Default: None
            additional_forward_args (Any, optional): further arguments of ``forward_func``, as
                in Captum; a dict is passed by keyword. Default: None
            position (int or Tensor, optional): the token whose row is explained, an int or
                ``(B,)``; None for the one the model reads its output from. Default: None
            aggregation (str, optional): ``"raw"`` averages the layers' rows, ``"rollout"``
                multiplies :math:`I + H` over layers, ``"attribution"`` does so with the
                gradient-weighted, clamped maps (Ali et al., eq. 24).
                Default: ``"attribution"``
            components (iterable of str, optional): the parts folded in, any of ``"conv"``,
                ``"activation"``, ``"gate"``, ``"norm"``, ``"skip"``; None for those of the paper's
                equation of the family: all except the skip (and RWKV-4's token shift, its
                ``"conv"``). Default: None
            start_layer (int, optional): the first layer. Default: 0
            return_convergence_delta (bool, optional): must be False. Default: False
            **options: how a layer's map is made from its channels (``reduction``, ``sign``,
                ``discard_ratio``, ``min_max``, ``normalize_rows``); see
                :class:`~captum_ssm.attr.MapOptions`. ``sign`` defaults to ``"clamp"`` for
                ``"attribution"``.

        Returns:
            Tensor or tuple of one Tensor: of the shape of ``inputs``; zero on padding.

        Raises:
            ValueError: for inputs, a target, a position or options that are not accepted, an
                unsupported model, or a mixer whose frozen operator does not reproduce its
                output.
            TypeError: for inputs of a wrong type or dtype.
        """
        self._no_delta(return_convergence_delta)
        frozen, maps = self._maps(
            inputs,
            target,
            additional_forward_args,
            position,
            aggregation,
            components,
            start_layer,
            options,
        )
        read = raw_row if aggregation == "raw" else rollout_row
        with self._computing():
            return format_attributions(read(maps, frozen.require_query()), frozen, inputs)

    def rollout(
        self,
        inputs: Any,
        target: TargetType = None,
        additional_forward_args: Any = None,
        *,
        position: Any = None,
        aggregation: str = "attribution",
        components: Iterable[str] | None = None,
        start_layer: int = 0,
        **options: Unpack[MapChoices],
    ) -> Tensor:
        """The whole product over layers, ``(B, L, L)``, for ``"rollout"`` or ``"attribution"``.

        The arguments are those of :meth:`attribute`. It takes memory quadratic in the sequence.

        Raises:
            ValueError, TypeError: as for :meth:`attribute`, and for ``"raw"``.
            MemoryLimitError: where the matrices do not fit ``memory_limit``.

        Examples::

            >>> UnifiedImplicitAttention(model).rollout(input_ids, target=token).shape
            torch.Size([1, 7, 7])
        """
        if aggregation == "raw":
            raise ValueError(
                "aggregation is 'raw', which multiplies no layers; accepted are 'rollout' and "
                "'attribution'. Single maps are returned by captum_ssm.hidden_attention."
            )
        frozen, maps = self._maps(
            inputs,
            target,
            additional_forward_args,
            position,
            aggregation,
            components,
            start_layer,
            options,
        )
        with self._computing():
            return frozen.mask_matrix(rollout_matrix(maps))

    def _maps(
        self,
        inputs: Any,
        target: TargetType,
        additional_forward_args: Any,
        position: Any,
        aggregation: str,
        components: Iterable[str] | None,
        start_layer: int,
        choices: MapChoices,
    ) -> tuple[FrozenModel, LayerMaps]:
        if aggregation not in AGGREGATIONS:
            raise ValueError(f"aggregation is {aggregation!r}; accepted are {AGGREGATIONS}.")
        gradients = aggregation == "attribution"
        paper = MapChoices(sign="clamp") if gradients else MapChoices()
        chosen = check_components("unified", components)
        options = MapOptions.of(paper | choices, formulation="unified", components=chosen)
        frozen = self._freeze(
            inputs, additional_forward_args, position, target=target, gradients=gradients
        )
        with self._computing():
            layers = frozen.from_layer(start_layer)
            return frozen, LayerMaps(layers, options, frozen.mask, gradients=gradients)
