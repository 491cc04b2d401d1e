"""Mixers without an adapter, found before a model is recorded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from captum_ssm.capture.check import Deviation, Rebuilt, check_reconstruction, state_of
from captum_ssm.capture.model import refuse_scripted
from captum_ssm.capture.recording import NotReachedError
from captum_ssm.capture.request import Request
from captum_ssm.capture.thrown_away import on_thrown_away
from captum_ssm.discovery.scans import all_forms
from captum_ssm.discovery.search import discover
from captum_ssm.errors import UnsupportedModelError
from captum_ssm.mixers import FrozenMixer, MixerCall, find_adapter, find_mixers
from captum_ssm.mixers.call import MISFITS
from captum_ssm.mixers.registry import Adapter, known_of, may_be_namesake, nearest_misses, remember
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.clones import repeated
from captum_ssm.utils.copies import Copies, copied, original
from captum_ssm.utils.nested import detached, map_tensors, same_values
from captum_ssm.utils.quiet import quiet
from captum_ssm.utils.watch_modules import After
from captum_ssm.wiring.wiring import Wiring

T = TypeVar("T")


def warn_of_unknown(model: nn.Module, refused: str | None) -> None:
    """Warn of what mixes tokens in a model and is no mixer, as once measured.

    Attention is no matter: its probabilities are constants wherever they are computed.
    """
    known = known_of(model)
    known.unknown = unknown = known.unknown if refused is None else refused
    if unknown is not None and "Softmax" not in unknown and "ScaledDotProduct" not in unknown:
        why = unknown.partition(". ")[0].removesuffix(".")
        if "tokens are mixed" not in why:
            why = f"nothing tells what else mixes tokens, as {why.partition('; ')[0]}"
        warnings.warn(
            f"{why}: its coefficients are not held constant, so they share the relevance of what "
            "they multiply. The convergence delta says whether it still adds up to the score.",
            UserWarning,
            stacklevel=2,
        )


@repeated
def find_namesakes(request: Request) -> None:
    """Find other adapters of mixers whose class only has the name of one that is registered.

    As in copies of a package that compute something else: what the adapter of the name computes is
    compared with what they return, once for all that look alike.
    """
    candidates = [module for _, module in find_mixers(request.module) if may_be_namesake(module)]
    if not candidates:
        return
    alike: dict[str, set[nn.Module]] = {}
    for module in candidates:
        alike.setdefault(look_of(module), set()).add(module)
    # The run that is explained warns by itself.
    with quiet(), on_thrown_away(request) as (of_copies, copies):
        calls = _calls_of(alike, of_copies, copies)
        unlike = {m for look, call in calls.items() if not _is_like(call) for m in alike[look]}
        if unlike:
            _find_others(unlike, copies, of_copies.run)
    for module in candidates:
        known_of(module).is_of_its_name = module not in unlike


@repeated
def adapter_of(call: MixerCall) -> Adapter:
    """A call's adapter; another one where that of its module's name computes something else."""
    module = original(call.module)
    if may_be_namesake(module):
        with quiet(), copied(module) as copies:
            of_copy = replace(call, module=copies.root)
            is_like = _is_like(of_copy)
            if not is_like:
                _find_others({module}, copies, of_copy.run)
        known_of(module).is_of_its_name = is_like
    return find_adapter(module) or _refuse


def _find_others(modules: set[nn.Module], copies: Copies, run: Callable[[], Any]) -> None:
    # Other adapters of modules than those of their classes: in them, or in parts of them.
    for module in modules:
        known_of(module).is_of_its_name = False
    try:
        adapters = _discovered(copies, run)
    except BaseException:
        for module in modules:
            known_of(module).is_of_its_name = None
        raise
    inside = {part for module in adapters for part in module.modules()}
    rest = {m for m in modules - inside if adapters.keys().isdisjoint(m.modules())}
    remember(adapters | dict.fromkeys(rest, _refuse))


def _discovered(copies: Copies, run: Callable[[], Any]) -> dict[nn.Module, Adapter]:
    # By the user's modules.
    adapters = discover(copies.root, run, _reproduces)
    return {original(module): freeze for module, freeze in adapters.items()}


def _refuse(call: MixerCall) -> FrozenMixer:
    kind = type(call.module)
    near = nearest_misses(original(call.module), 1)
    raise UnsupportedModelError(
        f"{call.path} is a {kind.__module__}.{kind.__qualname__}, which has the name of a class "
        "that this library knows and computes something else, and it cannot be measured"
        + (f": {near}" if near else "")
        + ". Register an adapter with captum_ssm.register_mixer(module_type, freeze)."
    )


def _calls_of(
    alike: dict[str, set[nn.Module]], request: Request, copies: Copies
) -> dict[str, MixerCall]:
    # For each look, the first call of the copy of a module that has it.
    calls: dict[str, MixerCall] = {}
    look_of_copy = {copies.of(m): look for look, modules in alike.items() for m in modules}

    def note(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if (look := look_of_copy[module]) not in calls:
            call = MixerCall("", module, args, kwargs, result)
            calls[look] = map_tensors(lambda x: x.detach().clone(), call)

    _run_noting(look_of_copy, note, request)
    return calls


def _run_noting(modules: Iterable[nn.Module], note: After, request: Request) -> None:
    # A run of copies, in which a function is told of each call of some of them, in any thread.
    with torch.no_grad(), ExitStack() as hooks:
        for module in modules:
            handle = module.register_forward_hook(note, with_kwargs=True, prepend=True)
            hooks.enter_context(handle)
        request.run()


def _is_like(call: MixerCall) -> bool:
    adapter = find_adapter(call.module)
    return adapter is not None and _reproduces(adapter, call)


def _reproduces(adapter: Adapter, call: MixerCall) -> bool:
    try:
        with torch.no_grad():
            deviation = Deviation.of(call, Rebuilt.of(adapter(call), call))
            check_reconstruction("", call, deviation, call.token_mask())
    except MISFITS:
        return False
    return True


def look_of(module: nn.Module) -> str:
    """What modules have in common that compute alike: their class, parts, shapes and settings."""
    settings = {
        f"{path}.{name}": value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, (bool, int, float, str, tuple)) and not name.startswith("_")
    }
    shapes = {name: tuple(value.shape) for name, value in module.named_parameters()}
    kind = type(module)
    return f"{kind.__module__}.{kind.__qualname__} {id(kind)}: {module} {settings} {shapes}"


def reaching(request: Request, run: Callable[[], T]) -> T:
    """What a run of a model returns; again with other mixers, where it called none of the known.

    Some wrappers of models compute what a mixer computes by themselves, from its parts: then the
    wrapper is the mixer.

    Raises:
        NotReachedError: nothing around the known mixers is one.
    """
    try:
        return run()
    except NotReachedError:
        if request.remote or not repeated(_search)(request):
            raise
        return run()


def _called(modules: set[nn.Module], request: Request, copies: Copies) -> set[nn.Module]:
    # The modules whose copies a run calls.
    called: set[nn.Module] = set()
    if modules:
        _run_noting(map(copies.of, modules), lambda module, *_: called.add(module), request)
    return {module for module in modules if copies.of(module) in called}


@contextmanager
def _set_aside(modules: set[nn.Module]) -> Iterator[None]:
    # For the time of a search, these modules are no mixers.
    before = {module: known_of(module).is_of_its_name for module in modules}
    try:
        for module in modules:
            known_of(module).is_of_its_name = False
        yield
    finally:
        for module, is_of_its_name in before.items():
            known_of(module).is_of_its_name = is_of_its_name


@repeated
def find_unknown_mixers(request: Request, *, between: Wiring | None = None) -> bool:
    """Run a model whose mixers no adapter is registered for, and remember those found.

    Where ``between``, the wiring of the known mixers, is mixed, a model that has some is searched
    too, once for what its graph is made of.

    Returns:
        bool: whether any were found.
    """
    if request.remote:
        return False
    find_namesakes(request)
    known, made_of = known_of(request.module), frozenset() if between is None else between.structure
    is_mixed = between is not None and between.is_mixed
    has_mixers = any(True for _ in find_mixers(request.module))
    if has_mixers and (not is_mixed or made_of <= known.searched):
        return False
    # A search of a whole model takes long, and each method asks again.
    state = None if has_mixers else _searched_in(request)
    if state is not None and same_values(known.barren, state):
        return False
    is_found = _search(request, made_of)
    if state is not None and not is_found:
        known.barren = state
    return is_found


def _searched_in(request: Request) -> Any:
    # All that a search depends on; a function by its number, as it may hold the model.
    run_on = detached((request.inputs, request.positional, request.named))
    runs = id(request.forward_func), map_tensors(torch.clone, run_on)
    return state_of(request.module), all_forms(), runs


def _search(request: Request, made_of: frozenset[Any] = frozenset()) -> bool:
    # Whether mixers are found in what a run calls; those that it does not call are none.
    refuse_scripted(request.module)
    mixers = {module for _, module in find_mixers(request.module)}
    with quiet(), on_thrown_away(request) as (of_copies, copies):
        unused = mixers - _called(mixers, of_copies, copies)
        with _set_aside(unused):
            adapters = _discovered(copies, of_copies.run)
    remember(adapters)
    known = known_of(request.module)
    known.searched, known.unknown = known.searched | made_of, None
    return bool(adapters)
