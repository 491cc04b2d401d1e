"""Relevance adds up to the score: of every method that claims it, over models of every kind.

The models have no bias terms, which are nobody's relevance; with them, they are the
convergence delta.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import channels_first
import inputs
import pytest
import torch
import wild
from families import FAMILIES, build, padded
from group_normed import GroupNormed
from groups import SIDE, Groups, OnImages
from inputs import FORMS, noise, options
from long_convolutions import S4D, TokensLast
from models import VOCABULARY, ids, made, without_biases
from rwkv import TimeMix
from torch import Tensor, nn
from transformers import MambaConfig
from transformers.models.mamba.modeling_mamba import MambaMixer
from two_grids import Bare, TwoGrids
from two_grids import E as WIDTH
from vision_models import VISION, images
from xlstm_layers import WIDTH as XLSTM_WIDTH
from xlstm_layers import L as XLSTM_TOKENS
from xlstm_layers import Layer

from captum_ssm import LaTIM, MambaLRP
from captum_ssm.models import BidirectionalMamba

ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-9}


def assert_adds_up(
    method: type,
    model: nn.Module,
    x: Any,
    target: Any,
    extra: dict[str, Tensor] | None = None,
    error: float | None = None,
) -> tuple[Tensor, ...]:
    """The relevance of each input, whose sum is the score up to ``error`` times its size."""
    tensors = x if isinstance(x, tuple) else (x,)
    index = target if isinstance(target, tuple) else (target,)
    with torch.no_grad():
        output = model(*tensors, **(extra or {}))
    output = getattr(output, "logits", output)
    if extra is None and output.dim() == 3 and len(index) == 1:
        output = output[:, -1]  # the last token, which a language model is asked of
    relevance, delta = method(model).attribute(
        x, target, extra, return_convergence_delta=True, **options(method)
    )
    parts = relevance if isinstance(relevance, tuple) else (relevance,)
    assert [part.shape for part in parts] == [one.shape for one in tensors]
    error = ROUNDING[output.dtype] if error is None else error
    if extra is None:
        score = output[(slice(None), *index)]
        error *= float(score.abs().max().clamp(min=1 if score.dtype is torch.float32 else 0))
        total = sum(part.flatten(1).sum(1) for part in parts)
        assert float((total - score).abs().max()) <= error
    assert float(delta.abs().max()) <= error
    return parts


@pytest.mark.every_case
@pytest.mark.parametrize("family", FAMILIES)
def test_in_every_family(family):
    assert_adds_up(MambaLRP, without_biases(build(family)), ids(2, 9), 3)


def test_an_activation_of_several_functions_is_one():
    # transformers writes this GELU out; half of it would go to the product's other factor.
    model = without_biases(build("recurrent_gemma", hidden_activation="gelu_new"))
    assert_adds_up(MambaLRP, model, ids(2, 9), 3)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba", "qwen3_next"])
def test_beside_padding(family, side):
    if family not in FAMILIES:
        pytest.skip(f"this transformers has no {family}")
    mask = padded(side)
    model, extra = without_biases(build(family)), {"attention_mask": mask}
    (relevance,) = assert_adds_up(MambaLRP, model, ids(2, 9), 3, extra)
    assert (relevance[mask == 0] == 0).all()


@pytest.mark.parametrize("name", FORMS)
def test_in_every_form_of_input(name):
    form = FORMS[name]
    parts = assert_adds_up(MambaLRP, without_biases(made(form.model)), form.inputs, form.target)
    # No entry that is read has the relevance of another.
    assert all(len(part.unique()) >= part.count_nonzero() > 0 for part in parts)


class PerLayer(nn.Module):
    """Each layer adds an embedding of its own of the same ids; the model names its first table."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build("mamba")
        self.tables = nn.ModuleList(nn.Embedding(VOCABULARY, 16) for _ in range(2))

    def get_input_embeddings(self) -> nn.Module:
        return self.inner.get_input_embeddings()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.get_input_embeddings()(tokens)
        for layer, table in zip(self.inner.backbone.layers, self.tables, strict=False):
            x = layer(x) + table(tokens)
        return self.inner.lm_head(self.inner.backbone.norm_f(x))


class Normed(nn.Module):
    """An image, a convolution and a norm, and then tokens."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 6, 3, bias=False), norm
        self.mixer, self.head = BidirectionalMamba(6, state=4), nn.Linear(6, 3, bias=False)
        for scale in (norm.weight, norm.running_var):
            if scale is not None:
                nn.init.uniform_(scale, 0.5, 2.0)

    def forward(self, image: Tensor) -> Tensor:
        x = self.norm(self.stem(image)).flatten(2).mT
        return self.head((x + self.mixer(x))[:, :5].mean(1))


NORMS = {
    "an instance norm": nn.InstanceNorm2d,
    "an instance norm with weights": partial(nn.InstanceNorm2d, affine=True),
    "an instance norm with statistics": partial(nn.InstanceNorm2d, track_running_stats=True),
    "a batch norm": nn.BatchNorm2d,
    "a batch norm without weights": partial(nn.BatchNorm2d, affine=False),
}


class Case(NamedTuple):
    """A model without bias terms, what it is given, its target, and the methods that add up."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    target: Any
    methods: tuple[type, ...] = (MambaLRP,)
    error: float | None = None  # that of rounding unless given


