"""What a method's ``attribute`` takes, read off its ``_attribute``, and documented once for all."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin

from typing_extensions import Unpack, get_type_hints

from captum_ssm.utils.nested import tensors_in
from captum_ssm.utils.suggestions import did_you_mean

Initializer = TypeVar("Initializer", bound=Callable[..., None])
# Results of ``_attribute`` that are asked for by keyword and are no options of a method.
RESULTS = ("return_error_bound", "return_states")
# What ``attribute`` of every method takes after ``inputs``.
SHARED = ("target", "additional_forward_args", "position", "return_convergence_delta")
# Options by the names that they had before.
RENAMED = {"stage": "grid"}
# Options of Captum's own methods that these do without.
OF_CAPTUM = {
    "attention_mask": "It is an argument of the model: additional_forward_args={'attention_mask': "
    "mask}.",
    "baselines": "These methods compare with no baseline: drop it.",
    "feature_mask": "Relevance is of single tokens: drop it, and add up relevance over groups.",
    "internal_batch_size": "These methods follow no path of steps: drop it.",
    "multiply_by_inputs": "These methods have one form: drop it.",
    "n_steps": "These methods follow no path of steps: drop it.",
    "perturbations_per_eval": "These methods perturb nothing: drop it.",
}
_ARGUMENTS = """\
    inputs (Tensor, tuple of Tensor, or dict): token ids ``(B, L)``, embeddings ``(B, L, E)``, or
        floats of any shape ``(B, ...)``: series, images, videos, volumes; a tuple of several, as
        the model takes them; or a tokenizer's whole output, whose mask then goes to the model.
    target (int, tuple, Tensor or list, optional): the explained output, in every form Captum
        takes: one index for each axis of the output after the first. For a language model's logits
        ``(B, L, V)`` an int or one id per example names the token read at ``position``, a tuple
        ``(position, token)`` sets both. As in Captum, -1 is the last class or token. May be None
        where the model returns one value per example. Methods that need no target (see
        ``needs_target``) use only the position that it names. Default: None
    additional_forward_args (Any, optional): further arguments of ``forward_func``, as in Captum;
        a dict is passed by keyword. Default: None
    position (int or Tensor, optional): the token whose row is explained, an int or ``(B,)``; None
        for those that the model reads the output from. Default: None
"""
# Options of several methods, for those whose own docstring does not describe them.
_OPTIONS = {
    "start_layer": """\
    start_layer (int, optional): the first layer. Default: 0
""",
    "grid": """\
    grid (int, optional): of a model whose layers work on several grids of tokens, one after the
        other: only the layers of this one, negative from the end, interpolated from its grid to the
        input, as of Grad-CAM. None is all. Default: None
""",
    "options": """\
    **options: how a layer's map is made, see :class:`~captum_ssm.attr.MapChoices`.
""",
}
_DELTA = """\
    return_convergence_delta (bool, optional): also return what the relevance leaves out, for
        methods with ``has_convergence_delta()``. Default: False
"""
_BALANCE = """\
    return_balance (bool, optional): also return, last, the share ``(B,)`` of what the score reads
        that comes through the last mixers, whose maps hold it; the rest goes around them, which
        only a rollout and MambaLRP follow. What the score reads of another input beside the mixers,
        such as features of no token, is not counted. It takes another run of the model.
        Default: False
"""
_PROGRESS = """\
    show_progress (bool, optional): True shows a progress bar, False none; None shows one on a
        terminal, for what takes more than two seconds. Default: None
"""
_RETURNS = """\
    Tensor or tuple of Tensor: relevance in the shape of ``inputs``, zero on padding. A token's
    relevance is spread evenly over the axes of its embedding, and shared among features that are
    not an embedding's by ``feature_share``; a patch's is interpolated, or carried by the measured
    transport. With
    ``return_convergence_delta`` a pair of it and the delta, ``(B,)``.
"""
_RAISES = """\
    ValueError: for inputs, a target, a position or options that do not fit, an unsupported model,
        or a mixer whose frozen operator does not reproduce its output.
    TypeError: for inputs of a wrong type or dtype, or an unknown option.
"""


@dataclass(frozen=True)
class Option:
    """A keyword argument of a method's ``attribute``.

    Args:
        name (str): its name.
        default (Any): its default; None also where the method chooses it.
        values (tuple of str): the names it can be, where it is a choice.
        types (tuple of type): the types it can be in addition.

    Examples::

        >>> LaTIM.options()["aggregation"].values
        ('alti_logit', 'flow_logit', 'alti', 'l1', 'l2')
    """

    name: str
    default: Any
    values: tuple[str, ...] = ()
    types: tuple[type, ...] = ()


@dataclass(frozen=True)
class Arguments:
    """What ``attribute`` of every method takes, in addition to the method's own options."""

    inputs: Any
    target: Any = None
    additional_forward_args: Any = None
    position: Any = None
    return_convergence_delta: bool = False

    def is_one_text(self, batch: int) -> bool:
        """Whether the inputs are one text expanded to a batch: all rows share their memory."""
        tensors = tensors_in((self.inputs, self.additional_forward_args))
        batched = [x for x in tensors if x.dim() and x.shape[0] == batch]
        return batch > 1 and bool(batched) and not any(x.stride(0) for x in batched)


