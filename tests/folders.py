"""Where things are, whichever folder a test stands in."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
# Folders of docs that a build writes, which may be under way: docs/conf.py.
GENERATED = ("tutorials", "models")


def pages_of_docs() -> list[Path]:
    """The committed pages of the documentation."""
    found = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs").glob("[!_]*/*.md")]
    return sorted(path for path in found if path.parent.name not in GENERATED)
