"""How :func:`explain` is to explain, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from captum_ssm.capture import check_model, unwrap
from captum_ssm.explanation.make.inputs.parse_inputs import is_tokenizer
from captum_ssm.explanation.make.questions.base import Setup
from captum_ssm.explanation.make.relevance.methods import ALL, parse_methods
from captum_ssm.explanation.make.relevance.removal import Replacement
from captum_ssm.utils.integers import as_index

UNITS = ("token", "word", "sentence", "line", "turn")
MAPS = ("hidden-attention", "latim")


def parse_setup(
    model: Any,
    methods: Any,
    alternatives: Any,
    maps: Any,
    layers: Any,
    lens: Any,
    memory_limit: int | None,
    tokenizer: Any = None,
    validate: bool = False,
    circuit: bool = False,
) -> Setup:
    """How examples are explained.

    Raises:
        TypeError: for a model that is not one.
        ValueError: for an unknown method, option or map, and a negative count.
    """
    if is_tokenizer(model):
        raise TypeError(
            f"model is a tokenizer, {type(model).__name__}; expected explain(model, tokenizer, "
            "text), in this order."
        )
    module = unwrap(check_model(model))
    tokenizer = tokenizer if hasattr(tokenizer, "convert_ids_to_tokens") else None
    chosen = parse_methods(methods, model, module, tokenizer, memory_limit)
    count = as_index(alternatives)
    if count is None or count < 0:
        raise ValueError(f"alternatives is {alternatives!r}; expected an integer from 0 on.")
    return Setup(
        module,
        chosen,
        count,
        _maps(maps),
        layers,
        bool(lens),
        memory_limit,
        Replacement.of(tokenizer),
        bool(validate),
        isinstance(methods, str) and methods == ALL,
        bool(circuit),
    )


def parse_spans(units: Any) -> dict[str, tuple[int, int]]:
    """The named parts of a text, ``{name: (start, end)}``; none for the usual units.

    Raises:
        ValueError: for unknown units, and parts that are not two integers.
    """
    if isinstance(units, str) and units in UNITS:
        return {}
    if not isinstance(units, Mapping) or not units:
        raise ValueError(
            f"units is {units!r}; expected one of {', '.join(UNITS)}, or named parts of the text "
            "such as {'subject': (0, 4)}."
        )
    spans = {}
    for name, span in units.items():
        indices = [as_index(bound) for bound in span] if isinstance(span, Sequence) else []
        bounds = [bound for bound in indices if bound is not None]
        if not len(bounds) == len(indices) == 2 or not isinstance(name, str):
            raise ValueError(
                f"units[{name!r}] is {span!r}; expected two integers, the first character and the "
                "one after the last."
            )
        spans[name] = bounds[0], bounds[1]
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
