"""Which adapter belongs to which module class."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from captum_ssm.errors import InputError, UnsupportedModelError
from captum_ssm.mixers.call import MISFITS, MixerCall
from captum_ssm.mixers.frozen_mixer import FrozenMixer
from captum_ssm.mixers.linear_layers import is_plain
from captum_ssm.mixers.past import Past, past_of
from captum_ssm.utils.clones import address
from captum_ssm.utils.copies import original

Adapter = Callable[[MixerCall], FrozenMixer]
_REGISTRY: dict[str, Adapter] = {}


@dataclass
class Known:
    """What runs of a model told of it, or of one of its modules.

    Args:
        adapter (Callable, optional): of this module. Its class's comes first. Default: None
        is_of_its_name (bool, optional): whether the adapter of its class computes what it computes,
            where that was taken for the class by its name alone; None before they are compared.
            Default: None
        miss (str, optional): why it was not taken for a mixer. Default: ""
        searched (frozenset, optional): what its graphs are made of between whose mixers unknown
            ones were looked for. Default: frozenset()
        made_of (frozenset, optional): what its graphs are made of in which nothing is left to be
            searched for. Default: None
        unknown (str, optional): what mixes tokens in it and is not a mixer. Default: None
        honest (frozenset, optional): what its graphs are made of that were found to tell the truth.
            Default: frozenset()
        hidden (Any, optional): what in it depends on tokens in a way that autograd does not show.
            Default: None
        hidden_in (frozenset, optional): what its graph was made of in which that was found.
            Default: frozenset()
        apart (frozenset, optional): what its graphs are made of in which a score of an example
            depends on no other of its batch. Default: frozenset()
        steady (frozenset, optional): what its runs called in which random numbers had no effect.
            Default: frozenset()
        long (dict of frozenset to int): by what its runs called, the longest text between whose
            mixers no token acted on another. Default: ``{}``
        mixes_examples (bool, optional): whether a score of an example depends on others of its
            batch. Default: None, not looked at
        projection (str, optional): the name of its linear layer that returned its result.
            Default: None, not seen
        barren (Any, optional): its state, and what it was run on, where no mixer was found.
            Default: None
        right (Any, optional): the state in which it was run in a wider dtype and found to be what
            its adapter computes. Default: None
    """

    adapter: Adapter | None = None
    is_of_its_name: bool | None = None
    miss: str = ""
    searched: frozenset[Any] = frozenset()
    made_of: frozenset[Any] | None = None
    unknown: str | None = None
    honest: frozenset[Any] = frozenset()
    hidden: Any = None
    hidden_in: frozenset[Any] = frozenset()
    apart: frozenset[Any] = frozenset()
    steady: frozenset[Any] = frozenset()
    long: dict[frozenset[Any], int] = field(default_factory=dict)
    mixes_examples: bool | None = None
    projection: str | None = None
    barren: Any = None
    right: Any = None

    @property
    def is_warned(self) -> bool:
        """Whether warnings are about something in it."""
        return bool(self.unknown or self.hidden or self.mixes_examples)

    def is_settled(self, structure: frozenset[Any] = frozenset()) -> bool:
        """Whether all that mixes tokens in a graph is known.

        Args:
            structure (frozenset, optional): what the graph is made of. Default: frozenset(), for
                any graph of this model
        """
        if self.made_of is None or not structure:
            return self.made_of is not None
        # What a warning is about may be gone from a graph that is made of less.
        return structure == self.made_of if self.is_warned else structure <= self.made_of

    def settle(self, structure: frozenset[Any]) -> None:
        """Note that a graph was measured, and searched if tokens are mixed."""
        before = None if self.is_warned else self.made_of
        self.made_of = structure if before is None else before | structure

    def forget_warned(self) -> None:
        """Forget what a warning was about, and which graphs had it, before another is measured."""
        if self.is_warned:
            self.made_of = self.unknown = None


_KNOWN: WeakKeyDictionary[nn.Module, Known] = WeakKeyDictionary()
_NOTHING = Known()
# All that a class may be registered by: modules are looked up many times in each run.
_NAMES: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()
# Packages that are what they are called. People keep copies of others, such as mamba_ssm, under the
# same name, in which a class computes something else.
_PACKAGES = ("captum_ssm", "fla", "transformers")


def known_of(module: nn.Module) -> Known:
    """What is known of a module, to be read and to be changed."""
    return _KNOWN.setdefault(original(module), Known())


def channels_of(module: nn.Module) -> int:
    """The axis of the channels in the tokens that a mixer takes and returns."""
    return getattr(find_adapter(module), "channels", -1)


def layout_of(module: nn.Module) -> dict[str, Any]:
    """The options of :meth:`MixerCall.of` that say how a mixer takes and returns its tokens."""
    adds_input = getattr(find_adapter(module), "adds_input", False)
    return {"channels": channels_of(module), "adds_input": adds_input}


def projection_of(module: nn.Module) -> Any:
    """The linear layer of a mixer that was seen to return its result, if one was."""
    name = _KNOWN.get(original(module), _NOTHING).projection
    return None if name is None else module.get_submodule(name)


def learn_projection(module: nn.Module, mixer: FrozenMixer) -> None:
    """Let :func:`projection_of` know the layer of a frozen mixer's output projection."""
    layers = (
        name
        for name, layer in module.named_modules()
        if is_plain(layer) and address(layer.weight) == address(mixer.out_weight)
    )
    known_of(module).projection = next(layers, None) if mixer.out_gate is None else None


