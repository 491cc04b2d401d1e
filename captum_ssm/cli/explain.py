"""Explain a language model's next token, each token of a continuation, or the class of an image."""

from __future__ import annotations

import argparse
import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from captum_ssm.cli.arguments import (
    DATA,
    PICTURES,
    add_output,
    check_file,
    check_output,
    check_text,
    numbers,
    write,
)
from captum_ssm.cli.inputs import read_messages, read_texts
from captum_ssm.cli.loading import (
    MODEL,
    add_loading,
    add_pixels,
    check_loading,
    is_vision_mamba,
    load_model,
    load_tokenizer,
    picture_options,
    quiet,
)
from captum_ssm.cli.options import add_methods, add_options, flag, methods_of
from captum_ssm.cli.parser import listed
from captum_ssm.cli.terminal import show, show_summary, visible
from captum_ssm.explanation import Explanation
from captum_ssm.explanation.make import explain
from captum_ssm.explanation.make.generate import parse_generation
from captum_ssm.explanation.make.parse import MAPS, OPTIONS, UNITS, settings_of
from captum_ssm.explanation.parts import RELEVANCE, THROUGH
from captum_ssm.explanation.units import texts_of

TABLE = (".csv",)
# Arguments of explain whose messages name them.
NAMED = (
    *("text", "messages", "target", "against", "max_new_tokens", "position", "span", "hops"),
    *("units", "labels", "maps", "alternatives", "reasoning", "through"),
)


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    inputs = "--text TEXT | --ids IDS | --input FILE | --messages FILE | --image FILE"
    parser.usage = f"{parser.prog} MODEL ({inputs}) [options]"
    _add_inputs(parser)
    add_methods(parser, "--method")
    add_answers(parser)
    _add_results(parser)
    add_loading(parser)
    add_options(parser)


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL)
    inputs = parser.add_mutually_exclusive_group(required=True)
    inputs.add_argument("--text", help="The text that the model reads.")
    parser.add_argument(
        "--question", help="The question that the text answers, for a model that finds answers."
    )
    inputs.add_argument("--ids", help="Token ids in place of a text, such as '3,1,4'.")
    inputs.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help="A file with one text per line, or a .csv with a column named text and, where each "
        "text has its own, target and against.",
    )
    inputs.add_argument(
        "--messages",
        type=Path,
        metavar="FILE",
        help="A conversation for a chat model, as JSON: a list of messages with a role and a "
        "content, or several such lists.",
    )
    inputs.add_argument(
        "--image",
        type=Path,
        metavar="FILE",
        help="A picture, for a model that reads images without a text.",
    )


def add_answers(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what is asked of a text, and whether methods are checked by it."""
    parser.add_argument(
        "--validate",
        action="store_true",
        help="Also remove the most relevant tokens first, and say by which method the score falls "
        "fastest.",
    )
    targets = parser.add_mutually_exclusive_group()
    targets.add_argument(
        "--target",
        help="The continuation that is explained, one row per token, or with --ids its token ids; "
        "for a classifier a class or its label. Default: what the model predicts",
    )
    targets.add_argument("--target-ids", help="The target's token ids, such as '3,1,4'.")
    targets.add_argument(
        "--max-new-tokens",
        type=int,
        metavar="N",
        help="Let the model write up to N tokens, and explain each.",
    )
    parser.add_argument(
        "--against",
        help="Another continuation, class or label: the command also explains the difference "
        "between the two scores.",
    )
    parser.add_argument(
        "--labels",
        nargs="+",
        metavar="LABEL",
        help="The names of a classifier's classes. Default: those of its configuration",
    )
    _add_own_words(parser)
    parser.add_argument(
        "--position",
        help="The token of the text at which the prediction is explained, or 'all' for every one. "
        "Default: the last",
    )


def _add_own_words(parser: argparse.ArgumentParser) -> None:
    # What is asked of the words that the model itself writes.
    parser.add_argument(
        "--span",
        help="Explain several tokens of the continuation together, in one row: a text of it, or "
        "the first and the last token, such as '0,4' or '-3,-1'.",
    )
    parser.add_argument(
        "--hops",
        type=int,
        metavar="K",
        help="Follow what the answer takes from the model's own words back to what it wrote these "
        "from, K times.",
    )
    parser.add_argument(
        "--through",
        choices=THROUGH,
        help="What says on which of its own words the model rests: relevance, or swaps of words, "
        "at about eight forward passes per word. Default: relevance",
    )
    parser.add_argument(
        "--reasoning",
        nargs=2,
        metavar=("BEGIN", "END"),
        help="What the model's thoughts begin and end with. Default: '<think>' '</think>'",
    )


def add_kept(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what is kept in addition to the rows of what is asked."""
    parser.add_argument(
        "--alternatives",
        type=int,
        default=1,
        metavar="N",
        help="The number of other answers that are explained as well, for the page. Default: 1",
    )
    parser.add_argument(
        "--maps",
        nargs="*",
        choices=MAPS,
        metavar="MAP",
        help=f"Keep one map per layer for the page: {listed(MAPS)}. Default: {MAPS[0]}",
    )
    parser.add_argument(
        "--lens", action="store_true", help="Keep the answers after each layer, for the page."
    )


def _add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--units",
        choices=UNITS,
        default="token",
        metavar="UNIT",
        help=f"What is shown: relevance is summed over it, {listed(UNITS, 'or')}. Default: token",
    )
    add_kept(parser)
    parser.add_argument("--title", help="A heading for the page.")
    add_output(
        parser,
        "Where to write a page (.html), the data (.json), a table (.csv) or a picture (.png, "
        ".svg, .pdf).",
    )
    add_pixels(parser)


