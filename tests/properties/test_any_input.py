"""Inputs and outputs of every form: series, images, volumes, tuples, forecasts, dense maps."""

from __future__ import annotations

import warnings

import inputs
import pytest
import torch
from folders import ROOT
from inputs import FORMS, IDS, E, noise, options
from methods import MAPS, METHODS, assert_close, each, each_method
from models import ids, made, tiny, without_biases
from torch import Tensor, nn

from captum_ssm import (
    InputError,
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    TargetError,
    hidden_attention,
    supported,
    token_grids,
)
from captum_ssm.capture import Request, freeze

PAGE = ROOT / "docs" / "how_to" / "any_input.md"
OF_TOKENS = [method for method in METHODS if method is not MambaLRP]


def explained(method: type, form: inputs.Form, model: nn.Module | None = None, **more):
    model = made(form.model) if model is None else model
    found = method(model, **more).attribute(form.inputs, form.target, **options(method))
    return found if isinstance(found, tuple) else (found,)


def tensors(form: inputs.Form) -> tuple[Tensor, ...]:
    return form.inputs if isinstance(form.inputs, tuple) else (form.inputs,)


def test_the_table_of_the_documentation():
    assert inputs.table() in PAGE.read_text()


@pytest.mark.parametrize("name", ["series `(B, L, F)`", "patches of a series", "table `(B, F)`"])
def test_relevance_per_entry_is_gradient_times_input_of_the_frozen_model(name):
    # What a coefficient that is frozen multiplies is linear in it: twice the input of an entry
    # that only passes frozen parts has twice the relevance. Here: relevance is input times the
    # gradient, so it vanishes exactly where the input does.
    form = FORMS[name]
    x = form.inputs.clone()
    x[:, 1] = 0
    found = MambaLRP(made(form.model)).attribute(x, form.target)
    assert (found[:, 1] == 0).all()
    assert (found[:, 0] != 0).all()


@each_method
@pytest.mark.parametrize("name", ["series `(B, L, F)`", "patches of a series", "a strided stem"])
def test_a_feature_without_weight_gets_nothing(method, name):
    form = FORMS[name]
    model = made(form.model)
    features = 2 if isinstance(model, inputs.Series) else 1
    weight = model.inp.weight if name != "a strided stem" else model.inp[0].weight
    with torch.no_grad():
        weight[:, 1:] = 0
    (found,) = explained(method, form, model)
    by_feature = found.abs().movedim(features, 0).flatten(1).sum(1)
    assert by_feature[0] > 0
    assert (by_feature[1:] == 0).all()


def through_norm(model: nn.Module, added: Tensor) -> Tensor:
    """What is added to a token, after the first norm with its denominator frozen, up to that."""
    return (added - added.mean(-1, keepdim=True)) * model.body.norms[0].weight


def score_times_input(model: nn.Module, x: Tensor, target: int) -> Tensor:
    """The size of input times gradient of the target's score."""
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(leaf)[:, target].sum(), leaf)
    return (gradient * x).abs()


@each(OF_TOKENS)
def test_a_token_is_shared_by_what_its_features_add(method):
    form = FORMS["series `(B, L, F)`"]
    model = made(form.model)
    (found,) = explained(method, form, model)
    if method.needs_target():  # to the score, not to the tokens
        sizes = score_times_input(model, form.inputs, form.target)
    else:
        sizes = through_norm(model, model.inp.weight.T).norm(dim=-1) * form.inputs.abs()
    (even,) = explained(method, form, model, feature_share="even")
    token = even.sum(-1, keepdim=True)
    assert_close(found, token * (sizes / sizes.sum(-1, keepdim=True)).detach(), 1e-9)
    assert_close(even, (token / 3).expand_as(even), 1e-12)
    # Where a step adds nothing, there is nothing to tell its features apart by.
    x = form.inputs.clone()
    x[:, 2] = 0
    nothing = method(model).attribute(x, form.target, **options(method))
    assert_close(nothing[:, 2], nothing[:, 2, :1].expand(-1, 3), 1e-12)


