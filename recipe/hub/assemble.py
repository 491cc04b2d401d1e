"""The folder that Hugging Face's kernel-builder takes, out of this repository's sources.

    python recipe/hub/assemble.py OUTPUT
    cd OUTPUT && kernel-builder build-and-copy

C++ is taken as it is. Of the Python files, which a kernel of the hub has to import from each other
by relative names, the imports are rewritten, and `extension.py` is the one beside this script.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NAME = "captum_ssm_kernels"
COMPILED = (".cpp", ".cu", ".h", ".inc", ".cuh")
NOT_BUILT = ("emulate.cpp",)  # a check of the CUDA kernels on a CPU


def assemble(output: Path) -> None:
    """Write the folder, which must be new or empty."""
    if output.exists() and any(output.iterdir()):
        raise SystemExit(f"{output} is not empty; expected a new folder.")
    package = output / "torch-ext" / NAME
    package.mkdir(parents=True)
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix in COMPILED and path.name not in NOT_BUILT and "allocator" not in path.parts:
            copy = output / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    python = (ROOT / "captum_ssm" / "kernels").glob("*.py")
    for path in sorted([*python, ROOT / "captum_ssm" / "errors.py"]):
        (package / path.name).write_text(relative(path.read_text(encoding="utf-8")))
    shutil.copy(HERE / "extension.py", package)
    shutil.copy(HERE / "torch_binding.cpp", output / "torch-ext")
    for name in ("flake.nix", "CARD.md"):
        shutil.copy(HERE / name, output)
    shutil.copy(ROOT / "LICENSE", output)
    text = (HERE / "build.toml").read_text(encoding="utf-8")
    (output / "build.toml").write_text(
        re.sub(r'\["SOURCES ([^"]+)"\]', lambda found: sources(output, found[1]), text)
    )


def sources(output: Path, patterns: str) -> str:
    """The files that patterns stand for, as a list of TOML."""
    found = sorted(path for pattern in patterns.split() for path in output.glob(pattern))
    return "".join(["[\n", *(f'    "{path.relative_to(output)}",\n' for path in found), "]"])


def relative(code: str) -> str:
    """Python code whose imports of the kernels' package are relative."""
    code = re.sub(r"from captum_ssm\.kernels import", "from . import", code)
    return re.sub(r"from captum_ssm\.(?:kernels\.)?(\w+) import", r"from .\1 import", code)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    assemble(Path(sys.argv[1]))
