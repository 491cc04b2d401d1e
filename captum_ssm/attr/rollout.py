"""Attention rollout through Mamba layers (Ali et al., 2025, section 3.2)."""

from __future__ import annotations

from typing import Any

from captum_ssm.attr.maps.method import RolloutAttribution


class MambaRollout(RolloutAttribution):
    r"""Attention rollout: the layers' hidden attention, multiplied up with the residual stream.

    .. math::
        \rho = \prod_{\lambda = 1}^{\Lambda} \big(I + \mathbb{E}_d[\alpha^{\lambda, d}]\big),

    the latest layer leftmost, read at the query's row (Ali et al.,
    `The Hidden Attention of Mamba Models <https://arxiv.org/abs/2403.01590>`_, eq. 21-22).
    Class-agnostic: ``target`` is accepted, and only a position in it is used. The row is carried
    backward through the layers, one reversed scan each, in time linear in the sequence and without
    a matrix.

    What a layer makes of a mixer's result is no part of :math:`\alpha`, also not its sign:
    :math:`x - f(x)` counts as :math:`x + f(x)`. What is added to the stream once more around mixers
    counts as much as it adds, with its sign. Where a score reads several tokens, their rows count
    by the sizes of its gradients: also those of a difference of two positions.

    I is the residual stream, as it is found in the model's graph. Of two mixers in series in one
    branch, as the attention and the convolution of Inkling, it goes around both:
    :math:`I + \alpha^2 \alpha^1`. Where nothing is added there is no I. A mixer that adds its input
    by itself (Inkling's convolutions) is :math:`I + \alpha`; ways around the same mixer count once.
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
