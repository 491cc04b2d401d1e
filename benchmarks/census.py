"""Every token mixer of transformers, mamba-ssm and flash-linear-attention: is it explained?

Each language model of the installed transformers is built at a tiny size, with random weights, and
run; the same with the layers of mamba-ssm and fla where they are installed. Of each class of mixers
it says how it is known and with which error its frozen operator reproduces its output, or why it is
refused. Classes that no tiny model here holds (vision, audio, encoders) are listed as not run.

    python benchmarks/census.py                      # print, and say what is new or has changed
    python benchmarks/census.py --save               # also write results/census.json and the docs
    python benchmarks/census.py lfm2 zaya            # some models only
    PYTHONPATH=. .venv-fla/bin/python benchmarks/census.py --package fla --save

`tests/properties/test_census.py` compares the names of the classes with the table on each change.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import inspect
import json
import re
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "benchmarks" / "results" / "census.json"
PAGE = ROOT / "docs" / "families.md"
BEGIN, END = "<!-- census: begin -->", "<!-- census: end -->"
sys.path.insert(0, str(ROOT / "tests"))

Row = dict[str, Any]
SECONDS = 120  # for one model
ENTRIES = 4_000_000  # of the weights of a model that still counts as tiny

# What the code of a module that mixes tokens holds: states of transformers' caches, scans, softmax.
RECURRENT = re.compile(
    r"update_recurrent_state\(|update_conv_state\(|_rnn_scan\(|rwkv_linear_attention\(|"
    r"mlstm_backend|slope_rate\b|selective_scan|chunk_scan|_delta_(rule|attention)\("
)
SOFTMAX = re.compile(r"get_interface\(|scaled_dot_product_attention\(|eager_attention_forward\(")
# Modules that are no mixers: blocks of mamba-ssm, and a table of Qwen4 in which hashes of ids are
# looked up, to whose values no map of tokens leads.
NO_MIXERS = ("Block", "GatedMLP", "Qwen4ExpTextNGramEmbedding", "Qwen4ExpTextPLELayer")
# The name, the bases and the body of each class of a file.
CLASS = re.compile(r"^class (\w+)\(([^)]*)\):\n((?:[ \t].*\n|\n)*)", re.MULTILINE)

# What makes a configuration tiny: names of its numbers, and what they become.
SIZES: tuple[tuple[str, int], ...] = (
    (r"(hidden_size|d_model|n_embd|dim|width|embedding_size|emb_dim|attention_hidden_size)", 32),
    (r"(num_hidden_layers|n_layers?|num_layers|decoder_layers|encoder_layers)", 2),
    (r"(swa_)?(num_attention_heads|n_heads?|num_heads|decoder_attention_heads|encoder_att\w+)", 4),
    (r"(head_dim|attention_head_size|kv_channels|v_head_dim|qk_nope_head_dim|\w+_head_dim)", 8),
    (r"qk_rope_head_dim", 4),
    (r"(qk_head_dim)", 12),
    (r"(\w*intermediate_size|\w*ffn_dim|n_inner|d_ff|ffn_hidden_size|inner_dim|lru_width)", 32),
    (r"vocab_size\w*|\w+_vocab_size", 64),
    (r"(num_experts|n_routed_experts|num_local_experts|moe_num_experts|router_num_experts)", 4),
    (r"(num_experts_per_tok\w*|moe_topk|moe_k|top_k_experts|experts_per_token)", 2),
    (r"(n_group|num_expert_group|topk_group|n_groups|mamba_n_groups)", 1),
    (r"\w*(lora_rank|low_rank\w*|lowrank|_rank)", 8),
    (r"(mamba_d_state|state_size|ssm_state_size|d_state)", 4),
    (r"\w*chunk_size", 8),
    (r"(linear_)?num_(key|value)_heads|linear_num_heads|linear_num_(key|value)_heads", 4),
    (r"(max_position_embeddings|n_positions|block_size|attention_window\w*|sliding_window)", 64),
    (r"(num_nextn_predict_layers|num_mtp_layers)", 0),
)


def main() -> None:
    """Count, print, and save if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", help="model types; all without one")
    parser.add_argument("--package", choices=("transformers", "mamba_ssm", "fla"), action="append")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--render", action="store_true", help="only write the docs from the table")
    options = parser.parse_args()
    if not options.render:
        warnings.filterwarnings("ignore")
        table = load()
        for package in options.package or ("transformers", "mamba_ssm"):
            found = COUNTS[package](options.models)
            whole = {k: v for k, v in table.get(package, {}).items() if options.models} | found
            for line in changes(table.get(package, {}), whole):
                print(line)
            table[package] = dict(sorted(whole.items()))
        if not options.save:
            return
        TABLE.write_text(json.dumps(table, indent=1) + "\n")
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{render(load())}{END}{rest.partition(END)[2]}")


