"""The record of a run: its rows, and the machine and versions they belong to."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).resolve().parent / "results"


def processor() -> str:
    """The processor's name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def save(
    path: Path,
    benchmark: str,
    rows: Sequence[dict[str, Any]],
    *,
    cpu_time: bool = False,
    **details: Any,
) -> None:
    """Write the rows as JSON.

    ``cpu_time`` tells that times are the processor's instead of the wall clock's; ``details`` are
    what else the rows depend on, such as other packages' versions.
    """
    record = {
        "benchmark": benchmark,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "processor": processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "clock": "processor time" if cpu_time else "wall clock",
        "torch": torch.__version__,
        "python": platform.python_version(),
        **details,
        "rows": list(rows),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
