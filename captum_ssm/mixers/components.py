"""The two formulations of a mixer's maps, and the parts of a mixer that a map can include."""

from __future__ import annotations

from collections.abc import Iterable

COMPONENTS = ("conv", "activation", "gate", "norm", "skip")
PAPER_COMPONENTS = ("conv", "activation", "gate", "norm")
FORMULATIONS = ("hidden", "unified")


def check_formulation(formulation: str) -> None:
    """Raise for an unknown formulation."""
    if formulation not in FORMULATIONS:
        raise ValueError(f"formulation is {formulation!r}; expected one of {FORMULATIONS}.")


def check_components(formulation: str, components: Iterable[str] | None) -> tuple[str, ...] | None:
    """The chosen components, by name; None for None.

    The arguments are those of :meth:`FrozenMixer.operator`; the name of one component will do.

    Raises:
        ValueError: for an unknown formulation or component, or components without ``"unified"``.
        TypeError: for components that are not iterable.

    Examples::

        >>> check_components("unified", ["gate"])
        ('gate',)
    """
    check_formulation(formulation)
    if components is None:
        return None
    if formulation == "hidden":
        raise ValueError(
            "components were given with formulation='hidden', which is the recurrence alone; "
            "pass formulation='unified' to choose components."
        )
    if not isinstance(components, Iterable):
        raise TypeError(f"components is {components!r}; expected any of {COMPONENTS}.")
    chosen = (components,) if isinstance(components, str) else tuple(components)
    unknown = [c for c in chosen if c not in COMPONENTS]
    if unknown:
        raise ValueError(f"components holds {unknown}; expected any of {COMPONENTS}.")
    return chosen
