"""Doing, not only looking: a model's run without edges, with other values, and what that changes."""

from captum_ssm.interventions.knockout import knockout

__all__ = ["knockout"]
