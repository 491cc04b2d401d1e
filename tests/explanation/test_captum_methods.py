"""Captum's methods as rows: what Captum returns, by name and as objects, next to ours."""

import captum.attr
import pytest
import torch
from families import build
from models import VOCABULARY, tiny, word_tokenizer
from vision_models import vim

from captum_ssm import MambaLRP, explain
from captum_ssm.explanation.make.relevance.captum_methods import NAMED
from captum_ssm.explanation.make.relevance.methods import method_names
from captum_ssm.explanation.make.relevance.removal import Replacement

TEXT = "w3 w4 w5 w6 w7"
IDS = torch.tensor([[3, 4, 5, 6, 7]])


@pytest.fixture(scope="module")
def words():
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    return word_tokenizer(vocabulary, unk_token="w36", pad_token="w35")


def logit_of(model, token=8):
    return lambda ids: model(ids, use_cache=False).logits[:, -1, token]


def row(model, words, methods, **options):
    return torch.from_numpy(
        explain(model, words, TEXT, target="w8", methods=methods, **options).relevance()[:5].copy()
    )


def test_gradient_methods_are_captums_layer_methods_at_the_embedding(model, words):
    table, score = model.get_input_embeddings(), logit_of(model)
    found = row(model, words, {"integrated-gradients": {"baselines": "pad", "n_steps": 20}})
    layer = captum.attr.LayerIntegratedGradients(score, table)
    expected = layer.attribute(IDS, baselines=torch.full_like(IDS, 35), n_steps=20)
    torch.testing.assert_close(found, expected[0].sum(-1).detach().float(), rtol=1e-4, atol=1e-6)
    found = row(model, words, "input-x-gradient")
    expected = captum.attr.LayerGradientXActivation(score, table).attribute(IDS)
    torch.testing.assert_close(found, expected[0].sum(-1).detach(), rtol=1e-4, atol=1e-6)


def test_ablation_is_the_score_minus_that_without_the_token(model, words):
    score = logit_of(model)
    with torch.no_grad():
        drops = []
        for k in range(5):
            without = IDS.clone()
            without[0, k] = 36  # what the tokenizer has for unknown words
            drops.append(score(IDS) - score(without))
    expected = torch.cat(drops)
    for name in ("feature-ablation", captum.attr.FeatureAblation(model)):
        torch.testing.assert_close(row(model, words, name), expected, rtol=1e-4, atol=1e-6)
    padded = row(model, words, {"feature-ablation": {"baselines": 35}})
    assert (padded - expected).abs().max() > 1e-3


def test_shapley_values_add_up_to_what_all_tokens_change(model, words):
    score = logit_of(model)
    with torch.no_grad():
        change = score(IDS) - score(torch.full_like(IDS, 36))
    for name in ("shapley-value-sampling", captum.attr.ShapleyValues(model)):
        assert abs(row(model, words, name).sum() - change) < 1e-4
    assert abs(row(model, words, {"kernel-shap": {"n_samples": 200}}).sum() - change) < 1e-3


def test_the_delta_is_the_score_above_the_baseline_minus_the_sum(model, words):
    explained = explain(model, words, TEXT, target="w8", methods="integrated-gradients")
    (example,) = explained.examples
    table = model.get_input_embeddings()
    with torch.no_grad():
        whole = logit_of(model)(IDS)
        other = table(torch.full_like(IDS, Replacement.of(words).token))
        hook = table.register_forward_hook(lambda module, args, output: other)
        change = whole - logit_of(model)(IDS)
        hook.remove()
    missing = change - float(example.relevance["integrated-gradients"][0].sum())
    assert abs(float(missing) - example.deltas["integrated-gradients"][0]) < 1e-4
    assert not explained.methods[0].adds_up


def test_a_path_of_too_few_steps_is_told(model, words):
    methods = {"integrated-gradients": {"n_steps": 1}}
    with pytest.warns(UserWarning, match=r"with 1 steps it does not follow.*'n_steps': 4"):
        explain(model, words, TEXT, target="w8", methods=methods)


def test_contrasts_and_positions(model, words):
    methods = ["saliency", "input-x-gradient", "feature-ablation", "kernel-shap"]
    explained = explain(
        model, words, TEXT, target="w8 w9", against="w8 w11", methods=methods, alternatives=0
    )
    for name in ("input-x-gradient", "feature-ablation"):  # linear in the score
        parts = [explained.relevance(name, output=1, answer=one) for one in ("w9", "w11")]
        contrast = explained.relevance(name, output=1, against="w11")
        assert abs(contrast - (parts[0] - parts[1])).max() < 1e-5
    for name in methods:  # the first output does not see the token after it
        assert (explained.relevance(name, output=0)[5:] == 0).all()


