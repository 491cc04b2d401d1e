"""A model that is read inside, at directions of a stream or a state, in place of at its head."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from captum_ssm.capture.model import check_model, input_embeddings, is_wrapped
from captum_ssm.capture.state_module import StateModule
from captum_ssm.errors import InputError, brief
from captum_ssm.utils.nested import first_of
from captum_ssm.utils.suggestions import did_you_mean
from captum_ssm.utils.watch_modules import watch_modules

Side = Literal["output", "input", "state"]


class _Read(Exception):
    # Ends a run whose readout is known.
    pass


class Readout(nn.Module):
    r"""A model whose output is features of its residual stream or of a state, and ends there.

    A feature is a direction :math:`w_f` of what one module of the model returns at each token: a
    probe, a steering vector, or a latent of a sparse autoencoder (SAE) or of a transcoder. The
    readout returns :math:`W x_t + b`, or what a function returns, ``(B, L, F)``, one number per
    token and feature. It is a model like any other: every method, ``explain``, ``supported`` and
    the interventions take it in the model's place, and a target is ``(position, feature)``. The
    mixers after the module are not run, and no explanation names them.

    With ``side="state"`` the features are of the recurrent state of a mixer after each token,
    :math:`\langle W_f, S_t \rangle + b_f`, as :func:`~captum_ssm.interventions.states` returns it.
    Nothing that the mixer makes of its state has a part in them, and explanations name it
    ``state``. A feature costs as much as the mixer's recurrence, with one map per channel.

    With a ``decoder`` the features also say what of the stream or state is written by which of
    them, so that relevance can begin at them (:meth:`~captum_ssm.RelevanceFlow.features`), and they
    can be removed from a run (:func:`~captum_ssm.interventions.scaled_features`).

    Args:
        model (nn.Module): the whole model, which stays as it is.
        layer (str or nn.Module): the module that is read, by its path or itself, such as
            ``"backbone.layers.1"`` for the residual stream after the second block. Where a run
            calls it several times, the first call counts.
        directions (Tensor or Callable): ``(F, E)``, one row per feature, or ``(E,)`` for one
            feature; or a function or module from ``(B, L, E)`` to ``(B, L, F)``, such as the
            ``encode`` of an SAE. Of a state ``(F, D, N)`` for a diagonal recurrence, or
            ``(F, H, K, P)`` for linear attention and the delta rule; or, with a decoder, a function
            of flat states ``(B, L, D N)`` or ``(B, L, H K P)``, at which relevance begins alone.
        names (sequence of str, optional): of the F features. Default: ``"feature 0"`` and so on for
            a matrix; for a function their numbers
        bias (Tensor, optional): ``(F,)``, added to the products with a matrix. Default: None
        decoder (Tensor, optional): ``(F, E)``, or of a state ``(F, D, N)`` or ``(F, H, K, P)``:
            what each feature writes, per unit of its value. Default: None
        side (str, optional): ``"output"`` reads what the layer returns; ``"input"`` what it is
            given, as a transcoder's encoder does, whose decoder writes to what the layer returns;
            ``"state"`` the state of a mixer. Default: ``"output"``

    Raises:
        TypeError: for a ``model`` that is not a torch module, or directions of another kind.
        ValueError: for a layer that the model does not have, an unknown side, matrices of
            another shape, or another number of names.

    Examples::

        >>> directions = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
        >>> readout = captum_ssm.Readout(model, "backbone.layers.0", directions, ["a", "b", "c"])
        >>> readout(input_ids).shape
        torch.Size([1, 7, 3])
        >>> MambaLRP(readout).attribute(input_ids, target=(6, readout.index("b"))).shape
        torch.Size([1, 7])
    """

    decoder: Tensor | None

    def __init__(
        self,
        model: nn.Module,
        layer: str | nn.Module,
        directions: Tensor | Callable[[Tensor], Tensor],
        names: Sequence[str] | None = None,
        *,
        bias: Tensor | None = None,
        decoder: Tensor | None = None,
        side: Side = "output",
    ) -> None:
        super().__init__()
        if is_wrapped(check_model(model)):
            raise TypeError(
                "model is an nnsight model, whose runs nnsight starts; expected its torch module."
            )
        if side not in ("output", "input", "state"):
            raise ValueError(f"side is {side!r}; expected 'output', 'input' or 'state'.")
        self.model = model
        self.layer, self.side = _path_of(model, layer), side
        if side == "state":
            _check_of_state(directions, decoder)
            if torch.is_tensor(directions):
                directions = directions.detach().to(_device_of(model))
                self.state = StateModule(self.layer, self.module, directions)
                directions = directions.flatten(1)
        self.encoder = _encoder(directions, bias, _device_of(model))
        decoder = None if decoder is None else decoder.detach().to(_device_of(model))
        self.register_buffer("decoder", decoder)
        counts = [self.encoder.out_features] if isinstance(self.encoder, nn.Linear) else []
        counts += [] if decoder is None else [len(decoder)]
        known = counts if names is None else [*counts, len(names)]
        if len({*known}) > 1:
            raise ValueError(
                f"directions, decoder and names are of {' and '.join(map(str, known))} features; "
                "expected as many of each."
            )
        if names is None:
            names = [f"feature {k}" for k in range(counts[0])] if counts else []
        self.names = [str(name) for name in names]
        self.config = _configuration(model, self.names)
        self.training = model.training

    @property
    def module(self) -> nn.Module:
        """The module that is read."""
        return self.model.get_submodule(self.layer)

    @property
    def arguments_of(self) -> nn.Module:
        """The model, whose arguments are those of the readout."""
        return self.model

    def get_input_embeddings(self) -> Any:
        """The model's embedding table, or None."""
        return input_embeddings(self.model)

    def index(self, name: str) -> int:
        """The number of a feature, by its name.

        Raises:
            ValueError: for a name that no feature has.
        """
        if name in self.names:
            return self.names.index(name)
        hint = did_you_mean(name, self.names)
        raise ValueError(f"no feature has the name {name!r}; {len(self.names)} have others.{hint}")

    def later_modules(self) -> set[nn.Module]:
        """The modules that stand after the layer in the model, and so are not run."""
        modules = list(self.model.modules())
        module = self.module
        after = modules[modules.index(module) :]
        if self.side == "state":  # which another module reads
            return {*after}
        inside = {*module.modules()}
        return {part for part in after if part not in inside}

    def encode(self, stream: Tensor) -> Tensor:
        """The features ``(B, L, F)`` of what the layer returns, ``(B, L, E)``, or of flat states.

        Raises:
            InputError: for a stream of another width, or features of another shape.
        """
        if isinstance(self.encoder, nn.Linear) and stream.shape[-1] != self.encoder.in_features:
            raise InputError(
                f"directions have {self.encoder.in_features} entries, and {self.layer} has "
                f"{stream.shape[-1]} at each token; expected as many."
            )
        if isinstance(self.encoder, nn.Linear):
            stream = stream.to(self.encoder.weight)
        features = self.encoder(stream)
        if not torch.is_tensor(features) or features.shape[:-1] != stream.shape[:-1]:
            shape = tuple(features.shape) if torch.is_tensor(features) else type(features).__name__
            raise InputError(
                f"the readout of {self.layer} is {shape} for {tuple(stream.shape)}; expected one "
                "row of features per token."
            )
        return features

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """The features ``(B, L, F)`` of the tokens, for the arguments of the model.

        Raises:
            InputError: where the run does not reach the layer, it works on no tokens
                ``(B, L, E)``, or a function reads a state.
        """
        if self.side == "state" and not hasattr(self, "state"):
            raise InputError(
                f"the state of {self.layer} is read by a function, at which relevance begins and "
                "cannot end; expected directions (F, D, N) or (F, H, K, P). Call "
                "RelevanceFlow(model).features(..., readout=readout)."
            )
        calls: list[Any] = []

        def read(module: nn.Module, *call: Any) -> None:
            calls.append(call)
            raise _Read

        when: dict[str, Any] = {"before" if self.side == "state" else "after": read}
        try:
            with watch_modules([self.module], **when):
                self.model(*args, **kwargs)
        except _Read:
            if self.side == "state":
                positional, named = calls[0]
                features = self.state(*positional, **named)
                bias = getattr(self.encoder, "bias", None)
                return features if bias is None else features + bias.to(features)
            return self.encode(stream_of(self.side, *calls[0]))
        raise InputError(
            f"the model did not run {self.layer}, or runs compiled; expected a layer that every "
            "run goes through, of an uncompiled model."
        )


