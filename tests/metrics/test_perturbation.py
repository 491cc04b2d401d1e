"""The faithfulness harness: against scikit-learn, and against cases worked by hand."""

import math

import numpy as np
import pytest
import torch
from captum.attr import InputXGradient
from models import ids, randomize, tiny
from scipy.stats import spearmanr
from sklearn import metrics as sklearn_metrics
from torch import Tensor, nn

from captum_ssm import MambaAttribution, hidden_attention
from captum_ssm.metrics import (
    Curve,
    Interval,
    activation,
    average_precision,
    bootstrap,
    cls_influence,
    delta_af,
    flipping,
    knockout_agreement,
    layer_knockout,
    oversmoothing,
    perturbation,
    position_bias,
    pruning,
    segmentation,
    token_similarity,
)
from captum_ssm.metrics.perturbation import blurred, removed
from captum_ssm.models import VisionMamba

UNK = 9


def vote(tokens: Tensor) -> Tensor:
    """Two logits: how many tokens are 1, and how many are 2."""
    return torch.stack([(tokens == 1).sum(1), (tokens == 2).sum(1)], 1).double()


def spied(classify, seen: list[Tensor]):
    """The classifier, whose inputs are kept in ``seen``."""
    return lambda x: seen.append(x) or classify(x)


def test_positive_and_negative_perturbation_by_hand():
    tokens = torch.tensor([[1, 1, 2, 1, 2]])
    relevance = torch.tensor([[5.0, 4.0, 1.0, 3.0, 2.0]])
    options = {"removal": UNK, "shares": (0.2, 0.4, 0.6, 0.8)}
    label = torch.tensor([0])
    positive = perturbation(vote, tokens, relevance, label, **options)
    # 1 1 2 1 2 loses the ones first: 2:2 (a tie goes to the first class), 1:2, 0:2, 0:1.
    assert positive.values.tolist() == [[1, 0, 0, 0]]
    assert float(positive.areas) == pytest.approx(0.5 / 3)
    negative = perturbation(vote, tokens, relevance, label, order="negative", **options)
    assert negative.values.tolist() == [[1, 1, 1, 1]]
    assert float(negative.areas) == 1


def test_flipping_and_delta_af_by_hand():
    tokens = torch.tensor([[1, 2, 1, 2]])
    relevance = torch.tensor([[2.0, -1.0, 3.0, -2.0]])
    options = {"removal": UNK, "shares": (0.0, 0.25, 0.5, 0.75, 1.0)}
    target = torch.tensor([0])
    most = flipping(vote, tokens, relevance, target, **options)
    assert most.values.tolist() == [[2, 1, 0, 0, 0]]
    least = flipping(vote, tokens, relevance, target, order="negative", **options)
    assert least.values.tolist() == [[2, 2, 2, 1, 0]]
    area = delta_af(vote, tokens, relevance, target, **options)
    assert area.values.tolist() == [[0, 1, 2, 1, 0]]
    assert float(area.areas) == 1
    assert float(delta_af(vote, tokens, -relevance, target, **options).areas) == -1
    likely = flipping(vote, tokens, relevance, target, probability=True, **options)
    assert float(likely.values[0, 2]) == pytest.approx(1 / (1 + math.exp(2)))


def test_activation_and_pruning_by_hand():
    tokens = torch.tensor([[1, 2, 1, 2]])
    relevance = torch.tensor([[4.0, 1.0, 3.0, -2.0]])
    shares = (0.0, 0.5, 1.0)
    curve = activation(vote, tokens, relevance, torch.tensor([0]), removal=UNK, shares=shares)
    expected = [0.5, 1 / (1 + math.exp(-2)), 0.5]
    assert curve.values[0].tolist() == pytest.approx(expected)
    area = torch.trapezoid(torch.tensor(expected), torch.tensor(shares))
    assert float(curve.areas) == pytest.approx(float(area))
    # By magnitude: token 1 goes first, then token 3.
    curve = pruning(vote, tokens, relevance, removal=UNK, shares=(0.0, 0.25, 0.5, 1.0))
    assert curve.values.tolist() == [[0, 0.5, 2, 4]]


