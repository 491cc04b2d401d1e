"""Bad calls: what each says, and that it leaves the model as it was."""

import copy
import inspect
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
import torch
from families import TRANSFORMERS_4, build, modeling_of
from methods import MAPS, METHODS, OF_A_TARGET, each, each_method
from models import VOCABULARY, Classifier, ids, recast, tiny
from torch import nn
from unchanged import assert_unchanged, fingerprint
from wild import Kernel

from captum_ssm import (
    InputError,
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    ReconstructionError,
    TargetError,
    UnifiedImplicitAttention,
    UnsupportedModelError,
    hidden_attention,
    register_mixer,
    supported,
)
from captum_ssm.mixers import registered
from captum_ssm.models import VisionMamba
from captum_ssm.utils.nested import same_values

TOKENS = ids(2, 7)
IDS = f"0 .. {VOCABULARY - 1}"  # that a model knows


class NoMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, tokens):
        return self.rnn(self.embedding(tokens))[0]


class OwnTable(nn.Module):
    """A model that does not tell which table its embeddings are."""

    def __init__(self):
        super().__init__()
        self.embedding, self.model = nn.Embedding(VOCABULARY, 16), tiny()

    def forward(self, tokens):
        return self.model(inputs_embeds=self.embedding(tokens)).logits


class CheckpointFunction(Kernel):
    """Several classes have this name, such as Megatron's."""


class Checkpointed(nn.Module):
    """A model that checkpoints its blocks by another function than PyTorch's."""

    def __init__(self, function=CheckpointFunction):
        super().__init__()
        self.model, self.function = tiny(), function

    def get_input_embeddings(self):
        return self.model.get_input_embeddings()

    def forward(self, tokens):
        embeddings = self.get_input_embeddings()(tokens)
        run = self.model.backbone
        hidden = self.function.apply(embeddings, lambda e: run(inputs_embeds=e)[0])
        return self.model.lm_head(hidden)


def never(tokens):
    raise AssertionError("the model was run")


def mask(*rows: str) -> torch.Tensor:
    return torch.tensor([[int(c) for c in row] for row in rows])


def with_nan(path: str) -> nn.Module:
    model = recast(tiny(tie_word_embeddings=False), torch.float32)
    with torch.no_grad():
        model.get_submodule(path).weight[0, 0] = float("nan")
    return model


@dataclass
class Case:
    """A bad call of every method (or of ``methods``), its error and parts of the message."""

    error: type[Exception]
    says: list[str]
    inputs: object = None
    options: dict = field(default_factory=dict)
    model: object = tiny
    wrap: object = None
    methods: list = field(default_factory=lambda: METHODS)
    target: object = 4


def wrong_position(position, says, error=InputError):
    return Case(error, says, options={"position": position})


def wrong_mask(given, says, error=InputError):
    return Case(error, says, options={"additional_forward_args": {"attention_mask": given}})


def wrong_target(target, says, **more):
    return Case(TargetError, says, methods=OF_A_TARGET, target=target, **more)


def wrong_option(methods, says, error=ValueError, **options):
    return Case(error, says, methods=methods, options=options)


def no_gradient(function, *says):
    """``function`` makes of a model a callable without gradients to its mixers."""
    says = ["does not depend differentiably", *says]
    return Case(ValueError, says, wrap=lambda m: (function(m), m), methods=OF_A_TARGET)


wrong_class = partial(wrong_target, model=lambda: Classifier("last"))
UIA = [UnifiedImplicitAttention]