@each(OF_TOKENS)
def test_features_of_two_outputs_differ_where_the_target_is_explained(method):
    model = made(inputs.Forecast)
    found = [method(model).attribute(noise(2, 24, 5), (3, k), **options(method)) for k in (0, 2)]
    share = [one.abs() / one.abs().sum(-1, keepdim=True).clamp(min=1e-30) for one in found]
    assert method.needs_target() != torch.allclose(share[0], share[1])


@each_method
def test_layouts_agree(method):
    model, x = made(inputs.Series), noise(2, 8, 3)
    truth = method(model).attribute(x, 1, **options(method))
    first = made(inputs.ChannelsFirst)
    assert_close(method(first).attribute(x.mT.contiguous(), 1, **options(method)).mT, truth, 1e-9)
    # A square one: the axis of the features is measured, not guessed.
    square = noise(2, 6, 6)
    model, first = made(lambda: inputs.Series(6)), made(lambda: inputs.ChannelsFirst(6))
    truth = method(model).attribute(square, 1, **options(method))
    found = method(first).attribute(square.mT.contiguous(), 1, **options(method))
    assert_close(found.mT, truth, 1e-9)
    one = made(inputs.Univariate)
    truth = method(made(lambda: inputs.Series(1))).attribute(x[..., :1], 1, **options(method))
    assert_close(method(one).attribute(x[..., 0], 1, **options(method)), truth[..., 0], 1e-9)


@each(OF_TOKENS)
def test_a_patch_hands_on_what_its_token_has(method):
    form = FORMS["patches of a series"]
    model = made(form.model)

    class FromTokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm, self.head = model.body, model.norm, model.head

        def forward(self, h):
            return self.head(self.norm(self.body(h).mean(1)))

    h = model.tokens(form.inputs).detach()
    of_tokens = method(FromTokens()).attribute(h, form.target, **options(method)).sum(-1)
    (found,) = explained(method, form, model)
    assert_close(found.sum(1).unflatten(1, (-1, 4)).sum(-1), of_tokens, 1e-9)


class Spectrogram(inputs.Images):
    """Patches of 4 steps and 4 frequencies of ``(B, T, F)``, one axis of tokens after the other."""

    def __init__(self, *, learned: int = 0):
        super().__init__()
        self.inp = nn.Conv2d(1, E, 4, stride=4)
        self.learned = nn.Parameter(torch.randn(learned, E))

    def tokens(self, x):
        tokens, middle = super().tokens(x.mT[:, None]), 4  # (B, 2 x 4, E), frequencies first
        learned = self.learned.expand(len(x), -1, -1)
        return torch.cat([tokens[:, :middle], learned, tokens[:, middle:]], 1)


class Variables(Spectrogram):
    """Patches of 4 steps of each variable of ``(B, T, F)``."""

    def __init__(self):
        super().__init__()
        self.inp = nn.Conv2d(1, E, (1, 4), stride=(1, 4))


@each(OF_TOKENS)
def test_entries_of_a_step_that_are_parts_of_different_tokens(method):
    model, x = made(Spectrogram), noise(1, 16, 8)

    def read_at_third(x):  # of eight tokens in the order of a causal mixer
        return model.head(model.norm(model.body(model.tokens(x))[:, 2]))

    found = method(read_at_third, model).attribute(x, 1, **options(method))
    by_patch = found.unflatten(2, (2, 4)).unflatten(1, (4, 4)).abs().sum((2, 4))[0]
    read = torch.tensor([[1, 0], [1, 0], [1, 0], [0, 0]]).bool()
    assert not by_patch[~read].any()
    assert by_patch[2, 0] > 0


