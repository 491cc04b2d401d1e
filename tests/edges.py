"""Brute force for interventions: a model's own scans, with edges removed.

A scan is linear in its values, so what is left of it without some sources is the scan itself, of
values that are zero there. The model's own function computes it inside the model's own forward; no
formula of this library is in any of it. Softmax attention has its probabilities set to zero.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from families import (
    DELTA_FAMILIES,
    FAMILIES,
    KDA_FAMILIES,
    SSD_FAMILIES,
    modeling_of,
    skip_what_keeps_its_cache,
)
from models import S6_FAMILIES, without_cache
from torch import Tensor, nn

from captum_ssm.mixers import find_mixers

Patched = Callable[[nn.Module, "Removed"], object]


class Removed:
    """Edges from ``sources`` to ``targets``, both ``(B, L)``, 1 for the chosen tokens."""

    def __init__(self, sources: Tensor, targets: Tensor, renormalize: bool = False) -> None:
        self.sources, self.targets, self.renormalize = sources, targets, renormalize

    def along(self, mask: Tensor, like: Tensor, axis: int) -> Tensor:
        shape = [1] * like.dim()
        shape[0], shape[axis] = mask.shape[0], mask.shape[1]
        return mask.to(like).reshape(shape)

    def left(
        self, out: Any, scan: Callable[[Tensor], Tensor], values: Tensor, axis: int = 1
    ) -> Any:
        """What a scan that returned ``out`` returns without the sources' values, at the targets."""
        y = out[0] if isinstance(out, tuple) else out
        found = scan(values * (1 - self.along(self.sources, values, axis)))
        y = torch.where(self.along(self.targets, y, axis) != 0, found, y)
        return (y, *out[1:]) if isinstance(out, tuple) else y

    @property
    def pairs(self) -> Tensor:
        """Target and source, ``(B, L, L)``, 1 for an edge."""
        return self.targets[:, :, None] * self.sources[:, None]


class RemovedPairs(Removed):
    """Edges ``(B, L, L)`` of target and source, 1 for the removed ones: a scan for each source."""

    def __init__(self, pairs: Tensor) -> None:
        super().__init__(torch.ones(pairs.shape[:2]), torch.ones(pairs.shape[:2]))
        self.removed = pairs

    def left(
        self, out: Any, scan: Callable[[Tensor], Tensor], values: Tensor, axis: int = 1
    ) -> Any:
        y = skipped = scan(0 * values)  # what each token's own skip adds
        for j in range(self.removed.shape[1]):
            own = torch.zeros(self.removed.shape[:2])
            own[:, j] = 1
            read = scan(values * self.along(own, values, axis)) - skipped
            read = read - skipped * self.along(own, read, axis)
            y = y + read * self.along(1 - self.removed[:, :, j], y, axis)
        return (y, *out[1:]) if isinstance(out, tuple) else y

    @property
    def pairs(self) -> Tensor:
        return self.removed


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, tuple) else out


def function_of(name: str, values: str, axis: int = 1, **without: Any) -> Patched:
    """A scan that is a function of the modeling file."""

    @contextmanager
    def patched(model: nn.Module, edges: Removed) -> Iterator[None]:
        modeling = modeling_of(model, name)
        original = getattr(modeling, name)
        names = inspect.signature(original)

        def scan(*args: Any, **kwargs: Any) -> Any:
            given = names.bind(*args, **kwargs).arguments
            given = given | given.pop("kwargs", {})
            out = original(**given)

            def of(v: Tensor) -> Tensor:
                return first(original(**(given | without | {values: v})))

            # A skip is no edge: what it adds of the sources is put back.
            kept = 0
            if without:
                own = given[values] * edges.along(edges.sources, given[values], axis)
                kept = first(original(**(given | {values: own}))) - of(own)
            return edges.left(
                out, lambda v: first(original(**(given | {values: v}))) + kept, given[values], axis
            )

        with ExitStack() as stack:
            stack.enter_context(patch.object(modeling, name, scan))
            for _, mixer in find_mixers(model):
                for attribute, value in mixer.__dict__.items():
                    if value is original:
                        stack.enter_context(patch.dict(mixer.__dict__, {attribute: scan}))
            yield

    return patched


@contextmanager
def rg_lru(model: nn.Module, edges: Removed) -> Iterator[None]:
    """``_rnn_scan`` of the gated values."""
    kind = next(type(m.rg_lru) for m in model.modules() if hasattr(m, "rg_lru"))
    original = kind._rnn_scan

    def scan(self, **kwargs):
        kwargs["recurrent_states"] = None
        out = original(self, **kwargs)
        values = kwargs["hidden_states"]
        return edges.left(
            out, lambda v: original(self, **(kwargs | {"hidden_states": v}))[0], values
        )

    with patch.object(kind, "_rnn_scan", scan):
        yield


