r"""Perturbation tests: what a model says while tokens are taken from it, or given back.

All of them order the tokens (or an image's patches) by relevance and run the model on inputs
from which a share of them is removed. They take relevance in the shape of the input, as every
Captum method returns it, and any ``forward_func`` that returns one row of logits an example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm._integers import as_integers
from captum_ssm.metrics._estimate import Estimate, bootstrap

Removal = str | int | float | Tensor | Callable[[Tensor], Tensor]
REMOVALS = ("zero", "mean", "blur", "mask")
TENTHS = tuple(k / 10 for k in range(1, 10))
WHOLE = tuple(k / 10 for k in range(11))


@dataclass(frozen=True)
class Curve:
    """What a model says as a share of its tokens is removed or given back, an example a row.

    Args:
        shares (Tensor): ``(S,)``, ascending.
        values (Tensor): ``(B, S)``.

    Examples::

        >>> curve = Curve(torch.tensor([0.0, 0.5, 1.0]), torch.tensor([[1.0, 1.0, 0.0]]))
        >>> curve.areas
        tensor([0.7500])
    """

    shares: Tensor
    values: Tensor

    @property
    def areas(self) -> Tensor:
        """The area under each example's curve over the span of the shares, ``(B,)``."""
        span = float(self.shares[-1] - self.shares[0])
        if span == 0:
            return self.values[:, 0]
        return torch.trapezoid(self.values, self.shares.to(self.values)) / span

    def mean(self) -> Tensor:
        """The curve's mean over examples, ``(S,)``."""
        return self.values.mean(0)

    def estimate(self, **options: Any) -> Estimate:
        """The mean area with its interval; the options are those of :func:`bootstrap`."""
        return bootstrap(self.areas, **options)


