"""Peak memory of one thing a script does, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any


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
