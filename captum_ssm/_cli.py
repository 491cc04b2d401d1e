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
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from captum_ssm._capture.request import check_inputs
from captum_ssm._capture.target import extract_logits
from captum_ssm._supported import first_line, report
from captum_ssm._vocabulary import require_known, unknown_in_prompt
from captum_ssm.attr import Option, TokenAttribution, methods
from captum_ssm.generation import continuation_relevance
from captum_ssm.kernels import ExtensionWarning

DEFAULT_METHOD = "mamba-lrp"
PICTURES = (".png", ".svg", ".pdf")
PAGES = (".html", *PICTURES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, 0 or 1.

    Args:
        arguments (sequence of str, optional): in place of those of the process. Default: None
    """
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


# options of methods


def _add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("options of methods")
    for name, owners in _owners().items():
        kinds = {method: _expected(option) for method, option in owners.items()}
        same = len(set(kinds.values())) == 1
        lines = {_listed(kinds): next(iter(kinds.values()))} if same else kinds
        told = "; ".join(f"{who}: {what}" for who, what in lines.items())
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
    _check_options(methods()[args.method], found)
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


def _check_options(method: type[TokenAttribution], options: dict[str, Any]) -> None:
    # A method checks its options before it runs the model: as far as that is it called here.
    class Reached(Exception):
        pass

    def run(*_: Any, **__: Any) -> NoReturn:
        raise Reached

    explainer = method(nn.Identity())
    explainer._run = run  # type: ignore[method-assign]
    with suppress(Reached):
        explainer.attribute(torch.zeros(1, 1, dtype=torch.long), target=0, **options)


# explain


def _explain(args: argparse.Namespace) -> None:
    # All that the arguments tell is checked before transformers is imported.
    options = _options(args)
    _check_output(args.output)
    _check_model(args.model)
    _device(args.device)
    numbers = _Vocabulary(None)
    prompt = target = None
    if args.ids is not None:
        prompt = numbers.encode(args.ids, "--ids")
    if args.target_ids is not None:
        target = numbers.encode(args.target_ids, "--target-ids")
    elif prompt is not None and args.target is not None:
        target = numbers.encode(args.target, "--target")
    _check_position(args.position, prompt, target)

    with _quiet_transformers():
        vocabulary = numbers if prompt is not None else _Vocabulary.load(args.model)
        if prompt is None:
            prompt = vocabulary.encode_prompt(args.text)
        if target is None and args.target is not None:
            target = vocabulary.encode(args.target, "--target")
        _check_position(args.position, prompt, target)
        model = _load(args)
        method = methods()[args.method](model)
        prompt = prompt.to(args.device)
        explained = _explained(model, method, prompt, target, args.position, options)
    explained.report(vocabulary)
    if args.output is not None:
        explained.write(args.output, vocabulary, f"{args.method}: {args.model}")
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


def _check_position(position: int | None, prompt: Tensor | None, target: Tensor | None) -> None:
    if position is None:
        return
    if target is not None and target.numel() > 1:
        raise ValueError(
            f"--target has {target.numel()} tokens, but with --position it has to be one: the "
            "token the model may predict there."
        )
    P = None if prompt is None else prompt.numel()
    if P is not None and not -P <= position < P:
        raise ValueError(
            f"--position is {position}; the text has {P} tokens: expected 0 .. {P - 1} (or -{P} "
            ".. -1 from the end)."
        )


@dataclass(frozen=True)
class _Vocabulary:
    # A tokenizer, or none: then texts are ids, and ids are shown.
    tokenizer: Any

    @classmethod
    def load(cls, name: str) -> _Vocabulary:
        import transformers

        why: Any = "its vocabulary is empty"
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name)
            # What transformers makes up for a model that came without one.
            if tokenizer.vocab_size > 0 and len(tokenizer.encode("a b", add_special_tokens=False)):
                return cls(tokenizer)
        except (OSError, ValueError, KeyError, ImportError) as error:
            why = error
        raise ValueError(
            f"no tokenizer could be loaded from {name!r} ({first_line(why)}); pass token ids "
            "with --ids in place of --text."
        )

    def encode(self, text: str, name: str) -> Tensor:
        """The ids of a target, or those that a text lists."""
        if self.tokenizer is not None:
            found = self.tokenizer.encode(text, add_special_tokens=False)
            require_known(self.tokenizer, text, found, name, "--target-ids takes token ids.")
        else:
            try:
                found = [int(part) for part in text.replace(",", " ").split()]
            except ValueError:
                raise ValueError(
                    f"{name} is {text!r}; expected token ids such as '3,1,4'."
                ) from None
        return _at_least_one(found, text, name)

    def encode_prompt(self, text: str) -> Tensor:
        """The ids of a prompt, with the special tokens that the model expects."""
        found = self.tokenizer.encode(text)
        warning = unknown_in_prompt(self.tokenizer, found)
        if warning:
            print(f"captum_ssm: warning: {warning}", file=sys.stderr)
        return _at_least_one(found, text, "--text")

    def tokens(self, ids: Tensor) -> list[str]:
        if self.tokenizer is None:
            return [str(i) for i in ids.tolist()]
        return self.tokenizer.convert_ids_to_tokens(ids.tolist())


def _at_least_one(ids: list[int], text: str, name: str) -> Tensor:
    if not ids:
        raise ValueError(f"{name} is {text!r}, which holds no token; give at least one.")
    return torch.tensor(ids)


@dataclass(frozen=True)
class _Explained:
    relevance: Tensor  # (T, L)
    ids: Tensor  # (L,): what the model read
    targets: Tensor  # (T,)
    probabilities: Tensor  # (T, V), where each was predicted

    def report(self, vocabulary: _Vocabulary, top: int = 10) -> None:
        from captum_ssm.visualization import readable_tokens

        tokens = readable_tokens(vocabulary.tokens(self.ids))
        for row, (name, probability, best) in zip(
            self.relevance, self._predictions(vocabulary), strict=True
        ):
            print(f"\n{name!r}, probability {probability:.4f}; the model predicts {best!r}")
            order = row.abs().argsort(descending=True)[:top].sort().values
            largest = float(row.abs().max()) or 1.0
            for i in order.tolist():
                bar = ("#" if row[i] >= 0 else "-") * round(24 * abs(float(row[i])) / largest)
                print(f"{i:6d}  {tokens[i]:16s} {float(row[i]):+11.4g}  {bar}")

    def write(self, path: Path, vocabulary: _Vocabulary, title: str) -> None:
        from captum_ssm.visualization import interaction_map, text_html, text_record

        tokens = vocabulary.tokens(self.ids)
        if path.suffix in PICTURES:
            figure = interaction_map(
                self.relevance,
                tokens,
                row_tokens=vocabulary.tokens(self.targets),
                title=title,
            )
            figure.savefig(path, dpi=130)
            return
        records = [
            text_record(row, tokens, predicted=best, probability=probability, target=name)
            for row, (name, probability, best) in zip(
                self.relevance, self._predictions(vocabulary), strict=True
            )
        ]
        path.write_text(text_html(records, title=title), encoding="utf-8")

    def _predictions(self, vocabulary: _Vocabulary) -> list[tuple[str, float, str]]:
        from captum_ssm.visualization import readable_tokens

        best = readable_tokens(vocabulary.tokens(self.probabilities.argmax(-1)))
        names = readable_tokens(vocabulary.tokens(self.targets))
        chosen = self.probabilities.gather(1, self.targets[:, None])[:, 0].tolist()
        return list(zip(names, chosen, best, strict=True))


def _explained(
    model: nn.Module,
    method: Any,
    prompt: Tensor,
    target: Tensor | None,
    position: int | None,
    options: dict[str, Any],
) -> _Explained:
    P = prompt.numel()
    ids = prompt if target is None else torch.cat([prompt, target[:-1].to(prompt)])
    check_inputs(ids[None], model)
    with torch.no_grad():
        logits = extract_logits(model(ids[None]))[0]
    V = logits.shape[-1]
    if target is not None and not (int(target.min()) >= 0 and int(target.max()) < V):
        raise ValueError(f"--target is {target.tolist()}; the model's ids are 0 .. {V - 1}.")
    rows = logits[P - 1 :] if position is None else logits[position][None]
    probabilities = rows.float().softmax(-1).cpu()
    targets = probabilities.argmax(-1) if target is None else target
    if position is None:
        relevance = continuation_relevance(method, prompt, targets.to(prompt.device), **options)
    else:
        relevance = method.attribute(
            ids[None], target=int(targets[0]), position=position % P, **options
        )
    return _Explained(relevance.cpu(), ids.cpu(), targets, probabilities)


# supported


def _supported(args: argparse.Namespace) -> None:
    if args.length < 1:
        raise ValueError(f"--length is {args.length}; expected at least one token.")
    _check_model(args.model)
    _device(args.device)
    with _quiet_transformers():
        report(_load(args, images=True), args.length, with_weights=not args.config_only)


# both


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

    device = _device(args.device)
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    vision = Path(args.model, "model.safetensors")
    try:
        if vision.exists() and not Path(args.model, "config.json").exists():
            return _load_vision(vision, images).to(device, None if dtype == "auto" else dtype)
        if getattr(args, "config_only", False):
            config = AutoConfig.from_pretrained(args.model)
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config)
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype).eval().to(device)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(
            f"no language model could be loaded from {args.model!r}: {first_line(error)}\n"
            "A model of another kind is explained in Python: "
            "captum_ssm.MambaLRP(model).attribute(inputs), "
            "captum_ssm.estimate(captum_ssm.MambaLRP(model), inputs)."
        ) from error


def _load_vision(path: Path, wanted: bool) -> nn.Module:
    from safetensors.torch import load_file

    from captum_ssm.models import VisionMamba

    model = VisionMamba.from_state_dict(load_file(path))
    if not wanted:
        raise ValueError(
            "it holds a VisionMamba, which reads images; explain takes text. "
            "docs/how_to/images.md shows how images are explained."
        )
    return model


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        known = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        raise ValueError(
            f"--device is {name!r}, which torch {torch.__version__} cannot use here "
            f"({first_line(error)}); it can use {', '.join(known)}."
        ) from error
    return device


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
