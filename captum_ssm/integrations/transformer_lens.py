"""Exact maps of gated delta rules in a model that TransformerLens has wrapped.

TransformerLens's own map leaves out what a key removes from the state, and the norms of keys and
queries. Packages add architectures by the entry point ``transformer_lens.architectures``, which
keeps those that TransformerLens has by itself; so this changes the wrapped model.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformer_lens.model_bridge.generalized_components import GatedDeltaNetBridge

from captum_ssm.mixers.families.delta import delta_rule
from captum_ssm.mixers.parts import unit

HOOKS = ("q", "k", "beta", "log_decay")


class ExactGatedDeltaNet(GatedDeltaNetBridge):
    """TransformerLens's gated delta rule, with the map that it computes."""

    def compute_effective_attention(self, cache: Any, layer_idx: int) -> Tensor:
        """The map ``(B, H, L, L)`` of a layer, from the hooks of a run.

        Raises:
            RuntimeError: for a cache without the hooks.
        """
        names = [f"blocks.{layer_idx}.linear_attn.hook_{name}" for name in HOOKS]
        missing = [name for name in names if name not in cache]
        if missing:
            raise RuntimeError(
                f"the cache has no {missing[0]}; expected the cache of "
                "run_with_cache(tokens, use_cache=False)."
            )
        q, k, beta, log_decay = (cache[name].float() for name in names)
        repeat = beta.shape[-1] // k.shape[-2]  # each key head serves consecutive value heads
        q, k = (unit(vectors).repeat_interleave(repeat, 2) for vectors in (q, k))
        return delta_rule(q, k, beta, log_decay[..., None], width=1).matrix()


def exact_maps(bridge: Any) -> Any:
    """Let ``cache.compute_ssm_effective_attention()`` have the whole map of gated delta rules.

    The map times ``hook_v`` is ``hook_recurrence_out``. Runs, hooks and other layers stay as they
    are; TransformerLens's maps of Mamba and Mamba-2 are exact already.

    Args:
        bridge (TransformerBridge): a wrapped model, which is changed.

    Returns:
        TransformerBridge: the same one.

    Examples::

        >>> from captum_ssm.integrations.transformer_lens import exact_maps
        >>> bridge = exact_maps(TransformerBridge.boot_transformers("Qwen/Qwen3-Next-80B-A3B"))
        >>> _, cache = bridge.run_with_cache(tokens, use_cache=False)
        >>> maps = cache.compute_ssm_effective_attention(layer=0)  # (B, H, L, L)
    """
    for module in bridge.modules():
        if type(module) is GatedDeltaNetBridge:
            module.__class__ = ExactGatedDeltaNet
    return bridge