@each(MAPS)
@pytest.mark.parametrize("kind", [Spectrogram, Variables, lambda: Spectrogram(learned=1)])
def test_a_patch_of_steps_and_features_has_what_its_token_has(method, kind):
    model, x = kind().eval(), noise(1, 16, 8).float()
    found = method(model).attribute(x, 1)
    bins = x.shape[2] if kind is Variables else 2
    by_patch = found.unflatten(2, (bins, -1)).unflatten(1, (4, 4)).sum((2, 4))[0].mT.flatten()

    class FromTokens(inputs.Classifier):
        def tokens(self, h):
            return h

    after = FromTokens().eval()
    after.body, after.norm, after.head = model.body, model.norm, model.head
    of_tokens = method(after).attribute(model.tokens(x).detach(), 1).sum(-1)[0]
    if model.learned.numel():
        of_tokens = torch.cat([of_tokens[:4], of_tokens[5:]])
    assert_close(by_patch, of_tokens, 1e-5)


def test_an_image_whose_axes_a_model_exchanges():
    class Published(nn.Module):  # of a spectrogram, by the usual name
        def __init__(self):
            super().__init__()
            self.patch_embed, self.model = nn.Module(), made(Spectrogram).float()
            self.patch_embed.proj = self.model.inp

        def forward(self, x):
            return self.model(x)

    model, x = Published().eval(), noise(1, 1, 16, 8).float()
    found = MambaRollout(lambda x: model(x[:, 0]), model).attribute(x)
    assert_close(found[:, 0], MambaRollout(model).attribute(x[:, 0]))


@each(MAPS)
def test_a_stem_at_full_resolution(method):
    class Smoothed(inputs.Series):
        def __init__(self):
            super().__init__()
            self.inp = nn.Conv1d(3, E, 3, padding=1)

        def tokens(self, x):
            return self.inp(x.mT).mT

    model, x = made(Smoothed), noise(2, 8, 3)
    with torch.no_grad():
        model.inp.weight[..., :2] = 0  # each token is made of the step after it
    found = method(model).attribute(x, 1)
    assert (found[:, 0] == 0).all()
    assert (found[:, 1:].abs().sum(-1) > 0).all()


@each(OF_TOKENS)
def test_a_patch_is_shared_by_what_its_entries_add(method):
    form = FORMS["patches of a series"]
    model = made(form.model)
    x = form.inputs.clone()
    x[:, :, 5], x[:, :, 8:12] = 0, 0
    found = method(model).attribute(x, form.target, **options(method))
    by_patch = found.unflatten(2, (-1, 4))  # (B, F, tokens, steps)
    assert (by_patch[..., 1, 1].abs().sum(1) < 1e-9 * by_patch[..., 1, :].abs().sum((1, 2))).all()
    # Steps get the share of the squares of what they add, features that of the sizes.
    weight = through_norm(model, model.inp.weight.permute(1, 2, 0)).norm(dim=-1)[:, None]
    sizes = (weight * x.unflatten(2, (-1, 4)).abs()).detach()
    # Where no step adds anything, by their weights alone.
    sizes[:, :, 2] = weight[:, 0].detach()
    steps = sizes.square().sum(1, keepdim=True)
    steps = steps / steps.sum(-1, keepdim=True)
    token = by_patch.sum((1, 3), keepdim=True)
    assert_close(by_patch.sum(1, keepdim=True), token * steps, 1e-5)
    if method.needs_target():
        sizes = score_times_input(model, x, form.target).unflatten(2, (-1, 4))
    sizes[:, :, 1, 1] = sizes[:, :, 2] = 1  # these steps are shared evenly
    features = sizes / sizes.sum(1, keepdim=True)
    assert_close(by_patch, token * steps * features, 1e-5)


def test_several_inputs_are_explained_as_one_that_holds_them():
    class Joined(inputs.Two):
        def tokens(self, both):
            return super().tokens(both[..., :3], both[..., 3:])

    form = FORMS["two series, a tuple"]
    x, z = form.inputs
    model, joined = made(inputs.Two), made(Joined)
    both = torch.cat([x, z], -1)
    for method in METHODS:
        found = method(model).attribute((x, z), 1, **options(method))
        assert isinstance(found, tuple)
        truth = method(joined).attribute(both, 1, **options(method))
        if method is MambaLRP:
            assert_close(torch.cat(found, -1), truth, 1e-12)
        else:  # the sums of tokens, whose parts are measured for each input as a whole
            assert_close(found[0].sum(-1) + found[1].sum(-1), truth.sum(-1), 1e-9)
    # The share of each input is that of what it adds to the tokens.
    first, second = MambaRollout(model).attribute((x, z))
    added = [part(one) - part.bias for one, part in ((x, model.first), (z, model.second))]
    sizes = [through_norm(model, one).norm(dim=-1) for one in added]
    share = (sizes[0] / (sizes[0] + sizes[1])).detach()
    assert_close(first.sum(-1), share * (first.sum(-1) + second.sum(-1)), 1e-9)


