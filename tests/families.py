"""Tiny random models of every architecture family of transformers, hybrids and all."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from models import S6_FAMILIES, SHARED, VOCABULARY, built_once, randomize, tiny
from torch import Tensor, nn

try:
    from transformers.initialization import no_init_weights
except ImportError:  # transformers 4
    from transformers.modeling_utils import no_init_weights

TRANSFORMERS_4 = transformers.__version__.startswith("4.")
ATTENTION = dict(intermediate_size=24, num_attention_heads=4, num_key_value_heads=2)
HEADS = dict(num_heads=4, head_dim=8, n_groups=2, chunk_size=8)
MAMBA2 = dict(
    mamba_n_heads=4, mamba_d_head=8, mamba_n_groups=2, mamba_d_state=4, mamba_chunk_size=8
)
LINEAR_FIRST = dict(
    num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"]
)
DELTA = dict(
    LINEAR_FIRST,
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=4,
    linear_conv_kernel_dim=4,
)
EXPERTS = dict(
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)
FALCON_H1 = dict(
    **ATTENTION,
    **MAMBA2,
    num_hidden_layers=2,
    mamba_d_ssm=32,
    head_dim=4,
    # Every multiplier differs from one, and from the others.
    ssm_multipliers=[0.5, 0.7, 1.2, 0.9, 1.1],
    ssm_in_multiplier=1.3,
    ssm_out_multiplier=0.8,
    attention_in_multiplier=1.1,
    attention_out_multiplier=0.7,
    key_multiplier=0.6,
)
# The chunked form of transformers 4 fails by itself; a sequence within one chunk does not.
ONE_CHUNK = 128 if TRANSFORMERS_4 else 8
XLSTM = dict(
    num_heads=2, num_hidden_layers=2, chunk_size=ONE_CHUNK, qk_dim_factor=0.5, use_cache=False
)
GEMMA = dict(num_key_value_heads=1, num_hidden_layers=3, lru_width=16, attention_window_size=5)
KIMI = dict(
    num_attention_heads=2,
    linear_num_heads=2,
    linear_head_dim=8,
    linear_conv_kernel_dim=4,
    num_experts=2,
    num_experts_per_token=1,
    moe_intermediate_size=16,
    kv_lora_rank=8,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    first_k_dense_replace=1,
)
KDA = dict(linear_num_heads=2, linear_head_dim=8, linear_conv_kernel_dim=4)
LATENT = dict(kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
SHORT_CONV = dict(num_hidden_layers=2, layer_types=["conv", "full_attention"])
INKLING = dict(
    ATTENTION,
    head_dim=8,
    num_hidden_layers=2,
    layer_types=["hybrid_sliding", "hybrid"],
    swa_num_attention_heads=4,
    swa_num_key_value_heads=2,
    swa_head_dim=8,
    sliding_window_size=5,
    d_rel=4,
    rel_extent=6,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_experts_per_tok=2,
)
VISION = dict(hidden_size=16, depth=1, num_heads=2, intermediate_size=16, out_hidden_size=16)

# By family: the prefix of its classes in transformers, and what its configuration needs.
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": ("Mamba2", dict(HEADS, state_size=4, num_hidden_layers=2)),
    "zamba2": (
        "Zamba2",
        dict(
            ATTENTION,
            num_key_value_heads=4,
            num_hidden_layers=4,
            mamba_d_state=4,
            n_mamba_heads=4,
            mamba_ngroups=2,
            mamba_headdim=8,
            # Without its kernels transformers 4 passes a wrong state from chunk to chunk.
            chunk_size=ONE_CHUNK,
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
            hybrid_layer_ids=[1, 3],
            adapter_rank=2,
            num_mem_blocks=1,
        ),
    ),
    "bamba": ("Bamba", dict(**ATTENTION, **MAMBA2, num_hidden_layers=3, attn_layer_indices=[1])),
    "falcon_h1": ("FalconH1", dict(FALCON_H1, mamba_rms_norm=True, mamba_norm_before_gate=False)),
    "falcon_h1_norm_first": (
        "FalconH1",
        dict(FALCON_H1, mamba_rms_norm=True, mamba_norm_before_gate=True),
    ),
    "falcon_h1_no_norm": ("FalconH1", dict(FALCON_H1, mamba_rms_norm=False)),
    "nemotron_h": (
        "NemotronH",
        dict(
            ATTENTION,
            head_dim=4,
            ssm_state_size=4,
            mamba_num_heads=4,
            mamba_head_dim=8,
            n_groups=2,
            chunk_size=8,
            layers_block_type=["mamba", "attention", "mlp", "mamba"],
        ),
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        dict(
            **ATTENTION,
            **MAMBA2,
            num_hidden_layers=3,
            layer_types=["mamba", "attention", "mamba"],
            num_local_experts=0,
            shared_intermediate_size=24,
        ),
    ),
    # The attention of transformers 4 would read a cache.
    "recurrent_gemma": ("RecurrentGemma", ATTENTION | GEMMA | dict(head_dim=4, use_cache=False)),
    "rwkv": (
        "Rwkv",
        dict(attention_hidden_size=16, num_hidden_layers=2, context_length=64, use_cache=False),
    ),
    "xlstm": ("xLSTM", dict(XLSTM, weight_mode="single")),
    "xlstm_fused": ("xLSTM", dict(XLSTM, weight_mode="fused")),
    "minimax": (
        "MiniMax",
        dict(
            **ATTENTION,
            **LINEAR_FIRST,
            head_dim=4,
            num_local_experts=2,
            num_experts_per_tok=1,
            block_size=8,
        ),
    ),
    "qwen3_next": ("Qwen3Next", dict(**ATTENTION, **DELTA, **EXPERTS, head_dim=8)),
    "qwen3_5": ("Qwen3_5", dict(**ATTENTION, **DELTA, head_dim=8)),
    "qwen3_5_moe": ("Qwen3_5Moe", dict(**ATTENTION, **DELTA, **EXPERTS, head_dim=8)),
    "lara_mini": ("LaraMini", dict(**ATTENTION, **DELTA, **EXPERTS, head_dim=8)),
    "olmo_hybrid": ("OlmoHybrid", ATTENTION | DELTA),
    "kimi_linear": ("KimiLinear", ATTENTION | LINEAR_FIRST | KIMI),
    "qwen4_exp": (
        "Qwen4Exp",
        ATTENTION
        | DELTA
        | EXPERTS
        | dict(
            num_hidden_layers=2,
            layer_types=["linear_attention", "indexed_attention"],
            head_dim=8,
            hc_count=2,
            hc_lowrank=4,
            indexer_n_heads=2,
            indexer_kv_heads=1,
            indexer_head_dim=8,
            indexer_budget=4,
            indexer_compress_ratio=2,
        ),
    ),
    "bailing_hybrid": (
        "BailingHybrid",
        ATTENTION
        | KDA
        | LATENT
        | dict(
            num_hidden_layers=2,
            layer_types=["linear_attention", "full_attention"],
            num_key_value_heads=4,
            mlp_layer_types=["dense", "sparse"],
            moe_intermediate_size=16,
            num_experts=4,
            num_experts_per_token=1,
            num_expert_group=2,
            topk_group=1,
        ),
    ),
    "glm5_next": (
        "Glm5Next",
        ATTENTION
        | KDA
        | LATENT
        | dict(
            num_hidden_layers=2,
            layer_types=["linear_attention", "indexed_attention"],
            mlp_layer_types=["dense", "dense"],
            indexer_types=["full"] * 2,
            hc_sinkhorn_iters=2,
            num_key_value_heads=4,
            qk_rope_head_dim=0,
            q_lora_rank=8,
            moe_intermediate_size=16,
            n_routed_experts=4,
            num_experts_per_tok=1,
            index_topk=4,
            index_kpool=2,
            index_head_dim=8,
            index_n_heads=2,
            hc_mult=2,
        ),
    ),
    "lfm2": ("Lfm2", ATTENTION | SHORT_CONV | dict(block_auto_adjust_ff_dim=False, conv_bias=True)),
    "lfm2_moe": ("Lfm2Moe", ATTENTION | SHORT_CONV | EXPERTS | dict(num_dense_layers=1)),
    "lfm3": (
        "Lfm3",
        ATTENTION
        | SHORT_CONV
        | dict(
            head_dim=8,
            num_hidden_layers=3,
            layer_types=["conv", "sliding_attention", "full_attention"],
            sliding_window=5,
        ),
    ),
    "inkling": ("Inkling", INKLING | dict(mlp_layer_types=["dense", "sparse"])),
    "inkling2": (
        "Inkling2",
        INKLING | dict(n_layers_per_attn_res_block=2, unpadded_vocab_size=VOCABULARY),
    ),
    "zaya": (
        "Zaya",
        ATTENTION
        | EXPERTS
        | dict(head_dim=8, num_hidden_layers=2, layer_types=["hybrid"] * 2, router_hidden_size=8),
    ),
}
# The installed transformers may lack some.
SPECS = {k: spec for k, spec in SPECS.items() if hasattr(transformers, f"{spec[0]}Config")}
FAMILIES = (*S6_FAMILIES, *SPECS)
SSD_FAMILIES = ("mamba2", "zamba2", "bamba", "falcon_h1", "nemotron_h", "granitemoehybrid")
DELTA_FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "lara_mini", "qwen4_exp", "olmo_hybrid")
KDA_FAMILIES = ("kimi_linear", "bailing_hybrid", "glm5_next")
CONV_FAMILIES = ("lfm2", "lfm2_moe", "lfm3", "inkling", "inkling2")
WITH_ATTENTION = (
    "jamba",
    "zamba",
    *(k for k, spec in SPECS.items() if ATTENTION.keys() <= spec[1].keys()),
)
HYBRIDS = tuple(k for k in WITH_ATTENTION if k != "zaya")  # all of its layers are attention
# Short convolutions and attention, and no recurrence: nothing keeps a state.
WITHOUT_STATE = (*(k for k in CONV_FAMILIES if k in SPECS), "zaya")
# Explained by the adapters of others here, in the same way: see conftest.py.
ALIKE = (
    *("falcon_mamba", "bamba", "granitemoehybrid", "falcon_h1_norm_first", "falcon_h1_no_norm"),
    *("xlstm_fused", "qwen3_5", "qwen3_5_moe", "lara_mini", "glm5_next", "lfm2_moe", "lfm3"),
    "inkling2",
)
# No residual stream that LaTIM could follow: streams that are mixed, convolutions after attention.
NO_STREAM = ("qwen4_exp", "glm5_next", "inkling", "inkling2")


@built_once
def build(family: str, *, seed: int = 0, **changes: object) -> nn.Module:
    """A random model of a family, in eval mode and float32."""
    if family in S6_FAMILIES:
        return tiny(family, seed=seed, **changes)
    prefix, options = SPECS[family]
    options = SHARED | options | changes
    model_type = getattr(transformers, f"{prefix}ForCausalLM", None)
    if model_type is None:  # part of a model of images and text
        model_type = getattr(transformers, f"{prefix}ForConditionalGeneration")
        config_type = getattr(transformers, f"{prefix}Config")
        config = config_type(text_config=options, vision_config=VISION)
    else:
        config_type = getattr(transformers, f"{prefix}TextConfig", None)
        config_type = config_type or getattr(transformers, f"{prefix}Config")
        config = config_type(**options)
    # transformers 5 can't initialise xLSTM's fused weights, whose gates share one bias.
    with no_init_weights() if family == "xlstm_fused" else nullcontext():
        model = model_type(config)
    return randomize(model, seed).eval()


def skip_what_fails_by_itself(family: str, length: int, side: str | None = None) -> None:
    """Skip where the model itself, in the installed transformers, does not do what it should."""
    if TRANSFORMERS_4 and length == 1 and family.startswith("falcon_h1"):
        pytest.skip("the Falcon-H1 of transformers 4 makes two tokens of one")
    if TRANSFORMERS_4 and side == "left" and family == "zamba2":
        pytest.skip("the Zamba2 of transformers 4, without a cache, lets padding into its states")


def skip_what_keeps_its_cache(family: str) -> None:
    """Skip where the model itself, run as it is, reads what another run has left in it."""
    if TRANSFORMERS_4 and family == "recurrent_gemma":
        pytest.skip("the RecurrentGemma of transformers 4 keeps its cache between runs")


def modeling_of(model: nn.Module, scan: str) -> ModuleType:
    """The file a model is written in; skips where its scan is no function of that file."""
    modeling = sys.modules[type(model).__module__]
    if getattr(modeling, scan, None) is None:
        pytest.skip("transformers 4 has its scan inside the mixer's forward")
    return modeling


def padded(side: str, batch: int = 2, length: int = 9, pads: int = 4) -> Tensor:
    """An attention mask whose last row has padding on one side."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[-1, slice(0, pads) if side == "left" else slice(length - pads, length)] = 0
    return mask
