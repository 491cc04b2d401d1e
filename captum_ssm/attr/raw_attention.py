"""Raw hidden attention (Ali et al., 2025, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import Unpack

from captum_ssm._captum import TargetType, log_usage
from captum_ssm.attr._base import TokenAttribution, format_attributions
from captum_ssm.attr._maps import LayerMaps, MapChoices, MapOptions, raw_row


class RawAttention(TokenAttribution):
    r"""The query token's row of the hidden attention matrices, averaged over layers.

    Per layer the mean over channels :math:`\mathbb{E}_d[\alpha^d]` of Mamba's implicit attention
    (Ali et al., `The Hidden Attention of Mamba Models <https://arxiv.org/abs/2403.01590>`_,
    eq. 13); the average over layers is theirs too (section 4.2). Class-agnostic: ``target`` is
    accepted and ignored. A row costs time linear in the sequence.

    Args:
        forward_func (nn.Module, nnsight model or Callable): what is explained.
        model (nn.Module or nnsight model, optional): the model ``forward_func`` runs; required
            where it is a plain callable. Default: None
        check (bool, optional): see :class:`~captum_ssm.ReconstructionError`. Default: True
        interpolate_mode, memory_limit, remote (optional): see
            :class:`~captum_ssm.attr.TokenAttribution`. Default: None

    Examples::

        >>> relevance = RawAttention(model).attribute(input_ids)  # (B, L)
    """

    @log_usage()
    def attribute(
        self,
        inputs: Any,
        target: TargetType = None,
        additional_forward_args: Any = None,
        *,
        position: Any = None,
        layers: int | str | Sequence[int | str] | None = None,
        return_convergence_delta: bool = False,
        **options: Unpack[MapChoices],
    ) -> Any:
        r"""Relevance of each input token.

        Args:
            inputs (Tensor or tuple of one Tensor): token ids ``(B, L)``, embeddings
                ``(B, L, E)`` or images ``(B, C, H, W)``.
            target (optional): ignored. Default: None
            additional_forward_args (Any, optional): further arguments of ``forward_func``, as
                in Captum; a dict is passed by keyword. Default: None
            position (int or Tensor, optional): the token whose row is explained, an int or
                ``(B,)``; None for the one the model reads its output from. Default: None
            layers (int, str or sequence, optional): mixers by index or module path; None for
                all. Default: None
            return_convergence_delta (bool, optional): must be False. Default: False
            **options: how a layer's map is made from its channels (``reduction``, ``sign``,
                ``discard_ratio``, ``min_max``, ``normalize_rows``); see
                :class:`~captum_ssm.attr.MapOptions`.

        Returns:
            Tensor or tuple of one Tensor: of the shape of ``inputs``; zero on padding.

        Raises:
            ValueError: for inputs, a position or options that are not accepted, an unsupported
                model, or a mixer whose frozen operator does not reproduce its output.
            TypeError: for inputs of a wrong type or dtype.
        """
        self._no_delta(return_convergence_delta)
        chosen = MapOptions.of(options)
        frozen = self._freeze(inputs, additional_forward_args, position)
        with self._computing():
            maps = LayerMaps(frozen.select(layers), chosen, frozen.mask)
            return format_attributions(raw_row(maps, frozen.require_query()), frozen, inputs)