def load() -> dict[str, dict[str, Row]]:
    """The committed table: by package and class."""
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def changes(before: dict[str, Row], after: dict[str, Row]) -> Iterator[str]:
    """What is new, gone, or known in another way."""
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if new is None:
            yield f"gone     {name}"
        elif old is None:
            yield f"new      {name}: {shown(new)}"
        elif old["known"] != new["known"]:
            yield f"changed  {name}: {shown(old)} -> {shown(new)}"


def shown(row: Row) -> str:
    """A row in words."""
    error = f", error {row['error']:.0e}" if "error" in row else ""
    on = f" on {row['on']}" if "on" in row else ""
    return f"{row['known']}{on}{error}{': ' + row['why'] if 'why' in row else ''}"


@functools.cache
def names_in(package: str) -> dict[str, bool]:
    """The mixers in a package's source, found without importing it, and whether each is recurrent.

    Classes of transformers that only compute softmax attention count where a language model
    is in the same file.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return {}
    pattern = {
        "transformers": "models/*/modeling_*.py",
        "mamba_ssm": "modules/*.py",
        "fla": "layers/*.py",
    }[package]
    found: dict[str, bool] = {}
    for path in sorted(Path(spec.origin).parent.glob(pattern)):
        text = path.read_text()
        is_language_output = "CausalLM(" in text
        if package == "transformers" and not (is_language_output or RECURRENT.search(text)):
            continue
        for name, bases, body in CLASS.findall(text):
            if "Module" not in bases or "def forward(" not in body or name in NO_MIXERS:
                continue
            if package != "transformers" or RECURRENT.search(body):
                found[name] = True
            elif is_language_output and SOFTMAX.search(body):
                found[name] = False
    return found


def count_transformers(only: list[str]) -> dict[str, Row]:
    """A row for each language model of the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    found: dict[str, Row] = {}
    extra = {"glm5_next": "Glm5NextForConditionalGeneration"}
    for kind, name in sorted((dict(NAMES) | extra).items()):
        if not only or kind in only:
            report(kind, found, lambda k=kind, n=name: language_model(k, n))
    if not only:
        for name in names_in("transformers"):
            found.setdefault(name, {"known": "not run"})
    return found


def report(
    kind: str,
    found: dict[str, Row],
    build: Callable[[], tuple[nn.Module, Tensor]],
    package: str = "transformers",
) -> None:
    """Add the mixers of a model that is built here; print them, or why it was not built."""
    try:
        with time_limit():
            model, inputs = build()
            with torch.no_grad():
                model(inputs)
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        print(f"{kind:28} not built: {why}", flush=True)
        if package != "transformers":
            found.setdefault(kind, {"known": "not run", "why": why})
        return
    for name, row in mixers_of(model, inputs, package).items():
        print(f"{kind:28} {name:34} {shown(row)}", flush=True)
        if name not in found or found[name]["known"] in ("refused", "part"):
            found[name] = row


