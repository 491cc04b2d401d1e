"""The names of a model's classes, and which of them is meant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from captum_ssm.errors import TargetError, brief
from captum_ssm.utils.integers import index_in
from captum_ssm.utils.suggestions import did_you_mean

MOST_NAMED = 20  # in a message


def names_of(labels: Any, model: Any, count: int) -> tuple[str, ...]:
    """One name for each of so many classes.

    The configuration of a model may name its classes.

    Raises:
        ValueError: for another number of names.
    """
    if labels is not None and len(labels) != count:
        raise ValueError(
            f"labels holds {len(labels)} names; the model has {count} classes: expected one name "
            "per class."
        )
    names = configured(model) if labels is None else labels
    if len(names) != count:  # as of the configuration of a model inside of another one
        return tuple(map(str, range(count)))
    try:
        return tuple(str(names[k]) for k in range(count))
    except KeyError as error:
        raise ValueError(
            f"labels names the classes {', '.join(map(str, names))}; expected 0 .. {count - 1}, "
            "each with its name."
        ) from error


def configured(model: Any) -> Mapping[int, str]:
    """The names in a model's configuration, by class."""
    return getattr(getattr(model, "config", None), "id2label", None) or {}


def class_of(name: str, wanted: Any, labels: Sequence[str]) -> int | None:
    """The class that a target names, by its number or its name; None for no target.

    Raises:
        TargetError: for a class that there is not, or a name of several.
    """
    if wanted is None:
        return None
    if isinstance(wanted, str):
        matches = [k for k, label in enumerate(labels) if label == wanted]
        matches = matches or [k for k, each in enumerate(labels) if each.lower() == wanted.lower()]
        if len(matches) == 1:
            return matches[0]
        several = f", which is the name of the classes {', '.join(map(str, matches))}"
        hint = did_you_mean(wanted, labels)
        raise _unknown(name, repr(wanted) + (several if matches else ""), labels, hint)
    index = index_in(wanted, len(labels))
    if index is None:
        raise _unknown(name, repr(wanted), labels)
    return index


def classes_of(
    target: Any, against: Any, labels: Sequence[str], logits: Tensor
) -> tuple[int, int | None]:
    """The class that is explained, the likeliest unless another one is named, and its rival.

    Raises:
        TargetError: for a class that there is not, or twice the same one.
    """
    wanted, other = class_of("target", target, labels), class_of("against", against, labels)
    chosen = int(logits.argmax()) if wanted is None else wanted
    if other == chosen:
        raise itself(against)
    return chosen, other


def itself(
    against: Any, what: str = "the class that is explained", other: str = "another class"
) -> TargetError:
    """The error for an answer that is explained against itself."""
    return TargetError(f"against is {brief(against)}, {what}; expected {other}.")


def _unknown(name: str, wanted: str, labels: Sequence[str], hint: str = "") -> TargetError:
    shown = ", ".join(labels[:MOST_NAMED]) + (", ..." if len(labels) > MOST_NAMED else "")
    return TargetError(
        f"{name} is {wanted}; expected a class 0 .. {len(labels) - 1}, or its name: {shown}.{hint}"
    )
