"""``supported``, on the committed models and on tiny ones saved to disk."""

from functools import partial

import pytest
import torch
from commands import COPYING, DIGITS, explain
from families import build
from models import SHARED, ids, tiny
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MambaForCausalLM

from captum_ssm import LaTIM, MambaLRP, estimate, hidden_attention
from captum_ssm.attr import methods
from captum_ssm.cli import main
from captum_ssm.cli.supported import PROBE_LENGTH, _inputs, count
from captum_ssm.inspection.support_report import shortened
from captum_ssm.utils.memory import readable_bytes


def lines(*arguments: str, capsys) -> list[str]:
    assert main(["supported", *arguments]) == 0
    found = capsys.readouterr().out.splitlines()
    assert max(map(len, found)) <= 120
    return found


def test_supported(capsys):
    said = "\n".join(lines(COPYING, "--length", "100", capsys=capsys))
    for part in (
        "backbone.layers.{0-2}.mixer  MambaMixer  by its class  16      forward  128 ",
        "Other layers, each on one token at a time: Embedding, 4 x MambaRMSNorm, Linear",
        "mamba-lrp          works",
        "ompiled kernels: ",  # or no compiled kernels, and why
        "for a text of 100 tokens, measured",
        "a map per layer (explain --maps)",
    ):
        assert part in said
    assert "not reproduced" not in said
    assert "act on one another" not in said


def test_what_it_says_is_exact_is_what_the_methods_measure(capsys):
    said = " ".join(" ".join(lines(COPYING, capsys=capsys)).split())
    model = AutoModelForCausalLM.from_pretrained(COPYING).eval()
    probe = torch.randint(27, (1, 16), generator=torch.Generator().manual_seed(0))
    worst = max(float(error) for error in LaTIM(model).layer_errors(probe, activation="silu"))
    assert "misses its output by nothing with activation='gate', the default" in said
    assert f"and by {100 * worst:.3g}% with activation='silu'" in said
    best = int(model(probe).logits[0, -1].argmax())
    score = float(model(probe).logits[0, -1, best].detach())
    total = float(MambaLRP(model).attribute(probe, target=best).sum())
    assert f"adds up to {total:.4g}, and the explained score is {score:.4g}" in said


