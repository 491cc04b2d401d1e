"""Heads, ranked by what they carry, and named by what they read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from captum_ssm.attr.flow.layer_edges import LayerEdges
from captum_ssm.errors import InputError
from captum_ssm.utils.tables import text_table

# Rows of a layer's heads are read so many entries at a time.
_TILE = 1 << 22
# A role needs this share of what chance leaves over. It was chosen for copying-mamba, whose last
# mixer copies, and spreads a third of its relevance over tokens without a role.
_CLEARLY = 0.2


@dataclass(frozen=True)
class HeadRole:
    """What one head of a mixer reads.

    Args:
        layer (str): the mixer's path.
        head (int): which of its maps, or of its groups of channels.
        role (str, optional): that of the largest :attr:`excess`; None where no role is
            clearly above chance.
        size (float): the sum of the head's absolute entries: relevance for edges, in units of the
            score, and attention for maps.
        part (float): its part of the sizes of all heads.
        shares (dict of str to float): by role, the share of the size at the role's tokens. A token
            may have several roles, so shares may add up to more than one.
        chance (dict of str to float): what the shares would be if each row of the head were spread
            evenly over the tokens up to its own.
    """

    layer: str
    head: int
    role: str | None
    size: float
    part: float
    shares: dict[str, float] = field(repr=False)
    chance: dict[str, float] = field(repr=False)

    @property
    def excess(self) -> dict[str, float]:
        """By role, ``(share - chance) / (1 - chance)``: 0 at chance, 1 where all is read there."""
        return {role: _excess(self.shares[role], self.chance[role]) for role in self.shares}


class HeadRoles(tuple[HeadRole, ...]):
    """Heads, the largest first; its text is a table."""

    def named(self, role: str) -> HeadRoles:
        """The heads of one role, or of none for None."""
        return HeadRoles(head for head in self if head.role == role)

    def by_role(self) -> dict[str | None, float]:
        """By role, the part of the size of all heads that its heads have, the largest first."""
        roles = {head.role for head in self}
        parts = {role: sum(head.part for head in self if head.role == role) for role in roles}
        return dict(sorted(parts.items(), key=lambda item: -item[1]))

    def table(self, count: int = 10) -> str:
        """The first heads as a table, with their shares and, after a slash, chance."""
        roles = list(self[0].shares) if self else []
        rows = [("layer", "head", "role", "size", "part", *roles)]
        rows += [
            (
                *(
                    head.layer,
                    str(head.head),
                    head.role or "-",
                    f"{head.size:.3g}",
                    f"{head.part:.1%}",
                ),
                *(f"{head.shares[role]:.2f}/{head.chance[role]:.2f}" for role in roles),
            )
            for head in self[:count]
        ]
        lines = text_table(rows)
        if len(self) > count:
            lines.append(f"and {len(self) - count} more")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.table()


def head_roles(
    maps: Mapping[str, LayerEdges | Tensor],
    tokens: Tensor,
    *,
    separators: Sequence[int] = (),
    mask: Tensor | None = None,
    groups: int | None = 1,
) -> HeadRoles:
    """Rank the heads of all mixers, and name each by the tokens that it reads.

    The roles of a token j for the token i that reads it: ``"itself"``; ``"previous"``, the one
    before it; ``"duplicate"``, an earlier one with i's id; ``"induction"``, one that follows an
    earlier token with i's id (Olsson et al., `2022 <https://arxiv.org/abs/2209.11895>`_);
    ``"first"`` of the text; ``"separator"``, an earlier one with one of the ids of ``separators``.

    A head is named by the role whose share of its absolute entries is the furthest above chance,
    where it is clearly above it (:func:`is_clearly_above_chance`). Chance is even attention to all
    tokens up to i, where each token i counts as much as it does in the head. A name rests on the
    given texts alone: give several, and different ones.

    Args:
        maps (mapping of str to LayerEdges or Tensor): by mixer's path. Edges, of
            :meth:`~captum_ssm.RelevanceFlow.edges` (``formulation="unified"``, whose edges start
            at the word itself) or of :attr:`Components.edges <captum_ssm.attr.Components>`: what
            the head read of what counts for the score. Or maps ``(B, M, L, L)`` of
            :func:`~captum_ssm.hidden_attention`: where it looks.
        tokens (Tensor): ``(B, L)``, the ids.
        separators (sequence of int, optional): ids of separators, such as those of punctuation.
            Default: ()
        mask (Tensor, optional): ``(B, L)``, zero on padding. Default: None
        groups (int, optional): how many heads, equal groups of channels, a mixer counts as whose
            edges have one map per channel. Its channels spread widely and cancel, so that only
            their sum has a role as a rule. None: each channel by itself. Default: 1

    Returns:
        HeadRoles: the largest head first.

    Raises:
        InputError: for tokens of another shape than the maps'.
        ValueError: for a number of groups that does not divide the channels.
        TypeError: for maps that are no mapping.

    Examples::

        >>> edges = RelevanceFlow(model).edges(input_ids, target=5, formulation="unified")
        >>> roles = head_roles(edges, input_ids)
        >>> len(roles), roles[0].part >= roles[1].part
        (2, True)
        >>> round(sum(head.part for head in roles), 3)
        1.0
    """
    if not isinstance(maps, Mapping):
        raise TypeError(
            f"maps is a {type(maps).__name__}; expected a mapping from mixers' paths, such as "
            "RelevanceFlow(model).edges(...) or captum_ssm.hidden_attention(model, inputs)."
        )
    counted = _roles_of(tokens, separators, mask)
    by_layer = {
        layer: _summed(layer, of_layer, counted, groups) for layer, of_layer in maps.items()
    }
    total = sum(size for sizes, _, _ in by_layer.values() for size in sizes.tolist()) or 1.0
    heads = [
        _named(layer, m, size, total, *(dict(zip(counted.by_role, x, strict=True)) for x in parts))
        for layer, (sizes, shares, chance) in by_layer.items()
        for m, (size, *parts) in enumerate(
            zip(sizes.tolist(), shares.T.tolist(), chance.T.tolist(), strict=True)
        )
    ]
    return HeadRoles(sorted(heads, key=lambda head: -head.size))


def is_clearly_above_chance(share: float, chance: float) -> bool:
    """Whether a share names a head: at least a fifth of what chance leaves over."""
    return _excess(share, chance) >= _CLEARLY


def _excess(share: float, chance: float) -> float:
    return (share - chance) / max(1 - chance, 1e-6)


def _named(
    layer: str,
    head: int,
    size: float,
    total: float,
    shares: dict[str, float],
    chance: dict[str, float],
) -> HeadRole:
    unnamed = HeadRole(layer, head, None, size, size / total, shares, chance)
    excess = unnamed.excess
    best = max(excess, key=excess.__getitem__)
    is_clear = is_clearly_above_chance(shares[best], chance[best])
    return replace(unnamed, role=best) if is_clear else unnamed


class _Roles(NamedTuple):
    # Which tokens have a role for those that read: by role (B, L, L), and all that may be read.
    by_role: dict[str, Tensor]
    readable: Tensor


def _roles_of(tokens: Tensor, separators: Sequence[int], mask: Tensor | None) -> _Roles:
    if tokens.dim() != 2 or tokens.is_floating_point():
        raise InputError(
            f"tokens has shape {tuple(tokens.shape)} and dtype {tokens.dtype}; expected the ids "
            "(B, L), integers, that the model was given."
        )
    tokens = tokens.cpu()
    B, L = tokens.shape
    is_text = torch.ones(B, L, dtype=torch.bool) if mask is None else mask.cpu().bool()
    readable = torch.ones(L, L, dtype=torch.bool).tril() & is_text[:, None] & is_text[:, :, None]
    same = (tokens[:, :, None] == tokens[:, None, :]) & is_text[:, None]
    earlier = torch.ones(L, L, dtype=torch.bool).tril(-1)
    after = torch.zeros_like(same)
    after[:, :, 1:] = same[:, :, :-1]  # j - 1 has i's id
    position = torch.arange(L)
    first = is_text.int().argmax(1)
    by_role = {
        "itself": torch.eye(L, dtype=torch.bool).expand(B, L, L),
        "previous": (position[:, None] - 1 == position).expand(B, L, L),
        "duplicate": same & earlier,
        "induction": after & earlier,
        "first": ((position == first[:, None])[:, None] & earlier).expand(B, L, L),
    }
    if len(separators):
        is_separator = torch.isin(tokens, torch.tensor(list(separators)))
        by_role["separator"] = is_separator[:, None] & earlier
    return _Roles({role: at & readable for role, at in by_role.items()}, readable)


def _summed(
    layer: str, maps: LayerEdges | Tensor, roles: _Roles, groups: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    # By head: its size (M,), and by role its shares and those of chance, (roles, M).
    K, M = len(roles.by_role), _count(layer, maps, groups)
    size = torch.zeros(1 + 2 * K, M, dtype=torch.float64)
    for index, rows in _rows(layer, maps, roles.readable.shape, M):
        rows = rows.abs().cpu().double()  # (B, M, R, L)
        of_row = rows.sum(3)
        readable = roles.readable[:, index]
        count = readable.sum(2).clamp(min=1)
        at = torch.stack([mask[:, index] for mask in roles.by_role.values()])  # (roles, B, R, L)
        read = torch.einsum("bmrl,kbrl->km", rows, at.double())
        even = torch.einsum("bmr,kbr->km", of_row, at.sum(3) / count.double())
        size += torch.cat([of_row.sum((0, 2))[None], read, even])
    shares = size[1:] / size[0].clamp(min=1e-300)
    return size[0], shares[:K], shares[K:]


def _count(layer: str, maps: LayerEdges | Tensor, groups: int | None) -> int:
    # The heads of a mixer: its maps, or groups of channels that have a map each.
    if not isinstance(maps, LayerEdges):
        return maps.shape[1]
    channels = maps.operator.channels
    if groups is None or maps.heads_count < channels:
        return maps.heads_count
    if groups < 1 or channels % groups:
        raise ValueError(
            f"groups is {groups}; expected a divisor of the {channels} channels of {layer}, or "
            "None for each channel by itself."
        )
    return groups


def _rows(
    layer: str, maps: LayerEdges | Tensor, shape: Sequence[int], count: int
) -> Iterator[tuple[Tensor, Tensor]]:
    # Rows that are not zero, by head: their tokens (R,) and (B, M, R, L).
    if isinstance(maps, LayerEdges):
        size = (maps.operator.batch, maps.operator.length)
        live = (maps.out != 0).any(0).nonzero()[:, 0].cpu()
        width = maps.operator.channels
    else:
        size = (maps.shape[0], maps.shape[-1])
        live, width = torch.arange(maps.shape[2]), maps.shape[1]
        if maps.dim() != 4 or maps.shape[2] != maps.shape[3]:
            raise InputError(
                f"the maps of {layer} have shape {tuple(maps.shape)}; expected (B, M, L, L), one "
                "map per head and a row for every token."
            )
    if size != tuple(shape[:2]):
        raise InputError(
            f"tokens has shape {tuple(shape[:2])}, and {layer} works on {size[1]} tokens of "
            f"{size[0]} texts; expected the ids that the maps are of."
        )
    step = max(1, _TILE // (size[0] * width * size[1]))
    for index in live.split(step):
        if isinstance(maps, LayerEdges):
            yield index, _by_head(maps, index, count)
        else:
            yield index, maps[:, :, index]


def _by_head(layer: LayerEdges, index: Tensor, count: int) -> Tensor:
    # All channels at a time: `LayerEdges.heads` goes through the heads one by one.
    operator = layer.operator
    rows = operator.map_rows(
        index.to(operator.device).expand(operator.batch, -1), 0, operator.channels
    )
    return rows.unflatten(1, (count, -1)).sum(2)
