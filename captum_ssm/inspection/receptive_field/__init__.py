"""The effective receptive field: which positions of the input one unit really depends on.

``unit`` says which unit is asked about, ``gradient`` measures by gradients (Luo et al., 2016),
``implicit`` by the mixers' maps, and ``result`` has what is returned.
"""

from captum_ssm.inspection.receptive_field.gradient import effective_receptive_field
from captum_ssm.inspection.receptive_field.result import Area, ReceptiveField

__all__ = ["Area", "ReceptiveField", "effective_receptive_field"]
