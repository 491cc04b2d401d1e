"""Which of the ids of an input an embedding table was given."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from captum_ssm.capture.check_inputs import is_placeholder
from captum_ssm.capture.model import input_embeddings
from captum_ssm.capture.request import Request
from captum_ssm.capture.thrown_away import on_thrown_away
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.mixers.registry import known_of
from captum_ssm.utils.clones import memory, repeated
from captum_ssm.utils.copies import original
from captum_ssm.utils.nested import tensors_in
from captum_ssm.utils.random_state import random_state_kept
from captum_ssm.utils.watch_modules import watch_modules
from captum_ssm.wiring.mixing_test import halves

# The least part of an embedding that is made of other ids.
_LEAST = 1e-3
# A table by its path, and what it was given.
Given = tuple[str, nn.Module, Tensor]


def rows_of(table: nn.Module | None, embedding: nn.Module | None) -> int | None:
    """How many ids a table embeds, if it is the model's own; None for others."""
    return getattr(table, "num_embeddings", None) if table is embedding else None


def entries_of(looked_up: Tensor, ids: Tensor, rows: int | None = None) -> Tensor | None:
    """The entries of ``ids``, counted from 0 in their flat order, that ``looked_up`` holds.

    None if it holds others. A view of ids, such as one column of a table, is known by its memory;
    a copy only if it holds all of them.

    Args:
        looked_up (Tensor): what a table was given, of any shape.
        ids (Tensor): one of the model's inputs.
        rows (int, optional): how many ids the model's own table embeds. Others are placeholders
            (of images, of sound), for which a model looks up what it likes. Default: None
    """
    if is_view(looked_up, ids):
        addresses, asked = _addresses(ids).flatten(), _addresses(looked_up)
        entry = torch.full((int(max(addresses.max(), asked.max())) + 1,), -1)
        entry[addresses] = torch.arange(len(addresses))
        entries = entry[asked]
        return None if bool((entries < 0).any()) else entries
    if looked_up.shape != ids.shape:
        return None
    is_same = looked_up.to(ids.device) == ids
    is_known = is_same if rows is None else is_same | is_placeholder(ids, rows)
    if not bool(is_same.any() and is_known.all()):
        return None
    return torch.arange(ids.numel()).view(ids.shape)


def is_view(tensor: Tensor, ids: Tensor) -> bool:
    """Whether two tensors share their memory."""
    return tensor.dtype == ids.dtype and memory(tensor) == memory(ids)


def check_tables(request: Request, tables: Sequence[Given], operations: frozenset[Any]) -> None:
    """Raise where what a table returns for an id depends on others, as by a hook that mixes them.

    Relevance begins at what tables return, so that nothing else would tell. Tables that compute
    more than a look-up are given others at half of their ids, once for what a run calls.

    Raises:
        UnsupportedModelError: naming the table.
    """
    known, key = known_of(request.module), ("tables", operations)
    inputs = [x for x in request.inputs if not x.is_floating_point()]
    asked = [
        (name, table, ids)
        for name, table, ids in tables
        if not _only_looks_up(table) and any(entries_of(ids, x) is not None for x in inputs)
    ]
    if not asked or key in known.honest:
        return
    with torch.no_grad(), on_thrown_away(request) as (_, copies), random_state_kept():
        for name, table, ids in asked:
            if not _looks_up_each(copies.of(table), ids):
                raise UnsupportedModelError(
                    f"{name} ({type(table).__name__}), a table of embeddings, mixes tokens: what "
                    "it returns for an id depends on the others. Expected a table that looks up "
                    "each id for itself; mix them in a module after it."
                )
    known.honest |= {key}


def _only_looks_up(table: nn.Module) -> bool:
    hooks = (table._forward_hooks, table._forward_pre_hooks)
    is_plain = type(table).forward is nn.Embedding.forward and "forward" not in vars(table)
    return is_plain and not any(hooks)


def _looks_up_each(table: Any, ids: Tensor) -> bool:
    # Whether nothing changes at half of the ids where the others do.
    sets = halves(ids.numel(), torch.Generator().manual_seed(0))
    kept = [half.to(ids.device).view(ids.shape) for half in sets]
    others = (ids + 1) % table.num_embeddings
    try:
        before, again = table(ids), table(ids)
        after = [(same, table(torch.where(same, ids, others))) for same in kept]
    except Exception:  # a table that takes no other ids
        return True
    if not torch.equal(before, again):  # by dropout
        return True
    least = _LEAST * before.abs().max()
    return all(bool(((x - before)[same].abs() <= least).all()) for same, x in after)


def warn_of_derived(request: Request, tables: Sequence[Given]) -> None:
    """Warn of tables that are given ids which are computed from those of inputs, such as n-grams.

    They change where the inputs do. That is tried, in one more run, where a table was given what is
    neither an input nor counts upward, as positions do.
    """
    ids = [x for x in request.inputs if not x.is_floating_point()]
    input_table = input_embeddings(request.module)
    unknown = [
        (name, table, looked_up)
        for name, table, looked_up in tables
        if all(entries_of(looked_up, tokens, rows_of(table, input_table)) is None for tokens in ids)
        and not _counts(looked_up)
    ]
    others = _given_for(request, tables) if ids and unknown else {}
    for name, table, looked_up in unknown:
        calls = [before for _, other, before in tables if other is table]
        first = next(k for k, before in enumerate(calls) if before is looked_up)
        other = next(iter(others.get(table, [])[first:]), looked_up)
        if looked_up.shape != other.shape or not torch.equal(looked_up, other):
            warnings.warn(
                f"{name} is given ids that are computed from those of inputs. What it adds to a "
                "token counts as that token's, whichever ids it was computed from; for MambaLRP "
                "it has no relevance, as the convergence delta shows.",
                stacklevel=2,
            )


def _counts(numbers: Tensor) -> bool:
    # Positions, segments: each number is the one before it, or the next one.
    steps = numbers.diff(dim=-1) if numbers.dim() else numbers
    return bool(((steps == 0) | (steps == 1)).all())


@repeated
def _given_for(request: Request, tables: Sequence[Given]) -> dict[nn.Module, list[Tensor]]:
    # What these tables are given where the inputs are others. Nothing if these do not run.
    ids_of: dict[nn.Module, list[Tensor]] = {module: [] for _, module, _ in tables}

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        ids_of[original(module)].append(next(tensors_in((args, kwargs))))

    inputs = tuple(x if x.is_floating_point() else x.roll(1, -1) for x in request.inputs)
    with torch.no_grad(), on_thrown_away(request) as (of_copies, copies):
        try:
            with watch_modules(map(copies.of, ids_of), before=keep):
                of_copies.run(inputs)
        except Exception:  # a forward_func that takes no others
            return {}
    return ids_of


def _addresses(x: Tensor) -> Tensor:
    # The offset of each entry in its storage.
    addresses = torch.tensor(x.storage_offset())
    for size, stride in zip(x.shape, x.stride(), strict=True):
        addresses = addresses[..., None] + stride * torch.arange(size)
    return addresses
