"""The command line: explain one text, or say what of a model is supported.

    python -m captum_ssm explain --model state-spaces/mamba-130m-hf \\
        --text "The capital of France is" --target " Paris" --output out.html
    python -m captum_ssm supported state-spaces/mamba-130m-hf
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from captum_ssm._capture.model import extract_logits
from captum_ssm._capture.request import check_inputs
from captum_ssm._errors import InputError
from captum_ssm._report import report
from captum_ssm._supported import first_line
from captum_ssm._vocabulary import require_known, unknown_in_prompt
from captum_ssm.attr import Option, methods
from captum_ssm.generation import continuation_relevance
from captum_ssm.kernels import ExtensionWarning
from captum_ssm.models import VisionMamba
from captum_ssm.visualization import interaction_map, readable_tokens, text_html, text_record

DEFAULT_METHOD = "mamba-lrp"
PICTURES = (".png", ".svg", ".pdf")
PAGES = (".html", *PICTURES)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    # Progress bars and advice on kernels are not what was asked for.
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, given in ``arguments`` or to the process; the exit status is 0 or 1."""
    args = _parser().parse_args(arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExtensionWarning)
        try:
            args.run(args)
        except (ValueError, TypeError, OSError) as error:
            print(f"captum_ssm: error: {error}", file=sys.stderr)
            return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m captum_ssm",
        description="Explain state-space models and gated linear RNNs.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    explain = commands.add_parser(
        "explain",
        help="which tokens a prediction rests on",
        description="Explain a language model's next token, or each token of a continuation.",
        allow_abbrev=False,
    )
    explain.set_defaults(run=_explain)
    explain.add_argument("--model", required=True, help="a hub name, or a folder")
    given = explain.add_mutually_exclusive_group(required=True)
    given.add_argument("--text", help="the text the model reads")
    given.add_argument("--ids", help="token ids in its place, such as '3,1,4'")
    explain.add_argument(
        "--method",
        choices=methods(),
        default=DEFAULT_METHOD,
        help=f"{_listed(methods())}. Default: {DEFAULT_METHOD}",
    )
    wanted = explain.add_mutually_exclusive_group()
    wanted.add_argument(
        "--target",
        help="the explained continuation (with --ids: token ids); one row per token. "
        "Default: the token the model predicts",
    )
    wanted.add_argument("--target-ids", help="its token ids in its place, such as '3,1,4'")
    explain.add_argument(
        "--position",
        type=int,
        help="explain what the model predicts at this token of the text, not at the last",
    )
    explain.add_argument(
        "--output", type=Path, help="write a page (.html) or a picture (.png, .svg, .pdf)"
    )
    _add_loading(explain)
    _add_options(explain)

    supported = commands.add_parser(
        "supported",
        help="what of a model is supported, and what a run costs",
        description="List a model's token mixers, check that they are reproduced exactly, and "
        "estimate the cost of each method.",
    )
    supported.set_defaults(run=_supported)
    supported.add_argument("model", help="a hub name, or a folder")
    supported.add_argument(
        "--length", type=int, default=1024, help="tokens the costs are for. Default: 1024"
    )
    supported.add_argument(
        "--config-only",
        action="store_true",
        help="read the configuration alone: lists the mixers without loading weights",
    )
    _add_loading(supported)
    return parser


def _add_loading(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="where the model runs. Default: cpu")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "float64", "bfloat16", "float16"),
        help="of the weights; auto keeps the checkpoint's. Default: auto",
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("options of methods")
    for name, owners in _owners().items():
        kinds: dict[str, list[str]] = {}
        for method, option in owners.items():
            kinds.setdefault(_expected(option), []).append(method)
        told = "; ".join(f"{_listed(names)}: {kind}" for kind, names in kinds.items())
        is_switch = all(option.types == (bool,) for option in owners.values())
        action: dict[str, Any] = {"action": "store_const", "const": ""} if is_switch else {}
        group.add_argument(_flag(name), help=told, **action)


def _owners() -> dict[str, dict[str, Option]]:
    # By option: the methods that have it.
    found: dict[str, dict[str, Option]] = {}
    for method, cls in methods().items():
        for name, option in cls.options().items():
            found.setdefault(name, {})[method] = option
    return found