def test_all_explains_by_all_and_leaves_out_what_fails(model, words, monkeypatch):
    explained = explain(model, words, TEXT, methods="all")
    assert [method.name for method in explained.methods] == method_names()
    assert set(NAMED) < set(method_names())
    assert "the model was given" in explained.methods[-1].note

    for said, told in (("no such thing",) * 2, ("", "NotImplementedError")):

        def fails(self, *args, said=said, **options):
            raise NotImplementedError(said)

        monkeypatch.setattr(captum.attr.Saliency, "attribute", fails)
        explained = explain(model, words, TEXT, methods="all")
        assert "saliency" not in [method.name for method in explained.methods]
        assert explained.settings["notes"] == [f"without saliency: {told}"]
    with pytest.raises(NotImplementedError):
        explain(model, words, TEXT, methods=["mamba-lrp", "saliency"])


def test_objects_classes_and_wrappers_stay_as_they_are(model, words):
    given = captum.attr.IntegratedGradients(model)
    noisy = captum.attr.NoiseTunnel(captum.attr.Saliency(model))
    layer = captum.attr.LayerIntegratedGradients(model, model.get_input_embeddings())
    several = [given, noisy, layer, MambaLRP(model), MambaLRP, "integrated-gradients"]
    before = torch.random.get_rng_state()
    explained = explain(model, words, TEXT, methods=several)
    assert torch.equal(before, torch.random.get_rng_state())
    names = [method.name for method in explained.methods]
    assert names[:3] == ["integrated-gradients", "noise-tunnel", "layer-integrated-gradients"]
    assert names[3:] == ["mamba-lrp", "mamba-lrp-2", "integrated-gradients-2"]
    assert given.forward_func is model
    assert noisy.attribution_method.forward_func is model
    assert not model.get_input_embeddings()._forward_hooks
    first, again = (explained.relevance(name) for name in (names[0], names[5]))
    assert (first == again).all()


def test_images():
    image, model = torch.rand(3, 16, 16), vim()
    methods = ["saliency", "integrated-gradients", "feature-ablation", "occlusion"]
    explained = explain(model, image, target=1, methods=methods, alternatives=0, validate=True)
    for name in methods:
        assert explained.relevance(name).shape == (16, 16)
    rows, columns = explained.examples[0].grid
    ablated = torch.from_numpy(explained.relevance("feature-ablation").copy())
    patches = ablated.unfold(0, 16 // rows, 16 // rows).unfold(1, 16 // columns, 16 // columns)
    assert (patches.flatten(2).std(-1) < 1e-6).all()  # a patch is removed as a whole
    mean = image.mean((1, 2), keepdim=True)
    without = image.clone()
    without[:, : 16 // rows, : 16 // columns] = mean
    with torch.no_grad():
        drop = model(image[None]) - model(without[None])
    assert abs(patches[0, 0].sum() - drop[0, 1]) < 1e-4
    assert set(explained.examples[0].validation.curves) == set(methods)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        (lambda model: captum.attr.DeepLift(model), "DeepLift cannot be a row of an explanation"),
        (
            lambda model: captum.attr.IntegratedGradients(tiny()),
            "IntegratedGradients was made with another model",
        ),
        (
            lambda model: captum.attr.IntegratedGradients(logit_of(model)),
            r"another model or function, function; expected .* IntegratedGradients\(model\)",
        ),
        (lambda model: MambaLRP(tiny()), "MambaLRP was made with another model"),
        (lambda model: "MambaLrp", "Did you mean 'mamba-lrp'"),
        (lambda model: {"saliency": {"steps": 3}}, "holds the option 'steps'; expected abs"),
        (
            lambda model: {"integrated-gradients": {"baselines": "mask"}},
            "the baseline is 'mask', and the tokenizer has no such token",
        ),
    ],
)
def test_what_cannot_be_a_row_says_why(methods, message, model, words):
    with pytest.raises(ValueError, match=message):
        explain(model, words, TEXT, methods=methods(model))


# Its routers of experts jump on the path.
@pytest.mark.filterwarnings("ignore:Integrated Gradients adds up to")
def test_a_hybrid():
    explained = explain(build("jamba"), IDS, methods=["integrated-gradients", "occlusion"])
    assert all(abs(explained.relevance(m.name)).max() > 0 for m in explained.methods)
