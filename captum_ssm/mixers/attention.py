"""Softmax attention layers of hybrid models, by way of transformers' attention interface.

Every attention module of transformers computes its queries, keys and values (rotary positions,
norms, multipliers and all) and hands them to a function that its config names. A copy of the
module that shares its parameters, and whose config names a function of ours, is run once more on
the recorded input: the function keeps what it is given. What the module does behind it, a gate
and the output projection, is read by handing it ones.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from captum_ssm.mixers._base import FrozenMixer, MixerCall, register_mixer
from captum_ssm.operators import SoftmaxOperator

_INTERFACE = "captum_ssm_record"


def freeze_attention(call: MixerCall) -> FrozenMixer:
    """An attention module of transformers that dispatches through its attention interface."""
    seen = _record(call)
    query, key, value = (seen[n].to(call.dtype) for n in ("query", "key", "value"))
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    H, P = value.shape[1], value.shape[-1]
    operator = SoftmaxOperator(
        query=query,
        key=key,
        scale=seen["scaling"] if seen["scaling"] is not None else query.shape[-1] ** -0.5,
        width=P,
        bias=_bias(seen, query),
        softcap=seen.get("softcap"),
        sinks=None if seen.get("s_aux") is None else seen["s_aux"].to(call.dtype),
    )
    projection = _output_projection(call.module)
    return FrozenMixer(
        recurrence=operator,
        inputs=value.transpose(1, 2).reshape(*call.output.shape[:2], H * P),
        out_proj=lambda y: call.linear(projection, y),
        out_weight=call.weight(projection),
        gate=seen["gate"],
    )


for _name in (
    "BambaAttention",
    "FalconH1Attention",
    "GraniteMoeHybridAttention",
    "JambaAttention",
    "KimiLinearAttention",
    "MiniMaxAttention",
    "NemotronHAttention",
    "OlmoHybridAttention",
    "Qwen3NextAttention",
    "Qwen3_5Attention",
    "Qwen3_5MoeAttention",
    "RecurrentGemmaAttention",
    "RecurrentGemmaSdpaAttention",
    "Zamba2Attention",
    "ZambaAttention",
):
    register_mixer(_name, freeze_attention)


def _record(call: MixerCall) -> dict[str, Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    seen: dict[str, Any] = {}

    def keep(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        seen.update(kwargs, query=query, key=key, value=value, mask=attention_mask)
        seen["scaling"] = scaling
        B, H, L, _ = query.shape
        return query.new_ones(B, L, H, value.shape[-1]), None

    class KeepDirect(TorchFunctionMode):
        # transformers 4 has attention that calls the kernel itself, past the interface.
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            named = kwargs or {}
            if func is not F.scaled_dot_product_attention:
                return func(*args, **named)
            query, key, value = args
            keep(module, query, key, value, named.get("attn_mask"), named.get("scale"))
            return query.new_ones(*query.shape[:-1], value.shape[-1])

    class Keep(nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            seen["gate"] = y
            return y

    module = copy.copy(call.module)  # shares parameters; its own attributes
    module.__dict__["_modules"] = dict(call.module._modules)
    module._modules[_output_name(call.module)] = Keep()
    module.__dict__["config"] = copy.copy(call.module.config)
    module.config._attn_implementation = _INTERFACE
    kwargs = {**call.kwargs}
    for cache in ("past_key_values", "past_key_value", "use_cache"):
        if cache in kwargs:
            kwargs[cache] = None
    ALL_ATTENTION_FUNCTIONS.register(_INTERFACE, keep)
    try:
        # The class's forward: an instance's may be wrapped, to watch the module itself.
        with KeepDirect():
            type(module).forward(module, *call.args, **kwargs)
    finally:
        ALL_ATTENTION_FUNCTIONS._local_mapping.pop(_INTERFACE, None)
    if "query" not in seen:
        raise ValueError(
            f"{call.path} ({type(call.module).__name__}) computes attention by itself, past "
            "transformers' interface and PyTorch's kernel, so its probabilities are not known; "
            "load the model with attn_implementation='sdpa'."
        )
    gate = seen["gate"].to(call.dtype)
    seen["gate"] = None if bool((gate == 1).all()) else gate
    return seen


def _output_name(module: nn.Module) -> str:
    for name in ("o_proj", "out_proj", "dense"):
        if isinstance(module._modules.get(name), nn.Module):
            return name
    raise ValueError(f"{type(module).__name__} has no output projection that is known.")


def _output_projection(module: nn.Module) -> Any:
    return module._modules[_output_name(module)]


def _bias(seen: dict[str, Any], query: Tensor) -> Tensor | None:
    mask, L = seen["mask"], query.shape[2]
    window = seen.get("sliding_window")
    if torch.is_tensor(mask) and mask.dim() == 4:
        mask = mask[..., :L]
        if mask.dtype == torch.bool:
            zero = torch.zeros(mask.shape, dtype=query.dtype, device=query.device)
            return zero.masked_fill(~mask, -torch.inf)
        lowest = torch.finfo(mask.dtype).min
        mask_ = mask.to(query.dtype)
        return mask_.masked_fill(mask <= lowest / 2, -torch.inf)
    places = torch.arange(L, device=query.device)
    distance = places[:, None] - places
    allowed = distance >= 0
    if window is not None:
        allowed = allowed & (distance < window)
    allowed = allowed.expand(1, 1, L, L)
    if torch.is_tensor(mask) and mask.dim() == 2:
        allowed = allowed & (mask != 0)[:, None, None, :]
    elif window is None:
        return None
    zero = torch.zeros(allowed.shape, dtype=query.dtype, device=query.device)
    return zero.masked_fill(~allowed, -torch.inf)
