"""Run notebooks, and check that their committed outputs are what the runs give.

    python tutorials/run_notebooks.py Copying_Mamba Time_Series     # or all of them: no names

What ran is written to out/notebooks. A notebook runs in an empty folder, so that it needs nothing
but the installed package; what it uses of the checkout where it can is linked there. Every notebook
has a kernel of its own, which has imported what all of them import and done nothing else: kernels
are forks of this process, which imports that once.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import multiprocessing
import os
import secrets
import sys
import tempfile
from pathlib import Path

import nbformat
from check_outputs import HERE, RUNS, problems, read, said
from ipykernel.kernelapp import IPKernelApp
from jupyter_client import AsyncKernelClient
from jupyter_client.connect import write_connection_file
from nbclient import NotebookClient

# What takes long to import.
IMPORTED = [
    "captum_ssm.attr",
    "captum_ssm.visualization",
    "transformers.models.mamba.modeling_mamba",
]
# Packages that only one notebook needs, without which it is skipped.
NEEDS = {"Why_Is_This_Character_JavaScript": "typeseg"}
# What a notebook uses if it lies next to it: models that are too large for the package.
NEXT_TO = {
    "From_Heatmap_To_Receptive_Field": ("trained_models.py", "models/digits-segmenter"),
    "One_Question_Across_Architectures": ("models/stories-recurrentgemma", "models/stories-rwkv"),
}
AT_A_TIME = 2
SECONDS_PER_CELL = 600


class ForkedKernel:
    """A kernel that is a fork of this process, with the methods of a manager that nbclient calls.

    All are forked before the first of them is connected to: connections have threads, which forks
    do not inherit.
    """

    has_kernel = True

    def __init__(self, connection_file: Path, folder: Path) -> None:
        self.connection_file = str(connection_file)
        sockets = str(connection_file.with_suffix(""))
        write_connection_file(
            self.connection_file, transport="ipc", ip=sockets, key=secrets.token_hex().encode()
        )
        fork = multiprocessing.get_context("fork")
        self.process = fork.Process(target=serve, args=(self.connection_file, folder))
        self.process.start()

    def client(self) -> AsyncKernelClient:
        client = AsyncKernelClient(connection_file=self.connection_file)
        client.load_connection_file()
        return client

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def shutdown_kernel(self, now: bool = False) -> None:
        self.process.kill()
        self.process.join()

    def cleanup_resources(self) -> None:
        """Nothing: the folder of the connection file is temporary."""


def serve(connection_file: str, folder: Path) -> None:
    """Be a kernel in a folder until this process or its parent ends."""
    os.chdir(folder)
    sys.path[0] = ""
    IPKernelApp.launch_instance(["-f", connection_file], parent_handle=os.getppid())


async def run(name: str, kernel: ForkedKernel) -> list[str]:
    """Run a notebook and write what ran. Returns what is wrong with it."""
    notebook = nbformat.read(HERE / f"{name}.ipynb", as_version=4)
    client = NotebookClient(notebook, km=kernel, timeout=SECONDS_PER_CELL, record_timing=False)
    try:
        await client.async_execute()
    except Exception:
        print(f"{name} failed", flush=True)
        raise
    finally:
        kernel.shutdown_kernel()
        nbformat.write(notebook, RUNS / f"{name}.ipynb")
    return problems(read(HERE / f"{name}.ipynb"), read(RUNS / f"{name}.ipynb"))


async def run_all(kernels: dict[str, ForkedKernel]) -> bool:
    """Run notebooks, some at a time, and say of each whether it gave its committed outputs."""
    free = asyncio.Semaphore(AT_A_TIME)

    async def report(name: str, kernel: ForkedKernel) -> bool:
        async with free:
            found = await run(name, kernel)
        print(said(name, found), flush=True)
        return not found

    return all(await asyncio.gather(*(report(*item) for item in kernels.items())))


def folder_of(name: str, parent: Path) -> Path:
    """A folder to run a notebook in, empty except for links to what it uses where it can."""
    folder = parent / name
    folder.mkdir()
    for part in NEXT_TO.get(name, ()):
        (folder / part).parent.mkdir(exist_ok=True)
        (folder / part).symlink_to(HERE / part)
    return folder


def runnable(name: str) -> bool:
    """Whether what a notebook needs is installed; says so where it is not."""
    needed = NEEDS.get(name)
    if needed is None or importlib.util.find_spec(needed):
        return True
    print(f"{name} was SKIPPED: {needed} is not installed")
    return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", help="their names, without .ipynb. Default: all")
    names = parser.parse_args().notebooks or sorted(path.stem for path in HERE.glob("*.ipynb"))
    RUNS.mkdir(parents=True, exist_ok=True)
    for module in IMPORTED:
        importlib.import_module(module)
    with tempfile.TemporaryDirectory() as parent:
        kernels = {
            name: ForkedKernel(Path(parent) / f"{name}.json", folder_of(name, Path(parent)))
            for name in names
            if runnable(name)
        }
        try:
            as_committed = asyncio.run(run_all(kernels))
        finally:
            for kernel in kernels.values():
                kernel.shutdown_kernel()
    sys.exit(not as_committed)


if __name__ == "__main__":
    main()
