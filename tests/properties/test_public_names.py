"""The public names, their documentation, and the one call by which others extend the library."""

import ast
import inspect
import pickle
import re
import subprocess
import sys
from collections import OrderedDict
from dataclasses import replace
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
from folders import ROOT
from methods import each_method
from models import ids
from running_mean import RunningMean, freeze_running_mean
from torch import nn

import captum_ssm
from captum_ssm import (
    FrozenMixer,
    MambaAttribution,
    MambaRollout,
    MixerSupport,
    RawAttention,
    ReconstructionError,
    UnsupportedModelError,
    hidden_attention,
    register_mixer,
)
from captum_ssm.capture import Request, freeze
from captum_ssm.explanation.corpus.parts import ReportExample
from captum_ssm.mixers import find_adapter, registered
from captum_ssm.operators import PermutedOperator

pytestmark = pytest.mark.usefixtures("own_registry")
NAMES = (
    *("LaTIM", "MambaAttribution", "MambaLRP", "MambaRollout", "RawAttention"),
    *("UnifiedImplicitAttention", "SSMLLMAttribution", "hidden_attention"),
    *("Estimate", "estimate", "FrozenMixer", "MixerCall", "register_mixer", "register_scan"),
    *("InputError", "MemoryLimitError", "ReconstructionError", "RelevanceFlow", "TargetError"),
    "Readout",
    *("UnsupportedModelError", "supported", "Support", "MixerSupport", "token_grids"),
    *("Area", "ReceptiveField", "effective_receptive_field", "Explanation", "explain"),
    *("ExplainBatches", "ServedLog", "explain_dataset"),
    *("Trace", "continuation_relevance", "replay", "trace", "trace_rows"),
)


def test_the_public_names():
    assert list(captum_ssm.__all__) == sorted(NAMES)
    for name in NAMES:
        assert getattr(captum_ssm, name) is not None


