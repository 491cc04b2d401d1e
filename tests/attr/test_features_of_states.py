"""Relevance that begins at features of a recurrent state, against plain loops and edges."""

from __future__ import annotations

import pytest
import torch
import wild
from families import FAMILIES, TRANSFORMERS_4, WITHOUT_STATE, build
from models import ids, normal
from state_loops import LOOPS
from torch import Tensor, nn

from captum_ssm import InputError, Readout, RelevanceFlow, UnsupportedModelError
from captum_ssm.interventions import knockout, scaled_features, states
from captum_ssm.mixers import find_mixers

L = 7
SHIFTED = pytest.mark.filterwarnings("ignore:.*reads neighboring tokens before its scan")


def entries(path: str, model: nn.Module, state: Tensor) -> Readout:
    """A feature for each entry of the state, which it reads and writes."""
    shape = state.shape[2:]
    each = torch.eye(shape.numel()).to(state).unflatten(1, shape)
    return Readout(model, path, each, decoder=each, side="state")


def first_of(family: str) -> tuple[nn.Module, str, Tensor]:
    """A model, its first mixer, and that one's states after all tokens."""
    model = exact(family)
    path, found = next(iter(states(model, ids(2, L), positions=None).items()))
    return model, path, found.values


def exact(family: str) -> nn.Module:
    """A model in double precision, which experts do not have."""
    model = build(family)
    has_experts = any("experts" in name for name, _ in model.named_modules())
    return model if has_experts else model.double()


def close(x: Tensor, least: float = 1e-8) -> dict[str, float]:
    rtol = 1e-3 if x.dtype == torch.float32 else least
    return dict(rtol=rtol, atol=rtol / 10 * float(x.detach().abs().max()))


@SHIFTED
@pytest.mark.parametrize("family", LOOPS)
def test_it_is_the_state_times_its_gradient_in_a_loop_with_constant_coefficients(family):
    model, path, state = first_of(family)
    nodes: list[Tensor] = []

    def keep(t: int, h: Tensor) -> Tensor:
        nodes.append(h)
        return h

    x = model.get_input_embeddings()(ids(2, L)).detach().requires_grad_()
    _, y = LOOPS[family](model, x, torch.Tensor.detach, keep)
    direction = normal(1, y.shape[-1]).to(y)
    score = (y @ direction.T)[:, 5, 0]
    slopes = torch.autograd.grad(score.sum(), nodes, allow_unused=True)
    slopes = torch.stack([0 * h if g is None else g for h, g in zip(nodes, slopes, strict=True)], 1)
    assert slopes[:, :5].flatten(1).norm(dim=1).min() > 0
    explained = Readout(model, path, direction)
    # In the models themselves some norms and scans are of single precision.
    torch.testing.assert_close(explained(ids(2, L))[:, 5, 0], score, **close(score, 1e-5))

    readout = entries(path, model, state)
    found = RelevanceFlow(explained).features(ids(2, L), (5, 0), readout=readout)
    torch.testing.assert_close(found.values, state.flatten(2), **close(state))
    expected = state * slopes
    torch.testing.assert_close(found.relevance, expected.flatten(2), **close(expected, 1e-6))
    assert found.rest.abs().max() <= 1e-6 * found.total.abs().max()

    # The features may be of some directions only, and written by others.
    read, written = (normal(3, *state.shape[2:], seed=k).to(state) for k in (1, 2))
    some = Readout(model, path, read, bias=torch.ones(3), decoder=written, side="state")
    part = RelevanceFlow(explained).features(ids(2, L), (5, 0), readout=some)
    values = state.flatten(2) @ read.flatten(1).T + 1
    expected = values * (slopes.flatten(2) @ written.flatten(1).T)
    torch.testing.assert_close(part.relevance, expected, **close(expected, 1e-6))
    torch.testing.assert_close(part.total, found.total, **close(found.total))


@SHIFTED
@pytest.mark.parametrize("layer", [0, -1])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in WITHOUT_STATE])
def test_it_adds_up_to_the_edges_that_pass_over_the_token(family, layer):
    model, tokens = exact(family), ids(2, L)
    path, state = list(states(model, tokens, positions=None).items())[layer]
    atoms = normal(3, *state.values.shape[2:]).to(state.values)
    readout = Readout(model, path, atoms, decoder=atoms, side="state")
    found = RelevanceFlow(model).features(tokens, 5, readout=readout)
    edges = RelevanceFlow(model).edges(tokens, 5)[path].matrix()
    later = int(family == "rwkv")  # which reads its state before it writes
    over = [edges[:, t + later :, : t + 1].sum((1, 2)) for t in range(L)]
    over = torch.stack(over, 1)
    torch.testing.assert_close(found.total, over, **close(over))
    assert over.abs().max() > 0
    every = entries(path, model, state.values)
    whole = RelevanceFlow(model).features(tokens, 5, readout=every)
    torch.testing.assert_close(whole.relevance.sum(-1), over, **close(over))


