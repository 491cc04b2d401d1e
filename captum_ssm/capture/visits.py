"""The visits of a model's mixers in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd.graph import GradientEdge

from captum_ssm.capture.embedded_ids import entries_of, is_view, rows_of
from captum_ssm.capture.filled_tokens import FilledTokens
from captum_ssm.capture.model import input_embeddings
from captum_ssm.capture.operations import Operations
from captum_ssm.capture.request import Request
from captum_ssm.capture.reuse import InnerResults
from captum_ssm.capture.substitute import FrozenStandIns
from captum_ssm.errors import InputError, UnsupportedModelError
from captum_ssm.graph.points import edge_of
from captum_ssm.mixers import MixerCall
from captum_ssm.mixers.past import Past
from captum_ssm.mixers.registry import channels_of, layout_of, past_before
from captum_ssm.utils.clones import version_of
from captum_ssm.utils.copies import original
from captum_ssm.utils.nested import first_of, map_tensors, tensors_in, with_first
from captum_ssm.utils.progress import Bar
from captum_ssm.utils.retry import copies_are_kept
from captum_ssm.utils.saved_tensors import written_over
from captum_ssm.utils.watch_modules import run_in
from captum_ssm.wiring.cuts import RunCuts


@dataclass(eq=False)
class Visits:
    """The calls of a run: what is kept of each, and what the model goes on with.

    Modules are copies of the user's.
    """

    request: Request
    root: nn.Module
    mixers: Mapping[nn.Module, str]
    substitute: FrozenStandIns | None
    cuts: RunCuts | None
    bar: Bar
    gradients: bool
    whole: bool

    def __post_init__(self) -> None:
        inputs, substitute = self.request.inputs, self.substitute
        self.ids = {k: x for k, x in enumerate(inputs) if not x.is_floating_point()}
        self.embedded: list[Tensor] = []  # the ids that the table was given
        self.edges: list[GradientEdge | None] = []  # of the recorded calls' outputs
        self.inner = InnerResults()
        self.filled = FilledTokens()
        self.operations = Operations()
        self.pasts: dict[nn.Module, Past | None] = {}  # of mixers that are running
        self.given: dict[nn.Module, Any] = {}  # and what the model gave them
        self.versions: list[tuple[Tensor, int]] = []  # of what other modules are given and return
        self.tables: list[tuple[nn.Module, Tensor]] = []  # by call, and what they were given
        # Some mixer has its channels first, so other modules may have them first too.
        self.channels_first = any(channels_of(module) == 1 for module in self.mixers)
        self.table = input_embeddings(self.root)
        widths = [m.embedding_dim for m in self.root.modules() if isinstance(m, nn.Embedding)]
        self.width = max(widths, default=0)
        self.grad_mode = torch.is_grad_enabled()
        # What is inside a mixer is recomputed; only what is outside needs its graph.
        keep = partial(self.inner.running, linears=substitute is None and not self.whole)
        for module in self.mixers:
            if substitute is not None:
                substitute.prepare(module)
                run_in(substitute.running, module)
            if substitute is None or substitute.keeps_mixers:
                run_in(keep, module)
            run_in(self.operations.in_mixer, module)

    def inputs(self) -> tuple[Tensor, ...]:
        """The inputs that the model is to be given: values are where its graph begins."""
        inputs, cuts = self.request.inputs, self.cuts
        if cuts is None:
            return tuple(inputs)
        return tuple(
            x if k in self.ids else cuts.begin(k, x, embedded=self.request.is_embedded(k))
            for k, x in enumerate(inputs)
        )

    def enter(self, module: nn.Module, inputs: Any) -> Any:
        """What a module is to be given, in place of ``inputs``."""
        with self.operations.paused():
            return self._entered(module, inputs)

    def _entered(self, module: nn.Module, inputs: Any) -> Any:
        if module not in self.mixers:
            return map_tensors(Tensor.clone, inputs) if copies_are_kept() else inputs
        # A mixer's forward may run without a graph.
        with torch.set_grad_enabled(self.grad_mode):
            call = self._call(module, inputs, None)
            tokens = call.given_tokens()
            _check_ordinary(call)
            _check_device(module, call.path, "is given", tokens)
            self.pasts[module] = past_before(call)  # before the mixer writes into its cache
            self.given[module] = inputs
            if self.cuts is None:
                return inputs
            entered = self.cuts.enter(tokens)

            def cut_off(value: Any) -> Any:
                if value is tokens:
                    return entered
                return value if self.whole or not torch.is_tensor(value) else value.detach()

            args = tuple(map(cut_off, call.args))
            kwargs = {name: cut_off(value) for name, value in call.kwargs.items()}
            return replace(call, args=args, kwargs=kwargs).own[:2]

    def leave(self, module: nn.Module, inputs: Any, value: Any) -> tuple[Any, Any]:
        """The call that is recorded, if any, and what the model goes on with."""
        if is_table(module):
            self.tables.append((module, next(tensors_in(inputs))))
        with self.operations.paused(), torch.set_grad_enabled(self.grad_mode):
            call = self._call(module, inputs, value)
            is_mixer = module in self.mixers
            if not is_mixer and self.substitute is None and not _is_ordinary(call):
                return None, value  # nothing takes its place, so it need not be followed
            if not is_mixer:
                _check_ordinary(call)
            call = replace(call, past=self.pasts.pop(module, None))
            if is_mixer:
                _check_device(module, call.path, "returns", call.output)
                self.inner.leave(call)
            self.bar.advance(is_mixer)
            visit, value = self._recorded(call, is_mixer)
            if self.cuts is not None and is_mixer:
                value = with_first(value, self.cuts.leave(self.mixers[module], first_of(value)))
            elif self.cuts is not None and is_table(module) and self.table in (None, module):
                value = self._embedded(module, next(tensors_in(inputs)), value)
                visit = None if visit is None else replace(call, result=value)
            if module is self.table:
                self.filled.embedded(first_of(value))
            if visit is not None and not (is_mixer or is_table(module)):
                tensors = tensors_in((visit.args, visit.kwargs, visit.result))
                self.versions += [(x, version_of(x)) for x in tensors]
                value = map_tensors(Tensor.clone, value) if copies_are_kept() else value
            if is_mixer:
                call = self._call(module, self.given.pop(module), None)
            return visit, replace(call, result=value).own[2]

    def abandon(self, module: nn.Module) -> None:
        """Forget a call that was entered, and ended in an exception."""
        self.pasts.pop(module, None)
        self.given.pop(module, None)
        if self.cuts is not None and module in self.mixers:
            self.cuts.abandon()

    def calls(
        self, visits: Sequence[tuple[nn.Module, Any, Any]], paths: Mapping[nn.Module, str]
    ) -> list[MixerCall]:
        """The recorded calls, in forward order, with what was kept of them."""
        inner, calls = iter(self.inner.calls), []
        for order, (module, _, call) in enumerate(visits):
            linears, scans = next(inner) if module in self.mixers else (None, None)
            calls.append(
                replace(call, path=paths[module], order=order, linears=linears, scans=scans)
            )
        return calls

    def check(self) -> None:
        """Raise where ids are not embedded as they were given, or what was kept is written over."""
        self._check_embedded()
        for x, version in self.versions:
            if version_of(x) != version:
                raise written_over(x, version)

    def _check_embedded(self) -> None:
        # Whether the model embeds the ids of an input as they were given.
        if self.cuts is not None:
            is_alone = len(self.request.inputs) == 1
            for k, ids in self.ids.items():
                _check_embedded(self.embedded, ids, self.cuts.embedded.get(k), is_alone)

    def _call(self, module: nn.Module, inputs: Any, value: Any) -> MixerCall:
        layout = layout_of(module) if module in self.mixers else {}
        if self.channels_first and module not in self.mixers and _has_channels_first(module, value):
            layout = {"channels": 1}
        args, kwargs = inputs
        path = self.mixers.get(module, "")
        return MixerCall.of(path, original(module), args, kwargs, value, **layout)

    def _recorded(self, call: MixerCall, is_mixer: bool) -> tuple[MixerCall | None, Any]:
        substitute, value = self.substitute, call.result
        if substitute is not None:
            value = substitute(call)
        is_own = value is call.result
        is_recorded = is_own or is_mixer
        if self.gradients and not first_of(value).requires_grad:
            # A frozen model fed with ids has no graph: it starts here.
            value = with_first(value, first_of(value).detach().clone().requires_grad_(True))
        if not is_recorded:
            return None, value
        visit = replace(call, result=value)
        has_graph = first_of(value).requires_grad
        self.edges.append(edge_of(first_of(value)) if has_graph else None)
        # What is measured after the run is compared with what the mixer returned.
        own_graph = substitute is not None and is_mixer and substitute.made[-1] is None
        if not (is_own or own_graph or substitute is None or substitute.keeps_outputs):
            visit = replace(visit, result=map_tensors(_form, value))
        # Which the model may change in place.
        return visit, with_first(value, first_of(value).clone()) if own_graph else value

    def looked_up(self, arguments: Any, rows: Any) -> Any:
        """What a model goes on with at rows of a table of ids that is no module."""
        indices = next((x for x in tensors_in(arguments) if self._are_ids(x)), None)
        if self.substitute is None or indices is None or not rows.is_floating_point():
            return rows
        if rows.shape[: indices.dim()] != indices.shape:
            return rows
        with self.operations.paused(), torch.enable_grad():
            return self.substitute.looked_up(indices, rows)

    def _are_ids(self, x: Tensor) -> bool:
        return any(is_view(x, ids) for ids in self.ids.values())

    def fill(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """What a module is to be given, where the tokens begin that the model filled."""
        with self.operations.paused():
            return self._filled((args, kwargs))

    def _filled(self, inputs: Any) -> Any:
        filled = self.filled.among(inputs)
        if filled is None:
            return None
        tokens, is_filled = filled
        with torch.enable_grad():
            started = self._started(tokens.detach(), is_filled)
            begun = torch.where(is_filled[..., None], started, tokens)
        return map_tensors(lambda x: begun if x is tokens else x, inputs)

    def _started(self, tokens: Tensor, is_filled: Tensor) -> Tensor:
        if self.substitute is not None:
            tokens = self.substitute.filled(tokens)
        if self.cuts is not None:
            [(k, ids)] = self.ids.items()
            entries = is_filled.flatten().nonzero().squeeze(-1)
            begun = tokens.flatten(0, 1)[entries]
            begun = self.cuts.embed(k, ids, entries.cpu(), begun, self.width)
            tokens = tokens.masked_scatter(is_filled[..., None], begun)
        return tokens

    def _embedded(self, module: nn.Module, looked_up: Tensor, value: Any) -> Any:
        assert self.cuts is not None
        self.embedded.append(looked_up)
        for k, ids in self.ids.items():
            entries = entries_of(looked_up, ids, rows_of(module, self.table))
            if entries is not None:
                return self.cuts.embed(k, ids, entries, value, self.width)
        return value


def _check_embedded(
    embedded: list[Tensor], ids: Tensor, known: Tensor | None, is_alone: bool
) -> None:
    # Known is, for each id, whether a table was given it. Of several inputs all have to be found,
    # as nothing else tells whose the tokens are.
    if known is None and not is_alone:
        known = torch.zeros(1, dtype=torch.bool)
    if known is not None:
        if not bool(known.all()):
            raise InputError(
                f"the model embeds {int(known.sum())} of the {ids.numel()} ids of inputs, of shape "
                f"{tuple(ids.shape)}, by torch.nn.Embedding; expected all, as a whole or in views "
                "of them, such as columns. Pass what is no ids in additional_forward_args."
            )
        return
    for looked_up in embedded:
        if looked_up.shape == ids.shape and torch.equal(
            looked_up.sort(-1).values.to(ids.device), ids.sort(-1).values
        ):
            raise UnsupportedModelError(
                "the model embeds the ids of inputs in another order than that of inputs, so its "
                "tokens are not those that were given; expected a forward_func that passes the "
                "ids on as they are."
            )


def _check_ordinary(call: MixerCall) -> None:
    # Tensors of a transformation have no values, and those of inference mode no graph.
    for x in tensors_in((call.args, call.kwargs)):
        how = _how_run(x)
        if how is not None:
            raise UnsupportedModelError(
                f"{call.path or type(call.module).__name__} is run under {how}, where what it "
                "computes cannot be followed; expected a forward_func that calls the model outside "
                "of it."
            )


def _is_ordinary(call: MixerCall) -> bool:
    return all(_how_run(x) is None for x in tensors_in((call.args, call.kwargs, call.result)))


def _how_run(x: Tensor) -> str | None:
    if is_functorch_wrapped_tensor(x):
        return "torch.func (vmap, jvp, grad)"
    is_inference = x.is_inference() or torch.is_inference_mode_enabled()
    return "torch.inference_mode()" if is_inference else None


def _check_device(module: nn.Module, path: str, how: str, tokens: Tensor) -> None:
    # Adapters compute with what a mixer is given and its weights.
    weights = {p.device for p in module.parameters() if not p.is_meta}
    if weights and tokens.device not in weights:
        raise UnsupportedModelError(
            f"{path} {how} tokens on {tokens.device}, and its weights are on "
            f"{', '.join(map(str, weights))}: its own forward moves tokens to another device. "
            "Expected a mixer that is given tokens where its weights are; move them in the forward "
            "of the module around it, in hooks (register_forward_pre_hook, register_forward_hook), "
            "or with accelerate's add_hook_to_module."
        )


def is_table(module: nn.Module) -> bool:
    """Whether a module embeds ids."""
    return isinstance(module, nn.Embedding)


def _has_channels_first(module: nn.Module, value: Any) -> bool:
    # A norm, or another module with a weight per channel, tells. Where the axes are of one size, a
    # series is taken for (B, L, E).
    weight = getattr(module, "weight", None)
    if not (torch.is_tensor(value) and torch.is_tensor(weight) and value.dim() >= 3):
        return False
    is_last = value.dim() == 3 and weight.shape == value.shape[-1:]
    return weight.shape == value.shape[1:2] and not is_last


def _form(x: Tensor) -> Tensor:
    # Its shape and dtype, without its numbers.
    return x.new_zeros(()).expand(x.shape)