def test_ids_and_values_together():
    form = FORMS["ids and values, a tuple"]
    model = made(form.model)
    for method in METHODS:
        of_ids, of_values = explained(method, form, model)
        assert of_ids.shape == IDS.shape
        assert of_values.shape == (2, 8, 5)
    embedded = model.table(IDS).detach()

    class FromEmbeddings(inputs.IdsAndValues):
        def tokens(self, e, z):
            return e + self.second(z)

    other = FromEmbeddings()
    other.load_state_dict(model.state_dict())
    other.double().eval()
    truth = MambaLRP(other).attribute((embedded, form.inputs[1]), 1)
    found = MambaLRP(model).attribute(form.inputs, 1)
    assert_close(found[0], truth[0].sum(-1), 1e-12)
    assert_close(found[1], truth[1], 1e-12)


class SecondTable(inputs.Classifier):
    """Ids, and what another table holds for numbers made of them or not."""

    def __init__(self, numbers) -> None:
        super().__init__()
        self.table, self.second, self.numbers = nn.Embedding(11, E), nn.Embedding(97, E), numbers

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def tokens(self, ids: Tensor) -> Tensor:
        return self.table(ids) + self.second(self.numbers(ids))


@each([MambaRollout, MambaLRP])
def test_ids_computed_from_the_inputs_are_told(method):
    tokens = IDS[:, :7]
    shuffled = torch.tensor([5, 3, 9, 1, 2, 7, 4])
    numbers = {
        "bigrams": lambda ids: (31 * ids + 7 * ids.roll(1, -1)) % 97,
        "positions": lambda ids: torch.arange(7).expand_as(ids),
        "constants": lambda ids: shuffled.expand_as(ids),
        "the ids": lambda ids: ids,
    }
    for name, of in numbers.items():
        model = made(lambda of=of: SecondTable(of))
        before = torch.get_rng_state()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            method(model).attribute(tokens, 1)
        told = [str(one.message) for one in caught if "computed from" in str(one.message)]
        assert bool(told) == (name == "bigrams"), name
        assert all(one.startswith("second is given ids") for one in told)
        assert not model.second._forward_pre_hooks
        assert torch.equal(torch.get_rng_state(), before)


class Auxiliary(inputs.Series):
    """Another mixer makes an output that is not explained."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = inputs.Body(1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(self.tokens(x))
        return self.head(self.norm(h.mean(1))), self.extra(h)


@each_method
def test_a_mixer_that_the_output_does_not_read(method):
    model, plain, x = made(Auxiliary), made(inputs.Series), noise(2, 8, 3)
    plain.load_state_dict(model.state_dict(), strict=False)
    found, truth = (method(one).attribute(x, 1, **options(method)) for one in (model, plain))
    assert_close(found, truth, 1e-9)


class Labeled(torch.Tensor):
    """As torchvision's images are."""


@each_method
def test_subclasses_of_tensors_are_tensors(method):
    model, x = made(inputs.Series), noise(2, 8, 3)
    truth = method(model).attribute(x, 1, **options(method))
    found = method(model).attribute(x.as_subclass(Labeled), 1, **options(method))
    assert type(found) is torch.Tensor
    assert_close(found, truth)


def test_tuples_of_one_come_back_as_such():
    x = noise(2, 8, 3)
    for method in METHODS:
        found = method(made(inputs.Series)).attribute((x,), 1)
        assert isinstance(found, tuple)
        assert len(found) == 1
        assert found[0].shape == x.shape


