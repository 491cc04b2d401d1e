"""What an adapter is given (a `MixerCall`), what it returns (a `FrozenMixer`), and the registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import Parameter
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import Self

from captum_ssm._devices import weights_loaded
from captum_ssm.operators import TokenOperator
from captum_ssm.operators.composed import product, sum_of
from captum_ssm.operators.conv import causal_conv

COMPONENTS = ("conv", "activation", "gate", "norm", "skip")
PAPER_COMPONENTS = ("conv", "activation", "gate", "norm")
FORMULATIONS = ("hidden", "unified")

# A product of two tensors that both carry relevance.
Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MixerCall:
    """One visit of the forward pass to a mixer module, recorded at the module's boundary.

    Args:
        path (str): the module's name in the model.
        module (nn.Module): the mixer.
        args (tuple): positional arguments of its forward.
        kwargs (dict): keyword arguments of its forward.
        result (Any): what its forward returned.
        gradient (Tensor, optional): gradient of the target with respect to ``output``,
            ``(B, L, E)``. Default: None
        order (int, optional): its place among the calls recorded in one run. Default: 0

    Examples::

        >>> module = model.backbone.layers[0].mixer
        >>> x = torch.randn(1, 7, 16)
        >>> call = MixerCall("mixer", module, (x,), {}, module(x))
        >>> call.tokens().shape, call.output.shape
        (torch.Size([1, 7, 16]), torch.Size([1, 7, 16]))
    """

    path: str
    module: Any  # an nn.Module; adapters read attributes of its class
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    gradient: Tensor | None = None
    order: int = 0

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the call by the names in the module's ``forward``."""
        return bound_arguments(self.module, self.args, self.kwargs)

    @property
    def output(self) -> Tensor:
        """The mixed tokens ``(B, L, E)``: the result, or its first element."""
        result = self.result
        return result[0] if isinstance(result, (tuple, list)) else result

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to work in: float64 where the mixer's output is, else float32."""
        return torch.float64 if self.output.dtype == torch.float64 else torch.float32

    def tokens(self, name: str = "hidden_states") -> Tensor:
        """The tokens ``(B, L, E)`` that entered the mixer, in the working dtype."""
        value = self.arguments.get(name)
        if value is None:
            value = next(a for a in (*self.args, *self.kwargs.values()) if torch.is_tensor(a))
        return value.to(self.dtype)

    def token_mask(self, name: str = "attention_mask") -> Tensor | None:
        """The ``(B, L)`` padding mask the mixer was given, in the working dtype, or None."""
        mask = self.arguments.get(name)
        if not torch.is_tensor(mask) or mask.dim() != 2:
            return None
        return mask.to(self.output.device, self.dtype)

    def linear(self, layer: nn.Module, x: Tensor) -> Tensor:
        """``layer(x)`` for ``x (..., in)`` in the working dtype: ``(..., out)``.

        A layer without plain weights (quantised, with adapters) computes in its own dtype.
        """
        with weights_loaded(layer):
            weight = getattr(layer, "weight", None)
            if torch.is_tensor(weight):
                x = x.to(weight.device)
            if not _is_plain(layer):
                return layer(x.to(self.output.dtype)).to(self.dtype)
            bias = None if layer.bias is None else self.parameter(layer.bias)
            return F.linear(x, self.parameter(layer.weight), bias)

    def weight(self, layer: Any) -> Tensor:
        """The matrix of a linear layer, ``(out, in)``, in the working dtype.

        Of a layer without plain weights (quantised, with adapters) it is read off its outputs.
        """
        if _is_plain(layer):
            return self.parameter(layer.weight)
        ones = torch.eye(layer.in_features, dtype=self.output.dtype, device=self.output.device)
        with torch.no_grad():
            return (self.linear(layer, ones) - self.linear(layer, 0 * ones[:1])).mT

    def parameter(self, value: Tensor) -> Tensor:
        """A parameter of any shape, detached, in the working dtype."""
        return value.detach().to(self.dtype)

    def decay_rate(self, A_log: Tensor) -> Tensor:
        """``-exp(A_log)``, of any shape, computed in float32 whatever the model's dtype."""
        return -torch.exp(A_log.detach().float()).to(self.dtype)