def refuse_unknown(
    told: str, names: Iterable[str], known: Sequence[str], later: Sequence[str] = ()
) -> None:
    """Raise for an argument that a method does not have.

    ``later`` are those that ``attribute`` has. The error says what to do in its place.
    """
    for name in (name for name in names if name not in known):
        if (new := RENAMED.get(name)) in known:
            raise TypeError(f"{name}= is now called {new}=; expected {new}=.")
        why = OF_CAPTUM.get(name) or did_you_mean(name, [*known, *later]).strip()
        if name in later:
            why = f"It belongs to attribute: {told}(model).attribute(inputs, {name}=...)."
        elif not why and not later:
            why = (
                "An argument of the model goes into additional_forward_args, such as "
                f"{{{name!r}: ...}}."
            )
        expected = ", ".join(name for name in known if name not in RESULTS)
        raise TypeError(
            f"{told} has no option {name!r}; expected {expected or 'no further options'}. {why}"
        )


def refuses_others(init: Initializer) -> Initializer:
    """The ``__init__`` of methods, which says of an argument that it does not have what to do."""

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **named: Any) -> None:
        known, later = [*inspect.signature(init).parameters][1:], [*self.options(), *SHARED]
        refuse_unknown(type(self).__name__, named, known, later)
        init(self, *args, **named)

    return cast(Initializer, checked)


@functools.cache
def options_of(method: Callable[..., Any]) -> dict[str, Option]:
    """The options of a method's ``_attribute``, by name, from its signature and type hints."""
    hints = get_type_hints(method)
    options: dict[str, Option] = {}
    for name, parameter in _own_parameters(method).items():
        hint = hints.get(name, Any)
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            options |= {key: _option(key, None, value) for key, value in _unpacked(hint).items()}
        elif name not in RESULTS:
            options[name] = _option(name, parameter.default, hint)
    return options


def _own_parameters(method: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    # Without self and the arguments that all methods share.
    return dict(list(inspect.signature(method).parameters.items())[2:])


def _unpacked(hint: Any) -> dict[str, Any]:
    # The entries of a TypedDict T in **options: Unpack[T].
    return get_type_hints(get_args(hint)[0]) if get_origin(hint) is Unpack else {}


def _option(name: str, default: Any, hint: Any) -> Option:
    values: list[str] = []
    types: list[type] = []

    def read(hint: Any) -> None:
        if get_origin(hint) is Literal:
            values.extend(value for value in get_args(hint) if value is not None)
        elif get_origin(hint) in (Union, UnionType):
            for part in get_args(hint):
                read(part)
        elif isinstance(hint, type) and not get_args(hint) and hint is not type(None):
            types.append(hint)

    read(hint)
    return Option(name, default, tuple(values), tuple(types))


def documented(attribute: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """``attribute`` with the parameters and the docstring of a method's ``_attribute`` in its own.

    What it does is the same: users see the options of each method in its signature and in ``help``.
    """

    @functools.wraps(attribute)
    def shown(self: Any, *args: Any, **kwargs: Any) -> Any:
        return attribute(self, *args, **kwargs)

    of_method = _own_parameters(method)
    signature = inspect.signature(attribute)
    shared = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    # A stable sort: options of the method stand before ``return_convergence_delta``.
    last = ("return_convergence_delta", *RESULTS, "return_balance", "show_progress")
    keywords = [p for p in [*shared, *of_method.values()] if p.kind is p.KEYWORD_ONLY]
    keywords.sort(key=lambda p: last.index(p.name) + 1 if p.name in last else 0)
    parameters = [
        *(p for p in shared if p.kind is not p.KEYWORD_ONLY),
        *keywords,
        *(p for p in of_method.values() if p.kind is p.VAR_KEYWORD),
    ]
    shown.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    shown.__doc__ = _documentation(inspect.cleandoc(method.__doc__ or ""), of_method)
    return shown


def _documentation(written: str, names: Collection[str]) -> str:
    # The method's own summary, arguments and sections around those that all methods share.
    summary, *parts = re.split(r"^(Args|Returns|Raises|Examples)::?\n", written, flags=re.M)
    sections = dict(zip(parts[::2], (p.strip("\n") + "\n" for p in parts[1::2]), strict=True))
    told = sections.pop("Args", "")
    known = [name for name in _OPTIONS if name in names]
    shared = "".join(_OPTIONS[name] for name in known if not re.search(rf"\b{name}\b[ :]", told))
    arguments = _ARGUMENTS + told + shared + _DELTA + _BALANCE + _PROGRESS
    returns, raises = sections.pop("Returns", _RETURNS), sections.pop("Raises", _RAISES)
    text = f"{summary.strip()}\n\nArgs:\n{arguments}\nReturns:\n{returns}\nRaises:\n{raises}"
    return text + "".join(f"\n{name}::\n\n{part}" for name, part in sections.items())
