"""Memory of processes, and measurements in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def status_mib(name: str) -> float:
    """A line of this process's status, in MiB: ``VmRSS`` is now, ``VmHWM`` the peak."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) / 1024


def in_a_process(script: str, *arguments: Any, env: dict[str, str] | None = None) -> Any:
    """What a script prints as JSON on its last line, run in a fresh process with ``--one``."""
    command = [sys.executable, script, "--one", *map(str, arguments)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    return json.loads(run.stdout.splitlines()[-1])


def peak_mib(script: str, sides: str, side: str, *arguments: Any) -> float:
    """Peak resident MiB of a fresh process that calls one of a script's functions once.

    Args:
        script (str): the script's path.
        sides (str): its function that makes a dict of functions, from ``arguments``.
        side (str): the key of the one to call.
        arguments: literals.
    """
    # ru_maxrss would start from the parent's peak.
    code = (
        "import os, runpy, sys\n"
        f"sys.path.insert(0, os.path.dirname({script!r}))\n"
        f"runpy.run_path({script!r})[{sides!r}](*{arguments!r})[{side!r}]()\n"
        "lines = open('/proc/self/status')\n"
        "print(next(s for s in lines if s.startswith('VmHWM')).split()[1])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(found.stdout.split()[-1]) / 1024
