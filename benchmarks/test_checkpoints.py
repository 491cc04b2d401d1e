"""The script of published checkpoints, on tiny ones of the real formats."""

import json
import sys
from pathlib import Path

import checkpoints
import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import families
from models import VOCABULARY, word_tokenizer

WORDS = [f"w{k}" for k in range(VOCABULARY)]
TEXT = " ".join(WORDS[k] for k in (5, 9, 12, 30, 7, 21))
FAMILIES = ("mamba", "mamba2", "falcon_h1", "qwen3_5", "recurrent_gemma")


@pytest.fixture(params=FAMILIES)
def folder(request, tmp_path):
    families.build(request.param).save_pretrained(tmp_path / request.param)
    words = {word: k for k, word in enumerate(WORDS)}
    word_tokenizer(words, unk_token="w0", pad_token="w0").save_pretrained(tmp_path / request.param)
    return tmp_path / request.param


def test_a_checkpoint_gets_all_its_numbers_and_a_page(folder, tmp_path):
    page = tmp_path / "page.html"
    found = checkpoints.row(folder.name, str(folder), "float32", TEXT, page)
    assert found["tokens"] == 6
    assert found["mixers"] >= 2
    assert found["largest_error"] < 1e-4
    assert found["lrp_forwards"] > 0
    assert found["lrp_delta"] >= 0
    assert found["peak_mib"] >= found["loaded_mib"] > 0
    assert "w30" in page.read_text(encoding="utf-8")
    low = checkpoints.row(folder.name, str(folder), "bfloat16", TEXT, page)
    assert low["largest_error"] > found["largest_error"]


@pytest.mark.slow
def test_one_command_keeps_dated_rows_and_tells_what_failed(tmp_path):
    model = tmp_path / "mamba"
    families.build("mamba").save_pretrained(model)
    words = {word: k for k, word in enumerate(WORDS)}
    word_tokenizer(words, unk_token="w0", pad_token="w0").save_pretrained(model)
    record = tmp_path / "checkpoints.json"
    line = [f"tiny={model}", "--dtypes", "float32", "--text", TEXT, "--by", "a test"]
    line += ["--output", str(record), "--pages", str(tmp_path / "pages")]
    for _ in range(2):  # the second run takes the place of the first
        checkpoints.main(line)
        (row,) = json.loads(record.read_text())
        assert row["by"] == "a test"
        assert row["versions"]["torch"] == torch.__version__
        assert (tmp_path / "pages" / "tiny-float32.html").exists()
    with pytest.raises(SystemExit, match="not measured:\ngone, float32: "):
        checkpoints.main([f"gone={tmp_path / 'nothing'}", *line[1:]])
    assert len(json.loads(record.read_text())) == 1
