"""Pages, data sets and the command line on a GPU, and how it is left after a call."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from captum.attr import TextTokenInput
from families import build
from gpu import DEVICE, ON_A_GPU, assert_same, exact_convolutions
from methods import METHODS, each_method
from models import ids, tiny
from torch import nn
from unchanged import HOOKS

from captum_ssm import (
    ExplainBatches,
    Explanation,
    MambaLRP,
    MambaRollout,
    RawAttention,
    SSMLLMAttribution,
    TargetError,
    examples,
    explain,
    explain_dataset,
    hidden_attention,
)
from captum_ssm.cli import main
from captum_ssm.explanation import open_dataset
from captum_ssm.interventions import circuit, knockout

__all__ = ["exact_convolutions"]
pytestmark = ON_A_GPU
TEXT = "The bird near the dogs sings. The dogs near the bird"
TOKENS = ids(2, 9)
IS_GPU = DEVICE == "cuda"


def relevance_of(explanation: Explanation) -> list[Any]:
    return [
        [example.relevance, [[a.probability for a in o.answers] for o in example.outputs]]
        for example in explanation.examples
    ]


def both(name: str, *inputs: Any, **options: Any) -> Explanation:
    """The explanation that is made on the GPU, after it was compared with that of the CPU."""
    made = []
    for device in (DEVICE, "cpu"):
        model, processor = examples.load(name)
        made.append(explain(model.to(device), processor, *inputs, show_progress=False, **options))
    assert_same(relevance_of(made[0]), relevance_of(made[1]), 2e-3)
    return made[0]


OPTIONS: dict[str, dict[str, Any]] = {
    "several methods": {"methods": ["mamba-lrp", "latim", "rollout", "unified"]},
    "Captum's methods": {"methods": ["integrated-gradients", "saliency", "feature-ablation"]},
    "checked": {"validate": True},
    "a contrast": {"target": " bark", "against": " sings", "alternatives": 2},
    "what the model writes": {"max_new_tokens": 4},
    "hops": {"target": " bark. Anna", "hops": 1},
    "swaps": {"target": " bark. Anna", "span": "Anna", "hops": 1, "through": "swaps"},
    "circuit": {"circuit": True},
    "maps and lens": {"maps": True, "lens": True},
    "places": {"position": [3, 6], "units": "word"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_text(name, tmp_path):
    page, file = tmp_path / "why.html", tmp_path / "why.json"
    made = both("stories-mamba", TEXT, **OPTIONS[name])
    made.to_html(page)
    made.save(file)
    assert_same(relevance_of(Explanation.load(file)), relevance_of(made))
    assert "<html" in page.read_text(encoding="utf-8")


def test_other_models():
    both("stories-qwen3next", [TEXT, "The dogs near the bird"], methods=["mamba-lrp", "latim"])
    both("reviews-jamba", ["The plot was not good.", "The cast was good."], target="negative")
    both("digits-vim", examples.sample("digits-vim"), methods=["mamba-lrp", "rollout"])
    both("series-forecaster", examples.sample("series-forecaster"), target=(2, 1))
    messages = [{"role": "user", "content": "Anna has a red ball. Who has a ball?"}]
    both("chat-mamba", messages=messages, max_new_tokens=4)


def test_a_generated_continuation():
    found = []
    for device in (DEVICE, "cpu"):
        model, tokenizer = examples.load("stories-mamba2")
        llm = SSMLLMAttribution(MambaLRP(model.to(device)), tokenizer)
        made = llm.attribute(
            TextTokenInput(TEXT, tokenizer), gen_args={"max_new_tokens": 3, "do_sample": False}
        )
        found.append((made.token_attr, made.seq_attr))
    assert_same(*found)


ROWS = [{"text": " ".join(TEXT.split()[: 2 + k % 8])} for k in range(12)]


@pytest.mark.parametrize("budget", [None, 1 << 20, 1])
def test_a_data_set(budget, tmp_path):
    found = []
    for device in (DEVICE, "cpu"):
        model, tokenizer = examples.load("stories-mamba")
        explain_dataset(
            model.to(device),
            tokenizer,
            ROWS,
            tmp_path / device / "rows",
            methods=["mamba-lrp", "rollout"],
            batch_memory=budget,
            maps=True,
        )
        rows = open_dataset(tmp_path / device / "rows")
        assert not rows.errors
        found.append([relevance_of(row) for row in rows])
    assert_same(*found)


def test_batches_of_other_programs():
    tables = []
    for device in (DEVICE, "cpu"):
        model, tokenizer = examples.load("stories-mamba")
        each = ExplainBatches(
            lambda model=model, tokenizer=tokenizer, device=device: (model.to(device), tokenizer),
            methods="mamba-lrp",
            batch_memory=1 << 20,
        )
        table = each({"text": [row["text"] for row in ROWS]})
        assert table["error"].to_pylist() == [None] * len(ROWS)
        tables.append(table["relevance.mamba-lrp"].to_pylist())
    assert_same(*tables)


def test_the_command_line(tmp_path: Path):
    rows = tmp_path / "rows.txt"
    rows.write_text("\n".join(row["text"] for row in ROWS), encoding="utf-8")
    name, out = "stories-mamba", str(tmp_path / "rows")
    device = ("--device", DEVICE)
    assert main(["run", str(rows), "--model", name, "--output", out, *device]) == 0
    assert not open_dataset(out).errors
    page = str(tmp_path / "why.html")
    assert main(["explain", name, "--text", TEXT, "--output", page, *device]) == 0
    assert main(["supported", name, *device]) == 0
    assert main(["circuit", name, "--text", TEXT, *device]) == 0


def state_of(model: nn.Module) -> dict[str, Any]:
    """What a call could leave changed, of the model and of the generators of random numbers."""
    modules = dict(model.named_modules())
    return {
        "classes": {name: type(m) for name, m in modules.items()},
        "hooks": {name: [len(getattr(m, h)) for h in HOOKS] for name, m in modules.items()},
        "attributes": {name: list(vars(m)) for name, m in modules.items()},
        "weights": {n: (id(p), p.device, p.cpu().tolist()) for n, p in model.named_parameters()},
        "gradients": {n: (p.requires_grad, p.grad) for n, p in model.named_parameters()},
        "numbers": (torch.get_rng_state().tolist(), random.getstate()),
        "numbers of the GPU": torch.cuda.get_rng_state().tolist() if IS_GPU else None,
    }


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next"])
def test_model_and_random_numbers_are_left_as_they_were(family):
    model, tokens = build(family).to(DEVICE), TOKENS.to(DEVICE)
    model(tokens)
    before = state_of(model)
    for method in METHODS:
        method(model).attribute(tokens, target=5)
    hidden_attention(model, tokens)
    with knockout(model, sources=1), torch.no_grad():
        model(tokens)
    assert state_of(model) == before


@pytest.mark.parametrize("device", ["cpu", DEVICE])
def test_random_numbers_are_left_as_they_were_by_pages(device, tmp_path):
    model, tokenizer = examples.load("stories-mamba")
    model = model.to(device)
    TOKENS.to(DEVICE).float().normal_()
    before = state_of(model)
    options = {"methods": ["mamba-lrp", "gradient-shap", "feature-ablation"], "validate": True}
    explain(model, tokenizer, TEXT, show_progress=False, max_new_tokens=3, **options)
    explain_dataset(model, tokenizer, ROWS[:3], tmp_path / "rows")
    assert state_of(model) == before


@each_method
def test_an_error_in_the_middle_leaves_the_model_as_it_was(method):
    model, tokens = tiny("jamba").to(DEVICE), TOKENS.to(DEVICE)
    model(tokens)
    before = state_of(model)
    layer = model.model.layers[2]
    own = layer.forward

    def failing(*args: Any, **kwargs: Any) -> Any:
        own(*args, **kwargs)
        raise ZeroDivisionError

    layer.forward = failing
    with pytest.raises(ZeroDivisionError):
        method(model).attribute(tokens, target=5)
    del layer.forward
    with pytest.raises((TargetError, AssertionError)):
        MambaLRP(model).attribute(tokens, target=10**6)
    with pytest.raises(ZeroDivisionError), circuit(model, [(0, 3, 1)]):
        raise ZeroDivisionError
    assert state_of(model) == before


@pytest.mark.skipif(not IS_GPU, reason="counts the GPU's memory")
@pytest.mark.parametrize("family", ["mamba", "mamba2", "jamba"])
@each_method
def test_memory_is_given_back(method, family):
    model, tokens = build(family).to(DEVICE), TOKENS.to(DEVICE)
    taken = []
    for _ in range(3):  # what a library sets up at its first use stays, such as cuBLAS' workspace
        found = method(model).attribute(tokens, target=5)
        del found
        gc.collect()
        taken.append(torch.cuda.memory_allocated())
    assert taken[2] <= taken[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("family", ["mamba", "mamba2", "bamba"])
@each_method
def test_other_dtypes(method, family, dtype):
    model = build(family).to(DEVICE, dtype)
    found = method(model).attribute(TOKENS.to(DEVICE), target=5)
    assert found.device.type == DEVICE
    assert found.isfinite().all()
    truth = method(build(family).to(dtype)).attribute(TOKENS, target=5)
    error = (found.cpu().double() - truth.double()).norm() / truth.double().norm()
    assert error < (1e-6 if dtype == torch.float64 else 0.3)


@each_method
@pytest.mark.parametrize("family", ["mamba", "qwen3_next"])
def test_under_autocast(method, family):
    model, tokens = build(family).to(DEVICE), TOKENS.to(DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found = method(model).attribute(tokens, target=5)
    assert found.device.type == DEVICE
    assert found.isfinite().all()


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_next"])
def test_products_that_are_rounded_to_tf32(family, precision, monkeypatch):
    """As on every GPU since Ampere, where a user asks for it: no mixer is taken for another one."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        model, tokens = build(family).to(DEVICE), TOKENS.to(DEVICE)
        found = [method(model).attribute(tokens, target=5) for method in (MambaLRP, MambaRollout)]
    finally:
        torch.set_float32_matmul_precision(before)
    truth = [method(build(family)).attribute(TOKENS, 5) for method in (MambaLRP, MambaRollout)]
    assert_same(found, truth, 0.1)


def test_a_changed_mixer_is_noticed():
    model, tokens = build("mamba").to(DEVICE), TOKENS.to(DEVICE)
    layer = model.backbone.layers[0].mixer.in_proj
    with (
        layer.register_forward_hook(lambda module, args, output: 2 * output),
        pytest.raises(ValueError, match="mixer"),
    ):
        RawAttention(model).attribute(tokens)
