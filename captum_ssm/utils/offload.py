"""Models whose weights lie elsewhere: offloaded by accelerate, or spread over devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.clones import memory
from captum_ssm.utils.copies import original, running
from captum_ssm.utils.nested import map_tensors
from captum_ssm.utils.saved_tensors import Save, saving

V = TypeVar("V")


# By module, the one whose hook loads its weights, as seen in the model's last run: a hook may load
# those of all modules inside.
_LOADERS: WeakKeyDictionary[nn.Module, ref[nn.Module]] = WeakKeyDictionary()


def is_offloaded(module: nn.Module) -> bool:
    """Whether weights of ``module`` were loaded for the model's last run only."""
    return any(original(part) in _LOADERS for part in module.modules())


@contextmanager
def weights_loaded(module: nn.Module) -> Iterator[None]:
    """Have the weights of ``module`` at hand where accelerate offloads them between calls."""
    with ExitStack() as stack:
        for part in module.modules():
            loader = _LOADERS.get(original(part), lambda part=part: part)()
            if loader is not None and part is not original(part):  # a copy has its own weights
                loader = running(loader)
            hook = getattr(loader, "_hf_hook", None)
            if hook is not None and any(value.is_meta for value in _weights(part).values()):
                hook.pre_forward(loader)
                stack.callback(hook.post_forward, loader, None)
        yield


@contextmanager
def reloaded_in_backward(model: nn.Module) -> Iterator[None]:
    """Run a copy of a model such that no graph keeps the weights that accelerate loads for a call.

    Its backward pass loads them again, into the user's modules for as long as it takes.
    """
    away = {m: [n for n, w in _weights(m).items() if w.is_meta] for m in model.modules()}
    away = {module: names for module, names in away.items() if names}
    hooked = [m for m in model.modules() if "_hf_hook" in m.__dict__]
    for module in model.modules():
        _LOADERS.pop(original(module), None)
    if not (away and hooked):
        yield
        return
    loaded = _Loaded(away)
    for module in hooked:
        module.__dict__["_hf_hook"] = _WatchedHook(module, loaded)
    # The node of a graph that a gradient of a parameter would be added by keeps the parameter.
    for p in model.parameters():
        if p.is_meta:
            p.requires_grad_(False)
    with saving(loaded.keep):
        yield


class _Loaded:
    # The weights that were loaded, by their memory. Away are those that may be, by module.
    def __init__(self, away: Mapping[nn.Module, Sequence[str]]) -> None:
        self.away = away
        self.known: dict[tuple[torch.device, int], _LoadedWeight] = {}

    def note(self, part: nn.Module, loader: nn.Module) -> None:
        weights = _weights(part)
        for name in self.away[part]:
            if not weights[name].is_meta:
                _LOADERS.setdefault(original(part), ref(original(loader)))
                self.note_weight(weights[name], part, name, int(weights[name].storage_offset()))

    def note_weight(self, held: Tensor, part: nn.Module, name: str, offset: int) -> None:
        self.known[_memory(held)] = _LoadedWeight(ref(held), part, name, offset)

    def keep(self, x: Tensor, save: Save) -> Callable[[], Tensor]:
        if _memory(x) not in self.known:
            return save(x)
        weight = self.known[_memory(x)]
        held = weight.held()
        # Memory that was released may have been given to something else since.
        if held is None or held.dtype != x.dtype:
            return save(x)
        part, name = weight.part, weight.name
        size, stride = x.size(), x.stride()
        offset = x.storage_offset() - weight.offset
        owner = original(part)

        def load() -> Tensor:
            with weights_loaded(owner):
                again = _weights(owner)[name].detach()
            loaded = again.as_strided(size, stride, again.storage_offset() + offset)
            # A backward pass that records a graph of its own does not keep it either.
            self.note_weight(loaded, part, name, int(again.storage_offset()))
            return loaded

        return load


class _LoadedWeight(NamedTuple):
    # A weight in memory, as long as `held` is alive, which begins there at `offset`.
    held: ref[Tensor]
    part: nn.Module
    name: str
    offset: int


class _WatchedHook:
    # A module's hook, which also notes what it loaded.
    def __init__(self, module: nn.Module, loaded: _Loaded) -> None:
        self._own: Any = module._hf_hook
        self._loaded = loaded
        self._inside = [part for part in module.modules() if part in loaded.away]

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = self._own.pre_forward(module, *args, **kwargs)
        for part in self._inside:
            self._loaded.note(part, module)
        return arguments

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)


def _weights(module: nn.Module) -> dict[str, Tensor]:
    # Its own, not those of the modules inside.
    tensors = {**module._parameters, **module._buffers}
    return {name: value for name, value in tensors.items() if value is not None}


def _memory(x: Tensor) -> tuple[torch.device, int]:
    return x.device, memory(x)


def moved(value: V, source: torch.device, device: torch.device) -> V:
    """``value``, or a copy with its tensors on ``device``, whose functions are called there.

    Containers and dataclasses are gone through; modules stay where they are.

    Args:
        value (Any): its functions take tensors on ``source`` only.
        source (torch.device): what it was computed on.
        device (torch.device): what a function of the copy is given, and returns, is here.
    """
    if source == device:
        return value

    def moving(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: moved(function(*moved(args, device, source)), source, device)

    return map_tensors(lambda tensor: tensor.to(device), value, moving)
