"""A model frozen at one input: its mixers, how they hang together, its query and its score."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from captum_ssm.capture.check import (
    Deviation,
    Rebuilt,
    check_reconstruction,
    is_padded_left,
    warn_if_padding_is_read,
    warn_of_shift,
)
from captum_ssm.capture.finite import check_relevance
from captum_ssm.capture.model import listed_layers, mixer_index
from captum_ssm.capture.recording import Recording
from captum_ssm.capture.request import Request
from captum_ssm.capture.substitute import FrozenDuringRun, without_autocast
from captum_ssm.capture.target import at_steps, one_query
from captum_ssm.errors import UnsupportedModelError, brief
from captum_ssm.mixers import FrozenMixer, MixerCall, find_adapter
from captum_ssm.mixers.reordered import ReorderedMixer
from captum_ssm.models.token_grid import TokenGrid
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.copies import copied
from captum_ssm.utils.integers import as_integers, from_start, index_in
from captum_ssm.utils.lazy import cached_property
from captum_ssm.utils.nested import map_tensors
from captum_ssm.utils.offload import moved, weights_loaded
from captum_ssm.wiring.grids import StepGrids
from captum_ssm.wiring.wiring import Wiring


@dataclass
class FrozenCall:
    """One visited mixer: its recorded call and its frozen form, in the model's order of tokens.

    Args:
        name (str): the module's path; a module's later visits carry ``":1"``, ``":2"``, ...
        call (MixerCall): what was recorded, on the device of the first mixer.
        step (int): its step through the model; mixers that run side by side share one.
        source (MixerCall): what was recorded, on the device of its own weights.
        made (FrozenDuringRun, optional): what was frozen, and compared, while the model ran.
        mask (Tensor, optional): ``(B, L)``, zero for padding.
        check (bool): compare the frozen mixer with what the mixer returned.
        order (Tensor, optional): ``(W, l)``: token t of window w of the mixer's sequences is this
            one of the model's. Default: None, the same
        scale (Tensor, optional): ``(E,)`` or ``(B, L, E)``, what the model multiplies the mixer's
            output by. The call and the frozen mixer hold it. Default: None
        matrix (Tensor, optional): ``(E, E_mixer)``, by which it multiplies that output first. They
            hold it too. Default: None
    """

    name: str
    call: MixerCall
    step: int
    source: MixerCall = field(repr=False)
    made: FrozenDuringRun | None = field(repr=False)
    mask: Tensor | None = field(repr=False)
    check: bool = field(repr=False)
    order: Tensor | None = field(default=None, repr=False)
    scale: Tensor | None = field(default=None, repr=False)
    matrix: Tensor | None = field(default=None, repr=False)
    is_new: bool = field(default=True, init=False, repr=False)

    @property
    def mixer(self) -> FrozenMixer:
        """The frozen mixer, checked the first time.

        It is read anew at each access, unless it was frozen while the model ran: of a deep model
        only one needs to exist.
        """
        with exact_arithmetic():
            mixer = None if self.made is None else self.made.mixer
            if mixer is None:
                mixer = self._read()
            if self.is_new:
                self._look_at(mixer)
            if self.order is not None:
                mixer = ReorderedMixer.of(mixer, self.order)
            if self.matrix is not None:
                mixer = _projected(mixer, self.matrix.to(mixer.out_weight))
            if self.scale is not None:
                mixer = _scaled(mixer, self.scale.to(mixer.out_weight))
        return moved(mixer, self.source.output.device, self.device)

    @property
    def device(self) -> torch.device:
        """The one that the call and the frozen mixer are on: that of the first mixer."""
        return self.call.output.device

    @property
    def shape(self) -> tuple[int, int]:
        """(B, L), the tokens it works on."""
        return self.call.output.shape[0], self.call.output.shape[1]

    def times(self, scale: Tensor) -> FrozenCall:
        """This call, of a mixer whose output the model multiplies by ``scale``, as above."""
        call = replace(self.call, result=self.call.output * scale.to(self.call.output))
        return replace(self, call=call, scale=scale)

    def through(self, matrix: Tensor) -> FrozenCall:
        """This call, of a mixer whose output goes through ``matrix``, as above."""
        call = replace(self.call, result=self.call.output @ matrix.to(self.call.output).mT)
        return replace(self, call=call, matrix=matrix)

    def of_first(self) -> FrozenCall:
        """This call of the first example, read and checked anew."""
        B = self.shape[0]

        def first(x: Tensor) -> Tensor:
            return x[:1] if x.dim() > 1 and x.shape[0] == B else x

        call, source, mask = map_tensors(first, (self.call, self.source, self.mask))
        scale = self.scale if self.scale is None or self.scale.dim() == 1 else self.scale[:1]
        return replace(self, call=call, source=source, mask=mask, made=None, scale=scale)

    def _read(self) -> FrozenMixer:
        adapter, call = find_adapter(self.source.module), self.source
        assert adapter is not None
        with copied(call.module), weights_loaded(call.module):
            return adapter(call)

    def _look_at(self, mixer: FrozenMixer) -> None:
        # Once: what was not compared in the run is compared, and what the call kept is let go.
        call = self.source
        if self.check and self.made is None:
            deviation = Deviation.of(call, Rebuilt.of(mixer, call))
            check_reconstruction(self.name, call, deviation, self.mask)
        for values in (call.linears, call.scans):
            if values is not None:
                values.forget()
        warn_if_padding_is_read(self.name, call, mixer, self.mask)
        warn_of_shift(call, mixer)
        self.is_new = False


def _projected(mixer: FrozenMixer, matrix: Tensor) -> FrozenMixer:
    project = mixer.out_proj
    return replace(
        mixer,
        out_weight=matrix @ mixer.out_weight,
        out_proj=lambda y: project(y) @ matrix.mT,
        dense_skip=None if mixer.dense_skip is None else mixer.dense_skip @ matrix.mT,
    )


def _scaled(mixer: FrozenMixer, scale: Tensor) -> FrozenMixer:
    if scale.dim() > 1:
        return replace(mixer, out_gate=scale if mixer.out_gate is None else scale * mixer.out_gate)
    project = mixer.out_proj
    return replace(
        mixer,
        out_weight=scale[:, None] * mixer.out_weight,
        out_proj=lambda y: scale * project(y),
        dense_skip=None if mixer.dense_skip is None else scale * mixer.dense_skip,
    )


@dataclass(frozen=True)
class FrozenModel:
    """A model frozen at one input.

    Args:
        request (Request): what was run.
        layers (list of FrozenCall): its mixers, in forward order.
        shape (tuple of int): (B, L).
        counted (int): the tokens that positions count.
        mask (Tensor, optional): ``(B, L)``, 1 for tokens and 0 for padding. Default: None
        wiring (Wiring): how the layers hang together.
        query (list of Tensor, optional): ``(B, L)`` for each step that the output reads, weights
            of the tokens whose rows are explained: one token, or an even share of each where the
            model pools by mean. Default: None
        score (Tensor, optional): ``(B,)``, the explained score, where gradients were asked.
            Default: None
        others (list of MixerCall, optional): calls outside the mixers, where asked for.
            Default: ()
        grid (TokenGrid, optional): which token is which patch, where the input is an image and
            the model tells. Default: None
        unruled (frozenset of str, optional): functions without a rule of relevance by which the
            score reads what comes after the last mixer. Default: frozenset()
        operations (frozenset, optional): the functions that the run called between its mixers.
            Default: frozenset()
        live (Recording, optional): the run, with its graph cut at the mixers where it has one, if
            it was to be kept. Default: None
        again (Callable, optional): freezes a request's model in the same way. Default: None
    """

    request: Request
    layers: list[FrozenCall]
    shape: tuple[int, int]
    counted: int
    wiring: Wiring
    mask: Tensor | None = None
    query: list[Tensor] | None = None
    score: Tensor | None = None
    others: Sequence[MixerCall] = ()
    grid: TokenGrid | None = None
    unruled: frozenset[str] = frozenset()
    operations: frozenset[Any] = frozenset()
    live: Recording | None = field(default=None, repr=False)
    again: Callable[[Request], FrozenModel] | None = field(default=None, repr=False)

    @property
    def input_shape(self) -> tuple[int, int]:
        """(B, L), the tokens of the input: those that the first step's are made of."""
        B, tokens = self.shape[0], self.wiring.steps[0].tokens
        for _, link in self.wiring.steps[0].reads:
            tokens = link.earlier(tokens)
        return B, tokens

    @cached_property
    def grids(self) -> StepGrids:
        """By step, the grid of its tokens; None where they form none."""
        return StepGrids(self.wiring, self.grid)

    def from_patches(self, mode: str) -> FrozenModel:
        """This frozen model, with relevance interpolated from the first step's own grid.

        Itself where the model declares a grid, or forms none.
        """
        is_image = self.request.inputs[0].dim() > 3 and len(self.wiring.inputs) == 1
        if self.grid is not None or not is_image or self.grids[0] is None:
            return self
        return replace(self.from_grid(0, mode), layers=self.layers)

    def from_grid(self, grid: int, mode: str = "bilinear") -> FrozenModel:
        """Only the layers of one grid of tokens, which is then the input's.

        Raises:
            ValueError: for a grid that the model does not have, or whose tokens form no grid.
        """
        steps = self.steps_of(grid)
        first = steps[0]
        patches = self.grids[first]
        if patches is None:
            raise ValueError(
                f"grid is {brief(grid)}, whose {self.wiring.steps[first].tokens} tokens form no "
                "grid over the input; leave grid at None."
            )
        wiring, output = self.wiring.starting_at(first), self.wiring.output
        query = self.query
        if query is not None:
            query = [w for w, (read, _) in zip(query, output, strict=True) if read >= first]
        layers = [layer for layer in self.layers if layer.step in steps]
        patches = replace(patches, mode=mode)
        return replace(self, wiring=wiring, grid=patches, query=query, layers=layers)

    def steps_of(self, grid: int) -> list[int]:
        """The steps of a grid, which work on the same tokens.

        Raises:
            ValueError: for a grid that the model does not have.
        """
        grids = self.wiring.grids
        index = index_in(grid, len(grids))
        if index is None:
            raise ValueError(
                f"grid is {brief(grid)}; the layers of this model work on {len(grids)} grids of "
                f"tokens, one after the other: expected 0 .. {len(grids) - 1} (or "
                f"-{len(grids)} .. -1 from the end)."
            )
        return grids[index]

    def mask_of(self, layer: FrozenCall) -> Tensor | None:
        """The padding mask of a layer's tokens, if they are the input's."""
        return self.mask if self.mask is None or self.mask.shape == layer.shape else None

    def of_first(self) -> FrozenModel:
        """The layers of the first example, of a model whose layers work on the input's tokens."""
        mask = None if self.mask is None else self.mask[:1]
        layers = [layer.of_first() for layer in self.layers]
        return replace(self, layers=layers, shape=(1, self.shape[1]), mask=mask)

    def require_query(self) -> list[Tensor]:
        """The query's weights, ``(B, L)`` for each step that the output reads."""
        assert self.query is not None
        return self.query

    def require_wiring(self) -> Wiring:
        """How the layers hang together, for a method that goes through them.

        Raises:
            UnsupportedModelError: where tokens are mixed between them in a way that no map shows.
        """
        if self.wiring.refused is not None:
            raise UnsupportedModelError(self.wiring.refused)
        for said in self.wiring.said():
            warnings.warn(said, UserWarning, stacklevel=2)
        return self.wiring

    def require_chain(self, what: str) -> None:
        """Raise unless all layers work on the same tokens, one after the other."""
        self.require_wiring()
        if not self.is_chain:
            raise UnsupportedModelError(
                f"{what} follows one residual stream through all layers, and those of this model "
                "work on different tokens, in another order than that of the input, or on "
                "branches; use another method."
            )

    def __reduce__(self) -> tuple[Any, ...]:
        # A graph cannot be copied or written to a file: the model runs again.
        assert self.again is not None
        return self.again, (self.request,)

    @property
    def is_chain(self) -> bool:
        """Whether all layers work on the same tokens in their order, one after the other."""
        orders = self.wiring.orders
        in_order = all(any(orders[c] is None for c in step.calls) for step in self.wiring.steps)
        return in_order and self.wiring.is_chain

    def require_score(self) -> Tensor:
        """The explained score, ``(B,)``, of a model frozen with gradients."""
        assert self.score is not None
        return self.score

    def warn_of_padding(self) -> None:
        """Warn of mixers that read padding on the left, where nothing else freezes them."""
        if is_padded_left(self.mask):
            for layer in self.layers:
                _ = layer.mixer

    def at(self, position: int | Tensor) -> FrozenModel:
        """This frozen model, asked for the row of another token."""
        shape, call = (self.shape[0], self.counted), self.layers[0].call
        mask = None if self.mask is None or self.mask.shape != shape else self.mask != 0
        query = one_query(position, shape, mask, call.output.device)
        return replace(self, query=at_steps(query.to(call.dtype), self.wiring))

    def row_index(
        self, rows: int | Sequence[int] | Tensor, shape: tuple[int, int] | None = None
    ) -> Tensor:
        """Asked rows, an int, ``(R,)`` or ``(B, R)``, as positions ``(B, R)`` from the start.

        ``shape`` is that of a layer; None for the model's.
        """
        B, L = self.shape if shape is None else shape
        index = as_integers(rows, self.layers[0].call.output.device)
        if index is None or index.dim() > 2:
            raise TypeError(f"rows is {brief(rows)}; expected an int, (R,) or (B, R) integers.")
        if index.numel() == 0 or (index.dim() == 2 and index.shape[0] != B):
            raise ValueError(
                f"rows has shape {tuple(index.shape)}; expected an int, (R,) or ({B}, R)."
            )
        told = f"rows holds {index.tolist()}, outside the sequence of {L} tokens"
        return torch.atleast_2d(from_start(index, L, told)).expand(B, -1)

    def from_layer(self, start: int) -> list[FrozenCall]:
        """The layers from step ``start`` (negative from the end) on."""
        count = len(self.wiring.steps)
        index = index_in(start, count)
        if index is None:
            raise ValueError(
                f"start_layer is {brief(start)}; this model has {count} layers of mixers: expected "
                f"0 .. {count - 1} (or -{count} .. -1 from the end)."
            )
        return [layer for layer in self.layers if layer.step >= index]

    def mask_matrix(self, matrix: Tensor) -> Tensor:
        """``matrix (B, ..., L, L)``, finite, with the rows and columns of padding set to zero."""
        check_relevance(matrix, self.request.module)
        if self.mask is None or matrix.shape[-2:] != (self.mask.shape[1],) * 2:
            return matrix
        mask = self.mask.reshape(self.shape[0], *[1] * (matrix.dim() - 3), self.mask.shape[1])
        return matrix * mask[..., None] * mask[..., None, :]

    def select(self, layers: int | str | Sequence[int | str] | None) -> list[FrozenCall]:
        """The layers named by index (negative from the end) or path; None for all."""
        if layers is None:
            return self.layers
        wanted = listed_layers(layers)
        if not wanted:
            raise ValueError("layers is empty; name at least one, or pass None for all.")
        return [self._layer(item, "layers holds") for item in wanted]

    def select_one(self, layer: int | str | None) -> FrozenCall:
        """The layer named by its index (negative from the end) or its path."""
        return self._layer(layer, "layer is")

    def _layer(self, layer: Any, told: str) -> FrozenCall:
        paths = [call.name for call in self.layers]
        return self.layers[mixer_index(layer, self.request.module, paths, told)]


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Without gradients, and in the operators' own dtype wherever the caller's autocast is on."""
    with torch.no_grad(), without_autocast():
        yield
