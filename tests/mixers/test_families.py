"""Every architecture family: reconstruction, rollouts through hybrids, padding, altered mixers."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from families import (
    CONV_FAMILIES,
    DELTA_FAMILIES,
    FAMILIES,
    HYBRIDS,
    KDA_FAMILIES,
    NO_STREAM,
    SSD_FAMILIES,
    build,
    modeling_of,
    padded,
    skip_what_fails_by_itself,
)
from folders import ROOT
from frozen import alter_a_head, assert_reconstructs, frozen_layers
from methods import each_method
from models import S6_FAMILIES, ids
from torch import Tensor, nn

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    ReconstructionError,
    UnifiedImplicitAttention,
    hidden_attention,
    register_mixer,
)
from captum_ssm.capture import Request, freeze
from captum_ssm.capture.check import Deviation, Rebuilt, check_reconstruction
from captum_ssm.capture.tolerances import tolerances_of
from captum_ssm.mixers import MixerCall, find_adapter, find_mixers, registered, registry
from captum_ssm.operators import SoftmaxOperator

# These models do not look at the mask in their recurrence: padding on the left enters it.
# (LFM2 zeroes it ahead of a projection with a bias.)
IGNORE_LEFT_PADDING = ("recurrent_gemma", "rwkv", "xlstm", "xlstm_fused", "lfm2")


@pytest.mark.every_case
@pytest.mark.parametrize(
    "length", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 11)), 19]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_unified_operator_and_the_biases_are_the_mixer(family, length):
    skip_what_fails_by_itself(family, length)
    model = build(family)
    layers = frozen_layers(model, ids(2, length), check=True)
    assert {layer.call.path for layer in layers} == {path for path, _ in find_mixers(model)}
    for layer in layers:
        assert_reconstructs(layer)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_on_padded_batches(family, side):
    skip_what_fails_by_itself(family, 11, side)
    mask = padded(side, length=11)
    ignored = side == "left" and family in IGNORE_LEFT_PADDING
    with pytest.warns(UserWarning, match="reads the padding") if ignored else nullcontext():
        for layer in frozen_layers(build(family), ids(2, 11), mask, check=True):
            assert_reconstructs(layer, mask)


@pytest.mark.parametrize("family", [name for name in IGNORE_LEFT_PADDING if name in FAMILIES])
def test_relevance_through_a_frozen_run_warns_of_padding_too(family):
    skip_what_fails_by_itself(family, 11, "left")
    extra = {"attention_mask": padded("left", length=11)}
    with pytest.warns(UserWarning, match="reads the padding"):
        MambaLRP(build(family)).attribute(ids(2, 11), 3, extra)


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids_have_layers_of_both_kinds(family):
    operators = [layer.mixer.recurrence for layer in frozen_layers(build(family), ids(2, 3))]
    assert 0 < sum(isinstance(op, SoftmaxOperator) for op in operators) < len(operators)


@pytest.mark.parametrize("family", FAMILIES)
def test_components_are_what_they_are_called(family):
    for layer in frozen_layers(build(family), ids(2, 7)):
        mixer = layer.mixer
        width = mixer.inputs.shape[-1]

        def channels(matrix: Tensor, width: int = width) -> Tensor:
            return matrix.repeat_interleave(width // matrix.shape[1], 1)

        hidden = channels(mixer.operator().matrix())
        bare = channels(mixer.operator("unified", ()).matrix())
        torch.testing.assert_close(bare, hidden)
        factors = {"gate": mixer.gate, "norm": mixer.norm}
        for name, factor in factors.items():
            with_factor = channels(mixer.operator("unified", (name,)).matrix())
            expected = hidden if factor is None else hidden * factor.mT[..., None]
            torch.testing.assert_close(with_factor, expected, atol=1e-6, rtol=1e-4)
        activated = channels(mixer.operator("unified", ("activation",)).matrix())
        expected = hidden if mixer.activation is None else hidden * mixer.activation.mT[:, :, None]
        torch.testing.assert_close(activated, expected, atol=1e-6, rtol=1e-4)
        if mixer.conv is None:
            convolved = channels(mixer.operator("unified", ("conv",)).matrix())
            torch.testing.assert_close(convolved, hidden)


def stages(maps: dict[str, Tensor], family: str) -> list[Tensor]:
    """The layers' matrices, those of a block's parallel mixers summed."""
    parallel = family.startswith("falcon_h1")
    by_layer: dict[str, Tensor] = {}
    for path, matrix in maps.items():
        key = path.rpartition(".")[0] if parallel else path
        by_layer[key] = by_layer[key] + matrix if key in by_layer else matrix
    assert not parallel or len(by_layer) * 2 == len(maps)
    return [*by_layer.values()]


def product(maps: dict[str, Tensor], family: str, past: dict[str, Tensor] | None = None) -> Tensor:
    """The rollout, ``(B, L, L)``, of maps with the residual streams of the family.

    ``past`` are the shares ``(B, L, 1)`` in which some mixers read the embeddings.
    """
    rho = eye = torch.eye(next(iter(maps.values())).shape[-1])
    inside = None  # a branch, what its first mixer returned
    for path, matrix in zip(maps, stages(maps, family), strict=False):
        is_attention = path.partition(":")[0].endswith("attn")
        if is_attention and family.startswith("inkling"):
            inside = matrix @ rho
        elif is_attention and family.startswith("zamba"):
            share = (past or {}).get(path, torch.zeros(1))
            # A stream of its own, which only the branch reads.
            inside = rho + matrix @ ((1 - share) * rho + share * eye)
        elif inside is None:
            rho = rho + matrix @ rho
        else:  # Inkling's convolution adds its input
            mixed = matrix @ inside
            rho, inside = rho + mixed + (0 if family.startswith("zamba") else inside), None
    return rho


@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_is_the_product_of_the_layers_matrices(family):
    model, tokens = build(family), ids(2, 11)
    frozen = freeze(Request.of(model, None, tokens))
    steps = [frozen.wiring.steps[layer.step] for layer in frozen.layers]
    past = {
        layer.name: step.reads[1][1].share[..., None].float()
        for layer, step in zip(frozen.layers, steps, strict=True)
        if step.is_aside
    }
    assert bool(past) == family.startswith("zamba")
    for formulation, method, options in (
        ("hidden", MambaRollout(model), {}),
        ("unified", UnifiedImplicitAttention(model), {"aggregation": "rollout"}),
    ):
        maps = hidden_attention(model, tokens, formulation=formulation)
        rho = product({path: m.mean(1) for path, m in maps.items()}, family, past)
        scale = float(rho.abs().max())
        found = method.rollout(tokens, **options)
        torch.testing.assert_close(found, rho, atol=2e-5 * scale, rtol=0)
        row = method.attribute(tokens, position=7, **options)
        torch.testing.assert_close(row, rho[:, 7], atol=2e-5 * scale, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_unified_implicit_attention_in_its_three_aggregations(family):
    model, tokens = build(family), ids(2, 9)
    method = UnifiedImplicitAttention(model)
    names = ("raw", "rollout", "attribution")
    results = [method.attribute(tokens, target=3, aggregation=name) for name in names]
    for result in results:
        assert result.shape == tokens.shape
        assert bool(torch.isfinite(result).all())
        assert float(result.abs().max()) > 0
    maps = hidden_attention(model, tokens, formulation="unified", reduction="mean", rows=-1)
    rows = torch.stack(stages(maps, family)).mean(0)[:, 0]
    torch.testing.assert_close(results[0], rows, atol=1e-5 * float(rows.abs().max()), rtol=1e-4)
    whole = method.rollout(tokens, target=3)[:, -1]
    torch.testing.assert_close(results[2], whole, atol=1e-5 * float(whole.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_latim_adds_up_and_mamba_lrp_runs(family):
    model, tokens = build(family), ids(2, 9)
    if family in NO_STREAM:
        with pytest.raises(ValueError, match="residual stream"):
            LaTIM(model).attribute(tokens, target=3, activation="gate")
    else:
        relevance, delta = LaTIM(model).attribute(
            tokens, target=3, activation="gate", return_convergence_delta=True
        )
        assert float(delta.abs().max()) <= 1e-5 * float(relevance.abs().sum(1).min())
    relevance = MambaLRP(model).attribute(tokens, target=3)
    assert relevance.shape == tokens.shape
    assert bool(torch.isfinite(relevance).all())
    assert float(relevance.abs().max()) > 0


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_row_is_explained_like_the_row_alone(family, side):
    skip_what_fails_by_itself(family, 9, side)
    model, tokens, mask = build(family), ids(2, 9), padded(side)
    real = mask[1].bool()
    with torch.no_grad():
        # Each has a model of its own, since the RecurrentGemma of transformers 4 keeps its states.
        together = build(family)(tokens, attention_mask=mask).logits[1, real]
        apart = build(family)(tokens[1:, real]).logits[0]
    alike = torch.allclose(together, apart, atol=1e-4)
    assert alike == (side == "right" or family not in IGNORE_LEFT_PADDING)
    if not alike:
        return
    for method, options in (
        (MambaRollout(model), {}),
        (MambaAttribution(model), {"target": 3}),
        (UnifiedImplicitAttention(model), {"target": 3}),
    ):
        extra = {"attention_mask": mask}
        batch = method.attribute(tokens, additional_forward_args=extra, **options)
        alone = method.attribute(tokens[1:, real], **options)
        scale = float(alone.abs().max())
        torch.testing.assert_close(batch[1:, real], alone, atol=1e-4 * scale, rtol=0)
        assert float(batch[1, ~real].abs().max()) == 0


OUTPUT_PROJECTIONS = ("out_proj", "o_proj", "linear_out", "output", "dense")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mixer_with_one_head_altered_is_caught(family):
    # A variant that computes something else in one head, of every kind of mixer in the family.
    kinds = {type(module) for _, module in find_mixers(build(family))}
    for kind in kinds:
        model = build(family)
        path, module = next((p, m) for p, m in find_mixers(model) if type(m) is kind)
        names = (n for n in OUTPUT_PROJECTIONS if isinstance(getattr(module, n, None), nn.Module))
        alter_a_head(getattr(module, next(names, ""), module))
        with pytest.raises(ReconstructionError, match=path.replace(".", r"\.")):
            hidden_attention(model, ids(2, 9))
        assert hidden_attention(model, ids(2, 9), check=False)


SCANS = {
    **dict.fromkeys(S6_FAMILIES, "mamba_selective_scan"),
    **dict.fromkeys(SSD_FAMILIES, "mamba2_chunk_scan"),
    "rwkv": "rwkv_linear_attention",
    **dict.fromkeys(DELTA_FAMILIES, "torch_chunk_gated_delta_rule"),
    **dict.fromkeys(KDA_FAMILIES, "chunk_kimi_delta_attention"),
    **dict.fromkeys(CONV_FAMILIES, "causal_conv1d_fn"),
}


@pytest.mark.parametrize("family", [family for family in SCANS if family in FAMILIES])
def test_a_patched_scan_is_caught(family, monkeypatch):
    modeling = modeling_of(build(family), SCANS[family])
    original, calls = getattr(modeling, SCANS[family]), []

    def weaker(*args, **kwargs):
        # Smaller steps; a smaller beta for the delta rule.
        calls.append(args)
        if "beta" in kwargs:
            return original(*args, **(kwargs | {"beta": kwargs["beta"] * 0.8}))
        return original(args[0], args[1] * 0.8, *args[2:], **kwargs)

    monkeypatch.setattr(modeling, SCANS[family], weaker)
    model = build(family)  # which transformers 4 gives the function
    with pytest.raises(ReconstructionError):
        hidden_attention(model, ids(2, 9))
    assert calls


def skip_what_does_not_run(model: nn.Module) -> None:
    try:
        with torch.no_grad():
            model(ids(2, 9))
    except RuntimeError as error:
        pytest.skip(f"the model itself does not run in {model.dtype}: {error}")


@pytest.mark.parametrize("family", FAMILIES)
def test_models_in_half_precision_pass_the_check(family):
    # transformers' chunked xLSTM mixes dtypes; a sequence within one chunk takes another path.
    changes = {"chunk_size": 16} if family.startswith("xlstm") else {}
    model = build(family, **changes).to(torch.bfloat16)
    skip_what_does_not_run(model)
    maps = hidden_attention(model, ids(2, 9), formulation="unified", reduction="mean")
    for matrix in maps.values():
        assert matrix.dtype == torch.float32
        assert bool(torch.isfinite(matrix).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_double_precision_stays_double(family):
    model, tokens = build(family), ids(2, 9)
    single = hidden_attention(model, tokens, reduction="mean")
    skip_what_does_not_run(model.double())
    for path, matrix in hidden_attention(model, tokens, reduction="mean").items():
        assert matrix.dtype == torch.float64
        scale = float(matrix.abs().max())
        torch.testing.assert_close(matrix.float(), single[path], atol=1e-4 * scale, rtol=0)


@pytest.mark.parametrize("factor", [1, 50, 1000])
def test_rwkv_with_large_keys_stays_finite_and_right(factor):
    model = build("rwkv")
    with torch.no_grad():
        for _, module in find_mixers(model):
            module.key.weight.mul_(factor)
    layers = frozen_layers(model, ids(2, 19), check=True)
    for layer in layers:
        assert_reconstructs(layer)
        matrix = layer.mixer.recurrence.matrix()
        assert bool(torch.isfinite(matrix).all())
        assert float(matrix.min()) >= 0
        # A weighted average of values: rows add up to one.
        torch.testing.assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]))


def test_rwkv_token_shift_is_a_convolution_where_features_share_one_mix():
    model, tokens = build("rwkv"), ids(2, 9)
    with torch.no_grad():
        for _, module in find_mixers(model):
            module.time_mix_value.fill_(0.3)
    shifted = ("conv", "gate")
    for layer in frozen_layers(model, tokens, check=True)[:2]:
        mixer = layer.mixer
        assert mixer.conv_bias.abs().max() <= 1e-6 * mixer.values.abs().max()
        plain = mixer.operator("unified").matrix()
        expected = 0.3 * plain
        expected[..., :-1] += 0.7 * plain[..., 1:]
        found = mixer.operator("unified", shifted).matrix()
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def test_unified_attention_of_rwkv_is_the_papers_equation_21():
    """``diag(sigmoid(r)) alpha``, without the token shift of the values (eq. 18)."""
    model, tokens = build("rwkv"), ids(2, 9)
    hidden, unified = (
        hidden_attention(model, tokens, formulation=name) for name in ("hidden", "unified")
    )
    truths = []
    for layer in frozen_layers(model, tokens):
        gate = layer.mixer.gate.mT[..., None]
        truths.append((gate * hidden[layer.name]).mean(1))
        torch.testing.assert_close(unified[layer.name], gate * hidden[layer.name])
    found = UnifiedImplicitAttention(model).attribute(tokens, aggregation="raw")
    torch.testing.assert_close(found, torch.stack(truths).mean(0)[:, -1])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_is_the_matrix_row(family):
    model, tokens = build(family), ids(2, 9)
    for formulation in ("hidden", "unified"):
        maps = hidden_attention(model, tokens, formulation=formulation)
        rows = hidden_attention(model, tokens, formulation=formulation, rows=[5, -1])
        for path, matrix in maps.items():
            scale = float(matrix.abs().max())
            torch.testing.assert_close(rows[path], matrix[:, :, [5, -1]], atol=1e-5 * scale, rtol=0)


class Named(nn.Module):
    def forward(self, x, attention_mask=None, *more, scale=1.0, **options):
        return x


class Hidden(Named):
    def forward(self, *given, **rest):
        return super().forward(*given, **rest)


class Silent(nn.Module):
    forward = staticmethod(lambda *given, **rest: given[0])


@pytest.mark.parametrize("kind", [Named, Hidden])
def test_arguments_go_by_the_names_of_forward(kind):
    module, x, mask = kind(), torch.ones(2, 3, 4), torch.ones(2, 3)
    for args, kwargs in (
        ((x,), {"attention_mask": mask, "scale": 2.0, "position_ids": 3}),
        ((x, mask), {"scale": 2.0, "position_ids": 3}),
        ((), {"x": x, "attention_mask": mask, "scale": 2.0, "position_ids": 3}),
    ):
        call = MixerCall("mixer", module, args, kwargs, x)
        found = {k: v for k, v in call.arguments.items() if k != "self"}
        assert found == {"x": x, "attention_mask": mask, "scale": 2.0, "position_ids": 3}
        assert torch.equal(call.token_mask(), mask)
        assert call.tokens("x") is x
    more = MixerCall("mixer", module, (x, mask, 5), {}, x)
    assert torch.equal(more.token_mask(), mask)


def test_arguments_that_have_no_names_anywhere():
    x, mask = torch.ones(2, 3, 4), torch.ones(2, 3)
    call = MixerCall("mixer", Silent(), (x,), {"attention_mask": mask}, x)
    assert torch.equal(call.token_mask(), mask)
    assert call.tokens("x") is x


def test_the_librarys_own_adapters_have_one_class_each(own_registry):
    def freeze_other(call):
        raise NotImplementedError

    before = registered()
    with pytest.raises(ValueError, match=r"'MambaMixer'.*s6\.freeze_s6 and .*freeze_other"):
        registry.adapts("MambaMixer")(freeze_other)
    assert registered() == before
    # A user's function replaces the library's.
    register_mixer("MambaMixer", freeze_other)
    assert find_adapter(build("mamba").backbone.layers[0].mixer) is freeze_other


def test_the_page_on_adding_a_family_runs(own_registry):
    page = (ROOT / "docs" / "add_a_family.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 8
    space: dict[str, object] = {"__name__": "add_a_family"}
    for block in blocks:
        exec(block, space)
    model, tokens, mask = space["model"], space["tokens"], padded("left")
    for layer in frozen_layers(model, tokens, mask, check=True):
        assert_reconstructs(layer, mask)


def test_the_page_of_families_names_every_mixer():
    page = (ROOT / "docs" / "families.md").read_text()
    missing = [name for name in registered() if f"`{name.rpartition('.')[2]}`" not in page]
    assert not missing


def test_an_rwkv_that_rescales_its_weights_remembers_it():
    fresh, model = (build("rwkv", num_hidden_layers=5, rescale_every=2) for _ in range(2))
    first = MambaRollout(model).attribute(ids(2, 7))
    torch.testing.assert_close(model(ids(2, 7)).logits, fresh(ids(2, 7)).logits)
    for explained in (model, fresh):
        torch.testing.assert_close(MambaRollout(explained).attribute(ids(2, 7)), first)


@pytest.mark.parametrize("family", ["recurrent_gemma", "rwkv", "xlstm"])
def test_no_cache_is_filled_while_a_model_is_explained(family: str) -> None:
    if family not in FAMILIES:
        pytest.skip("not in this transformers")
    tokens = ids(1, 6)
    for method in (MambaAttribution, LaTIM, MambaLRP):
        found, expected = (
            method(build(family, use_cache=cached)).attribute(tokens, target=3)
            for cached in (True, False)
        )
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_knows_a_gate_that_is_wrong_by_a_tenth(family, dtype, monkeypatch):
    model = build(family).to(dtype)
    skip_what_does_not_run(model)
    for layer in frozen_layers(model, ids(2, 9), check=True):
        mixer, call = layer.mixer, layer.call
        # What a gate does to the output, up to the bias term of the output projection.
        rebuilt = mixer.output()
        wrong = rebuilt + 0.1 * (rebuilt - mixer.out_proj(torch.zeros_like(mixer.inputs)))
        error = Deviation.of(call, Rebuilt.of(mixer)).errors(None).whole
        assert error <= 0.8 * tolerances_of(call, mixer.rounding).dtype
        deviation = Deviation.of(call, replace(Rebuilt.of(mixer), output=wrong))
        with pytest.raises(ReconstructionError):
            check_reconstruction(layer.name, call, deviation)


def test_each_example_is_checked_by_itself():
    layer = frozen_layers(build("mamba"), ids(2, 9))[0]
    rebuilt = Rebuilt.of(layer.mixer)
    rebuilt.output[1] *= 1.01  # of the smaller example
    loud = replace(layer.call, result=layer.call.output * torch.tensor([1e4, 1.0])[:, None, None])
    wrong = replace(rebuilt, output=rebuilt.output * torch.tensor([1e4, 1.0])[:, None, None])
    with pytest.raises(ReconstructionError, match="relative error 9"):
        check_reconstruction("a", loud, Deviation.of(loud, wrong))


def with_weights_of(scale):
    return lambda mixer: [layer.weight.mul_(scale) for layer in (mixer.in_proj, mixer.x_proj)]


# On larger tokens the recurrence adds more, or still little, or less than float32 rounds.
FAINT = {
    "steps": lambda mixer: mixer.dt_proj.bias.fill_(-14.0),
    "small weights": with_weights_of(1e-2),
    "tiny weights": with_weights_of(1e-3),
}


@each_method
@pytest.mark.parametrize("error", [0.0, 0.005])
@pytest.mark.parametrize("faint", FAINT)
def test_a_wrong_recurrence_is_known_however_little_it_adds(method, error, faint, monkeypatch):
    # A recurrence of 1e-7 of the output, in float32, and one that is off by half a percent.
    model, tokens = build("mamba"), ids(2, 9)
    with torch.no_grad():
        for layer in model.backbone.layers:
            FAINT[faint](layer.mixer)
    freeze = find_adapter(model.backbone.layers[0].mixer)

    def wrong(call):
        mixer = freeze(call)
        factor = torch.full_like(mixer.inputs, 1 + error)
        return replace(mixer, recurrence=mixer.recurrence.scaled(factor, None))

    first = frozen_layers(model, tokens)[0].mixer
    assert float(first.recurrence_share(first.gated_output()).max()) < 1e-5
    monkeypatch.setitem(registry._REGISTRY, "MambaMixer", wrong)
    if not error:
        assert method(model).attribute(tokens, target=4).isfinite().all()
        return
    with pytest.raises(ReconstructionError, match="of what its recurrence adds"):
        method(model).attribute(tokens, target=4)


def test_a_recurrence_that_adds_nothing_is_not_known_by_its_rounding(monkeypatch):
    model, tokens = build("recurrent_gemma"), ids(2, 9)
    freeze = find_adapter(model.model.layers[0].temporal_block)

    def all_in_the_skip(call):
        mixer = freeze(call)
        nothing = mixer.recurrence.scaled(torch.zeros_like(mixer.inputs), None)
        return replace(mixer, recurrence=nothing, skip=mixer.mixed / mixer.values)

    monkeypatch.setitem(registry._REGISTRY, "RecurrentGemmaRecurrentBlock", all_in_the_skip)
    for layer in frozen_layers(model, tokens, check=True)[:2]:
        mixer = layer.mixer
        share = mixer.recurrence_share(mixer.gated_output())
        assert (share > 0).all()
        assert (share < torch.finfo(torch.float32).eps).all()
