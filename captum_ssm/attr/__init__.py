"""The attribution methods, one per file.

``base`` is what they share, ``options`` what their ``attribute`` takes. Methods of maps are made of
``maps``, LaTIM of ``latim_parts``, the relevance flow of ``flow``. MambaLRP passes ``relevance``
with ``relevance_stand_ins`` and ``norms`` in the place of modules, in ``segments`` of a long text.
``to_inputs`` gives tokens' relevance the shape of the inputs.
"""

from typing import TYPE_CHECKING

from captum_ssm.attr.base import TokenAttribution, methods
from captum_ssm.attr.flow.components import Components
from captum_ssm.attr.flow.edge import Edge
from captum_ssm.attr.flow.edges import RelevanceEdges
from captum_ssm.attr.flow.features import Feature, FeatureRelevance
from captum_ssm.attr.flow.graph import FlowGraph
from captum_ssm.attr.flow.layer_edges import LayerEdges
from captum_ssm.attr.latim import LaTIM
from captum_ssm.attr.mamba_attribution import MambaAttribution
from captum_ssm.attr.mamba_lrp import MambaLRP, StateRelevance
from captum_ssm.attr.maps.maps import MapChoices
from captum_ssm.attr.options import Option
from captum_ssm.attr.raw_attention import RawAttention
from captum_ssm.attr.relevance_flow import RelevanceFlow
from captum_ssm.attr.rollout import MambaRollout
from captum_ssm.attr.unified import UnifiedImplicitAttention
from captum_ssm.capture.span_target import SpanTarget
from captum_ssm.errors import renamed

__all__ = [
    "Components",
    "Edge",
    "Feature",
    "FeatureRelevance",
    "FlowGraph",
    "LaTIM",
    "LayerEdges",
    "MambaAttribution",
    "MambaLRP",
    "MambaRollout",
    "MapChoices",
    "Option",
    "RawAttention",
    "RelevanceEdges",
    "RelevanceFlow",
    "SpanTarget",
    "StateRelevance",
    "TokenAttribution",
    "UnifiedImplicitAttention",
    "methods",
]

if not TYPE_CHECKING:
    __getattr__ = renamed(__name__, MapOptions="MapChoices")
