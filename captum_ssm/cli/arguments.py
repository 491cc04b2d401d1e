"""What the arguments alone tell: checked before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path

from captum_ssm.cli.parser import listed
from captum_ssm.explanation import Explanation


def check_output(path: Path | None, endings: tuple[str, ...]) -> None:
    """Raise unless a file of one of these kinds can be written there.

    Raises:
        ValueError: for another ending, or a folder that does not exist.
    """
    if path is None:
        return
    if path.suffix not in endings:
        raise ValueError(
            f"--output is {path}; expected a name that ends in {listed(endings, 'or')}."
        )
    if not path.parent.is_dir():
        raise ValueError(
            f"--output is {path}, and there is no folder {path.parent}; create it, or name another."
        )


def check_file(path: Path | None) -> None:
    """Raise unless the file is there.

    Raises:
        ValueError: where it is not.
    """
    if path is not None and not path.is_file():
        raise ValueError(f"No such file: {path}")


def check_model(name: str) -> None:
    """Raise for the name of a folder that holds no model.

    Raises:
        ValueError: says what is there.
    """
    # A hub name has at most one slash, and does not begin with a folder that is here.
    path = Path(name)
    below = len(path.parts) == 2 and path.parent.is_dir()
    if path.is_dir():
        if any((path / file).exists() for file in ("config.json", "model.safetensors")):
            return
        what = "a folder without config.json"
    elif path.exists():
        what = "a file"
    elif name.startswith((".", "~", os.sep)) or len(path.parts) > 2 or below:
        what = "a folder that does not exist"
    else:
        return
    raise ValueError(
        f"MODEL is {name!r}, {what}; expected a folder that save_pretrained wrote, or a hub name "
        "such as state-spaces/mamba-130m-hf."
    )


def numbers(text: str | None, name: str) -> list[int] | None:
    """Token ids such as ``"3,1,4"``.

    Raises:
        ValueError: for anything else, and where there is none.
    """
    if text is None:
        return None
    try:
        found = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise ValueError(f"{name} is {text!r}; expected token ids such as '3,1,4'.") from None
    if not found:
        raise ValueError(f"{name} is {text!r}, which holds no token; give at least one.")
    return found


def write(explanation: Explanation, path: Path, units: str = "token") -> None:
    """A page, the data or a table, by the ending."""
    if path.suffix == ".json":
        explanation.save(path)
    elif path.suffix == ".csv":
        explanation.to_pandas(units).to_csv(path, index=False)
    else:
        explanation.to_html(path)
    print(f"\nwrote {path}")
