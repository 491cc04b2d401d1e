"""Models that are not simply there: offloaded, spread over devices, compiled, quantised."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, NO_STREAM, TRANSFORMERS_4, build
from gpu import exact_convolutions
from methods import METHODS, assert_close, each_method
from models import embed, ids, tiny
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from unchanged import assert_unchanged, fingerprint, tensors_alive

from captum_ssm import (
    LaTIM,
    MambaAttribution,
    MambaLRP,
    MambaRollout,
    RawAttention,
    ReconstructionError,
    UnsupportedModelError,
    hidden_attention,
)
from captum_ssm.capture import FrozenCall, Request, freeze
from captum_ssm.interventions import knockout
from captum_ssm.mixers.linear_layers import is_quantized
from captum_ssm.utils.nested import map_tensors
from captum_ssm.utils.offload import moved

__all__ = ["exact_convolutions"]
TOKENS = ids(2, 9)
some_families = pytest.mark.parametrize("family", ["mamba", "jamba", "mamba2", "recurrent_gemma"])


@cache
def expected(family: str, method: type) -> Tensor:
    return method(build(family)).attribute(TOKENS, target=5)


def accelerate() -> Any:
    return pytest.importorskip("accelerate")


def split(model: nn.Module, folder: str) -> nn.Module:
    """Every other layer on disk, the rest of the model at hand."""
    base = getattr(model, model.base_model_prefix)
    names = [name for name, _ in base.named_children() if name != "layers"]
    places = {f"{model.base_model_prefix}.{name}": "cpu" for name in names} | {"lm_head": "cpu"}
    for i in range(len(base.layers)):
        places[f"{model.base_model_prefix}.layers.{i}"] = "disk" if i % 2 else "cpu"
    return accelerate().dispatch_model(model, places, main_device="cpu", offload_dir=folder)


OFFLOADED: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "cpu": lambda model, folder: accelerate().cpu_offload(model, execution_device="cpu"),
    "disk": lambda model, folder: accelerate().disk_offload(model, folder, execution_device="cpu"),
    "every other layer": split,
}


@each_method
@some_families
@pytest.mark.parametrize("kind", OFFLOADED)
@pytest.mark.filterwarnings("ignore")
def test_offloaded_weights_are_loaded_where_they_are_read(kind, family, method, tmp_path):
    model = OFFLOADED[kind](build(family), str(tmp_path))
    before = [name for name, p in model.named_parameters() if p.is_meta]
    assert before
    found = method(model).attribute(TOKENS, target=5)
    torch.testing.assert_close(found, expected(family, method))
    assert [name for name, p in model.named_parameters() if p.is_meta] == before
    torch.testing.assert_close(model(TOKENS).logits, build(family)(TOKENS).logits)


def block_of(path: str) -> str | None:
    """The path of the block that a weight belongs to: up to its first number."""
    parts = path.split(".")
    return next((".".join(parts[: i + 1]) for i, p in enumerate(parts) if p.isdigit()), None)


@pytest.fixture
def blocks_alive(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """At each load from disk, the number of blocks any of whose matrices exist.

    The rule of a norm keeps its weight, which has one axis, until the backward pass.
    """
    offload = pytest.importorskip("accelerate.utils.offload")
    load, weights, counts = offload.load_offloaded_weight, [], []

    def counted(file: str, info: Any) -> Tensor:
        weight = load(file, info)
        if weight.dim() > 1:
            weights.append((block_of(Path(file).name), StorageWeakRef(weight.untyped_storage())))
        weights[:] = [one for one in weights if not one[1].expired()]
        counts.append(len({block for block, _ in weights if block is not None}))
        return weight

    monkeypatch.setattr(offload, "load_offloaded_weight", counted)
    return counts


@pytest.fixture
def only_references() -> Iterator[None]:
    """What nothing refers to is gone, without the garbage collector's help."""
    gc.disable()
    yield
    gc.enable()


LOADED_AT_ONCE = [pytest.param(method, ["MambaBlock"]) for method in (LaTIM, MambaLRP)]


