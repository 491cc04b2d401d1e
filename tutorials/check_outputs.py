"""The committed outputs of a notebook are what a run gives, up to rounding.

    python tutorials/check_outputs.py Copying_Mamba          # compares with out/notebooks
    python tutorials/check_outputs.py Copying_Mamba --write  # commits the outputs of that run

Text is compared word by word and number by number. Of figures, that they are there: their pixels
depend on matplotlib and on fonts. Of the page of an explanation, its data: not its script, and not
the versions of packages. Numbers of a cell with the tag ``varies`` are not compared: a
model that was trained on another processor is another model. Each figure has a text that says what
it shows, in the metadata of its cell, which is where the documentation takes it from.
"""

from __future__ import annotations

import argparse
import base64
import copy
import difflib
import html
import json
import math
import re
import sys
import zlib
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
from nbconvert.preprocessors import CoalesceStreamsPreprocessor

HERE = Path(__file__).resolve().parent
RUNS = HERE.parent / "out" / "notebooks"

NUMBER = re.compile(r"(?<!\w)[+\N{MINUS SIGN}-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?%?(?!\w)")
# A color says the number next to it once more, in hundreds of steps.
COLOR = re.compile(r"#[0-9a-f]{6}\b")
# What depends on the machine: addresses of objects, and absolute paths.
UNSTABLE = re.compile(
    rf"0x[0-9a-f]{{6,}}|(?<![\w.<])/(?:home|root|tmp|usr|opt|Users)/|{re.escape(str(HERE.parent))}"
)
# What a kernel shows, by its id: nothing once the kernel is gone.
WIDGET = "application/vnd.jupyter.widget-view+json"
PAGE = re.compile(r'<iframe [^>]*srcdoc="([^"]*)"')
PAGE_DATA = re.compile(r'<script [^>]*id="captum-data">(.*?)</script>', re.DOTALL)
RELATIVE, ABSOLUTE = 0.02, 1e-4


def problems(committed: Any, run: Any) -> list[str]:
    """What is wrong with a notebook, given a run of the same cells."""
    found = []
    for index, (cell, ran) in enumerate(zip(code_cells(committed), code_cells(run), strict=True)):
        shown, fresh = lines_of(cell), lines_of(ran)
        varies = "varies" in cell.metadata.get("tags", ())
        if not agree("\n".join(shown), "\n".join(fresh), varies):
            diff = difflib.unified_diff(shown, fresh, "committed", "this run", lineterm="", n=1)
            found.append(f"code cell {index} gives other outputs:\n" + "\n".join(diff))
        for line in fresh:
            if UNSTABLE.search(line):
                found.append(f"code cell {index} shows what depends on the machine: {line}")
        if any(output.get("name") == "stderr" for output in ran.outputs):
            found.append(f"code cell {index} warns; expected no outputs on stderr.")
        if any("image/png" in output.get("data", ()) for output in ran.outputs) and not alt(cell):
            found.append(
                f"code cell {index} has a figure without an alternative text; expected one in the "
                'cell\'s metadata, as {"mystnb": {"image": {"alt": "..."}}}.'
            )
    return found


def read(path: Path) -> Any:
    """A notebook without widgets, in which what a cell prints is one output, however sent."""
    notebook = nbformat.read(path, as_version=4)
    for cell in code_cells(notebook):
        for output in cell.outputs:
            output.get("data", {}).pop(WIDGET, None)
    return CoalesceStreamsPreprocessor(enabled=True)(notebook, {})[0]


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def alt(cell: Any) -> str:
    return cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")


def lines_of(cell: Any) -> list[str]:
    """The outputs of a cell as lines, a figure by its kind, a page by its data."""
    lines: list[str] = []
    for output in cell.outputs:
        if output.output_type == "error":
            lines.append(f"{output.ename}: {output.evalue}")
        for kind, content in output.get("data", {"text/plain": output.get("text", "")}).items():
            page = PAGE.search(content)
            if kind.startswith("image/"):
                lines.append(kind)
            elif page:
                lines.extend(page_lines(html.unescape(page[1])))
            else:
                lines.extend(content.splitlines())
    return lines


def page_lines(page: str) -> list[str]:
    """The data of a page (see docs/how_to/page.md), without the versions that made it."""
    data = json.loads(PAGE_DATA.search(page)[1], object_hook=unpacked)
    del data["versions"]
    return json.dumps(data, indent=1, ensure_ascii=False).splitlines()


def unpacked(part: dict[str, Any]) -> Any:
    """Packed rows as text: the largest magnitude of each, and its values as shares of that."""
    if "scale" not in part:
        return part
    steps = np.frombuffer(zlib.decompress(base64.b64decode(part["data"])), "<i2")
    shares = [steps / 32767 * abs(steps / 32767) for steps in steps.reshape(part["shape"])]
    return [
        f"{scale * 32767**2:.3f}: " + " ".join(f"{share:.3f}" for share in row)
        for scale, row in zip(part["scale"], shares, strict=True)
    ]


def agree(one: str, other: str, varies: bool = False) -> bool:
    """Whether two texts have the same words, and numbers that differ by rounding only."""
    one, other = (COLOR.sub("a color", text) for text in (one, other))
    words, others = ([part.split() for part in NUMBER.split(text)] for text in (one, other))
    if words != others:
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return varies or all(close(a, b) for a, b in pairs)


def close(one: str, other: str) -> bool:
    """Counts are equal. Of measured numbers the last digit may differ, or two percent."""
    if one.isdecimal() and other.isdecimal():
        return one == other
    a, b = (value(number) for number in (one, other))
    digits = re.fullmatch(r"[^.e]*\.?(\d*)(e.*)?%?", one)
    unit = 0.0 if digits[2] else 10.0 ** -len(digits[1])
    return math.isclose(a, b, rel_tol=RELATIVE, abs_tol=max(ABSOLUTE, 1.01 * unit))


def value(number: str) -> float:
    return float(number.replace("\N{MINUS SIGN}", "-").replace(",", "").removesuffix("%"))


def with_outputs(committed: Any, run: Any) -> Any:
    """The committed notebook, with the outputs of a run and nothing else of it."""
    notebook = copy.deepcopy(committed)
    for cell, ran in zip(code_cells(notebook), code_cells(run), strict=True):
        cell.outputs, cell.execution_count = ran.outputs, ran.execution_count
    return notebook


def said(name: str, found: list[str]) -> str:
    """What to say of a notebook in which these problems were found."""
    if not found:
        return f"{name}: the committed outputs are those of this run"
    hint = f"python tutorials/check_outputs.py {name} --write"
    return "\n".join([f"{name}:", *found, f"To commit the outputs of this run: {hint}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebook", help="its name, without .ipynb")
    parser.add_argument("--write", action="store_true", help="commit the outputs of the run")
    args = parser.parse_args()
    path = HERE / f"{args.notebook}.ipynb"
    committed, run = read(path), read(RUNS / path.name)
    if [cell.source for cell in committed.cells] != [cell.source for cell in run.cells]:
        again = f"python tutorials/run_notebooks.py {path.stem}"
        sys.exit(f"out/notebooks/{path.name} is a run of other cells; run it again: {again}")
    if args.write:
        committed = with_outputs(committed, run)
        nbformat.write(committed, path)
    found = problems(committed, run)
    if found:
        sys.exit(said(args.notebook, found))
    print(said(args.notebook, found))


if __name__ == "__main__":
    main()