@contextmanager
def mlstm(model: nn.Module, edges: Removed) -> Iterator[None]:
    """xLSTM's backend module, heads before tokens."""
    originals = {}

    def scan(module, **kwargs):
        run = originals[module]
        values = kwargs["value"]
        return edges.left(
            run(**kwargs), lambda v: run(**(kwargs | {"value": v}))[0], values, axis=2
        )

    with ExitStack() as stack:
        for _, layer in find_mixers(model):
            module = layer.mlstm_backend
            originals[module] = module.forward
            stack.enter_context(
                patch.object(module, "forward", lambda module=module, **kw: scan(module, **kw))
            )
        yield


@contextmanager
def lightning(model: nn.Module, edges: Removed) -> Iterator[None]:
    """MiniMax's block loop is the module itself: a copy whose norm is the end runs it again."""
    busy = False

    def before_norm(module: nn.Module, kwargs: dict, y: Tensor) -> Tensor:
        nonlocal busy
        if busy:
            return None
        H, P = module.num_attention_heads, module.head_dim
        qkv = module.act_fn(module.qkv_proj(kwargs["hidden_states"])).unflatten(-1, (H, 3 * P))
        seen = {}

        class Stop(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                seen["y"] = x
                return x

        def scan(v: Tensor) -> Tensor:
            mixed = torch.cat([qkv[..., : 2 * P], v], -1).flatten(2)
            stubs = {"act_fn": nn.Identity(), "qkv_proj": nn.Identity(), "norm": Stop()}
            stubs["output_gate"], stubs["out_proj"] = nn.Linear(3 * H * P, H * P), nn.Identity()
            with patch.dict(module._modules, stubs):
                module.forward(**(without_cache(kwargs) | {"hidden_states": mixed}))
            return seen["y"].unflatten(-1, (H, P))

        busy = True
        y = edges.left(y.unflatten(-1, (H, P)), scan, qkv[..., 2 * P :]).flatten(2)
        busy = False
        return y

    calls = {}
    with ExitStack() as hooks:
        for _, module in find_mixers(model):
            if not hasattr(module, "slope_rate"):
                continue
            hooks.callback(
                module.register_forward_pre_hook(
                    lambda m, args, kwargs: calls.update({m: kwargs}), with_kwargs=True
                ).remove
            )
            hooks.callback(
                module.norm.register_forward_pre_hook(
                    lambda n, args, m=module: before_norm(m, calls[m], args[0])
                ).remove
            )
        yield


@contextmanager
def attention(model: nn.Module, edges: Removed) -> Iterator[None]:
    """transformers' eager function: probabilities of removed pairs are zero."""
    modeling = sys.modules[type(model).__module__]
    original = getattr(modeling, "eager_attention_forward", None)
    if original is None:
        yield
        return

    def attend(module, query, key, value, *args, **kwargs):
        _, weights = original(module, query, key, value, *args, **kwargs)
        left = weights * (1 - edges.pairs[:, None])
        if edges.renormalize:
            left = left / left.sum(-1, keepdim=True).clamp(min=1e-30)
        value = value.repeat_interleave(weights.shape[1] // value.shape[1], 1)
        return (left @ value).transpose(1, 2), weights

    model.set_attn_implementation("eager")
    with patch.object(modeling, "eager_attention_forward", attend):
        yield


S6 = function_of("mamba_selective_scan", "hidden_states", axis=2, D=None)
SSD = function_of("mamba2_chunk_scan", "hidden_states", D=None)
DELTA = function_of("torch_chunk_gated_delta_rule", "value")
SCANS: dict[str, Patched] = {
    **dict.fromkeys(S6_FAMILIES, S6),
    **dict.fromkeys(SSD_FAMILIES, SSD),
    "falcon_h1_norm_first": SSD,
    "falcon_h1_no_norm": SSD,
    "recurrent_gemma": rg_lru,
    "rwkv": function_of("rwkv_linear_attention", "value"),
    "xlstm": mlstm,
    "xlstm_fused": mlstm,
    "minimax": lightning,
    **dict.fromkeys(DELTA_FAMILIES, DELTA),
    **dict.fromkeys(KDA_FAMILIES, function_of("chunk_kimi_delta_attention", "value")),
}
SCANS = {family: scan for family, scan in SCANS.items() if family in FAMILIES}


@contextmanager
def removed_by_hand(
    family: str, model: nn.Module, sources: Tensor, targets: Tensor, renormalize: bool = False
) -> Iterator[None]:
    """The model without edges in any layer, while the block runs."""
    with without(family, model, Removed(sources, targets, renormalize)):
        yield


@contextmanager
def without(family: str, model: nn.Module, edges: Removed) -> Iterator[None]:
    """As above, of any edges."""
    skip_what_keeps_its_cache(family)
    with SCANS[family](model, edges), attention(model, edges):
        yield