@pytest.mark.parametrize(
    ("method", "at_once"), [*((method, None) for method in METHODS), *LOADED_AT_ONCE]
)
@pytest.mark.filterwarnings("ignore")
def test_no_more_than_two_blocks_are_in_memory(
    method, at_once, blocks_alive, only_references, tmp_path
):
    model = tiny("jamba" if at_once is None else "mamba", layers=3).requires_grad_(False)
    truth = method(model).attribute(TOKENS, target=5)
    accelerate().disk_offload(
        model.requires_grad_(True),
        str(tmp_path),
        execution_device="cpu",
        preload_module_classes=at_once,
    )
    assert_close(method(model).attribute(TOKENS, target=5), truth, 1e-6)
    assert max(blocks_alive) <= 2


@pytest.mark.parametrize("method", [MambaAttribution, MambaLRP])
@pytest.mark.parametrize("fails", [None, "the model", "the target"])
def test_an_offloaded_model_is_left_as_it_was(method, fails, tmp_path):
    model = tiny("jamba", layers=2)
    model.get_output_embeddings().weight.requires_grad_(False)
    accelerate().disk_offload(model, str(tmp_path), execution_device="cpu")
    if fails == "the model":
        model.get_output_embeddings().register_forward_pre_hook(lambda *_: 1 / 0)
    hooks = [module.__dict__.get("_hf_hook") for module in model.modules()]
    failure = pytest.raises((AssertionError, ZeroDivisionError)) if fails else nullcontext()
    with failure:
        method(model).attribute(TOKENS, target=10**6 if fails == "the target" else 5)
    assert [module.__dict__.get("_hf_hook") for module in model.modules()] == hooks
    for name, p in model.named_parameters():
        assert p.is_meta
        assert p.requires_grad == (name != "lm_head.weight"), name


def test_what_a_graph_saves_is_released(tmp_path):
    model = tiny("jamba", layers=2)
    accelerate().disk_offload(model, str(tmp_path), execution_device="cpu")
    method, alive = MambaLRP(model, memory_limit=1 << 30), []
    for _ in range(3):
        method.attribute(TOKENS, target=5)
        alive.append(tensors_alive())
    assert alive[1] == alive[2]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_offloaded(family):
    if TRANSFORMERS_4 and family == "zamba2":
        pytest.skip("the Zamba2 of transformers 4 makes its cache where its weights were left")
    model = accelerate().cpu_offload(build(family), execution_device="cpu")
    maps = hidden_attention(model, TOKENS, formulation="unified", reduction="mean")
    truth = hidden_attention(build(family), TOKENS, formulation="unified", reduction="mean")
    for path, matrix in truth.items():
        torch.testing.assert_close(maps[path], matrix)
    found = MambaLRP(model).attribute(TOKENS, target=5)
    torch.testing.assert_close(found, expected(family, MambaLRP))


def tensors_of(mixer) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(keep, mixer)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_all_of_a_frozen_mixer_is_moved(family):
    for layer in freeze(Request.of(build(family), None, TOKENS)).layers:
        there = moved(layer.mixer, torch.device("cpu"), torch.device("meta"))
        assert {t.device.type for t in tensors_of(there)} == {"meta"}
        assert len(tensors_of(there)) >= len(tensors_of(layer.mixer))


@some_families
@each_method
def test_moved_mixers_are_explained_alike(method, family, monkeypatch):
    own = FrozenCall.mixer.fget
    here, other = torch.device("cpu"), torch.device("cpu", 0)  # the same, by another name
    there = property(lambda layer: moved(own(layer), here, other))
    monkeypatch.setattr(FrozenCall, "mixer", there)
    found = method(build(family)).attribute(TOKENS, target=5)
    torch.testing.assert_close(found, expected(family, method))


@pytest.mark.cuda
@pytest.mark.usefixtures("exact_convolutions")
@pytest.mark.parametrize("family", FAMILIES)
@each_method
def test_models_on_a_gpu(method, family):
    explained = method(build(family).cuda())
    if method is LaTIM and family in NO_STREAM:
        with pytest.raises(UnsupportedModelError, match="residual stream"):
            explained.attribute(TOKENS.cuda(), target=5)
        return
    found = explained.attribute(TOKENS.cuda(), target=5)
    assert found.is_cuda
    torch.testing.assert_close(found.cpu(), expected(family, method), rtol=1e-3, atol=1e-4)


