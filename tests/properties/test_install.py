"""Source distribution and wheels, with and without a compiler, in an environment of their own."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from configparser import ConfigParser
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from folders import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import captum_ssm

pytestmark = pytest.mark.slow

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
SKIPPED = shutil.ignore_patterns(
    ".*", "build", "dist", "out", "_build", "*.so", "*.egg-info", "__pycache__"
)


@cache
def installed_packages() -> Mapping[str, list[str]]:
    return packages_distributions()


def distribution(module: str) -> str:
    """The name under which the package of a module is installed."""
    (name, *_) = installed_packages().get(module, [module])
    return canonicalize_name(name)


def imports(node: ast.AST, later: bool = False) -> Iterator[tuple[str, bool]]:
    """The packages of others that a module imports, and whether it runs without them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            names = [alias.name for alias in child.names]
        elif isinstance(child, ast.ImportFrom):
            names = [] if child.level else [child.module]
        else:
            # Within a function, for type checkers, and where its absence is dealt with.
            optional = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Try)
            typing = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            yield from imports(child, later or typing or isinstance(child, optional))
            continue
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names and top != "captum_ssm":
                yield distribution(top), later


def declared(section: str, option: str) -> set[str]:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = config[section][option].strip().splitlines()
    return {canonicalize_name(Requirement(line).name) for line in lines}


def test_what_is_imported_is_installed_with_the_package():
    found = {}
    for path in sorted((ROOT / "captum_ssm").rglob("*.py")):
        for name, later in imports(ast.parse(path.read_text(encoding="utf-8"))):
            found.setdefault(name, []).append((later, path.name))
    # Who imports a module of integrations has the package that it is named after.
    for path in (ROOT / "captum_ssm" / "integrations").glob("*.py"):
        found.pop(canonicalize_name(path.stem), None)
    required = declared("options", "install_requires")
    at_once = {name for name, places in found.items() if not all(later for later, _ in places)}
    assert at_once <= required, {name: found[name] for name in at_once - required}
    assert required <= set(found)  # and nothing is installed for nothing
    # What only some functions import may be left to an extra, one that users are told of.
    extras = [
        declared("options.extras_require", name)
        for name in ("data", "distributed", "logs", "metrics", "notebook", "tables")
    ]
    missing = set(found) - required - set().union(*extras)
    assert not missing, {name: found[name] for name in missing}


def test_imports_are_told_apart():
    code = "import torch.nn\nfrom sklearn import metrics\ntry: import numpy\nexcept ImportError: 0"
    assert list(imports(ast.parse(code))) == [
        ("torch", False),
        ("scikit-learn", False),
        ("numpy", True),
    ]
    code = "import os, captum_ssm.kernels\nfrom . import x\ndef f():\n if f: import tqdm.auto"
    assert list(imports(ast.parse(code))) == [("tqdm", True)]
    code = "if TYPE_CHECKING: import pandas\nif x: import numpy"
    assert list(imports(ast.parse(code))) == [("pandas", True), ("numpy", False)]