def bound_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a call of ``module`` by the names in its ``forward``.

    Those in its variable keyword (``**kwargs``, whatever its name) stand among the others. Where a
    subclass takes ``*args`` and passes them on, the names are those of the base class.
    """
    found: list[tuple[int, dict[str, Any]]] = []
    for cls in type(module).__mro__:
        if "forward" not in vars(cls):
            continue
        signature = inspect.signature(vars(cls)["forward"])
        try:
            named = dict(signature.bind(module, *args, **kwargs).arguments)
        except TypeError:  # a forward that hides its signature
            continue
        unnamed = 0
        for name, parameter in signature.parameters.items():
            if parameter.kind is Parameter.VAR_KEYWORD:
                named.update(named.pop(name, {}))
            elif parameter.kind is Parameter.VAR_POSITIONAL:
                unnamed = len(named.get(name, ()))
        found.append((unnamed, named))
    return min(found, key=lambda one: one[0])[1] if found else dict(kwargs)


def is_quantised(module: nn.Module) -> bool:
    """Whether a linear layer of ``module``, or one it wraps, holds quantised weights."""
    return any(
        _is_code(value)
        for part in module.modules()
        if hasattr(part, "in_features")
        for value in _weights(part)
    )


def _weights(layer: nn.Module) -> list[Tensor]:
    weight = getattr(layer, "weight", None)
    if callable(weight) and not torch.is_tensor(weight):  # torch.ao's packed layers
        weight = weight()
    values = [*layer.parameters(), *layer.buffers()]
    return [*values, weight] if torch.is_tensor(weight) else values


def _is_code(value: Tensor) -> bool:
    # Integers, floats of one byte, or a quantisation library's tensor, which may claim any dtype.
    # Torch's own subclasses (DTensor) hold plain numbers; a flag, mask or counter is no weight.
    if type(value).__module__.partition(".")[0] != "torch":
        return True
    if value.dim() == 0 or value.dtype == torch.bool or value.is_complex():
        return False
    return not value.is_floating_point() or value.element_size() == 1


def _is_plain(layer: Any) -> TypeGuard[nn.Linear]:
    return (
        isinstance(layer, nn.Linear)
        and type(layer).forward is nn.Linear.forward
        and type(layer.weight) in (Tensor, nn.Parameter)
        and layer.weight.is_floating_point()
    )


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
        gate, z = _detached(self.gate), self.gate_argument
        if gate is not None and z is not None:
            tiny = torch.where(z.abs() < 1e-6, torch.full_like(z, 1e-6), z).detach()
            gate = z * (gate / tiny)
        return replace(
            self,
            recurrence=self.recurrence.detach(),
            skip=_detached(self.skip),
            activation=_detached(self.activation),
            gate=gate,
            norm=_detached(self.norm),
            offset=_detached(self.offset),
        )

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


def activation_factor(act: Callable[[Tensor], Tensor], psi: Tensor) -> Tensor:
    """The factor f with ``act(psi) = f * psi``: for SiLU the sigmoid. Exact at zero by limit.

    Args:
        act (Callable): an activation with ``act(0) = 0``, such as SiLU, GELU or ReLU.
        psi (Tensor): its argument, of any shape.

    Returns:
        Tensor: of the shape of ``psi``.

    Examples::

        >>> psi = torch.randn(1, 7, 4)
        >>> factor = activation_factor(nn.functional.gelu, psi)
        >>> torch.testing.assert_close(factor * psi, nn.functional.gelu(psi))
    """
    if act is F.silu or isinstance(act, nn.SiLU) or type(act).__name__ == "SiLUActivation":
        return torch.sigmoid(psi)
    tiny = 1e-4
    safe = torch.where(psi.abs() < tiny, torch.full_like(psi, tiny), psi)
    return act(safe) / safe


def rms_factor(y: Tensor, weight: Tensor | None, eps: float, groups: int = 1) -> Tensor:
    """The frozen scale of an RMS norm over groups of channels.

    Args:
        y (Tensor): what the norm normalises, ``(B, L, D)``.
        weight (Tensor, optional): its weight, ``(D,)`` or of one group's width.
        eps (float): its epsilon.
        groups (int, optional): number of equal groups of channels. Default: 1

    Returns:
        Tensor: ``(B, L, D)``.

    Examples::

        >>> norm, y = nn.RMSNorm(4, eps=1e-5), torch.randn(1, 7, 4)
        >>> torch.testing.assert_close(rms_factor(y, norm.weight, norm.eps) * y, norm(y))
    """
    parts = y.unflatten(-1, (groups, -1))
    scale = torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps).expand_as(parts)
    if weight is not None:
        scale = scale * (weight if weight.numel() == parts.shape[-1] else weight.view(groups, -1))
    return scale.flatten(-2)


def unit(x: Tensor) -> Tensor:
    """``x (..., N)`` divided by its length, as the delta rule's keys and queries are."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def previous(x: Tensor) -> Tensor:
    """Each token's predecessor in ``x (B, L, E)``, zeros for the first."""
    return F.pad(x, (0, 0, 1, 0))[:, :-1]