@pytest.mark.cuda
@pytest.mark.usefixtures("exact_convolutions")
@some_families
@each_method
def test_layers_on_several_devices(method, family):
    hooks = pytest.importorskip("accelerate.hooks")
    model = build(family)
    for i, layer in enumerate(getattr(model, model.base_model_prefix).layers):
        place = torch.device("cuda" if i % 2 else "cpu")
        layer.to(place)
        hooks.add_hook_to_module(layer, hooks.AlignDevicesHook(place, io_same_device=True))
    found = method(model).attribute(TOKENS, target=5)
    assert found.device == TOKENS.device
    torch.testing.assert_close(found, expected(family, method), rtol=1e-3, atol=1e-4)


@pytest.fixture(params=["in place", "wrapped"])
def compiling(request):
    """A model of one layer, the same compiled, and the graphs that its compiler was given."""
    model, graphs = build("mamba", num_hidden_layers=1), []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    if request.param == "wrapped":
        return model, torch.compile(model, backend=backend), graphs
    model.compile(backend=backend)
    return model, model, graphs


def test_a_compiled_model_is_run_without_its_compiler(compiling):
    model, compiled, graphs = compiling
    before, plain = model._compiled_call_impl, build("mamba", num_hidden_layers=1)
    for method in METHODS:
        truth = method(plain).attribute(TOKENS, target=5)
        torch.testing.assert_close(method(compiled).attribute(TOKENS, target=5), truth)
    found = MambaRollout(compiled).attribute(embed(model, TOKENS)).sum(-1)
    torch.testing.assert_close(found, MambaRollout(plain).attribute(TOKENS))
    paths = list(hidden_attention(plain, TOKENS))
    assert list(hidden_attention(compiled, TOKENS)) == paths
    assert not graphs
    assert model._compiled_call_impl is before


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_behind_a_function(compiling):
    model, compiled, graphs = compiling
    compiled(TOKENS, use_cache=False)  # transformers 4 makes a cache that can't be traced
    count = len(graphs)
    assert count > 0
    for method in METHODS:
        truth = method(build("mamba", num_hidden_layers=1)).attribute(TOKENS, target=5)
        for given in (model, compiled):
            explained = method(lambda t: compiled(t, use_cache=False).logits, given)
            torch.testing.assert_close(explained.attribute(TOKENS, target=5), truth)
    edges = {"sources": 2, "targets": -1, "layers": 0}
    with torch.no_grad():
        plain = build("mamba", num_hidden_layers=1)
        with knockout(plain, **edges):
            truth = plain(TOKENS).logits
        with knockout(model, **edges):
            found = compiled(TOKENS, use_cache=False).logits
    torch.testing.assert_close(found, truth)
    compiled(TOKENS, use_cache=False)
    assert len(graphs) == count  # neither compiled for the recording, nor anew behind it


class Int8Linear(nn.Linear):
    """As bitsandbytes' and quanto's: a Linear whose weight is another thing."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None)
        scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        codes = (layer.weight.detach() / scale).round().to(torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.bias = layer.bias

    def matrix(self) -> Tensor:
        return self.weight * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix(), self.bias)


class PackedLinear(Int8Linear):
    """As bitsandbytes' in four bits: the shape of the weight says nothing."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        self.weight = nn.Parameter(self.weight.detach().reshape(-1, 1), requires_grad=False)

    def matrix(self) -> Tensor:
        return self.weight.view(self.out_features, self.in_features) * self.scale