CASES = {
    # the model
    "no known mixer": Case(
        UnsupportedModelError,
        ["NoMixer", "Embedding, GRU", "Supported: ", "MambaMixer", "register_mixer"],
        model=NoMixer,
    ),
    "a model that is not one": Case(
        TypeError, ["model is a str", "torch.nn.Module", "nnsight"], wrap=lambda m: (m, "mamba")
    ),
    "a class": Case(
        TypeError,
        ["forward_func is the class MambaForCausalLM itself", "torch.nn.Module"],
        wrap=lambda m: (type(m), None),
    ),
    "the class of the model": Case(
        TypeError, ["model is the class MambaForCausalLM itself"], wrap=lambda m: (m, type(m))
    ),
    "a configuration": Case(
        TypeError, ["forward_func is a MambaConfig", "nnsight"], wrap=lambda m: (m.config, None)
    ),
    "nothing": Case(TypeError, ["forward_func is a NoneType"], wrap=lambda m: (None, None)),
    "a callable without model=": Case(
        ValueError, ["function", "model=model"], wrap=lambda m: (lambda t: m(t), None)
    ),
    "a callable that runs another model": Case(
        UnsupportedModelError,
        ["did not reach any of the 2 mixers", "MambaForCausalLM"],
        wrap=lambda m: (tiny(seed=1).forward, m),
    ),
    "a callable that drops a token": Case(
        InputError, ["12 of the 14 ids", "(2, 7)"], wrap=lambda m: (lambda t: m(t[:, 1:]), m)
    ),
    "a callable that generates": Case(
        UnsupportedModelError,
        methods=[RawAttention, MambaRollout],  # the others meet its no_grad() first
        says=["runs the model once", *(() if TRANSFORMERS_4 else ("(2, 1)", "(2, 7)"))],
        wrap=lambda m: (lambda t: m.generate(t, max_new_tokens=2, do_sample=False), m),
    ),
    "a callable that returns no tensor": Case(
        TypeError, ["returned a str", "ModelOutput"], wrap=lambda m: (lambda t: str(m(t)), m)
    ),
    "a callable that detaches": no_gradient(lambda m: lambda t: m(t).logits.detach(), "detaches"),
    "a callable under no_grad": no_gradient(
        lambda m: torch.no_grad()(lambda t: m(t).logits), "no_grad"
    ),
    "a head of a backbone under no_grad": no_gradient(
        lambda m: lambda t: m.lm_head(torch.no_grad()(m.backbone)(t)[0])
    ),
    "a graph that misses the mixers": Case(
        ValueError,
        ["does not depend differentiably"],
        model=Checkpointed,
        methods=[MambaAttribution, LaTIM, MambaLRP],
    ),
    "a graph of a kernel that misses the mixers": Case(
        ValueError,
        ["does not depend differentiably", "backward pass hides them"],
        model=lambda: Checkpointed(Kernel),
        methods=[MambaAttribution, LaTIM, MambaLRP],
    ),
    "a pooled output that is detached": Case(
        ValueError,
        ["autograd does not show"],
        model=lambda: Classifier("last"),
        wrap=lambda m: (lambda t: m(t).detach(), m),
        methods=[RawAttention, MambaRollout],
    ),
    "NaN in a mixer's weights": Case(
        InputError,
        ["backbone.layers.1.mixer", "NaN", "weights"],
        model=lambda: with_nan("backbone.layers.1.mixer.in_proj"),
    ),
    "NaN in the head's weights": Case(
        InputError,
        ["score", "NaN"],
        model=lambda: with_nan("lm_head"),
        methods=OF_A_TARGET,
        target=0,
    ),
    # the inputs
    "no tokens": Case(InputError, ["empty", "(2, 0)"], ids(2, 0)),
    "no examples": Case(InputError, ["empty", "(0, 7)"], ids(0, 7)),
    "no tokens, embedded": Case(InputError, ["empty", "(2, 0, 16)"], torch.zeros(2, 0, 16)),
    "ids of a float dtype": Case(
        TypeError, ["ids", "torch.float32", "integer dtype"], TOKENS.float()
    ),
    "ids of booleans": Case(TypeError, ["ids", "torch.bool", "integer dtype"], TOKENS > 9),
    "embeddings of integers": Case(
        TypeError, ["embeddings", "torch.int64", "floating dtype"], torch.ones(2, 7, 16).long()
    ),
    "complex embeddings": Case(
        TypeError, ["torch.complex64"], torch.ones(2, 7, 16, dtype=torch.complex64)
    ),
    "one axis": Case(InputError, ["(7,)", "(B, L)"], TOKENS[0]),
    "five axes": Case(InputError, ["(1, 1, 1, 2, 7)", "(B, C, H, W)"], TOKENS[None, None, None]),
    "two inputs": Case(ValueError, ["tuple of 2", "additional_forward_args"], (TOKENS, TOKENS)),
    "a list": Case(TypeError, ["list", "(B, L)"], TOKENS.tolist()),
    "an array": Case(TypeError, ["ndarray"], np.ones((2, 7))),
    "a text": Case(TypeError, ["str"], "one two three"),
    "an id outside the vocabulary": Case(InputError, ["37 to 37", IDS], TOKENS * 0 + 37),
    "a negative id": Case(InputError, ["-2", IDS], TOKENS * 0 - 2),
    "a negative id of one byte": Case(InputError, ["-2", IDS], (TOKENS * 0 - 2).to(torch.int8)),
    "ids without values": Case(InputError, ["device meta"], TOKENS.to("meta")),
    "embeddings without values": Case(
        InputError, ["device meta"], torch.zeros(2, 7, 16, device="meta")
    ),
    "sparse ids": Case(TypeError, ["torch.sparse_coo", "to_dense()"], TOKENS.to_sparse()),
    "embeddings of another width": Case(
        InputError, ["(2, 7, 8)", "width 8", "width 16"], torch.zeros(2, 7, 8)
    ),
    "NaN in the embeddings": Case(
        InputError, ["NaN", "inputs"], torch.full((2, 7, 16), float("nan"))
    ),
    # the mask
    "ids that a table of the user's own has no row for": Case(
        InputError,
        ["embedding", f"0 to {VOCABULARY}", IDS],
        torch.tensor([[0, VOCABULARY]]),
        model=OwnTable,
    ),
    "an example of padding only": Case(
        InputError,
        ["row 1", "padding"],
        options={"additional_forward_args": mask("1111111", "0000000")},
    ),
    "a mask of another batch": Case(
        InputError,
        ["batch of 2", "(3, 7)"],
        options={"additional_forward_args": mask(*["1111111"] * 3)},
    ),
    "a mask of another length": wrong_mask(mask(*["111111"] * 2), ["(2, 6)", "(2, 7)"]),
    "a mask without a batch": wrong_mask(
        torch.ones(7), ["attention_mask", "(7,)", "(2, 7)", "(B, L)"]
    ),
    "a mask without a batch, in its place": Case(
        InputError,
        ["attention_mask", "(7,)", "(2, 7)", "(B, L)"],
        options={"additional_forward_args": torch.ones(7)},
        model=lambda: Classifier("last"),
    ),
    "a float mask of another batch": wrong_mask(
        torch.ones(3, 7), ["attention_mask", "(3, 7)", "(2, 7)"]
    ),
    "a mask that is a list": wrong_mask(
        [[1] * 7] * 2, ["attention_mask is a list", "(B, L)", "0 for padding"], TypeError
    ),
    "a mask that is an array": wrong_mask(
        np.ones((2, 7)), ["attention_mask is a ndarray"], TypeError
    ),
    "a mask of numbers": wrong_mask(
        mask("1111111", "2222555"), ["attention_mask", "from 1 to 5", "0 for padding"]
    ),
    "a mask of scores": wrong_mask(
        mask("1111111", "0111111") * 0.5, ["attention_mask", "from 0 to 0.5", "0 for padding"]
    ),
    # the position
    "a position after the end": wrong_position(7, ["position is 7", "7 tokens", "0 .. 6"]),
    "a position before the start": wrong_position(-8, ["position is -8", "-7 .. -1"]),
    "one of several positions": wrong_position(torch.tensor([3, 7]), ["[3, 7]", "0 .. 6"]),
    "positions of another batch": wrong_position(
        torch.tensor([3, 1, 2]), ["3 entries", "batch of 2"]
    ),
    "a position that is no integer": wrong_position(2.0, ["position is 2.0", "(B,)"], TypeError),
    "a position that is a bool": wrong_position(True, ["bool"], TypeError),
    "a position that is a word": wrong_position("last", ["position", "last"], TypeError),
    "positions that are words": wrong_position(["a", "b"], ["position is ['a', 'b']"], TypeError),
    "a position on padding": Case(
        InputError,
        ["[1, 1]", "padding"],
        options={"position": 1, "additional_forward_args": mask("1111111", "0011111")},
    ),
    # the target
    "a row of scores for a target": wrong_target(
        torch.ones(2, 50), ["target is of shape (2, 50), from 1 to 1", "one id per example"]
    ),
    "no target for token logits": wrong_target(
        None, [f"(2, 7, {VOCABULARY})", "no target was given", "(position, token)"]
    ),
    "a token of a model without a head": wrong_target(
        4,
        ["hidden states of shape (2, 7, 16)", "features, not tokens", "(position, feature)"],
        model=lambda: tiny().backbone,
    ),
    "a target outside the vocabulary": wrong_target(VOCABULARY, ["37", IDS]),
    "a target before the vocabulary": wrong_target(
        -VOCABULARY - 1, ["[-38", IDS, f"-{VOCABULARY} .. -1 from its end"]
    ),
    "a pair with a fraction of a token": wrong_target((2, 3.7), ["(2, 3.7)", "(position, token)"]),
    "a pair with a fraction of a position": wrong_target((2.0, 3), ["(2.0, 3)", "of two integers"]),
    "a pair with a word": wrong_target((3, "x"), ["(3, 'x')", "of two integers"]),
    "pairs with a bool": wrong_target(
        [(3, 4), (3, True)], ["[(3, 4), (3, True)]", "of two integers"]
    ),
    "one of several targets outside": wrong_target([4, 99], ["[4, 99]", IDS]),
    "targets of another batch": wrong_target([4, 5, 6], ["3 entries", "batch of 2"]),
    "pairs of another batch": wrong_target([(1, 4)] * 3, ["3 entries", "batch of 2"]),
    "a target of floats": wrong_target(2.5, ["2.5", "token id"]),
    "a target of words": wrong_target("five", ["'five'"]),
    "a target of three": wrong_target((1, 2, 3), ["3 entries"]),
    "pairs of three": wrong_target([(1, 2, 3)] * 2, ["(position, token)"]),
    "a position in both": wrong_target((3, 4), ["(3, 4)", "is 5"], options={"position": 5}),
    "a position of the target outside": Case(
        InputError, ["[9, 9]", "0 .. 6"], methods=OF_A_TARGET, target=(9, 4)
    ),
    "a class before the first": wrong_class(-6, ["target is -6", "(2, 5)"]),
    "a class outside": wrong_class(5, ["target is 5", "(2, 5)"]),
    "no target for several classes": wrong_class(None, ["target is None", "(2, 5)"]),
    "classes of another batch": wrong_class([1, 2, 3], ["[1, 2, 3]", "(2, 5)"]),
    # the options
    "an unknown option": wrong_option(METHODS, ["colour"], TypeError, colour="red"),
    "an unknown option, before the model runs": Case(
        TypeError,
        ["no option 'clamp'", "reduction, sign", "additional_forward_args"],
        methods=MAPS,
        wrap=lambda m: (never, m),
        options={"clamp": True},
    ),
    "an unknown reduction": wrong_option(MAPS, ["'median'", "'mean', 'max'"], reduction="median"),
    "an unknown sign": wrong_option(MAPS, ["'plus'", "'clamp'"], sign="plus"),
    "a ratio of one": wrong_option(MAPS, ["discard_ratio is 1.0", "0 <= r < 1"], discard_ratio=1.0),
    "a ratio that is a word": wrong_option(
        MAPS, ["discard_ratio is 'a'", "0 <= r < 1"], discard_ratio="a"
    ),
    "a tolerance of one": wrong_option(MAPS, ["tolerance is 1.0", "tolerance < 1"], tolerance=1.0),
    "a convergence delta": wrong_option(MAPS, ["convergence delta"], return_convergence_delta=True),
    "a layer that is not there": wrong_option(
        [RawAttention], ["2", "0 .. 1", "backbone.layers.1.mixer"], layers=[0, 2]
    ),
    "a path that is not there": wrong_option(
        [RawAttention], ["'layers.0'", "backbone.layers.0.mixer"], layers="layers.0"
    ),
    "no layers": wrong_option([RawAttention], ["layers"], layers=[]),
    "an unknown aggregation": wrong_option(UIA, ["'sum'", "'raw'", "'rollout'"], aggregation="sum"),
    "an unknown component": wrong_option(UIA, ["'bias'", "'conv'"], components=["conv", "bias"]),
    "components that are a number": wrong_option(
        UIA, ["components is 3", "'conv'"], TypeError, components=3
    ),
    "several layers of one map": wrong_option(
        [LaTIM],
        ["layer is [0, 1]", "2 mixers", "backbone.layers.1.mixer"],
        layer=[0, 1],
        aggregation="l2",
    ),
    "a layer of LaTIM that is not there": wrong_option(
        [LaTIM], ["this model has 2 mixers"], layer=99, aggregation="l1"
    ),
    "an aggregation without its layer": wrong_option([LaTIM], ["pass layer="], aggregation="l2"),
    "an unknown norm": wrong_option(
        [LaTIM], ["aggregation is 'linf'"], aggregation="linf", layer=0
    ),
    "a norm below zero": wrong_option([LaTIM], ["a number p > 0"], aggregation=-1, layer=0),
    "an unknown activation": wrong_option([LaTIM], ["activation is 'tanh'"], activation="tanh"),
    "a start that is not there": wrong_option(
        [MambaRollout, MambaAttribution, *UIA], ["start_layer is 2", "0 .. 1"], start_layer=2
    ),
}


