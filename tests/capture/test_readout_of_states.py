"""Readouts of a recurrent state, against states that plain loops compute step by step."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import wild
from families import FAMILIES, WITHOUT_STATE, build
from models import ids, without_biases
from state_loops import LOOPS
from torch import Tensor, nn

import captum_ssm
from captum_ssm import InputError, MambaLRP, Readout, RelevanceFlow, UnsupportedModelError
from captum_ssm.interventions import TokenKnockout, circuit, knockout, states
from captum_ssm.mixers import find_mixers

L = 7


def directions(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def read_of(family: str, layer: int = 0, features: int = 3) -> tuple[nn.Module, Readout]:
    model = build(family)
    if family != "qwen3_next":  # its experts have no double precision
        model = model.double()
    path, state = list(states(model, ids(2, L)).items())[layer]
    matrix = directions(features, *state.values.shape[2:]).to(state.values)
    return model, Readout(model, path, matrix, side="state")


@pytest.mark.filterwarnings("ignore:.*reads neighboring tokens before its scan")
@pytest.mark.parametrize("family", LOOPS)
def test_a_state_is_what_a_loop_computes_and_so_are_its_gradients(family):
    model, readout = read_of(family)
    x = model.get_input_embeddings()(ids(2, L)).detach().requires_grad_()
    state, _ = LOOPS[family](model, x)
    truth = torch.einsum("blx,fx->blf", state.flatten(2), readout.encoder.weight)
    found = readout(inputs_embeds=x)
    close = dict(rtol=1e-4, atol=1e-5) if x.dtype == torch.float32 else dict(rtol=1e-8, atol=1e-11)
    torch.testing.assert_close(found, truth, **close)
    expected, gradient = (torch.autograd.grad(y[:, 5, 1].sum(), x)[0] for y in (truth, found))
    assert expected[:, :6].abs().amin((0, 2)).gt(0).all()
    torch.testing.assert_close(gradient, expected, **close)


@pytest.mark.filterwarnings("ignore:.*reads neighboring tokens before its scan")
@pytest.mark.parametrize("family", LOOPS)
def test_relevance_is_the_gradient_with_coefficients_held_constant(family):
    model, readout = read_of(family)
    tokens = ids(2, L)
    x = model.get_input_embeddings()(tokens).detach().requires_grad_()
    state, _ = LOOPS[family](model, x, torch.Tensor.detach)
    score = torch.einsum("blx,fx->blf", state.flatten(2), readout.encoder.weight)[:, 5, 1]
    (gradient,) = torch.autograd.grad(score.sum(), x)
    expected = (gradient * x).sum(-1)
    found = MambaLRP(readout).attribute(tokens, (5, 1))
    torch.testing.assert_close(found, expected.to(found), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*reads neighboring tokens before its scan")
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in WITHOUT_STATE])
def test_relevance_adds_up_to_the_state_of_every_family(family):
    model, tokens = without_biases(build(family)), ids(2, L)
    path, state = list(states(model, tokens, positions=None).items())[-1]
    values = state.values.flatten(2)
    matrix = directions(2, *state.values.shape[2:]).to(values)
    readout = Readout(model, path, matrix, side="state")
    truth = torch.einsum("blx,fx->blf", values, matrix.flatten(1))
    torch.testing.assert_close(readout(tokens), truth, rtol=1e-4, atol=1e-5)
    relevance, delta = MambaLRP(readout).attribute(tokens, (5, 1), return_convergence_delta=True)
    torch.testing.assert_close(relevance.sum(1) + delta, truth[:, 5, 1], rtol=1e-4, atol=1e-5)
    assert (delta.abs() <= 1e-4 * relevance.abs().sum(1)).all()


@pytest.mark.filterwarnings("ignore:.*reads neighboring tokens before its scan")
@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("family", LOOPS)
def test_edges_and_knockout_end_at_what_tokens_wrote(family, layer):
    model, readout = read_of(family, layer)
    tokens, target = ids(1, L), (5, 1)
    written = states(model, tokens)[readout.layer].by_source(5).flatten(2)
    written = written @ readout.encoder.weight[1]  # (1, L): of the score
    close = dict(rtol=1e-4, atol=1e-5, check_dtype=False)
    edges = RelevanceFlow(readout).edges(tokens, target)
    assert list(edges)[-1] == "state"
    torch.testing.assert_close(edges["state"].matrix()[:, 5], written, **close)
    whole = readout(tokens)[0, 5, 1]
    with knockout(readout, sources=2, targets=5, layers="state"):
        lost = whole - readout(tokens)[0, 5, 1]
    torch.testing.assert_close(lost, written[0, 2], **close)
    with circuit(readout, edges.top(10_000)):
        torch.testing.assert_close(readout(tokens)[0, 5, 1], whole, **close)
    effect = TokenKnockout(readout).attribute(tokens, target)
    if layer == 0:
        torch.testing.assert_close(effect[:, :5], written[:, :5], **close)


@pytest.mark.parametrize("name", captum_ssm.attr.methods())
def test_methods_take_it_or_say_why_not(name):
    _, readout = read_of("mamba", -1)
    method = captum_ssm.attr.methods()[name](readout)
    if name == "latim":
        with pytest.raises(UnsupportedModelError, match="does not add to a residual stream"):
            method.attribute(ids(1, L), (5, 1))
        return
    found = method.attribute(ids(1, L), (5, 1))
    assert found.shape == (1, L)
    assert (found[:, 6:] == 0).all()
    assert found.abs().sum() > 0


def test_it_is_listed_with_the_layers_before_it():
    _, readout = read_of("mamba", -1)
    found = captum_ssm.supported(readout, ids(1, L))
    assert [(one.name, one.known) for one in found.mixers] == [
        ("model.backbone.layers.0.mixer", "registered"),
        ("state", "registered"),
    ]


def test_a_bias_and_names_are_those_of_other_readouts():
    model, plain = read_of("mamba2")
    matrix = directions(3, *states(model, ids(1, L))[plain.layer].values.shape[2:])
    readout = Readout(
        model,
        model.backbone.layers[0].mixer,
        matrix,
        ["a", "b", "c"],
        bias=torch.ones(3),
        side="state",
    )
    assert (readout.layer, readout.index("b")) == ("backbone.layers.0.mixer", 1)
    torch.testing.assert_close(readout(ids(1, L)), plain(ids(1, L)) + 1)
    of_states = states(model, ids(1, L), positions=None)[plain.layer].values.flatten(2)
    torch.testing.assert_close(readout.encode(of_states), readout(ids(1, L)), rtol=1e-5, atol=1e-6)


def test_padding_and_half_precision():
    model, tokens = build("mamba2"), ids(2, L)
    path, state = next(iter(states(model, tokens).items()))
    matrix = directions(2, *state.values.shape[2:]).float()
    readout = Readout(model, path, matrix, side="state")
    mask = torch.ones(2, L, dtype=torch.long)
    mask[1, :3] = 0
    padded = readout(tokens, attention_mask=mask)
    torch.testing.assert_close(padded[1, 3:], readout(tokens[1:, 3:])[0], rtol=1e-4, atol=1e-5)
    half = Readout(build("mamba2").bfloat16(), path, matrix, side="state")(tokens)
    exact = readout(tokens)
    assert (half - exact).norm() < 0.05 * exact.norm()


def test_a_mixer_that_is_not_registered_has_no_gradient_of_its_state():
    torch.manual_seed(0)
    model, x = wild.Stack(wild.Mixer()).eval(), wild.tokens()
    path = next(path for path, m in model.named_modules() if isinstance(m, wild.Mixer))
    readout = Readout(model, path, directions(2, 8, 3).float(), side="state")
    with pytest.raises(UnsupportedModelError, match=r"\(Mixer\) is not known to be a mixer, so no"):
        readout(x)
    assert list(states(model, x)) == [path]
    with pytest.raises(UnsupportedModelError, match=r"\(Mixer\) is measured, so no gradient"):
        readout(x)


def test_a_copy_reads_its_own_model():
    _, readout = read_of("mamba")
    other = copy.deepcopy(readout)
    with torch.no_grad():
        table = other.model.get_input_embeddings().weight
        table.copy_(table.flip(0))
    found, own = other(ids(1, L)), readout(ids(1, L))
    assert (found - own).abs().max() > 1e-3
    relevance, delta = MambaLRP(other).attribute(ids(1, L), (5, 1), return_convergence_delta=True)
    torch.testing.assert_close((relevance.sum(1) + delta).to(found), found[:, 5, 1])


@pytest.mark.parametrize(
    ("layer", "shape", "given", "error", "told"),
    [
        (1, (2, 4, 8, 4), {}, UnsupportedModelError, "keeps no state of one scan"),
        (0, (2, 9, 9, 9), {}, InputError, r"the state after a token is \(4, 8, 4\)"),
        (0, (2, 9), {}, InputError, r"expected \(F, D, N\) for a diagonal"),
        (0, (2, 4, 8, 4), {"decoder": torch.ones(2, 16)}, ValueError, "decoder has shape"),
    ],
)
def test_what_cannot_be_read_is_refused(layer, shape, given, error, told):
    model = build("qwen3_next")
    path = [path for path, _ in find_mixers(model)][layer]
    with pytest.raises(error, match=told):
        Readout(model, path, torch.ones(shape), side="state", **given)(ids(1, L))


def test_what_is_no_mixer_and_what_goes_on_from_a_cache_is_refused():
    model = build("mamba2")
    with pytest.raises(UnsupportedModelError, match="is not known to be a mixer"):
        Readout(model, "lm_head", torch.ones(2, 4, 4, 8), side="state")(ids(1, L))
    with pytest.raises(TypeError, match="directions is a function; expected a tensor"):
        Readout(model, "backbone.layers.0.mixer", lambda x: x, side="state")
    readout = Readout(model, "backbone.layers.0.mixer", torch.ones(2, 4, 4, 8), side="state")
    with torch.no_grad():
        cache = model(ids(1, L), use_cache=True).cache_params
    taken = inspect.signature(model.forward).parameters
    named = {"cache" if "cache" in taken else "cache_params": cache}
    if "cache_position" in taken:  # transformers 4 asks for it
        named["cache_position"] = torch.tensor([L])
    with pytest.raises(UnsupportedModelError, match="a cache that is not empty"):
        readout(ids(1, 1), **named)


def test_the_model_is_left_as_it_was():
    model, readout = read_of("mamba")
    before = {name: (id(m), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    mixer = dict(vars(model.backbone.layers[0].mixer))
    MambaLRP(readout).attribute(ids(1, L), (6, 1))
    readout(ids(1, L))
    assert before == {name: (id(m), len(m._forward_pre_hooks)) for name, m in model.named_modules()}
    assert mixer == vars(model.backbone.layers[0].mixer)
    assert "state" not in dict(model.named_modules())