@dataclass(frozen=True)
class ShortConv:
    """A causal depthwise convolution at one input, or none at all.

    Args:
        inputs (Tensor): u, ``(B, L, D)``.
        taps (Tensor, optional): ``(D, K)``. Default: None
        bias (Tensor, optional): ``(D,)``, or ``(B, L, D)``. Default: None

    Examples::

        >>> u, conv = torch.randn(1, 7, 4), nn.Conv1d(4, 4, 3, groups=4, padding=2)
        >>> found = ShortConv(u, conv.weight[:, 0], conv.bias)
        >>> torch.testing.assert_close(found.output, conv(u.mT)[..., :7].mT)
    """

    inputs: Tensor
    taps: Tensor | None = None
    bias: Tensor | None = None

    @cached_property
    def output(self) -> Tensor:
        """conv(u) + bias, ``(B, L, D)``."""
        psi = self.inputs if self.taps is None else causal_conv(self.inputs, self.taps)
        return psi if self.bias is None else psi + self.bias

    def channels(self, index: slice | Tensor) -> ShortConv:
        """The same convolution of some channels only."""
        taps = None if self.taps is None else self.taps[index]
        bias = None if self.bias is None else self.bias[..., index]
        return ShortConv(self.inputs[..., index], taps, bias)


def short_conv(call: MixerCall, conv: nn.Conv1d, u: Tensor) -> ShortConv:
    """The convolution of a module as :class:`ShortConv`.

    Args:
        call (MixerCall): says which dtype to work in.
        conv (nn.Conv1d): causal and depthwise.
        u (Tensor): what it acts on, ``(B, L, D)``.

    Returns:
        ShortConv: over the L tokens.

    Examples::

        >>> module, x = model.backbone.layers[0].mixer, torch.randn(1, 7, 16)
        >>> call = MixerCall("mixer", module, (x,), {}, module(x))
        >>> u = torch.randn(1, 7, 32)
        >>> found = short_conv(call, module.conv1d, u)
        >>> torch.testing.assert_close(found.output, module.conv1d(u.mT)[..., :7].mT)
    """
    bias = None if conv.bias is None else call.parameter(conv.bias)
    return ShortConv(u, call.parameter(conv.weight)[:, 0], bias)


def masked_tokens(call: MixerCall) -> tuple[Tensor, Tensor | None]:
    """The tokens that entered a mixer, with padding zeroed, and the mask.

    Args:
        call (MixerCall): the recorded call.

    Returns:
        tuple: ``(B, L, E)``, and the mask ``(B, L)`` or None where the mixer was given none.

    Examples::

        >>> module, x = model.backbone.layers[0].mixer, torch.randn(1, 7, 16)
        >>> call = MixerCall("mixer", module, (x,), {}, module(x))
        >>> tokens, mask = masked_tokens(call)
        >>> tokens.shape, mask
        (torch.Size([1, 7, 16]), None)
    """
    x, mask = call.tokens(), call.token_mask()
    return (x if mask is None else x * mask[..., None]), mask