def test_curves_are_trapezoids_of_their_span():
    torch.manual_seed(0)
    shares, values = torch.linspace(0.1, 0.9, 9), torch.rand(4, 9)
    expected = [sklearn_metrics.auc(shares.numpy(), v) / 0.8 for v in values.numpy()]
    curve = Curve(shares, values)
    assert curve.areas.tolist() == pytest.approx(expected, rel=1e-5)
    assert curve.estimate().value == pytest.approx(np.mean(expected), rel=1e-5)
    assert Curve(shares[:1], values[:, :1]).areas.tolist() == values[:, 0].tolist()


def test_padding_stays_and_does_not_count():
    tokens = torch.tensor([[1, 2, 1, 2, 7, 7], [1, 1, 1, 2, 1, 2]])
    relevance = torch.tensor([[4.0, 1, 3, 2, 99, -99], [6.0, 5, 4, 3, 2, 1]])
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    seen, target = [], torch.zeros(2).long()
    options = {"removal": UNK, "shares": (0.5,), "mask": mask}
    for order in ("positive", "negative"):
        perturbation(spied(vote, seen), tokens, relevance, target, order=order, **options)
    assert seen[0].tolist() == [[9, 2, 9, 2, 7, 7], [9, 9, 9, 2, 1, 2]]
    assert seen[1].tolist() == [[1, 9, 1, 9, 7, 7], [1, 1, 1, 9, 9, 9]]


def test_removal_by_mask():
    relevance = torch.tensor([[4.0, 1, 3, 2, 99], [5, 4, 3, 2, 1]])
    padding = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    model, tokens = tiny("mamba"), ids(2, 5)
    seen = []

    def last(x, left):
        seen.append(left.tolist())
        assert len(x) == len(left) == 1
        return model(x, attention_mask=left).logits[:, -1]

    options = {"removal": "mask", "shares": (0.0, 0.5), "batch_size": 1}
    curve = pruning(last, tokens, relevance, mask=padding, **options)
    assert seen[2:] == [[[1, 1, 1, 1, 0]], [[1, 1, 1, 1, 1]], [[1, 0, 1, 0, 0]], [[1, 1, 1, 0, 0]]]
    left = torch.tensor([[1, 0, 1, 0, 0], [1, 1, 1, 0, 0]])
    with torch.no_grad():
        whole, less = (model(tokens, attention_mask=m).logits[:, -1] for m in (padding, left))
    torch.testing.assert_close(curve.values[:, 1].float(), (whole - less).square().mean(-1))
    assert not curve.values[:, 0].any()
    # Embeddings too; an image has no mask.
    x, target = torch.randn(2, 5, 4), torch.zeros(2).long()
    found = activation(lambda x, left: (x * left[..., None]).sum(1), x, relevance, target,
                       removal="mask", shares=(0.0,))  # fmt: skip
    assert found.values.tolist() == [[0.25], [0.25]]
    with pytest.raises(ValueError, match="'mask' for tokens"):
        perturbation(vote, torch.rand(2, 3, 4, 4), torch.rand(2, 4, 4), target, removal="mask")


def test_ties_fall_at_random_and_by_seed():
    tokens, relevance, target = torch.ones(200, 10).long(), torch.zeros(200, 10), torch.zeros(200)
    seen, options = [], {"removal": UNK, "shares": (0.3,)}
    for seed in (0, 0, 1):
        perturbation(spied(vote, seen), tokens, relevance, target.long(), seed=seed, **options)
    gone = [(x == UNK).double().mean(0) for x in seen]
    assert torch.equal(gone[0], gone[1])
    assert not torch.equal(gone[0], gone[2])
    assert (gone[0] - 0.3).abs().max() < 0.15


class Bright(nn.Module):
    """Whether the left half of an image is brighter, per pixel summed over color channels."""

    def forward(self, images: Tensor) -> Tensor:
        left, right = images.sum(1).chunk(2, -1)
        return torch.stack([left.sum((1, 2)), right.sum((1, 2))], 1)


