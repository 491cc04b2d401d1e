"""The command line: explain one text, or say what of a model is supported.

    python -m captum_ssm explain --model state-spaces/mamba-130m-hf \\
        --text "The capital of France is" --target " Paris" --method latim --output out.html
    python -m captum_ssm supported state-spaces/mamba-130m-hf
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import captum_ssm
from captum_ssm._capture.request import check_inputs
from captum_ssm._capture.target import extract_logits
from captum_ssm._supported import first_line, report
from captum_ssm.generation import continuation_relevance
from captum_ssm.kernels import ExtensionWarning

METHODS: dict[str, Any] = {
    "raw-attention": captum_ssm.RawAttention,
    "rollout": captum_ssm.MambaRollout,
    "mamba-attribution": captum_ssm.MambaAttribution,
    "unified": captum_ssm.UnifiedImplicitAttention,
    "latim": captum_ssm.LaTIM,
    "mamba-lrp": captum_ssm.MambaLRP,
}
# By flag: the methods that take it, and the name of their argument.
OPTIONS: dict[str, dict[str, str]] = {
    "layer": {"raw-attention": "layers", "latim": "layer"},
    "start_layer": {
        "rollout": "start_layer",
        "mamba-attribution": "start_layer",
        "unified": "start_layer",
    },
    "aggregation": {"unified": "aggregation", "latim": "aggregation"},
    "activation": {"latim": "activation"},
}
PICTURES = (".png", ".svg", ".pdf")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status, 0 or 1.

    Args:
        arguments (sequence of str, optional): in place of those of the process. Default: None
    """
    args = _parser().parse_args(arguments)
    with warnings.catch_warnings(), _quiet_loading():
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
    )
    explain.set_defaults(run=_explain)
    explain.add_argument("--model", required=True, help="a hub name, or a folder")
    given = explain.add_mutually_exclusive_group(required=True)
    given.add_argument("--text", help="the text the model reads")
    given.add_argument("--ids", help="token ids in its place, such as '3,1,4'")
    explain.add_argument("--method", choices=METHODS, default="latim", help="default: latim")
    wanted = explain.add_mutually_exclusive_group()
    wanted.add_argument(
        "--target",
        help="the explained continuation (with --ids: token ids); one row a token. "
        "Default: the token the model predicts",
    )
    wanted.add_argument("--target-ids", help="its token ids in its place, such as '3,1,4'")
    explain.add_argument(
        "--position",
        type=int,
        help="explain what the model predicts at this token of the text, not at the last",
    )
    explain.add_argument(
        "--layer", help="one layer, by index or module path (raw-attention, latim)"
    )
    explain.add_argument(
        "--start-layer",
        type=int,
        help="the first layer of the product (rollout, mamba-attribution, unified)",
    )
    explain.add_argument(
        "--aggregation",
        help="latim: alti_logit, alti, l1, l2, or a number; unified: raw, rollout, attribution",
    )
    explain.add_argument("--activation", help="latim: silu, taylor1, taylor2, relu, identity, gate")
    explain.add_argument(
        "--output", type=Path, help="write a page (.html) or a picture (.png, .svg, .pdf)"
    )
    _add_loading(explain)

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


# explain


def _explain(args: argparse.Namespace) -> None:
    options = _options(args)
    if args.output is not None and args.output.suffix not in (".html", *PICTURES):
        raise ValueError(
            f"--output is {args.output}; accepted are names that end in .html, "
            f"{', '.join(PICTURES)}."
        )
    vocabulary = _Vocabulary.load(args.model) if args.text is not None else _Vocabulary(None)
    prompt = vocabulary.encode(args.text if args.text is not None else args.ids, "the text")
    model = _load(args)
    prompt = prompt.to(args.device)
    target = None
    if args.target is not None:
        target = vocabulary.encode(args.target, "--target", special=False)
        vocabulary.require_known(args.target, target)
    elif args.target_ids is not None:
        target = _Vocabulary(None).encode(args.target_ids, "--target-ids")
    method = METHODS[args.method](model)
    explained = _explained(model, method, prompt, target, args.position, options)
    explained.report(vocabulary)
    if args.output is not None:
        title = f"{args.method}: {args.model}"
        args.output.parent.mkdir(parents=True, exist_ok=True)
        explained.write(args.output, vocabulary, title)
        print(f"\nwrote {args.output}")


def _options(args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for flag, names in OPTIONS.items():
        value = getattr(args, flag)
        if value is None:
            continue
        if args.method not in names:
            raise ValueError(
                f"--{flag.replace('_', '-')} is for {' and '.join(names)}; the method is "
                f"{args.method}."
            )
        found[names[args.method]] = _number(value)
    return found


def _number(value: Any) -> Any:
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


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

    def encode(self, text: str, name: str, special: bool = True) -> Tensor:
        if self.tokenizer is not None:
            found = self.tokenizer.encode(text, add_special_tokens=special)
        else:
            try:
                found = [int(part) for part in text.replace(",", " ").split()]
            except ValueError:
                raise ValueError(
                    f"{name} is {text!r}; it has to be token ids such as '3,1,4'."
                ) from None
        if not found:
            raise ValueError(f"{name} is {text!r}, which holds no token.")
        return torch.tensor(found)

    def require_known(self, text: str, ids: Tensor) -> None:
        """Raise where the tokenizer put its unknown token for a part of ``text``."""
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        asked = unknown is not None and self.tokenizer.unk_token in text
        if unknown is None or asked or unknown not in ids.tolist():
            return
        known = sorted(set(self.tokenizer.get_vocab()) - set(self.tokenizer.all_special_tokens))
        near = get_close_matches(text.strip(), known, n=5)
        shown = [*near, *(token for token in known if token not in near)][:20]
        raise ValueError(
            f"--target is {text!r}, which the tokenizer reads as {' '.join(self.tokens(ids))}: "
            f"a part of it is not in the vocabulary. Among its {len(known)} tokens are "
            f"{', '.join(shown)}; --target-ids takes ids in place of words."
        )

    def tokens(self, ids: Tensor) -> list[str]:
        if self.tokenizer is None:
            return [str(i) for i in ids.tolist()]
        return self.tokenizer.convert_ids_to_tokens(ids.tolist())


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
    if position is not None and target is not None and target.numel() > 1:
        raise ValueError(
            f"--target has {target.numel()} tokens, but with --position it has to be one: the "
            "token the model may predict there."
        )
    if position is not None and not -P <= position < P:
        raise ValueError(f"--position is {position}; the text has {P} tokens, 0 .. {P - 1}.")
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
        raise ValueError(f"--length is {args.length}; at least one token is needed.")
    report(_load(args, images=True), args.length, with_weights=not args.config_only)


# both


def _load(args: argparse.Namespace, images: bool = False) -> nn.Module:
    import transformers

    auto = transformers.AutoModelForCausalLM
    device = _device(args.device)
    dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
    vision = Path(args.model, "model.safetensors")
    try:
        if vision.exists() and not Path(args.model, "config.json").exists():
            return _load_vision(vision, images).to(device, None if dtype == "auto" else dtype)
        if getattr(args, "config_only", False):
            config = transformers.AutoConfig.from_pretrained(args.model)
            with torch.device("meta"):
                return auto.from_config(config)
        return auto.from_pretrained(args.model, dtype=dtype).eval().to(device)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(
            f"no language model could be loaded from {args.model!r}: {first_line(error)}\n"
            "A model of another kind is explained in Python: "
            "captum_ssm.LaTIM(model).attribute(inputs), captum_ssm.estimate(model, inputs)."
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
def _quiet_loading() -> Iterator[None]:
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