def stream_of(side: Side, args: Any, kwargs: Any, result: Any) -> Tensor:
    """What a layer is given or returns at its tokens, ``(B, L, E)``."""
    if side == "output":
        stream = first_of(result)
    else:
        stream = next((x for x in (*args, *kwargs.values()) if torch.is_tensor(x)), None)
    if not torch.is_tensor(stream) or stream.dim() != 3 or not stream.is_floating_point():
        shape = tuple(stream.shape) if torch.is_tensor(stream) else type(stream).__name__
        raise InputError(
            f"what is read of the layer is {shape}; expected one vector per token, (B, L, E)."
        )
    return stream


class _Function(nn.Module):
    # A function in the place of a module.
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, stream: Tensor) -> Tensor:
        return self.function(stream)


def _path_of(model: nn.Module, layer: Any) -> str:
    paths = {path: module for path, module in model.named_modules() if path}
    if isinstance(layer, nn.Module):
        matches = [path for path, module in paths.items() if module is layer]
        if matches:
            return matches[0]
        raise ValueError(
            f"layer is a {type(layer).__name__} that is not a part of the model; expected one of "
            "its modules."
        )
    if layer not in paths:
        raise ValueError(
            f"layer is {brief(layer)}, and {type(model).__name__} has no such module; expected a "
            f"path such as {next(iter(paths), None)!r}.{did_you_mean(str(layer), paths)}"
        )
    return str(layer)