def run(args: argparse.Namespace) -> None:
    """Explain, print, and write."""
    asked, lines = _checked(args)
    with quiet():
        try:
            check_options(asked)
            explanation = _image(args, asked) if args.image is not None else _texts(args, asked)
        except ValueError as error:
            raise ValueError(_as_flags(str(error), args.input, lines)) from error
    if args.input is None:
        show(explanation, args.units)
    else:
        show_summary(explanation, lines)
    write(explanation, args.output, args.units, partial(_figure, explanation, args.units))


def _as_flags(message: str, path: Path | None, lines: list[int]) -> str:
    # The arguments of explain have the flags' names, and several inputs are lines of a file.
    which = re.match(r"inputs\[(\d+)\] of \d+: ", message)
    told = message.removeprefix(which[0]) if which else message
    told = re.sub(rf"^({'|'.join(NAMED)})\b", lambda name: flag(name[0]), told)
    told = told.replace("target= also takes", "--target-ids takes")
    return f"{path}, line {lines[int(which[1])]}: {told}" if which and lines else told


def _checked(args: argparse.Namespace) -> tuple[dict[str, Any], list[int]]:
    # All that the arguments tell, before transformers is imported: what explain is called with,
    # and the lines of a file of texts.
    asked = asked_of_all(args) | {"units": args.units, "title": args.title}
    endings = DATA if args.image is not None else (*DATA, *TABLE)
    check_output(args.output, endings if args.input is not None else (*endings, *PICTURES))
    if args.output is not None and args.output.suffix in TABLE and find_spec("pandas") is None:
        raise ImportError("--output is a .csv, which needs pandas: pip install pandas")
    for path in (args.input, args.messages, args.image):
        check_file(path)
    check_loading(args)
    if args.image is not None:
        check_no_text(args, f"--image is {args.image}")
        return asked | {name: class_of(getattr(args, name)) for name in ("target", "against")}, []
    if is_vision_mamba(args.model):
        raise ValueError(
            "MODEL is a VisionMamba, which reads images; expected --image in place of a text."
        )
    texts, lines = _checked_texts(args)
    return asked | texts, lines


def _checked_texts(args: argparse.Namespace) -> tuple[dict[str, Any], list[int]]:
    lines: list[int] = []
    asked = asked_of_texts(args)
    if args.ids is not None:
        asked["inputs"] = [numbers(args.ids, "--ids")]
    elif args.input is not None:
        lines, asked["inputs"], columns = read_texts(args.input)
        for name, values in columns.items():
            if asked[name] is not None:
                raise ValueError(
                    f"--{name} was given, and {args.input} has a column {name}; remove one of them."
                )
            asked[name] = values
    elif args.messages is not None:
        asked["messages"] = read_messages(args.messages)
    else:
        check_text(args.text)
        asked["inputs"] = args.text
    if args.question is not None:
        if args.text is None:
            raise ValueError("--question was given without --text, in which its answer stands.")
        asked["inputs"] = {"question": args.question, "context": args.text}
    return asked, lines


