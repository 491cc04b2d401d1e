"""The errors this library raises, each saying what was given, what is accepted and what to do."""

__all__ = ["InputError", "ReconstructionError", "TargetError", "UnsupportedModelError"]


class UnsupportedModelError(ValueError):
    """The model holds no token mixer that this library knows."""


class ReconstructionError(ValueError):
    """A frozen operator does not reproduce what the mixer itself returned.

    Raised instead of returning a map that would describe another computation than the model's:
    an unknown variant of a mixer, a patched kernel, a generation cache that was already filled.
    """


class InputError(ValueError):
    """The inputs cannot be explained: empty, not finite, all padding, of unequal batch sizes."""


# Captum reports a bad target by `assert`; code and tests written for Captum catch that.
class TargetError(ValueError, AssertionError):
    """The target does not select one value per example of the model's output."""
