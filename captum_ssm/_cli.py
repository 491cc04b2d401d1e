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
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import captum_ssm
from captum_ssm._frozen import (
    TOLERANCE,
    FrozenLayer,
    check_inputs,
    exact_arithmetic,
    extract_logits,
    freeze,
)
from captum_ssm._memory import estimate, readable_bytes, tensors_of
from captum_ssm.generation import continuation_relevance
from captum_ssm.mixers import find_adapter, find_mixers
from captum_ssm.ops import ExtensionWarning

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
PROBE_LENGTH = 16


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
    explain.add_argument(
        "--target",
        help="the explained continuation (with --ids: token ids); one row a token. "
        "Default: the token the model predicts",
    )
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
            f"no tokenizer could be loaded from {name!r} ({_first_line(why)}); pass token ids "
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
                    f"{name} is {text!r}; with --ids it has to be token ids such as '3,1,4'."
                ) from None
        if not found:
            raise ValueError(f"{name} is {text!r}, which holds no token.")
        return torch.tensor(found)

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
    model = _load(args)
    found = list(find_mixers(model))
    kinds: dict[str, list[str]] = {}
    for path, module in found:
        kinds.setdefault(type(module).__name__, []).append(path)
    print(f"{type(model).__name__}, {_count(_parameters(model)).strip()} parameters")
    print(f"{len(found)} token mixers that captum_ssm knows:")
    modules = dict(found)
    for kind, paths in kinds.items():
        print(f"  {len(paths):3d} x {kind:28s} {paths[0]} .. {paths[-1]}")
        print(f"        {_family(modules[paths[0]])}")
    if not found:
        known = ", ".join(captum_ssm.mixers.registered())
        raise captum_ssm.UnsupportedModelError(
            f"{type(model).__name__} holds no token mixer that captum_ssm knows. Supported: "
            f"{known}. A new one is taught with captum_ssm.register_mixer."
        )
    if args.config_only:
        print("\nno weights were loaded, so nothing was run: leave out --config-only for the rest")
        return

    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    vocabulary = embeddings.num_embeddings
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (1, PROBE_LENGTH), generator=generator).to(args.device)
    frozen = freeze(model, None, ids, query=False, check=False)
    with exact_arithmetic():
        rows = [_Probe.of(layer) for layer in frozen.layers]
    print(
        f"\nfrozen at {PROBE_LENGTH} random tokens (error: frozen mixer against the mixer itself)"
    )
    print(f"  {'mixer':52s} {'maps':>6s} {'error':>9s}")
    # Equal neighbours on one line.
    for _, group in groupby(rows, key=lambda row: (row.kind, row.maps, row.fits)):
        same = list(group)
        name = same[0].path if len(same) == 1 else f"{same[0].path} .. {same[-1].path}"
        error = max(row.error for row in same)
        verdict = "" if same[0].fits else "  NOT reproduced: methods raise ReconstructionError"
        print(f"  {name:52s} {same[0].maps:6d} {error:9.1e}{verdict}")
    if any(row.activated for row in rows):
        print("  LaTIM: exact with activation='gate'; the other choices approximate SiLU")
    _print_costs(model, rows, ids[:, :1].expand(-1, args.length))


@dataclass(frozen=True)
class _Probe:
    # What a short run tells of one mixer.
    path: str
    kind: str
    maps: int
    channels: int
    width: int
    error: float
    fits: bool
    activated: bool
    numbers: int  # that its frozen form holds for each token

    @classmethod
    def of(cls, layer: FrozenLayer) -> _Probe:
        mixer = layer.mixer
        expected = layer.call.output
        rebuilt = mixer.output()
        error = float((rebuilt - expected).abs().max() / expected.abs().max().clamp(min=1e-12))
        _, length, channels, maps = mixer.recurrence.sizes
        return cls(
            layer.name,
            type(layer.call.module).__name__,
            maps,
            channels,
            expected.shape[-1],
            error,
            error <= TOLERANCE[expected.dtype],
            mixer.activation is not None,
            sum(t.numel() for t in tensors_of(mixer)) // length,
        )


def _print_costs(model: nn.Module, rows: list[_Probe], ids: Tensor) -> None:
    L, E = ids.shape[1], rows[0].width
    forward = 2 * _parameters(model) * L
    recorded = sum(2 * 4 * L * row.width for row in rows)  # each mixer's input and output

    def of(request: str, **options: Any) -> tuple[float, float]:
        found = estimate(model, ids, request=request, **options)
        return found.total_bytes, found.flops

    vectors = sum(2 * L * L * row.channels * row.width for row in rows)
    costs = {
        "raw-attention, rollout": of("row"),
        "unified, raw or rollout": of("row", formulation="unified"),
        "mamba-attribution": of("streamed"),
        "unified, attribution": of("streamed", formulation="unified"),
        # Tiles of 64 rows of vectors; then a graph through everything, and its gradients.
        "latim": (2 * recorded + 4 * 64 * L * E, vectors),
        "mamba-lrp": (4 * recorded + 4 * L * sum(row.numbers for row in rows), 2 * forward),
        "rollout, all rows": of("rollout"),
        "hidden_attention, mean of each layer": of("hidden_attention", reduction="mean"),
        "hidden_attention, all maps": of("hidden_attention"),
    }
    print(
        f"\nroughly, for one text of {L} tokens, beside one forward pass of {_count(forward)}FLOP:"
    )
    print(f"  {'':42s} {'memory':>10s} {'FLOP':>10s}")
    for name, (memory, work) in costs.items():
        print(f"  {name:42s} {readable_bytes(memory):>10s} {_count(work):>10s}")


def _family(module: nn.Module) -> str:
    adapter = find_adapter(module)
    home = sys.modules.get(getattr(adapter, "__module__", ""))
    return _first_line(home.__doc__ or "") if home is not None else ""


# both


def _load(args: argparse.Namespace) -> nn.Module:
    import transformers

    auto = transformers.AutoModelForCausalLM
    try:
        if getattr(args, "config_only", False):
            config = transformers.AutoConfig.from_pretrained(args.model)
            with torch.device("meta"):
                return auto.from_config(config)
        dtype = args.dtype if args.dtype == "auto" else getattr(torch, args.dtype)
        return auto.from_pretrained(args.model, dtype=dtype).eval().to(args.device)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ValueError(
            f"no language model could be loaded from {args.model!r}: {_first_line(error)}"
        ) from error


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


def _first_line(value: Any) -> str:
    text = str(value).strip()
    return text.splitlines()[0] if text else type(value).__name__


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _count(value: float) -> str:
    for unit in (" ", " k", " M", " G", " T"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g} P"
