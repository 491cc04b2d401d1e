"""Which token, or entry, of a point reads each earlier one, decoded from a few backward passes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from captum_ssm.graph.points import Point, gradients


def readers(
    later: Point,
    earlier: Point,
    channels: Tensor | None = None,
    *,
    tokens: Tensor | None = None,
    labels: Tensor | None = None,
) -> Tensor | None:
    """The token of ``later`` that reads each token of ``earlier``, ``(T,)`` int64; -1 for none.

    None where several later tokens read one earlier token. Two backward passes: seeded with random
    vectors :math:`r_t`, then with :math:`c_t r_t` for known numbers :math:`c_t`, the gradient at a
    token that only later token t reads is multiplied by exactly :math:`c_t`. Where several read it,
    the two gradients are not parallel. Where that is not clear, and in half precision, where the
    factors are too coarse, it is :func:`readers_by_bits`.

    Args:
        later (Point): where gradients are put in.
        earlier (Point): where they are read.
        channels (Tensor, optional): the later channels to look at. Default: None
        tokens (Tensor, optional): the later tokens to look at. Default: None
        labels (Tensor, optional): a number below T for each later token, returned in place of its
            position; tokens with the same number count as one. Default: None
    """
    if min(torch.finfo(p.dtype).bits for p in (later, earlier)) < 32:
        return readers_by_bits(later, earlier, channels, tokens=tokens, labels=labels)
    T = later.tokens
    numbers = torch.arange(T, device=later.device) if labels is None else labels
    codes = (1 + numbers / T).to(later.dtype)[:, None]
    r = _noise_in(later, channels, tokens)
    ((first,), (second,)) = (gradients([later], [s], [earlier]) for s in (r, r * codes))
    if first is None or second is None:
        return torch.full((earlier.tokens,), -1, device=earlier.device)
    reader, is_clear = decoded(first, second, T)
    if reader is not None and not is_clear:
        # Several readers, or gradients that are rounding: those through the norm of a multiple.
        return readers_by_bits(later, earlier, channels, tokens=tokens, labels=labels)
    return reader


def decoded(first: Tensor, second: Tensor, count: int) -> tuple[Tensor | None, bool]:
    """The number k at each token whose second vector ``(E,)`` is its first times 1 + k / count.

    They are ``(T,)`` int64, -1 for a first vector of zeros; None where vectors are not parallel.
    And whether they are clear of rounding.
    """
    if first.is_complex():
        first, second = (torch.view_as_real(x).flatten(1) for x in (first, second))
    a, b = first.double(), second.double()
    size = a.square().sum(-1)
    ratio = (a * b).sum(-1) / size.clamp(min=1e-300)
    rest = (b - ratio[:, None] * a).norm(dim=-1) / size.sqrt().clamp(min=1e-150)
    if bool((rest > 0.01)[size > 1e-4 * size.amax()].any()):
        return None, False
    unrounded = (ratio - 1) * count
    number = unrounded.round()
    # Gradients so small that they are rounded may give any number, and infinite ones none.
    clear = ((unrounded - number).abs() <= 0.25) & (rest <= 0.05 / count)
    clear &= (number >= 0) & (number < count)
    is_read = size != 0
    return torch.where(is_read & clear, number, -1).long(), bool((clear | ~is_read).all())


def readers_by_bits(
    later: Point,
    earlier: Point,
    channels: Tensor | None = None,
    *,
    by_channel: bool = False,
    tokens: Tensor | None = None,
    labels: Tensor | None = None,
) -> Tensor | None:
    """:func:`readers` from exact zeros alone, in 2 log2(T) passes: for half precision.

    With ``by_channel`` each earlier channel is looked at by itself, ``(T, E)``.
    """
    r = _noise_in(later, channels, tokens)
    numbers = torch.arange(later.tokens, device=later.device) if labels is None else labels
    reader: Tensor | None = None
    for bit in range(max(1, (later.tokens - 1).bit_length())):
        hits = []
        for value in (0, 1):
            chosen = ((numbers >> bit) & 1) == value
            (g,) = gradients([later], [r * chosen[:, None]], [earlier])
            if g is None:
                return torch.full((earlier.tokens,), -1, device=earlier.device)
            hits.append(g != 0 if by_channel else (g != 0).any(-1))
        if bool((hits[0] & hits[1]).any()):
            return None
        if reader is None:
            reader = torch.where(hits[0] | hits[1], 0, -1)
        reader = torch.where(hits[1], reader | (1 << bit), reader)
    is_valid = reader is not None and bool((reader <= int(numbers.max())).all())
    return reader if is_valid else None


@dataclass(frozen=True)
class Entries:
    """The later entry that reads each earlier entry, and the factor with which it does.

    Args:
        token (Tensor): ``(T, E)`` of the earlier point, the later token; -1 for none.
        channel (Tensor): ``(T, E)``, its channel; -1 for none.
        factor (Tensor): ``(T, E)``, zero for none.
    """

    token: Tensor
    channel: Tensor
    factor: Tensor


def entries(later: Point, earlier: Point, *, where: Tensor | None = None) -> Entries | None:
    """The entries of ``later`` that read those of ``earlier``, where each is read by at most one.

    None where an entry is read by several. Four backward passes: seeded with ones, with a number
    for each token, with a number for each channel, and with random numbers as a proof.

    With ``where``, ``(T, E)`` bool, only some later entries are looked at.
    """
    T, E = later.tokens, later.width
    ones = torch.ones(T, E, dtype=later.dtype, device=later.device)
    if where is not None:
        ones = ones * where
    if later.is_at(earlier):
        token, channel = torch.meshgrid(
            *(torch.arange(n, device=later.device) for n in (T, E)), indexing="ij"
        )
        is_read = ones != 0
        return Entries(
            torch.where(is_read, token, -1), torch.where(is_read, channel, -1), ones.double()
        )
    by_token = 1 + torch.arange(T, device=later.device)[:, None] / T
    by_channel = 1 + torch.arange(E, device=later.device) / E
    noise = later.noise()
    pulled = []
    for seed in (ones, ones * by_token, ones * by_channel, ones * noise):
        (g,) = gradients([later], [seed.to(later.dtype)], [earlier])
        if g is None:
            nothing = torch.full((earlier.tokens, earlier.width), -1, device=earlier.device)
            return Entries(nothing, nothing, 0.0 * nothing)
        pulled.append(g.double())
    factor, tokens, channels, proof = pulled
    is_read = factor != 0
    safe = torch.where(is_read, factor, 1)
    token = ((tokens / safe - 1) * T).round().long().clamp(0, T - 1)
    channel = ((channels / safe - 1) * E).round().long().clamp(0, E - 1)
    expected = factor * noise.double()[token, channel]
    scale = factor.abs() * (1 + noise.double()[token, channel].abs())
    if bool((((proof - expected).abs() > 1e-3 * scale) & (is_read | (proof != 0))).any()):
        return None
    return Entries(torch.where(is_read, token, -1), torch.where(is_read, channel, -1), factor)


def _noise_in(later: Point, channels: Tensor | None, tokens: Tensor | None) -> Tensor:
    r = later.noise()
    for axis, index in ((1, channels), (0, tokens)):
        if index is not None:
            masked = torch.zeros_like(r)
            masked.index_copy_(axis, index, r.index_select(axis, index))
            r = masked
    return r