Freeze = Callable[[MixerCall], FrozenMixer]
_REGISTRY: dict[str, Freeze] = {}


def adapts(*names: str) -> Callable[[Freeze], Freeze]:
    """Register one of the library's own adapters, by the names of its classes.

    Raises:
        ValueError: for a name that has an adapter.
    """

    def register(function: Freeze) -> Freeze:
        for name in names:
            if name in _REGISTRY:
                both = [f"{f.__module__}.{f.__name__}" for f in (_REGISTRY[name], function)]
                raise ValueError(
                    f"{name!r} was given two adapters, {both[0]} and {both[1]}; expected one. "
                    "Remove the name from either of them."
                )
            _REGISTRY[name] = function
        return function

    return register


def register_mixer(module_type: type[nn.Module] | str, freeze: Freeze | None = None) -> Any:
    """Register a mixer: how to read a recorded call of it as a frozen operator.

    Args:
        module_type (type or str): the module class, or its dotted name
            (``"package.module.Class"``, or a trailing part of it such as ``"Class"``) where
            importing it would cost. Subclasses are recognised too; the most derived wins. A name
            that is registered, by the library or by you, gets the new function.
        freeze (Callable, optional): takes a :class:`MixerCall`, returns a
            :class:`FrozenMixer`. None makes this a decorator. Default: None

    Returns:
        The ``freeze`` function.

    Raises:
        TypeError: for a ``module_type`` that is neither a class nor a name, or a ``freeze`` that
            cannot be called.

    Examples::

        >>> class MyMixer(nn.Module):
        ...     pass
        >>> @register_mixer(MyMixer)
        ... def freeze_my_mixer(call):
        ...     ...  # and returns FrozenMixer(recurrence=..., inputs=..., out_proj=..., ...)

    What ``freeze`` returns is checked against the module's own output at every use, so an
    adapter that reads the module wrongly raises ``ReconstructionError`` instead of explaining
    another model.
    """
    if isinstance(module_type, type):
        name = f"{module_type.__module__}.{module_type.__qualname__}"
    elif isinstance(module_type, str) and module_type:
        name = module_type
    else:
        given = repr(module_type) if isinstance(module_type, str) else type(module_type).__name__
        raise TypeError(
            f"module_type is {given}; expected a module class or its dotted name, a str."
        )

    def register(function: Freeze) -> Freeze:
        if not callable(function):
            raise TypeError(
                f"freeze is a {type(function).__name__}; expected a function that takes a "
                "MixerCall and returns a FrozenMixer."
            )
        _REGISTRY[name] = function
        return function

    return register if freeze is None else register(freeze)


def find_adapter(module: nn.Module) -> Freeze | None:
    """The registered ``freeze`` for a module's class or its nearest base class.

    Args:
        module (nn.Module): a mixer, or something else.

    Returns:
        Callable, or None where the library does not know the module.

    Examples::

        >>> find_adapter(model.backbone.layers[0].mixer).__name__
        'freeze_s6'
        >>> find_adapter(nn.Linear(2, 2)) is None
        True
    """
    for cls in type(module).__mro__:
        parts = f"{cls.__module__}.{cls.__qualname__}".split(".")
        for start in range(len(parts)):
            freeze = _REGISTRY.get(".".join(parts[start:]))
            if freeze is not None:
                return freeze
    return None


def registered() -> list[str]:
    """The names of the mixers the library knows.

    Returns:
        list of str: sorted.

    Examples::

        >>> "MambaMixer" in registered()
        True
    """
    return sorted(_REGISTRY)


def find_mixers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The known mixers of a model, not looking inside a mixer found.

    Args:
        model (nn.Module): the model.

    Yields:
        tuple: path and module, in the order of ``named_modules``.

    Examples::

        >>> [path for path, module in find_mixers(model)]
        ['backbone.layers.0.mixer', 'backbone.layers.1.mixer']
    """
    inside: str | None = None
    for path, module in model.named_modules():
        if inside is not None and path.startswith(inside):
            continue
        if find_adapter(module) is not None:
            inside = f"{path}." if path else ""
            yield path, module
            if not path:
                return


def _detached(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach()