def test_names_are_imported_when_they_are_used_and_no_others():
    assert {*NAMES, "attr", "kernels", "visualization"} <= set(dir(captum_ssm))
    assert captum_ssm.metrics is sys.modules["captum_ssm.metrics"]
    with pytest.raises(AttributeError, match="module 'captum_ssm' has no attribute 'nothing'"):
        captum_ssm.nothing  # noqa: B018
    # Type checkers read the names that are imported for them.
    tree = ast.parse(Path(captum_ssm.__file__).read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    assert set(NAMES) <= names
    for name in NAMES:
        module, _, own = captum_ssm.__getattr__(name).__module__.rpartition(".")
        assert f"{module}.{own}".startswith("captum_ssm.")
    assert pickle.loads(pickle.dumps(MambaRollout)) is MambaRollout


OLD_NAMES = {  # CHANGELOG.md has them in a table
    "captum_ssm": {
        **{"_cli": "captum_ssm.cli", "ops": "captum_ssm.kernels"},
        **{"page": "captum_ssm.explanation.page", "scans": "captum_ssm.discovery.scans"},
        "generation": "captum_ssm.explanation.make.answers.captum_llm",
    },
    "captum_ssm.attr": {"MapOptions": "attr.MapChoices"},
    "captum_ssm.kernels": {
        "diagonal_vecmat": "kernels.diagonal_rmatvec",
        "naive_linear_matrix": "kernels.naive_linear_attention_matrix",
        "linear_vecmat": "kernels.linear_attention_rmatvec",
        **{
            f"linear_{name}": f"kernels.linear_attention_{name}"
            for name in ("mean", "rows", "scan")
        },
    },
    "captum_ssm.metrics": {"Estimate": "metrics.Interval"},
    "captum_ssm.operators": {
        "BandOperator": "operators.SkipOperator",
        "ChainOperator": "TokenOperator.scaled and .convolved",
        "ComposedOperator": "operators.ScaledOperator",
        "PlacedOperator": "operators.PackedOperator",
        "WindowedOperator": "operators.PermutedOperator",
        "band": "operators.composed",
    },
}
OLD_ATTRIBUTES = {
    FrozenMixer: {"centred": "centered", "exchanged": "neighbor_share"},
    MixerSupport: {"exchanged": "neighbor_share", "stage": "step"},
    ReportExample: {"place": "point"},
    PermutedOperator: {"apply": "matvec", "vecmat": "rmatvec", "place": "position"},
}


@pytest.mark.parametrize(("module", "old"), [(m, old) for m in OLD_NAMES for old in OLD_NAMES[m]])
def test_an_old_name_raises_an_error_with_the_new_one(module, old):
    new = OLD_NAMES[module][old]
    with pytest.raises(AttributeError, match=rf"\.{old} is now {re.escape(new)}\.$"):
        getattr(import_module(module), old)


@pytest.mark.parametrize("kind", OLD_ATTRIBUTES)
def test_an_old_attribute_raises_an_error_with_the_new_one(kind):
    value = kind.__new__(kind)
    for old, new in OLD_ATTRIBUTES[kind].items():
        with pytest.raises(
            AttributeError, match=f"{kind.__name__}.{old} is now {kind.__name__}.{new}"
        ):
            getattr(value, old)
        assert hasattr(kind, new) or new in kind.__dataclass_fields__
    with pytest.raises(AttributeError, match=f"'{kind.__name__}' object has no attribute 'x'"):
        value.x  # noqa: B018


def test_the_version_is_the_installed_one():
    try:
        installed = version("captum-ssm")
    except PackageNotFoundError:
        pytest.skip("captum-ssm is imported from its sources, not installed")
    assert installed == captum_ssm.__version__


def test_the_citation_names_this_version():
    assert f"\nversion: {captum_ssm.__version__}\n" in (ROOT / "CITATION.cff").read_text("utf-8")


@each_method
def test_attribute_has_captums_signature(method):
    names = list(inspect.signature(method.attribute).parameters)
    assert names[:4] == ["self", "inputs", "target", "additional_forward_args"]
    assert {"position", "return_convergence_delta"} <= set(names)
    for part in ("Args:", "Returns:", "Raises:"):
        assert part in method.attribute.__doc__
    assert list(inspect.signature(method).parameters)[:2] == ["forward_func", "model"]


def test_one_import_brings_every_module_and_nothing_heavy():
    # nnsight's import gives every object a `save`; anyio, and all that needs it, then fails.
    code = (
        "import sys, captum_ssm as c\n"
        "parts = c.attr, c.discovery, c.kernels, c.metrics, c.mixers, c.models, c.operators\n"
        "for module in parts:\n"
        "    assert module.__name__.startswith('captum_ssm.')\n"
        "c.metrics.perturbation, c.visualization.image_overlay\n"
        "heavy = {'datasets', 'nnsight', 'scipy', 'sklearn', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "import anyio\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def toy() -> nn.Module:
    parts = {"embedding": nn.Embedding(37, 8), "mixer": RunningMean(), "head": nn.Linear(8, 5)}
    return nn.Sequential(OrderedDict(parts))


def assert_explained(model: nn.Module) -> None:
    tokens = ids(2, 7)
    (maps,) = hidden_attention(model, tokens).values()
    age = (torch.arange(7)[:, None] - torch.arange(7)).clamp(min=0)
    truth = torch.exp(-model.mixer.rate.detach()[:, None, None] * age).tril()
    torch.testing.assert_close(maps, truth.expand(2, 8, 7, 7))
    for method in (RawAttention, MambaRollout, MambaAttribution):
        assert method(model).attribute(tokens, target=3).shape == (2, 7)
    mean = truth.mean(0)
    torch.testing.assert_close(RawAttention(model).attribute(tokens)[0], mean[-1])


def test_an_unregistered_loop_is_measured():
    assert_explained(toy())


class Saturated(RunningMean):
    def forward(self, x):
        h, out = torch.zeros_like(x[:, 0]), []
        for token in x.unbind(1):
            h = torch.tanh(self.decay(token) * h + token)
            out.append(h)
        return self.out_proj(torch.stack(out, 1))


def test_an_unregistered_mixer_is_not_guessed():
    model = toy()
    model.mixer = Saturated()
    with pytest.raises(UnsupportedModelError, match="Saturated"):
        RawAttention(model).attribute(ids())


def test_register_a_class():
    assert register_mixer(RunningMean, freeze_running_mean) is freeze_running_mean
    assert_explained(toy())


def test_register_by_decorator():
    @register_mixer(RunningMean)
    def freeze(call):
        """Its docstring."""
        return freeze_running_mean(call)

    assert freeze.__doc__ == "Its docstring."  # the function itself comes back
    assert_explained(toy())


@pytest.mark.parametrize("whole", [True, False])
def test_register_by_name(whole):
    module = RunningMean.__module__
    name = f"{module}.RunningMean" if whole else "RunningMean"
    register_mixer(name, freeze_running_mean)
    assert name in registered()
    assert registered() == sorted(registered())
    assert_explained(toy())


def test_the_most_derived_class_wins():
    class Derived(RunningMean):
        pass

    def freeze_derived(call):
        return freeze_running_mean(call)

    register_mixer(RunningMean, freeze_running_mean)
    assert find_adapter(Derived()) is freeze_running_mean
    register_mixer(Derived, freeze_derived)
    assert find_adapter(Derived()) is freeze_derived
    assert find_adapter(RunningMean()) is freeze_running_mean
    assert find_adapter(nn.Linear(2, 2)) is None


def test_a_name_matches_whole_parts_only():
    register_mixer("ningMean", freeze_running_mean)
    assert find_adapter(RunningMean()) is None


def test_a_wrong_adapter_is_found_out():
    register_mixer(RunningMean, lambda call: freeze_running_mean(call, error=0.01))
    with pytest.raises(ReconstructionError, match="mixer"):
        RawAttention(toy()).attribute(ids())
    RawAttention(toy(), check=False).attribute(ids())


def test_an_adapter_may_read_its_coefficients_without_a_graph():
    class Decaying(RunningMean):
        def decay(self, token):
            return torch.exp(-torch.sigmoid(token))

    @register_mixer(Decaying)
    def freeze_decaying(call):
        x, mixer = call.tokens("x"), freeze_running_mean(call)
        with torch.no_grad():
            dt, A = torch.sigmoid(x), -torch.ones(x.shape[-1], 1)
            return replace(mixer, recurrence=replace(mixer.recurrence, dt=dt, A=A))

    assert find_adapter(Decaying()) is freeze_decaying
    model = nn.Sequential(Decaying(), Decaying(), nn.Linear(8, 5))
    x = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))
    first, second = (
        freeze(Request.of(model, None, x), target=(-1, 2), gradients=True, check=check)
        .layers[0]
        .call.gradient
        for check in (True, False)
    )
    torch.testing.assert_close(first, second)


def test_a_mixer_that_is_the_whole_model():
    register_mixer(RunningMean, freeze_running_mean)
    (maps,) = hidden_attention(RunningMean(), torch.randn(2, 5, 8)).values()
    assert maps.shape == (2, 8, 5, 5)