@contextmanager
def refused(model, error, says):
    """The call within raises the error, with these parts in its message, and changes nothing."""
    before = fingerprint(model)
    with pytest.raises(error) as caught:
        yield
    for part in says:
        assert part in str(caught.value)
    assert_unchanged(model, before)


@pytest.mark.parametrize(
    ("name", "method"),
    [(name, method) for name, case in CASES.items() for method in case.methods],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_bad_call(name, method):
    case = CASES[name]
    model = case.model()
    forward_func, of = (model, None) if case.wrap is None else case.wrap(model)
    inputs = TOKENS if case.inputs is None else case.inputs
    with refused(model, case.error, case.says):
        method(forward_func, of).attribute(inputs, target=case.target, **case.options)


UNIFIED = {"formulation": "unified"}
HIDDEN_CASES = {
    "formulation": (ValueError, ["'raw'", "'hidden'", "'unified'"], {"formulation": "raw"}),
    "component": (ValueError, ["'bias'", "'conv'"], UNIFIED | {"components": ["conv", "bias"]}),
    "components of hidden": (ValueError, ["unified"], {"components": ["conv"]}),
    "reduction": (ValueError, ["'sum'", "'mean'"], {"reduction": "sum"}),
    "row": (ValueError, ["[7]", "0 .. 6"], {"rows": [7]}),
    "rows of another batch": (ValueError, ["(3, 1)", "(2, R)"], {"rows": [[1], [2], [3]]}),
    "no rows": (ValueError, ["(0,)"], {"rows": torch.zeros(0, dtype=torch.long)}),
    "rows of floats": (TypeError, ["1.5"], {"rows": 1.5}),
    "rows that are a word": (TypeError, ["rows is 'last'", "(B, R)"], {"rows": "last"}),
    "number": (TypeError, ["components is 3", "'conv'"], UNIFIED | {"components": 3}),
    "layer": (ValueError, ["5", "0 .. 1"], {"layers": 5}),
    "no layers": (ValueError, ["layers"], {"layers": []}),
}


@pytest.mark.parametrize("name", HIDDEN_CASES)
def test_a_bad_call_of_hidden_attention(name):
    error, says, options = HIDDEN_CASES[name]
    model = tiny()
    with refused(model, error, says):
        hidden_attention(model, TOKENS, **options)


@pytest.mark.parametrize(
    ("model", "says"), [(None, "a NoneType"), ("mamba", "a str"), (type(tiny()), "the class Mamba")]
)
def test_hidden_attention_of_no_model(model, says):
    with pytest.raises(TypeError) as caught:
        hidden_attention(model, TOKENS)
    assert f"model is {says}" in str(caught.value)
    assert "forward_func" not in str(caught.value)  # it has no such argument


def test_a_frozen_method_explains_its_own_inputs_only():
    frozen = RawAttention(tiny()).freeze_once(TOKENS)
    truth = RawAttention(tiny()).attribute(TOKENS, position=3)
    for same in (TOKENS, TOKENS.clone(), (TOKENS.int(),)):
        found = frozen.attribute(same, position=3)
        assert torch.equal(found[0] if isinstance(found, tuple) else found, truth)
    for other in (TOKENS.flip(1), TOKENS[:, :6], TOKENS[:1]):
        with pytest.raises(ValueError, match="not those that freeze_once was given"):
            frozen.attribute(other, position=3)
    with pytest.raises(TypeError, match="inputs is a list"):
        frozen.attribute(TOKENS.tolist(), position=3)


LOGITS = {"aggregation": "alti_logit"}
INTERACTIONS = {
    "several layers": ({"layer": [0, 1]}, ["layer is [0, 1]", "0 .. 1"]),
    "no such layer": ({"layer": 2}, ["layer is 2", "0 .. 1"]),
    "no layer": ({"layer": None}, ["layer is None"]),
    "targets of another shape": (LOGITS | {"target": TOKENS[:, 1:]}, ["(2, 6)", "(2, 7)"]),
    "targets of floats": (LOGITS | {"target": TOKENS.float()}, ["torch.float32", "(2, 7)"]),
    "targets outside": (LOGITS | {"target": TOKENS * 0 + VOCABULARY}, [str(VOCABULARY), IDS]),
    "a mask that is a list": (
        LOGITS | {"additional_forward_args": {"attention_mask": [1] * 7}},
        ["attention_mask is a list"],
    ),
}


@pytest.mark.parametrize("name", INTERACTIONS)
def test_a_bad_call_of_interactions(name):
    options, says = INTERACTIONS[name]
    model = tiny()
    with refused(model, (ValueError, TypeError), says):
        LaTIM(model).interactions(TOKENS, **options)
    if "aggregation" not in options:
        with pytest.raises(ValueError, match="layer is"):
            LaTIM(model).contributions(TOKENS, options["layer"], -1)


def test_a_method_is_refused_where_it_is_made():
    model = tiny()
    for forward_func, of in ((type(model), None), (model.config, None), (model, model.config)):
        with pytest.raises(TypeError, match="expected a torch"):
            RawAttention(forward_func, of)


REGISTRATIONS = {
    "a number": ((3,), "module_type is int"),
    "a module": ((nn.Linear(2, 2),), "module_type is Linear; expected a module class"),
    "no name": (("",), "module_type is ''"),
    "a name for a function": (("Foo", "bar"), "freeze is a str"),
}


@pytest.mark.parametrize("name", REGISTRATIONS)
def test_a_bad_registration(name):
    arguments, says = REGISTRATIONS[name]
    before = registered()
    with pytest.raises(TypeError, match=says):
        register_mixer(*arguments)
    assert registered() == before
    with pytest.raises(TypeError, match="freeze is a NoneType"):
        register_mixer("Foo")(None)
    assert registered() == before


def test_errors_are_what_captum_expects():
    assert issubclass(TargetError, (ValueError, AssertionError))
    assert issubclass(TargetError, AssertionError)
    for error in (InputError, ReconstructionError, TargetError, UnsupportedModelError):
        assert issubclass(error, ValueError)
        assert error.__doc__


def test_a_model_error_comes_through_as_it_is():
    # A mistake in the call of the model itself is reported by the model itself.
    with pytest.raises(TypeError, match="nonsense"):
        RawAttention(lambda t, nonsense: tiny()(t), tiny()).attribute(TOKENS)


def assert_raises_reconstruction(path, call):
    with pytest.raises(ReconstructionError) as caught:
        call(check=True)
    for part in (path, "MambaMixer", "relative error", "1e-04", "check=False", "register_mixer"):
        assert part in str(caught.value)
    call(check=False)


def explainers(model, **options):
    yield lambda check: RawAttention(model, check=check).attribute(TOKENS, **options)
    yield lambda check: MambaRollout(model, check=check).attribute(TOKENS, **options)
    yield lambda check: MambaAttribution(model, check=check).attribute(TOKENS, 4, **options)
    yield lambda check: UnifiedImplicitAttention(model, check=check).attribute(TOKENS, 4, **options)
    yield lambda check: MambaRollout(model, check=check).rollout(TOKENS, **options)
    yield lambda check: MambaAttribution(model, check=check).rollout(TOKENS, 4, **options)
    yield lambda check: hidden_attention(model, TOKENS, check=check, **options)


def test_a_mixer_that_computes_something_else():
    model = tiny()
    mixer = model.backbone.layers[1].mixer
    own = mixer.forward
    mixer.forward = lambda *args, **kwargs: 1.01 * own(*args, **kwargs)
    before = fingerprint(model)
    for call in explainers(model):
        assert_raises_reconstruction("backbone.layers.1.mixer", call)
        assert_unchanged(model, before)


@pytest.mark.skipif(TRANSFORMERS_4, reason="its loop in Mamba's forward is not measured")
def test_a_subclass_that_computes_something_else_is_measured():
    model = tiny()
    mixer = model.backbone.layers[1].mixer

    class LouderMambaMixer(type(mixer)):
        def forward(self, *args, **kwargs):
            return 1.01 * super().forward(*args, **kwargs)

    mixer.__class__ = LouderMambaMixer
    before = fingerprint(model)
    for call in explainers(model):
        call(check=True)
        assert_unchanged(model, before)
    known = [one.known for one in supported(model, TOKENS).mixers]
    assert known[0] == "registered"
    assert known[1] in ("measured", "recognized")


def test_a_subclass_that_computes_the_same():
    model = tiny()
    truth = RawAttention(model).attribute(TOKENS)
    mixer = model.backbone.layers[1].mixer
    mixer.__class__ = type("MyMambaMixer", (type(mixer),), {})
    assert torch.equal(RawAttention(model).attribute(TOKENS), truth)


def test_a_patched_scan(monkeypatch):
    model = tiny()
    modeling = modeling_of(model, "mamba_selective_scan")
    scan = modeling.mamba_selective_scan

    def slower(x, dt, *args, **kwargs):
        return scan(x, dt * 0.9, *args, **kwargs)

    monkeypatch.setattr(modeling, "mamba_selective_scan", slower)
    for call in explainers(model):
        # Each method reads the layers in the order it needs them, and stops at the first.
        assert_raises_reconstruction("backbone.layers.", call)


@pytest.mark.skipif(TRANSFORMERS_4, reason="transformers 4 takes one token behind a filled cache")
def test_a_generation_cache_that_is_not_empty():
    model = tiny()
    # Its name since transformers 5.24, and before.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "cache_params"
    with torch.no_grad():
        cache = getattr(model(ids(2, 5, seed=1), use_cache=True), name)
    before = [copy.deepcopy(vars(layer)) for layer in cache.layers]
    options = {"additional_forward_args": {name: cache, "use_cache": True}}
    for call in explainers(model, **options):
        # MambaLRP takes it, but the mixer ignores its state when it is given several tokens.
        with pytest.raises((ReconstructionError, UnsupportedModelError), match="cache that is not"):
            call(check=True)
    assert same_values(before, [vars(layer) for layer in cache.layers])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_no_false_alarm_in_any_dtype(dtype):
    for seed in range(3):
        model = recast(tiny(layers=3, seed=seed), dtype)
        for length in (1, 40):
            RawAttention(model).attribute(ids(2, length, seed=seed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_wrong_mixer_is_found_in_any_dtype(dtype):
    model = recast(tiny(), dtype)
    mixer = model.backbone.layers[0].mixer
    own, skip = mixer.forward, mixer.D.detach().clone()

    def without_skip(hidden_states, **kwargs):
        mixer.D.data.zero_()
        try:
            return own(hidden_states, **kwargs)
        finally:
            mixer.D.data.copy_(skip)

    mixer.forward = without_skip
    with pytest.raises(ReconstructionError, match=r"layers\.0"):
        RawAttention(model).attribute(TOKENS)


def test_padding_may_hold_anything():
    # What a mixer returns at padding is not part of the explanation, so it is not compared.
    model = tiny()
    extra = mask("1111111", "0011111")
    hook = model.backbone.layers[0].mixer.register_forward_hook(
        lambda module, args, out: torch.where(extra[..., None].bool(), out, 1e3)
    )
    RawAttention(model).attribute(TOKENS, additional_forward_args=extra)
    hook.remove()


@each_method
def test_a_target_may_count_from_the_end(method):
    model, classifier = tiny(), Classifier("last")
    for explained, last in ((model, VOCABULARY - 1), (classifier, 4)):
        truth = method(explained).attribute(TOKENS, target=last)
        assert torch.equal(method(explained).attribute(TOKENS, target=-1), truth)
    truth = method(model).attribute(TOKENS, target=(3, VOCABULARY - 2))
    assert torch.equal(method(model).attribute(TOKENS, target=(3, -2)), truth)
    assert torch.equal(method(model).attribute(TOKENS, target=[(-4, -2)] * 2), truth)


def test_interactions_take_targets_from_the_end():
    options, latim = LOGITS | {"layer": 1}, LaTIM(tiny())
    truth = latim.interactions(TOKENS, target=TOKENS * 0 + VOCABULARY - 1, **options)
    assert torch.equal(latim.interactions(TOKENS, target=TOKENS * 0 - 1, **options), truth)


@each(OF_A_TARGET)
def test_integers_of_any_kind(method):
    model, classifier = tiny(), Classifier("last")
    truth = method(model).attribute(TOKENS, target=(3, 4))
    for pair in ((np.int64(3), np.int32(4)), (torch.tensor(3), torch.tensor(4))):
        assert torch.equal(method(model).attribute(TOKENS, target=pair), truth)
    position = torch.tensor([3, 3], dtype=torch.uint8)
    assert torch.equal(method(model).attribute(TOKENS, target=4, position=position), truth)
    truth = method(classifier).attribute(TOKENS, target=3)
    assert torch.equal(method(classifier).attribute(TOKENS, target=np.int64(3)), truth)


def test_layers_are_numbers_of_any_kind():
    model = tiny()
    for layers in (1, -1, np.int64(1), torch.tensor(1), range(1, 2), [torch.tensor(1)]):
        assert list(hidden_attention(model, TOKENS, layers=layers)) == ["backbone.layers.1.mixer"]
    for layers in (1.0, [0.0], [[0]], True):
        with pytest.raises(ValueError, match="layers holds"):
            hidden_attention(model, TOKENS, layers=layers)
    with pytest.raises(ValueError, match="start_layer is 'first'"):
        MambaRollout(model).attribute(TOKENS, start_layer="first")


@each_method
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_ids_of_any_integer_dtype(method, dtype):
    model = tiny()
    truth = method(model).attribute(TOKENS, target=4)
    for explain in (method(model), method(lambda t: model(t.long()), model)):
        assert torch.equal(explain.attribute(TOKENS.to(dtype), target=4), truth)


@each_method
def test_masks_of_any_dtype(method):
    given = mask("1111111", "0011111")
    for model in (tiny(), Classifier("mean")):
        explain = partial(method(model).attribute, TOKENS, 4)
        truth = explain({"attention_mask": given})
        assert not torch.allclose(explain()[1], truth[1])
        for dtype in (torch.bool, torch.int32, torch.float32, torch.bfloat16):
            found = explain({"attention_mask": given.to(dtype)})
            torch.testing.assert_close(found, truth)
    for dtype in (torch.bool, torch.int64, torch.float32):
        torch.testing.assert_close(explain(given.to(dtype)), truth)  # the classifier's second


@pytest.mark.skipif(TRANSFORMERS_4, reason="models of transformers 4 take masks (B, L) only")
def test_masks_of_more_axes_are_the_models_affair():
    model = build("jamba")
    causal = torch.ones(7, 7).tril().bool().expand(2, 1, 7, 7)
    blind = causal & (torch.arange(7) != 2)
    for method in (RawAttention, MambaLRP):
        truth = method(model).attribute(TOKENS, target=4)
        extra = {"attention_mask": causal}
        found = method(model).attribute(TOKENS, target=4, additional_forward_args=extra)
        torch.testing.assert_close(found, truth)
        extra = {"attention_mask": blind}
        other = method(model).attribute(TOKENS, target=4, additional_forward_args=extra)
        assert not torch.allclose(other, truth)  # the attention layers have read it


def test_an_image_may_come_with_a_mask_of_its_tokens():
    class Masked(VisionMamba):
        def forward(self, images, attention_mask=None):
            return super().forward(images)

    model = Masked((8, 12), 4, classes=5, width=8, depth=2, state=4).eval()
    images = torch.randn(2, 3, 8, 12)
    extra = {"attention_mask": torch.ones(2, 7, dtype=torch.long)}
    truth = MambaRollout(model).attribute(images)
    found = MambaRollout(model).attribute(images, additional_forward_args=extra)
    torch.testing.assert_close(found, truth)


def test_components_may_be_one_name_or_come_once():
    method, options = UnifiedImplicitAttention(tiny()), {"aggregation": "rollout"}
    truth = method.attribute(TOKENS, components=["conv"], **options)
    assert not torch.equal(truth, method.attribute(TOKENS, **options))
    maps = hidden_attention(tiny(), TOKENS, formulation="unified", components=["conv"])
    for once in ("conv", iter(["conv"])):
        assert torch.equal(method.attribute(TOKENS, components=once, **options), truth)
    for once in ("conv", iter(["conv"])):
        found = hidden_attention(tiny(), TOKENS, formulation="unified", components=once)
        assert all(torch.equal(found[path], m) for path, m in maps.items())
