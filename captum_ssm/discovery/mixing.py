"""Modules whose tokens act on one another, told by a change of one token."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from captum_ssm.discovery.measure.cut_run import token_argument
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.mixers.call import MixerCall
from captum_ssm.mixers.registry import known_of
from captum_ssm.utils.nested import map_tensors
from captum_ssm.utils.offload import moved

UNSEEN = (
    "lets tokens act on one another in a way that is not known. Known are scans, sums over tokens, "
    "products with a matrix of tokens by tokens, convolutions by Fourier transforms with one "
    "kernel per channel, and loops whose steps are one token of all examples each, where "
    "torch.stack or torch.cat gathers their results in order or each is written to its token of a "
    "tensor"
)


def tokens_act(call: MixerCall) -> bool:
    """Whether another first token changes what a module returns at a later one."""
    try:
        tokens = token_argument(call)
    except UnsupportedModelError:
        return False
    if tokens.shape[1] < 2:
        return False
    weights = (p.device for p in call.module.parameters() if not p.is_meta)
    device = call.output.device
    changed = tokens.clone()
    changed[:, 0] = tokens[:, -1]
    args, kwargs = map_tensors(lambda x: changed if x is tokens else x, (call.args, call.kwargs))
    with torch.no_grad():
        before, after = (
            moved(run, device, next(weights, device)).run().output
            for run in (call, replace(call, args=args, kwargs=kwargs))
        )
    return before.shape[:2] == tokens.shape[:2] and not torch.equal(before[:, 1:], after[:, 1:])


def note_unseen(calls: Collection[MixerCall]) -> None:
    """Let errors name the smallest modules, of those of calls, in which tokens act on others."""
    mixing = {type(call.module): call.module for call in calls if tokens_act(call)}
    for kind, module in mixing.items():
        inner = {type(part) for part in module.modules()} - {kind}
        if inner.isdisjoint(mixing) and not known_of(module).miss:
            known_of(module).miss = UNSEEN
