"""Raw hidden attention (Ali et al., 2025, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typing_extensions import Unpack

from captum_ssm.attr.maps.maps import MapChoices, raw_row
from captum_ssm.attr.maps.method import MapAttribution
from captum_ssm.attr.options import Arguments


class RawAttention(MapAttribution):
    r"""The query token's row of the hidden attention matrices, averaged over layers.

    Per layer the mean over channels :math:`\mathbb{E}_d[\alpha^d]` of Mamba's implicit attention
    (Ali et al., `The Hidden Attention of Mamba Models <https://arxiv.org/abs/2403.01590>`_,
    eq. 13); the average over layers is theirs too (section 4.2). Class-agnostic: ``target`` is
    accepted, and only a position in it is used. A row costs time linear in the sequence.

    The arguments are those of :class:`~captum_ssm.attr.TokenAttribution`.

    Examples::

        >>> relevance = RawAttention(model).attribute(input_ids)  # (B, L)
    """

    name = "raw-attention"
    summary = "hidden attention, averaged over layers"

    @classmethod
    def needs_target(cls, **options: Any) -> bool:
        """False: attention is the same for every target."""
        return False

    def _attribute(
        self,
        arguments: Arguments,
        *,
        layers: int | str | Sequence[int | str] | None = None,
        grid: int | None = None,
        **options: Unpack[MapChoices],
    ) -> Any:
        """Relevance of each input token.

        Args:
            layers (int, str or sequence, optional): mixers by index or module path; None for
                all. Default: None
        """
        return self._relevance(
            self._maps(arguments, {**options}, layers=layers, grid=grid), raw_row
        )
