"""Where the compiled kernels are missing, the warning says which of several reasons it is."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from folders import ROOT

from captum_ssm import kernels

NO_KERNELS = shutil.ignore_patterns("*.so", "__pycache__", "data", "static")
# An editable install would find the kernels of its own checkout.
PROGRAM = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in str(finder)]
from captum_ssm.kernels import extension_report
print(extension_report())
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    return shutil.copytree(ROOT / "captum_ssm", folder / "captum_ssm", ignore=NO_KERNELS)


def report(*folders: Path, **variables: str) -> str:
    path = os.pathsep.join(map(str, folders))
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folders[0],
        env=os.environ | {"PYTHONPATH": path} | variables,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return run.stdout


def test_a_checkout_without_kernels_knows_of_the_installed_copy(package, tmp_path):
    checkout, site = tmp_path / "checkout", tmp_path / "site"
    shutil.copytree(package, checkout / "captum_ssm")
    (checkout / "setup.py").touch()
    (site / "captum_ssm").mkdir(parents=True)
    said = report(checkout, site)
    assert "imported from its sources" in said
    assert "pip install -e ." in said
    (site / "captum_ssm" / "_C.abi3.so").touch()
    said = report(checkout, site)
    assert f"imported captum_ssm from {checkout / 'captum_ssm'}, which has none" in said
    assert f"the installed copy in {site / 'captum_ssm'} has them" in said
    assert "Start Python in another folder" in said


def test_an_installed_copy_says_how_it_gets_kernels(package):
    said = report(package.parent)
    assert "none were built when captum_ssm was installed" in said
    assert "--force-reinstall -v" in said


def test_kernels_that_cannot_be_loaded_are_not_said_to_be_missing(package, tmp_path):
    shutil.copytree(package, tmp_path / "captum_ssm")
    (tmp_path / "captum_ssm" / "_C.abi3.so").write_bytes(b"of another machine")
    said = report(tmp_path)
    assert "could not be loaded (" in said
    assert "They need torch >= 2.11, and this is torch" in said


def test_the_report_of_a_choice_and_of_kernels_that_are_there(package):
    assert report(package.parent, CAPTUM_SSM_PURE_TORCH="1") == (
        "no compiled kernels: CAPTUM_SSM_PURE_TORCH is set.\n"
    )
    if kernels.extension_loaded():
        assert kernels.extension_report().startswith("compiled kernels: loaded from /")


def test_kernels_for_cuda_that_are_missing_are_said(monkeypatch):
    extension = sys.modules[kernels.extension_report.__module__]
    monkeypatch.setattr(extension, "_MISSING", None)
    monkeypatch.setitem(sys.modules, "captum_ssm._C", pytest)
    monkeypatch.setattr(extension, "_MISSING_CUDA", ImportError("not built"))
    said = kernels.extension_report()
    assert said.startswith("compiled kernels: loaded from ")
    assert (
        "On a GPU the PyTorch forms run: the CUDA kernels could not be loaded (not built)" in said
    )
