"""What an input is that is not a text: a picture, a video, a series or a row of a table.

An array alone does not tell: ``(1, 50, 4)`` is an image of one channel or one series of four
features. So every reading that its shape allows is tried on the model, and the one that the model
takes counts. Where it takes several, its first layer decides: a 2-D convolution reads images, a
linear layer or a 1-D convolution reads series and tables.

Axes are written as letters: ``"hwc->1chw"`` makes a batch of one picture of channels first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from captum_ssm.capture.model import extract_logits
from captum_ssm.errors import InputError, brief
from captum_ssm.explanation.make.inputs.pictures import (
    file_name,
    is_path,
    is_picture,
    normalized,
    norms,
    pictures,
    processed,
)
from captum_ssm.inspection.support import first_line
from captum_ssm.utils.blocks import contextmanager
from captum_ssm.utils.watch_modules import watch_modules

# By the number of axes: what each reading is, and how it becomes what a model may take.
FLOATS = {
    1: (("table", "f->1f"), ("series", "t->1tf"), ("series", "t->1ft")),
    2: (("series", "tf->1tf"), ("table", "bf->bf"), ("image", "hw->1chw")),
    3: (("image", "chw->1chw"), ("series", "btf->btf"), ("image", "hwc->1chw")),
    4: (("image", "bchw->bchw"), ("image", "bhwc->bchw"), ("video", "cthw->1cthw")),
    5: (("video", "bcthw->bcthw"), ("video", "btchw->bcthw")),
}
PICTURES = {
    2: (("image", "hw->1chw"),),
    3: (("image", "hwc->1chw"), ("image", "chw->1chw")),
    4: (*FLOATS[4], ("video", "thwc->1cthw"), ("video", "thwc->1tchw")),
    5: (*FLOATS[5], ("video", "bthwc->bcthw"), ("video", "bthwc->btchw")),
}
COLUMNS = (("series", "tf->1tf"), ("series", "tf->1ft"), ("table", "bf->bf"))
PLAIN = (
    "pixels were scaled to 0 .. 1 and not normalized: mean= and std=, or processor=, do what the "
    "model was trained with"
)
READ_BY = {nn.Conv1d: "series", nn.Conv2d: "image", nn.Conv3d: "video", nn.Linear: "series"}


@dataclass(frozen=True)
class Given:
    """Inputs as the model takes them.

    Args:
        kind (str): ``"image"``, ``"video"``, ``"series"`` or ``"table"``.
        axes (str): a letter for each axis of an example, such as ``"1tf"``.
        examples (tuple of Tensor): each ``(1, ...)``.
        names (tuple of str): one per example.
        features (tuple of str): of a series or table.
        mean, std (sequence of float, optional): how pixels were normalized, if that is known.
        note (str): what was done that the user did not ask for.
    """

    kind: str
    axes: str
    examples: tuple[Tensor, ...]
    names: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    mean: Any = None
    std: Any = None
    note: str = ""

    @property
    def is_pixels(self) -> bool:
        """Whether it is images or videos."""
        return self.kind in ("image", "video")

    def named(self, features: Sequence[str] | None) -> Given:
        """A copy with other names of its features; None leaves them.

        Raises:
            ValueError: for another number of names, or an input without features.
        """
        if features is None:
            return self
        count = len(self.features)
        if isinstance(features, str) or len(features) != count or not count:
            has = f"{count} feature{'s' * (count != 1)}" if count else "no features"
            raise ValueError(
                f"features is {brief(features)}; the {self.kind} has {has}: expected one name for "
                "each."
            )
        return replace(self, features=tuple(map(str, features)))


@dataclass(frozen=True)
class Trial:
    """What a model did with one reading: its error, or None, and its first layer with weights."""

    kind: str
    axes: str
    batch: Tensor
    error: Exception | None
    first: nn.Module | None
    seen: Tensor | None

    @property
    def is_read_so(self) -> bool:
        """Whether the first layer is one that reads inputs of this kind."""
        wanted = READ_BY.get(type(self.first))
        return wanted in (None, self.kind, "series" if self.kind == "table" else None)


# By the readings that there are and the shapes of the forms: which one the model takes.
Known = dict[Any, tuple[int, Trial]]


def inputs_for(
    model: nn.Module,
    inputs: Any,
    processor: Any = None,
    mean: Any = None,
    std: Any = None,
    known: Known | None = None,
) -> Given:
    """What inputs are for a model.

    ``known`` is what earlier inputs of this model told, which is not tried again for those of the
    same shape.

    Raises:
        InputError: where the model takes none of the readings; it has the model's own reason.
        TypeError: for what is neither of these.
    """
    mean, std = norms(processor, mean, std)
    known = {} if known is None else known
    is_ready = torch.is_tensor(inputs) and inputs.is_floating_point()
    if processor is not None and not is_ready:
        inputs = list(inputs) if isinstance(inputs, Iterator) else inputs
        forms, readings = processed(inputs, processor)
        images = _of_pixels(_chosen(model, forms, readings, known), mean, std)
        names = tuple(map(file_name, inputs if isinstance(inputs, list) else [inputs]))
        return replace(images, names=names) if all(names) else images
    several = _several(inputs)
    if several is not None:
        return _joined([inputs_for(model, example, None, mean, std, known) for example in several])
    if is_picture(inputs):
        name, forms = pictures(inputs)
        images = _of_pixels(_chosen(model, forms, PICTURES, known), mean, std, is_raw=True)
        return replace(images, names=(name,)) if name else images
    array, columns = _array(inputs)
    trial = _chosen(model, [array], FLOATS if columns is None else {2: COLUMNS}, known)
    is_values = trial.kind in ("series", "table")
    return _of_values(trial, columns) if is_values else _of_pixels(trial, mean, std)


def may_be_text(inputs: Any, has_tokenizer: bool) -> bool:
    """Whether inputs are texts or token ids, by their type alone.

    A path is a text only where a tokenizer was given.
    """
    first = inputs
    while isinstance(first, (list, tuple)) and first:
        first = first[0]
    if isinstance(first, (list, tuple)):
        return has_tokenizer
    if isinstance(first, float) or (not has_tokenizer and is_path(first)):
        return False
    if not torch.is_tensor(first):
        return isinstance(first, (str, int, Mapping))
    return not (first.is_floating_point() or first.dim() > 2)


def arranged(values: Tensor, how: str) -> Tensor:
    """Axes in another order: ``"tf->1ft"`` swaps two. Letters that are new are of length 1."""
    before, after = how.split("->")
    values = values.permute([before.index(letter) for letter in after if letter in before])
    for axis, letter in enumerate(after):
        if letter not in before:
            values = values.unsqueeze(axis)
    return values


def _chosen(
    model: nn.Module,
    forms: Sequence[Tensor],
    readings: Mapping[int, Sequence[tuple[str, str]]],
    known: Known,
) -> Trial:
    # The model's reading of one of the forms of an input, such as a picture in color or gray.
    ways = [(form, *way) for form in forms for way in readings.get(form.dim(), ())]
    if getattr(model, "main_input_name", None) == "pixel_values":
        ways = [way for way in ways if way[1] in ("image", "video")]
    if not ways or forms[0].numel() == 0:
        raise InputError(
            f"the input has shape {tuple(forms[0].shape)}; expected an image (C, H, W), a series "
            "(T, F), a row of a table (F,), a video (C, T, H, W), or a batch of them. Other inputs "
            "are explained by the methods' own attribute."
        )
    key = tuple(how for _, _, how in ways), tuple(form.shape for form in forms)
    if key in known:
        k, trial = known[key]
        form, _, how = ways[k]
        return replace(trial, batch=_batch(model, form, how).contiguous())
    trials = [_tried(model, kind, how, form) for form, kind, how in ways]
    passed = [k for k, trial in enumerate(trials) if trial.error is None]
    if passed:
        k = next((k for k in passed if trials[k].is_read_so), passed[0])
        known[key] = k, trials[k]
        return trials[k]
    near = [trial for trial in trials if trial.is_read_so] or trials
    told, closest = dict.fromkeys(f"{_a(t.kind)} {tuple(t.batch.shape)}" for t in near), near[0]
    reason = first_line(closest.error).rstrip(".")[:200]
    first = f" Its first layer is {closest.first}." if closest.first is not None else ""
    raise InputError(
        f"the model does not take the input, of shape {tuple(forms[0].shape)}: it was tried as "
        f"{', '.join(told)}. The model says: {reason}.{first}{_hint(model, closest)}"
    ) from closest.error


def _hint(model: nn.Module, trial: Trial) -> str:
    if isinstance(trial.first, nn.Embedding):
        return " It reads token ids: give ids (L,) of an integer dtype, or a tokenizer and a text."
    if READ_BY.get(type(trial.first), trial.kind) in ("image", "video"):
        config = getattr(model, "config", model)
        size = getattr(config, "image_size", None)
        told = f" It is made for pictures of size {size}." if size else ""
        return f"{told} Expected one that fits; processor= resizes and normalizes pictures."
    return " Expected (T, F) or (B, T, F), or a pandas table, whose rows are the steps."


def _a(kind: str) -> str:
    return {"image": "an image", "table": "rows of a table", "series": "a series"}.get(
        kind, f"a {kind}"
    )


def _tried(model: nn.Module, kind: str, how: str, values: Tensor) -> Trial:
    batch, weight = _batch(model, values, how), next(iter(model.parameters()))
    error: Exception | None = None
    with torch.no_grad(), _first_layer(model) as seen:
        try:
            output = extract_logits(model(batch[:1].to(weight.device)))
            if output.shape[0] != 1 or output.dim() < 2:
                error = ValueError(f"its output has shape {tuple(output.shape)} for one example")
        except Exception as raised:  # the model's own, of any kind
            error = raised
    first, received = seen[0] if seen else (next(_layers(model), None), None)
    return Trial(kind, how.split("->")[1], batch.contiguous(), error, first, received)


def _batch(model: nn.Module, values: Tensor, how: str) -> Tensor:
    weight = next(iter(model.parameters()))
    dtype = weight.dtype if weight.is_floating_point() else torch.float32
    return arranged(values, how).to(dtype)


@contextmanager
def _first_layer(model: nn.Module) -> Iterator[list[tuple[nn.Module, Tensor]]]:
    # The layers with weights in the order in which they run, each with what it is given.
    seen: list[tuple[nn.Module, Tensor]] = []

    def see(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args and torch.is_tensor(args[0]):
            seen.append((layer, args[0]))

    with watch_modules(_layers(model), before=see):
        yield seen


def _layers(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if isinstance(module, (*READ_BY, nn.Embedding)))


def _of_pixels(trial: Trial, mean: Any, std: Any, is_raw: bool = False) -> Given:
    axes = trial.axes.replace("b", "1", 1)
    if trial.kind == "video" and not _is_channels_first(trial):
        axes = "1tchw"
    pixels, note = trial.batch, ""
    if is_raw:
        is_plain = mean is None and std is None
        mean, std = (0.0,) if mean is None else mean, (1.0,) if std is None else std
        pixels = normalized(pixels / 255, mean, std, axes.index("c"))
        note = PLAIN if is_plain else ""
    examples = tuple(pixels.split(1))
    names = _names(trial.kind, len(examples))
    return Given(trial.kind, axes, examples, names, mean=mean, std=std, note=note)


def _is_channels_first(trial: Trial) -> bool:
    # A video's second axis, or its third, holds the channels that the first convolution takes.
    sizes = list(trial.batch.shape[1:3])
    wanted = getattr(trial.first, "in_channels", None)
    counts = [wanted] if wanted in sizes else [3, 1]
    return next((sizes.index(count) == 0 for count in counts if count in sizes), True)


def _of_values(trial: Trial, columns: tuple[str, ...] | None) -> Given:
    axes = trial.axes.replace("b", "1", 1)
    if axes == "1f" and columns is None and _reads_one_variable(trial):
        axes = "1t"
    if axes == "1tf" and columns is None and _reads_channels_first(trial):
        axes = "1ft"
    kind = "series" if "t" in axes else "table"
    count = trial.batch.shape[axes.index("f")] if "f" in axes else 1
    features = columns or tuple(f"feature {k}" for k in range(count))
    if "f" not in axes or len(features) != count:
        features = ("value",)
    examples = tuple(trial.batch.split(1))
    return Given(kind, axes, examples, _names(kind, len(examples)), features)


def _reads_one_variable(trial: Trial) -> bool:
    # Made for a series (B, L) whose steps share one embedding, Linear(1, width) or Conv1d(1, ...).
    width = getattr(trial.first, "in_features", None) or getattr(trial.first, "in_channels", None)
    return width == 1 and trial.batch.shape[1] > 1


def _reads_channels_first(trial: Trial) -> bool:
    # Made for a 1-D convolution over the steps of (B, F, T), which gets the input as it is.
    seen = trial.seen
    is_given = seen is not None and seen.shape[1:] == trial.batch.shape[1:] and seen.is_contiguous()
    return isinstance(trial.first, nn.Conv1d) and is_given


def _names(kind: str, count: int) -> tuple[str, ...]:
    name = {"table": "row"}.get(kind, kind)
    return (name,) if count == 1 else tuple(f"{name} {k + 1}" for k in range(count))


def _several(inputs: Any) -> list[Any] | None:
    # The examples of a list or a generator; None for one input, such as rows of numbers.
    if isinstance(inputs, (list, tuple, Iterator)):
        items = list(inputs)
        if not items:
            raise InputError("inputs is empty; expected at least one example.")
        is_numbers = all(isinstance(entry, (int, float, list, tuple)) for entry in items)
        return None if is_numbers else items
    return None


def _joined(inputs: Sequence[Given]) -> Given:
    kinds = dict.fromkeys(f"{_a(entry.kind)} of axes {entry.axes}" for entry in inputs)
    if len(kinds) > 1 or len({entry.features for entry in inputs}) > 1:
        raise InputError(
            f"the inputs are {' and '.join(kinds)}; expected examples of one kind, with the same "
            "features."
        )
    examples = tuple(example for each in inputs for example in each.examples)
    named = [name for each in inputs for name in each.names]
    is_plain = len(set(named)) < len(named)
    names = _names(inputs[0].kind, len(examples)) if is_plain else tuple(named)
    return replace(inputs[0], examples=examples, names=names)


def _array(inputs: Any) -> tuple[Tensor, tuple[str, ...] | None]:
    # Numbers as a tensor, and the names of a table's columns.
    columns, kind = getattr(inputs, "columns", None), type(inputs).__name__
    if hasattr(inputs, "to_numpy"):  # pandas
        inputs = inputs.to_numpy()
    values = inputs
    if not torch.is_tensor(inputs):
        try:
            values = torch.from_numpy(np.array(inputs, ndmin=1))
        except (TypeError, ValueError):
            raise TypeError(
                f"the input is a {kind}, not all of numbers; expected an image (a PIL image, a "
                "path or an array), a series (T, F), a row of a table, or a batch or list of them; "
                "or a text with its tokenizer."
            ) from None
    if values.is_complex() or (values.is_floating_point() and not values.isfinite().all()):
        raise InputError("the input holds NaN, Inf or complex numbers; expected finite numbers.")
    names = None if columns is None else tuple(map(str, columns))
    return values if values.is_floating_point() else values.float(), names