def test_patches_of_images():
    torch.manual_seed(0)
    images = torch.rand(3, 2, 6, 10)
    relevance = torch.randn(3, 2, 6, 10)
    seen, target = [], torch.zeros(3).long()
    bright = spied(Bright(), seen)
    perturbation(bright, images, relevance, target, shares=(0.4,), patch=(3, 2))
    pooled = relevance.sum(1).unflatten(1, (2, 3)).unflatten(3, (5, 2)).mean((2, 4))
    chosen = pooled.flatten(1).topk(4).indices
    gone = torch.zeros(3, 10).scatter(1, chosen, 1).view(3, 2, 5).bool()
    gone = gone.repeat_interleave(3, 1).repeat_interleave(2, 2)[:, None].expand_as(images)
    assert torch.equal(seen[0], torch.where(gone, 0, images))
    # Squares that do not fit end at the border.
    perturbation(bright, images, relevance, target, shares=(1.0,), patch=4)
    assert not seen[1].any()


def test_batches_and_embeddings():
    torch.manual_seed(0)
    x, relevance = torch.randn(5, 7, 4), torch.randn(5, 7, 4)

    def classify(x):
        assert len(x) <= 2 or len(x) == 5
        return x.cumsum(1).tanh().sum(1)

    labels = classify(x).argmax(1)
    for function in (perturbation, flipping, delta_af):
        together, apart = (
            function(classify, x, relevance, labels, batch_size=size).values for size in (None, 2)
        )
        torch.testing.assert_close(together, apart)
        spread = function(classify, x, relevance.sum(-1), labels).values
        torch.testing.assert_close(together, spread)


def test_shares_may_come_from_a_generator():
    tokens, relevance, target = ids(2, 5), torch.rand(2, 5), torch.tensor([0, 1])
    for score in (perturbation, flipping, delta_af, activation):
        run = vote, tokens, relevance, target
        listed, generated = (score(*run, removal=UNK, shares=s) for s in ([0, 0.4], iter([0, 0.4])))
        assert torch.equal(generated.shares, listed.shares)
        assert torch.equal(generated.values, listed.values)
    curve = pruning(vote, tokens, relevance, removal=UNK, shares=iter([0, 0.4]))
    assert curve.values.shape == (2, 2)


def test_what_replaces_the_removed():
    torch.manual_seed(0)
    images = torch.rand(2, 3, 12, 16)
    assert not removed(images, "zero").any()
    mean = removed(images, "mean")
    torch.testing.assert_close(mean[1, 2, 3, 4], images[1, 2].mean())
    assert float(removed(images, -0.5).unique()) == -0.5
    torch.testing.assert_close(removed(images, lambda x: x + 1), images + 1)
    torch.testing.assert_close(removed(images, torch.ones(1, 3, 1, 1)), torch.ones_like(images))
    soft = removed(images, "blur")
    assert soft.var() < 0.2 * images.var()
    torch.testing.assert_close(soft.mean(), images.mean(), atol=0.02, rtol=0)
    torch.testing.assert_close(blurred(torch.ones(1, 3, 5, 5)), torch.ones(1, 3, 5, 5))
    embeddings = torch.rand(2, 5, 4)
    torch.testing.assert_close(removed(embeddings, "mean")[0, 3], embeddings[0].mean(0))
    assert removed(ids(), UNK).unique().tolist() == [UNK]


def test_a_perfect_order_beats_chance_and_its_reverse():
    torch.manual_seed(0)
    images = torch.rand(30, 3, 8, 8)
    labels = Bright()(images).argmax(1)
    gradient = InputXGradient(Bright()).attribute(images.clone().requires_grad_(), target=labels)
    sign = 1 - 2 * labels.view(-1, 1, 1, 1).double()
    exact = gradient + 0 * sign  # the other half has no gradient
    areas = {
        name: perturbation(Bright(), images, relevance, labels).estimate()
        for name, relevance in (
            ("exact", exact), ("random", torch.randn(images.shape)), ("reverse", -exact))
    }  # fmt: skip
    assert areas["exact"].high < areas["random"].low < areas["reverse"].low
    area = delta_af(Bright(), images, exact.double(), labels, patch=2).estimate()
    assert area.low > 0


