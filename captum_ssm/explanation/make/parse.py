"""How :func:`explain` is to explain, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from captum_ssm.capture import Readout, check_model, unwrap
from captum_ssm.errors import brief
from captum_ssm.explanation.make.answers.whole import AskedAnswer
from captum_ssm.explanation.make.inputs.parse_inputs import is_tokenizer
from captum_ssm.explanation.make.questions.base import Setup
from captum_ssm.explanation.make.relevance.methods import ALL, parse_methods
from captum_ssm.explanation.make.relevance.removal import Replacement
from captum_ssm.explanation.parts import RELEVANCE
from captum_ssm.utils.integers import count_of, pair_of
from captum_ssm.utils.suggestions import did_you_mean

UNITS = ("token", "word", "sentence", "line", "turn")
MAPS = ("hidden-attention", "latim")
# By name, what ``explain`` takes for all inputs alike, and its defaults.
OPTIONS: dict[str, Any] = {
    **{"max_new_tokens": None, "generation": None, "methods": ("mamba-lrp",), "validate": False},
    **{"span": None, "hops": None, "reasoning": None, "through": RELEVANCE, "position": None},
    **{"units": "token", "alternatives": 1, "maps": False, "layers": None, "lens": False},
    **{"circuit": False, "processor": None, "labels": None, "features": None, "mean": None},
    **{"std": None, "title": None, "memory_limit": None, "show_progress": True},
}


def checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of ``explain`` that are not about one input: those that are given, and defaults.

    Raises:
        TypeError: for another one.
    """
    for name in options:
        if name not in OPTIONS:
            raise TypeError(
                f"there is no option {name!r}.{did_you_mean(name, OPTIONS)} Expected one of "
                f"{', '.join(OPTIONS)}."
            )
    return {**OPTIONS, **options}


def parse_setup(model: Any, tokenizer: Any, options: Mapping[str, Any]) -> Setup:
    """How inputs are explained.

    Raises:
        TypeError: for a model that is not one.
        ValueError: for an unknown method, option, unit or map, and a negative count.
    """
    if is_tokenizer(model):
        raise TypeError(
            f"model is a tokenizer, {type(model).__name__}; expected explain(model, tokenizer, "
            "text), in this order."
        )
    module = unwrap(check_model(model))
    reader = tokenizer if hasattr(tokenizer, "convert_ids_to_tokens") else None
    methods, labels, limit = (options[name] for name in ("methods", "labels", "memory_limit"))
    if labels is None and isinstance(model, Readout):
        labels = model.names or None
    return Setup(
        **settings_of(options),
        model=module,
        methods=parse_methods(methods, model, module, reader, limit),
        tokenizer=tokenizer,
        processor=options["processor"],
        labels=labels,
        layers=options["layers"],
        memory_limit=limit,
        replacement=Replacement.of(reader),
        skips_failing=isinstance(methods, str) and methods == ALL,
        position=options["position"],
    )


def settings_of(options: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a :class:`Setup` that say nothing of a model, checked.

    Raises:
        ValueError, TypeError: as for ``explain``.
    """
    whole = (options[name] for name in ("span", "hops", "reasoning", "through"))
    return {
        "alternatives": count_of("alternatives", options["alternatives"], 0),
        "maps": _maps(options["maps"]),
        "spans": parse_spans(options["units"]),
        "answer": AskedAnswer.of(*whole),
        **{name: bool(options[name]) for name in ("lens", "circuit", "validate")},
    }


def parse_spans(units: Any) -> dict[str, tuple[int, int]]:
    """The named parts of a text, ``{name: (start, end)}``; none for the usual units.

    Raises:
        ValueError: for unknown units, and parts that are not two integers.
    """
    if isinstance(units, str) and units in UNITS:
        return {}
    if not isinstance(units, Mapping) or not units:
        raise ValueError(
            f"units is {brief(units)}; expected one of {', '.join(UNITS)}, or named parts of the "
            "text such as {'subject': (0, 4)}."
        )
    spans = {}
    for name, span in units.items():
        bounds = pair_of(span)
        if bounds is None or not isinstance(name, str):
            raise ValueError(
                f"units[{name!r}] is {brief(span)}; expected two integers, the first character and "
                "the one after the last."
            )
        spans[name] = bounds
    return spans


def _maps(maps: Any) -> tuple[str, ...]:
    if isinstance(maps, bool):
        return MAPS[:1] if maps else ()
    names = (maps,) if isinstance(maps, str) else tuple(maps)
    for name in names:
        if name not in MAPS:
            raise ValueError(
                f"maps holds {name!r}; expected True, or one or several of {', '.join(MAPS)}."
            )
    return names
