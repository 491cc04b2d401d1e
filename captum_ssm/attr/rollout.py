"""Attention rollout through Mamba layers (Ali et al., 2025, section 3.2)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import Unpack

from captum_ssm._captum import TargetType
from captum_ssm.attr._map_attribution import MapAttribution
from captum_ssm.attr._maps import MapChoices, rollout_row


class MambaRollout(MapAttribution):
    r"""Attention rollout: the layers' hidden attention, multiplied up with the residual stream.

    .. math::
        \rho = \prod_{\lambda = 1}^{\Lambda} \big(I + \mathbb{E}_d[\alpha^{\lambda, d}]\big),

    the latest layer leftmost, read at the query's row (Ali et al.,
    `The Hidden Attention of Mamba Models <https://arxiv.org/abs/2403.01590>`_, eq. 21-22).
    Class-agnostic: ``target`` is accepted, and only a position in it is used. The row is carried
    backward through the layers, one reversed scan each, in time linear in the sequence and without
    a matrix.

    I is the residual stream, as it is found in the model's graph. Of two mixers in series in one
    branch, as the attention and the convolution of Inkling, it goes around both:
    :math:`I + \alpha^2 \alpha^1`. Where nothing is added there is no I. A mixer that adds its input
    by itself (Inkling's convolutions) is :math:`I + \alpha`; ways past the same mixer count once.
    With ``normalize_rows`` each factor's rows are divided by their sum and the number of streams
    that are added: those of :math:`\alpha^1` by their own sum.

    The arguments are those of :class:`~captum_ssm.attr.TokenAttribution`.

    Examples::

        >>> relevance = MambaRollout(model).attribute(input_ids)  # (B, L)
    """

    name = "rollout"
    summary = "hidden attention, multiplied over layers"

    @classmethod
    def needs_target(cls, **options: Any) -> bool:
        """False: attention is the same for every target."""
        return False

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
        """Relevance of each input token."""
        asked = inputs, target, additional_forward_args, position
        maps = self._maps(*asked, options, start_layer=start_layer, grid=grid)
        return self._relevance(maps, rollout_row)

    def rollout(
        self,
        inputs: Any,
        additional_forward_args: Any = None,
        *,
        start_layer: int = 0,
        **options: Unpack[MapChoices],
    ) -> Tensor:
        r"""The whole product :math:`\rho`, every token a query: ``(B, L, L)``.

        The arguments are those of :meth:`attribute`. It takes memory quadratic in the sequence.

        Raises:
            ValueError, TypeError: as for :meth:`attribute`.
            MemoryLimitError: where the matrices do not fit ``memory_limit``.

        Examples::

            >>> MambaRollout(model).rollout(input_ids).shape
            torch.Size([1, 7, 7])
        """
        asked = inputs, None, additional_forward_args, None
        return self._rollout(self._maps(*asked, options, start_layer=start_layer, query=False))
