"""The methods in inseq, by their names: ``import captum_ssm.integrations.inseq``.

inseq explains each token of an answer by what stands before it. Its own gradient methods return a
vector per token and take its norm; these return one signed number per token, which adds up as the
method says. The score is what inseq's ``attributed_fn`` is: ``"logit"`` is what papers explain.
"""

from __future__ import annotations

from typing import Any

from inseq.attr.feat import FeatureAttribution
from inseq.data import FeatureAttributionStepOutput
from inseq.utils import Registry

from captum_ssm.attr import TokenAttribution, methods


class InseqAttribution(FeatureAttribution, Registry):
    """A method of this library, as inseq runs one for each token of an answer.

    Args:
        attribution_model (inseq.models.AttributionModel): a decoder-only model.
        **options: inseq's own.

    Examples::

        >>> import inseq
        >>> import captum_ssm.integrations.inseq
        >>> model = inseq.load_model("state-spaces/mamba-130m-hf", "mamba_lrp")
        >>> model.attribute("The capital of France is", attributed_fn="logit").show()
    """

    kind: type[TokenAttribution]

    def __init__(self, attribution_model: Any, **options: Any) -> None:
        super().__init__(attribution_model, **options)
        self.method = self.kind(attribution_model)

    def attribute_step(
        self, attribute_fn_main_args: dict[str, Any], attribution_args: dict[str, Any] | None = None
    ) -> FeatureAttributionStepOutput:
        """Relevance ``(B, L)`` of the tokens before one that is explained."""
        attributions = self.method.attribute(**attribute_fn_main_args, **(attribution_args or {}))
        scores = {}
        if isinstance(attributions[0], tuple):
            attributions, scores["deltas"] = attributions
        (relevance,) = attributions  # of the embeddings, (B, L, E)
        return FeatureAttributionStepOutput(
            target_attributions=relevance.sum(-1), step_scores=scores
        )


# inseq finds the subclasses that are alive.
_REGISTERED: dict[str, type[InseqAttribution]] = {}


def register() -> None:
    """Give inseq all methods that are defined by now, the user's own included.

    Their names are those of :func:`captum_ssm.attr.methods`, with underscores.
    """
    for name, kind in methods().items():
        members = {"method_name": name.replace("-", "_"), "kind": kind}
        if name not in _REGISTERED:
            _REGISTERED[name] = type(kind.__name__, (InseqAttribution,), members)


register()
