"""Softmax attention layers of hybrid models, by way of transformers' attention interface.

Every attention module of transformers computes its queries, keys and values (rotary positions,
norms, multipliers and all) and hands them to a function that its config names. A copy of the
module that shares its parameters, and whose config names a function of ours, is run once more on
the recorded input: the function keeps what it is given. What the module does behind it, a gate
and the output projection, is read by handing it ones.
"""

from __future__ import annotations

import copy
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from captum_ssm.mixers._call import MixerCall
from captum_ssm.mixers._frozen_mixer import FrozenMixer
from captum_ssm.mixers._registry import adapts
from captum_ssm.operators import SoftmaxOperator

_INTERFACE = "captum_ssm_record"


@adapts(
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
)
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


def _record(call: MixerCall) -> dict[str, Any]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Registered once, for good: taking an entry back would take it from another thread's run.
    if _INTERFACE not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(_INTERFACE, _keep)

    seen: dict[str, Any] = {}

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
    token = _RECORDING.set(seen)
    try:
        # The class's forward: an instance's may be wrapped, to watch the module itself.
        with _KeepDirect():
            type(module).forward(module, *call.args, **kwargs)
    finally:
        _RECORDING.reset(token)
    if "query" not in seen:
        raise ValueError(
            f"{call.path} ({type(call.module).__name__}) computes attention by itself, past "
            "transformers' interface and PyTorch's kernel, so its probabilities are not known; "
            "load the model with attn_implementation='sdpa'."
        )
    gate = seen["gate"].to(call.dtype)
    seen["gate"] = None if bool((gate == 1).all()) else gate
    return seen


# Where the recording that is under way keeps what it is given: one for each thread.
_RECORDING: ContextVar[dict[str, Any] | None] = ContextVar("captum_ssm_recording", default=None)


def _keep(
    module: nn.Module | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers' that keeps its arguments and returns ones."""
    seen = _RECORDING.get()
    if seen is None:
        raise RuntimeError(
            f"attn_implementation is {_INTERFACE!r}, which computes nothing: captum_ssm records "
            "attention by it. Load the model with 'sdpa' or 'eager'."
        )
    seen.update(kwargs, query=query, key=key, value=value, mask=attention_mask, scaling=scaling)
    B, H, L, _ = query.shape
    return query.new_ones(B, L, H, value.shape[-1]), None


class _KeepDirect(TorchFunctionMode):
    # transformers 4 has attention that calls the kernel itself, past the interface. PyTorch keeps
    # a stack of such modes for each thread: another thread's attention is not seen here.
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **named)
        named = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | named
        query, key, value = (named[name] for name in ("query", "key", "value"))
        ones, _ = _keep(None, query, key, value, named.get("attn_mask"), named.get("scale"))
        return ones.transpose(1, 2)


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