def mixers_of(model: nn.Module, inputs: Tensor, package: str = "transformers") -> dict[str, Row]:
    """By class, how the mixers of a model are explained."""
    from captum_ssm import UnsupportedModelError
    from captum_ssm.capture import Request, freeze
    from captum_ssm.discovery.measure import FrozenRecurrence
    from captum_ssm.inspection.support import support_of

    names = names_in(package)
    held = {type(m).__name__ for m in model.modules()} & names.keys()
    found: dict[str, Row] = {}
    try:
        with time_limit():
            frozen = freeze(Request.of(model, None, inputs, None), query=False, check=False)
            for layer in frozen.layers:
                one = support_of(frozen, layer)
                if one.problem is not None:
                    found[one.kind] = {"known": "refused", "why": one.problem}
                elif isinstance(layer.mixer, FrozenRecurrence):
                    found[one.kind] = {"known": "scans alone", "why": missing(layer.mixer)}
                elif found.get(one.kind, {}).get("known") != "refused":
                    worst = max(one.error, found.get(one.kind, {}).get("error", 0.0))
                    found[one.kind] = {"known": one.known, "error": float(f"{worst:.0e}")}
            for layer in frozen.layers:
                module = layer.source.module
                inside = held & {type(part).__name__ for part in module.modules()} - found.keys()
                why = f"of {type(module).__name__}"
                found |= {name: {"known": "part", "why": why} for name in inside}
            held -= found.keys()
    except UnsupportedModelError as error:
        return {name: {"known": "refused", "why": nearest(error, name)} for name in held}
    except Exception as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        return {name: {"known": "refused", "why": why} for name in held}
    return found | {k: {"known": "refused", "why": "no scan of it was found"} for k in held}


def missing(mixer: Any) -> str:
    """What of a mixer could not be measured."""
    said = re.search(r"could be measured: (.*?)\. Methods", str(mixer.missing))
    return said.group(1) if said else first_line(mixer.missing)


def nearest(error: Exception, name: str) -> str:
    """What the message about a model without mixers says of a class."""
    said = re.search(r"cannot be measured: (.*?)\. Register", str(error))
    said = said or re.search(rf"\({name}\) ([^;.]+)", str(error))
    return said.group(1) if said else "no scan of it was found"


def first_line(error: Exception) -> str:
    """The first line of a message, shortened."""
    return (str(error).strip().splitlines() or [""])[0][:160]


def language_model(kind: str, name: str) -> tuple[nn.Module, Tensor]:
    """A tiny model of transformers, and ids."""
    import transformers
    from families import SPECS, build
    from models import S6_FAMILIES, VOCABULARY, ids, randomize

    if kind in SPECS or kind in S6_FAMILIES:
        return build(kind), ids(2, 11)
    cls = getattr(transformers, name)
    config = cls.config_class(**tiny(cls.config_class))
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(config).parameters())
    if size > ENTRIES:
        raise ValueError(f"{size} weights at the sizes that this script knows")
    return randomize(cls(config)).eval(), ids(2, 11) % min(VOCABULARY, 37)


def tiny(config_type: Any) -> dict[str, Any]:
    """Arguments that make a configuration tiny."""
    base = config_type()
    given = base.to_dict()
    found: dict[str, Any] = {}
    layers = given.get("layer_types")
    kinds = list(dict.fromkeys(layers)) if isinstance(layers, list) and layers else []
    count = max(2, len(kinds))
    for name, value in given.items():
        if isinstance(value, dict) and name.endswith("_config"):
            inner = type(getattr(base, name))
            if hasattr(inner, "to_dict"):
                found[name] = tiny(inner)
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if name.endswith("_token_id"):
            found[name] = min(value, 2)
            continue
        for pattern, size in SIZES:
            if re.fullmatch(pattern, name) and value > 0:
                found[name] = size
                break
    for name in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if name in found:
            found[name] = count
    for name in ("num_key_value_heads", "swa_num_key_value_heads"):
        if isinstance(given.get(name), int):
            of = name.replace("key_value", "attention")
            same = given[name] == given.get(of)
            found[name] = 4 if same else min(given[name], 2)
    if kinds:
        found["layer_types"] = (kinds * count)[:count]
    for name in ("mlp_layer_types", "indexer_types"):
        if isinstance(given.get(name), list):
            found[name] = (list(dict.fromkeys(given[name])) * count)[:count]
    return found | EXCEPTIONS.get(base.model_type, {})


# What the rules above do not get right, by model type.
EXCEPTIONS: dict[str, dict[str, Any]] = {}


