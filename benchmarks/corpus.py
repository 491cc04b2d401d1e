"""A data set of prompts: time against one batch, memory, processes, and killed runs.

python benchmarks/corpus.py [time | memory | budget | processes | kills] ...
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _memory import status_mib
from _record import RESULTS, save
from transformers import MambaConfig, MambaForCausalLM

from captum_ssm import MambaLRP, examples, explain_dataset
from captum_ssm.examples import stories

MODEL = "stories-mamba"
COUNTS = (200, 2_000, 20_000)
BUDGETS = (None, 1 << 30, 1 << 28, 1 << 26)  # bytes
LONG_ROWS, LONGEST = 64, 400  # of a larger model, in tokens
KILLS, KILLED_ROWS, KILLED_SHARD = 50, 100, 5


def prompts(count: int) -> list[str]:
    """Random stories of different lengths."""
    draw = random.Random(0)
    return [" ".join(stories.make_story(draw, draw.randrange(6, 30)).words) for _ in range(count)]


def run(folder: Path, count: int, *options: str) -> list[str]:
    """The command of one process that explains so many prompts."""
    return [sys.executable, __file__, "explain", str(folder), str(count), *options]


def explained(folder: Path, count: int, rows_per_shard: int = 1000, process: Any = None) -> None:
    model, tokenizer = examples.load(MODEL)
    explain_dataset(
        model,
        tokenizer,
        prompts(count),
        folder,
        rows_per_shard=rows_per_shard,
        process=process,
        alternatives=0,
    )


def explained_long(folder: Path, memory: int | None) -> float:
    """MiB that the process took more at its peak than before, with a model of eight layers."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = MambaConfig(hidden_size=256, num_hidden_layers=8, vocab_size=1000)
    model, draw = MambaForCausalLM(config).eval(), random.Random(0)
    rows = [
        {"input_ids": [draw.randrange(1000) for _ in range(draw.randrange(LONGEST // 4, LONGEST))]}
        for _ in range(LONG_ROWS)
    ]
    options: dict[str, Any] = {"alternatives": 0, "batch_memory": memory}
    explain_dataset(model, None, rows[:1], folder / "first", **options)
    before = status_mib("VmRSS")
    begin = time.perf_counter()
    explain_dataset(model, None, rows, folder / "all", **options)
    print(time.perf_counter() - begin)
    return status_mib("VmHWM") - before


def seconds(function: Any) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def one_batch(count: int) -> float:
    """Relevance of all prompts from the best single padded batch."""
    model, tokenizer = examples.load(MODEL)
    ids = tokenizer(prompts(count), return_tensors="pt", padding=True, padding_side="left")
    named = {"attention_mask": ids["attention_mask"]}
    ids = ids["input_ids"]

    def once() -> None:
        with torch.no_grad():
            target = model(ids, **named).logits[:, -1].argmax(-1)
        MambaLRP(model).attribute(ids, target=target, additional_forward_args=named)

    once()
    return min(seconds(once) for _ in range(3))


def measure_time(there: Path) -> list[dict[str, Any]]:
    count = 2_000
    explained(there / "warm", 20)
    taken = min(seconds(lambda k=k: explained(there / f"time{k}", count)) for k in range(2))
    batch = one_batch(count)
    ratio = {"ratio": taken / batch, "seconds": taken, "one_batch": batch}
    return [{"measured": "time", "prompts": count, **ratio}]


def measure_memory(there: Path) -> list[dict[str, Any]]:
    rows = []
    for count in COUNTS:
        told = subprocess.run(
            run(there / f"memory{count}", count), check=True, capture_output=True, text=True
        )
        peak = float(told.stdout.split()[-1])
        rows.append({"measured": "memory", "prompts": count, "peak_mib": peak})
    return rows


def measure_budget(there: Path) -> list[dict[str, Any]]:
    """Peak and time by what a batch may take."""
    rows = []
    for memory in BUDGETS:
        part = str(there / str(memory))
        command = [sys.executable, __file__, "budget-of", part, str(memory or 0)]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        taken = {"seconds": float(told[-2]), "peak_mib": float(told[-1])}
        rows.append({"measured": "budget", "bytes": memory, **taken})
    return rows


def measure_processes(there: Path) -> list[dict[str, Any]]:
    count, rows = 20_000, []  # starting a process takes seconds of its own
    for n in (1, 2):
        folder = there / f"of{n}"

        def together(n: int = n, folder: Path = folder) -> None:
            commands = [run(folder, count, "--process", str(k), str(n)) for k in range(n)]
            for process in [subprocess.Popen(c, stdout=subprocess.DEVNULL) for c in commands]:
                assert process.wait() == 0

        rows.append({"measured": "processes", "processes": n, "seconds": seconds(together)})
    same = files(there / "of1") == files(there / "of2")
    return [row | {"prompts": count, "equal": same} for row in rows]


def measure_kills(there: Path) -> list[dict[str, Any]]:
    """One run that is killed again and again, and begun anew where it was finished between."""
    whole = lambda: explained(there / "whole", KILLED_ROWS, KILLED_SHARD)  # noqa: E731
    longest, draw = seconds(whole), random.Random(1)
    expected = files(there / "whole")
    folder, equal, finished, begun = there / "killed", True, 0, 0
    for _ in range(KILLS):
        child = os.fork()  # importing PyTorch takes longer than all that is explained
        if not child:
            explained(folder, KILLED_ROWS, KILLED_SHARD)
            os._exit(0)
        time.sleep(draw.uniform(0.0, longest))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left = {k: v for k, v in files(folder).items() if not k.endswith(".tmp")}
        equal &= left.items() <= expected.items()
        begun += 1 < len(left) < len(expected)
        if left.keys() == expected.keys():
            finished += 1
            shutil.rmtree(folder)
    explained(folder, KILLED_ROWS, KILLED_SHARD)
    equal &= files(folder) == expected
    told = {"kills": KILLS, "finished_between": finished, "begun": begun, "equal": equal}
    return [{"measured": "kills", "prompts": KILLED_ROWS, **told}]


def files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()} if folder.exists() else {}


MEASURED = {
    "time": measure_time,
    "memory": measure_memory,
    "budget": measure_budget,
    "processes": measure_processes,
    "kills": measure_kills,
}


def main() -> None:
    if sys.argv[1:2] == ["explain"]:
        parser = argparse.ArgumentParser()
        parser.add_argument("folder", type=Path)
        parser.add_argument("count", type=int)
        parser.add_argument("--process", type=int, nargs=2)
        args = parser.parse_args(sys.argv[2:])
        explained(args.folder, args.count, process=args.process)
        print(status_mib("VmHWM"))
        return
    if sys.argv[1:2] == ["budget-of"]:
        print(explained_long(Path(sys.argv[2]), int(sys.argv[3]) or None))
        return
    torch.set_num_threads(1)
    rows = []
    for name in sys.argv[1:] or MEASURED:
        with tempfile.TemporaryDirectory() as there:
            found = MEASURED[name](Path(there))
        print(*found, sep="\n", flush=True)
        rows += found
    if not sys.argv[1:]:
        save(RESULTS / "corpus.json", "corpus", rows)


if __name__ == "__main__":
    main()
