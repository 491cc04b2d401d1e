"""The folder for Hugging Face's kernel-builder: all sources, and Python that stands by itself.

The compiled build was tried by hand (docs/development/releasing.md says how); here the operations
of the folder run in PyTorch, under a name of their own.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from types import ModuleType

import pytest
import torch
from folders import ROOT

from captum_ssm import kernels

NAMESPACE = "_captum_ssm_kernels_cpu_test"
OPS = f'''
import torch

ops = torch.ops.{NAMESPACE}


def add_op_namespace_prefix(name):
    return f"{NAMESPACE}::{{name}}"
'''


def loaded(name, path, **where) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path, **where)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    output = tmp_path_factory.mktemp("hub") / "kernel"
    loaded("hub_assemble", ROOT / "recipe" / "hub" / "assemble.py").assemble(output)
    return output


@pytest.fixture(scope="module")
def hub(folder):
    """The package as the hub's loader imports it: by its path, under a name of its own."""
    package = folder / "torch-ext" / "captum_ssm_kernels"
    (package / "_ops.py").write_text(OPS)
    path = package / "__init__.py"
    return loaded("hub_kernels_1", path, submodule_search_locations=[str(package)])


def test_every_source_is_named_and_there(folder):
    tomllib = pytest.importorskip("tomllib")
    build = tomllib.loads((folder / "build.toml").read_text())
    assert build["general"]["edition"] == 5
    assert build["torch"]["stable-abi"] == dict.fromkeys(build["general"]["backends"], "2.11")
    named = [*build["torch"]["src"]]
    for kernel in build["kernel"].values():
        named += kernel["src"]
    assert [one for one in named if not (folder / one).is_file()] == []
    compiled = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.suffix in (".cpp", ".cu")
    }
    assert len(compiled) == 10
    assert compiled <= {*named}
    for path in (folder / "csrc").rglob("*.*"):
        for included in re.findall(r'#include "([^"]+)"', path.read_text()):
            assert (path.parent / included).is_file(), (path.name, included)


def test_python_imports_nothing_but_torch_and_itself(folder):
    allowed = {"__future__", "torch", *sys.stdlib_module_names}
    for path in (folder / "torch-ext").rglob("*.py"):
        found = re.findall(r"^(?:from|import) ([\w.]+)", path.read_text(), re.MULTILINE)
        assert {one.partition(".")[0] for one in found if one[0] != "."} <= allowed, path.name


def test_operations_are_its_own_and_return_the_same(hub):
    assert {*kernels.__all__} == {*hub.__all__}
    assert hub.extension_report() == f"compiled kernels: torch.ops.{NAMESPACE}."
    torch.manual_seed(0)
    B, L, D, N = 2, 9, 4, 3
    dt, v = torch.rand(2, B, L, D)
    mixed = torch.randn(2, B, L, 1, N)
    given = (dt, dt, -torch.rand(D, N), *mixed)
    index = torch.tensor([[8], [3]])
    results = []
    for one in (kernels, hub):
        leaf = v.clone().requires_grad_()
        coefficients = one.DiagonalCoefficients(*given)
        y = one.diagonal_scan(leaf, coefficients)
        (gradient,) = torch.autograd.grad(y.square().sum(), leaf)
        q, k = torch.randn(2, B, L, 2, N, generator=torch.Generator().manual_seed(1))
        linear = one.LinearAttentionCoefficients(q, k, -torch.ones(B, L, 2, 1))
        u = one.linear_attention_scan(v.unflatten(-1, (2, 2)), linear)
        results.append([y, gradient, one.diagonal_rows(index, coefficients), u])
    for ours, theirs in zip(*results, strict=True):
        assert ours.abs().max() > 0
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-6)
    assert hasattr(getattr(torch.ops, NAMESPACE), "diagonal_scan")
    assert hub.diagonal_scan is not kernels.diagonal_scan


def test_a_folder_that_is_not_empty_is_left_alone(folder):
    with pytest.raises(SystemExit, match="is not empty"):
        sys.modules["hub_assemble"].assemble(folder)
