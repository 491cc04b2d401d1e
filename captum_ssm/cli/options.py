"""The methods' own options as flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from captum_ssm.attr import Option, methods
from captum_ssm.cli.parser import listed, plain
from captum_ssm.errors import InputError
from captum_ssm.explanation.make.relevance.captum_methods import NAMED
from captum_ssm.explanation.make.relevance.methods import ALL, method_names

DEFAULT_METHOD = "mamba-lrp"


def add_methods(parser: argparse.ArgumentParser, *aliases: str) -> None:
    """The argument that says by which methods; it may have other names as well."""
    parser.add_argument(
        "--methods",
        *aliases,
        nargs="+",
        type=method_named,
        choices=[*method_names(), ALL],
        metavar="METHOD",
        default=[DEFAULT_METHOD],
        help=f"One or several of {listed(method_names())}, or all. Default: {DEFAULT_METHOD}",
    )


def methods_of(args: argparse.Namespace) -> str | dict[str, dict[str, Any]]:
    """The methods that were given, each with its options; or all."""
    chosen = [ALL] if ALL in args.methods else list(dict.fromkeys(args.methods))
    options = options_of(args, chosen)
    return ALL if ALL in chosen else options


def add_options(parser: argparse.ArgumentParser) -> None:
    """One flag for each option of any method."""
    group = parser.add_argument_group(
        "options of methods",
        "Each goes to the methods that it names. help(captum_ssm.LaTIM.attribute) in Python says "
        "what an option of LaTIM does.",
    )
    for name, owners in _owners().items():
        kinds: dict[str, list[str]] = {}
        for method, option in owners.items():
            kinds.setdefault(_expected(option), []).append(method)
        told = "; ".join(f"for {listed(names)}: {kind}" for kind, names in kinds.items())
        told = f"{told[0].upper()}{told[1:]}."
        is_switch = all(option.types == (bool,) for option in owners.values())
        action: dict[str, Any] = {"metavar": name.upper()}
        if is_switch:
            action = {"action": "store_const", "const": ""}
        group.add_argument(flag(name), help=told, dest=f"option_{name}", **action)


def options_of(args: argparse.Namespace, chosen: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The options that were given, for each of the methods that have them.

    Raises:
        ValueError: for an option that none of the methods has, or a value that it cannot be.
    """
    options: dict[str, dict[str, Any]] = {name: {} for name in chosen}
    for name, owners in _owners().items():
        text = getattr(args, f"option_{name}")
        if text is None:
            continue
        takers = [method for method in chosen if method in owners]
        if not takers:
            raise ValueError(
                f"{flag(name)} was given, and --methods is {' '.join(chosen)}; expected "
                f"{listed(owners, 'or')}. Choose one of these, or remove {flag(name)}."
            )
        for method in takers:
            options[method][name] = _value(owners[method], text)
    for method in (name for name in chosen if name in methods()):
        # A method checks its options before its inputs, which hold no token here.
        with suppress(InputError):
            explainer = methods()[method](nn.Identity())
            explainer.attribute(torch.zeros(1, 0, dtype=torch.long), **options[method])
    return options


def method_named(text: str) -> str:
    """The name of a method that was given by its name or its class, in any spelling."""
    known = {plain(cls.__name__): name for name, cls in (methods() | NAMED).items()}
    known |= {plain(name): name for name in known.values()}
    return known.get(plain(text), text)


def _owners() -> dict[str, dict[str, Option]]:
    # By option: the methods that have it.
    owners: dict[str, dict[str, Option]] = {}
    for method, cls in methods().items():
        for name, option in cls.options().items():
            owners.setdefault(name, {})[method] = option
    return owners


def _value(option: Option, text: str) -> Any:
    if text in option.values:
        return text
    if option.types == (bool,):
        return True
    if not option.values and not option.types:
        return tuple(text.replace(",", " ").split())
    for kind in sorted(option.types, key=lambda kind: kind is str):  # a number, where it is one
        with suppress(ValueError):
            return kind(text)
    raise ValueError(f"{flag(option.name)} is {text!r}; expected {_expected(option)}.")


def _expected(option: Option) -> str:
    if option.types == (bool,):
        return "turns it on"
    words = {int: "an integer", float: "a number", str: "a name"}
    kinds = [*option.values, *(words.get(kind, kind.__name__) for kind in option.types)]
    return listed(kinds, "or") if kinds else "words separated by commas"


def flag(name: str) -> str:
    """An argument's name as a flag."""
    return f"--{name.replace('_', '-')}"
