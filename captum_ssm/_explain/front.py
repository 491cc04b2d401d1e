"""What :func:`explain` takes, and which examples it is about."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from captum_ssm._capture import check_model, unwrap
from captum_ssm._errors import InputError
from captum_ssm._explain.asked import Setup
from captum_ssm._explain.images import ImageRequest, as_pixels, explain_image
from captum_ssm._explain.texts import TextRequest, explain_text
from captum_ssm._integers import as_index
from captum_ssm._progress import progress, showing
from captum_ssm._rows import has_delta
from captum_ssm._workspace import workspace
from captum_ssm.attr import methods as all_methods
from captum_ssm.explanation import Example, Explanation, Method

UNITS = ("token", "word", "sentence")
MAPS = ("hidden-attention", "latim")
PACKAGES = ("captum_ssm", "torch", "captum", "transformers", "numpy")


@workspace()
def explain(
    model: Any,
    tokenizer: Any = None,
    inputs: Any = None,
    *,
    target: Any = None,
    against: Any = None,
    methods: str | Sequence[str] | Mapping[str, Mapping[str, Any]] = ("mamba-lrp",),
    position: int | Sequence[int] | Literal["all"] | None = None,
    units: str | Mapping[str, tuple[int, int]] = "token",
    alternatives: int = 1,
    maps: bool | str | Sequence[str] = False,
    layers: int | str | Sequence[int | str] | None = None,
    lens: bool = False,
    processor: Any = None,
    labels: Sequence[str] | Mapping[int, str] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    title: str | None = None,
    memory_limit: int | None = None,
    show_progress: bool = True,
    input_ids: Any = None,
    attention_mask: Any = None,
    token_type_ids: Any = None,
    pixel_values: Any = None,
) -> Explanation:
    """Why a model answers what it answers, as data that can be shown, saved and compared.

    ``explain(model, tokenizer, text)`` explains the model's next token, and with ``target`` each
    token of a continuation; ``explain(model, image)`` the class of an image. The model runs once
    to see what it answers, and then as each method needs.

    Args:
        model (nn.Module or nnsight model): a language model that returns logits ``(B, L, V)``, or
            an image classifier that returns ``(B, classes)``.
        tokenizer (TokenizerLike, optional): of the language model. Without it, ids are their own
            texts, and the inputs may stand here. Default: None
        inputs (str, list of str, Tensor, dict or image): a text or several; token ids ``(L,)`` or
            ``(B, L)``; a tokenizer's whole output, also by keyword (``**tokenizer(text)``), whose
            padding is not explained; an image ``(C, H, W)`` or several ``(B, C, H, W)`` as the
            model takes them, or, with ``processor``, as that takes them. Default: None
        target (str, int, sequence of int or list of str, optional): the continuation that is
            explained, one output per token; of an image a class or its label; a list of str has
            one per text. None is what the model predicts. Default: None
        against (str, int, sequence of int or list of str, optional): another continuation, or
            class. Where the two first differ, the score of one less that of the other is explained
            as well; methods that ignore the target give their plain row. Default: None
        methods (str, sequence of str or dict, optional): names, as
            :func:`captum_ssm.attr.methods` lists them; a dict has options of each method's
            ``attribute``. Default: ``("mamba-lrp",)``
        position (int, sequence of int or str, optional): explains what is predicted at these
            tokens of the text, negative from the end, in place of its continuation: the target,
            of one token, or the model's own prediction there. ``"all"`` explains every token of
            the text from the second on, by those before it, and then the continuation.
            Default: None
        units (str or dict, optional): what relevance is summed over where it is shown:
            ``"token"``, ``"word"`` or ``"sentence"``; or named parts of the text,
            ``{"subject": (0, 4)}``, each a range of characters. The rows themselves are per
            token. Default: ``"token"``
        alternatives (int, optional): how many of the other likeliest answers are explained at
            each output, in addition to the target. Default: 1
        maps (bool, str or sequence of str, optional): also keep one map ``(L, L)`` per layer:
            ``"hidden-attention"`` (the mean over channels; also for True) or ``"latim"`` (the l2
            norms of the contributions). Default: False
        layers (int, str or sequence, optional): of the maps, by index or module path; None for
            all. Default: None
        lens (bool, optional): also keep the likeliest answers after each layer, by the model's
            own final norm and head; skipped, with a note in ``settings``, where these are not
            found. Default: False
        processor (Callable, optional): the image processor of the model. Default: None
        labels (sequence or dict of str, optional): the names of an image model's classes; None
            for those of its configuration. Default: None
        mean, std (sequence of float, optional): how the pixels were normalized, to show the
            image; None for those of the processor, or else the range of its values is shown.
            Default: None
        title (str, optional): a heading. Default: None
        memory_limit (int, optional): bytes for the rows, for the maps, and for the work of each
            method; what needs more is refused before it is computed. Default: None
        show_progress (bool, optional): progress bars for what takes more than two seconds.
            Default: True
        input_ids, attention_mask, token_type_ids, pixel_values (Tensor, optional): what tokenizers
            and processors return, by keyword. Default: None

    Returns:
        Explanation: with one example per text or image.

    Raises:
        ValueError: for a text without a token, words of a target that the tokenizer does not know,
            a target of several tokens where one is needed, a contrast with the target itself, an
            unknown method, unit or map, and whatever a method raises.
        TypeError: for inputs of a wrong type.
        MemoryLimitError: where rows or maps do not fit ``memory_limit``.

    Examples::

        >>> explanation = explain(model, tokenizer, "w3 w4 w5", target="w6 w7", against="w6 w8")
        >>> [output.answers[output.chosen].text for output in explanation.examples[0].outputs]
        ['w6', 'w7']
        >>> explanation.relevance(output=1, against="w8").shape
        (5,)
        >>> explanation = explain(model, **tokenizer("w3 w4 w5", return_tensors="pt"))
    """
    module = unwrap(check_model(model))
    is_tokenizer = callable(getattr(tokenizer, "encode", None)) and not isinstance(tokenizer, str)
    if inputs is None and not is_tokenizer:
        tokenizer, inputs = None, tokenizer
    given = {"input_ids": input_ids, "attention_mask": attention_mask}
    given |= {"token_type_ids": token_type_ids, "pixel_values": pixel_values}
    named = {name: value for name, value in given.items() if value is not None}
    if (inputs is None) == (not named):
        raise TypeError(
            f"{'no input' if inputs is None else 'more than one input'} was given; expected a text "
            "with its tokenizer, token ids, a tokenizer's output, or an image."
        )
    chosen = _methods(methods)
    setup = Setup(
        module,
        {name: cls(model, memory_limit=memory_limit) for name, (cls, _) in chosen.items()},
        {name: options for name, (_, options) in chosen.items()},
        _count("alternatives", alternatives),
        _maps(maps),
        layers,
        bool(lens),
        memory_limit,
    )
    spans = _spans(units)
    texts = _texts(tokenizer, named if inputs is None else inputs)
    if texts is None:
        image = named.get("pixel_values", inputs)
        image = image["pixel_values"] if isinstance(image, Mapping) else image
        pixels = as_pixels(image, processor, next(module.parameters()).device)
        mean = getattr(processor, "image_mean", None) if mean is None else mean
        std = getattr(processor, "image_std", None) if std is None else std
        B = len(pixels)
        targets = [_per_example(name, v, B) for name, v in _both(target, against)]
        names = ["image"] if B == 1 else [f"image {k + 1}" for k in range(B)]
        asked: list[Any] = [
            ImageRequest(one[None], name, a, b, labels, mean, std)
            for one, name, a, b in zip(pixels, names, *targets, strict=True)
        ]
    else:
        B = len(texts)
        targets = [_per_example(name, v, B) for name, v in _both(target, against)]
        asked = [
            TextRequest(tokenizer, text, _ids(a), _ids(b), position, spans)
            for text, a, b in zip(texts, *targets, strict=True)
        ]
    with showing(None if show_progress else False):
        found = progress(asked, "examples") if len(asked) > 1 else asked
        examples = tuple(_explained(setup, one) for one in found)
    called = _name(module)
    settings = {
        "target": target,
        "against": against,
        "position": position,
        "units": "span" if spans else units,
        "spans": dict(spans),
        "alternatives": setup.alternatives,
        "maps": setup.maps,
        "layers": layers,
        "lens": setup.lens,
        "dtype": str(next(module.parameters()).dtype).removeprefix("torch."),
        "device": str(next(module.parameters()).device),
        "notes": setup.notes,
    }
    return Explanation(
        _title(examples, called) if title is None else title,
        called,
        tuple(_method(name, cls, options) for name, (cls, options) in chosen.items()),
        examples,
        {name: _plain(value) for name, value in settings.items()},
        _versions(),
    )


def _explained(setup: Setup, asked: TextRequest | ImageRequest) -> Example:
    if isinstance(asked, TextRequest):
        return explain_text(setup, asked)
    return explain_image(setup, asked)


def _both(target: Any, against: Any) -> list[tuple[str, Any]]:
    return [("target", target), ("against", against)]


def _methods(given: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    known = all_methods()
    named = [given] if isinstance(given, str) else given
    if not named:
        raise ValueError("methods is empty; name at least one, such as 'mamba-lrp'.")
    found = {}
    for name in named:
        if name not in known:
            raise ValueError(
                f"methods holds {name!r}; expected one or several of {', '.join(known)}."
            )
        options = dict(named[name]) if isinstance(named, Mapping) else {}
        unknown = [option for option in options if option not in known[name].options()]
        if unknown:
            raise ValueError(
                f"methods[{name!r}] holds the option {unknown[0]!r}; expected "
                f"{', '.join(known[name].options()) or 'no options'}."
            )
        found[name] = known[name], options
    return found


def _method(name: str, cls: Any, options: dict[str, Any]) -> Method:
    title = cls(nn.Identity()).get_name()
    plain = {option: _plain(value) for option, value in options.items()}
    return Method(name, title, cls.summary, has_delta(cls, options), plain)


def _count(name: str, given: Any) -> int:
    found = as_index(given)
    if found is None or found < 0:
        raise ValueError(f"{name} is {given!r}; expected an integer from 0 on.")
    return found


def _maps(given: Any) -> tuple[str, ...]:
    if isinstance(given, bool):
        return MAPS[:1] if given else ()
    found = (given,) if isinstance(given, str) else tuple(given)
    for name in found:
        if name not in MAPS:
            raise ValueError(
                f"maps holds {name!r}; expected True, or one or several of {', '.join(MAPS)}."
            )
    return found


def _spans(units: Any) -> dict[str, tuple[int, int]]:
    if isinstance(units, str) and units in UNITS:
        return {}
    if not isinstance(units, Mapping) or not units:
        raise ValueError(
            f"units is {units!r}; expected one of {', '.join(UNITS)}, or named parts of the text "
            "such as {'subject': (0, 4)}."
        )
    found = {}
    for name, span in units.items():
        indices = [as_index(one) for one in span] if isinstance(span, Sequence) else []
        bounds = [one for one in indices if one is not None]
        if not len(bounds) == len(indices) == 2 or not isinstance(name, str):
            raise ValueError(
                f"units[{name!r}] is {span!r}; expected two integers, the first character and the "
                "one after the last."
            )
        found[name] = bounds[0], bounds[1]
    return found


def _texts(tokenizer: Any, inputs: Any) -> list[str] | list[list[int]] | None:
    # Texts, or ids without their padding; None for images.
    if isinstance(inputs, str) or (
        isinstance(inputs, (list, tuple)) and inputs and isinstance(inputs[0], str)
    ):
        if tokenizer is None:
            raise TypeError(
                "inputs is a text, and there is no tokenizer; expected explain(model, tokenizer, "
                "text)."
            )
        return [inputs] if isinstance(inputs, str) else list(inputs)
    mask = None
    if isinstance(inputs, Mapping):
        if "input_ids" not in inputs:
            return None
        mask = inputs.get("attention_mask")
        segments = inputs.get("token_type_ids")
        if segments is not None and bool(torch.as_tensor(segments).any()):
            raise InputError(
                "token_type_ids marks a second text; expected one text per example. Pass "
                "tokenizer(text) in place of tokenizer(text, pair)."
            )
        inputs = inputs["input_ids"]
    if isinstance(inputs, (list, tuple)) and inputs and not torch.is_tensor(inputs[0]):
        rows = inputs if isinstance(inputs[0], (list, tuple)) else [inputs]
        masks = [[1] * len(row) for row in rows] if mask is None else mask
        masks = masks if isinstance(masks[0], (list, tuple, Tensor)) else [masks]
        return [
            [int(one) for one, kept in zip(row, mark, strict=True) if kept]
            for row, mark in zip(rows, masks, strict=True)
        ]
    if not torch.is_tensor(inputs) or inputs.is_floating_point():
        return None
    ids = inputs[None] if inputs.dim() == 1 else inputs
    if ids.dim() != 2 or ids.numel() == 0 or ids.dtype == torch.bool:
        raise InputError(
            f"the ids have shape {tuple(inputs.shape)} and dtype {inputs.dtype}; expected (L,) or "
            "(B, L) of an integer dtype, at least one."
        )
    marks = torch.ones_like(ids) if mask is None else torch.as_tensor(mask).reshape(ids.shape)
    found = [row[mark != 0].tolist() for row, mark in zip(ids, marks, strict=True)]
    if not all(found):
        raise InputError("attention_mask marks no token of an example; expected at least one.")
    return found


def _per_example(name: str, given: Any, B: int) -> list[Any]:
    # One for all, or a list of texts with one each.
    if isinstance(given, (list, tuple)) and given and isinstance(given[0], str):
        if len(given) != B:
            raise InputError(
                f"{name} holds {len(given)} texts for {B} example(s); expected one per example, or "
                "one text for all."
            )
        return list(given)
    return [given] * B


def _ids(given: Any) -> str | list[int] | None:
    # A continuation: text, or ids.
    if given is None or isinstance(given, str):
        return given
    index = as_index(given)
    if index is not None:
        return [index]
    values = given.reshape(-1).tolist() if torch.is_tensor(given) else given
    found = [as_index(one) for one in values] if isinstance(values, Sequence) else [None]
    if None in found:
        raise TypeError(f"target is {given!r}; expected a text, a token id, or several ids.")
    return found  # type: ignore[return-value]


def _plain(value: Any) -> Any:
    # As JSON gives it back.
    if torch.is_tensor(value):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    index = as_index(value)
    return str(value) if index is None else index


def _name(model: nn.Module) -> str:
    name = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    if not name:
        return type(model).__name__
    return Path(name).name if Path(name).is_dir() else name


def _title(examples: Sequence[Example], name: str) -> str:
    if len(examples) == 1 and len(examples[0].outputs) == 1:
        (output,) = examples[0].outputs
        return f"Why “{output.answers[output.chosen].text.strip()}”?"
    return f"What {name} reads"


def _versions() -> dict[str, str]:
    from captum_ssm import __version__

    found = {"captum_ssm": __version__, "python": sys.version.split()[0]}
    for name in PACKAGES[1:]:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