@SHIFTED
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in WITHOUT_STATE])
def test_without_its_state_a_token_passes_on_no_edge(family):
    model, tokens, t = exact(family), ids(2, L), 3
    path, state = list(states(model, tokens, positions=None).items())[-1]
    every = entries(path, model, state.values)
    later = int(family == "rwkv")
    with torch.no_grad():
        with knockout(model, sources=slice(t + 1), targets=slice(t + later, L), layers=path):
            expected = model(tokens).logits
        with scaled_features(every, range(len(every.names)), tokens=t):
            found = model(tokens).logits
        torch.testing.assert_close(found, expected, **close(expected, 1e-5))
        assert (found - model(tokens).logits).abs().max() > 1e-3


@SHIFTED
@pytest.mark.parametrize(
    ("scale", "features", "chosen", "tokens"),
    [(0.0, "b", [1], 3), (3.0, ["a", -1], [0, 2], [2, 4]), (0.0, 0, [0], None)],
)
@pytest.mark.parametrize("family", LOOPS)
def test_features_of_a_state_are_removed_and_made_larger(family, scale, features, chosen, tokens):
    model, path, state = first_of(family)
    x = model.get_input_embeddings()(ids(2, L)).detach()
    read, written = (normal(3, *state.shape[2:], seed=k).to(state) / 3 for k in (1, 2))
    readout = Readout(model, path, read, ["a", "b", "c"], decoder=written, side="state")
    at = range(L) if tokens is None else torch.tensor(tokens).reshape(-1).tolist()

    def change(t: int, h: Tensor) -> Tensor:
        values = h.flatten(1) @ read[chosen].flatten(1).T * (t in at)
        return h + (scale - 1) * torch.tensordot(values, written[chosen], 1)

    returned = Readout(model, path, torch.eye(x.shape[-1]).to(x))
    with torch.no_grad():
        _, expected = LOOPS[family](model, x, change=change)
        with scaled_features(readout, features, scale, tokens=tokens):
            found, logits = returned(ids(2, L)), model(ids(2, L)).logits
        torch.testing.assert_close(found, expected, **close(expected, 1e-5))
        assert (found - returned(ids(2, L))).abs().max() > 1e-3
        assert (logits - model(ids(2, L)).logits).abs().max() > 1e-3


@pytest.mark.skipif(TRANSFORMERS_4, reason="transformers 4 has another cache in every family")
@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next"])
def test_what_is_removed_is_what_a_changed_cache_leaves_out(family):
    """The last mixer: the model itself goes on from a state that was changed in its cache."""
    model, tokens, t = build(family), ids(1, L), 3
    path, state = list(states(model, tokens, positions=t).items())[-1]
    layer = [name for name, _ in find_mixers(model)].index(path)
    atom = normal(1, *state.values.shape[2:]).to(state.values)
    atom = atom / atom.norm()
    readout = Readout(model, path, atom, decoder=atom, side="state")
    with torch.no_grad():
        output = model(tokens[:, : t + 1], use_cache=True)
        name = "cache" if "cache" in output else "cache_params"  # before transformers 5.24
        cache = output[name]
        kept = cache.get_recurrent_state(layer)
        feature = (state.values[:, 0] * atom).sum() * atom[0]
        kept -= feature.mT if family == "mamba2" else feature
        expected = [
            model(tokens[:, s : s + 1], **{name: cache}, use_cache=True).logits[:, 0]
            for s in range(t + 1, L)
        ]
        with scaled_features(readout, 0, tokens=t):
            found = model(tokens).logits
    torch.testing.assert_close(found[:, t + 1 :], torch.stack(expected, 1), rtol=1e-4, atol=1e-5)
    assert (found - model(tokens).logits)[:, t + 1 :].abs().max() > 1e-4


