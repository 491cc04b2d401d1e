"""Tables of methods and of measured numbers, from the results that the benchmarks wrote.

python docs/tables.py     # writes them into the pages; a test compares
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import truth_tables

from captum_ssm.attr import methods

DOCS = Path(__file__).resolve().parent
BENCHMARKS = DOCS.parent / "benchmarks"

# Around a table inside of a page.
BEGIN, END = "<!-- python docs/tables.py writes this table. -->", "<!-- The table ends here. -->"
ABOUT = (
    "The models are small and were trained for this repository, on tasks whose right answer is "
    "known. The numbers rank methods on these tasks; the order may differ on yours. [Which method "
    "to use](choosing.md) says what follows from them.\n\n"
    "`python docs/tables.py` writes this page from the files in `benchmarks/copying/results`, "
    "`benchmarks/passkey/results`, `benchmarks/vision/results` and `benchmarks/results`."
)

KINDS = {"mamba": "Mamba", "mamba2": "Mamba-2"}
SCORES = ("auc", "ap", "recall_at_k")
# What a mixing is called here, and in the results.
MIXINGS = {
    "none: each layer's dot products at its own tokens": "none",
    'ALTI (`"alti_logit"`)': "ALTI",
    "ALTI, compared with the layer's output": "ALTI, compared with the layer's output",
    "ALTI, distances in l2": "ALTI, l2 distances",
    "ALTI, without the residual stream": "ALTI, without the residual stream",
    "shares of l2 norms": "l2 norms",
    'the target\'s edges (`"flow_logit"`)': None,
}

RAW, ROLLOUT, ATTRIBUTION = "`RawAttention`", "`MambaRollout`", "`MambaAttribution`"
UNIFIED = "`UnifiedImplicitAttention`"
UNIFIED_LAYER = '`hidden_attention`, `formulation="unified"`, `reduction="mean"`'
RANDOM = "*at random*"

# What each row of the results is in this library.
LANGUAGE = {
    "Mamba-Attention, all layers": RAW,
    "Mamba-Attention": f"{RAW}, `layers=`",
    "Mamba-Attention, absolute": f'{RAW}, `layers=`, `sign="absolute"`',
    "Unified (raw), all layers": f'{UNIFIED}, `aggregation="raw"`',
    "Unified (raw)": UNIFIED_LAYER,
    "Unified (raw), absolute": f"{UNIFIED_LAYER}, absolute values",
    "Rollout": ROLLOUT,
    "Unified (rollout)": f'{UNIFIED}, `aggregation="rollout"`',
    "Mamba-Attribution": ATTRIBUTION,
    "Unified (attribution)": UNIFIED,
    "MambaLRP": "`MambaLRP`",
}
IMAGES = {
    "Raw attention, hidden": RAW,
    "Raw attention, hidden, absolute": f'{RAW}, `sign="absolute"`',
    "Raw attention, unified": f'{UNIFIED}, `aggregation="raw"`',
    "Rollout, hidden": ROLLOUT,
    "Rollout, hidden, absolute": f'{ROLLOUT}, `sign="absolute"`',
    "Rollout, unified": f'{UNIFIED}, `aggregation="rollout"`',
    "Attribution, hidden": ATTRIBUTION,
    "Attribution, unified": UNIFIED,
    "Attribution, without activation": f'{UNIFIED}, `components=("conv", "gate")`',
    "Attribution, without convolution": f'{UNIFIED}, `components=("activation", "gate")`',
    "Attribution, without gate": f'{UNIFIED}, `components=("conv", "activation")`',
    "Attribution, without S6": f"{UNIFIED}, the identity for each recurrence",
    "Attribution, only S6": f"{UNIFIED}, `components=()`",
    "LaTIM, ALTI-Logit": '`LaTIM`, `activation="gate"`',
    "LaTIM, l2 of the last layer": '`LaTIM`, `layer=-1`, `aggregation="l2"`, `activation="gate"`',
    "MambaLRP": "`MambaLRP`",
    "Integrated gradients": "*Captum's* `IntegratedGradients`",
    "Input x gradient": "*Captum's* `InputXGradient`",
    "Saliency": "*Captum's* `Saliency`",
    "Brightness": "*brightness of the pixels*",
    "Random maps": RANDOM,
}
REMOVED = {
    "black": "patches turn black, as the empty canvas is",
    "blur": "patches are blurred",
    "mean": "patches take the image's mean color",
}


def pages() -> dict[Path, str]:
    """The README and the pages of this folder with tables, as they should be."""
    inside = {
        DOCS.parent / "README.md": truth_tables.readme_table(),
        DOCS / "how_to" / "command_line.md": _methods(),
        DOCS / "choosing.md": truth_tables.numbered_findings(),
    }
    return {path: _with_table(path, table) for path, table in inside.items()} | {
        DOCS / "measured.md": _measured(),
        DOCS / "truth.md": truth_tables.page(),
        DOCS / "checkpoints.md": truth_tables.checkpoints(),
    }


def _with_table(path: Path, table: str) -> str:
    # The page as it is, with the table between its marks.
    before, _, after = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = after.partition(END)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def _measured() -> str:
    vision = _results("vision", "digits-*")
    parts = [*map(_copying, _results("copying"))]
    parts += map(_paper_scale, _results("copying", "paper/*"))
    parts += map(_passkey, _results("passkey"))
    parts += [_objects(found) for found in vision if found["about"]["removal"] == "black"]
    parts += map(_perturbation, vision)
    row = BENCHMARKS / "results" / "linear_row.json"
    if row.exists():
        parts.append(_row(json.loads(row.read_text())))
    parts.append(_mixing())
    head = "# What was measured\n\n<!-- python docs/tables.py writes this page. -->\n\n" + ABOUT
    return "\n\n".join([head, *parts]) + "\n"


def _methods() -> str:
    rows = [
        [
            f"`{name}`",
            f"`{method.__name__}`",
            method.summary,
            method.cost,
            ", ".join(f"`--{option.replace('_', '-')}`" for option in method.options()),
        ]
        for name, method in methods().items()
    ]
    marks = ["---"] * 5
    head = ["`--methods`", "class", "relevance", "time after the run", "flags"]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, marks, *rows])


def chance(length: int) -> dict[str, float]:
    """The scores that random maps reach on copied strings, on average.

    A row marks the copied token and its neighbors, so three of ``length`` tokens, and two where
    the copied token is the first or the last.
    """
    harmonic = sum(1 / i for i in range(1, length + 1)) / length
    marked = [2, *[3] * (length - 2), 2]
    ap = [(k - 1) / (length - 1) * (1 - harmonic) + harmonic for k in marked]
    share = sum(marked) / length**2
    return {"hit": share, "auc": 0.5, "ap": sum(ap) / length, "recall_at_k": share}


def _results(name: str, stems: str = "*") -> list[dict[str, Any]]:
    paths = sorted((BENCHMARKS / name / "results").glob(f"{stems}.json"))
    return [json.loads(path.read_text()) | {"name": path.stem} for path in paths]


def _table(head: list[str], rows: list[list[str]]) -> str:
    marks = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, marks, *rows])


def _section(title: str, text: str, table: str) -> str:
    return f"## {title}\n\n{text}\n\n{table}"


def _language(name: str, layer: int | None) -> str:
    latim = re.fullmatch(r"LaTIM \((.+), (\w+)\)", name)
    if latim is None:
        whole = f"{name}, all layers"
        told = LANGUAGE[whole if layer is None and whole in LANGUAGE else name]
        return told.replace("`layers=`", f"`layers={layer}`")
    aggregation = latim[1].lower().replace("-", "_")
    where = "" if layer is None else f"`layer={layer}`, "
    return f'`LaTIM`, {where}`aggregation="{aggregation}"`, `activation="{latim[2]}"`'


def _copying(found: dict[str, Any]) -> str:
    scored = [
        (_language(name, m["layer"]), m)
        for name, m in found["methods"].items()
        if "taylor" not in name
    ]
    scored.append((RANDOM, chance(found["length"])))
    scored.sort(key=lambda row: -row[1]["hit"])
    rows = [[name, f"{m['hit']:.1%}", *(f"{m[key]:.3f}" for key in SCORES)] for name, m in scored]
    kind = KINDS[found["model_type"]]
    text = (
        f"{found['examples']} held-out strings of {found['length']} letters, copied by a small "
        f"{kind} language model. *Hit*: how often the most relevant source token is the one copied "
        "or its neighbor. AUC, average precision and recall at K: each row of the map against "
        "those three tokens. Methods that read one layer are read at the one that did best on "
        "other strings. LaTIM's Taylor approximations are in `benchmarks/copying/results`. "
        "`python benchmarks/copying/evaluate.py` measures it anew."
    )
    head = ["method", "hit ↑", "AUC ↑", "AP ↑", "R@K ↑"]
    return _section(f"Copying a string: {kind}", text, _table(head, rows))


def _paper_scale(found: dict[str, Any]) -> str:
    kind = KINDS[found["model_type"]]
    rows = [
        [
            _language(name, m["layer"]),
            f"{m['hit']:.1%}",
            *(f"{m[key]:.2f}" for key in SCORES),
            " / ".join(f"{x:.2f}" for x in m["paper"]) if "paper" in m else "",
        ]
        for name, m in found["methods"].items()
    ]
    by_chance = chance(found["length"])
    shown = [f"{by_chance['hit']:.1%}", *(f"{by_chance[key]:.2f}" for key in SCORES), ""]
    text = (
        f"{found['examples']} held-out strings of {found['length']} letters, copied by a {kind} of "
        f"{found['layers']} layers of width {found['width']}, trained as in appendix B.1 of the "
        "LaTIM paper but for what `benchmarks/README.md` names; the paper's is 512 wide. It "
        f"predicts {found['accuracy']:.1%} of the copied tokens. The last column has the paper's "
        "table 2: AUC, AP and R@K."
    )
    head = ["method", "hit ↑", "AUC ↑", "AP ↑", "R@K ↑", "paper"]
    rows.append([RANDOM, *shown])
    size = f"{found['layers']} layers of {found['width']}"
    return _section(f"Copying a string: {kind}, {size}", text, _table(head, rows))


def _mixing() -> str:
    found = {one["name"]: one for one in _results("copying", "mixing/*")}
    rows = []
    for told, key in MIXINGS.items():
        row = [told]
        for one in found.values():
            for activation in ("gate", "silu"):
                if key is None:
                    m = one["edges"]["the target's edges"] if activation == "gate" else None
                else:
                    m = one[activation][f"map: {key}"]
                row.append("" if m is None else f"{m['hit']:.0%}, {m['ap']:.2f}")
        rows.append(row)
    text = (
        "ALTI-Logit is a sum of dot products with the target's direction, carried to the input by "
        "a mixing R of the layers below. Here they stay and the mixing changes: hit and "
        "average precision, "
        + "; ".join(
            f"{name}: {one['examples']} strings of {one['length']} ({one['edges']['examples']} for "
            "the target's edges)"
            for name, one in found.items()
        )
        + ". `python benchmarks/copying/mixing.py` measures it anew."
    )
    head = ["mixing", *(f'{name}, `"{a}"`' for name in found for a in ("gate", "silu"))]
    return _section("Why ALTI-Logit misses the copied token", text, _table(head, rows))


def _passkey(found: dict[str, Any]) -> str:
    contexts = list(found["contexts"])
    longest = contexts[-1]
    rows = []
    for name, method in found["methods"].items():
        shares = method["contexts"]
        rows.append(
            [
                _language(name, method["layer"]),
                *(f"{shares[context]['token']:.0%}" for context in contexts),
                f"{shares[longest]['distractor']:.0%}",
            ]
        )
    rows.sort(key=lambda row: -float(row[-2][:-1]))
    text = (
        f"A small Mamba answers which value stands behind a key, among other records and filler. "
        f"The share of {found['examples']} questions for which the largest score lies at that "
        f"value, with {', '.join(contexts)} tokens of context (training had {contexts[0]} at "
        "most), and at another record. A token drawn at random is right in "
        f"{1 / int(contexts[0]):.1%} to {1 / int(longest):.1%}. With so many questions a share is "
        "known to about ±8 points at 90%, ±14 at 50%. The maps of the recurrence alone (the first "
        "four methods of the papers) peak a token or two behind the value, where the convolution "
        "has carried it, and that counts as a miss. `python benchmarks/passkey/evaluate.py` "
        "measures it anew."
    )
    head = [
        "method",
        *(f"value, {context} tokens ↑" for context in contexts),
        f"another record, {longest} tokens ↓",
    ]
    return _section("Looking up a value", text, _table(head, rows))


def _interval(score: dict[str, float], unit: float = 100, digits: int = 1) -> str:
    value, low, high = (f"{unit * score[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _objects(found: dict[str, Any]) -> str:
    keys = ("miou", "map", "pixel_accuracy")
    scores = sorted(found["scores"].items(), key=lambda row: -row[1]["miou"]["value"])
    rows = [[IMAGES[name], *(_interval(row[key]) for key in keys)] for name, row in scores]
    text = (
        f"A small Vision Mamba names digits on a canvas of clutter; {found['about']['images']} "
        "held-out images. Overlap of each map with the digit's true pixels, in percent, with 95% "
        "bootstrap intervals over images. **The digit is the brightest thing on a canvas**, so "
        "brightness itself segments well: no explanation here is as good.\n\n"
        "`python benchmarks/vision/evaluate.py` measures it anew."
    )
    return _section(
        "Images: does the map show the object?",
        text,
        _table(["method", "mIoU ↑", "mAP ↑", "pixel accuracy ↑"], rows),
    )


def _perturbation(found: dict[str, Any]) -> str:
    about = found["about"]
    scores = sorted(found["scores"].items(), key=lambda row: row[1]["positive"]["value"])
    rows = [
        [
            IMAGES[name],
            _interval(row["positive"]),
            _interval(row["negative"]),
            _interval(row["delta_af"], 1, 2),
        ]
        for name, row in scores
    ]
    caveat = (
        " **Integrated gradients start from an empty canvas**, which is just what removal leaves."
        if about["removal"] == "black"
        else ""
    )
    command = f"python benchmarks/vision/evaluate.py --removal {about['removal']}"
    text = (
        f"The same model; {REMOVED[about['removal']]}, {about['images']} held-out images. How "
        "often the prediction stays while 10 to 90% of the patches are removed, in percent: the "
        "most relevant first (*positive*, lower is better) or last (*negative*, higher is "
        "better). $\\Delta A^F$: the difference between the two in the predicted class's logit."
        f"{caveat} 95% bootstrap intervals over images. `{command}` measures it anew."
    )
    return _section(
        f"Images: does removing patches change the prediction? ({about['removal']})",
        text,
        _table(["method", "positive ↓", "negative ↑", "$\\Delta A^F$ ↑"], rows),
    )


def _row(found: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['length']:,}",
            f"{row['kernel_ms']:.1f} ms",
            f"{row['matrix_over_kernel']:.0f} x" if "matrix_over_kernel" in row else "",
            f"{row['torch_form_over_kernel']:.0f} x" if "torch_form_over_kernel" in row else "",
        ]
        for row in found["rows"]
    ]
    head = ["tokens", "a row", "the whole matrix, for its row", "a row in PyTorch"]
    threads = "one thread" if found["threads"] == 1 else f"{found['threads']} threads"
    text = (
        f"One layer's row, by {found['clock']} on {threads} of a CPU with {found['capability']}; "
        "the last two columns are times over the first. "
        "`python benchmarks/kernels/linear_row.py` measures it anew."
    )
    return _section("What a row costs", text, _table(head, rows))


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