def _options(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, owners in _owners().items():
        text = getattr(args, name)
        if text is None:
            continue
        if args.method not in owners:
            raise ValueError(
                f"{_flag(name)} was given, and --method is {args.method}; expected "
                f"{_listed(owners, 'or')}. Choose one of these, or remove {_flag(name)}."
            )
        found[name] = _value(owners[args.method], text)
    # A method checks its options before its inputs, which hold no token here.
    explainer = methods()[args.method](nn.Identity())
    with suppress(InputError):
        explainer.attribute(torch.zeros(1, 0, dtype=torch.long), **found)
    return found


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
    raise ValueError(f"{_flag(option.name)} is {text!r}; expected {_expected(option)}.")


def _expected(option: Option) -> str:
    if option.types == (bool,):
        return "a switch"
    words = {int: "an integer", float: "a number", str: "a name"}
    kinds = [*option.values, *(words.get(kind, kind.__name__) for kind in option.types)]
    return _listed(kinds, "or") if kinds else "words, such as 'a,b'"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _listed(names: Any, last: str = "and") -> str:
    *first, final = names
    return f"{', '.join(first)} {last} {final}" if first else final


def _explain(args: argparse.Namespace) -> None:
    # All that the arguments tell is checked before transformers is imported.
    options = _options(args)
    _check_output(args.output)
    _check_model(args.model)
    _check_device(args.device)
    target = None if args.target_ids is None else _numbers(args.target_ids, "--target-ids")
    if args.ids is not None:
        tokenizer = None
        prompt = _numbers(args.ids, "--ids")
        if args.target is not None:
            target = _numbers(args.target, "--target")
    else:
        tokenizer = _tokenizer(args.model)
        prompt = _encoded_prompt(tokenizer, args.text)
        if args.target is not None:
            target = _encoded_target(tokenizer, args.target)
    _check_position(args.position, prompt, target)
    explained = _explained(args, tokenizer, prompt, target, options)
    explained.report()
    if args.output is not None:
        explained.write(args.output, f"{args.method}: {args.model}")
        print(f"\nwrote {args.output}")


def _check_output(path: Path | None) -> None:
    if path is None:
        return
    if path.suffix not in PAGES:
        raise ValueError(
            f"--output is {path}; expected a name that ends in {_listed(PAGES, 'or')}."
        )
    if not path.parent.is_dir():
        raise ValueError(
            f"--output is {path}, and there is no folder {path.parent}; create it, or name another."
        )


def _check_position(position: int | None, prompt: Tensor, target: Tensor | None) -> None:
    if position is None:
        return
    if target is not None and target.numel() > 1:
        raise ValueError(
            f"--target has {target.numel()} tokens, but with --position it has to be one: the "
            "token the model may predict there."
        )
    P = prompt.numel()
    if not -P <= position < P:
        raise ValueError(
            f"--position is {position}; the text has {P} tokens: expected 0 .. {P - 1} (or -{P} "
            ".. -1 from the end)."
        )


@_quiet_transformers()
def _tokenizer(name: str) -> Any:
    import transformers

    why: Any = "its vocabulary is empty"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        # What transformers makes up for a model that came without one.
        if tokenizer.vocab_size > 0 and len(tokenizer.encode("a b", add_special_tokens=False)):
            return tokenizer
    except (OSError, ValueError, KeyError, ImportError) as error:
        why = error
    raise ValueError(
        f"no tokenizer could be loaded from {name!r} ({first_line(why)}); pass token ids with "
        "--ids in place of --text."
    )


def _encoded_prompt(tokenizer: Any, text: str) -> Tensor:
    # With the special tokens that the model expects.
    found = tokenizer.encode(text)
    warning = unknown_in_prompt(tokenizer, found)
    if warning:
        print(f"captum_ssm: warning: {warning}", file=sys.stderr)
    return _at_least_one(found, text, "--text")


def _encoded_target(tokenizer: Any, text: str) -> Tensor:
    found = tokenizer.encode(text, add_special_tokens=False)
    require_known(tokenizer, text, found, "--target", "--target-ids takes token ids.")
    return _at_least_one(found, text, "--target")


def _numbers(text: str, name: str) -> Tensor:
    try:
        found = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"{name} is {text!r}; expected token ids such as '3,1,4'.") from None
    return _at_least_one(found, text, name)


def _at_least_one(ids: list[int], text: str, name: str) -> Tensor:
    if not ids:
        raise ValueError(f"{name} is {text!r}, which holds no token; give at least one.")
    return torch.tensor(ids)