def adapts(*names: str) -> Callable[[Adapter], Adapter]:
    """Register one of the library's own adapters, by the names of its classes.

    Raises:
        ValueError: for a name that already has an adapter.
    """

    def register(function: Adapter) -> Adapter:
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


def register_mixer(module_type: type[nn.Module] | str, freeze: Adapter | None = None) -> Any:
    """Register a mixer class, with the function that freezes a recorded call of it.

    Args:
        module_type (type or str): the module class, or its dotted name
            (``"package.module.Class"``, or a trailing part of it such as ``"Class"``) to
            avoid importing it. Subclasses are included; the most derived registered class wins.
            Registering a name again, also one of the library's own, replaces its function.
        freeze (Callable, optional): takes a :class:`MixerCall`, returns a
            :class:`FrozenMixer`. None returns a decorator. Default: None

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

    The frozen mixer is checked against the module's own output at every use, so a wrong ``freeze``
    raises ``ReconstructionError`` instead of explaining another model.
    """
    if isinstance(module_type, type):
        name = f"{module_type.__module__}.{module_type.__qualname__}"
    elif isinstance(module_type, str) and module_type:
        name = module_type
    else:
        kind = repr(module_type) if isinstance(module_type, str) else type(module_type).__name__
        raise TypeError(
            f"module_type is {kind}; expected a module class or its dotted name, a str."
        )

    def register(function: Adapter) -> Adapter:
        if not callable(function):
            raise TypeError(
                f"freeze is a {type(function).__name__}; expected a function that takes a "
                "MixerCall and returns a FrozenMixer."
            )
        _REGISTRY[name] = function
        return function

    return register if freeze is None else register(freeze)


def find_adapter(module: nn.Module) -> Adapter | None:
    """The registered ``freeze`` for the class of ``module`` or its nearest base class, if any.

    For a module of another class, the one that was found when its model ran.

    Examples::

        >>> find_adapter(model.backbone.layers[0].mixer).__name__
        'freeze_s6'
        >>> find_adapter(nn.Linear(2, 2)) is None
        True
    """
    known = _KNOWN.get(original(module), _NOTHING)
    of_class = None if known.is_of_its_name is False else _registered(module)
    return known.adapter if of_class is None else of_class


def _registered(module: nn.Module) -> Adapter | None:
    # The adapter of the module's own class, or of the nearest base of it.
    cls = type(module)
    names = _NAMES.get(cls)
    if names is None:
        names = _NAMES[cls] = tuple(_names(cls))
    return next((_REGISTRY[name] for name in names if name in _REGISTRY), None)


def _names(kind: type) -> Iterator[str]:
    # The names that a class may be registered by, then those of its bases.
    for cls in kind.__mro__:
        parts = f"{cls.__module__}.{cls.__qualname__}".split(".")
        yield from (".".join(parts[start:]) for start in range(len(parts)))