def test_captums_targets_of_dense_outputs():
    model, x = made(inputs.Forecast), noise(2, 24, 5)
    score = model(x)[:, 3, 2]
    for target in ((3, 2), [(3, 2), (3, 2)]):
        for method in (MambaLRP, LaTIM):
            attribution, delta = method(model).attribute(
                x, target, return_convergence_delta=True, **options(method)
            )
            claimed = attribution.flatten(1).sum(1) + delta
            if method is MambaLRP:
                assert_close(claimed, score, 1e-9)
    per_example = MambaLRP(model).attribute(x, [(3, 2), (11, 4)])
    assert_close(per_example[1], MambaLRP(model).attribute(x[1:], (11, 4))[0], 1e-9)
    with pytest.raises(TargetError, match=r"\(2, 12, 5\) and target is 3.*as in Captum.*position="):
        MambaLRP(model).attribute(x, 3)
    with pytest.raises(TargetError, match="target is None"):
        MambaAttribution(model).attribute(x)


@each(MAPS)
def test_an_entry_is_read_from_its_own_tokens(method):
    model, x = made(inputs.PerStep), noise(2, 8, 5)
    there = method(model).attribute(x, (3, 2), position=3)
    if method.needs_target():
        # The step's token is found; and its entry can be asked for by the token instead.
        assert_close(method(model).attribute(x, (3, 2)), there, 1e-9)
        assert_close(method(model).attribute(x, 2, position=3), there, 1e-9)
    assert (there[:, 4:] == 0).all()
    assert (there[:, :4] != 0).any()


def test_a_token_of_a_language_model_is_named_with_its_position():
    model, tokens = tiny(), ids()
    for method in (MambaAttribution, MambaLRP):
        found = method(model).attribute(tokens, (3, 5))
        assert_close(found, method(model).attribute(tokens, 5, position=3))
        embedded = model.get_input_embeddings()(tokens).detach()
        assert_close(method(model).attribute(embedded, (3, 5)).sum(-1), found)


