"""What an adapter returns: a mixer frozen at one input."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from typing_extensions import Self

from captum_ssm._nested import detached
from captum_ssm.mixers._parts import ShortConv
from captum_ssm.operators import TokenOperator
from captum_ssm.operators.composed import product, sum_of

COMPONENTS = ("conv", "activation", "gate", "norm", "skip")
PAPER_COMPONENTS = ("conv", "activation", "gate", "norm")
FORMULATIONS = ("hidden", "unified")

# A product of two tensors that both carry relevance.
Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class FrozenMixer:
    r"""A token mixer frozen at one input: what acts on what, and in which order.

    .. math::
        y = W_{out}\, \big(n \odot g \odot (\alpha v + s \odot v)\big) + b_{out}, \qquad
        v = \sigma \odot (\mathrm{conv}(u) + b_{conv})

    Args:
        recurrence (TokenOperator): :math:`\alpha`.
        inputs (Tensor): u, ``(B, L, D)``, what the convolution acts on, with padding zeroed
            where the model zeroes it; the values themselves where there is neither a
            convolution nor an activation.
        out_proj (Callable): maps the gated output ``(B, L, D)`` to the mixer's ``(B, L, E)``.
        out_weight (Tensor): ``(E, D)``, the weight of ``out_proj`` (``call.weight(layer)``).
        skip (Tensor, optional): s, broadcasts to ``(B, L, D)``. Default: None
        conv (Tensor, optional): taps ``(D, K)`` as in :class:`torch.nn.Conv1d`. Default: None
        conv_bias (Tensor, optional): its bias, ``(D,)``, or ``(B, L, D)`` for what else is
            added behind the convolution; it lies outside the operator. Default: None
        activation (Tensor, optional): :math:`\sigma`, ``(B, L, D)``: for SiLU the sigmoid of
            its argument, times the padding mask. Default: None
        gate (Tensor, optional): g, ``(B, L, D)``. Default: None
        gate_argument (Tensor, optional): z, ``(B, L, D)``, where the gate is SiLU or GELU of
            it, so that gate and signal carry relevance alike (MambaLRP's half rule).
            Default: None
        norm (Tensor, optional): n, ``(B, L, D)``: the frozen scale of a norm. Default: None
        centred (bool, optional): the norm first takes the mean over channels away, which lies
            outside the operator (:meth:`remainder`). Default: False
        offset (Tensor, optional): a bias after the norm, added to the gated output; it lies
            outside the operator. Broadcasts to ``(B, L, D)``. Default: None
        paper_components (tuple of str, optional): what ``"unified"`` folds in where no components
            are chosen, as in the family's own equation of Zimerman et al. Default: all except
            the skip
        rounding (float, optional): how many times further than most the mixer's own arithmetic
            may be from exact in half precision, for the reconstruction check. Default: 1.0

    Examples::

        >>> module = model.backbone.layers[0].mixer
        >>> x = torch.randn(1, 7, 16)
        >>> frozen = captum_ssm.mixers.find_adapter(module)(
        ...     MixerCall("mixer", module, (x,), {}, module(x))
        ... )
        >>> torch.testing.assert_close(frozen.output(), module(x), rtol=1e-4, atol=1e-5)
        >>> frozen.operator("unified").matrix("mean").shape
        torch.Size([1, 7, 7])
    """

    recurrence: TokenOperator
    inputs: Tensor
    out_proj: Callable[[Tensor], Tensor] = field(repr=False)
    out_weight: Tensor = field(repr=False)
    skip: Tensor | None = None
    conv: Tensor | None = None
    conv_bias: Tensor | None = None
    activation: Tensor | None = None
    gate: Tensor | None = None
    gate_argument: Tensor | None = None
    norm: Tensor | None = None
    centred: bool = False
    offset: Tensor | None = None
    paper_components: tuple[str, ...] = PAPER_COMPONENTS
    rounding: float = 1.0

    @cached_property
    def values(self) -> Tensor:
        """v, ``(B, L, D)``, what the recurrence acts on."""
        v = ShortConv(self.inputs, self.conv, self.conv_bias).output
        return v if self.activation is None else v * self.activation

    def with_values(self, values: Tensor) -> FrozenMixer:
        """This mixer, spared computing ``values``, ``(B, L, D)``, once more."""
        self.__dict__["values"] = values  # where cached_property looks; a copy computes its own
        return self

    def operator(
        self, formulation: str = "hidden", components: Iterable[str] | None = None
    ) -> TokenOperator:
        """The operator whose maps are the implicit attention.

        Args:
            formulation (str, optional): ``"hidden"``: the recurrence alone (Ali et al., eq. 13),
                acting on ``values``. ``"unified"``: the whole mixer up to its output
                projection (Zimerman et al., eq. 9), acting on ``inputs``.
                Default: ``"hidden"``
            components (iterable of str, optional): which parts ``"unified"`` folds in, any of
                ``"conv" "activation" "gate" "norm" "skip"``. None is the paper's choice, the
                mixer's ``paper_components``. Default: None

        Raises:
            ValueError: for an unknown formulation or component, or components without
                ``"unified"``.
        """
        chosen = self._chosen(formulation, components)
        if formulation == "hidden":
            return self.recurrence
        return self.recurrence.compose(
            left=product(
                self.gate if "gate" in chosen else None, self.norm if "norm" in chosen else None
            ),
            skip=self.skip if "skip" in chosen else None,
            right=self.activation if "activation" in chosen else None,
            conv=self.conv if "conv" in chosen else None,
        )

    def _chosen(self, formulation: str, components: Iterable[str] | None) -> tuple[str, ...]:
        chosen = check_components(formulation, components)
        return self.paper_components if chosen is None else chosen

    @property
    def left(self) -> Tensor | None:
        """What multiplies the rows of every map: gate and norm, ``(B, L, D)``."""
        return product(self.gate, self.norm)

    def scans_in_order(self) -> list[tuple[FrozenMixer, Tensor | None, float]]:
        """The scans the mixer adds up: each with the order of its tokens and its weight."""
        return [(self, None, 1.0)]

    def mix(self, values: Tensor) -> Tensor:
        """The recurrence of ``values (B, L, D)``, and the skip: ``(B, L, D)``."""
        y = self.recurrence.matvec(values)
        return y if self.skip is None else torch.addcmul(y, self.skip, values)

    def gated_output(self, multiply: Product = torch.mul) -> Tensor:
        """The input of the output projection, ``(B, L, D)``, by way of the operator.

        Args:
            multiply (Callable, optional): the product of a signal and a gate that depends on
                ``gate_argument``, which relevance propagation replaces by a rule of its own.
                Default: :func:`torch.mul`
        """
        total = self._add_up(lambda scan: scan._gated(multiply))
        return total if self.offset is None else total + self.offset

    def output(self, multiply: Product = torch.mul) -> Tensor:
        """What the mixer returns, ``(B, L, E)``: the output projection of :meth:`gated_output`."""
        return self.out_proj(self.gated_output(multiply))

    def remainder(self) -> Tensor:
        """What is added to the gated output outside of all maps, ``(B, L, D)``.

        The offset, less what a centred norm takes away. What ``conv_bias`` adds passes through the
        maps and is no part of it.
        """
        taken = self._add_up(lambda scan: scan._mean_taken())
        return -taken if self.offset is None else self.offset - taken

    def detach_coefficients(self) -> Self:
        """This mixer with its coefficients outside of the autograd graph.

        Its output is linear in ``inputs``, with a gradient through nothing else; a gate that has a
        ``gate_argument`` is that argument times a constant.
        """
        frozen = detached(
            {name: getattr(self, name) for name in ("skip", "activation", "gate", "norm", "offset")}
        )
        z = self.gate_argument
        if self.gate is not None and z is not None:
            tiny = torch.where(z.abs() < 1e-6, torch.full_like(z, 1e-6), z).detach()
            frozen["gate"] = z * (frozen["gate"] / tiny)
        return replace(self, recurrence=self.recurrence.detach(), **frozen)

    def _add_up(self, of: Callable[[FrozenMixer], Tensor]) -> Tensor:
        # The sum over the scans of what one gives, (B, L, D), in the model's order of the tokens.
        parts = []
        for scan, order, weight in self.scans_in_order():
            y = of(scan) if weight == 1 else weight * of(scan)
            parts.append(y if order is None else y[:, torch.argsort(order)])
        return sum_of(parts)

    def _gated(self, multiply: Product) -> Tensor:
        y = self.mix(self.values)
        if self.centred:
            y = y - y.mean(-1, keepdim=True)
        if self.norm is not None:
            y = y * self.norm
        if self.gate is None:
            return y
        return y * self.gate if self.gate_argument is None else multiply(y, self.gate)

    def _mean_taken(self) -> Tensor:
        if not self.centred:
            return torch.zeros_like(self.inputs)
        mean = self.mix(self.values).mean(-1, keepdim=True).expand_as(self.inputs)
        return mean if self.left is None else mean * self.left

    def mean_gated_gradient(self, gradient: Tensor) -> Tensor:
        """The channel mean of the gradient at the gated output, ``(B, L)``.

        Args:
            gradient (Tensor): at the mixer's output, ``(B, L, E)``. It is pulled back through
                the output projection, which needs no hook inside a fused kernel.
        """
        return gradient.to(self.out_weight.dtype) @ self.out_weight.mean(1)


def check_components(formulation: str, components: Iterable[str] | None) -> tuple[str, ...] | None:
    """The chosen components, by name.

    Args:
        formulation (str): ``"hidden"`` or ``"unified"``.
        components (iterable of str, optional): any of :data:`COMPONENTS`, or one of them; None for
            the paper's choice, which each mixer states.

    Returns:
        tuple of str, or None for None.

    Raises:
        ValueError: for an unknown formulation or component, or components without ``"unified"``.
        TypeError: for components that cannot be gone through.

    Examples::

        >>> check_components("unified", ["gate"])
        ('gate',)
    """
    if formulation not in FORMULATIONS:
        raise ValueError(f"formulation is {formulation!r}; expected one of {FORMULATIONS}.")
    if components is None:
        return None
    if formulation == "hidden":
        raise ValueError(
            "components were given with formulation='hidden', which is the recurrence alone; "
            "pass formulation='unified' to choose components."
        )
    if not isinstance(components, Iterable):
        raise TypeError(f"components is {components!r}; expected any of {COMPONENTS}.")
    chosen = (components,) if isinstance(components, str) else tuple(components)
    unknown = [c for c in chosen if c not in COMPONENTS]
    if unknown:
        raise ValueError(f"components holds {unknown}; expected any of {COMPONENTS}.")
    return chosen