def stacked(*kinds: Callable[[], nn.Module], width: int = 6) -> nn.Module:
    return wild.Stack(*(kind() for kind in kinds), width=width)


def mamba() -> nn.Module:
    return MambaMixer(MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=1), 0)


BOTH = (LaTIM, MambaLRP)
SERIES = partial(noise, 2, 8, 3)
CASES = {
    "a table per layer": Case(PerLayer, partial(ids, 2, 9), 3),
    **{
        f"{count} images, {name}": Case(
            lambda norm=norm: Normed(norm(6)), partial(torch.randn, count, 2, 7, 8), 1, error=1e-4
        )
        for count in (1, 2)
        for name, norm in NORMS.items()
    },
    **{f"pixels, {name}": Case(model, images, 3) for name, model in VISION.items()},
    **{
        f"measured: {kind.__name__}": Case(partial(stacked, kind, kind), wild.tokens, (3, 1))
        for kind in wild.KINDS
    },
    "a known and a measured mixer": Case(
        partial(stacked, mamba, partial(wild.Mixer, 16), width=16),
        partial(wild.tokens, 1, 6, 16),
        (3, 1),
    ),
    "a group norm": Case(
        lambda: nn.Sequential(GroupNormed(), GroupNormed()), partial(wild.tokens, 1), (5, 1)
    ),
    "xLSTM": Case(
        partial(stacked, Layer, partial(Layer, back=True), width=XLSTM_WIDTH),
        partial(wild.tokens, 1, XLSTM_TOKENS, XLSTM_WIDTH),
        (5, 1),
    ),
    "S4D": Case(
        lambda: TokensLast(S4D(glu=False), S4D(glu=False)), partial(wild.tokens, 1, 9), (6, 3)
    ),
    "S4D, GLU": Case(lambda: TokensLast(S4D(), S4D()), partial(wild.tokens, 1, 9), (6, 3)),
    # The mean that a layer norm after a scan subtracts is no map of LaTIM's.
    **{
        f"channels first, {kind}": Case(
            lambda kind=kind: channels_first.twins(kind)[0],
            lambda kind=kind: channels_first.twins(kind)[2],
            2,
            methods,
            1e-4,
        )
        for kind, methods in (("series", BOTH), ("square", (MambaLRP,)))
    },
    **{
        f"convolutions between groups, {kind.__name__}": Case(
            partial(made, kind), partial(noise, 2, 3, SIDE, SIDE), 1, BOTH
        )
        for kind in (Groups, OnImages)
    },
    "two grids, MLPs": Case(lambda: made(TwoGrids(mlp=True)), SERIES, 1, (LaTIM,)),
    "no norm": Case(lambda: made(Bare()), SERIES, (5, 7), (LaTIM,)),
    "no last norm": Case(lambda: made(Bare(mlp=True)), SERIES, (5, 7), (LaTIM,)),
    "a head of all tokens": Case(
        lambda: made(nn.Sequential(Bare(), nn.Flatten(), nn.Linear(8 * WIDTH, 4))),
        SERIES,
        1,
        (LaTIM,),
    ),
    "images on two grids": Case(
        lambda: made(inputs.Hierarchy()), partial(noise, 2, 3, 16, 16), 1, (LaTIM,)
    ),
    "a U-shape": Case(
        lambda: made(inputs.UShape()), partial(noise, 2, 3, 16, 16), (2, 5, 5), (LaTIM,)
    ),
}


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("method", "name"),
    [(method, name) for name, case in CASES.items() for method in case.methods],
)
def test_relevance_adds_up_to_the_score(method, name):
    case = CASES[name]
    model = without_biases(case.model().eval(), "cls_token", "pos_embed")
    assert_adds_up(method, model, case.inputs(), case.target, error=case.error)


@pytest.mark.filterwarnings("ignore:.*token shift")
def test_rwkv7():
    model = without_biases(stacked(TimeMix, TimeMix, width=16).eval())
    assert_adds_up(MambaLRP, model, wild.tokens(1, 9, 16), (6, 3), error=1e-4)


@pytest.mark.skipif(importlib.util.find_spec("typeseg") is None, reason="typeseg is not installed")
def test_a_trained_model():
    from captum_ssm.examples import typeseg as typeseg_model

    text = "<p>Hi</p>\n<script>alert('x');</script>\n"
    bare, x = without_biases(typeseg_model.TypeSeg().eval()), typeseg_model.ids_of(text)
    assert_adds_up(MambaLRP, bare, x, (text.index("alert"), 2), error=1e-3)