def run(*command: object, cwd: Path, **variables: str) -> str:
    environment = os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"} | variables
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The source distribution, made from a copy of the tree where nothing can be compiled."""
    folder = tmp_path_factory.mktemp("sdist")
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=SKIPPED)
    code = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    run(sys.executable, "-c", code, cwd=tree, CAPTUM_SSM_BUILD="0")
    (found,) = (tree / "dist").glob("*.tar.gz")
    return found


def wheel(sdist: Path, folder: Path, **variables: str) -> tuple[Path, str]:
    said = run(
        *(sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-index"),
        *("--no-build-isolation", "--wheel-dir", folder, sdist),
        cwd=folder,
        **variables,
    )
    (found,) = folder.glob("*.whl")
    return found, said


def installed(built: Path, folder: Path) -> Path:
    """The interpreter of a fresh environment that holds the wheel, and sees this one's packages."""
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install"),
        *("--no-deps", "--no-index", built),
        cwd=folder,
    )
    # As a path only: this environment's own .pth files (an editable install) are not followed.
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (site / "rest.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def try_readme(python: Path, folder: Path) -> str:
    """Runs the code of the README, as a reader would."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    pieces = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    script = "".join(pieces) + (
        "print(tuple(relevance.shape), int(relevance[0, :-1].argmax()))\n"
        "import captum_ssm as c\n"
        "print(c.__file__, c.kernels.extension_loaded(), c.__version__)\n"
    )
    (folder / "readme.py").write_text(script, encoding="utf-8")
    said = run(python, "readme.py", cwd=folder)
    for page in ("why", "review", "chat"):
        assert "<script" in (folder / f"{page}.html").read_text(encoding="utf-8")  # it is whole
    return said


def test_the_source_distribution_is_whole(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    csrc = {str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file()}
    package = {str(p.relative_to(ROOT)) for p in (ROOT / "captum_ssm").rglob("*.py")}
    scripts = {str(p.relative_to(ROOT)) for p in (ROOT / "benchmarks").rglob("*.py")}
    assert csrc | package | scripts <= names
    assert "benchmarks/results/linear_row.json" in names  # the documentation's tables read it
    assert {"captum_ssm/py.typed", "LICENSE", "README.md", "setup.py", "pyproject.toml"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_without_a_compiler(sdist, tmp_path):
    built, said = wheel(sdist, tmp_path, CAPTUM_SSM_BUILD="0")
    assert built.name.endswith("-py3-none-any.whl")
    assert "WITHOUT compiled kernels: CAPTUM_SSM_BUILD=0" in said
    names = zipfile.ZipFile(built).namelist()
    assert not [name for name in names if name.startswith(("tests", "csrc", "docs"))]
    said = try_readme(installed(built, tmp_path), tmp_path)
    assert "(1, 12) 8" in said
    assert f"{tmp_path}/venv" in said
    assert f" False {captum_ssm.__version__}" in said
    assert "ExtensionWarning" in said  # and it says what is slow


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler on this machine")
def test_with_a_compiler(sdist, tmp_path):
    # Unoptimised, which compiles in a fraction of the time.
    built, _ = wheel(sdist, tmp_path, CAPTUM_SSM_CXXFLAGS="-O0")
    assert re.search(r"-cp310-abi3-\w+\.whl$", built.name)  # one wheel for every Python
    names = set(zipfile.ZipFile(built).namelist())
    assert {"captum_ssm/_C.abi3.so", "captum_ssm/_C_allocator.abi3.so"} <= names
    said = try_readme(installed(built, tmp_path), tmp_path)
    assert "(1, 12) 8" in said
    assert f" True {captum_ssm.__version__}" in said
    assert "ExtensionWarning" not in said


# As in pip's isolated build, nothing is seen of what is installed; setuptools alone is put back.
ISOLATED = """
import runpy, sys
sys.path = [path for path in sys.path if "site-packages" not in path] + [sys.argv.pop(1)]
sys.argv[0] = "setup.py"
runpy.run_path("setup.py", run_name="__main__")
"""


# As with a torch for CUDA and no nvcc. Nothing is compiled: files of nothing stand for it.
WITHOUT_NVCC = """
import runpy, sys
import setuptools.command.build_ext as commands
import torch
from torch.utils import cpp_extension

def build(self, extension):
    path = self.get_ext_fullpath(extension.name)
    self.mkpath(path.rpartition("/")[0])
    open(path, "w").close()

torch.version.cuda, cpp_extension.CUDA_HOME = "13.0", sys.argv.pop(1)
commands.build_ext.build_extension = build
sys.argv[0] = "setup.py"
print(runpy.run_path("setup.py", run_name="__main__")["architectures"]())
"""


def test_without_nvcc_the_kernels_for_the_cpu_are_built_alone(tmp_path):
    out = ("build_ext", "--build-lib", tmp_path, "--build-temp", tmp_path)
    said = run(sys.executable, "-c", WITHOUT_NVCC, tmp_path, *out, cwd=ROOT)
    assert "WITHOUT CUDA kernels: the build failed (nvcc not found at" in said
    assert "WITHOUT compiled kernels" not in said
    built = {path.name.partition(".")[0] for path in (tmp_path / "captum_ssm").iterdir()}
    assert built == {"_C", "_C_allocator"}


def test_kernels_are_compiled_for_all_gpus_where_none_is_seen(tmp_path):
    arguments = (sys.executable, "-c", WITHOUT_NVCC, tmp_path, "--version")
    said = run(*arguments, cwd=ROOT, CUDA_VISIBLE_DEVICES="")
    assert "['-arch=all-major']" in said.splitlines()
    chosen = run(*arguments, cwd=ROOT, TORCH_CUDA_ARCH_LIST="9.0")
    assert "[]" in chosen.splitlines()


def test_an_isolated_build_compiles_with_the_torch_it_is_installed_beside(tmp_path):
    packages = Path(sysconfig.get_path("purelib"))
    for name in ("setuptools", "_distutils_hack"):
        (tmp_path / name).symlink_to(packages / name)
    for name in ("setup.py", "setup.cfg", "LICENSE", "README.md", "csrc", "captum_ssm"):
        (tmp_path / name).symlink_to(ROOT / name)
    said = run(sys.executable, "-c", ISOLATED, tmp_path, "--version", cwd=tmp_path)
    assert captum_ssm.__version__ in said.splitlines()
    assert "WITHOUT" not in said
    without = "import sys; sys.modules['torch'] = None" + ISOLATED
    said = run(sys.executable, "-c", without, tmp_path, "--version", cwd=tmp_path)
    assert "WITHOUT compiled kernels: torch cannot be imported" in said
