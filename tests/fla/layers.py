"""Tiny random models of flash-linear-attention's layers."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from models import VOCABULARY, randomize
from torch import Tensor, nn

SHORT_CONV = {"use_short_conv": True, "conv_size": 3, "conv_bias": True}
RETENTION = {"num_heads": 2, "expand_k": 0.5, "expand_v": 2.0}
LINEAR = {"num_heads": 2, "expand_k": 0.5, "expand_v": 1.0, "gate_low_rank_dim": 4}
GATED_DELTA = {"num_heads": 2, "head_dim": 8, "expand_v": 0.5}
RWKV7 = {
    "head_dim": 8,
    "decay_low_rank_dim": 4,
    "gate_low_rank_dim": 4,
    "a_low_rank_dim": 4,
    "v_low_rank_dim": 4,
    "num_hidden_layers": 2,
}

# By name: the layer's module and class, and its options.
SPECS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "retnet": ("multiscale_retention", "MultiScaleRetention", RETENTION),
    "retnet_conv_groups": (
        "multiscale_retention",
        "MultiScaleRetention",
        RETENTION | SHORT_CONV | {"num_heads": 4, "num_kv_heads": 2, "fuse_norm": False},
    ),
    "retnet_no_gate": (
        "multiscale_retention",
        "MultiScaleRetention",
        RETENTION | {"use_output_gate": False},
    ),
    "hgrn": ("hgrn", "HGRNAttention", {}),
    "hgrn_conv": ("hgrn", "HGRNAttention", SHORT_CONV),
    "hgrn2": ("hgrn2", "HGRN2Attention", {"expand_ratio": 4}),
    "hgrn2_conv": ("hgrn2", "HGRN2Attention", {"expand_ratio": 4} | SHORT_CONV),
    "gla": ("gla", "GatedLinearAttention", LINEAR),
    "gla_conv_groups": (
        "gla",
        "GatedLinearAttention",
        LINEAR | SHORT_CONV | {"num_heads": 4, "num_kv_heads": 2, "clamp_min": -0.05},
    ),
    "rwkv6": (
        "rwkv6",
        "RWKV6Attention",
        {"num_heads": 2, "proj_low_rank_dim": 4, "gate_low_rank_dim": 4},
    ),
    "rwkv7": ("rwkv7", "RWKV7Attention", RWKV7),
    "rwkv7_fused": ("rwkv7", "RWKV7Attention", RWKV7 | {"fuse_norm": True}),
    "delta_net": ("delta_net", "DeltaNet", {"num_heads": 2} | SHORT_CONV),
    "delta_net_bare": (
        "delta_net",
        "DeltaNet",
        {
            "num_heads": 2,
            "use_gate": True,
            "use_short_conv": False,
            "allow_neg_eigval": True,
            "qk_activation": "elu",
            "qk_norm": "sum",
        },
    ),
    "gated_delta_net": ("gated_deltanet", "GatedDeltaNet", GATED_DELTA | SHORT_CONV),
    "gated_delta_net_groups": (
        "gated_deltanet",
        "GatedDeltaNet",
        GATED_DELTA
        | {"num_v_heads": 4, "allow_neg_eigval": True, "output_gate_activation": "sigmoid"},
    ),
    # One group: on a CPU, unlike in its kernels, the layer gives heads the wrong ones of several.
    "mamba2": ("mamba2", "Mamba2", {"head_dim": 8, "state_size": 4}),
    "mamba2_variant": (
        "mamba2",
        "Mamba2",
        {
            "head_dim": 8,
            "state_size": 4,
            "D_has_hdim": True,
            "norm_before_gate": True,
            "use_bias": True,
        },
    ),
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
