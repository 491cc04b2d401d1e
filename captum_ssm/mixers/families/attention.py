"""Softmax attention layers of hybrid models, read through transformers' attention interface.

Every attention module of transformers computes its queries, keys and values, with rotary
positions, norms and multipliers, and passes them to a function that its config names. We copy the
module, with shared parameters, set the config's function to our own and run the copy on the
recorded input. Our function stores its arguments and returns ones, so that the input of the output
projection is the gate.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from captum_ssm.mixers.call import MixerCall, without_caches
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.mixers.parts import projection
from captum_ssm.mixers.past import Past, by_key
from captum_ssm.mixers.registry import adapts
from captum_ssm.operators import LatterOperator, SoftmaxOperator
from captum_ssm.utils.blocks import bound

_INTERFACE = "captum_ssm_record"


@adapts(
    "BailingHybridAttention",
    "BambaAttention",
    "FalconH1Attention",
    "FlintAttention",
    "Gemma2Attention",
    "Glm5NextTextAttention",
    "GptOssAttention",
    "GraniteMoeHybridAttention",
    "GraniteMoeSWAAttention",
    "GraniteSWAAttention",
    "HYV4Attention",
    "JambaAttention",
    "KimiLinearAttention",
    "LaraMiniAttention",
    "Lfm2Attention",
    "Lfm2MoeAttention",
    "Lfm3Attention",
    "MiniMaxAttention",
    "NemotronHAttention",
    "OlmoHybridAttention",
    "Qwen3NextAttention",
    "Qwen3_5Attention",
    "Qwen3_5MoeAttention",
    "Qwen4ExpTextAttention",
    "RecurrentGemmaAttention",
    "RecurrentGemmaSdpaAttention",
    "VaultGemmaAttention",
    "Zamba2Attention",
    "ZambaAttention",
)
def freeze_attention(call: MixerCall) -> FrozenMixer:
    """An attention module of transformers that dispatches through its attention interface."""
    seen = _record(call)
    query, key, value = (seen[n].to(call.dtype) for n in ("query", "key", "value"))
    groups = query.shape[1] // key.shape[1]
    first = key.shape[2] - query.shape[2]
    query = F.pad(query, (0, 0, first, 0))  # the tokens before ask for nothing here
    key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    H, P = value.shape[1], value.shape[-1]
    sinks = seen.get("s_aux") if seen.get("sinks") is None else seen["sinks"]
    operator = SoftmaxOperator(
        query=query,
        key=key,
        scale=seen["scaling"] if seen["scaling"] is not None else query.shape[-1] ** -0.5,
        width=P,
        bias=_bias(seen, query),
        softcap=seen.get("softcap"),
        sinks=None if sinks is None else sinks.to(call.dtype),
    )
    return FrozenMixer(
        recurrence=LatterOperator(operator, first) if first else operator,
        state=by_key(value[:, :, :first]) if first else None,
        inputs=value[:, :, first:].transpose(1, 2).reshape(*call.output.shape[:2], H * P),
        **projection(call, call.module.get_submodule(_output_path(call.module))),
        gate=seen["gate"],
    )


class _Cached:
    # Stands for a cache: what a module adds comes after what was there when it was called.
    def __init__(self, past: Past) -> None:
        assert past.state is not None
        self.before = past.tails[0], past.state

    def update(self, *new: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        pairs = zip(self.before, new, strict=False)
        return tuple(torch.cat([old.to(x), x], -2) for old, x in pairs)


def _record(call: MixerCall) -> dict[str, Any]:
    config = copy.copy(call.module.config)  # without which it is none of transformers' classes
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Registered once and never removed: another thread's run may be using it.
    if _INTERFACE not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(_INTERFACE, _keep)

    seen: dict[str, Any] = {}
    module, last = _shallow(call.module), nn.Identity()  # for what the last layer is given
    last.register_forward_hook(lambda _, args, y: seen.update(gate=y))
    _replace(module, _output_path(call.module), last)
    module.__dict__["config"] = config
    config._attn_implementation = _INTERFACE
    kwargs = without_caches(call.kwargs)
    if call.past is not None and call.past.state is not None:
        cache_names = (name for name, x in call.kwargs.items() if hasattr(x, "update"))
        kwargs |= dict.fromkeys(cache_names, _Cached(call.past))
    # The class's forward: the instance's own may be wrapped, to record the module.
    with bound(_RECORDING, seen), _KeepDirect():
        type(module).forward(module, *call.args, **kwargs)
    if "query" not in seen:
        raise ValueError(
            f"{call.path} ({type(call.module).__name__}) computes attention itself, so its "
            "probabilities cannot be read; expected it to call transformers' attention interface "
            "or PyTorch's scaled_dot_product_attention. Load the model with "
            "attn_implementation='sdpa'."
        )
    gate = seen["gate"].to(call.dtype)
    seen["gate"] = None if bool((gate == 1).all()) else gate
    return seen


# The arguments that the current recording stores, per thread.
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
    """An attention function for transformers that stores its arguments and returns ones."""
    seen = _RECORDING.get()
    if seen is None:
        raise RuntimeError(
            f"attn_implementation is {_INTERFACE!r}, which captum_ssm uses to record attention and "
            "which computes nothing; expected 'sdpa' or 'eager'. Load the model with one of them."
        )
    seen.update(kwargs, query=query, key=key, value=value, mask=attention_mask, scaling=scaling)
    B, H, L, _ = query.shape
    return query.new_ones(B, L, H, value.shape[-1]), None


class _KeepDirect(TorchFunctionMode):
    # Some attention modules of transformers 4 call the kernel directly, without the interface.
    # PyTorch has a stack of such modes per thread, so another thread's attention is not recorded.
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is not F.scaled_dot_product_attention:
            return func(*args, **named)
        named = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | named
        query, key, value = (named[name] for name in ("query", "key", "value"))
        ones, _ = _keep(None, query, key, value, named.get("attn_mask"), named.get("scale"))
        return ones.transpose(1, 2)


def _shallow(module: nn.Module) -> Any:
    # A copy that shares parameters and submodules, with attributes of its own.
    shallow = copy.copy(module)
    shallow.__dict__["_modules"] = dict(module._modules)
    return shallow


def _replace(module: nn.Module, path: str, by: nn.Module) -> None:
    # Submodules on the path are copied, not changed.
    name, _, rest = path.partition(".")
    if rest:
        child = _shallow(module.get_submodule(name))
        # The class's forward, without what was put around this module's to record it.
        child.__dict__.pop("forward", None)
        child.__dict__.update(_forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict())
        _replace(child, rest, by)
        by = child
    module._modules[name] = by


def _output_path(module: nn.Module) -> str:
    for name in ("o_proj", "out_proj", "dense"):
        layer = module._modules.get(name)
        if isinstance(layer, nn.Module):
            # A projection that gates what it is given has a linear layer of its own.
            return f"{name}.linear" if isinstance(layer._modules.get("linear"), nn.Module) else name
    raise ValueError(
        f"{type(module).__name__} has submodules {sorted(module._modules)}; expected an output "
        "projection o_proj, out_proj or dense. Register an adapter of your own with "
        "captum_ssm.mixers.register_mixer."
    )


def _bias(seen: dict[str, Any], query: Tensor) -> Tensor | None:
    masked, position = _masked(seen, query), seen.get("position_bias")
    if position is None:
        return masked
    if masked is None:
        L = query.shape[2]
        masked = _added(query.new_ones(L, L, dtype=torch.bool).tril()[None, None], query)
    return masked + position.to(query)


def _masked(seen: dict[str, Any], query: Tensor) -> Tensor | None:
    mask, L = seen["mask"], query.shape[2]
    window = seen.get("sliding_window")
    if torch.is_tensor(mask) and mask.dim() == 4:
        mask = F.pad(mask[..., :L], (0, 0, L - mask.shape[-2], 0))
        if mask.dtype == torch.bool:
            return _added(mask, query)
        lowest = torch.finfo(mask.dtype).min
        return mask.to(query.dtype).masked_fill(mask <= lowest / 2, -torch.inf)
    positions = torch.arange(L, device=query.device)
    distance = positions[:, None] - positions
    allowed = distance >= 0
    if window is not None:
        allowed = allowed & (distance < window)
    allowed = allowed.expand(1, 1, L, L)
    if torch.is_tensor(mask) and mask.dim() == 2:
        allowed = allowed & (mask != 0)[:, None, None, :]
    elif window is None:
        return None
    return _added(allowed, query)


def _added(allowed: Tensor, like: Tensor) -> Tensor:
    # Zero where attention is allowed, else -inf, as it is added to the scores.
    return like.new_zeros(allowed.shape).masked_fill(~allowed, -torch.inf)