def asked_of_all(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of explain that are not about texts alone."""
    told = {name: getattr(args, name) for name in ("alternatives", "validate", "labels")}
    return {"methods": methods_of(args), **told}


def asked_of_texts(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of explain that :func:`add_answers` and :func:`add_kept` are for."""
    return {
        "target": numbers(args.target_ids, "--target-ids") or args.target,
        "against": args.against,
        "position": _position(args.position),
        "lens": args.lens,
        "max_new_tokens": args.max_new_tokens,
        "span": _span(args.span),
        "hops": args.hops,
        "reasoning": args.reasoning,
        "through": args.through or RELEVANCE,
        "maps": False if args.maps is None else args.maps or True,
    }


def check_options(asked: dict[str, Any]) -> None:
    """Raise for what explain would not take from any model."""
    options = OPTIONS | asked
    settings_of(options)
    length, position = options["max_new_tokens"], options["position"]
    parse_generation(length, None, options.get("target"), position)


def check_no_text(args: argparse.Namespace, but: str) -> None:
    """Raise where an argument is given that is for texts alone."""
    of_texts = ("target_ids", "max_new_tokens", "span", "hops", "through", "reasoning", "position")
    for name in (*of_texts, "maps", "lens", "units"):
        if getattr(args, name, None) not in (None, False, "token"):
            raise ValueError(
                f"{flag(name)} was given, which is for texts, and {but}; remove one of them."
            )


def is_classifier(model: Any) -> bool:
    """Whether targets are classes."""
    return type(model).__name__.endswith("Classification")


def class_of(target: Any) -> Any:
    """A class by its number, where a text is one, or by its name."""
    if isinstance(target, list):
        return [class_of(name) for name in target]
    return int(target) if isinstance(target, str) and target.isdecimal() else target


def _span(text: str | None) -> str | tuple[int, ...] | None:
    # Two integers name tokens, anything else is a text.
    ends = [] if text is None else text.split(",")
    try:
        return (int(ends[0]), int(ends[1])) if len(ends) == 2 else text
    except ValueError:
        return text


def _position(text: str | None) -> int | str | None:
    if text is None or text == "all":
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--position is {text!r}; expected an integer, or 'all'.") from None


def _texts(args: argparse.Namespace, asked: dict[str, Any]) -> Explanation:
    model = load_model(args, images=False)
    tokenizer = load_tokenizer(args.model) if args.ids is None else None
    for name in ("target", "against"):
        if is_classifier(model):
            asked[name] = class_of(asked[name])
        elif args.ids is not None and isinstance(asked[name], str):
            asked[name] = numbers(asked[name], f"--{name}")
    return explain(model, tokenizer, **asked)


def _image(args: argparse.Namespace, asked: dict[str, Any]) -> Explanation:
    model = load_model(args, images=True)
    return explain(model, args.image, **asked, **picture_options(args, model))


def _figure(explanation: Explanation, units: str) -> Any:
    # One row for each method and output.
    from captum_ssm.visualization import image_overlay, interaction_map

    (example,) = explanation.examples
    title = ", ".join(method.title for method in explanation.methods)
    title = f"{explanation.title} {title}: {explanation.model}"
    if example.image is not None:
        rows = {
            m.title: torch.from_numpy(explanation.relevance(m.name))[None]
            for m in explanation.methods
        }
        pixels = torch.from_numpy(example.image).permute(2, 0, 1)[None]
        return image_overlay(rows, pixels, title=title)
    texts = [visible(text) for text in texts_of(example, units)]
    several = len(explanation.methods) > 1
    names, values = [], []
    for method in explanation.methods:
        for k, output in enumerate(example.outputs):
            answer = visible(output.answers[output.chosen].text)
            names.append(f"{answer} ({method.name})" if several else answer)
            values.append(explanation.relevance(method.name, k, units=units))
    return interaction_map(np.stack(values), texts, row_tokens=names, title=title)