def _check_of_state(directions: Any, decoder: Tensor | None) -> None:
    if decoder is not None and decoder.dim() not in (3, 4):
        raise ValueError(
            f"decoder has shape {tuple(decoder.shape)}; expected (F, D, N) or (F, H, K, P), as the "
            "state of the mixer is."
        )
    if torch.is_tensor(directions):
        if decoder is not None and decoder.shape[1:] != directions.shape[1:]:
            raise ValueError(
                f"directions have shape {tuple(directions.shape)}, and decoder has "
                f"{tuple(decoder.shape)}; expected one state's shape in both."
            )
    elif decoder is None:
        raise TypeError(
            f"side is 'state', and directions is a {type(directions).__name__}; expected a tensor "
            "(F, D, N) or (F, H, K, P), as relevance ends where the state is read linearly. With a "
            "decoder a function is expected too: relevance begins at what it returns."
        )


def _encoder(directions: Any, bias: Tensor | None, device: torch.device) -> nn.Module:
    if torch.is_tensor(directions):
        matrix = torch.atleast_2d(directions.detach()).to(device)
        if matrix.dim() != 2 or (bias is not None and bias.shape != matrix.shape[:1]):
            raise ValueError(
                f"directions have shape {tuple(directions.shape)} and bias "
                f"{None if bias is None else tuple(bias.shape)}; expected (F, E) and (F,)."
            )
        features, width = matrix.shape
        layer = nn.Linear(width, features, bias=bias is not None, device="meta")
        layer.weight = nn.Parameter(matrix, requires_grad=False)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().to(matrix), requires_grad=False)
        return layer
    if bias is not None or not callable(directions):
        raise TypeError(
            f"directions is a {type(directions).__name__}"
            f"{'' if bias is None else ', with a bias of its own'}; expected a matrix (F, E), with "
            "or without a bias, or a function from (B, L, E) to (B, L, F)."
        )
    return directions if isinstance(directions, nn.Module) else _Function(directions)


def _device_of(model: nn.Module) -> torch.device:
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def _configuration(model: nn.Module, names: Sequence[str]) -> Any:
    # The model's configuration, with the features in the place of its classes: numbers of their
    # own, as of a regression, which do not compete.
    config = copy.copy(getattr(model, "config", None) or SimpleNamespace())
    config.id2label, config.problem_type = dict(enumerate(names)), "regression"
    return config