def test_what_it_says_of_costs_is_what_estimate_says(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("captum_ssm.inspection.cost.BUDGET", 0)  # as if the model were large
    model = build("mamba2")
    model.save_pretrained(tmp_path)
    said = lines(str(tmp_path), "--length", "600", capsys=capsys)
    assert any("for a text of 600 tokens, extrapolated from shorter texts:" in x for x in said)
    # Rows that carry nothing take no memory: the costs are those of the same tokens.
    ids = _inputs(model, 600)
    target = int(model(ids[:, :PROBE_LENGTH]).logits[0, -1].argmax())
    explained = {name: method(model).attribute for name, method in methods().items()}
    calls = {name: partial(call, target=target) for name, call in explained.items()}
    calls |= {
        "a map per layer (explain --maps)": partial(hidden_attention, model, reduction="mean"),
    }
    for name, call in calls.items():
        (line,) = [line for line in said if line.startswith(f"  {name}  ") and "iB" in line]
        number, unit = line.removeprefix(f"  {name}").split()[:2]
        said_bytes = float(number) * 1024 ** (1 + ["KiB", "MiB", "GiB"].index(unit))
        # What a model was found to be in earlier calls is not looked at again.
        assert said_bytes == pytest.approx(estimate(call, ids).total_bytes, rel=0.1)


@pytest.mark.parametrize(
    "family",
    [*(pytest.param(k, marks=pytest.mark.slow) for k in ("jamba", "mamba2")), "qwen3_next"],
)
def test_supported_families(family, tmp_path, capsys):
    build(family).save_pretrained(tmp_path)
    said = "\n".join(lines(str(tmp_path), capsys=capsys))
    assert "not reproduced" not in said
    assert ("Attention" in said) == (family != "mamba2")
    assert " .. " not in said
    assert "does not work" not in said


def test_supported_finds_what_mixes_tokens_outside_the_maps(tmp_path, capsys):
    build("rwkv").save_pretrained(tmp_path)
    said = lines(str(tmp_path), capsys=capsys)
    (mixing,) = [line for line in said if "in which tokens act on one another" in line]
    assert "RwkvFeedForward" in mixing
    assert "Norm" not in mixing
    assert "Embedding" not in mixing


def test_supported_knows_the_vision_model(capsys):
    said = "\n".join(lines(DIGITS, "--length", "1", capsys=capsys))
    for part in (
        "layers.{0-3}.mixer  BidirectionalMamba",
        "for an image of 40 x 40 pixels, 101 tokens, measured",
        "an image of noise",
    ):
        assert part in said
    assert "does not work" not in said
    assert explain("--ids", "3", model=DIGITS) == 1
    assert "which reads images; expected --image" in capsys.readouterr().err


def test_supported_by_its_configuration(tmp_path, capsys):
    tiny().config.save_pretrained(tmp_path)  # no weights at all
    said = "\n".join(lines(str(tmp_path), "--config-only", capsys=capsys))
    assert "2 x MambaMixer" in said
    assert "Other layers: Embedding, 3 x MambaRMSNorm, Linear" in said
    assert "Nothing was run" in said


def test_paths_and_numbers_are_short():
    layers = [f"model.layers.{i}.linear_attn" for i in range(48) if i % 4 != 3]
    assert shortened(layers) == "model.layers.{0-2, 4-6, .., 44-46}.linear_attn"
    assert shortened(layers[:1]) == "model.layers.0.linear_attn"
    assert shortened(layers[:2]) == "model.layers.{0-1}.linear_attn"
    assert shortened(["a.0.x", "a.2.x"]) == "a.{0, 2}.x"
    assert shortened(["a.0.x", "a.1.y"]) == "a.0.x .. a.1.y"
    assert shortened(["shared", "shared:1"]) == "shared .. shared:1"
    counts = [count(n) for n in (5, 1500, 999_600, 6e9, 7e15)]
    assert counts == ["5", "1.5 k", "1 M", "6 G", "7,000 T"]
    assert [readable_bytes(2**n) for n in (10, 51, 60)] == ["1.0 KiB", "2.0 PiB", "1.0 EiB"]


def test_a_device_that_is_not_there(capsys):
    if torch.cuda.is_available():
        pytest.skip("it is there")
    assert main(["supported", COPYING, "--device", "cuda"]) == 1
    assert explain("--ids", "3,4", "--device", "cuda") == 1
    said = capsys.readouterr().err.splitlines()
    assert all("--device is 'cuda', which torch" in line for line in said)
    assert all(line.endswith("it can use cpu.") for line in said)
    assert main(["supported", COPYING, "--device", "gpu"]) == 1
    assert "--device is 'gpu'" in capsys.readouterr().err


def test_supported_measures_what_it_does_not_know(tmp_path, capsys):
    config = dict(SHARED, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(tmp_path)
    assert main(["supported", str(tmp_path)]) == 0
    assert "LlamaAttention  measured on a run" in capsys.readouterr().out
    assert main(["supported", str(tmp_path), "--length", "0"]) == 1
    tokens = ",".join(map(str, ids(1, 4)[0].tolist()))
    assert explain("--ids", tokens, model=str(tmp_path)) == 0
    assert main(["supported", str(tmp_path), "--config-only"]) == 1
    assert "LlamaForCausalLM holds no token mixer" in capsys.readouterr().err


def test_the_report_runs_the_model_a_few_times(monkeypatch, capsys):
    runs = []
    forward = MambaForCausalLM.forward

    def counted(*args, **kwargs):
        runs.append(1)
        return forward(*args, **kwargs)

    monkeypatch.setattr(MambaForCausalLM, "forward", counted)
    lines(COPYING, capsys=capsys)
    assert len(runs) <= 13
    found = " ".join(lines(COPYING, "--length", "4", capsys=capsys))
    assert "Memory in addition to the weights" in found
    assert len(runs) > 40  # so it is asked for
