"""Features as a place where relevance ends and begins, against models built by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from families import build
from models import VOCABULARY, ids, tiny, without_biases, word_tokenizer
from torch import Tensor, nn

import captum_ssm
from captum_ssm import InputError, LaTIM, MambaLRP, Readout, RelevanceFlow, explain
from captum_ssm.attr import methods
from captum_ssm.interventions import TokenKnockout, circuit, knockout, scaled_features

L, F = 7, 5
FAMILIES = ("mamba", "mamba2", "jamba", "qwen3_next", "rwkv", "recurrent_gemma")


def exact() -> nn.Module:
    return tiny().double()


def directions(features: int = F, width: int = 16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(features, width, generator=generator, dtype=torch.float64)


class ByHand(nn.Module):
    """Mamba's embeddings and first blocks, and a head whose rows are the directions."""

    def __init__(self, model: nn.Module, blocks: int, head: Tensor) -> None:
        super().__init__()
        self.embeddings, self.layers = model.backbone.embeddings, model.backbone.layers[:blocks]
        self.head = nn.Linear(*head.shape[::-1], bias=False, dtype=head.dtype)
        self.head.weight = nn.Parameter(head)

    def get_input_embeddings(self) -> nn.Module:
        return self.embeddings

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class After(nn.Module):
    """What Mamba does with the residual stream after its first block."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.layers, self.norm = model.backbone.layers[1:], model.backbone.norm_f
        self.head = model.lm_head

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("name", methods())
def test_a_readout_is_the_model_whose_head_is_that_direction(name, blocks):
    model, head = exact(), directions()
    readout = Readout(model, f"backbone.layers.{blocks - 1}", head)
    hand = ByHand(model, blocks, head)
    tokens = ids(2, L)
    torch.testing.assert_close(readout(tokens), hand(tokens), rtol=0, atol=0)
    for target in ((L - 1, 2), [(3, 0), (5, 4)]):
        found, expected = (
            methods()[name](one).attribute(tokens, target) for one in (readout, hand)
        )
        assert expected.abs().max() > 0
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_edges_and_knockout_end_at_a_feature():
    model, head = exact(), directions()
    readout, hand = Readout(model, model.backbone.layers[0], head), ByHand(model, 1, head)
    tokens = ids(1, L)
    edges = RelevanceFlow(readout).edges(tokens, (6, 1))
    expected = RelevanceFlow(hand).edges(tokens, (6, 1), against=None)
    assert list(edges) == ["model.backbone.layers.0.mixer"]
    torch.testing.assert_close(edges.matrix(), expected.matrix(), rtol=1e-9, atol=1e-12)
    assert RelevanceFlow(readout).graph(tokens, (6, 1)).error < 1e-5
    found, expected = (TokenKnockout(one).attribute(tokens, (6, 1)) for one in (readout, hand))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    with circuit(readout, edges.top(100)):
        whole = readout(tokens)
    torch.testing.assert_close(whole[0, 6], hand(tokens)[0, 6], rtol=1e-9, atol=1e-12)
    with knockout(readout, sources=2, targets=6):
        found = readout(tokens)
    with knockout(hand, sources=2, targets=6):
        torch.testing.assert_close(found, hand(tokens), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("family", FAMILIES)
def test_relevance_adds_up_to_a_feature_of_every_family(family):
    model = without_biases(build(family))
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    with torch.no_grad():
        width = model(ids(1, L), output_hidden_states=True).hidden_states[-1].shape[-1]
    readout = Readout(
        model, blocks[len(blocks) - 1], directions(width=width).to(next(model.parameters()))
    )
    relevance, delta = MambaLRP(readout).attribute(ids(2, L), (5, 3), return_convergence_delta=True)
    score = readout(ids(2, L))[:, 5, 3]
    torch.testing.assert_close(relevance.sum(1) + delta, score, rtol=1e-5, atol=1e-6)
    assert (delta.abs() <= 1e-4 * relevance.abs().sum(1)).all()


def test_latim_adds_up_to_a_feature():
    readout, asked = Readout(exact(), "backbone.layers.1", directions()), dict(target=(6, 2))
    found, delta = LaTIM(readout).attribute(
        ids(1, L), **asked, aggregation="alti_logit", return_convergence_delta=True
    )
    torch.testing.assert_close(found.sum(), readout(ids(1, L))[0, 6, 2], rtol=1e-5, atol=1e-6)
    assert delta.abs().max() < 1e-5


@pytest.mark.parametrize("side", ["output", "input"])
def test_relevance_begins_at_features_as_in_the_rest_of_the_model(side):
    """The rest of the model, on the stream as its input, has gradient times input per entry."""
    model, atoms = exact(), directions(F, 16, 1)
    sae = lambda x: torch.relu(x @ directions(F, 16, 2).T)  # noqa: E731
    readout = Readout(model, "backbone.layers.0", sae, decoder=atoms, side=side)
    tokens, target = ids(2, L), 5
    found = RelevanceFlow(model).features(tokens, target, readout=readout, against=None)

    before = model.backbone.embeddings(tokens).detach()
    stream = model.backbone.layers[0](before).detach()
    relevance = MambaLRP(After(model)).attribute(stream, (L - 1, target))
    values = sae(before if side == "input" else stream)
    expected = values * ((relevance / stream) @ atoms.T)
    torch.testing.assert_close(found.values, values, rtol=1e-9, atol=1e-12)
    scale = expected.abs().max()
    torch.testing.assert_close(found.relevance / scale, expected / scale, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.total, relevance.sum(-1), rtol=0, atol=1e-5 * scale)
    best = found.top(1)[0]
    assert best.relevance == found.relevance.flatten()[found.relevance.abs().argmax()]


def test_features_of_one_layer_make_a_feature_of_a_later_one():
    model, atoms = exact(), directions(F, 16, 1)
    early = Readout(model, "backbone.layers.0", atoms, decoder=torch.linalg.pinv(atoms).T)
    late = Readout(model, "backbone.layers.1", directions())
    found = RelevanceFlow(late).features(ids(1, L), (6, 2), readout=early)
    blocks = RelevanceFlow(late).edges(ids(1, L), (6, 2)).blocks
    torch.testing.assert_close(found.total.float(), blocks[0].after, rtol=1e-5, atol=1e-6)
    later = Readout(model, "backbone.norm_f", atoms, decoder=atoms)
    with pytest.raises(captum_ssm.UnsupportedModelError, match="not run before the score is read"):
        RelevanceFlow(early).features(ids(1, L), (6, 2), readout=later)


def test_features_are_removed_and_made_larger():
    model, atoms, tokens = exact(), directions(F, 16, 1), ids(2, L)
    readout = Readout(model, "backbone.layers.0", atoms, "abcde", decoder=atoms)
    mask = torch.tensor([True, False, False, False, True])
    for scale, chosen, at, numbers in (
        (0.0, "b", None, [1]),
        (3.0, ["a", -1, 0], [2, 4], [0, 4]),  # each once
        (0.5, mask, None, [0, 4]),
        (0.5, slice(2, 4), [1], [2, 3]),
        (2.0, torch.tensor(3), None, [3]),
    ):
        stream = model.backbone.layers[0](model.backbone.embeddings(tokens)).detach()
        mask = torch.zeros(L, 1, dtype=stream.dtype)
        mask[slice(None) if at is None else at] = scale - 1
        stream = stream + mask * ((stream @ atoms[numbers].T) @ atoms[numbers])
        with torch.no_grad(), scaled_features(readout, chosen, scale, tokens=at):
            found = model(tokens).logits
        torch.testing.assert_close(
            found.double(), After(model)(stream).detach(), rtol=1e-5, atol=1e-5
        )
    assert not torch.allclose(found, model(tokens).logits)


def test_the_page_names_features(tmp_path):
    tokenizer = word_tokenizer({f"w{i}": i for i in range(VOCABULARY)})
    names = ["a verb", "a noun", "red", "blue", "end"]
    readout = Readout(exact(), "backbone.layers.0", directions(), names)
    found = explain(readout, tokenizer, "w3 w4 w5", target="a noun", position=[1, 2])
    outputs = found.examples[0].outputs
    assert [one.answers[one.chosen].text for one in outputs] == ["a noun", "a noun"]
    found.to_html(tmp_path / "why.html")
    assert "a noun" in (tmp_path / "why.html").read_text(encoding="utf-8")
    # As many features as words are features still.
    many = Readout(exact(), "backbone.layers.0", directions(VOCABULARY))
    (output,) = explain(many, tokenizer, "w3 w4 w5", position=1).examples[0].outputs
    assert output.answers[output.chosen].text.startswith("feature ")


def test_the_model_is_left_as_it_was():
    model = exact()
    before = {name: (id(m), len(m._forward_hooks)) for name, m in model.named_modules()}
    readout = Readout(model, "backbone.layers.0", directions())
    MambaLRP(readout).attribute(ids(1, L), (6, 1))
    readout(ids(1, L))
    assert before == {name: (id(m), len(m._forward_hooks)) for name, m in model.named_modules()}
    assert not hasattr(model.config, "problem_type") or model.config.problem_type is None


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (dict(layer="backbone.layer.0"), ValueError, "Did you mean"),
        (dict(layer=nn.Linear(1, 1)), ValueError, "not a part of the model"),
        (dict(names=["a"]), ValueError, "5 and 1 features"),
        (dict(decoder=torch.ones(3, 16)), ValueError, "5 and 3 features"),
        (dict(side="middle"), ValueError, "expected 'output', 'input' or 'state'"),
        (dict(directions=3), TypeError, "expected a matrix"),
        (dict(bias=torch.ones(2)), ValueError, r"\(F, E\) and \(F,\)"),
        (dict(model=SimpleNamespace()), TypeError, "expected a torch.nn.Module"),
    ],
)
def test_what_cannot_be_read_is_refused(change, error, told):
    given = dict(model=exact(), layer="backbone.layers.0", directions=directions()) | change
    with pytest.raises(error, match=told):
        Readout(**given)


def test_what_a_run_cannot_be_read_at_is_refused():
    model = exact()
    with pytest.raises(InputError, match="expected as many"):
        Readout(model, "backbone.layers.0", directions(width=3))(ids(1, L))
    with pytest.raises(InputError, match="one row of features per token"):
        Readout(model, "backbone.layers.0", lambda x: x.sum(1))(ids(1, L))
    with pytest.raises(InputError, match="did not run"):
        Readout(model, "backbone.layers", directions())(ids(1, L))
    readout = Readout(model, "backbone.layers.0", directions())
    with pytest.raises(ValueError, match="has no decoder"):
        RelevanceFlow(model).features(ids(1, L), 5, readout=readout)
    with pytest.raises(ValueError, match="no feature has the name"):
        readout.index("a")
    readout = Readout(model, "backbone.layers.0", directions(), decoder=directions())
    with (
        pytest.raises(captum_ssm.UnsupportedModelError, match="did not run"),
        scaled_features(readout, 0),
    ):
        pass
    with pytest.raises(TypeError, match="features is"), scaled_features(readout, [1.5]):
        pass
    with pytest.raises(ValueError, match="outside the 5 features"), scaled_features(readout, 9):
        pass
