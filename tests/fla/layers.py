"""Tiny random models of flash-linear-attention's layers."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from models import VOCABULARY, randomize
from torch import Tensor, nn

SHORT_CONV = dict(use_short_conv=True, conv_size=3, conv_bias=True)
RETENTION = dict(num_heads=2, expand_k=0.5, expand_v=2.0)
LINEAR = dict(num_heads=2, expand_k=0.5, expand_v=1.0, gate_low_rank_dim=4)
GROUPS = dict(SHORT_CONV, num_heads=4, num_kv_heads=2)
GATED_DELTA = dict(num_heads=2, head_dim=8, expand_v=0.5)
BARE_DELTA = dict(
    use_gate=True, use_short_conv=False, allow_neg_eigval=True, qk_activation="elu", qk_norm="sum"
)
RWKV7 = dict(
    head_dim=8,
    decay_low_rank_dim=4,
    gate_low_rank_dim=4,
    a_low_rank_dim=4,
    v_low_rank_dim=4,
    num_hidden_layers=2,
)
# One group: on a CPU, unlike in its kernels, the layer gives heads the wrong ones of several.
MAMBA2 = dict(head_dim=8, state_size=4, chunk_size=64)

# By module: the layer's class, and the options of each variant.
VARIANTS: dict[tuple[str, str], dict[str, dict[str, Any]]] = {
    ("multiscale_retention", "MultiScaleRetention"): {
        "retnet": RETENTION,
        "retnet_conv_groups": RETENTION | GROUPS | dict(fuse_norm=False),
        "retnet_no_gate": RETENTION | dict(use_output_gate=False),
    },
    ("hgrn", "HGRNAttention"): {"hgrn": {}, "hgrn_conv": SHORT_CONV},
    ("hgrn2", "HGRN2Attention"): {
        "hgrn2": dict(expand_ratio=4),
        "hgrn2_conv": dict(SHORT_CONV, expand_ratio=4),
    },
    ("gla", "GatedLinearAttention"): {
        "gla": LINEAR,
        "gla_conv_groups": LINEAR | GROUPS | dict(clamp_min=-0.05),
    },
    ("rwkv6", "RWKV6Attention"): {
        "rwkv6": dict(num_heads=2, proj_low_rank_dim=4, gate_low_rank_dim=4)
    },
    ("rwkv7", "RWKV7Attention"): {"rwkv7": RWKV7, "rwkv7_fused": RWKV7 | dict(fuse_norm=True)},
    ("delta_net", "DeltaNet"): {
        "delta_net": dict(SHORT_CONV, num_heads=2),
        "delta_net_bare": dict(BARE_DELTA, num_heads=2),
    },
    ("gated_deltanet", "GatedDeltaNet"): {
        "gated_delta_net": GATED_DELTA | SHORT_CONV,
        "gated_delta_net_groups": GATED_DELTA
        | dict(num_v_heads=4, allow_neg_eigval=True, output_gate_activation="sigmoid"),
    },
    ("mamba2", "Mamba2"): {
        "mamba2": MAMBA2,
        "mamba2_variant": MAMBA2 | dict(D_has_hdim=True, norm_before_gate=True, use_bias=True),
    },
}
# By name: the layer's module and class, and its options.
SPECS: dict[str, tuple[str, str, dict[str, Any]]] = {
    name: (*layer, options)
    for layer, variants in VARIANTS.items()
    for name, options in variants.items()
}
LAYERS = tuple(SPECS)


class Model(nn.Module):
    """A language model of two layers of one kind, each in a residual stream."""

    def __init__(self, name: str) -> None:
        super().__init__()
        module, kind, options = SPECS[name]
        layer = getattr(importlib.import_module(f"fla.layers.{module}"), kind)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.layers = nn.ModuleList(layer(hidden_size=16, layer_idx=i, **options) for i in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.final_norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, VOCABULARY)
        self.name = name

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        h, passed = self.embedding(input_ids), {}
        if self.name.startswith("hgrn"):
            passed["lower_bound"] = torch.linspace(0.1, 0.4, 16)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            out = layer(norm(h), attention_mask=attention_mask, **passed)
            if self.name.startswith("rwkv7"):
                passed["v_first"] = out[-1]
            h = h + out[0]
        return self.head(self.final_norm(h))


def build(name: str, seed: int = 0) -> nn.Module:
    """A random model of a layer, in eval mode and float32."""
    return randomize(Model(name), seed).eval()
