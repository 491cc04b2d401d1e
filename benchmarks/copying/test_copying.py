"""Tests of the task, of the training scan and of the models saved from it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from _scan import fast_scan
from _training import Checkpoint, fit, inverse_square_root
from mimetic import mimic_attention
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)
from transformers.models.mamba import modeling_mamba

from captum_ssm import hidden_attention
from captum_ssm.examples.copying import (
    LENGTHS,
    MAX_LENGTH,
    SEPARATOR,
    SEPARATOR_ID,
    VOCABULARY_SIZE,
    CopyBatch,
    alignment,
    decode,
    encode,
    held_out_batch,
    is_held_out,
    make_batch,
    predicting_positions,
    source_positions,
)

MODELS = Path(__file__).resolve().parents[2] / "tutorials" / "models"


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("length", [1, 5, *LENGTHS])
def test_layout(length: int) -> None:
    batch = make_batch(8, generator(0), length)
    assert batch.tokens.shape == (8, 2 * length + 1)
    assert (batch.tokens[:, length] == SEPARATOR_ID).all()
    assert torch.equal(batch.prompt[:, :-1], batch.source)
    predicted = batch.tokens[:, predicting_positions(length) + 1]
    assert torch.equal(predicted, batch.targets)
    assert torch.equal(predicted, batch.tokens[:, source_positions(length)])
    assert int(predicting_positions(length).max()) == batch.inputs.shape[1] - 1


def test_alignment_marks_the_answers() -> None:
    batch = make_batch(8, generator(0), 6)
    mask = alignment(6)
    assert mask.sum(dim=1).eq(1).all()
    for row, columns in enumerate(mask):
        assert torch.equal(batch.inputs[:, columns][:, 0], batch.targets[:, row])
    band = alignment(6, (-1, 0, 1))
    assert band.sum() == 3 * 6 - 2
    assert not band[:, 6:].any()


def test_words() -> None:
    tokens = encode([*"cab", SEPARATOR])
    assert tokens.tolist() == [2, 0, 1, SEPARATOR_ID]
    assert decode(tokens) == ["c", "a", "b", SEPARATOR]


def test_the_seed_decides() -> None:
    assert torch.equal(make_batch(16, generator(1)).tokens, make_batch(16, generator(1)).tokens)
    lengths = {make_batch(2, generator(seed)).length for seed in range(200)}
    assert lengths == set(LENGTHS)


def test_held_out_strings_never_meet_training() -> None:
    # One seed for both: the string, not the seed, decides the side.
    training = make_batch(2000, generator(7), MAX_LENGTH).source
    reserved = held_out_batch(2000, generator(7), MAX_LENGTH).source
    assert not is_held_out(training).any()
    assert is_held_out(reserved).all()
    both = torch.cat([training, reserved])
    assert len(torch.unique(both, dim=0)) == len(both)


def test_too_few_strings_is_an_error() -> None:
    with pytest.raises(ValueError, match="distinct"):
        make_batch(27, generator(0), 1)


SMALL = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 32,
    "state_size": 8,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "use_cache": False,
}


def small(kind: str, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    if kind == "mamba":
        return MambaForCausalLM(MambaConfig(**SMALL | settings))
    heads = {"num_heads": 4, "head_dim": 16, "n_groups": 2, "chunk_size": 4, "expand": 2}
    return Mamba2ForCausalLM(Mamba2Config(**SMALL | heads | settings))


@pytest.mark.skipif(
    not hasattr(modeling_mamba, "mamba_selective_scan"), reason="this release has the scan inline"
)
@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_training_scan_matches_the_stock_one(kind: str) -> None:
    model = small(kind, num_hidden_layers=2)
    tokens = make_batch(3, generator(0), 5).inputs

    def loss_and_gradients() -> list[torch.Tensor]:
        loss = model(tokens).logits.square().mean()
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]

    stock = loss_and_gradients()
    with fast_scan():
        fast = loss_and_gradients()
    for expected, actual in zip(stock, fast, strict=True):
        scale = float(expected.abs().max())
        torch.testing.assert_close(actual, expected, rtol=0.0, atol=1e-5 * scale)


@pytest.mark.parametrize("kind", ["mamba", "mamba2"])
def test_a_layer_like_attention_reads_what_followed_the_same_symbols(kind: str) -> None:
    model = small(kind, state_size=64, num_hidden_layers=1)
    n = 12
    tokens = torch.randperm(26, generator=generator(0))[:n]
    batch = CopyBatch(torch.cat([tokens, torch.tensor([SEPARATOR_ID]), tokens])[None], n)

    def hits() -> float:
        rows = predicting_positions(n)[3:]  # those with as many symbols before as a query reads
        maps = hidden_attention(model, batch.inputs, layers=0, reduction="mean", rows=rows)
        (found,) = maps.values()
        best = found[0, :, :n].abs().argmax(-1)
        return float((best == torch.arange(3, n)).double().mean())

    before = hits()
    mimic_attention(model, 0)
    assert hits() > 0.8 > before


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    def trained(steps: int, checkpoint: Checkpoint, model: nn.Module) -> torch.Tensor:
        args = SimpleNamespace(lr=0.1, weight_decay=0.0, steps=steps, report_every=2)

        def loss_of(step: int) -> torch.Tensor:
            x = torch.randn(4, 3, generator=checkpoint.generator)
            return (model(x) - 1).square().mean()

        options = {"factor": inverse_square_root, "checkpoint": checkpoint}
        fit(model, args, "test", loss_of, lambda: {"share": 0.0}, **options)
        return model.weight.detach().clone()

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(3, 1)

    whole = trained(4, Checkpoint(generator=generator(3)), model())
    path = tmp_path / "checkpoint.pt"
    trained(2, Checkpoint(path, generator(3)), model())
    later = Checkpoint(path, generator(0))
    assert torch.equal(trained(4, later, model()), whole)
    assert [one["step"] for one in later.history] == [2, 4]


@pytest.mark.parametrize("name", ["copying-mamba", "copying-mamba2"])
def test_saved_model_copies(name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / name, local_files_only=True).eval()

    def accuracy(batch: CopyBatch) -> float:
        logits = model(batch.inputs, use_cache=False).logits[:, batch.length :]
        return float((logits.argmax(-1) == batch.targets).double().mean())

    with torch.no_grad():
        for length in LENGTHS:
            assert accuracy(held_out_batch(32, generator(99), length)) > 0.98