def test_errors_of_perturbation():
    tokens, label = ids(2, 5), torch.zeros(2).long()
    relevance = torch.zeros(2, 5)
    calls = [
        ({"order": "up"}, "'positive' or 'negative'"),
        ({"shares": (0.5, 1.5)}, r"in \[0, 1\]"),
        ({"removal": "zero"}, "the UNK id"),
    ]
    for options, message in calls:
        with pytest.raises(ValueError, match=message):
            perturbation(vote, tokens, relevance, label, **({"removal": UNK} | options))
    with pytest.raises(ValueError, match="in the inputs' shape"):
        perturbation(vote, tokens, relevance[:, :4], label, removal=UNK)
    with pytest.raises(ValueError, match="NaN or Inf"):
        perturbation(vote, tokens, relevance / 0, label, removal=UNK)
    with pytest.raises(ValueError, match="one row per example"):
        perturbation(lambda x: x, tokens[..., None].expand(-1, -1, 3).double(), relevance, label)
    with pytest.raises(ValueError, match="'blur' for images"):
        perturbation(vote, torch.rand(2, 5, 3), relevance, label, removal="blur")


CLASSES = {
    "a class outside": (torch.tensor([0, 99]), ValueError, r"from 0 to 99; .* 0 .. 1, .* \(2, 2\)"),
    "a class below 0": (torch.tensor([-1, 0]), ValueError, "from -1 to 0"),
    "classes of another batch": (torch.zeros(3).long(), ValueError, r"\(3,\) for a batch of 2"),
    "fractions of classes": (torch.tensor([0.5, 1.0]), TypeError, "is torch.float32; expected"),
    "words": (["a", "b"], TypeError, "is list; expected"),
}


@pytest.mark.parametrize("name", CLASSES)
def test_errors_of_classes(name):
    given, error, message = CLASSES[name]
    tokens, relevance = ids(2, 5), torch.rand(2, 5)
    for score in (perturbation, flipping, delta_af, activation):
        with pytest.raises(error, match=message):
            score(vote, tokens, relevance, given, removal=UNK)
    model = vision()

    def two(images):
        return model(images)[:, :2]

    with pytest.raises(error, match=message):
        layer_knockout(two, torch.randn(2, 3, 8, 12), given, model=model)


def test_classes_of_any_form_are_the_same():
    tokens, relevance = ids(2, 5), torch.rand(2, 5)
    for score in (perturbation, flipping):
        truth = score(vote, tokens, relevance, torch.tensor([1, 1]), removal=UNK).values
        for given in ([1, 1], torch.tensor([1]), torch.tensor(1), 1, torch.tensor([True, True])):
            assert torch.equal(score(vote, tokens, relevance, given, removal=UNK).values, truth)