@contextmanager
def time_limit() -> Iterator[None]:
    """Raise TimeoutError after a while."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def count_mamba_ssm(only: list[str]) -> dict[str, Row]:
    """A row for each of mamba-ssm's modules, run on a CPU by its reference functions."""
    from mamba_ssm_cpu import on_cpu
    from models import randomize

    found: dict[str, Row] = {name: {"known": "not run"} for name in names_in("mamba_ssm")}
    with on_cpu() as package:
        heads = {"d_state": 8, "headdim": 8}
        sizes = {"Mamba": {"d_state": 4}, "Mamba2": heads, "Mamba2Simple": heads, "Mamba3": heads}
        for name, options in sizes.items():
            mixer = getattr(package, name)(16, **options)
            model = nn.Sequential(nn.Linear(16, 16), randomize(mixer), nn.Linear(16, 5)).eval()
            found[name] = mixers_of(model, torch.randn(2, 9, 16), "mamba_ssm")[name]
            print(f"{'mamba_ssm':28} {name:34} {shown(found[name])}", flush=True)
    return found


def count_fla(only: list[str]) -> dict[str, Row]:
    """A row for each of fla's layers, on a CPU by Triton's interpreter."""
    path = ROOT / "tests" / "fla" / "conftest.py"  # which sets the interpreter up
    spec = importlib.util.spec_from_file_location("fla_conftest", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    naive = on_cpu()
    modules = [m for path, m in sys.modules.items() if path.startswith("fla.layers.")]
    found: dict[str, Row] = {}
    for name in names_in("fla"):
        kind = next(getattr(module, name) for module in modules if hasattr(module, name))
        if not only or name in only:
            report(name, found, lambda k=kind: (fla_model(k), token_ids()), "fla")
            row = found[name]
            if row["known"] in ("refused", "not run") and name in REASONS:
                row["why"] = REASONS[name]
            if "error" in row and kind.__module__.rpartition(".")[2] in naive:
                row["on"] = "fla's naive form"
    return found


def on_cpu(setattr: Callable[..., None] = setattr) -> frozenset[str]:
    """Let fla's layers run where kernels do not: on its naive forms, or its recurrences.

    ``setattr`` puts them in; a test passes one that undoes it. The files of the layers that run on
    naive forms are returned.
    """
    importlib.import_module("fla.layers.simple_gla")  # which fla.layers leaves out
    sys.path.insert(0, str(ROOT / "tests" / "fla"))
    standins = importlib.import_module("standins")
    standins.install(setattr)
    without_chunks(setattr)
    return frozenset(standins.LAYERS)


def without_chunks(setattr: Callable[..., None]) -> None:
    """Let fla's layers run their recurrences, where the interpreter fails at kernels of chunks."""
    modules = [m for name, m in sys.modules.items() if name.startswith("fla.layers.")]
    for module in modules:
        for name, function in list(vars(module).items()):
            kind, _, rest = name.partition("_")
            if kind != "chunk" or not function.__module__.startswith("fla.ops."):
                continue
            ops = sys.modules[function.__module__.rpartition(".")[0]]
            other = getattr(ops, f"fused_recurrent_{rest}", None)
            if other is not None:
                taken = inspect.signature(other).parameters
                setattr(module, name, functools.partial(_with_some, other, frozenset(taken)))


def _with_some(function: Callable[..., Any], taken: frozenset[str], **given: Any) -> Any:
    # GLA's kernel of chunks and its recurrence call the decay by two names.
    if "gk" in taken and "g" in given and "g" not in taken:
        given["gk"] = given.pop("g")
    left_out = [name for name, value in given.items() if name not in taken]
    assert not any(torch.is_tensor(given[name]) for name in left_out), left_out
    return function(**{name: value for name, value in given.items() if name in taken})


def token_ids() -> Tensor:
    """Two texts of nine ids."""
    from models import ids

    return ids(2, 9)


def fla_model(kind: Any, **others: Any) -> OneLayer:
    """A model of one layer of fla; ``others`` are sizes and options in the place of those here."""
    own = FLA_OPTIONS.get(kind.__name__, {})
    sizes = FLA_SIZES | own | others
    taken = {*inspect.signature(kind.__init__).parameters, *own}
    layer = kind(**{name: size for name, size in sizes.items() if name in taken})
    return OneLayer(layer, sizes["hidden_size"])


class OneLayer(nn.Module):
    """One layer in a residual stream, with random weights."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        from models import VOCABULARY, randomize

        self.embedding = nn.Embedding(VOCABULARY, width)
        self.norm = nn.LayerNorm(width)
        self.takes_mask = "attention_mask" in inspect.signature(layer.forward).parameters
        self.layer = layer
        self.final_norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)
        randomize(self).eval()

    def get_input_embeddings(self) -> nn.Module:
        """The embedding of tokens."""
        return self.embedding

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits, (B, L, V)."""
        h = self.embedding(input_ids)
        passed = {"attention_mask": attention_mask} if self.takes_mask else {}
        out = self.layer(self.norm(h), **passed)
        h = h + (out[0] if isinstance(out, tuple) else out)
        return self.head(self.final_norm(h))


# Options of fla's layers, by name.
FLA_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_heads": 2,
    "head_dim": 16,
    "layer_idx": 0,
    "state_size": 16,
    "num_hidden_layers": 2,
    "expand_k": 1.0,
    "expand_v": 1.0,
    "num_slots": 16,
    "gate_low_rank_dim": 8,
    "decay_low_rank_dim": 8,
    "a_low_rank_dim": 8,
    "v_low_rank_dim": 8,
    "proj_low_rank_dim": 8,
}
# Why single layers are not explained, where what was raised does not say it.
REASONS = {
    "LogLinearMamba2": "needs a GPU; its naive form is explained",
    "Mamba3": "needs mamba-ssm's kernels on a GPU; mamba-ssm's own Mamba3 is explained",
    "MoBA": "needs the inner kernels of flash-attn",
    "MomAttention": "its tokens are sorted into memories, and no recurrence runs over all",
    "StickBreakingAttention": "needs a GPU; its naive form is explained",
    "YOCOCrossAttention": "mixes values that another layer projected, of which it is not told",
    "YOCOSharedKVBuilder": "mixes no tokens: it projects keys and values for other layers",
}
# And of single layers.
FLA_OPTIONS: dict[str, dict[str, Any]] = {
    "BasedLinearAttention": {"num_key_value_heads": 2, "feature_dim": 8},
    "HGRN2Attention": {"expand_ratio": 16},
    "Mamba": {"intermediate_size": 64},
    "Mamba2": {"num_heads": 4, "chunk_size": 64},
    "LogLinearMamba2": {"num_heads": 4},
    "MultiheadLatentAttention": {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "qk_head_dim": 24,
        "v_head_dim": 16,
    },
    "NativeSparseAttention": {
        "num_heads": 16,
        "num_kv_heads": 1,
        "block_size": 4,
        "block_counts": 1,
        "window_size": 3,
    },
    "Raven": {"topk": 4},
    "ReBasedLinearAttention": {"num_key_value_heads": 2},
    "RodimusAttention": {"expand_ratio": 16},
}


COUNTS = {"transformers": count_transformers, "mamba_ssm": count_mamba_ssm, "fla": count_fla}


def render(table: dict[str, dict[str, Row]]) -> str:
    """The table for the docs."""
    lines = ["| package | class | explained | error |", "|---|---|---|---|"]
    short: list[str] = []
    for package, rows in table.items():
        recurrent = {name for name, scans in names_in(package).items() if scans}
        others: dict[str, list[str]] = {}
        for name, row in rows.items():
            if name in recurrent or package != "transformers":
                error = f"{row['error']:.0e}" if "error" in row else ""
                why = f" on {row['on']}" if "on" in row else ""
                why += f": {row['why']}" if "why" in row else ""
                lines.append(f"| {package} | `{name}` | {row['known']}{why} | {error} |")
            else:
                others.setdefault(row["known"], []).append(f"`{name}`")
        for known, names in sorted(others.items()):
            short.append(f"Softmax attention, {known} ({len(names)}): {', '.join(names)}.")
    return "\n".join([*lines, "", *(line + "\n" for line in short), ""])


if __name__ == "__main__":
    main()
