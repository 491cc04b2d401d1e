"""What `docs/choosing.md` says of circuits is what the records say."""

import json
import re
from pathlib import Path
from statistics import fmean

import pytest
import torch

from captum_ssm.metrics import bootstrap

HERE = Path(__file__).resolve().parent
PAGE = HERE.parents[1] / "docs" / "choosing.md"
CONTRAST, SIGNED, LOGIT = "LRP contrast |E|", "LRP contrast, signed", "LRP logit |E|"
EAP, INTEGRATED = "EAP |E|", "EAP-IG |E|"
# The eight models that are published with the repository; other records are of other seeds.
FIRST = ("copying-mamba", "copying-mamba2", "passkey-mamba", "stories-mamba", "stories-mamba2",
         "stories-qwen3next", "stories-recurrentgemma", "stories-rwkv")  # fmt: skip


@pytest.fixture(scope="module")
def records():
    found = {name: json.loads((HERE / "results" / f"{name}.json").read_text()) for name in FIRST}
    return {
        name: record | {"rows": {(row["ranking"], row["ablation"]): row for row in record["rows"]}}
        for name, record in found.items()
    }


def area(records, ranking, ablation, what="kept"):
    values = (r["rows"][ranking, ablation]["area"][what]["value"] for r in records.values())
    return f"{fmean(values):.2f}"


def difference(records, one, other, ablation):
    first, second = (
        torch.cat([torch.tensor(r["rows"][name, ablation]["each"]) for r in records.values()])
        for name in (one, other)
    )
    found = bootstrap((first - second).double())
    return " ".join([f"{found.value:.2f}", f"[{found.low:.2f}, {found.high:.2f}]"]).replace(
        "-0.00", "0.00"
    )


def kept(records, name, k, ranking=CONTRAST):
    record = records[name]
    return record["rows"][ranking, "zero"]["curves"]["kept"][record["ks"].index(k)]


def sentences(records):
    one = [kept(records, name, 1) for name in records]
    none = [r["rows"][CONTRAST, "zero"]["kept_none"] for r in records.values()]

    def both(ranking, what="kept", ablations=("zero", "mean")):
        return tuple(area(records, ranking, ablation, what) for ablation in ablations)

    zero, mean = both(CONTRAST)
    yield (
        f"relevance by size keeps {zero} (zero ablation; area over log k, mean of the models) and "
        f"{mean} (mean ablation); plain gradients (EAP) keep {' and '.join(both(EAP))}"
    )
    parts = (difference(records, CONTRAST, EAP, ablation) for ablation in ("zero", "mean"))
    yield f"The difference per question is {' and '.join(parts)}"
    yield f"with zero ablation ({difference(records, INTEGRATED, CONTRAST, 'zero')})"
    yield f"with mean ablation ({difference(records, INTEGRATED, CONTRAST, 'mean')})"
    yield f"keeps {min(one):.2f} to {max(one):.2f} of a model's answers"
    yield f"no edge keeps {min(none):.2f} to {max(none):.2f}"
    parts = (difference(records, SIGNED, CONTRAST, ablation) for ablation in ("zero", "mean"))
    yield f"({' and '.join(parts)}), and can be gamed"
    zero, mean = both(SIGNED, "control")
    yield f"in {zero} (zero) and {mean} (mean) of the cases"
    yield f"against {area(records, CONTRAST, 'zero', 'control')} by size"
    yield f"EAP-IG, signed, in {' and '.join(both('EAP-IG, signed', 'control'))}"
    ablations = ("zero", "mean", "zero, coefficients of the whole run", "interchange")
    gaps = both(CONTRAST, "gap", ablations)
    yield f"a gap to the model of {gaps[0]} with zero ablation, {gaps[1]} where removed edges"
    yield f'{gaps[2]} with `coefficients="whole"`, and {gaps[3]} where they carry'
    yield f"keeps {difference(records, LOGIT, CONTRAST, 'zero')} fewer"
    less, more = (area(records, name, "zero", "control") for name in (CONTRAST, LOGIT))
    yield f"in {less} instead of {more}"
    attention = area(records, "hidden attention", "zero")
    reach, norms, chance = (
        area(records, f"{name}, reach", "zero")
        for name in ("hidden attention", "LaTIM l1", "random")
    )
    yield f"The largest hidden attention keeps {attention}"
    yield f"tokens the output depends on {reach}; LaTIM's norms, with that help, {norms}"
    yield f"random edges {chance}"
    few, more = (kept(records, "copying-mamba", k) for k in (5, 20))
    yield f"copying-mamba gives {few:.2f} of its answers with 5 edges and {more:.2f} with 20"
    counts = {record["examples"] for record in records.values()}
    yield f"{counts.pop()} questions each; k = 1, 2, 5, 20 and 100"
    assert not counts


def found_sentences():
    rows = json.loads((HERE / "results" / "found" / "stories-mamba.json").read_text())["rows"]
    ways = ("by rank", "by relevance", "by runs", "by both")
    sizes = {way: torch.tensor([row[way][0] for row in rows]).double() for way in ways}
    saved = {way: told(bootstrap(sizes["by rank"] - size)) for way, size in sizes.items()}
    yield f"On {len(rows)} questions of stories-mamba"
    yield f"from {told(bootstrap(sizes['by rank']))} edges, by rank alone"
    yield f"to {told(bootstrap(sizes['by both']))}."
    yield f"saves {saved['by relevance']} edges"
    yield f"by a run saves {saved['by runs']}, and both in turn {saved['by both']}."


def told(found):
    return f"{found.value:.1f} [{found.low:.1f}, {found.high:.1f}]"


def test_numbers_of_the_page_are_those_of_the_records(records):
    page = re.sub(r"\s+", " ", PAGE.read_text())
    missing = [text for text in (*sentences(records), *found_sentences()) if text not in page]
    assert not missing