def test_what_a_function_finds_in_a_state_is_where_relevance_begins():
    model, path, state = first_of("mamba2")
    read, written = (normal(3, *state.shape[2:], seed=k) for k in (1, 2))

    def encode(flat: Tensor) -> Tensor:
        return torch.relu(flat @ read.flatten(1).T)

    readout = Readout(model, path, encode, decoder=written, side="state")
    found = RelevanceFlow(model).features(ids(2, L), 5, readout=readout)
    linear = RelevanceFlow(model).features(
        ids(2, L), 5, readout=Readout(model, path, read, decoder=written, side="state")
    )
    assert 0 < (linear.values > 0).sum() < linear.values.numel()
    torch.testing.assert_close(found.values, linear.values.relu())
    torch.testing.assert_close(found.relevance, linear.relevance * (linear.values > 0))
    torch.testing.assert_close(found.total, linear.total)
    active = linear.values[0, 3] > 0
    assert active.any()
    assert not active.all()
    with torch.no_grad():
        whole = model(ids(1, L)).logits
        for k in range(3):
            with scaled_features(readout, k, tokens=3):
                changed = model(ids(1, L)).logits
            assert torch.equal(changed, whole) == (not active[k])
    with pytest.raises(InputError, match="read by a function, at which relevance begins"):
        readout(ids(2, L))


def test_the_state_of_a_mixer_that_is_not_registered_has_features():
    torch.manual_seed(0)
    model, x = wild.Stack(wild.Mixer()).eval(), wild.tokens()
    (path, state), *_ = states(model, x, positions=None).items()
    readout = entries(path, model, state.values)
    found = RelevanceFlow(model).features(x, (5, 1), readout=readout, against=None)
    edges = RelevanceFlow(model).edges(x, (5, 1), against=None)[path].matrix()
    over = torch.stack([edges[:, t:, : t + 1].sum((1, 2)) for t in range(x.shape[1])], 1)
    torch.testing.assert_close(found.relevance.sum(-1), over, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        with knockout(model, sources=slice(4), targets=slice(3, None), layers=path):
            expected = model(x)
        with scaled_features(readout, range(len(readout.names)), tokens=3):
            without = model(x)
    torch.testing.assert_close(without, expected, rtol=1e-4, atol=1e-6)
    assert (without - model(x))[:, 3:].abs().max() > 1e-3


def test_features_of_a_state_make_a_feature_of_a_later_state():
    model, tokens = build("mamba2"), ids(1, L)
    early, late = states(model, tokens, positions=None).items()
    atoms = normal(2, *late[1].values.shape[2:]).float()
    later = Readout(model, late[0], atoms, side="state")
    found = RelevanceFlow(later).features(
        tokens, (5, 1), readout=entries(early[0], model, early[1].values)
    )
    edges = RelevanceFlow(later).edges(tokens, (5, 1))[f"model.{early[0]}"].matrix()
    over = torch.stack([edges[:, t:, : t + 1].sum((1, 2)) for t in range(L)], 1)
    torch.testing.assert_close(found.total, over, rtol=1e-4, atol=1e-5)
    with pytest.raises(UnsupportedModelError, match="is not a mixer that is run before the score"):
        RelevanceFlow(later).features(
            tokens, (5, 1), readout=entries(late[0], model, late[1].values)
        )


@pytest.mark.parametrize(
    ("path", "shape", "error", "told"),
    [
        ("model.layers.1.self_attn", (2, 4, 8, 4), UnsupportedModelError, "keeps no state of one"),
        ("model.layers.0.linear_attn", (2, 4, 8, 5), InputError, r"a token is \(4, 8, 4\)"),
        ("model.layers.0.mlp", (2, 4, 8, 4), UnsupportedModelError, "is not a mixer that is run"),
    ],
)
def test_states_without_features_are_refused(path, shape, error, told):
    model = build("qwen3_next")
    readout = Readout(model, path, torch.ones(shape), decoder=torch.ones(shape), side="state")
    with pytest.raises(error, match=told):
        RelevanceFlow(model).features(ids(1, L), 5, readout=readout)
    expected = ValueError if "mlp" in path else error
    with pytest.raises(expected), scaled_features(readout, 0):
        model(ids(1, L))


def test_a_readout_of_a_state_needs_shapes_of_one_state():
    model = build("mamba2")
    atoms = torch.ones(2, 4, 4, 8)
    for given, told in (
        (dict(decoder=torch.ones(2, 16)), r"decoder has shape \(2, 16\); expected \(F, D, N\)"),
        (dict(decoder=torch.ones(2, 4, 8, 4)), "expected one state's shape in both"),
        (dict(decoder=torch.ones(3, 4, 4, 8)), "2 and 3 features"),
    ):
        with pytest.raises(ValueError, match=told):
            Readout(model, "backbone.layers.0.mixer", atoms, side="state", **given)
    without = Readout(model, "backbone.layers.0.mixer", atoms, side="state")
    with pytest.raises(ValueError, match="has no decoder"):
        RelevanceFlow(model).features(ids(1, L), 5, readout=without)
    with pytest.raises(ValueError, match="has no decoder"), scaled_features(without, 0):
        pass