def random_maps(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    maps = torch.randn(6, 3, 9, 11, generator=generator).round(decimals=1)
    masks = torch.randint(-1, 2, (6, 9, 11), generator=generator)
    return maps, masks


def test_segmentation_against_scikit_learn():
    maps, masks = random_maps()
    scores = segmentation(maps, masks)
    flat = maps.sum(1).double().flatten(1)
    flat = (flat - flat.amin(1, keepdim=True)) / (flat.amax(1, keepdim=True)
                                                  - flat.amin(1, keepdim=True))  # fmt: skip
    found, truth, aps = [], [], []
    for values, mask in zip(flat, masks.flatten(1), strict=True):
        known = mask >= 0
        found.append((values > values.mean())[known])
        truth.append(mask[known])
        both = torch.stack([1 - values[known], values[known]])
        labels = torch.stack([mask[known] == 0, mask[known] == 1])
        aps.append(sklearn_metrics.average_precision_score(labels.flatten(), both.flatten()))
    found, truth = torch.cat(found), torch.cat(truth)
    assert scores.pixel_accuracy().value == pytest.approx(
        sklearn_metrics.accuracy_score(truth, found)
    )
    iou = sklearn_metrics.jaccard_score(truth, found, average=None)
    assert scores.miou().value == pytest.approx(iou.mean())
    assert scores.map().value == pytest.approx(np.mean(aps))
    for interval in (scores.pixel_accuracy(), scores.miou(), scores.map()):
        assert interval.low < interval.value < interval.high


def test_segmentation_by_hand():
    maps = torch.tensor([[[4.0, 3.0], [1.0, 0.0]]])
    masks = torch.tensor([[[1, 0], [1, 0]]])
    scores = segmentation(maps, masks)
    assert scores.pixel_accuracy().value == 0.5
    assert scores.miou().value == pytest.approx(1 / 3)
    perfect = segmentation(-maps, torch.tensor([[[0, 0], [1, 1]]]))
    assert [perfect.pixel_accuracy().value, perfect.miou().value] == [1, 1]
    assert perfect.map().value == pytest.approx(1)
    assert segmentation(maps, masks, threshold=0.9).correct.tolist() == [3]
    assert segmentation(torch.zeros(1, 2, 2), masks).pixel_accuracy().value == 0.5


def test_scale_and_sign_of_a_map_do_not_matter_to_its_segmentation():
    maps, masks = random_maps()
    maps = maps.double() + torch.rand(maps.shape).double() / 100  # no ties to round differently
    for same in (maps * 1e-6, maps * 7 - 3, maps.sum(1)):
        scores, other = segmentation(maps, masks), segmentation(same, masks)
        torch.testing.assert_close(scores.correct, other.correct)
        torch.testing.assert_close(scores.ap, other.ap)


@pytest.mark.parametrize("decimals", [0, 1, 6])
def test_average_precision_against_scikit_learn(decimals):
    generator = torch.Generator().manual_seed(decimals)
    for n in (1, 2, 7, 200):
        scores = torch.randn(n, generator=generator, dtype=torch.float64).round(decimals=decimals)
        truth = torch.rand(n, generator=generator) < 0.4
        truth[0] = True
        expected = sklearn_metrics.average_precision_score(truth, scores)
        assert float(average_precision(scores, truth)) == pytest.approx(expected)
    assert float(average_precision(scores, torch.zeros(n).bool())) == 0


def test_errors_of_segmentation():
    maps, masks = random_maps()
    with pytest.raises(ValueError, match="expected \\(B, C, H, W\\)"):
        segmentation(maps[..., :-1], masks)
    with pytest.raises(ValueError, match="NaN or Inf"):
        segmentation(maps / 0, masks)


def test_intervals_cover_as_often_as_they_say():
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for trial in range(200):
        found = bootstrap(torch.randn(50, generator=generator), resamples=300, seed=trial)
        covered += found.low <= 0 <= found.high
    assert 0.89 <= covered / 200 <= 0.985


def test_bootstrap_is_seeded_and_named():
    values = torch.arange(20.0)
    assert bootstrap(values) == bootstrap(values)
    assert bootstrap(values) != bootstrap(values, seed=1)
    narrow, wide = (bootstrap(values, level=level) for level in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.value == 9.5 < narrow.high < wide.high
    ratio = bootstrap(values, values + 1, statistic=lambda a, b: a.sum() / b.sum())
    assert ratio.value == pytest.approx(190 / 210)
    assert str(bootstrap(torch.ones(3))) == "1.000 [1.000, 1.000]"
    assert bootstrap(torch.tensor([2.0])) == Interval(2, 2, 2, samples=1)
    assert math.isnan(bootstrap(torch.zeros(0)).value)
    with pytest.raises(ValueError, match="as many in each"):
        bootstrap(values, values[:3])
    with pytest.raises(ValueError, match="0 < level < 1"):
        bootstrap(values, level=95)


def test_scores_of_as_many_samples_are_compared_on_the_same_draws():
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(99, (40, 2), generator=generator)  # sums of integers are exact
    drawn, others = [], []
    bootstrap(values, statistic=lambda v: drawn.append(v) or v[0, 0])
    bootstrap(values * 2, values + 1, statistic=lambda v, w: others.append((v, w)) or w[0, 0])
    assert len(drawn) == 1001  # the samples themselves, and 1000 times as many drawn from them
    assert torch.equal(drawn[0], values.double())
    for a, (b, c) in zip(drawn, others, strict=True):
        assert a.shape == values.shape
        assert torch.equal(b, a * 2)
        assert torch.equal(c, a + 1)
    one, two = bootstrap(values[:, 0]), bootstrap(values[:, 0] * 2)
    assert (two.low, two.value, two.high) == pytest.approx(
        (2 * one.low, 2 * one.value, 2 * one.high)
    )


def vision() -> VisionMamba:
    torch.manual_seed(0)
    return randomize(VisionMamba((8, 12), 4, classes=5, width=8, depth=3, state=4)).eval()


def test_knocking_a_layer_out_is_running_the_model_without_it():
    model, images = vision(), torch.randn(3, 3, 8, 12)
    target = torch.tensor([0, 3, 1])
    drops = layer_knockout(model, images, target, batch_size=2)
    assert list(drops) == [f"layers.{n}.mixer" for n in range(3)]
    for n, drop in enumerate(drops.values()):
        without = vision()
        nn.init.zeros_(without.layers[n].mixer.out_proj.weight)
        with torch.no_grad():
            expected = (model(images) - without(images)).gather(1, target[:, None])[:, 0]
        torch.testing.assert_close(drop, expected)
    with torch.no_grad():
        before = model(images)
    found = layer_knockout(lambda x: model(x), images, target, model=model,
                           layers=["layers.1.mixer"], replacement="mean")  # fmt: skip
    assert list(found) == ["layers.1.mixer"]
    assert not torch.allclose(found["layers.1.mixer"], drops["layers.1.mixer"])
    assert all(len(m._forward_hooks) == 0 for m in model.modules())
    with torch.no_grad():
        assert torch.equal(model(images), before)
    with pytest.raises(ValueError, match=r"layers\.9.*expected an index"):
        layer_knockout(model, images, target, layers=["layers.9"])
    with pytest.raises(ValueError, match="'zero' or 'mean'"):
        layer_knockout(model, images, target, replacement="noise")


def test_token_similarity():
    torch.manual_seed(0)
    tokens = torch.randn(3, 7, 5, dtype=torch.float64)
    expected = []
    for x in tokens:
        table = sklearn_metrics.pairwise.cosine_similarity(x.numpy())
        expected.append(table[np.triu_indices(7, 1)].mean())
    assert token_similarity(tokens).tolist() == pytest.approx(expected)
    alike = torch.arange(1.0, 5)[None, :, None] * torch.ones(1, 1, 3)
    assert float(token_similarity(alike)) == pytest.approx(1)
    assert float(token_similarity(torch.eye(4)[None])) == pytest.approx(0)
    assert float(token_similarity(torch.tensor([[[1.0, 0], [-2.0, 0]]]))) == pytest.approx(-1)
    with pytest.raises(ValueError, match="L > 1"):
        token_similarity(torch.ones(1, 1, 4))


@pytest.mark.parametrize("kind", ["vision", "text"])
def test_oversmoothing_after_every_block(kind):
    model = vision() if kind == "vision" else tiny("mamba")
    inputs = torch.randn(2, 3, 8, 12) if kind == "vision" else ids(2, 6)
    blocks = model.layers if kind == "vision" else model.backbone.layers
    seen = []
    handles = [b.register_forward_hook(lambda m, a, out: seen.append(out)) for b in blocks]
    found = oversmoothing(model, inputs)
    for handle in handles:
        handle.remove()
    prefix = "layers" if kind == "vision" else "backbone.layers"
    assert list(found) == [f"{prefix}.{n}" for n in range(len(blocks))]
    for value, tokens in zip(found.values(), seen, strict=True):
        tokens = tokens[0] if isinstance(tokens, tuple) else tokens
        torch.testing.assert_close(value, token_similarity(tokens))
    last = seen[-1][0] if isinstance(seen[-1], tuple) else seen[-1]
    kept = torch.cat([last[:, 1:-2], last[:, -1:]], 1)
    for left_out in ([0, -2], iter([0, -2])):
        without = oversmoothing(model, inputs, leave_out=left_out)
        torch.testing.assert_close(list(without.values())[-1], token_similarity(kept))
    assert all(len(m._forward_hooks) == 0 for m in model.modules())


def test_influence_on_the_cls_token():
    model, images = vision(), torch.randn(5, 3, 8, 12)
    (position,) = model.cls_tokens()
    found = cls_influence(model, images, position, batch_size=2)
    maps = hidden_attention(model, images, reduction="mean")
    for path, row in found.items():
        torch.testing.assert_close(row, maps[path][:, position].abs())


def test_position_bias():
    near = torch.tensor([1.0, 2, 3, 9, 3, 2, 1])
    assert float(position_bias(near, 3)) == pytest.approx(1)
    assert float(position_bias(-near, 3)) == pytest.approx(-1)
    assert float(position_bias(torch.ones(7), 3)) == 0
    assert float(position_bias(torch.ones(1), 0)) == 0
    generator = torch.Generator().manual_seed(0)
    influence = torch.rand(2, 9, generator=generator).round(decimals=1)
    others = [j for j in range(9) if j != 7]
    for row, value in zip(influence, position_bias(influence, -2), strict=True):
        expected = spearmanr([-abs(j - 7) for j in others], row[others].numpy()).statistic
        assert float(value) == pytest.approx(expected)
    with pytest.raises(ValueError, match="for 7 tokens"):
        position_bias(near, 7)


def test_captum_methods_and_ours_in_one_table():
    """Any attribution tensor will do, from Captum or from here."""
    model, images = vision(), torch.randn(4, 3, 8, 12)
    with torch.no_grad():
        labels = model(images).argmax(1)
    for method in (InputXGradient(model), MambaAttribution(model)):
        relevance = method.attribute(images.clone().requires_grad_(), target=labels)
        curve = perturbation(model, images, relevance, labels, patch=4)
        assert curve.values.shape == (4, 9)
        assert 0 <= curve.estimate().value <= 1
        assert segmentation(relevance, torch.ones(4, 8, 12)).map().samples == 4


def test_knockout_agreement_is_scipys_rank_correlation_and_a_count():
    from scipy.stats import spearmanr

    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 6, 20, generator=generator)
    y[:, 3:6] = 0  # ties
    mask = torch.ones(6, 20)
    mask[2, :7] = 0
    found = knockout_agreement(x, y, k=4, mask=mask)
    for b in range(6):
        keep = mask[b] != 0
        truth = spearmanr(x[b][keep], y[b][keep]).statistic
        assert abs(float(found.rank[b]) - truth) <= 1e-6
        tops = [set(t[b].masked_fill(~keep, -9.0).topk(4).indices.tolist()) for t in (x, y)]
        assert float(found.overlap[b]) == len(tops[0] & tops[1]) / 4
    same = knockout_agreement(-y[:1], y[:1], absolute=True).estimate()
    assert same["rank"].value == pytest.approx(1.0)
    assert same["overlap"].value == 1.0
    both = found.estimate(resamples=50)
    assert both["rank"].low <= both["rank"].value <= both["rank"].high
    flat = knockout_agreement(torch.ones(1, 5, 3), torch.randn(1, 5))
    assert flat.rank.isnan().all()
    assert flat.estimate()["rank"].samples == 0
    with pytest.raises(ValueError, match="attributions has shape"):
        knockout_agreement(x, y[:, 1:])
    with pytest.raises(ValueError, match="k is 0"):
        knockout_agreement(x, y, k=0)
    with pytest.raises(ValueError, match="effects holds NaN"):
        knockout_agreement(x, y * torch.nan)
