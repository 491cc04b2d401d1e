"""Explain a language model's next token, each token of a continuation, or the class of an image."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from captum_ssm.attr import methods
from captum_ssm.cli.arguments import check_file, check_model, check_output, listed, numbers, write
from captum_ssm.cli.loading import (
    add_loading,
    check_device,
    is_vision_mamba,
    load_image,
    load_model,
    load_tokenizer,
    quiet,
)
from captum_ssm.cli.options import add_options, options_of
from captum_ssm.cli.terminal import show, show_summary, visible
from captum_ssm.explanation import Explanation
from captum_ssm.explanation.make import explain
from captum_ssm.explanation.make.parse import MAPS, UNITS
from captum_ssm.explanation.units import texts_of
from captum_ssm.utils.vocabulary import require_known

DEFAULT_METHOD = "mamba-lrp"
DATA = (".html", ".json")
PICTURES = (".png", ".svg", ".pdf")


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    _add_inputs(parser)
    _add_answers(parser)
    _add_results(parser)
    add_loading(parser)
    add_options(parser)


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a hub name, or a folder")
    inputs = parser.add_mutually_exclusive_group(required=True)
    inputs.add_argument("--text", help="the text the model reads")
    inputs.add_argument("--ids", help="token ids in its place, such as '3,1,4'")
    inputs.add_argument("--input", type=Path, help="a file of texts, one per line")
    inputs.add_argument("--image", type=Path, help="a picture, for a model that reads images")
    parser.add_argument(
        "--methods",
        "--method",
        nargs="+",
        choices=methods(),
        default=[DEFAULT_METHOD],
        help=f"one or several of {listed(methods())}. Default: {DEFAULT_METHOD}",
    )


def _add_answers(parser: argparse.ArgumentParser) -> None:
    targets = parser.add_mutually_exclusive_group()
    targets.add_argument(
        "--target",
        help="the explained continuation (with --ids: token ids), one row per token; of an image "
        "its class. Default: what the model predicts",
    )
    targets.add_argument("--target-ids", help="its token ids in its place, such as '3,1,4'")
    parser.add_argument(
        "--against",
        help="another continuation or class: also explain the difference between the two scores",
    )
    parser.add_argument(
        "--position",
        help="explain what the model predicts at this token of the text, not at the last; or "
        "'all': every token of the text",
    )


def _add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--units", choices=UNITS, default="token", help="what is shown. Default: token"
    )
    parser.add_argument(
        "--alternatives",
        type=int,
        default=1,
        help="how many other answers are explained, for the page. Default: 1",
    )
    parser.add_argument(
        "--maps", nargs="*", choices=MAPS, help="also keep a map per layer, for the page"
    )
    parser.add_argument(
        "--lens", action="store_true", help="also keep the answers after each layer, for the page"
    )
    parser.add_argument("--title", help="a heading for the page")
    parser.add_argument(
        "--output",
        type=Path,
        help="write a page (.html), the data (.json) or a picture (.png, .svg, .pdf)",
    )
    for name in ("mean", "std"):
        parser.add_argument(
            f"--{name}",
            type=float,
            nargs="+",
            help="of the pixels' normalization, for a VisionMamba. Default: that of ImageNet",
        )


def run(args: argparse.Namespace) -> None:
    """Explain, print, and write."""
    asked = _checked(args)
    with quiet():
        try:
            found = _image(args, asked) if args.image is not None else _texts(args, asked)
        except ValueError as error:
            # The arguments of explain have the flags' names.
            message = re.sub(
                r"^(text|target|against|position|units|maps|alternatives)\b", r"--\1", str(error)
            )
            raise ValueError(message) from error
    if args.input is None:
        show(found, args.units)
    else:
        show_summary(found)
    if args.output is None:
        return
    if args.output.suffix in DATA:
        write(found, args.output)
    else:
        _figure(found, args.units).savefig(args.output, dpi=130)
        print(f"\nwrote {args.output}")


def _checked(args: argparse.Namespace) -> dict[str, Any]:
    # All that the arguments tell, before transformers is imported: what explain is called with.
    chosen = list(dict.fromkeys(args.methods))
    asked: dict[str, Any] = {
        "methods": options_of(args, chosen),
        "units": args.units,
        "alternatives": args.alternatives,
        "title": args.title,
    }
    check_output(args.output, DATA if args.input is not None else (*DATA, *PICTURES))
    for name in ("input", "image"):
        check_file(getattr(args, name), f"--{name}")
    check_model(args.model)
    check_device(args.device)
    if args.image is not None:
        flags = ("target_ids", "position", "maps", "lens")
        texts = [f"--{name.replace('_', '-')}" for name in flags if getattr(args, name)]
        if texts or args.units != "token":
            raise ValueError(
                f"{(texts or ['--units'])[0]} was given, which is of texts, and --image is "
                f"{args.image}; remove one of them."
            )
        return asked | {"target": _class(args.target), "against": _class(args.against)}
    if is_vision_mamba(args.model):
        raise ValueError(
            f"--model is {args.model!r}, a VisionMamba, which reads images; expected --image in "
            "place of a text."
        )
    target: Any = numbers(args.target_ids, "--target-ids") or args.target
    against: Any = args.against
    if args.ids is not None:
        asked["inputs"] = [numbers(args.ids, "--ids")]
        target = target if isinstance(target, list) else numbers(target, "--target")
        against = numbers(against, "--against")
    elif args.input is not None:
        lines = args.input.read_text(encoding="utf-8").splitlines()
        asked["inputs"] = [line for line in lines if line.strip()]
        if not asked["inputs"]:
            raise ValueError(f"--input is {args.input}, which holds no text; write one per line.")
    else:
        asked["inputs"] = args.text
    asked |= {"target": target, "against": against, "position": _position(args.position)}
    if args.maps is not None:
        asked["maps"] = args.maps or True
    if args.ids is not None:
        _check_position(asked["position"], len(asked["inputs"][0]), target)
    return asked | {"lens": args.lens}


def _class(text: str | None) -> int | str | None:
    return int(text) if text is not None and text.isdecimal() else text


def _position(text: str | None) -> int | str | None:
    if text is None or text == "all":
        return text
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--position is {text!r}; expected an integer, or 'all'.") from None


def _check_position(position: Any, P: int, target: list[int] | None) -> None:
    if not isinstance(position, int):
        return
    if target is not None and len(target) > 1:
        raise ValueError(
            f"--target has {len(target)} tokens, but with --position it has to be one: the "
            "token the model may predict there."
        )
    if not -P <= position < P:
        raise ValueError(
            f"--position is {position}; the text has {P} tokens: expected 0 .. {P - 1} (or -{P} "
            ".. -1 from the end)."
        )


def _texts(args: argparse.Namespace, asked: dict[str, Any]) -> Explanation:
    tokenizer = None
    if args.ids is None:
        tokenizer = load_tokenizer(args.model)
        for name in ("target", "against"):
            if isinstance(asked[name], str):
                ids = tokenizer.encode(asked[name], add_special_tokens=False)
                advice = "--target-ids takes token ids."
                require_known(tokenizer, asked[name], ids, f"--{name}", advice)
    model = load_model(args, images=False)
    return explain(model, tokenizer, **asked)


def _image(args: argparse.Namespace, asked: dict[str, Any]) -> Explanation:
    model = load_model(args, images=True)
    pixels, known = load_image(args.image, args, model)
    return explain(model, pixels, **asked, **known)


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
