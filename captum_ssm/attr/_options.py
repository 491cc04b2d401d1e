"""What a method's ``attribute`` takes, read off its signature, and documented once for all."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from typing_extensions import Unpack, get_type_hints

from captum_ssm._captum import log_usage
from captum_ssm._in_place import seen_in_views
from captum_ssm._progress import showing
from captum_ssm._retry import past_writes
from captum_ssm._workspace import workspace

# What the attribute of every method takes.
SHARED = (
    "self",
    "inputs",
    "target",
    "additional_forward_args",
    "position",
    "return_convergence_delta",
    "return_error_bound",
    "show_progress",
)
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
# Options that several methods have, for those whose own documentation does not tell of them.
_OPTIONS = {
    "start_layer": """\
    start_layer (int, optional): the first layer. Default: 0
""",
    "stage": """\
    stage (int, optional): of a model whose layers work on several grids of tokens, one after the
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
        ('alti_logit', 'alti', 'l1', 'l2')
    """

    name: str
    default: Any
    values: tuple[str, ...] = ()
    types: tuple[type, ...] = ()


@functools.cache
def options_of(attribute: Callable[..., Any]) -> dict[str, Option]:
    """The options of a method's ``attribute``, by name, from its signature and type hints."""
    function = inspect.unwrap(attribute)
    hints = get_type_hints(function)
    found: dict[str, Option] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name, Any)
        if name in SHARED:
            continue
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            for key, value in _unpacked(hint).items():
                found[key] = _option(key, None, value)
        else:
            found[name] = _option(name, parameter.default, hint)
    return found


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


def described(function: Callable[..., Any]) -> Callable[..., Any]:
    """A method's ``attribute``, logged as Captum's, checked, and with its whole documentation."""

    @functools.wraps(function)
    def attribute(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = type(self).options()
        unknown = [name for name in kwargs if name not in SHARED and name not in options]
        if unknown:
            raise TypeError(
                f"{self.get_name()}.attribute has no option {unknown[0]!r}; expected "
                f"{', '.join(options) or 'no further options'}. An argument of the model goes into "
                f"additional_forward_args, such as {{{unknown[0]!r}: ...}}."
            )
        if kwargs.get("return_convergence_delta") and not self.has_convergence_delta():
            raise no_delta(self.get_name())
        with workspace(), showing(kwargs.pop("show_progress", None)):
            run = functools.partial(function, self, *args, **kwargs)
            found = seen_in_views(past_writes)(run)
        self._check_relevance(found)
        return found

    signature = inspect.signature(function)
    attribute.__signature__ = _with_progress(signature)  # type: ignore[attr-defined]
    attribute.__doc__ = _documentation(inspect.cleandoc(function.__doc__ or ""), signature)
    return log_usage()(attribute)


def _with_progress(signature: inspect.Signature) -> inspect.Signature:
    # A keyword before the method's **options, if it has these.
    kind = inspect.Parameter.KEYWORD_ONLY
    added = inspect.Parameter("show_progress", kind, default=None, annotation=bool | None)
    parameters = list(signature.parameters.values())
    is_open = parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    parameters.insert(len(parameters) - is_open, added)
    return signature.replace(parameters=parameters)


def no_delta(name: str) -> ValueError:
    """The error of a method that has no convergence delta."""
    return ValueError(
        f"{name} is not a decomposition of the output, so it has no convergence delta; leave "
        "return_convergence_delta at False."
    )


def _documentation(own: str, signature: inspect.Signature) -> str:
    # The method's own summary, arguments and sections around those that all methods share.
    summary, *parts = re.split(r"^(Args|Returns|Raises|Examples)::?\n", own, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], (p.strip("\n") + "\n" for p in parts[1::2]), strict=True))
    told = sections.pop("Args", "")
    known = [name for name in _OPTIONS if name in signature.parameters]
    shared = "".join(_OPTIONS[name] for name in known if not re.search(rf"\b{name}\b[ :]", told))
    arguments = _ARGUMENTS + told + shared + _DELTA + _PROGRESS
    returns, raises = sections.pop("Returns", _RETURNS), sections.pop("Raises", _RAISES)
    text = f"{summary.strip()}\n\nArgs:\n{arguments}\nReturns:\n{returns}\nRaises:\n{raises}"
    return text + "".join(f"\n{name}::\n\n{part}" for name, part in sections.items())
