"""Files that are in their folder as a whole or not at all, whenever the process is killed.

A file is written under a temporary name ``NAME.OWNER.PROCESS.tmp`` in the same folder, flushed to
the disk, and renamed. The owner is a number, and process k of n owns those that are k modulo n:
what a killed run left is removed by the process that would have written it, and no other one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_END = ".tmp"


@contextmanager
def replacing(path: Path, owner: int = 0, is_first: bool = False) -> Iterator[Path]:
    """A temporary file to be written inside, which afterwards takes the place of ``path``.

    Args:
        path (Path): the file.
        owner (int, optional): whose it is. Default: 0
        is_first (bool, optional): whether a file that another process has put there meanwhile stays
            as it is. Default: False

    Raises:
        OSError: where it cannot be written, such as on a full disk; says what to do.
    """
    target = Path(os.path.realpath(path))  # a link stays one
    temporary = target.with_name(f"{target.name}.{owner}.{os.getpid()}{_END}")
    try:
        yield temporary
        _flush(temporary)
        (_put_first if is_first else os.replace)(temporary, target)
        _flush(target.parent)
    except OSError as error:
        raise OSError(
            error.errno,
            f"{path} could not be written ({error.strerror or error}). All files that were "
            "finished are as they were: make room, or end other runs that write into this folder, "
            "and start again",
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _put_first(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError:  # by a file system without links
        os.replace(temporary, path)


def remove_temporary(folder: Path, process: int, count: int) -> None:
    """Remove what a killed run left of the files that one of ``count`` processes owns."""
    for path in folder.glob(f"*{_END}"):
        owner = path.name.split(".")[-3:-2]
        if owner and owner[0].isdecimal() and int(owner[0]) % count == process:
            path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    # A folder's own flush makes a new name in it last; not all systems have it.
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:
        if path.is_dir():
            return
        raise
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
