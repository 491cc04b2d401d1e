"""Runs the tests of flash-linear-attention's layers in their own environment (fla/run.sh)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from families import TRANSFORMERS_4
from folders import TESTS

HERE = TESTS / "fla"


def run(*arguments: str, seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(HERE / "run.sh"), *arguments],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.skipif(TRANSFORMERS_4, reason="flash-linear-attention needs transformers 5")
def test_layers_of_flash_linear_attention():
    made = run("--version", seconds=600)
    if made.returncode:
        pytest.skip(f"the environment could not be made: {made.stderr.strip()[-300:]}")
    result = run("-p", "no:cacheprovider", seconds=1800)
    assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-2000:]