@dataclass(frozen=True)
class _Explained:
    # Tokens are as the tokenizer spells them.
    relevance: Tensor  # (T, L)
    tokens: list[str]  # of what the model read
    targets: list[str]
    probabilities: list[float]  # of the targets
    predicted: list[str]

    def report(self, top: int = 10) -> None:
        tokens = readable_tokens(self.tokens)
        for row, name, probability, best in self._rows():
            print(f"\n{name!r}, probability {probability:.4f}; the model predicts {best!r}")
            order = row.abs().argsort(descending=True)[:top].sort().values
            largest = float(row.abs().max()) or 1.0
            for i in order.tolist():
                bar = ("#" if row[i] >= 0 else "-") * round(24 * abs(float(row[i])) / largest)
                print(f"{i:6d}  {tokens[i]:16s} {float(row[i]):+11.4g}  {bar}")

    def write(self, path: Path, title: str) -> None:
        if path.suffix in PICTURES:
            figure = interaction_map(
                self.relevance, self.tokens, row_tokens=self.targets, title=title
            )
            figure.savefig(path, dpi=130)
            return
        records = [
            text_record(row, self.tokens, predicted=best, probability=probability, target=name)
            for row, name, probability, best in self._rows()
        ]
        path.write_text(text_html(records, title=title), encoding="utf-8")

    def _rows(self) -> Iterator[tuple[Tensor, str, float, str]]:
        names, best = readable_tokens(self.targets), readable_tokens(self.predicted)
        return zip(self.relevance, names, self.probabilities, best, strict=True)


@_quiet_transformers()
def _explained(
    args: argparse.Namespace,
    tokenizer: Any,
    prompt: Tensor,
    target: Tensor | None,
    options: dict[str, Any],
) -> _Explained:
    model = _load(args)
    method = methods()[args.method](model)
    P = prompt.numel()
    ids = prompt if target is None else torch.cat([prompt, target[:-1]])
    inputs = ids[None].to(args.device)
    check_inputs(inputs, model)
    with torch.no_grad():
        logits = extract_logits(model(inputs))[0]
    V = logits.shape[-1]
    if target is not None and not (int(target.min()) >= 0 and int(target.max()) < V):
        raise ValueError(f"--target is {target.tolist()}; the model's ids are 0 .. {V - 1}.")
    rows = logits[P - 1 :] if args.position is None else logits[args.position][None]
    probabilities = rows.float().softmax(-1).cpu()
    predicted = probabilities.argmax(-1)
    target = predicted if target is None else target
    if args.position is None:
        relevance = continuation_relevance(method, inputs[:, :P], target.to(args.device), **options)
    else:
        position = args.position % P
        relevance = method.attribute(inputs, target=int(target[0]), position=position, **options)

    def tokens(ids: Tensor) -> list[str]:
        found = ids.tolist()
        return [*map(str, found)] if tokenizer is None else tokenizer.convert_ids_to_tokens(found)

    chosen = probabilities.gather(1, target[:, None])[:, 0].tolist()
    return _Explained(relevance.cpu(), tokens(ids), tokens(target), chosen, tokens(predicted))


def _supported(args: argparse.Namespace) -> None:
    if args.length < 1:
        raise ValueError(f"--length is {args.length}; expected at least one token.")
    _check_model(args.model)
    _check_device(args.device)
    with _quiet_transformers():
        report(_load(args, images=True), args.length, with_weights=not args.config_only)


def _check_model(name: str) -> None:
    # A hub name has at most one slash, and does not begin with a folder that is here.
    path = Path(name)
    below = len(path.parts) == 2 and path.parent.is_dir()
    if path.is_dir():
        if any((path / file).exists() for file in ("config.json", "model.safetensors")):
            return
        what = "a folder without config.json"
    elif path.exists():
        what = "a file"
    elif name.startswith((".", "~", os.sep)) or len(path.parts) > 2 or below:
        what = "a folder that does not exist"
    else:
        return
    raise ValueError(
        f"--model is {name!r}, {what}; expected a folder that save_pretrained wrote, or a hub name "
        "such as state-spaces/mamba-130m-hf."
    )


def _load(args: argparse.Namespace, images: bool = False) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    vision = Path(args.model, "model.safetensors")
    try:
        if vision.exists() and not Path(args.model, "config.json").exists():
            if not images:
                raise ValueError(
                    "it holds a VisionMamba, which reads images; explain takes text. "
                    "docs/how_to/images.md shows how images are explained."
                )
            return VisionMamba.from_state_dict(load_file(vision)).to(args.device, dtype)
        if getattr(args, "config_only", False):
            config = AutoConfig.from_pretrained(args.model)
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype or "auto")
        return model.eval().to(args.device)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(
            f"no language model could be loaded from {args.model!r}: {first_line(error)}\n"
            "A model of another kind is explained in Python: "
            "captum_ssm.MambaLRP(model).attribute(inputs), "
            "captum_ssm.estimate(captum_ssm.MambaLRP(model), inputs)."
        ) from error


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        known = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        raise ValueError(
            f"--device is {name!r}, which torch {torch.__version__} cannot use here "
            f"({first_line(error)}); it can use {', '.join(known)}."
        ) from error