class Adapted(nn.Module):
    """As peft's: a plain weight, and a path beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.base_layer = layer
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base_layer.bias

    def matrix(self) -> Tensor:
        return self.weight + self.up.weight @ self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


class LoraLinear(nn.Linear):
    """As LoRA's own: a Linear with floating-point weights and another forward."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None)
        self.weight, self.bias = layer.weight, layer.bias
        self.down = nn.Parameter(0.1 * torch.randn(2, layer.in_features))
        self.up = nn.Parameter(0.1 * torch.randn(layer.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.down.mT @ self.up.mT


class RoundingLinear(Int8Linear):
    """As where activations are quantised too: what enters is rounded to eight bits."""

    def forward(self, x: Tensor) -> Tensor:
        scale = x.detach().abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        rounded = (x / scale).round() * scale
        return super().forward(x + (rounded - x).detach())


def assert_found_louder(model: nn.Module, factor: float) -> None:
    """A mixer of the model that returns ``factor`` times its output is noticed."""
    name, module = next((n, m) for n, m in model.named_modules() if hasattr(m, "conv1d"))
    own = module.forward
    module.forward = lambda *args, **kwargs: factor * own(*args, **kwargs)
    with pytest.raises(ReconstructionError, match=name):
        RawAttention(model).attribute(TOKENS)


def with_linears(model: nn.Module, make: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """The model with its linear layers replaced, but those whose weights transformers reads."""
    for path, layer in [*model.named_modules()]:
        if type(layer) is nn.Linear and not path.endswith(("lm_head", "dt_proj", "router")):
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, make(layer))
    return model


def plain(layer: nn.Linear, make: Callable[[nn.Linear], Any]) -> nn.Linear:
    other = copy.deepcopy(layer)
    other.weight = nn.Parameter(make(layer).matrix().detach())
    return other


@each_method
@pytest.mark.parametrize("family", ["mamba", "jamba", "mamba2", "minimax"])
@pytest.mark.parametrize("kind", [Int8Linear, PackedLinear, Adapted])
def test_layers_that_are_not_plain_are_explained_by_what_they_compute(kind, family, method):
    def make(layer: nn.Linear) -> nn.Module:
        torch.manual_seed(0)
        return kind(layer)

    model = with_linears(build(family), make)
    same = with_linears(build(family), partial(plain, make=make))
    # Two sums instead of one: rounded in another order.
    torch.testing.assert_close(model(TOKENS).logits, same(TOKENS).logits, rtol=1e-4, atol=1e-4)
    before = fingerprint(model)
    found = method(model).attribute(TOKENS, target=5)
    truth = method(same).attribute(TOKENS, target=5)
    torch.testing.assert_close(found, truth, rtol=1e-3, atol=1e-4)
    assert_unchanged(model, before)


@each_method
@pytest.mark.parametrize("name", ["in_proj", "out_proj"])
def test_a_hook_that_changes_what_a_layer_returns_is_noticed(name, method):
    model = build("mamba")
    layer, seen = model.get_submodule(f"backbone.layers.0.mixer.{name}"), []
    with layer.register_forward_hook(lambda module, args, output: seen.append(output)):
        found = method(model).attribute(TOKENS, target=5)
    assert seen  # and nothing else
    torch.testing.assert_close(found, method(model).attribute(TOKENS, target=5))
    with (
        layer.register_forward_hook(lambda module, args, output: 2 * output),
        pytest.raises(ReconstructionError, match="mixer"),
    ):
        method(model).attribute(TOKENS, target=5)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_scripted_part_is_refused():
    model = build("mamba")
    model.lm_head = torch.jit.script(model.lm_head)
    with pytest.raises(UnsupportedModelError, match="lm_head is a torch"):
        MambaLRP(model).attribute(TOKENS, target=5)


def test_a_replaced_forward_of_a_layer_is_noticed():
    model = build("mamba")
    layer = model.backbone.layers[0].mixer.in_proj
    own = layer.forward
    layer.forward = lambda x: 2 * own(x)
    with pytest.raises(ReconstructionError, match="mixer"):
        MambaLRP(model).attribute(TOKENS, target=5)


@pytest.mark.parametrize("family", ["mamba", "jamba", "mamba2"])
def test_rounded_activations_are_no_other_mixer(family):
    model = with_linears(build(family), RoundingLinear)
    found = MambaRollout(model).attribute(TOKENS)
    torch.testing.assert_close(found, MambaRollout(build(family)).attribute(TOKENS), rtol=0, atol=1)
    assert_found_louder(model, 1.1)


def test_quantised_is_what_holds_codes():
    layer = nn.Linear(4, 4)
    assert not is_quantized(layer)
    assert not is_quantized(LoraLinear(layer))
    assert not is_quantized(Adapted(layer))
    assert is_quantized(Adapted(PackedLinear(layer)))
    assert is_quantized(nn.Linear(4, 4, dtype=torch.float8_e4m3fn, device="meta"))


@pytest.mark.parametrize("kind", [LoraLinear, Adapted])
@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_adapters_do_not_hide_another_mixer(family, kind):
    model = with_linears(build(family), kind)
    RawAttention(model).attribute(TOKENS)
    assert_found_louder(model, 1.01)


@pytest.mark.parametrize("kind", [LoraLinear, Adapted])
def test_adapters_are_part_of_a_knockout(kind):
    model = with_linears(build("mamba2"), kind)
    with knockout(model, sources=[2]):
        found = model(TOKENS).logits
    for path, layer in [*model.named_modules()]:
        if isinstance(layer, kind):  # one plain matrix in place of both
            merged = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
            matrix = layer(torch.eye(layer.in_features)) - layer(torch.zeros(1, layer.in_features))
            merged.weight.data, merged.bias = matrix.mT.detach(), layer.bias
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, merged)
    with knockout(model, sources=[2]):
        torch.testing.assert_close(model(TOKENS).logits, found)
    assert not torch.allclose(model(TOKENS).logits, found, atol=1e-4)


@each_method
@pytest.mark.parametrize("kind", [LoraLinear, Adapted])
@pytest.mark.parametrize("family", ["mamba", "falcon_mamba", "jamba"])
def test_a_wrapper_whose_weight_is_read_adds_nothing(family, kind, method):
    # These families multiply with the weight of their dt_proj, and so leave out LoRA there.
    model, wrapped = build(family), build(family)
    for path, layer in [*wrapped.named_modules()]:
        if path.endswith("dt_proj"):
            parent, _, name = path.rpartition(".")
            setattr(wrapped.get_submodule(parent), name, kind(layer))
    assert torch.equal(wrapped(TOKENS).logits, model(TOKENS).logits)
    expected = method(model).attribute(TOKENS, target=3)
    torch.testing.assert_close(method(wrapped).attribute(TOKENS, target=3), expected)


def bitsandbytes(layer: nn.Linear, bits: int) -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    kind, options = bnb.nn.Linear4bit, {"quant_type": "nf4"}
    if bits == 8:
        kind, options = bnb.nn.Linear8bitLt, {"has_fp16_weights": False}
    made = kind(layer.in_features, layer.out_features, layer.bias is not None, **options)
    made.weight = type(made.weight)(layer.weight.data, requires_grad=False, **options)
    made.bias = layer.bias
    return made.to("cpu")


def quanto(layer: nn.Linear) -> nn.Module:
    q = pytest.importorskip("optimum.quanto")
    made = q.QLinear.from_module(layer, weights=q.qint8)
    made.freeze()
    return made


def torchao(layer: nn.Linear) -> nn.Module:
    q = pytest.importorskip("torchao.quantization")
    q.quantize_(layer, q.Int8WeightOnlyConfig())
    return layer


LIBRARIES = {
    "bitsandbytes, 8 bits": partial(bitsandbytes, bits=8),
    "bitsandbytes, 4 bits": partial(bitsandbytes, bits=4),
    "quanto": quanto,
    "torchao": torchao,
}


@each_method
@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.filterwarnings("ignore")
def test_quantised_by_a_library(library, method):
    model = with_linears(build("jamba"), LIBRARIES[library]).requires_grad_(False)
    found = method(model).attribute(TOKENS, target=5)
    assert found.isfinite().all()
    # Near the unquantised model's, as its logits are.
    truth = expected("jamba", method)
    error = (model(TOKENS).logits - build("jamba")(TOKENS).logits).norm()
    assert error > 0
    assert (found - truth).norm() < (2 if "4" in library else 0.2) * truth.norm()
