"""Perturbation tests: a model's output while tokens are removed, or given back.

All of them order the tokens (or an image's patches) by relevance and run the model on inputs
from which a share of them is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from captum_ssm.errors import brief
from captum_ssm.metrics.interval import Interval, bootstrap
from captum_ssm.metrics.logits import batched_logits, classes

Removal = str | int | float | Tensor | Callable[[Tensor], Tensor]
REMOVALS = ("zero", "mean", "blur", "mask")
TENTHS = tuple(k / 10 for k in range(1, 10))
WHOLE = tuple(k / 10 for k in range(11))


@dataclass(frozen=True)
class Curve:
    """A score per example at each share of tokens that is removed or given back.

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

    def estimate(self, **options: Any) -> Interval:
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
    Negative perturbation removes the least relevant first: the higher the better.

    Args:
        forward_func (Callable): inputs to logits ``(B, V)``.
        inputs (Tensor): ids ``(B, L)``, embeddings ``(B, L, E)`` or images ``(B, C, H, W)``.
        attributions (Tensor): of their shape (ids of any shape that sums to ``(B, L)``).
        labels (Tensor): ``(B,)``: the true class, or the predicted one.
        order (str, optional): ``"positive"`` or ``"negative"``. Default: ``"positive"``
        removal (optional): what replaces the removed: ``"zero"``, ``"mean"`` (of each of an
            image's channels, or of a sequence's embeddings), ``"blur"`` (images; Fong &
            Vedaldi, 2017), a number (for ids the UNK id), a tensor that broadcasts to the
            inputs, or a function of the inputs that returns one. With ``"mask"`` the tokens
            stay as they are, and ``forward_func`` is called with an attention mask after the
            inputs: ``(B, L)``, 1 for tokens that are left, 0 for removed ones.
            Default: ``"zero"``
        shares (sequence of float, optional): ascending, in [0, 1]. Default: 0.1, 0.2, ..., 0.9,
            as in both papers
        patch (int or (int, int), optional): side of the squares an image is removed in; 1 for
            single pixels, as in the papers. Default: 1
        mask (Tensor, optional): a padding mask ``(B, L)``, zero for padding. Padding is not
            removed and does not count: shares are of each example's own tokens. Default: None
        batch_size (int, optional): examples run at once; None for all. Default: None
        seed (int, optional): breaks ties in the order. Default: 0

    Returns:
        Curve: of 0 and 1.

    Raises:
        ValueError: for an unknown order or removal, shares outside [0, 1], relevance that is
            not finite or not of the inputs' shape, classes that the logits do not have, or a
            ``forward_func`` that does not return ``(B, V)``.
        TypeError: for classes that are not integers.

    Examples::

        >>> last = lambda ids: model(ids).logits[:, -1]
        >>> predicted = last(input_ids).argmax(-1)
        >>> relevance = MambaLRP(model).attribute(input_ids, target=predicted)
        >>> curve = perturbation(last, input_ids, relevance, predicted, removal=0)
        >>> curve.values.shape
        torch.Size([1, 9])
    """
    shares = list(shares)
    runs = _Removal(order, removal, patch, mask, batch_size, seed).runs(
        forward_func, inputs, attributions, shares
    )
    return _curve(shares, [r.argmax(-1) == classes("labels", labels, r) for r in runs])


def flipping(
    forward_func: Callable[..., Tensor],
    inputs: Tensor,
    attributions: Tensor,
    target: Tensor,
    *,
    shares: Sequence[float] = WHOLE,
    probability: bool = False,
    **options: Any,
) -> Curve:
    """The target's logit, or probability, while tokens are removed (Samek et al., 2017).

    Args:
        target (Tensor): ``(B,)``, the class explained.
        probability (bool, optional): the target's probability instead of its logit.
            Default: False

    The other arguments, and the errors, are those of :func:`perturbation`.

    Examples::

        >>> last = lambda ids: model(ids).logits[:, -1]
        >>> flipping(last, input_ids, torch.rand(1, 7), torch.tensor([5]), removal=0).values.shape
        torch.Size([1, 11])
    """
    shares, scores = list(shares), []
    for logits in _Removal(**options).runs(forward_func, inputs, attributions, shares):
        values = logits.double().softmax(-1) if probability else logits.double()
        scores.append(values.gather(1, classes("target", target, logits)[:, None])[:, 0])
    return _curve(shares, scores)


def delta_af(
    forward_func: Callable[..., Tensor],
    inputs: Tensor,
    attributions: Tensor,
    target: Tensor,
    **options: Any,
) -> Curve:
    r""":math:`\Delta A^F`, the area between two flipping curves (Jafari et al., MambaLRP, 2024).

    The target's logit while the least relevant tokens are removed first, minus its logit while
    the most relevant are removed first: the higher the area the better, and zero on average for
    random relevance. The arguments and the errors are those of :func:`flipping`.

    Examples::

        >>> last = lambda ids: model(ids).logits[:, -1]
        >>> delta_af(last, input_ids, torch.rand(1, 7), torch.tensor([5]), removal=0).areas.shape
        torch.Size([1])
    """
    options["shares"] = list(options.get("shares", WHOLE))  # used twice
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
    **options: Any,
) -> Curve:
    """The target's probability while tokens are given back (Ali et al., 2022; AUAC).

    Everything is removed at first (text is all UNK); then tokens are given back, the most
    relevant first. The area under the curve is the AUAC: the higher the better. The arguments
    and the errors are those of :func:`perturbation`; ``shares`` are of tokens given back.

    Examples::

        >>> last = lambda ids: model(ids).logits[:, -1]
        >>> activation(last, input_ids, torch.rand(1, 7), torch.tensor([5]), removal=0).mean().shape
        torch.Size([11])
    """
    # Giving back the most relevant share s is removing the least relevant share 1 - s.
    shares = list(shares)
    options |= {"order": "negative", "removal": removal, "probability": True}
    options["shares"] = [1 - s for s in shares]
    removing = flipping(forward_func, inputs, attributions, target, **options)
    return _curve(shares, removing.values.unbind(1))


def pruning(
    forward_func: Callable[..., Tensor],
    inputs: Tensor,
    attributions: Tensor,
    *,
    removal: Removal,
    shares: Sequence[float] = WHOLE,
    **options: Any,
) -> Curve:
    """How much the logits change while the least relevant tokens are removed (AU-MSE).

    The mean squared difference from the logits of the whole input; the lower the area the
    better (Ali et al., 2022; Ali et al., 2025, appendix A). Tokens are ordered by the magnitude
    of their relevance, as in the paper's pruning task.
    The arguments and the errors are those of :func:`perturbation`.

    Examples::

        >>> last = lambda ids: model(ids).logits[:, -1]
        >>> bool((pruning(last, input_ids, torch.rand(1, 7), removal=0).values >= 0).all())
        True
    """
    shares = list(shares)
    least = _Removal("negative", removal, **options)
    magnitude = _unit_relevance(attributions, inputs, least.side).abs()
    runs = least.runs(forward_func, inputs, magnitude, [0.0, *shares])
    whole = next(runs).double()
    return _curve(shares, [(logits.double() - whole).square().mean(-1) for logits in runs])


def removed(inputs: Tensor, removal: Removal) -> Tensor:
    """Inputs with everything removed; ``removal`` as in :func:`perturbation`."""
    if callable(removal):
        return removal(inputs)
    if torch.is_tensor(removal):
        return removal.to(inputs).expand_as(inputs)
    if not isinstance(removal, str):
        return torch.full_like(inputs, removal)
    if not inputs.is_floating_point():
        raise ValueError(
            f"removal is {brief(removal)} for ids; expected the UNK id, 'mask', a tensor or a "
            "function."
        )
    if removal == "zero":
        return torch.zeros_like(inputs)
    if removal == "mean":
        axes = (2, 3) if inputs.dim() == 4 else (1,)
        return inputs.mean(axes, keepdim=True).expand_as(inputs)
    if removal == "blur" and inputs.dim() == 4:
        return blurred(inputs)
    raise ValueError(
        f"removal is {brief(removal)} for inputs of shape {tuple(inputs.shape)}; expected one of "
        f"{REMOVALS} ('blur' for images, 'mask' for tokens), a number, a tensor or a function."
    )


def blurred(images: Tensor) -> Tensor:
    """Images after a Gaussian blur whose standard deviation is a tenth of their height."""
    from scipy.ndimage import gaussian_filter

    sigma = images.shape[-2] / 10
    radius = max(1, min(int(3 * sigma), min(images.shape[-2:]) - 1))
    values = images.detach().double().cpu().numpy()
    soft = gaussian_filter(values, sigma, mode="mirror", radius=radius, axes=(2, 3))
    return torch.from_numpy(soft).to(images)


@dataclass(frozen=True)
class _Removal:
    # The arguments that all tests share, as perturbation describes them.
    order: str = "positive"
    removal: Removal = "zero"
    patch: int | tuple[int, int] = 1
    mask: Tensor | None = None
    batch_size: int | None = None
    seed: int = 0

    @property
    def side(self) -> tuple[int, int]:
        return (self.patch, self.patch) if isinstance(self.patch, int) else self.patch

    def runs(
        self,
        forward_func: Callable[..., Tensor],
        inputs: Tensor,
        attributions: Tensor,
        shares: list[float],
    ) -> Iterator[Tensor]:
        # The logits (B, V) for each share removed.
        if self.order not in ("positive", "negative"):
            raise ValueError(f"order is {self.order!r}; expected 'positive' or 'negative'.")
        if any(not 0 <= s <= 1 for s in shares):
            raise ValueError(f"shares are {shares}; expected numbers in [0, 1].")
        relevance = _unit_relevance(attributions, inputs, self.side)
        if not bool(torch.isfinite(relevance).all()):
            raise ValueError("attributions hold NaN or Inf; expected finite values.")
        relevance = relevance.detach().cpu()
        removable = torch.ones_like(relevance).bool() if self.mask is None else self.mask.cpu() != 0
        key = -relevance if self.order == "positive" else relevance
        rank = _removal_ranks(key, removable, self.seed)
        masks = isinstance(self.removal, str) and self.removal == "mask" and inputs.dim() < 4
        replacement = inputs if masks else removed(inputs, self.removal)
        for share in shares:
            gone = rank < (share * removable.sum(1)).round()[:, None]  # (B, U)
            if masks:
                changed: tuple[Tensor, ...] = (inputs, (removable & ~gone).long().to(inputs.device))
            else:
                changed = (torch.where(_on_inputs(gone, inputs, self.side), replacement, inputs),)
            yield batched_logits(forward_func, changed, self.batch_size)


def _unit_relevance(attributions: Tensor, inputs: Tensor, side: tuple[int, int]) -> Tensor:
    # Relevance per unit, which is what is removed at once: tokens (B, L), or squares of an
    # image (B, U).
    images = inputs.dim() == 4
    if images and attributions.dim() == 2:  # per unit already
        return attributions.double()
    channels = 1 if images else 2
    expected = tuple(n for axis, n in enumerate(inputs.shape) if axis != channels)
    is_summed = attributions.dim() == len(expected)
    relevance = attributions if is_summed else attributions.sum(channels)
    if relevance.shape != expected:
        raise ValueError(
            f"attributions have shape {tuple(attributions.shape)} for inputs of shape "
            f"{tuple(inputs.shape)}; give them in the inputs' shape, as a Captum method does."
        )
    if not images:
        return relevance.double()
    return F.avg_pool2d(relevance[:, None].double(), side, ceil_mode=True).flatten(1)


def _removal_ranks(key: Tensor, removable: Tensor, seed: int) -> Tensor:
    # When each unit (B, U) is removed, from 0 on: by ascending key, padding last, ties at random.
    noise = torch.rand(key.shape, generator=torch.Generator().manual_seed(seed))
    sequence = np.lexsort((noise.numpy(), key.masked_fill(~removable, torch.inf).numpy()))
    return torch.from_numpy(sequence).argsort(1)


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


def _curve(shares: list[float], values: Sequence[Tensor]) -> Curve:
    stacked = torch.stack(list(values), 1).cpu().double()
    return Curve(torch.tensor(shares, dtype=torch.float64), stacked)
