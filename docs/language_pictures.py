"""The pictures of the pages in docs/recipes of language models and Vision Mamba.

    python docs/language_pictures.py            # or the names of some pages

Models come with the package or lie in ``tutorials/models``. Small ones of the other classes are
trained on the same stories, within a minute each. What the pages say of the pictures is printed.
"""

from __future__ import annotations

import argparse
import copy
import sys
from functools import cache
from pathlib import Path

import matplotlib
import torch
import transformers
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks" / "language"))

import train as stories  # noqa: E402
from recipe_pictures import saved  # noqa: E402

from captum_ssm import (  # noqa: E402
    LaTIM,
    MambaLRP,
    UnifiedImplicitAttention,
    examples,
    hidden_attention,
    supported,
)
from captum_ssm.examples.digits import held_out_digits  # noqa: E402
from captum_ssm.interventions import knockout, states  # noqa: E402
from captum_ssm.visualization import image_overlay, layer_overview, map_strip  # noqa: E402

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

TEXT = "Tom has a kite. The dogs near the house behind the bird"
STORY = (
    "The dogs near the house bark. Tom has a blue kite. Anna has a red ball. "
    "Tom sings because he is happy. Anna's ball is red."
)
SMALL = {"hidden_size": 48}
SSD = {"mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16}
# By class: as benchmarks/language/train.py has its own.
SPECS = {
    "FalconMamba": SMALL | {"num_hidden_layers": 2, "time_step_min": 0.01},
    "Qwen3_5": {**stories.SPECS["qwen3next"][1]},
    "NemotronH": stories.ATTENTION
    | SMALL
    | {
        "head_dim": 12,
        "ssm_state_size": 16,
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "chunk_size": 16,
        "layers_block_type": ["mamba", "attention", "mlp", "mamba", "mlp"],
    },
    "FalconH1": stories.ATTENTION
    | SMALL
    | SSD
    | {"num_hidden_layers": 2, "head_dim": 12, "mamba_n_heads": 6, "mamba_d_ssm": 96},
    "Jamba": stories.ATTENTION
    | SMALL
    | {
        "num_hidden_layers": 3,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "num_experts": 2,
        "num_experts_per_tok": 1,
    },
    "Zamba2": stories.ATTENTION
    | SMALL
    | {
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "mamba_d_state": 16,
        "n_mamba_heads": 6,
        "mamba_headdim": 16,
        "mamba_ngroups": 1,
        "chunk_size": 16,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "hybrid_layer_ids": [1],
        "adapter_rank": 4,
        "num_mem_blocks": 1,
    },
    "xLSTM": SMALL
    | {"num_heads": 4, "num_hidden_layers": 2, "chunk_size": 16, "qk_dim_factor": 0.5}
    | {"use_cache": False},  # which is of other sizes than the states where these are rounded
}


@cache
def trained(prefix: str, steps: int = 500) -> nn.Module:
    """A small model of a class of transformers, trained on stories of up to 32 words."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{prefix}TextConfig", None)
    config = config or getattr(transformers, f"{prefix}Config")
    model = getattr(transformers, f"{prefix}ForCausalLM")(config(**stories.SHARED, **SPECS[prefix]))
    settings = {"seed": 0, "steps": steps, "batch": 32, "length": 32, "people": 3}
    rates = {"lr": 3e-3, "weight_decay": 0.01, "report_every": steps}
    stories.train(model, argparse.Namespace(architecture=prefix, **settings, **rates))
    right = stories.accuracy(model.eval(), 200, 3)["animal"]
    print(f"{prefix}: {right:.0%} of questions for an animal answered right")
    return model


def committed(name: str) -> nn.Module:
    folder = ROOT / "tutorials" / "models" / name
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def asked() -> tuple[Tensor, list[str], int, int]:
    """The text's ids and words, and the two answers."""
    _, tokenizer = examples.load("stories-mamba")
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    words = tokenizer.convert_ids_to_tokens(ids[0])
    return ids, words, tokenizer.vocab["bark"], tokenizer.vocab["sings"]


def margin(model: nn.Module, ids: Tensor) -> Tensor:
    *_, bark, sings = asked()
    logits = model(ids).logits[:, -1]
    return logits[:, bark] - logits[:, sings]


def why(name: str, model: nn.Module) -> Tensor:
    """Relevance of the margin; prints the share of the subject among the words before the last."""
    ids, words, *_ = asked()
    relevance = MambaLRP(lambda ids: margin(model, ids), model).attribute(ids)[0]
    share = relevance[:-1].abs() / relevance[:-1].abs().sum()
    found = float(margin(model, ids).detach())
    print(f"{name}: margin {found:.1f}, {share[words.index('dogs')]:.0%} dogs")
    return relevance


def mamba() -> None:
    models = {
        "Mamba": committed("stories-mamba"),
        "Mamba-2": committed("stories-mamba2"),
        "Falcon-Mamba": trained("FalconMamba"),
    }
    rows = {name: why(name, model) for name, model in models.items()}
    saved("mamba", layer_overview(rows, asked()[1]))


def qwen3_next() -> None:
    shown = {}
    for name, model in (
        ("Qwen3-Next", committed("stories-qwen3next")),
        ("Qwen3.5", trained("Qwen3_5")),
    ):
        why(name, model)
        for path, found in hidden_attention(model, asked()[0], reduction="mean").items():
            size = found[0].abs()
            kind = "attention" if "self_attn" in path else "delta rule"
            shown[f"{name}, {kind}\n{size.trace() / size.sum():.0%} on the diagonal"] = found[0]
            print(f"{name} {path}: {size.trace() / size.sum():.1%} on the diagonal")
    saved("qwen3_next", map_strip(list(shown.items()), columns=3))


def hybrids() -> None:
    ids = asked()[0]
    prefixes = {"Nemotron-H": "NemotronH", "Falcon-H1": "FalconH1", "Jamba": "Jamba"}
    kinds = ("attention", "recurrence")
    rows = {}
    for name, prefix in (prefixes | {"Zamba2": "Zamba2"}).items():
        model = trained(prefix)
        why(name, model)
        layers: dict[str, list[str]] = {kind: [] for kind in kinds}
        for mixer in supported(model, ids).mixers:
            layers[kinds["Attention" not in mixer.kind]].append(mixer.name)
        with torch.no_grad():
            rows[name] = [float(margin(model, ids))]
            for names in (*layers.values(), None):
                cut = {"sources": slice(0, -1), "targets": -1, "formulation": "unified"}
                with knockout(model, layers=names, **cut):
                    rows[name].append(float(margin(model, ids)))
        print(name, [f"{value:.1f}" for value in rows[name]])
        if name == "Nemotron-H":
            with_one_tap(model)
    figure, axis = plt.subplots(figsize=(8, 3.2))
    cuts = {"whole": "0.75", "attention": "#5299cd", "recurrence": "#ea8630", "any layer": "0.4"}
    for k, (cut, color) in enumerate(cuts.items()):
        label = cut if cut == "whole" else f"nothing read by {cut}"
        places = [x + 0.2 * (k - 1.5) for x in range(len(rows))]
        axis.bar(places, [row[k] for row in rows.values()], 0.19, label=label, color=color)
    axis.axhline(0, color="0.3", linewidth=0.8)
    axis.set_xticks(range(len(rows)), list(rows))
    axis.set_ylabel("logit of bark minus sings")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1))
    saved("hybrids", figure)