def perturbation(
    forward_func: Callable[..., Tensor],
    inputs: Tensor,
    attributions: Tensor,
    labels: Tensor,
    *,
    order: str = "positive",
    removal: Removal = "zero",
    shares: Sequence[float] = TENTHS,
    patch: int | tuple[int, int] = 1,
    mask: Tensor | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> Curve:
    """Top-1 hits while tokens are removed (Chefer et al., 2021; Ali et al., table 1).

    Positive perturbation removes the most relevant first: the lower the area the better.
    Negative perturbation removes the least relevant first: the higher the better. Both papers
    take 10 to 90 percent and report the area in percent.

    Args:
        forward_func (Callable): inputs to logits ``(B, V)``.
        inputs (Tensor): ids ``(B, L)``, embeddings ``(B, L, E)`` or images ``(B, C, H, W)``.
        attributions (Tensor): of their shape (ids of any shape that sums to ``(B, L)``).
        labels (Tensor): ``(B,)``: the true class, or the predicted one.
        order (str, optional): ``"positive"`` or ``"negative"``. Default: ``"positive"``
        removal (optional): what stands where something was removed: ``"zero"``, ``"mean"`` (of
            each image's colours, or of a sequence's embeddings), ``"blur"`` (images; Fong &
            Vedaldi, 2017), a number, for ids the UNK id, a tensor that broadcasts to the
            inputs, or a function of the inputs that returns one. With ``"mask"`` tokens stay
            where they are, and ``forward_func`` takes, behind the inputs, which of them are
            left, ``(B, L)`` of 0 and 1: an attention mask. Default: ``"zero"``
        shares (sequence of float, optional): ascending, in [0, 1]. Default: 0.1, 0.2, ..., 0.9
        patch (int or (int, int), optional): side of the squares an image is removed in; 1 for
            single pixels, as in the papers. Default: 1
        mask (Tensor, optional): ``(B, L)``, zero for padding, which is left as it is; shares
            are then of each example's own tokens. Default: None
        batch_size (int, optional): examples run at once; None for all. Default: None
        seed (int, optional): breaks ties in the order. Default: 0

    Returns:
        Curve: of 0 and 1.

    Raises:
        ValueError: for an order, shares or a removal that are not accepted, relevance that is
            not finite or does not fit, classes that the logits do not have, or a
            ``forward_func`` that returns something else.
        TypeError: for classes that are no integers.

    Examples::

        >>> def last(ids):
        ...     return model(ids).logits[:, -1]
        >>> predicted = last(input_ids).argmax(-1)
        >>> relevance = MambaLRP(model).attribute(input_ids, target=predicted)
        >>> curve = perturbation(last, input_ids, relevance, predicted, removal=0)
        >>> curve.values.shape
        torch.Size([1, 9])
    """
    runs = _runs(
        forward_func, inputs, attributions, order, removal, shares, patch, mask, batch_size, seed
    )
    hits = [(logits.argmax(-1) == classes("labels", labels, logits)).double() for logits in runs]
    return Curve(torch.tensor(list(shares), dtype=torch.float64), torch.stack(hits, 1).cpu())


def flipping(
    forward_func: Callable[..., Tensor],
    inputs: Tensor,
    attributions: Tensor,
    target: Tensor,
    *,
    order: str = "positive",
    removal: Removal = "zero",
    shares: Sequence[float] = WHOLE,
    patch: int | tuple[int, int] = 1,
    mask: Tensor | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    probability: bool = False,
) -> Curve:
    """The target's logit while tokens are removed (Samek et al., 2017).

    Args:
        target (Tensor): ``(B,)``, the class explained.
        probability (bool, optional): its probability instead. Default: False

    The other arguments, and the errors, are those of :func:`perturbation`.

    Returns:
        Curve: of logits, or probabilities.

    Examples::

        >>> def last(ids):
        ...     return model(ids).logits[:, -1]
        >>> predicted = last(input_ids).argmax(-1)
        >>> relevance = MambaLRP(model).attribute(input_ids, target=predicted)
        >>> flipping(last, input_ids, relevance, predicted, removal=0).values.shape
        torch.Size([1, 11])
    """
    runs = _runs(
        forward_func, inputs, attributions, order, removal, shares, patch, mask, batch_size, seed
    )
    return Curve(
        torch.tensor(list(shares), dtype=torch.float64), _target_curve(runs, target, probability)
    )


def delta_af(
    forward_func: Callable[..., Tensor],
    inputs: Tensor,
    attributions: Tensor,
    target: Tensor,
    **options: Any,
) -> Curve:
    r""":math:`\Delta A^F`, the area between two flipping curves (Jafari et al., MambaLRP, 2024).

    The target's logit while the least relevant tokens are removed first, less that while the
    most relevant are: the higher the area the better, and zero on average for relevance that
    means nothing. The arguments and the errors are those of :func:`flipping`.

    Returns:
        Curve: of differences of logits.

    Examples::

        >>> def last(ids):
        ...     return model(ids).logits[:, -1]
        >>> predicted = last(input_ids).argmax(-1)
        >>> relevance = MambaLRP(model).attribute(input_ids, target=predicted)
        >>> curve = delta_af(last, input_ids, relevance, predicted, removal=0)
        >>> curve.areas.shape
        torch.Size([1])
    """
    least = flipping(forward_func, inputs, attributions, target, order="negative", **options)
    most = flipping(forward_func, inputs, attributions, target, order="positive", **options)
    return Curve(least.shares, least.values - most.values)


def activation(
    forward_func: Callable[..., Tensor],
    inputs: Tensor,
    attributions: Tensor,
    target: Tensor,
    *,
    removal: Removal,
    shares: Sequence[float] = WHOLE,
    patch: int | tuple[int, int] = 1,
    mask: Tensor | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> Curve:
    """The target's probability while tokens are given back (Ali et al., 2022; AUAC).

    From an input that is removed altogether, for text a sentence of UNK, tokens come back from
    the most relevant on. The area under the curve is the AUAC: the higher the better. The
    arguments and the errors are those of :func:`perturbation`; ``shares`` are of tokens given
    back.

    Returns:
        Curve: of probabilities.

    Examples::

        >>> def last(ids):
        ...     return model(ids).logits[:, -1]
        >>> predicted = last(input_ids).argmax(-1)
        >>> relevance = MambaLRP(model).attribute(input_ids, target=predicted)
        >>> activation(last, input_ids, relevance, predicted, removal=0).mean().shape
        torch.Size([11])
    """
    # Giving back the most relevant share s is removing the least relevant share 1 - s.
    removed = [1 - s for s in shares]
    runs = _runs(
        forward_func, inputs, attributions, "negative", removal, removed, patch, mask, batch_size,
        seed,
    )  # fmt: skip
    return Curve(torch.tensor(list(shares), dtype=torch.float64), _target_curve(runs, target, True))


def pruning(
    forward_func: Callable[..., Tensor],
    inputs: Tensor,
    attributions: Tensor,
    *,
    removal: Removal,
    shares: Sequence[float] = WHOLE,
    patch: int | tuple[int, int] = 1,
    mask: Tensor | None = None,
    batch_size: int | None = None,
    seed: int = 0,
) -> Curve:
    """How far the logits move while the least relevant tokens are removed (AU-MSE).

    The mean squared difference to the logits of the whole input; the lower the area the better
    (Ali et al., 2022; Ali et al., 2025, appendix A). Relevance is ordered by magnitude, as in
    the paper's pruning task. The arguments and the errors are those of :func:`perturbation`.

    Returns:
        Curve: of squared logits.

    Examples::

        >>> def last(ids):
        ...     return model(ids).logits[:, -1]
        >>> predicted = last(input_ids).argmax(-1)
        >>> relevance = MambaLRP(model).attribute(input_ids, target=predicted)
        >>> bool((pruning(last, input_ids, relevance, removal=0).values >= 0).all())
        True
    """
    relevance = _unit_relevance(attributions, inputs, _side(patch)).abs()
    runs = _runs(
        forward_func, inputs, relevance, "negative", removal, [0.0, *shares], patch, mask,
        batch_size, seed,
    )  # fmt: skip
    whole = next(runs).double()
    errors = [(logits.double() - whole).square().mean(-1) for logits in runs]
    return Curve(torch.tensor(list(shares), dtype=torch.float64), torch.stack(errors, 1).cpu())


def removed(inputs: Tensor, removal: Removal) -> Tensor:
    """Inputs with everything removed; ``removal`` as in :func:`perturbation`."""
    if callable(removal) and not torch.is_tensor(removal):
        return removal(inputs)
    if torch.is_tensor(removal):
        return removal.to(inputs).expand_as(inputs)
    if not isinstance(removal, str):
        return torch.full_like(inputs, removal)
    if not inputs.is_floating_point():
        raise ValueError(
            f"removal is {removal!r} for ids; accepted are the UNK id, 'mask', a tensor and a "
            "function."
        )
    if removal == "zero":
        return torch.zeros_like(inputs)
    if removal == "mean":
        where = (2, 3) if inputs.dim() == 4 else (1,)
        return inputs.mean(where, keepdim=True).expand_as(inputs)
    if removal == "blur" and inputs.dim() == 4:
        return blurred(inputs)
    raise ValueError(
        f"removal is {removal!r} for inputs of shape {tuple(inputs.shape)}; accepted are "
        f"{REMOVALS} ('blur' for images, 'mask' for tokens), a number, a tensor and a function."
    )


def blurred(images: Tensor, sigma: float | None = None) -> Tensor:
    """Images under a Gaussian blur, by default a tenth of their height wide."""
    sigma = images.shape[-2] / 10 if sigma is None else sigma
    reach = max(1, min(int(3 * sigma), min(images.shape[-2:]) - 1))
    x = torch.arange(-reach, reach + 1, dtype=images.dtype, device=images.device)
    kernel = torch.exp(-0.5 * (x / sigma).square())
    kernel = kernel / kernel.sum()
    colours = images.shape[1]
    padded = F.pad(images, (reach,) * 4, mode="reflect")
    down = kernel.view(1, 1, -1, 1).expand(colours, -1, -1, -1)
    across = kernel.view(1, 1, 1, -1).expand(colours, -1, -1, -1)
    return F.conv2d(F.conv2d(padded, down, groups=colours), across, groups=colours)


def _runs(
    forward_func: Callable[..., Tensor],
    inputs: Tensor,
    attributions: Tensor,
    order: str,
    removal: Removal,
    shares: Sequence[float],
    patch: int | tuple[int, int],
    mask: Tensor | None,
    batch_size: int | None,
    seed: int,
) -> Iterator[Tensor]:
    # The logits (B, V) for each share removed, as an iterator.
    if order not in ("positive", "negative"):
        raise ValueError(f"order is {order!r}; accepted are 'positive' and 'negative'.")
    if any(not 0 <= s <= 1 for s in shares):
        raise ValueError(f"shares are {list(shares)}; accepted are numbers in [0, 1].")
    side = _side(patch)
    relevance = _unit_relevance(attributions, inputs, side)
    if not bool(torch.isfinite(relevance).all()):
        raise ValueError("attributions hold NaN or Inf.")
    rank, count = _ranks(relevance, mask, order == "positive", seed)
    masks = isinstance(removal, str) and removal == "mask" and inputs.dim() < 4
    replacement = inputs if masks else removed(inputs, removal)
    step = len(inputs) if batch_size is None else batch_size
    for share in shares:
        gone = rank < (share * count).round()[:, None]  # (B, U)
        if masks:
            left = ~gone if mask is None else (mask.cpu() != 0) & ~gone
            changed: tuple[Tensor, ...] = (inputs, left.long().to(inputs.device))
        else:
            changed = (torch.where(_on_inputs(gone, inputs, side), replacement, inputs),)
        with torch.no_grad():
            parts = zip(*(each.split(step) for each in changed), strict=True)
            yield torch.cat([read_logits(forward_func(*part)) for part in parts])


def _side(patch: int | tuple[int, int]) -> tuple[int, int]:
    return (patch, patch) if isinstance(patch, int) else patch


def read_logits(output: Any) -> Tensor:
    """What ``forward_func`` returned, or its ``.logits``, where it is ``(B, V)``."""
    logits = getattr(output, "logits", output)
    if not torch.is_tensor(logits) or logits.dim() != 2:
        raise ValueError(
            "forward_func has to return logits (B, V), one row an example; it returned "
            f"{tuple(logits.shape) if torch.is_tensor(logits) else type(output).__name__}."
        )
    return logits


def classes(name: str, given: Any, logits: Tensor) -> Tensor:
    """The class of each example, ``(B,)``, where it is one of the columns of ``logits (B, V)``."""
    (B, V), accepted = logits.shape, "accepted is one class an example, integers (B,)"
    yes_or_no = isinstance(given, Tensor) and given.dtype == torch.bool
    found = as_integers(given.long() if yes_or_no else given, logits.device)
    if found is None:
        kind = given.dtype if isinstance(given, Tensor) else type(given).__name__
        raise TypeError(f"{name} is {kind}; {accepted}.")
    if found.numel() != 1 and tuple(found.shape) != (B,):
        raise ValueError(f"{name} has shape {tuple(found.shape)} for a batch of {B}; {accepted}.")
    if bool(((found < 0) | (found >= V)).any()):
        raise ValueError(
            f"{name} holds classes from {int(found.min())} to {int(found.max())}; forward_func "
            f"returns logits of shape {tuple(logits.shape)}, so of classes 0 .. {V - 1}."
        )
    return found.reshape(-1).expand(B)


def _unit_relevance(attributions: Tensor, inputs: Tensor, side: tuple[int, int]) -> Tensor:
    # Relevance of what can be removed at once: tokens (B, L), or squares of an image (B, U).
    if inputs.dim() == 4:
        if attributions.dim() == 2:  # of units already
            return attributions
        maps = attributions.sum(1) if attributions.dim() == 4 else attributions
        if maps.shape != (inputs.shape[0], *inputs.shape[2:]):
            raise ValueError(_shapes(attributions, inputs))
        pooled = F.avg_pool2d(maps[:, None].double(), side, ceil_mode=True)
        return pooled.flatten(1)
    relevance = attributions.sum(-1) if attributions.dim() == 3 else attributions
    if relevance.shape != inputs.shape[:2]:
        raise ValueError(_shapes(attributions, inputs))
    return relevance.double()


def _shapes(attributions: Tensor, inputs: Tensor) -> str:
    return (
        f"attributions have shape {tuple(attributions.shape)} for inputs of shape "
        f"{tuple(inputs.shape)}; give them in the inputs' shape, as a Captum method does."
    )


def _ranks(
    relevance: Tensor, mask: Tensor | None, descending: bool, seed: int
) -> tuple[Tensor, Tensor]:
    # The place of each unit in the order of removal, and how many there are an example.
    B, U = relevance.shape
    generator = torch.Generator().manual_seed(seed)
    relevance = relevance.detach().cpu()
    # In a random order first: what follows is stable, so ties fall at random.
    shuffle = torch.rand(B, U, generator=generator).argsort(1)
    key = relevance.gather(1, shuffle)
    if mask is not None:
        last = -torch.inf if descending else torch.inf
        key = key.masked_fill(mask.cpu().gather(1, shuffle) == 0, last)
    sequence = shuffle.gather(1, key.argsort(dim=1, descending=descending, stable=True))
    rank = sequence.argsort(1)
    count = torch.full((B,), U) if mask is None else (mask.cpu() != 0).sum(1)
    return rank, count


def _on_inputs(gone: Tensor, inputs: Tensor, side: tuple[int, int]) -> Tensor:
    gone = gone.to(inputs.device)
    if inputs.dim() == 2:
        return gone
    if inputs.dim() == 3:
        return gone[..., None]
    height, width = inputs.shape[-2:]
    rows, columns = -(-height // side[0]), -(-width // side[1])
    squares = gone.view(-1, rows, columns)
    squares = squares.repeat_interleave(side[0], 1).repeat_interleave(side[1], 2)
    return squares[:, None, :height, :width]


def _target_curve(runs: Iterator[Tensor], target: Tensor, probability: bool) -> Tensor:
    found = []
    for logits in runs:
        scores = logits.double().softmax(-1) if probability else logits.double()
        found.append(scores.gather(1, classes("target", target, logits)[:, None])[:, 0])
    return torch.stack(found, 1).cpu()
