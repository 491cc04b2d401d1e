"""What an adapter returns: a mixer frozen at one input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import Self

from captum_ssm.errors import UnsupportedModelError, renamed
from captum_ssm.mixers.components import PAPER_COMPONENTS, check_components
from captum_ssm.mixers.parts import ImageConv, ShortConv
from captum_ssm.operators import TokenOperator, continued
from captum_ssm.operators.composed import product, sum_of
from captum_ssm.utils.lazy import cached_property
from captum_ssm.utils.nested import detached


@dataclass(frozen=True, kw_only=True)
class FrozenMixer:
    r"""A token mixer with its coefficients frozen at one input.

    .. math::
        y = W_{out}\, \big(n \odot g \odot (\alpha v + s \odot v)\big) + b_{out}, \qquad
        v = \sigma \odot (\mathrm{conv}(u) + b_{conv})

    Args:
        recurrence (TokenOperator): :math:`\alpha`.
        inputs (Tensor): u, ``(B, L, D)``, the input of the convolution, with padding set to zero
            if the model does that. Without a convolution and an activation, u is v.
        out_proj (Callable): maps the gated output ``(B, L, D)`` to the mixer's ``(B, L, E)``.
        out_weight (Tensor): ``(E, D)``, the weight of ``out_proj`` (``call.weight(layer)``).
        skip (Tensor, optional): s, broadcasts to ``(B, L, D)``. Default: None
        conv (Tensor, optional): taps ``(D, K)`` as in :class:`torch.nn.Conv1d`. Default: None
        conv_bias (Tensor, optional): its bias, ``(D,)``, or ``(B, L, D)`` if each token has its
            own. Added after the convolution; not part of the operator. Default: None
        image_conv (ImageConv, optional): of a scan among :class:`FrozenScans`, a convolution over
            tokens in another order than the scan's, or that reads later ones. u is what it returns,
            in the scan's order. Default: None
        activation (Tensor, optional): :math:`\sigma`, ``(B, L, D)``: for SiLU the sigmoid of
            its argument, times the padding mask. Default: None
        gate (Tensor, optional): g, ``(B, L, D)``. Default: None
        gate_argument (Tensor, optional): z, ``(B, L, D)``, if the gate is SiLU or GELU of z. Gate
            and signal then get half of the relevance each (MambaLRP's half rule).
            Default: None
        norm (Tensor, optional): n, ``(B, L, D)``: the frozen scale of a norm. Default: None
        centered (int, optional): the number of equal groups of channels over each of which the
            norm first subtracts the mean: 1 for a layer norm, 0 for none. The subtracted mean is
            not part of the operator (:meth:`remainder`). Default: 0
        offset (Tensor, optional): a bias after the norm, added to the gated output. Not part of
            the operator. Broadcasts to ``(B, L, D)``. Default: None
        own (tuple of Tensor, optional): a weight and a token's own values, ``(B, L, D)`` each,
            whose product is a part of the offset. It has relevance of the token. Default: None
        paper_components (tuple of str, optional): the components of ``"unified"`` if none are
            chosen, as in Zimerman et al.'s equation for the family. Default: all except the skip
        readout (Callable, optional): for a mixer with a norm: computes the gated output
            ``(B, L, D)`` of other mixed values :math:`\alpha v + s \odot v`, summed over all scans,
            with the norm's scale computed anew. Interventions need it. Default: None
        memory (Callable, optional): returns the recurrence whose state the model keeps, where that
            is scaled by the run it is from, or not the state of :math:`\alpha`. Default: None
        out_gate (Tensor, optional): ``(B, L, E)``, a factor of what ``out_proj`` returns that
            differs by token, as that of a GLU. Default: None
        dense_skip (Tensor, optional): ``(B, L, E)``, what each token adds to its own output past
            ``out_proj``, as the D of S5 and LRU. No map holds it. Default: None
        adds_input (bool, optional): whether the skip is a residual: the mixer's own input, added to
            what it returns. Default: False
        neighbor_share (float, optional): the share of neighboring tokens in v, by a token shift
            that no map shows. Default: 0.0
        rounding (float, optional): a factor of the reconstruction check's tolerance in half
            precision, for a mixer whose own arithmetic rounds more than most. Default: 1.0
        state (Tensor, optional): ``(B, N, D)``, the state that the recurrence begins with
            (``call.state``), as :func:`captum_ssm.operators.continued` takes it. What tokens read
            of it is not part of the operator. Default: None, which is zero

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
    image_conv: ImageConv | None = None
    activation: Tensor | None = None
    gate: Tensor | None = None
    gate_argument: Tensor | None = None
    norm: Tensor | None = None
    centered: int = 0
    offset: Tensor | None = None
    own: tuple[Tensor, Tensor] | None = None
    paper_components: tuple[str, ...] = PAPER_COMPONENTS
    readout: Callable[[Tensor], Tensor] | None = field(default=None, repr=False)
    memory: Callable[[], TokenOperator] | None = field(default=None, repr=False)
    out_gate: Tensor | None = None
    dense_skip: Tensor | None = None
    adds_input: bool = False
    neighbor_share: float = 0.0
    rounding: float = 1.0
    state: Tensor | None = None

    if not TYPE_CHECKING:
        __getattr__ = renamed(centred="centered", exchanged="neighbor_share")

    @cached_property
    def convolved(self) -> Tensor:
        """conv(u) + bias, ``(B, L, D)``: what the activation is applied to."""
        return ShortConv(self.inputs, self.conv, self.conv_bias).output

    @cached_property
    def values(self) -> Tensor:
        """v, ``(B, L, D)``, the input of the recurrence."""
        v = self.convolved
        return v if self.activation is None else v * self.activation

    @cached_property
    def mixed(self) -> Tensor:
        """:math:`\\alpha v + s \\odot v`, ``(B, L, D)``: what norm and gate are applied to."""
        return self.mix(self.values)

    def with_values(self, values: Tensor, convolved: Tensor | None = None) -> FrozenMixer:
        """This mixer, with ``values`` and ``convolved``, ``(B, L, D)``, as computed."""
        of_conv = {} if convolved is None else {"convolved": convolved}
        return self._knowing({"values": values} | of_conv)

    def normed(
        self, scale_of: Callable[[Tensor], Tensor], bonus: Tensor | None = None
    ) -> FrozenMixer:
        """This mixer with a norm, whose scale, and the offset after it, are those of any values.

        Args:
            scale_of (Callable): from the mixed values to the norm's scale, both ``(B, L, D)``.
            bonus (Tensor, optional): ``(B, L, D)``, the weight of a token's own values, of a mixer
                without a skip, added after the norm. Default: None
        """
        mixed = self.mixed
        scale = scale_of(mixed)
        # A skip is added before the norm, so it is divided by the norm's scale.
        skip = self.skip if bonus is None else bonus / scale
        added = None if bonus is None or skip is None else skip * self.values

        def readout(y: Tensor) -> Tensor:
            if added is None:
                y = y * (scale if y is mixed else scale_of(y))
            else:
                y = (y - added) * scale_of(y - added) + added * scale
            y = y if self.gate is None else y * self.gate
            return y if self.offset is None else y + self.offset

        normed = replace(self, norm=scale, skip=skip, readout=readout)
        computed = ("values", "convolved", *(() if bonus is not None else ("mixed",)))
        return normed._knowing({name: x for name, x in vars(self).items() if name in computed})

    def _knowing(self, known: dict[str, Tensor]) -> Self:
        self.__dict__.update(known)  # cached_property's cache, which copies do not share
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
            components (iterable of str, optional): the parts that ``"unified"`` includes, any
                of ``"conv" "activation" "gate" "norm" "skip"``. None stands for the mixer's
                ``paper_components``. Default: None

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
        """The row factors of every map, gate times norm: ``(B, L, D)``, or None."""
        return product(self.gate, self.norm)

    def scans_in_order(self) -> list[tuple[FrozenMixer, Tensor | None, float]]:
        """The scans that the mixer adds up, each with its order of the tokens and its weight."""
        return [(self, None, 1.0)]

    @property
    def has_token_shift(self) -> bool:
        """Whether values are mixed with those of the token before, in a way that no map shows."""
        by_token = self.conv_bias is not None and self.conv_bias.dim() == 3
        return by_token or self.neighbor_share > 0

    def with_row_factors(self, factors: Sequence[Tensor]) -> FrozenMixer:
        """This mixer, whose unified maps have other row factors than gate and norm.

        Args:
            factors (sequence of Tensor): for each of :meth:`scans_in_order`, ``(B, L, D)``, in its
                order.
        """
        return replace(self, gate=factors[0], norm=None)

    def mix(self, values: Tensor, factor: float = 1.0) -> Tensor:
        """The recurrence applied to ``values (B, L, D)``, plus the skip: ``(B, L, D)``.

        Args:
            values (Tensor): v.
            factor (float, optional): multiplies the recurrence, not the skip. Default: 1.0
        """
        if self.state is None:
            y = self.recurrence.matvec(values)
        else:
            y = continued(self.recurrence, values, self.state)[0]
        return self._skipped(y if factor == 1 else factor * y, values)

    def carry(self) -> tuple[Tensor, Tensor]:
        """``mixed (B, L, D)``, and the state ``(B, N, D)`` after the last token.

        Raises:
            UnsupportedModelError: for a recurrence whose state is not known.
        """
        y, state = continued(self.recurrence, self.values, self.state)
        return self._skipped(y, self.values), state

    def _skipped(self, y: Tensor, values: Tensor) -> Tensor:
        return y if self.skip is None else torch.addcmul(y, self.skip, values)

    def gated_output(self, mixed: Sequence[Tensor] | None = None) -> Tensor:
        """The input of the output projection, ``(B, L, D)``, computed with the operator.

        Args:
            mixed (sequence of Tensor, optional): what each of :meth:`scans_in_order` returns,
                ``(B, L, D)``, in its order, if that is known. Default: None
        """
        known = None if mixed is None else iter(mixed)

        def gated(scan: FrozenMixer) -> Tensor:
            return scan.gated(scan.mixed if known is None else next(known))

        total = self._add_up(gated)
        return total if self.offset is None else total + self.offset

    @property
    def is_readable(self) -> bool:
        """Whether it is known what comes of other mixed values: any norm can be computed anew."""
        norms = (scan.norm for scan, _, _ in self.scans_in_order())
        return self.readout is not None or all(norm is None for norm in norms)

    def gated_output_of(self, mixed: Sequence[Tensor]) -> Tensor:
        """The input of the output projection if the scans returned ``mixed`` instead.

        Gates stay what they are. The scale of a norm is computed anew.

        Args:
            mixed (sequence of Tensor): for each of :meth:`scans_in_order`, ``(B, L, D)``, in its
                order.

        Raises:
            UnsupportedModelError: for a norm that cannot be computed anew.
        """
        if self.readout is not None:
            values = iter(mixed)
            return self.readout(self._add_up(lambda scan: next(values)))
        if not self.is_readable:
            raise UnsupportedModelError(
                "the norm after this mixer's scan is known at the values of this run only, so what "
                "it returns for other values cannot be computed; expected a FrozenMixer with a "
                "readout. Register an adapter with captum_ssm.register_mixer(module_type, freeze)."
            )
        return self.gated_output(mixed)

    def output(self) -> Tensor:
        """What the mixer returns, ``(B, L, E)``: the output projection of :meth:`gated_output`."""
        return self.projected(self.gated_output())

    def projected(self, y: Tensor) -> Tensor:
        """The output projection of ``y (B, L, D)``, and its gate: ``(B, L, E)``."""
        y = self.out_proj(y)
        y = y if self.dense_skip is None else y + self.dense_skip
        return y if self.out_gate is None else y * self.out_gate

    def recurrence_share(self, gated: Tensor) -> Tensor:
        """The norm of what the recurrence adds to the gated output over that of all, ``(B,)``.

        Args:
            gated (Tensor): :meth:`gated_output`, ``(B, L, D)``.
        """
        alone = self._add_up(lambda scan: scan.gated(scan._recurrent()))
        added, whole = (x.flatten(1).norm(dim=1) for x in (alone, gated))
        return added / whole.clamp(min=1e-30)

    def remainder(self) -> Tensor:
        """The part of the gated output that is not a map of tokens, ``(B, L, D)``.

        It is the offset minus the mean that a centered norm subtracts. ``conv_bias`` passes through
        the maps and is not part of it.
        """
        mean = self._add_up(lambda scan: scan._subtracted_mean())
        return -mean if self.offset is None else self.offset - mean

    def detach_coefficients(self) -> Self:
        """This mixer with its coefficients detached from the autograd graph.

        Its output is then linear in ``inputs``. A gate with a ``gate_argument`` becomes that
        argument times a constant; no other coefficient has a gradient.
        """
        names = ("skip", "activation", "gate", "norm", "offset", "out_gate")
        frozen = detached({name: getattr(self, name) for name in names})
        if self.gate is not None and self.gate_argument is not None:
            frozen["gate"] = _TimesConstant.apply(self.gate_argument, frozen["gate"])
        if self.own is not None:
            weight, values = self.own
            frozen["offset"] = frozen["offset"] + weight.detach() * (values - values.detach())
        mixer = replace(self, recurrence=self.recurrence.detach(), **frozen)
        return mixer._knowing({"convolved": self.convolved})

    def _add_up(self, of: Callable[[FrozenMixer], Tensor]) -> Tensor:
        # The sum of a function of each scan, (B, L, D), with the tokens in the model's order.
        parts = []
        for scan, order, weight in self.scans_in_order():
            y = of(scan) if weight == 1 else weight * of(scan)
            parts.append(y if order is None else y[:, torch.argsort(order)])
        return sum_of(parts)

    def gated(self, y: Tensor) -> Tensor:
        """The gated output of one scan's mixed values ``y (B, L, D)``, its norm frozen."""
        if self.centered:
            y = y - mean_of_groups(y, self.centered)
        if self.norm is not None:
            y = y * self.norm
        return y if self.gate is None else y * self.gate

    def _recurrent(self) -> Tensor:
        # What the recurrence returns, (B, L, D), without the skip.
        y = self.mixed
        return y if self.skip is None else torch.addcmul(y, self.skip, self.values, value=-1)

    def _subtracted_mean(self) -> Tensor:
        if not self.centered:
            return torch.zeros_like(self.inputs)
        mean = mean_of_groups(self.mix(self.values), self.centered)
        return mean if self.left is None else mean * self.left

    def mean_gated_gradient(self, gradient: Tensor) -> Tensor:
        """The channel mean of the gradient at the gated output, ``(B, L)``.

        It is that at the mixer's output, ``(B, L, E)``, times the output projection's weight, so
        no hook inside a fused kernel is needed.
        """
        gradient = gradient.to(self.out_weight.dtype)
        gradient = gradient if self.out_gate is None else gradient * self.out_gate
        return gradient @ self.out_weight.mean(1)


def mean_of_groups(y: Tensor, groups: int) -> Tensor:
    """The mean over each of equal groups of the channels of ``y (B, L, D)``, in its shape."""
    parts = y.unflatten(-1, (groups, -1))
    return parts.mean(-1, keepdim=True).expand_as(parts).flatten(-2)


class _TimesConstant(torch.autograd.Function):
    # A known function of x, as x times a constant.
    @staticmethod
    def forward(ctx: Any, x: Tensor, known: Tensor) -> Tensor:
        ctx.save_for_backward(x, known)
        ctx.set_materialize_grads(False)
        return known.view_as(known)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None
        x, known = ctx.saved_tensors
        return grad * (known / torch.where(x.abs() < 1e-6, 1e-6, x)), None