class Prefixed(nn.Module):
    """A language model with learned tokens before those it is given, of which it returns none."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.model, self.count = tiny(), count
        self.first = nn.Parameter(0 * torch.randn(count, self.model.config.hidden_size))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        tokens = self.model.get_input_embeddings()(input_ids)
        tokens = torch.cat([self.first.expand(len(tokens), -1, -1), tokens], 1)
        return self.model(inputs_embeds=tokens).logits[:, self.count :]


@each_method
def test_positions_are_those_of_the_tokens_that_a_model_is_given(method):
    # Zeros before the tokens change nothing, once nothing has a bias term.
    model, tokens = without_biases(Prefixed().eval()), ids(1, 7)
    for more in ({"target": (3, 5)}, {"target": 5, "position": 3}, {"target": 5}):
        found = method(model).attribute(tokens, **more, **options(method))
        expected = method(model.model).attribute(tokens, **more, **options(method))
        assert_close(found, expected, 1e-4)
    frozen = method(model).freeze_once(tokens)
    found = frozen.attribute(tokens, target=5, position=3, **options(method))
    assert not found[:, 4:].any()
    assert found[:, 3].any()
    mask = torch.ones_like(tokens)
    mask[:, 5:] = 0
    found = method(model).attribute(
        tokens, target=5, additional_forward_args={"attention_mask": mask}, **options(method)
    )
    assert not found[:, 5:].any()
    assert found[:, 4].any()


class ImagePrefixed(nn.Module):
    """A language model with patches of an image before its tokens; it returns those of the text."""

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny().double()
        self.patches = nn.Conv2d(3, self.model.config.hidden_size, 4, 4, dtype=torch.float64)

    def embedded(self, input_ids: Tensor, image: Tensor) -> Tensor:
        patches = self.patches(image).flatten(2).mT
        return torch.cat([patches, self.model.get_input_embeddings()(input_ids)], 1)

    def forward(self, input_ids: Tensor, image: Tensor) -> Tensor:
        return self.model(inputs_embeds=self.embedded(input_ids, image)).logits[:, 4:]


@each(METHODS)
def test_positions_of_a_text_after_an_image_are_those_of_the_text(method):
    model, tokens, image = ImagePrefixed().eval(), ids(1, 7), noise(1, 3, 8, 8)
    of_text, of_image = method(model).attribute((tokens, image), target=(5, 8), **options(method))
    joined = model.embedded(tokens, image).detach()
    expected = method(model.model).attribute(joined, target=(9, 8), **options(method)).sum(-1)
    assert_close(of_text, expected[:, 4:], 1e-6)
    # A bias of the patches has relevance too, and no pixel gets it.
    if method is not MambaLRP:
        assert_close(of_image.sum(), expected[:, :4].sum(), 1e-6)


def test_a_class_summed_over_a_mask():
    model, x = made(inputs.UShape), noise(1, 3, 16, 16)
    mask = torch.zeros(16, 16, dtype=torch.float64)
    mask[2:6, 2:6] = 1

    def of_object(images):
        return (model(images)[:, 2] * mask).sum((1, 2))

    found, delta = MambaLRP(of_object, model).attribute(x, return_convergence_delta=True)
    assert_close(found.flatten(1).sum(1) + delta, of_object(x).detach(), 1e-9)
    for method in MAPS:
        assert method(of_object, model).attribute(x).shape == x.shape
    # The tokens that the mask is read from, and no others.
    (query,) = freeze(Request.of(of_object, model, x)).require_query()
    assert torch.equal(query.view(8, 8) > 0, mask[::2, ::2] > 0)


def test_a_pixel_is_read_past_the_coarse_grid():
    model, x = made(inputs.UShape), noise(1, 3, 16, 16)
    frozen = freeze(Request.of(model, None, x), target=(2, 5, 5), gradients=True)
    assert [len(stage.reads) for stage in frozen.wiring.steps] == [1, 1, 2]
    (coarse, by_up), (fine, past) = frozen.wiring.steps[2].reads
    assert (coarse, fine) == (1, 0)
    assert_close(by_up.share + past.share, torch.ones_like(past.share), 1e-12)
    # Past the coarse grid each token is the one in its place; through it, one of its four.
    assert torch.equal(past.source, torch.arange(64))
    places = torch.arange(64).view(8, 8)
    parent = (places // 8 // 2) * 4 + places % 8 // 2
    assert torch.equal(by_up.source, parent.flatten())
    # The sizes are those of the Jacobians of what is added, here two linear maps before a norm.
    (query,) = frozen.require_query()
    assert query[0].view(8, 8).argmax() == 2 * 8 + 2  # the token of pixel (5, 5)
    assert query[0].count_nonzero() == 1


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_relevance_on_a_measured_grid(mode):
    form = FORMS["image `(B, C, H, W)`"]
    model = made(form.model)
    declared = made(form.model)
    declared.token_grid = lambda height, width: inputs.grid(height // 4, width // 4)
    for method in MAPS:
        (found,) = explained(method, form, model, interpolate_mode=mode)
        (truth,) = explained(method, form, declared, interpolate_mode=mode)
        assert_close(found, truth, 1e-9)
        (by_transport,) = explained(method, form, model)
        patches = by_transport.sum(1).unflatten(-1, (3, 4)).unflatten(1, (2, 4)).sum((2, 4))
        (nearest,) = explained(method, form, model, interpolate_mode="nearest")
        assert_close(patches, nearest.sum(1)[:, ::4, ::4], 1e-9)


def grids(model: nn.Module, x: Tensor) -> list[tuple[int, ...] | None]:
    found = token_grids(model, x)
    assert list(found) == list(hidden_attention(model, x))
    shapes = [None if grid is None else grid.shape for grid in found.values()]
    assert shapes == [mixer.grid for mixer in supported(model, x).mixers]
    return shapes


def test_grids_are_measured():
    shapes = {name: grids(made(FORMS[name].model), FORMS[name].inputs) for name in (
        "image `(B, C, H, W)`", "image, two grids", "segmentation, a U-shape",
        "video `(B, C, T, H, W)`", "patches of a series", "one variable `(B, L)`",
    )}  # fmt: skip
    assert list(shapes.values()) == [
        [(2, 3)] * 2, [(8, 8), (4, 4)], [(8, 8), (4, 4), (8, 8)], [(2, 2, 2)] * 2, [(4,)] * 2,
        [None] * 2,
    ]  # fmt: skip

    class WithCls(inputs.Images):
        def __init__(self):
            super().__init__()
            self.cls = nn.Parameter(torch.zeros(E))

        def tokens(self, x):
            h = super().tokens(nn.functional.pad(x, (0, -x.shape[3] % 4, 0, -x.shape[2] % 4)))
            cls = self.cls.expand(len(h), 1, E)
            return torch.cat([h[:, :2], cls, h[:, 2:]], 1)

    # A class token in the middle, and an odd size that is padded to multiples.
    model, x = made(WithCls), noise(1, 3, 7, 11)
    grid, _ = token_grids(model, x).values()
    assert torch.equal(grid.index, torch.tensor([[0, 1, 3], [4, 5, 6]]))


@each(MAPS)
def test_the_layers_of_one_grid(method):
    form = FORMS["image, two grids"]
    model = made(form.model)
    mode = {"interpolate_mode": "nearest"}
    fine, coarse, last = (
        method(model, **mode).attribute(form.inputs, form.target, grid=grid) for grid in (0, 1, -1)
    )
    assert torch.equal(coarse, last)
    blocks = coarse.sum(1).unflatten(-1, (4, 4)).unflatten(1, (4, 4))
    assert_close(blocks, blocks[:, :, :1, :, :1].expand_as(blocks), 1e-9)
    assert not torch.allclose(fine, coarse)
    with pytest.raises(ValueError, match=r"grid is 2; .* 2 grids .*0 \.\. 1"):
        method(model).attribute(form.inputs, form.target, grid=2)
    with pytest.raises(TypeError, match=r"stage= is now called grid=; expected grid="):
        method(model).attribute(form.inputs, form.target, stage=1)
    # The layers of the second grid alone: its mixer's own map, read by the pooled output.
    if method is RawAttention:
        h = model.merge(model.one.on_image(model.inp(form.inputs))).flatten(2).mT
        body = model.two

        class Last(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.norm, self.head = body, model.norm, model.head

            def forward(self, h):
                return self.head(self.norm(self.body(h).mean(1)))

        alone = RawAttention(Last()).attribute(h.detach()).sum(-1)
        assert_close(blocks[:, :, 0, :, 0].flatten(1), alone, 1e-9)


def test_what_is_refused_says_why():
    model, x = made(inputs.Two), noise(2, 8, 3)
    with pytest.raises(InputError, match="the same number of examples"):
        MambaLRP(model).attribute((x, noise(3, 8, 5)), 1)
    with pytest.raises(ValueError, match="inputs is a tuple of 2; a whole rollout"):
        MambaRollout(model).rollout((x, noise(2, 8, 5)))
    with pytest.raises(ValueError, match="feature_share is 'equal'"):
        RawAttention(model, feature_share="equal")
    with pytest.raises(InputError, match=r"\(8,\)"):
        RawAttention(made(inputs.Series)).attribute(noise(8), 1)
    with pytest.raises(InputError, match="empty"):
        MambaLRP(made(inputs.Series)).attribute(noise(0, 8, 3), 1)
    with pytest.raises(ValueError, match=r"grid is 0.*form no grid"):
        RawAttention(made(inputs.Tabular)).attribute(noise(2, 6), grid=0)


@each_method
def test_a_volume_of_32(method):
    class Volume(inputs.Video):
        def __init__(self):
            super().__init__()
            self.inp = nn.Conv3d(1, E, 8, stride=8)

    x = noise(1, 1, 32, 32, 32)
    found = method(made(Volume)).attribute(x, 1, **options(method))
    assert found.shape == x.shape
    assert found.isfinite().all()
    assert found.count_nonzero() == found.numel()
