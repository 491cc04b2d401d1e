"""Small reference models: Vision Mamba, and VMamba's four-direction scan."""

from captum_ssm.models.ss2d import SS2D
from captum_ssm.models.token_grid import TokenGrid
from captum_ssm.models.vision_mamba import BidirectionalMamba, VisionMamba

__all__ = ["SS2D", "BidirectionalMamba", "TokenGrid", "VisionMamba"]