def may_be_namesake(module: nn.Module) -> bool:
    """Whether one of the library's own adapters is taken for a class by its name alone.

    Such an adapter has to be compared with what the module returns before it is used.
    """
    is_open = _KNOWN.get(original(module), _NOTHING).is_of_its_name is None
    is_named = type(module).__module__.partition(".")[0] in _PACKAGES
    return is_open and not is_named and is_own(_registered(module))


def is_own(freeze: Adapter | None) -> bool:
    """Whether an adapter is one of the library's own."""
    return (getattr(freeze, "__module__", None) or "").startswith("captum_ssm.")


def own_adapters() -> list[Adapter]:
    """The library's own adapters, each once."""
    return [freeze for freeze in dict.fromkeys(_REGISTRY.values()) if is_own(freeze)]


def how_known(module: nn.Module) -> str:
    """``"registered"``, ``"measured"`` or ``"recognized"``, of a module that has an adapter."""
    adapter = _KNOWN.get(original(module), _NOTHING).adapter
    by_class = adapter is None or find_adapter(module) is not adapter
    return "registered" if by_class else getattr(adapter, "known", "recognized")


def remember(adapters: Mapping[nn.Module, Adapter]) -> None:
    """Let :func:`find_adapter` find these adapters of single modules."""
    for module, freeze in adapters.items():
        known_of(module).adapter = freeze


def nearest_misses(model: nn.Module, most: int = 3) -> str:
    """What in ``model`` looks like a mixer and why it is not one; or nothing."""
    misses: dict[tuple[str, str], str] = {}
    parts = (pair for name, part in model.named_children() for pair in outermost(part, name))
    for path, module in [("", model), *parts]:
        if why := _KNOWN.get(original(module), _NOTHING).miss:
            misses.setdefault((type(module).__name__, why), path)
    first = [*misses.items()][:most]
    return "; ".join(f"{path or 'the model'} ({kind}) {why}" for (kind, why), path in first)


def registered() -> list[str]:
    """The names of the registered mixers, sorted.

    Examples::

        >>> "MambaMixer" in registered()
        True
    """
    return sorted(_REGISTRY)


def supported_classes() -> str:
    """What is registered, in a line of an error."""
    return (
        f"{len(_REGISTRY)} classes, such as MambaMixer and Mamba2Mixer "
        "(captum_ssm.mixers.registered() lists them)"
    )


def find_mixers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of ``model`` that have an adapter, except those inside of another such module.

    Yields:
        tuple: path and module, in the order of ``named_modules``.

    Examples::

        >>> [path for path, module in find_mixers(model)]
        ['backbone.layers.0.mixer', 'backbone.layers.1.mixer']
    """
    return ((path, m) for path, m in outermost(model) if find_adapter(m) is not None)


def outermost(
    module: nn.Module, path: str = "", seen: set[nn.Module] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model in their order, each once, except those inside of a mixer."""
    seen = set() if seen is None else seen
    if module in seen:
        return
    seen.add(module)
    yield path, module
    if find_adapter(module) is None:
        for name, child in module.named_children():
            yield from outermost(child, f"{path}.{name}" if path else name, seen)


def past_before(call: MixerCall) -> Past | None:
    """What a cache holds for the mixer of a call, in the form that its adapter reads.

    Raises:
        InputError: for a cache of another model, or of another number of examples.
        UnsupportedModelError: for a filled cache of transformers 4.
    """
    read = getattr(find_adapter(call.module), "past_of", past_of)
    past: Past | None = read(call.module, call.arguments, call.given_tokens())
    return past


def frozen_by(adapter: Adapter, call: MixerCall) -> FrozenMixer:
    """A call's mixer, frozen by an adapter.

    Raises:
        UnsupportedModelError: the mixer begins with what a cache holds, which the adapter cannot
            read.
    """
    if call.past is None:
        return adapter(call)
    try:
        mixer = adapter(call)
    except InputError:
        raise
    except MISFITS as error:
        raise _of_cache(call) from error
    if call.past.state is not None and mixer.state is None:
        raise _of_cache(call)
    return mixer


def _of_cache(call: MixerCall) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{call.path} ({type(call.module).__name__}) is called with a cache that is not empty, and "
        "what it keeps there is not known to this library; expected a recurrent mixer's state, or "
        "the keys and values of attention. Explain the whole text, without a cache."
    )