def with_one_tap(model: nn.Module) -> None:
    """Print the margin where the last word reads nothing and no convolution sees another word."""
    _, tokenizer = examples.load("stories-mamba")
    alone = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in alone.named_parameters():
            if name.endswith("conv1d.weight"):
                parameter[..., :-1] = 0
        for subject in ("dogs", "cats", "bird"):
            ids = tokenizer(TEXT.replace("dogs", subject), return_tensors="pt").input_ids
            with knockout(alone, sources=slice(0, -1), targets=-1, formulation="unified"):
                print(f"with one tap, nothing read, {subject}: {float(margin(alone, ids)):.2f}")


def linear_rnns() -> None:
    _, tokenizer = examples.load("stories-mamba")
    ids = tokenizer(STORY, return_tensors="pt").input_ids
    at = tokenizer.convert_ids_to_tokens(ids[0]).index("dogs")
    rest = ids.shape[1] - 1 - at
    figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), sharey=True)
    models = {"RecurrentGemma": committed("stories-recurrentgemma"), "xLSTM": trained("xLSTM")}
    for axis, (name, model) in zip(axes, models.items(), strict=True):
        why(name, model)
        for layer, state in enumerate(states(model, ids, positions=-1).values()):
            kept = state.memory_length(at).flatten().sort(descending=True).values
            places = (torch.arange(len(kept)) + 0.5) / len(kept) * 100
            axis.plot(places, kept.clamp(max=rest), ".-", label=f"layer {layer}")
            print(
                f"{name}, layer {layer}: half is left after a median of {kept.median():.0f} of "
                f"{rest} tokens; {(kept > rest).float().mean():.0%} of {len(kept)} keep it"
            )
        axis.set_title(name)
        axis.set_xlabel("channels" if name == "RecurrentGemma" else "heads")
        axis.set_xticks([])
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("tokens until half is left")
    saved("linear_rnns", figure)


def vim() -> None:
    model, _ = examples.load("digits-vim")
    samples = held_out_digits(40)
    chosen = [samples.labels.tolist().index(digit) for digit in (2, 5, 9)]
    images, labels, masks = (x[chosen] for x in (samples.images, samples.labels, samples.masks))
    kinds = {
        "MambaLRP": MambaLRP,
        "LaTIM": LaTIM,
        "UnifiedImplicitAttention": UnifiedImplicitAttention,
    }
    found = {
        name: kind(model).attribute(images, target=labels).detach() for name, kind in kinds.items()
    }
    for name, relevance in found.items():
        size = relevance.sum(1).abs()
        inside = size[masks.bool()].sum() / size.sum()
        print(f"{name}: {inside:.0%} of the relevance on the digits")
    print(f"{masks.float().mean():.0%} of the pixels are the digits'")
    shown = ((images + 0.5) / 2).clamp(0, 1)
    titles = [f"a {label}" for label in labels.tolist()]
    saved("vim", image_overlay(found, shown, titles=titles))


PAGES = (mamba, qwen3_next, hybrids, linear_rnns, vim)

if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    names = {page.__name__: page for page in PAGES}
    for asked_for in sys.argv[1:] or names:
        names[asked_for]()
